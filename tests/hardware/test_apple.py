"""Apple's GPUs, without one: which device is chosen, what is refused, and that no step needs float64 on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import drivetrain as dt
from drivetrain.core import precision
from drivetrain.hardware.detection import survey
from drivetrain.plan.rules import Pins, choose_settings
from tests.api.jobs import Variant, Vectors, make_job
from tests.api.test_swa import Normed
from tests.hardware.test_amd import CPU
from tests.hardware_fixtures import load

VARIANT = Variant("mlp", torch.float32, global_batch=16, steps=8, num_samples=64)


@pytest.fixture
def mac(tmp_path: Path) -> dt.Hardware:
    return survey(tmp_path, {}, nvml=None, root=tmp_path, software=CPU, system="darwin", machine="arm64")


def test_it_is_used_only_if_asked_for(mac: dt.Hardware) -> None:
    assert dt.DeviceManager(mac).device == torch.device("cpu")
    assert dt.DeviceManager(mac, device="mps").device == torch.device("mps:0")
    manager = dt.DeviceManager(mac, device="mps")
    assert [gpu.vendor for gpu in manager.gpus] == ["apple"]
    assert manager.get_device_info()["device_name"].endswith("GPU")
    assert manager.memory_stats().total_bytes == mac.memory.total_bytes
    (note,) = [note for note in mac.notes if "Apple GPU" in note.sentence]
    assert "has not been tried" in note.sentence
    assert note.remedy == "--device mps"


def test_settings(mac: dt.Hardware) -> None:
    settings = choose_settings(mac, Pins(device="mps"))
    assert settings.devices.value == ("mps",)
    assert "not tested" in settings.devices.reason
    assert settings.precision.value == "fp32"
    assert not settings.pin_memory.value


def test_refused(mac: dt.Hardware) -> None:
    with pytest.raises(dt.DrivetrainError, match="no Apple GPU"):
        dt.DeviceManager(load("h200"), device="mps")
    with pytest.raises(dt.DrivetrainError, match="contradict each other"):
        dt.DeviceManager(mac, mode="multi_gpu", device="mps")
    with pytest.raises(dt.DrivetrainError, match="contradict each other"):
        dt.DeviceManager(mac, device="mps", ids=[0])


class NoFloat64(TorchDispatchMode):
    """Raises, as Apple's GPUs do, where an operation has a result in float64."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it")
        return result


def parts_loss(model: Any, batch: Any) -> Any:
    output = model(batch[0])
    dt.log("confidence", output.softmax(1).amax(1).mean())
    dt.log("right", dt.LossSum((output.argmax(1) == batch[1]).sum(), len(batch[1])))
    each = torch.nn.functional.cross_entropy(output, batch[1], reduction="none")
    return {"class": each.mean(), "size": output.square().mean()}


def token_loss(model: Any, batch: Any) -> dt.LossSum:
    each = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return dt.LossSum(each.sum(), (batch[1] >= 0).sum())


@pytest.mark.parametrize("kind", ["plain", "parts", "counted", "averaged"])
def test_a_run_without_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The CPU stands in for the device: every operation of a run is looked at."""
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", frozenset({"cpu"}))
    changes: dict[str, Any] = {
        "plain": {},
        "parts": {"loss": parts_loss},
        "counted": {"loss": token_loss},
        "averaged": {"model": Normed, "swa": dt.SWA(start=0.5, every=2)},
    }[kind]
    metrics = {
        "accuracy": lambda output, batch: output.argmax(1) == batch[1],
        "mean": lambda output, batch: output.mean(),
    }
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False, loss_weighting="samples", batch_size=5)
    job = make_job(VARIANT, **changes, valid=Vectors(VARIANT), metrics=metrics)
    with NoFloat64():
        result = dt.train(job, config, quiet=True)
    assert result.finished
    monkeypatch.undo()
    again = dt.train(
        make_job(VARIANT, name="wide", **changes, valid=Vectors(VARIANT), metrics=metrics), config, quiet=True
    )
    assert result.metrics == pytest.approx(dict(again.metrics), rel=1e-4)


def test_the_guard_sees_float64() -> None:
    with NoFloat64(), pytest.raises(TypeError, match="float64"):
        torch.ones(2).double()


def test_the_flag() -> None:
    assert dt.configure(device="mps").device.device == "mps"
