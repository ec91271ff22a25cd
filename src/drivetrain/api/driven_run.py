"""The parts of a run whose loop is the user's, and its steps with a closure: what `Drive` works with."""

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from drivetrain.api.loop_checks import (
    COUPLED,
    OF_BATCH,
    CarriedNames,
    Closure,
    carried_variables,
    kept_by_functions,
    kept_by_model,
    value_of,
)
from drivetrain.checkpoint import Checkpoint, Checkpointer, LiveTensors
from drivetrain.core.errors import BadResumeError, DrivetrainError
from drivetrain.core.hook import StepContext
from drivetrain.core.isolation import heeds_mode, modes_of, set_modes
from drivetrain.core.launchers import supervision
from drivetrain.core.metrics import LossSum, StepOutcome, StepRecord, collecting
from drivetrain.core.optimizers import JointOptimizer, closure_error, needs_closure, wants_gradients_first
from drivetrain.core.precision import widened
from drivetrain.core.run_folder import RunFolder
from drivetrain.core.state import GENERATORS, KeptWatch, Shard, local_part
from drivetrain.core.world import World
from drivetrain.data.batch import MicroBatch, leaves
from drivetrain.data.division import Place, Position
from drivetrain.data.external_order import refuse_unequal_orders
from drivetrain.data.loader import Loader
from drivetrain.job import LossFunction
from drivetrain.loop.bad_numbers import refuse_unmoved
from drivetrain.loop.hook_calls import DataWatch
from drivetrain.loop.schedule import SaveSchedule
from drivetrain.loop.trainer import COUNTED_STEPS, Begun, Trainer
from drivetrain.monitor.phases import CHECKPOINT, LOGGING
from drivetrain.monitor.recorder import NoRunRecorder, RunRecorder
from drivetrain.monitor.sampler import watch_memory
from drivetrain.plan.plan import PlannedRun
from drivetrain.run import (
    Best,
    Session,
    best_of,
    checkpoint_of,
    falls_back,
    make_checkpointer,
    make_schedule,
    note_end,
    open_recorder,
    tell_batch_size,
    tell_changes,
    tell_extension,
    tell_notes,
    tell_plain_optimizer,
    tell_rate,
    tell_sharding,
    watch_compiling,
    write_down,
)
from drivetrain.run.assemble import RunParts, assemble, division_of, make_loader, make_stepper, make_validation, resume
from drivetrain.run.loss_weighting import settle_own_loop
from drivetrain.run.model_factory import Prepared, callable_model
from drivetrain.run.periodic import replica_check
from drivetrain.run.refusals import changes_since_start, keep_fingerprint
from drivetrain.run.saver import CheckpointSaver
from drivetrain.strategies import Trial
from drivetrain.strategies.base import check_objective
from drivetrain.strategies.optimizer_state import move_to_parameters
from drivetrain.strategies.replicated import Freezer, parameter_names
from drivetrain.strategies.turns import TurnsStrategy

# ----------------------------------------------------------------------------------------------------------------------
# The parts of a run whose loop is the user's: what `Drive` in `driving.py` works with.
#
# The model is called by the loop, not by a strategy: the strategy's objective gets the loss that the loop computed. So
# with several processes `run.model` is still the plain model, and DDP, which only watches the parameters, reduces loss
# and count together with the gradients, as it does in `train`.


_SAVED = (nn.Module, Optimizer)  # or told of in another line
_NO_LOOPS = ("drivetrain", "tqdm", "rich", "contextlib")  # packages whose frames are between a loop and its run


@dataclass(frozen=True)
class Opened:
    """Everything that a driven loop works with, once its folder is claimed."""

    folder: RunFolder | None  # on the main process
    checkpointer: Checkpointer
    checkpoint: Checkpoint | None  # that the run goes on from
    loader: Loader
    parts: RunParts
    called_model: Any  # what the loop calls: the model compiled; None: the model
    changes: Sequence[str]  # in the job, since the checkpoint


