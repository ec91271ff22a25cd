"""Every way of running a mixture computes what the blackboard says, in outputs and in every gradient."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain.core.errors import DrivetrainError
from drivetrain.moe import Balance, MixtureOfExperts
from drivetrain.moe.dispatch import Work, choose_way, from_rows, order_of, to_rows
from drivetrain.moe.experts import gated_silu
from tests.moe.reference import distance, gradients, plain_forward, plain_gradients

BF16 = 2.0**-8


def made(seed: int = 0, **changes: Any) -> tuple[MixtureOfExperts, list[int]]:
    values: dict[str, Any] = {"num_inputs": 16, "num_experts": 4, "hidden": [8, 24, 16, 8], "num_outputs": 8, "k": 2}
    values |= changes
    torch.manual_seed(seed)
    layer = MixtureOfExperts(**values)
    hidden = values["hidden"]
    widths = [hidden] * values["num_experts"] if isinstance(hidden, int) else list(hidden)
    return layer, widths + [0] * (layer.num_slots - len(widths))


def some(count: int, layer: MixtureOfExperts, dtype: torch.dtype, seed: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(count, layer.experts.num_inputs, generator=generator, dtype=torch.float64)
    upstream = torch.randn(count, layer.experts.num_outputs, generator=generator, dtype=torch.float64)
    return tokens.to(dtype), upstream.to(dtype)


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    num_experts = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["mlp", "gated"]))
    return {
        "num_inputs": draw(st.integers(1, 9)),
        "num_experts": num_experts,
        "hidden": draw(st.lists(st.integers(1, 9), min_size=num_experts, max_size=num_experts)),
        "num_outputs": draw(st.integers(1, 9)),
        "k": draw(st.integers(1, num_experts)),
        "kind": kind,
        "activation": draw(st.sampled_from(["gelu", "relu", "silu", "tanh"])),
        "bias": draw(st.booleans()),
        "scores": draw(st.sampled_from(["softmax", "sigmoid"])),
        "normalize": draw(st.sampled_from([None, True, False])),
        "num_slots": num_experts + draw(st.integers(0, 3)),
    }


@given(layers(), st.integers(0, 7), st.sampled_from(["dense", "loop"]), st.integers(0, 1000))
@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
def test_any_layer_equals_the_blackboard(values: dict[str, Any], count: int, way: str, seed: int) -> None:
    layer, widths = made(seed, **values, way=way)
    layer.double()
    layer.router.bias[: values["num_experts"]].uniform_(-0.2, 0.2)
    tokens, upstream = some(count, layer, torch.float64, seed)
    assert distance(gradients(layer, tokens, upstream), plain_gradients(layer, widths, tokens, upstream)) < 1e-10


@pytest.mark.parametrize("kind", ["mlp", "gated"])
@pytest.mark.parametrize(
    ("way", "dtype", "limit"),
    [
        ("loop", torch.float32, 1e-5),
        ("dense", torch.float32, 1e-5),
        ("loop", torch.bfloat16, 4 * BF16),
        ("dense", torch.bfloat16, 4 * BF16),
        ("grouped", torch.bfloat16, 4 * BF16),
    ],
)
@pytest.mark.parametrize("k", [1, 2])
def test_each_way_equals_float64_to_the_rounding_of_its_type(
    kind: str, way: str, dtype: torch.dtype, limit: float, k: int
) -> None:
    """In bf16 with the same weights: it is the arithmetic that is compared, and routing is exact."""
    layer, widths = made(kind=kind, way=way, k=k, num_slots=6, bias=True)
    tokens, upstream = some(40, layer, dtype)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.to(dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = gradients(layer, tokens, upstream)
    assert found["output"].dtype == dtype
    assert found["experts.w_in"].dtype == torch.float32
    assert distance(found, plain_gradients(layer, widths, tokens, upstream)) < limit


@pytest.mark.parametrize("way", ["dense", "loop", "grouped"])
def test_experts_without_tokens_get_zero_gradients(way: str) -> None:
    layer, widths = made(way=way, k=1)
    tokens, upstream = some(12, layer, torch.bfloat16)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.bias[2] = 1.0  # all tokens go to one expert
    layer.to(torch.bfloat16)
    found = gradients(layer, tokens, upstream)
    assert layer.tally.on(torch.device("cpu")).tolist() == [0, 0, 12, 0]
    assert all(not found["experts.w_in"][slot].any() for slot in (0, 1, 3))
    assert distance(found, plain_gradients(layer, widths, tokens, upstream)) < 6 * BF16


@given(st.integers(0, 9), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=40)
def test_rows_there_and_back_have_true_gradients(count: int, k: int, num_experts: int, seed: int) -> None:
    torch.manual_seed(seed)
    chosen = torch.randint(0, num_experts, (count, k))
    order = order_of(chosen, num_experts)
    assert order.ends.tolist() == torch.bincount(chosen.flatten(), minlength=num_experts).cumsum(0).tolist()
    tokens = torch.randn(count, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(count, k, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(count * k, 1, dtype=torch.float64)
    result = from_rows(to_rows(tokens, order) * factors, weights, order)
    expected = torch.stack([
        tokens[t] * sum(weights[t, c] * factors[order.places[t * k + c]] for c in range(k)) for t in range(count)
    ]) if count else tokens * 1  # fmt: skip
    assert torch.allclose(result, expected, atol=1e-12)
    if count and seed < 5:
        assert torch.autograd.gradcheck(
            lambda t, w: from_rows(to_rows(t, order) * factors, w, order), (tokens, weights)
        )


def test_the_gate_has_a_true_gradient() -> None:
    hidden = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gated_silu, (hidden,))


@pytest.mark.parametrize("way", ["dense", "loop"])
def test_what_fills_up_narrow_experts_stays_zero_in_training(way: str) -> None:
    layer, widths = made(way=way, num_slots=6)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=0.5)
    for step in range(30):
        tokens, upstream = some(16, layer, torch.float32, step)
        optimizer.zero_grad()
        (layer(tokens) - upstream).square().mean().backward()
        optimizer.step()
    for slot, width in enumerate(widths):
        assert not layer.experts.w_in[slot, width:].any()
        assert not layer.experts.w_out[slot, :, width:].any()
        assert bool(layer.experts.w_in[slot, :width].any()) == (width > 0)
    assert not layer.router.weight[4:].any()


def test_a_masked_expert_is_as_if_it_were_not_there() -> None:
    """Whatever stands in its slot: no output and no other gradient changes by a bit."""
    for way in ("dense", "loop"):
        found = []
        for noise in (0.0, 3.0):
            layer, _ = made(way=way, num_slots=6)
            with torch.no_grad():
                layer.router.weight[5] += noise
                layer.router.bias[5] += noise
                layer.experts.w_in[5] += noise
                layer.experts.w_out[5] += noise
            tokens, upstream = some(30, layer, torch.float32)
            found.append(gradients(layer, tokens, upstream))
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
        assert not found[1]["experts.w_in"][5].any()
        assert not found[1]["router.weight"][5].any()


def test_the_router_is_exact_under_autocast() -> None:
    layer, widths = made(way="loop")
    tokens, _ = some(200, layer, torch.float32)
    weights = {name: value.detach().double() for name, value in layer.named_parameters()}
    _, expected = plain_forward(layer, weights, widths, tokens.double())
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(tokens)
    assert output.dtype == torch.bfloat16
    counts = torch.bincount(torch.tensor(expected).flatten(), minlength=4)
    assert layer.tally.on(torch.device("cpu")).tolist() == counts.tolist()


class Block(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mixture, _ = made(**{"hidden": 16, "num_outputs": 16, "balance": Balance(1e-3, 1e-2, 1e-3), **changes})

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs + self.mixture(self.norm(inputs))
        return result


@pytest.mark.parametrize("way", ["dense", "loop"])
def test_recomputed_blocks_have_the_same_gradients_and_count_once(way: str) -> None:
    found, counts = [], []
    for recomputes in (False, True):
        block = Block(way=way, noise=0.3).train()
        tokens, upstream = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1)).unbind()
        forward = partial(checkpoint, block, use_reentrant=False) if recomputes else block
        torch.manual_seed(5)
        found.append(gradients(block, tokens, upstream, forward))
        counts.append(block.mixture.tally.on(torch.device("cpu")).tolist())
        assert len(block.mixture.tally.losses) == 1
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert counts[0] == counts[1]
    assert sum(counts[0]) == 18


@pytest.mark.parametrize("way", ["dense", "grouped", "loop"])
def test_compiled_it_computes_and_counts_the_same(way: str) -> None:
    """As one graph where there is nothing to wait for; without compiling again for the second step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer, _ = made(hidden=16, num_outputs=16, way=way, balance=Balance(1e-3, 1e-2, 1e-3))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=way != "loop")
    for step in range(3):
        tokens, upstream = some(9, layer, torch.float32, step)
        with torch.autocast("cpu", torch.bfloat16):
            plain, found = gradients(layer, tokens, upstream), gradients(layer, tokens, upstream, compiled)
        assert distance(found, plain) < 2 * BF16
        assert sum(layer.tally.on(torch.device("cpu")).tolist()) == 18 * 2 * (step + 1)
        first, second = (value.item() for value, _ in layer.tally.losses)
        assert first == pytest.approx(second, rel=1e-5)
        layer.tally.losses.clear()
        if step == 0:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_noise_follows_the_generators_and_only_trains() -> None:
    layer, _ = made(noise=1.0)
    tokens, _ = some(20, layer, torch.float32)
    torch.manual_seed(1)
    first = layer(tokens)
    torch.manual_seed(1)
    assert torch.equal(first, layer(tokens))
    assert not torch.equal(first, layer(tokens))
    layer.eval()
    assert torch.equal(layer(tokens), layer(tokens))


