"""Errors of checkpoints, in the user's terms."""

from pathlib import Path

from drivetrain.core.errors import DrivetrainError


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
