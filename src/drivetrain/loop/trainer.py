"""The training loop, and nothing else: it yields a record per optimizer step.

Record n is read after step n+1 was enqueued, so the host does not wait for the device in the loop. It waits only where
a result is needed: before a hook, at the end. A checkpoint's state is copied at the end of its step, and the checkpoint
counts once the record of that step was read.

Where CUDA-graph replays write their results into a table on the device, the records of some milliseconds are read at
once, while steps for some more are in flight. Each record then has their mean as its seconds. Steps that need no hook
or checkpoint and whose sample numbers are on the device already are enqueued one after the other, as a stretch: the
host's per-step work would take as long as the device needs to run the step.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import ChecksFirst, Hook, Rehearsal, StepContext, Verdict
from drivetrain.core.records import PartLoss, PinnedSlots, Reading, StepOutcome, StepRecord, Values
from drivetrain.core.state import put_away
from drivetrain.core.supervision import supervision
from drivetrain.core.world import World
from drivetrain.data.division import Place, Stretch
from drivetrain.data.loader import Loader, MicroBatch
from drivetrain.job import Job
from drivetrain.loop import Stepper
from drivetrain.monitor.phases import CHECKPOINT, HOOKS, LOGGING, VALIDATION
from drivetrain.strategies.lr_on_device import are_rounded, rounded, set_rate


class NormCadence(Protocol):
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


class _Enqueued:
    """A step, or a stretch of them, in flight on the device; its outcome may not be on the host yet."""

    __slots__ = ("began", "ended", "num_steps", "place", "rates", "reading")

    def __init__(self, first: Place, rates: Sequence[float], began: float, reading: Reading) -> None:
        self.place, self.rates, self.num_steps, self.began = first, rates, len(rates), began
        self.reading = reading
        self.ended = math.nan  # when the host began to enqueue the next one, if it did

    def travels_with(self, other: "_Enqueued") -> bool:
        """Return whether both results reach the host in one copy: reading one then waits for the other, too."""
        note, beside = self.reading.note, other.reading.note
        return note is not None and beside is not None and note.sent is not None and note.sent is beside.sent


# How long to wait, after an error, for the record of a step whose state was copied: the device may hang.
LAST_WAIT_SECONDS = 10.0
# The read-back batch and the in-flight window of steps with a result table, in seconds and in steps at most. The host
# may be busy with something else, such as a line for the terminal, or held up, for as long without idling the device.
TOGETHER_SECONDS, MOST_TOGETHER = 8e-3, 64
UNDER_WAY_SECONDS, MOST_UNDER_WAY = 32e-3, 256


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
        validation: Hook | None = None,
    ) -> None:
        self._job, self._world, self._model, self._optimizer = job, world, model, optimizer
        self._stepper, self._loader, self._folder, self._save = stepper, loader, folder, save
        self._first_step = first_step
        self._validation = validation
        # Looked up once: the loop's overhead is a few microseconds per step, and has to stay so.
        self._num_steps, self._save_every = job.num_steps, job.save_every
        self._hooks = [(hook, hook.every) for hook in ([validation] if validation else []) + [*job.hooks]]
        everies = [self._save_every, *(every for _, every in self._hooks)]
        self._everies = [every for every in everies if every != "epoch"]
        self._rounds_rates = are_rounded(optimizer)
        self._slots = PinnedSlots()
        self._ahead: deque[_Enqueued] = deque()
        self._steps_ahead = 0
        self._read_until = -math.inf  # the time up to which seconds were attributed to steps
        self._seconds = math.inf  # per step, at the last read-back
        self._num_done = 0  # in-flight steps that were done at that time
        self._last_loss = math.nan  # of the record read last; before hooks that is the step just done
        self._commit: Callable[[bool], None] | None = None  # of a snapshot that was taken after the step in flight
        self.wants_stop = False
        self.stopped_early = False  # a stop was requested; the run can go on later
        self.ended_by_hook = False  # a hook found that the job is done
        self.has_moved = False  # some step, over the whole life of the run, was not skipped
        # Optimizers create their state in their first step: unsavable state is refused then, not at the first save.
        self.check_after_first_step: Callable[[], Any] = lambda: None
        self.average_of: Callable[[Tensor], Tensor | None] = lambda parameter: None
        self.tell: Callable[..., None] = lambda kind, **facts: None
        self.say: Callable[[str], None] = lambda text: None
        self.measure: Callable[[nn.Module], Mapping[str, float]] = lambda model: {}
        self.rehearsal: Rehearsal | None = None
        self.before_step: Callable[[int], None] | None = None  # with its number, from 1
        self.norms: NormCadence | None = None  # decides which steps compute their gradient norm, if nothing is clipped
        self.set_loss_weights: Callable[[int], None] | None = None  # of the step that begins, where they change
        self.check_model: Callable[[], None] = lambda: None  # raises if a hook changed the model in a forbidden way
        # Copies the state for a checkpoint before its step was judged. It returns a function to call once it was, with
        # whether an error has ended the run; never if the step was bad. None: saves wait for the judgement.
        self.snapshot: Callable[[int], Callable[[bool], None]] | None = None

    def stop(self) -> None:
        """Stop after the next step or two, on all ranks at the same step, with a checkpoint."""
        self.wants_stop = True

    def run(self) -> Iterator[StepRecord]:
        try:
            for place, micro_batches in self.steps():
                begun = self.begin(place)
                yield from self.settle(begun, self._stepper.run(place, micro_batches, self.wants_stop))
                if self.is_over:
                    return
                if self._stepper.may_go_on:
                    yield from self._go_on()
        except (Exception, KeyboardInterrupt):
            yield from self.last_words()
            raise

    def steps(self) -> Iterator[tuple[Place, Iterable[MicroBatch]]]:
        """Return the job's remaining steps: the place of each, and this rank's micro-batches.

        Hooks are checked first: one that cannot work raises while no work can be lost.
        """
        self._check_hooks()
        self._stepper.clock.start()
        return self._loader.batches(self._first_step, self._job.max_steps, self._job.epochs)

    def begin(self, place: Place) -> Begun:
        if self.before_step is not None:
            self.before_step(place.step + 1)
        if self.norms is not None and self.norms.begin(place.step):
            self.norms = None
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
        place, ahead, clock = begun.place, self._ahead, self._stepper.clock
        reading = Reading(outcome, self._world.device, self._slots)
        self._enqueue(_Enqueued(place, (begun.lr,), begun.began, reading))
        done, is_last, hooks_due = place.step + 1, begun.is_last, begun.hooks
        if done == self._first_step + 1:
            self.check_after_first_step()
        save_due = _is_due(self._save_every, place) or is_last
        commit, self._commit = self._commit, None
        is_awaited = save_due or hooks_due or commit is not None or self.wants_stop
        num_due = len(ahead) - 1 if is_awaited else self._num_due()
        if num_due:
            yield from self._records(num_due)
        if commit is not None:
            commit(False)
        clock.lap(LOGGING)
        save_due |= self.stopped_early
        ends = is_last or self.is_over
        if save_due or hooks_due or self.is_over:
            clock.look()
        if save_due and not ends and not hooks_due and self.snapshot is not None:
            self._commit = self.snapshot(done)
            clock.lap(CHECKPOINT)
            clock.next_step()
            return
        if save_due or hooks_due:
            # The host waits for the device here: no hook runs, and no run ends, before the step was judged.
            yield from self.outstanding()
            clock.lap(LOGGING)
            verdict = self._call(hooks_due, place)
            save_due |= verdict.save
            self.ended_by_hook = verdict.stop
        if save_due or self.is_over:
            self._save(done)
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
        self._enqueue(_Enqueued(found.first, rates, began, Reading(outcome, self._world.device)))
        num_due = self._num_due()
        if num_due:
            yield from self._records(num_due)
        stepper.clock.lap(LOGGING)
        stepper.clock.next_steps(len(rates))

    def _undisturbed(self) -> Stretch | None:
        """Return the next steps that no hook, checkpoint, norm or end of the job waits for; None if too few."""
        if self.before_step is not None or self._commit is not None:
            return None
        stretch = self._loader.alike()
        if stretch is None:
            return None
        done = stretch.first.step
        free = [every - 1 - done % every for every in self._everies]
        if self.norms is not None:
            free.append(self.norms.every - 1 - done % self.norms.every)
        if self._job.max_steps is not None:
            free.append(self._job.max_steps - 1 - done)
        stretch = stretch.shortened(min(free, default=stretch.num_steps)).shortened(self._num_together)
        return stretch if stretch.num_steps > 1 else None

    def _enqueue(self, enqueued: _Enqueued) -> None:
        if self._ahead:
            self._ahead[-1].ended = enqueued.began
        self._ahead.append(enqueued)
        self._steps_ahead += enqueued.num_steps

    def outstanding(self, *, leaving: bool = False) -> Iterator[StepRecord]:
        """Yield the records of the last steps that were not read yet; blocks until the device has finished them.

        `leaving` says that the loop was left before its end, perhaps by this rank alone.
        """
        ahead = self._ahead
        commit, self._commit = self._commit, None
        if ahead:
            yield from self._records(len(ahead))
        if commit is not None:
            commit(leaving)

    def _num_due(self) -> int:
        """Return how many in-flight entries to read now where no result is needed: all but the last.

        Of results in a device table only some are read, so that the device keeps work. One step among them without a
        row there, or in another table, such as an epoch's last, changes nothing.
        """
        ahead = self._ahead
        note, before = ahead[-1].reading.note, ahead[-2].reading.note if len(ahead) > 1 else None
        if before is not None and note is not None and before.noted is not note.noted:
            before.noted.send()  # now, right after that step: later, reading it would wait for all steps after it, too
        note = note or before
        if note is None:
            return len(ahead) - 1
        together, under_way = self._num_together, _num_within(UNDER_WAY_SECONDS, self._seconds, MOST_UNDER_WAY)
        if note.noted.num_unsent >= together:
            note.noted.send()
        num_due, left = 0, self._steps_ahead
        if left < under_way + together:
            return 0
        for enqueued in ahead:
            left -= enqueued.num_steps
            # Results in the same copy as the last one arrive together with it.
            if left < under_way or (enqueued.reading.note is not None and enqueued.reading.note.sent is note.sent):
                break
            num_due += 1
        while 0 < num_due < len(ahead) - 1 and ahead[num_due].travels_with(ahead[num_due - 1]):
            num_due += 1
        return num_due

    @property
    def _num_together(self) -> int:
        """The number of steps whose table rows are read back at once."""
        return _num_within(TOGETHER_SECONDS, self._seconds, MOST_TOGETHER)

    def _records(self, count: int) -> Iterator[StepRecord]:
        """Yield the records of the oldest `count` in-flight entries; blocks until the device has finished them."""
        # Plain loops: this runs in every step, and each call costs a microsecond, as the step evicts it from cache.
        ahead, taken, found, num_steps, are_noted = self._ahead, [], [], 0, False
        asked = time.perf_counter()
        for _ in range(count):
            enqueued = ahead.popleft()
            taken.append(enqueued)
            found.append(enqueued.reading.all_values())  # the host waits until the device has done them
            num_steps += enqueued.num_steps
            are_noted |= enqueued.reading.note is not None
        now = time.perf_counter()
        self._stepper.clock.waited(now - asked)
        self._steps_ahead -= num_steps
        # Where the host is far ahead, the time when it enqueued a step says nothing about how long the step took.
        began, ended = max(taken[0].began, self._read_until), taken[-1].ended
        if are_noted or not ended > began:
            ended = now
        # Some remaining entries are done, too; their share of the time is attributed now, not when they are read.
        num_done = sum(left.num_steps for left in ahead if left.travels_with(taken[-1])) if are_noted else 0
        num_timed = num_steps + num_done - self._num_done
        self._num_done = num_done
        if num_timed > 0:
            self._seconds, self._read_until = (ended - began) / num_timed, ended
        seconds = self._seconds
        for enqueued, values in zip(taken, found, strict=True):
            for number, step_values in enumerate(values):
                yield self._record(enqueued, number, step_values, seconds)

    def last_words(self) -> Iterator[StepRecord]:
        """Yield the last step's record after an error, if its state was copied and only its judgement is missing."""
        ahead, commit = [*self._ahead], self._commit
        self._ahead.clear()
        self._commit = None
        if len(ahead) != 1 or commit is None:
            return
        (last,) = ahead
        try:
            if not last.reading.is_there(LAST_WAIT_SECONDS):
                return
            record = self._record(last, 0, last.reading.values(), time.perf_counter() - last.began)
        except Exception:  # noqa: BLE001  (a bad step, or a device that is gone: the first error is the news)
            return
        yield record
        commit(True)

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
        factor = self._job.lr_factor(step, num_steps)
        for group in self._optimizer.param_groups:
            lr = group["initial_lr"] * factor
            set_rate(group, rounded(lr) if self._rounds_rates else lr)
        if self.set_loss_weights is not None:
            self.set_loss_weights(step)
        return float(lr)

    def _record(self, enqueued: _Enqueued, number: int, values: Values, seconds: float) -> StepRecord:
        """Build the record of step `number`, from 0, of this entry."""
        place = enqueued.place
        step = place.step + 1 + number
        total, count, stop, norm, skipped, named = values
        supervision.step(step)
        self.stopped_early |= stop > 0
        loss = total / count if count else total * math.inf if total else 0.0  # nothing counted: nothing learnt
        parts = None
        if named is not None:
            loss, parts = named[0].read(named[1], step - 1, count)
        if not math.isfinite(loss):
            raise self._not_finite(step, place.epoch, loss, parts)
        self._last_loss = loss if count else math.nan
        if not skipped:
            self.has_moved = True
        lr = enqueued.rates[number]
        return StepRecord(step, place.epoch, place.num_samples, loss, count, lr, norm, seconds, skipped > 0, parts)

    def refuse_unmoved(self, steps: int) -> None:
        """Raise for a job that ended without a single step that moved the weights: nothing was trained."""
        if steps and not self.has_moved:
            raise DrivetrainError(
                f"all {steps} steps were skipped, since their gradients were not finite: nothing was trained, and the "
                "weights are those that the run began with",
                remedy="use --precision bf16 or fp32 (fp16 overflows); look for infinite values in the data, and for "
                "sqrt, log or a division by zero in the loss; then train under another --name",
            )

    def _not_finite(
        self, step: int, epoch: int, loss: float, parts: Mapping[str, PartLoss] | None = None
    ) -> DrivetrainError:
        where = f"the loss of step {step} (epoch {epoch + 1}) is {loss}"
        bad = [name for name, part in (parts or {}).items() if part.num_items and not math.isfinite(part.loss)]
        if bad:
            where += f" (its part {', '.join(bad)})"
        if step == 1:
            return DrivetrainError(
                f"{where}: before anything was learnt, so the data or the first weights are to blame",
                remedy="look for nan or infinite values in the first batch, and for a log or a division by zero in the "
                "loss; --precision fp32 rules out an overflow",
            )
        return DrivetrainError(
            f"{where}; the run stops before it is saved, so the last checkpoint is good",
            remedy="a lower learning rate, or clip_norm; then run again under the same name to go on from there",
        )

    def _check_hooks(self) -> None:
        for hook, _ in self._hooks:
            if isinstance(hook, ChecksFirst):
                hook.check(self._context(self._first_step, 0))

    def _context(self, step: int, epoch: int) -> StepContext:
        return StepContext(
            step,
            epoch,
            self._model,
            self._world,
            self._folder,
            self._companions,
            self.tell,
            batch=self._stepper.last_batch,
            say=self.say,
            measure=lambda: self.measure(self._model),
            rehearsal=self.rehearsal,
            loss=self._last_loss,
        )

    def _call(self, hooks: list[Hook], place: Place) -> Verdict:
        context = self._context(place.step + 1, place.epoch + place.ends_epoch)
        verdicts = []
        for hook in hooks:
            put_away(self._model)
            verdicts.append(hook(context) or Verdict())
            self._stepper.clock.lap(VALIDATION if hook is self._validation else HOOKS)
        self.check_model()
        self._stepper.look_again()
        return Verdict(any(verdict.save for verdict in verdicts), any(verdict.stop for verdict in verdicts))

    def _companions(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors kept for a parameter element by element: optimizer state and moving average."""
        state = {**self._optimizer.state.get(parameter, {}), "average": self.average_of(parameter)}
        return {
            name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == parameter.shape
        }


def _is_due(every: int | Literal["epoch"], place: Place) -> bool:
    """Return whether something with this period is due after this step."""
    return place.ends_epoch if every == "epoch" else (place.step + 1) % every == 0


def _num_within(span: float, seconds: float, most: int) -> int:
    """Return how many steps of `seconds` each fit into a span of time: at least one, at most `most`."""
    return max(1, min(most, int(span / seconds))) if seconds > 0 else most
