"""The parts of the trainer: schedule, groups, frozen weights, the lag of records, stopping together, hooks, export."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

import drivetrain as dt
from drivetrain import Constant, DrivetrainError, StepContext, WarmupCosine, export
from drivetrain.api.training import train
from drivetrain.checkpoint import Checkpoint, Checkpointer
from drivetrain.config import configure
from drivetrain.core.precision import Precision
from drivetrain.core.world import World
from drivetrain.data.keyed_items import seed_all
from drivetrain.loop.trainer import Trainer
from drivetrain.strategies import SingleStrategy, StrategyParts, Trial
from tests.api.jobs import Mlp, Trained, Variant, Vectors, make_job, make_model, plain_loop, run, vector_loss
from tests.api.test_resume import CrashingLoss, PlantedError, assert_identical
from tests.gloo_pool import GlooPool

SMALL = Variant(dtype=torch.float32, steps=6, num_samples=20, global_batch=8, save_every=100)


def test_schedules() -> None:
    cosine = WarmupCosine(warmup_steps=4, floor=0.2)
    assert [cosine.factor(step, 14) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine.factor(4, 14) == 1.0
    assert cosine.factor(9, 14) == pytest.approx(0.6)
    assert cosine.factor(14, 14) == pytest.approx(0.2)
    assert [Constant(2).factor(step, 10) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert Constant().factor(0, 10) == 1.0


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    trained = run(str(tmp_path), SMALL, schedule=lambda step: 1 / (step + 1))
    assert trained is not None
    assert [row["lr"] for row in trained.rows] == pytest.approx([1e-2 / (step + 1) for step in range(6)])


def test_decay_is_for_weights_only() -> None:
    optimizer = make_job(SMALL).make_optimizer(Mlp(0.0))
    decays = [
        (group["weight_decay"], {parameter.dim() for parameter in group["params"]}) for group in optimizer.param_groups
    ]
    assert decays == [(0.1, {2}), (0.0, {1})]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def _accumulated(folder: str, accumulation: int) -> dict[str, Any] | None:
    job = make_job(Variant(steps=1, num_samples=80, global_batch=50))
    config = configure(output_dir=folder, gpu_mode="cpu", accumulation_steps=accumulation, report=False)
    result = train(job, config, quiet=True)
    return yaml.safe_load((result.folder / "plan.yaml").read_text()) if result.is_main else None


@pytest.mark.parametrize(("world", "accumulation", "micro_batch"), [(1, 4, 13), (2, 4, 7), (1, 60, 1)])
def test_accumulating_cuts_a_jobs_own_batch(
    gloo_pool: GlooPool, tmp_path: Path, world: int, accumulation: int, micro_batch: int
) -> None:
    plan = gloo_pool.run(_accumulated, str(tmp_path), accumulation, world=world)[0]
    assert (plan["global_batch"], plan["micro_batch"]) == (50, micro_batch)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_where_it_exists(make: Any) -> None:
    optimizer = make_job(SMALL, optimizer=lambda groups: make(groups, lr=0.1)).make_optimizer(Mlp(0.0))
    assert all(group["fused"] is True for group in optimizer.param_groups)
    chosen = make_job(SMALL, optimizer=lambda groups: make(groups, lr=0.1, foreach=True)).make_optimizer(Mlp(0.0))
    assert not any(group["fused"] for group in chosen.param_groups)


class Adapted(nn.Module):
    """A frozen model with a low-rank adapter beside its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Mlp(0.0).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return result


def adapted_run(folder: str) -> Trained | None:
    return run(folder, SMALL, model=Adapted)


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_parameters_stay_and_have_no_state(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    torch.manual_seed(SMALL.seed)
    before = {f"model/{name}": value.numpy() for name, value in Adapted().state_dict().items()}
    trained = gloo_pool.run(adapted_run, str(tmp_path), world=world)[0]
    for name, value in before.items():
        assert (trained.weights[name] == value).all() == ("base" in name), name
    assert {key.split("/")[1] for key in trained.state} == {"down.weight", "up.weight"}


def test_a_record_comes_after_the_next_step_was_given_to_the_device(tmp_path: Path) -> None:
    events: list[str] = []

    def loss(model: Any, batch: Any) -> Tensor:
        events.append("step")
        return vector_loss(model, batch)

    original = Trainer._record

    def record(self: Trainer, *args: Any) -> Any:
        found = original(self, *args)
        events.append(f"record {found.step}")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_record", record)
        run(str(tmp_path), SMALL, loss=loss, settings={"loss_weighting": "samples"})
    assert events[1:] == [
        "step", "step", "record 1", "step", "record 2", "step", "record 3", "step", "record 4", "step", "record 5",
        "record 6",
    ]  # fmt: skip


class StopOnRank:
    """One rank's wish to stop, in the middle of a step."""

    def __init__(self, rank: int, at_call: int) -> None:
        self.rank, self.at_call, self.calls = rank, at_call, 0
        self.stop: Any = None

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.at_call and dist.get_rank() == self.rank:
            self.stop()
        return vector_loss(model, batch)


def run_with_a_stop(folder: str, rank: int) -> tuple[int, bool, int]:
    config = configure(output_dir=folder, gpu_mode="cpu", loss_weighting="samples", report=False)  # calls are counted
    loss = StopOnRank(rank, 3)
    original = Trainer.run

    def run_and_tell(self: Trainer) -> Any:
        loss.stop = self.stop
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", run_and_tell)
        result = train(make_job(SMALL, loss=loss), config, quiet=True)
    again = train(make_job(SMALL), config, quiet=True)
    return result.steps, result.finished, again.resumed_from


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_ranks_wish_stops_all_at_the_same_step(gloo_pool: GlooPool, tmp_path: Path, rank: int) -> None:
    answers = gloo_pool.run(run_with_a_stop, str(tmp_path), rank, world=3)
    assert len(set(answers)) == 1
    steps, finished, resumed_from = answers[0]
    assert not finished
    assert 2 <= steps < 6
    assert resumed_from == steps  # a checkpoint was made when it stopped


class Counter:
    """A hook with a memory."""

    every = 2

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, context: StepContext) -> None:
        self.seen.append(context.step)

    def state_dict(self) -> Mapping[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state["seen"])


