"""Notes of starts in the run's events: that one has begun, and why it did not come to a step."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import RunFolder


def note_claim(folder: RunFolder) -> None:
    """Note that a start has begun where there was one before: its end, such as a refusal, is no longer the news."""
    if folder.is_resumed:
        _note(folder, {"event": "claim"})


def note_failure(folder: RunFolder, error: BaseException) -> None:
    """Note why a run did not begin."""
    facts: dict[str, Any] = {"event": "stopped by an error", "error": f"{type(error).__name__}: {error}"}
    if isinstance(error, DrivetrainError):
        facts = {"event": "refused", "error": error.message, "remedy": error.remedy}
    elif isinstance(error, KeyboardInterrupt):
        facts = {"event": "stop", "because": "Ctrl-C before it began; the same command begins it"}
    _note(folder, facts)


def _note(folder: RunFolder, facts: dict[str, Any]) -> None:
    with suppress(OSError):  # a full disk: what follows is the news
        log = folder.log("events.jsonl")
        log.append({**facts, "time": datetime.now(UTC).isoformat()})
        log.close()
