"""The mixture layer, with the balance of its loads; and the bounds of settings of a mixture and its hooks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Self, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import PERIODS, StepContext, is_period
from drivetrain.core.isolation import evaluating, is_counted
from drivetrain.core.world import World
from drivetrain.moe.dispatch import Dispatcher, LocalDispatcher, Way, WayName, check_way
from drivetrain.moe.experts import Experts, Kind, Router, Routing, Scores

# ----------------------------------------------------------------------------------------------------------------------
# Bounds of settings, which stand at the fields themselves, and one error for all values outside them.
#
# A field or an argument says them in its type: `far: Annotated[float, Number(0)] = 4.0`.


@dataclass(frozen=True)
class Whole:
    least: int
    or_none: bool = False

    def has(self, value: object) -> bool:
        if value is None:
            return self.or_none
        return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= self.least

    def __str__(self) -> str:
        return f"a whole number from {self.least}" + ", or None" * self.or_none


@dataclass(frozen=True)
class Number:
    """A number within bounds. Infinity is allowed where there is no `most`, unless the value has to be finite."""

    least: float = -math.inf
    most: float = math.inf
    finite: bool = False

    def has(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        return self.least <= float(value) <= self.most and (not self.finite or math.isfinite(value))

    def __str__(self) -> str:
        least = f" from {self.least:g}" if math.isfinite(self.least) else ""
        most = f" to {self.most:g}" if math.isfinite(self.most) else ""
        return f"a {'finite ' * self.finite}number{least}{most}"


Bound = Whole | Number


def check_fields(of: object) -> None:
    """Raise one error for all fields of a dataclass that are out of bounds: name, value, and what is allowed."""
    kind: Callable[..., Any] = type(of)
    _refuse(kind.__name__, vars(of), bounds_of(kind))


def check_arguments(of: str, function: Callable[..., Any], values: Mapping[str, object]) -> None:
    """Raise one error for all arguments of a function that are out of bounds."""
    _refuse(of, values, bounds_of(function))


@cache
def bounds_of(declared: Callable[..., Any]) -> dict[str, Bound]:
    """Return the bounds in the types of a class's fields or a function's arguments, by name."""
    hints = get_type_hints(declared, include_extras=True)
    return {
        name: bound for name, hint in hints.items() for bound in getattr(hint, "__metadata__", ()) if _is_bound(bound)
    }


def _is_bound(given: object) -> bool:
    return isinstance(given, Whole | Number)


def _refuse(of: str, values: Mapping[str, object], bounds: Mapping[str, Bound]) -> None:
    wrong = [name for name, bound in bounds.items() if not bound.has(values[name])]
    if wrong:
        raise DrivetrainError(
            f"{of}: " + ", ".join(f"{name} is {values[name]!r}" for name in wrong),
            remedy="give " + "; ".join(f"{name} {bounds[name]}" for name in wrong),
        )


def check_every(of: str, every: object) -> None:
    """Check a hook's period. A job checks it, too; here the error shows where the hook is made."""
    if not is_period(every):
        raise DrivetrainError(f"{of}: every is {every!r}", remedy=f"give {PERIODS}")


# ----------------------------------------------------------------------------------------------------------------------
# The layer: router, experts, the dispatcher between them, the counts of chosen experts, and the balance of loads.
#
# The tokens of each expert are counted during training, once each; load figures are derived from the counts. Loads are
# balanced by a bias on the choice and by auxiliary losses; the end of a step settles them. Outside of steps `outputs`
# and `outputs_of` compute experts' outputs for given tokens: nothing is counted, and no noise is drawn.

SAMPLE = 256  # tokens of a micro-batch that are kept to decide by which experts come and go


