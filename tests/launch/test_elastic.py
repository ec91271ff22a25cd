"""A lost machine: one in reserve takes its place, bit by bit; or those that are left go on, equal to rounding."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.commands.test_train_integration import SCRIPT, diary, losses, wait_for_step, weights
from tests.hardware_fixtures import load
from tests.launch.hosts import some_hosts
from tests.launch.jobs import are_gone, environment, launch, launching, script, wait_for, wait_for_words
from tests.launch.training_script import train
from tests.warm_python import run


def worlds(folder: Path) -> list[int]:
    """The number of processes of each start that made a step."""
    rows = map(json.loads, (folder / "runs" / "launched" / "events.jsonl").read_text().splitlines())
    return [row["world_size"] for row in rows if row["event"] in ("start", "resume")]


def steps(folder: Path) -> list[int]:
    rows = (folder / "runs" / "launched" / "steps.jsonl").read_text().splitlines()
    return [json.loads(row)["step"] for row in rows]


def test_a_spare_takes_the_place_of_a_lost_machine_bit_by_bit(tmp_path: Path) -> None:
    """The machine that was lost comes back, is in reserve, and takes the place of the one that replaced it."""
    folder = tmp_path / "hosts"
    folder.mkdir()
    job = (str(SCRIPT), str(folder), "40")
    with some_hosts(folder, 3) as hosts:
        flags = ("--spares", "1", "--node-seconds", "15", *job)
        first, second, spare = (hosts.launch(host, *flags, forks=True, PAUSE="0.02", HOLD="20") for host in (0, 1, 2))
        wait_for_words(folder / "host-0.err", "node 2")  # it is here, and waits
        at, _ = wait_for_step(folder, 5, rank=2)
        second.kill()
        at, _ = wait_for_step(folder, 20, after=at, rank=2)
        again = hosts.launch(1, *flags, forks=True, PAUSE="0.02", HOLD="20")
        wait_for_words(folder / "host-0.err", "is back; it waits in reserve")
        spare.kill()
        (folder / "go").write_text("")
        ended = hosts.end(0, first)
        assert ended.code == hosts.end(1, again).code == 0, ended.err
        assert "node 2 (" in ended.err
        assert "takes the place of node 1" in ended.err
        assert "takes the place of node 2" in ended.err
        assert "waiting up to" not in ended.err  # nothing was waited for
    assert worlds(folder) == [4, 4, 4]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert launch(whole, str(SCRIPT), str(whole), "40", num_processes=4, forks=True, PAUSE="0").code == 0
    assert losses(folder) == losses(whole)
    assert weights(folder) == weights(whole)
    assert steps(folder) == list(range(1, 41))


def test_those_that_are_left_go_on_and_the_lost_one_joins_again(tmp_path: Path) -> None:
    folder = tmp_path / "hosts"
    folder.mkdir()
    job = (str(SCRIPT), str(folder), "40")
    with some_hosts(folder, 3) as hosts:
        flags = ("--rejoin-seconds", "1", *job)

        def start(host: int) -> "object":
            return hosts.launch(host, *flags, forks=True, nodes="2:3", num_processes=1, PAUSE="0.02", HOLD="20")

        first, second, third = (start(host) for host in (0, 1, 2))
        at, _ = wait_for_step(folder, 5, rank=2)
        hosts.processes[2].kill()
        wait_for_words(folder / "host-0.err", "going on with 2 of 3 machines; node 2 joins at the next restart")
        at, pid = wait_for_step(folder, 20, after=at, rank=1)
        third = start(2)
        wait_for_words(folder / "host-0.err", "is back; it joins at the next restart")
        os.kill(pid, signal.SIGKILL)  # a worker, which is a reason to start again
        (folder / "go").write_text("")
        for host, process in enumerate((first, second, third)):
            ended = hosts.end(host, process)  # type: ignore[arg-type]
            assert ended.code == 0, ended.err
        assert "takes part again" in (folder / "host-0.err").read_text()
    assert worlds(folder) == [3, 2, 3]
    assert steps(folder) == list(range(1, 41))  # each once
    train(tmp_path / "one", 40)
    assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-9)


def test_a_job_that_refuses_fewer_machines_waits_for_all(tmp_path: Path) -> None:
    text = (
        "import os, sys, time\nfrom drivetrain import DrivetrainError\n"
        "from drivetrain.core.launchers import supervision\n"
        "rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "open(f'seen-{size}-{rank}-' + os.environ['TORCHELASTIC_RESTART_COUNT'], 'w').write('x')\n"
        "if size == 1:\n    raise DrivetrainError('one is not enough', remedy='two')\n"
        "supervision.step(1 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))\n"
        "while not os.path.exists('over'):\n    time.sleep(0.05)\n"
    )
    job = script(tmp_path, text)
    with some_hosts(tmp_path, 2) as hosts:

        def start(host: int) -> "object":
            return hosts.launch(host, "--rejoin-seconds", "1", str(job), nodes="1:2", num_processes=1)

        first, second = start(0), start(1)
        wait_for(tmp_path / "seen-2-1-0")
        hosts.processes[1].kill()
        words = "the job does not go on with fewer machines: one is not enough"
        wait_for_words(tmp_path / "host-0.err", words)
        second = start(1)
        wait_for(tmp_path / "seen-2-1-2")
        (tmp_path / "over").write_text("")
        for host, process in enumerate((first, second)):
            ended = hosts.end(host, process)  # type: ignore[arg-type]
            assert ended.code == 0, ended.err


def test_a_gpu_in_reserve_takes_the_place_of_a_broken_one(tmp_path: Path) -> None:
    """The machine is a recorded one with four GPUs. What its CUDA would say is said by the job; the rest is real."""
    bad = load("4x-l4").gpus[1].uuid
    job = script(
        tmp_path,
        "import os, time\nfrom drivetrain.core.launchers import supervision\n"
        "rank, gpus = int(os.environ['RANK']), os.environ['CUDA_VISIBLE_DEVICES']\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "open(f'gpus-{attempt}-{rank}', 'w').write(gpus)\n"
        "supervision.step(attempt + 1)\n"
        f"if gpus.split(',')[rank] == '{bad}':\n"
        "    while not (os.path.exists(f'gpus-{attempt}-0') and os.path.getsize(f'gpus-{attempt}-0')):\n"
        "        time.sleep(0.01)\n"  # or rank 0 might be ended before it has written
        "    raise RuntimeError('CUDA error: uncorrectable ECC error encountered')\n"
        "if attempt == 0:\n    time.sleep(600)\n",
    )
    code = (
        "from pathlib import Path\nfrom drivetrain.launch.layout import LaunchOptions, make_layout\n"
        "from drivetrain.launch.supervisor import Supervisor\nfrom drivetrain.launch.workers import WorkerTask\n"
        "from tests.hardware_fixtures import load\n"
        "options = LaunchOptions(num_gpus=2, spares=1)\nlayout = make_layout(options, load('4x-l4'))\n"
        f"task = WorkerTask(('script', {str(job)!r}))\n"
        f"raise SystemExit(Supervisor(task, layout, options, Path({str(tmp_path / 'runs')!r}), {{}}).run())\n"
    )
    done = run(["-c", code], cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    gpus = [gpu.uuid for gpu in load("4x-l4").gpus]
    assert (tmp_path / "gpus-0-0").read_text() == f"{gpus[0]},{gpus[1]}"
    assert (tmp_path / "gpus-1-1").read_text() == f"{gpus[0]},{gpus[2]}"
    assert f"GPU {gpus[2]} takes the place of GPU {bad}" in done.stderr


def test_ranks_that_stood_by_go_on_to_the_same_bits(tmp_path: Path) -> None:
    """After a kill -9 both ranks are processes that were there before it."""
    folder, whole = tmp_path / "broken", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    with launching(folder, "--standby", str(SCRIPT), str(folder), "12", forks=True, PAUSE="0", HOLD="6") as process:
        first = [wait_for_step(folder, 6, rank=rank)[1] for rank in (0, 1)]
        children = wait_for_children(process.pid, 5)  # the workers, those that stand by, and the guard
        os.kill(first[1], signal.SIGKILL)
        (folder / "go").write_text("")
        out, err = process.communicate(240)
    assert process.returncode == 0, err
    assert "finished 12" in out
    then = {pid for rank in (0, 1) for _, _, pid in diary(folder, rank)} - {*first}
    assert len(then) == 2
    assert then <= children
    assert are_gone(list(children)) == []
    assert launch(whole, str(SCRIPT), str(whole), "12", forks=True, PAUSE="0").code == 0
    assert losses(folder) == losses(whole)
    assert weights(folder) == weights(whole)


def wait_for_children(pid: int, count: int, seconds: float = 240) -> set[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if len(found := {child.pid for child in psutil.Process(pid).children()}) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{pid} did not have {count} children within {seconds} s")
