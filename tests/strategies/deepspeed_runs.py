"""What the ranks of the DeepSpeed suite run: at the top of a module, so that worker processes find it by name."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import drivetrain as dt
from drivetrain.api.training import train
from drivetrain.checkpoint import Checkpointer
from drivetrain.config import configure
from drivetrain.core.hook import StepContext
from drivetrain.core.precision import Precision
from drivetrain.core.world import World
from drivetrain.strategies import (
    Average,
    DdpStrategy,
    DeepSpeedStrategy,
    SingleStrategy,
    Strategy,
    StrategyParts,
    Trial,
)
from drivetrain.strategies.zero import ZeroFacts, derive
from tests.api.jobs import Trained, Variant, make_job, run
from tests.api.test_resume import MICRO_BATCH, CrashingLoss, PlantedError
from tests.strategies.fsdp_runs import Branched, Odd, crash_with, run_with, world_here

__all__ = ["crash_with", "run_with"]

# Everything is cut, in small pieces, as it would be in a large model.
TINY_PIECES = {
    "zero_optimization": {
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 300,
        "reduce_bucket_size": 100,
        "allgather_bucket_size": 100,
        "stage3_prefetch_bucket_size": 100,
        "stage3_max_live_parameters": 300,
    }
}


def zero(stage: int, offload: bool = False) -> dict[str, Any]:
    return {"parallel_strategy": "deepspeed", "zero_stage": stage, "offload_optimizer": offload}


def zero_run(folder: str, variant: Variant, micro_batch: int | None, settings: dict[str, Any]) -> Trained | None:
    return run(folder, variant, micro_batch, settings=settings)


def crash(folder: str, variant: Variant, at_call: int, settings: dict[str, Any], ema: float | None = None) -> bool:
    loss = CrashingLoss(make_job(variant).loss, at_call)
    try:
        run(folder, variant, MICRO_BATCH, settings=settings, loss=loss, ema=ema)
    except PlantedError:
        return True
    return False


class OddInFloat(Odd):
    """Without what DeepSpeed refuses: other types, and a weight without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.float()
        self.scale = nn.Parameter(torch.tensor([1.5]))


def odd_run(folder: str, settings: dict[str, Any], ema: float | None) -> tuple[Trained, list[float]] | None:
    """Tied, frozen, transposed weights, and buffers that change; validated between steps. Not with Adam: before a batch
    norm a bias has a gradient of zero but for rounding, of which Adam makes whole steps."""
    from tests.api.jobs import read

    variant = Variant("mlp", torch.float32, global_batch=12, steps=5, num_samples=36)
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, batch_size=2, report=False, **settings)
    optimizer = lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)  # noqa: E731
    valid = make_job(variant).data
    job = make_job(variant, model=OddInFloat, ema=ema, valid=valid, valid_every=2, optimizer=optimizer)
    result = train(job, config, quiet=True)
    if not result.is_main:
        return None
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return read(result.folder), [row["valid_loss"] for row in rows]


def made_strategy(kind: str, world: World, own: dict[str, Any] | None = None) -> Strategy:
    """`single`, `ddp`, or `zero-1` to `zero-3`, with `-offload`."""
    if kind == "single":
        return SingleStrategy(world)
    if kind == "ddp":
        return DdpStrategy(world)
    stage, offload = int(kind.split("-")[1]), kind.endswith("offload")
    facts = ZeroFacts("fp32", world.size, 4, 1, 4 * world.size, 1.0, stage, offload)
    return DeepSpeedStrategy(world, derive(facts, own))


def pass_on(folder: str, kind: str, steps: int, averages: bool = False) -> dict[str, Any] | None:
    """Loads the newest checkpoint of a folder, if there is one; trains some steps; saves. Returns what it saved."""
    world = world_here()
    torch.manual_seed(100 + world.rank)  # other weights on every rank: those of rank 0, or the checkpoint's, must win
    model = OddInFloat()
    job = make_job(Variant())
    optimizer = job.make_optimizer(model)
    strategy = made_strategy(kind, world, TINY_PIECES)
    average = Average(model, 0.5) if averages else None
    parts = StrategyParts(model, job.loss, optimizer, 1.0, average=average)
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
    checkpointer.save((before.step if before else 0) + 1, *strategy.save())
    saved = checkpointer.latest()
    assert saved is not None
    strategy.close()
    checkpointer.close()
    if not world.is_main:
        return None
    tensors = {key: saved.read(key).numpy() for key in saved.keys}
    return {"tensors": tensors, "groups": saved.meta["optimizer_groups"]}


def branched(folder: str, settings: dict[str, Any]) -> None:
    rank = world_here().rank
    run(folder, Variant("mlp", torch.float32, 12, steps=2), 3, settings=settings, model=lambda: Branched(rank))


