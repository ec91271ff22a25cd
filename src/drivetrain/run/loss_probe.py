"""Measures what kind of loss a job has: gradients of a batch and of its three unequal parts, on the job's own model.

It is the user's model and loss in fp32, without autocast, compiler or fused attention. What the whole batch drew at
random (dropout, noise, masks) is replayed for the parts, each getting its own samples' draws: with draws of their own,
the parts would look unlike the batch for that reason alone. Weights, buffers and generators are afterwards what they
were before.
"""

import copy
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.core.hook import settlement_of
from drivetrain.core.isolation import (
    EagerDispatchMode,
    copied,
    frozen_to_copy,
    model_kept,
    own_attributes,
    put_back,
    uncounted,
)
from drivetrain.core.metrics import LossSum
from drivetrain.core.precision import Precision, as_real, numerics
from drivetrain.data.batch import ClassWeights, Count, candidates, map_tensors, to_device
from drivetrain.data.keyed_items import seed_all, what_draws
from drivetrain.job import LossFunction
from drivetrain.plan.loss_weighting import FLOORS, MOST_TOLERANCE, TOLERANCE, Finding, judge

MOST_ENTRIES = 2_000_000  # of all gradients together, that are compared
PART_SHARES = (0.2, 0.5)  # where a batch is cut: parts of 20, 30 and 50 % of its samples


class Parts(NamedTuple):
    """A batch, and the same samples as three batches of different sizes."""

    whole: Any
    parts: tuple[Any, ...]
    sizes: tuple[int, ...]
    reordered: Callable[[], Any] | None = None  # the whole batch with its samples in another order
    draws: bool = False  # whether the collate function drew random numbers for it
    of_none: Callable[[Count], Sequence[Any]] = lambda count: ()  # batches of a sample that has none of what it counts


class Carried(NamedTuple):
    """What a call of the loss leaves behind for the next one."""

    moved: tuple[str, ...] = ()  # buffers and frozen weights that a forward changes
    unsaved: tuple[str, ...] | None = None  # attributes, where the next call's value depends on more than those
    hooked: tuple[str, ...] = ()  # parameters with hooks of the user's that run after each backward

    @property
    def note(self) -> str:
        """What is to be said of something that checkpoints do not hold."""
        if self.unsaved is None:
            return ""
        names = f" ({', '.join(self.unsaved[:3])})" if self.unsaved else ""
        return (
            f"called twice with the same batch, it gives another value: it or the model keeps something between calls"
            f"{names} that checkpoints do not hold. Each micro-batch counts as a call, and a resumed run differs. Keep "
            "it in a persistent buffer of the model that a hook changes, dt.every(1, …); for a weight that depends on "
            "the step, return named parts and use Job(loss_weights=…)"
        )

    @property
    def couples(self) -> str:
        """Why the micro-batch is part of what is learned; empty if it is not."""
        if self.hooked:
            return f"a hook of {self.hooked[0]} runs after each backward (register_post_accumulate_grad_hook)"
        if not self.moved:
            return "" if self.unsaved is None else "the loss depends on how often it was called"
        names = ", ".join(self.moved[:3]) + (", …" if len(self.moved) > 3 else "")
        return f"each forward pass changes {names}"


class LabelMeans(NamedTuple):
    """What the cross-entropies near the end of a loss leave out of their means, whatever the labels of a batch are."""

    ignored: tuple[int, ...] = ()  # each `ignore_index`
    classes: tuple[ClassWeights, ...] = ()  # each that has weights which differ


class ProbedLoss(NamedTuple):
    """The finding that follows from the gradients, and the counts that it is stated in."""

    finding: Finding
    counts: tuple[Count, ...]  # those that explain the loss, the likeliest first
    why_unknown: str = ""
    returns_sum: bool = False  # the function returns a `LossSum`: there is nothing to find out
    carried: Carried = Carried()
    foreign: tuple[nn.Parameter, ...] = ()  # parameters that it uses and the model does not have


def part_bounds(num_samples: int) -> list[int]:
    """Return where a batch of at least six samples is cut into three parts that differ in size."""
    first = max(1, round(PART_SHARES[0] * num_samples))
    second = max(first + 2, round(PART_SHARES[1] * num_samples))
    return [0, first, second, num_samples]


