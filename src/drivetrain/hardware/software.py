"""Versions of installed packages, without importing any of them: importing torch would take longer than detect()."""

import ast
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from drivetrain.hardware.facts import Software

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


def _installed(*names: str) -> str:
    """Return the version of the first of these distributions that is installed; empty if none is."""
    for name in names:
        try:
            return version(name) or ""
        except (PackageNotFoundError, OSError, ValueError, KeyError):
            continue
    return ""


def _majors(cuda: str) -> tuple[str, ...]:
    """Return CUDA major versions, the one that torch was built for first."""
    return tuple(dict.fromkeys((cuda.partition(".")[0] or "13", "13", "12", "11")))
