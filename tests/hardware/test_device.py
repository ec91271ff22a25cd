"""Which devices a run uses, and the check that tensors are on them."""

import dataclasses
from collections import UserDict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from drivetrain.core.errors import DrivetrainError
from drivetrain.hardware import DeviceManager, Hardware, Note, assert_on_device, canonical_device
from drivetrain.hardware.gpu_drivers import read_utilization
from tests.hardware_fixtures import load

# ---- canonical devices


@pytest.mark.parametrize(
    ("given", "expected"),
    [("cpu", "cpu"), ("cpu:0", "cpu"), ("meta", "meta"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3"), (2, "cuda:2")],
)
def test_canonical(given: str | int, expected: str) -> None:
    assert str(canonical_device(given)) == expected
    if isinstance(given, str):
        assert canonical_device(torch.device(given)) == canonical_device(given)


@pytest.mark.parametrize("given", ["gpu", "cuda:x", "", "cuda:-2"])
def test_not_a_device(given: str) -> None:
    with pytest.raises(DrivetrainError, match="is not a device") as caught:
        canonical_device(given)
    assert "cuda:0" in caught.value.remedy


# ---- which devices


def chosen(hardware: Hardware, **asked: Any) -> list[str]:
    return [str(device) for device in DeviceManager(hardware, **asked).devices]


ONE_GPU = "1x-l4"


def hardware_of(name: str) -> Hardware:
    if name != ONE_GPU:
        return load(name)
    four = load("4x-l4")
    return four.model_copy(update={"gpus": four.gpus[:1], "links": ()})


@pytest.mark.parametrize(
    ("name", "asked", "devices"),
    [
        ("cpu-2core", {}, ["cpu"]),
        ("cpu-2core", {"mode": "cpu"}, ["cpu"]),
        ("cpu-2core", {"device": "cpu"}, ["cpu"]),
        (ONE_GPU, {}, ["cuda:0"]),
        (ONE_GPU, {"mode": "cpu"}, ["cpu"]),
        (ONE_GPU, {"device": "cpu"}, ["cpu"]),
        (ONE_GPU, {"mode": "single_gpu"}, ["cuda:0"]),
        ("4x-l4", {}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("4x-l4", {"device": "cuda"}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("4x-l4", {"mode": "single_gpu"}, ["cuda:0"]),
        ("4x-l4", {"mode": "single_gpu", "device": "cuda:2"}, ["cuda:2"]),
        ("4x-l4", {"device": "cuda:2"}, ["cuda:2"]),
        ("4x-l4", {"device": torch.device("cuda", 2)}, ["cuda:2"]),
        ("4x-l4", {"mode": "multi_gpu", "ids": [3, 1]}, ["cuda:3", "cuda:1"]),
        ("4x-l4", {"ids": [1]}, ["cuda:1"]),
        ("4x-l4", {"device": "cuda:1", "ids": [1]}, ["cuda:1"]),
    ],
)
def test_devices(name: str, asked: dict[str, Any], devices: list[str]) -> None:
    manager = DeviceManager(hardware_of(name), **asked)
    assert [str(device) for device in manager.devices] == devices
    assert str(manager.device) == devices[0]
    assert manager.uses_gpu == (devices != ["cpu"])
    assert [gpu.index for gpu in manager.gpus] == [device.index for device in manager.devices if device.type == "cuda"]
    assert manager.mode == ("cpu" if devices == ["cpu"] else "multi_gpu" if len(devices) > 1 else "single_gpu")


@pytest.mark.parametrize(
    ("name", "asked", "says"),
    [
        ("cpu-2core", {"mode": "single_gpu"}, "mode single_gpu: there is no GPU that can be used here"),
        ("cpu-2core", {"mode": "multi_gpu"}, "no GPU that can be used"),
        ("cpu-2core", {"device": "cuda"}, "no GPU that can be used"),
        ("cpu-2core", {"ids": [0]}, "no GPU that can be used"),
        (ONE_GPU, {"device": "cuda:3"}, "there is no cuda:3 here; this process may use cuda:0"),
        (ONE_GPU, {"ids": [7]}, "there is no cuda:7"),
        (ONE_GPU, {"mode": "multi_gpu"}, "needs at least two GPUs; 1 GPU can be used"),
        ("4x-l4", {"mode": "multi_gpu", "ids": [1]}, "needs at least two GPUs"),
        ("4x-l4", {"mode": "single_gpu", "ids": [0, 1]}, "contradict"),
        ("4x-l4", {"mode": "cpu", "ids": [0]}, "contradict"),
        ("4x-l4", {"mode": "cpu", "device": "cuda"}, "contradict"),
        ("4x-l4", {"mode": "single_gpu", "device": "cpu"}, "contradict"),
        ("4x-l4", {"device": "cuda:1", "ids": [2]}, "contradict"),
        ("4x-l4", {"ids": []}, "no GPU is named"),
        ("4x-l4", {"ids": [1, 1]}, "named twice"),
        ("4x-l4", {"mode": "all"}, "not a GPU mode"),
        ("4x-l4", {"device": "mps"}, "this machine has no Apple GPU"),
    ],
)
def test_what_is_not_there(name: str, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(DrivetrainError) as caught:
        DeviceManager(hardware_of(name), **asked)
    assert says in caught.value.message
    assert caught.value.remedy


def test_the_reason_why_there_is_no_gpu_is_given() -> None:
    note = Note(
        severity="problem", sentence="There is an NVIDIA GPU, but torch is not a CUDA build.", remedy="pip install x"
    )
    broken = hardware_of(ONE_GPU).model_copy(update={"accelerator": "cpu", "notes": (note,)})
    assert chosen(broken) == ["cpu"]
    with pytest.raises(DrivetrainError) as caught:
        DeviceManager(broken, mode="single_gpu")
    assert note.sentence in caught.value.message
    assert caught.value.remedy == "pip install x"


def test_memory_stats_on_a_cpu_are_zero() -> None:
    stats = DeviceManager(load("cpu-2core")).memory_stats()
    assert (stats.allocated_bytes, stats.reserved_bytes, stats.peak_allocated_bytes) == (0, 0, 0)
    assert (stats.total_bytes, stats.free_bytes) == (None, None)


def test_memory_stats_do_not_start_cuda() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pytest.skip("another test has started CUDA in this process")
    hardware = load("4x-l4")
    stats = DeviceManager(hardware).memory_stats("cuda:1")
    assert stats.allocated_bytes == 0
    assert stats.free_bytes == hardware.gpus[1].memory_free_bytes
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


# ---- is everything where it belongs? The meta device stands in for a second device.


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = None


def here(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def elsewhere(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="meta")


def complaint(**things: Any) -> str:
    with pytest.raises(DrivetrainError) as caught:
        assert_on_device("cpu", **things)
    return caught.value.message


@pytest.mark.parametrize(
    ("thing", "path"),
    [
        (elsewhere(2), "batch"),
        ([here(), elsewhere()], "batch[1]"),
        ((here(), (elsewhere(),)), "batch[1][0]"),
        ({"image": [elsewhere()], "label": here()}, "batch['image'][0]"),
        ({0: {"x": elsewhere()}}, "batch[0]['x']"),
        (Pair(here(), elsewhere()), "batch.right"),
        (Sample(elsewhere(), here()), "batch.image"),
        (deque([elsewhere()]), "batch[0]"),
        (UserDict(ids=elsewhere()), "batch['ids']"),
        ({"s": Sample([here(), Pair(1, elsewhere())])}, "batch['s'].image[1].right"),
    ],
)
def test_names_the_tensor_that_is_elsewhere(thing: Any, path: str) -> None:
    assert complaint(batch=thing) == f"1 tensor is not on cpu:\n    {path} is on meta"


def test_names_parameters_and_buffers_of_a_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert_on_device("cpu", model=model)
    model[1].to("meta")
    message = complaint(model=model, extra=elsewhere())
    assert "model.1.weight is on meta" in message
    assert "model.1.running_mean is on meta" in message
    assert "extra is on meta" in message
    assert "model.0" not in message
    assert message.startswith("6 tensors are not on cpu:")


def test_names_eight_and_counts_the_rest() -> None:
    lines = complaint(batch=[elsewhere() for _ in range(11)]).splitlines()
    assert len(lines) == 1 + 8 + 1
    assert lines[-1].strip() == "and 3 more"
    assert len(complaint(batch=[elsewhere() for _ in range(8)]).splitlines()) == 9


def test_remedy_says_what_to_type() -> None:
    with pytest.raises(DrivetrainError) as caught:
        assert_on_device("cpu", batch=elsewhere())
    assert '.to("cpu")' in caught.value.remedy
    assert "to_empty" in caught.value.remedy


def test_accepts_what_is_right() -> None:
    cycle: list[Any] = [here()]
    cycle.append(cycle)
    assert_on_device(
        "cpu", a=here(), b={"x": [here()], "text": "abc", "n": 3, "none": None}, c=cycle, d=range(3), e=b"x"
    )
    assert_on_device("meta", a=elsewhere(), model=torch.nn.Linear(2, 2, device="meta"))
    assert_on_device("cpu:0", a=here())
    assert_on_device("cuda", nothing=None)


def test_expected_cuda_names_the_index() -> None:
    with pytest.raises(DrivetrainError, match=r"not on cuda:0:\n    batch is on cpu"):
        assert_on_device("cuda", batch=here())


def test_manager_checks_its_own_device() -> None:
    manager = DeviceManager(load("cpu-2core"))
    manager.assert_on_device(batch=here())
    with pytest.raises(DrivetrainError, match="batch is on meta"):
        manager.assert_on_device(batch=elsewhere())


# ---- facts about one device, in the words of a training script

INFO_KEYS = {
    *("device_type", "cuda_available", "device_count", "current_device", "device_name", "compute_capability"),
    *("total_memory", "free_memory", "used_memory", "total_memory_gb", "free_memory_gb", "used_memory_gb"),
    *("gpu_utilization", "memory_utilization"),
}


def test_device_info_of_a_cpu() -> None:
    hardware = load("cpu-2core")
    info = DeviceManager(hardware).get_device_info()
    assert set(info) == INFO_KEYS
    assert info["device_type"] == info["current_device"] == "cpu"
    assert info["device_count"] == 0
    assert not info["cuda_available"]
    assert info["total_memory"] == hardware.memory.total_bytes
    assert info["used_memory"] == info["total_memory"] - info["free_memory"] >= 0
    assert info["total_memory_gb"] == info["total_memory"] / 2**30
    assert info["device_name"] == hardware.cpu.model
    assert (info["compute_capability"], info["gpu_utilization"], info["memory_utilization"]) == (None, None, None)


def test_device_info_of_a_gpu_without_starting_cuda() -> None:
    hardware = load("4x-l4")
    info = DeviceManager(hardware).get_device_info("cuda:2")
    assert set(info) == INFO_KEYS
    assert (info["device_type"], info["current_device"], info["device_count"]) == ("cuda", "cuda:2", 4)
    assert info["compute_capability"] == (8, 9)
    assert info["total_memory"] == hardware.gpus[2].memory_total_bytes
    assert info["free_memory"] == hardware.gpus[2].memory_free_bytes
    assert info["used_memory"] >= 0  # free and total are not swapped


def test_log_memory_usage(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    manager = DeviceManager(load("4x-l4"), ids=[0, 3])
    line = manager.log_memory_usage(step=7, prefix="epoch 1", log=lines.append)
    assert lines == [line]
    assert line.startswith("epoch 1: step 7: cuda:0 0.00 GiB allocated")
    assert "cuda:3" in line
    assert "cuda:1" not in line
    DeviceManager(load("cpu-2core")).log_memory_usage()
    assert capsys.readouterr().err.startswith("cpu ")


def test_verify_training_setup() -> None:
    manager = DeviceManager(load("cpu-2core"))
    model, batch = torch.nn.Linear(4, 2), {"x": torch.zeros(3, 4), "y": [torch.zeros(3)], "name": "a"}
    found = manager.verify_training_setup(model, batch)
    assert (found["device"], found["num_parameters"], found["num_trained"]) == ("cpu", 10, 10)
    assert (found["num_batch_tensors"], found["is_training"]) == (2, True)
    assert manager.verify_training_setup(model)["batch_on_device"] is None
    with pytest.raises(DrivetrainError, match=r"batch\['x'\] is on meta"):
        manager.verify_training_setup(model, {"x": torch.zeros(1, device="meta")})
    with pytest.raises(DrivetrainError, match=r"model\.weight is on meta"):
        manager.verify_training_setup(torch.nn.Linear(4, 2, device="meta"), batch)
    with pytest.raises(DrivetrainError, match="holds no tensor"):
        manager.verify_training_setup(model, ["a"])
    with pytest.raises(DrivetrainError, match="no parameter of the model is trained"):
        manager.verify_training_setup(model.requires_grad_(False), batch)


def test_utilisation_is_asked_by_uuid() -> None:
    gpu, asked = load("4x-l4").gpus[1], []

    class Nvml:
        nvmlInit = nvmlShutdown = staticmethod(lambda: None)  # noqa: N815
        nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: asked.append(uuid) or uuid)  # noqa: N815
        nvmlDeviceGetUtilizationRates = staticmethod(lambda _: SimpleNamespace(gpu=87, memory=40))  # noqa: N815

    assert read_utilization(gpu, Nvml) == (87.0, 40.0)
    assert asked == [gpu.uuid.encode()]
    Nvml.nvmlDeviceGetUtilizationRates = staticmethod(lambda _: 1 / 0)
    assert read_utilization(gpu, Nvml) == (None, None)
