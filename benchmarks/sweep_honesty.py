"""How often `drivetrain compare` finds a difference that is not there, and how many runs it takes to find a small one.

A small network with dropout on scikit-learn's digits, 46 steps, all runs in one process. Up to four runs of a seed:

- base;
- null: every forward draws one more random number, so that dropout drops others. Nothing is better or worse;
- gain: a learning rate 0.5 % higher, which lowers the validation loss by about 0.5 %;
- gain and null: both at once, as a real change disturbs the draws, too.

False wins: 200 comparisons of base with null, each of 12 pairs, looked at after every pair. All pairs are dealt out in
random order, and again when they are used up. The same with pairs of base runs of different seeds, which nothing but
chance tells apart.

Runs to find the gain: pairs of the seeds that have all four runs are drawn, with repetition, until there is a verdict,
500 times over; four of five comparisons have one by the figure given. An unpaired test gets the runs that a t-test
needs to find the gain in four of five cases, by the measured spread; it is planned for that number, and may not be
looked at before. For both, the gain is set to 0.5 % exactly: all differences are moved by what the mean is off.
"""

import math
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.recipes.digits import load_digits
from drivetrain.report.paired_test import evidence

COMPARISONS, PAIRS = 200, 12
SEEDS, SEEDS_OF_GAINS = 900, 300
SEARCHES, MOST_PAIRS, OFTEN = 500, 2000, 0.8
RATE, GAIN = 0.01, 1.005
PLANTED = 0.005  # of the validation loss
NEEDED = 20  # evidence, for 95 % confidence
QUIET = {"report": False, "auto_optimize": False, "monitor_gpu": False, "log_every": 0}


class Network(nn.Module):
    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.05), nn.Linear(32, 10)
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        if self.draws and self.training:
            torch.rand(1)
        logits: Tensor = self.layers(images)
        return logits


def make_job(seed: int, *, gains: bool, draws: bool, name: str = "") -> dt.Job:
    train_set, images, labels = load_digits()
    rate = RATE * (GAIN if gains else 1)
    return dt.Job(
        name=name or f"{'gain' if gains else 'base'}{'-null' if draws else ''}-{seed}",
        model=lambda: Network(draws),
        data=train_set,
        valid=TensorDataset(images, labels),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        schedule=dt.WarmupCosine(),
        global_batch=64,
        epochs=2,
        seed=seed,
    )


ARMS = {"base": (False, False), "null": (False, True), "gain": (True, False), "gain and null": (True, True)}


def losses(seeds: Sequence[int], arms: Sequence[str], folder: Path) -> dict[str, list[float]]:
    """Train some arms with each seed; return their validation losses."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    config = dt.configure(output_dir=str(folder), **QUIET)
    for seed in seeds:
        for name in arms:
            gains, draws = ARMS[name]
            result = dt.train(make_job(seed, gains=gains, draws=draws), config, quiet=True)
            found[name].append(result.metrics["valid_loss"])
            shutil.rmtree(result.folder)
    return found


def false_wins(pairs: np.ndarray, rng: np.random.Generator, comparisons: int = COMPARISONS) -> int:
    """Return in how many comparisons some look finds a difference."""
    dealt = np.concatenate([rng.permutation(pairs) for _ in range(-(-comparisons * PAIRS // len(pairs)))])
    blocks = dealt[: comparisons * PAIRS].reshape(comparisons, PAIRS)
    return sum(bool(evidence(block).max() >= NEEDED) for block in blocks)


def pairs_to_find(pairs: np.ndarray, rng: np.random.Generator) -> float:
    """Return the number of pairs by which most comparisons have a verdict, stopping at the first."""
    needed = []
    for _ in range(SEARCHES):
        found = np.flatnonzero(evidence(rng.choice(pairs, size=MOST_PAIRS)) >= NEEDED)
        needed.append(found[0] + 1 if len(found) else MOST_PAIRS)
    return float(np.quantile(needed, OFTEN))


def unpaired_runs(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the runs of both arms together that a planned t-test needs, by the normal approximation."""
    variance = statistics.variance(one) + statistics.variance(other)
    gain = statistics.mean(other) - statistics.mean(one)
    return 2.0 * math.ceil(variance * (1.96 + 0.8416) ** 2 / gain**2)


def measure(num_seeds: int = SEEDS, seeds_of_gains: int = SEEDS_OF_GAINS) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        found = losses(range(num_seeds), ["base", "null"], Path(folder))
        found |= losses(range(seeds_of_gains), ["gain", "gain and null"], Path(folder))
    return figures(found)


def figures(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return what the losses of all arms show."""
    rng = np.random.default_rng(0)
    base = np.array(found["base"])
    by_chance = np.roll(base, 1) - base
    told: dict[str, list[float]] = {
        "seeds": [len(base)],
        f"false wins of {COMPARISONS}, other draws of dropout": [false_wins(np.array(found["null"]) - base, rng)],
        f"false wins of {COMPARISONS}, other seeds": [false_wins(by_chance, rng)],
    }
    for arm in ("gain", "gain and null"):
        values = np.array(found[arm])
        same = base[: len(values)]
        wanted = values - values.mean() + same.mean() * (1 - PLANTED)
        told |= {
            f"{arm}: change of the loss (%)": [float(100 * (values.mean() - same.mean()) / same.mean())],
            f"{arm}: correlation of pairs": [float(np.corrcoef(same, values)[0, 1])],
            f"{arm}: runs to find it, paired and looked at after each": [2 * pairs_to_find(wanted - same, rng)],
            f"{arm}: runs to find it, unpaired and planned": [unpaired_runs(list(same), list(wanted))],
        }
    return told
