"""What of a run's configuration is DeepSpeed's. Needs no DeepSpeed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config import configure
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.strategies.deepspeed_settings import Zero
from drivetrain.strategies.kinds.deepspeed import SPEC
from drivetrain.strategies.spec import refuse_without_package
from tests.api.jobs import Variant, make_job

SCRIPT = """
import torch
import drivetrain as dt
data = {"x": torch.zeros(8, 2), "y": torch.zeros(8).long()}
job = dt.Job(name="mine", model=lambda: torch.nn.Linear(2, 2), data=data,
             loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
             optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), global_batch=4, max_steps=2)
dt.train(job)
"""


def written(folder: Path, own: dict[str, Any]) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(own))
    return path


def test_a_file_settles_what_nobody_said(tmp_path: Path) -> None:
    own = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    config = configure(parallel_strategy="deepspeed", deepspeed_config=written(tmp_path, own))
    zero = Zero.of(config)
    obeyed, notes = zero.obeyed(config)
    assert (obeyed.batch.size, obeyed.batch.accumulation, obeyed.precision.dtype) == (4, 2, "bf16")
    assert notes[0] == "batch.size is 4, as ds.json says"
    pinned = configure(parallel_strategy="deepspeed", deepspeed_config=config.deepspeed.config, batch_size=8)
    assert Zero.of(pinned).obeyed(pinned)[0].batch.size == 8, "and then deriving its JSON names the contradiction"
    assert Zero.of(configure()) == Zero(2)


def test_fp16_in_a_file(tmp_path: Path) -> None:
    """On a GPU it is the run's precision; on a CPU it is left out, and both are told."""
    own = {"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}}
    config = configure(parallel_strategy="deepspeed", deepspeed_config=written(tmp_path, own))
    obeyed, notes = Zero.of(config, on_gpu=True).obeyed(config)
    assert obeyed.precision.dtype == "fp16"
    assert "hysteresis has no effect" in notes[1]
    without = Zero.of(config, on_gpu=False)
    obeyed, notes = without.obeyed(config)
    assert obeyed.precision.dtype == "auto"
    assert notes == ["fp16 needs a GPU, and this run uses the CPU: fp16 in ds.json is left out"]
    assert "fp16" not in without.own


def test_options_without_the_strategy() -> None:
    with pytest.raises(ConfigError, match=r"add --deepspeed .that is --parallel-strategy deepspeed"):
        configure(zero_stage=2)
    with pytest.raises(ConfigError, match="is an option of fsdp"):
        configure(parallel_strategy="deepspeed", fsdp_offload=True)
    with pytest.raises(ConfigError, match="every rank has to use the same weights"):
        configure(parallel_strategy="deepspeed", find_unused_parameters=True)
    with pytest.raises(ConfigError, match="cannot be compiled"):
        configure(parallel_strategy="deepspeed", zero_stage=3, compile=True)
    assert configure(parallel_strategy="deepspeed", zero_stage=3, offload_optimizer=True).deepspeed.stage == 3


def test_a_missing_package_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import drivetrain as dt

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else find(name))
    with pytest.raises(DrivetrainError, match="not installed") as caught:
        refuse_without_package("deepspeed", SPEC)
    assert caught.value.remedy == "pip install 'drivetrain[deepspeed]'"
    built: list[bool] = []

    def model() -> Any:
        built.append(True)

    config = configure(output_dir=tmp_path, gpu_mode="cpu", parallel_strategy="deepspeed")
    with pytest.raises(DrivetrainError, match="not installed"):
        dt.train(make_job(Variant(), model=model), config, quiet=True)
    assert not built, "nothing large is made before"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
@pytest.mark.parametrize(
    "processes", [[], pytest.param(["--cpu", "--num-processes", "2"], marks=pytest.mark.soak)], ids=["one", "two"]
)
def test_a_missing_package_is_the_last_thing_on_the_screen(tmp_path: Path, processes: list[str]) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "drivetrain", "train", str(script), *processes]
    done = subprocess.run(
        [*command, "--parallel-strategy", "deepspeed", "--output-dir", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].strip() == "remedy: pip install 'drivetrain[deepspeed]'", done.stderr
    assert "Traceback" not in done.stderr
