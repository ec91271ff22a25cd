"""Errors of checkpoints, in the user's terms; a failure on one rank can be sent as JSON and raised on all."""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.value import Value


class CheckpointError(DrivetrainError):
    """A checkpoint cannot be written or read. For a full disk, the bytes are available as numbers, too."""

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        path: Path | None = None,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.path, self.needed_bytes, self.free_bytes = path, needed_bytes, free_bytes


class CheckpointDamagedError(CheckpointError):
    """The files on the disk are not what was written, or were never a checkpoint."""


class SharedFileError(CheckpointDamagedError):
    """A checkpoint is whole, but frozen weights that it shares with others are missing or damaged."""


class NewerFormatError(CheckpointError):
    """The checkpoint was written by a newer drivetrain. Nothing is wrong with it: it is left where it is."""


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_KINDS: dict[str, type[CheckpointError]] = {
    "shared": SharedFileError,
    "damaged": CheckpointDamagedError,
    "newer": NewerFormatError,
    "other": CheckpointError,
}


class SaveFailure(Value):
    message: str
    remedy: str = ""
    path: str = ""
    needed_bytes: int | None = None
    free_bytes: int | None = None
    kind: Literal["shared", "damaged", "newer", "other"] = "other"

    @classmethod
    def of(
        cls, error: Exception, folder: Path, doing: str, needed_bytes: int | None = None, free_bytes: int | None = None
    ) -> "SaveFailure":
        if isinstance(error, CheckpointError):
            return cls(
                message=error.message,
                remedy=error.remedy,
                path=str(error.path or folder),
                needed_bytes=error.needed_bytes,
                free_bytes=error.free_bytes,
                kind=_kind_of(error),
            )
        start = f"{doing} in {folder}"
        if not isinstance(error, OSError):
            return cls(message=f"{start}: {type(error).__name__}: {error}", path=str(folder))
        if error.errno not in _NO_SPACE or needed_bytes is None:
            remedy = "make that folder writable, or name another one"
            return cls(message=f"{start}: {error.strerror or error}", path=str(folder), remedy=remedy)
        free = "" if free_bytes is None else f", and {free_bytes} were free when it began"
        return cls(
            message=f"{start}: {error.strerror}; it needs {needed_bytes} bytes{free}",
            remedy="free space there, keep fewer checkpoints, or name another folder; older ones are as they were",
            path=str(folder),
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )

    @classmethod
    def joined(cls, by_rank: Sequence["SaveFailure | None"]) -> "SaveFailure | None":
        """Join the failures of all ranks into one, with each failed rank's message; None if none failed."""
        ranks: dict[str, list[int]] = {}
        for rank, failure in enumerate(by_rank):
            if failure is not None:
                ranks.setdefault(failure.message, []).append(rank)
        first = next((failure for failure in by_rank if failure is not None), None)
        if first is None or len(by_rank) == 1:
            return first
        told = [f"rank {', '.join(map(str, numbers))}: {message}" for message, numbers in ranks.items()]
        more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
        return first.model_copy(update={"message": "; ".join(told[:3]) + more})

    def error(self) -> CheckpointError:
        return _KINDS[self.kind](
            self.message,
            remedy=self.remedy,
            path=Path(self.path) if self.path else None,
            needed_bytes=self.needed_bytes,
            free_bytes=self.free_bytes,
        )


def _kind_of(error: CheckpointError) -> Literal["shared", "damaged", "newer", "other"]:
    if isinstance(error, SharedFileError):
        return "shared"
    if isinstance(error, CheckpointDamagedError):
        return "damaged"
    return "newer" if isinstance(error, NewerFormatError) else "other"
