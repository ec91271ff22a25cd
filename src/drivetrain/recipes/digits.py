"""A small convolutional network on the 1,797 handwritten digits (8×8) that scikit-learn brings along.

Data and model are small enough to train anywhere in seconds; nothing is downloaded.
"""

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain.api.training import Result, export
from drivetrain.config import Config
from drivetrain.core.schedules import WarmupCosine
from drivetrain.job import Job
from drivetrain.recipes.recipe import Recipe

NUM_VALID = 360  # of 1,797: one fifth


def job(config: Config) -> Job:
    train_set, valid_images, valid_labels = load_digits()
    rate = config.optimizer.learning_rate or 3e-3
    return Job(
        name="digits",
        model=DigitNet,
        data=train_set,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        global_batch=None if config.batch_asked.is_set else 64,
        default_batch=64,
        epochs=config.budget.epochs or 15,
        max_steps=config.budget.max_steps,
        seed=config.run.seed,
        schedule=WarmupCosine(),
        valid=TensorDataset(valid_images, valid_labels),
        metrics={"accuracy": accuracy},
    )


class DigitNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = functional.relu(self.first(images))
        features = functional.max_pool2d(functional.relu(self.second(features)), 2)
        logits: Tensor = self.out(functional.relu(self.hidden(features.flatten(1))))
        return logits


def load_digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return training set, validation images and labels. The split is the same for every seed, to compare runs."""
    rows = _bundled()
    images = rows[:, :64].reshape(-1, 1, 8, 8).float() / 16
    labels = rows[:, 64].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, valid = order[NUM_VALID:], order[:NUM_VALID]
    return TensorDataset(images[train], labels[train]), images[valid], labels[valid]


def _bundled() -> Tensor:
    """Return rows of 64 pixels and a label. Reads scikit-learn's file directly: importing it takes two seconds."""
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin if package and package.origin else "").parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():  # another version may keep it elsewhere
        from sklearn.datasets import load_digits as loaded

        digits = loaded()
        return torch.tensor([[*row, label] for row, label in zip(digits.data, digits.target, strict=True)])
    with gzip.open(file, "rt") as lines:
        return torch.from_numpy(np.loadtxt(lines, delimiter=","))


def accuracy(logits: Tensor, batch: list[Tensor]) -> Tensor:
    """Mark the digits that are read correctly."""
    return logits.argmax(1) == batch[1]


def show(result: Result) -> None:
    """Print what the run reached, and where its files are."""
    folder = result.folder
    export(result)
    if result.metrics:
        print(f"\n{result.metrics['valid_accuracy']:.1%} of the held-out digits are read correctly.")
    print(f"Results are in {folder}:")
    for name, about in (
        ("report.html", "all of it on one page"),
        ("training_metrics.png", "loss, accuracy and time by epoch"),
        ("performance_summary.txt", "speed and accuracy in words"),
        ("model.safetensors", "the weights, for plain PyTorch"),
        ("steps.jsonl", "every optimizer step"),
        ("checkpoints/", "what an interrupted run goes on from"),
    ):
        if (folder / name).exists():  # a picture is drawn of longer runs, or by `drivetrain report`
            print(f"  {name:<24} {about}")


RECIPE = Recipe(make=job, about="a small network on handwritten digits", show=show)
