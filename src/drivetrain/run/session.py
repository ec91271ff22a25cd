"""A run on one rank: how it was started, its world and devices, its settled job, its folder, the plan it follows."""

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import nn

from drivetrain.checkpoint import Checkpoint
from drivetrain.config import Config
from drivetrain.config.flags import unread_flags
from drivetrain.core.code_fingerprint import is_own
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.launchers import ProcessPlace, is_restart, supervision
from drivetrain.core.log import notice, redacted_words
from drivetrain.core.optimizers import Turn
from drivetrain.core.plugins import strategy_facts
from drivetrain.core.precision import Precision, num_threads, numerics
from drivetrain.core.processes import refuse_while_importing
from drivetrain.core.run_folder import Extension, RunFolder, is_finished, read_switch
from drivetrain.core.world import World
from drivetrain.data.division import Division
from drivetrain.data.loader import Loader
from drivetrain.hardware import DeviceManager, Hardware, assert_on_device, detect
from drivetrain.job import Job
from drivetrain.loop import own_stream
from drivetrain.plan import Choice, Pins, choose_settings
from drivetrain.plan.knobs import Asked, StepWay, pinned_fields, way_by_rule
from drivetrain.plan.loss_weighting import LossRule, Weighting
from drivetrain.plan.plan import PlannedRun
from drivetrain.plan.rules import DataPath
from drivetrain.run.claiming import Script, claim_folder, extended, note_failure
from drivetrain.run.job_settings import debugged, given_strategy, refuse_conflicts, refuse_strategy, settled_job
from drivetrain.run.memory import Residency
from drivetrain.run.preflight import Preflight, run_preflight
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
from drivetrain.strategies.compiling import what_was_compiled
from drivetrain.strategies.loss_parts import LossParts, StepLog

# ----------------------------------------------------------------------------------------------------------------------
# Knows how this process was started: the command with its configuration and target, and the launcher.

Instead = Callable[[Job], NoReturn]

_command_line: ContextVar[Config | None] = ContextVar("command_line", default=None)
_target: ContextVar[str] = ContextVar("target", default="")
_instead: ContextVar[Instead | None] = ContextVar("instead", default=None)
_runs = [0]
_claimed: list[Path] = []  # folders of runs, by this process
_ended = [True]
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16"}


@contextmanager
def configured(config: Config, target: str = "", instead: Instead | None = None) -> Iterator[None]:
    """Use this configuration for everything trained inside that is not given another one.

    `target` is what the command line named, kept in the run folder so that the job can be found again. With `instead`,
    `train` calls that with the job, and trains nothing.
    """
    tokens = _command_line.set(config), _target.set(target), _instead.set(instead)
    try:
        yield
    finally:
        _command_line.reset(tokens[0])
        _target.reset(tokens[1])
        _instead.reset(tokens[2])


def given_on_command_line() -> Config | None:
    """Return the configuration of the command that runs this script; None under plain `python`."""
    return _command_line.get()


def done_instead(job: Job) -> None:
    """Do what the command line wants done with a job instead of training it, if anything; it does not return then."""
    action = _instead.get()
    if action is not None:
        action(job)


def target_of_run() -> str:
    """Return the source of the job: what the command line named, or the script that is running; empty in a notebook."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    return _target.get() or (str(Path(script).absolute()) if script.endswith(".py") else "")


def _unread_flags() -> str:
    """Return one line where `python SCRIPT` was given flags of drivetrain; `drivetrain launch` tells of them itself."""
    script = target_of_run()
    is_plain = not _target.get() and "DRIVETRAIN_LAUNCHED" not in os.environ
    if not is_plain or not script or num_trained() != 1 or str(Path(sys.argv[0]).absolute()) != script:
        return ""
    return unread_flags(Path(script), sys.argv[1:])


def _script_of_run() -> Script:
    """Return what is run to get the job, and the folders of the runs that it had in this process."""
    target = target_of_run()
    arguments = sys.argv[1:] if target.endswith(".py") else []
    return Script(target, redacted_words(arguments), tuple(_claimed))


def _switch_of(recorded: Mapping[str, Any], folder: Path) -> int | None:
    """Return after how many steps compiled code was used: known before a checkpoint, or settled after it."""
    return recorded.get("compiled_from") or read_switch(folder)


def target_to_rerun() -> str:
    """Return what a fresh process can run to get the job that is being trained; empty where there is no such thing.

    A script is run up to its first `dt.train`: a later one cannot be reached.
    """
    is_module = not _target.get() and getattr(sys.modules["__main__"], "__spec__", None) is not None
    if num_trained() != 1 or (is_module and not module_of_run()):
        return ""
    return target_of_run()


def module_of_run() -> str:
    """Return the module that `python -m` runs, if it is the user's own and no installed runner, as pytest is."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return "" if _target.get() or spec is None or not is_own(main) else str(spec.name)


def note_end(finished: bool) -> None:
    """Record how the last run of this process ended; the caller that ran a script asks for it."""
    _ended[0] = finished
    supervision.tell("end", finished=finished)


def last_one_finished() -> bool:
    return _ended[0]


def count_run() -> None:
    """Count a call of `train` or `drive` in this process."""
    _runs[0] += 1


def num_trained() -> int:
    """Return how often `train` or `drive` was called in this process."""
    return _runs[0]


