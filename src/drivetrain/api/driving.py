"""`dt.drive(...)`: a custom training loop, with the same parts as `dt.train`.

run = dt.drive(model, optimizer, data, global_batch=64, epochs=3, name="mine")
for batch in run:
    run.backward(loss(run.model, batch))
    run.step()
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from drivetrain.api.driven_run import (
    DrivenProgress,
    DrivenRun,
    LoopWatch,
    as_computed,
    check_closure,
    refuse_closure,
    step_with,
)
from drivetrain.api.loop_checks import Closure, DivisionWatch, GradientWatch, WeightWatch
from drivetrain.checkpoint import export as export_checkpoint
from drivetrain.config import Config
from drivetrain.core.aims import Aim, EarlyStopping, GlobalBatch
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem, suggesting_keywords
from drivetrain.core.hook import Hook
from drivetrain.core.isolation import draws_kept, uncounted
from drivetrain.core.metrics import (
    LoggedValue,
    LoggedValues,
    LossSum,
    MetricFunction,
    MetricObject,
    NamedLosses,
    StepOutcome,
    collect_into,
    copied,
    log,
    media_of,
    on_host,
)
from drivetrain.core.optimizers import (
    GivenOptimizer,
    Optim,
    closure_error,
    members_of,
    needs_closure,
)
from drivetrain.core.plugins import STRATEGIES, strategy_facts
from drivetrain.core.processes import stopping_cleanly, written_first
from drivetrain.core.schedules import Constant, Schedule
from drivetrain.core.world import World
from drivetrain.data.batch import MicroBatch
from drivetrain.data.division import Place
from drivetrain.job import OTHER_NAMES, Job, LossFunction
from drivetrain.job_checks import EXAMPLES
from drivetrain.loop.trainer import Begun
from drivetrain.monitor.tracking import check_trackers
from drivetrain.report import write_report
from drivetrain.run import (
    Session,
    done_instead,
    draws_always,
    tell_end,
)
from drivetrain.strategies.base import around_forward, check_objective
from drivetrain.strategies.replicated import share_buffers
from drivetrain.strategies.turns import TurnsStrategy

_AVERAGE = (
    "dt.drive keeps no average: give a copy of the model as another model, by name, and move it after run.step(), "
    "if not run.accumulating; or use dt.train, where Job has it"
)
_OTHER_NAMES = {
    **OTHER_NAMES,
    **dict.fromkeys(
        ("test", *(name for name, meant in OTHER_NAMES.items() if meant == "test")),
        "dt.train has a test set; in a loop of your own, measure it after the loop",
    ),
    **dict.fromkeys(("ema", "swa"), _AVERAGE),
    **dict.fromkeys(("wd", "weight_decay", "lr", "learning_rate"), "the optimizer has it, which you give to dt.drive"),
    "init_from": "load weights into the model before dt.drive: model.load_state_dict(…), or --init-from",
    "loss_weights": "multiply the parts of the loss in the loop: run.backward(loss + 0.1 * penalty)",
    "count": "run.backward(dt.LossSum(sum, count)) counts",
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint", "ckpt_path"),
        "leave it out: an interrupted run of the same name continues by itself",
    ),
    "load_best_model_at_end": 'dt.export(run.folder, "best.safetensors", which="best") writes the best weights',
}


@suggesting_keywords("drive", _OTHER_NAMES, "settings of the run go to config=dt.configure(…)")
def drive(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    data: Any,
    *,
    turns: bool | Mapping[str, int] = False,
    name: str = "drive",
    global_batch: GlobalBatch | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    seed: int = 0,
    schedule: Schedule | Mapping[str, Schedule] = Constant(),  # noqa: B008  (frozen)
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
    checkpoint_every: int | Literal["epoch"] | None = None,
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
        model: The model. Or several by name: `run.model` is then an `nn.ModuleDict` of them.
        optimizer: Its optimizer. Or several by name, each with parameters of its own; all are saved.
        data: A data set, a list of items, a dictionary of tensors, something to iterate, or a `DataLoader`.
        turns: Whether each of several optimizers has a turn of its own in every step, as in a GAN. The loop then gets
            the batches of a step once for each of them; `run.turn` is the name of the optimizer whose turn it is, and
            only its parameters have gradients. Otherwise all step after one backward. `{"g": 5}`: `g` has its turn in
            every fifth step, beginning with the first, and the others in each.
        name: Name of the run, and of its folder.
        global_batch: Samples per optimizer step, over all devices. None: the batch size times the devices. Where it
            grows, by the steps done: `{0: 256, 1000: 512}`.
        epochs: How often to go through the data.
        max_steps: How many optimizer steps to do at most.
        seed: Seed of the sample order and of whatever a step draws at random.
        schedule: The factor of the learning rate: `WarmupCosine`, `Constant`, or a function of the step. Of several
            optimizers, one for all, or one for each by name.
        clip_norm: The gradient norm to clip to; of several optimizers, that of each.
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
        checkpoint_every: Steps between checkpoints, or `"epoch"`. Default: by what a save costs, and at the end.
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
    whole = model if isinstance(model, nn.Module) else nn.ModuleDict(model)
    optims = _optims(whole, optimizer, schedule, turns=turns)
    job = Job(
        name=name,
        model=whole,
        data=data,
        loss=dict.fromkeys(optims, as_computed) if turns else as_computed,
        optimizer=optims or GivenOptimizer(cast(Optimizer, optimizer)),
        global_batch=global_batch,
        epochs=epochs,
        max_steps=max_steps,
        seed=seed,
        schedule=Constant() if isinstance(schedule, Mapping) else schedule,
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
    _refuse_without_loss(job, loss)
    done_instead(job)
    return _started(Session.join(job, config, quiet=quiet, fresh=fresh or None, extend=extend), loss)


def _optims(
    model: nn.Module,
    optimizer: Optimizer | Mapping[str, Optimizer],
    schedule: Schedule | Mapping[str, Schedule],
    *,
    turns: bool | Mapping[str, int],
) -> dict[str, Optim]:
    """Return several optimizers as those of a job; empty for one."""
    given = optimizer if isinstance(optimizer, Mapping) else {}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    schedules = schedule if isinstance(schedule, Mapping) else {}
    problems = []
    if turns and len(given) < 2:
        message, remedy = "turns are for several optimizers", 'optimizer={"d": …, "g": …}, or leave turns out'
        problems.append(Problem("dt.drive: turns", message, remedy=remedy))
    periods = turns if isinstance(turns, Mapping) else {}
    for argument, names_given in (("schedule", schedules), ("turns", periods)):
        unknown = [of for of in names_given if of not in given]
        if unknown:
            message = f"{unknown[0]!r} is none of the optimizers"
            allowed = ", ".join(given) or f"no names in {argument}, since there is one optimizer"
            what = f"dt.drive: {argument}"
            problems.append(Problem(what, message, unknown[0], allowed=allowed, remedy="name one of them"))
    if periods and all(periods.get(of, 1) > 1 for of in given):
        message = "no optimizer has a turn in each step"
        problems.append(Problem("dt.drive: turns", message, remedy="leave one of them out, which then has"))
    if problems:
        raise ConfigError(problems)
    found = {}
    for of, it in given.items():
        own = {names[parameter] for group in it.param_groups for parameter in group["params"] if parameter in names}
        found[of] = Optim(
            GivenOptimizer(it, takes_closure=False),
            partial(_is_among, frozenset(own)),
            schedule=schedules.get(of),
            every=periods.get(of, 1),
        )
    return found


def _is_among(names: frozenset[str], name: str, parameter: nn.Parameter) -> bool:
    return name in names


def _started(session: Session, loss: LossFunction | None) -> "Drive":
    with ExitStack() as stack, draws_kept():
        stack.callback(session.close)
        _refuse(session)
        try:
            return Drive(session, stack, loss)
        except BaseException as error:
            session.note_failed_start(error)
            raise


class Drive(DrivenProgress):
    """The run that `dt.drive` returns. It is iterated over once; call `backward` and `step` once for each batch.

    Example:
        >>> for batch in run:  # doctest: +SKIP
        ...     run.backward(loss(run.model, batch))
        ...     run.step()
    """

    def __init__(self, session: Session, stack: ExitStack, loss: LossFunction | None = None) -> None:
        driven = DrivenRun(session, stack, loss)
        parts, say = driven.parts, driven.recorder.say
        for optimizer in members_of(parts.optimizer).values():
            stack.callback(optimizer.register_step_pre_hook(self._refuse_foreign_step).remove)
        self._turns = parts.strategy if isinstance(parts.strategy, TurnsStrategy) else None
        self._turn, self._is_last_turn = 0, True
        self._in_turn = ExitStack()  # the context in which only the parameters of the turn have gradients
        self._driven, self._trainer, self._stepper = driven, driven.trainer, driven.stepper
        self._session, self.world, self._precision = session, session.world, session.precision
        self.model: Any = parts.model if driven.called_model is None else driven.called_model
        self._plain, self._optimizer = parts.model, parts.optimizer
        trained = [] if session.sharded else parts.given.trained  # shards: at a step's end
        alike = World() if session.holds_parts else session.world  # the processes that hold the same gradients
        self._gradients = GradientWatch(trained, scales_loss=session.precision.scales_loss, world=alike)
        self._weights = WeightWatch(parts.model, trained, say, may_follow=driven.puts_off_saves)
        self._division = DivisionWatch(session, driven.loader, parts.model, say, is_called=driven.called_model is None)
        self._watch = LoopWatch(self, driven, has_turns=self._turns is not None)
        self._shares_buffers = session.world.size > 1 and session.config.distributed.broadcast_buffers
        self._around_forward = around_forward(parts.given)
        self._apart = ExitStack()  # the contexts around the forward of a batch that does not count
        self._iterator: weakref.ref[Any] | None = None
        self._begun: Begun | None = None
        self._micro: MicroBatch | None = None  # of the current batch
        self._is_learned = self._is_stepped = self._is_stepping = self._is_inside = False
        self._kept: list[MicroBatch] = []  # of a step with a closure
        self._rates: list[float] | None = None  # as the schedule set them
        self._logged: LoggedValues = {}  # with the current batch
        # `_is_over`: the loop was left, at its end or before; `_is_replaced`: the same process opened the run once more
        self.finished = self._is_over = self._is_replaced = False
        self._stack = stack.pop_all()
        if driven.folder is not None:
            driven.folder.make_way = partial(_make_way, weakref.ref(self))

    def validate(self) -> dict[str, float]:
        """Measure the validation set now, and return loss and metrics by name.

        Call it on all processes, inside the loop after `run.step()`. It changes neither `best` nor early stopping, and
        records nothing: validations that are due do, and `run.step()` does these by itself.
        """
        validation = self._driven.validation
        if validation is None:
            raise DrivetrainError("the run has no validation set", remedy="give it one: dt.drive(…, valid=…, loss=…)")
        if self._is_over or not (self._micro is None or self._is_stepped):
            raise DrivetrainError(
                "run.validate() was called after the loop, or between a batch and its run.step()",
                remedy="call it after run.step(); after the loop, run.metrics is the last validation",
            )
        return validation.measure(self._plain)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the run's autocast context, for code such as a validation.

        It is on by itself from batch to `backward`.
        """
        return self._precision.around_forward() or nullcontext()

    def __iter__(self) -> Iterator[Any]:
        self._refuse_replaced()
        if self._iterator is not None:
            raise DrivetrainError(
                "a run is iterated over once; it goes through all its epochs by itself",
                remedy="write one loop; run.epoch and run.ends_epoch tell where it is",
            )
        self._process = os.getpid()
        _OPEN.add(self)
        batches = self._batches()
        self._iterator = weakref.ref(batches)  # weak: a loop that was left shows by the iterator being freed
        return batches

    def __next__(self) -> Any:
        """Raise: an iterator that the run kept itself would not show that its loop was left."""
        raise DrivetrainError(
            "next(run) was called, and a run is no iterator",
            remedy="write `for batch in run:`; or `batches = iter(run)` once, and then next(batches)",
        )

    def backward(self, loss: Tensor | LossSum | NamedLosses) -> None:
        """Run the backward of a batch's loss: a mean over its samples, a `LossSum`, or a dictionary of named parts.

        Call it once for each batch. Parts that are a `LossSum` each have a separate count, which has to be known before
        the first backward of a step: with several batches per step they are refused. Parts that are means may be
        accumulated.
        """
        micro, begun = self._micro, self._begun
        self._refuse_replaced()
        if self._is_learned and needs_closure(self._optimizer):
            raise closure_error(self._optimizer)
        if micro is None or begun is None or self._is_learned:
            raise DrivetrainError(
                "run.backward() was called twice for one batch, or outside the loop",
                remedy="add losses together and call it once for each batch",
            )
        self._leave_forward()
        self._gradients.check(micro)
        self._watch.refuse_scaler(loss)
        if isinstance(loss, Tensor | LossSum):
            check_objective(loss.total if isinstance(loss, LossSum) else loss, self._plain, self.turn)
        self._division.judge(micro, loss)
        self._stepper.forward_backward(loss, begun.place, micro)
        self._gradients.note(micro, loss)
        self._weights.note(micro)
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
            values: LoggedValues = {name: [copied(value)]}
            media = media_of(values)
            self._driven.recorder.logged(self.steps, self.epoch, on_host(values), media)
        else:
            log(name, value.detach() if isinstance(value, Tensor) else value)  # no graph is kept until the step

    def step(self, closure: Closure | None = None) -> None:
        """Step the optimizer with the last batch of a global batch; do nothing for the others.

        Call it once for each batch.

        Args:
            closure: For optimizers that compute the loss several times in a step, such as LBFGS or SAM: a function of a
                batch that returns its loss, as `backward` takes it. It is called for all batches of the step as often
                as the optimizer asks, with the same random draws each time; `backward` is then not called. The batches
                of a step are kept until it is done.
        """
        micro, begun = self._micro, self._begun
        if micro is None or begun is None or self._is_stepped:
            raise DrivetrainError(
                "run.step() was called twice for one batch, or outside the loop", remedy="call it once for each batch"
            )
        check_closure(self._session, self._optimizer, closure, is_learned=self._is_learned)
        self._gradients.check_changed(micro)
        self._weights.check(micro)
        self._is_stepped = True
        collect_into(None)
        if closure is not None:
            self._leave_forward()
            self._is_learned = True
            self._kept.append(micro)
        elif self._logged and micro.weight:
            self._session.step_log.add(self._logged, micro.num_samples)
        self._watch.stepped(is_due=micro.is_last)
        if micro.is_last and self._turns is not None:
            self._is_stepping = True
            self._stepper.seed_update()
            self._driven.end_turn()
            self._in_turn.close()
            self._is_stepping = False
        if micro.is_last and self._is_last_turn:
            if closure is None and self._turns is None:
                self._gradients.compare()
            self._check_rates()
            self._is_stepping = True
            stepped = None if closure is None else partial(self._stepped_with, closure, begun)
            outcome = self._driven.step(stepped)
            self._is_stepping = False
            self._driven.settle(begun, outcome)
        self._weights.note_step()

    def _stepped_with(self, closure: Closure, begun: Begun) -> StepOutcome:
        kept, self._kept = self._kept, []

        def judged(batch: Any) -> Tensor | LossSum | NamedLosses:
            loss: Tensor | LossSum | NamedLosses = self._gradients.loss_of(closure, batch)
            if self._micro is not None:
                self._division.judge(self._micro, loss)
            return loss

        return step_with(judged, self._driven, self._session, begun, kept, self._again)

    @contextmanager
    def _again(self, micro: MicroBatch) -> Iterator[None]:
        """Be inside the forward of a batch that was handed out before."""
        self._micro = micro
        self._enter_forward()
        try:
            yield
        finally:
            self._leave_forward()

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
        target = Path(path) if path is not None else self.folder / "model.safetensors"
        self._driven.raise_if_unsaved()
        if self.world.is_main:
            export_checkpoint(self._driven.weights(is_over=self._is_over), target, prefix="model/", instead="ema/")
        return target

    # The loop

    def _batches(self) -> Iterator[Any]:
        driven = self._driven
        with draws_kept(), self._stack:
            try:
                with stopping_cleanly(self.stop, driven.recorder.say):
                    yield from self._handed_out()
                self.finished = driven.finish()
            except BaseException as error:
                self._leave_forward()
                self._tell_one_sample()
                self._in_turn.close()
                collect_into(None)
                begun = self._begun
                is_between = begun is not None and driven.steps > begun.place.step
                is_last = begun is not None and begun.is_last and is_between
                self.finished = driven.left(error, is_last=is_last, is_between=is_between)
                # `break` and an error in the loop's body look the same here. Neither is an error of this generator.
                if not isinstance(error, GeneratorExit):
                    driven.say_last_words()
                    raise
            finally:
                self._is_over = True
                _OPEN.discard(self)
        if self.finished and self.world.is_main and self._session.config.watch.report:
            with written_first(driven.recorder.say):
                for problem in write_report(self.folder, always_draws=draws_always(self._session)):
                    driven.recorder.say(problem)
        tell_end(self._session, self.steps, self.best, self.last, driven.recorder)
        driven.say_last_words()

    def _handed_out(self) -> Iterator[Any]:
        driven = self._driven
        if driven.stopped_because or self._session.is_done:
            return  # it was stopped early, and then killed before it was finished; or the script is in a later run
        for place, micro_batches in self._trainer.steps():
            self._watch.look(place)
            self._check_rates()
            self._begun = self._trainer.begin(place)
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
            if self._shares_buffers:
                share_buffers(self._plain, self.world)
            if self._turns is None:
                yield from self._of_step(place, micro_batches)
            else:
                kept, due = list(micro_batches), self._turns.due(place.step)
                for turn in due:
                    self._turn, self._is_last_turn = turn, turn == due[-1]
                    self._in_turn.enter_context(self._turns.training(turn))
                    yield from self._of_step(place, kept, turn)
            driven.keep()
            if self._trainer.is_over:
                break
        self._micro = None

    def _of_step(self, place: Place, micro_batches: Iterable[MicroBatch], turn: int = 0) -> Iterator[Any]:
        """Hand out the batches of a step, or of one turn of it."""
        for micro in micro_batches:
            batch = self._stepper.begin(place, micro, turn)
            self._micro = micro
            self._is_learned = self._is_stepped = False
            self._logged = {}
            collect_into(self._logged)
            self._enter_forward()
            self._gradients.begin(micro)
            with self._watch.around_body(place, batch):
                yield batch
            self._check_body()
            self._weights.end(micro)

    def _check_body(self) -> None:
        if not self._is_learned or not self._is_stepped:
            missing = "run.step()" if self._is_learned else "run.backward(loss)"
            raise DrivetrainError(
                f"the loop went on to the next batch without {missing}",
                remedy="call run.backward(loss) and run.step() for every batch, also to accumulate gradients: it steps "
                "where one is due. To leave a batch out, give backward dt.LossSum(loss * 0, 0)",
            )

    def _tell_one_sample(self) -> None:
        """Say of a loop that was left in the forward of a batch of one sample, as by an error, what is often the cause.

        The error itself is not known here.
        """
        micro, job = self._micro, self._session.job
        if micro is not None and micro.num_samples == 1 and not self._is_learned and job.global_batch != 1:
            self._driven.recorder.say(
                "  loop       it was left in a batch of 1 sample, where a step is divided or an epoch ends: squeeze() "
                "drops that dimension, too, where squeeze(1) does not, and batch normalization needs 2"
            )

    def _enter_forward(self) -> None:
        if self._micro is not None and not self._micro.weight:
            self._apart.enter_context(uncounted(self._plain))
        if self._micro is not None:
            self._division.begin(self._micro)
        if self._around_forward is not None:
            self._around_forward.__enter__()
            self._is_inside = True

    def _leave_forward(self) -> None:
        self._apart.close()
        self._division.end()
        if self._is_inside and self._around_forward is not None:
            self._is_inside = False
            self._around_forward.__exit__(None, None, None)

    def _check_rates(self) -> None:
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if self._rates is not None and len(self._rates) != len(rates):
            raise DrivetrainError(
                f"the loop has changed the optimizer's groups: there were {len(self._rates)}, and now {len(rates)}. "
                "Schedule, reduction and checkpoints were made for those at the start",
                remedy="give the optimizer all its groups at the start; a hook can keep some frozen at first: "
                "context.freeze, and context.unfreeze later",
            )
        if self._rates is not None and self._rates != rates:
            raise DrivetrainError(
                "the learning rate was changed by the loop: the schedule would undo it, and a resumed run not know it",
                remedy="give dt.drive a schedule: WarmupCosine, a function from the step to a factor of the "
                "optimizer's rate, or one from the optimizer to a torch scheduler",
            )

    def _refuse_replaced(self) -> None:
        if self._is_replaced:
            raise DrivetrainError(
                f"the run {self._session.name} was opened again after this, and only the newest goes on",
                remedy="give each run a name of its own: dt.drive(…, name=…)",
            )

    def _refuse_foreign_step(self, *_: Any) -> None:
        if not self._is_stepping:
            raise DrivetrainError(
                "optimizer.step() was called by the loop", remedy="call run.step(), which knows when it is due"
            )


