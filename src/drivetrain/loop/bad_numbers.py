"""Judges the numbers of steps: what is not finite is skipped, three in a row roll the run back, spikes are reported.

A step whose loss or gradients are not finite leaves the weights as they were, on all ranks together, where the strategy
can do that; it takes its batch and its place in the schedule. Where it cannot (an optimizer on a GPU that is not
fused), the run goes back to its last checkpoint and leaves that step out. After three in a row the weights are
to blame, not a batch: the run goes back to its last checkpoint and skips all batches since then.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.core.errors import BadResumeError, DrivetrainError
from drivetrain.core.metrics import PartLoss, StepRecord
from drivetrain.core.world import World
from drivetrain.data.division import Place
from drivetrain.data.loader import Loader
from drivetrain.loop.read_back import ReadStep
from drivetrain.loop.stepper import Stepper

MOST_IN_A_ROW = 3
FIRST_STEPS = 3  # after a resume, in which bad numbers are the checkpoint's
MOST_SAMPLES_TOLD = 64
_REMEDY = "a lower learning rate, or clip_norm; then run again under the same name to go on from there"


@dataclass(frozen=True)
class Skips:
    """The steps of a run that are left out: single bad ones, and ranges that a run went back before."""

    single: frozenset[int] = frozenset()
    past: Sequence[tuple[int, int]] = field(default_factory=tuple)  # from the first to the last, both left out

    def __contains__(self, step: int) -> bool:
        return step in self.single or any(first <= step <= last for first, last in self.past)

    def next_after(self, step: int) -> int | None:
        """Return the next step after this one that is left out; None if there is none."""
        found = [each for each in self.single if each > step]
        found += [max(first, step + 1) for first, last in self.past if last > step]
        return min(found, default=None)


NO_SKIPS = Skips()


class RollBackError(DrivetrainError):
    """The run has to go back to its last checkpoint and leave steps out."""

    def __init__(self, message: str, *, remedy: str, last: int, single: bool) -> None:
        """Say what went wrong.

        Args:
            message: What it was.
            remedy: What a user can do about it, if the run cannot.
            last: The last step to leave out.
            single: Whether it is the only one; otherwise all after the checkpoint are.
        """
        super().__init__(message, remedy=remedy)
        self.last, self.single = last, single


class BadNumbers:
    """Judges every step of a run by its loss and the norm of its gradients, alike on all ranks."""

    def __init__(
        self,
        world: World,
        stepper: Stepper,
        loader: Loader,
        tell: Callable[..., None],
        say: Callable[[str], None],
        *,
        skips: Skips = NO_SKIPS,
        first_step: int = 0,
        scales_loss: bool = False,
    ) -> None:
        """Prepare to judge.

        Args:
            world: The ranks.
            stepper: Knows the losses of this rank.
            loader: Knows the samples of a step.
            tell: Writes an event.
            say: Prints a line.
            skips: The steps that are left out.
            first_step: How many steps were done before.
            scales_loss: Whether a scaler skips steps by itself, which is no reason to worry.
        """
        self._world, self._stepper, self._loader, self._tell, self._say = world, stepper, loader, tell, say
        self.skips, self._first_step, self._scales_loss = skips, first_step, scales_loss
        self.in_a_row = 0  # bad steps up to the last one that was judged

    def judge(
        self, step: int, read: ReadStep, loss: float, parts: Mapping[str, PartLoss] | None, *, has_moved: bool
    ) -> bool:
        """Judge a step and return whether anything was learned; raise if the run cannot simply go on.

        All ranks call it together, for the steps that are left out, too.

        Args:
            step: Its number, from 1.
            read: Its values, read back from the device.
            loss: Its loss.
            parts: The parts of its loss, if it has some.
            has_moved: Whether any step of the run moved the weights.
        """
        if self.skips is not NO_SKIPS and step in self.skips:
            self.in_a_row = self.in_a_row + 1 if step in self.skips.single else 0
            return False
        norm = read.values.grad_norm
        if not self._is_bad(loss, norm):
            self.in_a_row = 0
            return True
        place = read.enqueued.place if read.enqueued.num_steps == 1 else self._loader.division.place(step - 1)
        self._report(step, place, loss, norm, parts, skipped=read.values.skipped >= 1, has_moved=has_moved)
        return False

    def _is_bad(self, loss: float, norm: float | None) -> bool:
        """Return whether a step is bad. A scaler's steps are only by their loss: it overflows to find its scale."""
        if not math.isfinite(loss):
            return True
        return norm is not None and not math.isfinite(norm) and not self._scales_loss

    def _report(
        self,
        step: int,
        place: Place,
        loss: float,
        norm: float | None,
        parts: Mapping[str, PartLoss] | None,
        *,
        skipped: bool,
        has_moved: bool,
    ) -> None:
        """Report a bad step; raise if there were too many in a row, or if it was not skipped."""
        self.in_a_row += 1
        ranks = [rank for rank, bad in enumerate(self._world.gather(self._stepper.own_loss_is_bad(place.step))) if bad]
        what = _what_is_bad(step, place.epoch, loss, norm, parts)
        whose = f" on rank {', '.join(map(str, ranks))}" if ranks and self._world.size > 1 else ""
        facts = {
            "loss": str(loss),
            "grad_norm": str(norm),
            "ranks": ranks,
            "samples": self._samples(place, ranks),
            "in_a_row": self.in_a_row,
        }
        self._tell("bad step", step=step, words=f"{what}{whose}", skipped=skipped, **facts)
        if self.in_a_row >= MOST_IN_A_ROW:
            raise self._too_many(step, f"{what}{whose}", has_moved=has_moved)
        if not skipped:
            raise RollBackError(f"{what}{whose}", remedy=_REMEDY, last=step, single=True)
        self._say(f"{what}{whose}: skipped on all ranks, the weights are as before; events.jsonl names its samples")

    def _samples(self, place: Place, ranks: Sequence[int]) -> list[int]:
        """Return the samples of the ranks to blame, or of the whole step; none where they have no numbers."""
        if not self._loader.source.is_keyed:
            return []
        numbers = self._loader.samples_of(place)
        found: list[int] = []
        for rank in ranks or range(self._world.size):
            first, last = self._loader.division.rank_slice(place, rank)
            found += numbers[first - place.start : last - place.start]
        return found[:MOST_SAMPLES_TOLD]

    def _too_many(self, step: int, what: str, *, has_moved: bool) -> DrivetrainError:
        words = f"{what}, as the two before it"
        if not has_moved:
            return _nothing_learned(words, "first batches")
        if self._first_step and step <= self._first_step + FIRST_STEPS:
            return _bad_resume(words, self._first_step)
        return RollBackError(words, remedy=_REMEDY, last=step, single=False)


