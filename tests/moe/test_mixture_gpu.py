"""On a GPU: every way of running in bf16 and fp32, against the blackboard in float64; nothing waits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.moe import Balance, Lifecycle, MixtureOfExperts, Rules, Settlement
from drivetrain.moe.experts import gated_silu
from tests.api.jobs import Variant
from tests.moe.jobs import Mixture, run_mixture
from tests.moe.reference import distance, gradients, plain_gradients

pytestmark = pytest.mark.gpu

BF16 = 2.0**-8
CUDA = torch.device("cuda")


def made(**changes: Any) -> tuple[MixtureOfExperts, list[int]]:
    torch.manual_seed(0)
    values: dict[str, Any] = {"num_inputs": 64, "num_experts": 5, "hidden": [64, 128, 32, 64, 128], "num_outputs": 32}
    values |= changes
    layer = MixtureOfExperts(**values)
    widths = values["hidden"] + [0] * (layer.num_slots - len(values["hidden"]))
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.bfloat16())  # it is the arithmetic that is compared
    return layer, widths


def some(count: int, layer: MixtureOfExperts) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(count, layer.experts.num_inputs, generator=generator).bfloat16()
    return tokens, torch.randn(count, layer.experts.num_outputs, generator=generator).bfloat16()


@pytest.mark.parametrize("kind", ["mlp", "gated"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    ("way", "is_bf16"), [("loop", True), ("dense", True), ("grouped", True), ("loop", False), ("dense", False)]
)
def test_each_way_equals_float64(kind: str, k: int, way: str, is_bf16: bool) -> None:
    layer, widths = made(kind=kind, k=k, way=way, num_slots=8, bias=True)
    tokens, upstream = some(200, layer)
    expected = plain_gradients(layer, widths, tokens, upstream)
    layer.to(CUDA)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    with torch.autocast("cuda", torch.bfloat16, enabled=is_bf16):
        found = gradients(layer, tokens.to(CUDA, dtype), upstream.to(CUDA, dtype))
    assert found["output"].dtype == dtype
    assert distance(found, expected) < (6 * BF16 if is_bf16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(300, 24), (77, 1), (64, 1408), (5, 2816), (0, 16)])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gated_activation_is_rounded_once(rows: int, width: int, dtype: torch.dtype, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(rows, 2 * width, generator=generator)).to(CUDA, dtype)
    upstream = torch.randn(rows, width, generator=generator).to(CUDA, dtype)
    found, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    output = (torch.compile(gated_silu, dynamic=True) if compiled else gated_silu)(found)
    output.backward(upstream)
    gate, up = exact.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(upstream.double())
    assert found.grad is not None
    assert exact.grad is not None
    for one, other in ((output, expected), (found.grad, exact.grad)):
        assert one.dtype == dtype
        # Half a unit of the last place, and what fp32 loses where terms of both signs are added up.
        limit = torch.finfo(dtype).eps * other.abs() + 1e-5
        assert bool(((one.double() - other).abs() <= limit).all())


@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_groups_without_tokens_leave_no_trace(kind: str) -> None:
    """What the kernel does not write is not initialised: it must reach neither outputs nor gradients."""
    layer, widths = made(kind=kind, k=1, way="grouped", num_slots=8)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.bias[3] = 1.0
    tokens, upstream = some(130, layer)
    expected = plain_gradients(layer, widths, tokens, upstream)
    layer.to(CUDA)
    poison = [torch.full((2**22,), float("nan"), device=CUDA, dtype=torch.bfloat16) for _ in range(8)]
    del poison  # the allocator hands this memory out again
    with torch.autocast("cuda", torch.bfloat16):
        found = gradients(layer, tokens.to(CUDA), upstream.to(CUDA))
        empty = gradients(layer, tokens[:0].to(CUDA), upstream[:0].to(CUDA))
    assert distance(found, expected) < 6 * BF16
    assert all(value.isfinite().all() for value in (found | empty).values())
    assert not empty["experts.w_in"].any()


@pytest.mark.parametrize("way", ["dense", "grouped"])
def test_nothing_waits_for_the_device(way: str) -> None:
    layer, _ = made(way=way, kind="gated", balance=Balance(1e-3, 1e-2, 1e-3))
    layer.to(CUDA)
    settlement = Settlement(layer)
    tokens, upstream = (part.to(CUDA) for part in some(256, layer))
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                gradients(layer, tokens, upstream)
            settlement.settle()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert layer.load.sum() == 512


@pytest.mark.parametrize("way", ["dense", "grouped"])
def test_compiled_it_computes_and_counts_the_same(way: str) -> None:
    torch._dynamo.reset()
    layer, _ = made(way=way, kind="gated")
    layer.to(CUDA)
    compiled = torch.compile(layer, fullgraph=True)
    tokens, upstream = (part.to(CUDA) for part in some(256, layer))
    with torch.autocast("cuda", torch.bfloat16):
        plain, found = gradients(layer, tokens, upstream), gradients(layer, tokens, upstream, compiled)
    assert distance(found, plain) < 6 * BF16
    assert layer.tally.on(layer.load.device).sum() == 2 * 512


@pytest.mark.parametrize("count", [256, 8192])
def test_compiled_it_takes_a_smaller_last_batch(count: int) -> None:
    torch._dynamo.reset()
    layer, _ = made(kind="gated")
    layer.to(CUDA)
    compiled = torch.compile(layer)
    for number in (count, count - 96):
        tokens, upstream = (part.to(CUDA) for part in some(number, layer))
        with torch.autocast("cuda", torch.bfloat16):
            plain, found = gradients(layer, tokens, upstream), gradients(layer, tokens, upstream, compiled)
        assert distance(found, plain) < 6 * BF16


def test_sizes_choose_the_way() -> None:
    small, _ = made()
    large = MixtureOfExperts(1024, 32, 2816, kind="gated", k=2)
    for layer in (small.to(CUDA), large.to(CUDA)):
        layer.eval()
    assert small.way(1024, torch.float32).name == "dense"
    assert large.way(32768, torch.bfloat16).name == "grouped"
    assert large.way(32768, torch.float32).name == "loop"


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-4), ("bf16", 5e-2), ("fp16", 5e-2)])
def test_it_trains_in_any_precision_as_on_the_cpu(tmp_path: Path, precision: str, limit: float) -> None:
    variant = Variant(dtype=torch.float32, steps=8, global_batch=30, num_samples=100)
    wanted = Mixture(num_slots=7, dtype=torch.float32)
    on_cpu = run_mixture(str(tmp_path / "cpu"), variant, wanted, 10)
    settings = {"precision": precision, "gpu_mode": "single_gpu"}
    on_gpu = run_mixture(str(tmp_path / "gpu"), variant, wanted, 10, settings)
    assert on_cpu is not None
    assert on_gpu is not None
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=limit)


@pytest.mark.parametrize("hooks", [False, True])
def test_a_captured_step_learns_and_counts_the_same(tmp_path: Path, hooks: bool) -> None:
    """Loads are settled between replays, and experts come and go between them, in place."""
    variant = Variant(dtype=torch.float32, steps=40, global_batch=32, num_samples=320)
    wanted = Mixture(num_experts=3, num_slots=6, dtype=torch.float32)
    found = []
    for capture in ("off", "on"):
        settings = {"precision": "fp32", "gpu_mode": "single_gpu", "capture": capture, "auto_optimize": False}
        rules = Rules(far=1.01, new_share=0.01, patience=1, cooldown=1, agreement=2.0)
        changes = {"hooks": [Lifecycle(5, rules)] if hooks else []}
        trained = run_mixture(str(tmp_path / capture), variant, wanted, None, settings, changes=changes)
        assert trained is not None
        found.append(trained)
    words = (tmp_path / "on" / "suite" / "events.jsonl").read_text()
    assert "step captured" in words, words
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-5)
    for key in ("model/mixture.load", "model/mixture.expert_ids"):
        assert (found[0].weights[key] == found[1].weights[key]).all(), key
    assert found[0].weights["model/mixture.load"].sum() == 64
