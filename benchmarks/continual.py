"""What `drivetrain continual` finds over five seeds; and a mixture that grows against a fixed one.

Comparisons go on where they were cut short: their runs are kept under `runs/benchmarks`.
"""

import json
from functools import partial
from pathlib import Path

import torch
from studies.continual.comparison import FILE, MethodOutcome
from studies.continual.data import load_images
from studies.continual.diary import accuracy
from studies.continual.methods import METHODS
from studies.continual.networks import Mixture, num_experts_in
from studies.continual.tasks import Images, TaskKind
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.cli import main
from drivetrain.config import Config
from drivetrain.core.hook import Hook
from drivetrain.moe import Lifecycle, Rules

SEEDS = 5
FOLDER = Path("runs") / "benchmarks"
COMPARED = ("dense", "ewc", "dense+replay", "fixed", "growing", "growing+sleep")
FIRST, LAST = 4, 8  # experts of the mixture that grows, and of the fixed one
EPOCHS = 3


def measure(tasks: TaskKind) -> dict[str, list[float]]:
    name = f"continual-{tasks}"
    flags = ["--tasks", tasks, "--seeds", str(SEEDS), "--methods", ",".join(COMPARED)]
    flags += ["--output-dir", str(FOLDER), "--name", name, "--tune"]
    if main(["continual", *flags]):
        raise SystemExit(f"drivetrain continual {' '.join(flags)} failed")
    runs = [
        MethodOutcome.from_json(one) for one in json.loads((FOLDER / name / FILE).read_text(encoding="utf-8"))["runs"]
    ]
    samples: dict[str, list[float]] = {}
    for method in COMPARED:
        own = [run for run in runs if run.method == method and run.seed < SEEDS]
        if own:
            samples[f"{method}: accuracy after the last task (%)"] = [100 * run.scores.accuracy for run in own]
            samples[f"{method}: forgotten (%)"] = [100 * run.scores.forgetting for run in own]
            if METHODS[method].network == "growing":
                samples[f"{method}: experts"] = [run.experts[-1][1] for run in own]
    return samples


MEASURES = {f"continual-{tasks}": partial(measure, tasks) for tasks in ("rotated", "split", "permuted")}


def measure_growth() -> dict[str, list[float]]:
    """Train on one data set, all of it from the start. MNIST has to be in the cache, or there is a network."""
    images, test = load_images("mnist", None)
    samples: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        for name, first in (("fixed", LAST), ("growing", FIRST)):
            found, num_experts = _trained(images, test, first, seed)
            samples.setdefault(f"{name}: test accuracy (%)", []).append(100 * found)
            samples.setdefault(f"{name}: experts at the end", []).append(num_experts)
            print(f"  seed {seed}: {name} {found:.2%}, {num_experts} experts", flush=True)
    means = [sum(samples[f"{name}: test accuracy (%)"]) / SEEDS for name in ("fixed", "growing")]
    samples["mean of growing less mean of fixed (points)"] = [means[1] - means[0]]
    return samples


def _trained(images: Images, test: Images, first: int, seed: int) -> tuple[float, int]:
    """Return the test accuracy, and the number of experts at the end."""
    torch.manual_seed(seed)
    model = Mixture(images.side**2, 64, 10, first, LAST + 1, k=2, by_nearness=False)
    rules = Rules(max_experts=LAST, far=1.2, patience=1, idle_looks=10**9, agreement=2.0)
    hooks: list[Hook] = [Lifecycle(every=20, rules=rules, seed=seed)]
    job = Job(
        name=f"growth-{first}-seed-{seed}",
        model=model,
        data=TensorDataset(images.pixels, images.labels),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        global_batch=128,
        epochs=EPOCHS,
        seed=seed,
        hooks=hooks,
        keep_last=1,
    )
    config = Config.model_validate(
        {"run": {"output_dir": FOLDER / "growth"}, "watch": {"report": False}, "plan": {"auto_optimize": False}}
    )
    train(job, config, quiet=True)
    return accuracy(model, test, next(model.parameters()).device), num_experts_in(model)
