"""A recipe of a user: found by module or entry point, trained, planned and refused as ours are."""

import json
from pathlib import Path

import pytest

import drivetrain as dt
from drivetrain.cli import main
from drivetrain.core import plugins
from drivetrain.core.plugins import RECIPES

DOCUMENTED = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The complete recipe of CONTRIBUTING.md, in the current folder."""
    code = DOCUMENTED.partition("**A recipe.**")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "line_recipe.py").write_text(code)
    (tmp_path / "no_recipe.py").write_text("RECIPE = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(plugins.sys.modules, "line_recipe", raising=False)
    return "line_recipe"


def train(target: str, *flags: str) -> int:
    return main(["train", target, "--gpu-mode", "cpu", "--no-report", "--output-dir", "runs", *flags])


def test_by_its_module(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{module}:RECIPE"
    assert train(target, "--max-steps", "3", "--seed", "4", "--size", "small") == 0
    assert "the line is learned" in capsys.readouterr().out
    assert len(Path("runs/line/steps.jsonl").read_text().splitlines()) == 3
    assert json.loads(Path("runs/line/source.json").read_text())["target"] == target
    assert train(target, "--experts", "3") == 2
    assert f"the recipe {target} does not use it" in capsys.readouterr().err
    assert train(f"{module}:job", "--experts", "3") == 2, "a function is no recipe, and reads nothing of theirs"


def test_by_its_entry_point(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = dict.fromkeys(("line", "digits"), f"{module}:RECIPE") | {"broken": "no_recipe:RECIPE"}
    monkeypatch.setattr(plugins, "_entry_points", lambda group: theirs if group == "drivetrain.recipes" else {})
    assert "line" in RECIPES.names()
    assert RECIPES.target("digits").startswith("drivetrain."), "ours cannot be replaced"
    assert main(["plan", "line", "--gpu-mode", "cpu"]) == 0
    assert "The plan for line" in capsys.readouterr().out
    assert train("broken") == 1
    assert "is a int, expected a Recipe" in capsys.readouterr().err


def test_as_an_object(module: str, tmp_path: Path) -> None:
    recipe = RECIPES.load(f"{module}:RECIPE")
    result = dt.train(recipe.job(dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False, quiet=True)))
    assert result.steps == 8
