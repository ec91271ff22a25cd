"""Injects faults into a run, by name: `--inject kill@120:rank1,nan@200`. For tests of what a run survives.

Every fault is the real thing as far as one process can do it: a signal, a held GIL, a collective that the others never
enter. Each happens once per run folder: a note is written there first, so that a restart does not fail again.
"""

import ctypes
import errno
import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ENVIRONMENT = "DRIVETRAIN_INJECT"  # how `drivetrain launch` hands the faults to a script
NOTES = "injected"  # the folder of the notes, in the run's folder
SLOW_SECONDS, SPIKE_FACTOR = 3.0, 8.0
KINDS = {
    "kill": "SIGKILL to the process",
    "segfault": "a crash in native code",
    "exception": "an exception in the loop",
    "exit": "the process leaves with code 3, without a word",
    "stop": "SIGSTOP to the process",
    "gil": "native code that never gives the GIL back",
    "loader": "data that never comes",
    "collective": "waiting in a collective that other ranks do not enter",
    "save": "SIGSTOP while a checkpoint is being written",
    "oom": "out of memory in the forward",
    "nan": "gradients that are not finite",
    "spike": f"weights that are {SPIKE_FACTOR:g} times too large",
    "flip": "one bit of one weight flipped",
    "slow": f"a step that takes {SLOW_SECONDS:g} s longer",
    "disk-full": "no space left for the next checkpoint",
}
ALLOWED = f"KIND@STEP or KIND@STEP:rankN, several separated by commas; kinds: {', '.join(KINDS)}"
_FORM = re.compile(r"([a-z-]+)@([1-9]\d*)(?::rank(\d+))?")


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, the step it happens in, from 1, and its rank; None is every rank."""

    kind: str
    step: int
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}" + ("" if self.rank is None else f":rank{self.rank}")


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Return the faults that a text names; raises ValueError, which says what is allowed.

    Args:
        text: Such as `kill@120:rank1,nan@200`.
    """
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = _FORM.fullmatch(word)
        if match is None or match[1] not in KINDS:
            what = "has the wrong form" if match is None else "is of no known kind"
            raise ValueError(f"{word!r} {what}")
        found.append(Fault(match[1], int(match[2]), None if match[3] is None else int(match[3])))
    return tuple(found)


class Faults:
    """The faults of one rank of a run. Where there are none, the run does not ask."""

    def __init__(self, faults: Sequence[Fault], rank: int, folder: Path) -> None:
        """Keep those of this rank.

        Args:
            faults: All that are injected.
            rank: This rank.
            folder: The run's folder, where it is noted which have happened.
        """
        self._rank, self._notes, self.step = rank, folder / NOTES, 0
        self._left = [fault for fault in faults if fault.rank in (None, rank)]

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self, *kinds: str, step: int | None = None) -> Fault | None:
        """Return a fault of these kinds that is due now, once in the life of the run folder; None if none is."""
        now = self.step if step is None else step
        for fault in [fault for fault in self._left if fault.kind in kinds and fault.step <= now]:
            self._left.remove(fault)
            if fault.step == now or fault.kind in ("save", "disk-full"):  # a checkpoint is not due in every step
                self._notes.mkdir(parents=True, exist_ok=True)
                try:
                    (self._notes / f"{fault}-on-rank{self._rank}".replace(":", "-")).touch(exist_ok=False)
                except FileExistsError:
                    continue
                return fault
        return None

    def at_step(self, step: int, model: Any, barrier: Callable[[], None]) -> None:
        """Do what is due before a step, from 1.

        Args:
            step: Its number.
            model: The model, of which `spike` and `flip` change weights.
            barrier: A collective of all ranks, which only `collective` enters.
        """
        self.step = step
        fault = self.take("kill", "segfault", "exception", "exit", "stop", "gil", "collective", "spike", "flip", "slow")
        match None if fault is None else fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segfault":
                faulthandler._sigsegv()  # type: ignore[attr-defined]
            case "exception":
                raise RuntimeError(f"injected by --inject {fault}")
            case "exit":
                os._exit(3)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "gil":
                _hold_gil()
            case "collective":
                barrier()
            case "spike":
                _change_weights(model, lambda weight: weight.mul_(SPIKE_FACTOR))
            case "flip":
                _change_weights(model, _flip)
            case "slow":
                time.sleep(SLOW_SECONDS)

    def at_data(self, step: int) -> None:
        """Never return, if the data of this step is not to come."""
        if self.take("loader", step=step) is not None:
            _wait_for_data()

    def at_save(self, step: int) -> None:
        """Do what is due while the checkpoint of a step is being written."""
        if self.take("save", step=step) is not None:
            os.kill(os.getpid(), signal.SIGSTOP)

    def at_write(self) -> None:
        """Raise if the disk is to be full."""
        if self.take("disk-full") is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def around(self, objective: Callable[..., Any]) -> Callable[..., Any]:
        """Return the objective with faults of the forward and backward.

        Args:
            objective: What a step differentiates: a scalar tensor of a micro-batch.
        """

        def called(*arguments: Any) -> Any:
            fault = self.take("oom", "nan")
            if fault is not None and fault.kind == "oom":
                import torch

                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB (--inject {fault})")
            value = objective(*arguments)
            return value if fault is None else value * float("nan")

        return called

    @property
    def changes_steps(self) -> bool:
        """Whether a fault happens inside a step, which then cannot be captured."""
        return any(fault.kind in ("oom", "nan") for fault in self._left)


def _hold_gil() -> NoReturn:
    sleep = ctypes.PyDLL(None).sleep  # unlike CDLL, it keeps the GIL
    while True:
        sleep(86_400)


def _wait_for_data() -> NoReturn:
    while True:
        time.sleep(3600)


def _change_weights(model: Any, change: Callable[[Any], object]) -> None:
    import torch

    with torch.no_grad():
        for parameter in [each for each in model.parameters() if each.requires_grad]:
            if change(parameter) is None:
                return  # one is enough


def _flip(weight: Any) -> None:
    """Flip the lowest bit but eight of the first number's fraction: too little for the loss to show it."""
    import torch

    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[weight.element_size()]
    weight.view(-1)[:1].view(whole).bitwise_xor_(1 << (8 if weight.element_size() > 2 else 1))
