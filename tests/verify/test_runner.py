"""Whatever happens to a probe is a row; nothing is left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.verify.probe import Probe, ProbeResult
from drivetrain.verify.runner import describe_returncode, run_probes
from tests.verify.machines import machine

PLANTED = "tests.verify.planted_probes"


def planted(function: str, **fields: Any) -> Probe:
    fields = {"name": function.replace("_", "-"), "time_limit_seconds": 200, **fields}
    return Probe(title=function, function=f"{PLANTED}:{function}", **fields)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int], seconds: float = 60) -> list[int]:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if is_alive(pid)]


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Holds for every test here: no process, no temporary file, no folder below the run folder."""
    temporary = Path(tempfile.mkdtemp(prefix="v-"))  # a short path: see LONGEST_TMPDIR
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert not left
    temporary.rmdir()  # empty, or this raises
    assert list(tmp_path.glob("**/.drivetrain-verify-*")) == []


def run(tmp_path: Path, *probes: Probe, **settings: Any) -> tuple[ProbeResult, ...]:
    settings = {"preload": (), "run_folder": tmp_path / "runs", **settings}
    return run_probes(probes, hardware=machine(), **settings)


@pytest.fixture(params=["fork", "spawn"])
def start_method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_outcomes_come_back_in_order(tmp_path: Path, start_method: str) -> None:
    results = run(tmp_path, planted("good"), planted("no_use"), planted("raise_error"), start_method=start_method)
    assert [(result.name, result.status) for result in results] == [
        ("good", "passed"),
        ("no-use", "not applicable"),
        ("raise-error", "failed"),
    ]
    assert results[0].rates[0].value == 12.5
    assert results[1].detail == "planted reason"
    assert 0 < results[0].seconds < 100


FAILURES = {  # function: what the row says is the cause, and the remedy
    "crash": ("its process was killed by SIGSEGV, a crash in native code", "--only crash"),
    "abort": ("its process was killed by SIGABRT", "--only abort"),
    "exit_at_once": ("its process ended with exit code 3", "--only exit-at-once"),
    "exit_politely": ("SystemExit: 0", "--only exit-politely"),
    "raise_error": ("ZeroDivisionError: planted error", "drivetrain verify --only raise-error"),
    "import_missing": ("No module named 'a_package_that_is_not_there'", "pip install a_package_that_is_not_there"),
    "return_nothing": ("returned NoneType, not an Outcome", "--only return-nothing"),
    "allocate_too_much": ("MemoryError", "free memory"),
    "killed_for_memory": ("was killed by SIGKILL, as the kernel does where memory runs out", "dmesg"),
}


def test_a_failure_is_a_row_and_not_the_end(tmp_path: Path, start_method: str) -> None:
    *failures, after = run(tmp_path, *map(planted, FAILURES), planted("good"), start_method=start_method)
    assert after.status == "passed"
    for result, (cause, remedy) in zip(failures, FAILURES.values(), strict=True):
        assert result.status == "failed", result.name
        assert cause in result.detail
        assert remedy in result.remedy


def test_a_crash_says_where(tmp_path: Path) -> None:
    (result,) = run(tmp_path, planted("crash"))
    assert "last words before the crash" in result.output_tail
    assert "in crash" in result.output_tail  # faulthandler's Python lines


def test_a_hang_ends_at_its_limit(tmp_path: Path, start_method: str) -> None:
    for limit in (1.5, 6, 24, 96):
        probe = planted("hang", time_limit_seconds=limit)
        hung, after = run(tmp_path, probe, planted("good"), start_method=start_method)
        assert hung.status == "failed"
        assert hung.detail == f"did not end within {limit:g} s and was stopped"
        assert f"--only hang --time-limit-seconds {max(60, 4 * limit):g}" in hung.remedy
        assert hung.seconds >= limit
        assert after.status == "passed"
        if hung.output_tail:
            break  # otherwise a busy machine had not even started it by then
    assert "in hang" in hung.output_tail


def test_quick_leaves_out_what_takes_too_long(tmp_path: Path) -> None:
    patient, hurried = planted("hang", time_limit_seconds=2, name="a"), planted("hang", name="b", quick_limit_seconds=1)
    late, left_out = run(tmp_path, patient, hurried, quick=True)
    assert late.status == "failed"
    assert left_out.status == "not applicable"
    assert left_out.detail == "takes more than 1 s, left out by --quick"
    (full,) = run(tmp_path, hurried.model_copy(update={"time_limit_seconds": 1.5}), quick=False)
    assert full.status == "failed"


def test_much_output_is_kept_short(tmp_path: Path) -> None:
    (result,) = run(tmp_path, planted("print_much", time_limit_seconds=60))
    assert result.detail == "RuntimeError: after 100 MB of output"
    assert "the very end" in result.output_tail
    assert len(result.output_tail) <= 4096


def test_output_without_end(tmp_path: Path) -> None:
    endless, after = run(tmp_path, planted("print_forever", time_limit_seconds=1), planted("good"))
    assert endless.detail == "did not end within 1 s and was stopped"
    assert endless.seconds < 30
    assert after.status == "passed"


def test_a_closed_output_does_not_keep_the_zygote_busy(tmp_path: Path) -> None:
    (result,) = run(tmp_path, planted("close_its_output"))
    assert float(result.figure) < 0.3


def test_output_of_what_passed_is_not_kept(tmp_path: Path) -> None:
    (result,) = run(tmp_path, planted("good"))
    assert result.output_tail == ""


def test_processes_of_a_probe_end_with_it(tmp_path: Path, start_method: str) -> None:
    result, _ = run(tmp_path, planted("leave_processes"), planted("good"), start_method=start_method)
    assert result.status == "passed"
    assert wait_until_gone([int(pid) for pid in result.figure.split()]) == []


