"""NVIDIA GPUs by a fake NVML: what is found, in which order, and what is said when something is wrong."""
# ruff: noqa: N802 - the names are pynvml's

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.core.value import GIB
from drivetrain.hardware import Hardware, Note, Software
from drivetrain.hardware.detection import survey
from tests.hardware.fake_nvml import FakeGpu, FakeMig, FakeNvml, gpu_uuid, gpus

CUDA_TORCH = Software(python="3.12", platform="Linux", torch="2.13.0+cu130", torch_backend="cuda", torch_cuda="13.0")
CPU_TORCH = CUDA_TORCH.model_copy(update={"torch": "2.13.0+cpu", "torch_backend": "cpu", "torch_cuda": ""})

Look = Callable[..., Hardware]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    def look(nvml: Any, environ: Mapping[str, str] | None = None, **more: Any) -> Hardware:
        more = {"software": CUDA_TORCH, "root": tmp_path, "architectures": (), **more}
        environ = {"DRIVETRAIN_CACHE": str(tmp_path / "cache"), **(environ or {})}
        return survey(tmp_path, environ, nvml=nvml, **more)

    return look


def gpu_notes(hardware: Hardware) -> list[Note]:
    """Without those on the empty folder that stands for / in these tests."""
    return [note for note in hardware.notes if "/dev/shm" not in note.sentence and "files" not in note.sentence]


def only_note(hardware: Hardware) -> Note:
    (note,) = gpu_notes(hardware)
    return note


def plant_card(root: Path, address: str = "0000:01:00.0", vendor: str = "0x10de", kind: str = "0x030200") -> None:
    device = root / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


# ---- what is found


