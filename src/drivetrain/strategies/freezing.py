"""Freezes weights between steps, and thaws them: what is frozen gets no gradient, and so its optimizer leaves it alone.

`requires_grad` stays as it is. Gradients are computed and reduced as before, and dropped before they are clipped: so no
strategy, compiler or bucket has to know, and ranks that freeze at the same step stay in step.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.strategies.base import StrategyParts
from drivetrain.strategies.replicated import parameter_names, set_frozen


class Freezer:
    """Freezes a run's weights by their names. All ranks call it together, after the same step.

    Args:
        parts: What the strategy was given.
        owners: Where the optimizer holds this rank's parts of parameters: each part, and the parameter it is of.
    """

    def __init__(self, parts: StrategyParts, owners: Mapping[Tensor, Tensor]) -> None:
        self._parts, self._owners = parts, owners

    def freeze(self, patterns: Iterable[str]) -> None:
        """Freeze the weights whose names match one of the patterns."""
        trained = self._trained()
        frozen = self._parts.frozen.names | self._matching(patterns, trained)
        if frozen >= trained:
            raise DrivetrainError("context.freeze: nothing would be left to train", remedy="freeze fewer weights")
        set_frozen(self._parts, frozen, self._owners)

    def unfreeze(self, patterns: Iterable[str]) -> None:
        """Thaw the weights whose names match one of the patterns."""
        thawed = self._matching(patterns, self._trained())
        set_frozen(self._parts, self._parts.frozen.names - thawed, self._owners)

    def _trained(self) -> set[str]:
        """Return the names of the weights that the optimizer has."""
        names = parameter_names(self._parts.model, self._parts.optimizer, self._owners)
        return {names[tensor] for tensor in self._parts.trained}

    def _matching(self, patterns: Iterable[str], trained: set[str]) -> set[str]:
        if self._parts.frozen.refused:
            raise DrivetrainError(
                f"context.freeze: {self._parts.frozen.refused}", remedy="use --parallel-strategy ddp or fsdp"
            )
        found: set[str] = set()
        for pattern in patterns:
            matching = {name for name in trained if fnmatchcase(name, pattern)}
            if not matching:
                raise DrivetrainError(
                    f"context.freeze: no weight that the optimizer has matches {pattern!r}",
                    remedy=f"name some of {', '.join(sorted(trained)[:5])}, …; a star stands for any text",
                )
            found |= matching
        return found
