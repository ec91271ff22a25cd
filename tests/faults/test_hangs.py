"""A rank that hangs is named, with the stacks of all, and the job goes on without it having hung."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import drivetrain as dt
from drivetrain.core.launchers import PHASES, supervision
from drivetrain.loop.validation import Validator
from drivetrain.run import CheckpointSaver
from drivetrain.run.recovery import StepRetry
from drivetrain.strategies import RunningMean
from tests.api.jobs import Variant, Vectors, read, run
from tests.launch.jobs import Ended, launch, launching
from tests.run.test_memory import Hungry
from tests.warm_python import WarmProcess

SCRIPT = Path(__file__).parent / "stepping_script.py"
KINDS = {  # what the rank is said to do
    "stop": "its process is stopped",
    "gil": "the other ranks wait for it",
    "loader": "the other ranks wait for it",
    "collective": "the other ranks wait for it",
    "save": "its process is stopped",
}
PLACES = {"gil": "_hold_gil", "loader": "_wait_for_data", "collective": "at_step"}


def run_with(
    folder: Path, inject: str, *flags: str, steps: int = 24, hang: float = 3.0, world: int = 2, **more: str
) -> Ended:
    words = ("--inject", inject) if inject else ()
    words += ("--hang-seconds", str(hang), *flags, str(SCRIPT), str(folder), str(steps))
    return launch(folder, *words, num_processes=world, forks=True, timeout=240 + 4 * steps, **more)


def reported(done: Ended) -> tuple[int, float, str]:
    """The rank that was named first, after how long, and the words."""
    found = re.search(r"rank (\d+) \(.*?\): (no step has ended for (\d+) s[^\n]*)", done.err)
    assert found is not None, done.err
    return int(found[1]), float(found[3]), found[2]


def hung_rank(kind: str) -> int:
    return 0 if kind in ("save", "gil") else 1


def without_a_supervisor(folder: Path) -> Ended:
    """What a process that holds the GIL says, which hangs until it is killed."""
    with WarmProcess(["-c", PLAIN, str(SCRIPT), str(folder), "1000"], cwd=folder) as process:
        assert process.stdout is not None
        late = threading.Timer(120, process.kill)  # it hangs, as the reading below would
        late.start()
        text = ""
        while "in _hold_gil" not in text and (line := process.stdout.readline()):
            text += line
        late.cancel()
    return Ended(0, text, "", 0.0)


PLAIN = """
import sys, runpy
from drivetrain.core import launchers
launchers.LEAST_SECONDS = 1.0
import os
os.environ["DRIVETRAIN_INJECT"] = "gil@40"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

JOBS: dict[str, Callable[[Path], Ended]] = {
    # With a limit of 2 s: a step of 0.1 s at times takes 0.3 s; a hook and a validation take 3 s.
    "slow": lambda at: run_with(at, "", steps=32, hang=2.0, SLOW="1", HOOK_SECONDS="3", VALID_SECONDS="3"),
    **{kind: lambda at, kind=kind: run_with(at, f"{kind}@9:rank{hung_rank(kind)}") for kind in KINDS},  # type: ignore[misc]
    "one process": lambda at: run_with(at, "gil@9", world=1),
    # 3 s, of which 2 are too many, and 12 would be the end.
    "resolves itself": lambda at: run_with(at, "slow@9:rank1", hang=12.0),
    "undisturbed": lambda at: run_with(at, "", hang=60.0),
    "without a supervisor": without_a_supervisor,
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Future[Ended]]]]:
    """All jobs, five at a time: most of the time they wait."""
    with ThreadPoolExecutor(5) as threads:
        folders = {name: tmp_path_factory.mktemp(name.replace(" ", "-")) for name in JOBS}
        yield {name: (folder, threads.submit(JOBS[name], folder)) for name, folder in folders.items()}


@pytest.fixture
def ended(
    begun: dict[str, tuple[Path, Future[Ended]]], tmp_path: Path, request: pytest.FixtureRequest
) -> tuple[Path, Ended]:
    """The folder of the job of this test, and how it ended. A test that failed runs it once more, by itself."""
    if request.param in begun:
        folder, job = begun.pop(request.param)
        return folder, job.result()
    return tmp_path, JOBS[request.param](tmp_path)


@pytest.fixture(scope="module")
def undisturbed(begun: dict[str, tuple[Path, Future[Ended]]]) -> list[float]:
    """The losses of the same job where nothing hangs."""
    folder, job = begun["undisturbed"]
    done = job.result()
    assert done.code == 0, done.err
    assert "no step has ended" not in done.err
    return read(folder / "runs" / "stepping").losses


