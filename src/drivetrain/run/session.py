"""A run on one rank: its world and devices, its settled job, its folder, and the plan it follows."""

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self, TypedDict

import torch
from torch import nn

from drivetrain.checkpoint import Checkpoint
from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.launchers import is_restart, supervision
from drivetrain.core.log import notice
from drivetrain.core.optims import Turn
from drivetrain.core.precision import Precision, num_threads, numerics
from drivetrain.core.processes import refuse_while_importing
from drivetrain.core.run_folder import Extension, RunFolder
from drivetrain.core.safe_text import redacted_words
from drivetrain.core.world import World
from drivetrain.data.division import Division
from drivetrain.data.loader import Loader
from drivetrain.hardware import DeviceManager, Hardware, assert_on_device, detect
from drivetrain.job import Job
from drivetrain.loop import own_stream
from drivetrain.plan import Choice, Pins, choose_settings
from drivetrain.plan.data_path import DataPath
from drivetrain.plan.knobs import Asked, StepWay, pinned_fields, way_by_rule
from drivetrain.plan.loss_weighting import LossRule, Weighting
from drivetrain.plan.plan import PlannedRun
from drivetrain.run.claiming import claim_folder, note_failure
from drivetrain.run.command_context import (
    count_run,
    given_on_command_line,
    obey_launcher,
    share_workers,
    target_of_run,
    unused_gpus,
)
from drivetrain.run.extending import extended
from drivetrain.run.job_settings import debugged, given_strategy, refuse_strategy, settled_job
from drivetrain.run.preflight import Preflight, run_preflight
from drivetrain.run.residency import Residency
from drivetrain.strategies import (
    Description,
    Sharded,
    SharedExperts,
    Strategy,
    StrategyContext,
    StrategySpec,
    strategy_spec,
)
from drivetrain.strategies.base import LossFunction
from drivetrain.strategies.compiling import num_graphs
from drivetrain.strategies.loss_parts import LossParts
from drivetrain.strategies.step_log import StepLog

SOURCE = "source.json"


def _on_gpu(devices: Sequence[torch.device]) -> bool:
    return any(device.type == "cuda" for device in devices)


