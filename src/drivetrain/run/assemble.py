"""Assembles what a run computes with, from a model that was built: the one place where the parts come together.

`train`, `drive`, `benchmark_performance` and the planner's trials of first steps all call it, so that what is measured
is what is trained. The data is opened here too: how its steps are divided, its loader, and the validator of its
validation set.
"""

from collections.abc import Callable, Container, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoint.weights import WeightsTaken, plainly_named
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.goodput import start_marks
from drivetrain.core.hook import NoSettlement, StepContext, settlement_of
from drivetrain.core.isolation import buffers_kept, is_out_of_memory, model_kept, untouched
from drivetrain.core.metrics import logging_loss
from drivetrain.core.optimizers import LossByTurn, Turn, may_draw
from drivetrain.core.run_folder import read_fork
from drivetrain.core.state import ParameterWatch
from drivetrain.core.value import format_count
from drivetrain.core.world import World
from drivetrain.data.batch import note_one_sample, to_device
from drivetrain.data.division import Division, Position, key_of
from drivetrain.data.feed import ResidentFeed, feed_for
from drivetrain.data.keyed_items import DRAWS_FROM_ALL, Collate, Columns, Draws, what_draws
from drivetrain.data.loader import Loader, MicroBatch
from drivetrain.data.source import Source, source_of
from drivetrain.loop import CapturedStepper, JointCapturedStepper, Stepper, make_capturable, why_not_captured
from drivetrain.loop.schedule import Rates, rates_of
from drivetrain.loop.validation import BatchNormPass, Validation, Validator
from drivetrain.monitor.phases import NoClock, PhaseClock, count_apart, counted
from drivetrain.plan import Choice
from drivetrain.plan.rules import DataPath
from drivetrain.run.model_factory import Prepared, called_loss_of, couples_samples, take_weights
from drivetrain.run.session import Session
from drivetrain.strategies import Average, RunningMean, SingleStrategy, Strategy, StrategyParts, Trial, make_average
from drivetrain.strategies.base import LossFunction, ObjectiveCall
from drivetrain.strategies.compiling import varying_dims_of
from drivetrain.strategies.ddp import DdpStrategy
from drivetrain.strategies.loss_parts import LossParts, StepLog
from drivetrain.strategies.replicated import as_fork
from drivetrain.strategies.turns import OwnLoss, TurnsStrategy, clips_of, parts_by_turn

ENOUGH_TO_COMPILE = 500  # full batches that a run validates, or smaller last steps: then these are compiled as well
TRIAL_PARTS = 8  # of a micro-batch: one of them is enough to try a model on


def division_of(run: Session, model: nn.Module | None) -> Division:
    """Return how steps are divided in the way that is followed."""
    job, least = run.job, 1
    is_synced = run.config.distributed.sync_batchnorm and run.world.size > 1  # sees the samples of all ranks
    if model is not None and not is_synced and couples_samples(model):
        least = 2  # one sample alone has no variance
    is_fixed = bool(run.weighting.holds_division)
    return job.divided(run.way.micro_batch, run.world.size, least=least, is_fixed=is_fixed)


def make_loader(
    run: Session,
    division: Division,
    data: Any,
    *,
    shuffle: bool,
    start: Position | None = None,
    collate: Collate | None = None,
    begins_often: bool = False,
) -> Loader:
    """Make a loader by the plan; the run closes it at its end. One that begins often weighs what workers cost."""
    source, collate = source_of(data), collate or run.job.collate
    wishes, device = source.wishes, run.world.device
    pins_memory = wishes.pin_memory if run.config.data.pin_memory is None else None
    fetched = _path_fetched(run)
    loader = Loader(
        source,
        division,
        run.world.rank,
        run.job.seed,
        collate,
        shuffle=shuffle,
        num_workers=_num_workers(run, source),
        pin_memory=(pins_memory or run.settings.pin_memory.value) and device.type == "cuda",
        prefetch_factor=run.config.data.prefetch_factor
        or wishes.prefetch_factor
        or (fetched and fetched.prefetch_factor)
        or run.settings.prefetch_factor.value
        or 2,
        start=start,
        feed=feed_for(device, channels_last=run.way.channels_last),
        may_do_without_workers=run.config.data.num_workers < 0,
        resident=run.residency.of(
            source,
            collate,
            channels_last=run.way.channels_last,
            num_workers=_num_workers(run, source),
            planned=None if run.planned.data_path is None else run.planned.data_path.resident,
        ),
        weighs_workers=begins_often and run.config.data.num_workers < 0,
    )
    loader.notes += run.residency.take_notes()
    run.loaders.append(loader)
    if run.world.is_main:
        loader.warn_if_inexact()
    return loader


