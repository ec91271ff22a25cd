"""Versions found without importing anything, and which GPUs a build of torch has code for."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from drivetrain.hardware.detection import OPTIONAL_PACKAGES, find_software, runs_on
from tests.hardware.children import child_environ


def in_child(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=child_environ(),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout.strip()


def test_importing_and_detecting_do_not_import_torch() -> None:
    code = "import sys, drivetrain.hardware as h; h.detect(); print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert in_child(code) == "[]"


def test_torch_from_its_files_is_torch_as_imported() -> None:
    code = (
        "from drivetrain.hardware.detection import find_software as find\n"
        "before = find(); import torch; after = find()\n"
        "print(before.torch, before.torch_backend, before.torch_cuda, sep='|')\n"
        "print(after.torch == torch.__version__, before.torch_backend == after.torch_backend)"
    )
    from_files, same = in_child(code).splitlines()
    assert from_files.split("|")[0] == torch.__version__
    assert same == "True True"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n", ("2.9.1+cu128", "cuda", "12.8")),
        ("__version__ = '2.9.1+rocm6.4'\ncuda = None\nhip: Optional[str] = '6.4'\n", ("2.9.1+rocm6.4", "rocm", "6.4")),
        ("__version__ = '2.9.1'\ncuda = None\nhip = None\nraise SystemExit\n", ("2.9.1", "cpu", "")),
    ],
)
def test_every_build_of_torch(tmp_path: Path, text: str, expected: tuple[str, str, str]) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('must not be imported')")
    (tmp_path / "torch/version.py").write_text(text)
    code = (
        "import sys; from drivetrain.hardware.detection import find_software as find; sys.path.insert(0, sys.argv[1]); "
        "s = find(); print(s.torch, s.torch_backend, s.torch_cuda, sep='|')"
    )
    assert tuple(in_child(code, str(tmp_path)).split("|")) == expected


def test_no_torch_is_said() -> None:
    code = (
        "import sys; import drivetrain.hardware as h; sys.path[:] = []; sys.path_importer_cache.clear()\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if f.__module__ == '_frozen_importlib']\n"
        "found = h.detect()\n"
        "print(found.software.torch_backend, any('not installed' in note.sentence for note in found.notes))"
    )
    assert in_child(code) == "none True"


def test_optional_packages() -> None:
    packages = find_software().packages
    assert tuple(packages) == OPTIONAL_PACKAGES
    assert packages["networkx"] == version("networkx")


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ((), (7, 0), True),  # unknown: no judgement
        (("sm_80", "sm_90"), (8, 0), True),
        (("sm_80", "sm_90"), (8, 9), True),  # same family, older
        (("sm_86",), (8, 0), False),
        (("sm_80", "sm_90"), (7, 5), False),
        (("sm_80", "sm_90"), (12, 0), False),
        (("sm_80", "compute_90"), (12, 0), True),  # the driver compiles it
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("compute_90a",), (10, 0), False),
        (("sm_120",), (12, 1), True),
    ],
)
def test_which_gpus_a_build_runs_on(architectures: tuple[str, ...], capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(architectures, capability) is runs
