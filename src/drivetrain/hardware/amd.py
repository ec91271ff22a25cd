"""Detects AMD GPUs by the files of the amdgpu driver under /sys.

Written from its documentation, not tested on real ones.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain.hardware.cuda_driver import select
from drivetrain.hardware.facts import Gpu, Note, Precision


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
