"""Fused optimizers give what plain ones give, whatever gradients look like: the reference is torch's plain form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.core.optimizers import tell_plain_steps, use_fused

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, weight_decay=0.01),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "nesterov": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "dampening": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, dampening=0.3),
    "adam": lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.1, lr_decay=0.1),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda weight: weight,
    "transposed": lambda weight: weight.t().contiguous().t(),
    "every second column": lambda weight: weight.repeat_interleave(2, 1)[:, ::2],
}


def sparse_rows(gradient: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), gradient[[0, 2]], gradient.shape, check_invariants=False)


def gradients_of(pattern: str, step: int, shapes: list[torch.Size]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    generator = torch.Generator().manual_seed(step)
    for number, shape in enumerate(shapes):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        if pattern == "sparse" and len(shape) == 2 and step in (1, 3):
            found.append(sparse_rows(gradient))
        elif pattern == "late" and number == 1 and step < 2:
            found.append(None)
        else:
            found.append(gradient)
    return found


def trained(name: str, layout: str, pattern: str, *, fused: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    parameters = [
        nn.Parameter(LAYOUTS[layout](weight)),
        nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64)),
        nn.Parameter(torch.randn(2, generator=generator)),  # of another type, in the same group
    ]
    optimizer = OPTIMIZERS[name](parameters)
    if fused:
        use_fused(optimizer, nn.Module())
    for step in range(5):
        given = gradients_of(pattern, step, [parameter.shape for parameter in parameters])
        for parameter, gradient in zip(parameters, given, strict=True):
            if gradient is None or gradient.is_sparse:
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            else:  # lies as autograd lets it lie
                parameter.grad = None
                (parameter * gradient.to(parameter.dtype)).sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_equals_plain(name: str, layout: str) -> None:
    takes_sparse = name in ("momentum", "dampening", "adagrad")  # plain torch takes no sparse gradient otherwise
    for pattern in ("all", "late", *(["sparse"] if takes_sparse else [])):
        if pattern == "sparse" and name == "momentum" and layout != "contiguous":
            continue
        expected, found = (trained(name, layout, pattern, fused=fused) for fused in (False, True))
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


def test_what_cannot_be_fused_is_not() -> None:
    strided = nn.Parameter(torch.randn(4, 6)[:, ::2])
    mixed = SGD([{"params": [nn.Parameter(torch.randn(3))]}, {"params": [strided]}], lr=0.1)
    use_fused(mixed, nn.Module())
    assert [group["fused"] for group in mixed.param_groups] == [True, None]
    assert not getattr(mixed, "_step_supports_amp_scaling", False)
    damped = OPTIMIZERS["dampening"]([nn.Parameter(torch.randn(3))])
    use_fused(damped, nn.Module())
    assert damped.param_groups[0]["fused"] is None


def test_the_plain_form_is_reported_once_and_only_for_its_steps() -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = SGD([weight], lr=0.1)
    use_fused(optimizer, nn.Module())
    told: list[str] = []
    tell_plain_steps(optimizer, told.append)
    for is_sparse, form in ((False, True), (True, False), (False, True), (True, False)):
        weight.grad = sparse_rows(torch.ones(4, 3)) if is_sparse else torch.ones(4, 3)
        optimizer.step()
        assert optimizer.param_groups[0]["fused"] is form
    assert told == ["a gradient is sparse, which fused SGD does not take: such steps are done by the plain form"]


def test_a_skipped_first_step_leaves_no_momentum() -> None:
    """Torch's fused kernel keeps uninitialised memory as momentum if its first step is skipped."""
    weight = nn.Parameter(torch.ones(64))
    optimizer = SGD([weight], lr=1.0, momentum=0.5)
    use_fused(optimizer, nn.Module())
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())  # type: ignore[attr-defined]
    weight.grad = torch.full((64,), float("inf"))
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(64))
    assert not optimizer.state[weight]["momentum_buffer"].any()


