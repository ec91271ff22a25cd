"""`dt.drive(...)`: a custom training loop, with the same parts as `dt.train`.

    run = dt.drive(model, optimizer, data, global_batch=64, epochs=3, name="mine")
    for batch in run:
        run.backward(loss(run.model, batch))
        run.step()

The model is called by the loop, not by a strategy: the strategy's objective gets the loss that the loop computed. So
with several processes `run.model` is still the plain model, and DDP, which only watches the parameters, reduces loss
and count together with the gradients, as it does in `train`.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import default_collate

from drivetrain.checkpoint import Checkpoint, Checkpointer, LiveTensors
from drivetrain.checkpoint import export as export_checkpoint
from drivetrain.config import Config
from drivetrain.core.arguments import suggesting_keywords
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.hook import Hook, StepContext
from drivetrain.core.isolation import uncounted
from drivetrain.core.logged import LoggedValue, LoggedValues, collect_into, log, media_of, on_host
from drivetrain.core.metrics import LossSum, MetricFunction, MetricObject, NamedLosses
from drivetrain.core.plugins import STRATEGIES, strategy_facts
from drivetrain.core.processes import stopping_cleanly, written_first
from drivetrain.core.records import StepRecord
from drivetrain.core.run_folder import RunFolder
from drivetrain.core.schedules import Constant, Schedule
from drivetrain.core.state import Shard, local_part
from drivetrain.core.world import World
from drivetrain.data.batch import MicroBatch
from drivetrain.data.division import Position
from drivetrain.data.external_order import refuse_unequal_orders
from drivetrain.data.loader import Loader
from drivetrain.job import OTHER_NAMES, Aim, EarlyStopping, Job, LossFunction
from drivetrain.loop.trainer import Begun, Trainer
from drivetrain.monitor.recorder import NoRunRecorder, RunRecorder
from drivetrain.monitor.sampler import watch_memory
from drivetrain.monitor.tracking import check_trackers
from drivetrain.plan.plan import PlannedRun
from drivetrain.report import write_report
from drivetrain.run import (
    CHECKPOINTS,
    Best,
    Session,
    best_of,
    checkpoint_of,
    done_instead,
    note_end,
    open_recorder,
    tell_batch_size,
    tell_changes,
    tell_end,
    tell_extension,
    tell_notes,
    tell_plain_optimizer,
    tell_rate,
    tell_sharding,
    write_down,
)
from drivetrain.run.assemble import RunParts, assemble, division_of, make_loader, make_stepper, make_validation, resume
from drivetrain.run.changes import changes_since_start, keep_fingerprint
from drivetrain.run.model_factory import Prepared, callable_model
from drivetrain.run.saver import CheckpointSaver
from drivetrain.strategies import Trial
from drivetrain.strategies.base import around_forward, check_objective
from drivetrain.strategies.optimizer_state import move_to_parameters
from drivetrain.strategies.replicated import parameter_names, share_buffers


@suggesting_keywords("drive", OTHER_NAMES, "settings of the run go to config=dt.configure(…)")
def drive(
    model: nn.Module,
    optimizer: Optimizer,
    data: Any,
    *,
    name: str = "drive",
    global_batch: int | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    seed: int = 0,
    schedule: Schedule = Constant(),  # noqa: B008  (frozen)
    clip_norm: float | None = None,
    collate: Callable[[list[Any]], Any] = default_collate,
    shuffle: bool = True,
    loss: LossFunction | None = None,
    valid: Any = None,
    valid_every: int | None = None,
    valid_batch: int | None = None,
    metrics: Mapping[str, MetricFunction | MetricObject] | None = None,
    best: Aim = Aim(),  # noqa: B008  (frozen)
    early_stopping: EarlyStopping | None = None,
    hooks: Sequence[Hook] = (),
    checkpoint_every: int | None = None,
    keep_last: int = 3,
    config: Config | None = None,
    quiet: bool = False,
    fresh: bool = False,
    extend: bool = False,
) -> "Drive":
    """Return a run to iterate over. An interrupted run of the same job under the same name is continued, exactly.

    The loss that `run.backward` gets is not examined: a scalar is a mean over the batch's samples, and a mean over
    tokens has to be a `LossSum`. Only `dt.train` can find out what a scalar is a mean of.

    Model and optimizer are used as they are: the model is moved to its device in place, modes stay as they were set.

    Args:
        model: The model.
        optimizer: Its optimizer.
        data: A data set, a list of items, a dictionary of tensors, something to iterate, or a `DataLoader`.
        name: Name of the run, and of its folder.
        global_batch: Samples per optimizer step, over all devices. None: the batch size times the devices.
        epochs: How often to go through the data.
        max_steps: How many optimizer steps to do at most.
        seed: Seed of the sample order and of whatever a step draws at random.
        schedule: The factor of the learning rate: `WarmupCosine`, `Constant`, or a function of the step.
        clip_norm: The gradient norm to clip to.
        collate: Makes a batch of a list of items.
        shuffle: Whether to draw samples in a new order in each epoch.
        loss: The loss of validation, a function of (model, batch). Needed with `valid` only: the loop has its own.
        valid: The validation set, or several by name, as in `Job`. It is measured by `run.step` when that is due.
        valid_every: Steps between validations. Default: at the end of each epoch.
        valid_batch: Samples per device in each forward of a validation. Default: the micro-batch.
        metrics: By name: functions of (output, batch), or torchmetrics objects, as in `Job`.
        best: Which checkpoint is kept as the best; needs `valid`.
        early_stopping: When to end the loop because validation no longer improves.
        hooks: Code to call between steps.
        checkpoint_every: Steps between checkpoints. Default: at the end of each epoch.
        keep_last: How many checkpoints to keep.
        config: How to run it, from `configure`. Default: the command line's, else the defaults.
        quiet: Whether to print nothing but errors.
        fresh: Whether to begin anew where a run has this name; that one is moved aside, to `NAME.old-1`.
        extend: Whether to go on with the run of this name, finished or not, to a longer end.

    Returns:
        The run: iterate over it once, and call its `backward` and `step` for each batch.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = dt.drive(model, optimizer, list(torch.ones(32, 1)), global_batch=8, epochs=1, quiet=True)
        >>> for batch in run:
        ...     run.backward(run.model(batch).square().mean())
        ...     run.step()
        >>> run.steps
        4
    """
    job = Job(
        name=name,
        model=model,
        data=data,
        loss=_as_computed,
        optimizer=lambda groups: optimizer,
        global_batch=global_batch,
        epochs=epochs,
        max_steps=max_steps,
        seed=seed,
        schedule=schedule,
        clip_norm=clip_norm,
        collate=collate,
        shuffle=shuffle,
        valid=valid,
        valid_every=valid_every,
        valid_batch=valid_batch,
        metrics={} if metrics is None else metrics,
        best=best,
        early_stopping=early_stopping,
        hooks=hooks,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
    )
    if valid is not None and loss is None:
        message = "validation needs a loss function, and dt.drive leaves the loss to the loop"
        remedy = "loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])"
        raise ConfigError([Problem("dt.drive: loss", message, remedy=remedy)])
    done_instead(job)
    session = Session.join(job, config, quiet=quiet, fresh=fresh or None, extend=extend)
    with ExitStack() as stack:
        stack.callback(session.close)
        _refuse(session)
        try:
            return Drive(session, stack, loss)
        except BaseException as error:
            session.note_failed_start(error)
            raise


@dataclass(frozen=True)
class _Opened:
    """Everything that a driven loop works with, once its folder is claimed."""

    folder: RunFolder | None  # on the main process
    checkpointer: Checkpointer
    checkpoint: Checkpoint | None  # that the run goes on from
    loader: Loader
    parts: RunParts
    called_model: Any  # what the loop calls: the model compiled; None: the model
    changes: Sequence[str]  # in the job, since the checkpoint


class Drive:
    """The run that `dt.drive` returns. It is iterated over once; call `backward` and `step` once for each batch.

    Example:
        >>> for batch in run:  # doctest: +SKIP
        ...     run.backward(loss(run.model, batch))
        ...     run.step()
    """

    def __init__(self, session: Session, stack: ExitStack, loss: LossFunction | None = None) -> None:
        job, world, opened = session.job, session.world, _open(session, stack)
        parts, checkpoint, self._loader = opened.parts, opened.checkpoint, opened.loader
        self._session, self.world, self._precision = session, world, session.precision
        self._checkpointer, self._division = opened.checkpointer, parts.division
        self._apart = ExitStack()  # the contexts around the forward of a batch that does not count
        self._shares_buffers = world.size > 1 and session.config.distributed.broadcast_buffers
        self._strategy, self._watch, average = parts.strategy, parts.watch, parts.average
        self.resumed_from = resume(session, parts, checkpoint)
        self._stepper = make_stepper(session, parts)
        self._recorder = stack.enter_context(open_recorder(session, opened.folder, self._loader, self.resumed_from))
        if world.size == 1:
            self._watch.note = self._note
        tell_extension(session, opened.folder, parts.optimizer, self.resumed_from, self._recorder)
        keep_fingerprint(session, opened.folder)
        _tell(session, opened, self.resumed_from, self._recorder)
        beside = session.config.checkpoint.async_save
        self._validation = make_validation(session, parts, checkpoint, self._report_validation, loss)
        self._saves = CheckpointSaver(
            self._checkpointer,
            world,
            self._recorder,
            self._state,
            lambda: self._validation.best_step if self._validation else None,
            beside=beside,
        )
        stack.callback(self._saves.close)
        self._memory = watch_memory(world.device, self._recorder.event, self._recorder.say)
        self._saves.watch_frozen(self._strategy.save)
        self._trainer = Trainer(
            job,
            world,
            parts.model,
            parts.optimizer,
            self._stepper,
            self._loader,
            session.path,
            self._saves,
            self._recorder,
            rates=parts.rates,
            first_step=self.resumed_from,
            has_moved=checkpoint is not None and checkpoint.meta.get("has_moved", True),
            validation=self._validation,
            average=average,
            before_step=self._recorder.before_step,
            check_model=self._watch.check,
        )
        stack.callback(parts.optimizer.register_step_pre_hook(self._refuse_foreign_step).remove)

        self.model: Any = parts.model if opened.called_model is None else opened.called_model
        self._plain, self._optimizer, self._average = parts.model, parts.optimizer, average
        self._trained = [] if session.sharded else parts.given.trained  # shards: at a step's end
        self._buffers = list(parts.model.buffers())
        self._around_forward = around_forward(parts.given)
        self._iterator: weakref.ref[Any] | None = None
        self._begun: Begun | None = None
        self._micro: MicroBatch | None = None  # of the current batch
        self._is_learned = self._is_stepped = self._is_stepping = self._is_inside = False
        self._rates: list[float] | None = None  # as the schedule set them
        self._logged: LoggedValues = {}  # with the current batch
        self._failure: Exception | None = None
        self.steps = self.resumed_from  # optimizer steps done, over the whole life of the run
        self.last: StepRecord | None = None  # read one step late, so that the host does not wait for the device
        self.finished = False
        self._is_over = False  # the loop was left, at its end or before
        self._is_whole = True
        self._remember()
        self._stack = stack.pop_all()

    @property
    def folder(self) -> Path:
        return self._session.path

    @property
    def epoch(self) -> int:
        """The epoch of the current batch, from 0."""
        return self._begun.place.epoch if self._begun else 0

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
        return self._validation.latest if self._validation else {}

    @property
    def best(self) -> Best | None:
        """The best validation so far: its value, its step and the metric; its checkpoint is kept."""
        return best_of(self._validation, self._session.job.best)

    def validate(self) -> dict[str, float]:
        """Measure the validation set now, and return loss and metrics by name.

        Call it on all processes, inside the loop after `run.step()`. It changes neither `best` nor early stopping, and
        records nothing: validations that are due do, and `run.step()` does these by itself.
        """
        if self._validation is None:
            raise DrivetrainError("the run has no validation set", remedy="give it one: dt.drive(…, valid=…, loss=…)")
        if self._is_over or not (self._micro is None or self._is_stepped):
            raise DrivetrainError(
                "run.validate() was called after the loop, or between a batch and its run.step()",
                remedy="call it after run.step(); after the loop, run.metrics is the last validation",
            )
        return self._validation.measure(self._plain)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the run's autocast context, for code such as a validation.

        It is on by itself from batch to `backward`.
        """
        return self._precision.around_forward() or nullcontext()

    def __iter__(self) -> Iterator[Any]:
        if self._iterator is not None:
            raise DrivetrainError(
                "a run is iterated over once; it goes through all its epochs by itself",
                remedy="write one loop; run.epoch and run.ends_epoch tell where it is",
            )
        batches = self._batches()
        self._iterator = weakref.ref(batches)  # weak: a loop that was left shows by the iterator being freed
        return batches

    def backward(self, loss: Tensor | LossSum | NamedLosses) -> None:
        """Run the backward of a batch's loss: a mean over its samples, a `LossSum`, or a dictionary of named parts.

        Call it once for each batch. Parts that are a `LossSum` each have a separate count, which has to be known before
        the first backward of a step: with several batches per step they are refused. Parts that are means may be
        accumulated.
        """
        micro, begun = self._micro, self._begun
        if micro is None or begun is None or self._is_learned:
            raise DrivetrainError(
                "run.backward() was called twice for one batch, or outside the loop",
                remedy="add losses together and call it once for each batch",
            )
        self._leave_forward()
        if isinstance(loss, Tensor | LossSum):
            check_objective(loss.total if isinstance(loss, LossSum) else loss, self._plain)
        if micro.number and self._trained and all(parameter.grad is None for parameter in self._trained):
            raise DrivetrainError(
                "the gradients were cleared between two batches of one step",
                remedy="leave optimizer.zero_grad() out: gradients are cleared after they were used",
            )
        self._stepper.learn(loss, begun.place, micro)
        self._is_learned = True

    def log(self, name: str, value: LoggedValue) -> None:
        """Log a value, as `dt.log` does in a loss.

        Before `run.step()` it is averaged over the samples of the step, all batches and all ranks, and stands in
        `steps.jsonl`: the same names in every step. After `run.step()`, as for the result of a validation, the value of
        rank 0 is recorded in `metrics.jsonl`, under any name.

        Args:
            name: The name of the curve.
            value: A scalar tensor or a number; or `dt.LossSum(sum, count)`.
        """
        if self._micro is None or self._is_stepped:
            values: LoggedValues = {name: [value]}
            media = media_of(values)
            self._recorder.logged(self.steps, self.epoch, on_host(values), media)
        else:
            log(name, value)

    def step(self) -> None:
        """Step the optimizer with the last batch of a global batch; do nothing for the others.

        Call it once for each batch.
        """
        micro, begun = self._micro, self._begun
        if micro is None or begun is None or self._is_stepped:
            raise DrivetrainError(
                "run.step() was called twice for one batch, or outside the loop", remedy="call it once for each batch"
            )
        if not self._is_learned:
            raise DrivetrainError("run.step() was called before run.backward()", remedy="call run.backward(loss) first")
        self._is_stepped = True
        collect_into(None)
        if self._logged and micro.weight:
            self._session.step_log.add(self._logged, micro.num_samples)
        if micro.is_last:
            self._check_rates()
            self._watch.check_frozen()
            self._is_whole = False  # until all that follows a step went well
            self._is_stepping = True
            outcome = self._strategy.step(self._trainer.wants_stop)
            self._is_stepping = False
            self.steps = begun.place.step + 1
            self._remember()
            for record in self._trainer.settle(begun, outcome):
                self._write(record)
            self._is_whole = True

    def stop(self) -> None:
        """Stop after the next step or two, on all processes at the same step, with a checkpoint."""
        self._trainer.stop()

    def close(self) -> None:
        """End the run. Only needed where something still holds the iterator of a loop that was left."""
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is not None:
            iterator.close()
        self._stack.close()

    def export(self, path: Path | str | None = None) -> Path:
        """Write the weights as one file, on the main process: safetensors, or a state_dict for `.pt`, `.pth`, `.bin`.

        Inside the loop these are the weights as they are now, after it those of the last checkpoint. Where processes
        hold parts of the weights, they are those of the last checkpoint at any time, and it is reported if the run is
        further than that. A moving average is taken where there is one.
        """
        if self._failure is not None:
            raise self._failure
        target = Path(path) if path is not None else self.folder / "model.safetensors"
        if self.world.is_main:
            export_checkpoint(self._weights(), target, prefix="model/", instead="ema/")
        return target

    def _weights(self) -> Checkpoint | LiveTensors:
        if self._is_over or (self._holds_parts and self.world.size > 1):
            saved = checkpoint_of(self.folder, "last")
            if saved.step != self.steps and not self._is_over:
                self._note(f"export writes the weights of step {saved.step}, the last one saved; {self.steps} are done")
            return saved
        found = {f"model/{name}": value for name, value in self._plain.state_dict().items()}
        if self._average is not None:
            found |= {f"ema/{name}": value for name, (value, _) in self._average.named().items()}
        return LiveTensors(self.folder, {key: local_part(value) for key, value in found.items()})

    @property
    def _holds_parts(self) -> bool:
        """Whether a process holds only some of the weights, so that one alone cannot write them."""
        return self._session.holds_parts

    # The loop

    def _batches(self) -> Iterator[Any]:
        with self._stack:
            try:
                with stopping_cleanly(self.stop, self._recorder.say):
                    yield from self._handed_out()
                self._saves.finish()
                self._memory.close()
                job = self._session.job
                is_done = self._loader.position.is_over(job.max_steps, job.epochs)
                because = self._validation.stopped_because if self._validation else ""
                finished = is_done or bool(because) or self._trainer.ended_by_hook
                if finished:
                    self._trainer.refuse_unmoved(self.steps)
                self.finished = finished
                self._recorder.finish(self.finished, self.steps, because, compilation=self._session.compilation())
                note_end(self.finished)
            except BaseException as error:
                self._left_early(error)
                # `break` and an error in the loop's body look the same here. Neither is an error of this generator.
                if not isinstance(error, GeneratorExit):
                    raise
            finally:
                self._is_over = True
        if self.finished and self.world.is_main and self._session.config.watch.report:
            with written_first(self._recorder.say):
                for problem in write_report(self.folder):
                    self._recorder.say(problem)
        tell_end(self._session, self.steps, self.best, self.last, self._recorder)

    def _handed_out(self) -> Iterator[Any]:
        if self._validation is not None and self._validation.stopped_because:
            return  # it was stopped early, and then killed before it was finished
        for place, micro_batches in self._trainer.steps():
            self._check_rates()
            self._begun = self._trainer.begin(place)
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
            if self._shares_buffers:
                share_buffers(self._plain, self.world)
            for micro in micro_batches:
                batch = self._stepper.begin(place, micro)
                self._micro = micro
                self._is_learned = self._is_stepped = False
                self._logged = {}
                collect_into(self._logged)
                self._enter_forward()
                yield batch
                self._check_body()
            if self._trainer.is_over:
                break
        self._micro = None

    def _check_body(self) -> None:
        if not self._is_learned or not self._is_stepped:
            missing = "run.step()" if self._is_learned else "run.backward(loss)"
            raise DrivetrainError(
                f"the loop went on to the next batch without {missing}",
                remedy="call run.backward(loss) and run.step() for every batch; to leave one out, give backward "
                "dt.LossSum(loss * 0, 0)",
            )

    def _enter_forward(self) -> None:
        if self._micro is not None and not self._micro.weight:
            self._apart.enter_context(uncounted(self._plain))
        if self._around_forward is not None:
            self._around_forward.__enter__()
            self._is_inside = True

    def _leave_forward(self) -> None:
        self._apart.close()
        if self._is_inside and self._around_forward is not None:
            self._is_inside = False
            self._around_forward.__exit__(None, None, None)

    def _check_rates(self) -> None:
        if self._rates is not None and self._rates != [group["lr"] for group in self._optimizer.param_groups]:
            raise DrivetrainError(
                "the learning rate was changed by the loop: the schedule would undo it, and a resumed run not know it",
                remedy="give dt.drive a schedule: WarmupCosine, a function from the step to a factor of the "
                "optimizer's rate, or one from the optimizer to a torch scheduler",
            )

    def _refuse_foreign_step(self, *_: Any) -> None:
        if not self._is_stepping:
            raise DrivetrainError(
                "optimizer.step() was called by the loop", remedy="call run.step(), which knows when it is due"
            )

    # What is kept

    def _write(self, record: StepRecord) -> None:
        self._recorder.write(record)
        self._memory.observe(record)
        self._saves.report()
        self.last = record

    def _report_validation(self, context: StepContext, metrics: dict[str, float], seconds: float) -> None:
        epoch = context.epoch if self.last is None else self.last.epoch
        self._recorder.metrics(context.step, epoch, metrics, seconds)

    def _note(self, text: str) -> None:
        self._recorder.event("note", text=text)
        self._recorder.say(text)

    def _remember(self) -> None:
        """Remember the position at which the state is that of `steps` steps.

        The next forward may change buffers; it does not change weights.
        """
        self._versions = [buffer._version for buffer in self._buffers]
        self._position = self._loader.position

    def _state(self) -> tuple[list[Shard], dict[str, Any]]:
        self._watch.check()
        shards, meta = self._strategy.save()
        is_keyed = self._session.job.source.is_keyed
        validation = dict(self._validation.state_dict()) if self._validation else None
        meta |= {**self._session.meta(self._division), "validation": validation, "has_moved": self._trainer.has_moved}
        return shards, meta | {"data": None if is_keyed else self._position.to_json()}

    def _left_early(self, error: BaseException) -> None:
        """Write the outstanding records and a checkpoint.

        A failure in this does not hide the error that ended the loop.
        """
        self._leave_forward()
        collect_into(None)
        try:
            for record in self._trainer.outstanding(leaving=True) if self._is_whole else self._trainer.last_words():
                self._write(record)
            self._saves.close()
            self._save_alone()
        except Exception as failure:
            self._failure = failure
            if isinstance(error, GeneratorExit):
                raise
            error.add_note(f"and step {self.steps} could not be saved: {failure}")

    def _save_alone(self) -> None:
        """Save on the main process, which has the whole state; the others may be gone, or still looping."""
        if not self.world.is_main or not self._is_whole or self.steps == self.resumed_from:
            return
        saved = self._checkpointer.steps()
        strategy = self._session.strategy
        if self._holds_parts and self.world.size > 1 and self.steps not in saved:
            self._recorder.say(
                f"the loop was left after step {self.steps}; with {strategy} a checkpoint takes all processes, and "
                f"they may be gone: it will go on from step {max(saved, default=0)}"
            )
            return
        if self.steps not in saved and self._versions != [buffer._version for buffer in self._buffers]:
            self._recorder.say(
                f"the loop was left inside step {self.steps + 1}, which has changed the model's buffers already: it "
                f"will go on from step {max(saved, default=0)}"
            )
            return
        self._recorder.flush()
        if self.steps not in saved:
            self._checkpointer.over(World()).save(self.steps, *self._state())
            self._recorder.event("checkpoint", step=self.steps)
        self._recorder.finish(False, self.steps)


