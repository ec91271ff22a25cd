"""The report of a run, from its folder alone."""

import errno
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drivetrain.cli import main
from drivetrain.commands.monitor import state_of
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.goodput import stamp
from drivetrain.core.run_folder import RunFolder
from drivetrain.core.value import format_duration
from drivetrain.report import RunData, draw, summary, write_report
from drivetrain.report.compare import compare
from drivetrain.report.picture import _few_bars, _smoothed, _thinned
from tests import warm_python
from tests.api.jobs import Variant, make_job, run

SMALL = Variant(dtype=torch.float32, steps=30, num_samples=80, global_batch=8, save_every=100)


def accuracy(output: Tensor, batch: Any) -> Tensor:
    return (output.argmax(1) == batch[1]).double()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has all there is, moved away from where it was written."""
    made = tmp_path_factory.mktemp("made")
    changes = {"valid": make_job(SMALL).data, "metrics": {"accuracy": accuracy}}
    run(str(made), SMALL, settings={"log_every": 5}, **changes)
    return Path(shutil.move(made / "suite", tmp_path_factory.mktemp("moved") / "suite"))


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "suite"))


def pixels(png: bytes) -> tuple[int, int, int]:
    """Width, height, and how many different bytes there are in the picture: an empty one has few."""
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    data, position = b"", 8
    while position < len(png):
        length, kind = struct.unpack(">I4s", png[position : position + 8])
        if kind == b"IDAT":
            data += png[position + 8 : position + 8 + length]
        position += 12 + length
    return width, height, len(set(zlib.decompress(data)))


def run_without_torch(code: str) -> str:
    """Run code in a new interpreter, which must not load torch. Returns what it prints."""
    lines = ("import sys", "from drivetrain.cli import main", code, "assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pages_are_made_without_torch(folder: Path, copied: Path, tmp_path: Path) -> None:
    """It would take seconds to load before the first words of a command that only reads files."""
    runs, page = [str(folder), str(copied)], str(tmp_path / "compare.html")
    told = run_without_torch(
        f"assert main(['report', {str(copied)!r}]) == 0\n"
        f"main(['compare', *{runs!r}, '--out', {page!r}])\n"
        "from drivetrain.commands.monitor import MachineWatch\n"
        "from drivetrain.commands.monitor_server import PICTURES, MonitorServer, RunData, page, summary\n"
        "from pathlib import Path\n"
        f"watch = MachineWatch(Path({str(tmp_path)!r}))\n"
        "server = MonitorServer(watch.look)\n"
        f"data = RunData.read(Path({str(copied)!r}))\n"
        "assert '</html>' in page(data, summary(data), PICTURES, live=True)\n"
        f"assert server.figures_of('0', Path({str(copied)!r}))\n"
        "server.server_close()\n"
    )
    assert "report.html" in told
    assert "compare.html" in told
    assert (tmp_path / "compare.html").exists()


def test_a_flag_is_no_other_code(tmp_path: Path) -> None:
    runs = [tmp_path / "own" / "suite", tmp_path / "faster" / "suite"]
    for folder, settings in zip(runs, ({}, {"learning_rate": 0.2}), strict=True):
        run(str(folder.parent), SMALL, settings=settings, valid=make_job(SMALL).data)
    found = compare(runs)
    assert [arm.label for arm in found.arms] == ["learning_rate=auto", "learning_rate=0.2"]
    differences = dict(found.differences)
    assert differences["config: optimizer.learning_rate"] == ("auto", "0.2")
    assert not [name for name in differences if name.startswith("code")]


def test_the_words(folder: Path) -> None:
    text = summary(RunData.read(folder))
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in steps if row["epoch"] == 2]
    final = sum(row["loss"] * row["num_items"] for row in last) / sum(row["num_items"] for row in last)
    assert "suite: finished" in text
    assert "optimizer steps       30" in text
    assert "compilation           not used" in text
    assert f"final loss            {final:.4f}" in text
    best = max(row["valid_accuracy"] for row in metrics)
    assert f"{metrics[-1]['valid_accuracy']:.4f} at the end, {best:.4f} at best" in text
    seconds = sum(row["seconds"] for row in steps)
    assert f"{sum(row['samples'] for row in steps) / seconds:,.0f} over all" in text
    for phase in ("data", "forward", "backward", "optimizer", "validation", "checkpoint"):
        assert f"  {phase} " in text
    assert "MFU                   unknown" in text
    assert "this process (GiB)" in text
    assert "skipped" not in text


def test_phases_are_weighted_by_their_steps(copied: Path) -> None:
    rows = [
        {"step": 10, "steps": 10, "phase_steps": 10, "phases": {"forward": 0.001}},
        {"step": 40, "steps": 30, "phase_steps": 30, "phases": {"forward": 0.003, "data": 0.004}},
    ]
    (copied / "speed.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    phases = RunData.read(copied).phases
    assert phases == pytest.approx({"forward": (0.01 + 0.09) / 40, "data": 0.12 / 40})


def test_skipped_steps_mfu_and_gpus(copied: Path) -> None:
    lines = (copied / "steps.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "skipped": number < 3} for number, line in enumerate(lines)]
    (copied / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    speed = [{**json.loads(line), "mfu": 0.4} for line in (copied / "speed.jsonl").read_text().splitlines()]
    (copied / "speed.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in speed))
    flops = {"event": "flops", "flops_per_sample": 1e9, "peak_flops_per_second": 989.4e12}
    flops |= {"peak_origin": "tabled", "peak_source": "vendor data sheet, dense"}
    with (copied / "events.jsonl").open("a") as file:
        file.write(json.dumps(flops) + "\n")
    gpu = {"device": "gpu0", "utilisation_percent": 90.0, "power_watts": 500.0, "memory_total_gib": 100.0}
    gpu |= {"memory_peak_gib": 40.0, "memory_peak_reserved_gib": 50.0, "throttled": ["power cap"], "step": 1}
    with (copied / "gpu.jsonl").open("a") as file:
        file.write(f"{json.dumps(gpu)}\n{json.dumps({**gpu, 'utilisation_percent': 70.0, 'throttled': []})}\n")
    text = summary(RunData.read(copied))
    assert "skipped steps         3" in text
    assert "MFU                   40.0% of 989.4 TFLOP/s (tabled: vendor data sheet, dense)" in text
    assert "  busy (%)                   80.0       90.0       70.0" in text
    assert "peak allocated 40.00 GiB = 40% of the card, 80% of what torch had reserved" in text
    assert "throttled in 1 samples: power cap (1)" in text


def test_the_picture(folder: Path) -> None:
    width, height, colors = pixels(draw(RunData.read(folder)))
    assert (width, height) == (1680, 552)
    assert colors > 100


def test_drawing_leaves_the_callers_matplotlib_alone(folder: Path) -> None:
    script = (
        "import sys, pathlib, matplotlib\n"
        "matplotlib.use('pdf'); before = dict(matplotlib.rcParams)\n"
        "from drivetrain.report import write_report\n"
        f"assert write_report(pathlib.Path({str(folder)!r})) == []\n"
        "assert matplotlib.get_backend() == 'pdf' and dict(matplotlib.rcParams) == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = warm_python.run(["-c", script])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "missing", ["steps.jsonl", "speed.jsonl", "metrics.jsonl", "gpu.jsonl", "plan.yaml", "events.jsonl"]
)
def test_whatever_is_missing_is_left_out(copied: Path, missing: str) -> None:
    (copied / missing).unlink()
    assert write_report(copied) == []
    assert pixels((copied / "training_metrics.png").read_bytes())[2] > 50


def test_an_empty_folder_has_a_report(tmp_path: Path) -> None:
    assert write_report(tmp_path) == []
    assert "not begun" in (tmp_path / "performance_summary.txt").read_text()


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (["start", "stop"], "stopped (asked)"),
        (
            ["start", "stop", "resume"],
            "crashed (its process ended without a word: killed, or the machine went down)",
        ),
        (["start", "stop", "claim", "refused"], "refused (no such file)"),
        (["start", "stop", "resume", "stopped by an error"], "crashed (RuntimeError: <b>)"),
        (["start", "stopped by an error", "resume", "finish"], "finished (asked)"),
    ],
)
def test_how_a_run_ended_is_what_happened_last(tmp_path: Path, events: list[str], said: str) -> None:
    why = {
        "stop": {"because": "asked"},
        "finish": {"because": "asked"},
        "stopped by an error": {"error": "RuntimeError: <b>"},
        "refused": {"error": "no such file"},
    }
    rows = [{"event": kind, "step": 1, **why.get(kind, {})} for kind in events]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert write_report(tmp_path) == []
    assert (tmp_path / "performance_summary.txt").read_text().splitlines()[0].partition(": ")[2] == said
    assert f">{said.partition(' (')[0]} after" in (tmp_path / "report.html").read_text()


def in_a_process(script: str, *arguments: object) -> str:
    """Return what another process prints: a process does not see its own locks."""
    done = warm_python.run(["-c", script, *map(str, arguments)])
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


LOOK = """
import sys; from pathlib import Path
from drivetrain.report import RunData, summary, write_report
from drivetrain.report.page import live_figures
data = RunData.read(Path(sys.argv[1]))
assert write_report(Path(sys.argv[1])) == []
print(live_figures(data)["about"])
print(summary(data).splitlines()[0])
print(data.account.goodput if data.account else None)
"""

CLAIM = """
import sys; from pathlib import Path
from drivetrain.core.run_folder import RunFolder
try:
    RunFolder.claim(Path(sys.argv[1]), 'given', {'name': 'job', 'num_steps': 5000})
