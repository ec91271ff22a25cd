"""Small jobs for the suites, and the same trained by a plain loop that shares nothing with the trainer."""

import functools
import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drivetrain import Job, LossSum, WarmupCosine
from drivetrain.api.training import train
from drivetrain.checkpoint import Checkpointer
from drivetrain.config import configure
from drivetrain.core.world import World
from drivetrain.data.division import SampleStream

NUM_SAMPLES = 150
VOCABULARY = 11


@dataclass(frozen=True)
class Variant:
    """What a suite varies of a job."""

    kind: str = "mlp"  # or "transformer"
    dtype: torch.dtype = torch.float64
    global_batch: int = 32
    steps: int = 8  # with 150 samples, an epoch and part of a second; the first 5 warm up
    dropout: float = 0.0
    noisy_items: bool = False
    num_samples: int = NUM_SAMPLES
    seed: int = 3
    save_every: int | None = None
    num_layers: int = 2  # of a transformer


class Vectors(Dataset[Any]):
    def __init__(self, variant: Variant) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(variant.num_samples, 6, generator=generator, dtype=torch.float64).to(variant.dtype)
        self.labels = torch.randint(0, 4, (variant.num_samples,), generator=generator)
        self.noisy = variant.noisy_items

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.inputs[index]
        if self.noisy:
            image = (
                image * (1 + 0.1 * random.random()) + 0.1 * np.random.random() + 0.1 * torch.rand(6, dtype=image.dtype)
            )
        return image, self.labels[index]


class Sentences(Dataset[Any]):
    """Token sequences of unequal length, padded with -1 in the targets."""

    def __init__(self, variant: Variant) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, VOCABULARY, (variant.num_samples, 10), generator=generator)
        self.lengths = torch.randint(1, 10, (variant.num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.tokens[index, :-1].clone(), self.tokens[index, 1:].clone()
        targets[self.lengths[index] :] = -1
        return inputs, targets


class Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


class Transformer(nn.Module):
    def __init__(self, dropout: float, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=tokens.device, dtype=self.out.weight.dtype
        )
        result: Tensor = self.out(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))
        return result


def vector_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def token_loss(model: nn.Module, batch: Any) -> LossSum:
    inputs, targets = batch
    logits = model(inputs).flatten(0, 1)
    total = functional.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")
    return LossSum(total, (targets >= 0).sum())


def make_model(variant: Variant) -> nn.Module:
    made = Mlp(variant.dropout) if variant.kind == "mlp" else Transformer(variant.dropout, variant.num_layers)
    return made.to(variant.dtype)


def make_job(variant: Variant, name: str = "suite", **changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": name,
        "model": lambda: make_model(variant),
        "data": Vectors(variant) if variant.kind == "mlp" else Sentences(variant),
        "loss": vector_loss if variant.kind == "mlp" else token_loss,
        "optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        "global_batch": variant.global_batch,
        "max_steps": variant.steps,
        "seed": variant.seed,
        "schedule": WarmupCosine(warmup_steps=5, floor=0.1),
        "clip_norm": 0.5,
        "weight_decay": 0.1,
        "checkpoint_every": variant.save_every or variant.steps,
    }
    return Job(**{**values, **changes})


@dataclass(frozen=True)
class Trained:
    """What a run came to, in a form that travels between processes and compares exactly."""

    losses: list[float]
    rows: list[dict[str, Any]]  # of steps.jsonl, times aside
    weights: dict[str, Any]  # numpy
    state: dict[str, Any]  # optimizer's, numpy
    resumed_from: int


def run(
    folder: str,
    variant: Variant,
    micro_batch: int | None = None,
    num_workers: int = 0,
    gpu_mode: str = "cpu",
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> Trained | None:
    """Train in this world (of one, or the process group that is there). The main rank returns what came of it."""
    # Drawing takes longer than these runs do. Many loss functions of the suites count their calls: those of the probe
    # that asks what kind of loss it is are left out.
    given = {"report": False, "loss_weighting": "samples", **(settings or {})}
    config = configure(output_dir=folder, gpu_mode=gpu_mode, num_workers=num_workers, batch_size=micro_batch, **given)
    result = train(make_job(variant, **changes), config, quiet=True)
    return read(result.folder, result.resumed_from) if result.is_main else None


def read(folder: Path, resumed_from: int = 0) -> Trained:
    import json

    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    clips = "clip_norm: null" not in (folder / "job.yaml").read_text()
    for row in rows:
        del row["seconds"]
        if not clips:
            del row["grad_norm"]  # how often it is recorded depends on how long it takes
    checkpoint = Checkpointer(folder / "checkpoints", World()).latest()
    assert checkpoint is not None
    tensors = {key: checkpoint.read(key).numpy() for key in checkpoint.keys}
    return Trained(
        losses=[row["loss"] for row in rows],
        rows=rows,
        weights={key: value for key, value in tensors.items() if key.startswith("model/")},
        state={key: value for key, value in tensors.items() if not key.startswith("model/")},
        resumed_from=resumed_from,
    )


@functools.cache
def plain_loop(variant: Variant, left_out: Collection[int] = frozenset()) -> tuple[list[float], dict[str, Any]]:
    """The same job as anybody would write it: whole batches, one device, nothing of the trainer.

    The updates of some steps, from 1, may be left out; their losses are nan.
    """
    data: Any = Vectors(variant) if variant.kind == "mlp" else Sentences(variant)
    torch.manual_seed(variant.seed)
    model = make_model(variant)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    losses: list[float] = []
    epoch = 0
    while len(losses) < variant.steps:
        order = SampleStream(variant.num_samples, variant.seed).samples(epoch, 0, variant.num_samples).tolist()
        for start in range(0, variant.num_samples, variant.global_batch):
            step = len(losses)
            if step == variant.steps:
                break
            if step + 1 in left_out:
                losses.append(math.nan)
                continue
            items = [data[index] for index in order[start : start + variant.global_batch]]
            first, second = (torch.stack(column) for column in zip(*items, strict=True))
            optimizer.zero_grad()
            if variant.kind == "mlp":
                loss = functional.cross_entropy(model(first), second)
            else:
                kept = second >= 0
                loss = functional.cross_entropy(model(first)[kept], second[kept])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 5) / (variant.steps - 5)))
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * ((step + 1) / 5 if step < 5 else cosine)
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return losses, {f"model/{name}": value.numpy() for name, value in model.state_dict().items()}
