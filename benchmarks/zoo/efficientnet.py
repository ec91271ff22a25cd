"""An EfficientNet: narrow and depthwise convolutions, each with batch normalization, so that memory is the limit."""

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals import Pace, Workload
from benchmarks.zoo.vit import image_workload

WORDS = "EfficientNet-B0, 5.3 million weights, images of 224 x 224, 1,000 classes; no stochastic depth"
CHANNELS_LAST = True
EAGER_SECONDS, COMPILED_SECONDS = 180, 300  # cuDNN tries all it has for each of its many convolutions
# How much wider inside, channels, blocks, stride of the first block, side of the kernel.
STAGES = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
          (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))  # fmt: skip


def normed(inputs: int, outputs: int, side: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, side, stride, side // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Widens, convolves each channel, weighs the channels by their means, and narrows."""

    def __init__(self, inputs: int, outputs: int, factor: int, stride: int, side: int) -> None:
        super().__init__()
        inside, few = inputs * factor, max(1, inputs // 4)
        self.is_added = stride == 1 and inputs == outputs
        self.widen = nn.Sequential(normed(inputs, inside), nn.SiLU()) if factor > 1 else nn.Identity()
        self.depthwise = nn.Sequential(normed(inside, inside, side, stride, groups=inside), nn.SiLU())
        self.squeeze, self.excite = nn.Conv2d(inside, few, 1), nn.Conv2d(few, inside, 1)
        self.narrow = normed(inside, outputs)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.depthwise(self.widen(images))
        weights = self.excite(functional.silu(self.squeeze(hidden.mean((2, 3), keepdim=True)))).sigmoid()
        changed: Tensor = self.narrow(hidden * weights)
        return images + changed if self.is_added else changed


class EfficientNet(nn.Module):
    def __init__(self, divided_by: int = 1, classes: int = 1000, side: int = 224) -> None:
        """Makes B0 with its channels divided by a number; any `side` that 32 divides will do."""
        super().__init__()
        inputs = 32 // divided_by
        blocks: list[nn.Module] = [normed(3, inputs, 3, 2), nn.SiLU()]
        for factor, channels, count, stride, kernel in STAGES:
            outputs = channels // divided_by
            for number in range(count):
                blocks.append(Block(inputs, outputs, factor, 1 if number else stride, kernel))
                inputs = outputs
        last = 1280 // divided_by
        self.features = nn.Sequential(*blocks, normed(inputs, last), nn.SiLU())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits


def workload(smoke: bool) -> Workload:
    return image_workload(smoke, EfficientNet, {"divided_by": 8, "classes": 10, "side": 32}, Pace(16, 40, 4))