class DrivenRun:
    """The steps of a run with all that goes with them: trainer, validation, checkpoints, records.

    `Drive` calls the model's side of it: it hands out batches, and takes their losses.
    """

    def __init__(self, session: Session, stack: ExitStack, loss: LossFunction | None) -> None:
        opened = open_run(session, stack)
        parts, checkpoint, self.folder = opened.parts, opened.checkpoint, opened.folder
        self._session, self._checkpointer, self.loader = session, opened.checkpointer, opened.loader
        self.parts, self.called_model = parts, opened.called_model
        self.has_hooks = bool(session.job.hooks)
        self.resumed_from = resume(session, parts, checkpoint)
        self.steps = self.resumed_from  # optimizer steps done, over the whole life of the run
        self.last: StepRecord | None = None
        self.stepper = make_stepper(session, parts)
        supervision.is_own_loop = True
        stack.callback(supervision.phase, "end")
        self.recorder = stack.enter_context(open_recorder(session, opened.folder, opened.loader, self.resumed_from))
        stack.enter_context(watch_compiling(self.recorder))
        if session.world.size == 1:
            parts.watch.note = self._note
        _tell(session, opened, self.resumed_from, self.recorder)
        self.validation = make_validation(
            session, parts, checkpoint, self._report_validation, loss, partial(self.recorder.measuring, "validating")
        )
        self._saver = CheckpointSaver(
            opened.checkpointer,
            session.world,
            self.recorder,
            self._state,
            lambda: self.validation.best_step if self.validation else None,
            beside=session.config.checkpoint.async_save,
            schedule=make_schedule(session),
            limit_seconds=session.config.distributed.timeout_seconds,
        )
        stack.callback(self._saver.close)
        self._memory = watch_memory(session.world.device, self.recorder.event, self.recorder.say)
        self._saver.watch_frozen(parts.strategy.save)
        # Where other processes hold parts of the state, a loop that is left cannot be saved: nothing is put off there.
        self.puts_off_saves = not (session.holds_parts and session.world.size > 1)
        self._late = LateSaver(self._saver, puts_off=self.puts_off_saves)
        self.trainer = self._make_trainer(checkpoint)
        self._replicas = replica_check(session, parts, self.recorder.event, trained_only=True)
        self._holders = [it._buffers for it in parts.model.modules() if it._buffers]
        self._was_training = heeds_mode(parts.model) and parts.model.training
        self._failure: Exception | None = None  # of the save when the loop was left
        self._error: Exception | None = None  # in what follows a step
        self._is_whole = True  # all that follows a step went well
        self._ended: tuple[bool, int, str] | None = None  # whether finished, its steps, and why it was stopped
        self._position = self.loader.position  # at which the state is that of `steps` steps
        self._versions = self._buffer_versions()  # then; a forward does not change weights, but may change these

    def _make_trainer(self, checkpoint: Checkpoint | None) -> Trainer:
        session, parts = self._session, self.parts
        return Trainer(
            session.job,
            session.world,
            parts.model,
            parts.optimizer,
            self.stepper,
            self.loader,
            session.path,
            self._late,
            self.recorder,
            rates=parts.rates,
            first_step=self.resumed_from,
            has_moved=checkpoint is not None and checkpoint.meta.get("has_moved", True),
            validation=self.validation,
            average=parts.average,
            before_step=self.recorder.before_step,
            check_model=parts.watch.check,
            freezer=Freezer(parts.given, session.sharded.owners if session.sharded else {}),
        )

    @property
    def latest(self) -> Mapping[str, float]:
        """The last validation, by name; empty before the first."""
        return self.validation.latest if self.validation else {}

    @property
    def stopped_because(self) -> str:
        """Why validations ended the run; empty if they did not."""
        return self.validation.stopped_because if self.validation else ""

    def end_turn(self) -> None:
        """Step the optimizers of one of several turns. The state is that of no step until the last turn is over."""
        assert isinstance(self.parts.strategy, TurnsStrategy)
        self._is_whole = False
        self.parts.strategy.end_turn(self.trainer.flags)

    def step(self, stepped: Callable[[], StepOutcome] | None = None) -> StepOutcome:
        """Step the optimizer. Its outcome has to be settled before the state counts as whole again.

        `stepped` does it in another way, with a closure.
        """
        self.parts.watch.check_frozen()
        if self._was_training and not self.parts.model.training:
            self._was_training = False
            self._note(
                "the model is in evaluation mode, and was in training mode at first: it trains without dropout, and "
                "batch normalization does not follow. Call run.model.train() after evaluating"
            )
        self._is_whole = False
        if stepped is not None:
            return stepped()
        self.stepper.seed_update()
        return self.parts.strategy.step(self.trainer.flags)

    def settle(self, begun: Begun, outcome: StepOutcome) -> None:
        """Do what follows a step: records, validations, hooks and checkpoints that are due."""
        self.steps, self._position = begun.place.step + 1, self.loader.position
        try:
            for record in self.trainer.settle(begun, outcome):
                self._write(record)
                self._replicas.observe(record)
        except Exception as error:  # the loop's generator does not hear of it: it is closed, as by `break`
            self._error = error
            raise
        self._is_whole = True

    def keep(self) -> None:
        """Save what is due since the step: its loop goes on, so all that its body did with the model is part of it."""
        if self._late.has_due:
            clock = self.stepper.clock
            clock.look()
            clock.lap(LOGGING)
            with supervision.in_phase("save"):  # it may wait for the save before
                self._late.save_due()
            clock.lap(CHECKPOINT)
        self._versions = self._buffer_versions()

    def finish(self) -> bool:
        """Wait for the last checkpoint and close the records. Return whether the job is done."""
        self.keep()
        self._saver.finish()
        self._memory.close()
        job = self._session.job
        is_done = self.loader.position.is_over(job.max_steps, job.epochs)
        finished = is_done or bool(self.stopped_because) or self.trainer.ended_by_hook or self._session.is_done
        if finished:
            refuse_unmoved(self.steps, has_moved=self.trainer.has_moved)
        self.recorder.finish(finished, self.steps, self.stopped_because, compilation=self._session.compilation())
        self._ended = (finished, self.steps, self.stopped_because)
        note_end(finished)
        return finished

    def say_last_words(self) -> None:
        """Say why the run ended before its end, where that is known and was saved; call it after everything else."""
        if self._ended is not None:
            self.recorder.last_words(*self._ended)

    def left(self, error: BaseException, *, is_last: bool, is_between: bool) -> bool:
        """Finish the run where its loop was left with the last step done; else save. Return whether the job is done.

        Args:
            error: How it was left.
            is_last: Whether the last step of the job was done.
            is_between: Whether it was left after a step, before it asked for the next batch: no forward has begun.
        """
        if is_between:
            self._versions = self._buffer_versions()
        # With several processes the others may be gone.
        if is_last and isinstance(error, GeneratorExit) and self._is_whole and self._session.world.size == 1:
            return self.finish()
        self._left_early(error)
        return False

    def _left_early(self, error: BaseException) -> None:
        """Write the outstanding records and a checkpoint.

        A failure in this does not hide the error that ended the loop.
        """
        self._saver.failed(self._error or error)
        self._late.drop()
        try:
            for record in self.trainer.outstanding() if self._is_whole else self.trainer.last_words():
                self._write(record)
            self._saver.close()
            if isinstance(self._error, BadResumeError) and falls_back(self._session, self._error):
                self._error.add_note("start it again: it goes on from the checkpoint before")
            self._save_alone()
        except Exception as failure:
            self._failure = failure
            if isinstance(error, GeneratorExit):
                raise
            error.add_note(f"and step {self.steps} could not be saved: {failure}")

    def raise_if_unsaved(self) -> None:
        """Raise what went wrong where the loop was left and its state could not be saved."""
        if self._failure is not None:
            raise self._failure

    def weights(self, *, is_over: bool) -> Checkpoint | LiveTensors:
        """Return the weights as they are; after the loop, or where ranks hold parts, those of the last checkpoint."""
        session = self._session
        if is_over or (session.holds_parts and session.world.size > 1):
            saved = checkpoint_of(session.path, "last")
            if saved.step != self.steps and not is_over:
                self._note(f"export writes the weights of step {saved.step}, the last one saved; {self.steps} are done")
            return saved
        found = {f"model/{name}": value for name, value in self.parts.model.state_dict().items()}
        if self.parts.average is not None:
            found |= {f"ema/{name}": value for name, (value, _) in self.parts.average.named().items()}
        return LiveTensors(session.path, {key: local_part(value) for key, value in found.items()})

    def _write(self, record: StepRecord) -> None:
        self.recorder.write(record)
        self._memory.observe(record)
        self._saver.report()
        self.last = record

    def _report_validation(self, context: StepContext, metrics: dict[str, float], seconds: float, best: str) -> None:
        epoch = context.epoch if self.last is None else self.last.epoch
        self.recorder.metrics(context.step, epoch, metrics, seconds, best)

    def _note(self, text: str) -> None:
        self.recorder.event("note", text=text)
        self.recorder.say(text)

    def _buffer_versions(self) -> list[tuple[Tensor, int]]:
        """Return the buffers with their versions: a forward may write to them, and may replace them."""
        return [(it, it._version) for held in self._holders for it in held.values() if it is not None]

    def _state(self) -> tuple[list[Shard], dict[str, Any]]:
        self.parts.watch.check()
        shards, meta = self.parts.strategy.save()
        is_keyed = self._session.job.source.is_keyed
        validation = dict(self.validation.state_dict()) if self.validation else None
        meta |= {**self._session.meta(self.parts.division), "validation": validation}
        meta |= {"has_moved": self.trainer.has_moved, "data": None if is_keyed else self._position.to_json()}
        return shards, meta

    def _save_alone(self) -> None:
        """Save on the main process, which has the whole state; the others may be gone, or still looping."""
        session = self._session
        if not session.world.is_main or not self._is_whole or self.steps == self.resumed_from:
            return
        saved = self._checkpointer.steps()
        if session.holds_parts and session.world.size > 1 and self.steps not in saved:
            self.recorder.say(
                f"the loop was left after step {self.steps}; with {session.strategy} a checkpoint takes all processes, "
                f"and they may be gone: it will go on from step {max(saved, default=0)}"
            )
            return
        if self.steps not in saved and _marks(self._versions) != _marks(self._buffer_versions()):
            self.recorder.say(
                f"the loop was left inside step {self.steps + 1}, which has changed the model's buffers already: it "
                f"will go on from step {max(saved, default=0)}"
            )
            return
        self.recorder.flush()
        if self.steps not in saved:
            alone = self._checkpointer.over(World())
            self._saver.save_held(alone, unless=self.steps)
            alone.save(self.steps, *self._state())
            self.recorder.event("checkpoint", step=self.steps)
        self.recorder.finish(False, self.steps)
        self._ended = (False, self.steps, "")


