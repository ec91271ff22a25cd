"""FP8 linear layers against float64, on whatever device is here; the sizes are those of small transformers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.core.precision import LEAST_FEATURES, RECIPES, Fp8Linear, compute_in_fp8, scaled
from drivetrain.core.value import Fp8Recipe as Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDING = {E4M3: 2**-4, E5M2: 2**-3}  # half a unit of the last of 3 and 2 bits, relative to the number


def layer_of(recipe: Recipe, inputs: int = 256, outputs: int = 512) -> tuple[nn.Linear, nn.Linear]:
    """Return a layer that multiplies in FP8, and the same in float64."""
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs)
    exact = copy.deepcopy(layer).double()
    assert compute_in_fp8([layer], recipe) == 1
    return layer, exact


def run(layer: nn.Module, inputs: Tensor, gradient: Tensor, dtype: torch.dtype) -> list[Tensor]:
    inputs = inputs.to(dtype, copy=True).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        output = layer(inputs)
    output.backward(gradient.to(output.dtype))
    grads = [parameter.grad for parameter in layer.parameters()]
    return [each.detach().double() for each in (output, inputs.grad, *grads)]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_scaling_rounds_once_and_only_by_the_format(kind: torch.dtype, dim: int | None) -> None:
    values = torch.randn(64, 48, dtype=torch.float64).float() * torch.logspace(-3, 3, 48)
    numbers, factor = scaled(values, kind, dim)
    assert numbers.float().abs().max() <= torch.finfo(kind).max
    assert torch.equal(torch.frexp(factor)[0], torch.full_like(factor, 0.5)), "a power of two"
    found = numbers.double() * factor.double()
    smallest = torch.finfo(kind).tiny * factor.double()  # below it the format has fewer bits
    limit = ROUNDING[kind] * values.double().abs().clamp(min=smallest.expand_as(values))
    assert bool(((found - values.double()).abs() <= limit).all())


def test_a_number_is_rounded_alike_whatever_stands_beside_it() -> None:
    values = torch.randn(32, 32)
    beside = torch.cat([values, torch.full((1, 32), 37.0)])
    alone, factor = scaled(values, E4M3, None)
    there, other = scaled(beside, E4M3, None)
    is_normal = values.abs() > 2.0**-6 * other  # the smallest normal number of e4m3, at the coarser scale
    assert factor != other
    assert torch.equal((alone.float() * factor)[is_normal], (there[:-1].float() * other)[is_normal])


@pytest.mark.parametrize("zeros", [torch.zeros(16, 16), torch.full((16, 16), 1e-30)])
def test_nothing_and_next_to_nothing_stay_finite(zeros: Tensor) -> None:
    numbers, factor = scaled(zeros, E4M3, 1)
    assert bool(torch.isfinite(numbers.float() * factor).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bad_number_is_not_hidden(recipe: Recipe, bad: float) -> None:
    layer, _ = layer_of(recipe)
    inputs = torch.randn(32, 256)
    inputs[3, 7] = bad
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.isfinite(layer(inputs)[3]).any()


@pytest.mark.parametrize("shape", [(32, 256), (2, 24, 256), (7, 256)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_are_near_float64(recipe: Recipe, shape: tuple[int, ...]) -> None:
    layer, exact = layer_of(recipe)
    inputs, gradient = torch.randn(shape), torch.randn(*shape[:-1], 512)
    for found, wanted in zip(
        run(layer, inputs, gradient, torch.float32), run(exact, inputs, gradient, torch.float64), strict=True
    ):
        # Each factor is off by at most 2^-4 (e5m2: 2^-3), at random: their root mean square over a long sum is less.
        assert float((found - wanted).norm() / wanted.norm()) < (0.05 if recipe == "fp8" else 0.08)


@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_whose_weights_differ_much_in_size_are_near_float64(recipe: Recipe) -> None:
    layer, exact = layer_of(recipe)
    with torch.no_grad():
        sizes = torch.logspace(-2, 2, 512).unsqueeze(1)[torch.randperm(512)]
        layer.weight.mul_(sizes)
        exact.weight.mul_(sizes.double())
    inputs, gradient = torch.randn(32, 256), torch.randn(32, 512) / sizes.t()
    found = run(layer, inputs, gradient, torch.float32)[1]
    wanted = run(exact, inputs, gradient, torch.float64)[1]
    assert float((found - wanted).norm() / wanted.norm()) < (0.05 if recipe == "fp8" else 0.08)


def test_by_rows_the_division_of_a_batch_is_nothing_but_order() -> None:
    layer, _ = layer_of("fp8")
    inputs, gradient = torch.randn(64, 256), torch.randn(64, 512)
    whole = run(layer, inputs, gradient, torch.float32)
    layer.zero_grad()
    parts = [run(layer, inputs[part], gradient[part], torch.float32) for part in (slice(0, 48), slice(48, 64))]
    for number in (0, 1):
        assert torch.equal(torch.cat([part[number] for part in parts]), whole[number])
    # The gradients of weights are sums over rows, in bf16.
    assert float((parts[1][2] - whole[2]).norm() / whole[2].norm()) < 2**-8


def test_outside_autocast_it_is_linear() -> None:
    layer, _ = layer_of("fp8")
    inputs = torch.randn(4, 256)
    assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))


def test_it_changes_only_what_pays_and_can_be_undone() -> None:
    class Own(nn.Linear):
        pass

    small, odd = nn.Linear(LEAST_FEATURES, 16), nn.Linear(LEAST_FEATURES, LEAST_FEATURES + 8)
    model = nn.Sequential(nn.Linear(256, 256), small, odd, Own(256, 256))
    names = list(model.state_dict())
    assert compute_in_fp8([model], "fp8") == 1
    assert [type(layer) for layer in model] == [Fp8Linear, nn.Linear, nn.Linear, Own]
    assert list(model.state_dict()) == names
    assert compute_in_fp8([model], None) == 0
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weights_get_no_gradient(recipe: Recipe) -> None:
    layer, _ = layer_of(recipe)
    layer.weight.requires_grad_(False)
    inputs = torch.randn(16, 256, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(inputs).sum().backward()
    assert layer.weight.grad is None
    assert inputs.grad is not None


def errors_on_gpu(layer: nn.Module, exact: nn.Module, rows: int, backend: str | None) -> list[float]:
    inputs = torch.randn(rows, 1024, device="cuda")
    gradient = torch.randn(rows, 2048, device="cuda")

    def learn(model: Any, values: Tensor, around: bool) -> list[Tensor]:
        values = values.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=around):
            output = model(values)
        output.backward(gradient.to(output.dtype))
        return [each.detach().double() for each in (output, values.grad, *(p.grad for p in layer_of_model(model)))]

    def layer_of_model(model: nn.Module) -> list[Any]:
        return list(model.parameters())

    called = torch.compile(layer, backend=backend) if backend else layer
    pairs = zip(learn(called, inputs, True), learn(exact, inputs.double(), False), strict=True)
    return [float((found - wanted).norm() / wanted.norm()) for found, wanted in pairs]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("rows", [4096, 1000])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_is_as_near_to_float64(recipe: Recipe, rows: int, backend: str | None) -> None:
    layer, exact = layer_of(recipe, 1024, 2048)
    found = errors_on_gpu(layer.cuda(), exact.cuda(), rows, backend)
    assert max(found) < (0.05 if recipe == "fp8" else 0.08), found
