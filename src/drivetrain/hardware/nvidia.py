"""Detects NVIDIA GPUs by NVML, the library behind nvidia-smi, without a CUDA context or memory on any GPU.

NVML lists every GPU in the order of the PCI bus and ignores CUDA_VISIBLE_DEVICES; CUDA by default puts the fastest
first. So GPUs are identified by UUID and then put in the order in which this process would count them.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from drivetrain.core.value import GIB
from drivetrain.hardware.catalogue import cuda_precisions, tabled_rates
from drivetrain.hardware.facts import Gpu, Link, Memory, MigSlice, Note, Rate
from drivetrain.hardware.gpu_drivers import Nvml, Selection, first_mig_entry, mig_matches, names_mig, select

Handle = Any

BUSY_BELOW_FREE_FRACTION = 0.8
_CUDA_ORDER_TIMEOUT_SECONDS = 3.0
_MAX_NVLINKS = 36
_COMPUTE_MODE_PROHIBITED = 2

# Cores per SM, by compute capability: NVML reports cores, and SMs only for MIG devices.
_CORES_PER_SM = {
    (5, 0): 128, (5, 2): 128, (5, 3): 128, (6, 0): 64, (6, 1): 128, (6, 2): 128, (7, 0): 64, (7, 2): 64, (7, 5): 64,
    (8, 0): 64, (8, 6): 128, (8, 7): 128, (8, 9): 128, (9, 0): 128, (10, 0): 128, (10, 3): 128, (11, 0): 128,
    (12, 0): 128, (12, 1): 128,
}  # fmt: skip
_ARCHITECTURES = {
    2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper",
    10: "Blackwell", 13: "Rubin",
}  # fmt: skip
_ANCESTORS: dict[int, Any] = {
    0: "pcie switch",
    10: "pcie switch",
    20: "pcie switch",
    30: "host bridge",
    40: "numa node",
    50: "between numa nodes",
}


@dataclass(frozen=True)
class NvidiaFindings:
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    num_present: int = 0  # on this machine, visible to this process or not
    driver: str = ""
    driver_cuda: str = ""
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class _Device:
    """A GPU that answers NVML."""

    physical_index: int
    handle: Handle
    uuid: str
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    mig: MigSlice | None = None


def find_nvidia(
    nvml: Nvml | None,
    environ: Mapping[str, str],
    host_memory: Memory,
    root: Path = Path("/"),
    cuda_order: "Callable[[Mapping[str, str]], list[str]] | None" = None,
) -> NvidiaFindings:
    """Return every NVIDIA GPU that this process may use. `nvml` is the pynvml module, or None if not installed."""
    cards = nvidia_cards(root)
    if nvml is None:
        remedy = "pip install nvidia-ml-py"
        sentence = f"{_cards(cards)} cannot be asked: the Python package nvidia-ml-py is missing."
        return NvidiaFindings(notes=(Note(severity="problem", sentence=sentence, remedy=remedy),) if cards else ())
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        return NvidiaFindings(notes=_init_notes(error, cards, root))
    try:
        count = nvml.nvmlDeviceGetCount()
        return _survey(nvml, count, environ, host_memory, root, cuda_order or ask_cuda_order)
    except nvml.NVMLError as error:
        return NvidiaFindings(notes=_init_notes(error, cards, root))
    finally:
        _ask(nvml, "nvmlShutdown")


def nvidia_cards(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the PCI addresses of NVIDIA display or 3D controllers, driver or no driver."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _word(device / "vendor") == "0x10de" and _word(device / "class").startswith("0x03"):
            found.append(device.name)
    return tuple(found)


def ask_cuda_order(environ: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of all GPUs in CUDA's order, from libcuda in another process: this one does not start CUDA."""
    script = (
        "import ctypes as c, uuid\n"
        "cuda = c.CDLL('libcuda.so.1')\n"
        "assert cuda.cuInit(0) == 0\n"
        "count = c.c_int()\n"
        "assert cuda.cuDeviceGetCount(c.byref(count)) == 0\n"
        "for index in range(count.value):\n"
        "    raw = c.create_string_buffer(16)\n"
        "    assert cuda.cuDeviceGetUuid_v2(raw, index) == 0\n"
        "    print('GPU-' + str(uuid.UUID(bytes=raw.raw)))\n"
    )
    clean = {key: value for key, value in environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        env=clean,
        capture_output=True,
        text=True,
        timeout=_CUDA_ORDER_TIMEOUT_SECONDS,
        check=True,
    )
    return answer.stdout.split()


