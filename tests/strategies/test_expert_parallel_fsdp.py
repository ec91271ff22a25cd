"""Experts shared out over ranks and all else in shards: what one process learns, held in parts by every rank."""

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drivetrain as dt
from drivetrain.api.measuring import plan
from drivetrain.checkpoint import Checkpointer
from drivetrain.config import configure
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import StepContext
from drivetrain.core.precision import FP32_ON_CPU, Precision
from drivetrain.core.state import local_part
from drivetrain.core.world import World
from drivetrain.moe import Balance, MixtureOfExperts, Slots, mixtures_in
from drivetrain.plan.fitting import num_bytes
from drivetrain.strategies import (
    Average,
    DdpStrategy,
    ExpertParallelStrategy,
    FsdpStrategy,
    ShardedExpertParallelStrategy,
    ShardOptions,
    SharedExperts,
    SingleStrategy,
    Strategy,
    StrategyParts,
    Trial,
)
from drivetrain.strategies.sharding import ROOT, build, forecast_local, layout_of, shard
from tests.api.jobs import Trained, Variant, Vectors, make_job, read, run
from tests.gloo_pool import GlooPool
from tests.moe.jobs import Mixture, MixtureModel, mixture_loss, run_mixture
from tests.moe.test_lifecycle import Planned, by_number
from tests.moe.test_sleep import NIGHTS, Sleep
from tests.strategies.test_expert_parallel import EXPERT_PARALLEL, STEPS, distances, sgd

SHARDED = {**EXPERT_PARALLEL, "expert_rest": "fsdp"}
LIMIT = {"time_limit_seconds": 180}


class Block(nn.Module):
    """A dense part, and a mixture whose experts do not divide by 2 or 3 ranks."""

    def __init__(self, num_slots: int, width: int) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(width), nn.Linear(width, width)
        self.mixture = MixtureOfExperts(width, 5, 8, k=2, balance=Balance(1e-2), num_slots=num_slots)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs + self.mixture(torch.tanh(self.dense(self.norm(inputs))))
        return result


class Deep(nn.Module):
    def __init__(self, num_slots: int = 5, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(num_slots, width) for _ in range(2))
        self.out = nn.Linear(width, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))  # no rows to cut

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        result: Tensor = self.out(hidden) * self.scale
        return result


# The same as one process


def train(folder: str, wanted: Mixture, micro_batch: int, clip: float | None, settings: Any) -> Trained | None:
    changes = {"optimizer": sgd, "clip_norm": clip, "weight_decay": 0.01}
    return run_mixture(folder, STEPS, wanted, micro_batch, settings, changes=changes)