except Exception as error:
    print(error)
"""


def test_a_run_that_goes_on_is_said_to(tmp_path: Path) -> None:
    """By its lock, on this machine. Its page says when it was written; once the process is gone, it has crashed."""
    held = RunFolder.claim(tmp_path, "given", {"name": "job", "num_steps": 5000})
    rows = [{"step": n, "epoch": 0, "samples": 8, "num_items": 8, "loss": 1.0, "seconds": 0.25} for n in range(1, 1001)]
    (held.path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    validations = [{"step": n, "epoch": 0, "valid_loss": 1.0, "seconds": 25.0} for n in range(100, 1001, 100)]
    (held.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in validations))
    began = {"event": "start", "step": 0, **stamp()}
    (held.path / "events.jsonl").write_text(json.dumps(began) + "\n")
    live, told, goodput = in_a_process(LOOK, held.path).splitlines()
    left = format_duration(4000 * (0.25 + 0.25))
    assert live == f"running: step 1,000 of 5,000, about {left} left"
    assert told.startswith("given (job): running, at 20")
    assert float(goodput) > 0.9, "steps that no checkpoint holds yet are not lost"
    page = (held.path / "report.html").read_text()
    assert re.search(
        rf">running when this page was written, 20\d\d-.* UTC: step 1,000 of 5,000, about {left} left<", page
    )
    assert "<title>given (job)</title>" in page
    cards = page.partition('class="cards"')[2].partition("</dl>")[0]
    assert "step 100; 1 now" in cards
    assert "at the end" not in page.partition("<script>")[0]
    assert RunData.read(held.path).is_running, "this process sees it, too"
    assert "in use by another run" in in_a_process(CLAIM, tmp_path), "nor has it lost its lock by looking"
    held.close()
    live, told, _ = in_a_process(LOOK, held.path).splitlines()
    assert live.startswith("crashed after 1,000 of 5,000 steps: its process ended without a word")
    (held.path / "crash.json").write_text(json.dumps({"cause": "out of memory", "rank": 3, "headline": "too much"}))
    assert "1,000 of 5,000 steps: out of memory on rank 3: too much" in in_a_process(LOOK, held.path).splitlines()[0]
    with (held.path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "resume", "step": 0, **stamp(), "time": "2099-01-01T00:00:00+00:00"}) + "\n")
    assert "out of memory" not in in_a_process(LOOK, held.path), "that was the end of an earlier start"
    assert "out of memory" not in state_of(held.path).cause


def test_a_run_of_another_machine_shows_by_its_records(tmp_path: Path) -> None:
    """A shared file system may not show the locks of other machines."""
    row = {"step": 1, "epoch": 0, "samples": 8, "num_items": 8, "loss": 1.0, "seconds": 0.25}
    (tmp_path / "steps.jsonl").write_text(json.dumps(row) + "\n")
    for boot, age, how in (
        ("another", 5, "running"),
        ("another", 3600, "crashed"),
        (stamp()["boot"], 5, "crashed"),
    ):
        (tmp_path / "events.jsonl").write_text(
            json.dumps({"event": "start", "step": 0, **stamp(), "boot": boot}) + "\n"
        )
        for path in tmp_path.glob("*.jsonl"):
            os.utime(path, (time.time() - age,) * 2)
        assert RunData.read(tmp_path).standing.state == how, (boot, age)
        assert state_of(tmp_path).state == how


@pytest.mark.parametrize("damage", [b"{not json}\n", b"\xff\xfe\n", b"\0\0\n", b"7\n"])
def test_damaged_lines_are_left_out_and_said(copied: Path, damage: bytes) -> None:
    for name in ("steps", "events", "metrics", "speed"):
        with (copied / f"{name}.jsonl").open("ab") as file:
            file.write(damage)
    (copied / "plan.yaml").write_bytes(damage if damage == b"\xff\xfe\n" else b"")
    problems = write_report(copied)
    assert "1 damaged lines of steps.jsonl are left out" in problems
    assert len(problems) == 4 + (damage == b"\xff\xfe\n")
    assert pixels((copied / "training_metrics.png").read_bytes())[2] > 50


def test_a_line_that_is_no_step_hides_no_other(copied: Path) -> None:
    with (copied / "steps.jsonl").open("a") as file:
        file.write('{"step": 1}\n{"step": null, "epoch": "x", "loss": "y"}\n')
    assert write_report(copied) == ["2 damaged lines of steps.jsonl are left out"]


def test_a_line_that_is_no_validation_hides_no_other(copied: Path) -> None:
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"valid_loss": 1.0}\n')
    with (copied / "speed.jsonl").open("a") as file:
        file.write('{"step": 1}\n')
    assert write_report(copied) == [
        "1 damaged lines of metrics.jsonl are left out",
        "1 damaged lines of speed.jsonl are left out",
    ]


def test_records_that_end_too_early_are_said(copied: Path, capsys: Any) -> None:
    """A run that is finished is not interrupted where its records were lost, and the report is written all the same."""
    for name in ("steps", "events"):
        rows = (copied / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        (copied / f"{name}.jsonl").write_bytes(b"".join(rows[: len(rows) // 2]) + b'{"half": ')
    (copied / "hardware.json").write_text('{"cpu": {"model": ')
    assert main(["report", str(copied)]) == 1
    said = capsys.readouterr().out
    assert "steps.jsonl ends at step 15, and 30 were done: the rest is lost" in said
    assert "hardware.json cannot be read and is left out: " in said
    assert "expected" in said.partition("hardware.json")[2], "what is wrong, not only where"
    assert f"written: {copied / 'report.html'}" in said
    assert (copied / "performance_summary.txt").read_text().startswith("suite: finished")
    with pytest.raises(DrivetrainError, match="the records of suite end at step 15, and 30 were done") as caught:
        compare([copied, Path(shutil.copytree(copied, copied.with_name("other")))])
    assert "--common" in caught.value.remedy


def test_a_damaged_folder_is_said_and_raises_nothing(copied: Path) -> None:
    (copied / "plan.yaml").write_text("world_size: 1\n")
    problems = write_report(copied)
    assert len(problems) >= 2
    assert all("was not written" in text for text in problems)


def test_a_folder_that_cannot_be_written_is_said_once(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("drivetrain.report.write_atomically", refused)
    (problem,) = write_report(copied)
    assert "Read-only file system" in problem
    assert "remedy: make the folder writable, or copy it" in problem


def test_a_torn_last_line_is_no_line(copied: Path) -> None:
    with (copied / "steps.jsonl").open("a") as file:
        file.write('{"step": 31, "ep')
    assert write_report(copied) == []


def test_a_report_that_fails_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises
    run(str(tmp_path), SMALL, settings={"report": True})
    assert (tmp_path / "suite" / "finished.json").exists()
    assert (tmp_path / "suite" / "performance_summary.txt").exists()
    assert not (tmp_path / "suite" / "training_metrics.png").exists()


def test_many_points_become_few_without_moving_the_mean() -> None:
    steps, values = np.arange(1, 10_001), np.random.default_rng(0).normal(size=10_000)
    where, means = _thinned(steps, values)
    assert len(where) <= 1500
    assert where[-1] == 10_000
    assert means.mean() == pytest.approx(values.mean(), abs=0.01)
    assert len(_thinned(steps[:100], values[:100])[0]) == 100


def test_smoothing_is_a_mean_of_the_last() -> None:
    assert _smoothed(np.array([1.0, 2.0, 3.0, 4.0]), 2).tolist() == [1.0, 1.5, 2.5, 3.5]


def test_epochs_count_validation_and_sleep(tmp_path: Path) -> None:
    steps = [
        {"step": step, "epoch": (step - 1) // 2, "loss": 1.0, "num_items": 4, "seconds": 0.5, "samples": 4}
        for step in range(1, 5)
    ]
    metrics = [{"step": 2, "epoch": 0, "valid_loss": 1.0, "seconds": 0.25}, {"step": 4, "epoch": 1, "seconds": 0.75}]
    events = [{"event": "sleep", "step": 3, "seconds": 2.0}]
    for name, rows in {"steps": steps, "metrics": metrics, "events": events}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    epochs = RunData.read(tmp_path).epochs
    assert [(epoch.seconds, epoch.whole_seconds) for epoch in epochs] == [(1.0, 1.25), (1.0, 3.75)]


def test_thousands_of_epochs_are_few_bars_with_the_same_mean() -> None:
    numbers, seconds = list(range(1, 1002)), [float(number) for number in range(1001)]
    middles, means = _few_bars(numbers, seconds)
    assert len(middles) == len(means) <= 200
    assert [middles[0], means[0]] == [3.5, 2.5]
    assert means[-1] == sum(seconds[996:]) / 5, "the last group is smaller"


def test_names_with_formulas_and_values_without_end_are_drawn(copied: Path) -> None:
    rows = [json.loads(line) for line in (copied / "steps.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {r"cost $\frac": math.inf if row["step"] == 3 else 1.0, "$x$": math.nan}
    (copied / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(RunData.read(copied)).startswith(b"\x89PNG")


def test_a_value_without_end_spoils_no_later_mean() -> None:
    assert _smoothed(np.array([1.0, math.inf, 3.0, 5.0]), 2).tolist() == [1.0, 1.0, 3.0, 4.0]
