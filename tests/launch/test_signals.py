"""Signals to a job in training: whoever gets them, and however the job was started, it is saved and loses nothing.

`all` is every process of the job, with its loader processes: what SLURM signals.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from drivetrain.checkpoint import Checkpoint
from drivetrain.core.processes import StopWish
from tests.commands.test_train_integration import diary, wait_for_step
from tests.launch.hosts import two_hosts
from tests.launch.jobs import Launching, are_gone, environment, launch, script, wait_for, words_of
from tests.warm_python import WarmProcess

SCRIPT = Path(__file__).with_name("signaled_script.py")
STEPS = "20000"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
TARGETS = ("supervisor", "workers", "all")
PLACES = ("foreground", "background")
SECONDS = 20  # of the 30 that a scheduler gives at least
BACKGROUND = "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv[:] = sys.argv[1:]; "
BACKGROUND += "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"  # as a shell starts `command &`


def start(folder: Path, place: str, *words: str, **more: str) -> Launching:
    command = words_of(folder, *words, forks=True)
    if place == "background":
        command = ["-c", BACKGROUND, *command[1:]]
    return Launching(command, folder, environment(**more))


def send(process: Launching | WarmProcess, number: signal.Signals, target: str, workers: list[int]) -> None:
    below = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
    meant = {"supervisor": [process.pid], "workers": workers, "all": [*below, process.pid]}[target]
    for pid in meant:
        with suppress(ProcessLookupError):  # the loader processes of a validation end with it
            os.kill(pid, number)


def steps_saved(folder: Path) -> int:
    checkpoint = Checkpoint.latest_in(folder / "runs" / "launched" / "checkpoints")
    return 0 if checkpoint is None else checkpoint.step


def workers_of(process: Launching, folder: Path) -> list[int]:
    """The workers, once they made a few steps."""
    deadline = time.monotonic() + 240
    while not all(diary(folder, rank) and diary(folder, rank)[-1][0] >= 3 for rank in (0, 1)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [diary(folder, rank)[-1][2] for rank in (0, 1)]


def signal_once(folder: Path, number: signal.Signals, target: str, place: str) -> float:
    """Return how long it took from the signal to the end."""
    with start(folder, place, str(SCRIPT), str(folder), STEPS) as process:
        workers = workers_of(process, folder)
        loaders = [one.pid for pid in workers for one in psutil.Process(pid).children(recursive=True)]
        assert len(loaders) >= 2, "no loader process to be signaled"
        began = time.monotonic()
        send(process, number, target, workers)
        if (number, target, place) == (signal.SIGINT, "supervisor", "background"):
            # Ignored, as the shell wants it: Ctrl-C is meant for the foreground. The job goes on.
            wait_for_step(folder, diary(folder)[-1][0] + 5)
            assert process.poll() is None
            number = signal.SIGTERM
            process.send_signal(number)
        _, err = process.communicate(timeout=240)
        seconds = time.monotonic() - began
        assert process.returncode == 128 + number, err
        assert are_gone([*workers, *loaders]) == []
    step = steps_saved(folder)
    assert [diary(folder, rank)[-1][0] for rank in (0, 1)] == [step, step], err
    assert 3 <= step < int(STEPS)
    words = f"stopped by {number.name}; the checkpoint of step {step} is saved, and the same command goes on from there"
    assert err.rstrip().splitlines()[-1] == f"drivetrain: {words}"
    assert "Traceback" not in err
    return seconds


@pytest.mark.parametrize(
    ("number", "target", "place"),
    [
        (signal.SIGUSR1, "all", "foreground"),
        (signal.SIGTERM, "all", "foreground"),
        (signal.SIGHUP, "workers", "foreground"),
        (signal.SIGUSR1, "supervisor", "background"),
    ],
)
def test_a_signal_saves(tmp_path: Path, number: signal.Signals, target: str, place: str) -> None:
    signal_once(tmp_path, number, target, place)


@pytest.mark.soak
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_table(tmp_path: Path, number: signal.Signals, target: str, place: str) -> None:
    assert signal_once(tmp_path, number, target, place) < SECONDS


@pytest.mark.parametrize("moment", ["startup", "validation", "save"])
def test_a_signal_at_any_moment(tmp_path: Path, moment: str) -> None:
    """To all processes. Before the first step there is nothing to save, and the job ends without waiting."""
    with start(tmp_path, "foreground", str(SCRIPT), str(tmp_path), STEPS, MOMENT=moment) as process:
        wait_for(tmp_path / "moment")
        send(process, signal.SIGUSR1, "all", [])
        _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGUSR1, err
    assert "Traceback" not in err
    step, last = steps_saved(tmp_path), err.rstrip().splitlines()[-1]
    if moment == "startup":
        assert last == "drivetrain: stopped by SIGUSR1"
        assert diary(tmp_path) == []
        return
    assert [diary(tmp_path, rank)[-1][0] for rank in (0, 1)] == [step, step], err
    assert f"stopped by SIGUSR1; the checkpoint of step {step} is saved" in last


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        signal.SIGTERM,
        *(pytest.param(number, marks=pytest.mark.soak) for number in (signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)),
    ],
    ids=lambda number: number.name,
)
def test_a_rank_without_a_supervisor_saves_by_itself(tmp_path: Path, number: signal.Signals) -> None:
    """Its loader processes get the signal as well."""
    words = [str(SCRIPT), str(tmp_path), STEPS]
    with WarmProcess(words, cwd=tmp_path, env=environment(LOADERS="2")) as process:
        wait_for_step(tmp_path, 3)
        loaders = psutil.Process(process.pid).children(recursive=True)
        assert len(loaders) >= 2
        send(process, number, "all", [])
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"{number.name}: stopping after this step, with a checkpoint" in output
    assert "Traceback" not in output
    assert f"stopped {steps_saved(tmp_path)}" in output
    assert steps_saved(tmp_path) == diary(tmp_path)[-1][0] >= 3


OWN = """
import faulthandler, multiprocessing, os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append("USR1"))
stacks = open(f"stacks-{rank}", "w")
faulthandler.register(signal.SIGUSR2, file=stacks)
for number in (signal.SIGUSR1, signal.SIGUSR2):
    os.kill(os.getpid(), number)
