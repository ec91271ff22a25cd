"""Processes are forked from one whose OpenMP threads have run: they stay on one thread, whatever a trainer asks for."""

import gc
import importlib
import math
import os
import stat
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from drivetrain.core.processes import SetAside
from drivetrain.data.keyed_items import GATHERED
from drivetrain.proving import Certificate, Check, Classification, Kind
from drivetrain.proving.processes import Workplace, _start
from drivetrain.proving.recorder import Recorder, read_rank


def many_threads() -> float:
    torch.set_num_threads(2)
    return float(torch.tanh(torch.ones(2_000_000, dtype=torch.float64)).sum())


def test_a_trainer_that_asks_for_threads_does_not_hang() -> None:
    assert many_threads() > 0  # here they start
    with Workplace(20.0) as place:
        assert place.apart(many_threads) > 0


def test_a_certificate_replaces_no_device(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    Certificate("job", "trainer").write(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert b'"job"' in os.read(reader, 1 << 16)
    os.close(reader)


def test_a_certificate_shows_what_libraries_say_as_they_say_it() -> None:
    verdict = Classification(Kind.FAILED, "unknown", "2 processes", "[/pytorch/gloo/pair.cc:456] timed out")
    certificate = Certificate("job", "trainer", checks=[Check("2 processes", "samples", "failed", verdict=verdict)])
    written = StringIO()
    certificate.show(Console(file=written, width=120))
    assert "[/pytorch/gloo/pair.cc:456] timed out" in written.getvalue()


def test_what_one_process_imports_the_next_need_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loaded_late.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with Workplace(20.0) as place:
        place.apart(lambda: importlib.import_module("loaded_late").__name__)
        assert place.apart(lambda: "loaded_late" in sys.modules)


class Left:
    """Something in a cycle that must not be destroyed by another process, as the threads of a process group."""

    def __init__(self) -> None:
        self.itself, self.home = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.home:
            os._exit(7)


def test_garbage_of_the_parent_is_not_destroyed_in_a_rank(tmp_path: Path) -> None:
    """Nor while it trains, nor when its run is over and it collects again what a run sets aside."""

    def train() -> None:
        aside = SetAside()
        aside.begin()
        lost: list[list[int]] = [[] for _ in range(100_000)]
        aside.end()
        lost += [[] for _ in range(100_000)]
        gc.collect()

    gc.collect()
    gc.disable()
    Left()
    gc.enable()
    process = _start(train, tmp_path / "log", {})
    process.join()
    assert process.exitcode == 0


TENSORS = {
    **{str(kind): torch.tensor([[1, 0], [2, 1]]).to(kind) for kind in GATHERED},
    "a number": torch.tensor(2.5),
    "nothing": torch.empty(0, 3),
    "not finite": torch.tensor([math.nan, -math.inf, -0.0]),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "conjugate": torch.tensor([1 + 2j]).conj(),
}


def test_tensors_are_written_and_read_bit_by_bit(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rank-0")
    recorder.weights(TENSORS)
    recorder.finish(None)
    found = read_rank(tmp_path / "rank-0").weights
    assert found.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape), name
        assert torch.equal(bits(found[name]), bits(expected)), name
        found[name].zero_()  # memory of its own that may be written to


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def test_a_file_that_a_kill_cut_is_read_up_to_its_last_entry(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rank-0")
    recorder.note("first")
    recorder.weights({"weight": torch.ones(100)})
    whole = (tmp_path / "rank-0").read_bytes()
    for length in range(whole.index(b"weights"), len(whole), 7):
        (tmp_path / "cut").write_bytes(whole[:length])
        found = read_rank(tmp_path / "cut")
        assert found.notes == ["first"]
        assert not found.weights
