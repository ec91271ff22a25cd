"""What code inside a model may have to know of the micro-step it runs in."""

from collections.abc import Iterator
from contextlib import contextmanager

_uncounted = [0]


def is_counted() -> bool:
    """False while a rank that has nothing left runs a sample at weight 0, to stay in step with the others."""
    return not _uncounted[0]


@contextmanager
def uncounted() -> Iterator[None]:
    """Around a forward whose samples are not part of the step."""
    _uncounted[0] += 1
    try:
        yield
    finally:
        _uncounted[0] -= 1
