"""The scripts of docs/guide/migrate.md train, with each trainer that is installed, to comparable results."""

import json
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
NEEDS = {"sums": ["peft"], "reviews": ["transformers"], "tables": ["transformers"]}
SCRIPTS = {
    trainer: [task for task in lines.TASKS if (lines.FOLDER / f"{task}_{trainer}.py").exists()]
    for trainer in lines.TRAINERS
}
# What a script prints last: an accuracy, a loss, or the share of images that a discriminator tells apart. All trainers
# came to 0.90 to 0.93 (1.0 for reviews), from 0.1 (0.5) by chance; to losses of 5.24 to 5.25 from 5.6 at first, and of
# 2.40 to 2.54 from 5.5; to 0.27 to 0.30 where the scripts stop below 0.3.
EXPECTED = {
    "digits": (0.88, 0.95),
    "reviews": (0.9, 1.0),
    "sums": (5.20, 5.29),
    "tables": (2.2, 2.7),
    "loop": (0.88, 0.95),
    "gan": (0.8, 1.0),
    "hooks": (0.1, 0.3),
    "many": (0.88, 0.95),
}
# Samples to train with, where fewer than all tell as much: the other scripts learn too little from fewer.
NUM_SAMPLES = {"reviews": 480, "sums": 160, "tables": 256, "gan": 512}
# All scripts of a trainer in one process: importing it takes longer than most of them. Drawing the reports of ours
# would take as long as training; tests/report does that.
RUN = """
import contextlib, importlib, io, json, os, runpy, sys
from drivetrain.api import driving, training
driving.write_report = training.write_report = lambda folder, **how: []
found, num_samples = {}, json.loads(sys.argv[2])
for task in sys.argv[3:]:
    if task in num_samples:
        shared = importlib.import_module(f"benchmarks.peers.{task}")
        shared.train_set = shared.train_set[: num_samples[task]]
    os.mkdir(task)
    with contextlib.chdir(task), contextlib.redirect_stdout(io.StringIO()) as shown:
        runpy.run_path(f"{sys.argv[1]}".format(task), run_name="__main__")
    found[task] = float(shown.getvalue().strip().splitlines()[-1].split()[0])
print(json.dumps(found))
"""


@pytest.mark.parametrize("trainer", SCRIPTS)
def test_the_scripts_train(trainer: str, tmp_path: Path) -> None:
    if missing := [package for package in PACKAGES.get(trainer, []) if find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    tasks = [task for task in SCRIPTS[trainer] if all(map(find_spec, NEEDS.get(task, [])))]
    words = ["-c", RUN, str(lines.FOLDER / f"{{}}_{trainer}.py"), json.dumps(NUM_SAMPLES), *tasks]
    done = warm_python.run(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    wrong = {task: value for task, value in found.items() if not EXPECTED[task][0] <= value <= EXPECTED[task][1]}
    assert found.keys() == set(tasks)
    assert not wrong


def test_lines_are_counted() -> None:
    text = '"""A docstring."""\n\nimport os\nfrom sys import (\n    path,\n)\n\n# a comment\nvalue = [\n    1,\n]\n\n\n'
    text += 'def f():\n    """Words."""\n    return value  # of one\n'
    assert lines.lines_of_code(text) == 3 + 2


def test_the_pages_show_every_script_and_the_table() -> None:
    guide = ROOT / "docs" / "guide"
    pages = [path.read_text(encoding="utf-8") for path in (guide / "migrate.md", *(guide / "examples").glob("*.md"))]
    shown = sorted(name for page in pages for name in re.findall(r"benchmarks/peers/([a-z]+_\w+)\.py", page))
    assert shown == sorted(f"{task}_{trainer}" for trainer, tasks in SCRIPTS.items() for task in tasks)
    assert lines.table() in pages[0]


def test_what_a_trainer_cannot_do_has_no_script() -> None:
    assert not [trainer for task, trainer in lines.CANNOT if task in SCRIPTS[trainer]]
