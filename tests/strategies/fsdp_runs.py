"""What the ranks of the FSDP suites run: at the top of a module, so that worker processes find it by name."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

import drivetrain as dt
from drivetrain.api import training
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.hook import StepContext
from drivetrain.core.precision import FP32_ON_CPU, Precision
from drivetrain.core.world import World
from drivetrain.plan import tune
from drivetrain.plan.fitting import num_bytes
from drivetrain.plan.knobs import StepWay
from drivetrain.plan.tune import Measurement
from drivetrain.planning import planner
from drivetrain.planning.planner import make_plan
from drivetrain.planning.trials import ShardedProbe
from drivetrain.run.model_factory import build_model
from drivetrain.run.session import Session
from drivetrain.strategies import Average, FsdpStrategy, ShardOptions, SingleStrategy, StrategyParts, Trial
from drivetrain.strategies.sharding import build, forecast_local, shard
from tests.api.jobs import Trained, Variant, make_job, read, run
from tests.api.test_resume import MICRO_BATCH, CrashingLoss, PlantedError


def world_here(device: str = "cpu") -> World:
    return World.join([torch.device(device)])


def run_with(
    folder: str,
    strategy: str,
    variant: Variant,
    micro_batch: int | None,
    settings: dict[str, Any] | None = None,
    ema: float | None = None,
) -> Trained | None:
    return run(folder, variant, micro_batch, settings={"parallel_strategy": strategy, **(settings or {})}, ema=ema)


def crash_averaging(folder: str, strategy: str, variant: Variant, at_call: int) -> bool:
    return crash_with(folder, strategy, variant, at_call, ema=0.9)


def crash_with(
    folder: str,
    strategy: str,
    variant: Variant,
    at_call: int,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> bool:
    loss = CrashingLoss(make_job(variant).loss, at_call)
    given = {"parallel_strategy": strategy, **(settings or {})}
    try:
        run(folder, variant, MICRO_BATCH, settings=given, loss=loss, **changes)
    except PlantedError:
        return True
    return False


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return result


class Odd(nn.Module):
    """All that is awkward to cut: 7 rows for any world, 1 row, a number, a weight that is not contiguous, tied weights,
    frozen ones, a weight of another type, buffers that change and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.randn(1, 7))
        self.turned = nn.Parameter(torch.randn(4, 7).t())
        self.rough = nn.Parameter(torch.zeros(7))
        self.back = nn.Linear(7, 6, bias=False)
        self.again = nn.Linear(7, 6, bias=False)
        self.again.weight = self.back.weight
        self.register_buffer("signs", torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]), persistent=False)
        self.double()
        self.rough.data = self.rough.data.float()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs) * self.signs
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(self.frozen(hidden) + self.one) + self.rough.to(hidden.dtype)
        hidden = self.first(self.back(hidden) + self.again(hidden).tanh())
        result: Tensor = hidden @ self.turned * self.scale
        return result


def odd_job(folder: str, strategy: str, **settings: Any) -> Trained | None:
    """The awkward model, with an average that is validated between steps. Its norm sees parts of a batch, and rank 0's
    statistics count: it can only be compared with another strategy in the same world."""
    variant = Variant("mlp", torch.float64, global_batch=12, steps=5, num_samples=36)
    config = configure(
        output_dir=folder,
        gpu_mode="cpu",
        num_workers=0,
        batch_size=2,
        report=False,
        parallel_strategy=strategy,
        **settings,
    )
    job = make_job(variant, model=Odd, ema=0.9, valid=make_job(variant).data, valid_every=2)
    result = train(job, config, quiet=True)
    if not result.is_main:
        return None
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return replace(read(result.folder), rows=[{"valid": row["valid_loss"]} for row in rows])


