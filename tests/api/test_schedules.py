"""Learning rates in real runs: torch's schedulers, groups with their own rates, plateaus; the same after a resume."""

import functools
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torchs

import drivetrain as dt
from drivetrain.checkpoint import Checkpoint
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.loop.schedule import LearningRates, schedule_mistake
from tests.gloo_pool import GlooPool

STEPS = 12


class PlantedError(Exception):
    """Planted."""


def data_of(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return [(row, row.sum().square().unsqueeze(0)) for row in inputs]


def model_of() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def two_groups(parameters: Any) -> Optimizer:
    """SGD with a rate for the weights and another for the biases, which have a name."""
    every = [parameter for group in parameters for parameter in group["params"]]
    weights, biases = [it for it in every if it.dim() > 1], [it for it in every if it.dim() == 1]
    groups = [{"params": weights, "lr": 0.05}, {"params": biases, "lr": 0.01, "name": "bias"}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def job_of(schedule: Any, crash_at: int = 0, **changes: Any) -> dt.Job:
    """A job whose steps are all of the same 8 samples; it fails in the step of this number, if any."""
    values: dict[str, Any] = {
        "name": "rates",
        "model": model_of,
        "data": data_of(),
        "loss": loss_of,
        "optimizer": two_groups,
        "global_batch": 8,
        "max_steps": STEPS,
        "shuffle": False,
        "checkpoint_every": 2,
        "schedule": schedule,
        "hooks": [dt.every(1, functools.partial(crash, crash_at))],
    }
    return dt.Job(**{**values, **changes})


def crash(at_step: int, context: dt.StepContext) -> None:
    if context.step == at_step:
        raise PlantedError


def train(folder: Path | str, job: dt.Job, **settings: Any) -> dt.Result:
    given = {"loss_weighting": "samples", "report": False, **settings}
    config = dt.configure(output_dir=str(folder), gpu_mode="cpu", num_workers=0, **given)
    return dt.train(job, config, quiet=True)


def rows(folder: Path | str) -> list[dict[str, Any]]:
    lines = (Path(folder) / "rates" / "steps.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    for row in found:
        del row["seconds"], row["grad_norm"]
    return found


def weights(folder: Path | str) -> dict[str, Tensor]:
    checkpoint = Checkpoint.latest_in(Path(folder) / "rates" / "checkpoints")
    assert checkpoint is not None
    return {key.removeprefix("model/"): checkpoint.read(key) for key in checkpoint.keys if key.startswith("model/")}


def assert_equal(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert ours.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in ours.items())


def plain_loop(make: Callable[[Optimizer], Any], num_steps: int = STEPS) -> tuple[list[list[float]], nn.Module]:
    """Train as anybody would with torch's scheduler; return the rates of all groups in each step, and the model."""
    model = model_of()
    optimizer = two_groups([{"params": list(model.parameters())}])
    scheduler, rates = make(optimizer), []
    batch = [torch.stack(column) for column in zip(*data_of(), strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step in range(num_steps):
            if step:
                scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return rates, model


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda it: torchs.StepLR(it, 3, 0.5),
    "a lambda for each group": lambda it: torchs.LambdaLR(it, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "one after the other": lambda it: torchs.SequentialLR(
        it, [torchs.LinearLR(it, 0.1, total_iters=4), torchs.CosineAnnealingLR(it, 8)], [4]
    ),
    "one cycle with momentum": lambda it: torchs.OneCycleLR(it, [0.05, 0.02], total_steps=STEPS),
    "cyclic with momentum": lambda it: torchs.CyclicLR(it, 0.01, 0.05, step_size_up=3),
    "warm restarts": lambda it: torchs.CosineAnnealingWarmRestarts(it, 5),
}


@pytest.mark.parametrize("case", SCHEDULERS)
def test_a_torch_scheduler_through_a_crash(tmp_path: Path, case: str) -> None:
    """Rates of both groups and weights are those of a plain loop, and of a run that never crashed, to the bit."""
    schedule = SCHEDULERS[case]
    rates, model = plain_loop(schedule)
    train(tmp_path / "whole", job_of(schedule))
    assert [[row["lr"], row["lr_bias"]] for row in rows(tmp_path / "whole")] == rates
    for name, value in model.state_dict().items():
        assert torch.allclose(weights(tmp_path / "whole")[name], value, rtol=0, atol=1e-12), name
    with pytest.raises(PlantedError):
        train(tmp_path / "broken", job_of(schedule, crash_at=7))
    assert train(tmp_path / "broken", job_of(schedule)).resumed_from == 6
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert all(
        torch.equal(value, weights(tmp_path / "whole")[name]) for name, value in weights(tmp_path / "broken").items()
    )


def test_a_torch_scheduler_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    model, schedule = model_of(), SCHEDULERS["one cycle with momentum"]
    optimizer = two_groups([{"params": list(model.parameters())}])
    config = dt.configure(output_dir=str(tmp_path), gpu_mode="cpu", num_workers=0, report=False)
    run = dt.drive(
        model, optimizer, data_of(), name="rates", global_batch=8, max_steps=STEPS, shuffle=False, schedule=schedule,
        config=config, quiet=True,
    )  # fmt: skip
    for batch in run:
        run.backward(loss_of(run.model, batch))
        run.step()
    rates, plain = plain_loop(schedule)
    assert [[row["lr"], row["lr_bias"]] for row in rows(tmp_path)] == rates
    for name, value in plain.state_dict().items():
        assert torch.allclose(weights(tmp_path)[name], value, rtol=0, atol=1e-12), name


def on_ranks(folder: str, case: str, strategy: str) -> None:
    train(folder, job_of(SCHEDULERS[case]), parallel_strategy=strategy)


@pytest.mark.parametrize(("case", "strategy"), [("one cycle with momentum", "ddp"), ("step", "fsdp")])
def test_a_torch_scheduler_on_two_ranks(gloo_pool: GlooPool, tmp_path: Path, case: str, strategy: str) -> None:
    gloo_pool.run(on_ranks, str(tmp_path), case, strategy, world=2)
    rates, model = plain_loop(SCHEDULERS[case])
    assert [[row["lr"], row["lr_bias"]] for row in rows(tmp_path)] == rates
    for name, value in model.state_dict().items():
        assert torch.allclose(weights(tmp_path)[name], value, rtol=0, atol=1e-12), name


def test_one_rate_for_all_groups_is_recorded_once(tmp_path: Path) -> None:
    optimizer = lambda groups: torch.optim.AdamW(groups, lr=0.01)  # noqa: E731
    train(tmp_path, job_of(dt.WarmupLinear(3), optimizer=optimizer, weight_decay=0.1))
    assert not [name for row in rows(tmp_path) for name in row if name.startswith("lr_")]


def test_groups_without_names_are_numbered(tmp_path: Path) -> None:
    def optimizer(parameters: Any) -> Optimizer:
        made = two_groups(parameters)
        del made.param_groups[1]["name"]
        return made

    train(tmp_path, job_of(dt.StepDecay(4, 0.5), optimizer=optimizer))
    assert [(row["lr"], row["lr_1"]) for row in rows(tmp_path)] == [
        (0.05 * 0.5 ** (step // 4), 0.01 * 0.5 ** (step // 4)) for step in range(STEPS)
    ]


# What is refused


class Own(torchs.LRScheduler):
    def get_lr(self) -> list[float | Tensor]:
        return [0.1 for _ in self.optimizer.param_groups]


def rates_of(schedule: Any, **changes: Any) -> LearningRates:
    job = job_of(schedule, **changes)
    return LearningRates(job, job.make_optimizer(model_of()))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (SCHEDULERS["step"], ""),
        (SCHEDULERS["one after the other"], ""),
        (lambda it: torchs.OneCycleLR(it, 0.1, total_steps=STEPS, cycle_momentum=False), ""),
        (SCHEDULERS["one cycle with momentum"], "OneCycleLR changes momentum"),
        (SCHEDULERS["cyclic with momentum"], "CyclicLR changes momentum"),
        (
            lambda it: torchs.SequentialLR(it, [torchs.LinearLR(it), torchs.CyclicLR(it, 0.1, 0.2)], [5]),
            "CyclicLR changes momentum",
        ),
        (Own, "Own is not torch's own"),
        (dt.OneCycle(), ""),
    ],
)
def test_schedules_that_a_replay_would_not_follow(schedule: Any, words: str) -> None:
    found = rates_of(schedule).why_not_captured
    assert words in found
    assert bool(words) == bool(found)


FOREIGN = torchs.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 3)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (FOREIGN, r"made with another optimizer"),
        (3, "Job.schedule"),
        (dt.OnPlateau(), "no validation set"),
    ],
)
def test_a_job_refuses(schedule: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job_of(schedule)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda it: FOREIGN, "another optimizer than the job's"),
        (lambda it: torchs.OneCycleLR(it, 0.1), "total_steps OR"),
        (torchs.StepLR, "step_size"),
        (lambda it: "slow", "returned str"),
        (lambda step: 1 / step, "no number for step 0"),
        (lambda it: torchs.OneCycleLR(it, 0.1, total_steps=5), "made for 5 steps, and the job has 12"),
        (lambda it: torchs.ReduceLROnPlateau(it), "looks at validations"),
    ],
)
def test_a_run_refuses(schedule: Any, words: str) -> None:
    with pytest.raises(DrivetrainError, match=words):
        rates_of(schedule)