def obey_launcher(config: Config, place: ProcessPlace) -> tuple[Config, list[str]]:
    """Return the configuration with `accelerate launch`'s settings, where nothing else was set; and what to report."""
    told = dict(place.settings)
    changes: dict[str, dict[str, Any]] = {}
    notes: list[str] = []

    def settle(section: str, field: str, value: Any, own: Any, is_free: bool, spelled: str) -> None:
        if is_free:
            changes.setdefault(section, {})[field] = value
            notes.append(f"{spelled} of accelerate launch is obeyed")
        elif own != value:
            notes.append(f"{spelled} of accelerate launch is not obeyed: {section}.{field} is {own} here")

    wished = told.get("ACCELERATE_MIXED_PRECISION", "no")
    if wished in _PRECISIONS:  # `no` is also the default
        is_free = config.precision.dtype == "auto" and config.precision.mixed is None
        own = "fp32" if config.precision.mixed is False else config.precision.dtype
        settle("precision", "dtype", _PRECISIONS[wished], own, is_free, f"mixed precision {wished}")
    elif wished != "no":
        notes.append(f"mixed precision {wished} of accelerate launch is not known here: see --precision")
    steps = told.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps.isdecimal() and int(steps) > 1:
        own_steps = config.batch.accumulation
        settle("batch", "accumulation", int(steps), own_steps, own_steps is None, f"accumulation over {steps} steps")
    if told.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes"):
        own_mode = config.device.mode
        is_free = own_mode == "auto" and config.device.device == "auto"
        settle("device", "mode", "cpu", own_mode, is_free, "use of the CPU")
    if not changes:
        return config, notes
    sections = {name: getattr(config, name).model_copy(update=fields) for name, fields in changes.items()}
    return config.model_copy(update=sections), notes


def share_workers(config: Config, place: ProcessPlace) -> Config:
    """Return the configuration with this process's share of the loader processes that a machine may have in all."""
    total = config.data.total_workers
    if total is None or config.data.num_workers >= 0:
        return config
    own = total // place.local_size + (place.local_rank < total % place.local_size)
    return config.model_copy(update={"data": config.data.model_copy(update={"num_workers": own})})


def unused_gpus(place: ProcessPlace, devices: Sequence[torch.device], strategy: str, target: str) -> str:
    """Return the hint for one process that was started without a launcher beside several GPUs; empty elsewhere."""
    if (
        place.size > 1
        or place.launcher == "drivetrain"
        or len(devices) < 2
        or strategy_facts(strategy).processes == "one"
    ):
        return ""
    command = f"drivetrain launch {target}" if target.endswith(".py") else f"drivetrain train {target or 'TARGET'}"
    return f"{len(devices)} GPUs are here, and one process uses one: {devices[0]}. To use all: {command}"


# ----------------------------------------------------------------------------------------------------------------------
# A run on one rank: its world and devices, its settled job, its folder, and the plan it follows.


def _on_gpu(devices: Sequence[torch.device]) -> bool:
    return any(device.type == "cuda" for device in devices)


class Session:
    """One run on one rank: who takes part, where, on what, by which plan. `join` makes it, the caller closes it."""

    path: Path  # of the run's folder, once it is claimed
    extensions: tuple[Extension, ...] = ()  # that made the run longer, once the folder is claimed
    is_done = False  # whether the run was finished before, and this start only passes over it
    is_recorded = False  # whether a recorder was opened, which writes down how the run ends
    folder: RunFolder | None = None  # on the main process
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
            notes.append(_unread_flags())
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
        way = StepWay.model_validate(recorded["way"] | pinned)
        return way if way.compiled_from is not None else way.but(compiled_from=_switch_of(recorded["way"], self.path))

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
            folder, found = claim_folder(self.job, self.config, self.name, _script_of_run(), quiet=self.quiet)
            _claimed.append(folder.path)
            is_done = is_finished(folder.path) and not self.config.checkpoint.extends
            return {"path": str(folder.path.absolute()), "extensions": list(map(asdict, found)), "is_done": is_done}

        claimed = self.world.main_does(claim)
        self.folder = folder
        self.path, self.is_done = Path(claimed["path"]), claimed["is_done"]
        self.extensions = tuple(Extension(**it) for it in claimed["extensions"])
        self.job = extended(self.job, self.extensions)
        supervision.run(claimed["path"])
        return folder

    def note_failed_start(self, error: BaseException) -> None:
        """Record why the run did not begin. Once a recorder is open, it records the end itself."""
        if self.folder is not None and not self.is_recorded:
            note_failure(self.folder, error)

    def compilation(self) -> str:
        """Return what was compiled, asked of the compiler itself: `torch.compile` can do nothing without a message."""
        if self.planned.why_not_compiled:
            return f"asked for, but nothing can be compiled here: {self.planned.why_not_compiled}"
        if self.way.compile_mode is None:
            return "not asked for" if self.config.compile.enabled is not None else "not used"
        if self.way.compiled_from is None:
            return "in the background: it was not done before the run ended"
        return what_was_compiled(self.way)

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

    def numerics(self) -> AbstractContextManager[None]:
        """Set the switches of torch that this run wants, for the duration of the run."""
        return step_numerics(self.way, self.precision, cudnn_benchmark=self.config.kernels.cudnn_benchmark)

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
            refuse_conflicts(self.config, choice)

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


@contextmanager
def step_numerics(way: StepWay, precision: Precision, *, cudnn_benchmark: bool) -> Iterator[None]:
    """Set the switches of torch that a way of running steps asks for: of a run, and where the way is measured.

    Args:
        way: How steps are run.
        precision: The number format of its steps.
        cudnn_benchmark: Whether cuDNN may choose its convolutions by timing, where steps need not repeat to the bit.
    """
    switches = numerics(
        precision,
        deterministic=way.repeat == "strict",
        cudnn_benchmark=cudnn_benchmark and way.repeat == "off",
        cudnn_deterministic=way.repeat != "off",
    )
    with switches, num_threads(way.num_threads):
        yield