def poisoned(folder: str, settings: dict[str, Any]) -> None:
    """A loss that is not finite, on the last rank only."""
    world, calls = world_here(), [0]

    def loss(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        value = functional.cross_entropy(model(batch[0]), batch[1])
        return value * (float("nan") if calls[0] == 4 and world.rank == world.size - 1 else 1.0)

    given = {**settings, "bad_steps": "stop"}
    run(folder, Variant(dtype=torch.float32, steps=6, global_batch=12), None, settings=given, loss=loss)


def stopped(folder: str, settings: dict[str, Any]) -> tuple[int, bool]:
    """The last rank alone asks to stop after its second step."""
    import os
    import signal

    world, calls = world_here(), [0]

    def loss(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 3 and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return functional.cross_entropy(model(batch[0]), batch[1])

    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False, **settings)
    job = make_job(Variant(dtype=torch.float32, steps=20, global_batch=12), loss=loss)
    result = train(job, config, quiet=True)
    return result.steps, result.finished


def refused(folder: str, what: str) -> str:
    variant = Variant("mlp", torch.float32, 12, steps=2)
    settings, changes = zero(2), {}
    if what == "float64":
        changes["model"] = make_job(Variant()).model
    elif what == "scalar":
        changes["model"] = lambda: Odd().float()
    elif what == "adagrad":
        changes["optimizer"] = lambda groups: torch.optim.Adagrad(groups, lr=0.1)
    elif what == "adafactor":
        changes["optimizer"] = lambda groups: torch.optim.Adafactor(groups, lr=0.1)
    elif what == "ema":
        settings, changes["ema"] = zero(3), 0.9
    try:
        run(folder, variant, 3, settings=settings, **changes)
    except dt.DrivetrainError as error:
        return str(error)
    return ""


def held_bytes(kind: str) -> tuple[int, int]:
    """What this rank would write, and all of the state."""
    world = world_here()
    model = OddInFloat()
    job = make_job(Variant())
    strategy = made_strategy(kind, world, TINY_PIECES)
    batch = [torch.randn(4, 6), torch.randint(0, 4, (4,))]
    objective = strategy.prepare(StrategyParts(model, job.loss, job.make_optimizer(model), 1.0), Trial(batch, 4))
    strategy.backward(objective(batch, 4, 4 * world.size, 1))
    strategy.step(False)
    own = sum(shard.tensor.nbytes for shard in strategy.save()[0])
    strategy.close()
    return own, sum(world.gather(own))


def seen_by_a_hook(folder: str, settings: dict[str, Any]) -> list[float]:
    """A forward in a hook, without gradients, between steps."""
    seen: list[float] = []

    class Look:
        every = 1

        def __call__(self, context: StepContext) -> None:
            with torch.no_grad():
                seen.append(float(context.model(torch.ones(2, 6)).square().sum()))

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    run(folder, Variant("mlp", torch.float32, 12, steps=4), 3, settings=settings, hooks=[Look()])
    return seen


class SometimesUnused(nn.Module):
    """From a call on, one of its layers is not used any more; with 0, it is never used."""

    def __init__(self, until_call: int) -> None:
        super().__init__()
        self.until_call, self.calls = until_call, 0
        self.first, self.side, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.first(inputs)
        if self.calls <= self.until_call:
            hidden = hidden + self.side(hidden)
        result: Tensor = self.out(hidden)
        return result


def run_unused(folder: str, until_call: int, decay: float, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The weights at the end, and those of the layer at the start."""
    torch.manual_seed(4)
    made = SometimesUnused(until_call)
    first = {name: value.detach().numpy().copy() for name, value in made.side.named_parameters()}
    variant = Variant("mlp", torch.float32, 12, num_samples=60, steps=4)
    changes = {"model": lambda: made, "weight_decay": None}
    changes["optimizer"] = lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=decay)
    trained = run(folder, variant, 6, settings=settings, **changes)
    return None if trained is None else {"weights": trained.weights, "first": first}


def run_with_bad_gradients(folder: str, bad_calls: list[int], settings: dict[str, Any]) -> list[bool] | None:
    """Finite losses whose gradients are not, at some calls of the loss: which steps were skipped."""
    calls = [0]

    def loss(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        value = functional.cross_entropy(model(batch[0]), batch[1])
        if calls[0] in bad_calls or not bad_calls:
            value = value + (value * 0).sqrt()  # 0, and nan in backward
        return value

    trained = run(folder, Variant("mlp", torch.float32, 12, num_samples=60, steps=5), 6, settings=settings, loss=loss)
    return None if trained is None else [row["skipped"] for row in trained.rows]


def scaled(folder: str, kind: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Six steps in fp16 with a count of its own on every rank; the third overflows on the last rank."""
    world = world_here()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(called: Any, batch: Any) -> dt.LossSum:
        inputs, targets = batch
        total = functional.cross_entropy(called(inputs).float(), targets, reduction="sum", ignore_index=0)
        return dt.LossSum(total, (targets != 0).sum())

    parts = StrategyParts(model, loss, optimizer, 1.0, precision=Precision("fp16", "cpu"))
    if kind == "ddp":
        strategy: Strategy = DdpStrategy(world)
        parts.scaler.load_state_dict(scaling)
    else:
        facts = ZeroFacts("fp16", world.size, 4, 1, 4 * world.size, 1.0, int(kind[5]), kind.endswith("offload"))
        strategy = DeepSpeedStrategy(world, derive(facts), scaling=scaling)
    generator = torch.Generator().manual_seed(7 + world.rank)
    batches = [
        [torch.randn(4, 6, generator=generator), torch.randint(0, 4, (4,), generator=generator)] for _ in range(6)
    ]
    if world.rank == world.size - 1:
        batches[2][0] *= 1e8
    objective = strategy.prepare(parts, Trial(batches[0], 4))
    rows = []
    for batch in batches:
        strategy.backward(objective(batch, 4, 4 * world.size, 1))
        outcome = strategy.step(False)
        assert outcome.grad_norm is not None
        total = sum(float(value) * weight for value, weight in outcome.losses)
        rows.append(
            (
                total / float(outcome.num_items),
                float(outcome.grad_norm),
                float(outcome.skipped),
                parts.scaler.get_scale(),
            )
        )
    _, meta = strategy.save()
    weights = {name: value.detach().float().clone().numpy() for name, value in model.named_parameters()}
    strategy.close()
    return {"rows": rows, "scaler": meta["scaler"], "weights": weights}