class LoadTally:
    """A layer's counts since the last step, per device, and the auxiliary losses it has not handed over yet.

    It is no buffer: DDP would overwrite it with rank 0's. At a step's end it is empty, so it is not saved either. The
    copies that `replicate` makes of a layer share it; a deep copy gets a separate one.
    """

    def __init__(self, num_slots: int, sample_width: int = 0) -> None:
        self.num_slots, self.sample_width = num_slots, sample_width
        self.counts: dict[torch.device, Tensor] = {}
        self.losses: list[tuple[Tensor, int]] = []  # a sum over tokens, and how many
        # Where experts come and go: some tokens of the last forward that counted, and of how many they are, with how
        # many tokens to a sample of the batch.
        self.samples: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> Tensor:
        if device.type == "meta":  # of a model that is not made yet; nothing is counted there
            return torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        if device not in self.counts:
            self.counts[device] = torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        return self.counts[device]

    def sample_on(self, device: torch.device) -> Tensor:
        return self._sample(device)[0]

    def sampled(self, device: torch.device) -> tuple[Tensor, int]:
        """Return the sample without repetitions, and the number of tokens per sample of the batch. The host waits."""
        tokens, sizes = self._sample(device)
        count, per_sample = sizes.tolist()
        return tokens[:count], per_sample

    def keep(self, tokens: Tensor, per_sample: int) -> None:
        """Keep a sample of tokens, in place and of fixed size (repeated if too few), so that it can be captured."""
        if tokens.shape[0] and tokens.device.type != "meta":
            keep(*self._sample(tokens.device), tokens.detach(), per_sample)

    def _sample(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self.samples:
            sizes = torch.tensor([0, 1], device=device)
            self.samples[device] = torch.zeros(SAMPLE, self.sample_width, device=device), sizes
        return self.samples[device]

    def move(self, device: torch.device) -> None:
        """Follow the layer to a device. Counts elsewhere are dropped: reading them would wait for the device.

        All tensors are allocated before the first forward: a compiled one would notice a new one.
        """
        self.counts.clear()
        self.samples.clear()
        if device.type != "meta":
            self.on(device)
            self._sample(device)

    def total(self, device: torch.device) -> Tensor:
        """Return the counts over all devices of this process."""
        here = self.on(device)
        return here + sum(there.to(device) for other, there in self.counts.items() if other != device)

    def forget(self) -> None:
        for counts in self.counts.values():
            counts.zero_()  # in place: compiled and captured code keeps adding to them
        self.losses.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self)(self.num_slots, self.sample_width)
        for device in self.counts:
            twin.move(device)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.num_slots, self.sample_width)


def is_recomputing() -> bool:
    """Return whether this forward runs inside a backward: activation checkpointing computes it again."""
    return torch._C._current_graph_task_id() != -1


def count(tally: Tensor, chosen: Tensor) -> None:
    """Add the chosen experts to the counts, in place. Skips samples at weight 0, and recomputed forwards."""
    if torch.compiler.is_compiling():
        torch.ops.drivetrain.count_tokens(tally, chosen)  # asks at run time, not once when it is traced
    else:
        _count(tally, chosen)


def _count(tally: Tensor, chosen: Tensor) -> None:
    if is_counted() and not is_recomputing():
        flat = chosen.reshape(-1)
        tally.scatter_add_(0, flat, torch.ones_like(flat))  # whole numbers: the same in whatever order they are added


def keep(sample: Tensor, sizes: Tensor, tokens: Tensor, per_sample: int) -> None:
    """Keep a sample of tokens; like `count`, it skips samples that do not count."""
    if torch.compiler.is_compiling():
        torch.ops.drivetrain.keep_tokens(sample, sizes, tokens, per_sample)
    else:
        _keep(sample, sizes, tokens, per_sample)


def _keep(sample: Tensor, sizes: Tensor, tokens: Tensor, per_sample: int) -> None:
    if is_counted() and not is_recomputing():
        count = tokens.shape[0]
        picked = tokens[:SAMPLE] if count >= SAMPLE else tokens[torch.arange(SAMPLE, device=tokens.device) % count]
        sample.copy_(picked)
        # Filled, not set: to set an element from a number makes the host wait for the device.
        sizes[0].fill_(min(count, SAMPLE))
        sizes[1].fill_(per_sample)


torch.library.custom_op("drivetrain::count_tokens", _count, mutates_args=("tally",))
torch.library.register_fake("drivetrain::count_tokens", lambda tally, chosen: None)
torch.library.custom_op("drivetrain::keep_tokens", _keep, mutates_args=("sample", "sizes"))
torch.library.register_fake("drivetrain::keep_tokens", lambda sample, sizes, tokens, per_sample: None)