CASES: dict[str, tuple[int, Mixture, int, float | None, dict[str, Any]]] = {
    "2 ranks, k 2": (2, Mixture(num_experts=4), 15, 0.5, {}),
    "2 ranks, offloaded, k 1, no clipping": (2, Mixture(num_experts=5, k=1), 8, None, {"fsdp_offload": True}),
    "3 ranks, 5 experts, accumulation": (3, Mixture(num_experts=5, num_slots=7), 4, 0.5, {}),
    "3 ranks, in shards": (3, Mixture(num_experts=5, num_slots=7), 4, 0.5, {"fsdp_accumulate": "shards"}),
    "3 ranks, skew that leaves ranks empty": (3, Mixture(num_experts=6, skewed=True, k=1), 10, 0.5, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_learns_what_one_process_learns(gloo_pool: GlooPool, tmp_path: Path, case: str) -> None:
    world, wanted, micro_batch, clip, settings = CASES[case]
    alone = train(str(tmp_path / "alone"), wanted, 30, clip, {})
    assert alone is not None
    if wanted.skewed:
        assert np.count_nonzero(alone.weights["model/mixture.load"]) == 1, "all tokens go to one expert"
    args = (str(tmp_path / "shared"), wanted, micro_batch, clip, {**SHARDED, **settings})
    shared = gloo_pool.run(train, *args, world=world, **LIMIT)[0]
    found = distances(shared, alone)
    assert max(found.values()) < 1e-9, found


def train_wrongly(folder: str, wanted: Mixture) -> Trained | None:
    """As with DDP, which averages: experts would learn at half the rate."""
    with mock.patch.object(ShardedExpertParallelStrategy, "gradient_factor", 0.5):
        return train(folder, wanted, 15, None, SHARDED)


def train_with_own_routers(folder: str, wanted: Mixture) -> Trained | None:
    """Routers that hear of their own rank's tokens only."""
    with mock.patch.object(FsdpStrategy, "prepare", _forgetting_routers):
        return train(folder, wanted, 15, None, SHARDED)


def _forgetting_routers(self: Any, *args: Any, original: Any = FsdpStrategy.prepare) -> Any:
    made = original(self, *args)
    self._replicated = []
    return made


@pytest.mark.parametrize("bug", [train_wrongly, train_with_own_routers])
def test_a_planted_bug_is_caught(gloo_pool: GlooPool, tmp_path: Path, bug: Any) -> None:
    wanted = Mixture(num_experts=4)
    alone = train(str(tmp_path / "alone"), wanted, 30, None, {})
    assert alone is not None
    shared = gloo_pool.run(bug, str(tmp_path / "shared"), wanted, world=2, **LIMIT)[0]
    found = distances(shared, alone)
    assert found["losses"] > 1e-4
    assert found["model/mixture.experts.w_in"] > 1e-4


def some_counted(model: nn.Module, batch: Any) -> dt.LossSum:
    """What is counted is not samples: gradients are rescaled, the experts' like all others."""
    kept = batch[1] > 0
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return dt.LossSum((losses * kept).sum(), kept.sum())


def train_deep(folder: str, micro_batch: int, settings: dict[str, Any]) -> Trained | None:
    changes = {"model": lambda: Deep().double(), "optimizer": sgd, "loss": some_counted}
    return run(folder, STEPS, micro_batch, settings=settings, **changes)


def test_recomputed_blocks_gather_and_exchange_again(gloo_pool: GlooPool, tmp_path: Path) -> None:
    alone = train_deep(str(tmp_path / "alone"), 30, {})
    args = (str(tmp_path / "shared"), 8, {**SHARDED, "activations": "recompute"})
    shared = gloo_pool.run(train_deep, *args, world=2, **LIMIT)[0]
    assert alone is not None
    found = distances(shared, alone)
    assert max(found.values()) < 1e-9, found


class All(Planned):
    """Also a merge, and an exchange of places."""

    def __call__(self, context: StepContext) -> None:
        super().__call__(context)
        (layer,) = mixtures_in(context.model).values()
        slots = Slots(layer, context.experts.companions)
        at = {number: slot for slot, number in slots.ids.items()}
        if context.step == 12:
            slots.merge(at[1], at[3], 0.3)
        elif context.step == 14:
            slots.exchange(at[1], at[4])


def train_planned(folder: str, micro_batch: int, settings: dict[str, Any]) -> Trained | None:
    variant = Variant(steps=16, global_batch=30, num_samples=90)
    changes = {"hooks": [All()], "ema": 0.9, "optimizer": sgd}
    return run_mixture(folder, variant, Mixture(num_experts=3, num_slots=5), micro_batch, settings, changes=changes)


def test_experts_come_and_go(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Grown, pruned, merged, moved in the middle of a run: weights, routers, moments and averages, on any rank."""
    alone = train_planned(str(tmp_path / "alone"), 30, {})
    shared = gloo_pool.run(train_planned, str(tmp_path / "shared"), 8, SHARDED, world=2, **LIMIT)[0]
    assert alone is not None
    assert int(alone.weights["model/mixture.next_id"]) == 5, "two have grown"
    found = distances(by_number(shared), by_number(alone))
    assert max(found.values()) < 1e-9, found


def train_in_bf16(folder: str, settings: dict[str, Any]) -> Trained | None:
    variant = Variant(dtype=torch.float32, steps=6, global_batch=30, num_samples=90)
    return run(folder, variant, 15, settings={**settings, "precision": "bf16"}, model=Deep, optimizer=sgd)


def test_bf16_against_ddp(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """By operations but for the order of sums; by blocks it is rounded elsewhere."""
    ddp = gloo_pool.run(train_in_bf16, str(tmp_path / "ddp"), EXPERT_PARALLEL, world=2, **LIMIT)[0]
    for cast, limit in (("operations", 1e-3), ("blocks", 2e-2)):
        args = (str(tmp_path / cast), {**SHARDED, "fsdp_cast": cast})
        fsdp = gloo_pool.run(train_in_bf16, *args, world=2, **LIMIT)[0]
        assert fsdp.losses == pytest.approx(ddp.losses, rel=limit)
        assert {value.dtype.name for key, value in fsdp.weights.items() if key.endswith(("weight", "w_in"))} == {
            "float32"
        }


# Checkpoints


def go_on(
    folder: str, micro_batch: int, settings: Any, crash_at_call: int, dtype: torch.dtype, steps: int = 12
) -> Trained | None:
    wanted = Mixture(num_experts=5, num_slots=7, dtype=dtype)
    variant = Variant(dtype=dtype, steps=steps, global_batch=30, num_samples=100, save_every=3)
    changes = {"ema": 0.9, "valid": Vectors(Variant(dtype=dtype, num_samples=23)), "valid_every": 5}
    return run_mixture(folder, variant, wanted, micro_batch, settings, crash_at_call, changes)


def test_in_the_same_world_a_resumed_run_has_the_same_bits(gloo_pool: GlooPool, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("whole", "parts")]
    given = {"world": 3, **LIMIT}
    whole = gloo_pool.run(go_on, folders[0], 5, SHARDED, 0, torch.float32, 7, **given)[0]
    assert gloo_pool.run(go_on, folders[1], 5, SHARDED, 10, torch.float32, 7, **given)[0] is None
    resumed = gloo_pool.run(go_on, folders[1], 5, SHARDED, 0, torch.float32, 7, **given)[0]
    assert resumed.resumed_from == 3
    assert resumed.rows == whole.rows
    ours, theirs = resumed.weights | resumed.state, whole.weights | whole.state
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


def test_a_run_goes_on_in_other_worlds_and_strategies(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Cut short in each, with optimizer and average; against one that was never stopped."""
    whole = go_on(str(tmp_path / "whole"), 30, {}, 0, torch.float64)
    folder = str(tmp_path / "parts")
    roads: list[tuple[int, int, dict[str, Any]]] = [(3, 10, SHARDED), (1, 30, {}), (2, 15, EXPERT_PARALLEL)]
    for world, micro_batch, settings in roads:
        args = (folder, micro_batch, settings, 6, torch.float64)
        assert gloo_pool.run(go_on, *args, world=world, **LIMIT)[0] is None
    moved = gloo_pool.run(go_on, folder, 15, SHARDED, 0, torch.float64, world=2, **LIMIT)[0]
    assert moved.resumed_from == 9
    assert whole is not None
    assert any(key.startswith("ema/mixture.experts") for key in moved.state)
    found = distances(moved, whole)
    assert max(found.values()) < 1e-9, found


def world_here() -> World:
    return World.join([torch.device("cpu")])


def made(kind: str, world: World, model: nn.Module, job: dt.Job) -> tuple[Strategy, torch.optim.Optimizer]:
    if kind in ("single", "ddp", "experts+ddp"):
        kinds: dict[str, Any] = {"single": SingleStrategy, "ddp": DdpStrategy, "experts+ddp": ExpertParallelStrategy}
        return kinds[kind](world), job.make_optimizer(model)
    experts = SharedExperts(model, world) if kind == "experts+fsdp" else None
    sharded = shard(model, world, ShardOptions(), FP32_ON_CPU, experts)
    optimizer = job.make_optimizer(model)
    sharded.take_over(optimizer)
    if experts is None:
        return FsdpStrategy(world, sharded), optimizer
    return ShardedExpertParallelStrategy(world, sharded, experts), optimizer


def pass_on(folder: str, kind: str, steps: int) -> dict[str, Any] | None:
    """Loads the newest checkpoint of a folder, if there is one; trains some steps; saves. Returns what it saved."""
    world = world_here()
    torch.manual_seed(100 + world.rank)  # other weights on every rank: those of rank 0, or the checkpoint's, must win
    model = build(lambda: Deep(num_slots=7), world) if "fsdp" in kind else Deep(num_slots=7)
    job = make_job(Variant())
    strategy, optimizer = made(kind, world, model, job)
    parts = StrategyParts(model, mixture_loss, optimizer, 1.0, average=Average(model, 0.5))
    generator = torch.Generator().manual_seed(7 + world.rank)
    batch = [torch.randn(4, 6, generator=generator), torch.randint(0, 4, (4,), generator=generator)]
    objective = strategy.prepare(parts, Trial(batch, 4))
    checkpointer = Checkpointer(Path(folder), world)
    before = checkpointer.latest()
    if before is not None:
        strategy.load(before)
    for _ in range(steps):
        strategy.backward(objective(batch, 4, 4 * world.size, 1))
        strategy.step(False)
    shards, meta = strategy.save()
    checkpointer.save((before.step if before else 0) + 1, shards, meta | {"plan": {"world_size": world.size}})
    saved = checkpointer.latest()
    assert saved is not None
    strategy.close()
    checkpointer.close()
    return {key: saved.read(key).numpy() for key in saved.keys} if world.is_main else None


ROAD = [
    ("experts+fsdp", 3),
    ("ddp", 2),
    ("single", 1),
    ("experts+ddp", 2),
    ("experts+fsdp", 2),
    ("fsdp", 2),
    ("experts+fsdp", 4),
]


def test_checkpoints_are_passed_on_exactly(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Three steps with the first; each of the others loads it and saves it again: every bit, under the same names."""
    saved = [
        gloo_pool.run(pass_on, str(tmp_path), kind, 0 if number else 3, world=world, **LIMIT)[0]
        for number, (kind, world) in enumerate(ROAD)
    ]
    first = saved[0]
    assert {"ema/blocks.1.mixture.experts.w_in", "optimizer/blocks.0.mixture.router.weight/exp_avg_sq"} <= first.keys()
    assert first["model/blocks.0.mixture.experts.w_in"].shape == (7, 8, 6)
    for (kind, world), other in zip(ROAD[1:], saved[1:], strict=True):
        assert other.keys() == first.keys()
        for key, value in first.items():
            assert other[key].dtype == value.dtype
            assert np.array_equal(other[key], value), (kind, world, key)


def test_rank_0s_weights_count(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Every rank would make others; but for rank 0, none makes any."""
    saved = gloo_pool.run(pass_on, str(tmp_path), "experts+fsdp", 0, world=3, **LIMIT)[0]
    torch.manual_seed(100)
    for name, value in Deep(num_slots=7).state_dict().items():
        assert np.array_equal(saved[f"model/{name}"], value.numpy()), name


def start_from(folder: str, source: str) -> tuple[Trained | None, dict[str, float]]:
    """A run that starts with another's weights and does not move them; and what is evaluated of it."""
    variant = Variant(dtype=torch.float32, steps=1, global_batch=30, num_samples=90)
    still = {"optimizer": lambda groups: torch.optim.SGD(groups, lr=0.0), "init_from": source}
    job_changes: dict[str, Any] = {"model": fresh, "loss": mixture_loss, "valid": Vectors(variant), **still}
    trained = run(folder, variant, 15, settings=SHARDED, **job_changes)
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, batch_size=15, **SHARDED)
    return trained, dict(dt.evaluate(make_job(variant, **job_changes), Path(folder) / "suite", config))


def fresh() -> nn.Module:
    return MixtureModel(Mixture(num_experts=5, dtype=torch.float32))


def test_a_run_starts_with_others_weights_and_is_evaluated(gloo_pool: GlooPool, tmp_path: Path) -> None:
    variant = Variant(dtype=torch.float32, steps=5, global_batch=30, num_samples=90)
    changes: dict[str, Any] = {"model": fresh, "loss": mixture_loss, "valid": Vectors(variant)}
    before = run(str(tmp_path / "before"), variant, 30, **changes)
    assert before is not None
    source = tmp_path / "before" / "suite"
    trained, figures = gloo_pool.run(start_from, str(tmp_path / "after"), str(source), world=2, **LIMIT)[0]
    for name in ("first.weight", "mixture.router.weight", "mixture.experts.w_in", "mixture.experts.b_out"):
        assert np.array_equal(trained.weights[f"model/{name}"], before.weights[f"model/{name}"]), name
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0)
    alone = dt.evaluate(make_job(variant, **changes), tmp_path / "after" / "suite", config)
    assert figures == pytest.approx(alone, rel=1e-5)


# Who holds what


def held_and_forecast() -> dict[str, Any]:
    """What this rank holds after a step, by what has memory; the forecast; and what there is in all."""
    world = world_here()
    gc.collect()
    old = {tensor.untyped_storage()._cdata for tensor in _tensors()}
    torch.manual_seed(100 + world.rank)
    model = build(lambda: Deep(num_slots=7, width=64), world)
    is_without_memory = any(parameter.is_meta for parameter in model.parameters())
    whole = {name: parameter.numel() * 4 for name, parameter in model.named_parameters()}
    job = make_job(Variant(num_samples=4, global_batch=4))  # whose data are small beside the weights
    experts = SharedExperts(model, world)
    forecast = forecast_local(model, job.make_optimizer, world.size, world.rank, experts.num_rows(world.rank))
    assert forecast is not None
    sharded = shard(model, world, ShardOptions(), FP32_ON_CPU, experts)
    optimizer = job.make_optimizer(model)
    sharded.take_over(optimizer)
    strategy = ShardedExpertParallelStrategy(world, sharded, experts)
    batch = [torch.randn(4, 6), torch.randint(0, 4, (4,))]
    objective = strategy.prepare(StrategyParts(model, mixture_loss, optimizer, 1.0), Trial(batch, 4))
    strategy.backward(objective(batch, 4, 4 * world.size, 1))
    owned = [*sharded.parameters.values(), *sharded.replicated.values(), *experts.parameters]
    gradients = num_bytes(local_part(p.grad) for p in owned if p.grad is not None)
    strategy.step(False)
    strategy.save()  # forgets what was gathered
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    held = {
        "parameters": num_bytes(local_part(parameter) for parameter in owned),
        "buffers": num_bytes(model.buffers()),
        "gradients": gradients,
        "optimizer": num_bytes(state),
    }
    gc.collect()
    alive = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors()}
    kept = num_bytes(tensor for layer in experts.layers.values() for tensor in layer.tally.sampled(world.device)[:1])
    found = {
        "held": held,
        "forecast": forecast.model_dump(),
        "whole": whole,
        "without_memory": is_without_memory,
        "experts": {name: p.numel() * 4 for name, p in _named_experts(model)},
        "alive": sum(size for storage, size in alive.items() if storage not in old) - kept,
    }
    strategy.close()
    return found


def _tensors() -> list[Tensor]:
    """All that are alive in this process."""
    found = [each for each in gc.get_objects() if isinstance(each, Tensor) and not hasattr(each, "to_local")]
    return [tensor for tensor in found if tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter)]


