"""Finds out before the first step how a job's scalar loss is to be weighted, and looks again while that is open.

Rank 0 measures (`loss_probe`) and all ranks follow. The samples are taken by their place in the global order, so the
answer does not depend on the number of ranks. A run records the answer in its checkpoints and never asks twice.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.checkpoint import Checkpoint
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import generators_kept, untouched
from drivetrain.core.optimizers import chosen_parameters, only_training
from drivetrain.core.world import World
from drivetrain.data.batch import IGNORE_INDEX, MicroBatch, candidates, leaves
from drivetrain.data.division import Place, SampleStream
from drivetrain.data.keyed_items import Collated, KeyedItems, draws_anything, gather, gathers
from drivetrain.data.loader import Loader
from drivetrain.job import Job
from drivetrain.loop import CapturedStepper, Stepper
from drivetrain.monitor.recorder import NoRunRecorder, RunRecorder
from drivetrain.plan.loss_weighting import Finding, Weighting, weighting_of
from drivetrain.run.loss_probe import Parts, ProbedLoss, label_means, part_bounds, probe_loss, probe_one_sample
from drivetrain.run.model_factory import couples_samples
from drivetrain.run.session import Session
from drivetrain.strategies.single import part_of

FEWEST_SAMPLES, MOST_SAMPLES = 10, 16
FEWEST_CUT = 4  # samples of a batch that can only be cut, not made anew
MOST_LOOKS = 4  # at later batches
MOST_LOOKED_AT, LOOK_SECONDS = 64, 0.3  # samples, for some that differ in what they count
FETCHED_AT_ONCE = 8  # of these, after the first
SAMPLES_AT_ONCE, LOOK_AT_ALL_SECONDS = 4096, 1.0  # of data that is in memory
MOST_WEIGHTS_ON_CPU = 100_000_000  # of a sharded model, which rank 0 has whole in host memory
_PROBE_EPOCH = 2**48  # keys what items draw at random while they are looked at: an epoch that no run reaches
BATCH_NORM = "batch normalization couples the samples of a batch"
DRAWN = "the collate function draws random numbers for each batch that it makes"
BEFORE = "the run was begun by a version that weighted every scalar loss by samples"


def settle_weighting(run: Session, model: nn.Module, checkpoint: Checkpoint | None) -> None:
    """Set `run.weighting`: recorded, asked for, or measured where samples can be had by number. All ranks call it.

    Each of several losses is settled by itself; for the whole run only how its steps may be divided is kept.
    """
    if not run.job.turns:
        _settle(run, model, None if checkpoint is None else recorded_weighting(checkpoint))
        return
    recorded = {} if checkpoint is None else checkpoint.meta["turn_losses"]
    known = {name: Weighting.model_validate(found) for name, found in recorded.items()}
    _settle_turns(run, model, lambda own, name: _settle(own, model, known.get(name)))


def settle_own_loop(run: Session, checkpoint: Checkpoint | None) -> None:
    """Set `run.weighting` where the user's loop computes the loss: as it was or is asked for, else by samples."""
    asked = run.config.batch.loss_weighting
    if asked == "tokens":
        raise DrivetrainError(
            "--loss-weighting tokens: what the loop's loss is a mean over cannot be counted",
            remedy="call run.backward(dt.LossSum(sum, count)) in the loop",
        )
    found = Weighting(reason="not measured") if asked == "auto" else Weighting(by=asked, reason="asked for")
    if checkpoint is not None:
        found = recorded_weighting(checkpoint)
        _refuse_another(run, found)
    for each in (run, *(run.of_turn(turn) for turn in run.job.turns)):
        each.weighting = found


def _refuse_another(run: Session, recorded: Weighting) -> None:
    asked = run.config.batch.loss_weighting
    if asked not in ("auto", recorded.by):
        raise DrivetrainError(
            f"--loss-weighting {asked} would change what the run learns: it was begun {recorded}",
            remedy="leave the flag out to go on with that run, or use another --name for this one",
        )


