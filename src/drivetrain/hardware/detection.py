"""detect(): everything about this machine that a plan needs, in a fraction of a second, and never an exception.

Versions of packages are read without importing them: importing torch would take longer than all the rest.
"""

import ast
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from drivetrain.hardware.facts import Accelerator, Cpu, Disk, Gpu, Hardware, Memory, Note, Software, apply_measured
from drivetrain.hardware.gpu_drivers import AmdFindings, find_amd, load_nvml
from drivetrain.hardware.host import Found, find_cpu, find_disk, find_memory, find_open_files_limit, printable
from drivetrain.hardware.nvidia import NvidiaFindings, find_nvidia

OPTIONAL_PACKAGES = (
    "tensorboard", "wandb", "deepspeed", "transformers", "peft", "accelerate", "lightning", "torchmetrics", "networkx",
    "nvidia-ml-py", "bitsandbytes", "flash-attn",
)  # fmt: skip

Backend = Literal["cpu", "cuda", "rocm", "none"]


def find_software() -> Software:
    torch_version, cuda, hip = _torch_build()
    backend: Backend = "none" if not torch_version else "rocm" if hip else "cuda" if cuda else "cpu"
    return Software(
        python=platform.python_version(),
        platform=f"{platform.system()}-{platform.release().partition('-')[0]}-{platform.machine()}",
        torch=torch_version,
        torch_backend=backend,
        torch_cuda=cuda or hip,
        # Asked of the packages, not of a loaded torch: on an H200 asking torch was seen to start CUDA.
        cudnn=_installed(*(f"nvidia-cudnn-cu{major}" for major in _majors(cuda))) if backend == "cuda" else "",
        nccl=_installed(*(f"nvidia-nccl-cu{major}" for major in _majors(cuda))) if backend == "cuda" else "",
        packages={name: _installed(name) for name in OPTIONAL_PACKAGES},
    )


def torch_architectures() -> tuple[str, ...]:
    """Return the architectures (`sm_80`, `compute_90`, …) of the loaded torch; empty if not loaded or unknown."""
    torch = sys.modules.get("torch")
    try:
        # torch.cuda.get_arch_list() would start CUDA first; this is only the text compiled into the library.
        return tuple(str(torch._C._cuda_getArchFlags()).split()) if torch else ()
    except (AttributeError, RuntimeError):
        return ()


def runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Return whether code compiled for these architectures runs on a GPU of this capability."""
    for name in architectures:
        kind, _, number = name.partition("_")
        if number[-1:] in ("a", "f"):
            number, only_this_one = number[:-1], True
        else:
            only_this_one = False
        if not number.isdecimal() or len(number) < 2:
            return True  # not a name we know: do not judge
        target = int(number[:-1]), int(number[-1])
        if kind == "compute" and not only_this_one and target <= capability:
            return True  # the driver compiles it for any newer GPU
        if (
            kind == "sm"
            and target[0] == capability[0]
            and (target == capability or (target < capability and not only_this_one))
        ):
            return True
    return not architectures


def _torch_build() -> tuple[str, str, str]:
    """Return version, CUDA version and HIP version of torch; empty strings for those it lacks."""
    loaded = sys.modules.get("torch")
    if loaded is not None and hasattr(loaded, "version"):
        build: Any = loaded.version
        return str(loaded.__version__), str(build.cuda or ""), str(build.hip or "")
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return "", "", ""
    facts = _assignments(Path(next(iter(spec.submodule_search_locations))) / "version.py")
    return facts.get("__version__") or _installed("torch"), facts.get("cuda", ""), facts.get("hip", "")


def _assignments(path: Path) -> dict[str, str]:
    """Return the strings assigned at the top of a Python file, read without running it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, str] = {}
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return found


@cache  # each look reads the metadata file, and a process does not see packages change
def _installed(*names: str) -> str:
    """Return the version of the first of these distributions that is installed; empty if none is."""
    for name in names:
        try:
            found = distribution(name)
            # Most of the metadata is the package's description: to parse it all takes 70 ms before a first step.
            headers = (found.read_text("METADATA") or "").partition("\n\n")[0]
            stated = re.search(r"^Version: *(\S+)", headers, re.MULTILINE)
            return stated[1] if stated else found.version or ""
        except (PackageNotFoundError, OSError, ValueError, KeyError):
            continue
    return ""


def _majors(cuda: str) -> tuple[str, ...]:
    """Return CUDA major versions, the one that torch was built for first."""
    return tuple(dict.fromkeys((cuda.partition(".")[0] or "13", "13", "12", "11")))


Part = TypeVar("Part")

_SEVERITIES = ("problem", "warning", "info")


