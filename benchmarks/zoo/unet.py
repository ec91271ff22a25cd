"""A U-Net for segmentation: convolutions of changing size, with connections across."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals import Pace, Workload

WORDS = "U-Net of 4 levels from 32 channels, images of 128 x 128, 4 classes"
CHANNELS_LAST = True


def twice(inputs: int, outputs: int) -> nn.Sequential:
    first = (nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.SiLU())
    second = (nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.SiLU())
    return nn.Sequential(*first, *second)


class UNet(nn.Module):
    def __init__(self, channels: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        self.down = nn.ModuleList(twice(first, second) for first, second in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(twice(wide + narrow, narrow) for narrow, wide in pairwise(widths))
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level, down in enumerate(self.down):
            images = down(functional.max_pool2d(images, 2) if level else images)
            kept.append(images)
        for level in reversed(range(len(self.up))):
            images = self.up[level](torch.cat([functional.interpolate(images, scale_factor=2.0), kept[level]], 1))
        logits: Tensor = self.head(images)
        return logits


def workload(smoke: bool) -> Workload:
    channels, levels, side, num_samples = (8, 2, 8, 96) if smoke else (32, 4, 128, 2048)

    def data() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(num_samples, 3, side, side, generator=generator)
        return images, torch.randint(0, 4, (num_samples, side, side), generator=generator)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Workload(
        model=lambda: UNet(channels, levels, 4),
        loss=loss,
        data=data,
        global_batch=16 if smoke else 32,
        pace=Pace(2, 2, 2) if smoke else Pace(60, 25, 8),
        job_steps=40 if smoke else 100_000,
    )
