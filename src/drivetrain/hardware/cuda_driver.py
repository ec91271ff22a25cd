"""NVIDIA's driver, asked without a CUDA context: NVML, its management library, and the devices that CUDA would show.

CUDA_VISIBLE_DEVICES is read as the driver reads it. The rules: a list separated by commas; the first entry decides
between indices, `GPU-` and `MIG-` identifiers; reading stops at the first entry that is not valid; an entry named twice
leaves no device at all. tests/hardware/test_visible.py compares this with torch's reader.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from drivetrain.hardware.facts import Gpu

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
