"""A continued run whose code or data has changed: reported by name, refused with --strict, and never by mistake."""

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.core import code_fingerprint
from drivetrain.run.refusals import Fingerprint
from tests import warm_python
from tests.api.jobs import Variant, make_job

SCRIPT = '''
import sys, json
import torch
from torch import nn
from torch.nn import functional as F
import drivetrain as dt

SCALE = 1.0
KINDS = {"a", "b", "c", "d"}
WEIGHTS = torch.tensor([1.0, 2.0, 1.0])

def scaled(value):
    return value * SCALE if "a" in {"a", "b", "c", "d"} else value

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.act, self.two = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)
        self.function = F.relu
    def forward(self, x):
        """Words."""
        return self.two(self.function(self.act(self.one(x))))

def make_loss(smoothing):
    def loss(model, batch):
        # a comment
        return scaled(F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing, weight=WEIGHTS))
    return loss

def rate(step):
    return 1 / (1 + step)

class Stop:
    every = 1
    def __call__(self, context):
        if context.step == 3 and sys.argv[-1] == "stop":
            raise RuntimeError("planted")
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(60) % 3
job = dt.Job(name="job", model=Net, data=torch.utils.data.TensorDataset(x, y), loss=make_loss(0.1), seed=3,
             optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), schedule=rate, global_batch=20, epochs=2,
             checkpoint_every=2, hooks=[Stop()])
strict = sys.argv[-1] == "strict"
if __name__ == "__main__":
    try:
        dt.train(job, dt.configure(output_dir=sys.argv[1], report=False, strict=strict), quiet=True)
    except RuntimeError as error:
        print(error)
'''

CHANGES = {
    "nothing": ("", "", None),
    "comments and names": ("        # a comment\n", "        # another\n\n", None),
    "docstring": ('"""Words."""', '"""Other words."""', None),
    "a local name": ("rate(step):\n    return 1 / (1 + step)", "rate(n):\n    return 1 / (1 + n)", None),
    "activation": ("nn.ReLU()", "nn.GELU()", "the model's structure (act)"),
    "functional activation": ("self.function = F.relu", "self.function = F.gelu", "the model's structure (the whole)"),
    "forward": ("self.two(self.function", "2 * self.two(self.function", "the code of Net.forward"),
    "loss": ("return scaled(F.cross", "return 2 * scaled(F.cross", "the loss function"),
    "closure": ("make_loss(0.1)", "make_loss(0.2)", "the loss function"),
    "helper": ("return value * SCALE", "return value + SCALE", "the loss function"),
    "constant": ("SCALE = 1.0", "SCALE = 2.0", "the loss function"),
    "weights of classes": ("WEIGHTS = torch.tensor([1.0", "WEIGHTS = torch.tensor([3.0", "the loss function"),
    "schedule": ("1 / (1 + step)", "1 / (2 + step)", "the schedule"),
    "data": ("y = torch.arange(60) % 3", "y = (torch.arange(60) + 1) % 3", "of the training data"),
}  # fmt: skip


def fingerprint(folder: Path, name: str, script: str) -> Fingerprint:
    path = folder / f"{name}.py"
    path.write_text(script)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        return Fingerprint(module.job, module.Net())
    finally:
        del sys.modules[name]


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_named(tmp_path: Path, name: str) -> None:
    old, new, expected = CHANGES[name]
    assert old in SCRIPT
    before = fingerprint(tmp_path, "script_before", SCRIPT)
    assert before.not_covered == []
    after = fingerprint(tmp_path, "script_after", SCRIPT.replace(old, new, 1) if old else SCRIPT)
    found = after.changes_since(json.loads(json.dumps(before.facts)))
    assert len(found) == (expected is not None), found
    assert expected is None or expected in found[0]
    assert after.changes_since({}) == []  # a run that was begun by an older version


def test_samples_that_are_other_ones_each_time_are_no_change() -> None:
    class Noise:
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)

    job = make_job(Variant(global_batch=8), data=Noise(), collate=lambda items: items)
    first, second = (Fingerprint(job, torch.nn.Linear(2, 2)) for _ in range(2))
    assert first.facts["samples"] != second.facts["samples"]
    assert second.changes_since(first.facts) == []


def test_strange_things_are_left_out() -> None:
    class Strange:
        __slots__ = ("a",)

        def __call__(self, model: Any, batch: Any) -> Any: ...

        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                raise RuntimeError("no")
            return object.__getattribute__(self, name)

    job = make_job(Variant(), loss=Strange(), schedule=functools.partial(max, 1.0))
    found = Fingerprint(job, torch.nn.Linear(2, 2))
    assert any("loss function: RuntimeError: no" in text for text in found.not_covered)
    assert "schedule" in found.facts["functions"]
    json.dumps(found.facts)


def test_it_takes_milliseconds() -> None:
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32), 12)
    job = make_job(Variant())
    took = []
    for _ in range(4):
        began = time.process_time()
        Fingerprint(job, model)
        took.append(time.process_time() - began)
    assert min(took) < 0.1  # whatever else the machine does can only add to it


def run(folder: Path, script: str, what: str, name: str = "script.py", hash_seed: str = "") -> Any:
    """Run a script; in a fresh interpreter, if that is to have another order of sets."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    words = [str(path), str(folder / "runs"), what]
    if not hash_seed:
        return warm_python.run(words)
    command = [sys.executable, *words]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)


def changes(folder: Path) -> list[str]:
    rows = [json.loads(line) for line in (folder / "runs" / "job" / "events.jsonl").read_text().splitlines()]
    return [text for row in rows if row["event"] == "job changed" for text in row["changes"]]


def test_from_start_to_finish(tmp_path: Path) -> None:
    assert "planted" in run(tmp_path, SCRIPT, "stop").stdout
    before = (tmp_path / "runs" / "job" / "fingerprint.json").read_text()
    old, new, _ = CHANGES["loss"]
    refused = run(tmp_path, SCRIPT.replace(old, new), "strict")
    assert "the job has changed since step 2" in refused.stderr + refused.stdout
    assert "--strict is set: the loss function" in refused.stderr + refused.stdout
    assert (tmp_path / "runs" / "job" / "fingerprint.json").read_text() == before
    # Elsewhere, with other line numbers, in another process with another order of sets: the same.
    assert run(tmp_path, "\n\n" + SCRIPT, "stop", "elsewhere/other.py", "77").stdout.strip() in ("planted", "")
    assert changes(tmp_path) == []
    assert (tmp_path / "runs" / "job" / "fingerprint.json").read_text() == before


@pytest.mark.parametrize(("now", "recorded"), code_fingerprint._RECORDED_AS.items())
def test_a_function_of_ours_that_moved_is_no_change(now: str, recorded: str) -> None:
    module, _, name = now.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    assert "".join(code_fingerprint._Walk().value(function, 0)) == f"{recorded};"