def detect(run_folder: Path | str = "runs", environ: Mapping[str, str] | None = None) -> Hardware:
    """Detect what this process may use: GPUs, links, cores, memory, the run folder's disk, versions; and problems.

    Creates no CUDA context and starts CUDA in no way. Never raises: facts that cannot be determined become a note.

    Args:
        run_folder: The folder whose disk is looked at.
        environ: Environment variables, such as CUDA_VISIBLE_DEVICES. Default: those of this process.

    Returns:
        The facts, each marked as measured, reported or tabled.

    Example:
        >>> dt.detect().cpu.num_usable >= 1
        True
    """
    return survey(run_folder, os.environ if environ is None else environ, nvml=load_nvml())


def survey(
    run_folder: Path | str,
    environ: Mapping[str, str],
    *,
    nvml: Any,
    root: Path = Path("/"),
    system: str = sys.platform,
    machine: str = platform.machine(),
    software: Software | None = None,
    architectures: tuple[str, ...] | None = None,
    cuda_order: Callable[[Mapping[str, str]], list[str]] | None = None,
) -> Hardware:
    """Run detect() with all its inputs as arguments: NVML, the root of /proc and /sys, the operating system."""
    notes: list[Note] = []

    def attempt(part: Callable[[], Part], fallback: Part, what: str) -> Part:
        try:
            return part()
        except Exception as error:  # noqa: BLE001 - one part that fails must not take the others with it
            sentence = f"{what} could not be found out ({type(error).__name__}: {error})."
            notes.append(
                Note(severity="warning", sentence=sentence, remedy="please report this with: drivetrain check --json")
            )
            return fallback

    folder = Path(run_folder)
    cpu = attempt(lambda: find_cpu(root), _unknown_cpu(), "What the CPU can do")
    memory = attempt(lambda: find_memory(root), Found(_unknown_memory()), "How much memory there is")
    disk = attempt(lambda: find_disk(folder, root), Found(_unknown_disk(folder)), f"The disk of {str(run_folder)!r}")
    open_files = attempt(find_open_files_limit, tuple[Note, ...](), "The limit of open files")
    notes += [*memory.notes, *disk.notes, *open_files]
    installed = software or attempt(find_software, _unknown_software(), "What is installed")
    nvidia = attempt(lambda: find_nvidia(nvml, environ, memory.fact, root, cuda_order), NvidiaFindings(), "NVIDIA GPUs")
    amd = attempt(lambda: find_amd(environ, root), AmdFindings(), "AMD GPUs")
    installed = installed.model_copy(update={"driver": nvidia.driver, "driver_cuda": nvidia.driver_cuda})
    notes += nvidia.notes

    is_apple = system == "darwin" and machine == "arm64"
    discrete = amd.gpus if installed.torch_backend == "rocm" else nvidia.gpus
    gpus = (_apple_gpu(cpu, memory.fact),) if is_apple else discrete
    accelerator, reasons = _accelerator(installed, nvidia, amd, is_apple, cpu)
    notes += reasons
    if accelerator == "cuda":
        notes += _gpus_without_code(installed, gpus, torch_architectures() if architectures is None else architectures)

    hardware = Hardware(
        accelerator=accelerator,
        gpus=gpus,
        links=nvidia.links if gpus == nvidia.gpus else (),
        cpu=cpu,
        memory=memory.fact,
        disk=disk.fact,
        software=installed,
        notes=tuple(notes),
    )
    hardware = attempt(lambda: apply_measured(hardware, environ), hardware, "Which rates were measured")
    late = tuple(note for note in notes if note not in hardware.notes)
    ordered = sorted((*hardware.notes, *late), key=lambda note: _SEVERITIES.index(note.severity))
    return hardware.model_copy(update={"notes": tuple(ordered)})


def _accelerator(
    software: Software, nvidia: NvidiaFindings, amd: AmdFindings, is_apple: bool, cpu: Cpu
) -> tuple[Accelerator, list[Note]]:
    """Return the device that this torch would train on, and why it is not the GPU where it is not."""
    if software.torch_backend == "none":
        return "cpu", [Note(severity="problem", sentence="PyTorch is not installed.", remedy="pip install torch")]
    if is_apple:
        sentence = (
            "This is an Apple GPU, on which drivetrain has not been tried: training runs on the CPU unless it is asked "
            "for."
        )
        return "cpu", [Note(severity="info", sentence=sentence, remedy="--device mps")]
    if software.torch_backend == "rocm" and amd.num_present:
        return _rocm(amd)
    if nvidia.num_present:
        return _cuda(software, nvidia)
    return "cpu", [*_amd_without_rocm(software, amd), *_no_gpu(nvidia, cpu)]