def held_and_forecast(kind: str, replicas: int = 1) -> tuple[dict[str, int], dict[str, int], int]:
    """What this rank holds after a step, by what has memory; the forecast; and the whole model's bytes."""
    world = world_here()
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
        "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
    }
    job = make_job(Variant(), model=Odd, optimizer=makers[kind])
    torch.manual_seed(0)
    made = Odd()
    whole = num_bytes(made.parameters())
    num_ranks = world.size // replicas
    forecast = forecast_local(made, job.make_optimizer, num_ranks, world.rank % num_ranks)
    assert forecast is not None
    sharded = shard(made, world, ShardOptions(replicas=replicas), FP32_ON_CPU)
    optimizer = job.make_optimizer(made)
    sharded.take_over(optimizer)
    strategy = FsdpStrategy(world, sharded)
    batch = [torch.randn(4, 6, dtype=torch.float64), torch.randint(0, 4, (4,))]
    parts = StrategyParts(made, job.loss, optimizer, 1.0)
    objective = strategy.prepare(parts, Trial(batch, 4))
    strategy.backward(objective(batch, 4, 4 * world.size, 1))
    owned = [*sharded.parameters.values(), *sharded.replicated.values()]
    before = [parameter for parameter, name in sharded.replaced.items() if name not in sharded.replicated]
    assert num_bytes(before) == 0, "the whole weights are kept beside the shards"
    gradients = num_bytes(local(p.grad) for p in owned if p.grad is not None)
    strategy.step(False)
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    held = {
        "parameters": num_bytes(local(parameter) for parameter in owned),
        "buffers": num_bytes(made.buffers()),
        "gradients": gradients,
        "optimizer": num_bytes(state),
    }
    return held, forecast.model_dump(), whole


def units_seen(changes: dict[str, Any]) -> dict[str, Any]:
    """How a model of five blocks is gathered: its units, what is gathered when a block computes, and after forward."""
    world = world_here()
    model = nn.Sequential(nn.Linear(4, 4), *(Block(4) for _ in range(5)))
    sharded = shard(model, world, ShardOptions(**changes), FP32_ON_CPU)
    blocks = [cast(Any, module) for module in model if isinstance(module, Block)]
    groups = [block._get_fsdp_state()._fsdp_param_group for block in blocks]

    def is_gathered(number: int) -> bool:
        return bool(groups[number].is_unsharded or groups[number]._all_gather_result is not None)

    at: dict[int, list[int]] = {}

    def look(block: nn.Module, _: Any) -> None:
        at[blocks.index(block)] = [number for number in range(5) if is_gathered(number)]

    for block in blocks:
        block.register_forward_pre_hook(look)
    output = model(torch.ones(2, 4))
    after = [number for number in range(5) if is_gathered(number)]
    output.sum().backward()
    return {
        "units": [groups.index(group) for group in groups],
        "at": [at[number] for number in range(5)],
        "after": after,
        "words": sharded.in_words,
        "names": sharded.unit_names,
    }


def local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor
    return part


def scaled_steps(poisoned_rank: int | None) -> tuple[list[float], list[float], float, list[float]]:
    """Three fp16 steps with loss scaling, infinite gradients on one rank in the second: skipped, scale, weights."""
    world = world_here()
    torch.manual_seed(1)
    model = nn.Linear(6, 4)  # on 3 ranks: two rows, two rows, none
    job = make_job(Variant())
    sharded = shard(model, world, ShardOptions(), FP32_ON_CPU)
    optimizer = job.make_optimizer(model)
    sharded.take_over(optimizer)
    poison = [False]

    def loss(made: Any, batch: Any) -> Tensor:
        value = functional.cross_entropy(made(batch[0]), batch[1])
        # Infinite is the gradient of the first row alone, which rank 0 has.
        return value + (made(batch[0])[:, :1].sum() * float("inf") if poison[0] else 0.0)

    strategy = FsdpStrategy(world, sharded)
    precision = Precision("fp16", "cpu")
    parts = StrategyParts(model, loss, optimizer, 1.0, precision, average=Average(model, 0.9))
    generator = torch.Generator().manual_seed(7)
    batch = [torch.randn(4, 6, generator=generator), torch.randint(0, 4, (4,), generator=generator)]
    objective = strategy.prepare(parts, Trial(batch, 4))
    skipped, norms = [], []
    for number in range(3):
        poison[0] = number == 1 and poisoned_rank == world.rank
        strategy.backward(objective(batch, 4, 4 * world.size, 1))
        outcome = strategy.step(False)
        skipped.append(float(outcome.skipped))
        norms.append(float(outcome.grad_norm or 0.0))
    shards, meta = strategy.save()
    flat = torch.cat([s.tensor.flatten().double() for s in shards if s.key.startswith("model/")] or [torch.zeros(0)])
    return skipped, norms, float(meta["scaler"]["scale"]), flat.tolist()


