"""Saves in the background: the state is copied at a step's end, and a thread writes a checkpoint of the copy.

    begin(step, shards, meta)   the state is copied; training goes on and may change it
    judged()                    its step was good: the checkpoint commits as soon as every rank's file is written

A state whose step turns out to be bad is never judged, and is abandoned. There is one save at a time: the next one
waits for the last, and the wait is reported. A save that fails costs that checkpoint and not the run; `finish` raises
if it was the last. All ranks do the same. Their threads communicate over a separate process group (`World.aside`).

No wait for the thread is without limit: it may be waiting for a rank that is frozen. A wait goes on for as long as the
files of the save grow, of whichever rank, and ends when they have not grown for the limit.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.files import CheckpointError, SaveFailure
from drivetrain.checkpoint.frozen import Split
from drivetrain.checkpoint.staging import Staging
from drivetrain.checkpoint.tensor_file import refuse_unstorable_meta, refuse_unstorable_shards
from drivetrain.core.state import Shard
from drivetrain.core.world import World

# On the way out after an error, other ranks may be waiting for this one, and not get to judge the step.
GRACE_SECONDS = 30.0
LIMIT_SECONDS = 600.0  # for other waits, unless the run sets another: after this long without a byte a save has failed
LOOKS = 60  # how often the files are looked at within a limit
# A new thread starts with the GIL held. It releases it at once, or `begin` would wait for it.
HEAD_START_SECONDS = 0.002


@dataclass(frozen=True)
class SaveOutcome:
    """The result of a save, equal on all ranks; the times are this rank's."""

    step: int
    error: CheckpointError | None  # None: it is on the disk
    seconds: float  # from `begin` to its end
    stalled_seconds: float  # of those, how long `begin` took
    waited_seconds: float  # of those, how long for the save before it
    write_seconds: float = 0.0  # in the background, without waiting for the verdict