class Session:
    """One run on one rank: who takes part, where, on what, by which plan. `join` makes it, the caller closes it."""

    path: Path  # of the run's folder, once it is claimed
    extensions: tuple[Extension, ...] = ()  # that made the run longer, once the folder is claimed
    is_recorded = False  # whether a recorder was opened, which writes down how the run ends
    _folder: RunFolder | None = None  # on the main process
    strategy: str  # its name, once it is chosen
    preflight: Preflight | None = None  # what it found, where there was one
    strategy_choice: Choice[str]  # with its reason; by the number of processes until the model is made
    sharded: Sharded | None = None  # the model, where ranks hold parts of it
    experts: SharedExperts | None = None  # its experts, where these are shared out and the rest is sharded
    _made_strategy: Strategy | None = None
    _num_weights: int | None = None  # once the model is made
    fingerprint = ""  # of the job, once it was taken
    weighs_first_batch = False  # whether that is found out on the first batch, which has to be read first
    description: Description | None = None  # what the strategy adds to the record, once it is made

    @classmethod
    def join(
        cls, job: Job, config: Config | None, *, quiet: bool, fresh: bool | None = None, extend: bool = False
    ) -> Self:
        """Find the devices and join the world, which the caller closes.

        Args:
            job: What to train.
            config: How to run it; None: as the command line says.
            quiet: Whether to print nothing.
            fresh: Whether to move a run of this name aside; None: as the configuration says.
            extend: Whether to make a run of this name longer, besides what the configuration says.
        """
        refuse_while_importing()
        count_run()
        config = _of_this_start(config or given_on_command_line() or Config(), fresh=fresh, extend=extend)
        place = World.detect()
        config, notes = obey_launcher(config, place)
        hardware = detect(config.run.output_dir)
        devices = DeviceManager(hardware, config.device.mode, config.device.device, config.device.ids).devices
        if config.distributed.strategy != "auto":
            config, others = strategy_spec(config.distributed.strategy).settle(config, _on_gpu(devices))
            notes += others
        notes += config.notes
        config = share_workers(config, place)
        world = World.join(
            devices,
            backend=None if config.distributed.backend == "auto" else config.distributed.backend,
            init_method=config.distributed.init_method,
            timeout_seconds=config.distributed.timeout_seconds,
        )
        try:
            quiet = quiet or config.watch.quiet or not world.is_main
            notes.append(unused_gpus(place, devices, config.distributed.strategy, target_of_run()))
            for note in filter(None, () if quiet else notes):
                notice(note)
            session = cls(job, config, hardware, world, devices, quiet=quiet)
            session.preflight = run_preflight(session.job, config, hardware, world, target_of_run())
            return session
        except BaseException:
            world.close()
            raise

    def __init__(
        self,
        job: Job,
        config: Config,
        hardware: Hardware,
        world: World,
        devices: Sequence[torch.device],
        *,
        quiet: bool,
    ) -> None:
        self.config, self.hardware, self.world, self.quiet = config, hardware, world, quiet
        self.began = time.monotonic()
        refuse_strategy(config, world, devices)
        asked = config.distributed.strategy
        self.strategy_choice = given_strategy(asked, world.size)
        self.devices = devices if self.spec.devices == "several" else [world.device]  # of this process
        self.settings = choose_settings(hardware, Pins(**config.pins()))
        job = debugged(job, config, self.num_devices) if config.run.debug else job
        self.name = config.run.name or job.name
        folder = config.run.output_dir / self.name
        self.job, self.batch_by_rule = settled_job(job, config, self.settings, world, self.num_devices, folder)
        self._rule = LossRule(Weighting())
        self._turn_rules = {turn.name: LossRule(Weighting()) for turn in job.turns}
        self._turn_parts = {turn.name: LossParts(None, None, world) for turn in job.turns}
        self.loss_parts = LossParts(job.loss_weights, job.count, world)
        self.step_log = StepLog(world)
        self.residency = Residency(self.config, self.world.device, hardware.memory.free_bytes, quiet=quiet)
        self.loaders: list[Loader] = []
        self.follow(PlannedRun(self.by_rule()))
        if asked != "auto":
            self.spec.check(self._strategy_context())

    def by_rule(self) -> StepWay:
        """Return how a step is run where nothing was measured."""
        return way_by_rule(Asked(self.config.value, self.settings, self.rank_samples, len(self.devices)))

    def follow(self, planned: PlannedRun) -> None:
        """Work as planned from now on. Called before the parts are built that depend on it."""
        self.planned = planned
        self.precision = Precision(planned.way.precision, self.world.device.type)

    @property
    def way(self) -> StepWay:
        """How steps are run."""
        return self.planned.way

    def trying(self, way: StepWay) -> Self:
        """Return this run with steps run another way, to try it. It says nothing, and leaves this one as it is."""
        trial = copy.copy(self)
        trial.quiet = True
        trial.follow(replace(self.planned, way=way))
        return trial

    def of_turn(self, turn: Turn) -> Self:
        """Return this run with the loss of one turn alone: how that is weighted, and the parts it has."""
        found = copy.copy(self)
        found.job = self.job.of_turn(turn)
        found._rule, found.loss_parts = self._turn_rules[turn.name], self._turn_parts[turn.name]
        return found

    def recorded_way(self, checkpoint: Checkpoint) -> StepWay | None:
        """Return how steps before a checkpoint were run, except what is pinned now; None if world or machine differ."""
        recorded = checkpoint.meta["plan"]
        if recorded["world_size"] != self.world.size or recorded.get("machine") != self.machine():
            return None
        pinned = {name: getattr(self.way, name) for name in self.pinned()}
        return StepWay.model_validate(recorded["way"] | pinned)

    def _data_followed(self) -> dict[str, Any] | None:
        """Return how samples reach the device, where that was measured."""
        path = self.planned.data_path
        if path is None:
            return None
        return (DataPath(resident=True) if path.resident else path).model_dump(mode="json")

    def pinned(self) -> set[str]:
        """Return the names of the fields of a way that the user fixed."""
        return pinned_fields(self.config.value) | ({"micro_batch"} if self.planned.why_capped else set())

    def machine(self) -> str:
        """Return the name of the machine that a plan is made for; the number of ranks comes beside it."""
        device = self.world.device
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
        return f"CPU with {self.hardware.cpu.num_usable} cores"

    def claim(self) -> RunFolder | None:
        """Claim the folder on rank 0; the problems it finds are raised on all ranks."""
        folder: RunFolder | None = None

        def claim() -> dict[str, Any]:
            nonlocal folder
            folder, extensions = claim_folder(self.job, self.config, self.name, quiet=self.quiet)
            target = target_of_run()
            arguments = sys.argv[1:] if target.endswith(".py") else []
            folder.write(SOURCE, json.dumps({"target": target, "arguments": redacted_words(arguments)}) + "\n")
            return {"path": str(folder.path.absolute()), "extensions": [asdict(it) for it in extensions]}

        claimed = self.world.main_does(claim)
        self._folder = folder
        self.path = Path(claimed["path"])
        self.extensions = tuple(Extension(**it) for it in claimed["extensions"])
        self.job = extended(self.job, self.extensions)
        supervision.run(claimed["path"])
        return folder

    def note_failed_start(self, error: BaseException) -> None:
        """Record why the run did not begin. Once a recorder is open, it records the end itself."""
        if self._folder is not None and not self.is_recorded:
            note_failure(self._folder, error)

    def compilation(self) -> str:
        """Return what was compiled, asked of the compiler itself: `torch.compile` can do nothing without a message."""
        if self.planned.why_not_compiled:
            return f"asked for, but nothing can be compiled here: {self.planned.why_not_compiled}"
        if self.way.compile_mode is None:
            return "not asked for" if self.config.compile.enabled is not None else "not used"
        graphs = num_graphs()
        return f"{graphs} graphs in mode {self.way.compile_mode}" if graphs else "asked for, but nothing was compiled"

    def set_global_batch(self, global_batch: int, why: str) -> None:
        """Give the job a number of samples per step that it did not have, measured before the run folder is claimed."""
        self.job = replace(self.job, global_batch=global_batch)
        words = f"{why}; the number of samples in a step was not given: {global_batch}"
        self.follow(PlannedRun(self.by_rule(), batch_size_found=words))

    @property
    def rank_samples(self) -> int:
        """The samples of each step on the rank that has the most."""
        return -(-(self.job.largest_batch or 0) // self.world.size)

    def device_check(self, model: nn.Module) -> Callable[[Any], None] | None:
        """Return the check of every micro-batch, if asked for. Offloaded shards are meant to be on another device."""
        if not self.config.device.assertions:
            return None
        things = {} if self.sharded is not None and self.sharded.options.offload else {"model": model}
        return lambda batch: assert_on_device(self.world.device, **things, batch=batch)

    @contextmanager
    def numerics(self) -> Iterator[None]:
        """Set the switches of torch that this run wants, for the duration of the run."""
        switches = numerics(self.precision, **switches_of(self.way, self.config.kernels.cudnn_benchmark))
        with switches, num_threads(self.way.num_threads):
            yield

    def stream(self) -> AbstractContextManager[None]:
        """Return the context of the run: steps that are captured need a separate stream."""
        return own_stream(self.world.device) if self.way.capture else nullcontext()

    def close_loaders(self) -> None:
        """End the loaders' workers, however far the run came."""
        for loader in self.loaders:
            loader.close()

    @property
    def spec(self) -> StrategySpec:
        """The strategy that was chosen: its facts, and how it is made."""
        return strategy_spec(self.strategy_choice.value)

    def choose_strategy(self, choice: Choice[str], num_weights: int) -> None:
        """Use this strategy, which may depend on the model, and settle what it decides of the configuration."""
        self._num_weights = num_weights
        self.strategy_choice, self.strategy = choice, choice.value
        if self.config.distributed.strategy == "auto":
            self.config = self.spec.settle_auto(self.config, self.world.size)

    @property
    def shards(self) -> bool:
        """Whether ranks hold shards of the model. Known once it is built."""
        return self.cuts(self.strategy_choice.value)

    def cuts(self, strategy: str) -> bool:
        """Return whether this strategy makes ranks hold shards of the model."""
        if strategy == "auto":
            return False
        spec = strategy_spec(strategy)
        rest = spec.rest(self.config)
        return "shards" in (spec.memory, strategy_spec(rest).memory if rest else "")

    @property
    def is_whole(self) -> bool:
        """Whether each rank holds a whole model, so that others can be tried beside it. Known once it is built."""
        return not self.shards and self.spec.memory == "whole"

    @property
    def holds_parts(self) -> bool:
        """Whether a rank holds only some of the weights, so that one alone cannot write them or know their norm."""
        return self.shards or self.spec.shares_experts

    @property
    def weighting(self) -> Weighting:
        """The weighting of scalar losses, once it is known."""
        return self._rule.weighting

    @weighting.setter
    def weighting(self, found: Weighting) -> None:
        self._rule.weighting = found

    def weighted(self, loss: LossFunction) -> LossFunction:
        """Return the user's loss function, or it compiled, with its results weighted by the rule that holds by then."""
        return self._rule.around(loss)

    @property
    def part_names(self) -> list[str]:
        """The names of the parts that a loss was seen to have; of several losses, each is one and its parts are."""
        if not self.job.turns:
            return list(self.loss_parts.names)
        return [
            name
            for turn, parts in self._turn_parts.items()
            for name in (turn, *(f"{turn}_{part}" for part in parts.names))
        ]

    def meta(self, division: Division) -> dict[str, Any]:
        turns = {name: rule.weighting.model_dump(mode="json") for name, rule in self._turn_rules.items()}
        return {
            "plan": {
                "world_size": self.world.size,
                "machine": self.machine(),
                "way": self.way.but(micro_batch=division.micro_batch).model_dump(mode="json"),
                "data": self._data_followed(),
                "repeatable": self.planned.repeatability.model_dump(mode="json", exclude={"trials"}),
            },
            "job": self.job.identity(),
            "loss": self.weighting.model_dump(mode="json"),
            **({"turn_losses": turns} if turns else {}),
            "hooks": [dict(hook.state_dict()) for hook in self.job.hooks],
        }

    @property
    def num_devices(self) -> int:
        """The number of devices of the whole run."""
        return self.world.size * len(self.devices)

    def make_strategy(self, **changes: bool) -> Strategy:
        """Make the strategy that was chosen. `changes` are to the configuration of its processes."""
        strategy = self.spec.make(self._strategy_context(**changes))
        self.strategy = strategy.name
        self.description = self.spec.describe(strategy)
        self._made_strategy = strategy
        return strategy

    def _strategy_context(self, **changes: bool) -> StrategyContext:
        distributed = self.config.distributed.model_copy(update=changes)
        sharded = self.sharded
        if sharded is not None:
            sharded = replace(sharded, options=replace(sharded.options, **changes))  # type: ignore[arg-type]
        return StrategyContext(
            world=self.world,
            devices=self.devices,
            config=self.config.model_copy(update={"distributed": distributed}),
            job=self.job,
            precision=self.way.precision,
            micro_batch=self.way.micro_batch,
            num_weights=self._num_weights,
            peak_tflops=self.peak_tflops(),
            sharded=sharded,
            experts=self.experts,
        )

    def free_bytes(self) -> int:
        """Return the memory that is free now: on the GPU, or of the host on a CPU."""
        device = self.world.device
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else self.hardware.memory.free_bytes

    def close(self) -> None:
        """Close the run, however it ended."""
        if self._made_strategy is not None:
            self._made_strategy.close()
        if self.experts is not None:
            self.experts.close()
        self.world.close()

    def peak_tflops(self) -> float:
        """Return the peak bf16 rate of this rank's device, in TFLOP/s; 0 where it is not known."""
        index = self.world.device.index if self.world.device.type == "cuda" else None
        peaks = [gpu.peaks.get("bf16") for gpu in self.hardware.gpus if gpu.index == index]
        return next((peak.value for peak in peaks if peak is not None), 0.0)

    def load_hooks(self, checkpoint: Checkpoint) -> None:
        hooks, states = self.job.hooks, checkpoint.meta["hooks"]
        if len(states) != len(hooks):
            raise DrivetrainError(
                f"the job has {len(hooks)} hooks now, and had {len(states)} when step {checkpoint.step} was saved",
                remedy="give the same hooks in the same order to go on with that run, or another --name for this one",
            )
        for hook, state in zip(hooks, states, strict=True):
            hook.load_state_dict(state)


def _of_this_start(config: Config, *, fresh: bool | None, extend: bool) -> Config:
    """Return the configuration with what Python asked for. A restart of the same command goes on with its own run."""
    fresh = config.checkpoint.fresh if fresh is None else fresh
    start = config.checkpoint.model_copy(update={"fresh": fresh, "extend": config.checkpoint.extend or extend})
    if start.fresh and start.extends:
        raise DrivetrainError(
            "a run cannot be extended and begun anew at once", remedy="drop fresh, or extend and extend_schedule"
        )
    if is_restart():
        start = start.model_copy(update={"fresh": False})
    return config.model_copy(update={"checkpoint": start})


class Switches(TypedDict):
    """Keyword arguments of `core.precision.numerics`."""

    deterministic: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool


def switches_of(way: StepWay, cudnn_benchmark: bool) -> Switches:
    """Return the switches for a way, where the user allows cuDNN to choose by timing or not."""
    return Switches(
        deterministic=way.repeat == "strict",
        cudnn_benchmark=cudnn_benchmark and way.repeat == "off",
        cudnn_deterministic=way.repeat != "off",
    )
