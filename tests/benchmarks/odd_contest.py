"""A contest of competitors that misbehave. It needs no torch, so its children start at once."""

import os
import time

from benchmarks.contest import Aim, Circumstances, Competitor, Contest, Limit, Measured


def crash(told: Circumstances) -> Measured:
    os._exit(3)


def hang(told: Circumstances) -> Measured:
    time.sleep(600)
    raise AssertionError


def fail(told: Circumstances) -> Measured:
    raise ValueError("no such luck")


def good(seconds: float, told: Circumstances) -> Measured:
    return Measured([seconds, 1.5 * seconds], {"pid": os.getpid(), "known": dict(told.known)})


def contest(name: str, smoke: bool = False) -> Contest:
    return Contest(
        name=name,
        module=__name__,
        workload={"model": "none"},
        unit="steps/s",
        units_per_step=1,
        competitors=(
            Competitor("ours", "fast", lambda told: good(0.1, told), alone=True),
            Competitor("hand-1", "slow", lambda told: good(0.5, told)),
            Competitor("hand-2", "less slow", lambda told: good(0.25, told)),
            Competitor("crash", "ends its process", crash),
            Competitor("hang", "takes for ever", hang, cap_seconds=1.0),
            Competitor("fail", "raises", fail),
            Competitor("missing", "needs what is not there", fail, needs=("no_such_package_at_all",)),
            Competitor("hopeless", "is not even tried", crash, why_not="this machine is too old"),
        ),
        order=("ours", "hand-1", "crash", "hang", "fail", "missing", "hopeless", "hand-2", "best:hand", "ours"),
        aims=(Aim("by hand", ("hand-1", "hand-2"), 2.0), Aim("nobody", ("nobody",), 1.0)),
        limits=(Limit("process", "pid", 0), Limit("not there", "no such fact", 1)),
    )