def _settle(run: Session, model: nn.Module, recorded: Weighting | None) -> None:
    asked = run.config.batch.loss_weighting
    if recorded is not None:
        run.weighting = recorded
        _refuse_another(run, recorded)
        return
    couples = BATCH_NORM if couples_samples(model) else ""
    if asked in ("samples", "sum"):
        run.weighting = Weighting(by=asked, holds_division=couples, reason="asked for")
    elif run.job.source.is_keyed and run.job.largest_batch != 1:
        numbers = _first_samples(run)
        run.weighting = _measured_by_rank_0(run, model, lambda fewest: _parts_by_number(run, numbers, fewest))
        _refuse_unfound(run)
    else:
        notes = run.world.agree(_notes_of_one_sample(run, model) if run.world.is_main else ())
        run.weighting = Weighting(holds_division=couples, reason="not measured yet", notes=tuple(notes))
        run.weighs_first_batch = run.job.largest_batch != 1


def _settle_turns(run: Session, model: nn.Module, settle: Callable[[Session, str], None]) -> None:
    """Settle the weighting of each of several losses, by the gradients of the parameters that it trains."""
    chosen = chosen_parameters(model, run.job.optims)
    trained = [parameter for parameters in chosen.values() for parameter in parameters]
    found, weighs_first_batch = list[Weighting](), False
    for turn in run.job.turns:
        own = run.of_turn(turn)
        with only_training(trained, [parameter for name in turn.optimizers for parameter in chosen[name]]):
            settle(own, turn.name)
        own.weighting = own.weighting.closed()
        weighs_first_batch |= own.weighs_first_batch
        found.append(own.weighting)
    run.weighs_first_batch = weighs_first_batch
    held = next((weighting.holds_division for weighting in found if weighting.holds_division), "")
    run.weighting = Weighting(holds_division=held, reason="each loss by itself")


def recorded_weighting(checkpoint: Checkpoint) -> Weighting:
    """Return how a run weighted its losses when the checkpoint was written."""
    recorded = checkpoint.meta.get("loss")
    return Weighting.model_validate(recorded) if recorded else Weighting(reason=BEFORE)


def settle_by_batch(run: Session, model: nn.Module, batch: Any, num_samples: int, *, draws: bool = False) -> None:
    """Set `run.weighting` from the first batch of data that has no numbers. All ranks call it.

    Args:
        run: The run.
        model: Its model.
        batch: The first batch.
        num_samples: How many samples it has.
        draws: Whether the collate function drew random numbers for it.
    """
    if run.weighs_first_batch and run.job.turns:

        def settle(own: Session, name: str) -> None:
            own.weighs_first_batch = True
            settle_by_batch(own, model, batch, num_samples, draws=draws)

        _settle_turns(run, model, settle)
    elif run.weighs_first_batch:
        run.weighs_first_batch = False
        run.weighting = _measured_by_rank_0(run, model, lambda _: _cut(batch, num_samples, draws=draws))
        _refuse_unfound(run)


def _refuse_unfound(run: Session) -> None:
    if run.config.batch.loss_weighting == "tokens" and run.weighting.by != "tokens":
        raise DrivetrainError(
            f"--loss-weighting tokens: the loss is not a mean over a count of the batch ({run.weighting.reason})",
            remedy="return dt.LossSum(sum, count) from the loss function, or leave the flag out",
        )


def _measured_by_rank_0(run: Session, model: nn.Module, parts: Callable[[int], Parts]) -> Weighting:
    """Measure on rank 0 and agree."""
    found = _measured(run, model, parts) if run.world.is_main else None
    return Weighting.model_validate(run.world.agree(None if found is None else found.model_dump(mode="json")))


