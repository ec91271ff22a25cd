"""`dt.train(job)`: one call, from a job to a trained model in a run folder, on one process or many."""

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from drivetrain.checkpoint import Checkpoint, Checkpointer
from drivetrain.checkpoint import export as export_checkpoint
from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.hook import StepContext
from drivetrain.core.interrupt import stopping_cleanly
from drivetrain.core.precision import Precision, numerics
from drivetrain.core.records import StepRecord
from drivetrain.core.run_folder import RunFolder, is_finished, read_job
from drivetrain.core.world import World
from drivetrain.data.division import Division
from drivetrain.data.items import what_draws
from drivetrain.data.loader import Loader
from drivetrain.hardware import DeviceManager, Hardware, assert_on_device, detect
from drivetrain.job import EarlyStopping, Job
from drivetrain.monitor.console import RunConsole
from drivetrain.plan import Pins, choose_settings
from drivetrain.step import Stepper, to_device
from drivetrain.strategies import Average, DdpOptions, DdpStrategy, SingleStrategy, Strategy, StrategyParts, Trial
from drivetrain.strategies.activations import recompute
from drivetrain.trainer import Trainer
from drivetrain.validation import Validation, Validator

_CHECKPOINTS = "checkpoints"
_command_line: ContextVar[Config | None] = ContextVar("command_line", default=None)


@contextmanager
def configured(config: Config) -> Iterator[None]:
    """Everything trained inside uses this configuration, unless it is given one of its own."""
    token = _command_line.set(config)
    try:
        yield
    finally:
        _command_line.reset(token)


_trained = [0]


def num_trained() -> int:
    """How often `train` was called in this process."""
    return _trained[0]


@dataclass(frozen=True)
class Result:
    """Where a run's files are, and how it ended."""

    folder: Path
    steps: int  # optimizer steps done over the whole life of the run
    resumed_from: int  # the step this call went on from; 0 for a new run
    finished: bool  # false if it was asked to stop before the job's end
    last: StepRecord | None  # None if there was nothing left to do
    compilation: str = "not asked for"
    is_main: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last validation
    best_step: int | None = None


def train(job: Job, config: Config | None = None, *, quiet: bool = False) -> Result:
    """Train a job to its end. A run of the same job under the same name that was cut short is continued, exactly."""
    config = config or _command_line.get() or Config()
    _trained[0] += 1
    hardware = detect(config.run.output_dir)
    devices = DeviceManager(hardware, config.device.mode, config.device.device, config.device.ids).devices
    world = World.join(
        devices,
        backend=None if config.distributed.backend == "auto" else config.distributed.backend,
        init_method=config.distributed.init_method,
        timeout_seconds=config.distributed.timeout_seconds,
    )
    try:
        return _Run(job, config, hardware, world, quiet=quiet or not world.is_main).train()
    finally:
        world.close()


def export(run: Path | str | Result, path: Path | str | None = None) -> Path:
    """The newest weights of a run as one plain safetensors file, under the model's own names."""
    folder = run.folder if isinstance(run, Result) else Path(run)
    if not (folder / _CHECKPOINTS).is_dir():
        raise DrivetrainError(f"{folder} holds no checkpoints", remedy="give the folder of a run, such as runs/digits")
    checkpoint = Checkpoint.latest_in(folder / _CHECKPOINTS)  # changes nothing, so a run may go on beside it
    if checkpoint is None:
        raise DrivetrainError(f"{folder} holds no checkpoint that is whole", remedy="train on under the same name")
    target = Path(path) if path is not None else folder / "model.safetensors"
    export_checkpoint(checkpoint, target, prefix="model/")
    return target


