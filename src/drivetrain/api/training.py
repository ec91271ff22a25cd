"""`dt.train(job)`: one call, from a job to a trained model in a run folder, on one process or many."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drivetrain.checkpoint import Checkpoint, Checkpointer
from drivetrain.checkpoint import export as export_checkpoint
from drivetrain.checkpoint.weights import plainly_named
from drivetrain.config import Config
from drivetrain.core.errors import BadResumeError, suggesting_keywords
from drivetrain.core.faults import Faults
from drivetrain.core.goodput import start_marks
from drivetrain.core.hook import Rehearsal, StepContext
from drivetrain.core.isolation import draws_kept, is_out_of_memory, raised_while_compiling
from drivetrain.core.launchers import supervision
from drivetrain.core.log import notice
from drivetrain.core.metrics import LossSum, StepRecord
from drivetrain.core.processes import stopping_cleanly, wants_pause, written_first
from drivetrain.core.run_folder import RunFolder
from drivetrain.core.state import BesideLoss
from drivetrain.data.division import Position
from drivetrain.data.external_order import refuse_unequal_orders
from drivetrain.data.feed import DeviceFeed, ResidentFeed
from drivetrain.data.keyed_items import Collated
from drivetrain.data.loader import Loader, MicroBatch, SamplesAgain
from drivetrain.job import NAMES_FOR_TRAIN, Job, refuse_no_job
from drivetrain.job_checks import check_aims
from drivetrain.loop import Stepper
from drivetrain.loop.bad_numbers import BadNumbers, RollBackError, SpikeWatch, refuse_unmoved
from drivetrain.loop.trainer import Trainer
from drivetrain.monitor.phases import DATA, NoClock, make_clock
from drivetrain.monitor.recorder import NoRunRecorder, RunRecorder
from drivetrain.monitor.sampler import watch_memory
from drivetrain.monitor.tracking import check_trackers
from drivetrain.planning.fresh_process import CompileSwitch, refuse_background
from drivetrain.planning.planner import PlanningProgress, make_plan
from drivetrain.planning.trials import settle_global_batch
from drivetrain.report import write_report
from drivetrain.run import (
    CheckpointSaver,
    Result,
    Session,
    State,
    Which,
    best_of,
    checkpoint_of,
    configured,
    done_instead,
    draws_always,
    falls_back,
    folder_of,
    make_checkpointer,
    make_schedule,
    note_end,
    num_trained,
    open_recorder,
    tell_batch_size,
    tell_capture,
    tell_changes,
    tell_end,
    tell_extension,
    tell_notes,
    tell_plain_optimizer,
    tell_rate,
    tell_repeatable,
    tell_sharding,
    tell_strategy,
    watch_compiling,
    write_down,
)
from drivetrain.run.assemble import (
    RunParts,
    assemble,
    division_of,
    make_loader,
    make_stepper,
    make_validation,
    make_validator,
    resume,
    small_trial,
    try_last_batch,
)
from drivetrain.run.loss_weighting import look_at_all, settle_by_batch, settle_weighting, tell_weighting, watched
from drivetrain.run.model_factory import build_model, prepare_model
from drivetrain.run.periodic import NormCadence, replica_check
from drivetrain.run.recovery import (
    Caps,
    FaultyFiles,
    StepRetry,
    can_go_on_here,
    faults_of,
    give_memory_back,
    has_checkpoint,
    heed_cap,
    inject,
    lower_cap,
    read_skips,
    rolls_back,
    tell_cap,
)
from drivetrain.run.refusals import changes_since_start, keep_fingerprint, refuse_before_planning
from drivetrain.strategies.replicated import Freezer

__all__ = ["Result", "configured", "export", "num_trained", "train"]


@suggesting_keywords("train", NAMES_FOR_TRAIN, "settings of the run go to config: dt.train(job, dt.configure(…))")
@draws_kept()
def train(
    job: Job, config: Config | None = None, *, quiet: bool = False, fresh: bool = False, extend: bool = False
) -> Result:
    """Train a job to its end. An interrupted run of the same job under the same name is continued, exactly.

    If a step runs out of memory, a run of one process repeats it with half the micro-batch. If the loss is not finite
    right after a resume, it goes on from the checkpoint before, as long as there is one.

    Args:
        job: What to train.
        config: How to run it, from `configure`. Default: the command line's, else the defaults.
        quiet: Whether to print nothing but errors.
        fresh: Whether to begin anew where a run has this name; that one is moved aside, to `NAME.old-1`.
        extend: Whether to go on with the run of this name, finished or not, to the job's `epochs` or `max_steps`,
            which are more than it had.

    Returns:
        Where the run's files are, and how it ended.

    Example:
        >>> dt.train(job, dt.configure(precision="fp32"), quiet=True).finished
        True
    """
    refuse_no_job(job)
    done_instead(job)
    moves_aside = True if fresh else None
    while True:
        run = _Run.join(job, config, quiet=quiet, fresh=moves_aside, extend=extend)
        moves_aside = False  # once is enough: what is there from now on is this run
        try:
            result = replace(run.train(), job=job)
            if not run.quiet:
                _tell_twin(result)
            return result
        except Exception as error:
            if not run.can_try_again(error):
                raise
        finally:
            run.close()
        del run
        give_memory_back()


_ended: dict[tuple[int, float], str] = {}  # runs of this process, by their steps and last losses


def _tell_twin(result: Result) -> None:
    """Say that a run is another one of this process once more, as in an ensemble whose members have one seed."""
    if result.last is None or not result.is_main or result.resumed_from or not result.last.loss:
        return
    name = result.folder.name
    before = _ended.setdefault((result.steps, result.last.loss), name)
    if before != name:
        notice(
            f"the run {name} has ended with the loss of {before}, to the bit: jobs that are alike come to the same "
            "weights with one seed. Job(seed=…) gives each run first weights and an order of its own"
        )


def export(
    run: Path | str | Result,
    path: Path | str | None = None,
    *,
    which: Which = "last",
    average: bool = True,
) -> Path:
    """Write the weights of a run as one plain file, under the model's own names, and return its path.

    Args:
        run: The run's folder, or what `train` returned.
        path: The file. Its suffix says the format: `.safetensors`, or `.pt`, `.pth`, `.bin` for a state_dict by
            `torch.save`; others are refused. Default: `model.safetensors` in the run's folder.
        which: `last`, the newest checkpoint, or `best`, the one that validated best.
        average: Whether to take the moving average of the weights, where one was kept.

    Returns:
        The path of the file.

    Example:
        >>> dt.export(dt.train(job, quiet=True), "line.pt").name
        'line.pt'
    """
    checkpoint = checkpoint_of(run, which)
    target = Path(path) if path is not None else folder_of(run) / "model.safetensors"
    export_checkpoint(checkpoint, target, prefix="model/", instead="ema/" if average else "")
    return target


@dataclass(frozen=True)
class _Start:
    """The folder, checkpoint and model of a run, before its parts are assembled."""

    folder: RunFolder | None  # on the main process
    checkpointer: Checkpointer
    checkpoint: Checkpoint | None  # that the run goes on from
    model: nn.Module  # as the user made it
    changes: Sequence[str]  # in the job, since the checkpoint
    faults: Faults  # that are injected
    caps: Caps  # of the micro-batch, from steps that are still to come
    switch: CompileSwitch  # to code that is compiled in the background


class _Run(Session):
    """One call of `train` on one rank: builds the parts, runs the loop."""

    def train(self) -> Result:
        check_trackers(self.config.watch.trackers)
        built = settle_global_batch(self)
        folder = self.claim()
        try:
            faults = faults_of(self)
            checkpointer = make_checkpointer(self, FaultyFiles(faults) if faults else None)
            with start_marks.restoring():
                checkpoint = checkpointer.latest()
            caps = heed_cap(self, 0 if checkpoint is None else checkpoint.step)
            model = built or build_model(self)
            self.beside_loss = BesideLoss(self.job.losses, model)
            changes = changes_since_start(self, model, folder, checkpoint.step if checkpoint else None)
            refuse_before_planning(self, model, checkpoint)
            refuse_background(self)
            settle_weighting(self, model, checkpoint)
            with PlanningProgress(quiet=self.quiet) as progress:
                self.follow(make_plan(self, model, checkpoint, progress))
            switch = CompileSwitch(self, 0 if checkpoint is None else checkpoint.step)
            with self.numerics(), self.stream(), switch:
                return self._train(_Start(folder, checkpointer, checkpoint, model, changes, faults, caps, switch))
        except BaseException as error:
            self.note_failed_start(error)
            raise
        finally:
            self.close_loaders()
            if folder is not None:
                folder.close()

    _can_try_again: tuple[int, bool] | None = None  # the identity of the error that ended it, and what was found

    def can_try_again(self, error: Exception) -> bool:
        """Have the next start use smaller micro-batches, or an older checkpoint. Return whether this process can."""
        if self._can_try_again is not None and self._can_try_again[0] == id(error):
            return self._can_try_again[1]
        can = False
        if isinstance(error, BadResumeError):
            can = falls_back(self, error)
        elif isinstance(error, RollBackError):
            can = rolls_back(self, error)
        elif is_out_of_memory(error) and hasattr(self, "path"):  # without a folder the cap cannot be kept
            can = self._lower_cap(error)
        self._can_try_again = id(error), can
        return can

    def _lower_cap(self, error: Exception) -> bool:
        is_kept = lower_cap(self, error)
        is_here = can_go_on_here(self)
        at = " while compiling" if raised_while_compiling(error) is not None else ""
        words = f"out of memory{at} with micro-batches of {self.way.micro_batch} samples"
        if is_here:
            where = "the last checkpoint" if has_checkpoint(self) else "the beginning"
            notice(f"{words}: going on with half as many from {where}")
        else:
            again = f"Start it again with --batch-size {self.way.micro_batch // 2}"
            if is_kept:
                again = "Start it again: it goes on by itself with half as many"
            error.add_note(f"drivetrain: {words}. {again}")
        return is_here

    def _train(self, start: _Start) -> Result:
        """Assemble the run, go through its steps, and write the report."""
        loader, first = self._data(start)
        trial = small_trial(self, loader, first)
        watches = self.config.watch.log_every != 0
        parts = assemble(
            self,
            prepare_model(self, start.model),
            trial,
            loader.division,
            takes_weights=start.checkpoint is None,
            counts_flops=watches,
        )
        if start.checkpoint is None:
            try_last_batch(self, loader, parts)
        changes_steps = start.faults.changes_steps
        if changes_steps or (self.way.capture and self.world.any(changes_steps)):  # on another rank
            why = parts.why_not_captured or "faults are injected into steps"
            parts = replace(parts, objective=start.faults.around(parts.objective), why_not_captured=why)
        check_aims(self.job, [*(f"loss_{name}" for name in self.part_names), *self.step_log.names])
        self.loss_parts.check_division(-(-self.rank_samples // loader.division.micro_batch))
        wants_capture = self.way.capture
        if wants_capture and parts.why_not_captured:  # known before the first step, so the plan says what is done
            self.follow(self.planned.not_captured(parts.why_not_captured))
        resumed_from = resume(self, parts, start.checkpoint)
        clock = make_clock(self.world.device) if watches and self.world.is_main else NoClock()
        if isinstance(loader.feed, (DeviceFeed, ResidentFeed)):
            loader.feed.before_copy = lambda: clock.lap(DATA)
        stepper = make_stepper(self, parts, loader=loader, clock=clock)
        if wants_capture and parts.why_not_captured:
            stepper.why_not = parts.why_not_captured
        opened = open_recorder(self, start.folder, loader, resumed_from, clock, parts.flops_per_sample)
        with closing(stepper), opened as recorder:
            self._tell(start, parts, loader, stepper, resumed_from, recorder)
            loop = _Loop(self, start, parts, loader, stepper, recorder, resumed_from)
            loop.run()
            loop.test()
            recorder.finish(
                loop.finished,
                loop.steps,
                loop.stopped_because,
                compilation=self.compilation(),
                capture=stepper.in_words(),
            )
            note_end(loop.finished)
        if self.world.is_main and self.config.watch.report:
            with written_first(recorder.say):
                for problem in write_report(self.path, always_draws=draws_always(self)):
                    recorder.say(problem)
        start.checkpointer.close()
        result = loop.result(resumed_from)
        tell_end(self, result.steps, result.best, result.last, recorder)
        recorder.last_words(loop.finished, loop.steps, loop.stopped_because)
        return result

    def _data(self, start: _Start) -> tuple[Loader, MicroBatch]:
        """Open the data and read the first batch, on which the weighting of the loss may depend."""
        job, checkpoint = self.job, start.checkpoint
        position = None if checkpoint is None else Position.from_json(checkpoint.step, checkpoint.meta.get("data"))
        loader = make_loader(self, division_of(self, start.model), job.source, shuffle=job.shuffle, start=position)
        first = loader.first(job.max_steps, job.epochs)
        refuse_unequal_orders(loader.fingerprint, self.world)
        draws = self.weighs_first_batch and loader.collate_draws()
        settle_by_batch(self, start.model, first.batch, first.num_samples, draws=draws)
        look_at_all(self, loader, start.model)
        return loader, first

    def _tell(
        self,
        start: _Start,
        parts: RunParts,
        loader: Loader,
        stepper: Stepper,
        resumed_from: int,
        recorder: RunRecorder | NoRunRecorder,
    ) -> None:
        """Report what the run found out and decided."""
        tell_extension(self, start.folder, parts.optimizer, resumed_from, recorder)
        keep_fingerprint(self, start.folder)
        tell_changes(start.changes, resumed_from, recorder)
        tell_notes(loader, parts.model, recorder)
        tell_plain_optimizer(parts.optimizer, recorder)
        tell_rate(self, parts.optimizer, recorder)
        tell_capture(stepper, recorder)
        tell_repeatable(self, recorder)
        tell_sharding(self, recorder)
        tell_strategy(self, recorder)
        tell_weighting(self, recorder)
        tell_batch_size(self, recorder)
        tell_cap(self, recorder)
        if parts.weights_taken is not None:
            write_down(parts.weights_taken, recorder)


class _Loop:
    """The steps of a run with all that goes with them: validation, checkpoints, records."""

    def __init__(
        self,
        run: _Run,
        start: _Start,
        parts: RunParts,
        loader: Loader,
        stepper: Stepper,
        recorder: RunRecorder | NoRunRecorder,
        resumed_from: int,
    ) -> None:
        self._run, self._parts, self._loader, self._recorder = run, parts, loader, recorder
        checkpoint, job = start.checkpoint, run.job
        self._last: StepRecord | None = None
        self._tested: dict[str, float] = {}
        self._checkpointer, self._switch = start.checkpointer, start.switch
        self.steps, self.finished, self.stopped_because = resumed_from, False, ""
        self._validation = make_validation(
            run, parts, checkpoint, self._report_validation, progress=partial(recorder.measuring, "validating")
        )
        self._saver = CheckpointSaver(
            start.checkpointer,
            run.world,
            recorder,
            self._state,
            lambda: self._validation.best_step if self._validation else None,
            beside=run.config.checkpoint.async_save,
            schedule=make_schedule(run),
            limit_seconds=run.config.distributed.timeout_seconds,
        )
        self._saver.watch_frozen(parts.strategy.save)
        before_step = self._before_step(watched(run, loader, parts.model, stepper, recorder))
        norms = None
        if not job.clips and run.spec.norms:
            norms = self._norm_cadence(stepper, resumed_from)
        self._trainer = Trainer(
            job,
            run.world,
            parts.model,
            parts.optimizer,
            stepper,
            loader,
            run.path,
            self._saver,
            recorder,
            rates=parts.rates,
            first_step=resumed_from,
            has_moved=checkpoint is not None and checkpoint.meta.get("has_moved", True),
            validation=self._validation,
            average=parts.average,
            rehearsal=self._rehearsal(),
            before_step=inject(start.faults, run, parts, loader, self._saver, before_step),
            check_model=parts.watch.check,
            freezer=Freezer(parts.given, run.sharded.owners if run.sharded else {}),
            set_loss_weights=run.loss_parts.set_weights if run.loss_parts.has_schedule else None,
            norms=norms,
            retry=StepRetry(run, parts, loader, stepper, recorder, start.caps),
            bad=self._bad_numbers(stepper, resumed_from),
        )
        self._spikes = SpikeWatch(run.config.watch.spikes, recorder.event, recorder.say)
        self._replicas = replica_check(run, parts, recorder.event)

    def _bad_numbers(self, stepper: Stepper, first_step: int) -> BadNumbers | None:
        """Return the judge of numbers that are not finite; None where the run stops at the first. Collective."""
        run, recorder = self._run, self._recorder
        if run.config.watch.bad_steps == "stop":
            return None
        self._parts.given.gate.is_on = True
        return BadNumbers(
            run.world,
            stepper,
            self._loader,
            recorder.event,
            recorder.say,
            skips=read_skips(run),
            first_step=first_step,
            scales_loss=run.precision.scales_loss,
        )

    def run(self) -> None:
        """Go through the steps that are left, to the job's end or until something stops it."""
        recorder, saver, trainer, job = self._recorder, self._saver, self._trainer, self._run.job
        memory = watch_memory(self._run.world.device, recorder.event, recorder.say)
        was_stopped = self._validation is not None and self._validation.stopped_because
        self._run.beside_loss.put_back()  # all trials are done
        try:
            with stopping_cleanly(trainer.stop, recorder.say), watch_compiling(recorder):
                for record in () if was_stopped or self._run.is_done else trainer.run():
                    recorder.write(record)
                    self._last = record
                    memory.observe(record)
                    self._spikes.observe(record)
                    self._replicas.observe(record)
                    self._switch.observe(record)
                    saver.report()
                supervision.phase("save")
                saver.finish()
                memory.close()
        except BaseException as error:
            if isinstance(error, Exception) and is_out_of_memory(error):
                self._run.can_try_again(error)  # before it is reported: the report says what another start does
            saver.failed(error)
            raise
        finally:
            supervision.phase("end")
            self._loader.close()
            saver.close()
        self.steps = self._last.step if self._last else self.steps
        self.stopped_because = self._validation.stopped_because if self._validation else ""
        is_done = self._loader.position.is_over(job.max_steps, job.epochs)
        self.finished = is_done or bool(self.stopped_because) or trainer.ended_by_hook or self._run.is_done
        if self.finished:
            refuse_unmoved(self.steps, has_moved=trainer.has_moved)

    def test(self) -> None:
        """Measure the test sets once the job is done: with the best weights, or the last ones without validation."""
        run, parts = self._run, self._parts
        if not self.finished or not run.job.test_sets:
            return
        began = time.perf_counter()
        best = self._validation.best_step if self._validation else None
        is_saved = run.world.agree(best in self._checkpointer.steps())  # a save that fails does not end a run
        of_step = best if best is not None and is_saved else self.steps
        validator = make_validator(
            run, self._loader.division.micro_batch, "test", progress=partial(self._recorder.measuring, "testing")
        )
        if of_step != self.steps:
            parts.strategy.load(plainly_named(checkpoint_of(run.path, "best"), parts.model.state_dict()))
        with parts.average.in_place() if parts.average else nullcontext():
            self._tested = validator.measure(parts.model)
        if of_step != self.steps:
            parts.strategy.load(plainly_named(checkpoint_of(run.path, "last"), parts.model.state_dict()))
        epoch = self._last.epoch if self._last else max(0, self._loader.position.epoch - 1)
        self._recorder.test(self.steps, epoch, self._tested, time.perf_counter() - began, of_step)

    def result(self, resumed_from: int) -> Result:
        validation = self._validation
        return Result(
            self._run.path,
            self.steps,
            resumed_from,
            self.finished,
            self._last,
            self._run.compilation(),
            self._run.world.is_main,
            metrics=validation.latest if validation else {},
            best=best_of(validation, self._run.job.best),
            test=self._tested,
        )

    def _state(self) -> State:
        """Return what a checkpoint holds of this rank."""
        self._parts.watch.check()
        shards, meta = self._parts.strategy.save()
        meta |= {
            **self._run.meta(self._loader.division),
            "validation": dict(self._validation.state_dict()) if self._validation else None,
        }
        meta["data"] = None if self._run.job.source.is_keyed else self._loader.position.to_json()
        meta["has_moved"] = self._trainer.has_moved
        return shards, meta

    def _report_validation(self, context: StepContext, metrics: dict[str, float], seconds: float, best: str) -> None:
        # The record of the step that is validated was read before: its epoch is what `steps.jsonl` has.
        epoch = context.epoch if self._last is None else self._last.epoch
        self._recorder.metrics(context.step, epoch, metrics, seconds, best)
        if wants_pause(context.step):
            self._trainer.stop()

    def _before_step(self, others: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """Return the function to call before each step, numbered from 1; it reduces the counts of the loss's parts."""
        others = self._switch.before_steps(others, self._recorder)
        if self._loader.count_ahead is None:
            return others
        loss_parts = self._run.loss_parts

        def before_step(step: int) -> None:
            loss_parts.begin(step - 1)
            if others is not None:
                others(step)

        return before_step

    def _norm_cadence(self, stepper: Stepper, first_step: int) -> NormCadence:
        """Decide how often the gradient norm is recorded, and report it where that is not every step."""
        world, recorder = self._run.world, self._recorder

        def tell(words: str, facts: dict[str, Any]) -> None:
            recorder.event("gradient norm", words=words, **facts)
            if words:
                recorder.say(f"  grad norm  {words}")

        shares = world.size > 1 and self._run.holds_parts
        norms = NormCadence(self._parts.given, world, first_step, tell, shares=shares)
        if type(stepper) is not Stepper:
            plan = self._run.planned.plan
            norms.settle_captured(None if plan is None else plan.forecast.step_seconds)
        return norms

    def _rehearsal(self) -> Rehearsal | None:
        """Collect what hooks need to train on samples again; None where samples have no numbers."""
        run, job, precision = self._run, self._run.job, self._run.precision
        if not job.source.is_keyed:
            return None

        def loss(model: nn.Module, batch: Any) -> Tensor | LossSum:
            # A scaled loss belongs to the scaler's steps: without it, small gradients would vanish.
            with (None if precision.scales_loss else precision.around_forward()) or nullcontext():
                result = job.loss_function(model, batch)
            return run.loss_parts.total(result, batch) if isinstance(result, Mapping) else result

        samples = SamplesAgain(
            self._loader, Collated(job.collate), run.world.device, channels_last=run.way.channels_last
        )
        return Rehearsal(samples, self._parts.optimizer, job.clip_norm, loss)
