"""The examples run: each for a few steps, as a user would start it; the notebook cell by cell; one on two processes."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import warm_python
from tests.launch.jobs import launch

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = {
    "image_classification": r"test accuracy 0\.\d+",
    "text_classification": r"accuracy \d\.\d+",
    "lora": r"validation loss \d+\.\d+",
    "language_model": r"validation loss per token \d\.\d+",
    "own_loop": r"best accuracy 0\.\d+ at step 6, after 6 steps",
    "gan": r"after 6 steps: .*media has the samples",
    "hooks": r"loss \d\.\d+ after 6 steps",
    "many_gpus": r"accuracy 0\.\d+ after 6 steps",
}
NEEDS = {"text_classification": "transformers", "lora": "peft", "language_model": "transformers"}
SMALL = ["--max-steps", "6", "--gpu-mode", "cpu", "--no-report"]


def needed(name: str) -> None:
    package = NEEDS.get(name)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"needs {package}")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name: str, tmp_path: Path) -> None:
    needed(name)
    words = ["-m", "drivetrain", "train", str(EXAMPLES / f"{name}.py"), *SMALL]
    done = warm_python.run(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(SCRIPTS[name], done.stdout), done.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_two_processes_run_the_same_script(tmp_path: Path) -> None:
    done = launch(tmp_path, str(EXAMPLES / "many_gpus.py"), forks=True)
    assert done.code == 0, done.err
    rows = (tmp_path / "runs" / "many-gpus" / "steps.jsonl").read_text().splitlines()
    assert len(rows) == 60
    assert {json.loads(row)["samples"] for row in rows} == {128, 1500 % 128}


def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "first_job.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text("\n".join(cells), encoding="utf-8")
    done = warm_python.run(["cells.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.strip().splitlines()[-1]) > 0.7


def test_each_has_a_page() -> None:
    shown = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "guide" / "examples").glob("*.md"))
    for name in SCRIPTS:
        assert f'--8<-- "examples/{name}.py"' in shown
    assert "first_job.ipynb" in shown