def probe_loss(loss: LossFunction, model: nn.Module, parts: Parts, device: torch.device) -> ProbedLoss:
    """Find out how a loss weights the parts of a batch. Errors of the user's code are raised as they are."""
    hooked = tuple(name for name, weight in model.named_parameters() if weight._post_accumulate_grad_hooks)
    model, batches = _in_fp32(model, [parts.whole, *parts.parts])
    batches = [to_device(batch, device) for batch in batches]
    with _measuring(model, device):
        carried, foreign, labels = _carried(loss, model, batches[1], device)
        carried = carried._replace(hooked=hooked)
        found = _counts_in(batches, parts.sizes, labels)
        counts = [[float(candidate.of(batch)) for batch in batches[1:]] for candidate in found]
        # Where nothing is drawn nothing is replayed: that takes as long again. Draws from a generator of the user's own
        # are not seen; a loss that is not explained is looked at again, with replaying.
        for replays in (True,) if _has_drawn(device) else (False, True):
            # A loss may change its batch, and what the batch counts is read later.
            copies = [map_tensors(torch.clone, batch) for batch in batches]
            draws, gradients = what_draws(partial(_gradients, loss, model, copies, parts.sizes, replays), device)
            if gradients is None:
                return ProbedLoss(Finding(kind="samples"), (), "", returns_sum=True, carried=carried, foreign=foreign)
            vectors, cannot_replay = gradients
            products = (vectors @ vectors.T).tolist()
            finding = judge(products, parts.sizes, counts)
            if finding.kind in ("samples", "count", "sum") and not draws.torch:
                break
        if finding.kind in ("weighted", "coupled") and TOLERANCE < finding.residual < MOST_TOLERANCE:
            tolerance = _tolerance(loss, model, parts, device, vectors[0])
            finding = judge(products, parts.sizes, counts, tolerance)
        if finding.kind == "count" and _adds_others(loss, model, parts.of_none(found[finding.counts[0]]), device):
            finding = Finding(kind="divided", residual=finding.residual)
    if labels.classes and finding.kind in ("samples", "count"):
        finding = _by_class_weights(finding, found)
    if finding.kind == "unknown":
        return ProbedLoss(finding, (), "its gradient on the first samples is zero or not finite", carried=carried)
    if finding.kind in ("weighted", "coupled"):
        if cannot_replay:
            why = f"it draws random numbers that belong to no sample ({cannot_replay})"
            return ProbedLoss(Finding(kind="unknown"), (), why, carried=carried, foreign=foreign)
        if draws.python:
            why = "it draws random numbers outside of torch"
            return ProbedLoss(Finding(kind="unknown"), (), why, carried=carried, foreign=foreign)
    counts_found = tuple(found[number] for number in finding.counts)
    return ProbedLoss(finding, counts_found, carried=carried, foreign=foreign)


def _by_class_weights(finding: Finding, counts: Sequence[Count]) -> Finding:
    """Return that a loss is a mean over its class weights, first of what explains it, where its labels were found."""
    named = tuple(number for number in finding.counts if counts[number].kind == "class weights")
    if not named:
        return Finding(kind="weighted", residual=finding.residual)  # classes of other weights are not among these
    others = tuple(number for number in finding.counts if number not in named)
    return Finding(kind="count", counts=(*named, *others), residual=finding.residual)


def _counts_in(batches: Sequence[Any], sizes: Sequence[int], labels: LabelMeans) -> list[Count]:
    """List the counts that a batch and its parts offer."""
    offered = candidates(batches[0], labels.ignored, labels.classes)
    found = [candidate for candidate in offered if all(map(candidate.is_in, batches))]
    return [candidate for candidate in found if not candidate.leaves_out_samples(batches[1:], sizes)]