@pytest.mark.alone
@pytest.mark.parametrize(("kind", "ended"), [(kind, kind) for kind in KINDS], indirect=["ended"], ids=list(KINDS))
def test_a_hanging_rank_is_named_and_the_job_goes_on(
    undisturbed: list[float], ended: tuple[Path, Ended], kind: str
) -> None:
    (at, done), rank = ended, hung_rank(kind)
    assert done.code == 0, done.err
    assert "restart 1 of" in done.err
    folder = at / "runs" / "stepping"
    crash = json.loads((folder / "logs" / "attempt-0" / "crash.json").read_text())
    assert (crash["rank"], crash["cause"]) == (rank, "timeout")
    assert KINDS[kind] in crash["headline"]
    assert 7 <= crash["step"] <= 12, "not stale"
    place = PLACES.get(kind, "(the process is stopped, state T)")
    assert place in crash["traceback"]
    stacks = list((folder / "logs").glob("attempt-0/hang-after-step-*.txt"))[-1].read_text()
    assert all(f"rank {number}\n" in stacks for number in (0, 1))
    assert place in stacks
    np.testing.assert_array_equal(read(folder).losses, undisturbed)


@pytest.mark.alone
@pytest.mark.parametrize("ended", ["one process"], indirect=True)
def test_one_process_under_a_supervisor(ended: tuple[Path, Ended]) -> None:
    folder, done = ended
    assert done.code == 0, done.err
    assert reported(done)[0] == 0
    assert "_hold_gil" in next((folder / "runs" / "stepping" / "logs").glob("attempt-0/hang-*.txt")).read_text()


@pytest.mark.alone
@pytest.mark.parametrize("ended", ["slow"], indirect=True)
def test_slow_steps_hooks_and_validations_are_no_hang(ended: tuple[Path, Ended]) -> None:
    _, done = ended
    assert done.code == 0, done.err
    assert "no step has ended" not in done.err
    assert "restart" not in done.err


@pytest.mark.alone
@pytest.mark.parametrize("ended", ["resolves itself"], indirect=True)
def test_a_hang_that_resolves_itself_is_only_reported(ended: tuple[Path, Ended]) -> None:
    _, done = ended
    assert done.code == 0, done.err
    assert reported(done)[0] == 1
    assert "restart" not in done.err


@pytest.mark.alone
@pytest.mark.parametrize("ended", ["without a supervisor"], indirect=True)
def test_a_process_without_a_supervisor_tells_where_it_is(ended: tuple[Path, Ended]) -> None:
    """The GIL is held: a thread of Python could not tell."""
    text = ended[1].out
    assert "Timeout (0:00:0" in text
    assert "in _hold_gil" in text


def test_what_is_no_step_is_told_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves, which may wait for the one before, hooks, validations, and the pass over the data at the end of SWA."""
    seen: dict[str, set[str]] = {}

    def noting(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def noted(*arguments: Any, **more: Any) -> Any:
            seen.setdefault(name, set()).add(PHASES[supervision._phase])
            return original(*arguments, **more)

        monkeypatch.setattr(owner, name, noted)

    noting(CheckpointSaver, "_snapshot")
    noting(CheckpointSaver, "save")
    noting(Validator, "measure")
    noting(RunningMean, "finish")
    noting(StepRetry, "may_repeat")

    def hook(context: dt.StepContext) -> None:
        seen.setdefault("hook", set()).add(PHASES[supervision._phase])

    variant = Variant(steps=10, save_every=2)
    changes = {"valid": Vectors(variant), "valid_every": 5, "hooks": [dt.every(3, hook)], "swa": dt.SWA(start=0.5)}
    assert run(str(tmp_path), variant, loss=Hungry(16, 200), **changes) is not None
    assert seen == {
        "_snapshot": {"save"},
        "save": {"save"},
        "measure": {"validation"},
        "finish": {"hooks"},
        "may_repeat": {"step"},
        "hook": {"hooks"},
    }
    assert PHASES[supervision._phase] == "end"


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_hangs_of_every_kind_ten_times(tmp_path: Path, kind: str) -> None:
    """With the limits that users have: named correctly 10 of 10, reported within max(10 s, 5 steps) and some ticks."""
    rows = []
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        rank = number % 2 if kind != "save" else 0
        step = 9 + number
        words = ["--inject", f"{kind}@{step}:rank{rank}", str(SCRIPT), str(folder), "1000"]
        with launching(folder, *words, forks=True) as process:
            wait_for_any(folder / "runs" / "stepping" / "injected")
            began, err = time.monotonic(), ""
            while "no step has ended" not in err and time.monotonic() - began < 60:
                time.sleep(0.05)
                err = process.errors_so_far()
            seconds = time.monotonic() - began
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGKILL)
        named, _, said = reported(Ended(0, "", err, seconds))
        rows.append({"kind": kind, "rank": rank, "named": named, "seconds": round(seconds, 2), "words": said})
    (Path(os.environ.get("HANG_RESULTS", str(tmp_path))) / f"hangs-{kind}.json").write_text(json.dumps(rows, indent=1))
    assert all(row["named"] == row["rank"] for row in rows), rows
    assert all(row["seconds"] <= 15 for row in rows), rows


def wait_for_any(folder: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not (folder.is_dir() and any(folder.iterdir())):
        assert time.monotonic() < deadline, f"nothing in {folder}"
        time.sleep(0.01)


@pytest.mark.soak
def test_no_false_alarm_with_slow_steps(tmp_path: Path) -> None:
    """Half an hour of steps of 1 s, of which every seventh takes 3 s."""
    done = run_with(tmp_path, "", steps=1400, hang=60.0, PAUSE="1", SLOW="1")
    assert done.code == 0, done.err
    assert "no step has ended" not in done.err
