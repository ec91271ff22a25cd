"""Adapters of other trainers, each driven the way its own documentation tells users to, as trainers to prove.

An adapter does what an ordinary user of that trainer would write: no fix of ours is in it. Its package is imported when
the adapter is asked for, and not before. `find_subject` finds the trainer that a user names: an adapter, or
`module:name` of a user's trainer.
"""

import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError
from drivetrain.proving.adapters.accelerate import accelerate_subject
from drivetrain.proving.adapters.deepspeed import deepspeed_subject
from drivetrain.proving.adapters.hf_trainer import hf_subject
from drivetrain.proving.adapters.lightning import lightning_subject
from drivetrain.proving.adapters.plain import LoopState, plain_subject
from drivetrain.proving.case import Subject

__all__ = [
    "ADAPTERS",
    "LoopState",
    "accelerate_subject",
    "deepspeed_subject",
    "find_subject",
    "hf_subject",
    "lightning_subject",
    "plain_subject",
]

ADAPTERS: Mapping[str, Callable[[], Subject]] = {
    "plain": plain_subject,
    "accelerate": accelerate_subject,
    "lightning": lightning_subject,
    "hf": hf_subject,
    "deepspeed": deepspeed_subject,
}


def find_subject(name: str) -> Subject:
    """Return the trainer of this name.

    Args:
        name: a name of `ADAPTERS`, or `module:name` of a `Subject` or of a function `run(case)`, importable from the
            current folder.

    Example:
        >>> from drivetrain.proving.adapters import find_subject
        >>> find_subject("plain").name
        'plain loop'
    """
    if name in ADAPTERS:
        try:
            return ADAPTERS[name]()
        except ImportError as error:
            raise DrivetrainError(
                f"trainer {name} cannot be loaded: {error}", remedy="install its package beside Drivetrain"
            ) from error
    known = ", ".join(ADAPTERS)
    if ":" not in name:
        raise DrivetrainError(f"there is no trainer {name}", remedy=f"give one of {known}, or module:name of your own")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise DrivetrainError(
            f"trainer {name} cannot be loaded: {error}", remedy="give `module:name`, importable from this folder"
        ) from error
    if isinstance(found, Subject):
        return found
    if not callable(found):
        raise DrivetrainError(
            f"trainer {name} is a {type(found).__name__}", remedy="give a Subject or a function run(case)"
        )
    return Subject(found, getattr(found, "__name__", name))