_OPEN = weakref.WeakSet[Drive]()  # whose loop has begun, and is not over


def _close_at_exit() -> None:
    """Close the runs whose iterator is still held, as in a script that calls `next`: Python drops it too late."""
    for run in list(_OPEN):
        if run._process == os.getpid():  # not in a process that was forked from it
            run.close()


# Before Python ends the threads that save and copy; what `atexit` calls comes after that.
getattr(threading, "_register_atexit", atexit.register)(_close_at_exit)


def _make_way(of: weakref.ref[Drive]) -> None:
    """End a run whose folder this process claims once more: it is saved, and cannot be used any longer."""
    run = of()
    if run is not None:
        run.close()
        run._is_replaced = run._is_over = True


def _refuse_without_loss(job: Job, loss: LossFunction | None) -> None:
    if job.valid is not None and loss is None:
        message = "validation needs a loss function, and dt.drive leaves the loss to the loop"
        raise ConfigError([Problem("dt.drive: loss", message, remedy=EXAMPLES["loss"])])


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
    if session.way.compiled_from != 0:
        message = "another process cannot make your own loop again to compile it"
        problems.append(Problem("--compile-from", message, remedy="leave it out, or use dt.train"))
    if problems:
        raise ConfigError(problems)
    given: Any = session.job.optimizer
    if not session.job.optims and needs_closure(getattr(given, "make", given)(())):
        refuse_closure(session)
    check_trackers(config.watch.trackers)