def _named_experts(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if ".experts." in name]


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_holds_its_part_as_forecast(gloo_pool: GlooPool, world: int) -> None:
    ranks = gloo_pool.run(held_and_forecast, world=world, **LIMIT)
    whole = ranks[0]["whole"]
    assert [rank["without_memory"] for rank in ranks] == [False] + [True] * (world - 1)
    for number, rank in enumerate(ranks):
        assert rank["held"] == rank["forecast"], number
        for name, size in rank["experts"].items():
            assert 0 < size <= whole[name] / 7 * -(-7 // world), "no rank keeps all experts"
        assert rank["held"]["parameters"] < sum(whole.values()) * (0.62 if world == 2 else 0.35)
        between_steps = sum(size for what, size in rank["held"].items() if what != "gradients")
        assert rank["alive"] < between_steps + 4000, "nothing of the whole is kept anywhere"
    for name in ranks[0]["experts"]:
        assert sum(rank["experts"][name] for rank in ranks) == whole[name], "each expert is on one rank"


def test_units_leave_experts_out_and_routers_whole() -> None:
    layout = layout_of(Deep(), shares_experts=True)
    assert [unit.name for unit in layout.units] == ["blocks.0", "blocks.1", ROOT]
    assert list(layout.units[0].parameters) == [
        f"blocks.0.{name}" for name in ("norm.weight", "norm.bias", "dense.weight", "dense.bias")
    ]
    assert list(layout.units[-1].parameters) == ["first.weight", "first.bias", "out.weight", "out.bias"]
    assert sorted(layout.replicated) == ["blocks.0.mixture.router.weight", "blocks.1.mixture.router.weight", "scale"]
    assert len(layout.shared_out) == 2 * 4
    assert layout.in_words().endswith("whole on every rank: scale; experts are shared out (4.4 kB), routers whole")
    plain = layout_of(Deep())
    assert not plain.shared_out
    assert "blocks.0.mixture.experts.w_in" in plain.units[0].parameters


def planned(folder: str) -> tuple[Any, dict[str, int]]:
    """The plan, and a forecast of the fullest rank's part; each rank makes its own plan."""
    world = world_here()
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, **SHARDED)
    job = make_job(Variant(), model=Deep, loss=mixture_loss)
    found = plan(job, config)
    model = Deep()
    rows = {name: 3 for name, _ in _named_experts(model)}  # of 5 experts, on one of 2 ranks
    forecast = forecast_local(model, job.make_optimizer, world.size, 0, rows)
    assert forecast is not None
    return found.as_plain(), forecast.model_dump()


