"""The names of checkpoint folders, and how they are parsed."""

import re
import secrets
from pathlib import Path

_STEP = re.compile(r"step-([0-9]{8,18})")
_SET_ASIDE = re.compile(r"step-[0-9]{8,18}\.corrupt(-[0-9]+)?")
SHARED_NAME = re.compile(r"frozen-[0-9a-f]{16}")  # no separator, no `..`: nothing outside the folder is ever opened
_LEFTOVER = re.compile(
    r"\.step-[0-9]{8,18}\.tmp-[0-9a-f]{16}|\.trash-step-[0-9]{8,18}-[0-9a-f]{16}"
    r"|\.frozen-[0-9a-f]{16}\.tmp|\.trash-frozen-[0-9a-f]{16}"
)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def draft_name(step: int) -> str:
    """Return a folder name for a save in progress: hidden, and unique to this attempt."""
    return f".{step_name(step)}.tmp-{secrets.token_hex(8)}"


def trash_name(step: int) -> str:
    """Return a folder name for a checkpoint that is being removed."""
    return f".trash-{step_name(step)}-{secrets.token_hex(8)}"


def shared_name() -> str:
    """Return a new name for a folder of frozen weights, which several checkpoints share."""
    return f"frozen-{secrets.token_hex(8)}"


def shared_draft_name(name: str) -> str:
    return f".{name}.tmp"


def shared_trash_name(name: str) -> str:
    return f".trash-{name}"


def shared_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if SHARED_NAME.fullmatch(path.name))


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending."""
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    matches = (_STEP.fullmatch(name) for name in names)
    return sorted(step for match in matches if match and step_name(step := int(match[1])) == match[0])


def leftovers_in(folder: Path) -> list[Path]:
    """Return drafts and trash: those of a crash, or of a save in progress."""
    return [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)]


def set_aside_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if _SET_ASIDE.fullmatch(path.name))