# Plateaus

LOSSES = [5.0, 4.0, 4.5, 4.4, 4.3, 3.0, 3.1, float("nan"), 3.2, 2.9, 3.5, 3.6]


FOR_EPOCHS: dict[str, Any] = {
    "StepLR": lambda optimizer: torchs.StepLR(optimizer, 1, 0.5),
    "MultiStepLR": lambda optimizer: torchs.MultiStepLR(optimizer, [2, 3, 4]),
    "CosineAnnealingLR": lambda optimizer: torchs.CosineAnnealingLR(optimizer, 5),
    "ExponentialLR": lambda optimizer: torchs.ExponentialLR(optimizer, 0.5),
    "a function": lambda epoch: 0.5**epoch,
}
FOR_STEPS: dict[str, Any] = {
    "StepLR": lambda optimizer: torchs.StepLR(optimizer, 10, 0.5),
    "CosineAnnealingLR": lambda optimizer: torchs.CosineAnnealingLR(optimizer, 50),
    "OneCycleLR": lambda optimizer: torchs.OneCycleLR(optimizer, 0.1, total_steps=50),
    "warm restarts": lambda optimizer: torchs.CosineAnnealingWarmRestarts(optimizer, 4),
    "ours": dt.WarmupCosine(warmup_steps=3),
    "a warm-up": lambda step: min(1.0, step / 8),
}