def _survey(
    nvml: Nvml,
    count: int,
    environ: Mapping[str, str],
    host_memory: Memory,
    root: Path,
    cuda_order: Callable[[Mapping[str, str]], list[str]],
) -> NvidiaFindings:
    notes: list[Note] = []
    devices = _devices(nvml, count, host_memory, notes)
    devices = _in_cuda_order(devices, environ, cuda_order, notes)
    visible = _visible(nvml, devices, environ.get("CUDA_VISIBLE_DEVICES"), notes)
    nvlinks = [_nvlinks(nvml, device) for device in visible]
    gpus = tuple(
        _gpu(nvml, device, index, root, links)
        for index, (device, links) in enumerate(zip(visible, nvlinks, strict=True))
    )
    for gpu, device in zip(gpus, visible, strict=True):
        notes += _busy_notes(nvml, gpu, device)
    return NvidiaFindings(
        gpus=gpus,
        links=_links(nvml, visible, gpus, nvlinks),
        num_present=count,
        driver=_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
        driver_cuda=_cuda_version(_ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")),
        notes=tuple(notes),
    )


# ---- devices and their order


def _devices(nvml: Nvml, count: int, host_memory: Memory, notes: list[Note]) -> list[_Device]:
    found = []
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            name = _text(nvml.nvmlDeviceGetName(handle))
            total, free = _memory(nvml, handle, host_memory)
        except nvml.NVMLError as error:
            notes.append(_lost_note(nvml, index, error))
            continue
        found.append(_Device(index, handle, uuid, name, total, free))
    return found


def _lost_note(nvml: Nvml, index: int, error: Exception) -> Note:
    code = getattr(error, "value", None)
    if code == nvml.NVML_ERROR_GPU_IS_LOST:
        what, remedy = "has fallen off the bus", "sudo dmesg | grep -i xid, then sudo reboot"
    elif code == nvml.NVML_ERROR_RESET_REQUIRED:
        what, remedy = "has to be reset before it can be used", f"sudo nvidia-smi --gpu-reset -i {index}"
    elif code == nvml.NVML_ERROR_NO_PERMISSION:
        what, remedy = "may not be opened by this user", f"ls -l /dev/nvidia{index}, then sudo usermod -aG video $USER"
    else:
        what, remedy = f"does not answer ({error})", f"nvidia-smi -q -i {index}"
    sentence = f"GPU {index} (as nvidia-smi counts) {what}; it is left out, and torch may count the others anew."
    return Note(severity="problem", sentence=sentence, remedy=remedy)


def _memory(nvml: Nvml, handle: Handle, host_memory: Memory) -> tuple[int, int]:
    """Return total and free bytes. The driver's reserve is no part of the total, as in CUDA's count."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    newer = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, version) if version else None
    if newer is not None:
        total = int(newer.total) - int(newer.reserved)
        return total, min(int(newer.free), total)
    try:
        older = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        # A GPU without dedicated memory (Jetson, GB10) uses the host's.
        return host_memory.total_bytes, host_memory.free_bytes
    return int(older.total), int(older.free)


def _in_cuda_order(
    devices: list[_Device],
    environ: Mapping[str, str],
    cuda_order: Callable[[Mapping[str, str]], list[str]],
    notes: list[Note],
) -> list[_Device]:
    same_model = len({device.name for device in devices}) < 2
    if same_model or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return devices
    try:
        uuids = cuda_order(environ)
        places = [uuids.index(device.uuid) for device in devices]
    except (OSError, ValueError, subprocess.SubprocessError):
        notes.append(
            Note(
                severity="warning",
                sentence="The GPUs here are of different models, and CUDA could not be asked in which order it counts "
                "them; they are listed as nvidia-smi does.",
                remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            )
        )
        return devices
    return [device for _, device in sorted(zip(places, devices, strict=True), key=lambda pair: pair[0])]


def _visible(nvml: Nvml, devices: list[_Device], setting: str | None, notes: list[Note]) -> list[_Device]:
    if setting is not None and names_mig(setting):
        return _named_mig(nvml, devices, setting, notes)
    selection = select(setting, [device.uuid for device in devices])
    chosen = [devices[position] for position in selection.positions]
    if setting is not None and devices:
        notes += _selection_notes(setting, selection, len(devices))
    return _first_mig_instead(nvml, chosen, notes)


def _selection_notes(setting: str, selection: Selection, present: int) -> list[Note]:
    visible, stopped_at, repeated = len(selection.positions), selection.stopped_at, selection.repeated
    shown = f"CUDA_VISIBLE_DEVICES={setting!r}"
    remedy = "unset CUDA_VISIBLE_DEVICES, or name indices or UUIDs that nvidia-smi -L lists"
    if repeated is not None:
        sentence = f"{shown} names {repeated.strip()!r} twice, and CUDA then shows no GPU at all."
    elif not visible:
        sentence = f"{shown} hides {'the only GPU' if present == 1 else f'all {present} GPUs'} of this machine."
    elif stopped_at is not None and not stopped_at.startswith("-"):  # a negative entry ends the list on purpose
        sentence = (
            f"{shown}: there is no GPU {stopped_at!r}; CUDA ignores it and what follows ({visible} of {present} left)."
        )
    else:
        return []
    return [Note(severity="warning", sentence=sentence, remedy=remedy)]


# ---- MIG


def _named_mig(nvml: Nvml, devices: list[_Device], setting: str, notes: list[Note]) -> list[_Device]:
    entry = first_mig_entry(setting)
    for device in devices:
        for slice_ in _mig_devices(nvml, device):
            instance = _ask(nvml, "nvmlDeviceGetGpuInstanceId", slice_.handle)
            compute = _ask(nvml, "nvmlDeviceGetComputeInstanceId", slice_.handle)
            if mig_matches(entry, slice_.uuid, device.uuid, instance, compute):
                if "," in setting:
                    sentence = (
                        f"CUDA_VISIBLE_DEVICES names several MIG devices; CUDA shows a process only the first, {entry}."
                    )
                    notes.append(
                        Note(severity="info", sentence=sentence, remedy="start one process for each MIG device")
                    )
                return [slice_]
    if devices:
        sentence = f"CUDA_VISIBLE_DEVICES={setting!r}: there is no such MIG device, so no GPU is visible."
        notes.append(Note(severity="warning", sentence=sentence, remedy="nvidia-smi -L lists them"))
    return []


def _first_mig_instead(nvml: Nvml, chosen: list[_Device], notes: list[Note]) -> list[_Device]:
    """Replace GPUs with MIG on: CUDA shows the first MIG device and nothing else, unless another is named."""
    whole = []
    for device in chosen:
        mode = _ask(nvml, "nvmlDeviceGetMigMode", device.handle)
        if not mode or mode[0] != 1:
            whole.append(device)
            continue
        slices = _mig_devices(nvml, device)
        if slices:
            sentence = (
                f"GPU {device.physical_index} is divided by MIG; CUDA uses the first part only ({slices[0].name}) "
                "and no other GPU, unless CUDA_VISIBLE_DEVICES names another part."
            )
            remedy = "nvidia-smi -L, then export CUDA_VISIBLE_DEVICES=MIG-…"
            notes.append(Note(severity="warning", sentence=sentence, remedy=remedy))
            return [slices[0]]
        index = device.physical_index
        sentence = f"GPU {index} has MIG switched on but no MIG device, so it cannot be used."
        remedy = f"sudo nvidia-smi -i {index} -mig 0 (or make one: sudo nvidia-smi mig -i {index} -cgi 0 -C)"
        notes.append(Note(severity="problem", sentence=sentence, remedy=remedy))
    return whole


def _mig_devices(nvml: Nvml, device: _Device) -> list[_Device]:
    found = []
    for index in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", device.handle) or 0):
        handle = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", device.handle, index)
        uuid = _text(_ask(nvml, "nvmlDeviceGetUUID", handle)) if handle is not None else ""
        if not uuid:
            continue
        name = _text(_ask(nvml, "nvmlDeviceGetName", handle)) or device.name
        attributes = _ask(nvml, "nvmlDeviceGetAttributes", handle)
        memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        total = int(memory.total) if memory else int(attributes.memorySizeMB) * 1024**2 if attributes else 0
        free = int(memory.free) if memory else total
        slice_ = MigSlice(parent_uuid=device.uuid, profile=_mig_profile(name, attributes))
        found.append(_Device(device.physical_index, handle, uuid, name, total, free, slice_))
    return found


def _mig_profile(name: str, attributes: Any) -> str:
    named = re.search(r"MIG (\S+)", name)
    if named:
        return named[1]
    if attributes is None:
        return ""
    slices, compute = int(attributes.gpuInstanceSliceCount), int(attributes.computeInstanceSliceCount)
    whole = f"{slices}g.{round(int(attributes.memorySizeMB) / 1024)}gb"
    return whole if slices == compute else f"{compute}c.{whole}"


# ---- facts of one GPU


def _gpu(nvml: Nvml, device: _Device, index: int, root: Path, nvlinks: "_NvLinks") -> Gpu:
    # Clocks, power and the bus belong to the whole card: a MIG handle is refused there.
    card = _ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device.handle) if device.mig else device.handle
    capability = _capability(_ask(nvml, "nvmlDeviceGetCudaComputeCapability", card))
    pci = _pci_bus_id(_ask(nvml, "nvmlDeviceGetPciInfo", card))
    milliwatts = _ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", card)
    if milliwatts is None:
        milliwatts = _ask(nvml, "nvmlDeviceGetPowerManagementLimit", card)
    peaks, bandwidth = ({}, None) if device.mig else tabled_rates(device.name, device.memory_total_bytes)
    return Gpu(
        index=index,
        physical_index=device.physical_index,
        uuid=device.uuid,
        name=device.name,
        vendor="nvidia",
        architecture=_ARCHITECTURES.get(_ask(nvml, "nvmlDeviceGetArchitecture", card), ""),
        capability=capability,
        num_sms=_num_sms(nvml, device, card, capability),
        memory_total_bytes=device.memory_total_bytes,
        memory_free_bytes=device.memory_free_bytes,
        clock_sm_mhz=_ask(nvml, "nvmlDeviceGetClockInfo", card, nvml.NVML_CLOCK_SM),
        clock_sm_max_mhz=_ask(nvml, "nvmlDeviceGetMaxClockInfo", card, nvml.NVML_CLOCK_SM),
        clock_memory_max_mhz=_ask(nvml, "nvmlDeviceGetMaxClockInfo", card, nvml.NVML_CLOCK_MEM),
        power_limit_watts=None if milliwatts is None else milliwatts / 1000,
        pci_bus_id=pci,
        pcie_generation=_ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", card) or None,
        pcie_width=_ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", card) or None,
        numa_node=_numa_node(nvml, card, pci, root),
        num_nvlinks=nvlinks.count,
        mig=device.mig,
        precisions=cuda_precisions(capability),
        peaks=peaks,
        memory_bandwidth=bandwidth,
    )


def _capability(answer: Any) -> tuple[int, int] | None:
    return (int(answer[0]), int(answer[1])) if answer else None


def _num_sms(nvml: Nvml, device: _Device, card: Handle, capability: tuple[int, int] | None) -> int | None:
    attributes = _ask(nvml, "nvmlDeviceGetAttributes", device.handle)
    if attributes is not None and attributes.multiprocessorCount:
        return int(attributes.multiprocessorCount)
    per_sm = _CORES_PER_SM.get(capability) if capability else None
    cores = None if device.mig else _ask(nvml, "nvmlDeviceGetNumGpuCores", card)
    if not cores or per_sm is None or cores % per_sm:
        return None
    return int(cores // per_sm)


def _pci_bus_id(info: Any) -> str | None:
    """Return the bus id as in /sys/bus/pci/devices: NVML has a longer domain and capital letters."""
    domain, separator, rest = _text(getattr(info, "busId", "")).partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest.lower()}" if separator else None
    except ValueError:
        return None


def _numa_node(nvml: Nvml, card: Handle, pci: str | None, root: Path) -> int | None:
    # Not nvmlDeviceGetNumaNodeId: that is the node that the GPU's own memory forms, on the machines where it forms one.
    word = _word(root / "sys/bus/pci/devices" / pci / "numa_node") if pci else ""
    if re.fullmatch(r"-?[0-9]+", word):
        return int(word) if int(word) >= 0 else None
    masks = _ask(nvml, "nvmlDeviceGetMemoryAffinity", card, 1, 0)
    mask = int(masks[0]) if masks else 0
    return mask.bit_length() - 1 if mask.bit_count() == 1 else None


# ---- links


@dataclass(frozen=True)
class _NvLinks:
    to_peers: Mapping[str, int]  # PCI address of the other GPU -> links
    to_switch: int
    megabytes_per_second: int | None  # of one link, one direction

    @property
    def count(self) -> int:
        return sum(self.to_peers.values()) + self.to_switch


def _nvlinks(nvml: Nvml, device: _Device) -> _NvLinks:
    to_peers: dict[str, int] = {}
    to_switch = 0
    if device.mig:
        return _NvLinks({}, 0, None)
    for link in range(_MAX_NVLINKS):
        try:
            is_up = nvml.nvmlDeviceGetNvLinkState(device.handle, link)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                break  # the GPU has no more links
            continue
        if not is_up:
            continue
        if (
            _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", device.handle, link)
            == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        ):
            to_switch += 1
            continue
        peer = _pci_bus_id(_ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", device.handle, link))
        if peer:
            to_peers[peer] = to_peers.get(peer, 0) + 1
    return _NvLinks(to_peers, to_switch, _nvlink_speed(nvml, device) if to_peers or to_switch else None)


def _nvlink_speed(nvml: Nvml, device: _Device) -> int | None:
    values = _ask(nvml, "nvmlDeviceGetFieldValues", device.handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    if not values or values[0].nvmlReturn != 0:
        return None
    return int(values[0].value.uiVal) or None


def _links(
    nvml: Nvml, devices: Sequence[_Device], gpus: Sequence[Gpu], nvlinks: Sequence[_NvLinks]
) -> tuple[Link, ...]:
    found = []
    for a, b in combinations(range(len(gpus)), 2):
        direct = nvlinks[a].to_peers.get(gpus[b].pci_bus_id or "", 0)
        count = direct or min(nvlinks[a].to_switch, nvlinks[b].to_switch)
        if count:
            found.append(Link(a=a, b=b, kind="nvlink", num_nvlinks=count, bandwidth=_nvlink_rate(count, nvlinks[a])))
            continue
        level = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", devices[a].handle, devices[b].handle)
        found.append(Link(a=a, b=b, kind=_ANCESTORS.get(level, "unknown")))
    return tuple(found)


def _nvlink_rate(count: int, nvlinks: _NvLinks) -> Rate | None:
    if nvlinks.megabytes_per_second is None:
        return None
    gigabytes = count * nvlinks.megabytes_per_second / 1000
    return Rate(value=gigabytes, unit="GB/s", origin="reported", source="NVML, speed of a link × links, one direction")


# ---- notes


def _busy_notes(nvml: Nvml, gpu: Gpu, device: _Device) -> list[Note]:
    notes = []
    if _ask(nvml, "nvmlDeviceGetComputeMode", device.handle) == _COMPUTE_MODE_PROHIBITED:
        sentence = f"GPU {gpu.index} ({gpu.name}) is set to refuse computation (compute mode Prohibited)."
        remedy = f"sudo nvidia-smi -i {gpu.physical_index} -c DEFAULT"
        notes.append(Note(severity="problem", sentence=sentence, remedy=remedy))
    if gpu.memory_free_bytes >= BUSY_BELOW_FREE_FRACTION * gpu.memory_total_bytes:
        return notes
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", device.handle) or []
    pids = sorted({int(process.pid) for process in processes})
    if pids == [os.getpid()]:
        return notes  # it is this process that holds it
    others = [str(pid) for pid in pids if pid != os.getpid()]
    held = (gpu.memory_total_bytes - gpu.memory_free_bytes) / GIB
    who = f" (pid {', '.join(others[:8])}{', …' if len(others) > 8 else ''})" if others else ""
    sentence = (
        f"Other processes{who} hold {held:.1f} of {gpu.memory_total_bytes / GIB:.1f} GiB "
        f"of GPU {gpu.index} ({gpu.name})."
    )
    remedy = "nvidia-smi shows who holds it; stop those processes, or use another GPU with CUDA_VISIBLE_DEVICES"
    notes.append(Note(severity="warning", sentence=sentence, remedy=remedy))
    return notes


def _init_notes(error: Exception, cards: tuple[str, ...], root: Path) -> tuple[Note, ...]:
    """Return why NVML did not start. Without an NVIDIA card on the bus, a missing driver is no problem."""
    code = getattr(error, "value", None)
    here = _cards(cards)
    if code == 12:  # the library is not there
        if (root / "proc/driver/nvidia/version").exists():
            sentence = "The NVIDIA driver is loaded, but its library libnvidia-ml.so.1 is missing: no GPU can be used."
            remedy = "docker run --gpus all … (this container was started without it)"
        elif cards:
            sentence = f"{here} cannot be used: the NVIDIA driver is not installed."
            remedy = "sudo ubuntu-drivers install, then sudo reboot (in a container: docker run --gpus all …)"
        else:
            return ()
    elif code == 9:
        if not cards:
            sentence = "The NVIDIA library is installed, but there is no NVIDIA card and no driver is loaded."
            return (Note(severity="info", sentence=sentence),)
        sentence = f"{here} cannot be used: the NVIDIA driver is not loaded."
        remedy = "sudo modprobe nvidia (if that fails: sudo dmesg | grep -i nvidia)"
    elif code == 18:
        sentence = "The NVIDIA driver in the kernel and its library are of different versions, so no GPU can be used."
        remedy = "sudo reboot (or sudo rmmod nvidia_drm nvidia_modeset nvidia_uvm nvidia && sudo modprobe nvidia)"
    elif code == 4:
        sentence = "This user may not talk to the NVIDIA driver, so no GPU can be used."
        remedy = "ls -l /dev/nvidia*, then sudo usermod -aG video,render $USER and log in again"
    else:
        sentence = f"The NVIDIA driver does not answer ({error}), so no GPU can be used."
        remedy = "nvidia-smi, then sudo dmesg | grep -i -e nvrm -e xid"
    return (Note(severity="problem", sentence=sentence, remedy=remedy),)


def _cards(cards: tuple[str, ...]) -> str:
    if not cards:
        return "an NVIDIA GPU"
    return f"The NVIDIA card at PCI {cards[0]}" if len(cards) == 1 else f"The {len(cards)} NVIDIA cards here"


# ---- small reads


def _ask(nvml: Nvml, function: str, *arguments: Any) -> Any:
    """Return one fact, or None where this GPU, driver or library cannot answer."""
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:  # noqa: BLE001 - pynvml has other errors than NVMLError for an older driver or library
        return None


def _text(answer: Any) -> str:
    # Older nvidia-ml-py answers in bytes.
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer or "")


def _cuda_version(answer: Any) -> str:
    return f"{int(answer) // 1000}.{int(answer) % 1000 // 10}" if answer else ""


def _word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