def test_every_fact_of_a_gpu(look: Look, tmp_path: Path) -> None:
    plant_card(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0/numa_node").write_text("1\n")
    nvml = FakeNvml(gpus(1))
    hardware = look(nvml)
    (gpu,) = hardware.gpus
    assert hardware.accelerator == "cuda"
    assert (gpu.index, gpu.physical_index, gpu.uuid, gpu.name) == (0, 0, gpu_uuid(1), "NVIDIA L4")
    assert (gpu.vendor, gpu.architecture, gpu.capability, gpu.num_sms) == ("nvidia", "Ada", (8, 9), 58)
    assert gpu.memory_total_bytes == 24 * GIB - GIB // 2  # without what the driver keeps for itself
    assert gpu.memory_free_bytes == 22 * GIB
    assert (gpu.clock_sm_mhz, gpu.clock_sm_max_mhz, gpu.clock_memory_max_mhz) == (345, 2040, 6251)
    assert gpu.power_limit_watts == 72
    assert (gpu.pci_bus_id, gpu.pcie_generation, gpu.pcie_width, gpu.numa_node) == ("0000:01:00.0", 4, 16, 1)
    assert gpu.precisions == ("fp64", "fp32", "tf32", "fp16", "bf16")
    assert gpu.peaks["bf16"].value == 121
    assert gpu.peaks["bf16"].origin == "tabled"
    assert gpu.memory_bandwidth is not None
    assert gpu.memory_bandwidth.value == 300
    assert (hardware.software.driver, hardware.software.driver_cuda) == ("580.159.03", "13.0")
    assert gpu_notes(hardware) == []


def test_nvml_is_shut_down_also_after_trouble(look: Look) -> None:
    nvml = FakeNvml(gpus(1), fails={"nvmlDeviceGetUUID": pynvml.NVML_ERROR_UNKNOWN})
    look(nvml)
    assert nvml.inits == nvml.shutdowns == 1

    class Bursts(FakeNvml):
        def _nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
            raise RuntimeError("not an NVML error")

    bursts = Bursts(gpus(1))
    hardware = look(bursts)
    assert bursts.inits == bursts.shutdowns == 1
    assert any("NVIDIA GPUs could not be found out" in note.sentence for note in hardware.notes)


OPTIONAL_FACTS = {
    "nvmlDeviceGetCudaComputeCapability": "capability",
    "nvmlDeviceGetNumGpuCores": "num_sms",
    "nvmlDeviceGetClockInfo": "clock_sm_mhz",
    "nvmlDeviceGetMaxClockInfo": "clock_sm_max_mhz",
    "nvmlDeviceGetPciInfo": "pci_bus_id",
    "nvmlDeviceGetMaxPcieLinkGeneration": "pcie_generation",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie_width",
    "nvmlDeviceGetMemoryAffinity": "numa_node",
}


@pytest.mark.parametrize(("function", "fact"), OPTIONAL_FACTS.items())
@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
def test_a_fact_that_nvml_does_not_know_is_none(look: Look, function: str, fact: str, code: int) -> None:
    assert getattr(look(FakeNvml(gpus(1))).gpus[0], fact) is not None
    (gpu,) = look(FakeNvml(gpus(1), fails={function: code})).gpus
    assert getattr(gpu, fact) is None
    assert gpu.memory_free_bytes == 22 * GIB


@given(failing=st.sets(st.sampled_from([name[1:] for name in dir(FakeNvml) if name.startswith("_nvml")])))
def test_no_failing_call_raises(tmp_path_factory: pytest.TempPathFactory, failing: set[str]) -> None:
    fails = dict.fromkeys(failing, pynvml.NVML_ERROR_NOT_SUPPORTED)
    root = tmp_path_factory.getbasetemp()
    survey(root, {}, nvml=FakeNvml(gpus(2), fails=fails), root=root, software=CUDA_TORCH)


def test_power_limit_by_the_other_call(look: Look) -> None:
    nvml = FakeNvml(gpus(1), fails={"nvmlDeviceGetEnforcedPowerLimit": pynvml.NVML_ERROR_NOT_SUPPORTED})
    assert look(nvml).gpus[0].power_limit_watts == 75


def test_memory_by_the_older_call(look: Look) -> None:
    class OldDriver(FakeNvml):
        def _nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
            if version:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            return super()._nvmlDeviceGetMemoryInfo(handle)

    (gpu,) = look(OldDriver(gpus(1))).gpus
    assert (gpu.memory_total_bytes, gpu.memory_free_bytes) == (24 * GIB, 22 * GIB)


def test_a_gpu_without_memory_of_its_own_has_the_hosts(look: Look) -> None:
    nvml = FakeNvml(gpus(1, name="NVIDIA GB10"), fails={"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED})
    hardware = look(nvml)
    assert hardware.gpus[0].memory_total_bytes == hardware.memory.total_bytes > 0
    assert hardware.gpus[0].peaks == {}


@pytest.mark.parametrize(
    ("capability", "cores", "sms"),
    [((9, 0), 16896, 132), ((8, 0), 6912, 108), ((7, 0), 5120, 80), ((8, 6), 10496, 82), ((6, 1), 2560, 20)],
)
def test_sms_from_cores(look: Look, capability: tuple[int, int], cores: int, sms: int) -> None:
    assert look(FakeNvml(gpus(1, capability=capability, cores=cores))).gpus[0].num_sms == sms


def test_sms_of_an_unknown_generation_are_not_guessed(look: Look) -> None:
    assert look(FakeNvml(gpus(1, capability=(99, 0)))).gpus[0].num_sms is None
    assert look(FakeNvml(gpus(1, cores=7425))).gpus[0].num_sms is None


def test_numa_node_minus_one_is_none(look: Look, tmp_path: Path) -> None:
    plant_card(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0/numa_node").write_text("-1\n")
    assert look(FakeNvml(gpus(1))).gpus[0].numa_node is None


def test_bytes_from_an_older_nvidia_ml_py(look: Look) -> None:
    assert look(FakeNvml(gpus(1), driver=b"535.1")).software.driver == "535.1"


# ---- links


def test_links_by_pcie(look: Look) -> None:
    kinds = {0: "pcie switch", 10: "pcie switch", 20: "pcie switch", 30: "host bridge", 40: "numa node"}
    kinds |= {50: "between numa nodes", 77: "unknown"}
    for ancestor, kind in kinds.items():
        (link,) = look(FakeNvml(gpus(2), ancestor=ancestor)).links
        assert (link.a, link.b, link.kind, link.num_nvlinks) == (0, 1, kind, 0)


def test_links_by_nvlink_between_two_of_three(look: Look) -> None:
    three = gpus(3, num_nvlink_ports=4, nvlink_megabytes_per_second=14062)
    three[0].nvlinks = dict.fromkeys(range(4), three[2].bus_id)
    three[2].nvlinks = dict.fromkeys(range(4), three[0].bus_id)
    hardware = look(FakeNvml(three))
    by_pair = {(link.a, link.b): link for link in hardware.links}
    assert by_pair[0, 2].kind == "nvlink"
    assert by_pair[0, 2].num_nvlinks == 4
    assert by_pair[0, 2].bandwidth is not None
    assert by_pair[0, 2].bandwidth.value == pytest.approx(56.2, abs=0.1)
    assert by_pair[0, 2].bandwidth.origin == "reported"
    assert by_pair[0, 1].kind == by_pair[1, 2].kind == "pcie switch"
    assert [gpu.num_nvlinks for gpu in hardware.gpus] == [4, 0, 4]


def test_links_through_a_switch_join_all(look: Look) -> None:
    eight = gpus(8, num_nvlink_ports=18, nvlinks=dict.fromkeys(range(18), "switch"))
    hardware = look(FakeNvml(eight))
    assert len(hardware.links) == 28
    assert {(link.kind, link.num_nvlinks) for link in hardware.links} == {("nvlink", 18)}
    assert hardware.links[0].bandwidth is not None
    assert hardware.links[0].bandwidth.value == 450


# ---- order and visibility


def mixed() -> list[FakeGpu]:
    slow, fast = gpus(2)
    slow.name, slow.capability, slow.cores = "NVIDIA GeForce GTX 1080", (6, 1), 2560
    fast.name, fast.capability, fast.cores = "NVIDIA GeForce RTX 3090", (8, 6), 10496
    return [slow, fast]


def test_different_models_are_in_the_order_cuda_says(look: Look) -> None:
    hardware = look(FakeNvml(mixed()), cuda_order=lambda environ: [gpu_uuid(2), gpu_uuid(1)])
    assert [gpu.name for gpu in hardware.gpus] == ["NVIDIA GeForce RTX 3090", "NVIDIA GeForce GTX 1080"]
    assert [(gpu.index, gpu.physical_index) for gpu in hardware.gpus] == [(0, 1), (1, 0)]
    assert gpu_notes(hardware) == []


def test_an_index_means_cudas_order(look: Look) -> None:
    order = [gpu_uuid(2), gpu_uuid(1)]
    (gpu,) = look(FakeNvml(mixed()), {"CUDA_VISIBLE_DEVICES": "1"}, cuda_order=lambda environ: order).gpus
    assert gpu.name == "NVIDIA GeForce GTX 1080"


def test_order_by_bus_needs_no_question(look: Look) -> None:
    def must_not_be_asked(environ: Mapping[str, str]) -> list[str]:
        raise AssertionError

    hardware = look(FakeNvml(mixed()), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, cuda_order=must_not_be_asked)
    assert [gpu.physical_index for gpu in hardware.gpus] == [0, 1]
    hardware = look(FakeNvml(gpus(4)), cuda_order=must_not_be_asked)
    assert [gpu.physical_index for gpu in hardware.gpus] == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [OSError(), ValueError(), subprocess.TimeoutExpired("x", 1), "unknown uuid"])
def test_order_unknown_is_said(look: Look, error: Exception | str) -> None:
    def fail(environ: Mapping[str, str]) -> list[str]:
        if isinstance(error, Exception):
            raise error
        return ["GPU-something-else"]

    hardware = look(FakeNvml(mixed()), cuda_order=fail)
    assert [gpu.physical_index for gpu in hardware.gpus] == [0, 1]
    assert only_note(hardware).remedy == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"


def test_order_without_libcuda_here_is_said(look: Look) -> None:
    """The real question in a real child; on a machine with a GPU it does not know these made-up ones either."""
    assert "order" in only_note(look(FakeNvml(mixed()), dict(os.environ))).sentence


@pytest.mark.parametrize(
    ("setting", "physical"),
    [("2,0", [2, 0]), (gpu_uuid(4), [3]), (f"{gpu_uuid(4)[:12]},{gpu_uuid(1)}", [3, 0]), ("3", [3])],
)
def test_visible_devices(look: Look, setting: str, physical: list[int]) -> None:
    hardware = look(FakeNvml(gpus(4)), {"CUDA_VISIBLE_DEVICES": setting})
    assert [gpu.physical_index for gpu in hardware.gpus] == physical
    assert [gpu.index for gpu in hardware.gpus] == list(range(len(physical)))
    assert hardware.accelerator == "cuda"
    assert gpu_notes(hardware) == []


@pytest.mark.parametrize(
    ("setting", "left", "says"),
    [
        ("", 0, "hides all 4 GPUs"),
        ("-1", 0, "hides all 4 GPUs"),
        ("none", 0, "hides all 4 GPUs"),
        ("9", 0, "hides all 4 GPUs"),
        ("1,1", 0, "twice"),
        ("0,9,1", 1, "there is no GPU '9'"),
    ],
)
def test_hidden_gpus_are_said(look: Look, setting: str, left: int, says: str) -> None:
    hardware = look(FakeNvml(gpus(4)), {"CUDA_VISIBLE_DEVICES": setting})
    assert len(hardware.gpus) == left
    assert hardware.accelerator == ("cuda" if left else "cpu")
    note = only_note(hardware)
    assert note.severity == "warning"
    assert says in note.sentence
    assert "unset CUDA_VISIBLE_DEVICES" in note.remedy


# ---- MIG


def with_mig() -> list[FakeGpu]:
    first, second = gpus(2, name="NVIDIA A100-SXM4-40GB", capability=(8, 0), cores=6912, total=40 * GIB, free=39 * GIB)
    parts = [FakeMig("MIG-aaaa-1", 7), FakeMig("MIG-bbbb-2", 8)]
    second.mig_enabled, second.mig = True, parts
    return [first, second]


def test_mig_without_a_name_is_the_first_part_only(look: Look) -> None:
    hardware = look(FakeNvml(with_mig()))
    (gpu,) = hardware.gpus
    assert (gpu.uuid, gpu.physical_index, gpu.num_sms) == ("MIG-aaaa-1", 1, 14)
    assert gpu.mig is not None
    assert (gpu.mig.parent_uuid, gpu.mig.profile) == (gpu_uuid(2), "1g.5gb")
    assert gpu.memory_total_bytes == 5 * GIB
    assert gpu.capability == (8, 0)
    assert gpu.peaks == {}  # the whole chip's rates are not the part's
    assert gpu.memory_bandwidth is None
    assert "first part only" in only_note(hardware).sentence


@pytest.mark.parametrize("setting", ["MIG-bbbb-2", "MIG-bbbb", f"MIG-{gpu_uuid(2)}/8/0"])
def test_mig_by_name(look: Look, setting: str) -> None:
    hardware = look(FakeNvml(with_mig()), {"CUDA_VISIBLE_DEVICES": setting})
    assert [gpu.uuid for gpu in hardware.gpus] == ["MIG-bbbb-2"]
    assert gpu_notes(hardware) == []


def test_a_mig_device_with_the_name_of_the_whole_gpu(look: Look) -> None:
    _, divided = with_mig()
    divided.mig[0].name = divided.name
    (gpu,) = look(FakeNvml([divided])).gpus
    assert gpu.mig is not None
    assert gpu.mig.profile == "1g.5gb"  # from its attributes
    assert gpu.peaks == {}


def test_several_mig_names_show_one(look: Look) -> None:
    hardware = look(FakeNvml(with_mig()), {"CUDA_VISIBLE_DEVICES": "MIG-bbbb-2,MIG-aaaa-1"})
    assert [gpu.uuid for gpu in hardware.gpus] == ["MIG-bbbb-2"]
    assert "only the first" in only_note(hardware).sentence


def test_mig_that_is_not_there(look: Look) -> None:
    hardware = look(FakeNvml(with_mig()), {"CUDA_VISIBLE_DEVICES": "MIG-cccc"})
    assert hardware.gpus == ()
    assert "no such MIG device" in only_note(hardware).sentence


def test_other_gpu_by_index_beside_mig(look: Look) -> None:
    (gpu,) = look(FakeNvml(with_mig()), {"CUDA_VISIBLE_DEVICES": "0"}).gpus
    assert gpu.uuid == gpu_uuid(1)


def test_mig_switched_on_but_not_divided(look: Look) -> None:
    whole, divided = with_mig()
    divided.mig = []
    hardware = look(FakeNvml([whole, divided]))
    assert [gpu.uuid for gpu in hardware.gpus] == [gpu_uuid(1)]
    note = only_note(hardware)
    assert note.severity == "problem"
    assert "nvidia-smi -i 1 -mig 0" in note.remedy


# ---- what is wrong


def test_no_gpu_at_all(look: Look) -> None:
    for nvml in (None, FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), FakeNvml([])):
        hardware = look(nvml, software=CPU_TORCH)
        assert hardware.accelerator == "cpu"
        assert hardware.gpus == ()
        assert only_note(hardware).severity == "info"
        assert "No usable GPU" in only_note(hardware).sentence


@pytest.mark.parametrize(
    ("error", "says", "remedy"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "driver is not installed", "ubuntu-drivers"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "driver is not loaded", "modprobe nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions", "sudo reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "may not talk", "usermod"),
        (pynvml.NVML_ERROR_UNKNOWN, "does not answer (Unknown Error)", "dmesg"),
    ],
)
def test_a_card_whose_driver_does_not_work(look: Look, tmp_path: Path, error: int, says: str, remedy: str) -> None:
    plant_card(tmp_path)
    hardware = look(FakeNvml(init_error=error))
    note = only_note(hardware)
    assert hardware.accelerator == "cpu"
    assert note.severity == "problem"
    assert says in note.sentence
    assert remedy in note.remedy


def test_a_card_and_no_nvidia_ml_py(look: Look, tmp_path: Path) -> None:
    plant_card(tmp_path)
    assert only_note(look(None)).remedy == "pip install nvidia-ml-py"


def test_a_container_without_the_gpus(look: Look, tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version")
    note = only_note(look(FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    assert note.severity == "problem"
    assert "docker run --gpus all" in note.remedy


@pytest.mark.parametrize(("vendor", "kind"), [("0x8086", "0x030000"), ("0x10de", "0x040300")])
def test_other_cards_are_not_nvidia_gpus(look: Look, tmp_path: Path, vendor: str, kind: str) -> None:
    plant_card(tmp_path, vendor=vendor, kind=kind)  # another vendor's display; the sound of an NVIDIA card
    assert only_note(look(FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))).severity == "info"


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo"])
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, "fallen off the bus"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, "has to be reset"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "may not be opened"),
        (pynvml.NVML_ERROR_UNKNOWN, "does not answer"),
    ],
)
def test_one_lost_gpu_leaves_the_others(look: Look, function: str, code: int, says: str) -> None:
    three = gpus(3)
    three[1].fails = {function: code}
    hardware = look(FakeNvml(three))
    assert [gpu.uuid for gpu in hardware.gpus] == [gpu_uuid(1), gpu_uuid(3)]
    note = only_note(hardware)
    assert note.severity == "problem"
    assert "GPU 1" in note.sentence
    assert says in note.sentence


def test_memory_held_by_others(look: Look) -> None:
    two = gpus(2)
    two[1].free, two[1].processes = 10 * GIB, (4711, 42)
    note = only_note(look(FakeNvml(two)))
    assert note.severity == "warning"
    assert "pid 42, 4711" in note.sentence
    assert "13.5 of 23.5 GiB of GPU 1" in note.sentence


def test_memory_held_by_this_process_is_no_news(look: Look) -> None:
    assert gpu_notes(look(FakeNvml(gpus(1, free=GIB, processes=[os.getpid()])))) == []


def test_memory_held_and_nobody_named(look: Look) -> None:
    assert "Other processes hold 22.5 of 23.5 GiB" in only_note(look(FakeNvml(gpus(1, free=GIB)))).sentence


def test_a_library_that_does_not_fit_costs_one_fact_only(look: Look) -> None:
    class OldLibrary(FakeNvml):
        def _nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> Any:
            raise pynvml.NVMLLibraryMismatchError

    assert "Other processes hold" in only_note(look(OldLibrary(gpus(1, free=GIB, processes=[1])))).sentence


def test_a_driver_that_cannot_count_its_gpus(look: Look) -> None:
    note = only_note(look(FakeNvml(gpus(1), fails={"nvmlDeviceGetCount": pynvml.NVML_ERROR_UNKNOWN})))
    assert note.severity == "problem"
    assert "does not answer" in note.sentence


def test_compute_mode_prohibited(look: Look) -> None:
    assert "-c DEFAULT" in only_note(look(FakeNvml(gpus(1, compute_mode=2)))).remedy


def test_cpu_build_of_torch_beside_a_gpu(look: Look) -> None:
    hardware = look(FakeNvml(gpus(1)), software=CPU_TORCH)
    note = only_note(hardware)
    assert hardware.accelerator == "cpu"
    assert len(hardware.gpus) == 1
    assert note.severity == "problem"
    assert note.remedy == "pip install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"
    assert "cu126" in only_note(look(FakeNvml(gpus(1), cuda=12020), software=CPU_TORCH)).remedy
    assert "update the NVIDIA driver" in only_note(look(FakeNvml(gpus(1), cuda=11040), software=CPU_TORCH)).remedy


def test_torch_too_new_for_the_driver(look: Look) -> None:
    hardware = look(FakeNvml(gpus(1), cuda=12080, driver="570.1"))
    note = only_note(hardware)
    assert hardware.accelerator == "cpu"
    assert note.severity == "problem"
    assert "driver 570.1 can run CUDA 12.8 at most" in note.sentence
    assert "cu126" in note.remedy


def test_torch_with_a_newer_minor_version_runs(look: Look) -> None:
    newer = CUDA_TORCH.model_copy(update={"torch_cuda": "13.2"})
    assert look(FakeNvml(gpus(1), cuda=13000), software=newer).accelerator == "cuda"


def test_torch_without_code_for_a_gpu(look: Look) -> None:
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    note = only_note(look(FakeNvml(mixed()), environ, architectures=("sm_80", "sm_90")))
    assert note.severity == "problem"
    assert "holds no code for GPU 0 (NVIDIA GeForce GTX 1080, capability 6.1)" in note.sentence


def test_torch_missing(look: Look) -> None:
    missing = CUDA_TORCH.model_copy(update={"torch": "", "torch_backend": "none"})
    note = only_note(look(FakeNvml(gpus(1)), software=missing))
    assert note.remedy == "pip install torch"


@given(setting=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40))
def test_no_setting_makes_it_fail(tmp_path_factory: pytest.TempPathFactory, setting: str) -> None:
    root = tmp_path_factory.getbasetemp()
    environ = {"CUDA_VISIBLE_DEVICES": setting, "CUDA_DEVICE_ORDER": setting}
    hardware = survey(root, environ, nvml=FakeNvml(with_mig()), root=root, software=CUDA_TORCH)
    assert Hardware.from_json(hardware.to_json()) == hardware


def test_problems_come_first(look: Look) -> None:
    two = gpus(3)
    two[0].fails = {"nvmlDeviceGetUUID": pynvml.NVML_ERROR_GPU_IS_LOST}
    two[2].free = GIB
    order = [note.severity for note in look(FakeNvml(two)).notes]
    assert order == sorted(order, key=["problem", "warning", "info"].index)
    assert order[0] == "problem"
