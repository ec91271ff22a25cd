"""One value that a user set, and its source."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Given:
    """One value that a user set."""

    name: str  # the field's dotted name; empty if the line sets nothing, and the note says why
    value: Any
    spelled: str  # the key as the user wrote it
    source: str  # `command line`, `train.yaml line 3`, `Python`
    note: str = ""  # what a line of another trainer's file became
    needs_gpu: bool = False  # left out where no GPU is used
    is_foreign: bool = False  # of a file that was written for another trainer
