"""ResNet-50 in plain torch: bottleneck blocks with the stride in the 3 × 3 convolution, batch normalization."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce, self.norm_1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.spatial = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        self.expand, self.norm_3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.norm_1(self.reduce(images)))
        hidden = functional.relu(self.norm_2(self.spatial(hidden)))
        return functional.relu(self.norm_3(self.expand(hidden)) + self.short(images))


class ResNet50(nn.Module):
    """Takes images as bytes, as they come from a decoder, and normalises them where it computes."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([123.7, 116.3, 103.5]).view(1, 3, 1, 1))
        self.register_buffer("deviation", torch.tensor([58.4, 57.1, 57.4]).view(1, 3, 1, 1))
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stages.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not number else 1))
                inputs = 4 * width * 2**stage
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        mean, deviation = cast(Tensor, self.mean), cast(Tensor, self.deviation)
        hidden = (images.to(mean.dtype) - mean) / deviation
        hidden = functional.max_pool2d(functional.relu(self.norm(self.stem(hidden))), 3, 2, 1)
        result: Tensor = self.head(self.stages(hidden).mean((2, 3)))
        return result


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])