def _marks(versions: Sequence[tuple[Tensor, int]]) -> list[tuple[int, int]]:
    return [(id(buffer), version) for buffer, version in versions]


class LateSaver:
    """Puts off the saves of a step until its loop asks for the next batch.

    What the loop's body does after `run.step()`, such as moving a teacher or clamping a weight, is then part of them,
    as it is part of the run that goes on.

    Args:
        saver: Saves.
        puts_off: Whether it does; otherwise each save is made at once.
    """

    def __init__(self, saver: CheckpointSaver, *, puts_off: bool) -> None:
        self._saver, self._puts_off = saver, puts_off
        self._due: list[Callable[[], object]] = []

    @property
    def schedule(self) -> SaveSchedule:
        """The schedule that says when to save."""
        return self._saver.schedule

    @property
    def snapshot(self) -> Callable[[int], Callable[[bool], None]] | None:
        """The function that has the state copied before its step was judged; None if saves wait for it."""
        return self._snapshot if self._puts_off and self._saver.snapshot is not None else self._saver.snapshot

    @property
    def has_due(self) -> bool:
        return bool(self._due)

    def prepare(self) -> None:
        """Refuse a state that cannot be saved."""
        self._saver.prepare()

    def save(self, step: int) -> None:
        """Save the state of a step that was judged."""
        self._do(partial(self._saver.save, step))

    def hold(self, step: int) -> None:
        """Copy the state of a step that was judged, to be written with the next checkpoint."""
        self._do(partial(self._saver.hold, step))

    def save_due(self) -> None:
        """Do what was put off."""
        due, self._due = self._due, []
        for save in due:
            save()

    def drop(self) -> None:
        """Forget what was put off: the loop was left."""
        self._due = []

    def _do(self, save: Callable[[], None]) -> None:
        self._due.append(save)
        if not self._puts_off:
            self.save_due()

    def _snapshot(self, step: int) -> Callable[[bool], None]:
        taken: list[Callable[[bool], None]] = []

        def take() -> None:
            assert self._saver.snapshot is not None
            taken.append(self._saver.snapshot(step))

        def judge(is_good: bool) -> None:
            for commit in taken:
                commit(is_good)

        self._due.append(take)
        return judge


