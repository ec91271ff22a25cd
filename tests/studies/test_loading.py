"""Studies stand in the source code; the installed package is without them and says how to get them."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.core import plugins

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("words", [["continual"], ["train", "digits-continual"]])
def test_a_checkout_elsewhere_without_it(monkeypatch, tmp_path: Path, capsys, words: list[str]) -> None:
    monkeypatch.setattr(plugins, "CHECKOUT", tmp_path)
    monkeypatch.delitem(sys.modules, "drivetrain.commands.continual", raising=False)
    assert main([*words, "--gpu-mode", "cpu", "--output-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "not in the installed package" in error
    assert "pip install -e ." in error


def test_the_installed_package_is_without_studies(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (package,) = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    installed = tmp_path / "lib" / "site-packages" / "drivetrain"
    shutil.copytree(ROOT / package, installed, ignore=shutil.ignore_patterns("__pycache__"))
    assert not list(installed.rglob("continual/*.py"))
    begin = f"import sys; sys.path.insert(0, {str(installed.parent)!r})"
    code = f"{begin}; from drivetrain.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "continual"], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert "pip install -e ." in done.stderr