@pytest.mark.parametrize("name", FOR_EPOCHS)
def test_a_schedule_that_counts_epochs_is_told(tmp_path: Path, name: str) -> None:
    """Moved over as it was, it is over in the first epoch, and nothing was learned from then on."""
    train(tmp_path, job_of(FOR_EPOCHS[name], data=data_of(80), max_steps=None, epochs=5))
    events = (tmp_path / "rates" / "events.jsonl").read_text()
    assert "in the first of 5 epochs" in events
    assert "10 times per epoch" in events


@pytest.mark.parametrize("name", FOR_STEPS)
def test_a_schedule_that_counts_steps_is_not_told(name: str) -> None:
    job = job_of(FOR_STEPS[name], data=data_of(80), max_steps=None, epochs=5)
    assert schedule_mistake(job, job.make_optimizer(model_of())) == ""


def reduced(make: Callable[[Optimizer], torchs.ReduceLROnPlateau], values: list[float]) -> list[list[float]]:
    """Return the rates of each step by torch itself: each step is validated, and the next one has what follows."""
    optimizer = two_groups([{"params": list(model_of().parameters())}])
    scheduler, found = make(optimizer), []
    for value in values:
        found.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step(value)
    return found


class Planned:
    """A metric with these values, one after the other."""

    def __init__(self, values: list[float]) -> None:
        self.values, self.seen = values, -1  # it is tried once before the first step

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        value = self.values[self.seen]
        self.seen += 1
        return torch.tensor(value, dtype=torch.float64)


PLATEAUS: dict[str, tuple[Any, Callable[[Optimizer], torchs.ReduceLROnPlateau]]] = {
    "lower is better": (
        dt.OnPlateau(0.5, 1, "valid_figure", cooldown=1, min_lr=0.004),
        lambda it: torchs.ReduceLROnPlateau(it, factor=0.5, patience=1, cooldown=1, min_lr=0.004),
    ),
    "higher is better": (
        dt.OnPlateau(0.1, 2, "valid_figure", mode="max", threshold=0.2, threshold_mode="abs"),
        lambda it: torchs.ReduceLROnPlateau(
            it, mode="max", factor=0.1, patience=2, threshold=0.2, threshold_mode="abs"
        ),
    ),
}


@pytest.mark.parametrize("case", PLATEAUS)
def test_a_plateau_is_torchs(tmp_path: Path, case: str) -> None:
    schedule, make = PLATEAUS[case]
    job = job_of(schedule, valid=data_of(6), valid_every=1, valid_batch=6, metrics={"figure": Planned(LOSSES)})
    train(tmp_path, job)
    assert [[row["lr"], row["lr_bias"]] for row in rows(tmp_path)] == reduced(make, LOSSES)
    told = [json.loads(line) for line in (tmp_path / "rates" / "events.jsonl").read_text().splitlines()]
    assert any(event["event"] == "learning rate" for event in told)


