"""AMD GPUs from planted /sys files. No real AMD GPU has been tried."""

from pathlib import Path

import pytest
import torch

from drivetrain.core.value import GIB
from drivetrain.hardware import DeviceManager, Hardware, Software, gpu_drivers
from drivetrain.hardware.detection import survey
from drivetrain.hardware.gpu_drivers import NvmlReader, find_amd
from drivetrain.plan.rules import choose_settings

ROCM = Software(python="3.12", platform="Linux", torch="2.13.0+rocm7.1", torch_backend="rocm", torch_cuda="7.1")
CPU = ROCM.model_copy(update={"torch": "2.13.0+cpu", "torch_backend": "cpu"})


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A CPU and two MI300X."""
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "0").mkdir(parents=True)
    (nodes / "0/properties").write_text("cpu_cores_count 96\nsimd_count 0\n")
    for number in (1, 2):
        (nodes / str(number)).mkdir()
        (nodes / str(number) / "properties").write_text(
            "cpu_cores_count 0\nsimd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\nvendor_id 4098\n"
            f"location_id {number << 8}\ndomain 0\ndrm_render_minor {127 + number}\nunique_id {number}\n"
        )
        device = tmp_path / f"sys/class/drm/renderD{127 + number}/device"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{192 * GIB}\n")
        (device / "mem_info_vram_used").write_text(f"{2 * GIB}\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").write_text("")
    return tmp_path


def look(root: Path, environ: dict[str, str] | None = None, software: Software = ROCM) -> Hardware:
    return survey(root, environ or {}, nvml=None, root=root, software=software, system="linux", machine="x86_64")


def test_facts(machine: Path) -> None:
    hardware = look(machine)
    assert hardware.accelerator == "rocm"
    assert [gpu.index for gpu in hardware.gpus] == [gpu.physical_index for gpu in hardware.gpus] == [0, 1]
    gpu = hardware.gpus[1]
    assert (gpu.vendor, gpu.architecture, gpu.num_sms, gpu.uuid) == ("amd", "gfx942", 304, "GPU-0000000000000002")
    assert (gpu.memory_total_bytes, gpu.memory_free_bytes) == (192 * GIB, 190 * GIB)
    assert gpu.pci_bus_id == "0000:02:00.0"
    assert "bf16" in gpu.precisions
    assert "not been tried on real AMD hardware" in hardware.notes[-1].sentence


@pytest.mark.parametrize(
    ("environ", "physical"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, [1, 0]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [1]),  # the second counts within the first
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000002"}, [1]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_visible(machine: Path, environ: dict[str, str], physical: list[int]) -> None:
    hardware = look(machine, environ)
    assert [gpu.physical_index for gpu in hardware.gpus] == physical
    assert [gpu.index for gpu in hardware.gpus] == list(range(len(physical)))
    assert hardware.accelerator == ("rocm" if physical else "cpu")
    assert any("hides all 2 AMD GPUs" in note.sentence for note in hardware.notes) == (not physical)


def test_without_kfd_it_cannot_be_used(machine: Path) -> None:
    (machine / "dev/kfd").unlink()
    hardware = look(machine)
    assert hardware.accelerator == "cpu"
    assert "--device /dev/kfd" in hardware.notes[0].remedy


def test_beside_a_cpu_build_of_torch(machine: Path) -> None:
    hardware = look(machine, software=CPU)
    assert (hardware.accelerator, hardware.gpus) == ("cpu", ())
    assert any("is not a ROCm build" in note.sentence for note in hardware.notes)


def test_architecture_names(machine: Path) -> None:
    properties = machine / "sys/class/kfd/kfd/topology/nodes/1/properties"
    original = properties.read_text()
    for version, name in {"90010": "gfx90a", "100300": "gfx1030", "110000": "gfx1100", "90006": "gfx906"}.items():
        properties.write_text(original.replace("90402", version))
        assert find_amd({}, machine).gpus[0].architecture == name


def test_nonsense_is_not_a_gpu(tmp_path: Path) -> None:
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/0"
    node.mkdir(parents=True)
    (node / "properties").write_text("simd_count many\nx\n\n1 2 3\n")
    assert find_amd({}, tmp_path).num_present == 0


def test_apple(tmp_path: Path) -> None:
    hardware = survey(tmp_path, {}, nvml=None, root=tmp_path, software=CPU, system="darwin", machine="arm64")
    (gpu,) = hardware.gpus
    assert (gpu.vendor, hardware.accelerator) == ("apple", "cpu")
    assert gpu.memory_total_bytes == hardware.memory.total_bytes
    assert any("Apple GPU" in note.sentence and note.severity == "info" for note in hardware.notes)


def test_without_nvml(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a ROCm build torch calls the GPU `cuda`; what only NVML knows is left out, with the true reason."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(gpu_drivers, "load_nvml", lambda: pytest.fail("NVML was asked about an AMD GPU"))
    hardware = look(machine)
    manager = DeviceManager(hardware)
    assert manager.device.type == "cuda"
    assert manager.gpus[0].vendor == "amd"
    reader = NvmlReader(None, hardware.gpus)
    assert reader.missing == "utilization, temperature and power are read of NVIDIA GPUs only"
    assert reader.read() == {}
    nvml = FakeNvml()
    assert gpu_drivers.read_utilization(hardware.gpus[0], nvml) == (None, None)
    settings = choose_settings(hardware)
    assert settings.precision.value in ("bf16", "fp16")
    assert hardware.gpus[0].architecture in settings.precision.reason
    assert all("tf32" not in gpu.precisions for gpu in hardware.gpus)


class FakeNvml:
    def __getattr__(self, name: str) -> None:
        pytest.fail(f"{name} was asked about an AMD GPU")
