"""Compiling only some modules, and doing without a compiler that does not work."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.core.errors import ConfigError
from drivetrain.core.launchers import PHASES, supervision
from drivetrain.moe import MixtureOfExperts
from drivetrain.monitor.phases import FlopCount
from drivetrain.plan.fitting import _Live
from drivetrain.proving.loss import KeyedDraws
from drivetrain.run.loss_probe import ReplayedDraws
from drivetrain.strategies.compiling import (
    CompileOptions,
    compile_named,
    compile_repeated,
    compiled,
    forget_compiled,
    num_graphs,
    told_of_compiling,
    why_not_compiled,
)
from drivetrain.strategies.sharding import compile_blocks

CPU = torch.device("cpu")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.body = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs) * self.router(inputs).softmax(-1)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import cpp_builder, exc

    def fail(*args: Any, **kwargs: Any) -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fail)
    torch.compiler.reset()


def job(name: str) -> dt.Job:
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    return dt.Job(
        name=name,
        model=Gated,
        data=data,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        global_batch=8,
        max_steps=2,
    )


def train(folder: Path, name: str, **settings: Any) -> dt.Result:
    return dt.train(job(name), dt.configure(output_dir=folder, gpu_mode="cpu", report=False, num_workers=0, **settings))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_steps_run_eagerly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No working C++ compiler" in why_not_compiled(CPU)
    result = train(tmp_path, "fallback", compile=True)
    assert result.finished
    assert "drivetrain: --compile is not obeyed, steps run eagerly: " in capsys.readouterr().err
    assert "nothing can be compiled here" in result.compilation
    choice = yaml.safe_load((result.folder / "plan.yaml").read_text())["choices"]["compile.enabled"]
    assert choice["value"] is False
    assert "No working C++ compiler" in choice["why"]


@pytest.mark.usefixtures("no_kernels")
def test_only_what_is_named_is_compiled() -> None:
    torch.compiler.reset()
    before = num_graphs()
    torch.manual_seed(0)
    model = Gated()
    inputs = torch.randn(3, 4)
    expected = model(inputs)
    compile_named(model, ["router"], CompileOptions())
    assert torch.allclose(model(inputs), expected, atol=1e-6)
    assert num_graphs() == before + 1
    assert set(model.state_dict()) == set(Gated().state_dict())
    with pytest.raises(ConfigError, match="body, router"):
        compile_named(model, ["gate"], CompileOptions())


def test_in_a_run(tmp_path: Path) -> None:
    torch.compiler.reset()
    result = train(tmp_path, "named", compile=True, compile_only="router")
    assert "graphs in mode default" in result.compilation
    with pytest.raises(ConfigError, match="add --compile"):
        dt.configure(compile_only="router")


@pytest.mark.usefixtures("no_kernels")
def test_a_smaller_last_step_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiler would start anew for it: only in a job of many epochs, here three. Its losses are an eager run's."""
    data = TensorDataset(torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 2, (20,)))
    ours = replace(job("odd"), model=lambda: Gated().double(), data=data, max_steps=9)
    losses, graphs, told = [], [], []
    for enough, compiles in ((10, True), (3, True), (10, False)):
        torch.compiler.reset()
        monkeypatch.setattr("drivetrain.run.assemble.ENOUGH_TO_COMPILE", enough)
        before, folder = num_graphs(), tmp_path / f"{enough} {compiles}"
        result = dt.train(ours, dt.configure(output_dir=folder, gpu_mode="cpu", report=False, compile=compiles))
        graphs.append(num_graphs() - before)
        losses.append([json.loads(line)["loss"] for line in (result.folder / "steps.jsonl").read_text().splitlines()])
        told.append("the last step of each epoch has 4 samples: it runs eagerly" in capsys.readouterr().out)
    eager_last, compiled_last, none = graphs
    assert none == 0 < eager_last == compiled_last - 1
    assert told == [True, False, False]
    assert len(losses[0]) == 9
    assert losses[0] == pytest.approx(losses[2], rel=1e-12)
    assert losses[1] == pytest.approx(losses[2], rel=1e-12)


