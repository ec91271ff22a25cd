"""A mixture of experts that starts small, grows where inputs are new to it, and sleeps: on pictures of digits.

`drivetrain train digits-moe` is the demo; `examples/gpu_training_example.py` trains the same on MNIST.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.api.training import Result, export
from drivetrain.config import Config
from drivetrain.core.schedules import WarmupCosine
from drivetrain.job import Job
from drivetrain.moe import (
    Balance,
    Knowledge,
    KnowledgeFiles,
    Lifecycle,
    LoadReport,
    MixtureOfExperts,
    Rules,
    Sleep,
    SleepRules,
)
from drivetrain.recipes.digits import accuracy
from drivetrain.recipes.mnist import Pictures, load_pictures
from drivetrain.recipes.recipe import Recipe
from drivetrain.report import PICTURES, RunData

NUM_EXPERTS, NUM_SLOTS, WIDTH = 3, 10, 64


def job(config: Config) -> Job:
    return mixture_job("digits-moe", load_pictures("digits"), config, epochs=10, global_batch=64)


def mixture_job(name: str, pictures: Pictures, config: Config, *, epochs: int, global_batch: int) -> Job:
    """Return the job. The times of growing and sleeping follow from the number of steps."""
    epochs = config.budget.epochs or epochs
    asked = config.batch_asked
    batch = (asked.size or global_batch) * (asked.accumulation or 1)
    num_steps = min(config.budget.max_steps or 10**9, epochs * -(-len(pictures.train) // batch))
    look = max(2, num_steps // 50)
    seed, num_experts = config.run.seed, config.moe.experts or NUM_EXPERTS
    knowledge = Knowledge(look, labels=lambda batch: batch[1], names=pictures.classes)
    most = max(8, num_experts)
    rules = Rules(max_experts=most, far=1.5, new_share=0.25, patience=3, cooldown=4)
    lifecycle = Lifecycle(look, rules, seed, knowledge)
    nights = SleepRules(
        interval=15 * look, shortest=8 * look, longest=25 * look, reservoir=400, replay_steps=15, specialise_steps=10,
        max_experts=most,
    )  # fmt: skip
    rate = config.optimizer.learning_rate or 3e-3
    return Job(
        name=name,
        model=lambda: PictureMixture(pictures.size, num_experts),
        data=pictures.train,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        global_batch=None if asked.is_set else global_batch,
        default_batch=global_batch,
        epochs=epochs,
        max_steps=config.budget.max_steps,
        seed=seed,
        schedule=WarmupCosine(),
        valid=pictures.valid,
        metrics={"accuracy": accuracy},
        hooks=[
            lifecycle,
            Sleep(look, nights, lifecycle=lifecycle, seed=seed),
            LoadReport(look),
            KnowledgeFiles(knowledge),
        ],
    )


class PictureMixture(nn.Module):
    """Two convolutions, then a mixture of experts with a skip connection."""

    def __init__(self, size: int = 8, num_experts: int = NUM_EXPERTS) -> None:
        super().__init__()
        is_large = size > 16  # then both convolutions halve it, and nothing is pooled: a third of the work
        self.first = nn.Conv2d(1, 16, 5, stride=2, padding=2) if is_large else nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2 if is_large else 1, padding=1)
        self.pool = nn.Identity() if is_large else nn.MaxPool2d(2)
        side = -(-size // 4) if is_large else size // 2
        self.embed = nn.Linear(32 * side * side, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        slots = max(NUM_SLOTS, num_experts)
        self.mixture = MixtureOfExperts(
            WIDTH, num_experts, WIDTH, k=min(2, num_experts), num_slots=slots, balance=Balance(1e-3)
        )
        self.out = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(functional.relu(self.second(functional.relu(self.first(images)))))
        hidden = self.norm(self.embed(features.flatten(1)))
        logits: Tensor = self.out(hidden + self.mixture(hidden))
        return logits


@torch.no_grad()
def accuracy_of(result: Result, pictures: Pictures, num_experts: int) -> float:
    """Return the accuracy of the run's last weights, in plain PyTorch, on pictures that the run never saw."""
    model = PictureMixture(pictures.size, num_experts)
    model.load_state_dict(load_file(export(result)))
    images, labels = pictures.test.tensors
    said = torch.cat([model.eval()(part).argmax(1) for part in torch.split(images, 500)])
    return float((said == labels).double().mean())


def show(result: Result) -> None:
    show_mixture(result, load_pictures("digits"))


def show_mixture(result: Result, pictures: Pictures) -> None:
    """Print the results, and where they are."""
    data = RunData.read(result.folder)
    nights, changes = data.told("sleep"), [row["what"] for row in data.told("expert")]
    many = {what: changes.count(what) for what in ("grown", "split", "merged", "pruned")}
    words = ", ".join(f"{count} {what}" for what, count in many.items() if count) or "none came or went"
    seconds = sum(night["seconds"] for night in nights)
    experts = data.told("load")[-1]["loads"] if data.told("load") else {}
    started = len(experts) - many["grown"] - many["split"] + many["merged"] + many["pruned"]
    if result.finished:
        found = accuracy_of(result, pictures, started or NUM_EXPERTS)
        print(f"\n{found:.2%} of the {len(pictures.test):,} test pictures are read correctly; the run never saw them.")
    else:
        print("\nThe test pictures are read once, when the run is at its end; run it again to go on.")
    print(
        f"Experts: {started} at first, {len(experts)} at the end ({words}). "
        f"Slept {'once' if len(nights) == 1 else f'{len(nights)} times'}, {seconds:.1f} s."
    )
    here = Path.cwd()
    folder = result.folder.relative_to(here) if result.folder.is_relative_to(here) else result.folder
    print("Results:")
    for name, about in {
        "report.html": "all of it on one page",
        **PICTURES,
        "performance_summary.txt": "speed and accuracy in words",
        "events.jsonl": "every growth, merge and sleep with its figures",
        "model.safetensors": "the weights, for plain PyTorch",
    }.items():
        if (folder / name).exists():
            print(f"  {folder / name}   {about[0].lower()}{about[1:]}")


RECIPE = Recipe(
    make=job, about="a mixture of experts that grows and sleeps, on digits", show=show, reads=("moe.experts",)
)
