"""A small convolutional network on the 1,797 handwritten digits (8×8) that scikit-learn brings along.

Data and model are small enough to train anywhere in seconds; nothing is downloaded.
"""

import io
import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain.api import Result, export
from drivetrain.config import Config
from drivetrain.core.hook import StepContext
from drivetrain.job import Job, WarmupCosine

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
        global_batch=None if config.batch.size or config.batch.accumulation else 64,
        epochs=config.budget.epochs or 15,
        max_steps=config.budget.max_steps,
        seed=config.run.seed,
        schedule=WarmupCosine(),
        hooks=[ValidAccuracy(valid_images, valid_labels)],
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
    """Training set, validation images and labels. The split is the same for every seed, to compare runs."""
    from sklearn.datasets import load_digits as bundled

    digits = bundled()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, valid = order[NUM_VALID:], order[:NUM_VALID]
    return TensorDataset(images[train], labels[train]), images[valid], labels[valid]


class ValidAccuracy:
    """How many held-out digits are read correctly, after each epoch."""

    every: Literal["epoch"] = "epoch"

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels
        self._by_epoch: dict[str, float] = {}

    @torch.no_grad()
    def __call__(self, context: StepContext) -> None:
        if not context.world.is_main:
            return
        context.model.eval()
        predicted = context.model(self._images.to(context.world.device)).argmax(1).cpu()
        context.model.train()
        accuracy = float((predicted == self._labels).double().mean())
        self._by_epoch[str(context.epoch)] = accuracy
        print(f"            validation accuracy {accuracy:.2%}")
        lines = (json.dumps({"epoch": int(epoch), "valid_accuracy": value}) for epoch, value in self._by_epoch.items())
        (context.folder / "epochs.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def state_dict(self) -> Mapping[str, Any]:
        return self._by_epoch

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._by_epoch = dict(state)


def show(result: Result) -> None:
    """The pictures and words of a finished run, and where they are."""
    folder = result.folder
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = []
    if (folder / "epochs.jsonl").exists():
        epochs = [json.loads(line) for line in (folder / "epochs.jsonl").read_text(encoding="utf-8").splitlines()]
    by_epoch = [list(group) for _, group in groupby(steps, key=lambda row: row["epoch"])]
    losses = [
        sum(row["loss"] * row["num_items"] for row in rows) / sum(row["num_items"] for row in rows) for rows in by_epoch
    ]
    seconds = [sum(row["seconds"] for row in rows) for rows in by_epoch]
    fastest = max(sum(row["samples"] for row in rows) / sum(row["seconds"] for row in rows) for rows in by_epoch)
    export(result)
    _plot(result, losses, [100 * row["valid_accuracy"] for row in epochs], seconds)
    summary = [
        f"optimizer steps       {result.steps}",
        f"compilation           {result.compilation}",
        f"training time         {sum(seconds):.2f} s",
        f"samples per second    {fastest:,.0f} in the fastest epoch",
        f"final loss            {losses[-1]:.4f}",
    ]
    if epochs:
        best = max(epochs, key=lambda row: row["valid_accuracy"])
        summary.append(f"final accuracy        {epochs[-1]['valid_accuracy']:.2%}")
        summary.append(f"best accuracy         {best['valid_accuracy']:.2%} (epoch {best['epoch']})")
        print(f"\n{epochs[-1]['valid_accuracy']:.1%} of the held-out digits are read correctly.")
    (folder / "performance_summary.txt").write_text("\n".join(summary) + "\n", encoding="utf-8")
    print(f"Results are in {folder}:")
    for name, about in (
        ("training_metrics.png", "loss, accuracy and time by epoch"),
        ("performance_summary.txt", "speed and accuracy in words"),
        ("model.safetensors", "the weights, for plain PyTorch"),
        ("steps.jsonl", "every optimizer step"),
        ("checkpoints/", "what an interrupted run goes on from"),
    ):
        print(f"  {name:<24} {about}")


def _plot(result: Result, losses: list[float], accuracies: list[float], seconds: list[float]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    titled = (("training loss", losses), ("validation accuracy (%)", accuracies), ("seconds per epoch", seconds))
    for axis, (title, values) in zip(axes, titled, strict=True):
        axis.plot(range(1, len(values) + 1), values, marker="o", markersize=4)
        axis.set(title=title, xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[2].set_ylim(bottom=0)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    (result.folder / "training_metrics.png").write_bytes(picture.getvalue())
