"""The setup that `train` and `drive` share: the world, the settled job, the claimed folder, the parts of the run."""

import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from drivetrain.checkpoint import Checkpoint
from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.main_guard import refuse_while_importing
from drivetrain.core.precision import Precision, num_threads, numerics
from drivetrain.core.run_folder import RunFolder, is_finished, read_job
from drivetrain.core.supervision import supervision
from drivetrain.core.world import World
from drivetrain.data.division import Division, Position
from drivetrain.data.feed import feed_for
from drivetrain.data.keyed_items import Columns, Draws, KeyedItems
from drivetrain.data.loader import Loader
from drivetrain.data.source import Source, source_of
from drivetrain.hardware import DeviceManager, Hardware, assert_on_device, detect
from drivetrain.job import EarlyStopping, Job
from drivetrain.loop import own_stream, why_not_captured
from drivetrain.loop.validation import Validator
from drivetrain.plan import Choice, Pins, choose_settings
from drivetrain.plan.data_path import DataPath
from drivetrain.plan.knobs import Asked, Way, pinned_fields, way_by_rule
from drivetrain.plan.loss_weighting import LossRule, Weighting
from drivetrain.plan.plan import PlannedRun
from drivetrain.run.changes import FILE as FINGERPRINT
from drivetrain.run.changes import Fingerprint, as_text, read_fingerprint
from drivetrain.run.debugging import debugged
from drivetrain.run.launched import obey_launcher, share_workers, unused_gpus
from drivetrain.run.memory_needs import explained
from drivetrain.run.model_factory import checked, make_model, refuse_lazy, refuse_meta, unwrapped
from drivetrain.run.model_traits import couples_samples
from drivetrain.run.pinned import of_asked_length, plan_anew, refuse_other_batch
from drivetrain.run.preflight import Preflight, is_wanted, preflight
from drivetrain.run.residency import Residency
from drivetrain.run.sharing import given_strategy, refuse_strategy, strategy_for
from drivetrain.run.switches import switches_of
from drivetrain.strategies import (
    Description,
    Sharded,
    ShardOptions,
    SharedExperts,
    Strategy,
    StrategyContext,
    StrategySpec,
    strategy_spec,
)
from drivetrain.strategies.activations import recompute
from drivetrain.strategies.base import LossFunction
from drivetrain.strategies.compiling import compile_named, compile_options, compiled, num_graphs
from drivetrain.strategies.loss_parts import LossParts
from drivetrain.strategies.recurrent import split_recurrent_dropout
from drivetrain.strategies.sharding import build, compile_blocks, refuse_uncuttable, shard

SOURCE = "source.json"
Instead = Callable[[Job], NoReturn]

_command_line: ContextVar[Config | None] = ContextVar("command_line", default=None)
_target: ContextVar[str] = ContextVar("target", default="")
_instead: ContextVar[Instead | None] = ContextVar("instead", default=None)
_runs = [0]
_ended = [True]


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


def target_to_rerun() -> str:
    """Return what a fresh process can run to get the job that is being trained; empty where there is no such thing.

    A script is run up to its first `dt.train`: a later one cannot be reached. The module of `python -m` is not known.
    """
    main = sys.modules["__main__"]
    if num_trained() != 1 or (not _target.get() and getattr(main, "__spec__", None) is not None):
        return ""
    return target_of_run()


def _on_gpu(devices: Sequence[torch.device]) -> bool:
    return any(device.type == "cuda" for device in devices)


def note_end(finished: bool) -> None:
    """Record how the last run of this process ended; the caller that ran a script asks for it."""
    _ended[0] = finished
    supervision.tell("end", finished=finished)


def last_one_finished() -> bool:
    return _ended[0]


def num_trained() -> int:
    """Return how often `train` or `drive` was called in this process."""
    return _runs[0]