def probe_one_sample(loss: LossFunction, model: nn.Module, batch: Any, device: torch.device) -> ProbedLoss:
    """Find out what calls of a loss leave behind, where batches have one sample: there is nothing to weight."""
    model, batches = _in_fp32(model, [batch])
    with _measuring(model, device):
        carried, foreign, _ = _carried(loss, model, to_device(batches[0], device), device)
    return ProbedLoss(Finding(kind="unknown"), (), carried=carried, foreign=foreign)


def _carried(
    loss: LossFunction, model: nn.Module, batch: Any, device: torch.device
) -> tuple[Carried, tuple[nn.Parameter, ...], LabelMeans]:
    """Find what calls of the loss leave behind: calls it twice with one batch, and looks at the model in between.

    This comes before all other calls: what grows with each of them may have come to its end later.
    """
    saved = {name: (tensor, tensor._version, tensor.detach().clone()) for name, tensor in _kept_in_state(model)}
    attributes = {place: _mark(value) for place, value in own_attributes(model).items()}
    try:
        batches = [copy.deepcopy(batch) for _ in range(3)]
    except Exception:  # noqa: BLE001  (whatever an object of the user's raises)
        return Carried(), (), LabelMeans()
    first, foreign, labels = _value(loss, model, batches[0], device)
    moved = tuple(name for name, tensor in _kept_in_state(model) if name in saved and _has_moved(tensor, *saved[name]))
    changed = tuple(
        ".".join(filter(None, place))
        for place, value in own_attributes(model).items()
        if _mark(value) != attributes.get(place)
    )
    second, *_ = _value(loss, model, batches[1], device)
    if _are_alike(first, second, device):
        return Carried(moved), foreign, labels
    for name, tensor in _kept_in_state(model):
        if name in saved:
            put_back(tensor, saved[name][2])
    third, *_ = _value(loss, model, batches[2], device)
    if not _are_alike(first, third, device):
        return Carried(moved, changed), foreign, labels
    saved_names = model.state_dict().keys()
    return Carried(moved, tuple(name for name in moved if name not in saved_names) or None), foreign, labels


def _kept_in_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers and frozen weights that a forward of the user's own, or a parametrization, may change."""
    followers = set(map(id, frozen_to_copy(model)))
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm) or type(module).__module__.split(".")[0] in ("drivetrain", "torchmetrics"):
            continue
        buffers = [(name, it) for name, it in module.named_buffers(recurse=False) if it.layout is torch.strided]
        frozen = [(name, weight) for name, weight in module.named_parameters(recurse=False) if id(weight) in followers]
        for name, tensor in (*buffers, *frozen):
            yield f"{prefix}.{name}" if prefix else name, tensor


def _has_moved(now: Tensor, before: Tensor, version: int, value: Tensor) -> bool:
    if isinstance(now, nn.Parameter) and now is before and now._version != version:
        return True  # written to, if only with the same numbers: a teacher that begins as a copy
    return now.shape != value.shape or not torch.equal(now, value)


def _mark(value: Any) -> Any:
    return (id(value), value._version) if isinstance(value, Tensor) else repr(value)[:1000]


def _value(
    loss: LossFunction, model: nn.Module, batch: Any, device: torch.device
) -> tuple[float, tuple[nn.Parameter, ...], LabelMeans]:
    """Call the loss with generators set alike.

    Returns its value, parameters in it that the model does not have, and what its means leave out.
    """
    _seed(device)
    result = loss(model, batch)
    settlement_of(model).forget()
    values = list(result.values()) if isinstance(result, Mapping) else [result]
    totals = [each.total if isinstance(each, LossSum) else each for each in values]
    tensors = [each for each in totals if isinstance(each, Tensor)]
    own = set(map(id, model.parameters()))
    foreign = [parameter for parameter in _parameters_in(tensors) if id(parameter) not in own]
    return sum(float(each.detach().double().sum()) for each in tensors), tuple(foreign), label_means(tensors)


