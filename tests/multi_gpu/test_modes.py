"""Which mode a configuration comes to on which machine, and what cannot be configured."""

from typing import Any

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.multi_gpu import MultiGPUConfig, create_multi_gpu_trainer
from drivetrain.multi_gpu.config import choose_mode


@pytest.mark.parametrize(
    ("fields", "num_gpus", "num_processes", "expected"),
    [
        ({}, 0, 1, "single_gpu"),
        ({"enable_distributed": True}, 0, 1, "single_gpu"),
        ({"enable_distributed": True}, 1, 1, "single_gpu"),
        ({"enable_distributed": True, "enable_data_parallel": True}, 4, 1, "distributed"),
        ({"enable_distributed": False, "enable_data_parallel": True}, 4, 1, "data_parallel"),
        ({"enable_distributed": False, "enable_data_parallel": False}, 4, 1, "single_gpu"),
        ({"training_mode": "single_gpu", "enable_distributed": True}, 4, 1, "single_gpu"),
        ({"training_mode": "data_parallel"}, 2, 1, "data_parallel"),
        ({"training_mode": "distributed"}, 0, 1, "distributed"),
        ({}, 0, 2, "distributed"),  # anything else would train the job twice
    ],
)
def test_the_order_of_detection(fields: dict[str, Any], num_gpus: int, num_processes: int, expected: str) -> None:
    found = choose_mode(MultiGPUConfig(**fields), num_gpus, num_processes)
    assert found.mode == expected
    assert found.note == ""
    assert found.reason


@pytest.mark.parametrize(
    ("mode", "num_gpus", "num_processes", "expected"),
    [("data_parallel", 1, 1, "single_gpu"), ("data_parallel", 0, 1, "single_gpu"), ("single_gpu", 2, 2, "distributed")],
)
def test_what_is_replaced_is_told(mode: Any, num_gpus: int, num_processes: int, expected: str) -> None:
    found = choose_mode(MultiGPUConfig(training_mode=mode), num_gpus, num_processes)
    assert found.mode == expected
    assert mode in found.note


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"training_mode": "ddp"}, "auto, single_gpu, data_parallel, distributed"),
        ({"backend": "mpi"}, "nccl, gloo"),
        ({"world_size": 0}, "MultiGPUConfig.world_size"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not among 2 processes"),
        ({"device_ids": []}, "no GPU is named"),
        ({"sync_batch_norm": True}, "no such field"),
        ({"enable_distribute": True}, "did you mean `enable_distributed`?"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_multi_gpu_trainer(**fields)
    assert said in str(caught.value)


def test_fields_beside_a_configuration() -> None:
    with pytest.raises(ConfigError, match="there is a config already"):
        create_multi_gpu_trainer(config=MultiGPUConfig(), sync_bn=True)


def test_either_name_finds_unused_parameters() -> None:
    assert MultiGPUConfig(enable_find_unused_parameters=True).finds_unused_parameters
    assert MultiGPUConfig(find_unused_parameters=True).finds_unused_parameters
    assert not MultiGPUConfig().finds_unused_parameters
