"""Errors that a user sees. Each says what is wrong, what was found, what is allowed, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass

# The attribute of an error after which another start differs: what it does differently, in words.
GOES_ON_WITH = "drivetrain_goes_on_with"


class DrivetrainError(Exception):
    """An error with a remedy. The command line prints both without a traceback and exits with `exit_code`.

    Args:
        message: What is wrong.
        remedy: What to do about it.

    Example:
        >>> print(dt.DrivetrainError("no GPU is visible", remedy="drivetrain check"))
        no GPU is visible
          remedy: drivetrain check
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


class BadResumeError(DrivetrainError):
    """The numbers of a run went bad in the first steps after a resume: the checkpoint may be to blame."""

    def __init__(self, message: str, *, remedy: str, resumed_from: int) -> None:
        super().__init__(message, remedy=remedy)
        self.resumed_from = resumed_from


@dataclass(frozen=True)
class Problem:
    """One problem of the configuration, with all that a user needs to fix it."""

    key: str  # as the user spelled it: `--epochs`, `batch.size`, `train.yaml`
    message: str
    value: object = None
    source: str = ""  # `command line`, `train.yaml line 3`, `default`
    allowed: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        lines = [f"{self.key}{where}: {self.message}"]
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.remedy:
            lines.append(f"remedy:  {self.remedy}")
        return "\n    ".join(lines)


class ConfigError(DrivetrainError):
    """All problems of a configuration at once.

    Args:
        problems: Each with its key, the value it got, what is allowed, and a remedy.

    Example:
        >>> try:
        ...     dt.configure(epochs=0, batch_size=-1)
        ... except dt.ConfigError as error:
        ...     print([problem.key for problem in error.problems])
        ['epochs', 'batch_size']
    """

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        heading = "1 problem with the configuration" if count == 1 else f"{count} problems with the configuration"
        super().__init__("\n".join([f"{heading}:", *(f"  {problem}" for problem in self.problems)]))


class InputError(DrivetrainError):
    """The user's files hold something that cannot be trained on; found before anything is written."""

    exit_code = 2