class HeldState:
    """A copy of the state of a step in host memory, which is written with the next checkpoint.

    It has memory of its own, allocated for the first one. A newer one takes its place.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer, self._staging = checkpointer, Staging(clones=False)
        self._taken: tuple[Split, list[Shard], str] | None = None
        self.step: int | None = None  # None: nothing is held

    def take(self, step: int, shards: Sequence[Shard], meta: Mapping[str, Any]) -> None:
        """Copy the state of a step that was judged; the host may wait for the device."""
        refuse_unstorable_meta(meta)
        split = self._checkpointer.frozen.split(shards, wait=True, beside=True)
        self._taken = split, self._staging.take(split.written), json.dumps(dict(meta))
        self._staging.until_copied()
        self.step = step

    def drop(self) -> None:
        self.step, self._taken = None, None

    def save(self, checkpointer: Checkpointer) -> None:
        """Write it, together on all ranks; it is not held any more, written or not."""
        assert self._taken is not None
        assert self.step is not None
        (split, staged, text), step = self._taken, self.step
        self.drop()
        checkpointer.save_if_wanted(
            step, staged, json.loads(text), split, until_copied=lambda: None, is_wanted=lambda: True
        )


class BackgroundSaver:
    """Saves in a background thread. Made, used and closed by all ranks together, in the thread that trains."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        world: World,
        staging: Staging | None = None,
        *,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._checkpointer = checkpointer.over(world.aside())
        self._has_peers, self._limit_seconds = world.size > 1, limit_seconds
        self._staging = staging or Staging()
        self._thread: threading.Thread | None = None
        self._save: _Save | None = None  # the newest
        self._news: list[SaveOutcome] = []
        self.held = HeldState(self._checkpointer)
        self._writes_held = False  # the thread is using what is held

    def prepare(self, shards: Sequence[Shard], meta: Mapping[str, Any]) -> None:
        """Refuse state that cannot be saved, and allocate the memory for copies of it in the background.

        Call it once, after a step.
        """
        refuse_unstorable_shards(shards)
        refuse_unstorable_meta(meta)
        without_frozen = self._checkpointer.frozen.look(shards)

        def allocate() -> None:
            with contextlib.suppress(Exception):  # `begin` tries again, and reports the error
                copied = without_frozen()
                self._staging.prepare(copied)
                self._checkpointer.prepare(copied)

        self._start(allocate)

    def hold(self, step: int, shards: Sequence[Shard], meta: Mapping[str, Any]) -> None:
        """Copy the state of a step that was judged. The next save writes it first; one that is held later replaces it.

        If a save is under way that is writing a held state, or there are frozen weights, this waits for its end.
        """
        if self._writes_held or any(shard.is_untrained for shard in shards):
            self._join()
        self.held.take(step, shards, meta)

    def begin(self, step: int, shards: Sequence[Shard], meta: Mapping[str, Any], *, may_wait: bool = False) -> None:
        """Copy the state. When this returns, the tensors and the contents of `meta` may be changed.

        If the previous save is not done yet, this waits for it. With `may_wait` it also waits until a GPU has computed
        the checksums of frozen weights: for callers that have waited for the GPU already.
        """
        began = time.monotonic()
        refuse_unstorable_meta(meta)
        text = json.dumps(dict(meta))
        self._join()
        waited = 0.0 if self._save is None else time.monotonic() - began  # else for memory, see `prepare`
        save = self._save = _Save(step)
        split, staged, until_copied = Split(shards), list(shards), self._staging.until_copied
        try:
            split = self._checkpointer.frozen.split(shards, wait=may_wait, beside=True)
            staged = self._staging.take(split.written)
        except Exception as error:  # noqa: BLE001  (no memory, for example: the other ranks have to hear of it)
            until_copied = _raising(error)
        stalled = time.monotonic() - began
        if self.held.step == step:
            self.held.drop()  # it is saved anyway
        self._writes_held = self.held.step is not None

        def write() -> None:
            time.sleep(HEAD_START_SECONDS)
            if self._writes_held:
                self._write_held()
            try:
                writing = time.monotonic()
                is_saved = self._checkpointer.save_if_wanted(
                    step, staged, json.loads(text), split, until_copied=until_copied, is_wanted=save.is_wanted
                )
            except Exception as error:  # noqa: BLE001  (whatever it is, training goes on, and it is reported)
                failure = SaveFailure.of(error, self._checkpointer.folder, f"step {step} cannot be saved")
                save.failure = failure.error()
            else:
                if not is_saved:
                    return
            now = time.monotonic()
            written = now - writing - save.judging_seconds
            self._news.append(SaveOutcome(step, save.failure, now - began, stalled, waited, written))

        self._start(write)

    def _write_held(self) -> None:
        step, began, error = self.held.step or 0, time.monotonic(), None
        try:
            self.held.save(self._checkpointer)
        except Exception as failure:  # noqa: BLE001  (whatever it is, training goes on, and it is reported)
            error = SaveFailure.of(failure, self._checkpointer.folder, f"step {step} cannot be saved").error()
        self._writes_held = False
        seconds = time.monotonic() - began
        self._news.append(SaveOutcome(step, error, seconds, 0.0, 0.0, seconds))

    def judged(self) -> None:
        """Commit the save that was begun last as soon as it is written: its step is good."""
        self._decide(is_wanted=True)

    def abandon(self) -> None:
        """Drop the save that was begun last: it leaves nothing behind.

        To be called on all ranks together; a rank on its own calls `close`.
        """
        self._decide(is_wanted=False)

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def take_news(self) -> list[SaveOutcome]:
        """Return the saves that have ended since the last call, except abandoned ones."""
        return [self._news.pop(0) for _ in range(len(self._news))]

    def wait(self) -> None:
        """Wait until the save that was judged or abandoned last has ended."""
        self._join()

    def finish(self) -> None:
        """Wait, and raise if the last save failed."""
        self._join()
        if self._save is not None and self._save.failure is not None:
            raise self._save.failure

    @property
    def needs_peers(self) -> bool:
        """Whether a save is under way in which the other ranks take part."""
        return self._has_peers and self._save is not None and self._thread is not None and self._thread.is_alive()

    def close(self) -> str:
        """Finish a save that was judged; abandon one that was not. Nothing is raised.

        Returns a line to report if it was given up, since nothing of it was written for too long: empty otherwise.
        """
        if self._save is not None and self._save.verdict is None:
            self._decide(is_wanted=False)
        limit = GRACE_SECONDS if self._has_peers else self._limit_seconds
        if self._ends_within(limit) or self._save is None or not self._save.verdict:
            return ""
        return f"{self._stuck(limit)}; it is given up, and the checkpoints before it are as they were"

    def _decide(self, *, is_wanted: bool) -> None:
        if self._save is not None:
            self._save.verdict = is_wanted
            self._save.has_verdict.set()

    def _start(self, work: Callable[[], None]) -> None:
        # A daemon, so that a second Ctrl-C ends the process at once: a torn save is a leftover, never a checkpoint.
        self._thread = threading.Thread(target=work, name="drivetrain-save", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._save is not None and self._save.verdict is None:
            raise ValueError(f"step {self._save.step} is being saved and was not judged: the wait would have no end")
        if not self._ends_within(self._limit_seconds):
            raise CheckpointError(
                self._stuck(self._limit_seconds),
                remedy="look at the ranks that do not answer, and at the disk; --timeout-seconds allows for more",
                path=self._checkpointer.folder,
            )
        self._thread = None

    def _ends_within(self, limit_seconds: float) -> bool:
        """Wait for the thread. Return False if none of the files has grown for so long."""
        if self._thread is None:
            return True
        num_bytes, since = -1, time.monotonic()
        while time.monotonic() - since < limit_seconds:
            self._thread.join(limit_seconds / LOOKS)
            if not self._thread.is_alive():
                return True
            before, num_bytes = num_bytes, self._checkpointer.num_bytes_in_drafts()
            if num_bytes > before:
                since = time.monotonic()
        return False

    def _stuck(self, limit_seconds: float) -> str:
        step = "the first step" if self._save is None else f"step {self._save.step}"
        waits = "other ranks do not answer, or the disk does not" if self._has_peers else "the disk does not answer"
        return f"the save of {step} has not ended, and has written nothing for {limit_seconds:g} s: {waits}"


class _Save:
    """The state shared between the training thread and the thread that writes."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.verdict: bool | None = None
        self.has_verdict = threading.Event()
        self.failure: CheckpointError | None = None
        self.judging_seconds = 0.0  # that the thread has waited for the verdict

    def is_wanted(self) -> bool:
        began = time.monotonic()
        self.has_verdict.wait()
        self.judging_seconds = time.monotonic() - began
        return bool(self.verdict)


def _raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