def test_the_plan_says_it(gloo_pool: GlooPool, tmp_path: Path) -> None:
    for found, forecast in gloo_pool.run(planned, str(tmp_path), world=2, **LIMIT):
        choices, memory = found["choices"], found["forecast"]["memory"]
        assert choices["distributed.strategy"]["value"] == "expert_parallel"
        assert "2 blocks (blocks.0 to blocks.1" in choices["distributed.strategy"]["why"]
        assert choices["distributed.expert_rest"]["value"] == "fsdp", "a plan's file pins it"
        assert memory["parameters"] == forecast["parameters"] + forecast["buffers"]
        assert memory["optimizer"] == forecast["optimizer"]


# What may go wrong


def scaled_steps(poisoned_rank: int | None) -> tuple[list[float], float, list[float]]:
    """Three fp16 steps with loss scaling; in the second an expert's gradient on one rank is infinite."""
    world = world_here()
    torch.manual_seed(1)
    model = Deep()
    job = make_job(Variant(), optimizer=sgd)
    strategy, optimizer = made("experts+fsdp", world, model, job)
    assert isinstance(strategy, ShardedExpertParallelStrategy)
    parts = StrategyParts(model, mixture_loss, optimizer, 1.0, Precision("fp16", "cpu"))
    generator = torch.Generator().manual_seed(7)
    batch = [torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)]
    objective = strategy.prepare(parts, Trial(batch, 8))
    skipped = []
    for number in range(3):
        strategy.backward(objective(batch, 8, 8 * world.size, 1))
        if number == 1 and world.rank == poisoned_rank:
            gradient = next(iter(strategy.experts.held.values())).parameter.grad
            assert gradient is not None
            gradient.view(-1)[0] = float("inf")
        skipped.append(float(strategy.step(False).skipped))
    shards, meta = strategy.save()
    own = [shard.tensor.flatten().double() for shard in shards if shard.key.startswith("model/")]
    strategy.close()
    return skipped, float(meta["scaler"]["scale"]), torch.cat(own).tolist()


