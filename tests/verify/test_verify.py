"""The command: which probes it runs, what it prints, what it saves, how it exits. The probes are planted ones."""

import importlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drivetrain.commands import check
from drivetrain.commands.check import VerifyOptions
from drivetrain.config import Config, Resolved, configure
from drivetrain.core import plugins
from drivetrain.core.errors import ConfigError
from drivetrain.hardware import Hardware, MeasuredRates, load_measured, measured_path
from drivetrain.verify.probe import MeasuredRate, Probe, ProbeResult, Report
from drivetrain.verify.runner import (
    CHECKLIST,
    LiveProgress,
    PlainProgress,
    choose,
    chosen_gpus,
    collect,
    console_for,
    progress,
    read_checklist,
    run_probes,
    show_checklist,
    show_summary,
)
from tests.verify.machines import machine
from tests.verify.test_runner import planted


def result(name: str, status: Any, **fields: Any) -> ProbeResult:
    return ProbeResult(name=name, title=name, status=status, seconds=0.1, **fields)


class TestChoice:
    def test_all_without_names(self) -> None:
        assert choose([]) == CHECKLIST

    def test_names_in_the_checklists_order(self) -> None:
        assert [probe.name for probe in choose(["disk", "Placement", "gpu_use"])] == ["placement", "disk", "gpu-use"]

    def test_a_family(self) -> None:
        names = [probe.name for probe in choose(["matmul"])]
        assert names == ["matmul-fp32", "matmul-tf32", "matmul-fp16", "matmul-bf16"]

    def test_every_wrong_name_at_once(self) -> None:
        with pytest.raises(ConfigError) as caught:
            choose(["trainning", "disk", "zzz"])
        first, second = caught.value.problems
        assert (first.key, first.value) == ("--only", "trainning")
        assert "did you mean `--only training`?" in first.remedy
        assert "placement, matmul-fp32" in second.allowed
        assert caught.value.exit_code == 2

    def test_the_code_of_every_probe_is_there(self) -> None:
        for probe in CHECKLIST:
            module, _, function = probe.function.partition(":")
            assert callable(getattr(importlib.import_module(module), function)), probe.name

    def test_names_are_unique_and_titles_fit_their_column(self) -> None:
        assert len({probe.name for probe in CHECKLIST}) == len(CHECKLIST)
        assert max(len(probe.title) for probe in CHECKLIST) <= 18


class TestDevices:
    @pytest.mark.parametrize(
        ("values", "indices"),
        [
            ({}, (0, 1, 2, 3)),
            ({"gpu_mode": "cpu"}, ()),
            ({"device": "cpu"}, ()),
            ({"gpu_mode": "single_gpu"}, (0,)),
            ({"device": "cuda"}, (0, 1, 2, 3)),
            ({"device": "cuda:2"}, (2,)),
            ({"device_ids": [3, 1]}, (3, 1)),
        ],
    )
    def test_of_four_gpus(self, values: dict[str, Any], indices: tuple[int, ...]) -> None:
        assert chosen_gpus(machine(4), configure(**values)) == indices

    def test_without_gpus(self) -> None:
        assert chosen_gpus(machine(), Config()) == ()


