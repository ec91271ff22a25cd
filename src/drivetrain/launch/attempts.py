"""The supervisor's rows in a run's account of its time: it outlives the workers, and knows when each attempt ended."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from drivetrain.core.goodput import ATTEMPTS, stamp, start_marks
from drivetrain.core.run_folder import JsonLines


class AttemptLog:
    """Appends rows to `attempts.jsonl` in the run folder; they wait until that is known."""

    def __init__(self, submitted: float | None) -> None:
        self._folder: Path | None = None
        self._waiting: list[dict[str, Any]] = []
        seconds = start_marks.take(0.0)["seconds"]  # of this process, before it came here
        self.note("launch", seconds=seconds, **({} if submitted is None else {"submitted": submitted}))

    def note(self, event: str, **facts: Any) -> None:
        self._waiting.append({"event": event, **facts, **stamp()})
        self._write()

    def into(self, folder: Path) -> None:
        self._folder = folder
        self._write()

    def _write(self) -> None:
        if self._folder is None or not self._waiting:
            return
        with suppress(OSError):  # a full disk must not end the watch; the rows wait
            log = JsonLines(self._folder / ATTEMPTS)
            for row in self._waiting:
                log.append(row)
            log.close()
            self._waiting = []
