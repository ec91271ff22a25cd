"""The training loop, and nothing else: it yields a record per optimizer step.

Record n is read after step n+1 was enqueued, so the host does not wait for the device in the loop. It waits only where
a result is needed: before a hook, at the end. A checkpoint's state is copied at the end of its step, and the checkpoint
counts once the record of that step was read.

Steps that need no hook or checkpoint and whose sample numbers are on the device already are enqueued one after the
other, as a stretch: the host's per-step work would take as long as the device needs to run the step.
"""

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.core.hook import Hook, Rehearsal
from drivetrain.core.launchers import supervision
from drivetrain.core.metrics import StepOutcome, StepRecord
from drivetrain.core.optimizers import step_hooks_of
from drivetrain.core.state import CountingWatch, KeptWatch
from drivetrain.core.world import World
from drivetrain.data.division import Place, Stretch
from drivetrain.data.loader import Loader, MicroBatch
from drivetrain.job import Job
from drivetrain.loop.bad_numbers import NO_SKIPS, BadNumbers, RollBackError, not_finite
from drivetrain.loop.hook_calls import HookCalls, RunLog
from drivetrain.loop.read_back import InFlight, ReadStep
from drivetrain.loop.schedule import Rates, SaveSchedule, wrong_length
from drivetrain.loop.stepper import Stepper
from drivetrain.loop.validation import Validation
from drivetrain.monitor.phases import CHECKPOINT, LOGGING
from drivetrain.strategies.optimizer_state import Average
from drivetrain.strategies.replicated import Freezer

Steps = Iterator[tuple[Place, Iterable[MicroBatch]]]


class NormSchedule(Protocol):
    """Decides in which steps the gradient norm is computed: each of those whose number is a multiple of `every`."""

    every: int

    def begin(self, step: int) -> bool:
        """Prepare the step that follows `step` steps. Return whether nothing is left to decide or to do."""


class Begun(NamedTuple):
    """A step whose learning rate is set, with the work that is due after it."""

    place: Place
    lr: float
    began: float
    is_last: bool  # of the job
    hooks: list[Hook]  # that are due after it


# How long to wait, after an error, for the record of a step whose state was copied: the device may hang.
LAST_WAIT_SECONDS = 10.0
COUNTED_STEPS = 3  # whose changes to numbers of the model are looked at


class Saver(Protocol):
    """Saves checkpoints for the loop."""

    @property
    def schedule(self) -> SaveSchedule:
        """The schedule that says when to save."""

    def save(self, step: int) -> None:
        """Save the state of a step that was judged."""

    def hold(self, step: int) -> None:
        """Copy the state of a step that was judged, to be written with the next checkpoint."""

    def prepare(self) -> None:
        """Refuse a state that cannot be saved: called after the first step, in which optimizers create their state."""

    @property
    def snapshot(self) -> Callable[[int], Callable[[bool], None]] | None:
        """The function that copies the state for a checkpoint before its step was judged; None if saves wait for it.

        It returns a function to call once the step was judged, with whether it was good; not if an error ends the run.
        """


class Retry(Protocol):
    """Repeats a step that was out of memory with smaller micro-batches."""

    @property
    def next_change(self) -> int | None:
        """The step before which the micro-batch changes, by the number of steps done; None if it stays."""

    def may_repeat(self, error: Exception, place: Place) -> bool:
        """Return whether a step that failed can be repeated from the state that it began with."""

    def shrink(self, step: int) -> None:
        """Divide the steps that follow `step` steps into smaller micro-batches."""


