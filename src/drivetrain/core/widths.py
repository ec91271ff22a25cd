"""The widest floating-point numbers of a device, for sums and counts: float64, except where a device has none."""

import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})  # Apple's GPUs


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the type for sums on a device. In float32, counts are exact up to 2**24."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in the widest floating-point numbers of its device."""
    return tensor.to(wide_dtype(tensor.device))
