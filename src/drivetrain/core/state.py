"""What travels between a strategy and a checkpoint: named parts of tensors, and whatever can read them back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A rank's local part of one named tensor."""

    key: str  # `model/layers.0.weight`, `optimizer/layers.0.weight/exp_avg`
    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]  # of this part within the global tensor

    @classmethod
    def whole(cls, key: str, tensor: Tensor) -> "Shard":
        return cls(key, tensor, tuple(tensor.shape), (0,) * tensor.dim())


class TensorSource(Protocol):
    """A checkpoint, as a strategy sees it."""

    @property
    def meta(self) -> Mapping[str, Any]: ...

    @property
    def keys(self) -> Mapping[str, Any]: ...

    def read(
        self, key: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> Tensor: ...
