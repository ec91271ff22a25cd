"""Experts: their stacked weights, the router that chooses them for a token, and the ranks that they are on."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from drivetrain.core.errors import DrivetrainError

# ----------------------------------------------------------------------------------------------------------------------
# Experts, stacked: one tensor for each kind of weight, with a row for each expert.

Kind = Literal["mlp", "gated"]
# Each is 0 at 0, so hidden units that only fill up a narrower expert stay 0, and so do their weights.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


class Experts(nn.Module):
    """Stacked experts. `mlp`: out(act(in(x))). `gated`: out(act(gate(x)) × up(x)), with gate and up in one tensor.

    Experts narrower than the widest are padded with hidden units whose weights are 0. Those get no gradient and no
    decay, so they stay exactly 0: the result is the narrow expert's arithmetic.
    """

    def __init__(
        self,
        num_inputs: int,
        hidden: Sequence[int],
        num_outputs: int,
        *,
        kind: Kind = "mlp",
        activation: str = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        if kind not in ("mlp", "gated"):
            raise DrivetrainError(f"kind is {kind!r}", remedy="'mlp' or 'gated'")
        if activation not in ACTIVATIONS:
            raise DrivetrainError(f"activation is {activation!r}", remedy=f"one of {', '.join(ACTIVATIONS)}")
        self.kind, self.activation = kind, activation
        self.num_inputs, self.num_hidden, self.num_outputs = num_inputs, max(hidden), num_outputs
        count, width = len(hidden), self.num_hidden * (2 if kind == "gated" else 1)
        self.w_in = nn.Parameter(torch.zeros(count, width, num_inputs))
        self.w_out = nn.Parameter(torch.zeros(count, num_outputs, self.num_hidden))
        self.b_in = nn.Parameter(torch.zeros(count, width)) if bias else None
        self.b_out = nn.Parameter(torch.zeros(count, num_outputs)) if bias else None
        with torch.no_grad():
            for slot, wide in enumerate(hidden):
                self._start(slot, wide)

    def _start(self, slot: int, wide: int) -> None:
        """Initialize an expert as `nn.Linear` does, by its own width; a slot of width 0 stays empty."""
        if not wide:
            return
        for part in range(2 if self.kind == "gated" else 1):
            first = part * self.num_hidden
            _uniform(self.w_in[slot, first : first + wide], self.num_inputs)
            if self.b_in is not None:
                _uniform(self.b_in[slot, first : first + wide], self.num_inputs)
        _uniform(self.w_out[slot, :, :wide], wide)
        if self.b_out is not None:
            _uniform(self.b_out[slot], wide)

    @property
    def num_slots(self) -> int:
        return self.w_in.shape[0]

    @property
    def weights_per_expert(self) -> int:
        return self.w_in.shape[1] * self.w_in.shape[2] + self.w_out.shape[1] * self.w_out.shape[2]

    def dense(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run every expert on every token, in two products overall; experts that were not chosen get weight 0."""
        dtype, count = tokens.dtype, self.num_slots
        share = torch.zeros(tokens.shape[0], count, dtype=weights.dtype, device=tokens.device)
        share = share.scatter(1, chosen, weights).to(dtype)
        hidden = functional.linear(tokens, self.w_in.flatten(0, 1).to(dtype), _flat(self.b_in, dtype))
        active = self._activate(hidden.view(tokens.shape[0], count, self.w_in.shape[1]))
        weighed = (active * share.unsqueeze(-1)).reshape(tokens.shape[0], count * self.num_hidden)
        result = weighed @ self.w_out.to(dtype).transpose(1, 2).reshape(-1, self.num_outputs)
        return result if self.b_out is None else torch.addmm(result, share, self.b_out.to(dtype))

    def each(self, tokens: Tensor) -> Tensor:
        """Run every slot on every token: (slots, tokens, outputs), in a few kernels and without copying weights."""
        hidden = functional.linear(tokens, self.w_in.flatten(0, 1), None if self.b_in is None else self.b_in.flatten())
        active = self._activate(hidden.view(tokens.shape[0], self.num_slots, self.w_in.shape[1])).transpose(0, 1)
        weights = self.w_out.transpose(1, 2)
        return active @ weights if self.b_out is None else torch.baddbmm(self.b_out.unsqueeze(1), active, weights)

    def grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Run rows sorted by expert, in one kernel per product. It does not support autocast: weights are cast here."""
        dtype = rows.dtype
        kinds = None
        if self.b_in is not None:
            # As a product: its backward is one, too, where gathering's would add up row by row in any order.
            slots = torch.arange(self.num_slots, device=rows.device)
            numbers = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
            kinds = (torch.searchsorted(ends, numbers, right=True).unsqueeze(1) == slots).to(dtype)
        hidden = functional.grouped_mm(rows, in_dtype(self.w_in, dtype).transpose(-2, -1), offs=ends)
        if kinds is not None and self.b_in is not None:
            hidden = torch.addmm(hidden, kinds, self.b_in.to(dtype))
        result = functional.grouped_mm(self._activate(hidden), in_dtype(self.w_out, dtype).transpose(-2, -1), offs=ends)
        return result if kinds is None or self.b_out is None else torch.addmm(result, kinds, self.b_out.to(dtype))

    def loop(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Run rows sorted by expert, group by group. The reference: any device, any dtype."""
        dtype = rows.dtype
        w_in, w_out = self.w_in.to(dtype).unbind(0), self.w_out.to(dtype).unbind(0)
        b_in = [None] * len(w_in) if self.b_in is None else self.b_in.to(dtype).unbind(0)
        b_out = [None] * len(w_in) if self.b_out is None else self.b_out.to(dtype).unbind(0)
        results = []
        for slot, group in enumerate(torch.split(rows, list(counts))):
            if group.shape[0]:
                hidden = self._activate(functional.linear(group, w_in[slot], b_in[slot]))
                results.append(functional.linear(hidden, w_out[slot], b_out[slot]))
        if results:
            return torch.cat(results)
        # No rows: still in the autograd graph, as backward has to run on every rank; gradients are 0, not missing.
        nothing = sum(weight.flatten()[:0].sum() for weight in self.parameters())
        return rows.new_zeros(0, self.num_outputs) + (rows.sum() + nothing).to(dtype)

    def _activate(self, hidden: Tensor) -> Tensor:
        if self.kind == "mlp":
            return ACTIVATIONS[self.activation](hidden)
        if self.activation == "silu":
            return gated_silu(hidden)
        gate, up = hidden.chunk(2, -1)
        return ACTIVATIONS[self.activation](gate) * up