def test_it_survives_copying_saving_and_other_types() -> None:
    layer, _ = made(num_slots=6, balance=Balance(1e-3, 1e-2))
    tokens, _ = some(5, layer, torch.float32)
    output = layer(tokens)
    twin = copy.deepcopy(layer)  # with a graph of its last forward still alive
    assert torch.equal(twin(tokens), output)
    assert twin.tally is not layer.tally
    other, _ = made(1, num_slots=6)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(tokens), output)
    assert layer.to(torch.bfloat16).router.bias.dtype == torch.float32
    assert layer(tokens.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 5}, "k is 5"),
        ({"hidden": [8, 8]}, "2 widths"),
        ({"num_slots": 3}, "num_slots is 3"),
        ({"activation": "cosine"}, "cosine"),
        ({"scores": "best"}, "best"),
        ({"way": "fast"}, "fast"),
        ({"kind": "square"}, "square"),
        ({"num_experts": 2.5}, "num_experts is 2.5\n"),
        ({"hidden": 2.5}, "hidden is"),
        ({"k": 0, "noise": -1}, "k is 0, noise is -1"),
        ({"noise": math.nan}, "noise is nan"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DrivetrainError, match=words) as caught:
        made(**change)
    assert caught.value.remedy


def work(**changes: Any) -> Work:
    values: dict[str, Any] = {
        "num_tokens": 32768,
        "k": 2,
        "num_slots": 32,
        "weights_per_expert": 3 * 1024 * 2816,
        "row_lengths": (1024, 2816, 1024),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 0),
    }
    return Work(**(values | changes))