def _has_drawn(device: torch.device) -> bool:
    """Return whether the last call of `_value` drew from torch's generators, or there was none."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    after = [generator.get_state() for generator in generators]
    _seed(device)
    return not all(torch.equal(one.get_state(), state) for one, state in zip(generators, after, strict=True))


def _seed(device: torch.device) -> None:
    seed_all(0)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(0)


_NODES_LOOKED_AT = 64  # of a loss, from its end
_MOST_TERMS = 10_000
_LINEAR = {"AddBackward0", "SubBackward0", "MulBackward0", "NegBackward0", "ToCopyBackward0"}


def looks_like_a_sum(loss: Tensor, num_samples: int, step_samples: int) -> bool:
    """Return whether a loss is a sum over its batch, by how it was computed: every term of it ends in such a sum.

    Means, terms that are divided, and sums over anything else, such as weights, are none. One that is divided by
    `step_samples`, the samples of the whole step, is a sum: its batches add up to the mean.
    """
    # With what each is multiplied by: NaN where it is by nothing, since a sum of one value would look like its mean.
    nodes: list[tuple[Any, float]] = [(loss.grad_fn, math.nan)] if loss.grad_fn is not None else []
    has_sum, num_left = False, _MOST_TERMS  # terms that share parts come by again and again
    while nodes:
        if (num_left := num_left - 1) < 0:
            return False
        node, factor = nodes.pop()
        is_by_step = step_samples != num_samples and _divisor(node) == step_samples
        if _is_linear(node) or is_by_step:
            by = None if is_by_step else getattr(node, "_saved_other", None)
            if by is not None and by.numel() == 1:
                factor = abs(float(by.detach())) * (1.0 if math.isnan(factor) else factor)
            nodes += [(other, factor) for other, _ in node.next_functions if other is not None]
            continue
        sizes = list(getattr(node, "_saved_self_sym_sizes", ()) if node.name() == "SumBackward0" else [num_samples])
        is_sum = node.name() == "SumBackward0" or getattr(node, "_saved_reduction", 1) == 2
        if not is_sum or not sizes or sizes[0] == 0 or is_over_weights(node):
            return False
        if sizes[0] % num_samples and not _is_over_selected(node):
            return False
        if any(math.isclose(factor * number, 1.0, rel_tol=0.01) for number in (sizes[0], math.prod(sizes))):
            return False  # what it is multiplied by makes it a mean
        has_sum = True
    return has_sum


def is_over_weights(node: Any) -> bool:
    """Return whether a sum is over what was computed from weights alone: a penalty, or gradients given as a loss."""
    return any(it.name() == "torch::autograd::AccumulateGrad" for it in _in_a_row(node))


def _is_over_selected(node: Any) -> bool:
    """Return whether a sum is over what a mask has chosen: as many values as there are, whatever the samples are."""
    return any(it.name() in ("IndexBackward0", "MaskedSelectBackward0") for it in _in_a_row(node))


def _in_a_row(node: Any) -> Iterator[Any]:
    """Yield a node and those before it, as long as each was computed from a single one."""
    for _ in range(_NODES_LOOKED_AT):
        yield node
        others = [other for other, _ in node.next_functions if other is not None]
        if len(others) != 1:
            return
        node = others[0]


def leaves_labels_out(loss: Tensor) -> bool:
    """Return whether a mean near the end of a loss is a cross-entropy over some of its labels, or over their weights.

    The others are those that `ignore_index` marks. The host waits for the device.
    """
    return any(
        float(node._saved_total_weight) != node._saved_target.numel() or _has_weights(node)
        for node in _mean_entropies([loss])
    )


def label_means(losses: Sequence[Tensor]) -> LabelMeans:
    """Return what the cross-entropies near the end of losses leave out. The host waits for the device."""
    nodes = list(_mean_entropies(losses))
    saved = [int(node._saved_ignore_index) for node in nodes]
    ignored = [it - 2**64 if it >= 2**63 else it for it in saved]  # the graph tells it without its sign
    classes = [
        ClassWeights(tuple(node._saved_weight.tolist()), label)
        for node, label in zip(nodes, ignored, strict=True)
        if _has_weights(node)
    ]
    return LabelMeans(tuple(dict.fromkeys(ignored)), tuple(dict.fromkeys(classes)))


def _has_weights(node: Any) -> bool:
    weights = node._saved_weight
    return weights is not None and bool((weights != weights[:1]).any())


def _is_mean_entropy(node: Any) -> bool:
    return node.name().startswith("NllLoss") and getattr(node, "_saved_reduction", 0) == 1


def _mean_entropies(losses: Sequence[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the cross-entropies near the end of losses that are means over their labels."""
    return filter(_is_mean_entropy, graph_nodes(losses, through=lambda node: not _is_mean_entropy(node)))