def test_processes_of_a_hung_probe_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    run(tmp_path, planted("hang_with_processes", time_limit_seconds=4))
    pids = [int(pid) for pid in (tmp_path / "runs" / "pids").read_text().split()]
    assert wait_until_gone(pids) == []


def test_processes_end_with_their_probe_and_not_with_the_last(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    _, looked = run(tmp_path, planted("leave_and_tell"), planted("look_for_the_left"), num_at_once=2)
    assert looked.figure in ("gone", "zombie")


def test_a_lost_zygote_costs_one_row(tmp_path: Path) -> None:
    lost, after = run(tmp_path, planted("kill_the_zygote"), planted("good"))
    assert lost.status == "failed"
    assert "the process that starts probes was killed by SIGKILL" in lost.detail
    assert after.status == "passed"


def test_a_preload_that_fails_is_every_row(tmp_path: Path) -> None:
    results = run(tmp_path, planted("good"), planted("no_use"), preload=("a_package_that_is_not_there",))
    assert [result.status for result in results] == ["failed", "failed"]
    assert "ended with exit code 1" in results[0].detail
    assert "import torch" in results[0].remedy
    assert "a_package_that_is_not_there" in results[0].output_tail


def test_a_probe_has_folders_of_its_own_which_are_removed(tmp_path: Path) -> None:
    first, second = run(tmp_path, planted("says_where"), planted("says_where", name="again"))
    _, mode, scratch, run_scratch, temporary = first.figure.split()
    assert mode == "700"
    assert temporary == scratch
    assert not Path(scratch).exists()
    assert not Path(run_scratch).exists()
    assert not (tmp_path / "runs").exists(), "it was not there before"
    assert second.figure.split()[2] != scratch


def test_a_temporary_folder_too_deep_for_sockets_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setenv("TMPDIR", "/tmp")
    (result,) = run(tmp_path, planted("says_where"))
    assert result.figure.split()[-1] == "/tmp"
    assert list(deep.iterdir()) == []


def test_a_run_folder_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "precious").write_text("x")
    run(tmp_path, planted("says_where"), run_folder=tmp_path / "runs" / "new")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["precious"]


def test_rates_are_measured_alone_and_last(tmp_path: Path) -> None:
    probes = [
        planted("note_time", name="rates", measures_rates=True),
        planted("meet", name="first"),
        planted("meet", name="slow", is_slow=True),
        planted("note_time", name="rates-too", measures_rates=True),
    ]
    (tmp_path / "runs").mkdir()
    results = run(tmp_path, *probes, num_at_once=2)
    assert [(result.name, result.status) for result in results] == [
        ("rates", "passed"),
        ("first", "passed"),
        ("slow", "passed"),
        ("rates-too", "passed"),
    ]
    times = {result.name: [float(part) for part in result.figure.split()] for result in results}
    assert times["slow"][0] < times["first"][1], "two at once"
    assert times["first"][0] < times["slow"][1], "two at once"
    assert max(times["slow"][1], times["first"][1]) < times["rates"][0]
    assert times["rates"][1] < times["rates-too"][0]


def test_one_at_a_time(tmp_path: Path) -> None:
    probes = [planted("note_time", name="first"), planted("note_time", name="second")]
    first, second = (list(map(float, result.figure.split())) for result in run(tmp_path, *probes, num_at_once=1))
    assert first[1] < second[0]


def test_the_watcher_hears_of_everything(tmp_path: Path) -> None:
    heard = []

    class Listening:
        def started(self, probe: Probe) -> None:
            heard.append(("started", probe.name))

        def ended(self, result: ProbeResult) -> None:
            heard.append((result.status, result.name))

    run(tmp_path, planted("good"), planted("raise_error"), watcher=Listening())
    assert heard == [("started", "good"), ("passed", "good"), ("started", "raise-error"), ("failed", "raise-error")]


def test_torch_is_loaded_before_the_fork(tmp_path: Path) -> None:
    began = time.monotonic()
    (result,) = run(tmp_path, planted("is_torch_loaded"), preload=("torch",))
    assert result.figure.startswith("True")
    assert result.seconds < 0.5 * (time.monotonic() - began), "the time of the import is not the probe's"


SCRIPT = f"""
from pathlib import Path
from drivetrain.verify.runner import run_probes
from drivetrain.verify.probe import Probe
from tests.verify.machines import machine
probe = Probe(name="waits", title="waits", function="{PLANTED}:wait_for_interrupt", time_limit_seconds=300)
run_probes([probe], hardware=machine(), run_folder=Path("runs"), preload=())
"""


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, by: signal.Signals) -> None:
    repository = Path(__file__).parents[2]
    path = os.pathsep.join([str(repository), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": tempfile.gettempdir()}
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, start_new_session=True, stderr=subprocess.PIPE
    )
    running = tmp_path / "running"
    deadline = time.monotonic() + 240
    while not (running.exists() and running.read_text().count(" ") == 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    probe, grandchild, scratch = running.read_text().split()
    os.kill(run.pid, by)
    _, errors = run.communicate(timeout=240)
    assert run.returncode != 0
    if by == signal.SIGINT:
        assert b"KeyboardInterrupt" in errors
    assert wait_until_gone([int(probe), int(grandchild)]) == []
    deadline = time.monotonic() + 60
    while (Path(scratch).exists() or (tmp_path / "runs").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(scratch).exists()
    assert not (tmp_path / "runs").exists()


def test_return_codes_in_words() -> None:
    assert describe_returncode(3) == "ended with exit code 3"
    assert describe_returncode(-signal.SIGBUS) == "was killed by SIGBUS, often a full /dev/shm"
    assert describe_returncode(-200) == "was killed by signal 200"