def open_run(session: Session, stack: ExitStack) -> Opened:
    """Claim the folder, open the data and assemble the parts. The stack closes what was opened."""
    job, world = session.job, session.world
    folder = session.claim()
    if folder is not None:
        stack.callback(folder.close)
    checkpointer = make_checkpointer(session)
    checkpoint = checkpointer.latest()
    recorded = None if checkpoint is None else session.recorded_way(checkpoint)
    if recorded is not None:
        session.follow(PlannedRun(recorded))
    if session.config.batch.auto:
        why = "not measured: only the loop itself can run its step"
        session.follow(replace(session.planned, batch_size_found=why))
    stack.enter_context(session.numerics())
    division = division_of(session, job.model if isinstance(job.model, nn.Module) else None)
    start = None if checkpoint is None else Position.from_json(checkpoint.step, checkpoint.meta.get("data"))
    loader = make_loader(session, division, job.source, shuffle=job.shuffle, start=start)
    stack.callback(session.close_loaders)
    loader.first(job.max_steps, job.epochs)
    refuse_unequal_orders(loader.fingerprint, world)

    given = job.model if isinstance(job.model, nn.Module) else nn.Module()
    changes = changes_since_start(session, given, folder, checkpoint.step if checkpoint else None)
    prepared = _as_they_are(session)
    settle_own_loop(session, checkpoint)
    parts = assemble(
        session,
        prepared,
        Trial(None if session.sharded else partial(_touching_all, prepared.model), 1),
        division,
        loss=session.weighted(as_computed),
        # Buffers are shared before the loop calls the model; DDP would do it when it is given the loss.
        make_strategy=partial(session.make_strategy, broadcast_buffers=False),
        takes_weights=checkpoint is None,
        is_own_loop=True,
    )
    return Opened(folder, checkpointer, checkpoint, loader, parts, prepared.called_model, changes)


def _tell(session: Session, opened: Opened, resumed_from: int, recorder: RunRecorder | NoRunRecorder) -> None:
    """Report what the run found out and decided."""
    tell_extension(session, opened.folder, opened.parts.optimizer, resumed_from, recorder)
    keep_fingerprint(session, opened.folder)
    if opened.parts.weights_taken is not None:
        write_down(opened.parts.weights_taken, recorder)
    tell_changes(opened.changes, resumed_from, recorder)
    tell_notes(opened.loader, opened.parts.model, recorder)
    tell_plain_optimizer(opened.parts.optimizer, recorder)
    tell_rate(session, opened.parts.optimizer, recorder)
    tell_sharding(session, recorder)
    tell_batch_size(session, recorder)


def as_computed(model: Any, loss: Any) -> Any:
    """Return the loss that the loop computed already, or compute that of the trial; this is the job's loss function."""
    return loss() if callable(loss) else loss


def _as_they_are(session: Session) -> Prepared:
    """Return the user's model and optimizer on the device. Parameters stay the same objects, modules in their mode."""
    given = session.job.model
    modes = modes_of(given.modules()) if isinstance(given, nn.Module) else []
    model, optimizer, called = callable_model(session)
    set_modes(modes)
    parameter_names(
        model, optimizer, session.sharded.owners if session.sharded else {}
    )  # refuses the optimizer of another model
    move_to_parameters(optimizer)
    return Prepared(model, optimizer, called)


