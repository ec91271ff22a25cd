"""The loop, and nothing else: it yields a record per optimizer step.

Record n is read after step n+1 was given to the device, so the host does not wait for the device in the loop. It waits
where somebody needs to know: before a checkpoint, before a hook, at the end.
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import Hook, StepContext
from drivetrain.core.records import Reading, StepRecord
from drivetrain.core.world import World
from drivetrain.data.division import Place
from drivetrain.data.loader import Loader
from drivetrain.job import Job
from drivetrain.step import Stepper


class _Enqueued(NamedTuple):
    """A step that the device was given; its outcome may not be there yet."""

    place: Place
    reading: Reading
    lr: float
    began: float


class Trainer:
    """Runs a job's steps from `first_step` on. `save` is called when a checkpoint is due, with the steps done."""

    def __init__(
        self,
        job: Job,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        stepper: Stepper,
        loader: Loader,
        folder: Path,
        save: Callable[[int], None],
        first_step: int = 0,
    ) -> None:
        self._job, self._world, self._model, self._optimizer = job, world, model, optimizer
        self._stepper, self._loader, self._folder, self._save = stepper, loader, folder, save
        self._first_step = first_step
        self._stop = False
        self.stopped_early = False
        # Optimizers make their state in their first step: what cannot be saved is refused then, not at the first save.
        self.check_after_first_step: Callable[[], Any] = lambda: None

    def stop(self) -> None:
        """End after the next step or two, on all ranks at the same step, with a checkpoint."""
        self._stop = True

    def run(self) -> Iterator[StepRecord]:
        # Looked up once: the loop's own share of a step is a few microseconds, and is kept there.
        num_steps, save_every = self._job.num_steps, self._job.save_every
        hooks = [(hook, self._steps_between(hook)) for hook in self._job.hooks]
        ahead: _Enqueued | None = None
        for place, micro_batches in self._loader.batches(self._first_step, num_steps):
            began = time.perf_counter()
            lr = self._set_lr(place.step, num_steps)
            outcome = self._stepper.run(place, micro_batches, self._stop)
            enqueued = _Enqueued(place, Reading(outcome, self._world.device), lr, began)
            done = place.step + 1
            if done == self._first_step + 1:
                self.check_after_first_step()
            if ahead is not None:
                yield self._record(ahead, began)
            ahead = enqueued
            save_due = done % save_every == 0 or done == num_steps or self.stopped_early
            hooks_due = [hook for hook, every in hooks if done % every == 0]
            if save_due or hooks_due:
                # The host waits for the device here: nothing is saved, and no hook runs, before the step was judged.
                yield self._record(ahead, time.perf_counter())
                ahead = None
                self._call(hooks_due, done)
            if save_due or self.stopped_early:
                self._save(done)
            if self.stopped_early:
                return

    def _set_lr(self, step: int, num_steps: int) -> float:
        factor = self._job.lr_factor(step, num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr = group["initial_lr"] * factor
        return float(lr)

    def _record(self, enqueued: _Enqueued, now: float) -> StepRecord:
        """Reads the outcome. The host waits until that step is done on the device."""
        place = enqueued.place
        total, count, stop, norm = enqueued.reading.values()
        self.stopped_early |= stop > 0
        loss = total / count
        if not math.isfinite(loss):
            raise DrivetrainError(
                f"the loss of step {place.step + 1} (epoch {place.epoch}) is {loss}; the run stops before it is saved, "
                "so the last checkpoint is good",
                remedy="a lower learning rate, or clip_norm; then run again under the same name to go on from there",
            )
        return StepRecord(
            step=place.step + 1,
            epoch=place.epoch,
            samples=place.num_samples,
            loss=loss,
            num_items=count,
            lr=enqueued.lr,
            grad_norm=norm,
            seconds=now - enqueued.began,
        )

    def _steps_between(self, hook: Hook) -> int:
        return self._job.steps_per_epoch if hook.every == "epoch" else hook.every

    def _call(self, hooks: list[Hook], done: int) -> None:
        context = StepContext(done, done // self._job.steps_per_epoch, self._model, self._world, self._folder)
        for hook in hooks:
            hook(context)
