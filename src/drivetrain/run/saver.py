"""Saves the checkpoints of a run, deciding when each is begun and when it counts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from drivetrain.checkpoint import BackgroundSaver, Checkpointer, CheckpointError, Files, HeldState, Shard
from drivetrain.checkpoint.background import LIMIT_SECONDS
from drivetrain.core.errors import BadResumeError, DrivetrainError
from drivetrain.core.goodput import read_account
from drivetrain.core.launchers import supervision
from drivetrain.core.log import notice
from drivetrain.core.processes import SetAside
from drivetrain.core.run_folder import CHECKPOINTS as CHECKPOINTS
from drivetrain.core.world import World
from drivetrain.loop.schedule import SaveSchedule, observed_mtbf
from drivetrain.monitor.recorder import NoRunRecorder
from drivetrain.run.session import Session

NOTABLE_WAIT_SECONDS = 0.05
LARGE_BYTES = 2**26  # a state of this size belongs to a run that is long enough for the collector to matter

State = tuple[Sequence[Shard], dict[str, Any]]  # this rank's tensors, and all else as JSON


def must_be_finite(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the keys of a state in which NaN and infinite numbers are never right.

    These are the parameters that an optimizer holds, their averages, and what the optimizer keeps of each of their
    elements, such as moments. Buffers may hold anything (masks of -inf, metrics), and so may frozen parameters and an
    optimizer's other state.
    """
    found = set()
    trained = {name for group in meta.get("optimizer_groups", ()) for name in group["params"]}
    for key, shape in shapes.items():
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            name = name.rpartition("/")[0]
            is_meant = name in trained and shapes.get(f"model/{name}", shape) == shape and bool(shape)
        else:
            is_meant = kind in ("model", "ema") and name in trained
        if is_meant:
            found.add(key)
    return found


def make_checkpointer(run: Session, files: Files | None = None) -> Checkpointer:
    """Make the checkpointer of a run, together on all ranks. `files` are the operations on the disk, if others."""
    keys = must_be_finite if run.config.checkpoint.check_finite else _none
    folder = run.folder  # of the main process, which begins every save
    return Checkpointer(
        run.path / CHECKPOINTS,
        run.world,
        run.job.keep_last,
        files=files,
        must_be_finite=keys,
        refuse_lost=folder.refuse_lost if folder is not None else lambda: None,
    )