def _touching_all(model: nn.Module) -> Tensor:
    """Return zero, with a gradient for every parameter, the last ones first, as in a model's backward.

    DDP settles its buckets by the first backward it sees. With this one, a resumed run reduces in the same order as one
    that was never stopped.
    """
    sparse = {id(module.weight) for module in model.modules() if getattr(module, "sparse", False)}
    total = torch.zeros(())
    for parameter in model.parameters():
        if parameter.requires_grad:
            first = torch.zeros(1, dtype=torch.long, device=parameter.device)
            value = functional.embedding(first, parameter, sparse=True) if id(parameter) in sparse else parameter
            total = total.to(parameter.device) + value.real.sum() * 0
    return total


# ----------------------------------------------------------------------------------------------------------------------
# Steps of a driven loop with a closure: LBFGS, SAM and other optimizers that compute the loss several times.
#
# Each evaluation is over all batches of the step, with the strategy's own reduction, weighting and clipping.


def step_with(
    closure: Closure,
    driven: DrivenRun,
    session: Session,
    begun: Begun,
    kept: Sequence[MicroBatch],
    inside: Callable[[MicroBatch], AbstractContextManager[None]],
) -> StepOutcome:
    """Have the optimizer step with a closure over all batches of a step. The record is that of the first call.

    Args:
        closure: Returns the loss of a batch.
        driven: The run.
        session: The same, with its settings.
        begun: The step.
        kept: Its batches.
        inside: Returns the context of a batch's forward.
    """
    outcomes: list[StepOutcome] = []
    parts, strategy = driven.parts.given, driven.parts.strategy
    optimizer = parts.optimizer

    def learn(micro: MicroBatch) -> None:
        batch = driven.stepper.begin(begun.place, micro)  # with the batch's own random draws
        with collecting() as logged, inside(micro):
            loss = closure(batch)
        if isinstance(loss, Tensor | LossSum):
            check_objective(loss.total if isinstance(loss, LossSum) else loss, parts.model)
        if logged and micro.weight:
            session.step_log.add(logged, micro.num_samples)
        driven.stepper.forward_backward(loss, begun.place, micro)

    def evaluate() -> Tensor:
        gradients: list[Tensor | None] = []
        for parameter in parts.trained:
            parameter.grad = None
        for micro in kept:
            learn(micro)
        parts.evaluation.keep = lambda: gradients.extend(
            parameter.grad if parameter.grad is None else parameter.grad.clone() for parameter in parts.trained
        )
        try:
            outcomes.append(strategy.step(driven.trainer.flags))
        finally:
            parts.evaluation.keep = None
        for parameter, gradient in zip(parts.trained, gradients, strict=True):
            parameter.grad = gradient
        driven.stepper.seed_update()
        return _loss_of(outcomes[-1], begun.place.step)

    if wants_gradients_first(optimizer):
        evaluate()
    step: Callable[..., Any] = optimizer.step
    step(evaluate)
    for parameter in parts.trained:
        parameter.grad = None
    parts.follow()
    if not outcomes:
        raise DrivetrainError(
            f"{type(optimizer).__name__} did not call the closure that it was given",
            remedy="call run.backward(loss) and run.step()",
        )
    return outcomes[0]._replace(stop=sum(outcome.stop for outcome in outcomes))


# What other trainers call what a run has.
_OTHER_ATTRIBUTES = {
    **dict.fromkeys(("fit", "train"), "for batch in run: …"),
    **dict.fromkeys(("global_step", "step_count", "num_steps_done"), "run.steps"),
    **dict.fromkeys(("total_steps", "num_steps", "max_steps", "num_batches"), "len(run), the number of batches"),
    **dict.fromkeys(("current_epoch", "epochs"), "run.epoch and run.ends_epoch"),
    "sync_gradients": "not run.accumulating",
    "device": "run.world.device",
    "rank": "run.world.rank",
    **dict.fromkeys(("world_size", "num_processes"), "run.world.size"),
    **dict.fromkeys(("is_main", "is_main_process", "is_global_zero"), "run.world.is_main"),
    **dict.fromkeys(("lr", "learning_rate"), "run.last.lr"),
    **dict.fromkeys(("optimizer", "optimizers"), "the optimizer that you gave to dt.drive"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "dt.drive(schedule=…), which is stepped by itself"),
    "zero_grad": "nothing: gradients are cleared after they were used",
    **dict.fromkeys(("clip_grad_norm_", "clip_gradients"), "dt.drive(clip_norm=…)"),
    **dict.fromkeys(
        ("save", "save_checkpoint", "save_state", "save_model", "state_dict"),
        "run.export(path) for the weights; checkpoints are written by themselves",
    ),
    **dict.fromkeys(
        ("load", "load_checkpoint", "load_state", "load_state_dict", "resume"),
        "nothing: an interrupted run of the same name continues by itself",
    ),
    **dict.fromkeys(("unwrap_model", "module"), "run.model, which is not wrapped"),
    **dict.fromkeys(("log_dict", "log_metrics"), "run.log(name, value)"),
    **dict.fromkeys(("evaluate", "eval"), "run.validate()"),
    "name": "run.folder.name",
}