def test_infinite_gradients_of_one_ranks_experts_are_skipped_by_all(gloo_pool: GlooPool) -> None:
    good = gloo_pool.run(scaled_steps, None, world=2)
    bad = gloo_pool.run(scaled_steps, 1, world=2)
    assert [rank[0] for rank in good] == [[0.0, 0.0, 0.0]] * 2
    assert [rank[0] for rank in bad] == [[0.0, 1.0, 0.0]] * 2
    assert {rank[1] for rank in bad} == {good[0][1] / 2}, "the scale fell once, on all ranks alike"
    assert not np.isnan([rank[2] for rank in bad][1]).any()


def drive(folder: str, settings: dict[str, Any]) -> tuple[list[float], dict[str, Any]] | None:
    """A loop of one's own, whose optimizer has stepped before."""
    variant = Variant(steps=6, global_batch=12, num_samples=60)
    torch.manual_seed(3)
    model = MixtureModel(Mixture(num_experts=5)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Vectors(variant)
    functional.cross_entropy(model.eval()(data.inputs[:20]), data.labels[:20]).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.train()
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, batch_size=3, report=False, **settings)
    driven = dt.drive(model, optimizer, data, global_batch=12, max_steps=6, clip_norm=0.5, config=config, quiet=True)
    for batch in driven:
        driven.backward(functional.cross_entropy(driven.model(batch[0]), batch[1]))
        driven.step()
    if not driven.world.is_main:
        return None
    found = read(driven.folder)
    return found.losses, found.weights | found.state