class UnsavedWatch:
    """Tells of what changes with the first steps and is in no checkpoint: numbers of the model, what hooks keep."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, say: Callable[[str], None]) -> None:
        self._counting, self._kept, self._say = CountingWatch(model), KeptWatch(model), say
        self._hooks = step_hooks_of(optimizer)

    def look(self, num_done: int) -> None:
        """Look after each of the first steps; the last of them tells."""
        names, is_last = self._counting.look(), num_done == COUNTED_STEPS
        if names and is_last:
            self._say(
                f"  model      {', '.join(names[:3])} changes with every step, and is not in model.state_dict(): if it "
                "affects the outputs, a resumed run differs. Keep it with register_buffer"
            )
        for hook in self._hooks:
            kept = self._kept.look(hook)
            if kept and is_last:
                self._say(
                    f"  optimizer  its hook {getattr(hook, '__qualname__', hook)} keeps {', '.join(kept[:3])}, which "
                    "no checkpoint holds: a resumed run begins anew with it. Attributes of the optimizer are saved"
                )


class Trainer:
    """Runs the steps of a job that are left."""

    def __init__(
        self,
        job: Job,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        stepper: Stepper,
        loader: Loader,
        folder: Path,
        saver: Saver,
        recorder: RunLog,
        *,
        rates: Rates,
        first_step: int = 0,
        has_moved: bool = False,
        validation: Validation | None = None,
        average: Average | None = None,
        rehearsal: Rehearsal | None = None,
        before_step: Callable[[int], None] | None = None,
        check_model: Callable[[], None] = lambda: None,
        set_loss_weights: Callable[[int], None] | None = None,
        norms: NormSchedule | None = None,
        freezer: Freezer | None = None,
        retry: Retry | None = None,
        bad: BadNumbers | None = None,
    ) -> None:
        """Prepare the loop.

        Args:
            job: What is trained.
            world: The ranks that train it.
            model: The model, as hooks get it.
            optimizer: Its optimizer.
            stepper: Runs a step.
            loader: Yields the micro-batches of this rank.
            folder: The run's folder, for hooks.
            saver: Saves a checkpoint when one is due.
            recorder: Takes the events and lines of hooks.
            rates: Sets the learning rates of the optimizer before each step.
            first_step: How many steps were done before.
            has_moved: Whether some step before was not skipped.
            validation: Validates when that is due, and at the end.
            average: The moving average of the weights, for hooks that change the model.
            rehearsal: What hooks need to train on samples again.
            before_step: Called before each step with its number, from 1.
            check_model: Raises if a hook changed the model in a forbidden way.
            set_loss_weights: Sets the weights of the loss's parts for the step that begins, where they change.
            norms: Decides which steps compute their gradient norm, if nothing is clipped.
            freezer: Freezes weights for hooks.
            retry: Repeats steps that were out of memory; None: such a step ends the run.
            bad: Judges steps with numbers that are not finite; None: such a loss ends the run.
        """
        self._job, self._stepper, self._loader, self._rates = job, stepper, loader, rates
        self._saver, self._snapshot = saver, saver.snapshot
        given = model, optimizer, world, folder, recorder, stepper, validation, average, rehearsal
        self._hook_calls = HookCalls(*given, check_model, freezer, loader)
        self._unsaved = UnsavedWatch(model, optimizer, recorder.say)
        self._say, self._trusts_length = recorder.say, job.source.is_keyed
        self._first_step, self._validation, self._average = first_step, validation, average
        self._before_step, self._set_loss_weights = before_step, set_loss_weights
        self._norms, self._retry = norms, retry
        # Looked up once: the loop's overhead is a few microseconds per step, and has to stay so.
        self._num_steps, self._schedule = job.num_steps, saver.schedule
        self._hooks = [(hook, hook.every) for hook in (*([validation] if validation else []), *job.hooks)]
        everies = [saver.schedule.every, *(every for _, every in self._hooks), *([average.every] if average else [])]
        self._everies = [every for every in everies if isinstance(every, int)]
        self._in_flight = InFlight(world.device, stepper.clock)
        self._bad, self._device = bad, world.device
        self._skips = NO_SKIPS if bad is None else bad.skips
        self._last_loss = math.nan  # of the record read last; before hooks that is the step just done
        self._commit: Callable[[bool], None] | None = None  # of a snapshot that was taken after the step in flight
        self.wants_stop = False
        self.stopped_early = False  # a stop was requested; the run can go on later
        self.ended_by_hook = False  # a hook found that the job is done
        self.has_moved = has_moved  # some step, over the whole life of the run, was not skipped

    def stop(self) -> None:
        """Stop after the next step or two, on all ranks at the same step, with a checkpoint."""
        self.wants_stop = True

    @property
    def flags(self) -> float:
        """The wishes of this rank as one number, which travels with a step: see `SaveSchedule`."""
        return self.wants_stop + self._schedule.request()

    def run(self) -> Iterator[StepRecord]:
        try:
            steps: Steps | None = self.steps()
            while steps is not None:
                steps = yield from self._run_steps(steps)
        except RollBackError:  # to a checkpoint before this step: the next one is of no use
            self._in_flight.drop()
            self._commit = None
            raise
        except (Exception, KeyboardInterrupt):
            yield from self.last_words()
            raise

    def _run_steps(self, steps: Steps) -> Generator[StepRecord, None, Steps | None]:
        """Run steps. Return those that are left, where they are divided anew; None if the run is over."""
        for place, micro_batches in steps:
            if self._retry is not None and self._retry.next_change == place.step:
                return self._divided_anew(place)
            begun = self.begin(place)
            if self._skips is not NO_SKIPS and place.step + 1 in self._skips:
                outcome = self._left_out()
            else:
                is_repeated = False
                try:
                    outcome = self._stepper.run(place, micro_batches, self.flags)
                except Exception as error:
                    if self._retry is None or not self._retry.may_repeat(error, place):
                        error.add_note(_at(place, self._job))
                        raise
                    is_repeated = True
                if is_repeated:  # it was out of memory; the error is gone by now, with all the memory that it held
                    yield from self.outstanding()
                    return self._divided_anew(place)
            yield from self.settle(begun, outcome)
            if self.is_over:
                return None
            if self._stepper.may_go_on:
                yield from self._go_on()
        return None

    def _left_out(self) -> StepOutcome:
        """Leave out a step that was bad before: it takes its batch and its place in the schedule."""
        if self._average is not None:
            self._average.update()
        nothing = torch.full((), math.nan, dtype=torch.float32, device=self._device)
        return StepOutcome([(nothing, 1.0)], 0.0, 0.0, None, 1.0)

    def _divided_anew(self, place: Place) -> Steps:
        """Return the steps from this one on, with smaller micro-batches."""
        assert self._retry is not None
        self._loader.close()
        self._retry.shrink(place.step)
        return self._loader.batches(place.step, self._job.max_steps, self._job.epochs)

    def steps(self) -> Steps:
        """Return the job's remaining steps: the place of each, and this rank's micro-batches.

        Hooks are checked first: one that cannot work raises while no work can be lost.
        """
        for hook, _ in self._hooks:
            self._hook_calls.check(hook, self._first_step)
        self._stepper.clock.start()
        return self._loader.batches(self._first_step, self._job.max_steps, self._job.epochs)

    def begin(self, place: Place) -> Begun:
        if self._before_step is not None:
            self._before_step(place.step + 1)
        if self._norms is not None and self._norms.begin(place.step):
            self._norms = None
        if place.ends_epoch and not self._trusts_length and (words := wrong_length(self._job, place)):
            self._say(f"  data       {words}")
            self._trusts_length = True  # it is told once
        is_last, validation = self._is_last(place), self._validation
        hooks = [
            hook
            for hook, every in self._hooks
            if _is_due(every, place) or (is_last and hook is validation)  # the end is always validated
        ]
        if self._job.hooks:
            self._stepper.keep_batch(any(hook is not validation for hook in hooks))
        began = time.perf_counter()
        return Begun(place, self._set_lr(place.step, self._num_steps), began, is_last, hooks)

    def settle(self, begun: Begun, outcome: StepOutcome) -> Iterator[StepRecord]:
        """Do all that follows a step: yield due records, call hooks, save a checkpoint.

        Exhaust it before the next step.
        """
        place, in_flight, clock = begun.place, self._in_flight, self._stepper.clock
        in_flight.enqueue_step(place, begun.lr, begun.began, outcome)
        done, is_last, hooks_due = place.step + 1, begun.is_last, begun.hooks
        if done <= self._first_step + COUNTED_STEPS:
            self._unsaved.look(done - self._first_step)
        if done == self._first_step + 1:
            clock.look()
            self._saver.prepare()
            clock.lap(CHECKPOINT)
        if self._average is not None:
            self._average.after_step(done, ends_epoch=place.ends_epoch)
        save_due = is_last or self._schedule.is_due(place)
        commit, self._commit = self._commit, None
        is_awaited = save_due or hooks_due or commit is not None or self.wants_stop
        num_due = len(in_flight) - 1 if is_awaited else in_flight.num_due()
        if num_due:
            yield from self._records(num_due)
        if commit is not None:
            commit(not self._is_in_doubt)
        clock.lap(LOGGING)
        save_due |= self._schedule.take() or self.stopped_early
        ends = is_last or self.is_over
        if save_due or hooks_due or self.is_over:
            clock.look()
        if save_due and not ends and not hooks_due and self._snapshot is not None:
            with supervision.in_phase("save"):  # it may wait for the save before
                self._commit = self._snapshot(done)
            clock.lap(CHECKPOINT)
            clock.next_step()
            return
        if save_due or hooks_due:
            # The host waits for the device here: no hook runs, and no run ends, before the step was judged.
            yield from self.outstanding()
            clock.lap(LOGGING)
            verdict = self._hook_calls.call(hooks_due, place, self._last_loss)
            save_due |= verdict.save or (verdict.keep and not self._schedule.by_time)
            self.ended_by_hook = verdict.stop
            if verdict.keep and not (save_due or self.is_over or self._is_in_doubt):
                self._saver.hold(done)
        if self._average is not None and (is_last or self.ended_by_hook):
            with supervision.in_phase("hooks"):  # it may go over the data once more
                self._average.finish()
        if (save_due and not self._is_in_doubt) or ends or self.is_over:
            with supervision.in_phase("save"):
                self._saver.save(done)
            clock.lap(CHECKPOINT)
        clock.next_step()

    def _go_on(self) -> Iterator[StepRecord]:
        """Enqueue the steps after the last one that neither hook nor checkpoint waits for, and yield due records."""
        stepper, found = self._stepper, self._undisturbed()
        if found is None or self.wants_stop or stepper.clock.measures_next:
            return
        began, rates = time.perf_counter(), list[float]()

        def begins() -> Iterator[int]:
            for step in range(found.first.step, found.first.step + found.num_steps):
                if self.wants_stop:
                    return
                rates.append(self._set_lr(step, self._num_steps))
                yield step

        outcome = stepper.go_on(found, begins())
        if not rates:
            return
        self._loader.pass_over(found.shortened(len(rates)))
        self._in_flight.enqueue_stretch(found.first, rates, began, outcome)
        num_due = self._in_flight.num_due()
        if num_due:
            yield from self._records(num_due)
        stepper.clock.lap(LOGGING)
        stepper.clock.next_steps(len(rates))

    def _undisturbed(self) -> Stretch | None:
        """Return the next steps that no hook, checkpoint, norm or end of the job waits for; None if too few."""
        if self._before_step is not None or self._commit is not None:
            return None
        stretch = self._loader.alike()
        if stretch is None:
            return None
        done = stretch.first.step
        free = [every - 1 - done % every for every in self._everies]
        left_out = self._skips.next_after(done)
        if left_out is not None:
            free.append(left_out - 1 - done)
        if self._retry is not None and self._retry.next_change is not None:
            free.append(max(0, self._retry.next_change - done))
        if self._norms is not None:
            free.append(self._norms.every - 1 - done % self._norms.every)
        if self._job.max_steps is not None:
            free.append(self._job.max_steps - 1 - done)
        stretch = stretch.shortened(min(free, default=stretch.num_steps)).shortened(self._in_flight.num_read_back)
        return stretch if stretch.num_steps > 1 else None

    def outstanding(self) -> Iterator[StepRecord]:
        """Yield the records of the last steps that were not read yet; blocks until the device has finished them."""
        commit, self._commit = self._commit, None
        if self._in_flight:
            yield from self._records(len(self._in_flight))
        if commit is not None:
            commit(not self._is_in_doubt)

    def _records(self, count: int) -> Iterator[StepRecord]:
        """Yield the records of the oldest `count` entries in flight; blocks until the device has finished them."""
        for read in self._in_flight.read(count):
            yield self._record(read)

    def last_words(self) -> Iterator[StepRecord]:
        """Yield the last step's record after an error, if its state was copied and only its judgement is missing."""
        left, commit = self._in_flight.drop(), self._commit
        self._commit = None
        if len(left) != 1 or commit is None:
            return
        (last,) = left
        try:
            if not last.reading.is_there(LAST_WAIT_SECONDS):
                return
            record = self._record(ReadStep(last, 0, last.reading.values(), time.perf_counter() - last.began))
        except Exception:  # noqa: BLE001  (a bad step, or a device that is gone: the first error is the news)
            return
        yield record
        commit(not self._is_in_doubt)

    @property
    def _is_in_doubt(self) -> bool:
        """Whether the step that was judged last was bad: it is not saved, since a run may have to go back before it."""
        return self._bad is not None and self._bad.in_a_row > 0

    @property
    def is_over(self) -> bool:
        """Whether the run ends before the job's last step, because a stop was requested or a hook asked for it."""
        return self.stopped_early or self.ended_by_hook

    def _is_last(self, place: Place) -> bool:
        """Return whether the job ends with this step.

        The loader knows where epochs end; not every length is known beforehand.
        """
        return place.step + 1 == self._job.max_steps or (place.ends_epoch and place.epoch + 1 == self._job.epochs)

    def _set_lr(self, step: int, num_steps: int | None) -> float:
        lr = self._rates.set(step, num_steps)
        if self._set_loss_weights is not None:
            self._set_loss_weights(step)
        return lr

    def _record(self, read: ReadStep) -> StepRecord:
        """Build the record of a step that was read back, and judge its loss."""
        enqueued, number, values, seconds = read
        place = enqueued.place
        step = place.step + 1 + number
        _, count, stop, norm, skipped, _, logged = values
        supervision.step(step)
        if stop:
            self.stopped_early |= self._schedule.hear(stop, step)
        loss, parts = values.loss(step - 1)
        if self._bad is None:
            if not math.isfinite(loss):
                raise not_finite(step, place.epoch, loss, parts, self._first_step)
        elif not self._bad.judge(step, read, loss, parts, has_moved=self.has_moved):
            loss, count, parts = math.nan, 0.0, None
        self._last_loss = loss if count else math.nan
        if skipped < 1:  # of several turns, some may be skipped
            self.has_moved = True
        lr, other_rates = enqueued.rates[number], self._rates.take_others(step - 1)
        if other_rates is not None:
            logged = {**(logged or {}), **other_rates}
        samples = place.num_samples
        return StepRecord(step, place.epoch, samples, loss, count, lr, norm, seconds, skipped > 0, parts, logged)


def _at(place: Place, job: Job) -> str:
    """Return the words that say in which step an error was raised, and what is special about its batch."""
    few = place.num_samples < (job.largest_batch or 0) and place.ends_epoch and not job.batch_sizes
    words = f"; its batch is the last of the epoch and has {place.num_samples} samples" if few else ""
    return f"drivetrain: this was step {place.step + 1}, in epoch {place.epoch + 1}{words}"


def _is_due(every: int | Literal["epoch"], place: Place) -> bool:
    """Return whether something with this period is due after this step."""
    return place.ends_epoch if every == "epoch" else (place.step + 1) % every == 0