def _none(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    return set()


def falls_back(run: Session, error: BadResumeError) -> bool:
    """Set the checkpoint aside that a run went on from and went bad at once, if there is an older one; collective."""
    checkpointer = make_checkpointer(run)
    outcome = checkpointer.give_up_on(error.resumed_from, error.message)
    if outcome and run.world.is_main:
        notice(f"{checkpointer.problems[-1]}; going on from step {max(checkpointer.steps())} instead")
    return outcome


def make_schedule(run: Session) -> SaveSchedule:
    """Make the schedule of a run's saves: pinned by job or configuration, else by what saves cost here."""
    stated = 3600 * run.config.checkpoint.mtbf_hours
    account = read_account(run.path) if run.world.is_main else None
    failures = sum(account.interruptions.values()) if account else 0
    mtbf = observed_mtbf(stated, account.wall_seconds, failures) if account and failures else stated
    return SaveSchedule(
        run.job.checkpoint_every,
        seconds=run.config.checkpoint.seconds,
        mtbf_seconds=mtbf,
        mtbf_is_observed=bool(failures),
        is_main=run.world.is_main,
    )


class CheckpointSaver:
    """Saves in the background if `beside`; otherwise training waits for each save, and a failure ends it.

    `state` gives what is to be saved, `best_step` the step whose checkpoint is never pruned. Used by all ranks alike.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        world: World,
        recorder: NoRunRecorder,
        state: Callable[[], State],
        best_step: Callable[[], int | None],
        *,
        beside: bool,
        schedule: SaveSchedule | None = None,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._checkpointer, self._recorder, self._state, self._best_step = checkpointer, recorder, state, best_step
        self._saver = BackgroundSaver(checkpointer, world, limit_seconds=limit_seconds) if beside else None
        self.schedule = schedule or SaveSchedule(1)
        self._held = HeldState(checkpointer)  # where saves wait; otherwise the background saver has one
        self._told_seconds: float | None = None  # the interval between saves that was recorded last
        self._has_said_interval = False
        self._best_at: dict[int, int | None] = {}  # which step was the best when one was saved
        self._pins: set[int] = set()
        self._num_problems_told = 0
        self._aside = SetAside()
        self.when_begun: Callable[[int], None] | None = None  # called with the step of a save that was begun
        self._pin_best()  # before anything can be pruned
        self._tell_problems()

    @property
    def snapshot(self) -> Callable[[int], Callable[[bool], None]] | None:
        """The function that takes the state of a step not judged yet; None if saves wait. See `loop.trainer.Saver`."""
        return None if self._saver is None else self._snapshot

    def watch_frozen(self, state: Callable[[], State]) -> None:
        """Take the state before the first step; later ones are compared with it to tell which weights are frozen."""
        with suppress(DrivetrainError):  # what cannot be saved is reported after the first step, when it is complete
            self._checkpointer.frozen.watch(state()[0])

    def prepare(self) -> None:
        """Refuse a state that cannot be saved, and allocate memory for copies. Called after a step."""
        with self._blocking():
            shards, meta = self._state()
            num_bytes = sum(shard.tensor.nbytes for shard in shards if isinstance(shard.tensor, Tensor))
            self.schedule.expect(num_bytes)
            self._tell_interval()
            if num_bytes >= LARGE_BYTES:
                self._aside.begin()
            if self._saver is not None:
                self._saver.prepare(shards, meta)

    def save(self, step: int) -> None:
        """Save the state of a step that was judged."""
        with self._blocking():
            self._save(step)

    def _save(self, step: int) -> None:
        if self._saver is not None:
            self._begin(step, may_wait=True)(True)
            return
        began = time.monotonic()
        self._recorder.flush()
        shards, meta = self._state()
        self._best_at[step] = self._pin_best()
        self.save_held(self._checkpointer, unless=step)
        self._checkpointer.save(step, shards, meta)
        self.schedule.begun(step)
        seconds = time.monotonic() - began
        self.schedule.learn(seconds, 0.0)
        self._tell(step, None, {"seconds": seconds})

    def hold(self, step: int) -> None:
        """Copy the state of a step that was judged, the best so far; the next save writes it, too."""
        with self._blocking():
            self._recorder.flush()
            shards, meta = self._state()
            self._best_at[step] = self._pin_best()
            if self._saver is not None:
                self._saver.hold(step, shards, meta)
            else:
                self._held.take(step, shards, meta)

    def save_held(self, checkpointer: Checkpointer, unless: int) -> None:
        """Save what is held, now, unless that is the state of a step that is being saved anyway."""
        held = self._held if self._saver is None else self._saver.held
        if held.step is None or held.step == unless:
            held.drop()
            return
        step, began = held.step, time.monotonic()
        held.save(checkpointer)
        self._tell(step, None, {"seconds": time.monotonic() - began})

    def report(self) -> None:
        """Record which saves have ended since the last call. Costs nothing where none has."""
        if self._saver is None or not self._saver.has_news:
            return
        for outcome in self._saver.take_news():
            seconds = {
                "seconds": outcome.seconds,
                "stalled_seconds": outcome.stalled_seconds,
                "waited_seconds": outcome.waited_seconds,
            }
            if outcome.waited_seconds > NOTABLE_WAIT_SECONDS:
                self._recorder.event("waited for a save", step=outcome.step, seconds=outcome.waited_seconds)
            if outcome.stalled_seconds:  # what was held is written with another one
                self.schedule.learn(outcome.stalled_seconds, outcome.write_seconds)
            self._tell(outcome.step, outcome.error, seconds)

    def finish(self) -> None:
        """Wait at the end until the last save is on the disk; raises if it is not."""
        if self._saver is not None:
            with self._blocking():
                self._saver.finish()

    def failed(self, error: BaseException) -> None:
        """Report an error to the supervisor while a save is under way that takes all ranks: one may be frozen.

        Called before anything is waited for. Errors in words for users are raised on all ranks, which may go on.
        """
        is_awaited = self._saver is not None and self._saver.needs_peers
        if is_awaited and isinstance(error, Exception) and not isinstance(error, DrivetrainError):
            supervision.failed(error, saving=True)

    def close(self) -> None:
        """Finish a save of a step that was judged, abandon any other. Called after an error, too; raises nothing."""
        self._aside.end()
        if self._saver is not None:
            given_up = self._saver.close()
            self.report()
            if given_up:
                self._recorder.event("save given up", words=given_up)
                self._recorder.say(given_up)

    def _snapshot(self, step: int) -> Callable[[bool], None]:
        with self._blocking():
            return self._begin(step, may_wait=False)

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Account for the time that training waits for a save."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._recorder.spend("ckpt_block", time.monotonic() - began)

    def _begin(self, step: int, *, may_wait: bool) -> Callable[[bool], None]:
        """Begin a save. With `may_wait`, the host may wait for the device: it has just waited for the step."""
        assert self._saver is not None
        saver = self._saver
        shards, meta = self._state()
        self._best_at[step] = self._pin_best()
        saver.begin(step, shards, meta, may_wait=may_wait)
        self.schedule.begun(step)
        if self.when_begun is not None:
            self.when_begun(step)

        def judged(is_good: bool) -> None:
            if not is_good:
                saver.abandon()
                return
            self._recorder.flush()  # a checkpoint counts on the lines of all steps up to it
            saver.judged()

        return judged

    def _tell(self, step: int, error: CheckpointError | None, seconds: dict[str, float]) -> None:
        best = self._best_at.pop(step, None)
        if error is None:
            supervision.tell("checkpoint", step=step)
            self._unpin_all_but(best)
            self._recorder.event("checkpoint", step=step, best=best == step, **seconds)
        else:
            self._recorder.event("save failed", step=step, error=error.message, remedy=error.remedy, **seconds)
            self._recorder.say(f"step {step} was not saved, and training goes on: {error}")
        for news in self._checkpointer.frozen.take_news():
            self._recorder.event(news.event, **news.facts)
            self._recorder.say(news.text)
        self._tell_problems()
        self._tell_interval()

    def _tell_interval(self) -> None:
        """Record how often is saved, and why; again where that has changed by half, and once on the terminal."""
        seconds = self.schedule.interval_seconds if self.schedule.by_time else 0.0
        if self._told_seconds is not None and abs(seconds - self._told_seconds) <= 0.5 * self._told_seconds:
            return
        words = self.schedule.in_words()
        self._recorder.event("checkpoint interval", seconds=seconds, words=words)
        if self.schedule.by_time and self.schedule.is_measured and not self._has_said_interval:
            self._has_said_interval = True
            self._recorder.say(f"  checkpoints  {words}")
        self._told_seconds = seconds

    def _tell_problems(self) -> None:
        problems = self._checkpointer.problems[self._num_problems_told :]
        self._num_problems_told += len(problems)
        for problem in problems:
            self._recorder.event("checkpoint problem", problem=problem)
            self._recorder.say(problem)

    def _pin_best(self) -> int | None:
        best = self._best_step()
        if best is not None:
            self._checkpointer.pin(best)
            self._pins.add(best)
        return best

    def _unpin_all_but(self, best: int | None) -> None:
        """Let the former best checkpoint be pruned once there is a better one: the save of that one may have failed."""
        with suppress(OSError):  # where the folder cannot be read, all stay pinned
            if best is not None and best in self._checkpointer.steps():
                for step in self._pins - {best}:
                    self._checkpointer.unpin(step)
                self._pins &= {best}