def _measured(run: Session, model: nn.Module, parts: Callable[[int], Parts]) -> Weighting:
    couples = BATCH_NORM if couples_samples(model) else ""
    notes: tuple[str, ...] = ()
    device = next((parameter.device for parameter in model.parameters()), run.world.device)
    why_not = _why_not_here(run, model, device)
    if not why_not:
        try:
            with untouched(run.world.device):
                loss = _UncountedLoss(run.job)
                made, probed = _probed(run, loss, model, parts, device)
            couples = couples or probed.carried.couples or (DRAWN if made.draws else "")
            notes = _notes(run, probed)
            if probed.returns_sum:
                what = "named parts with a count each" if loss.has_parts else "a LossSum"
                return Weighting(holds_division=couples, reason=f"the loss function returns {what}", notes=notes)
            if not probed.why_unknown and loss.has_parts and probed.finding.kind != "samples":
                found = weighting_of(probed.finding, probed.counts, [1.0] * len(probed.counts), 1)
                words = f"named parts without a count are divided by samples, and their sum is not: {found.reason}"
                return Weighting(holds_division=couples or words, reason=words, notes=notes)
            if not probed.why_unknown:
                totals = [count.number(made.whole) for count in probed.counts]
                found = weighting_of(probed.finding, probed.counts, totals, sum(made.sizes), couples)
                return found.model_copy(update={"notes": notes})
            why_not = probed.why_unknown
        except torch.OutOfMemoryError:
            why_not = f"{FEWEST_SAMPLES} samples in fp32 do not fit into memory"
        except DrivetrainError as error:
            why_not = error.message.partition("\n")[0]
        except Exception as error:  # noqa: BLE001  (if the job is at fault, its first step shows where)
            why_not = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    found = weighting_of(Finding(kind="unknown"), (), (), 0, couples)
    words = f"{found.reason}: {why_not}"
    return found.model_copy(update={"reason": words, "holds_division": couples or words, "notes": notes})


def _probed(
    run: Session, loss: "_UncountedLoss", model: nn.Module, parts: Callable[[int], Parts], device: torch.device
) -> tuple[Parts, ProbedLoss]:
    """Probe the loss; with no more samples than a step has, where it is made for that many and fails with more."""
    most = run.job.largest_batch or 0
    try:
        made = parts(FEWEST_SAMPLES)
        return made, probe_loss(loss, model, made, device)
    except Exception as error:
        is_other = isinstance(error, (DrivetrainError, torch.OutOfMemoryError))
        if is_other or not FEWEST_CUT <= most < FEWEST_SAMPLES:
            raise
    made = parts(most)
    return made, probe_loss(loss, model, made, device)


def _notes_of_one_sample(run: Session, model: nn.Module) -> tuple[str, ...]:
    """Return what calls of the loss leave behind, where steps have one sample each."""
    device = next((parameter.device for parameter in model.parameters()), run.world.device)
    if not run.job.source.is_keyed or run.job.largest_batch != 1 or _why_not_here(run, model, device):
        return ()
    try:
        with untouched(run.world.device), generators_kept():
            item = KeyedItems(run.job.source.dataset, run.job.seed).keyed(_PROBE_EPOCH, _first_samples(run)[0])
            batch = Collated(run.job.collate)([item])
            return _notes(run, probe_one_sample(_UncountedLoss(run.job), model, batch, device))
    except Exception:  # noqa: BLE001  (if the job is at fault, its first step shows where)
        return ()


def _notes(run: Session, probed: ProbedLoss) -> tuple[str, ...]:
    """Return what else the probe has shown: state that no checkpoint holds, parameters that nothing trains."""
    found = [probed.carried.note] if probed.carried.note else []
    if probed.foreign:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in probed.foreign[:3])
        found.append(
            f"it uses parameters that the model does not have (of shape {shapes}): nothing trains them, and no "
            "checkpoint holds them. Make them part of the model (layers of a list with nn.ModuleList); or freeze them "
            "with requires_grad_(False), if they are not to be trained"
        )
    return tuple(found)


def _why_not_here(run: Session, model: nn.Module, device: torch.device) -> str:
    if device.type == "meta":
        return "rank 0 does not hold the whole model"
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    if device.type == "cpu" and run.world.device.type == "cuda" and num_weights > MOST_WEIGHTS_ON_CPU:
        return "the model is sharded, and too large to be tried out whole"
    return ""


