"""Collects problems with the user's files, so that they are reported all at once, before anything is written."""

from pathlib import Path

from drivetrain.core.errors import InputError

SHOWN = 10  # problems that are printed in full; the rest is counted


class BadInput:
    """Keeps the first ten problems with their file and line, and counts the rest.

    Example:
        >>> bad = BadInput()
        >>> bad.add("mails.csv", "the text is empty", line=7)
        >>> bad.count
        1
        >>> bad.raise_if_any(remedy="fill in the rows, or remove them")
        Traceback (most recent call last):
            ...
        drivetrain.core.errors.InputError: 1 problem with the input:
          mails.csv line 7: the text is empty
          remedy: fill in the rows, or remove them
    """

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[str] = []

    def add(self, file: Path | str, message: str, *, line: int | None = None) -> None:
        """Record one problem.

        Args:
            file: The file that holds it, as the user would write its path.
            message: What is wrong there, with the value that was found and what is allowed.
            line: The line in the file, from 1; None where the whole file is meant, such as an image.
        """
        self.count += 1
        if len(self._shown) < SHOWN:
            place = f"{file}" if line is None else f"{file} line {line}"
            self._shown.append(f"  {place}: {message}")

    def raise_if_any(self, remedy: str) -> None:
        """Raise an `InputError` (exit code 2) that lists the problems, if there are any.

        Args:
            remedy: What the user can do about them.
        """
        if not self.count:
            return
        heading = "1 problem with the input:" if self.count == 1 else f"{self.count:,} problems with the input:"
        rest = self.count - len(self._shown)
        more = [f"  and {rest:,} more"] if rest else []
        raise InputError("\n".join([heading, *self._shown, *more]), remedy=remedy)
