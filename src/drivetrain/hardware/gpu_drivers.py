"""GPU drivers, asked without a context on any GPU: NVML, amdgpu's files, and what devices do at the moment."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from drivetrain.core.value import GIB
from drivetrain.hardware.facts import Gpu, Note, Precision

# ----------------------------------------------------------------------------------------------------------------------
# NVIDIA's driver, asked without a CUDA context: NVML, its management library, and the devices that CUDA would show.
#
# CUDA_VISIBLE_DEVICES is read as the driver reads it. The rules: a list separated by commas; the first entry decides
# between indices, `GPU-` and `MIG-` identifiers; reading stops at the first entry that is not valid; an entry named
# twice leaves no device at all. tests/hardware/test_visible.py compares this with torch's reader.

Nvml: TypeAlias = Any
"""The pynvml module or an object like it: it has no type hints."""
_LARGEST_INDEX = 2**31 - 1
# Like strtoul: leading digits count, what follows them is dropped, so that `1gpu2` is 1.
_LEADING_NUMBER = re.compile(r"([+-]?)0*([0-9]*)")
_LEGACY_MIG = re.compile(r"MIG-(GPU-[^/]*)/([0-9]+)/([0-9]+)")


def load_nvml() -> Nvml | None:
    """Return the pynvml module; None where the package nvidia-ml-py is missing or broken."""
    try:
        import pynvml
    except Exception:  # noqa: BLE001 - a broken installation of it counts as none
        return None
    return pynvml


def read_utilization(gpu: Gpu, nvml: Nvml | None = None) -> tuple[float, float] | tuple[None, None]:
    """Return the share of time, in percent, in which the GPU computed and in which it moved memory.

    Returns `(None, None)` where NVML is missing or does not answer for this GPU.

    Args:
        gpu: the GPU, as `detect()` found it.
        nvml: the pynvml module or an object like it; None imports it.
    """
    nvml = nvml or load_nvml()
    if nvml is None or gpu.vendor != "nvidia":
        return None, None
    try:
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no driver, or a damaged library: all the same answer
        return None, None
    try:
        rates = nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid.encode()))
        return float(rates.gpu), float(rates.memory)
    except Exception:  # noqa: BLE001 - a MIG device has no answer; older drivers raise other errors
        return None, None
    finally:
        nvml.nvmlShutdown()


@dataclass(frozen=True)
class Selection:
    """The positions that were chosen, in order, and the entry at which reading stopped."""

    positions: tuple[int, ...]
    stopped_at: str | None = None  # the entry that is not valid: it and everything after it is ignored
    repeated: str | None = None  # the entry that was named twice: no device is left


def parse(value: str) -> tuple[int, ...] | tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES up to the first invalid one; empty if one is repeated."""
    entries = _entries(value)
    return entries if isinstance(entries, tuple) else ()


def select(value: str | None, uuids: Sequence[str]) -> Selection:
    """Return the positions in `uuids` (all devices, in CUDA's order) that CUDA_VISIBLE_DEVICES leaves visible."""
    if value is None:
        return Selection(tuple(range(len(uuids))))
    entries = _entries(value)
    if isinstance(entries, _Repeated):
        return Selection((), repeated=entries.entry)
    chosen: list[int] = []
    for entry in entries:
        position = _position(entry, uuids)
        if position is None:
            return Selection(tuple(chosen), stopped_at=str(entry))
        if position in chosen:
            return Selection((), repeated=str(entry))
        chosen.append(position)
    raw = value.split(",")
    return Selection(tuple(chosen), stopped_at=raw[len(chosen)].strip() if len(raw) > len(chosen) else None)