class _UncountedLoss:
    """The job's loss as the probe judges it: for named parts, the weighted sum of those whose items are not counted."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.has_parts = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        result = self._job.loss_function(model, batch)
        if not isinstance(result, Mapping):
            return result
        self.has_parts = True
        counts = () if self._job.count is None else self._job.count(batch)
        weights = self._job.loss_weights or {}
        total: Tensor | None = None
        for name, part in result.items():
            if isinstance(part, Tensor) and name not in counts:
                weight = weights.get(name, 1.0)
                # A weight that begins at 0 would hide the part.
                term = part * ((weight(0) if callable(weight) else weight) or 1.0)
                total = term if total is None else total + term
        return result if total is None else total


# Samples


def _first_samples(run: Session) -> list[int]:
    """Return the first samples of the global order on any number of ranks; of the data if it has a sampler."""
    job = run.job
    if not job.source.is_keyed:
        return list(range(min(MOST_LOOKED_AT, len(job.source.dataset))))
    order = job.source.order(job.largest_batch or 1, job.seed, shuffle=job.shuffle)
    assert isinstance(order, SampleStream)
    found: list[int] = order.samples(0, 0, min(MOST_LOOKED_AT, order.num_samples)).tolist()
    return found


def _parts_by_number(run: Session, numbers: Sequence[int], fewest: int) -> Parts:
    """Make a batch of at least `fewest` samples, and its parts, with the job's own collate function.

    Samples are chosen that count differently.
    """
    job = run.job
    fetch, collate = _fetching(job)
    wanted = min(MOST_SAMPLES, max(fewest, (job.largest_batch or 1) // 8))
    with generators_kept():
        items: list[Any] = []
        began = time.perf_counter()
        for first, last in pairwise([0, *range(wanted, len(numbers), FETCHED_AT_ONCE), len(numbers)]):
            items += fetch([*numbers[first:last]])
            if time.perf_counter() - began > LOOK_SECONDS:
                break
        while len(items) < FEWEST_SAMPLES:
            items += items
        alone = [collate([item]) for item in items]
        chosen = _chosen(items, alone, min(wanted, len(items)))
        draws, whole = draws_anything(lambda: collate(chosen))
        if draws:  # parts that are made anew would have other draws
            with suppress(DrivetrainError):
                return _cut(whole, len(chosen), draws=True)
        bounds = part_bounds(len(chosen))
        return Parts(
            whole,
            tuple(collate(chosen[first:last]) for first, last in pairwise(bounds)),
            tuple(last - first for first, last in pairwise(bounds)),
            lambda: collate(chosen[::-1]),
            draws,
            lambda count: [it for it in alone if count.is_in(it) and count.number(it) == 0][:2],
        )


def _fetching(job: Job) -> tuple[Callable[[list[int]], list[Any]], Callable[[list[Any]], Any]]:
    """Return what fetches samples by their numbers, and what makes a batch of them.

    Where batches are gathered from tensors, a number stands for its sample until then: to fetch each one takes longer
    than all the rest.
    """
    dataset = job.source.dataset
    if gathers(dataset, job.collate) and all(leaf.device.type == "cpu" for leaf in leaves(dataset.tensors)):
        return list, lambda numbers: gather(dataset, torch.tensor(numbers))
    source = KeyedItems(dataset, job.seed)
    return lambda numbers: source.__getitems__([(_PROBE_EPOCH, it) for it in numbers]), Collated(job.collate)


def _chosen(items: list[Any], alone: list[Any], wanted: int) -> list[Any]:
    """Choose items that differ in what they count, those with the least first, so that counts can be told apart."""
    offered = candidates(alone[0])
    common = {path for path, count in {count.path: count for count in offered}.items() if all(map(count.is_in, alone))}
    counts = [count for count in offered if count.path in common]
    columns = {count: count.numbers(alone) for count in counts}
    labels = [
        columns[count]
        for count in counts
        if count.kind == "not nan" or (count.kind == "unequal" and count.ignored in (IGNORE_INDEX, 0))
    ]
    labels = [column for column in labels if any(column)]
    # The loss of samples that have no label at all may be 0/0: they come last, and no part has only these.
    numbers = [number for number in range(len(items)) if all(column[number] for column in labels)]
    if not numbers:
        numbers, labels = list(range(len(items))), []
    while len(numbers) < FEWEST_SAMPLES:
        numbers += numbers
    varying = [column for column in columns.values() if min(column) < max(column)]
    if not varying:
        return [items[number] for number in numbers[:wanted]]
    empty = dict.fromkeys(column.index(0) for column in labels if 0 in column)
    by = max(varying, key=lambda column: (max(column) - min(column)) / max(1.0, max(column)))
    numbers.sort(key=by.__getitem__)
    half = min(wanted, len(numbers)) // 2
    chosen = [*numbers[: min(wanted, len(numbers)) - half], *numbers[-half:]]
    # Parts differ in what they count, and so do samples within a part: then padding is distinguished from what counts.
    chosen[0], chosen[half - 1] = chosen[half - 1], chosen[0]
    # Without them a mean over labeled samples would look like a mean over all.
    places = list(range(part_bounds(len(chosen))[-2] + 1, len(chosen)))
    for place, number in zip(reversed(places), empty, strict=False):
        chosen[place] = number
    _tell_apart(chosen, places[: max(0, len(places) - len(empty))], varying)
    return [items[number] for number in chosen]


def _tell_apart(chosen: list[int], places: Sequence[int], columns: Sequence[Sequence[float]]) -> None:
    """Exchange samples where a count by chance has the same mean in each part: it would look like that of samples."""
    bounds, free = part_bounds(len(chosen)), list(places)
    for column in columns:
        counts = [[column[number] for number in chosen[first:last]] for first, last in pairwise(bounds)]
        if free and len({sum(count) / len(count) for count in counts}) == 1:
            place = free.pop()
            before = column[chosen[place]]
            chosen[place] = max(range(len(column)), key=lambda number: abs(column[number] - before))


def _cut(batch: Any, num_samples: int, *, draws: bool = False) -> Parts:
    """Cut a batch that was handed over whole, by its rows."""
    if num_samples < FEWEST_CUT:
        raise DrivetrainError(f"the first batch has {num_samples} samples, too few to be cut into parts")
    count = min(num_samples, MOST_SAMPLES)
    whole, bounds = part_of(batch, num_samples, 0, count), part_bounds(count)
    pairs = list(pairwise(bounds))
    parts = tuple(part_of(whole, count, first, last) for first, last in pairs)
    return Parts(whole, parts, tuple(last - first for first, last in pairs), draws=draws)


# While the run goes on


class LossWatch:
    """Looks at micro-batches on the host: whether they tell apart what is still open, and whether they count nothing.

    A micro-batch that counts nothing runs as another one at weight 0: its own loss is 0/0, and so may its gradients be.
    """

    def __init__(
        self, run: Session, loader: Loader, model: nn.Module, stepper: Stepper, tell: Callable[[], None]
    ) -> None:
        self._run, self._loader, self._model, self._stepper, self._tell = run, loader, model, stepper, tell
        self._host = _host_world(run.world)
        self._place: Place | None = None
        self._telling: tuple[int, list[int], Any, int] | None = None  # step, sample numbers, batch, its samples
        self._filler: MicroBatch | None = None
        self._is_over, self._num_looks = False, 0
        loader.watch = self.look

    def look(self, place: Place, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Look at one rank's micro-batches of a step, before they are copied to the device."""
        self._place, weighting = place, self._run.weighting
        if weighting.others and self._telling is None and not self._is_over:
            for number, micro in enumerate(micro_batches):
                if micro.weight and not weighting.is_unambiguous(micro.batch, micro.num_samples):
                    self._telling = place.step, self._numbers(place, number), micro.batch, micro.num_samples
                    break
        if weighting.count is None:
            return micro_batches
        empty = [weighting.counts_nothing(micro.batch) for micro in micro_batches]
        if not all(empty):
            self._filler = micro_batches[empty.index(False)]
        if self._filler is None or not any(empty):
            return micro_batches
        filler = self._filler
        return [
            micro._replace(batch=filler.batch, num_samples=filler.num_samples, weight=0) if is_empty else micro
            for micro, is_empty in zip(micro_batches, empty, strict=True)
        ]

    def before_step(self, step: int) -> None:
        """Decide before the first step whose batches tell the open explanations apart. Ranks call it together."""
        if self._is_over or not self._run.weighting.others:
            return
        found = self._telling if self._telling is not None and self._telling[0] < step else None
        if self._host.any(found is not None):
            self._decide(found)
        elif self._place is not None and self._place.epoch > 0:
            self._is_over = True  # all samples were seen once

    def _decide(self, found: tuple[int, list[int], Any, int] | None) -> None:
        run, before = self._run, self._run.weighting
        if not run.is_whole:
            words = f"{before.reason}; batches that would tell more cannot be tried on a sharded model"
            after = before.closed().model_copy(
                update={"reason": words, "holds_division": before.holds_division or words}
            )
        elif run.job.source.is_keyed:
            told = self._host.gather([] if found is None else found[1])
            numbers = [number for part in told for number in part]
            after = _measured_by_rank_0(run, self._model, lambda fewest: _parts_by_number(run, numbers, fewest))
        else:
            draws = before.holds_division == DRAWN
            own = None if found is None else _measured(run, self._model, lambda _: _cut(*found[2:], draws=draws))
            told = self._host.gather(None if own is None else own.model_dump(mode="json"))
            after = Weighting.model_validate(next(each for each in told if each is not None))
        self._num_looks += 1
        is_same = (after.by, after.count, after.holds_division) == (before.by, before.count, before.holds_division)
        run.weighting, self._telling = after.without(before, closed=self._num_looks == MOST_LOOKS), None
        if not is_same:
            self._stepper.start_over()
            self._tell()

    def _numbers(self, place: Place, number: int) -> list[int]:
        """Return the samples of a micro-batch, and some of its step's others, where samples have numbers."""
        if not self._run.job.source.is_keyed:
            return []
        division, rank = self._loader.division, self._loader.rank
        part, samples = division.micro_steps(place, rank)[number], self._loader.samples_of(place)
        own = samples[part.start - place.start : part.stop - place.start]
        return [*own[:MOST_SAMPLES], *samples[:MOST_SAMPLES]]


