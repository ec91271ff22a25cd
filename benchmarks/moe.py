"""A mixture of experts, forward and backward: against a plain layer of grouped products, and a loop over experts.

The large case has fp32 weights and computes in bf16; gradients go to the inputs, the router and every expert. All
layers hold the same weights and route alike. The small case is launches more than arithmetic.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.moe import MixtureOfExperts

TOKENS, WIDTH, HIDDEN, EXPERTS, K = 32_768, 1024, 2816, 32, 2
ROUNDS = 7
TFLOP = 3 * 2 * TOKENS * K * 3 * WIDTH * HIDDEN * 1e-12  # forward, and twice that backward


class Routed(nn.Module):
    """A router as most people write it: fp32, softmax, top-k, normalized."""

    def __init__(self, like: MixtureOfExperts) -> None:
        super().__init__()
        self.k = like.k
        self.router = nn.Parameter(like.router.weight.detach().clone())

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(tokens.device.type, enabled=False):
            scores = functional.linear(tokens.float(), self.router).softmax(-1)
        weights, chosen = scores.topk(self.k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


class PlainGrouped(Routed):
    """Sort by expert, two grouped products, weigh the activations, put back in order, sum."""

    def __init__(self, like: MixtureOfExperts) -> None:
        super().__init__(like)
        self.w_in = nn.Parameter(like.experts.w_in.detach().clone())
        self.w_out = nn.Parameter(like.experts.w_out.detach().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.route(tokens)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        counts = (flat.unsqueeze(1) == torch.arange(self.w_in.shape[0], device=flat.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        rows = tokens.bfloat16().index_select(0, order // self.k)
        hidden = functional.grouped_mm(rows, self.w_in.bfloat16().transpose(-2, -1), offs=ends)
        gate, up = hidden.chunk(2, -1)
        active = functional.silu(gate) * up * weights.reshape(-1)[order].unsqueeze(1).bfloat16()
        result = functional.grouped_mm(active, self.w_out.bfloat16().transpose(-2, -1), offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        return result.index_select(0, back).view(tokens.shape[0], self.k, -1).sum(1)


class LoopOverModules(Routed):
    """A mixture as most are written: an expert is a module of three linear maps, and each is run on its tokens."""

    class Expert(nn.Module):
        def __init__(self, w_in: Tensor, w_out: Tensor) -> None:
            super().__init__()
            for name, weight in zip(("gate", "up", "down"), (*w_in.chunk(2), w_out), strict=True):
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
                linear.weight.data.copy_(weight)
                self.add_module(name, linear)

        def forward(self, tokens: Tensor) -> Tensor:
            result: Tensor = self.down(functional.silu(self.gate(tokens)) * self.up(tokens))
            return result

    def __init__(self, like: MixtureOfExperts) -> None:
        super().__init__(like)
        weights = zip(like.experts.w_in.detach(), like.experts.w_out.detach(), strict=True)
        self.experts = nn.ModuleList(self.Expert(*pair) for pair in weights)

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.route(tokens)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            if token.numel():
                output = expert(tokens[token]) * weights[token, choice].unsqueeze(1)
                result.index_add_(0, token, output.to(result.dtype))
        return result


class LoopOverExperts(Routed):
    """A mixture that loops over experts, runs each on its tokens, and adds results; gate and up are one product."""

    def __init__(self, like: MixtureOfExperts) -> None:
        super().__init__(like)
        experts = like.experts
        self.kind, self.num_outputs = experts.kind, experts.num_outputs
        self.w_in = nn.ParameterList(weight.clone() for weight in experts.w_in.detach())
        self.w_out = nn.ParameterList(weight.clone() for weight in experts.w_out.detach())
        has_bias = experts.b_in is not None and experts.b_out is not None
        self.b_in = nn.ParameterList(bias.clone() for bias in experts.b_in.detach()) if has_bias else None
        self.b_out = nn.ParameterList(bias.clone() for bias in experts.b_out.detach()) if has_bias else None

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.route(tokens)
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cuda") else tokens.dtype
        result = torch.zeros(tokens.shape[0], self.num_outputs, dtype=dtype, device=tokens.device)
        for expert in range(len(self.w_in)):
            token, choice = torch.where(chosen == expert)
            if not token.numel():
                continue
            hidden = functional.linear(tokens[token], self.w_in[expert], self.b_in[expert] if self.b_in else None)
            if self.kind == "gated":
                gate, up = hidden.chunk(2, -1)
                hidden = functional.silu(gate) * up
            else:
                hidden = functional.relu(hidden)
            output = functional.linear(hidden, self.w_out[expert], self.b_out[expert] if self.b_out else None)
            result.index_add_(0, token, output * weights[token, choice].unsqueeze(1).to(output.dtype))
        return result


def measure() -> dict[str, list[float]]:
    if not torch.cuda.is_available():
        raise SystemExit("moe needs a GPU")
    return {**_large(), **_small()}


def _large() -> dict[str, list[float]]:
    torch.manual_seed(0)
    ours = MixtureOfExperts(WIDTH, EXPERTS, HIDDEN, k=K, kind="gated").cuda()
    layers = {
        "drivetrain": ours,
        "plain grouped": PlainGrouped(ours),
        "loop over modules": LoopOverModules(ours),
        "loop": LoopOverExperts(ours),
    }
    tokens = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    _check_alike(layers, tokens, upstream, 0.05)
    steps = {name: _step(layer, tokens, upstream, autocast=True) for name, layer in layers.items()}
    for name in ("drivetrain", "plain grouped"):  # a loop asks the host how many tokens there are, and breaks in pieces
        compiled = torch.compile(layers[name])
        steps[f"{name} compiled"] = _step(layers[name], tokens, upstream, autocast=True, called=compiled)
    # As the trainer runs steps where the device would wait for the host between kernels.
    steps["drivetrain compiled, captured"] = _captured(steps["drivetrain compiled"], 0.05)
    times = _times(steps, {name: 4 if name.startswith("loop") else 20 for name in steps})
    result = {f"large, {name} (ms)": found for name, found in times.items()}
    result |= {f"large, {name} (TFLOP/s)": [TFLOP / ms * 1e3 for ms in found] for name, found in times.items()}
    for ours_is, others in (
        ("drivetrain", ("plain grouped", "loop over modules", "loop")),
        ("drivetrain compiled", ("plain grouped compiled", "loop over modules", "loop")),
        ("drivetrain compiled, captured", ("plain grouped compiled",)),
    ):
        for name in others:
            result[f"large, {name} / {ours_is} (×)"] = _ratios(times[name], times[ours_is])
    return result


def _small() -> dict[str, list[float]]:
    torch.manual_seed(0)
    ours = MixtureOfExperts(784, 16, 128, 10, k=K, activation="relu").cuda()
    layers: dict[str, nn.Module] = {"drivetrain": ours, "loop": LoopOverExperts(ours)}
    tokens, upstream = torch.rand(1024, 784, device="cuda"), torch.randn(1024, 10, device="cuda")
    _check_alike(layers, tokens, upstream, 1e-3)
    steps = {name: _step(layer, tokens, upstream, autocast=False) for name, layer in layers.items()}
    compiled = torch.compile(ours)
    steps["drivetrain compiled"] = _step(ours, tokens, upstream, autocast=False, called=compiled)
    # As the trainer runs a step this short. The loop cannot be captured: it asks the host how many tokens there are.
    steps["drivetrain captured"] = _captured(steps["drivetrain"])
    ways = [name for name in steps if name != "loop"]
    times = _times(steps, {"loop": 30, **dict.fromkeys(ways, 100)})
    result = {f"small, {name} (ms)": found for name, found in times.items()}
    for name in ways:
        result[f"small, loop / {name} (×)"] = _ratios(times["loop"], times[name])
    return result


def _step(
    layer: nn.Module, tokens: Tensor, upstream: Tensor, *, autocast: bool, called: Any = None
) -> Callable[[], Tensor]:
    inputs = tokens.clone().requires_grad_(autocast)  # the small case is a first layer: its inputs are data

    def step() -> Tensor:
        layer.zero_grad()
        inputs.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output: Tensor = (layer if called is None else called)(inputs)
        output.backward(upstream)
        return output.detach()

    return step


def _captured(step: Callable[[], Tensor], limit: float = 1e-5) -> Callable[[], Tensor]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        output = step()
    eager = step().clone()
    graph.replay()
    if not torch.allclose(output, eager, atol=limit):
        raise SystemExit("the captured step computes something else")

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


def _check_alike(layers: dict[str, nn.Module], tokens: Tensor, upstream: Tensor, limit: float) -> None:
    """Raise if the layers compute different things: comparing them would say nothing."""
    outputs = {
        name: _step(layer, tokens, upstream, autocast=tokens.dtype == torch.bfloat16)()
        for name, layer in layers.items()
    }
    first = outputs["drivetrain"].float()
    for name, output in outputs.items():
        distance = (output.float() - first).norm() / first.norm()
        if not distance < limit:
            raise SystemExit(f"{name} computes something else: {distance:.3g} of the output's norm apart")


def _times(steps: dict[str, Callable[[], Tensor]], repetitions: dict[str, int]) -> dict[str, list[float]]:
    """Return the milliseconds of a step, in rounds that take turns, the wait for the device included."""
    for step in steps.values():
        for _ in range(3):
            step()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(repetitions[name]):
                step()
            torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - began) / repetitions[name] * 1e3)
    return samples


def _ratios(slow: list[float], fast: list[float]) -> list[float]:
    return [a / b for a, b in zip(slow, fast, strict=True)]