def names_mig(value: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES names MIG devices."""
    return value is not None and value.startswith("MIG-")


def first_mig_entry(value: str) -> str:
    """Return the first MIG device that is named: CUDA shows a process only one."""
    return value.split(",", 1)[0]


def mig_matches(
    entry: str, uuid: str, parent_uuid: str, gpu_instance: int | None, compute_instance: int | None
) -> bool:
    """Return whether an entry means this MIG device: by its UUID, or by the older `MIG-GPU-<uuid>/<gi>/<ci>`."""
    legacy = _LEGACY_MIG.fullmatch(entry)
    if legacy:
        parent, instance, compute = legacy.groups()
        return parent_uuid.startswith(parent) and (int(instance), int(compute)) == (gpu_instance, compute_instance)
    return len(entry) > len("MIG-") and uuid.startswith(entry)


@dataclass(frozen=True)
class _Repeated:
    entry: str


def _entries(value: str) -> tuple[int, ...] | tuple[str, ...] | _Repeated:
    for prefix in ("GPU-", "MIG-"):
        if value.startswith(prefix):
            return _identifiers(value, prefix)
    indices: list[int] = []
    for entry in value.split(","):
        index = _leading_number(entry.strip())
        if index in indices:
            return _Repeated(entry)
        if index < 0:
            break
        indices.append(index)
    return tuple(indices)


def _identifiers(value: str, prefix: str) -> tuple[str, ...] | _Repeated:
    found: list[str] = []
    for entry in value.split(","):
        if entry in found:
            return _Repeated(entry)
        if not entry.startswith(prefix):
            break
        found.append(entry)
    return tuple(found)


def _leading_number(entry: str) -> int:
    match = _LEADING_NUMBER.match(entry)
    if match is None or match[0] in ("", "+", "-"):
        return -1
    sign, digits = match.groups()
    if sign == "-":
        return -1 if digits else 0
    # Python refuses to convert thousands of digits; every number that long is out of range anyway.
    return int(digits or "0") if len(digits) < 10 else _LARGEST_INDEX


def _position(entry: int | str, uuids: Sequence[str]) -> int | None:
    if isinstance(entry, int):
        return entry if entry < len(uuids) else None
    # The driver takes the beginning of a UUID, as long as only one device has it.
    matches = [position for position, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 and len(entry) > len("GPU-") else None


# ----------------------------------------------------------------------------------------------------------------------
# Detects AMD GPUs by the files of the amdgpu driver under /sys.
#
# Written from its documentation, not tested on real ones.


@dataclass(frozen=True)
class AmdFindings:
    gpus: tuple[Gpu, ...] = ()
    num_present: int = 0
    notes: tuple[Note, ...] = ()


def find_amd(environ: Mapping[str, str], root: Path = Path("/")) -> AmdFindings:
    """Return every AMD GPU that this process may use."""
    present = [gpu for number, node in enumerate(_nodes(root)) if (gpu := _gpu(node, number, root)) is not None]
    present = [gpu.model_copy(update={"physical_index": index}) for index, gpu in enumerate(present)]
    if not present:
        return AmdFindings()
    visible = _select(present, environ.get("ROCR_VISIBLE_DEVICES"))
    visible = _select(visible, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))
    visible = [gpu.model_copy(update={"index": index}) for index, gpu in enumerate(visible)]
    return AmdFindings(tuple(visible), len(present), tuple(_notes(present, visible, root)))


def _select(gpus: list[Gpu], setting: str | None) -> list[Gpu]:
    return [gpus[position] for position in select(setting, [gpu.uuid for gpu in gpus]).positions]


def _notes(present: list[Gpu], visible: list[Gpu], root: Path) -> list[Note]:
    notes = []
    if not (root / "dev/kfd").exists():
        sentence = "There is an AMD GPU, but /dev/kfd is not here, so it cannot be used."
        remedy = "docker run --device /dev/kfd --device /dev/dri … (outside containers: sudo modprobe amdgpu)"
        notes.append(Note(severity="problem", sentence=sentence, remedy=remedy))
    if not visible:
        names = "ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES"
        sentence = f"{names} hides {'the only AMD GPU' if len(present) == 1 else f'all {len(present)} AMD GPUs'}."
        remedy = "unset ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES"
        notes.append(Note(severity="warning", sentence=sentence, remedy=remedy))
    return notes


def _nodes(root: Path) -> list[dict[str, int]]:
    folders = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    return [_properties(folder / "properties") for folder in sorted(folders, key=lambda folder: int(folder.name))]


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _word(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _gpu(node: Mapping[str, int], index: int, root: Path) -> Gpu | None:
    simds = node.get("simd_count", 0)
    if not simds:
        return None  # a node of the topology that is a CPU
    device = root / f"sys/class/drm/renderD{node.get('drm_render_minor', 0)}/device"
    total, used = _number(device / "mem_info_vram_total"), _number(device / "mem_info_vram_used")
    if total is None:
        return None  # its driver is not up: torch could not use it either
    architecture = _architecture(node.get("gfx_target_version", 0))
    location = node.get("location_id", 0)
    pci = f"{node.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
    unique = node.get("unique_id", 0)
    numa = _word(device / "numa_node")
    return Gpu(
        index=index,
        physical_index=index,
        uuid=f"GPU-{unique:016x}" if unique else f"GPU-{pci}",
        name=_word(device / "product_name") or f"AMD {architecture}".strip(),
        vendor="amd",
        architecture=architecture,
        num_sms=simds // node["simd_per_cu"] if node.get("simd_per_cu") else None,
        memory_total_bytes=total,
        memory_free_bytes=max(0, total - (used or 0)),
        clock_sm_max_mhz=node.get("max_engine_clk_fcompute") or None,
        pci_bus_id=pci,
        numa_node=int(numa) if numa.isdecimal() else None,
        precisions=_precisions(architecture),
    )


def _architecture(version: int) -> str:
    """Return the architecture's name: 90402 is gfx942, 90010 is gfx90a.

    These are two decimal digits each, the last two written in hexadecimal.
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def _precisions(architecture: str) -> tuple[Precision, ...]:
    # Matrix instructions for bf16: CDNA (gfx908 on) and RDNA 3 (gfx11) on.
    has_bf16 = re.fullmatch(r"gfx(908|90a|9[45][0-9a-f]|1[12][0-9a-f]+)", architecture)
    return ("fp64", "fp32", "fp16", "bf16") if has_bf16 else ("fp64", "fp32", "fp16")


def _number(path: Path) -> int | None:
    word = _word(path)
    return int(word) if word.isdecimal() else None


def _word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# ----------------------------------------------------------------------------------------------------------------------
# Reads what GPUs and the host do at the moment: utilization, memory, temperature, power, clocks. Loads no torch.

Row = dict[str, Any]

# Bits of NVML's word on why clocks are lower than they could be. Idle, and what the user set, is no throttling.
_THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software, too hot",
    0x40: "hardware, too hot",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}


