"""The scripts of docs/guide/migrate.md train, with each trainer that is installed, to comparable results."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.peers import lines

from tests import warm_python

ROOT = Path(__file__).parents[2]
PACKAGES = {"lightning": ["lightning", "transformers"], "hf_trainer": ["transformers", "accelerate"]} | {
    "accelerate": ["accelerate", "transformers"]
}
SCRIPTS = sorted(path.stem for task in lines.TASKS for path in lines.FOLDER.glob(f"{task}_*.py"))
# All trainers came to accuracies of 0.90 to 0.91, from 0.1 by chance, and to losses of 4.94 to 4.95, from 5.6 at first.
EXPECTED = {"digits": (0.88, 0.95), "sums": (4.90, 4.99)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains(script: str, tmp_path: Path) -> None:
    task, _, trainer = script.partition("_")
    needed = [*PACKAGES.get(trainer, []), *(["peft"] if task == "sums" else [])]
    if missing := [package for package in needed if find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    done = warm_python.run([str(lines.FOLDER / f"{script}.py")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = float(done.stdout.strip().splitlines()[-1].split()[0])
    least, most = EXPECTED[task]
    assert least <= found <= most, done.stdout


def test_lines_are_counted() -> None:
    text = '"""A docstring."""\n\nimport os\nfrom sys import (\n    path,\n)\n\n# a comment\nvalue = [\n    1,\n]\n\n\n'
    text += 'def f():\n    """Words."""\n    return value  # of one\n'
    assert lines.lines_of_code(text) == 3 + 2


def test_the_page_shows_every_script_and_the_table() -> None:
    page = (ROOT / "docs" / "guide" / "migrate.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"benchmarks/peers/(\w+_\w+)\.py", page)) == SCRIPTS
    assert lines.table() in page