@dataclass(frozen=True)
class LoadFigures:
    """Figures of how evenly a step's tokens were spread over the active experts."""

    max_violation: float  # the fullest expert's load over the mean, less 1: 0 is perfect
    dead_experts: int  # active, and without a token
    entropy: float  # of the loads, over that of equal ones: 1 is perfect
    straggler: float  # the fullest rank's load over the mean of ranks: how long the others wait

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def figures_of(load: Sequence[int], active: Sequence[bool], ranks: Sequence[int], num_ranks: int) -> LoadFigures:
    """Compute the figures of a load; `ranks` holds the rank of each slot's expert."""
    loads = [tokens for tokens, is_active in zip(load, active, strict=True) if is_active]
    total = sum(loads)
    if not total:
        return LoadFigures(0.0, len(loads), 1.0, 1.0)
    entropy = -sum(tokens / total * math.log(tokens / total) for tokens in loads if tokens)
    by_rank = [0] * num_ranks
    for tokens, rank in zip(load, ranks, strict=True):
        by_rank[rank] += tokens
    return LoadFigures(
        max_violation=max(loads) * len(loads) / total - 1,
        dead_experts=loads.count(0),
        entropy=entropy / math.log(len(loads)) if len(loads) > 1 else 1.0,
        straggler=max(by_rank) * num_ranks / total,
    )


@dataclass(frozen=True)
class Balance:
    """The settings that keep experts equally busy. 0 turns a part off.

    Args:
        bias_rate: After each step the bias of every expert's choice moves by this much towards the mean load; weights
            and gradients do not see it.
        auxiliary: The coefficient of experts × Σ load share × mean score (Switch), where the load is that of the whole
            step before, over all ranks and micro-batches: so it means the same however a step is divided.
        z: The coefficient of the mean square of log Σ exp(logits), which keeps logits small.

    Example:
        >>> from drivetrain.moe import Balance, MixtureOfExperts
        >>> layer = MixtureOfExperts(64, num_experts=8, hidden=128, balance=Balance(auxiliary=0.01))
    """

    bias_rate: Annotated[float, Number(0, finite=True)] = 1e-3
    auxiliary: Annotated[float, Number(0, finite=True)] = 0.0
    z: Annotated[float, Number(0, finite=True)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)


BALANCE = Balance()