SMALL = {"num_tokens": 1024, "num_slots": 16, "weights_per_expert": 784 * 128 + 1280, "row_lengths": (784, 128, 10)}


@pytest.mark.parametrize(
    ("changes", "capability", "way", "words"),
    [
        ({}, (9, 0), "grouped", "GFLOP"),
        ({}, (8, 0), "loop", "compute capability 9.0"),
        ({"dtype": torch.float32}, (9, 0), "loop", "not float32"),
        ({"row_lengths": (1024, 2816, 10)}, (9, 0), "loop", "not 10"),
        (SMALL, (9, 0), "dense", "less than sorting"),
        (SMALL | {"dtype": torch.float32}, (7, 0), "dense", "less than sorting"),
        (SMALL | {"device": torch.device("cpu")}, (9, 0), "loop", "8 × the work"),
    ],
)
def test_the_way_is_chosen_by_size_and_type_and_says_why(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], capability: tuple[int, int], way: str, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    choice = choose_way(work(**changes))
    assert choice.name == way
    assert words in choice.reason
    assert math.isfinite(work(**changes).dense_gflop)


def test_the_way_can_be_chosen_while_compiling_for_any_number_of_tokens() -> None:
    """As for an epoch's last batch, which is smaller: the compiler then knows no number to put into a reason."""
    torch._dynamo.reset()
    layer, _ = made()
    sizes = {"dense": 512, "loop": 10**9}  # fp32: no grouped products

    def chosen(tokens: torch.Tensor, many: int) -> torch.Tensor:
        way = layer.dispatcher.way(layer.experts, tokens.shape[0] + many, 2, torch.float32, torch.device("cuda", 0))
        return tokens + list(sizes).index(way.name)

    compiled = torch.compile(chosen, backend="eager", fullgraph=True, dynamic=True)
    for place, many in enumerate(sizes.values()):
        for count in (5, 7):
            assert torch.equal(compiled(torch.zeros(count), many), torch.full((count,), float(place)))
