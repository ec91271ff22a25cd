"""Prints one line on standard error, for everything that is done otherwise than asked for."""

import sys


def say(text: str) -> None:
    """Print one line, marked as drivetrain's."""
    print(f"drivetrain: {text}", file=sys.stderr, flush=True)
