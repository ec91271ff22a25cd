"""State of the current micro-step that code inside a model may need."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_uncounted = [0]


def is_counted() -> bool:
    """Return False while a rank without samples left runs one at weight 0, to stay in step with the others."""
    return not _uncounted[0]


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Run a forward whose samples are not part of the step: its changes to the model's buffers are undone."""
    _uncounted[0] += 1
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        _uncounted[0] -= 1
        for buffer, saved in before:
            buffer.data.copy_(saved)  # `data`: leaves autograd's version counter alone, as backward may need it
