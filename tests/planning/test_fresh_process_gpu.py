"""On a GPU: what the plan says of repeating is true, and `--deterministic` repeats, with recurrent dropout, too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core import precision
from drivetrain.planning import planner
from tests.planning.test_fresh_process import plan_of

pytestmark = pytest.mark.gpu

WORDS = 100


class Sentences(nn.Module):
    """An embedding, whose compiled gradient is summed in any order, and what is given, with dropout."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64)
        self.recurrent = nn.LSTM(64, 64, 2, dropout=0.2, batch_first=True) if kind == "lstm" else None
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) if kind == "transformer" else None
        self.attention = nn.Linear(64, 192) if kind == "causal" else None
        self.out = nn.Linear(64, WORDS)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.words(inputs)
        if self.recurrent is not None:
            hidden = self.recurrent(hidden)[0]
        if self.layer is not None:
            hidden = self.layer(hidden)
        if self.attention is not None:
            parts = self.attention(hidden).unflatten(2, (3, 1, 64)).permute(2, 0, 3, 1, 4)
            hidden = functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        result: Tensor = self.out(hidden)
        return result


def trained(folder: Path, kind: str, **settings: Any) -> Path:
    length = 512 if kind == "causal" else 32
    text = torch.randint(0, WORDS, (256, length + 1), generator=torch.Generator().manual_seed(0))
    job = Job(
        name="job",
        model=lambda: Sentences(kind),
        data=TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
        global_batch=64,
        max_steps=60,
    )
    settings = {"gpu_mode": "single_gpu", "num_workers": 0, "report": False, **settings}
    return train(job, configure(output_dir=folder, **settings), quiet=True).folder


def bits(folder: Path) -> list[Any]:
    rows = [json.loads(row) for row in (folder / "steps.jsonl").read_text().splitlines()]
    newest = max((folder / "checkpoints").glob("*/manifest.json"))
    files = json.loads(newest.read_text())["manifest"]["files"]
    return [[row["loss"] for row in rows], {name: file["sha256"] for name, file in files.items()}]


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
@pytest.mark.parametrize("settings", [{"compile": True}, {"capture": "on"}], ids=["compiled", "captured"])
def test_deterministic_runs_repeat(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        torch.compiler.reset()
        folder = trained(tmp_path / name, kind, deterministic=True, auto_optimize=False, **settings)
        found.append(bits(folder))
        if "capture" in settings:
            events = (folder / "events.jsonl").read_text()
            assert '"step captured"' in events, "recurrent dropout outside cuDNN does not wait for the device"
    assert found[0] == found[1]


def test_compiled_attention_repeats_by_flex_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats, and comes to what torch's deterministic kernels come to within bf16's rounding."""

    def found(name: str) -> list[Any]:
        torch.compiler.reset()
        settings = {"deterministic": True, "precision": "bf16", "compile": True, "auto_optimize": False}
        return bits(trained(tmp_path / name, "causal", **settings))

    one, two = found("one"), found("two")
    assert one == two
    monkeypatch.setattr(precision, "_fits", lambda *parts: False)
    of_torch = found("of torch")
    assert of_torch[0] != one[0], "flex attention was not called before"
    assert of_torch[0] == pytest.approx(one[0], rel=2e-2)


def test_the_plan_says_whether_steps_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, the gradient of the embedding does not; what repeats is taken if it costs little, else named."""
    monkeypatch.setattr(planner, "LEAST_STEPS", 1)
    monkeypatch.setattr(planner, "LEAST_JOB_SECONDS", 0.0)
    monkeypatch.setattr(planner, "REPEAT_SHARE", 1e9)
    row = plan_of(trained(tmp_path / "a", "transformer", compile=True))["repeatable"]
    assert row["tried"][0]["repeats"] == "no"
    repeating = [trial for trial in row["tried"] if trial["repeats"] == "yes"]
    assert repeating, row
    assert (row["value"] == "yes") == (min(float(trial["cost"].split()[0]) for trial in repeating) <= 3.0)
    assert row["value"] == "yes" or "--deterministic" in row["why"]
