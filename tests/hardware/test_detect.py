"""detect() as a whole, on this machine: quick, never raising, and the same after a trip through JSON."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.hardware import Gpu, Hardware, Link, Note, Rate, detect
from drivetrain.hardware.detection import survey
from tests.hardware.children import child_environ
from tests.hardware_fixtures import load

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
rates = st.builds(
    Rate,
    value=st.floats(allow_nan=False, allow_infinity=False),
    unit=st.sampled_from(["TFLOP/s", "GB/s"]),
    origin=st.sampled_from(["measured", "reported", "tabled"]),
    source=texts,
)
precisions = st.sampled_from(["fp64", "fp32", "tf32", "fp16", "bf16"])
gpus = st.builds(
    Gpu,
    name=texts,
    uuid=texts,
    architecture=texts,
    capability=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 9)),
    precisions=st.lists(precisions, unique=True).map(tuple),
    peaks=st.dictionaries(precisions, rates),
    memory_bandwidth=st.none() | rates,
    power_limit_watts=st.none() | st.floats(0, 2000),
    mig=st.none(),
)
links = st.builds(Link, bandwidth=st.none() | rates)
notes = st.builds(Note, sentence=texts, remedy=texts)


@given(
    st.lists(gpus, max_size=3).map(tuple),
    st.lists(links, max_size=3).map(tuple),
    st.lists(notes, max_size=3).map(tuple),
)
def test_json_round_trip(gpus: tuple[Gpu, ...], links: tuple[Link, ...], notes: tuple[Note, ...]) -> None:
    hardware = load("cpu-2core").model_copy(update={"gpus": gpus, "links": links, "notes": notes})
    assert Hardware.from_json(hardware.to_json()) == hardware


def test_an_unknown_key_is_an_error() -> None:
    text = load("cpu-2core").to_json().replace('"accelerator"', '"acelerator": 1, "accelerator"')
    with pytest.raises(ValueError, match="acelerator"):
        Hardware.from_json(text)


def test_takes_well_below_a_second() -> None:
    """Of this process and of those it starts: what the machine does besides is not counted."""
    code = (
        "import os; from drivetrain.hardware import detect; start = sum(os.times()[:4]); detect(); "
        "print(sum(os.times()[:4]) - start)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], env=child_environ(), capture_output=True, text=True, check=True, timeout=240
    )
    assert float(answer.stdout) < 1


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "CUDA_VISIBLE_DEVICES",
                "CUDA_DEVICE_ORDER",
                "HIP_VISIBLE_DEVICES",
                "ROCR_VISIBLE_DEVICES",
                "HOME",
                "XDG_CACHE_HOME",
                "DRIVETRAIN_CACHE",
            ]
        ),
        st.text(st.characters(), max_size=30),  # with halves of characters, as os.environ has them
    )
)
def test_no_environment_makes_it_raise(environ: dict[str, str]) -> None:
    hardware = detect("runs", environ)
    assert hardware.cpu.num_usable >= 1
    assert Hardware.from_json(hardware.to_json()) == hardware


@pytest.mark.parametrize(
    "folder", ["", ".", "/", "/proc/nothing", "a" * 5000, "with\0nul", "/dev/null/x", "x/" * 2000, "not\udcfftext"]
)
def test_no_run_folder_makes_it_raise(folder: str) -> None:
    start = time.perf_counter()
    hardware = detect(folder)
    assert hardware.memory.total_bytes > 0
    assert Hardware.from_json(hardware.to_json()) == hardware
    assert time.perf_counter() - start < 60


def test_a_part_that_breaks_is_a_note_and_the_rest_stays(tmp_path: Path) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ZeroDivisionError("a bug of ours")

    hardware = survey(tmp_path, {}, nvml=Broken(), root=tmp_path)
    (note,) = [note for note in hardware.notes if "NVIDIA GPUs could not be found out" in note.sentence]
    assert "a bug of ours" in note.sentence
    assert hardware.memory.total_bytes > 0


def test_nothing_is_written(tmp_path: Path) -> None:
    detect(tmp_path / "runs", {**os.environ, "DRIVETRAIN_CACHE": str(tmp_path / "cache")})
    assert list(tmp_path.iterdir()) == []


def test_every_note_of_severity_has_a_remedy() -> None:
    for note in detect().notes:
        assert note.sentence.endswith(".")
        assert note.remedy or note.severity == "info"


def test_facts_are_finite() -> None:
    hardware = detect()
    assert math.isfinite(hardware.cpu.quota_cores or 0)
    assert 0 < hardware.memory.free_bytes <= hardware.memory.total_bytes <= hardware.memory.host_total_bytes
    assert hardware.memory.shm_total_bytes <= hardware.memory.total_bytes
