"""The store of measured rates: saved, found again, merged, and harmless when damaged."""

import multiprocessing
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from drivetrain.core.errors import DrivetrainError
from drivetrain.hardware import (
    CpuRates,
    DiskRates,
    GpuRates,
    Hardware,
    MeasuredRates,
    apply_measured,
    detect,
    load_measured,
    measured_path,
    save_measured,
)
from tests.hardware_fixtures import load


@pytest.fixture
def hardware() -> Hardware:
    return load("2x-rtx3090")


def test_measured_replaces_tabled_for_that_gpu_only(hardware: Hardware) -> None:
    first, second = hardware.gpus
    rates = GpuRates(peaks={"bf16": 65.5}, memory_bandwidth=850, host_to_device=25, device_to_host=26)
    save_measured(hardware, MeasuredRates(gpus={first.uuid: rates}, source="drivetrain verify, 2026-11-15"))
    seen = apply_measured(hardware)
    bf16 = seen.gpus[0].peaks["bf16"]
    assert (bf16.value, bf16.origin, bf16.source) == (65.5, "measured", "drivetrain verify, 2026-11-15")
    assert seen.gpus[0].peaks["tf32"].origin == "tabled"  # not measured: the data sheet stays
    assert seen.gpus[0].memory_bandwidth is not None
    assert seen.gpus[0].memory_bandwidth.value == 850
    assert seen.gpus[0].host_to_device is not None
    assert seen.gpus[1] == second


def test_detect_uses_what_was_measured(tmp_path: Path) -> None:
    before = detect(tmp_path)
    assert before.cpu.peaks == {}
    rates = MeasuredRates(cpu=CpuRates(peaks={"fp32": 0.05}, memory_bandwidth=9), disk=DiskRates(write=1.5, read=2.5))
    save_measured(before, rates)
    after = detect(tmp_path)
    assert after.cpu.peaks["fp32"].value == 0.05
    assert after.cpu.memory_bandwidth is not None
    assert after.disk.write is not None
    assert after.disk.read is not None
    assert (after.disk.write.value, after.disk.read.value, after.disk.read.origin) == (1.5, 2.5, "measured")
    assert detect(tmp_path / "elsewhere").disk.write is None


@pytest.mark.parametrize("change", [{"torch": "9.9"}, {"driver": "1.0"}])
def test_another_torch_or_driver_was_not_measured(hardware: Hardware, change: dict[str, str]) -> None:
    save_measured(hardware, MeasuredRates(gpus={hardware.gpus[0].uuid: GpuRates(peaks={"bf16": 1})}))
    other = hardware.model_copy(update={"software": hardware.software.model_copy(update=change)})
    assert apply_measured(other) == other


def test_fewer_cores_were_not_measured(hardware: Hardware) -> None:
    save_measured(hardware, MeasuredRates(cpu=CpuRates(peaks={"fp32": 1})))
    other = hardware.model_copy(update={"cpu": hardware.cpu.model_copy(update={"num_usable": 1})})
    assert apply_measured(hardware).cpu.peaks
    assert apply_measured(other) == other


def test_saving_again_merges(hardware: Hardware) -> None:
    first, second = (gpu.uuid for gpu in hardware.gpus)
    save_measured(hardware, MeasuredRates(gpus={first: GpuRates(peaks={"bf16": 1, "fp32": 2}, memory_bandwidth=3)}))
    save_measured(
        hardware, MeasuredRates(gpus={first: GpuRates(peaks={"bf16": 9}), second: GpuRates(peaks={"fp32": 7})})
    )
    save_measured(hardware, MeasuredRates(disk=DiskRates(write=5)))
    seen = apply_measured(hardware)
    assert seen.gpus[0].peaks["bf16"].value == 9
    assert seen.gpus[0].peaks["fp32"].value == 2
    assert seen.gpus[0].memory_bandwidth is not None
    assert seen.gpus[0].memory_bandwidth.value == 3
    assert seen.gpus[1].peaks["fp32"].value == 7
    assert seen.disk.write is not None
    assert seen.disk.read is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        b'{"format": 1, "gpus": 3}',
        b'{"new key": 1}',
        b'{"cpus": {"x": {"rates": -1}}}',
    ],
)
def test_a_damaged_file_is_ignored_and_said(hardware: Hardware, damage: bytes) -> None:
    path = measured_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    seen = apply_measured(hardware)
    assert seen.gpus == hardware.gpus
    assert [note.remedy for note in seen.notes] == ["drivetrain verify --save"]
    assert str(path) in seen.notes[0].sentence
    save_measured(hardware, MeasuredRates(disk=DiskRates(write=5)))
    assert load_measured()[1] == ()
    assert path.with_suffix(".unreadable").read_bytes() == damage


def test_a_folder_in_its_place_is_ignored_and_said(hardware: Hardware) -> None:
    measured_path().mkdir(parents=True)
    assert len(apply_measured(hardware).notes) == 1
    assert any("measured rates" in note.sentence for note in detect().notes)


def test_a_cache_that_cannot_be_written_is_an_error_with_a_remedy(hardware: Hardware, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DrivetrainError, match="could not be saved") as caught:
        save_measured(hardware, MeasuredRates(), {"DRIVETRAIN_CACHE": str(tmp_path / "file/cache")})
    assert "DRIVETRAIN_CACHE" in caught.value.remedy


def test_a_failure_while_writing_leaves_the_old_file(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_measured(hardware, MeasuredRates(disk=DiskRates(write=5)))
    before = path.read_bytes()

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(DrivetrainError, match="No space left"):
        save_measured(hardware, MeasuredRates(disk=DiskRates(write=6)))
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["measured.json", "measured.lock"]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_rate_is_a_positive_number(value: float) -> None:
    with pytest.raises(ValidationError):
        DiskRates(write=value)


def save_one(number: int) -> None:
    hardware = load("8x-a100-80gb")
    for _ in range(5):
        save_measured(hardware, MeasuredRates(gpus={hardware.gpus[number].uuid: GpuRates(memory_bandwidth=number + 1)}))


def test_writers_at_the_same_time_lose_nothing() -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=save_one, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 8
    seen = apply_measured(load("8x-a100-80gb"))
    assert [gpu.memory_bandwidth and gpu.memory_bandwidth.value for gpu in seen.gpus] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DRIVETRAIN_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a/measured.json"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/drivetrain/measured.json"),
        ({"HOME": "/c"}, "/c/.cache/drivetrain/measured.json"),
    ],
)
def test_where_the_file_is(environ: dict[str, str], expected: str) -> None:
    assert str(measured_path(environ)) == expected
