"""Reports, before the first step, what a recipe knows of its data: an event, and a line on the terminal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from drivetrain.core.hook import StepContext
from drivetrain.core.run_folder import read_rows, write_atomically

EVENT = "recipe"


class RecipeFacts:
    """A hook that reports what a recipe found and decided: once, when a run starts or is resumed.

    Args:
        lines: What is printed on the terminal.
        files: JSON files for the run folder, by name, such as the vocabulary that the weights belong to.
        facts: What is recorded in the event `recipe` of `events.jsonl`: JSON values by name.
    """

    every: Literal["epoch"] = "epoch"

    def __init__(self, lines: list[str], files: Mapping[str, Any] | None = None, **facts: Any) -> None:
        self._lines, self._files, self._facts = lines, files or {}, facts

    def check(self, context: StepContext) -> None:
        if context.world.is_main:
            for name, content in self._files.items():
                write_atomically(context.folder / name, json.dumps(content, ensure_ascii=False) + "\n")
        context.tell(EVENT, **self._facts)
        for line in self._lines:
            context.say(line)

    def __call__(self, context: StepContext) -> None:
        """Does nothing: everything is reported before the first step."""

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores nothing: the facts are those of the data as it is now."""


def facts_of(folder: Path) -> Mapping[str, Any]:
    """Returns what the run in `folder` last recorded of its data; empty if it recorded nothing."""
    rows, _ = read_rows(folder / "events.jsonl")
    found = [row for row in rows if row.get("event") == EVENT]
    return found[-1] if found else {}
