"""The calls that scripts for several GPUs consist of, each as a script makes it."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import multi_gpu
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.multi_gpu import (
    MultiGPUConfig,
    create_multi_gpu_trainer,
    create_optimized_training_optimizer,
    get_free_port,
    launch_distributed_training,
    optimize_model_for_multi_gpu,
    setup_distributed_environment,
)
from tests.gloo_pool import GlooPool
from tests.multi_gpu.distributed_script import trained_in_pool
from tests.multi_gpu.parts import LENGTH, VOCABULARY, SequenceModel, Sequences

SCRIPT = Path(__file__).with_name("distributed_script.py")
FAST: dict[str, Any] = {"quiet": True, "report": False, "auto_optimize": False}


def test_a_model_is_placed(capsys: pytest.CaptureFixture[str]) -> None:
    model, trainer = optimize_model_for_multi_gpu(
        model=SequenceModel(), training_mode="auto", enable_data_parallel=True, enable_distributed=False
    )
    info = trainer.get_training_info()
    print(f"{info['training_mode']} on {info['gpu_info']['device_count']} GPUs")
    assert model(torch.zeros(2, LENGTH, dtype=torch.long, device=trainer.device)).shape == (2, 2)
    assert "GPUs" in capsys.readouterr().out
    trainer.cleanup()
    trainer.cleanup()


def test_gpus_are_watched(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = create_multi_gpu_trainer(config=MultiGPUConfig(training_mode="auto", enable_gpu_monitoring=True))
    info = trainer.gpu_monitor.get_gpu_info()
    print(f"GPUs: {info['device_count']}, current: {info['current_device']}")
    for number, facts in info["devices"].items():
        print(f"{number}: {facts['name']}, {facts['total_memory'] / 1024**3:.1f} GB, {facts['capability']}")
    model = SequenceModel().to(trainer.device)
    for epoch in range(2):
        for _ in range(3):
            with torch.no_grad():
                model(torch.randint(0, VOCABULARY, (4, LENGTH)).to(trainer.device))
            trainer.record_gpu_metrics()
        summary = trainer.gpu_monitor.get_gpu_summary()
        print(f"epoch {epoch}: {summary['memory_allocated_mean'] / 1024**3:.2f} GB, {summary['memory_allocated_max']}")
    assert trainer.gpu_monitor.get_gpu_summary()["total_recordings"] == 6
    assert re.search(r"^epoch 1: 0\.\d\d GB, \d", capsys.readouterr().out, re.MULTILINE)


def test_monitoring_can_be_off() -> None:
    trainer = create_multi_gpu_trainer(enable_gpu_monitoring=False)
    trainer.record_gpu_metrics()
    assert trainer.gpu_monitor.get_gpu_summary()["total_recordings"] == 0


def test_the_quick_start(tmp_path: Path) -> None:
    async def main() -> dict[str, Any]:
        optimizer = create_optimized_training_optimizer(
            model=SequenceModel(),
            train_loader=DataLoader(Sequences(64), batch_size=32, num_workers=0, pin_memory=False),
            val_loader=DataLoader(Sequences(32, seed=1), batch_size=32),
            multi_gpu_config=MultiGPUConfig(
                training_mode="auto", enable_data_parallel=True, enable_gpu_monitoring=True
            ),
            max_epochs=1,
            learning_rate=0.001,
            output_dir=tmp_path,
            **FAST,
        )
        return await optimizer.train()

    assert asyncio.run(main())["total_epochs"] == 1


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # so that whatever is set inside is taken back
        monkeypatch.delenv(name)


def test_the_environment_of_processes_to_come(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = setup_distributed_environment(world_size=2, backend="nccl", init_method="env://")
    assert set(found) == {
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
        *("backend", "init_method"),
    }
    assert found["backend"] == ("nccl" if torch.cuda.is_available() else "gloo")
    assert (found["WORLD_SIZE"], found["RANK"], os.environ["MASTER_ADDR"]) == ("2", None, "localhost")
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="a launcher started 2 processes, and world_size is 4"):
        setup_distributed_environment(world_size=4)


@pytest.mark.parametrize(
    ("values", "said"), [({"world_size": 0}, "from 1"), ({"world_size": 1, "backend": "x"}, "gloo")]
)
def test_a_wrong_environment(clean_environment: None, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        setup_distributed_environment(**values)


def test_a_free_port() -> None:
    assert 1024 <= get_free_port() < 65536


def test_both_meanings_of_a_name_stay_apart() -> None:
    for name in ("setup_distributed_environment", "launch_distributed_training"):
        assert getattr(drivetrain, name) is not getattr(multi_gpu, name)
    assert drivetrain.get_free_port is multi_gpu.get_free_port
    assert drivetrain.benchmark_performance.__module__ == "drivetrain.api.measuring"


def test_a_rank_that_contradicts_the_launcher(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(DrivetrainError, match="RANK is 1 in the environment of this process, and 0 is asked for"):
        create_multi_gpu_trainer(training_mode="distributed", rank=0, world_size=2).get_training_info()


def check_ranks(folder: Path) -> None:
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank, told in enumerate(ranks):
        assert told["wrapper"] == DistributedDataParallel.__name__
        assert told["info"] == ranks[0]["info"] | {"rank": rank, "local_rank": rank}
        assert told["info"]["world_size"] == 2
        assert told["samples"] == 33  # of 66
        assert told["steps"] == 10  # 2 epochs of 5 steps: 16 samples each, 2 in the last
    assert ranks[0]["loss"] == ranks[1]["loss"]
    assert ranks[0]["weights"] == ranks[1]["weights"]  # though each rank made its own


def test_processes_that_joined_before(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(trained_in_pool, str(tmp_path), world=2)
    check_ranks(tmp_path)


@pytest.mark.soak
def test_spawned_processes(tmp_path: Path) -> None:
    code = f"from tests.multi_gpu.distributed_script import spawned\nspawned({str(tmp_path)!r})"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["MASTER_PORT"] = str(get_free_port())
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    check_ranks(tmp_path)
    assert "8 samples per process × 2 processes: 16 samples per step" in done.stderr
    if not torch.cuda.is_available():
        assert "sync_bn needs GPUs" in done.stderr
        assert "backend nccl needs GPUs" in done.stderr


def test_launching_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two processes for one GPU would be refused
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nopen(sys.argv[1] + '/' + os.environ['RANK'], 'w').close()\n")
    process = launch_distributed_training(script, 2, arguments=[str(tmp_path)], output_dir=tmp_path, tail_ranks="none")
    assert process.poll() is None
    assert process.wait(timeout=120) == 0
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.soak
def test_a_launched_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(SCRIPT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    process = launch_distributed_training(SCRIPT, 2, arguments=[str(tmp_path)], output_dir=tmp_path, tail_ranks="none")
    assert process.poll() is None  # it does not wait
    assert process.wait(timeout=180) == 0
    check_ranks(tmp_path)


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [("gone.py", {}, "no such file"), (str(SCRIPT), {"gpus": 2}, "there is no such option")],
)
def test_what_cannot_be_launched(path: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        launch_distributed_training(path, 2, **options)
