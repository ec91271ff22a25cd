"""The jobs of `same_results`: `python same_results_jobs.py NAME FOLDER [interrupted]`, by whatever drivetrain is found.

An interrupted run kills itself in its ninth step and so ends with code 9.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import drivetrain as dt
from drivetrain.moe import MixtureOfExperts

STEPS, KILLED_IN = 14, 9


class Numbered(Dataset[Any]):
    """Samples that write down when they are asked for."""

    def __init__(self, folder: Path, *columns: Tensor) -> None:
        self.columns, self.log = columns, folder / "samples.txt"

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        return tuple(column[index] for column in self.columns)


class Words(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.out(self.layers(self.words(tokens)))
        return result


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.experts = MixtureOfExperts(16, 32, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.experts(functional.relu(self.first(inputs))))
        return result


def vectors(folder: Path) -> Numbered:
    generator = torch.Generator().manual_seed(0)
    return Numbered(folder, torch.randn(90, 6, generator=generator), torch.randint(0, 3, (90,), generator=generator))


def sentences(folder: Path) -> Numbered:
    tokens = torch.randint(0, 20, (90, 11), generator=torch.Generator().manual_seed(1))
    return Numbered(folder, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def classes(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def tokens(model: nn.Module, batch: Any) -> Any:
    total = functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
    return dt.LossSum(total, batch[1].numel())


def parts(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    found = model(batch[0])
    return {"class": functional.cross_entropy(found, batch[1]), "size": found.square().mean()}


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


def job(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the job of a name, and its settings."""
    common: dict[str, Any] = {"name": "run", "global_batch": 16, "max_steps": STEPS, "checkpoint_every": 4, "seed": 5}
    common |= {"clip_norm": 1.0}  # how often the gradient norm is recorded otherwise depends on how long it takes
    small, texts = vectors(folder), sentences(folder)
    known: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "whole-batches": ({"model": perceptron, "data": small, "loss": classes, "optimizer": adam}, {}),
        "micro-batches": (
            {
                "model": lambda: Words(0.1),
                "data": texts,
                "loss": tokens,
                "optimizer": adam,
                "ema": 0.9,
            },
            {"batch_size": 5},
        ),
        "validated": (
            {"model": Words, "data": texts, "valid": texts, "loss": tokens, "optimizer": momentum, "valid_every": 5},
            {"num_workers": 1, "batch_size": 8},
        ),
        "named-parts": (
            {
                "model": lambda: nn.Linear(6, 3),
                "data": small,
                "loss": parts,
                "loss_weights": {"class": 1.0, "size": 0.1},
                "optimizer": adam,
            },
            {"batch_size": 6},
        ),
        "experts": ({"model": Experts, "data": small, "loss": classes, "optimizer": adam}, {"batch_size": 8}),
        "compiled": ({"model": Words, "data": texts, "loss": tokens, "optimizer": adam}, {"compile": True}),
    }
    made, settings = known[name]
    return dt.Job(**common, **made), settings


NAMES = ("whole-batches", "micro-batches", "validated", "named-parts", "experts", "compiled")


class Kill:
    """Ends the process as a kill would, in the middle of a step."""

    def __init__(self, loss: Any) -> None:
        self.loss, self.seen = loss, 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if model.training:
            self.seen += len(batch[0])
        if self.seen > 16 * KILLED_IN:
            os._exit(9)
        return self.loss(model, batch)


def main() -> None:
    name, folder, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if name == "names":
        print(" ".join(NAMES))
        return
    folder.mkdir(parents=True, exist_ok=True)
    made, settings = job(name, folder)
    if how:
        made = replace(made, loss=Kill(made.loss))
    (folder / "samples.txt").unlink(missing_ok=True)
    given = {"output_dir": folder, "report": False, "num_threads": 1, "auto_optimize": False, **settings}
    dt.train(made, dt.configure(**given), quiet=True)


if __name__ == "__main__":
    main()
