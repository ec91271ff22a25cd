"""`dt.train(job)`: one call, from a job to a trained model in a run folder, on one process or many."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.checkpoint import Checkpoint, Checkpointer
from drivetrain.checkpoint import export as export_checkpoint
from drivetrain.checkpoint.plain_names import plainly_named
from drivetrain.config import Config
from drivetrain.core.hook import Rehearsal, StepContext
from drivetrain.core.interrupt import stopping_cleanly, written_first
from drivetrain.core.loss import LossSum
from drivetrain.core.parameter_watch import ParameterWatch
from drivetrain.core.records import StepRecord
from drivetrain.core.run_folder import RunFolder
from drivetrain.data.batch import to_device
from drivetrain.data.division import Division, Position
from drivetrain.data.external_order import refuse_unequal_orders
from drivetrain.data.feed import DeviceFeed, ResidentFeed
from drivetrain.data.keyed_items import Collated, what_draws
from drivetrain.data.loader import Loader
from drivetrain.data.samples_by_number import SamplesAgain
from drivetrain.job import Job
from drivetrain.loop import CapturedStepper, Stepper, make_capturable
from drivetrain.loop.trainer import Trainer
from drivetrain.loop.validation import Validation
from drivetrain.monitor.flops import count_apart, counted
from drivetrain.monitor.memory import watch_memory
from drivetrain.monitor.phases import DATA, NoClock, make_clock
from drivetrain.monitor.recorder import Books, NoBooks
from drivetrain.plan.plan import Plan
from drivetrain.planning.batch_size import settle_global_batch
from drivetrain.planning.planner import Told, settle
from drivetrain.report import write_report
from drivetrain.run import (
    CHECKPOINTS,
    Result,
    Saves,
    Setup,
    State,
    Which,
    checkpoint_of,
    configured,
    done_instead,
    note_end,
    num_trained,
    open_books,
    take_weights,
    tell_batch_size,
    tell_capture,
    tell_changes,
    tell_notes,
    tell_plain_optimizer,
    tell_repeatable,
    tell_sharding,
    tell_strategy,
    write_down,
)
from drivetrain.run.grad_norm import NormCadence
from drivetrain.run.loss_weighting import look_at_all, settle_by_batch, settle_weighting, tell_weighting, watched
from drivetrain.run.memory_cap import (
    can_go_on_here,
    give_memory_back,
    has_checkpoint,
    heed_cap,
    is_out_of_memory,
    lower_cap,
    tell_cap,
)
from drivetrain.strategies import Average, SingleStrategy, StrategyParts, Trial

__all__ = ["Result", "configured", "export", "num_trained", "train"]


def train(job: Job, config: Config | None = None, *, quiet: bool = False) -> Result:
    """Train a job to its end. An interrupted run of the same job under the same name is continued, exactly.

    If a step runs out of memory, a run of one process goes on from its last checkpoint with half the micro-batch.
    """
    done_instead(job)
    while True:
        run = _Run.join(job, config, quiet=quiet)
        try:
            return run.train()
        except Exception as error:
            if not is_out_of_memory(error) or not run.can_try_again(error):
                raise
        finally:
            run.close()
        give_memory_back()


def export(
    run: Path | str | Result,
    path: Path | str | None = None,
    *,
    which: Which = "last",
    average: bool = True,
) -> Path:
    """Write the weights of a run as one plain file, under the model's own names, and return its path.

    The suffix says the format: `.safetensors`, or `.pt`, `.pth`, `.bin` for a state_dict by `torch.save`; others are
    refused. `which` is "last", the newest checkpoint, or "best", the one that validated best. Where a moving average
    was kept, it is taken, unless `average` is false.
    """
    checkpoint = checkpoint_of(run, which)
    folder = run.folder if isinstance(run, Result) else Path(run)
    target = Path(path) if path is not None else folder / "model.safetensors"
    export_checkpoint(checkpoint, target, prefix="model/", instead="ema/" if average else "")
    return target


class _Run(Setup):
    """One call of `train` on one rank: builds the parts, runs the loop."""

    def train(self) -> Result:
        built = settle_global_batch(self)
        folder = self.claim()
        try:
            heed_cap(self)
            checkpointer = Checkpointer(self.path / CHECKPOINTS, self.world, self.job.keep_last)
            checkpoint = checkpointer.latest()
            model = built or self.build()
            changes = self.changes_since_start(model, folder, checkpoint.step if checkpoint else None)
            settle_weighting(self, model, checkpoint)
            plan = self.do_without_compiler(settle(self, model, checkpoint, Told(quiet=self.quiet)))
            with self.numerics(), self.stream():
                return self._train(folder, checkpointer, checkpoint, model, plan, changes)
        finally:
            self.close_loaders()
            if folder is not None:
                folder.close()

    def can_try_again(self, error: Exception) -> bool:
        """Have the next start use smaller micro-batches. Return whether this process can do it."""
        if not hasattr(self, "path"):  # no folder was claimed, so there is nowhere to keep the cap
            return False
        lower_cap(self, error)
        is_here = can_go_on_here(self)
        words = f"out of memory with micro-batches of {self.way.micro_batch} samples"
        if is_here:
            where = "the last checkpoint" if has_checkpoint(self) else "the beginning"
            print(f"drivetrain: {words}: going on with half as many from {where}", file=sys.stderr)
        else:
            error.add_note(f"drivetrain: {words}. Start it again: it goes on by itself with half as many")
        return is_here

    def _train(
        self,
        folder: RunFolder | None,
        checkpointer: Checkpointer,
        checkpoint: Checkpoint | None,
        built: nn.Module,
        plan: Plan,
        changes: Sequence[str] = (),
    ) -> Result:
        job, world, precision = self.job, self.world, self.precision
        division = self.division(built)
        start = None if checkpoint is None else Position.from_json(checkpoint.step, checkpoint.meta.get("data"))
        loader = self.loader(division, job.source, shuffle=job.shuffle, start=start)
        first = loader.first(job.max_steps, job.epochs)
        refuse_unequal_orders(loader.fingerprint, world)
        settle_by_batch(self, built, first.batch, first.num_samples)
        look_at_all(self, loader, built)
        model, optimizer = self.dressed(built)
        watch = ParameterWatch(model)
        called_loss = self.called_loss()
        taken = None
        if checkpoint is None and job.init_from is not None:
            taken = take_weights(job.init_from, model, world, self.experts)
        average = None if job.ema is None else Average(model, job.ema)
        strategy = self.make_strategy()
        offloads = self.settings.activations.value == "offload"
        parts = StrategyParts(
            model,
            self.weighted(job.loss),
            optimizer,
            job.clip_norm,
            precision,
            None,
            None if called_loss is None else self.weighted(called_loss),
            average,
            offloads,
            loss_parts=self.loss_parts,
        )
        trial = Trial(to_device(first.batch, world.device, channels_last=self.channels_last), first.num_samples)
        watches = self.config.watch.log_every != 0
        flops = 0
        if watches and called_loss is not None:
            flops = count_apart(parts.loss, model, trial.batch, precision.around_forward())
        counts = watches and world.is_main and self.way.compile_mode is None
        draws, (flops_here, objective) = what_draws(
            lambda: counted(lambda: strategy.prepare(parts, trial), counts), world.device
        )
        flops = flops or flops_here
        self.loss_parts.check_division(-(-self.rank_samples // division.micro_batch))
        why_not_captured = self.why_not_captured(optimizer, draws, division)
        if not why_not_captured:
            make_capturable(optimizer)
        wants_capture = self.way.capture
        if wants_capture and why_not_captured:  # known before the first step, so the plan says what is done
            self.follow(self.way.but(capture=False))
            plan = plan.not_captured(why_not_captured)
        resumed_from = 0
        if checkpoint is not None:
            strategy.load(plainly_named(checkpoint, model.state_dict()))
            self.load_hooks(checkpoint)
            watch.check()
            resumed_from = checkpoint.step

        check = self.device_check(model)
        clock = make_clock(world.device) if watches and world.is_main else NoClock()
        if isinstance(loader.feed, (DeviceFeed, ResidentFeed)):
            loader.feed.before_copy = lambda: clock.lap(DATA)
        if isinstance(strategy, SingleStrategy) and not why_not_captured:
            captured = CapturedStepper(strategy, objective, world, job.seed, draws=draws, clock=clock)
            if isinstance(loader.feed, ResidentFeed):
                loader.feed.gathers = False  # the replay does it
                captured.take_rows(channels_last=self.channels_last)
            stepper: Stepper = captured
        else:
            stepper = Stepper(strategy, objective, world, job.seed, draws=draws, before_micro_step=check, clock=clock)
            stepper.why_not = why_not_captured if wants_capture else ""
            if self.loss_parts.can_count_ahead:
                loader.count_ahead = self.loss_parts.count_ahead
        with open_books(self, folder, loader, resumed_from, clock, flops / trial.num_samples, plan) as books:
            self.keep_fingerprint(folder)
            tell_changes(changes, resumed_from, books)
            tell_notes(loader, books)
            tell_plain_optimizer(optimizer, books)
            tell_capture(stepper, books)
            tell_repeatable(self, books)
            tell_sharding(self, books)
            tell_strategy(self, books)
            tell_weighting(self, books)
            tell_batch_size(self, books)
            tell_cap(self, books)

            def state() -> State:
                watch.check()
                shards, meta = strategy.save()
                meta |= {**self.meta(division), "validation": dict(validation.state_dict()) if validation else None}
                meta["data"] = None if job.source.is_keyed else loader.position.to_json()
                meta["has_moved"] = trainer.has_moved
                return shards, meta

            last: StepRecord | None = None

            def report(context: StepContext, metrics: dict[str, float], seconds: float) -> None:
                # The record of the step that is validated was read before: its epoch is what `steps.jsonl` has.
                epoch = context.epoch if last is None else last.epoch
                books.metrics(context.step, epoch, metrics, seconds)

            validation = self._validation(division, average, report)
            if validation is not None and checkpoint is not None and checkpoint.meta["validation"]:
                validation.load_state_dict(checkpoint.meta["validation"])
            if taken is not None:
                write_down(taken, books)
            best = (lambda: validation.best_step) if validation is not None else (lambda: None)
            saves = Saves(checkpointer, world, books, state, best, beside=self.config.checkpoint.async_save)
            trainer = Trainer(
                job, world, model, optimizer, stepper, loader, self.path, saves.save, resumed_from, validation
            )
            trainer.has_moved = checkpoint is not None and checkpoint.meta.get("has_moved", True)
            saves.watch_frozen(strategy.save)
            trainer.snapshot = saves.snapshot
            trainer.check_after_first_step = saves.prepare
            trainer.check_model = watch.check
            trainer.before_step = self._before_step(watched(self, loader, model, stepper, books), loader)
            if job.clip_norm is None and self.spec.norms:
                trainer.norms = self._norm_cadence(parts, resumed_from, books, stepper, plan)
            if self.loss_parts.has_schedule:
                trainer.set_loss_weights = self.loss_parts.set_weights
            trainer.tell, trainer.say = books.event, books.say
            trainer.rehearsal = self._rehearsal(loader, optimizer)
            if validation is not None:
                trainer.measure = validation.measure
            if average is not None:
                trainer.average_of = average.of
            memory = watch_memory(world.device, books.event, books.say)
            try:
                with stopping_cleanly(trainer.stop, books.say):
                    for record in () if validation and validation.stopped_because else trainer.run():
                        books.write(record)
                        last = record
                        memory.observe(record)
                        saves.report()
                    saves.finish()
                    memory.close()
            finally:
                loader.close()
                saves.close()
            steps = last.step if last else resumed_from
            because = validation.stopped_because if validation else ""
            is_done = loader.position.is_over(job.max_steps, job.epochs)
            finished = is_done or bool(because) or trainer.ended_by_hook
            if finished:
                trainer.refuse_unmoved(steps)
            books.finish(finished, steps, because, compilation=self.compilation(), capture=stepper.in_words())
            note_end(finished)
        if world.is_main and self.config.watch.report:
            with written_first(books.say):
                for problem in write_report(self.path):
                    books.say(problem)
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

    def _before_step(self, others: Callable[[int], None] | None, loader: Loader) -> Callable[[int], None] | None:
        """Return the function to call before each step, numbered from 1; it reduces the counts of the loss's parts."""
        if loader.count_ahead is None:
            return others

        def before_step(step: int) -> None:
            self.loss_parts.begin(step - 1)
            if others is not None:
                others(step)

        return before_step

    def _norm_cadence(
        self, parts: StrategyParts, first_step: int, books: Books | NoBooks, stepper: Stepper, plan: Plan
    ) -> NormCadence:
        """Decide how often the gradient norm is recorded, and report it where that is not every step."""

        def tell(words: str, facts: dict[str, Any]) -> None:
            books.event("gradient norm", words=words, **facts)
            if words:
                books.say(f"  grad norm  {words}")

        shares = self.world.size > 1 and self.holds_parts
        norms = NormCadence(parts, self.world, first_step, tell, shares=shares)
        if type(stepper) is not Stepper:
            norms.settle_captured(plan.forecast.step_seconds)
        return norms

    def _rehearsal(self, loader: Loader, optimizer: Optimizer) -> Rehearsal | None:
        """Collect what hooks need to train on samples again; None where samples have no numbers."""
        job, precision = self.job, self.precision
        if not job.source.is_keyed:
            return None

        def loss(model: nn.Module, batch: Any) -> Tensor | LossSum:
            # A scaled loss belongs to the scaler's steps: without it, small gradients would vanish.
            with (None if precision.scales_loss else precision.around_forward()) or nullcontext():
                result = job.loss(model, batch)
            return self.loss_parts.total(result, batch) if isinstance(result, Mapping) else result

        samples = SamplesAgain(loader, Collated(job.collate), self.world.device, channels_last=self.channels_last)
        return Rehearsal(samples, optimizer, job.clip_norm, loss)

    def _validation(
        self,
        division: Division,
        average: Average | None,
        report: Callable[[StepContext, dict[str, float], float], None],
    ) -> Validation | None:
        job = self.job
        if job.valid is None:
            return None
        validator = self.validator(division.micro_batch)
        return Validation(validator, job.validate_every, job.best, job.early_stopping, average, report)