def _host_world(world: World) -> World:
    """Return the same ranks, over a group whose collectives do not wait for the device."""
    if world.group is None or dist.get_backend(world.group) == "gloo":
        return world
    return World(world.rank, world.size, world.local_rank, group=dist.new_group(backend="gloo"))


def watched(
    run: Session, loader: Loader, model: nn.Module, stepper: Stepper, recorder: RunRecorder | NoRunRecorder
) -> Callable[[int], None] | None:
    """Return the function called before each step: the loss watch, where one is needed, and the recorder's."""
    weighting, others = run.weighting, recorder.before_step
    if not (weighting.holds_division or weighting.reason == "asked for" or isinstance(stepper, CapturedStepper)):
        stepper.look_at_loss = _ClassWeightWatch(run, recorder).look
    if loader.resident is not None or (not weighting.others and weighting.count is None):
        return others
    watch = LossWatch(run, loader, model, stepper, lambda: tell_weighting(run, recorder))

    def before_step(step: int) -> None:
        watch.before_step(step)
        if others is not None:
            others(step)

    return before_step


class _ClassWeightWatch:
    """Looks in each epoch whether the loss still has the class weights that micro-batches are weighted by."""

    def __init__(self, run: Session, recorder: RunRecorder | NoRunRecorder) -> None:
        self._run, self._recorder = run, recorder
        self._first: list[tuple[float, ...]] | None = None
        self._is_told = not run.world.is_main

    def look(self, epoch: int, loss: Tensor) -> None:
        if self._is_told:
            return
        now = [each.weights for each in label_means([loss]).classes]
        count, self._first = self._run.weighting.count, self._first if self._first is not None else now
        if self._run.weighting.holds_division or not now:
            return
        known = [count.weights] if count is not None and count.weights else self._first
        if not any(np.allclose(weights, it, rtol=0.02) for weights in now for it in known if len(it) == len(weights)):
            self._is_told = True
            self._recorder.say(
                f"  loss       since epoch {epoch + 1} its classes have other weights than at first: micro-batches, "
                f"ranks and validation are still weighted {self._run.weighting}. dt.LossSum(sum, count) with the sum "
                "of the weights of the labels as the count is exact in every epoch"
            )