def test_hooks_are_called_and_remembered(tmp_path: Path) -> None:
    def crash(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return vector_loss(model, batch)

    calls: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(str(tmp_path), SMALL, hooks=[Counter()], checkpoint_every=4, loss=crash)
    hook = Counter()
    run(str(tmp_path), SMALL, hooks=[hook], checkpoint_every=4)
    assert hook.seen == [2, 4, 6]


def test_export_loads_into_plain_pytorch(gloo_pool: GlooPool, tmp_path: Path) -> None:
    variant = Variant(steps=12)
    gloo_pool.run(run, str(tmp_path), variant, world=2)
    path = export(tmp_path / "suite", tmp_path / "weights.safetensors")
    model = make_model(variant)
    model.load_state_dict(load_file(path))
    _, weights = plain_loop(variant)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, torch.from_numpy(weights[f"model/{name}"]), rtol=0, atol=1e-10)
    with pytest.raises(DrivetrainError, match="holds no checkpoints"):
        export(tmp_path)


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    run(str(tmp_path), SMALL, checkpoint_every=1, keep_last=2)
    kept = sorted(path.name for path in (tmp_path / "suite" / "checkpoints").iterdir())
    assert kept == ["step-00000005", "step-00000006"]


def test_events_and_files_of_a_run(tmp_path: Path) -> None:
    run(str(tmp_path), SMALL, checkpoint_every=3)
    folder = tmp_path / "suite"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kinds = [
        "start", "flops", "repeatable", "checkpoint interval", "checkpoint", "checkpoint", "verdict", "finish", "end",
    ]  # fmt: skip
    assert [event["event"] for event in events if event["event"] != "time"] == kinds
    names = {path.name for path in folder.iterdir()}
    assert {"job.yaml", "plan.yaml", "config.yaml", "hardware.json", "steps.jsonl", "checkpoints"} <= names


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "unused": {"find_unused_parameters": True},
    "buckets": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": False},
    "static": {"static_graph": True, "broadcast_buffers": False},
}


def run_with_options(folder: str, name: str, micro_batch: int) -> Trained | None:
    config = configure(output_dir=folder, gpu_mode="cpu", batch_size=micro_batch, report=False, **DDP_OPTIONS[name])
    result = train(
        make_job(Variant(steps=12), model=Sparse if name == "unused" else lambda: make_model(Variant())),
        config,
        quiet=True,
    )
    from tests.api.jobs import read

    return read(result.folder) if result.is_main else None


class Sparse(nn.Module):
    """Has a layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Mlp(0.0).double(), nn.Linear(3, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.used(inputs)
        return result


@pytest.mark.parametrize("name", DDP_OPTIONS)
@pytest.mark.parametrize("micro_batch", [32, 8])
def test_ddp_options_change_nothing(gloo_pool: GlooPool, tmp_path: Path, name: str, micro_batch: int) -> None:
    trained = gloo_pool.run(run_with_options, str(tmp_path), name, micro_batch, world=2)[0]
    losses, _ = plain_loop(Variant(steps=12))
    assert trained.losses == pytest.approx(losses, abs=1e-10)


class Drawing(nn.Module):
    """Draws from the generators it is told to, in every forward."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.inner, self.kinds = Mlp(0.0), kinds

    def forward(self, inputs: Tensor) -> Tensor:
        noise = {
            "python": random.random,
            "numpy": np.random.random_sample,
            "torch": lambda: torch.rand(()).item(),
        }
        result: Tensor = self.inner(inputs) * (1 + 0.1 * sum(noise[kind]() for kind in self.kinds))
        return result