@pytest.mark.parametrize("world", [1, 2])
def test_a_plateau_through_a_crash(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    """The loss of a validation set that gets worse from step to step: reduced at validations 2, 3, ..."""
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    gloo_pool.run(plateau_run, whole, 0, world=world)
    gloo_pool.run(plateau_run, broken, 7, world=world)
    assert gloo_pool.run(plateau_run, broken, 0, world=world)[0] == 6
    found = [row["lr"] for row in rows(whole)]
    assert len(set(found)) > 2
    assert rows(broken) == rows(whole)
    assert_equal(weights(broken), weights(whole))


def plateau_run(folder: str, crash_at: int) -> int:
    worse = [(inputs, -targets) for inputs, targets in data_of(6)]
    schedule = lambda it: torchs.ReduceLROnPlateau(it, factor=0.5, patience=0)  # noqa: E731
    try:
        return train(folder, job_of(schedule, crash_at, valid=worse, valid_every=1)).resumed_from
    except PlantedError:
        return -1


def test_a_plateau_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    schedule, make = PLATEAUS["lower is better"]
    model = model_of()
    optimizer = two_groups([{"params": list(model.parameters())}])
    config = dt.configure(output_dir=str(tmp_path), gpu_mode="cpu", num_workers=0, report=False)
    run = dt.drive(
        model, optimizer, data_of(), name="rates", global_batch=8, max_steps=STEPS, schedule=schedule, loss=loss_of,
        valid=data_of(6), valid_every=1, valid_batch=6, metrics={"figure": Planned(LOSSES)}, config=config, quiet=True,
    )  # fmt: skip
    for batch in run:
        run.backward(loss_of(run.model, batch))
        run.step()
    assert [[row["lr"], row["lr_bias"]] for row in rows(tmp_path)] == reduced(make, LOSSES)


def test_a_plateau_after_a_warm_up(tmp_path: Path) -> None:
    schedule = dt.OnPlateau(0.5, 100, warmup_steps=4)
    train(tmp_path, job_of(schedule, valid=data_of(6)))
    assert [row["lr"] for row in rows(tmp_path)] == pytest.approx([0.0125, 0.025, 0.0375, *[0.05] * 9], abs=1e-15)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5], ids=str)
@pytest.mark.parametrize("kind", ["function", "torch"])
def test_a_rate_that_is_no_number_is_refused(tmp_path: Path, kind: str, value: float) -> None:
    """It names the schedule and the step, and the run goes on from its last checkpoint once that is mended."""

    def warm_restarts(step: int) -> float:
        return value if step == 7 else 1.0

    made: Any = warm_restarts if kind == "function" else lambda it: torchs.LambdaLR(it, warm_restarts)
    name = "warm_restarts" if kind == "function" else "LambdaLR"
    rate = value * 0.05
    with pytest.raises(dt.DrivetrainError, match=rf"{name} gives {rate} as the learning rate of step 8"):
        train(tmp_path, job_of(made, checkpoint_every=3))
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, 8)]
    mended: Any = (lambda step: 1.0) if kind == "function" else lambda it: torchs.LambdaLR(it, lambda step: 1.0)
    assert train(tmp_path, job_of(mended, checkpoint_every=3)).resumed_from == 6


def test_a_line_that_falls_below_0_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match=r"returned -0.1\d* for step 12"):
        train(tmp_path, job_of(lambda step: 1 - step / 10))
    assert train(tmp_path, job_of(lambda step: max(0.0, 1 - step / 10))).steps == 12


def test_a_rate_of_0_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, job_of(lambda step: 1.0, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0)))
    assert "the learning rate of the optimizer is 0 for every weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    "schedule", [lambda step: step // 1000, lambda it: torchs.LambdaLR(it, lambda step: min(1, step // 20))]
)
def test_a_schedule_that_begins_with_0_is_told(tmp_path: Path, schedule: Any) -> None:
    train(tmp_path, job_of(schedule))
    assert "the learning rate is 0 in each of the first 12 steps" in (tmp_path / "rates" / "events.jsonl").read_text()


def test_a_plateau_of_a_metric_that_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="valid_accuracy"):
        train(tmp_path, job_of(dt.OnPlateau(metric="valid_accuracy"), valid=data_of(6)))