def graph_nodes(
    losses: Iterable[Tensor], *, through: Callable[[Any], bool], most: int = _NODES_LOOKED_AT
) -> Iterator[Any]:
    """Yield the nodes by which losses were computed, each once, from their end; past some only those before them.

    Args:
        losses: What was computed.
        through: Whether to go on to what a node was computed from.
        most: How many nodes are looked at.
    """
    nodes, seen = deque(loss.grad_fn for loss in losses), set[Any]()
    while nodes and len(seen) < most:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if through(node):
            nodes.extend(other for other, _ in node.next_functions)


def _is_linear(node: Any) -> bool:
    return node.name() in _LINEAR


def positive_weights(loss: Tensor) -> list[Tensor]:
    """Return the `pos_weight` of each binary cross-entropy near the end of a loss."""
    weights = (getattr(node, "_saved_pos_weight", None) for node in graph_nodes([loss], through=lambda node: True))
    return [weight.detach() for weight in weights if weight is not None]


def mean_counts(loss: Tensor) -> list[float]:
    """Return how many values each mean near the end of a loss is over, or by what a sum is divided, such as weights.

    The host waits for the device.
    """

    def may_lead_to_one(node: Any) -> bool:
        return _count_of_mean(node) is None and (_is_linear(node) or node.name() == "DivBackward0")

    counts = map(_count_of_mean, graph_nodes([loss], through=may_lead_to_one))
    return [count for count in counts if count is not None]


def sums_normalized_weights(loss: Tensor, num_samples: int) -> bool:
    """Return whether a loss has a sum over weights of its samples that add up to 1. The host waits for the device."""
    for node in graph_nodes([loss], through=_is_linear):
        product = node.next_functions[0][0] if node.name() == "SumBackward0" else None
        if product is not None and product.name() == "MulBackward0":
            saved = (product._saved_self, product._saved_other)
            weights = [it for it in saved if it is not None and not it.requires_grad and it.shape[:1] == (num_samples,)]
            if num_samples > 1 and any(math.isclose(float(it.sum()), 1.0, rel_tol=1e-4) for it in weights):
                return True
    return False


_ELEMENTWISE = {"MeanBackward0", "SumBackward0", "DivBackward0", "MinimumBackward0", "MaximumBackward0"}


def has_standardized_weights(loss: Tensor, num_samples: int) -> bool:
    """Return whether a loss is weighted by numbers that were normalized over its batch. The host waits for the device.

    Their mean is 0 and their deviation 1. A batch of two would have no others.
    """
    for node in graph_nodes([loss], through=lambda node: _is_linear(node) or node.name() in _ELEMENTWISE):
        if node.name() == "MulBackward0" and num_samples > 2:
            for it in (node._saved_self, node._saved_other):
                if it is None or it.requires_grad or it.shape[:1] != (num_samples,) or it.numel() != num_samples:
                    continue
                mean, *deviations = it.mean(), it.std(), it.std(correction=0)
                if abs(mean) < 1e-4 and any(abs(deviation - 1) < 1e-3 for deviation in deviations):
                    return True
    return False


def _count_of_mean(node: Any) -> float | None:
    if node.name() == "MeanBackward0":
        return int(node._saved_self_sym_numel)
    if getattr(node, "_saved_reduction", 0) == 1:
        values = getattr(node, "_saved_target", None)
        return None if values is None else int(values.numel())
    return _divisor(node)


def _divisor(node: Any) -> float | None:
    """Return the number, without a gradient, that a node divides sums by; None where it does something else."""
    if node.name() != "DivBackward0" or not _are_sums(node.next_functions[0][0]):
        return None
    by = node._saved_other
    return None if by is None or by.numel() != 1 or by.requires_grad else float(by)