while not heard or not os.path.getsize(stacks.name):
    time.sleep(0.01)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    child.send_signal(number)
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
forked.start()
forked.terminate()
forked.join()
assert child.poll() is None, "a child dies of a signal that is meant for the job"
child.terminate()
assert (child.wait(), forked.exitcode) == (-signal.SIGTERM, -signal.SIGTERM), "its own signals are lost"
"""


def test_the_signals_of_a_script_are_its_own(tmp_path: Path) -> None:
    """Its handlers are called, its children outlive the job's signals, and end when it ends them."""
    done = launch(tmp_path, "--max-restarts", "0", str(script(tmp_path, OWN)))
    assert done.code == 0, done.err


def test_the_second_ctrl_c_and_nothing_else_is_impatient() -> None:
    wish = StopWish()
    wish.hear(signal.SIGUSR1)
    wish._first_at -= 60
    wish.hear(signal.SIGTERM)  # the time limit has come while it saves
    wish.share(signal.SIGINT)  # a rank that is late to tell of the first
    assert (wish.name, wish.exit_code, wish.at_once) == ("SIGUSR1", 138, False)
    wish.hear(signal.SIGINT)
    assert wish.at_once


def test_a_signal_to_every_process_of_two_hosts(tmp_path: Path) -> None:
    """One after the other, more than a moment apart: the second host's is not an impatient second one."""
    with two_hosts(tmp_path) as hosts:
        words = (str(SCRIPT), str(tmp_path), STEPS)
        both = [hosts.launch(host, *words, forks=True, num_processes=1) for host in (0, 1)]
        for rank in (0, 1):
            wait_for_step(tmp_path, 3, rank=rank)
        worker = diary(tmp_path, 1)[-1][2]
        os.kill(worker, signal.SIGSTOP)  # by the order of the first host, both may end before the second has its signal
        for process in both:
            below = psutil.Process(process.pid).children(recursive=True)
            for pid in (*(one.pid for one in below), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
        os.kill(worker, signal.SIGCONT)
        ends = [hosts.end(host, process) for host, process in enumerate(both)]
    step = steps_saved(tmp_path)
    assert [diary(tmp_path, rank)[-1][0] for rank in (0, 1)] == [step, step]
    for ended in ends:
        assert ended.code == 128 + signal.SIGUSR1, ended.err
        assert f"stopped by SIGUSR1; the checkpoint of step {step} is saved" in ended.last_lines[-1]
