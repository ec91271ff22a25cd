"""Attention that repeats: the same results as torch's, in place only while steps have to repeat."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drivetrain.core import precision
from drivetrain.core.precision import FP32_ON_CPU, numerics

OF_TORCH = functional.scaled_dot_product_attention


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)


@pytest.mark.parametrize(("is_causal", "scale"), [(False, None), (True, 0.3)])
def test_compiled_it_is_flex_attention_and_gives_the_same(
    is_causal: bool, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_fits", lambda *parts: True)  # else on a GPU alone
    torch.compiler.reset()
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        graphs.append(graph.code)
        return graph.forward

    parts = torch.randn(3, 2, 4, 256, 32, generator=torch.Generator().manual_seed(0)).unbind()
    with torch.no_grad(), numerics(FP32_ON_CPU, deterministic=True, cudnn_benchmark=False):
        found = torch.compile(attend, backend=backend, fullgraph=True)(*parts, is_causal, scale)
        eager = attend(*parts, is_causal, scale)
    assert ["flex_attention" in graph for graph in graphs] == [True]
    assert torch.equal(eager, OF_TORCH(*parts, is_causal=is_causal, scale=scale))
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)


def test_torchs_own_is_back_afterwards() -> None:
    with numerics(FP32_ON_CPU, deterministic=True, cudnn_benchmark=False):
        assert functional.scaled_dot_product_attention is not OF_TORCH
    assert functional.scaled_dot_product_attention is OF_TORCH
    with numerics(FP32_ON_CPU, deterministic=False, cudnn_benchmark=False):
        assert functional.scaled_dot_product_attention is OF_TORCH


@pytest.mark.parametrize(
    "changes", [{"attn_mask": torch.ones(256, 256, dtype=torch.bool)}, {"dropout_p": 0.5}], ids=["mask", "dropout"]
)
def test_what_it_cannot_do_is_left_to_torch(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_fits", lambda *parts: True)
    torch.compiler.reset()
    codes: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        codes.append(graph.code)
        return graph.forward

    def call(parts: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(*parts, **changes)  # type: ignore[arg-type]

    with torch.no_grad(), numerics(FP32_ON_CPU, deterministic=True, cudnn_benchmark=False):
        torch.compile(call, backend=backend, fullgraph=True)(torch.randn(3, 2, 4, 256, 32))
    assert codes
    assert not any("flex_attention" in code for code in codes)
