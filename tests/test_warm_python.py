"""Processes that are forked behave as those that are started."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from drivetrain import hardware
from tests import hardware_fixtures, warm_python, warm_workers

CASES: dict[str, list[str]] = {
    "words": ["-c", "import sys, os; print(sys.argv, os.getcwd()); print('e', file=sys.stderr)", "a", "b"],
    "error": ["-c", "print('first'); raise ValueError('no')"],
    "code": ["-c", "raise SystemExit(7)"],
    "message": ["-c", "raise SystemExit('why')"],
    "module": ["-m", "drivetrain", "config", "--epochs", "nine"],
    "atexit": ["-c", "import atexit; atexit.register(print, 'bye'); print('hi')"],
    "thread": [
        "-c",
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start(); print('hi')",
    ],
    "workers": [
        "-c",
        "import multiprocessing as m\n"
        "print(m.current_process().name, m.parent_process())\n"
        "if __name__ == '__main__':\n"
        "    p = m.get_context('fork').Process(target=print, args=('child',)); p.start(); p.join(); print(p.exitcode)",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_they_say_the_same(case: str, tmp_path: Path) -> None:
    words = CASES[case]
    ours = warm_python.run(words, cwd=tmp_path)
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ours.returncode, ours.stdout) == (done.returncode, done.stdout)
    assert ours.stderr.splitlines()[-1:] == done.stderr.splitlines()[-1:]


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    (tmp_path / "script.py").write_text(
        "import beside, pickle, sys\nclass Kept: pass\npickle.dumps(Kept())\nprint(__name__, sys.argv, beside.VALUE)\n"
    )
    assert warm_python.run(["script.py", "x"], cwd=tmp_path).stdout == "__main__ ['script.py', 'x'] 3\n"


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, -2)])
def test_signals(number: Any, expected: int) -> None:
    code = "import time; print('on', flush=True); time.sleep(600)"
    with warm_python.WarmProcess(["-c", code]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(number)
        assert process.wait(120) == expected


@pytest.mark.parametrize("machine", hardware_fixtures.names())
def test_workers_are_forked_only_where_no_gpu_is(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FRESH_WORKERS", raising=False)
    found = hardware_fixtures.load(machine)
    monkeypatch.setattr(hardware, "detect", lambda: found)
    assert warm_workers.may_fork() == (not found.gpus)


def test_what_the_caller_cleans_up_in_the_end_stays() -> None:
    """Unlike a fresh interpreter, a fork has the functions that Python would call at the caller's end."""
    with tempfile.TemporaryDirectory() as ours:
        words = ["python", "-c", "import tempfile; print(tempfile.TemporaryDirectory().name)", "--multiprocessing-fork"]
        process = warm_python.spawn_by_fork(sys.executable.encode(), words, [])
        assert os.waitpid(process, 0)[1] == 0
        assert Path(ours).is_dir()
