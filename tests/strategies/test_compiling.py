"""Compiling only some modules, and doing without a compiler that does not work."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.core.errors import ConfigError
from drivetrain.moe import MixtureOfExperts
from drivetrain.strategies.compiling import compile_named, num_graphs, why_not_compiled
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


def test_only_what_is_named_is_compiled() -> None:
    torch.compiler.reset()
    before = num_graphs()
    torch.manual_seed(0)
    model = Gated()
    inputs = torch.randn(3, 4)
    expected = model(inputs)
    compile_named(model, ["router"], "default")
    assert torch.allclose(model(inputs), expected, atol=1e-6)
    assert num_graphs() == before + 1
    assert set(model.state_dict()) == set(Gated().state_dict())
    with pytest.raises(ConfigError, match="body, router"):
        compile_named(model, ["gate"], "default")


def test_in_a_run(tmp_path: Path) -> None:
    torch.compiler.reset()
    result = train(tmp_path, "named", compile=True, compile_only="router")
    assert "graphs in mode default" in result.compilation
    with pytest.raises(ConfigError, match="add --compile"):
        dt.configure(compile_only="router")


def test_experts_are_their_mixture() -> None:
    torch.compiler.reset()
    model = nn.Sequential(MixtureOfExperts(4, 2, 8, k=1))
    before = num_graphs()
    compile_named(model, ["experts"], "default")
    model(torch.randn(6, 4)).sum().backward()
    assert num_graphs() > before


@pytest.mark.parametrize("fixed", [False, True])
def test_blocks_of_a_sharded_model_are_compiled_repeatably_where_asked(
    monkeypatch: pytest.MonkeyPatch, fixed: bool
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: asked.append(how) or function)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    compile_blocks(blocks, "default", fixed=fixed)
    assert len(asked) == 3
    assert all(("deterministic" in how.get("options", {})) == fixed for how in asked)