class TestSaving:
    def test_rates_by_what_they_are_of(self) -> None:
        def rate(of: str, quantity: Any, value: float, precision: Any = None) -> MeasuredRate:
            unit: Any = "TFLOP/s" if quantity == "matmul" else "GB/s"
            return MeasuredRate(of=of, quantity=quantity, value=value, unit=unit, precision=precision)

        gpu_rates = (
            rate("GPU-1", "matmul", 800, "bf16"),
            rate("GPU-1", "memory", 4300),
            rate("GPU-1", "host to device", 55),
            rate("GPU-1", "device to host", 52),
        )
        cpu_rates = (rate("cpu", "matmul", 0.07, "fp32"), rate("cpu", "memory", 30))
        rates = collect(
            [
                result("a", "passed", rates=gpu_rates),
                result("b", "passed", rates=(*cpu_rates, rate("disk", "write", 1.5), rate("disk", "read", 2.5))),
            ]
        )
        gpu = rates.gpus["GPU-1"]
        assert (gpu.peaks, gpu.memory_bandwidth) == ({"bf16": 800}, 4300)
        assert (gpu.host_to_device, gpu.device_to_host) == (55, 52)
        assert rates.cpu is not None
        assert (rates.cpu.peaks, rates.cpu.memory_bandwidth) == ({"fp32": 0.07}, 30)
        assert rates.disk is not None
        assert (rates.disk.write, rates.disk.read) == (1.5, 2.5)

    def test_a_failed_probe_gives_none(self) -> None:
        rate = MeasuredRate(of="cpu", quantity="memory", value=3, unit="GB/s")
        assert collect([result("a", "failed", rates=(rate,))]) == MeasuredRates()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command over planted probes."""

    def run(*functions: str, num_gpus: int = 0, **options: Any) -> int:
        probes = tuple(planted(function, measures_rates=True) for function in functions)
        hardware = machine(num_gpus, run_folder=str(tmp_path / "runs"))
        monkeypatch.setattr(check, "choose", lambda names: probes)
        monkeypatch.setattr(check, "detect", lambda folder: hardware)
        monkeypatch.setattr(check, "PRELOAD", ())
        return check.run_verify(VerifyOptions(**options), Resolved(configure(output_dir=str(tmp_path / "runs")), {}))

    return run


class TestCommand:
    def test_nothing_failed(self, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("good", "no_use") == 0
        out, err = capsys.readouterr()
        assert "✓ good               fine" in out
        assert "– no_use             not applicable: planted reason" in out
        assert out.splitlines()[-1].startswith("verify passed: 1 passed, 0 failed, 1 not applicable; ")
        assert out.splitlines()[-1].endswith("s on cpu")
        assert err == "", "each check is reported once"

    def test_something_failed(self, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("good", "raise_error") == 1
        out = capsys.readouterr().out
        assert "✗ raise_error        failed" in out
        assert "ZeroDivisionError: planted error" in out
        assert "remedy: drivetrain verify --only raise-error" in out
        assert out.splitlines()[-1].startswith("verify failed: 1 passed, 1 failed (raise-error), 0 not applicable")

    def test_json_is_one_document(self, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("good", "crash", json_output=True) == 1
        out, err = capsys.readouterr()
        report = Report.from_json(out)
        assert err == ""
        assert report.succeeded is False
        assert report.accelerator == "cpu"
        assert report.devices == ("cpu",)
        assert report.software.torch == "2.13.0+cpu"
        assert report.saved_to is None
        assert report.total_seconds > 0
        assert [entry.status for entry in report.results] == ["passed", "failed"]
        assert "last words before the crash" in report.results[1].output_tail
        assert set(json.loads(out)) == {
            "date",
            "total_seconds",
            "quick",
            "succeeded",
            "accelerator",
            "devices",
            "software",
            "results",
            "saved_to",
        }

    def test_save(self, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("good", save=True) == 0
        assert f"rates saved to {measured_path()}\n" in capsys.readouterr().out
        store, _ = load_measured()
        (stored,) = store.cpus.values()
        assert stored.rates.memory_bandwidth == 12.5
        assert "--quick" not in stored.source

    def test_quick_rates_are_called_rough(self, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("good", save=True, quick=True) == 0
        assert "rough ones, as --quick measures them" in capsys.readouterr().out
        (stored,) = load_measured()[0].cpus.values()
        assert stored.source.startswith("drivetrain verify --quick, ")

    def test_nothing_is_saved_unasked_or_without_rates(self, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
        command("good")
        command("no_use", save=True)
        assert "nothing to save" in capsys.readouterr().out
        assert not measured_path().exists()

    def test_the_limit_can_be_set(self, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("hang", time_limit_seconds=1) == 1
        assert "did not end within 1 s" in capsys.readouterr().out

    def test_a_wrong_name_is_wrong_input(self) -> None:
        with pytest.raises(ConfigError, match="there is no probe `nonsense`"):
            check.run_verify(VerifyOptions(only=("nonsense",)), Resolved(Config(), {}))

    def test_loading_the_command_does_not_load_torch(self) -> None:
        script = "import sys, drivetrain.commands.check; assert 'torch' not in sys.modules, 'torch'"
        subprocess.run([sys.executable, "-c", script], check=True)


class TestShow:
    ROWS = (
        result("short", "passed", figure="802 TFLOP/s, error 2e-03", detail="8,192³, relative error against float64"),
        result("broken", "failed", detail="x" * 150, remedy="drivetrain verify --only broken " + "y" * 60),
        result("absent", "not applicable", detail="one GPU – NCCL connects two or more"),
    )

    def shown(self, encoding: str) -> str:
        buffer = io.BytesIO()
        console = console_for(io.TextIOWrapper(buffer, encoding=encoding, write_through=True))
        show_checklist(self.ROWS, console)
        show_summary(report(self.ROWS), console)
        return buffer.getvalue().decode(encoding)

    @pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
    def test_eighty_columns_and_nothing_cut(self, encoding: str) -> None:
        text = self.shown(encoding)
        assert max(map(len, text.splitlines()[:-1])) <= 80
        assert text.count("x") >= 150
        assert text.count("y") >= 60

    def test_marks(self) -> None:
        assert [line[0] for line in self.shown("utf-8").splitlines() if line[0] not in " v"] == ["✓", "✗", "–"]

    def test_ascii(self) -> None:
        text = self.shown("ascii")
        assert text.isascii()
        assert "ok     short" in text
        assert "FAILED broken" in text
        assert "8,192^3" in text
        assert "?" not in text

    def test_one_line_of_progress(self) -> None:
        console = Console(file=io.StringIO(), width=80)
        live = LiveProgress(console, 3)
        live.started(Probe(name="a", title="torch.compile", function="a:b"))
        live.started(Probe(name="b", title="disk", function="a:b"))
        live.ended(result("b", "passed"))
        console.print(live)
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue().strip().endswith("1/3  torch.compile 0 s")


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_each_check_is_reported_once(is_terminal: bool) -> None:
    """Both streams in one place, as on a terminal and in a log file."""
    shown = io.StringIO()
    streams = [Console(file=shown, width=80, force_terminal=is_terminal, highlight=False) for _ in range(2)]
    rows = [result("one", "passed"), result("two", "failed")]
    with progress(streams[1], len(rows), streams[0]) as watcher:
        for row in rows:
            watcher.started(Probe(name=row.name, title=row.title, function="a:b"))
            watcher.ended(row)
    if not isinstance(watcher, PlainProgress):
        show_checklist(rows, streams[0])
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", text) if re.match(r" *[✓✗]", line)]
    assert [line.split()[1] for line in lines] == [row.title.split()[0] for row in rows]
    assert {line.rfind("0.1 s") for line in lines} == {75}, (
        "columns are those of one table, also where rows come singly"
    )
    assert "2/2  loading" not in text, "what was loaded long ago is not loaded at the end"


def report(rows: tuple[ProbeResult, ...]) -> Report:
    hardware: Hardware = machine()
    return Report(
        date="2026-01-01T00:00:00+00:00",
        total_seconds=1,
        quick=False,
        succeeded=False,
        accelerator="cpu",
        devices=("cpu",),
        software=hardware.software,
        results=rows,
    )


def test_the_documented_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of CONTRIBUTING.md, brought by another package: a row of the checklist, which passes."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = text.partition("**A probe of `verify`.**")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "my_probes.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(plugins, "_entry_points", lambda group: {"theirs": "my_probes:PROBES"})
    checklist = read_checklist()
    assert [probe.name for probe in checklist] == [*(probe.name for probe in CHECKLIST), "sorting"]
    assert "my_probes" not in sys.modules
    (found,) = run_probes(
        checklist[-1:], hardware=machine(0), run_folder=tmp_path / "runs", quick=True, preload=("torch",)
    )
    assert (found.status, found.figure) == ("passed", "1000 numbers"), found
