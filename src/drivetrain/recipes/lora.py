"""Low-rank adapters (LoRA): a frozen layer plus a trained product of two thin ones."""

import re
from typing import Any

from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError

MARK = "lora_"  # part of the name of every adapter weight
ATTENTION = r"(^|\.)(query|key|value|q_proj|k_proj|v_proj|o_proj|out_proj|qkv)$"


class LoraLayer(nn.Module):
    """Computes `base(x) + scale * up(down(x))`; `up` starts at zero, so that training starts from the frozen layer.

    Args:
        base: The layer to adapt, `nn.Linear` or `nn.Conv2d`; it is frozen.
        rank: Width between the two thin layers.
        alpha: The adapter counts `alpha / rank`.
    """

    def __init__(self, base: nn.Linear | nn.Conv2d, rank: int = 8, alpha: float = 32.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        if isinstance(base, nn.Conv2d):
            like: dict[str, Any] = {"stride": base.stride, "padding": base.padding, "dilation": base.dilation}
            self.lora_down: nn.Module = nn.Conv2d(base.in_channels, rank, base.kernel_size, bias=False, **like)  # type: ignore[arg-type]
            up: nn.Conv2d | nn.Linear = nn.Conv2d(rank, base.out_channels, 1, bias=False)
        else:
            self.lora_down = nn.Linear(base.in_features, rank, bias=False)
            up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(up.weight)
        self.lora_up = up

    def forward(self, inputs: Tensor) -> Tensor:
        adapted: Tensor = self.base(inputs) + self.scale * self.lora_up(self.lora_down(inputs))
        return adapted


def add_lora(module: nn.Module, pattern: str, rank: int = 8, alpha: float = 32.0) -> int:
    """Freezes `module`, and wraps its linear and convolution layers whose name matches; returns how many."""
    module.requires_grad_(False)
    names = [
        name
        for name, layer in module.named_modules()
        if (isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1))
        and re.search(pattern, name)
    ]
    if not names:
        raise DrivetrainError(
            f"the backbone has no layer whose name matches {pattern}", remedy="use a backbone with attention layers"
        )
    for name in names:
        parent = module.get_submodule(name.rpartition(".")[0])
        own = name.rpartition(".")[2]
        setattr(parent, own, LoraLayer(getattr(parent, own), rank, alpha))
    return len(names)


def trained_part(state: dict[str, Tensor], frozen_prefix: str) -> dict[str, Tensor]:
    """Returns adapters and everything outside the frozen backbone, such as a projector trained from scratch."""
    return {name: value for name, value in state.items() if not name.startswith(frozen_prefix) or MARK in name}


def load_trained_part(model: nn.Module, state: dict[str, Tensor], frozen_prefix: str) -> None:
    """Loads what `trained_part` kept; anything missing or left over is an error, never a random layer."""
    needed = set(trained_part(model.state_dict(), frozen_prefix))
    missing, unexpected = sorted(needed - set(state)), sorted(set(state) - needed)
    if missing or unexpected:
        raise DrivetrainError(
            f"the adapter does not fit the model: missing {missing[:5]}, left over {unexpected[:5]}",
            remedy="make the model with the settings that the adapter was trained with",
        )
    model.load_state_dict(state, strict=False)