def _uniform(weight: Tensor, fan_in: int) -> None:
    nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5)


def _flat(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.flatten().to(dtype)


def in_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in a dtype, laid out as it is: the compiler would transpose it meanwhile, which takes longer."""
    if weight.dtype == dtype or not (weight.is_cuda and torch.compiler.is_compiling()):
        return weight.to(dtype)
    cast: Tensor = torch.ops.drivetrain.cast(weight, dtype)
    return cast


@torch.library.custom_op("drivetrain::cast", mutates_args=())
def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype)


_cast.register_fake(lambda weight, dtype: torch.empty_like(weight, dtype=dtype))
_cast.register_autograd(
    lambda ctx, gradient: (gradient.to(ctx.dtype), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "dtype", inputs[0].dtype),
)


class _GatedSilu(Function):
    """Computes silu(gate) × up of one fused tensor.

    Its backward writes both halves in place instead of concatenating.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        gate, up = hidden.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        gate, up = hidden.chunk(2, -1)
        result = torch.empty_like(hidden)
        of_gate, of_up = result.chunk(2, -1)
        torch.mul(gradients[0], functional.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=of_gate)
        return result


def gated_silu(hidden: Tensor) -> Tensor:
    """Return silu(gate) × up of the two halves of each row."""
    if HAS_TRITON and hidden.is_cuda and hidden.dim() == 2 and hidden.dtype in ONE_KERNEL:
        fused: Tensor = torch.ops.drivetrain.gated_silu(hidden)
        return fused
    if torch.compiler.is_compiling():  # it fuses better by itself
        gate, up = hidden.chunk(2, -1)
        return functional.silu(gate) * up
    result: Tensor = _GatedSilu.apply(hidden)  # type: ignore[no-untyped-call]
    return result


# The same on an NVIDIA GPU, in one kernel for each direction. The compiler's backward reads the gate and the gradient
# twice, once for each half that it writes, and computes the activation anew: 0.78 ms of the 7.7 that a layer takes in
# `python -m benchmarks moe`.

HAS_TRITON = importlib.util.find_spec("triton") is not None
ONE_KERNEL = (torch.bfloat16, torch.float16, torch.float32)
MOST_IN_BLOCK = 1024  # elements of a row that one program computes


@cache
def _kernels() -> tuple[Any, Any]:
    """Return the kernels of forward and backward, compiled at their first launch."""
    import triton
    from triton import language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def forward(hidden, result, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * block + tl.arange(0, block)
        inside = at < width
        gate = tl.load(hidden + 2 * row * width + at, mask=inside).to(tl.float32)
        up = tl.load(hidden + 2 * row * width + width + at, mask=inside).to(tl.float32)
        tl.store(result + row * width + at, gate * tl.sigmoid(gate) * up, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def backward(gradient, hidden, result, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * block + tl.arange(0, block)
        inside = at < width
        of_result = tl.load(gradient + row * width + at, mask=inside).to(tl.float32)
        gate = tl.load(hidden + 2 * row * width + at, mask=inside).to(tl.float32)
        up = tl.load(hidden + 2 * row * width + width + at, mask=inside).to(tl.float32)
        share = tl.sigmoid(gate)
        of_gate = of_result * up * share * (1 + gate * (1 - share))
        tl.store(result + 2 * row * width + at, of_gate, mask=inside)
        tl.store(result + 2 * row * width + width + at, of_result * gate * share, mask=inside)

    return forward, backward


def _launch(kernel: Any, hidden: Tensor, *tensors: Tensor) -> None:
    """Launch a kernel over all rows of `hidden`, which may be none."""
    num_rows, width = hidden.shape[0], hidden.shape[1] // 2
    if not num_rows or not width:
        return
    block = min(MOST_IN_BLOCK, 1 << (width - 1).bit_length())
    with torch.cuda.device(hidden.device):
        kernel[(num_rows, -(-width // block))](*tensors, width, block)


@torch.library.custom_op("drivetrain::gated_silu", mutates_args=())
def _gated_silu(hidden: Tensor) -> Tensor:
    result = hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2)
    _launch(_kernels()[0], hidden, hidden.contiguous(), result)
    return result


@torch.library.custom_op("drivetrain::gated_silu_backward", mutates_args=())
def _gated_silu_backward(gradient: Tensor, hidden: Tensor) -> Tensor:
    result = hidden.new_empty(hidden.shape)
    _launch(_kernels()[1], hidden, gradient.contiguous(), hidden.contiguous(), result)
    return result


_gated_silu.register_fake(lambda hidden: hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2))
_gated_silu_backward.register_fake(lambda gradient, hidden: hidden.new_empty(hidden.shape))
_gated_silu.register_autograd(
    lambda ctx, gradient: torch.ops.drivetrain.gated_silu_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# ----------------------------------------------------------------------------------------------------------------------
# Chooses the experts of a token, and their weights: token-choice top-k, in fp32 or better.

Scores = Literal["softmax", "sigmoid"]
MOST_MAXIMA = 4  # that are computed one after the other


class Routing(NamedTuple):
    chosen: Tensor  # (tokens, k): slots of experts, best first
    weights: Tensor  # (tokens, k), fp32 or better
    logits: Tensor  # (tokens, slots): -inf where there is no expert


class Router(nn.Module):
    """A linear map from a token to a score for each slot.

    Slots without an active expert are never chosen: their scores are 0, and no gradient reaches their rows. `bias`
    moves the choice and not the weights; balancing sets it. Noise, in training, is drawn from torch's generators, which
    a run keys by step, rank and micro-step.
    """

    mask: Tensor  # 0 for an active expert, -inf for any other slot
    bias: Tensor

    def __init__(
        self,
        num_inputs: int,
        num_slots: int,
        k: int,
        *,
        scores: Scores = "softmax",
        normalize: bool | None = None,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        if scores not in ("softmax", "sigmoid"):
            raise DrivetrainError(f"scores is {scores!r}", remedy="'softmax' or 'sigmoid'")
        self.k, self.scores, self.noise = k, scores, noise
        # The normalized weight of a single expert is always 1: the router would never learn.
        self.normalize = k > 1 if normalize is None else normalize
        self.weight = nn.Parameter(torch.empty(num_slots, num_inputs))
        bound = num_inputs**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        self.register_buffer("mask", torch.zeros(num_slots))
        self.register_buffer("bias", torch.zeros(num_slots))
        self.uses_bias = False

    def forward(self, tokens: Tensor) -> Routing:
        dtype = torch.promote_types(torch.promote_types(tokens.dtype, self.weight.dtype), torch.float32)
        logits = functional.linear(tokens.to(dtype), self.weight.to(dtype))
        if self.noise and self.training:
            logits = logits + self.noise * torch.randn_like(logits)
        logits = logits + self.mask
        ranked = logits
        if self.uses_bias:
            ranked = self.score(logits.detach()) + self.bias + self.mask
        chosen = _best(ranked, self.k) if torch.compiler.is_compiling() else ranked.topk(self.k, -1).indices
        return Routing(chosen, self._weights(logits, chosen), logits)

    def score(self, logits: Tensor) -> Tensor:
        """Return the scores, (tokens, slots): 0 where there is no expert."""
        return logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()

    @property
    def active(self) -> Tensor:
        return self.mask == 0

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        if self.scores == "softmax" and self.normalize:
            return logits.gather(1, chosen).softmax(-1)  # the same as scores over their sum, in half the kernels
        weights = self.score(logits).gather(1, chosen)
        if self.normalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / total.clamp_min(torch.finfo(weights.dtype).tiny)  # all of them may underflow
        return weights

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.bias = self.bias.float()  # steps of a thousandth vanish in bf16
        return self


def _best(ranked: Tensor, count: int) -> Tensor:
    """Return what `topk` does, which takes kernels of its own; the compiler fuses maxima with what is around them."""
    if count > MOST_MAXIMA:
        return ranked.topk(count, -1).indices
    slots = torch.arange(ranked.shape[-1], device=ranked.device)
    found: list[Tensor] = []
    for _ in range(count):
        found.append(ranked.argmax(-1, keepdim=True))
        ranked = torch.where(slots == found[-1], -torch.inf, ranked)
    return torch.cat(found, -1)


# ----------------------------------------------------------------------------------------------------------------------
# Assigns experts to ranks: by cost, by the capability of the rank's device, and by co-activation.

Placement = tuple[int, ...]  # the rank of each slot
SLACK = 0.1  # how much longer than without the slowest rank may take, for experts that work together to be together
WORTH = 0.005  # of all that works together: less is not worth moving an expert for


def slots_of(placement: Placement, rank: int) -> list[int]:
    """Return the slots of a rank."""
    return [slot for slot, holder in enumerate(placement) if holder == rank]


def place(costs: Sequence[float], capabilities: Sequence[float], together: Tensor | None = None) -> Placement:
    """Place slots by cost; then swap slots while that puts more co-activation (`together`) on one rank."""
    ranks = list(_by_cost(costs, capabilities))
    for one, other in exchanges(costs, ranks, capabilities, together) if together is not None else ():
        ranks[one], ranks[other] = ranks[other], ranks[one]
    return tuple(ranks)


def exchanges(
    costs: Sequence[float], placement: Sequence[int], capabilities: Sequence[float], together: Tensor
) -> list[tuple[int, int]]:
    """Return pairs of slots to swap, one after the other, so that experts that are chosen together share a rank.

    `together` is (slots, slots): the fraction of all tokens that two experts both get. Every rank keeps its number of
    slots, and none gets more work than the slowest would have if only costs mattered, plus a tenth. Where one has more
    than that now, it is relieved first.
    """
    tied = together.detach().cpu().double()
    if len(capabilities) < 2 or not tied.any():
        return []
    return _Exchanges(costs, placement, capabilities, (tied + tied.T) / 2).found()


class _Exchanges:
    def __init__(
        self, costs: Sequence[float], placement: Sequence[int], capabilities: Sequence[float], tied: Tensor
    ) -> None:
        self._cost = torch.tensor([float(value) for value in costs], dtype=torch.float64)
        self._power = torch.tensor([float(value) for value in capabilities], dtype=torch.float64)
        self._ranks = torch.tensor(list(placement))
        self._tied = tied.fill_diagonal_(0.0)
        by_cost = torch.tensor(_by_cost(costs, capabilities))
        self._limit = float(self._times(by_cost).max()) * (1 + SLACK) + 1e-9

    def found(self) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = []
        for wanted in (self._relieved, self._gained):
            for _ in range(4 * len(self._cost)):
                worth, least = wanted()
                one, other = divmod(int(worth.argmax()), len(self._cost))
                if not worth[one, other] > least:
                    break
                self._ranks[[one, other]] = self._ranks[[other, one]]
                pairs.append((one, other))
        return pairs

    def _times(self, ranks: Tensor) -> Tensor:
        """Return the time that each rank takes."""
        return torch.zeros(len(self._power), dtype=torch.float64).index_add_(0, ranks, self._cost) / self._power

    def _slower(self) -> Tensor:
        """Return (slots, slots): the longer of the times of both their ranks, if these two swap."""
        ranks, power = self._ranks, self._power[self._ranks].unsqueeze(1)
        after = self._times(ranks)[ranks].unsqueeze(1) + (self._cost - self._cost.unsqueeze(1)) / power
        return torch.maximum(after, after.T)

    def _relieved(self) -> tuple[Tensor, float]:
        """Return how much sooner the slowest rank would be done, while it takes too long."""
        times = self._times(self._ranks)
        if times.max() <= self._limit:
            return torch.zeros_like(self._tied), 0.0
        of_slowest = (self._ranks == times.argmax()).unsqueeze(1) & (self._ranks != times.argmax())
        return (times.max() - self._slower()).where(of_slowest, 0.0), 1e-9 * float(times.max())

    def _gained(self) -> tuple[Tensor, float]:
        """Return how much more co-activation would be within a rank."""
        at = torch.nn.functional.one_hot(self._ranks, len(self._power)).double()
        ties = self._tied @ at  # of each slot to each rank
        nearer = ties[:, self._ranks] - ties.gather(1, self._ranks.unsqueeze(1))  # to the rank of the other
        gain = nearer + nearer.T - 2 * self._tied
        fits = self._slower().le(self._limit) & (self._ranks.unsqueeze(1) != self._ranks)
        return gain.where(fits, 0.0).triu(1), WORTH * float(self._tied.sum())


def share_together(placement: Sequence[int], together: Tensor) -> float:
    """Return the fraction of co-activation within a rank; 1 where there is none."""
    tied = together.detach().cpu().double()
    ranks = torch.tensor(list(placement))
    total = tied.sum()
    return float((tied * (ranks.unsqueeze(1) == ranks)).sum() / total) if total > 0 else 1.0


def _by_cost(costs: Sequence[float], capabilities: Sequence[float]) -> Placement:
    """Assign the most expensive first, each to the rank that would be done soonest; free slots are spread evenly.

    Where all cost the same and all ranks are equal, each rank gets a block of neighbors: fewer parts to save.
    """
    num_ranks = len(capabilities)
    if len(set(costs)) <= 1 and len(set(capabilities)) == 1:
        bounds = [len(costs) * rank // num_ranks for rank in range(num_ranks + 1)]
        return tuple(rank for rank, (first, last) in enumerate(pairwise(bounds)) for _ in range(first, last))
    ranks = [0] * len(costs)
    work, held = [0.0] * num_ranks, [0] * num_ranks
    for slot in sorted(range(len(costs)), key=lambda slot: -costs[slot]):
        cost = costs[slot]
        # A slot that costs nothing now will hold an expert one day: it goes where the fewest are.
        ranks[slot] = min(
            range(num_ranks),
            key=lambda rank: ((work[rank] + cost) / capabilities[rank] if cost else 0.0, held[rank], rank),
        )
        work[ranks[slot]] += cost
        held[ranks[slot]] += 1
    return tuple(ranks)


def costs_of(load: Sequence[int], active: Sequence[bool]) -> list[float]:
    """Return the cost of each slot: the tokens of the last step; before the first, every expert the same.

    An expert without tokens still costs something: it will get some.
    """
    total, count = sum(load), sum(active)
    least = 0.01 * total / max(count, 1)
    return [
        (max(float(tokens), least) if total else 1.0) if is_active else 0.0
        for tokens, is_active in zip(load, active, strict=True)
    ]


def free_slot(
    load: Sequence[int],
    active: Sequence[bool],
    taken: Sequence[bool],
    placement: Placement,
    capabilities: Sequence[float],
) -> int | None:
    """Return the slot for a new expert: a free one of the rank with the least work. None: there is no free slot."""
    costs = costs_of(load, active)
    work = [0.0] * len(capabilities)
    held = [0] * len(capabilities)
    for cost, rank, is_taken in zip(costs, placement, taken, strict=True):
        work[rank] += cost / capabilities[rank]
        held[rank] += is_taken
    free = [slot for slot, is_taken in enumerate(taken) if not is_taken]
    return min(free, key=lambda slot: (work[placement[slot]], held[placement[slot]], slot), default=None)