class _Run:
    """One call of `train` on one rank: claims the folder, builds the parts, runs the loop."""

    def __init__(self, job: Job, config: Config, hardware: Hardware, world: World, *, quiet: bool) -> None:
        self.config, self.hardware, self.world, self.quiet = config, hardware, world, quiet
        self.settings = choose_settings(hardware, Pins(**config.pins()))
        self.name = config.run.name or job.name
        self.job = self._settled(job)

    def _settled(self, job: Job) -> Job:
        """The job with its global batch and what the configuration says of saving."""
        job = replace(
            job,
            global_batch=job.global_batch or self.world.agree(self._global_batch(job) if self.world.is_main else None),
            checkpoint_every=self.config.checkpoint.every or job.checkpoint_every,
            keep_last=self.config.checkpoint.keep_last or job.keep_last,
            ema=self.config.optimizer.ema or job.ema,
            valid_every=self.config.validation.every or job.valid_every,
            early_stopping=self._early_stopping(job),
        )
        size, accumulation = self.config.batch.size, self.config.batch.accumulation
        if size and accumulation and size * accumulation * self.world.size < (job.global_batch or 0):
            raise ConfigError([
                Problem(
                    "--batch-size",
                    f"{size} × {accumulation} × {self.world.size} devices do not hold the {job.global_batch} samples "
                    "that a step of this job has",
                    size,
                    remedy="leave --accumulation-steps out: it follows from the others",
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
        """Micro-batch × accumulation × devices at the first start; afterwards what was recorded then."""
        recorded = read_job(self.config.run.output_dir / self.name).get("global_batch")
        if recorded and not is_finished(self.config.run.output_dir / self.name):
            return int(recorded)
        size, accumulation = self.config.batch.size, self.config.batch.accumulation
        micro = size or self.settings.micro_batch.value
        product = micro * (accumulation or (1 if size else self.settings.accumulation.value)) * self.world.size
        return min(product, job.num_samples) if size is None and accumulation is None else product

    def train(self) -> Result:
        folder = self._claim()
        precision = Precision(self.settings.precision.value, self.world.device.type)
        kernels = self.config.kernels
        try:
            with numerics(precision, deterministic=kernels.deterministic, cudnn_benchmark=kernels.cudnn_benchmark):
                return self._train(folder, precision)
        finally:
            if folder is not None:
                folder.close()

    def _claim(self) -> RunFolder | None:
        """Rank 0 claims the folder; what it finds wrong is raised on all ranks."""
        folder, answer = None, None
        if self.world.is_main:
            try:
                folder = RunFolder.claim(self.config.run.output_dir, self.name, self.job.identity())
                answer = {"path": str(folder.path.absolute())}
            except DrivetrainError as error:
                answer = {"message": error.message, "remedy": error.remedy}
        answer = self.world.agree(answer)
        if "message" in answer:
            raise DrivetrainError(answer["message"], remedy=answer["remedy"])
        self.path = Path(answer["path"])
        return folder

    def _train(self, folder: RunFolder | None, precision: Precision) -> Result:
        job, world = self.job, self.world
        checkpointer = Checkpointer(self.path / _CHECKPOINTS, world, job.keep_last)
        checkpoint = checkpointer.latest()
        division = Division(job.num_samples, job.global_batch or 0, self._micro_batch(checkpoint), world.size)
        loader = self._loader(division, job.data, shuffle=job.shuffle)
        model, optimizer, called = self._model()
        average = None if job.ema is None else Average(model, job.ema)
        strategy: Strategy = SingleStrategy(world)
        if world.size > 1:
            strategy = DdpStrategy(world, _ddp_options(self.config))
        self.strategy = strategy.name
        first = loader.micro_batch(division.place(0), 0)
        offloads = self.settings.activations.value == "offload"
        parts = StrategyParts(model, job.loss, optimizer, job.clip_norm, precision, called, average, offloads)
        trial = Trial(to_device(first.batch, world.device), first.num_samples)
        draws, objective = what_draws(lambda: strategy.prepare(parts, trial), world.device)
        resumed_from = 0
        if checkpoint is not None:
            strategy.load(checkpoint)
            for hook, state in zip(job.hooks, checkpoint.meta["hooks"], strict=True):
                hook.load_state_dict(state)
            resumed_from = checkpoint.step

        asserts = self.config.device.assertions
        check = (lambda batch: assert_on_device(world.device, model=model, batch=batch)) if asserts else None
        stepper = Stepper(strategy, objective, world, job.seed, draws=draws, before_micro_step=check)
        with _Books(self, folder, division, resumed_from) as books:

            def save(step: int) -> None:
                books.flush()
                shards, meta = strategy.save()
                pinned = self._pin_best(checkpointer, validation, pinned_before[0])
                meta |= {**self._meta(division), "validation": dict(validation.state_dict()) if validation else None}
                checkpointer.save(step, shards, meta)
                pinned_before[0] = pinned
                books.event("checkpoint", step=step, best=pinned == step)

            def report(context: StepContext, metrics: dict[str, float], seconds: float) -> None:
                books.metrics(context.step, context.epoch, metrics, seconds)

            validation = self._validation(division, precision, average, called or model, report)
            if validation is not None and checkpoint is not None and checkpoint.meta["validation"]:
                validation.load_state_dict(checkpoint.meta["validation"])
            pinned_before = [self._pin_best(checkpointer, validation, None)]
            trainer = Trainer(job, world, model, optimizer, stepper, loader, self.path, save, resumed_from, validation)
            trainer.check_after_first_step = strategy.save
            last = None
            try:
                with stopping_cleanly(trainer.stop, books.say):
                    for record in () if validation and validation.stopped_because else trainer.run():
                        books.write(record)
                        last = record
            finally:
                loader.close()
            steps = last.step if last else resumed_from
            because = validation.stopped_because if validation else ""
            finished = steps == job.num_steps or bool(because) or trainer.ended_by_hook
            books.finish(finished, steps, because)
        strategy.close()
        checkpointer.close()
        return Result(
            self.path,
            steps,
            resumed_from,
            finished,
            last,
            self._compilation(),
            world.is_main,
            metrics=validation.latest if validation else {},
            best_step=validation.best_step if validation else None,
        )

    def _pin_best(self, checkpointer: Checkpointer, validation: Validation | None, before: int | None) -> int | None:
        """The best checkpoint stays, however old it is; the one that was best before may go."""
        best = validation.best_step if validation else None
        if best is not None and best != before:
            checkpointer.pin(best)
            if before is not None:
                checkpointer.unpin(before)
        return best

    def _compilation(self) -> str:
        """Asked of the compiler itself: `torch.compile` can do nothing, and say nothing."""
        if not self.config.compile.enabled:
            return "not asked for"
        graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return (
            f"{graphs} graphs in mode {self.config.compile.mode}" if graphs else "asked for, but nothing was compiled"
        )

    def _micro_batch(self, checkpoint: Checkpoint | None) -> int:
        """The user's; else the checkpoint's, in a world of the same size; else a rank's whole share at once."""
        share = -(-(self.job.global_batch or 0) // self.world.size)
        if self.config.batch.size:
            return min(self.config.batch.size, share)
        if self.config.batch.accumulation:
            return -(-share // self.config.batch.accumulation)
        if checkpoint is not None and checkpoint.meta["plan"]["world_size"] == self.world.size:
            return int(checkpoint.meta["plan"]["micro_batch"])
        return share

    def _loader(self, division: Division, data: Dataset[Any], *, shuffle: bool) -> Loader:
        in_memory = type(data) is TensorDataset
        pinned = self.config.data.num_workers
        loader = Loader(
            data,
            division,
            self.world.rank,
            self.job.seed,
            self.job.collate,
            shuffle=shuffle,
            num_workers=pinned if pinned >= 0 else 0 if in_memory else self.settings.num_workers.value,
            pin_memory=self.settings.pin_memory.value and self.world.device.type == "cuda",
            prefetch_factor=self.settings.prefetch_factor.value or 2,
        )
        if self.world.is_main:
            loader.warn_if_inexact()
        return loader

    def _validation(
        self,
        division: Division,
        precision: Precision,
        average: Average | None,
        called: Any,
        report: Callable[[StepContext, dict[str, float], float], None],
    ) -> Validation | None:
        job = self.job
        if job.valid is None:
            return None
        num_samples = len(cast(Sized, job.valid))
        whole = Division(num_samples, num_samples, division.micro_batch, self.world.size)
        validator = Validator(job, self._loader(whole, job.valid, shuffle=False), precision, self.world)
        return Validation(validator, job.validate_every, job.best, job.early_stopping, average, called, report)

    def _model(self) -> tuple[nn.Module, Optimizer, Any]:
        torch.manual_seed(self.job.seed)  # the same weights on every rank, and in every run of this seed
        made = self.job.model if isinstance(self.job.model, nn.Module) else self.job.model()
        if not isinstance(made, nn.Module):
            raise DrivetrainError(
                f"the model factory returned {type(made).__name__}", remedy="return a torch.nn.Module"
            )
        model = made.to(self.world.device).train()
        if self.config.distributed.sync_batchnorm and self.world.size > 1:
            if self.world.device.type != "cuda":
                raise DrivetrainError("synchronised batch norm needs GPUs", remedy="drop --sync-batchnorm")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        if self.settings.activations.value == "recompute":
            self.recomputed = recompute(model)
        optimizer = self.job.make_optimizer(model)
        called = torch.compile(model, mode=self.config.compile.mode) if self.config.compile.enabled else None
        return model, optimizer, called

    def _meta(self, division: Division) -> dict[str, Any]:
        return {
            "plan": {"world_size": self.world.size, "micro_batch": division.micro_batch},
            "job": self.job.identity(),
            "hooks": [dict(hook.state_dict()) for hook in self.job.hooks],
        }


class _Books:
    """What the main process writes of a run: its files, and the terminal. Nothing on the others."""

    def __init__(self, run: _Run, folder: RunFolder | None, division: Division, resumed_from: int) -> None:
        self._run, self._folder, self._resumed_from = run, folder, resumed_from
        job = run.job
        self._console = RunConsole(job.num_steps, job.steps_per_epoch, resumed_from, quiet=run.quiet)
        if folder is None:
            return
        self._steps, self._events = folder.log("steps.jsonl"), folder.log("events.jsonl")
        self._metrics = folder.log("metrics.jsonl")
        self._steps.keep_up_to(resumed_from)
        self._metrics.keep_up_to(resumed_from)
        folder.write("hardware.json", run.hardware.to_json())
        folder.write("config.yaml", yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False))
        plan: dict[str, Any] = {
            "world_size": run.world.size,
            "micro_batch": division.micro_batch,
            "global_batch": job.global_batch,
        }
        plan |= {"strategy": run.strategy, "precision": run.settings.precision.value, "device": str(run.world.device)}
        folder.write("plan.yaml", yaml.safe_dump(plan, sort_keys=False))
        self.event("resume" if resumed_from else "start", step=resumed_from, **plan)

    def __enter__(self) -> "_Books":
        run, settings = self._run, self._run.settings
        if not run.quiet:
            size = f"{run.world.size} × {run.world.device}" if run.world.size > 1 else str(run.world.device)
            how = f"{settings.precision.value}: {settings.precision.reason}"
            verb = f"going on from step {self._resumed_from} of" if self._resumed_from else "training"
            self._console.say(
                f"[bold]{run.name}[/]: {verb} {run.job.num_steps} steps of {run.job.global_batch} samples"
            )
            self._console.say(f"  device     {size}\n  precision  {how}\n  folder     {run.path}")
        self._console.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._console.__exit__(*error)
        if self._folder is not None:
            if error[1] is not None:
                self.event("stopped by an error", error=f"{type(error[1]).__name__}: {error[1]}")
            self._steps.close()
            self._metrics.close()
            self._events.close()

    def write(self, record: StepRecord) -> None:
        if self._folder is not None:
            self._steps.append(record)
            self._console.show(record)

    def flush(self) -> None:
        if self._folder is not None:
            self._steps.flush()
            self._metrics.flush()

    def metrics(self, step: int, epoch: int, values: Mapping[str, float], seconds: float) -> None:
        if self._folder is None:
            return
        self._metrics.append({"step": step, "epoch": epoch, **values, "seconds": seconds})
        shown = "   ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        self.say(f"            {shown}")

    def say(self, text: str) -> None:
        if self._folder is not None:
            self._console.say(text)

    def finish(self, finished: bool, steps: int, because: str = "") -> None:
        if self._folder is None:
            return
        self.event("finish" if finished else "stop", step=steps, **{"because": because} if because else {})
        if because:
            self.say(f"stopped at step {steps}: {because}")
        elif not finished:
            self.say(f"stopped at step {steps} of {self._run.job.num_steps}; the same command goes on from there")
        if finished:
            self._folder.finish({"steps": steps})

    def event(self, kind: str, **facts: Any) -> None:
        if self._folder is None:
            return
        self._events.append({"event": kind, "time": datetime.now(UTC).isoformat(), **facts})
        self._events.flush()


def _ddp_options(config: Config) -> DdpOptions:
    return DdpOptions(
        find_unused_parameters=config.distributed.find_unused_parameters,
        broadcast_buffers=config.distributed.broadcast_buffers,
        bucket_cap_mb=config.distributed.bucket_cap_mb,
        static_graph=config.distributed.static_graph,
        gradient_as_bucket_view=config.distributed.gradient_as_bucket_view,
    )