class DrivenProgress:
    """Tells how far a driven run is, and what it came to so far: the part of `Drive` that changes nothing."""

    _driven: DrivenRun
    _session: Session
    _turns: TurnsStrategy | None
    _turn: int
    _begun: Begun | None
    _micro: MicroBatch | None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise for what a run does not have, in words where other trainers have it."""
            instead = f"; use {_OTHER_ATTRIBUTES[name]}" if name in _OTHER_ATTRIBUTES else ""
            raise AttributeError(f"a run of dt.drive has no {name}{instead}", name=name, obj=self)

    @property
    def steps(self) -> int:
        """The optimizer steps done, over the whole life of the run."""
        return self._driven.steps

    @property
    def resumed_from(self) -> int:
        """The step of the checkpoint that the run goes on from; 0 for a new run."""
        return self._driven.resumed_from

    @property
    def last(self) -> StepRecord | None:
        """The last record, which is read one step late, so that the host does not wait for the device."""
        return self._driven.last

    @property
    def folder(self) -> Path:
        return self._session.path

    @property
    def epoch(self) -> int:
        """The epoch of the current batch, from 0."""
        return self._begun.place.epoch if self._begun else 0

    @property
    def turn(self) -> str:
        """The name of the optimizer whose turn it is; empty where all step together."""
        return "" if self._turns is None else self._turns.turns[self._turn].name

    @property
    def accumulating(self) -> bool:
        """Whether more batches follow before the optimizer steps."""
        return self._micro is not None and not self._micro.is_last

    @property
    def ends_epoch(self) -> bool:
        """Whether an epoch ends with the current batch."""
        return self._begun is not None and self._begun.place.ends_epoch and not self.accumulating

    @property
    def num_samples(self) -> int:
        """The number of samples in the current batch that count: 0 where one only keeps the processes in step."""
        return 0 if self._micro is None else self._micro.num_samples * self._micro.weight

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last validation, by name; empty before the first."""
        return self._driven.latest

    @property
    def best(self) -> Best | None:
        """The best validation so far: its value, its step and the metric; its checkpoint is kept."""
        return best_of(self._driven.validation, self._session.job.best)

    def __len__(self) -> int:
        """Return how many batches the loop gets, if nothing ends it early: of a resumed run, those that are left."""
        job, driven = self._session.job, self._driven
        if job.num_steps is None or job.num_samples is None or job.source.sizes_vary:
            raise TypeError("the run has no length: how many batches its data has is not known beforehand")
        division, turns = driven.parts.division, self._turns
        if turns is None or all(turn.every == 1 for turn in turns.turns):
            left = division.num_batches(driven.resumed_from, job.num_steps)
            return left * (1 if turns is None else len(turns.turns))
        steps = range(driven.resumed_from, job.num_steps)
        return sum(division.num_batches(step, step + 1) * len(turns.due(step)) for step in steps)

    def __bool__(self) -> bool:
        return True  # also without a batch