def drive_with(folder: str, strategy: str, steps: int) -> tuple[list[float], dict[str, Any]] | None:
    variant = Variant("mlp", torch.float64, global_batch=12, steps=steps, num_samples=60)
    torch.manual_seed(variant.seed)
    job = make_job(variant)
    model = job.model() if callable(job.model) else job.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = configure(
        output_dir=folder, gpu_mode="cpu", num_workers=0, batch_size=2, report=False, parallel_strategy=strategy
    )
    driven = dt.drive(
        model, optimizer, job.data, global_batch=12, max_steps=steps, seed=3, clip_norm=0.5, config=config, quiet=True
    )
    for batch in driven:
        driven.backward(functional.cross_entropy(driven.model(batch[0]), batch[1]))
        driven.step()
    if not driven.world.is_main:
        return None
    rows = [json.loads(line) for line in (driven.folder / "steps.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows], read(driven.folder).weights


def what_a_hook_sees(folder: str) -> dict[str, Any]:
    """In a hook, after a validation: parameters by kind, the whole weights, and the loss of a forward there."""
    seen: dict[str, Any] = {}

    class Look:
        every = 2

        def __call__(self, context: StepContext) -> None:
            parameters = dict(context.model.named_parameters())
            seen["kinds"] = sorted({type(parameter).__name__ for parameter in parameters.values()})
            seen["shapes"] = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
            whole: Any = parameters["layers.0.weight"]
            seen["whole"] = whole.full_tensor().detach().numpy()
            with torch.no_grad():
                seen["output"] = context.model(torch.ones(2, 6)).numpy()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    variant = Variant("mlp", torch.float32, global_batch=12, steps=2, num_samples=24)
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False, parallel_strategy="fsdp")
    job = make_job(variant, hooks=[Look()], valid=make_job(variant).data, valid_every=1)
    result = train(job, config, quiet=True)
    if result.is_main:
        seen["saved"] = read(result.folder).weights["model/layers.0.weight"]
        events = (result.folder / "events.jsonl").read_text()
        seen["events"] = [json.loads(line) for line in events.splitlines()]
    return seen


class Failing(nn.Module):
    """Made without memory it fails: it looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]
        self.table = torch.arange(4.0)
        self.out = nn.Linear(6, 4)


class Loose(nn.Module):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"rows": [torch.arange(4.0)]}
        self.out = nn.Linear(6, 4)


class Numbers(nn.Module):
    """Several weights that stay whole, all of one shape: nobody would notice if they were mixed up."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(()) for _ in range(12))
        self.out = nn.Linear(6, 4)


def built(kind: str) -> tuple[bool, list[float]]:
    """Whether this rank built it without memory; and the weights that it has after rank 0's were sent."""
    world = world_here()
    torch.manual_seed(100 + world.rank)  # other weights on every rank: those of rank 0 must win
    makers: dict[str, Callable[[], nn.Module]] = {
        "odd": Odd,
        "failing": Failing,
        "loose": Loose,
        "numbers": Numbers,
    }
    model = build(makers[kind], world)
    without_memory = any(parameter.is_meta for parameter in model.parameters())
    sharded = shard(model, world, ShardOptions(), FP32_ON_CPU)
    whole = [p.full_tensor() for p in sharded.parameters.values()]  # type: ignore[attr-defined]
    whole += [*sharded.replicated.values(), *model.buffers()]
    return without_memory, torch.cat([tensor.detach().double().flatten() for tensor in whole]).tolist()


def make_other_models() -> None:
    world = world_here()
    shard(nn.Linear(4, 4 + world.rank), world, ShardOptions(), FP32_ON_CPU)


def run_with_poison(folder: str) -> None:
    """A loss that is not finite, on the last rank only."""
    world = world_here()
    calls = [0]

    def loss(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        value = functional.cross_entropy(model(batch[0]), batch[1])
        return value * (float("nan") if calls[0] == 4 and world.rank == world.size - 1 else 1.0)

    run_settings = {"parallel_strategy": "fsdp", "bad_steps": "stop"}
    run(folder, Variant(steps=6, global_batch=12), None, settings=run_settings, loss=loss)


def stop_on_last_rank(folder: str) -> tuple[int, bool]:
    """The last rank alone asks to stop after its second step."""
    world = world_here()
    calls = [0]

    def loss(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 3 and world.rank == world.size - 1:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)
        return functional.cross_entropy(model(batch[0]), batch[1])

    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False, parallel_strategy="fsdp")
    result = train(make_job(Variant(steps=20, global_batch=12), loss=loss), config, quiet=True)
    return result.steps, result.finished


def alone_steps(batch: list[Tensor], steps: int) -> list[float]:
    """The same three steps as `scaled_steps`, in one process that holds all of it, without scaling."""
    torch.manual_seed(1)
    model = nn.Linear(6, 4)  # on 3 ranks: two rows, two rows, none
    job = make_job(Variant())
    strategy = SingleStrategy(World())
    precision = Precision("fp16", "cpu")
    parts = StrategyParts(model, job.loss, job.make_optimizer(model), 1.0, precision)
    objective = strategy.prepare(parts, Trial(batch, 4))
    norms = []
    for _ in range(steps):
        strategy.backward(objective(batch, 4, 4, 1))
        norms.append(float(strategy.step(False).grad_norm or 0.0))
    return norms


class Branched(nn.Module):
    """Every rank uses another part of it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.branches[self.rank % 2](inputs))
        return result


def run_branched(folder: str, strategy: str) -> Trained | None:
    rank = world_here().rank
    settings = {"parallel_strategy": strategy, "find_unused_parameters": True}
    variant = Variant("mlp", torch.float64, 12, num_samples=60, steps=4)
    return run(folder, variant, 3, settings=settings, model=lambda: Branched(rank).double())


@contextmanager
def everything_is_tried() -> Iterator[None]:
    """Have the planner measure short jobs, too, with nothing from earlier starts."""
    limits = {"LEAST_STEPS": 1, "LEAST_JOB_SECONDS": 0.0, "BUDGET_SHARE": 1e9}
    with ExitStack() as stack:
        for name, value in limits.items():
            stack.enter_context(mock.patch.object(planner, name, value))
        yield


def plan_and_train(
    folder: str, variant: Variant, at_call: int = 0, settings: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Trained | None]:
    """Train as planned by measuring; a crash at some call of the loss after planning ends it. Returns the plan."""
    given = {"parallel_strategy": "fsdp", "plan_cache": False, "compile": False, **(settings or {})}
    loss = CrashingLoss(make_job(variant).loss, 0)
    trained = None

    def plan_first(*args: Any) -> Any:
        planned = make_plan(*args)
        loss.at_call = at_call and loss.calls + at_call
        return planned

    briefly = mock.patch.object(tune, "MOST_SECONDS", 0.05)  # which way is the fastest does not matter
    with everything_is_tried(), briefly, mock.patch.object(training, "make_plan", plan_first):
        try:
            trained = run(folder, variant, None, settings=given, loss=loss)
        except PlantedError:
            assert at_call
    return yaml.safe_load((Path(folder) / "suite" / "plan.yaml").read_text()), trained


def plan_by_figures(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Plan with the seconds that each rank says a way takes, by its words: the way that this rank is to follow."""
    rank = world_here().rank

    def figure(probe: Any, way: StepWay, given_seconds: float, num_parts: int) -> Measurement:
        return Measurement(sample_seconds=seconds.get(str(way), [3.0, 3.0])[rank], is_brief=not given_seconds)

    followed: list[StepWay] = []
    job = make_job(Variant("transformer", global_batch=12, num_samples=60, steps=400, num_layers=4))
    config = configure(gpu_mode="cpu", parallel_strategy="fsdp", plan_cache=False, compile=False, num_workers=0)
    session = Session.join(job, config, quiet=True)
    with everything_is_tried(), mock.patch.object(ShardedProbe, "_run", figure):
        followed.append(make_plan(session, build_model(session), None).way)
    return followed[0].model_dump()
