"""`dt.train(job)`: one call, from a job to a trained model in a run folder, on one process or many."""

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from drivetrain.checkpoint import Checkpoint, Checkpointer
from drivetrain.checkpoint import export as export_checkpoint
from drivetrain.checkpoint.names import step_name
from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import StepContext
from drivetrain.core.interrupt import stopping_cleanly
from drivetrain.core.precision import Precision, numerics
from drivetrain.core.records import StepRecord
from drivetrain.core.run_folder import RunFolder
from drivetrain.data.division import Division
from drivetrain.data.items import what_draws
from drivetrain.hardware import assert_on_device
from drivetrain.job import Job
from drivetrain.run import CHECKPOINTS, Books, Setup, configured, num_trained
from drivetrain.step import Stepper, to_device
from drivetrain.strategies import Average, StrategyParts, Trial
from drivetrain.trainer import Trainer
from drivetrain.validation import Validation, Validator

__all__ = ["Result", "configured", "export", "num_trained", "train"]


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
    run = _Run.join(job, config, quiet=quiet)
    try:
        return run.train()
    finally:
        run.world.close()


def export(
    run: Path | str | Result,
    path: Path | str | None = None,
    *,
    which: Literal["last", "best"] = "last",
    average: bool = True,
) -> Path:
    """The weights of a run as one plain safetensors file, under the model's own names.

    The newest, or those that validated best. Where a moving average was kept, it is taken, unless `average` is false.
    """
    folder = run.folder if isinstance(run, Result) else Path(run)
    if not (folder / CHECKPOINTS).is_dir():
        raise DrivetrainError(f"{folder} holds no checkpoints", remedy="give the folder of a run, such as runs/digits")
    checkpoint = Checkpoint.latest_in(folder / CHECKPOINTS)  # changes nothing, so a run may go on beside it
    if checkpoint is None:
        raise DrivetrainError(f"{folder} holds no checkpoint that is whole", remedy="train on under the same name")
    if which == "best":
        checkpoint = _best(checkpoint)
    target = Path(path) if path is not None else folder / "model.safetensors"
    export_checkpoint(checkpoint, target, prefix="model/", instead="ema/" if average else "")
    return target


def _best(newest: Checkpoint) -> Checkpoint:
    """The one that validated best, as the newest one remembers it."""
    step = (newest.meta.get("validation") or {}).get("best_step")
    if step is None:
        raise DrivetrainError(
            f"{newest.path.parent} holds a run that was never validated, so none of it is known to be best",
            remedy='give the job a validation set, or use which="last"',
        )
    return newest if step == newest.step else Checkpoint.open(newest.path.with_name(step_name(step)))


class _Run(Setup):
    """One call of `train` on one rank: builds the parts, runs the loop."""

    def train(self) -> Result:
        folder = self.claim()
        precision = Precision(self.settings.precision.value, self.world.device.type)
        kernels = self.config.kernels
        try:
            with numerics(precision, deterministic=kernels.deterministic, cudnn_benchmark=kernels.cudnn_benchmark):
                return self._train(folder, precision)
        finally:
            if folder is not None:
                folder.close()

    def _train(self, folder: RunFolder | None, precision: Precision) -> Result:
        job, world = self.job, self.world
        checkpointer = Checkpointer(self.path / CHECKPOINTS, world, job.keep_last)
        checkpoint = checkpointer.latest()
        division = Division(job.num_samples, job.global_batch or 0, self.micro_batch(checkpoint), world.size)
        loader = self.loader(division, job.data, shuffle=job.shuffle)
        model, optimizer, called = self.model()
        average = None if job.ema is None else Average(model, job.ema)
        strategy = self.make_strategy()
        first = loader.micro_batch(division.place(0), 0)
        offloads = self.settings.activations.value == "offload"
        parts = StrategyParts(model, job.loss, optimizer, job.clip_norm, precision, called, average, offloads)
        trial = Trial(to_device(first.batch, world.device), first.num_samples)
        draws, objective = what_draws(lambda: strategy.prepare(parts, trial), world.device)
        resumed_from = 0
        if checkpoint is not None:
            strategy.load(checkpoint)
            self.load_hooks(checkpoint)
            resumed_from = checkpoint.step

        asserts = self.config.device.assertions
        check = (lambda batch: assert_on_device(world.device, model=model, batch=batch)) if asserts else None
        stepper = Stepper(strategy, objective, world, job.seed, draws=draws, before_micro_step=check)
        with Books(self, folder, division, resumed_from) as books:

            def save(step: int) -> None:
                books.flush()
                shards, meta = strategy.save()
                pinned = self._pin_best(checkpointer, validation, pinned_before[0])
                meta |= {**self.meta(division), "validation": dict(validation.state_dict()) if validation else None}
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
            self.compilation(),
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
        validator = Validator(job, self.loader(whole, job.valid, shuffle=False), precision, self.world)
        return Validation(validator, job.validate_every, job.best, job.early_stopping, average, called, report)
