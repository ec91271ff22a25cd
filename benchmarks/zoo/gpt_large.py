"""A GPT of a size that fills the device with matrix products: where there is little left to gain."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals import Pace, Workload
from benchmarks.zoo.char_gpt import CharGpt

WORDS = "GPT of 1.4 billion weights, 24 layers, width 2,048, 16 heads, 1,024 tokens of 50,304 kinds"


def build(kinds: int = 50_304, length: int = 1024, width: int = 2048, layers: int = 24, heads: int = 16) -> CharGpt:
    """Make a model whose blocks are copies of one another: to draw each would take longer than the steps do."""
    model = CharGpt(kinds, length, width, 1, heads)
    model.blocks.extend(deepcopy(model.blocks[0]) for _ in range(layers - 1))
    return model


def workload(smoke: bool) -> Workload:
    kinds, length, num_samples = (16, 8, 96) if smoke else (50_304, 1024, 512)

    def data() -> tuple[Tensor, ...]:
        return (torch.randint(0, kinds, (num_samples, length + 1), generator=torch.Generator().manual_seed(0)),)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        tokens = batch[0]
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(
        model=lambda: build(16, 8, 8, 2, 2) if smoke else build(),
        loss=loss,
        data=data,
        global_batch=16,
        pace=Pace(2, 2, 2) if smoke else Pace(6, 3, 6),
        job_steps=40 if smoke else 20_000,
    )