class LoopWatch:
    """Tells of what the loop keeps beside its run, and changes, such as a target network: nothing saves it.

    Args:
        run: What the loop goes through.
        driven: Its parts.
        has_turns: Whether the loop gets each batch once for each of several turns.
    """

    def __init__(self, run: object, driven: DrivenRun, *, has_turns: bool) -> None:
        self._run, self._say, self._num_steps, self._has_turns = run, driven.recorder.say, 0, has_turns
        self._model = driven.parts.model
        self._modules, self._others, self._hidden = (KeptWatch(self._model) for _ in range(3))
        sets_epoch = hasattr(driven.loader.source.dataset, "set_epoch")
        self._data = None if sets_epoch or driven.has_hooks else DataWatch(driven.loader)
        self._carried_names: CarriedNames | None = None  # once the source of the loop was read
        self._is_accumulating = False  # after `run.step()`, which did nothing
        self._has_told_of_each_batch = False
        self._saved_as = "as it is when the loop asks for its next batch"
        if not driven.puts_off_saves:
            self._saved_as = "as hooks leave it: change it in one, dt.every(1, …)"
        self._told = set[str]()
        self._beside = partial(_beside_training, driven)  # read anew each time: a buffer may be replaced by another
        self._beside_watch = KeptWatch(nn.Module())

    def stepped(self, *, is_due: bool) -> None:
        """Look at what is not trained, where `run.step()` has let the loop go on with more batches of the step."""
        if not is_due and self._num_steps <= COUNTED_STEPS and (beside := self._beside()):
            self._beside_watch.look_at(beside)
            self._is_accumulating = True

    def _tell_of_each_batch(self) -> None:
        """Tell if the loop changes a teacher, say, with each batch that it gets, and not with each step."""
        self._is_accumulating = False
        names = self._beside_watch.look_at(self._beside())
        if names and not self._has_told_of_each_batch:
            self._has_told_of_each_batch = True
            self._say(
                f"  loop       it changes {', '.join(names[:3])}{', …' if names[3:] else ''} after each batch of a "
                f"step, {COUPLED}. Do it once for each step: if not run.accumulating: …"
            )

    def look(self, place: Place) -> None:
        """Look at the variables of the loop before a step, if it is time. Called by the generator of its batches.

        It is in the first steps, after the first epochs, and ever more seldom: a change is seen whenever it was made.
        """
        self._num_steps += 1
        begins_epoch = place.start == 0 and 0 < place.epoch <= COUNTED_STEPS
        if not (self._num_steps <= COUNTED_STEPS or begins_epoch or self._num_steps & (self._num_steps - 1) == 0):
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NO_LOOPS:
            frame = frame.f_back
        modules = {name: it for name, it in frame.f_locals.items() if isinstance(it, nn.Module)}
        carried = self._carried(frame)
        names, other_names = self._modules.look_at(modules), self._others.look_at(carried)
        hidden_names = self._hidden.look_at(self._kept_elsewhere(frame, {*modules, *carried}))
        if self._num_steps < COUNTED_STEPS or self._carried_names is None:
            return
        self._tell(
            names,
            "Give it to dt.drive as another model, by name, with its optimizer if it has one. A checkpoint then holds "
            f"it {self._saved_as}",
        )
        self._tell(
            [name for name in other_names if name in self._carried_names.into_loss],
            "run.steps counts steps, a tensor can be a buffer of the model (register_buffer), other state can be "
            "kept by a hook with state_dict, and other data belongs into the data set",
        )
        self._tell(
            hidden_names,
            "A tensor can be a buffer of the model (register_buffer), other state can be kept by a hook with "
            "state_dict, and the generators of torch, numpy and Python are seeded for each batch",
        )
        self._tell(
            [name for name in other_names if name in self._carried_names.into_choices],
            "dt.drive(…, valid=…, loss=…, early_stopping=…) keeps the best value and the patience, run.steps counts "
            "steps, and other state can be kept by a hook with state_dict",
        )

    def refuse_scaler(self, loss: Any) -> None:
        """Raise if the loop scaled its loss for fp16 itself. Called by `run.backward`; looks in the first step."""
        frame: FrameType | None = sys._getframe(1) if self._num_steps <= 1 else None
        factors = {it.data_ptr() for it in _factors_of(loss)} if frame is not None else ()
        while frame is not None and factors:
            own = getattr(frame.f_locals.get("self"), "__dict__", {})
            for held in (*frame.f_locals.values(), *own.values(), *frame.f_globals.values()):
                scale = held._scale if isinstance(held, torch.amp.GradScaler) else None  # made when it scales first
                if scale is not None and scale.data_ptr() in factors:
                    raise DrivetrainError(
                        "the loop scales its loss with a GradScaler, so gradients would be as many times too large",
                        remedy="leave scale, unscale_, step and update out, and call run.backward(loss) and "
                        "run.step(); --precision fp16 scales by itself",
                    )
            frame = frame.f_back

    @contextmanager
    def around_body(self, place: Place, batch: Any) -> Iterator[None]:
        """Look at what the loop does with its batch and with its data set; raise where that has no meaning."""
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)] if self._has_turns else []
        versions = [tensor._version for tensor in tensors]
        # A curriculum is set in the first steps, or where epochs begin or end: looking takes as long as a small step.
        is_time = place.ends_epoch or place.start == 0 or self._num_steps <= COUNTED_STEPS
        attributes = self._data.attributes() if self._data is not None and is_time else {}
        yield
        if self._is_accumulating:
            self._tell_of_each_batch()
        if versions != [tensor._version for tensor in tensors]:
            raise DrivetrainError(
                "the loop has changed its batch in place, and gets the same batch in each turn",
                remedy="compute a new tensor from it: x = x / 255, not x /= 255",
            )
        if attributes and self._data is not None and (words := self._data.judge(attributes, "the loop")):
            self._say(f"  data       {words}")

    def _carried(self, frame: FrameType) -> dict[str, Any]:
        """Return what the variables hold that one step leaves for the loss of the next, as it can be compared."""
        found = {**frame.f_globals, **frame.f_locals}
        found |= {f"self.{name}": it for name, it in getattr(found.get("self"), "__dict__", {}).items()}
        if self._carried_names is None:
            self._carried_names = carried_variables(frame, [name for name, it in found.items() if it is self._run])
            self._tell_of_divisors(self._carried_names, found)
        names = [*self._carried_names.into_loss, *self._carried_names.into_choices]
        shown = {name: self._shown(found.get(name)) for name in names}
        return {name: value for name, value in shown.items() if value is not None}

    def _kept_elsewhere(self, frame: FrameType, known: set[str]) -> dict[str, Any]:
        """Return what the model's forward and the functions of the loss may keep from one step for the next."""
        assert self._carried_names is not None
        found = {**frame.f_globals, **frame.f_locals}
        used = {name: value_of(name, found) for name in self._carried_names.used if name not in known}
        modules = {name: it for name, it in used.items() if isinstance(it, nn.Module)}
        functions = [it for name, it in used.items() if callable(it) and name not in modules and it is not self._run]
        kept = {**kept_by_model(self._model), **modules, **kept_by_functions(functions)}
        is_saved = {id(self._run), id(self._model)}
        return {
            name: it
            for name, it in kept.items()
            if name not in known and id(it) not in is_saved and not isinstance(it, (Optimizer, Iterator))
        }

    def _tell_of_divisors(self, names: CarriedNames, found: Mapping[str, Any]) -> None:
        """Tell if the loop divides its loss by a number of accumulated batches, as other trainers want it."""
        for name in names.divisors:
            if value_of(name, found) != 1:
                self._say(
                    f"  loss       the loop divides it by {name}, as if to accumulate gradients, which makes gradients "
                    "smaller by that. Leave it out: run.backward weights each batch by its part of the step"
                )

    def _shown(self, value: Any) -> Any:
        if value is self._run or getattr(value, "gi_running", False) or isinstance(value, _SAVED):
            return None  # the run, or its iterator
        if isinstance(value, Iterator):
            return self._num_steps  # it goes on
        if isinstance(value, (list, tuple, dict, set, deque)):
            return {"length": len(value), "items": value if isinstance(value, dict) else list(islice(value, 8))}
        if isinstance(value, (Tensor, int, float, np.ndarray, *GENERATORS)):
            return value
        return getattr(value, "__dict__", None) if not callable(value) and not isinstance(value, ModuleType) else None

    def _tell(self, names: Sequence[str], remedy: str) -> None:
        new = [name for name in names if name not in self._told]
        self._told.update(new)
        if new:
            change, them = ("changes", "it") if len(new) == 1 else ("change", "them")
            self._say(
                f"  loop       {', '.join(new[:3])} {change} with the steps, and no checkpoint holds {them}: a resumed "
                f"run begins anew with {them}. {remedy}"
            )


