"""The layer: router, experts, the dispatcher between them, and the counts of chosen experts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.moe.bounds import Number, Whole, check_arguments, check_fields
from drivetrain.moe.layer.dispatch import Dispatcher, LocalDispatcher
from drivetrain.moe.layer.experts import Experts, Kind
from drivetrain.moe.layer.kernel_choice import Way, WayName, check_way
from drivetrain.moe.layer.load import LoadFigures, LoadTally, count, figures_of, is_recomputing
from drivetrain.moe.layer.router import Router, Routing, Scores


@dataclass(frozen=True)
class Balance:
    """The settings that keep experts equally busy. 0 turns a part off.

    `bias_rate`: after each step the bias of every expert's choice moves by this much towards the mean load; weights and
    gradients do not see it. `auxiliary`: the coefficient of experts × Σ load share × mean score (Switch), where the
    load is that of the whole step before, over all ranks and micro-batches: so it means the same however a step is
    divided. `z`: the coefficient of the mean square of log Σ exp(logits), which keeps logits small.
    """

    bias_rate: Annotated[float, Number(0, finite=True)] = 1e-3
    auxiliary: Annotated[float, Number(0, finite=True)] = 0.0
    z: Annotated[float, Number(0, finite=True)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)


BALANCE = Balance()


class MixtureOfExperts(nn.Module):
    """Sends each token to the router's top `k` experts and sums their outputs by the router's weights.

    `hidden` is the width of every expert, or a list with one for each. `num_slots` is room for experts that come later:
    they take no part until they are active. Nothing is dropped, whatever the load. Inputs are (..., num_inputs).
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