class Setup:
    """One run on one rank. `join` makes it; the parts are built when asked for."""

    path: Path  # of the run's folder, once it is claimed
    strategy: str  # its name, once it is chosen
    preflight: Preflight | None = None  # what it found, where there was one
    strategy_choice: Choice[str]  # with its reason; by the number of processes until the model is made
    sharded: Sharded | None = None  # the model, where ranks hold parts of it
    experts: SharedExperts | None = None  # its experts, where these are shared out and the rest is sharded
    _made_strategy: Strategy | None = None
    _num_weights: int | None = None  # once the model is made
    _fingerprint = ""  # of the job, once it was taken
    weighs_first_batch = False  # whether that is found out on the first batch, which has to be read first
    batch_by_rule = False  # whether the samples of a step are not given
    description: Description | None = None  # what the strategy adds to the record, once it is made

    @classmethod
    def join(cls, job: Job, config: Config | None, *, quiet: bool) -> Self:
        """Find the devices and join the world, which the caller closes."""
        refuse_while_importing()
        _runs[0] += 1
        config = config or _command_line.get() or Config()
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
                print(f"drivetrain: {note}", file=sys.stderr)
            setup = cls(job, config, hardware, world, devices, quiet=quiet)
            setup.try_the_road()
            return setup
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
        self._told_no_blocks = False
        refuse_strategy(config, world, devices)
        asked = config.distributed.strategy
        self.strategy_choice = given_strategy(asked, world.size)
        self.devices = devices if self.spec.devices == "several" else [world.device]  # of this process
        self.settings = choose_settings(hardware, Pins(**config.pins()))
        job = debugged(job, config, self.num_devices) if config.run.debug else job
        self.name = config.run.name or job.name
        self.job = self._settled(job)
        self._rule = LossRule(Weighting())
        self.loss_parts = LossParts(job.loss_weights, job.count, world)
        self.residency = Residency(self.config, self.world.device, hardware.memory.free_bytes, quiet=quiet)
        self._loaders: list[Loader] = []
        self.follow(PlannedRun(self.by_rule()))
        if asked != "auto":
            self.spec.check(self._strategy_context())

    def by_rule(self) -> Way:
        """Return how a step is run where nothing was measured."""
        return way_by_rule(Asked(self.config.value, self.settings, self.rank_samples, len(self.devices)))

    def follow(self, planned: PlannedRun) -> None:
        """Work as planned from now on. Called before the parts are built that depend on it."""
        self.planned = planned
        self.precision = Precision(planned.way.precision, self.world.device.type)

    @property
    def way(self) -> Way:
        """How steps are run."""
        return self.planned.way

    def trying(self, way: Way) -> Self:
        """Return this run with steps run another way, to try it. It says nothing, and leaves this one as it is."""
        trial = copy.copy(self)
        trial.quiet = True
        trial.follow(replace(self.planned, way=way))
        return trial

    def recorded_way(self, checkpoint: Checkpoint) -> Way | None:
        """Return how steps before a checkpoint were run, except what is pinned now; None if world or machine differ."""
        recorded = checkpoint.meta["plan"]
        if recorded["world_size"] != self.world.size or recorded.get("machine") != self.machine():
            return None
        pinned = {name: getattr(self.way, name) for name in self.pinned()}
        return Way.model_validate(recorded["way"] | pinned)

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

    def _settled(self, job: Job) -> Job:
        """Return the job with its global batch and what the configuration says of its length and of saving."""
        given, recorded = job.global_batch, read_job(self.config.run.output_dir / self.name).get("global_batch")
        is_new = not recorded or is_finished(self.config.run.output_dir / self.name)
        is_asked = self.config.batch_asked.is_set or self.config.plan_pins.global_batch is not None
        self.batch_by_rule = self.world.agree(given is None and is_new and not is_asked)
        job = replace(
            of_asked_length(job, self.config),
            global_batch=job.global_batch or self.world.agree(self._global_batch(job) if self.world.is_main else None),
            checkpoint_every=self.config.checkpoint.every or job.checkpoint_every,
            keep_last=self.config.checkpoint.keep_last or job.keep_last,
            init_from=self.config.checkpoint.init_from or job.init_from,
            ema=self.config.optimizer.ema or job.ema,
            valid_every=self.config.validation.every or job.valid_every,
            valid_batch=self.config.validation.batch_size or job.valid_batch,
            early_stopping=self._early_stopping(job),
        )
        refuse_other_batch(self.config, job.global_batch or 0)
        size, accumulation = self.config.batch.size, self.config.batch.accumulation
        if (
            not self.config.batch.auto
            and size
            and accumulation
            and size * accumulation * self.num_devices < (job.global_batch or 0)
        ):
            source = self.config.plan_pins.lines.get("batch.size", "")
            remedy = "leave --accumulation-steps out: it follows from the others"
            if source:
                remedy = f"take batch.accumulation out: it follows from the others; or {plan_anew(self.config)}"
            raise ConfigError([
                Problem(
                    "batch.size" if source else "--batch-size",
                    f"{size} × {accumulation} × {self.num_devices} devices do not hold the {job.global_batch} samples "
                    "that a step of this job has",
                    size,
                    source,
                    remedy=remedy,
                )
            ])  # fmt: skip
        return job

    def _early_stopping(self, job: Job) -> EarlyStopping | None:
        patience = self.config.validation.patience
        if patience is None:
            return job.early_stopping
        return replace(
            job.early_stopping or EarlyStopping(metric=job.best.metric, mode=job.best.mode), patience=patience
        )

    def _global_batch(self, job: Job) -> int:
        """Return the global batch recorded at the first start; else as asked for, as planned in a file, or by rule.

        Asked for and by rule, it is micro-batch × accumulation × devices.
        """
        recorded = read_job(self.config.run.output_dir / self.name).get("global_batch")
        if recorded and not is_finished(self.config.run.output_dir / self.name):
            return int(recorded)
        asked, planned = self.config.batch_asked, self.config.plan_pins.global_batch
        if planned is not None and not asked.is_set:
            return planned
        size, accumulation = asked.size or (job.default_batch if asked.is_set else None), asked.accumulation
        micro = size or self.settings.micro_batch.value
        product = micro * (accumulation or (1 if size else self.settings.accumulation.value)) * self.num_devices
        return min(product, job.num_samples or product) if size is None and accumulation is None else product

    def try_the_road(self) -> None:
        """Run the preflight before anything large is made: do the ranks mean the same run, and reach each other?"""
        if is_wanted(self.config, self.world):
            timeout = self.config.distributed.timeout_seconds
            job, sources = self.job, {"training": self.job.source}
            if job.valid is not None:
                sources["validation"] = source_of(job.valid)
            data = {
                name: KeyedItems(source.dataset, job.seed) for name, source in sources.items() if not source.is_iterable
            }
            self.preflight = preflight(
                self.world, self.config, self.hardware, job.identity(), target_of_run(), timeout, data
            )

    def claim(self) -> RunFolder | None:
        """Claim the folder on rank 0; the problems it finds are raised on all ranks."""
        folder, answer = None, None
        if self.world.is_main:
            try:
                # A checkpoint brings its own experts, whatever number is asked for.
                experts = {} if self.config.moe.experts is None else {"experts": self.config.moe.experts}
                identity = self.job.identity() | experts
                if self.job.source.sizes_vary:  # what a step was taken to need is not what it is
                    recorded = read_job(self.config.run.output_dir / self.name)
                    identity |= {"global_batch": recorded.get("global_batch", self.job.global_batch)}
                folder = RunFolder.claim(self.config.run.output_dir, self.name, identity)
                folder.write(SOURCE, json.dumps({"target": target_of_run()}) + "\n")
                answer = {"path": str(folder.path.absolute())}
            except DrivetrainError as error:
                answer = {"message": error.message, "remedy": error.remedy}
        answer = self.world.agree(answer)
        if "message" in answer:
            raise DrivetrainError(answer["message"], remedy=answer["remedy"])
        self.path = Path(answer["path"])
        supervision.run(answer["path"])
        return folder

    def changes_since_start(self, model: nn.Module, folder: RunFolder | None, step: int | None) -> list[str]:
        """Return what has changed in the job since the run was begun; refused on all ranks with `--strict`.

        `step`: that of the checkpoint it goes on from; None for a new run. The model: as the user made it.
        """
        found = list[str]()
        if folder is not None:
            with torch.random.fork_rng(devices=[]):
                now = Fingerprint(self.job, model)
            before = None if step is None else read_fingerprint(self.path)
            found = [] if before is None else now.changes_since(before)
            self._fingerprint = as_text(now)
        if step is None or not self.config.run.strict:
            return found
        found = list(self.world.agree(found))
        if found:
            raise DrivetrainError(
                f"the job has changed since step {step} of {self.path} was saved, and --strict is set: "
                f"{'; '.join(found)}",
                remedy="use the code and data it was begun with, another --name for a new run, or leave --strict out",
            )
        return found

    def keep_fingerprint(self, folder: RunFolder | None) -> None:
        """Record the job as it is now, once its checkpoint was loaded: a job that cannot go on leaves no trace."""
        if folder is not None:
            folder.write(FINGERPRINT, self._fingerprint)

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
        return -(-(self.job.global_batch or 0) // self.world.size)

    def division(self, model: nn.Module | None) -> Division:
        """Return how steps are divided in the way that is followed."""
        job, least = self.job, 1
        is_synced = self.config.distributed.sync_batchnorm and self.world.size > 1  # sees the samples of all ranks
        if model is not None and not is_synced and couples_samples(model):
            least = 2  # one sample alone has no variance
        is_fixed = bool(self.weighting.holds_division)
        return Division(
            job.num_samples or 0, job.global_batch or 0, self.way.micro_batch, self.world.size, least, is_fixed
        )

    def loader(self, division: Division, data: Any, *, shuffle: bool, start: Position | None = None) -> Loader:
        source = source_of(data)
        wishes, device = source.wishes, self.world.device
        pins_memory = wishes.pin_memory if self.config.data.pin_memory is None else None
        fetched = self._path_fetched()
        loader = Loader(
            source,
            division,
            self.world.rank,
            self.job.seed,
            self.job.collate,
            shuffle=shuffle,
            num_workers=self._num_workers(source),
            pin_memory=(pins_memory or self.settings.pin_memory.value) and device.type == "cuda",
            prefetch_factor=self.config.data.prefetch_factor
            or wishes.prefetch_factor
            or (fetched and fetched.prefetch_factor)
            or self.settings.prefetch_factor.value
            or 2,
            start=start,
            feed=feed_for(device, channels_last=self.channels_last),
            may_do_without_workers=self.config.data.num_workers < 0,
            resident=self.residency.of(
                source,
                self.job.collate,
                channels_last=self.channels_last,
                num_workers=self._num_workers(source),
                planned=None if self.planned.data_path is None else self.planned.data_path.resident,
            ),
        )
        loader.notes += self.residency.take_notes()
        self._loaders.append(loader)
        if self.world.is_main:
            loader.warn_if_inexact()
        return loader

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

    def why_not_captured(self, optimizer: Optimizer, draws: Draws, division: Division) -> str:
        """Return why steps are not captured; empty if they are to be."""
        if not self.way.capture:
            return "not asked for"
        return why_not_captured(
            self.world,
            self.strategy,
            optimizer,
            self.precision,
            num_micro_steps=-(-division.global_batch // division.micro_batch),
            activations="recompute" if self.way.recompute else self.settings.activations.value,
            compile_mode=self.way.compile_mode or "",
            asserts=self.config.device.assertions,
            draws=draws,
        )

    def validator(self, micro_batch: int) -> Validator:
        """Make the validator of the job's validation set, in batches of the job's validation size or the given one."""
        valid = source_of(self.job.valid).dataset
        if self.job.valid_batch is not None:
            micro_batch = self.job.valid_batch * len(self.devices)
        whole = Division(len(valid), len(valid), micro_batch, self.world.size)
        loader = self.loader(whole, valid, shuffle=False)
        return Validator(self.job, loader, self.precision, self.world, self.weighted(self.job.loss), self.loss_parts)

    def close_loaders(self) -> None:
        """End the loaders' workers, however far the run came."""
        for loader in self._loaders:
            loader.close()

    def _num_workers(self, source: Source) -> int:
        """Return the configuration's number; else the handed-in DataLoader's; else the measured; else by rule."""
        if self.config.data.num_workers >= 0:
            return self.config.data.num_workers
        if source.wishes.num_workers is not None:
            return source.wishes.num_workers
        fetched = self._path_fetched()
        if fetched is not None:
            return fetched.num_workers
        in_memory = isinstance(source.dataset, (TensorDataset, Columns, list, tuple, torch.Tensor))
        return 0 if in_memory else self.settings.num_workers.value

    def _path_fetched(self) -> DataPath | None:
        """Return the measured data path of samples that are fetched batch by batch."""
        path = self.planned.data_path
        return None if path is None or path.resident else path

    @property
    def channels_last(self) -> bool:
        return self.way.channels_last

    def model(self) -> tuple[nn.Module, Optimizer, Any]:
        """Return the model as it is run, its optimizer, and what the loss function calls instead if it is compiled."""
        model, optimizer = self.dressed(self.build())
        if not self.shards:
            model = model.to(self.world.device)
        if self.way.compile_mode is None or self.shards:
            return model, optimizer, None
        how = compile_options(self.way.compile_mode, fixed=self.way.repeat != "off")
        return model, optimizer, torch.compile(model, **how)

    def build(self) -> nn.Module:
        """Make the model as the user defines it, on its device unless it is going to be sharded."""
        torch.manual_seed(self.job.seed)  # the same weights on every rank, and in every run of this seed
        made, notes = unwrapped(self._made())
        for note in () if self.quiet else notes:
            print(f"drivetrain: {note}", file=sys.stderr)
        refuse_lazy(made)
        self._refuse_meta(made)
        self._num_weights = sum(parameter.numel() for parameter in made.parameters())
        self.strategy_choice = strategy_for(self.config.distributed.strategy, made, self.job, self.world)
        self.strategy = self.strategy_choice.value
        if self.config.distributed.strategy == "auto":
            self.config = self.spec.settle_auto(self.config, self.world.size)
        if self.shards:
            refuse_uncuttable(made)
            if self.spec.shares_experts:
                self.experts = SharedExperts(made, self.world, self._peak_tflops())
            return made.train()  # where it was made: no more than a block at a time comes to the device
        if self.spec.keeps_on_host(self.config):
            return made.train()  # likewise: weight by weight
        try:
            return made.to(self.world.device).train()
        except torch.OutOfMemoryError as error:
            free, fraction = torch.cuda.mem_get_info(self.world.device)[0], self.config.memory.gpu_fraction
            raise explained(
                self.job, made, self.way.precision, str(self.world.device), free, fraction, num_devices=self.num_devices
            ) from error

    @property
    def spec(self) -> StrategySpec:
        """The strategy that was chosen: its facts, and how it is made."""
        return strategy_spec(self.strategy_choice.value)

    @property
    def shards(self) -> bool:
        """Whether ranks hold shards of the model. Known once it is built."""
        return self._cuts(self.strategy_choice.value)

    def _cuts(self, strategy: str) -> bool:
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

    def dressed(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        """Prepare a model that was built for the way that is followed."""
        if self.channels_last and not self.shards:  # shards are rows, one after the other
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.config.distributed.sync_batchnorm and self.world.size > 1:
            if self.world.device.type != "cuda":
                raise DrivetrainError("synchronised batch norm needs GPUs", remedy="drop --sync-batchnorm")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        fixed = self.way.repeat != "off"
        if self.config.compile.only and self.way.compile_mode is not None:
            compile_named(model, self.config.compile.only, self.way.compile_mode, fixed=fixed)
        elif self.shards and self.way.compile_mode is not None:
            compile_blocks(model, self.way.compile_mode, shares_experts=self.experts is not None, fixed=fixed)
        if self.way.splits_recurrent_dropout:
            split_recurrent_dropout(model)
        if self.way.recompute:
            self.recomputed = recompute(model)
            if not self.recomputed and "memory.activations" in self.config.foreign:
                if not self.quiet and not self._told_no_blocks:
                    words = "gradient checkpointing: the model has no repeated blocks to recompute; none is"
                    print(f"drivetrain: {words}", file=sys.stderr)
                self._told_no_blocks = True
            elif not self.recomputed and self.settings.activations.pinned:
                raise DrivetrainError(
                    "no repeated blocks were found in the model, so there is nothing to recompute block by block",
                    remedy="keep them in an nn.ModuleList or nn.Sequential, or use --activations offload",
                )
        if self.shards:
            self.sharded = shard(model, self.world, self._shard_options(), self.precision, self.experts)
        optimizer = self.job.make_optimizer(model)
        if self.sharded is not None:
            self.sharded.take_over(optimizer)
        if self.experts is not None:
            self.experts.cut_state(optimizer)
        return model, optimizer

    def _refuse_meta(self, made: nn.Module) -> None:
        """Refuse meta tensors, except on other ranks than the main one of a sharded model: they get values later."""
        if isinstance(self.job.model, nn.Module) or not self._cuts(self.config.distributed.strategy):
            refuse_meta(made)
            return
        problem = None
        try:
            if self.world.is_main:
                refuse_meta(made)
        except DrivetrainError as error:
            problem = {"message": error.message, "remedy": error.remedy}
        problem = self.world.agree(problem)
        if problem is not None:
            raise DrivetrainError(problem["message"], remedy=problem["remedy"])

    def called_loss(self) -> LossFunction | None:
        """Return what is called in place of the loss function where it is compiled, with the model inside."""
        # Of a sharded model, blocks are compiled.
        is_whole = self.way.compile_mode is not None and not self.shards and not self.config.compile.only
        if not is_whole:
            return None
        return compiled(self.job.loss, self.way.compile_mode or "default", fixed=self.way.repeat != "off")

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

    def _made(self) -> nn.Module:
        given = self.job.model
        if isinstance(given, nn.Module):
            return given
        if self._cuts(self.config.distributed.strategy):
            return checked(build(given, self.world))
        return make_model(given, self.hardware.memory.total_bytes)

    def _shard_options(self) -> ShardOptions:
        config = self.config
        return ShardOptions(
            offload=config.distributed.fsdp_offload,
            cast=config.distributed.fsdp_cast,
            accumulate=config.distributed.fsdp_accumulate,
            broadcast_buffers=config.distributed.broadcast_buffers,
            reduces_unused=config.distributed.find_unused_parameters,
        )

    def meta(self, division: Division) -> dict[str, Any]:
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
            peak_tflops=self._peak_tflops(),
            sharded=sharded,
            experts=self.experts,
        )

    def close(self) -> None:
        """Close the run, however it ended."""
        if self._made_strategy is not None:
            self._made_strategy.close()
        if self.experts is not None:
            self.experts.close()
        self.world.close()

    def _peak_tflops(self) -> float:
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
