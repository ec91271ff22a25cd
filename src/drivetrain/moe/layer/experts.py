"""Experts, stacked: one tensor for each kind of weight, with a row for each expert."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from drivetrain.core.errors import DrivetrainError

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
        hidden = functional.grouped_mm(rows, self.w_in.to(dtype).transpose(-2, -1), offs=ends)
        if kinds is not None and self.b_in is not None:
            hidden = torch.addmm(hidden, kinds, self.b_in.to(dtype))
        result = functional.grouped_mm(self._activate(hidden), self.w_out.to(dtype).transpose(-2, -1), offs=ends)
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
    if torch.compiler.is_compiling():  # it fuses better by itself
        gate, up = hidden.chunk(2, -1)
        return functional.silu(gate) * up
    result: Tensor = _GatedSilu.apply(hidden)  # type: ignore[no-untyped-call]
    return result
