"""Strategies are found, not listed: ours from their folder, others by entry point or by `package.module:SPEC`."""

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.config import configure
from drivetrain.core import plugins
from drivetrain.core import plugins as facts
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.plugins import STRATEGIES, StrategyFacts
from drivetrain.strategies import strategy_spec
from tests.hardware_fixtures import load

OWN = """
{first}
from drivetrain.strategies import Conflict, SingleStrategy, StrategySpec

SPEC = StrategySpec(
    make=lambda context: SingleStrategy(context.world),
    processes="o" + "ne",
    memory="whole",
    own_loop="it is shy",
    conflicts=(Conflict(when={{"compile.enabled": True}}, message="cannot compile with {{asked}}"),),
)
NUMBER = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "someones").mkdir()
    (tmp_path / "someones" / "__init__.py").write_text("raise ImportError('nothing here is to be imported')\n")
    (tmp_path / "someones" / "guarded.py").write_text(OWN.format(first=""))
    (tmp_path / "someones_strategy.py").write_text(OWN.format(first="import torch"))
    monkeypatch.syspath_prepend(tmp_path)
    return "someones_strategy"


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_facts_are_read_as_an_import_has_them(name: str) -> None:
    spec = strategy_spec(name)
    imported = {field: getattr(spec, field) for field in StrategyFacts.model_fields}
    assert dict(facts.strategy_facts(name)) == imported


def test_the_names_that_there_are() -> None:
    assert STRATEGIES.names()[:6] == ("data_parallel", "ddp", "deepspeed", "expert_parallel", "fsdp", "single")


def test_an_unknown_name_is_said_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        configure(parallel_strategy="fdsp")
    problem = caught.value.problems[0]
    assert problem.allowed.startswith("auto, data_parallel, ddp, deepspeed, expert_parallel, fsdp, single, or package.")
    assert problem.remedy == "did you mean `fsdp`?"
    with pytest.raises(DrivetrainError, match="there is no strategy fdsp"):
        strategy_spec("fdsp")


def test_anothers_facts_are_read_without_importing_it(module: str) -> None:
    for name in ("someones.guarded:SPEC", f"{module}:SPEC"):
        found = facts.strategy_facts(name)
        assert found.own_loop == "it is shy"
        assert found.processes == "any", "it is computed, so only an import can tell"
        with pytest.raises(ConfigError, match=rf"cannot compile with parallel_strategy: {name}"):
            configure(parallel_strategy=name, compile=True)
    assert module not in sys.modules
    assert strategy_spec(f"{module}:SPEC").processes == "one"
    with pytest.raises(DrivetrainError, match="cannot be loaded: nothing here"):
        strategy_spec("someones.guarded:SPEC")


def test_an_entry_point_has_a_name(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_entry_points", lambda group: dict.fromkeys(("theirs", "ddp"), f"{module}:SPEC"))
    assert STRATEGIES.names()[6:] == ("theirs",), "ours cannot be replaced"
    assert configure(parallel_strategy="theirs").distributed.strategy == "theirs"
    assert strategy_spec("theirs").own_loop == "it is shy"
    assert not strategy_spec("ddp").own_loop


def test_what_is_no_strategy(module: str) -> None:
    with pytest.raises(DrivetrainError, match="is a int, expected a StrategySpec"):
        strategy_spec(f"{module}:NUMBER")
    with pytest.raises(DrivetrainError, match="cannot be loaded"):
        strategy_spec(f"{module}:MISSING")
    with pytest.raises(DrivetrainError, match="cannot be loaded"):
        strategy_spec("nowhere_at_all:SPEC")


def test_one_that_uses_several_gpus_meets_the_machine() -> None:
    with pytest.raises(ConfigError, match="data_parallel shares batches between GPUs, and there is none"):
        configure(hardware=load("cpu-2core"), parallel_strategy="data_parallel")


def test_the_configuration_needs_no_torch() -> None:
    code = (
        "import sys\nfrom drivetrain.config import configure\n"
        "configure(parallel_strategy='expert_parallel', expert_rest='fsdp')\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_object_stands_for_its_name(module: str) -> None:
    """The configuration has the text: it is written to disk, and read by other processes."""
    spec = strategy_spec(f"{module}:SPEC")
    assert configure(parallel_strategy=spec).distributed.strategy == f"{module}:SPEC"
    assert configure(distributed={"strategy": strategy_spec("ddp")}).distributed.strategy == "ddp"
    with pytest.raises(ConfigError, match="no module has this strategy at its top level") as caught:
        configure(parallel_strategy=spec.model_copy() if hasattr(spec, "model_copy") else object())
    assert "top level of a module" in caught.value.problems[0].remedy
