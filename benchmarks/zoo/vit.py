"""A vision transformer over patches, of the size that is trained most."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals import Pace, Workload
from benchmarks.zoo.char_gpt import Block

WORDS = "ViT-B/16, 86.6 million weights, images of 224 x 224, 1,000 classes"


class VisionTransformer(nn.Module):
    def __init__(
        self, side: int = 224, patch: int = 16, width: int = 768, layers: int = 12, heads: int = 12, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.first.expand(len(images), -1, -1).to(patches.dtype), patches], 1) + self.places
        logits: Tensor = self.head(self.norm(self.blocks(hidden)[:, 0]))
        return logits


def image_workload(
    smoke: bool, model: type[nn.Module], small: dict[str, int], pace: Pace, *, job_steps: int = 20_000
) -> Workload:
    """Return work on images as bytes, made floating point on the device; `small` are the sizes of the tiny model.

    Two epochs of ImageNet are 20,000 steps.
    """
    side, classes, num_samples = (small["side"], small["classes"], 96) if smoke else (224, 1000, 2048)

    def data() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (num_samples, 3, side, side), dtype=torch.uint8, generator=generator)
        return images, torch.randint(0, classes, (num_samples,), generator=generator)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0].float() / 255 - 0.5), batch[1])

    return Workload(
        model=lambda: model(**small) if smoke else model(),
        loss=loss,
        data=data,
        global_batch=16 if smoke else 128,
        pace=Pace(2, 2, 2) if smoke else pace,
        job_steps=40 if smoke else job_steps,
    )


def workload(smoke: bool) -> Workload:
    small = {"side": 16, "patch": 8, "width": 16, "layers": 2, "heads": 2, "classes": 10}
    return image_workload(smoke, VisionTransformer, small, Pace(20, 40, 4), job_steps=200_000)
