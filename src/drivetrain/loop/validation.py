"""Validation on all ranks together, and batch-norm statistics anew for weights that no step has trained."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from drivetrain.core.aims import Aim, EarlyStopping
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import StepContext, Verdict, settlement_of
from drivetrain.core.isolation import (
    attributes_kept,
    buffers_kept,
    evaluating,
    frozen_to_copy,
    is_out_of_memory,
    model_kept,
    put_back,
    untouched,
)
from drivetrain.core.log import notice
from drivetrain.core.metrics import (
    Counted,
    Logged,
    LoggedValues,
    LossSum,
    MetricObject,
    Tally,
    collecting,
    flattened,
    one_value,
    over_all_ranks,
)
from drivetrain.core.precision import Precision, widened
from drivetrain.core.state import BesideLoss, is_distributed
from drivetrain.core.value import format_metric
from drivetrain.core.world import World
from drivetrain.data.batch import described, map_tensors, note_one_sample
from drivetrain.data.division import key_of
from drivetrain.data.keyed_items import seed_all
from drivetrain.data.loader import Loader, MicroBatch
from drivetrain.job import Job
from drivetrain.loop.schedule import Plateau
from drivetrain.strategies.base import LossFunction
from drivetrain.strategies.loss_parts import LossParts
from drivetrain.strategies.optimizer_state import Average, batch_norms, statistics_of
from drivetrain.strategies.single import part_of

# ----------------------------------------------------------------------------------------------------------------------
# Validation: the loss and the metrics over held-out samples, each counted once, on all ranks together.
#
# There may be several sets, by name. Each is divided like a single large step: every rank takes a slice, without
# padding or duplicates. It is a hook: afterwards all ranks know the same numbers, and so agree on which checkpoint is
# best and when to stop.

_VALIDATION = 0x7A11D  # the key of a model's random draws in validation: the same every time
_PART = "loss_"  # before the name of a part of the loss


def _to_try(loader: Loader) -> Iterator[tuple[str, MicroBatch]]:
    """Yield the first batch, and the last one if it has a single sample, which much code is not written for."""
    first = loader.first()
    yield "first", first
    division = loader.division
    if division.world_size == 1 and loader.source.is_keyed and first.num_samples > 1:
        place = division.place(division.steps_per_epoch - 1)
        if place.num_samples % division.micro_batch == 1:
            yield "last", loader.last_of(place)


class Validator:
    """Runs a model over the validation sets. `measure` is collective."""

    def __init__(
        self,
        job: Job,
        loaders: Mapping[str, Loader],  # by the name of the set
        precision: Precision,
        world: World,
        loss: LossFunction | None = None,
        loss_parts: LossParts | None = None,
        prefix: str = "valid_",  # of the names of metrics
        on_device: Callable[[Any], Any] = lambda batch: batch,  # moves a batch that was fetched by itself
        compiled_loss: LossFunction | None = None,  # for batches of the full size: others would be compiled anew
        may_halve: bool = True,  # whether batches that run out of memory are halved: not where that changes the loss
        eager: bool = False,  # whether compiled blocks of the model run as they are written
        progress: Callable[[str, float], None] | None = None,  # called with the set's name and the part that is done
    ) -> None:
        self._progress, self._buffers = progress, _BufferWatch(world)
        self._num_samples = 0  # of the newest batch
        self._has_told = False  # of what the loss changes
        self._scalars: dict[str, Tensor] = {}  # what metrics returned for the newest batch that return one number
        self._squares: set[str] = set()  # metrics that returned as many rows as columns as a batch has samples
        self._computes_gradients = False  # whether the loss does, and so is measured with gradients on
        self._may_halve, self._eager = may_halve, eager
        self._prefix, self._on_device, self._compiled_loss = prefix, on_device, compiled_loss
        self._outputs: list[Any] = []  # of the model: always the same list, since compiled code appends to it
        self._job, self._loaders, self._precision, self._world = job, loaders, precision, world
        self._loss = loss or job.loss_function
        self._loss_parts = loss_parts or LossParts(job.loss_weights, job.count, world)
        self._functions = {name: it for name, it in job.metrics.items() if not isinstance(it, MetricObject)}
        self._calls = _MetricCalls(self._functions, precision, world, self._outputs)
        # torchmetrics objects are modules; one that was made on another device would stop in its first update.
        self._objects = {
            name: cast(Any, it).to(world.device) if isinstance(it, nn.Module) else it
            for name, it in job.metrics.items()
            if isinstance(it, MetricObject)
        }

    def measure(self, model: nn.Module, called: Callable[..., Any] | None = None) -> dict[str, float]:
        """Return loss and metrics over each whole set, the same on every rank.

        Of a set with a name they are called `valid_NAME_loss`; those of the first set are called `valid_loss`, too.
        `called` is the model, perhaps compiled.
        """
        beside = BesideLoss([*self._job.losses, self._loss], model)
        with self._buffers.kept(model):
            by_set = {
                name: self._measure_set(name, loader, model, model if called is None else called)
                for name, loader in self._loaders.items()
            }
        if beside.put_back() and not self._has_told and self._world.is_main:
            self._has_told = True
            notice(
                "validation changes what the loss function keeps beside the model, such as a teacher: training goes on "
                "with what was there before"
            )
        first = next(iter(by_set.values()))
        values = {f"{self._prefix}{name}": value for name, value in first.items()}
        for of, found in by_set.items():
            values |= {f"{self._prefix}{of}_{name}": value for name, value in found.items()} if of else {}
        return values

    def try_out(self, model: nn.Module) -> None:
        """Run one batch of each set through the model, and raise what would end a validation. Nothing is kept of it."""
        for name, loader in self._loaders.items():
            words = f"batch of the validation set{f' {name!r}' if name else ''}"
            beside = BesideLoss([*self._job.losses, self._loss], model)
            failure = self._tried(loader, model, words)
            while self._halves(loader, model, failure):
                failure = self._tried(loader, model, words)
            beside.put_back()
            raise_on_all_ranks(failure, "validation", model, self._world)

    def _tried(self, loader: Loader, model: nn.Module, words: str) -> Exception | None:
        """Run batches of a set through the model, and return what went wrong; None if nothing did."""
        tried = f"the first {words}"
        with untouched(self._world.device), buffers_kept(model), model_kept(model):
            try:
                for which, micro in _to_try(loader):
                    tried = f"the {which} {words}, {described(micro.batch)}"
                    here = micro._replace(batch=self._on_device(micro.batch))
                    self._counted(partial(iter, [here]), model, model)
                    if which == "first":
                        self._tell_of_no_means(here)
            except DrivetrainError as error:
                failure = DrivetrainError(f"{error.message}; it was tried on {tried}", remedy=error.remedy)
                failure.__cause__ = error
                return failure
            except Exception as error:  # noqa: BLE001  (raised by the caller, on all ranks)
                note_one_sample(error, self._num_samples)
                error.add_note(f"drivetrain: {tried}, was tried before the first step, in evaluation mode")
                return error
        return None

    def _tell_of_no_means(self, micro: MicroBatch) -> None:
        """Say which metrics are no mean over samples, after a trial: a mean over batches is not their value."""
        single = [name for name, value in self._scalars.items() if value.dim() and micro.num_samples > 1]
        single = [name for name in single if [it.numel() for it in self._of_parts(name, micro)[1]] == [1, 1]]
        if single and self._world.is_main:
            notice(
                f"the metric {single[0]!r} returns one entry for a batch of {micro.num_samples} samples, and entries "
                "count alike: a validation reports their mean over batches, which depends on the size of the batches. "
                "A scalar is a mean over the samples of its batch: return value.squeeze(), or an entry per sample"
            )
        self._tell_of_pairs(micro)
        scalars = {name: value for name, value in self._scalars.items() if not value.dim()}
        names = [name for name, value in scalars.items() if not self._is_mean(name, value, micro)]
        if names and self._world.is_main:
            notice(
                f"the metric {names[0]!r} is no mean over samples: a validation reports its mean over batches, which "
                "depends on their size and on the number of devices. An object with update(output, target), compute() "
                "and reset(), as in torchmetrics, sees the whole set"
            )

    def _tell_of_pairs(self, micro: MicroBatch) -> None:
        """Say which metric has an entry for each pair of samples: an output of one column, and labels without one."""
        for name in sorted(self._squares) if micro.num_samples > 1 and self._world.is_main else ():
            cut, both = self._of_parts(name, micro)
            sizes = (cut, micro.num_samples - cut)
            if len(both) == 2 and all(it.shape[:2] == (size, size) for it, size in zip(both, sizes, strict=True)):
                notice(
                    f"the metric {name!r} returns {micro.num_samples} times as many entries as a batch has samples: an "
                    "output of shape (samples, 1) and labels of shape (samples,) make one for each pair. "
                    "output.squeeze(1) has one for each sample"
                )

    def _is_mean(self, name: str, value: Tensor, micro: MicroBatch) -> bool:
        """Return False if a metric's value of a batch differs from those of its parts together."""
        cut, both = self._of_parts(name, micro)
        if len(both) < 2 or any(it.numel() != 1 for it in both):
            return True
        first, rest, count = float(both[0]), float(both[1]), micro.num_samples
        whole, together = value.item(), (cut * first + (count - cut) * rest) / count
        tolerance = max(1e-5, 16 * torch.finfo(value.dtype).eps)
        return math.isnan(whole) or math.isclose(whole, together, rel_tol=tolerance, abs_tol=1e-8)

    def _of_parts(self, name: str, micro: MicroBatch) -> tuple[int, list[Tensor]]:
        """Return the size of a batch's first part, and what a metric returns for both parts; nothing if it cannot."""
        output, count = self._output(self._outputs), micro.num_samples
        cut = max(1, count // 3)
        try:
            with collecting(), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                metric = deepcopy(self._functions[name])  # an object may count its calls
                both = [
                    [part_of(it, count, *ends) for it in (output, micro.batch)] for ends in ((0, cut), (cut, count))
                ]
                model = self._calls.of_model.get(name)
                return cut, [torch.as_tensor(metric(it if model is None else model, part)) for it, part in both]
        except Exception:  # noqa: BLE001  (a batch that cannot be cut, or a part that the metric does not take)
            return cut, []

    def _measure_set(self, set_name: str, loader: Loader, model: nn.Module, called: Any) -> dict[str, float]:
        counted: dict[str, Counted | None] = {}
        failure: Exception | None = None
        while True:
            try:
                counted = self._counted(lambda: self._followed(set_name, loader), model, called)
            except Exception as error:  # noqa: BLE001  (raised below, on all ranks)
                note_one_sample(error, self._num_samples)
                failure = error
            if not self._halves(loader, model, failure):
                break
            failure = None
        own = ("loss", *self._functions)
        told = raise_on_all_ranks(
            failure, "validation", model, self._world, [name for name in counted if name not in own]
        )
        # A rank may have no sample of some part of the loss, or of something that it logs.
        others = list(dict.fromkeys(name for names in told for name in names))
        if others:
            counted = {name: counted.get(name) for name in (*own, *others)}
        values = over_all_ranks(counted, self._world)
        parts = [name for name in others if name.startswith(_PART)]
        if parts:
            values = self._with_total(values, parts)
        for name, found in self._objects.items():
            values |= self._same_on_ranks(name, flattened(name, self._computed(name, found)))
        return values

    def _same_on_ranks(self, name: str, values: dict[str, float]) -> dict[str, float]:
        """Return what a metric object computed, or raise if it did so for this rank's samples only. Collective."""
        by_rank = self._world.gather([_or_none(value) for value in values.values()])
        for rank, found in enumerate(by_rank):
            pairs = zip(by_rank[0], found, strict=True)
            if any(a != b and (a is None or b is None or not math.isclose(a, b, rel_tol=1e-5)) for a, b in pairs):
                raise DrivetrainError(
                    f"the metric {name!r} is {by_rank[0][0]} on rank 0 and {found[0]} on rank {rank}: it has to add up "
                    "what all ranks have seen",
                    remedy="in compute(), collect it with torch.distributed.all_gather_object; torchmetrics does so",
                )
        return values

    def _followed(self, set_name: str, loader: Loader) -> Iterator[MicroBatch]:
        """Yield this rank's batches of a set, and say how much of its share was taken."""
        if self._progress is None:
            yield from micro_batches(loader)
            return
        division, taken = loader.division, 0
        share = -(-division.num_samples // division.world_size)
        self._progress(set_name, 0.0)  # the first batch may take long: workers start
        for micro in micro_batches(loader):
            yield micro
            taken += micro.num_samples
            self._progress(set_name, min(1.0, taken / share))

    def _halves(self, loader: Loader, model: nn.Module, failure: Exception | None) -> bool:
        """Halve the batches of a set on all ranks if one was out of memory; return whether they did. Collective."""
        division, is_sharded = loader.division, any(map(is_distributed, model.parameters()))
        if not self._may_halve or division.micro_batch < 2 or is_sharded:
            return False
        if not self._world.any(failure is not None and is_out_of_memory(failure)):
            return False
        loader.division = replace(division, micro_batch=division.micro_batch // 2)
        if self._world.is_main:
            notice(
                f"validation was out of memory with batches of {division.micro_batch} samples: it begins again with "
                f"{loader.division.micro_batch}; valid_batch sets their size"
            )
        return True

    def _with_total(self, values: dict[str, float], parts: Sequence[str]) -> dict[str, float]:
        """Add the parts' weighted sum as the loss. A part without items in the set is left out."""
        weights = self._loss_parts.weights_now([name.removeprefix(_PART) for name in parts])
        found = [(values[name], weight) for name, weight in zip(parts, weights, strict=True)]
        total = sum(value * weight for value, weight in found if not math.isnan(value))
        return {"loss": total} | {name: value for name, value in values.items() if name != "loss"}

    def _counted(
        self, batches: Callable[[], Iterable[MicroBatch]], model: nn.Module, called: Any
    ) -> dict[str, Counted | None]:
        """Count over batches, with gradients on where the loss computes some, such as a penalty or a derivative."""
        try:
            return self._count(batches(), model, called)
        except RuntimeError as error:
            if self._computes_gradients or not computes_gradients(error):
                raise
        self._computes_gradients = True
        return self._count(batches(), model, called)

    def _count(self, batches: Iterable[MicroBatch], model: nn.Module, called: Any) -> dict[str, Counted | None]:
        tallies = {name: Tally(name) for name in ("loss", *self._functions)}
        for found in self._objects.values():
            found.reset()
        seed_validation(self._job.seed)
        most, outputs = 0, self._outputs
        stance = torch.compiler.set_stance("force_eager") if self._eager else nullcontext()
        gradients = torch.enable_grad() if self._computes_gradients else torch.no_grad()
        with evaluating(model), gradients, recording_outputs(called, outputs), stance:
            for micro in batches:
                outputs.clear()
                self._num_samples = micro.num_samples
                most = max(most, micro.num_samples)
                compiled = self._compiled_loss if micro.num_samples == most else None
                with collecting() as logged, self._precision.around_forward() or nullcontext():
                    loss: Any = (compiled or self._loss)(called, micro.batch)
                if isinstance(loss, Logged):
                    loss, logged = loss
                if not micro.weight:
                    continue  # it only kept this rank in step with the others
                self._add_logged(tallies, logged, micro.num_samples)
                if isinstance(loss, Mapping):
                    for name, part in self._loss_parts.means(loss, micro.batch).items():
                        tallies.setdefault(f"{_PART}{name}", Tally(f"{_PART}{name}")).add(part, micro.num_samples)
                else:
                    tallies["loss"].add(loss, micro.num_samples)
                if self._job.metrics:
                    with collecting() as logged, torch.no_grad():
                        self._add_metrics(tallies, self._output(outputs), micro, model)
                    self._add_logged(tallies, logged, micro.num_samples)
        return {name: tally.read() for name, tally in tallies.items()}

    def _add_logged(self, tallies: dict[str, Tally], logged: LoggedValues, num_samples: int) -> None:
        """Add what the loss or a metric logged. A metric of the same name goes before it."""
        for name, values in logged.items():
            total, count = one_value(name, values)
            if name in self._job.metrics or name == "loss":
                continue
            value = widened(total) if isinstance(total, Tensor) else torch.tensor(total, dtype=torch.float64)
            tally = tallies.setdefault(name, Tally(name))
            tally.add(value if count is None else LossSum(value, count), num_samples)

    def _add_metrics(self, tallies: Mapping[str, Tally], output: Any, micro: MicroBatch, model: nn.Module) -> None:
        for name in self._functions:
            try:
                value = self._calls(name, output, micro.batch, model)
            except DrivetrainError:
                raise
            except Exception as error:
                raise DrivetrainError(
                    f"the metric {name!r} raised {type(error).__name__}: {error}",
                    remedy="it gets the model's output and the batch: try it on one batch by hand",
                ) from error
            tallies[name].add(value, micro.num_samples)
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1:
                self._scalars[name] = value
            if isinstance(value, Tensor) and value.shape[:2] == (micro.num_samples,) * 2:
                self._squares.add(name)
        for name, found in self._objects.items():
            try:
                found.update(output, _target(micro.batch))
            except DrivetrainError:
                raise
            except Exception as error:
                raise DrivetrainError(
                    f"the metric {name!r} ({type(found).__name__}) refused the model's output: {error}",
                    remedy="give a function (output, batch) instead, which picks and shapes what the metric needs",
                ) from error

    def _output(self, outputs: list[Any]) -> Any:
        if not outputs:
            raise DrivetrainError(
                "metrics get the model's output, and the loss function did not call the model",
                remedy="call model(...) in the loss function",
            )
        return map_tensors(Tensor.detach, outputs[-1]) if self._computes_gradients else outputs[-1]

    def _computed(self, name: str, found: Any) -> Any:
        """Compute a metric object after comparing its states between ranks.

        torchmetrics reduces over ranks in `compute`; states that differ in shape would hang or mix there.
        """
        shapes = {
            state: list(value.shape)
            for state in getattr(found, "_defaults", {})
            if isinstance(value := getattr(found, state), torch.Tensor)
        }
        by_rank = self._world.gather(shapes)
        for rank, others in enumerate(by_rank):
            if others != by_rank[0]:
                state = next(state for state in others if others[state] != by_rank[0].get(state))
                raise DrivetrainError(
                    f"the metric {name!r} has a state {state!r} of shape {by_rank[0].get(state)} on rank 0 and of "
                    f"{others[state]} on rank {rank}",
                    remedy="make it alike on every rank, for example with the number of classes given",
                )
        return found.compute()


class _MetricCalls:
    """Calls metric functions, with the model's output; one that is written as the loss is, with the model."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], precision: Precision, world: World, outputs: list[Any]
    ) -> None:
        self._functions, self._precision, self._world, self._outputs = functions, precision, world, outputs
        self.of_model: dict[str, nn.Module] = {}  # the model of those that call it

    def __call__(self, name: str, output: Any, batch: Any, model: nn.Module) -> Any:
        """Return what the metric returns for a batch."""
        function = self._functions[name]
        try:
            if name not in self.of_model:
                return function(output, batch)
        except Exception as error:
            if not _is_for_model(error, output, model):
                raise
        if self._world.size > 1:  # a rank without a sample would not call the model, whose forward may communicate
            raise DrivetrainError(
                f"the metric {name!r} calls the model, which metrics cannot do in several processes",
                remedy="write it for the model's output, which is computed already: a function of (output, batch)",
            )
        num_outputs = len(self._outputs)
        with self._precision.around_forward() or nullcontext():
            value = function(model, batch)
        del self._outputs[num_outputs:]
        self.of_model[name] = model
        return value


def _is_for_model(error: Exception, output: Any, model: nn.Module) -> bool:
    """Return whether a metric took the model's output for the model: it called it, or asked for what the model has."""
    if isinstance(error, AttributeError):
        return error.obj is output and hasattr(model, str(error.name))
    return isinstance(error, TypeError) and str(error) == f"{type(output).__name__!r} object is not callable"


class _BufferWatch:
    """Puts back what a loss or a model changes in evaluation mode, too, so that validation leaves no trace.

    That is buffers, frozen weights that follow others, and attributes of modules, such as the hidden state of the batch
    before. The first measurement copies all of these tensors, and finds which ones change; later ones copy only these.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._names: set[str] | None = None

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[None]:
        followers = set(map(id, frozen_to_copy(model)))
        watched = {
            ".".join(filter(None, (path, name))): (held, name, tensor, tensor.detach().clone())
            for path, module in model.named_modules()
            for held in (module._buffers, module._parameters)
            for name, tensor in held.items()
            if tensor is not None and tensor.layout is torch.strided  # a sparse buffer is taken for a constant
            if held is module._buffers or id(tensor) in followers
            if self._names is None or ".".join(filter(None, (path, name))) in self._names
        }
        with attributes_kept(model):
            yield
        changed = {
            path
            for path, (held, name, tensor, copy) in watched.items()
            if held.get(name) is not tensor or not _are_equal(tensor, copy)
        }
        for held, name, tensor, copy in (watched[path] for path in changed):
            put_back(tensor, copy)
            held[name] = tensor
        if self._names is None and changed and self._world.is_main:
            notice(
                f"validation changes {', '.join(sorted(changed)[:3])} of the model: training goes on with what was "
                "there before. Where the numbers of a validation should not depend on it either, change it only "
                "if model.training"
            )
        self._names = changed if self._names is None else self._names


def _are_equal(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether a tensor has the shape and the numbers of a copy. The host waits for the device here."""
    if tensor.shape != copy.shape or torch.equal(tensor, copy):
        return tensor.shape == copy.shape
    both = (tensor, copy) if tensor.is_floating_point() else ()
    return bool(both) and all(torch.equal(*map(of, both)) for of in (torch.isnan, torch.nan_to_num))


class Validation:
    """The validation hook: validates when due, keeps the best result, and asks to stop."""

    def __init__(
        self,
        validator: Validator,
        every: int | Literal["epoch"],
        best: Aim,
        early_stopping: EarlyStopping | None,
        average: Average | None,
        report: Callable[[StepContext, dict[str, float], float, str], None],
        plateaus: Mapping[str, Plateau] | None = None,  # by the name of their optimizer
    ) -> None:
        self.every = every
        self.latest: dict[str, float] = {}
        self.best_step: int | None = None
        self.best_value = math.nan
        self.stopped_because = ""
        self._validator, self._best, self._early_stopping = validator, best, early_stopping
        self._average, self._report, self._plateaus = average, report, plateaus or {}
        self._patience = _Patience(early_stopping) if early_stopping else None

    def check(self, context: StepContext) -> None:
        """Try one batch of each set before the first step: a wrong metric is found now, and not an epoch later."""
        if context.step == 0:
            self._validator.try_out(context.model)

    def __call__(self, context: StepContext) -> Verdict:
        began = time.perf_counter()
        self.latest = self.measure(context.model)
        value = self.latest.get(self._best.metric, math.nan)
        is_best = self._best.is_better(value, self.best_value)
        if is_best:
            self.best_step, self.best_value = context.step, value
        best = f"{self._best.metric.replace('_', ' ')} {format_metric(value)}" if is_best else ""
        self._report(context, self.latest, time.perf_counter() - began, best)
        _picked(self.latest, self._best.metric)  # one that is not measured is an error
        self._reduce_rates(context)
        stop = self._patience is not None and self._patience.is_over(self.latest)
        if stop and self._patience is not None:
            self.stopped_because = self._patience.words()
        return Verdict(save=stop, stop=stop, keep=is_best)

    def _reduce_rates(self, context: StepContext) -> None:
        """Have the schedule look at the result, where it is one that does; the next step has the rate that follows."""
        for name, plateau in self._plateaus.items():
            words = plateau.observe(_picked(self.latest, plateau.metric))
            if words:
                words = f"{name}: {words}" if name else words
                context.tell("learning rate", step=context.step, words=words)
                context.say(f"  schedule   {words}")

    def measure(self, model: nn.Module) -> dict[str, float]:
        """Measure as validation does, with the EMA weights where there are some, without recording the result."""
        with self._average.in_place() if self._average else nullcontext():
            return self._validator.measure(model)

    def go_on(self) -> None:
        """Forget that the run was stopped: it was asked to go on, and patience begins anew."""
        self.stopped_because = ""
        if self._patience is not None:
            self._patience.begin_anew()

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "best_step": self.best_step,
            "best_value": _or_none(self.best_value),
            "latest": {name: _or_none(value) for name, value in self.latest.items()},
            "stopped_because": self.stopped_because,
            "patience": self._patience.state_dict() if self._patience else None,
            **{_plateau_key(name): plateau.state_dict() for name, plateau in self._plateaus.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_step = state["best_step"]
        self.best_value = _or_nan(state["best_value"])
        self.latest = {name: _or_nan(value) for name, value in state["latest"].items()}
        self.stopped_because = state["stopped_because"]
        if self._patience and state["patience"]:
            self._patience.load_state_dict(state["patience"])
        for name, plateau in self._plateaus.items():
            if state.get(_plateau_key(name)):
                plateau.load_state_dict(state[_plateau_key(name)])


def _plateau_key(name: str) -> str:
    return f"plateau {name}".strip()


class _Patience:
    """Counts validations without improvement."""

    def __init__(self, wanted: EarlyStopping) -> None:
        self._wanted, self._aim = wanted, Aim(wanted.metric, wanted.mode)
        self._best, self._waited = math.nan, 0

    def is_over(self, metrics: Mapping[str, float]) -> bool:
        value = _picked(metrics, self._aim.metric)
        if self._aim.is_better(value, self._best, self._wanted.min_delta):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return self._waited >= self._wanted.patience

    def begin_anew(self) -> None:
        self._waited = 0

    def words(self) -> str:
        return (
            f"{self._wanted.metric} has not improved on {self._best:.6g} by more than {self._wanted.min_delta:g} "
            f"in {self._waited} validations"
        )

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": _or_none(self._best), "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = _or_nan(state["best"])
        self._waited = state["waited"]


def _or_none(value: float) -> float | None:
    """Return the value, or None for nan and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def computes_gradients(error: RuntimeError) -> bool:
    """Return whether an error says that a loss computes gradients, and that they are off."""
    return "does not require grad" in str(error)


def seed_validation(seed: int) -> None:
    """Seed what a model draws at random outside of training: the same every time."""
    seed_all(key_of(seed, _VALIDATION))


def micro_batches(loader: Loader) -> Iterator[MicroBatch]:
    """Yield this rank's batches of a whole data set; one of weight 0 only keeps it in step with the others."""
    for _, micro_batches in loader.batches(0, 1):
        yield from micro_batches


def raise_on_all_ranks(
    failure: Exception | None, what: str, model: nn.Module, world: World, told: Any = None
) -> list[Any]:
    """Raise on all ranks if one of them failed; else return what each of them tells. Collective.

    Args:
        failure: What went wrong on this rank; None if nothing did.
        what: What was done, such as `validation`, for the ranks that did not fail.
        model: The model that was run.
        world: The ranks.
        told: What this rank tells the others, as JSON.
    """
    if failure is not None and any(map(is_distributed, model.parameters())):
        raise failure  # the others wait inside the model's forward, and not for words: they end with this rank
    by_rank = world.gather([_in_words(failure), told])
    if failure is not None:
        raise failure
    failures = [f"rank {rank}: {words}" for rank, (words, _) in enumerate(by_rank) if words]
    if failures:
        raise DrivetrainError(f"{what} failed: {'; '.join(failures)}", remedy="that rank shows where")
    return [of_rank for _, of_rank in by_rank]


def _in_words(error: Exception | None) -> str:
    """Return what went wrong, to tell other ranks; empty if nothing did."""
    if error is None:
        return ""
    return error.message if isinstance(error, DrivetrainError) else f"{type(error).__name__}: {error}"


def _picked(metrics: Mapping[str, float], name: str) -> float:
    if name not in metrics:
        raise DrivetrainError(
            f"{name!r} is none of the metrics that were measured: {', '.join(metrics)}", remedy="name one of them"
        )
    return metrics[name]


def _target(batch: Any) -> Any:
    """Return the target of a metric object: the second of a pair, or the batch's entry called target or label."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[1]
    if isinstance(batch, Mapping):
        for name in ("target", "targets", "label", "labels"):
            if name in batch:
                return batch[name]
    raise DrivetrainError(
        "a metric object needs a target, and the batch is neither a pair nor has an entry named target or label",
        remedy="give a function (output, batch) as the metric instead",
    )


@contextmanager
def recording_outputs(called: Any, outputs: list[Any]) -> Iterator[list[Any]]:
    """Collect the model's outputs while the loss function computes them, so that metrics need no second forward."""
    if not isinstance(called, nn.Module):
        yield outputs
        return
    handle = called.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


# ----------------------------------------------------------------------------------------------------------------------
# Computes the statistics of batch-norm layers anew, over training samples, for weights that no step has trained.


class BatchNormPass:
    """Runs the model over samples as in training, and averages what its batch-norm layers see, over all ranks.

    The statistics are means over the samples' batches. Layers in evaluation mode keep theirs. Weights and
    buffers are left as they were. All ranks call it together.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        make_loader: Callable[[], Loader],
        precision: Precision,
        world: World,
        seed: int,
    ) -> None:
        self._model, self._loss, self._make_loader = model, loss, make_loader
        self._precision, self._world, self._seed = precision, world, seed
        self._loader: Loader | None = None

    @torch.no_grad()
    def __call__(self) -> Sequence[Tensor]:
        """Return the running mean and variance of each layer in turn, for the weights that are in the model now."""
        self._loader = self._loader or self._make_loader()
        model = self._model
        layers = batch_norms(model)
        is_frozen = [not layer.training for layer in layers for _ in range(2)]  # in evaluation mode during training
        live = [buffer for layer in layers for buffer in statistics_of(layer)]
        sums = [widened(torch.zeros_like(buffer)) for buffer in live]
        count = widened(torch.zeros((), device=live[0].device))
        momenta = [(layer, layer.momentum) for layer in layers]
        seed_validation(self._seed)
        try:
            for layer in layers:
                layer.momentum = 1.0  # type: ignore[assignment]  # what it keeps is then the batch's own
            with buffers_kept(model):
                for micro in micro_batches(self._loader):
                    with collecting(), self._precision.around_forward() or nullcontext():
                        self._loss(model, micro.batch)
                    if micro.weight:
                        torch._foreach_add_(sums, [widened(buffer) for buffer in live], alpha=micro.num_samples)
                        count += micro.num_samples
        finally:
            settlement_of(model).forget()
            for layer, momentum in momenta:
                layer.momentum = momentum
        together = self._world.all_reduce(torch.cat([count.reshape(1), *(total.flatten() for total in sums)]))
        parts = torch.split(together[1:] / together[0], [total.numel() for total in sums])
        return [
            buffer if frozen else part.view_as(buffer)
            for part, buffer, frozen in zip(parts, live, is_frozen, strict=True)
        ]
