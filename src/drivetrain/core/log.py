"""The logger `drivetrain`, and what is shown and recorded of text that others wrote."""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# ----------------------------------------------------------------------------------------------------------------------
# What is shown and recorded of text that others wrote: without control sequences, and without secrets.
#
# Names, messages of exceptions and the output of ranks are such text. A terminal obeys escape sequences in it: they can
# hide lines, forge others, or set the title and the clipboard.

HIDDEN = "***"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # but tabs and line ends
_COLOR = re.compile(r"(\x1b\[[0-9;]*m)")
_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:(?:api|access|secret|private|auth|wandb|encryption|signing|hf)[_-]?key"
    r"|(?:(?:api|access|auth|hf|secret|bearer|refresh|session|wandb|private)[_-]?)?token"
    r"|secret|password|passwd|pwd|passphrase|credentials?)$",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(r"(?:pad|eos|bos|mask|cls|sep|unk|special|image|per)[_-]token$", re.IGNORECASE)
_IN_URL = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[bap]-[A-Za-z0-9-]{10,})"
)


def printable(text: str, *, colors: bool = False) -> str:
    """Return text with control characters in a visible form; line ends and tabs stay, and on request colors.

    Args:
        text: The text of another.
        colors: Whether sequences that set colors stay as they are; the text is then ended with a reset.

    Example:
        >>> printable("a" + chr(27) + "[2Jb")
        'a\\\\x1b[2Jb'
    """
    if not _CONTROL.search(text):
        return text
    if not colors:
        return _CONTROL.sub(_visible, text)
    parts = _COLOR.split(text)
    found = "".join(part if number % 2 else _CONTROL.sub(_visible, part) for number, part in enumerate(parts))
    return found + ("\x1b[0m" if len(parts) > 1 else "")


def on_one_line(text: str) -> str:
    """Return text such as the name of a folder as a line has it: line ends and tabs, too, are in a visible form.

    Args:
        text: The text of another.

    Example:
        >>> on_one_line("a" + chr(10) + "b")
        'a\\\\x0ab'
    """
    return re.sub(r"[\t\n]", _visible, printable(text))


def _visible(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def redacted(value: Any, name: str = "") -> Any:
    """Return what may be recorded of settings: without passwords, keys and tokens, by their names and by their looks.

    Args:
        value: Plain data: mappings, sequences, text, numbers.
        name: What it is called.

    Example:
        >>> redacted({"lr": 0.1, "api_key": "abc", "data": "s3://me:abc@host/set"})
        {'lr': 0.1, 'api_key': '***', 'data': 's3://me:***@host/set'}
    """
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if is_secret(name) else _TOKENS.sub(HIDDEN, _IN_URL.sub(rf"\1{HIDDEN}@", value))


def redacted_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without the values of flags that are secrets.

    Args:
        words: What stood behind the name of the command.

    Example:
        >>> redacted_words(["--lr", "0.1", "--api-key", "abc", "--password=abc"])
        ['--lr', '0.1', '--api-key', '***', '--password=***']
    """
    found, before = list[str](), ""
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and is_secret(name):
            found.append(f"{name}={HIDDEN}")
        elif before.startswith("-") and is_secret(before) and not word.startswith("-"):
            found.append(HIDDEN)
        else:
            found.append(str(redacted(word)))
        before = word
    return found


def is_secret(name: str) -> bool:
    """Return whether a setting or flag of this name holds a secret."""
    return bool(_SECRET_NAME.search(name.lstrip("-"))) and not _NOT_SECRET.search(name)


# ----------------------------------------------------------------------------------------------------------------------
# The logger `drivetrain`: one more sink of what a run prints and records, configured by the user as any other.
#
# Lines of a run have the level INFO, notices WARNING, events DEBUG. Nothing is printed twice: where the user's logging
# writes a line to the terminal already, the terminal output leaves it out.

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
        with contextlib.suppress(OSError):  # a full disk behind it
            print(f"drivetrain: {printable(text)}", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Write to standard error what a launcher has to tell. A screen that is gone, or a full disk, ends nothing.

    Python's own buffer is passed by: what it could not write would change the exit code to 120 in the end.

    Args:
        text: All of it, without the end of the last line.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    text = f"{printable(text)}\n"
    with contextlib.suppress(OSError, ValueError):
        try:
            descriptor = sys.stderr.fileno()
        except (OSError, ValueError):  # it is captured
            sys.stderr.write(text)
            return
        data = text.encode(sys.stderr.encoding, "backslashreplace")
        while data:
            data = data[os.write(descriptor, data) :]


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