def _open(session: Session, stack: ExitStack) -> _Opened:
    """Claim the folder, open the data and assemble the parts. The stack closes what was opened."""
    job, world = session.job, session.world
    folder = session.claim()
    if folder is not None:
        stack.callback(folder.close)
    checkpointer = Checkpointer(session.path / CHECKPOINTS, world, job.keep_last)
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
    parts = assemble(
        session,
        prepared,
        Trial(None if session.sharded else partial(_touching_all, prepared.model), 1),
        division,
        loss=_as_computed,
        # Buffers are shared before the loop calls the model; DDP would do it when it is given the loss.
        make_strategy=partial(session.make_strategy, broadcast_buffers=False),
        takes_weights=checkpoint is None,
        is_own_loop=True,
    )
    return _Opened(folder, checkpointer, checkpoint, loader, parts, prepared.called_model, changes)


def _tell(session: Session, opened: _Opened, resumed_from: int, recorder: RunRecorder | NoRunRecorder) -> None:
    """Report what the run found out and decided."""
    if opened.parts.weights_taken is not None:
        write_down(opened.parts.weights_taken, recorder)
    tell_changes(opened.changes, resumed_from, recorder)
    tell_notes(opened.loader, recorder)
    tell_plain_optimizer(opened.parts.optimizer, recorder)
    tell_rate(session, opened.parts.optimizer, recorder)
    tell_sharding(session, recorder)
    tell_batch_size(session, recorder)


