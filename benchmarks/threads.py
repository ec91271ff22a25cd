"""What the thread that trains and the one that saves were doing, and when: to find out which of them held up the other.

Looks at both every few milliseconds; writes down every garbage collection, and from when to when the parts of a save
took. A moment without a look is one in which the interpreter was held.
"""

import gc
import os
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from drivetrain.checkpoint.checkpoint import CheckpointFolder
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.files import Files
from drivetrain.checkpoint.staging import Staging
from drivetrain.core.run_folder import JsonLines

LOOK_SECONDS = 0.004
NOTABLE_SECONDS = 0.001
SAVER = "drivetrain-save"
PARTS = (
    (Staging, "prepare"),
    (Staging, "take"),
    (Staging, "until_copied"),
    (Checkpointer, "_agree_on_what_is_saved"),
    (CheckpointFolder, "begin"),
    (Files, "write_file"),
    (os, "fsync"),
    (Checkpointer, "_commit"),
    (Files, "remove_tree"),
    (JsonLines, "flush"),
)


class Span(NamedTuple):
    name: str
    thread: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def meets(self, begin: float, end: float) -> bool:
        return self.begin < end and begin < self.end


class Look(NamedTuple):
    at: float
    training: str
    saving: str


class Threads:
    """Watches both threads for the time of a `with`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.looks: list[Look] = []
        self._ends = threading.Event()
        self._originals: list[tuple[Any, str, Any]] = []
        self._collection_began = 0.0

    def __enter__(self) -> Self:
        for owner, name in PARTS:
            self._originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(name, getattr(owner, name)))
        gc.callbacks.append(self._collected)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        gc.callbacks.remove(self._collected)
        for owner, name, original in self._originals:
            setattr(owner, name, original)

    def _timed(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                thread = threading.current_thread().name
                self.spans.append(Span(name.strip("_"), thread, began, time.perf_counter()))

        return call

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began = time.perf_counter()
        elif info["generation"] > 0:
            name = f"collection of generation {info['generation']}"
            thread = threading.current_thread().name
            self.spans.append(Span(name, thread, self._collection_began, time.perf_counter()))

    def _look(self) -> None:
        main = threading.main_thread().ident
        while not self._ends.wait(LOOK_SECONDS):
            frames = sys._current_frames()
            saver = next((thread.ident for thread in threading.enumerate() if thread.name == SAVER), None)
            self.looks.append(Look(time.perf_counter(), _place(frames.get(main)), _place(frames.get(saver))))

    def between(self, begin: float, end: float) -> str:
        """Return what both were doing in a gap, in words."""
        parts = [
            f"{span.name} of {'the saver' if span.thread == SAVER else 'training'} ({1e3 * span.seconds:.0f} ms)"
            for span in self.spans
            if span.meets(begin, end) and span.seconds > NOTABLE_SECONDS
        ]
        looks = [look for look in self.looks if begin <= look.at <= end]
        seen = {name: Counter(getattr(look, name) for look in looks).most_common(2) for name in ("training", "saving")}
        places = [
            f"{name}: {', '.join(f'{place} × {count}' for place, count in found)}"
            for name, found in seen.items()
            if found
        ]
        times = [begin, *(look.at for look in looks), end]
        blind = max(after - before for before, after in pairwise(times))
        held = [f"no look for {1e3 * blind:.0f} ms"] if blind > 5 * LOOK_SECONDS else []
        return "; ".join([*(parts or ["no part of a save, no collection"]), *places, *held])


def _place(frame: FrameType | None) -> str:
    """Return the innermost two functions."""
    names = []
    while frame is not None and len(names) < 2:
        names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names) or "none"
