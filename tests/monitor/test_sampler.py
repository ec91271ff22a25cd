"""The sampler: what NVML says of the run's GPUs and of no other, and what is left without NVML or a GPU."""
# ruff: noqa: N802 - the names are pynvml's

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from drivetrain.core.run_folder import JsonLines
from drivetrain.core.value import GIB
from drivetrain.hardware import Gpu
from drivetrain.hardware.gpu_drivers import NvmlReader
from drivetrain.monitor.sampler import Sampler, torch_memory
from tests.api.jobs import Variant, run
from tests.hardware.fake_nvml import FakeGpu, FakeNvml, gpus
from tests.hardware_fixtures import load
from tests.launch.jobs import wait_for_words


class WatchedNvml(FakeNvml):
    """The stand-in, with what is asked while a run goes on. `asked` are the UUIDs that were looked up."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[str] = []
        self.reasons = 0

    def _nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> FakeGpu:
        self.asked.append(uuid.decode())
        for gpu in self.gpus:
            if gpu.uuid == uuid.decode():
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def _nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=93, memory=41)

    def _nvmlDeviceGetTemperature(self, handle: FakeGpu, kind: int) -> int:
        return 61

    def _nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        return 71500

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle: FakeGpu) -> int:
        return self.reasons


def facts_of(fake: FakeGpu, number: int) -> Gpu:
    return load("4x-l4").gpus[number].model_copy(update={"uuid": fake.uuid, "physical_index": number})


def sampled(
    folder: Path, nvml: Any, used: list[Gpu], every: int | None = None, steps: int = 0, waits: bool = False
) -> list[dict[str, Any]]:
    """The rows of so many steps; each that is to have one waits for it, if asked to."""
    told: list[str] = []
    sampler = Sampler(JsonLines(folder / "gpu.jsonl"), used, None, every, 0, told.append, nvml)
    for step in range(1, steps + 1):
        sampler.at_step(step)
        if waits and every is not None and step % every == 0:
            wait_for_words(folder / "gpu.jsonl", f'"step": {step},')
        else:
            time.sleep(0.01)
    sampler.close()
    assert told == []
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]


def test_a_row_per_gpu_of_the_run(tmp_path: Path) -> None:
    cards = gpus(4)
    nvml = WatchedNvml(cards)
    nvml.reasons = 0x4 | 0x40 | 0x1  # power cap, too hot, and idle, which is no throttling
    rows = sampled(tmp_path, nvml, [facts_of(cards[1], 1), facts_of(cards[3], 3)])
    assert {row["device"] for row in rows} == {"gpu1", "gpu3", "cpu"}
    assert set(nvml.asked) == {cards[1].uuid, cards[3].uuid}  # no word to the GPUs of others
    row = next(row for row in rows if row["device"] == "gpu3")
    used = cards[3].total - cards[3].free
    assert {name: row[name] for name in row if name not in ("time", "step", "device")} == {
        "utilisation_percent": 93.0,
        "memory_utilisation_percent": 41.0,
        "memory_used_gib": round(used / GIB, 3),
        "memory_total_gib": round(cards[3].total / GIB, 3),
        "temperature_c": 61,
        "power_watts": 71.5,
        "clock_sm_mhz": 345,
        "clock_memory_mhz": 405,
        "throttled": ["power cap", "hardware, too hot"],
    }
    assert nvml.inits == nvml.shutdowns == 1


def test_what_a_gpu_has_no_answer_for_is_left_out(tmp_path: Path) -> None:
    unsupported = pynvml.NVML_ERROR_NOT_SUPPORTED
    (card,) = gpus(1, fails={"nvmlDeviceGetUtilizationRates": unsupported, "nvmlDeviceGetPowerUsage": unsupported})
    row = next(row for row in sampled(tmp_path, WatchedNvml([card]), [facts_of(card, 0)]) if row["device"] == "gpu0")
    assert "utilisation_percent" not in row
    assert "power_watts" not in row
    assert row["temperature_c"] == 61


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (None, "nvidia-ml-py is not installed"),
        (WatchedNvml(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), "NVML does not start"),
        (WatchedNvml(gpus(1)), "does not answer for gpu2"),
    ],
)
def test_without_nvml_it_says_so_and_goes_on(tmp_path: Path, nvml: Any, words: str) -> None:
    gpu = facts_of(FakeGpu(uuid="GPU-lost"), 2)
    assert words in NvmlReader(nvml, [gpu]).missing
    rows = sampled(tmp_path, nvml, [gpu])
    assert {row["device"] for row in rows} == {"cpu"}


def test_without_a_gpu_there_is_the_host(tmp_path: Path) -> None:
    rows = sampled(tmp_path, None, [])
    assert len(rows) == 2  # one at the start, one at the end
    assert rows[0]["device"] == "cpu"
    assert 0 < rows[0]["process_memory_gib"] < rows[0]["memory_total_gib"]
    assert "utilisation_percent" not in rows[0]  # the first difference means nothing
    assert 0 <= rows[1]["utilisation_percent"] <= 100


def test_every_n_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "LEAST_SECONDS", 0.0)
    first, *steps = [row["step"] for row in sampled(tmp_path, None, [], every=10, steps=40, waits=True)]
    assert first < 10  # the row of the start
    assert steps == [10, 20, 30, 40, 40]  # the last is that of the end


def test_short_steps_do_not_make_more_rows(tmp_path: Path) -> None:
    began = time.monotonic()
    rows = sampled(tmp_path, None, [], every=1, steps=30)  # 0.3 s, and more on a busy machine
    assert len(rows) <= 3 + (time.monotonic() - began) / Sampler.LEAST_SECONDS < 30


def test_a_driver_that_hangs_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "PATIENCE_SECONDS", 0.1)
    release = threading.Event()
    (card,) = gpus(1)

    class Hanging(WatchedNvml):
        def _nvmlDeviceGetTemperature(self, handle: FakeGpu, kind: int) -> int:
            release.wait(300)
            return 0

    told: list[str] = []
    sampler = Sampler(JsonLines(tmp_path / "gpu.jsonl"), [facts_of(card, 0)], None, 1, 0, told.append, Hanging([card]))
    began = time.perf_counter()
    for step in range(1000):
        sampler.at_step(step)
    sampler.close()
    assert time.perf_counter() - began < 120  # the driver would take longer
    assert any("left behind" in text for text in told)
    release.set()


def test_a_run_without_a_gpu_writes_the_host(tmp_path: Path) -> None:
    run(str(tmp_path), Variant(dtype=torch.float32, steps=4), settings={"gpu_log_interval": 2})
    rows = [json.loads(line) for line in (tmp_path / "suite" / "gpu.jsonl").read_text().splitlines()]
    assert rows
    assert all(row["device"] == "cpu" and row["step"] <= 4 for row in rows)
    assert rows[-1]["step"] == 4


def test_cuda_is_not_started() -> None:
    if not torch.cuda.is_initialized():
        assert torch_memory(torch.device("cuda", 0)) == {}
        assert not torch.cuda.is_initialized()
