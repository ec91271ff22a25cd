"""Detects changes of a model's parameters, or of which of them are trained, during training."""

from collections.abc import Callable

from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.state import put_away

_REMEDY = (
    "train in two jobs: the second makes the model with the other parameters trained, and starts from the weights of "
    "the first with Job(init_from=...)"
)


class ParameterWatch:
    """Remembers a model's parameters when it is made; `check` raises once they have changed.

    The optimizer, gradient reduction and checkpoints were made for these. A parameter unfrozen later would not train;
    one that is frozen or replaced would be waited for by other ranks, or would differ after a resume.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Where set, a frozen parameter is reported to it, once, instead of refused: a custom loop in one process may
        # freeze some for a while.
        self.note: Callable[[str], None] | None = None
        self._known = self._now()
        self._frozen = [parameter for parameter, is_trained in self._known.values() if not is_trained]

    def check_frozen(self) -> None:
        """Check frozen parameters only, which a loop can afford in every step: free where nothing is frozen."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                self.check()

    def check(self) -> None:
        put_away(self._model)
        now = self._now()
        if now == self._known:
            return
        for name, (parameter, is_trained) in now.items():
            if name not in self._known:
                raise _changed(f"{name} was added to the model", "it is not in the optimizer and would not train")
            before, was_trained = self._known[name]
            if parameter is not before:
                raise _changed(f"{name} was replaced by another tensor", "the optimizer still trains the one before")
            if is_trained and not was_trained:
                raise _changed(f"requires_grad of {name} was set", "it is not in the optimizer and would not train")
            if was_trained and not is_trained:
                self._frozen_now(name)
        for name in self._known:
            if name not in now:
                raise _changed(f"{name} was taken out of the model", "the optimizer and checkpoints still hold it")

    def _frozen_now(self, name: str) -> None:
        if self.note is None:
            raise _changed(f"requires_grad of {name} was cleared", "a resumed run would not know, and train it")
        note, self.note = self.note, lambda _: None
        note(
            f"requires_grad of {name} was cleared: a checkpoint does not hold that, and after a resume the loop has to "
            "do it again"
        )

    def _now(self) -> "dict[str, _Known]":
        return {name: _Known((p, p.requires_grad)) for name, p in self._model.named_parameters()}


class _Known(tuple[Tensor, bool]):
    """A parameter that compares by identity: tensors compare element by element."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self[0] is other[0] and self[1] == other[1]

    __hash__ = tuple.__hash__


def _changed(what: str, why: str) -> DrivetrainError:
    return DrivetrainError(f"{what} after training had begun, and {why}", remedy=_REMEDY)