def _as_computed(model: Any, loss: Any) -> Any:
    """Return the loss that the loop computed already, or compute that of the trial; this is the job's loss function."""
    return loss() if callable(loss) else loss


def _refuse(session: Session) -> None:
    config, problems = session.config, []
    if session.spec.own_loop:
        allowed = ", ".join(["auto", *(name for name in STRATEGIES.names() if not strategy_facts(name).own_loop)])
        remedy = "use one of these, or dt.train"
        problems.append(Problem("--parallel-strategy", session.spec.own_loop, allowed=allowed, remedy=remedy))
    if config.distributed.static_graph:
        message = "DDP records a static graph in a forward of its own, and dt.drive leaves the forward to the loop"
        problems.append(Problem("--static-graph", message, remedy="leave it out"))
    if config.kernels.capture == "on":
        message = "a captured step is run by the device alone, and in your own loop Python runs it"
        problems.append(Problem("--capture", message, allowed="auto, off", remedy="leave it out, or use dt.train"))
    if problems:
        raise ConfigError(problems)
    check_trackers(config.watch.trackers)


def _as_they_are(session: Session) -> Prepared:
    """Return the user's model and optimizer on the device. Parameters stay the same objects, modules in their mode."""
    given = session.job.model
    modes = [(module, module.training) for module in given.modules()] if isinstance(given, nn.Module) else []
    model, optimizer, called = callable_model(session)
    for module, training in modes:
        module.training = training
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