def look_at_all(run: Session, loader: Loader, model: nn.Module) -> None:
    """Look for samples that tell open explanations apart in data that is in memory, and decide by them."""
    fetch = loader.from_memory
    if not run.weighting.others or fetch is None:
        return
    telling: list[int] | None = []
    if run.world.is_main:
        telling = _telling_samples(run.weighting, fetch, len(loader.source.dataset))
    telling = run.world.agree(telling)
    if telling is None:
        return  # there was no time to look at all of them: they are watched while they are used
    if telling:
        numbers = [*telling, *_first_samples(run)]
        run.weighting = _measured_by_rank_0(run, model, lambda fewest: _parts_by_number(run, numbers, fewest))
    run.weighting = run.weighting.closed()


def _telling_samples(weighting: Weighting, fetch: Callable[[Tensor], Any], num_samples: int) -> list[int] | None:
    began, found = time.perf_counter(), list[int]()
    for start in range(0, num_samples, SAMPLES_AT_ONCE):
        numbers = torch.arange(start, min(start + SAMPLES_AT_ONCE, num_samples))
        found += (weighting.ambiguous_samples(fetch(numbers)) + start).tolist()
        if len(found) >= MOST_SAMPLES:
            break
        if time.perf_counter() - began > LOOK_AT_ALL_SECONDS:
            return None
    return found[:MOST_SAMPLES]