def not_finite(
    step: int, epoch: int, loss: float, parts: Mapping[str, PartLoss] | None, first_step: int
) -> DrivetrainError:
    """Return the error for a loss that is not finite, for a run that stops there.

    Args:
        step: Its step, from 1.
        epoch: Its epoch, from 0.
        loss: The loss.
        parts: Its parts, if it has some.
        first_step: How many steps were done before the run went on.
    """
    where = _what_is_bad(step, epoch, loss, None, parts)
    if step == 1:
        return _nothing_learned(where, "first batch")
    if first_step and step <= first_step + FIRST_STEPS:
        return _bad_resume(where, first_step)
    return DrivetrainError(f"{where}; the run stops before it is saved, so the last checkpoint is good", remedy=_REMEDY)


def _nothing_learned(what: str, batches: str) -> DrivetrainError:
    return DrivetrainError(
        f"{what}: before anything was learned, so the data or the first weights are to blame",
        remedy=f"look for nan or infinite values in the {batches}, and for a log, a division by zero or a mean over no "
        "labels in the loss; --precision fp32 rules out an overflow",
    )


def _bad_resume(what: str, first_step: int) -> BadResumeError:
    return BadResumeError(
        f"{what}, right after the run went on from step {first_step}",
        remedy="a lower learning rate, or clip_norm, or repaired data of that step; then run again under the same name",
        resumed_from=first_step,
    )


