"""The table of planned choices: complete, and all that a new choice has to be added to, besides its setting."""

import json
import re
import shutil
from pathlib import Path
from textwrap import dedent, indent

from drivetrain.config import Config
from drivetrain.config.settings import BY_DOTTED
from drivetrain.plan.knobs import KNOBS, StepWay, pinned_fields
from tests import warm_python

ROOT = Path(__file__).parents[2]

# Trains with the added choice free, pinned by a flag, and pinned by the plan's file; then goes on with a run.
SCRIPT = """
import json, sys
from pathlib import Path

for name in [name for name in sys.modules if name.split(".")[0] == "drivetrain"]:
    del sys.modules[name]
sys.path.insert(0, str(Path("src").absolute()))  # the copy
import torch, yaml
from drivetrain import Job, configure, train
from drivetrain.plan.tune import Measurement
from drivetrain.planning import planner
from drivetrain.planning.probe import StepProbe

planner.LEAST_STEPS, planner.LEAST_JOB_SECONDS = 1, 0.0
StepProbe.__call__ = lambda self, way, seconds, **how: Measurement(sample_seconds=1.0 if way.flush_denormal else 2.0)
folder = Path(sys.argv[1])

def run(name, steps=40, fails=False, **settings):
    calls = [0]

    def loss(model, batch):
        calls[0] += 1
        if fails and calls[0] == 20:
            raise KeyboardInterrupt
        return (model(batch[0]) - batch[1]).square().mean()

    job = Job(
        name=name,
        model=lambda: torch.nn.Linear(2, 1),
        data=[(torch.ones(2), torch.ones(1))] * 8,
        loss=loss,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0001),
        global_batch=4,
        max_steps=steps,
        checkpoint_every=10,
    )
    fixed = {"gpu_mode": "cpu", "loss_weighting": "samples", "report": False, "plan_cache": False}
    train(job, configure(output_dir=folder, **fixed, **settings), quiet=True)
    return yaml.safe_load((folder / name / "plan.yaml").read_text())

found = {"free": run("free", steps=400), "pinned": run("pinned", flush_denormal="off")}
found["planned"] = run("planned", plan=folder / "free" / "plan.yaml")
try:
    run("resumed", flush_denormal="off", fails=True)
except KeyboardInterrupt:
    found["resumed"] = run("resumed", flush_denormal="on")
manifest = sorted((folder / "free" / "checkpoints").glob("step-*/manifest.json"))[-1]
print(json.dumps([found, manifest.read_text()]))
"""


def test_each_field_of_a_way_has_one_row_whose_settings_exist() -> None:
    assert sorted(knob.field for knob in KNOBS) == sorted(StepWay.model_fields)
    for knob in KNOBS:
        assert all(name in BY_DOTTED for name in knob.settings), knob
        assert all(BY_DOTTED[told.setting].is_planned for told in knob.lines), knob
    assert pinned_fields(Config().value) == set(), "nothing is pinned by default"


def test_a_knob_is_a_row_and_a_setting(tmp_path: Path) -> None:
    """The example of CONTRIBUTING.md, put into copies of the two files that it names: a new choice works throughout."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("**A planned choice (knob).**")[1]
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:3]
    setting, field, row = (indent(dedent(code), "    ") for code in examples)
    package = tmp_path / "src" / "drivetrain"
    shutil.copytree(ROOT / "src" / "drivetrain", package)  # with the bytecode of all that stays as it is
    _insert(package / "config" / "schema.py", "    cudnn_benchmark: Annotated", setting)
    _insert(package / "plan" / "knobs.py", "\n    def __str__(self)", field)
    _insert(package / "plan" / "knobs.py", ")\nBY_FIELD", f"{row.rstrip()},\n")
    done = warm_python.run(["-c", SCRIPT, str(tmp_path / "runs")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found, manifest = json.loads(done.stdout.splitlines()[-1])

    def told(name: str) -> tuple[str, str]:
        choice = found[name]["choices"]["kernels.flush_denormal"]
        return choice["value"], choice["why"]

    assert told("free") == ("on", "denormals flushed is +100%: 1 against 0 samples/s")
    assert any(tried["way"].endswith("denormals flushed") for tried in found["free"]["tried"])
    assert told("pinned") == ("off", "asked for")
    assert told("planned") == ("on", "asked for")
    assert found["resumed"]["notes"] == ["denormal numbers as asked for; else as in the checkpoint of step 10"]
    assert '"flush_denormal": true' in manifest or '"flush_denormal":true' in manifest


def _insert(file: Path, before: str, lines: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1
    file.write_text(text.replace(before, lines + before), encoding="utf-8")