def tell_weighting(run: Session, recorder: RunRecorder | NoRunRecorder) -> None:
    """Report a loss that is not a plain mean over samples, and what that means for the run."""
    weighting, job, lines = run.weighting, run.job, list[str]()
    weightings = {f"{turn.name} is ": run.of_turn(turn).weighting for turn in job.turns} or {"": weighting}
    for name, own in weightings.items():
        if own.by != "samples" and own.reason != "asked for":
            lines.append(
                f"{name}measured to be {own.reason}: "
                + ("added up" if own.by == "sum" else "weighted by that count")
                + " over micro-batches and ranks (--loss-weighting samples takes it for a mean over samples)"
            )
    if weighting.reason == BEFORE:
        lines.append(f"weighted by samples: {BEFORE}")
    if weighting.holds_division and job.largest_batch != 1:
        size = run.way.micro_batch
        most = max(1, -(-(job.largest_batch or 0) // size))
        remedy = "dt.LossSum(sum, count), or Job.count for named parts, makes a loss independent of it"
        if weighting.holds_division.startswith("batch norm"):  # runs before have another spelling
            remedy = "group or layer normalization does not depend on it"
        elif weighting.holds_division.startswith("each forward pass"):
            remedy = "a hook, dt.every(1, …), changes it once per step"
        elif weighting.holds_division == DRAWN:
            remedy = "what the data set draws for an item does not depend on it"
        lines.append(
            f"{weighting.holds_division}: what is learned depends on the micro-batch, which stays at {size}; more "
            f"than {most} device{'s' if most > 1 else ''} would have to make it smaller ({remedy})"
        )
        if run.world.size > 1 and weighting.holds_division.startswith("each forward pass"):
            lines.append(
                "each process changes its own buffers, and all go on with those of rank 0: what the samples of other "
                "processes changed is lost (reduce it over ranks in forward, or change it in a hook)"
            )
    notes = list(dict.fromkeys(note for own in weightings.values() for note in own.notes))
    lines += notes
    if lines:
        recorder.event("loss weighting", **{**weighting.model_dump(mode="json"), "notes": notes})
    for line in lines:
        recorder.say(f"  loss       {line}")