class MixtureOfExperts(nn.Module):
    """Sends each token to the router's top `k` experts and sums their outputs by the router's weights.

    Inputs are (..., num_inputs). No token is dropped, whatever the load.

    Args:
        num_inputs: The width of a token.
        num_experts: How many experts there are at first.
        hidden: The hidden width of every expert, or a list with one for each.
        num_outputs: The width of the output. Default: that of the input.
        k: How many experts each token goes to.
        kind: What an expert is: `"mlp"`, two linear layers; `"gated"`, three, one of them a gate (SwiGLU).
        activation: The activation of an expert. Default: `"gelu"`, and `"silu"` of a gated one.
        bias: Whether linear layers have a bias. Default: as is usual for the kind.
        scores: How the router's logits become scores: `"softmax"` or `"sigmoid"`.
        normalize: Whether the weights of a token's experts are divided by their sum. Default: as is usual for `scores`.
        noise: The standard deviation of noise on the router's logits during training.
        balance: How experts are kept equally busy.
        num_slots: Room for experts that come later; they take no part until they are active. Default: `num_experts`.
        way: How experts are computed, if not the fastest that was measured.

    Example:
        >>> import torch
        >>> from drivetrain.moe import MixtureOfExperts
        >>> layer = MixtureOfExperts(64, num_experts=8, hidden=128, k=2)
        >>> layer(torch.randn(4, 10, 64)).shape
        torch.Size([4, 10, 64])
    """

    load: Tensor
    uses: Tensor
    together: Tensor
    centroids: Tensor
    spreads: Tensor
    expert_ids: Tensor
    next_id: Tensor

    def __init__(
        self,
        num_inputs: Annotated[int, Whole(1)],
        num_experts: Annotated[int, Whole(1)],
        hidden: int | Sequence[int],
        num_outputs: int | None = None,
        *,
        k: Annotated[int, Whole(1)] = 2,
        kind: Kind = "mlp",
        activation: str | None = None,
        bias: bool | None = None,
        scores: Scores = "softmax",
        normalize: bool | None = None,
        noise: Annotated[float, Number(0, finite=True)] = 0.0,
        balance: Balance = BALANCE,
        num_slots: Annotated[int | None, Whole(1, or_none=True)] = None,
        way: Literal["auto"] | WayName = "auto",
    ) -> None:
        super().__init__()
        values = {"num_inputs": num_inputs, "num_experts": num_experts, "k": k, "num_slots": num_slots, "noise": noise}
        check_arguments("MixtureOfExperts", MixtureOfExperts.__init__, values)
        slots = num_experts if num_slots is None else num_slots
        widths = list(hidden) if isinstance(hidden, Iterable) else [hidden] * num_experts
        _check(num_experts, widths, k, slots)
        check_way(way)
        gated = kind == "gated"
        self.num_slots, self.k, self.balance = slots, k, balance
        self.router = Router(num_inputs, slots, k, scores=scores, normalize=normalize, noise=noise)
        self.router.uses_bias = balance.bias_rate > 0
        self.experts = Experts(
            num_inputs,
            widths + [0] * (slots - num_experts),
            num_outputs or num_inputs,
            kind=kind,
            activation=activation or ("silu" if gated else "gelu"),
            bias=not gated if bias is None else bias,
        )
        # Empty slots are all zeros: they get no gradient, and weight decay leaves zeros as they are.
        with torch.no_grad():
            self.router.weight[num_experts:] = 0.0
            self.router.mask[num_experts:] = float("-inf")
        self.register_buffer("load", torch.zeros(slots, dtype=torch.int64))  # of the last step, over all ranks
        self.register_buffer("uses", torch.zeros(slots, dtype=torch.int64))  # of all steps since the expert came
        ids = torch.cat([torch.arange(num_experts), torch.full((slots - num_experts,), -1)])
        self.register_buffer("expert_ids", ids)  # never reused; -1 is an empty slot
        self.register_buffer("next_id", torch.tensor(num_experts))
        self.can_grow = slots > num_experts
        if self.can_grow:  # what each expert's tokens are like: their mean, and their mean square distance from it
            self.register_buffer("centroids", torch.zeros(slots, num_inputs))
            self.register_buffer("spreads", torch.zeros(slots))
            # The fraction of all tokens that two experts both get, as of the last look of a `Knowledge` hook.
            self.register_buffer("together", torch.zeros(slots, slots))
        self.tally = LoadTally(slots, num_inputs if self.can_grow else 0)
        self.tally.move(self.load.device)
        self.dispatcher: Dispatcher = LocalDispatcher(way)

    def forward(self, inputs: Tensor) -> Tensor:
        device = inputs.device.type
        if not torch.is_autocast_enabled(device):
            return self._mixed(inputs, self.experts.w_in.dtype)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):  # grouped products know none, and the router is exact
            return self._mixed(inputs, dtype)

    def _mixed(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        tokens = inputs.reshape(-1, inputs.shape[-1])
        routing = self.router(tokens)
        if self.training:
            count(self.tally.on(tokens.device), routing.chosen)
            self._note_losses(routing)
            if self.can_grow:
                self.tally.keep(tokens, tokens.shape[0] // max(inputs.shape[0], 1) if inputs.dim() > 1 else 1)
        result = self.dispatcher(self.experts, tokens.to(dtype), routing)
        return result.view(*inputs.shape[:-1], result.shape[-1])

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tally.move(self.load.device)
        return self

    def way(self, num_tokens: int, dtype: torch.dtype) -> Way:
        """Return how `num_tokens` tokens would be run when computing in `dtype`, and why; for the plan."""
        return self.dispatcher.way(self.experts, num_tokens, self.k, dtype, self.experts.w_in.device)

    def figures(self) -> LoadFigures:
        """Return how the last step's tokens were spread. The host waits for the device."""
        ranks, capabilities = self.dispatcher.placement(self.num_slots)
        return figures_of(self.load.tolist(), self.router.active.tolist(), ranks, len(capabilities))

    def _note_losses(self, routing: Routing) -> None:
        balance = self.balance
        if not (balance.auxiliary or balance.z):
            return
        total = routing.weights.new_zeros(())
        if balance.auxiliary:
            scores = self.router.score(routing.logits)
            if self.router.scores == "sigmoid":
                scores = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
            total = total + balance.auxiliary * (scores.sum(0) * self._relative_load().to(scores.dtype)).sum()
        if balance.z:
            total = total + balance.z * routing.logits.logsumexp(-1).square().sum()
        # When a forward is computed again, all has to be computed again, but not noted again.
        if torch.compiler.is_compiling() or not is_recomputing():
            self.tally.losses.append((total, routing.logits.shape[0]))

    def _relative_load(self) -> Tensor:
        """Return each expert's share of the last step's tokens × number of experts: 1 for all before the first step."""
        active = self.router.active
        load, tokens = self.load.double(), self.load.sum()
        return torch.where(tokens > 0, load * active.sum() / tokens.clamp_min(1), active.double())

    @staticmethod
    def make_settlement(model: nn.Module) -> "Settlement":
        """Return what ends a step for all mixtures of a model (`core/hook.py`)."""
        return Settlement(model)

    def extra_repr(self) -> str:
        kind, wide = self.experts.kind, self.experts.num_hidden
        return f"k={self.k}, slots={self.num_slots}, {kind} of width {wide}"


def _check(num_experts: int, widths: Sequence[int], k: int, slots: int) -> None:
    problems = [
        (k > num_experts, f"k is {k}", f"from 1 to the {num_experts} experts there are"),
        (len(widths) != num_experts, f"hidden has {len(widths)} widths", f"one for each of {num_experts} experts"),
        (not all(map(Whole(1).has, widths)), f"hidden is {list(widths)}", "widths that are whole numbers from 1"),
        (slots < num_experts, f"num_slots is {slots}", f"at least the {num_experts} experts there are"),
    ]
    for is_wrong, what, allowed in problems:
        if is_wrong:
            raise DrivetrainError(f"MixtureOfExperts: {what}", remedy=f"give {allowed}")


def mixtures_in(model: nn.Module) -> dict[str, MixtureOfExperts]:
    """Return the layers of a model that are mixtures of experts, by name; a layer with two names once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}


def take_auxiliary(layers: Iterable[MixtureOfExperts]) -> Tensor | None:
    found: Tensor | None = None
    for layer in layers:
        losses, layer.tally.losses = layer.tally.losses, []
        if losses:
            device = losses[0][0].device
            mean = torch.stack([value.to(device) for value, _ in losses]).sum() / sum(count for _, count in losses)
            found = mean if found is None else found + mean.to(found.device)
    return found


@dataclass(frozen=True)
class _Alike:
    """Layers with equally many slots, settled together: a few kernels for all of them, not for each."""

    layers: tuple[MixtureOfExperts, ...]
    rates: Tensor


class Settlement:
    """Ends a step for all mixtures of a model: sums loads over all ranks, and moves biases."""

    group: dist.ProcessGroup | None = None  # of the ranks that share a step; set by the strategy

    def __init__(self, model: nn.Module) -> None:
        layers = list(mixtures_in(model).values())
        self.layers: Sequence[MixtureOfExperts] = layers
        kinds = sorted({(layer.num_slots, str(layer.load.device)) for layer in layers})
        groups = [
            tuple(layer for layer in layers if (layer.num_slots, str(layer.load.device)) == kind) for kind in kinds
        ]
        self._groups = [
            _Alike(group, torch.tensor([[layer.balance.bias_rate] for layer in group], device=group[0].load.device))
            for group in groups
        ]

    def take_auxiliary(self) -> Tensor | None:
        """Hand over the auxiliary losses of the last forward; None if there are none."""
        return take_auxiliary(self.layers)

    def forget(self) -> None:
        """Drop the counts since the last step: they are not part of one."""
        for layer in self.layers:
            layer.tally.forget()

    @torch.no_grad()
    def settle(self) -> None:
        """Settle loads and biases; collective where there are several ranks, with equal results.

        The host does not wait.
        """
        for group in self._groups:
            layers = group.layers
            counts = torch.stack([layer.tally.total(layer.load.device) for layer in layers])
            load = _over_all_ranks(counts, self.group)
            active = torch.stack([layer.router.active for layer in layers])
            mean = load.sum(1, keepdim=True) / active.sum(1, keepdim=True)
            moved = group.rates * torch.sign(mean - load) * active
            torch._foreach_add_([layer.router.bias for layer in layers], list(moved.unbind()))
            torch._foreach_copy_([layer.load for layer in layers], list(load.unbind()))
            torch._foreach_add_([layer.uses for layer in layers], list(load.unbind()))
            torch._foreach_zero_([counts for layer in layers for counts in layer.tally.counts.values()])
        for layer in self.layers:
            layer.tally.losses.clear()


def _over_all_ranks(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts


def route(layer: MixtureOfExperts, tokens: Tensor) -> Routing:
    with evaluating(layer.router):
        routing: Routing = layer.router(tokens)
    return routing


def outputs(layer: MixtureOfExperts, tokens: Tensor) -> Tensor:
    """Return the outputs of the layer."""
    tokens = tokens.to(layer.experts.w_in.dtype)
    return layer.dispatcher(layer.experts, tokens, route(layer, tokens))


def outputs_of(layer: MixtureOfExperts, tokens: Tensor, slots: Sequence[int]) -> Tensor:
    """Run some experts on all the tokens, at once, whichever rank they are on: (experts, tokens, outputs)."""
    tokens = tokens.to(layer.experts.w_in.dtype)
    _, capabilities = layer.dispatcher.placement(layer.num_slots)
    if tokens.is_cuda and len(capabilities) == 1:
        return layer.experts.each(tokens)[list(slots)]
    chosen = torch.tensor(list(slots), device=tokens.device).repeat_interleave(len(tokens)).unsqueeze(1)
    weights = torch.ones(chosen.shape, dtype=torch.promote_types(tokens.dtype, torch.float32), device=tokens.device)
    rows = tokens.repeat(len(slots), 1)
    found = layer.dispatcher(layer.experts, rows, Routing(chosen, weights, rows.new_zeros(len(rows), layer.num_slots)))
    return found.view(len(slots), len(tokens), -1)


@torch.no_grad()
def agreements(layer: MixtureOfExperts, tokens: Tensor, slots: list[int], world: World) -> list[list[float]]:
    """Return 1 − |a − b| ÷ (|a| + |b|) of each pair's outputs, over all ranks' tokens: 1 if equal, 0 if opposite."""
    found = outputs_of(layer, tokens, slots).double().flatten(1)
    products = world.all_reduce(found @ found.T)
    norms = products.diagonal().clamp_min(0).sqrt()
    distances = (products.diagonal()[:, None] + products.diagonal()[None] - 2 * products).clamp_min(0).sqrt()
    table: list[list[float]] = (1 - distances / (norms[:, None] + norms[None]).clamp_min(1e-30)).tolist()
    return table


def refuse_too_many(max_experts: int | None, model: nn.Module, of: str) -> None:
    """Refuse more experts than any mixture of the model has slots for."""
    slots = max((layer.num_slots for layer in mixtures_in(model).values()), default=0)
    if max_experts is not None and 0 < slots < max_experts:
        raise DrivetrainError(
            f"{of}: max_experts is {max_experts}, and the model's mixtures have room for {slots}",
            remedy=f"give max_experts up to {slots}, or the MixtureOfExperts num_slots={max_experts}",
        )


def auxiliary_loss(model: nn.Module) -> Tensor | None:
    """Return the auxiliary losses of the last forward, to be added to a mean loss; None if there are none.

    It hands them over: a second call finds none. `train` and `drive` add those that the loss function has left.
    """
    return take_auxiliary(mixtures_in(model).values())


class LoadReport:
    """A hook that writes the load figures of all mixtures into the run's event log, as events named `load`.

    The events also hold, by the experts' numbers, how many tokens of the last step each got, and its rank.

    Args:
        every: The steps between two reports.

    Example:
        >>> from drivetrain.moe import LoadReport
        >>> hooks = [LoadReport(every=50)]  # for dt.Job(hooks=…)
    """

    changes_data = False

    def __init__(self, every: int = 100) -> None:
        check_every("LoadReport", every)
        self.every = every

    def __call__(self, context: StepContext) -> None:
        for name, layer in mixtures_in(context.model).items():
            numbers = layer.expert_ids.tolist()
            ranks, _ = layer.dispatcher.placement(layer.num_slots)
            loads, places = (
                {str(number): value for number, value in zip(numbers, values, strict=True) if number >= 0}
                for values in (layer.load.tolist(), ranks)
            )
            facts = layer.figures().as_dict()
            context.tell("load", step=context.step, layer=name, top_k=layer.k, **facts, loads=loads, ranks=places)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def load_metrics(model: nn.Module) -> dict[str, float]:
    """Return figures of the last step's loads, layer by layer, for the records. The host waits for the device."""
    return {
        f"{name}/{figure}" if name else figure: value
        for name, layer in mixtures_in(model).items()
        for figure, value in layer.figures().as_dict().items()
    }
