"""The logger `drivetrain`: one more sink of what a run prints and records, configured by the user as any other.

Lines of a run have the level INFO, notices WARNING, events DEBUG. Nothing is printed twice: where the user's logging
writes a line to the terminal already, the terminal output leaves it out.
"""

import logging
import sys

from drivetrain.core.safe_text import printable

LOGGER = logging.getLogger("drivetrain")
LOGGER.addHandler(logging.NullHandler())  # otherwise Python prints warnings itself where nothing is configured


def log(text: str, level: int = logging.INFO) -> bool:
    """Pass a line to the logger. Returns whether the user's logging has written it to the terminal."""
    if not LOGGER.isEnabledFor(level):
        return False
    LOGGER.log(level, "%s", text)
    return any(_writes_to_terminal(handler) and level >= handler.level for handler in _handlers())


def notice(text: str) -> None:
    """Tell the user something on standard error that a run can go on with."""
    if not log(text, logging.WARNING):
        print(f"drivetrain: {printable(text)}", file=sys.stderr, flush=True)


def _handlers() -> list[logging.Handler]:
    found: list[logging.Handler] = []
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found


def _writes_to_terminal(handler: logging.Handler) -> bool:
    stream = getattr(handler, "stream", None)
    if stream is None:
        return hasattr(handler, "console")  # rich's handler
    return stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
