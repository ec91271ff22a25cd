"""What can be wrong with a checkpoint, in the words of the user."""

from pathlib import Path

from drivetrain.core.errors import DrivetrainError


class CheckpointError(DrivetrainError):
    """A checkpoint cannot be written or read. For a full disk, the bytes are there as numbers, too."""

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
    """What is on the disk is not what was written, or was never a checkpoint."""


class SharedFileError(CheckpointDamagedError):
    """A checkpoint is whole, but frozen weights that it shares with others are missing or damaged."""


class NewerFormatError(CheckpointError):
    """Written by a newer drivetrain. Nothing is wrong with it: it is left where it is."""
