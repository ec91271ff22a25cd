"""Reports of a worker to the supervisor that started it: its run folder, its progress, how it ended.

The reports are lines of JSON over a pipe that exists only under `drivetrain launch`; elsewhere every call does nothing.
A supervisor that has gone away ends nothing here: it takes its workers with it by other means.
"""

import json
import os
import time
from typing import Any

CHANNEL = "DRIVETRAIN_REPORT_FD"
_LEAST_SECONDS = 0.2  # between two reports of steps: one costs more than a short step's bookkeeping


class Supervision:
    """The channel to the supervisor. `step` and `tell` never raise."""

    def __init__(self, channel: int | None) -> None:
        self._channel = channel
        self._told_at = 0.0
        self.last_step = 0
        self.run_folder = ""

    @classmethod
    def of_environment(cls) -> "Supervision":
        text = os.environ.get(CHANNEL, "")
        return cls(int(text) if text.isdecimal() else None)

    @property
    def is_there(self) -> bool:
        return self._channel is not None

    def tell(self, kind: str, **facts: Any) -> None:
        if self._channel is None:
            return
        try:
            # One write per line: other threads of this process may report, too.
            os.write(self._channel, json.dumps({"kind": kind, **facts}).encode() + b"\n")
        except OSError:
            self._channel = None

    def step(self, step: int) -> None:
        self.last_step = step
        if self._channel is None:
            return
        now = time.monotonic()
        if now - self._told_at >= _LEAST_SECONDS:
            self._told_at = now
            self.tell("step", step=step)

    def run(self, folder: str, resumed_from: int | None = None) -> None:
        self.run_folder = folder
        self.tell("run", folder=folder)


supervision = Supervision.of_environment()
