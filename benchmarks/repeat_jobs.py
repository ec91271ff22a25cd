"""Jobs whose steps may not repeat on a GPU: `drivetrain plan benchmarks.repeat_jobs:gpt2 --measure`, or `train`."""

import os
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from benchmarks.gpt2 import CONTEXT, VOCABULARY, Gpt2, loss_of
from drivetrain import Job

# DRIVETRAIN_SMOKE: sizes that run anywhere, to see that it runs.
IS_SMALL = bool(os.environ.get("DRIVETRAIN_SMOKE"))
STEPS = int(os.environ.get("REPEAT_STEPS", "400"))
WORDS, LENGTH = 2000, 16 if IS_SMALL else 128


def _job(name: str, model: Any, data: TensorDataset, batch: int, loss: Any) -> Job:
    return Job(
        name=name,
        model=model,
        data=data,
        loss=loss,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-4),
        global_batch=batch,
        max_steps=STEPS,
        checkpoint_every=50,
        clip_norm=1.0,
    )


def _texts(count: int, length: int, words: int) -> TensorDataset:
    text = torch.randint(0, words, (count, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def gpt2() -> Job:
    """GPT-2 124M: an embedding that is used twice, and attention."""
    if IS_SMALL:
        model, data, batch = (lambda: Gpt2(32, 2, 2, LENGTH, WORDS)), _texts(32, LENGTH, WORDS), 8
    else:
        model, data, batch = Gpt2, _texts(512, CONTEXT, VOCABULARY), 64
    return _job("gpt2", model, data, batch, loss_of)


class Lstm(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 256)
        self.layers = nn.LSTM(256, 256, 2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(256, WORDS)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.layers(self.words(inputs))[0])
        return result


def lstm() -> Job:
    return _job("lstm", Lstm, _texts(4096, LENGTH, WORDS), 8 if IS_SMALL else 64, loss_of)


class Transformer(nn.Module):
    """Dropout everywhere, also inside attention, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(256, WORDS)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.layers(self.words(inputs)))
        return result


def transformer() -> Job:
    return _job("transformer", Transformer, _texts(4096, LENGTH, WORDS), 8 if IS_SMALL else 64, loss_of)


def _block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def _cnn() -> nn.Module:
    widths = (3, 16, 16) if IS_SMALL else (3, 64, 64, 128, 128, 256, 256, 512)
    blocks = [_block(a, b, 1 + (b > a > 3)) for a, b in pairwise(widths)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(widths[-1], 100))


def _loss_of_images(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def cnn() -> Job:
    """Convolutions, which cuDNN chooses by timing."""
    generator = torch.Generator().manual_seed(0)
    count = 64 if IS_SMALL else 2048
    data = TensorDataset(
        torch.randn(count, 3, 32, 32, generator=generator), torch.randint(0, 100, (count,), generator=generator)
    )
    return _job("cnn", _cnn, data, 8 if IS_SMALL else 256, _loss_of_images)