def label(gpu: Gpu) -> str:
    """Return a GPU's name by nvidia-smi's numbers: ranks may each call their own GPU `cuda:0`."""
    return f"gpu{gpu.physical_index}" + (f"-{gpu.uuid[-4:]}" if gpu.mig else "")


class NvmlReader:
    """Reads figures of some GPUs. Those that a GPU, its driver or a MIG device has no answer for are left out."""

    def __init__(self, nvml: Nvml | None, gpus: Sequence[Gpu]) -> None:
        self._nvml = nvml
        self._handles: list[tuple[Gpu, Any, Any]] = []  # with its own handle, and that of the card it is on
        self.missing = self._open(gpus) if gpus else ""

    def _open(self, gpus: Sequence[Gpu]) -> str:
        """Open the GPUs. Returns why nothing can be read, or nothing of some; empty if all is well."""
        if all(gpu.vendor != "nvidia" for gpu in gpus):
            return "utilization, temperature and power are read of NVIDIA GPUs only"
        if self._nvml is None:
            return "the package nvidia-ml-py is not installed"
        try:
            self._nvml.nvmlInit()
        except Exception as error:  # noqa: BLE001 - NVMLError, or OSError where the library is damaged
            return f"NVML does not start: {error}"
        lost = []
        for gpu in gpus:
            handle = self._ask("nvmlDeviceGetHandleByUUID", gpu.uuid.encode())
            if handle is None:
                lost.append(label(gpu))
                continue
            card = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if gpu.mig else handle
            self._handles.append((gpu, handle, card))
        return f"NVML does not answer for {', '.join(lost)}" if lost else ""

    def read(self) -> dict[str, Row]:
        return {label(gpu): self._row(handle, card) for gpu, handle, card in self._handles}

    def _row(self, handle: Any, card: Any) -> Row:
        nvml: Nvml = self._nvml
        ask = self._ask
        busy = ask("nvmlDeviceGetUtilizationRates", handle)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        power = ask("nvmlDeviceGetPowerUsage", card)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", card)
        if reasons is None:  # as older drivers call it
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", card)
        row = {
            "utilisation_percent": None if busy is None else float(busy.gpu),
            "memory_utilisation_percent": None if busy is None else float(busy.memory),
            "memory_used_gib": None if memory is None else round(memory.used / GIB, 3),
            "memory_total_gib": None if memory is None else round(memory.total / GIB, 3),
            "temperature_c": ask("nvmlDeviceGetTemperature", card, nvml.NVML_TEMPERATURE_GPU),
            "power_watts": None if power is None else power / 1000,
            "clock_sm_mhz": ask("nvmlDeviceGetClockInfo", card, nvml.NVML_CLOCK_SM),
            "clock_memory_mhz": ask("nvmlDeviceGetClockInfo", card, nvml.NVML_CLOCK_MEM),
            "throttled": None if reasons is None else [word for bit, word in _THROTTLING.items() if reasons & bit],
        }
        return {name: value for name, value in row.items() if value is not None}

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception:  # noqa: BLE001 - pynvml has other errors than NVMLError for an older driver or library
            return None

    def close(self) -> None:
        if self._handles:
            self._ask("nvmlShutdown")


class HostReader:
    """Reads CPU and memory of the machine and of this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._is_first = True
        self._cpu_percents()  # these are differences: the first answer means nothing

    def _cpu_percents(self) -> tuple[float, float]:
        return psutil.cpu_percent(), self._process.cpu_percent()

    def read(self) -> Row:
        memory = psutil.virtual_memory()
        row = {
            "memory_used_gib": round((memory.total - memory.available) / GIB, 3),
            "memory_total_gib": round(memory.total / GIB, 3),
            "process_memory_gib": round(self._process.memory_info().rss / GIB, 3),
        }
        percents = self._cpu_percents()
        if not self._is_first:
            row |= {"utilisation_percent": percents[0], "process_cpu_percent": percents[1]}
        self._is_first = False
        return row