def _beside_training(driven: DrivenRun) -> dict[str, Tensor]:
    """Return the weights of the model that no optimizer holds, and its buffers; nothing where they are in parts."""
    if not driven.puts_off_saves:
        return {}
    trained = {id(parameter) for parameter in driven.parts.given.trained}
    model = driven.parts.model
    return {name: it for name, it in (*model.named_parameters(), *model.named_buffers()) if id(it) not in trained}


def _factors_of(loss: Any) -> Iterator[Tensor]:
    """Yield the tensors that a loss was multiplied by last."""
    for value in loss.values() if isinstance(loss, Mapping) else (loss,):
        total = value.total if isinstance(value, LossSum) else value
        node: Any = total.grad_fn if isinstance(total, Tensor) else None
        for _ in range(4):
            if isinstance(factor := getattr(node, "_saved_other", None), Tensor):
                yield factor
            node = node.next_functions[0][0] if node is not None and node.next_functions else None


def check_closure(session: Session, optimizer: Optimizer, closure: Closure | None, *, is_learned: bool) -> None:
    """Raise where `run.step` got a closure that cannot be used, or lacks one. `is_learned`: after `run.backward`."""
    if closure is None and needs_closure(optimizer):
        raise closure_error(optimizer)
    if closure is None and not is_learned:
        raise DrivetrainError(
            "run.step() was called before run.backward()",
            remedy="call run.backward(loss) first, in place of loss.backward()",
        )
    if closure is None:
        return
    if is_learned:
        raise DrivetrainError(
            "run.step(closure) was called after run.backward(), and the closure computes the loss itself",
            remedy="leave run.backward(loss) out",
        )
    try:
        inspect.signature(closure).bind(None)
    except TypeError:
        raise DrivetrainError("the closure of run.step() takes no batch", remedy=OF_BATCH) from None
    except ValueError:
        pass  # it does not tell what it takes
    if isinstance(optimizer, JointOptimizer):
        raise DrivetrainError(
            "run.step(closure) is for one optimizer, and the run has several",
            remedy="call run.backward(loss) and run.step() for each batch",
        )
    refuse_closure(session)


def refuse_closure(session: Session) -> None:
    """Raise where an optimizer that asks for the loss several times would not get whole gradients as they are."""
    if session.precision.scales_loss or session.holds_parts:
        what = "fp16 scales the loss" if session.precision.scales_loss else "each process has a part of the model"
        raise DrivetrainError(
            f"run.step(closure) needs the gradients of all weights as they are, and {what}",
            remedy="use --precision bf16 or fp32, with --parallel-strategy ddp or on one device",
        )


def _loss_of(outcome: StepOutcome, step: int) -> Tensor:
    """Return the loss over the whole global batch, all ranks; nan where nothing was counted."""
    count = torch.as_tensor(outcome.num_items, dtype=torch.float64)
    if outcome.named is not None:
        mean, _ = outcome.named.reader.read(outcome.named.values.tolist(), step, float(count))  # the host waits
        return torch.tensor(mean, dtype=torch.float64)
    total = sum((widened(value) * factor for value, factor in outcome.losses), torch.zeros(()))
    return total / count.to(total)
