"""Each reason for which a step cannot be captured; which batches a recorded step fits; what a step keeps in Python."""

import itertools
import random
import types
from collections import Counter, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from re import match
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.api.driving import drive
from drivetrain.config import configure
from drivetrain.core.errors import ConfigError
from drivetrain.core.precision import Precision
from drivetrain.core.world import World
from drivetrain.data.keyed_items import Draws
from drivetrain.loop import make_capturable, why_not_captured, why_not_here
from drivetrain.loop.capture_rules import (
    NotStaticError,
    changes,
    generators_state,
    python_state,
    signature,
    with_tensors,
)

# A device that need not be there: nothing is put on it.
META = torch.device("meta")
GPU = torch.device("cuda", 0)
IMAGE = torch.zeros(2, 3, 4, 4)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CALLS = 0
HISTORY: list[float] = []
SETTINGS = types.SimpleNamespace(calls=0)
COUNTER = itertools.count()
DRAWS = np.random.default_rng(0)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, dtype=dtype, device=META))]


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters(), lr=1e-3, **options)


class Handmade(torch.optim.Optimizer):
    def __init__(self) -> None:
        super().__init__(parameters(), {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        pass


def reason(optimizer: torch.optim.Optimizer | None = None, precision: str = "bf16", **changes: Any) -> str:
    values: dict[str, Any] = {"world": World(device=GPU), "strategy": "single"} | changes
    found = optimizer or adam()
    for group in found.param_groups:
        for parameter in group["params"]:
            parameter.__class__ = _OnGpu
    return why_not_captured(values.pop("world"), values.pop("strategy"), found, Precision(precision, "cuda"), **values)


class _OnGpu(nn.Parameter):
    """A parameter that says it is on the GPU, for a machine that has none."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


def hooked() -> torch.optim.Optimizer:
    optimizer = adam()
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world": World(device=torch.device("cpu"))}, "this run is on cpu"),
        ({"strategy": "data_parallel"}, "data_parallel"),
        ({"num_micro_steps": 40}, "40 micro-batches"),
        ({"activations": "offload"}, "activations: offload"),
        ({"activations": "recompute"}, "activations: recompute"),
        ({"compile_mode": "reduce-overhead"}, "reduce-overhead captures the model by itself"),
        ({"compile_mode": "max-autotune"}, "max-autotune captures the model by itself"),
        ({"asserts": True}, "device assertions"),
        ({"draws": Draws(python=True, torch=False)}, "draws from Python's or numpy's generators"),
        ({"optimizer": Handmade()}, "Handmade has no fused form here"),
        ({"optimizer": torch.optim.SGD(parameters(), lr=0.1, foreach=True)}, "SGD has no fused form here"),
        ({"optimizer": torch.optim.AdamW(parameters(torch.float64), lr=0.1)}, "weights are float64"),
        ({"optimizer": hooked()}, "hooked to the step of AdamW"),
        ({"precision": "fp16"}, "fp16: AdamW is not fused"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reason_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in reason(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compile_mode": "default"},
        {"draws": Draws(python=False, torch=True)},
        {"optimizer": torch.optim.NAdam(parameters(), lr=0.1)},
        {"optimizer": torch.optim.RMSprop(parameters(), lr=0.1)},
    ],
)
def test_otherwise_nothing_stands_in_the_way(changes: dict[str, Any]) -> None:
    assert reason(**changes) == ""


class Ranks(World):
    """Two ranks on GPUs, over a backend that need not be there."""

    def __init__(self, backend: str) -> None:
        super().__init__(size=2, device=GPU, group=cast(Any, object()))
        self._over = backend

    @property
    def backend(self) -> str:
        return self._over


@pytest.mark.parametrize(
    ("strategy", "backend", "changes", "words"),
    [
        ("ddp", "gloo", {}, "gloo runs its collectives on the host"),
        ("ddp", "nccl", {"has_turns": True}, "each with a DDP of its own"),
        ("fsdp", "nccl", {}, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
        ("expert_parallel", "nccl", {}, "expert_parallel: the host has to know"),
        ("deepspeed", "nccl", {}, "deepspeed: its step asks the host"),
        ("ddp", "nccl", {}, ""),
    ],
)
def test_why_several_processes_do_not_capture(strategy: str, backend: str, changes: dict[str, Any], words: str) -> None:
    found = reason(world=Ranks(backend), strategy=strategy, **changes)
    assert words in found
    assert words or not found


def test_several_processes_capture_only_if_that_is_asked_for() -> None:
    assert why_not_here(Ranks("nccl"), asserts=False).startswith("2 processes share a step")
    assert why_not_here(Ranks("nccl"), asserts=False, is_asked_for=True) == ""


def test_a_parameter_elsewhere() -> None:
    world = World(device=GPU)
    assert "not on cuda:0" in why_not_captured(world, "single", adam(), Precision("bf16", "cuda"))


def test_a_loop_of_ones_own_is_not_captured(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", capture="on")
    with pytest.raises(ConfigError, match="in your own loop Python runs it"):
        drive(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2)] * 4, max_steps=1, config=config)


def test_every_group_is_made_capturable() -> None:
    optimizer = torch.optim.AdamW([{"params": parameters()}, {"params": parameters()}], lr=0.1)
    make_capturable(optimizer)
    assert all(group["capturable"] for group in optimizer.param_groups)
    make_capturable(torch.optim.SGD(parameters(), lr=0.1))


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Sample:
    inputs: Tensor
    name: str


def of(batch: Any) -> Any:
    return signature(batch, [])


def floats(*shape: int) -> Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: floats(3, 4),
        lambda: [floats(3, 4), torch.arange(3)],
        lambda: Pair(floats(2), floats(3)),
        lambda: {"a": floats(2), "b": (floats(1), {"c": None})},
        lambda: Sample(floats(2), "name"),
        lambda: UserDict(a=floats(2), b=3),
        lambda: [1, 2.5, True, "text", b"bytes", None],
    ],
)
def test_equal_for_what_differs_in_values_only(make: Any) -> None:
    assert of(make()) == of(make())
    assert hash(of(make())) == hash(of(make()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (floats(3, 4), floats(4, 3)),
        (floats(3), floats(3).double()),
        (IMAGE, IMAGE.contiguous(memory_format=torch.channels_last)),
        ([floats(2)], (floats(2),)),
        ([floats(2), 1], [floats(2), True]),
        ([floats(2), 1], [floats(2), 2]),
        ({"a": floats(2)}, {"b": floats(2)}),
        (Pair(floats(2), floats(2)), (floats(2), floats(2))),
        (Sample(floats(2), "one"), Sample(floats(2), "other")),
    ],
)
def test_different_for_anything_else(one: Any, other: Any) -> None:
    assert of(one) != of(other)


@pytest.mark.parametrize("thing", [torch.eye(3).to_sparse(), object(), {1, 2}])
def test_what_cannot_be_given_anew_is_named(thing: Any) -> None:
    with pytest.raises(NotStaticError, match="a batch holds a"):
        of([floats(2), thing])


@pytest.mark.parametrize(
    "batch",
    [
        [torch.arange(3), torch.arange(4)],
        Pair(torch.arange(3), torch.arange(4)),
        {"b": torch.arange(3), "a": [torch.arange(4), "kept"]},
        UserDict(b=torch.arange(3), a=(torch.arange(4),)),
        Sample(torch.arange(3), "kept"),
    ],
)
def test_the_same_structure_around_other_tensors(batch: Any) -> None:
    tensors: list[Tensor] = []
    before = signature(batch, tensors)
    others = [tensor + 1 for tensor in tensors]
    changed = with_tensors(batch, iter(others))
    found: list[Tensor] = []
    assert signature(changed, found) == before
    assert all(one is other for one, other in zip(found, others, strict=True))
    again: list[Tensor] = []
    signature(batch, again)
    assert all(one is other for one, other in zip(again, tensors, strict=True)), "the batch itself was changed"


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.layer(inputs))


class Counting(Plain):
    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(inputs)


class CountingInClass(Plain):
    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(inputs)


class Averaging(Plain):
    """Binds a new tensor in every step: a replay would read the old one's place and write another."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3)

    def forward(self, inputs: Tensor) -> Tensor:
        result = super().forward(inputs)
        self.mean = 0.9 * self.mean + 0.1 * result.detach().mean(0)
        return result


class Rebinding(Averaging):
    """The same with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.zeros(3))


class Remembering(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"losses": deque()}

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen["losses"].append(len(inputs))
        return super().forward(inputs)


class UsingGlobals(Plain):
    def forward(self, inputs: Tensor) -> Tensor:
        HISTORY.append(1.0)
        return super().forward(inputs)


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.mse_loss(model(batch), torch.zeros(len(batch), 3))


def global_counter(model: nn.Module, batch: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return mean_of(model, batch)


def through_another(model: nn.Module, batch: Tensor) -> Tensor:
    return global_counter(model, batch)


def settings(model: nn.Module, batch: Tensor) -> Tensor:
    SETTINGS.calls += 1
    return mean_of(model, batch)


def counts_on(model: nn.Module, batch: Tensor) -> Tensor:
    next(COUNTER)
    return mean_of(model, batch)


def draws(model: nn.Module, batch: Tensor) -> Tensor:
    return mean_of(model, batch) * DRAWS.random()


def in_default(model: nn.Module, batch: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return mean_of(model, batch)


def in_attribute(model: nn.Module, batch: Tensor) -> Tensor:
    in_attribute.calls += 1  # type: ignore[attr-defined]
    return mean_of(model, batch)


in_attribute.calls = 0  # type: ignore[attr-defined]


class LossWithState:
    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.kinds["all"] += 1
        return mean_of(model, batch)

    def method(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self(model, batch)


class WithSlots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.calls += 1
        return mean_of(model, batch)


def closure() -> Callable[..., Tensor]:
    calls = 0

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return mean_of(model, batch)

    return loss


def appending() -> Callable[..., Tensor]:
    note = [].append

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        result = mean_of(model, batch)
        note(result.detach())
        return result

    return loss


def generator() -> Callable[..., Tensor]:
    weights = (1 / number for number in itertools.count(1))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_of(model, batch) * next(weights)

    return loss


def looked_at(model: nn.Module, loss: Callable[..., Any], device: torch.device = CPU) -> list[str]:
    """What changed in a step that is not the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, torch.randn(5, 4)).backward()
        optimizer.step()

    step()
    before = python_state(model, loss, optimizer, device)
    step()
    return changes(before, python_state(model, loss, optimizer, device))


class MadeAnew(dict[str, Any]):
    """Makes an object whenever it is asked for one, as the table of activations of transformers does."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


ACTIVATIONS = MadeAnew(relu=nn.ReLU)


def by_table(model: nn.Module, batch: Tensor) -> Tensor:
    return ACTIVATIONS["relu"](model(batch)).mean()


def by_pattern(model: nn.Module, batch: Tensor) -> Tensor:
    """`re` keeps the patterns that it has compiled, those of other threads, too."""
    return mean_of(model, batch) if match(f"{random.random()}", "") is None else batch.sum()


@pytest.mark.parametrize(
    "loss", [mean_of, partial(mean_of), lambda model, batch: mean_of(model, batch), by_table, by_pattern]
)
def test_an_ordinary_step_changes_nothing(loss: Callable[..., Any]) -> None:
    assert looked_at(Plain(), loss) == []


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (Counting, "model.calls"),
        (CountingInClass, "CountingInClass.calls"),
        (Averaging, "model.mean"),
        (Rebinding, "model.mean"),
        (Remembering, "model.seen['losses']"),
        (UsingGlobals, "HISTORY"),
    ],
)
def test_what_a_model_keeps(make: Callable[[], nn.Module], where: str) -> None:
    assert looked_at(make(), mean_of)[0].startswith(where)
    inner = nn.Sequential(nn.Identity(), make())
    assert looked_at(inner, mean_of)[0].startswith(where.replace("model", "model.1"))


@pytest.mark.parametrize(
    ("loss", "where"),
    [
        (global_counter, "CALLS"),
        (through_another, "CALLS"),
        (settings, "SETTINGS.calls"),
        (counts_on, "COUNTER"),
        (draws, "DRAWS"),
        (in_default, "loss's default 0"),
        (in_attribute, "loss.calls"),
        (LossWithState(), "loss.kinds['all']"),
        (LossWithState().method, "loss.kinds['all']"),
        (partial(LossWithState()), "loss.func.kinds['all']"),
        (WithSlots(), "loss.calls"),
        (closure(), "loss's calls"),
        (appending(), "loss's note"),
        (generator(), "loss's weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_loss_keeps(loss: Callable[..., Any], where: str) -> None:
    assert any(found.startswith(where) for found in looked_at(Plain(), loss)), looked_at(Plain(), loss)


def test_a_hook_of_a_module() -> None:
    seen: list[int] = []
    model = Plain()
    model.layer.register_forward_hook(lambda module, arguments, output: seen.append(1))
    assert "seen" in looked_at(model, mean_of)[0]


def test_a_tensor_that_is_not_on_the_device() -> None:
    """In place on the host: a replay would not do it. On the run's own device it would."""
    kept = torch.zeros(1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        kept.add_(1)
        return mean_of(model, batch)

    assert not any("kept" in where for where in looked_at(Plain(), loss, CPU))
    assert any("kept" in where for where in looked_at(Plain(), loss, GPU))


@pytest.mark.parametrize(
    ("draw", "who"),
    [(random.random, "Python's"), (np.random.random, "numpy's"), (lambda: torch.rand(()), "torch's")],
)
def test_draws_from_the_hosts_generators(draw: Callable[[], Any], who: str) -> None:
    before = generators_state(GPU)
    assert changes(before, generators_state(GPU)) == []
    draw()
    assert changes(before, generators_state(GPU))[0].startswith(who)


def test_changes_between_steps() -> None:
    """What a hook may do: anything but writing values in place asks for a new recording."""
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict[str, Any]:
        return python_state(model, mean_of, optimizer, CPU)

    before = state()
    with torch.no_grad():
        model.layer.weight.mul_(0.5)
    assert changes(before, state()) == []
    for change, where in (
        (lambda: setattr(model.norm, "momentum", 0.5), "model.norm.momentum"),
        (lambda: model.norm.eval(), "model.norm.training"),
        (lambda: model.layer.bias.requires_grad_(False), "model.layer.bias"),
        (lambda: setattr(model, "layer", nn.Linear(4, 3)), "model._modules"),
        (lambda: optimizer.param_groups[0].update(weight_decay=0.5), "optimizer.param_groups[0]['weight_decay']"),
    ):
        before = state()
        change()
        assert where in changes(before, state())
