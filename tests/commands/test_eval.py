"""`drivetrain eval RUN` and `dt.evaluate`: the numbers of the last validation again, from what is on the disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.cli import main
from drivetrain.config import configure
from tests.api.jobs import Mlp

SCRIPT = """
import sys
import torch
import drivetrain as dt

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(0, 4, (40,)))
job = dt.Job(
    name="script",
    model=lambda: torch.nn.Linear(6, 4),
    data=data,
    valid=data,
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    global_batch=8,
    epochs=2,
)
dt.train(job)
print("after training")
"""


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def last_metrics(folder: Path) -> dict[str, float]:
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: value for name, value in row.items() if name.startswith("valid_")}


def test_a_recipe(tmp_path: Path, capsys: Any) -> None:
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path)]
    assert main(["train", "digits", "--epochs", "2", "--ema", "0.9", "--seed", "3", *flags]) == 0
    folder = tmp_path / "digits"
    before = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
    code, out, _ = run(capsys, "eval", str(folder), "--json", "--gpu-mode", "cpu")
    assert code == 0
    assert json.loads(out) == pytest.approx(last_metrics(folder), rel=1e-6)
    code, out, _ = run(capsys, "eval", str(folder), "--which", "best", "--batch-size", "7", "--gpu-mode", "cpu")
    assert code == 0
    assert "valid_accuracy" in out
    assert {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))} == before, "it only reads"


def test_a_script_is_run_up_to_its_training(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("Linear(6, 4)", "Linear(6, int(sys.argv[1]))"))
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path)]
    assert main(["train", str(script), *flags, "--", "4"]) == 0
    code, out, _ = run(capsys, "eval", str(tmp_path / "script"), "--json", "--gpu-mode", "cpu")  # with the same words
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == pytest.approx(last_metrics(tmp_path / "script"), rel=1e-6)
    assert "after training" not in out


def test_a_script_that_trains_another_job_first(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        SCRIPT.replace(
            "dt.train(job)", "dt.train(job)\nfrom dataclasses import replace\ndt.train(replace(job, name='second'))"
        )
    )
    assert main(["train", str(script), "--gpu-mode", "cpu", "--output-dir", str(tmp_path)]) == 0
    code, _, err = run(capsys, "eval", str(tmp_path / "second"), "--gpu-mode", "cpu")
    assert code == 1
    assert "trains the job 'script' first" in err


def test_from_python(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(30, 6, generator=generator), torch.randint(0, 4, (30,), generator=generator))
    job = dt.Job(
        name="python",
        model=lambda: Mlp(0.3),
        data=data,
        valid=data,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5),
        global_batch=10,
        epochs=2,
    )
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    result = dt.train(job, config, quiet=True)
    assert dt.evaluate(job, result, config) == pytest.approx(dict(result.metrics), rel=1e-6)
    from dataclasses import replace

    with pytest.raises(dt.DrivetrainError, match="no validation set"):
        dt.evaluate(replace(job, valid=None), result, config)
    with pytest.raises(dt.DrivetrainError, match="holds another model"):
        dt.evaluate(replace(job, model=lambda: torch.nn.Linear(6, 4)), result, config)


def test_folders_that_hold_no_run(tmp_path: Path, capsys: Any) -> None:
    code, _, err = run(capsys, "eval", str(tmp_path / "nothing"))
    assert code == 2
    assert "is no run of drivetrain's" in err
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "source.json").write_text("{")
    code, _, err = run(capsys, "eval", str(tmp_path / "torn"))
    assert code == 1
    assert "cannot be read" in err
    (tmp_path / "torn" / "source.json").write_text('{"target": ""}')
    code, _, err = run(capsys, "eval", str(tmp_path / "torn"))
    assert code == 1
    assert "interactive session" in err
