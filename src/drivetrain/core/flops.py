"""The FLOPs of one operation, by torch's formulas."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry


def flops_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any) -> int:
    """Return the FLOPs of a matrix product, convolution or attention; 0 for others, and where no formula fits."""
    formula = flop_registry.get(operation._overloadpacket)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **(kwargs or {}), out_val=result))
    except Exception:  # noqa: BLE001 - a formula that does not know these arguments must not end the run
        return 0