@pytest.mark.parametrize("is_infinite", [False, True])
def test_plain_steps_obey_the_loss_scaler(is_infinite: bool) -> None:
    """A fused optimizer skips by itself what the scaler found to be infinite: so must the plain step in its place."""
    weight, other = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))
    optimizer = SGD([{"params": [weight]}, {"params": [other]}], lr=1.0)
    use_fused(optimizer, nn.Module())
    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(is_infinite))  # type: ignore[attr-defined]
    weight.grad, other.grad = sparse_rows(torch.ones(4, 3)), torch.ones(3)
    optimizer.step()
    moved = 0.0 if is_infinite else 1.0
    assert weight.detach()[:, 0].tolist() == [1 - moved, 1, 1 - moved, 1]
    assert other.detach().tolist() == [1 - moved] * 3
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]  # as the scaler does


class Rare(nn.Module):
    """A branch of it is used for few samples only, and a table is looked up with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare = nn.Linear(8, 1), nn.Linear(8, 1)
        self.table = nn.Parameter(torch.randn(6, 1))

    def forward(self, x: Tensor, rare: Tensor, word: Tensor) -> Tensor:
        out: Tensor = self.always(x) + functional.embedding(word, self.table, sparse=bool(rare.any()))
        return out + self.rare(x) * rare[:, None] if rare.any() else out


def rare_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(*batch[:3]), batch[3])


@pytest.mark.parametrize("name", ["sgd without decay", "momentum", "adagrad"])
def test_a_late_branch_with_sparse_gradients_trains_as_in_a_plain_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make = OPTIMIZERS.get(name, lambda parameters: SGD(parameters, lr=0.1))
    generator = torch.Generator().manual_seed(0)
    x, rare = torch.randn(64, 8, generator=generator), torch.zeros(64, dtype=torch.long)
    rare[40] = 1
    word, y = torch.randint(6, (64,), generator=generator), x.sum(1, keepdim=True)
    torch.manual_seed(0)
    model = Rare()
    optimizer = make(model.parameters())
    for first in range(0, 64, 8):
        optimizer.zero_grad()
        rows = slice(first, first + 8)
        rare_loss(model, (x[rows], rare[rows], word[rows], y[rows])).backward()
        optimizer.step()
    job = dt.Job(
        name="rare",
        model=Rare,
        data=TensorDataset(x, rare, word, y),
        loss=rare_loss,
        optimizer=make,
        global_batch=8,
        epochs=1,
        shuffle=False,
    )
    result = dt.train(job, dt.configure(output_dir=tmp_path, report=False), quiet=True)
    found = load_file(dt.export(result))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
    assert "a gradient is sparse" in (result.folder / "events.jsonl").read_text()


class StopAt:
    """Ends the run with an error after a step."""

    every = 1

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, context: Any) -> None:
        if context.step == self.step:
            raise RuntimeError("planted")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def a_channels_last_model_goes_on_exactly(tmp_path: Path, gpu_mode: str = "auto") -> None:
    """The state of a checkpoint is row-major; fused kernels pair its elements with the weights' by address."""
    images = torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(0))

    def model() -> nn.Module:
        layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(16, 3))
        return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def job(name: str, stop_at: int) -> dt.Job:
        return dt.Job(
            name=name,
            model=model,
            data=TensorDataset(images, torch.arange(32) % 3),
            loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda parameters: AdamW(parameters, lr=0.01),
            global_batch=8,
            epochs=2,
            checkpoint_every=3,
            hooks=[StopAt(stop_at)],
        )

    config = dt.configure(output_dir=tmp_path, report=False, gpu_mode=gpu_mode)
    expected = load_file(dt.export(dt.train(job("whole", 0), config, quiet=True)))
    with pytest.raises(RuntimeError, match="planted"):
        dt.train(job("stopped", 5), config, quiet=True)
    result = dt.train(job("stopped", 0), config, quiet=True)
    assert result.resumed_from == 3
    found = load_file(dt.export(result))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_channels_last_model_goes_on_exactly(tmp_path: Path) -> None:
    a_channels_last_model_goes_on_exactly(tmp_path, "cpu")
