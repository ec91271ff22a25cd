"""Compares two images: is the first better, the second, or are they similar? The answer must not depend on the order.

`drivetrain train image-pairs` learns from generated images; `--data pairs.csv` from files of your own; `--backbone
FOLDER` freezes a backbone and trains low-rank adapters on it.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.api.training import Result, export
from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.schedules import WarmupCosine
from drivetrain.job import Job
from drivetrain.recipes import pair_data
from drivetrain.recipes.facts import RecipeFacts, facts_of
from drivetrain.recipes.lora import ATTENTION, add_lora, trained_part
from drivetrain.recipes.pair_data import LABELS, SWAPPED, Pairs
from drivetrain.recipes.recipe import Recipe

NO_SWAP_LOSS, BOTH_ORDERS = "no-swap-loss", "both-orders"
ADAPTER = "adapter.safetensors"
BACKBONE = "backbone."


@dataclass(frozen=True)
class PairSize:
    """The sizes of data and model. The small one takes a minute on two cores."""

    num_images: int
    image: int  # pixels across
    num_train: int
    num_valid: int
    width: int
    batch: int
    epochs: int


SIZES = {"small": PairSize(600, 24, 4000, 1000, 16, 64, 8), "full": PairSize(5500, 224, 45_000, 10_000, 64, 256, 10)}


def job(config: Config) -> Job:
    size, baseline = SIZES[config.recipe.size], config.recipe.baseline
    if baseline not in (None, NO_SWAP_LOSS, BOTH_ORDERS):
        allowed = f"{NO_SWAP_LOSS}, {BOTH_ORDERS}"
        raise ConfigError([Problem("--baseline", "image-pairs has no such", baseline, allowed=allowed)])
    backbone = find_backbone(config.recipe.backbone, size)
    train, valid, lines, known = _pairs(config, size, backbone.image)
    batch = min(size.batch, len(train))
    epochs, asked = config.budget.epochs or size.epochs, config.batch_asked
    per_step = (asked.size or batch) * (asked.accumulation or 1)
    num_steps = min(config.budget.max_steps or 10**9, epochs * -(-len(train) // per_step))
    most, both = 0.0 if baseline else config.recipe.swap_weight, baseline == BOTH_ORDERS
    rate = config.optimizer.learning_rate or 2e-3
    return Job(
        name="image-pairs" if baseline is None else f"image-pairs-{baseline}",
        model=lambda: PairModel(backbone),
        data=train,
        valid=valid,
        loss=lambda model, batch: pair_loss(model(batch[0], batch[1]), batch[2], both),
        loss_weights={"label": 1.0, "swap": lambda step: most * ramp(step, num_steps)},
        metrics={"accuracy": accuracy, "swap_consistency": swap_consistency},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        global_batch=None if asked.is_set else batch,
        default_batch=batch,
        epochs=epochs,
        max_steps=config.budget.max_steps,
        seed=config.run.seed,
        schedule=WarmupCosine(warmup_steps=num_steps // 20),
        clip_norm=1.0,
        weight_decay=0.01,
        hooks=[RecipeFacts(lines, **known)],
    )


def ramp(step: int, num_steps: int) -> float:
    """Returns the part of the swap loss that counts: a quarter at first, all of it from half of the job on."""
    return 0.25 + 0.75 * min(1.0, step / max(1, num_steps // 2))


def pair_loss(logits: Tensor, labels: Tensor, both_orders: bool = False) -> dict[str, Tensor]:
    """Returns cross-entropy in the order as listed, and the swap loss: how far the answers in both orders disagree.

    The swap loss is the symmetric KL divergence between the prediction for (a, b) and that for (b, a), swapped back.
    """
    label = functional.cross_entropy(logits[:, 0], labels)
    if both_orders:
        swapped = torch.tensor(SWAPPED, device=labels.device)[labels]
        label = (label + functional.cross_entropy(logits[:, 1], swapped)) / 2
    return {"label": label, "swap": symmetric_kl(logits[:, 0], logits[:, 1][:, list(SWAPPED)]).mean()}


def symmetric_kl(logits: Tensor, others: Tensor) -> Tensor:
    """Returns (KL(p, q) + KL(q, p)) / 2 of each row."""
    p, q = logits.float().log_softmax(-1), others.float().log_softmax(-1)
    return ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2


def accuracy(logits: Tensor, batch: list[Tensor]) -> Tensor:
    return logits[:, 0].argmax(1) == batch[2]


def swap_consistency(logits: Tensor, batch: list[Tensor]) -> Tensor:
    """Returns whether the answer for (b, a) is that for (a, b) with first and second exchanged."""
    said = logits.argmax(2)
    return said[:, 0] == torch.tensor(SWAPPED, device=said.device)[said[:, 1]]


class PairModel(nn.Module):
    """Compares the projected features of two images in both orders.

    It returns logits of (pairs, 2 orders, 3 labels).
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, backbone: "PairBackbone", projected: int = 64) -> None:
        super().__init__()
        self.backbone = backbone.make()
        self.projector = nn.Sequential(nn.Linear(backbone.width, projected), nn.GELU(), nn.Linear(projected, projected))
        self.head = nn.Sequential(nn.Linear(2 * projected, 64), nn.ReLU(), nn.Linear(64, len(LABELS)))
        self.register_buffer("mean", torch.tensor(backbone.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(backbone.deviation).view(1, 3, 1, 1), persistent=False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        pixels = (torch.cat([first, second]).float() / 255 - self.mean) / self.deviation
        a, b = self.projector(self.backbone(pixels)).chunk(2)
        orders = torch.stack([torch.cat([a, b], dim=1), torch.cat([b, a], dim=1)], dim=1)
        logits: Tensor = self.head(orders)
        return logits


class SmallBackbone(nn.Module):
    """Three convolutions that halve the image, averaged."""

    def __init__(self, width: int) -> None:
        super().__init__()
        channels = (3, width, 2 * width, 4 * width)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(channels))

    def forward(self, pixels: Tensor) -> Tensor:
        for layer in self.layers:
            pixels = functional.relu(layer(pixels))
        return pixels.mean((2, 3))


class HuggingFaceBackbone(nn.Module):
    """A vision model of transformers; its features are the mean over places."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        model = _transformers().AutoModel.from_pretrained(folder, local_files_only=True)
        self.model = getattr(model, "vision_model", model)  # of models for images and text, the half for images

    def forward(self, pixels: Tensor) -> Tensor:
        hidden: Tensor = self.model(pixel_values=pixels).last_hidden_state
        return hidden.mean(1) if hidden.dim() == 3 else hidden.mean((2, 3))


@dataclass(frozen=True)
class PairBackbone:
    """Makes features of images: trained with the rest, or frozen under low-rank adapters."""

    image: int
    width: int
    path: Path | None = None  # where its weights are; None: trained from scratch
    is_hugging_face: bool = False
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)

    def make(self) -> nn.Module:
        if self.path is None:
            return SmallBackbone(self.width // 4)
        if self.is_hugging_face:
            model: nn.Module = HuggingFaceBackbone(self.path)
            add_lora(model, ATTENTION)
            return model
        model = SmallBackbone(self.width // 4)
        state = {
            name.removeprefix(BACKBONE): value
            for name, value in load_file(self.path).items()
            if name.startswith(BACKBONE)
        }
        model.load_state_dict(state)
        add_lora(model, "layers")
        return model


def find_backbone(path: Path | None, size: PairSize) -> PairBackbone:
    """Finds out what `--backbone` is: a folder of Hugging Face's, a run of this recipe, or its exported weights."""
    if path is None:
        return PairBackbone(size.image, 4 * size.width)
    if (path / "config.json").is_file():
        return _hugging_face(path, size)
    weights = path / "model.safetensors" if path.is_dir() else path
    if weights.suffix == ".safetensors" and weights.is_file():
        shapes = {name: value.shape for name, value in load_file(weights).items() if name.startswith(BACKBONE)}
        last = shapes.get(f"{BACKBONE}layers.2.weight")
        if last is not None:
            return PairBackbone(size.image, last[0], weights)
    allowed = (
        "a folder with config.json of Hugging Face's, a run of image-pairs without --backbone, or its model.safetensors"
    )
    raise ConfigError([Problem("--backbone", f"{path} is none", str(path), allowed=allowed)])


def _hugging_face(folder: Path, size: PairSize) -> PairBackbone:
    config = _transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    config = getattr(config, "vision_config", config)
    found = folder / "preprocessor_config.json"
    said = json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}
    width = getattr(config, "hidden_size", None) or config.hidden_sizes[-1]
    image = getattr(config, "image_size", None) or size.image
    half = (0.5, 0.5, 0.5)
    return PairBackbone(
        image, width, folder, True, tuple(said.get("image_mean") or half), tuple(said.get("image_std") or half)
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise DrivetrainError(
            "--backbone names a folder of Hugging Face's, and transformers is not installed",
            remedy="pip install 'drivetrain[hf]'",
        ) from None
    return transformers


def _pairs(config: Config, size: PairSize, image: int) -> tuple[Pairs, Pairs, list[str], dict[str, Any]]:
    """Returns pairs to learn from, held-out pairs, what is to be said of them, and what is to be recorded."""
    counts, fold, known = (size.num_train, size.num_valid), config.recipe.fold, {}
    if config.data.path is not None:
        train, valid, left_out = pair_data.read_pairs(
            config.data.path, image, config.recipe.similar_within, fold, counts
        )
    else:
        images, scores, ratings = pair_data.generate(size.num_images, image)
        train, valid = pair_data.draw_pairs(images, ratings, pair_data.SIMILAR_WITHIN, fold, counts)
        train, left_out = pair_data.better_first(train), 0
        known = {"ceiling": pair_data.ceiling(scores, valid)}
    lines = [
        f"data: {len(train):,} pairs to learn from and {len(valid):,} of fold {fold}, of {len(train.images):,} images; "
        "no image is on both sides"
    ]
    if left_out:
        lines.append(f"data: {left_out:,} pairs are left out: one image is in fold {fold}, and the other is not")
    return train, valid, lines, {"fold": fold, "pairs_left_out": left_out, **known}


def show(result: Result) -> None:
    """Prints accuracy and consistency beside what can be reached; writes the weights, and what was trained of them."""
    facts, weights = facts_of(result.folder), load_file(export(result))
    if result.metrics:
        print(f"\n{result.metrics['valid_accuracy']:.1%} of the held-out pairs are labeled correctly.")
        print(f"{result.metrics['valid_swap_consistency']:.1%} get the same answer in both orders.")
    if "ceiling" in facts:
        print(f"At most {facts['ceiling']:.1%} can be expected to be labeled correctly: ratings have noise.")
    if any("lora_" in name for name in weights):
        save_file(trained_part(weights, BACKBONE), result.folder / ADAPTER)
        print(f"Adapter, projector and head are in {result.folder / ADAPTER}.")
    print(f"Weights are in {result.folder / 'model.safetensors'}.")


RECIPE = Recipe(
    make=job,
    about="which of two images is better, in whatever order",
    show=show,
    reads=(
        "data.path",
        "recipe.size",
        "recipe.baseline",
        "recipe.backbone",
        "recipe.fold",
        "recipe.swap_weight",
        "recipe.similar_within",
    ),
)
