"""Models that nothing was tuned for: ours with no flags, against the same loop by hand, eager and compiled.

A model is a file here with `WORDS`, which say what it is, and `workload(smoke)`. Adding one is adding its file: its
contest is `python -m benchmarks zoo-NAME`, and `zoo` runs all of them. The goal of each is to be no slower than the
faster of the two loops by hand. A file may say more: `CHANNELS_LAST` for the loops by hand, which packages it `NEEDS`,
how long the loops by hand may take (`EAGER_SECONDS`, `COMPILED_SECONDS`), and `ours(smoke)` where a user would not
write `dt.Job` for it.
"""

import importlib
import pkgutil
from dataclasses import replace
from functools import partial

from benchmarks.contest import Aim, Competitor, Contest
from benchmarks.rivals import Workload, by_hand, with_no_flags

NAMES = tuple(f"zoo-{module.name.replace('_', '-')}" for module in pkgutil.iter_modules(__path__))


def contest(name: str, smoke: bool = False) -> Contest:
    model = importlib.import_module(f"{__name__}.{name.removeprefix('zoo-').replace('-', '_')}")
    work: Workload = model.workload(smoke)
    if smoke:
        work = replace(work, compiler="eager")  # quick to compile
    size, channels_last = work.global_batch, getattr(model, "CHANNELS_LAST", False)
    fed = "batches from 4 loader workers, pinned" if work.collate else "data on the device"
    laid_out = ", channels-last" if channels_last else ""

    def hand(name: str, words: str, cap_seconds: float, *, compiled: bool) -> Competitor:
        measure = partial(by_hand, work, micro_batch=size, precision="bf16", compiled=compiled, cudnn_benchmark=True,
                          channels_last=channels_last)  # fmt: skip
        return Competitor(
            name,
            f"by hand: {fed}, fused AdamW, bf16{laid_out}, {words}",
            lambda _: measure(),
            cap_seconds=cap_seconds,
            needs=getattr(model, "NEEDS", ()),
        )

    return Contest(
        name=name,
        module=__name__,
        workload={"model": model.WORDS, "global_batch": size, "job": f"{work.job_steps} steps", "data": "random"},
        unit="samples/s",
        units_per_step=size,
        competitors=(
            model.ours(smoke) if hasattr(model, "ours") else with_no_flags(work, cap_seconds=300),
            hand("eager", "eager", getattr(model, "EAGER_SECONDS", 60), compiled=False),
            hand(
                "compiled",
                "the loss compiled with the model inside",
                getattr(model, "COMPILED_SECONDS", 150),
                compiled=True,
            ),
        ),
        order=("ours", "eager", "compiled", "eager", "ours"),
        aims=(
            Aim("the faster loop by hand", ("eager", "compiled"), 1.0),
            Aim("the eager loop by hand", ("eager",), 1.0),
        ),
    )
