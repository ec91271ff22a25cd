"""A ConvNeXt: wide depthwise convolutions between products over channels."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals import Pace, Workload
from benchmarks.zoo.vit import image_workload

WORDS = "ConvNeXt-T, 28.6 million weights, images of 224 x 224, 1,000 classes"
CHANNELS_LAST = True


class ChannelNorm(nn.LayerNorm):
    """Normalizes the channels of each pixel of images that have their channels before rows and columns."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, images: Tensor) -> Tensor:
        pixels = self.norm(self.depthwise(images).permute(0, 2, 3, 1))
        change = self.scale * self.narrow(functional.gelu(self.wide(pixels)))
        return images + change.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self, width: int = 96, depth: int = 3, classes: int = 1000, side: int = 224) -> None:
        """Makes four stages, the third of three times the depth; any `side` that 32 divides will do."""
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6)]
        for stage, blocks in enumerate((depth, depth, 3 * depth, depth)):
            channels = width * 2**stage
            if stage:
                stages += [ChannelNorm(channels // 2, eps=1e-6), nn.Conv2d(channels // 2, channels, 2, 2)]
            stages += [Block(channels) for _ in range(blocks)]
        self.stages = nn.Sequential(*stages)
        self.norm, self.head = nn.LayerNorm(8 * width, eps=1e-6), nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.stages(images).mean((2, 3))))
        return logits


def workload(smoke: bool) -> Workload:
    return image_workload(smoke, ConvNext, {"width": 8, "depth": 1, "classes": 10, "side": 32}, Pace(12, 40, 4))