def _rocm(amd: AmdFindings) -> tuple[Accelerator, list[Note]]:
    notes = list(amd.notes)
    usable = bool(amd.gpus) and not any(note.severity == "problem" for note in notes)
    sentence = "AMD GPUs are read from /sys as AMD documents it; drivetrain has not been tried on real AMD hardware."
    notes.append(Note(severity="info", sentence=sentence, remedy="drivetrain verify"))
    return ("rocm" if usable else "cpu"), notes


def _cuda(software: Software, nvidia: NvidiaFindings) -> tuple[Accelerator, list[Note]]:
    if not nvidia.gpus:
        return "cpu", []  # hidden, lost or not permitted: the notes on the GPUs say which
    count = f"There are {len(nvidia.gpus)} NVIDIA GPUs" if len(nvidia.gpus) > 1 else "There is an NVIDIA GPU"
    version = software.torch.partition("+")[0]
    driver_major = _major(nvidia.driver_cuda)
    if software.torch_backend != "cuda":
        sentence = f"{count} here, but torch {software.torch} is not a CUDA build: training would run on the CPU."
        return "cpu", [Note(severity="problem", sentence=sentence, remedy=_cuda_torch(version, driver_major))]
    if driver_major and _major(software.torch_cuda) > driver_major:
        sentence = (
            f"torch {software.torch} needs CUDA {software.torch_cuda}, but driver {nvidia.driver} can run CUDA "
            f"{nvidia.driver_cuda} at most: torch will find no GPU."
        )
        remedy = f"install a newer NVIDIA driver, or: {_cuda_torch(version, driver_major)}"
        return "cpu", [Note(severity="problem", sentence=sentence, remedy=remedy)]
    return "cuda", []


def _gpus_without_code(software: Software, gpus: tuple[Gpu, ...], architectures: tuple[str, ...]) -> list[Note]:
    notes = []
    for gpu in gpus:
        if gpu.capability is not None and not runs_on(architectures, gpu.capability):
            capability = ".".join(map(str, gpu.capability))
            sentence = (
                f"torch {software.torch} holds no code for GPU {gpu.index} ({gpu.name}, capability {capability}); "
                f"it was built for {' '.join(architectures)}."
            )
            remedy = "choose a build of torch for it on pytorch.org, or hide it with export CUDA_VISIBLE_DEVICES=…"
            notes.append(Note(severity="problem", sentence=sentence, remedy=remedy))
    return notes


def _amd_without_rocm(software: Software, amd: AmdFindings) -> list[Note]:
    if not amd.num_present:
        return []
    sentence = f"There is an AMD GPU, but torch {software.torch} is not a ROCm build: training would run on the CPU."
    return [Note(severity="info", sentence=sentence, remedy="choose the ROCm build of torch on pytorch.org")]


def _no_gpu(nvidia: NvidiaFindings, cpu: Cpu) -> list[Note]:
    if any(note.severity == "problem" for note in nvidia.notes):
        return []  # there is one; those notes say what is wrong with it
    cores = "1 core" if cpu.num_usable == 1 else f"{cpu.num_usable} cores"
    return [Note(severity="info", sentence=f"No usable GPU was found: training would run on the CPU ({cores}).")]


def _cuda_torch(version: str, driver_major: int) -> str:
    if 0 < driver_major < 12:
        return "update the NVIDIA driver first (it cannot run CUDA 12), then install the CUDA build of torch"
    tag = "cu126" if driver_major == 12 else "cu130"
    return f"pip install torch=={version}+{tag} --index-url https://download.pytorch.org/whl/{tag}"


def _major(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _apple_gpu(cpu: Cpu, memory: Memory) -> Gpu:
    return Gpu(
        index=0,
        physical_index=0,
        uuid="apple-0",
        name=f"{cpu.model} GPU",
        vendor="apple",
        architecture="",
        memory_total_bytes=memory.total_bytes,  # one memory for both
        memory_free_bytes=memory.free_bytes,
        precisions=("fp32", "fp16"),
    )


def _unknown_cpu() -> Cpu:
    return Cpu(
        model="", machine=platform.machine(), num_logical=1, num_affinity=1, num_usable=1, precisions=("fp64", "fp32")
    )


def _unknown_memory() -> Memory:
    return Memory(total_bytes=0, free_bytes=0, host_total_bytes=0, shm_total_bytes=0, shm_free_bytes=0)


def _unknown_disk(folder: Path) -> Disk:
    return Disk(path=printable(folder), total_bytes=0, free_bytes=0, filesystem="", is_network=False)


def _unknown_software() -> Software:
    return Software(python=platform.python_version(), platform=sys.platform, torch="", torch_backend="none")
