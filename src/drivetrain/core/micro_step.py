"""What code inside a model may have to know of the micro-step it runs in."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_uncounted = [0]


def is_counted() -> bool:
    """False while a rank that has nothing left runs a sample at weight 0, to stay in step with the others."""
    return not _uncounted[0]


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Around a forward whose samples are not part of the step: what they did to the model's buffers is undone."""
    _uncounted[0] += 1
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        _uncounted[0] -= 1
        for buffer, saved in before:
            buffer.data.copy_(saved)  # `data`: for autograd nothing has happened to what its backward may need