@pytest.mark.usefixtures("no_kernels")
def test_experts_are_their_mixture() -> None:
    torch.compiler.reset()
    model = nn.Sequential(MixtureOfExperts(4, 2, 8, k=1))
    before = num_graphs()
    compile_named(model, ["experts"], CompileOptions())
    model(torch.randn(6, 4)).sum().backward()
    assert num_graphs() > before


@pytest.mark.parametrize("fixed", [False, True])
def test_blocks_of_a_sharded_model_are_compiled_repeatably_where_asked(
    monkeypatch: pytest.MonkeyPatch, fixed: bool
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: asked.append(how) or function)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    compile_blocks(blocks, CompileOptions(fixed=fixed))
    assert len(asked) == 3
    assert all(("deterministic" in how.get("options", {})) == fixed for how in asked)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.linear(self.norm(inputs)).tanh()


class Stack(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


@pytest.mark.usefixtures("no_kernels")
def test_repeated_blocks_are_compiled_once_for_all_of_them() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, inputs = Stack().double(), torch.randn(3, 4, dtype=torch.float64)
    expected = model(inputs)
    before, seen = num_graphs(), []
    model.blocks[0].register_forward_hook(lambda *found: seen.append(found))
    compile_repeated(model, CompileOptions())
    assert torch.allclose(model(inputs), expected, rtol=1e-12)
    assert num_graphs() == before + 2, "the first has an input that needs no gradient; the others share one"
    assert len(seen) == 1
    assert set(model.state_dict()) == set(Stack().state_dict())
    forget_compiled(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(inputs), expected)


@pytest.mark.usefixtures("no_kernels")
@torch._dynamo.config.patch(recompile_limit=3)
def test_blocks_of_many_widths_are_all_compiled() -> None:
    """Each width is a graph of the same code, of which torch compiles eight, here three, and runs the rest eagerly."""

    class Wider(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(width, width + 1), nn.Linear(width + 1, width + 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.second(self.first(inputs).tanh())

    torch.compiler.reset()
    model, before = nn.Sequential(*(Wider(width) for width in range(2, 7))), num_graphs()
    compile_repeated(model, CompileOptions())
    model(torch.randn(3, 2)).sum().backward()
    with torch.no_grad():
        model(torch.randn(3, 2))
    assert num_graphs() == before + 2 * len(model), "each for training and for validation"


@pytest.mark.usefixtures("no_kernels")
def test_the_rest_is_compiled_around_compiled_blocks() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).logsumexp(-1).mean()

    torch.manual_seed(0)
    inputs, work = torch.randn(3, 4, dtype=torch.float64), []
    for num_blocks in (4, 8):
        torch.compiler.reset()
        model = Stack(num_blocks).double()
        expected = loss(model, inputs)
        compile_repeated(model, CompileOptions())
        graphs, calls = num_graphs(), torch._dynamo.utils.counters["stats"]["calls_captured"]
        assert torch.allclose(compiled(loss, CompileOptions())(model, inputs), expected, rtol=1e-12)
        assert num_graphs() > graphs + 2, "those of the blocks, and what is around"
        work.append(torch._dynamo.utils.counters["stats"]["calls_captured"] - calls)
    assert work[0] == work[1], "twice as many blocks are no more work for the compiler"


@pytest.mark.parametrize("make", [FlopCount, ReplayedDraws, lambda: KeyedDraws([0], 0), lambda: _Live([])])
def test_looking_on_leaves_what_the_user_compiled_and_flex_attention_alone(make: Any) -> None:
    torch.compiler.reset()
    function = torch.compile(lambda value: value * 2 + 1, backend="eager")
    before = num_graphs()
    queries = torch.randn(1, 2, 16, 8)
    expected = nn.functional.scaled_dot_product_attention(queries, queries, queries)
    with make():
        assert torch.equal(function(torch.ones(2)), torch.full((2,), 3.0))
        torch.testing.assert_close(flex_attention(queries, queries, queries), expected)
    assert num_graphs() == before
    function(torch.ones(2))
    assert num_graphs() == before + 1, "compiled after all"


def test_what_the_user_compiled_is_compiled_in_training(tmp_path: Path) -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: calls.append(1) or graph.forward(*args)

    class Partly(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = torch.compile(lambda value: value * 2 + 1, backend=backend)

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(self.scaled(inputs))

    torch.compiler.reset()
    settings: dict[str, Any] = {"output_dir": tmp_path, "gpu_mode": "cpu", "report": False, "num_workers": 0}
    dt.train(stacked_job("partly", Partly), dt.configure(**settings, compile=False))
    assert len(calls) >= 6, "in each of its steps"


@pytest.mark.usefixtures("no_kernels")
def test_a_copy_of_compiled_blocks_computes_with_its_own_weights() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, inputs = Stack(2), torch.randn(3, 4)
    compile_repeated(model, CompileOptions())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert copied(inputs).abs().max() == 0
    assert model(inputs).abs().max() > 0


@pytest.mark.usefixtures("no_kernels")
def test_sizes_that_vary_are_compiled_for_once() -> None:
    torch.compiler.reset()
    model = Stack(3)
    before = num_graphs()
    compile_repeated(model, CompileOptions(), varying_dims=(0,))
    for size in (3, 5, 7):
        model(torch.randn(size, 4))
    assert num_graphs() == before + 2


def stacked_job(name: str, model: Any = Stack) -> dt.Job:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(32, 4, dtype=torch.float64), torch.randint(0, 2, (32,)))
    return dt.Job(
        name=name,
        model=lambda: model().double(),
        data=data,
        valid=data,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        global_batch=8,
        max_steps=6,
    )


def test_a_run_with_compiled_blocks_learns_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    torch.compiler.reset()
    settings: dict[str, Any] = {"output_dir": tmp_path, "gpu_mode": "cpu", "report": False, "num_workers": 0}
    plain = dt.train(stacked_job("plain"), dt.configure(**settings, compile=False))
    assert not why_not_compiled(CPU)
    before = num_graphs()
    found = dt.train(stacked_job("blocks"), dt.configure(**settings, compile=True, compile_scope="blocks"))
    assert num_graphs() == before + 2, "for all blocks; the validation, of few batches, is not compiled"
    for name, expected in plain.model.state_dict().items():
        assert torch.allclose(found.model.state_dict()[name], expected, rtol=1e-11), name
    assert found.metrics["valid_loss"] == pytest.approx(plain.metrics["valid_loss"], rel=1e-11)
    choices = yaml.safe_load((found.folder / "plan.yaml").read_text())["choices"]
    assert choices["compile.scope"] == {"value": "blocks", "why": "each repeated block by itself; asked for"}
    request.getfixturevalue("no_kernels")  # those of the blocks show that kernels learn the same
    torch.compiler.reset()
    before = num_graphs()
    found = dt.train(stacked_job("both"), dt.configure(**settings, compile=True, compile_scope="both"))
    assert num_graphs() > before + 2, "the blocks, and the loss around them"
    for name, expected in plain.model.state_dict().items():
        assert torch.allclose(found.model.state_dict()[name], expected, rtol=1e-11), name
    with pytest.raises(dt.DrivetrainError, match="no repeated blocks"):
        dt.train(stacked_job("none", Gated), dt.configure(**settings, compile=True, compile_scope="blocks"))
    with pytest.raises(ConfigError, match="compiling is off"):
        dt.configure(compile=False, compile_scope="blocks")


@pytest.mark.usefixtures("no_kernels")
def test_a_run_is_compiled_as_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The compiler would run blocks eagerly that another run had compiled by themselves, and generalize over sizes."""
    torch.compiler.reset()
    settings: dict[str, Any] = {"output_dir": tmp_path, "gpu_mode": "cpu", "report": False, "compile": True}

    def trained(job: dt.Job, name: str, scope: str) -> tuple[int, int]:
        """Return how many graphs were made, and of how many operations."""
        counters, before = torch._dynamo.utils.counters["stats"], num_graphs()
        calls = counters["calls_captured"]
        result = dt.train(replace(job, name=name), dt.configure(**settings, compile_scope=scope))
        graphs = num_graphs() - before
        assert result.compilation == f"{graphs or whole[0]} graphs in mode default"
        return graphs, counters["calls_captured"] - calls

    ours = replace(stacked_job("ours"), valid=None)
    whole = (0, 0)
    whole = trained(ours, "first", "loss")
    assert trained(ours, "again", "loss") == (0, 0), "the same job once more: its code is there"
    assert trained(ours, "both", "both")[0] > whole[0]
    assert trained(ours, "whole", "loss") == whole
    wider = replace(ours, data=TensorDataset(torch.randn(32, 3, 4, dtype=torch.float64)[:, 0], ours.data.tensors[1]))
    assert trained(wider, "other data", "loss") == whole, "whose sizes may be others"

    def scaled(factor: float) -> Callable[..., Tensor]:
        return lambda model, batch: factor * ours.loss(model, batch)

    graphs = [trained(replace(ours, loss=scaled(factor)), f"by {factor}", "loss") for factor in (1.0, 0.5)]
    assert graphs[0] == graphs[1], "a number in the loss is part of its code, also of the second one's"


class Annealed(nn.Module):
    """Counts its calls, and takes its temperature from their number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = nn.Linear(4, 2), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return self.body(inputs) / (1.0 + self.calls)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("is_own_loop", [False, True])
def test_steps_that_the_compiler_gives_up_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_own_loop: bool
) -> None:
    torch.compiler.reset()
    annealed = replace(job("annealed"), model=Annealed, max_steps=14)
    settings: dict[str, Any] = {"output_dir": tmp_path, "gpu_mode": "cpu", "report": False, "auto_optimize": False}

    def train(ours: dt.Job) -> dt.Result | None:
        if not is_own_loop:
            return dt.train(ours, dt.configure(**settings, compile=True))
        model = ours.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"config": dt.configure(**settings, compile=True), "name": ours.name}
        run = dt.drive(model, optimizer, ours.data, global_batch=8, max_steps=14, **options)
        for batch in run:
            run.backward(nn.functional.cross_entropy(run.model(batch[0]), batch[1]))
            run.step()
        return None

    result = train(annealed)
    told = [line for line in capsys.readouterr().out.splitlines() if "runs eagerly from here on" in line]
    assert len(told) == 1
    name, value = ("forward", "calls") if is_own_loop else ("the loss function", "model.calls")
    assert f"  compile    {name} runs eagerly from here on: the compiler has made 8 versions" in told[0]
    assert f"{value} == " in told[0]
    if result is not None:
        assert "graphs in mode default; the loss function runs eagerly" in result.compilation
    train(replace(annealed, name="plain", model=Gated))
    assert "runs eagerly" not in capsys.readouterr().out


def test_a_watchdog_hears_of_compiling_after_a_reset_too() -> None:
    phases = []

    def backend(graph: Any, inputs: Any) -> Any:
        phases.append(PHASES[supervision._phase])
        return graph.forward

    for _ in range(2):
        with told_of_compiling(phases.append):
            torch.compile(lambda values: values + 1, backend=backend)(torch.ones(2))
            torch.compiler.reset()  # as planning does
    assert phases == ["compile", "compile"]
    assert PHASES[supervision._phase] != "compile"