def shaken(folder: str, at_call: int = 0) -> Trained | None:
    """Train with a hook that adds noise to the weights; fail at a call of the loss, if one is given."""

    def shake(context: StepContext) -> None:
        with torch.no_grad():
            for weight in context.model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1 * random.random() * np.random.random())

    loss = CrashingLoss(make_job(SMALL).loss, at_call)
    variant = replace(SMALL, dropout=0.0, dtype=torch.float64)  # the steps draw nothing
    try:
        settings = {"resident": "on"}
        return run(folder, variant, 3, settings=settings, hooks=[dt.every(1, shake)], checkpoint_every=2, loss=loss)
    except PlantedError:
        return None


def test_what_a_hook_draws_is_keyed(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """A resumed run drew the numbers of the first steps again, and processes might have drawn other ones."""
    whole = shaken(str(tmp_path / "whole"))
    assert shaken(str(tmp_path / "broken"), 12) is None
    mended = shaken(str(tmp_path / "broken"))
    assert whole is not None
    assert mended is not None
    assert mended.resumed_from > 0
    assert_identical(mended, whole)
    for together in gloo_pool.run(shaken, str(tmp_path / "two"), world=2):
        assert together is None or together.losses == pytest.approx(whole.losses, abs=1e-10)


@pytest.mark.parametrize("kinds", [("python",), ("numpy",), ("torch",), ("python", "numpy", "torch")])
def test_whatever_a_model_draws_from_is_keyed(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    def crash(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return vector_loss(model, batch)

    calls: list[int] = []
    whole = run(str(tmp_path / "whole"), SMALL, 3, model=lambda: Drawing(*kinds))
    with pytest.raises(KeyboardInterrupt):
        run(str(tmp_path / "broken"), SMALL, 3, model=lambda: Drawing(*kinds), loss=crash, checkpoint_every=1)
    mended = run(str(tmp_path / "broken"), SMALL, 3, model=lambda: Drawing(*kinds), checkpoint_every=1)
    assert whole is not None
    assert mended is not None
    assert mended.resumed_from > 0
    assert mended.losses == whole.losses
    quiet = run(str(tmp_path / "quiet"), SMALL, 3, model=Drawing)
    assert quiet is not None
    assert quiet.losses != whole.losses


def test_the_loss_scale_is_saved_and_goes_on(tmp_path: Path) -> None:
    """On the CPU by way of the strategy itself, since the command line refuses fp16 there."""

    def prepared() -> tuple[SingleStrategy, StrategyParts]:
        job = make_job(SMALL)
        model = make_model(SMALL)
        parts = StrategyParts(model, job.loss, job.make_optimizer(model), precision=Precision("fp16", "cpu"))
        strategy = SingleStrategy(World())
        strategy.prepare(parts, Trial([torch.randn(4, 6), torch.zeros(4, dtype=torch.long)], 4))
        return strategy, parts

    strategy, parts = prepared()
    parts.scaler.scale(torch.ones(()))  # it comes into being with its first use
    parts.scaler.update(512.0)
    shards, meta = strategy.save()
    Checkpointer(tmp_path, World()).save(1, shards, meta)
    checkpoint = Checkpoint.latest_in(tmp_path)
    assert checkpoint is not None
    other, others_parts = prepared()
    assert others_parts.scaler.get_scale() != 512.0
    other.load(checkpoint)
    assert others_parts.scaler.get_scale() == 512.0


def drawn() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(()).item()]


@pytest.mark.parametrize("way", ["train", "evaluate", "predict"])
def test_what_a_script_draws_after_a_run_is_its_own(tmp_path: Path, way: str) -> None:
    """Members of an ensemble, made one after the other, began alike: each run left the generators as it set them."""
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, report=False)
    job = make_job(Variant(steps=2), valid=Vectors(Variant()))
    calls: dict[str, Callable[[], Any]] = {
        "train": lambda: train(job, config, quiet=True),
        "evaluate": lambda: dt.evaluate(job, result, config),
        "predict": lambda: dt.predict(result, job.data),
    }
    result = calls["train"]()
    seed_all(7)
    expected = [drawn(), drawn()]
    seed_all(7)
    found = [drawn()]
    calls[way]()
    assert [*found, drawn()] == expected


@pytest.mark.parametrize("is_left", [False, True])
def test_what_a_script_draws_around_its_loop_is_its_own(tmp_path: Path, is_left: bool) -> None:
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, report=False)
    model = make_model(Variant())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed_all(7)
    expected = [drawn(), drawn(), drawn()]
    seed_all(7)
    found = [drawn()]
    data = Vectors(Variant())
    going = dt.drive(model, optimizer, data, global_batch=32, max_steps=2, config=config, quiet=True)
    found.append(drawn())
    for batch in going:
        going.backward(vector_loss(model, batch))
        going.step()
        if is_left:
            break
    assert [*found, drawn()] == expected


def test_members_of_an_ensemble_that_come_out_alike_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first weights are drawn by the seed, which is 0 for each of them: all members were one model."""
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    for number in range(2):
        train(make_job(SMALL, name=f"member-{number}"), config)
    assert "member-1 has ended with the loss of member-0, to the bit" in capsys.readouterr().err
    train(make_job(replace(SMALL, seed=1), name="another"), config)
    assert "to the bit" not in capsys.readouterr().err