def _are_sums(node: Any) -> bool:
    """Return whether a value was computed by adding up sums, few enough to look at."""
    left, seen = [node], set[Any]()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if node is None or len(seen) > _NODES_LOOKED_AT:
            return False
        if _is_linear(node):
            left += [other for other, _ in node.next_functions if other is not None]
        elif node.name() not in ("SumBackward0", "DotBackward0") and getattr(node, "_saved_reduction", 0) != 2:
            return False
    return True


def _parameters_in(results: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return the parameters that gradients of these results go to."""
    nodes = graph_nodes(results, through=lambda node: True, most=sys.maxsize)
    variables = (getattr(node, "variable", None) for node in nodes)
    return list({id(it): it for it in variables if isinstance(it, nn.Parameter)}.values())


def _are_alike(one: float, other: float, device: torch.device) -> bool:
    """Return whether two values are the same: to the bit on a CPU, within rounding where sums may be reordered."""
    if one == other or (one != one and other != other):
        return True
    return device.type != "cpu" and abs(one - other) <= 1e-6 * max(abs(one), abs(other))


def _gradients(
    loss: LossFunction, model: nn.Module, batches: Sequence[Any], sizes: Sequence[int], replays: bool
) -> tuple[Tensor, str] | None:
    """Return one row for the whole batch and for each part; and what was drawn that could not be replayed."""
    recorder = ReplayedDraws()
    rows, start, num_samples = [], 0, sum(sizes)
    for number, batch in enumerate(batches):
        if number:
            recorder.replay(start, sizes[number - 1], num_samples)
            start += sizes[number - 1]
        with recorder if replays else nullcontext():
            row = _gradient(loss, model, batch)
        if row is None:
            return None
        rows.append(row)
    return torch.stack(rows), recorder.not_replayed


def _gradient(loss: LossFunction, model: nn.Module, batch: Any) -> Tensor | None:
    result = loss(model, batch)
    settlement_of(model).forget()
    if not isinstance(result, (Tensor, int, float)):
        return None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if isinstance(result, Tensor) and result.requires_grad:  # the others are of batches that have nothing to count
        found = torch.autograd.grad(result, parameters, allow_unused=True)
    num_entries = sum(parameter.numel() for parameter in parameters)
    every = max(1, -(-num_entries // MOST_ENTRIES))
    entries = [
        as_real((torch.zeros_like(parameter) if gradient is None else gradient).to_dense().reshape(-1)[::every])
        for parameter, gradient in zip(parameters, found, strict=True)
    ]
    return torch.cat([entry.double().reshape(-1) for entry in entries]).cpu()


def _adds_others(loss: LossFunction, model: nn.Module, alone: Sequence[Any], device: torch.device) -> bool:
    """Return whether samples with none of what a loss is divided by add to it all the same.

    Such a batch would be taken for one that counts nothing. Two are compared: terms of the weights alone are the same.
    """
    found = list[Tensor]()
    for batch in _in_fp32(model, list(alone))[1]:
        _seed(device)
        gradient = _gradient(loss, model, to_device(batch, device))
        if gradient is not None and gradient.isfinite().all():
            found.append(gradient)
    if len(found) < 2:
        return False
    one, other = found
    return bool((one - other).norm() > MOST_TOLERANCE * max(one.norm(), other.norm()))


def _tolerance(loss: LossFunction, model: nn.Module, parts: Parts, device: torch.device, whole: Tensor) -> float:
    """Return how far rounding alone moves a gradient: compares with that of the same samples in another order."""
    if parts.reordered is None:
        return TOLERANCE
    _, (batch,) = _in_fp32(model, [parts.reordered()])
    with ReplayedDraws():
        other = _gradient(loss, model, to_device(batch, device))
    if other is None:
        return TOLERANCE
    floor = float((other - whole).norm() / whole.norm())
    return max(TOLERANCE, min(FLOORS * floor, MOST_TOLERANCE))


def _in_fp32(model: nn.Module, batches: list[Any]) -> tuple[nn.Module, list[Any]]:
    """Copy a bf16 or fp16 model to fp32: rounding of its weights would hide what is looked for."""
    low = (torch.bfloat16, torch.float16)
    if not any(tensor.dtype in low for tensor in model.parameters()):
        return model, batches

    def widened(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in low else tensor

    return copied(model).float(), [map_tensors(widened, batch) for batch in batches]


@contextmanager
def _measuring(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch off, and restore afterwards, what changes the sum of a batch's parts without being part of the loss."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase) and module.dropout]
    dropout = [module.dropout for module in recurrent]
    # Whether a mean over tokens is one has nothing to do with batch normalization, which is known by its type.
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    with ExitStack() as stack:
        stack.enter_context(numerics(Precision("fp32", device.type), deterministic=False, cudnn_benchmark=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_without_autocast())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(uncounted(model))
        stack.enter_context(model_kept(model))
        for module in recurrent:
            module.dropout = 0.0  # inside cuDNN it cannot be replayed
        for norm in norms:
            norm.eval()
        try:
            yield
        finally:
            for module, value in zip(recurrent, dropout, strict=True):
                module.dropout = value
            for norm in norms:
                norm.train()


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Disable autocast that a loss function turns on by itself: rounding to bf16 would hide what is looked for."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]
    torch.autocast.__exit__ = lambda self, *error: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]


class ReplayedDraws(EagerDispatchMode):
    """Records what a forward draws at random, and replays the draws of some of its samples."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.not_replayed = ""  # the first operation whose draws could not be divided among samples
        self._recorded: list[tuple[str, Tensor]] = []
        self._range: tuple[int, int, int] | None = None  # first sample, their number, the whole batch's
        self._next = 0

    def replay(self, first: int, count: int, num_samples: int) -> None:
        """Hand out from now on, from the beginning, what the `count` samples from `first` on drew."""
        self._range, self._next = (first, count, num_samples), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or name.startswith(_DRAWS_NOTHING):
            return result
        if name.startswith("aten.native_dropout"):
            return self._dropped(name, result, args)
        if not isinstance(result, Tensor) or name.startswith("aten.randperm"):
            self.not_replayed = self.not_replayed or name
            return result
        drawn = self._drawn(name, result)
        if drawn is not result:
            with torch.no_grad():
                result.copy_(drawn)
        return result

    def _dropped(self, name: str, result: Any, args: Any) -> Any:
        """Replace the fused dropout of GPUs: the mask is drawn, the output follows from it."""
        _, mask = result
        kept = self._drawn(name, mask)
        probability = args[1]
        scale = 0.0 if probability == 1 else 1 / (1 - probability)
        return args[0] * kept * scale, kept

    def _drawn(self, name: str, result: Tensor) -> Tensor:
        if self._range is None:
            self._recorded.append((name, result.detach().clone()))
            return result
        number, self._next = self._next, self._next + 1
        if number < len(self._recorded) and self._recorded[number][0] == name:
            part = _samples_of(self._recorded[number][1], result.shape, *self._range)
            if part is not None:
                return part
        self.not_replayed = self.not_replayed or name
        return result


# Tagged as random by torch for what they do with dropout, which is off here.
_DRAWS_NOTHING = ("aten._cudnn_rnn", "aten._scaled_dot_product", "aten.miopen_rnn", "aten._flash_attention")


def _samples_of(drawn: Tensor, shape: torch.Size, first: int, count: int, num_samples: int) -> Tensor | None:
    """Return the entries, of what the whole batch drew, that belong to some samples; None if none can be told apart.

    The dimension of samples is the one whose length is a multiple of their number, as here. A part that is padded to a
    shorter length gets the draws of its positions.
    """
    if drawn.shape == shape and num_samples != count:
        return drawn  # one draw for all samples
    if drawn.dim() != len(shape):
        return None
    rows = None
    for dim, (size, wanted) in enumerate(zip(drawn.shape, shape, strict=True)):
        if rows is None and size % num_samples == 0 and size // num_samples * count == wanted:
            rows = dim
            each = size // num_samples
            drawn = drawn.narrow(dim, first * each, count * each)
        elif size > wanted:
            drawn = drawn.narrow(dim, 0, wanted)
        elif size < wanted:
            return None
    return drawn if rows is not None else None