def refuse_unmoved(steps: int, *, has_moved: bool) -> None:
    """Raise for a job that ended without a single step that moved the weights: nothing was trained."""
    if steps and not has_moved:
        raise DrivetrainError(
            f"all {steps} steps were skipped, since their gradients were not finite: nothing was trained, and the "
            "weights are those that the run began with",
            remedy="use --precision bf16 or fp32 (fp16 overflows); look for infinite values in the data, and for "
            "sqrt, log or a division by zero in the loss; then train under another --name",
        )


def _what_is_bad(step: int, epoch: int, loss: float, norm: float | None, parts: Mapping[str, PartLoss] | None) -> str:
    if math.isfinite(loss):
        return f"the gradient norm of step {step} (epoch {epoch + 1}) is {norm}"
    bad = [name for name, part in (parts or {}).items() if part.num_items and not math.isfinite(part.loss)]
    return f"the loss of step {step} (epoch {epoch + 1}) is {loss}" + (f" (its part {', '.join(bad)})" if bad else "")


class SpikeWatch:
    """Notices a loss far above those before it: by its distance from their moving mean, in mean deviations.

    The loss of a step with fewer items is noisier, as in the smaller last step of an epoch. Its distance is scaled by
    the square root of its share of the most items that a step had.
    """

    AFTER, DEVIATIONS, AT_LEAST, QUIET = 50, 10.0, 1.25, 100
    DECAY = 0.98

    def __init__(self, act: str, tell: Callable[..., None], say: Callable[[str], None]) -> None:
        """Begin with nothing known.

        Args:
            act: What follows: `alert`, `rollback` or `off`.
            tell: Writes an event.
            say: Prints a line.
        """
        self._act, self._tell, self._say = act, tell, say
        self._seen, self._mean, self._deviation, self._told_at = 0, 0.0, 0.0, -self.QUIET
        self._most_items = 1.0  # of a step

    def observe(self, record: StepRecord) -> None:
        """Look at a step. Raises `RollBackError` where that is asked for; alike on all ranks, as the loss is."""
        loss = record.loss
        if self._act == "off" or not math.isfinite(loss):
            return
        self._most_items = max(self._most_items, record.num_items)
        off = (loss - self._mean) * math.sqrt(max(record.num_items, 0.0) / self._most_items)
        if self._seen >= self.AFTER and off > self.DEVIATIONS * self._deviation and off > self._far():
            self._spiked(record)
            return  # it does not count among those before
        self._seen += 1
        share = max(1.0 - self.DECAY, 1.0 / self._seen)
        self._mean += share * off
        self._deviation += share * (abs(off) - self._deviation)

    def _far(self) -> float:
        return (self.AT_LEAST - 1.0) * abs(self._mean)

    def _spiked(self, record: StepRecord) -> None:
        words = f"the loss of step {record.step} is {record.loss:.4g}, and was {self._mean:.4g} before"
        if self._act == "rollback":
            self._tell("loss spike", step=record.step, words=words, loss=record.loss, mean=self._mean)
            raise RollBackError(f"a spike: {words}", remedy=_REMEDY, last=record.step, single=False)
        if record.step - self._told_at >= self.QUIET:
            self._told_at = record.step
            self._tell("loss spike", step=record.step, words=words, loss=record.loss, mean=self._mean)
            self._say(f"{words}: a spike. --spikes rollback would go back to the last checkpoint and skip past it")


def facts_of(skips: Skips) -> dict[str, Any]:
    """Return the steps that are left out as JSON."""
    return {"single": sorted(skips.single), "past": [list(each) for each in skips.past]}