def make_validation(
    run: Session,
    parts: "RunParts",
    checkpoint: Checkpoint | None,
    report: Callable[[StepContext, dict[str, float], float, str], None],
    loss: LossFunction | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Validation | None:
    """Make the validation hook, in the state of the checkpoint that the run goes on from; None if there is no set.

    Args:
        run: The run.
        parts: Its parts.
        checkpoint: The checkpoint.
        report: Called with each validation: where it was, its values, the seconds it took, and the value in words
            by which it is the best so far; empty: it is not.
        loss: The loss function, if not the job's.
        progress: Called while it validates, with the name of the set and the part of it that is done.
    """
    job = run.job
    if job.valid is None:
        return None
    validation = Validation(
        make_validator(run, parts.division.micro_batch, loss=loss, progress=progress),
        job.validate_every,
        job.settled(job.best),
        None if job.early_stopping is None else job.settled(job.early_stopping),
        parts.average,
        report,
        parts.rates.plateaus,
    )
    if checkpoint is not None and checkpoint.meta["validation"]:
        validation.load_state_dict(checkpoint.meta["validation"])
        if run.extensions and run.extensions[-1].finished_at == checkpoint.step:
            validation.go_on()
    return validation


def make_validator(
    run: Session,
    micro_batch: int,
    kind: Literal["valid", "test"] = "valid",
    loss: LossFunction | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Validator:
    """Make the validator of the job's validation or test sets, in batches of the validation size or the given one."""
    sets = run.job.valid_sets if kind == "valid" else run.job.test_sets
    if run.job.valid_batch is not None:
        micro_batch = run.job.valid_batch * len(run.devices)
    loaders = {name: whole_set_loader(run, source, micro_batch) for name, source in sets.items()}
    called, pays = None, _pays(run, sets, micro_batch, kind)
    if loss is None and not run.job.turns and pays:
        called = called_loss_of(run)
    on_device = partial(to_device, device=run.world.device, channels_last=run.way.channels_last)
    return Validator(
        run.job,
        loaders,
        run.precision,
        run.world,
        _validated_loss(run) if loss is None else loss,
        run.loss_parts,
        prefix=f"{kind}_",
        on_device=on_device,
        compiled_loss=None if called is None else run.weighted(called),
        may_halve=not run.weighting.holds_division,
        eager=run.way.compiles_blocks and not pays,
        progress=progress,
    )


def _pays(run: Session, sets: Mapping[str, Source], micro_batch: int, kind: Literal["valid", "test"]) -> bool:
    """Return whether a run validates so many full batches that compiling the forward pays, by its job alone.

    A decision by time could be another one after an interruption, and compiled code rounds otherwise.
    """
    job = run.job
    num_batches = sum(len(source.dataset) // (micro_batch * run.world.size) for source in sets.values())
    num_times: float = 1
    if kind == "valid" and job.valid_every is not None:
        num_times = (job.num_steps or 0) // job.valid_every
    elif kind == "valid":
        per_epoch = job.steps_per_epoch or -(-(job.num_steps or 0) // (job.num_epochs or 1)) or 1
        num_times = job.epochs or (job.num_steps or 0) // per_epoch
    return num_batches * num_times >= ENOUGH_TO_COMPILE


def _validated_loss(run: Session) -> LossFunction:
    """Return the loss function of validations, with results weighted as in training."""
    if not run.job.turns:
        return run.weighted(run.job.loss_function)
    by_turn = {turn: run.of_turn(turn) for turn in run.job.turns}
    return LossByTurn({
        turn.name: own.weighted(turn.loss) if own.weighting.by == "tokens" else turn.loss
        for turn, own in by_turn.items()
    })  # fmt: skip


def whole_set_loader(run: Session, source: Source, micro_batch: int) -> Loader:
    """Make a loader of a whole data set in its own order, as one step: each sample once, over all ranks."""
    length = len(source.dataset)
    division = Division(length, length, micro_batch, run.world.size)
    collate = run.job.collate_of(source)
    return make_loader(run, division, source, shuffle=False, collate=collate, begins_often=True)


def _num_workers(run: Session, source: Source) -> int:
    """Return the configuration's number; else the handed-in DataLoader's; else the measured; else by rule."""
    if run.config.data.num_workers >= 0:
        return run.config.data.num_workers
    fetched = _path_fetched(run)
    if fetched is not None and source.wishes.num_workers is None:
        return fetched.num_workers
    return workers_by_rule(run, source).value


def workers_by_rule(run: Session, source: Source) -> Choice[int]:
    """Return how many processes load a data set where that is neither configured nor measured."""
    if source.wishes.num_workers is not None:
        count = min(source.wishes.num_workers, 1) if source.is_iterable else source.wishes.num_workers
        return Choice(value=count, reason="the DataLoader's own")
    if isinstance(source.dataset, (TensorDataset, Columns, list, tuple, torch.Tensor)):
        return Choice(value=0, reason="its items are in memory")
    if source.is_iterable and run.settings.num_workers.value > 1:
        return Choice(value=1, reason="data that can only be iterated has one at most")
    return run.settings.num_workers


def _path_fetched(run: Session) -> DataPath | None:
    """Return the measured data path of samples that are fetched batch by batch."""
    path = run.planned.data_path
    return None if path is None or path.resident else path


@dataclass(frozen=True)
class RunParts:
    """Everything a run computes with, ready for its first step."""

    model: nn.Module
    optimizer: Optimizer
    rates: Rates
    average: Average | None  # the moving average of the weights
    strategy: Strategy
    given: StrategyParts  # what the strategy was prepared with
    objective: ObjectiveCall
    draws: Draws  # the generators that a step draws from
    division: Division
    why_not_captured: str  # empty if steps are going to be captured
    flops_per_sample: float  # 0: not counted
    weights_taken: WeightsTaken | None  # the weights that the run starts from, if not those that the model has
    watch: ParameterWatch


def assemble(
    run: Session,
    prepared: Prepared,
    trial: Trial,
    division: Division,
    *,
    loss: LossFunction | None = None,
    make_strategy: Callable[[], Strategy] | None = None,
    world: World | None = None,
    loss_parts: LossParts | None = None,
    takes_weights: bool = False,
    counts_flops: bool = False,
    is_own_loop: bool = False,
) -> RunParts:
    """Put the parts together and try them on one batch; nothing is learned from it.

    Args:
        run: The run, following the way that the parts are for.
        prepared: Its model and optimizer.
        trial: The batch, on its device.
        division: How steps are divided into micro-batches.
        loss: The loss function, if not the job's, compiled where that is planned.
        make_strategy: Makes the strategy, if not the run's.
        world: The ranks that take part, if not the run's.
        loss_parts: The named parts of the loss, if not the run's.
        takes_weights: Whether to start from the weights of `init_from`: a checkpoint brings its own.
        counts_flops: Whether to count the FLOPs of a sample.
        is_own_loop: Whether the user's loop calls the model, which the trial then does not show.
    """
    job, world = run.job, world or run.world
    model, optimizer, called_model = prepared
    watch = ParameterWatch(model)
    called_loss = called_loss_of(run) if loss is None else None
    taken = None
    if takes_weights and job.init_from is not None:
        taken = take_weights(job.init_from, model, world, run.experts)
    average = _average_of(run, model, division)
    given = StrategyParts(
        model,
        run.weighted(logging_loss(job.loss_function)) if loss is None else loss,
        optimizer,
        clip_norm=None if job.optims else job.clip_norm,
        clips=clips_of(job, optimizer),
        precision=run.precision,
        called_model=called_model,
        called_loss=None if called_loss is None else run.weighted(called_loss),
        average=average,
        offloads_activations=run.settings.activations.value == "offload",
        loss_parts=run.loss_parts if loss_parts is None else loss_parts,
        step_log=run.step_log if loss_parts is None else StepLog(world),
    )
    make = make_strategy or run.make_strategy
    apart = None if loss_parts is None else world
    turns = parts_by_turn(job, given, lambda turn: _losses_of(run, turn, apart, is_given=loss is not None))
    strategy = TurnsStrategy(make, turns) if turns else make()
    run.strategy = strategy.name
    draws, objective, flops = _try_out(run, strategy, given, trial, counts_flops=counts_flops, draws_all=is_own_loop)
    rates = rates_of(job, optimizer)  # before a checkpoint is loaded: it begins with the settings as made
    _refuse_own_rates(run, rates)
    settled = "the loop is the user's own" if is_own_loop else _settle_capture(run, given, rates, draws, division)
    return RunParts(
        model=model,
        optimizer=optimizer,
        rates=rates,
        average=average,
        strategy=strategy,
        given=given,
        objective=objective,
        draws=draws,
        division=division,
        why_not_captured=settled,
        flops_per_sample=flops / trial.num_samples,
        weights_taken=taken,
        watch=watch,
    )


def _refuse_own_rates(run: Session, rates: Rates) -> None:
    if run.config.optimizer.learning_rate is not None and rates.sets_own:
        message = f"the job's schedule is a {rates.sets_own}, which sets rates of its own"
        raise ConfigError([Problem("--lr", message, remedy="leave it out, or use dt.OneCycle in the job")])


def _settle_capture(run: Session, given: StrategyParts, rates: Rates, draws: Draws, division: Division) -> str:
    """Make the optimizer ready for steps that are captured. Return why they are not; empty if they are."""
    given.step_log.settle()
    found = device_reasons(run, given.optimizer, draws, division) or rates.why_not_captured
    if not found and any(turn.every > 1 for turn in run.job.turns):
        found = "not every step has the same turns"
    if not found and division.micro_batch < division.global_batch:
        counted = given.loss_parts.counted
        found = f"the items of the part {counted[0]!r} of the loss are counted before each step" if counted else ""
    if not found and run.world.size > 1:
        found = _why_not_joint(run, given)
    if run.way.capture:  # where one rank cannot, none does
        found = next(filter(None, [found, *run.world.gather(found)]), "")
    if not found:
        make_capturable(given.optimizer)
    return found


def _why_not_joint(run: Session, given: StrategyParts) -> str:
    """Return why ranks that train with DDP cannot capture the steps of this job; empty if they can."""
    settings = run.config.distributed
    if settings.find_unused_parameters:
        return "with --find-unused-parameters, DDP's host asks the device in every step which weights were used"
    if settings.static_graph:
        return "with --static-graph, DDP reduces in another way, which was not tried in a CUDA graph"
    if not isinstance(given.mixtures, NoSettlement):
        return "ranks add up the load of a mixture's experts after each step, which was not tried between replays"
    if given.loss_parts.num_values:
        return "several ranks sum up named parts of the loss beside the gradients, which was not tried in a CUDA graph"
    return ""


def device_reasons(run: Session, optimizer: Optimizer, draws: Draws, division: Division) -> str:
    """Return why steps as the run makes them cannot be captured; empty if they can."""
    if not run.way.capture:
        return "not asked for"
    return why_not_captured(
        run.world,
        run.strategy,
        optimizer,
        run.precision,
        num_micro_steps=-(-division.global_batch // division.micro_batch),
        has_turns=bool(run.job.turns),
        activations="recompute" if run.way.recompute else run.settings.activations.value,
        compile_mode=run.way.compile_mode or "",
        asserts=run.config.device.assertions,
        draws=draws,
    )


def _losses_of(run: Session, turn: Turn, apart: World | None, *, is_given: bool) -> OwnLoss:
    """Return the loss of one of several turns, weighted and compiled by itself, unless it is given as it is.

    `apart`: the world it is tried in, if not the run's.
    """
    own = run.of_turn(turn)
    if is_given:
        return OwnLoss(turn.loss, None, own.loss_parts)
    called = called_loss_of(own)
    parts = own.loss_parts if apart is None else LossParts(None, None, apart, alone=True)
    return OwnLoss(own.weighted(logging_loss(turn.loss)), None if called is None else own.weighted(called), parts)


def _average_of(run: Session, model: nn.Module, division: Division) -> Average | None:
    """Return the average of the weights that the job wants; None if it wants none."""
    job = run.job
    average = make_average(model, job.ema, job.swa, job.num_steps)
    if isinstance(average, RunningMean):
        average.compute_statistics = _statistics_pass(run, model, division)
    return average


def _statistics_pass(run: Session, model: nn.Module, division: Division) -> BatchNormPass:
    """Return the pass over training samples that gives averaged weights the statistics of their batch-norm layers."""
    job = run.job

    def loader() -> Loader:
        length = len(job.source.dataset)
        most = (job.swa and job.swa.batch_norm_samples) or length
        all_at_once = replace(division, num_samples=length, global_batch=min(most, length), batch_sizes=())
        return make_loader(run, all_at_once, job.source.dataset, shuffle=True, begins_often=True)

    return BatchNormPass(model, _validated_loss(run), loader, run.precision, run.world, job.seed)


def _try_out(
    run: Session, strategy: Strategy, given: StrategyParts, trial: Trial, *, counts_flops: bool, draws_all: bool
) -> tuple[Draws, ObjectiveCall, int]:
    """Prepare the strategy on the trial. Return what the trial drew from, the objective, and its FLOPs where counted.

    With `draws_all` a step is taken to draw from every generator: the trial does not show what it draws from.
    """
    flops = 0
    if counts_flops and given.called_loss is not None:
        flops = count_apart(given.loss, given.model, trial.batch, run.precision.around_forward())
    counts_here = counts_flops and run.world.is_main and run.way.compile_mode is None

    def prepare() -> tuple[int, ObjectiveCall]:
        return counted(lambda: strategy.prepare(given, trial), counts_here)

    draws, (flops_here, objective) = (DRAWS_FROM_ALL, prepare()) if draws_all else what_draws(prepare, run.world.device)
    return draws, objective, flops or flops_here


def trial_of(run: Session, batch: Any, num_samples: int) -> Trial:
    """Return a batch from the loader as a trial on the run's device."""
    return Trial(to_device(batch, run.world.device, channels_last=run.way.channels_last), num_samples)


def small_trial(run: Session, loader: Loader, first: MicroBatch) -> Trial:
    """Return a batch to try the parts on: on a CPU, where a whole one takes as long as a step, an eighth of it.

    That is done only where the loss was seen to take other numbers of samples, and where nothing is compiled for one.
    """
    is_long = run.world.device.type == "cpu" and run.world.size == 1 and first.num_samples >= 2 * TRIAL_PARTS
    if is_long and run.way.compile_mode is None and takes_any_number(run):
        first = loader.beginning(first.num_samples // TRIAL_PARTS)
    return trial_of(run, first.batch, first.num_samples)


def takes_any_number(run: Session) -> bool:
    """Return whether the model was run on another number of samples than a micro-batch has, and may be."""
    weighting = run.weighting
    return run.job.source.is_keyed and not weighting.holds_division and weighting.reason != "asked for"


def try_last_batch(run: Session, loader: Loader, parts: RunParts) -> None:
    """Run the loss on the last batch of the first epoch, if it is a smaller one; a failure there loses an epoch's work.

    That is done only where what was tried before has not shown that the loss takes any number of samples.
    """
    job, batch, per_epoch = run.job, run.job.largest_batch or 1, run.job.steps_per_epoch
    if run.world.size > 1 or not job.source.is_keyed or job.turns or not per_epoch:
        return
    if (job.num_steps or per_epoch) < per_epoch:
        return
    place = loader.division.place(per_epoch - 1)
    rest = place.num_samples % loader.division.micro_batch
    is_known = rest > 1 and not run.weighting.holds_division  # a single sample was not tried at all
    if rest == 0 or place.num_samples == batch or is_known:
        return
    last = loader.last_of(place)
    try:
        with untouched(run.world.device), buffers_kept(parts.model), model_kept(parts.model):
            trial = trial_of(run, last.batch, last.num_samples)
            with run.precision.around_forward() or nullcontext():
                job.loss_function(parts.model, trial.batch)
            settlement_of(parts.model).forget()
    except Exception as error:
        if is_out_of_memory(error):
            return
        note_one_sample(error, last.num_samples)
        error.add_note(
            f"drivetrain: the last batch of each epoch is smaller, with {format_count(place.num_samples, 'sample')} "
            f"instead of {batch}; the loss has to take it, too, and was tried on it before the first step. To leave it "
            f"out: Job(data=DataLoader(dataset, batch_size={batch}, shuffle=True, drop_last=True))"
        )
        raise


def resume(run: Session, parts: RunParts, checkpoint: Checkpoint | None) -> int:
    """Load a checkpoint, if there is one. Return how many steps were done before."""
    if checkpoint is None:
        return 0
    fork = read_fork(run.path)
    is_forked = fork is not None and fork.step == checkpoint.step
    source = as_fork(checkpoint) if is_forked else checkpoint
    with start_marks.restoring():
        parts.strategy.load(plainly_named(source, parts.model.state_dict()))
        run.load_hooks(checkpoint)
    parts.watch.check()
    if run.extensions and isinstance(parts.average, RunningMean):
        parts.average.begin_anew_after(checkpoint.step)
    return checkpoint.step


def make_stepper(
    run: Session,
    parts: RunParts,
    *,
    world: World | None = None,
    loader: Loader | None = None,
    clock: PhaseClock | None = None,
) -> Stepper:
    """Make what runs a step: captured where that is planned and possible.

    Args:
        run: The run.
        parts: Its parts.
        world: The ranks that take part, if not the run's.
        loader: The loader, which a captured step takes resident samples from, and which counts ahead for loss parts.
        clock: Measures the phases of a step.
    """
    seed, world, clock = run.job.seed, world or run.world, clock or NoClock()
    sizes = None if loader is None else _compiled_sizes(run, loader)
    if isinstance(parts.strategy, DdpStrategy) and not parts.why_not_captured:
        # It finds no resident samples by itself: they are gathered beforehand.
        joint = JointCapturedStepper(parts.strategy, parts.objective, world, seed, draws=parts.draws, clock=clock)
        joint.compiled_sizes = sizes
        return joint
    if isinstance(parts.strategy, (SingleStrategy, TurnsStrategy)) and not parts.why_not_captured:
        captured = CapturedStepper(parts.strategy, parts.objective, world, seed, draws=parts.draws, clock=clock)
        if loader is not None and isinstance(loader.feed, ResidentFeed):
            loader.feed.gathers = False  # the replay does it
            captured.take_rows(channels_last=run.way.channels_last)
        captured.compiled_sizes = sizes
        return captured
    check = run.device_check(parts.model)
    stepper = Stepper(
        parts.strategy,
        parts.objective,
        world,
        seed,
        draws=parts.draws,
        update_key=partial(_update_key, parts.optimizer, seed, world.rank if run.holds_parts else 0),
        before_micro_step=check,
        clock=clock,
    )
    if loader is not None and parts.given.loss_parts.can_count_ahead:
        loader.count_ahead = parts.given.loss_parts.count_ahead
    stepper.compiled_sizes = sizes
    return stepper


_UPDATE = 0x0B7  # apart from the keys of what models draw


def _update_key(optimizer: Optimizer, seed: int, part: int) -> int | None:
    """Return the key of what an optimizer draws for a part of the weights; None if it draws nothing."""
    return key_of(seed, part, _UPDATE) if may_draw(optimizer) else None


def _compiled_sizes(run: Session, loader: Loader) -> Container[int] | None:
    """Return the sizes of micro-batches to compile steps for; None: whatever comes.

    For the smaller last step of an epoch, the compiler would start anew and take as long as before the first step: it
    runs eagerly, unless a job has very many epochs. By the job alone, see `_pays`.
    """
    job, division = run.job, loader.division
    varies = division.batch_sizes or not loader.source.is_keyed or bool(job.turns)
    # On a GPU, where it would be left out of capturing as well, it has not been measured.
    if run.way.compile_mode is None or run.world.device.type != "cpu" or varies or varying_dims_of(job.loss_function):
        return None
    last, sizes = division.steps_per_epoch - 1, _UsualSizes(loader)
    if (job.num_steps or 0) >= ENOUGH_TO_COMPILE * (last + 1):
        return None
    if not all(size in sizes for size in _sizes_of(loader, last)):
        samples = format_count(division.place(last).num_samples, "sample")
        words = f"the last step of each epoch has {samples}: it runs eagerly, as compiling would not pay off"
        loader.notes.append(words)
    return sizes


class _UsualSizes:
    """The sizes of the micro-batches of all steps of an epoch but its last. A shortage of memory may halve them."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._division, self._sizes = loader, loader.division, _sizes_of(loader, 0)

    def __contains__(self, size: object) -> bool:
        if self._loader.division is not self._division:
            self._division, self._sizes = self._loader.division, _sizes_of(self._loader, 0)
        return size in self._sizes


def _sizes_of(loader: Loader, step: int) -> set[int]:
    return {part.num_samples for part in loader.division.micro_steps(loader.division.place(step), loader.rank)}