@pytest.mark.parametrize("settings", [EXPERT_PARALLEL, SHARDED], ids=["ddp", "fsdp"])
def test_a_loop_of_ones_own(gloo_pool: GlooPool, tmp_path: Path, settings: dict[str, Any]) -> None:
    alone = drive(str(tmp_path / "alone"), {})
    shared = gloo_pool.run(drive, str(tmp_path / "shared"), settings, world=2, **LIMIT)[0]
    assert alone is not None
    assert shared[0] == pytest.approx(alone[0], rel=1e-9)
    for key, value in alone[1].items():
        assert np.allclose(shared[1][key], value, rtol=0, atol=1e-9), key


def refusals(folder: str) -> list[str]:
    variant = Variant(dtype=torch.float32, steps=4, global_batch=8)
    words = []
    asleep = {"model": fresh, "loss": mixture_loss, "hooks": [Sleep(2, NIGHTS)]}
    for number, changes in enumerate([{}, asleep]):
        try:
            run(f"{folder}/{number}", variant, 4, settings=SHARDED, **changes)
        except DrivetrainError as error:
            words.append(str(error))
    return words


def test_what_it_cannot_do_is_said(gloo_pool: GlooPool, tmp_path: Path) -> None:
    for without, asleep in gloo_pool.run(refusals, str(tmp_path), world=2, **LIMIT):
        assert "no mixture of experts" in without
        assert "--parallel-strategy ddp or fsdp" in without
        assert "sleep trains on remembered samples" in asleep
        assert "--expert-rest ddp" in asleep
