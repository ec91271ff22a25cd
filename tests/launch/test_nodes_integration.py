"""Two hosts in network namespaces, one `drivetrain launch` on each: never a half world, whatever happens to one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.launch.nodes import TOKEN
from tests.commands.test_train_integration import SCRIPT, losses, wait_for_step
from tests.launch.hosts import Hosts, clock_shim, two_hosts
from tests.launch.jobs import are_gone, environment, script, wait_for, wait_for_words
from tests.launch.training_script import train

RANK = "import os, sys, time\nrank = int(os.environ['RANK'])\n"
PIDS = RANK + "open(f'pid-{rank}', 'w').write(str(os.getpid()))\ntime.sleep(100)\n"


def pids(folder: Path) -> list[int]:
    return [int(wait_for(folder / f"pid-{rank}")) for rank in range(4)]


def test_the_environment_on_two_hosts(tmp_path: Path) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]
    job = script(
        tmp_path, RANK + f"open(f'facts-{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names}))\n"
    )
    with two_hosts(tmp_path) as hosts:
        second, first = (hosts.launch(host, str(job)) for host in (1, 0))  # the main one may come later
        assert hosts.end(0, first).code == hosts.end(1, second).code == 0
    facts = [(tmp_path / f"facts-{rank}").read_text() for rank in range(4)]
    assert facts == [
        "0 4 0 2 0 10.77.0.1 cable1",
        "1 4 1 2 0 10.77.0.1 cable1",
        "2 4 0 2 1 10.77.0.1 cable2",
        "3 4 1 2 1 10.77.0.1 cable2",
    ]
    assert not (tmp_path / "runs" / ".launch").exists()  # the secret is gone with the job


def test_the_first_cause_of_another_host_is_on_both_screens(tmp_path: Path) -> None:
    job = script(
        tmp_path, RANK + "if rank == 3:\n    time.sleep(1)\n    raise ValueError('over here')\ntime.sleep(60)\n"
    )
    with two_hosts(tmp_path) as hosts:
        first, second = (hosts.launch(host, str(job)) for host in (0, 1))
        for ended in (hosts.end(0, first), hosts.end(1, second)):
            assert ended.code == 1
            assert "rank 3 (node 1" in ended.err
            assert "  | ValueError: over here" in ended.last_lines
            assert ended.last_lines[-2] == "  cause:  exception"


@pytest.mark.parametrize("host", [0, 1])
def test_a_killed_launcher_ends_both_hosts(tmp_path: Path, host: int) -> None:
    with two_hosts(tmp_path) as hosts:
        both = [hosts.launch(number, "--rejoin-seconds", "1", str(script(tmp_path, PIDS))) for number in (0, 1)]
        workers = pids(tmp_path)
        both[host].kill()
        assert are_gone(workers) == []
        other = hosts.end(1 - host, both[1 - host])
    assert other.code == 1
    if host == 1:
        assert "node 1" in other.err
        assert other.last_lines[-2] == "  cause:  node lost"
        assert "node 1 did not come back within 1 s" in other.err
    else:
        assert "cause: node lost. The main machine at 10.77.0.1:29400 is lost" in other.err
    assert "remedy" in other.last_lines[-1]


def test_a_cable_that_is_cut_ends_the_workers_of_both_hosts(tmp_path: Path) -> None:
    """Nobody tells them: each finds out by the other's silence, and ends its workers before it looks for the other."""
    flags = ("--node-seconds", "4", "--rejoin-seconds", "200")
    with two_hosts(tmp_path) as hosts:
        for number in (0, 1):
            hosts.launch(number, *flags, str(script(tmp_path, PIDS)))
        workers = pids(tmp_path)
        hosts.cable("down")
        assert are_gone(workers, 30) == []  # 4 s of silence, 3 s to settle, and the machine's own business
        first, second = (wait_for_words(tmp_path / f"host-{number}.err", "workers") for number in (0, 1))
        assert "(node lost: nothing was heard of it for 4 s)" in first
        assert "All workers were ended; waiting up to 200 s for node 1 to come back" in first
        assert "is lost: nothing was heard of it for 4 s. The workers here were ended" in second


def test_different_code_is_refused_by_name(tmp_path: Path) -> None:
    jobs = [script(tmp_path, f"print({number})\n", f"job{number}.py") for number in (0, 1)]
    with two_hosts(tmp_path) as hosts:
        both = [hosts.launch(number, str(jobs[number])) for number in (0, 1)]
        for number in (0, 1):
            ended = hosts.end(number, both[number])
            assert ended.code == 1
            assert "node 1" in ended.err
            assert "has other code than node 0: script is" in ended.err
            assert "remedy" in ended.last_lines[-1]
            assert ended.out == ""  # nothing was started


@pytest.mark.soak
def test_another_secret_is_not_let_in(tmp_path: Path) -> None:
    job = script(tmp_path, PIDS)
    with two_hosts(tmp_path) as hosts:
        first = hosts.launch(0, "--join-seconds", "4", str(job), **{TOKEN: "one"})
        second = hosts.launch(1, str(job), **{TOKEN: "two"})
        stranger = hosts.end(1, second)
        assert "has another secret" in stranger.err
        assert hosts.end(0, first).code == 1  # it waited for the right one
    assert not list(tmp_path.glob("pid-*"))


@pytest.mark.soak
def test_a_wrong_main_address(tmp_path: Path) -> None:
    job = script(tmp_path, "")
    with two_hosts(tmp_path) as hosts:
        elsewhere = hosts.end(0, hosts.launch(0, "--main-address", "10.77.0.2", str(job)))
        assert "10.77.0.2 is not an address of this machine" in elsewhere.err
        itself = hosts.end(1, hosts.launch(1, "--main-address", "10.77.0.2", str(job)))
        assert "is this machine itself" in itself.err
        nowhere = hosts.end(1, hosts.launch(1, "--join-seconds", "1", "--main-address", "192.0.2.7", str(job)))
        assert "cannot be reached at 192.0.2.7:29400" in nowhere.err
        nobody = hosts.end(1, hosts.launch(1, "--join-seconds", "1", str(job)))
        assert "cannot be reached at 10.77.0.1:29400: Connection refused, for 1 s" in nobody.err
    for ended in (elsewhere, itself, nowhere, nobody):
        assert ended.code == 1
        assert "remedy" in ended.last_lines[-1]


def test_a_disk_that_stalls_is_no_lost_machine(tmp_path: Path) -> None:
    """The second launcher hangs in the opening of a log, for longer than a silent machine would be waited for."""
    logs = tmp_path / "logs" / "attempt-0"
    logs.mkdir(parents=True)
    os.mkfifo(logs / "rank-2.log")
    text = RANK + "print('hello', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)\n"
    words = ("--node-seconds", "2", "--log-dir", str(tmp_path / "logs"), str(script(tmp_path, text)))
    with two_hosts(tmp_path) as hosts:
        first, second = (hosts.launch(host, *words) for host in (0, 1))
        wait_for_words(tmp_path / "host-0.err", "node 1")
        assert first.poll() is None
        with (logs / "rank-2.log").open("rb"):
            (tmp_path / "go").touch()
            ends = [hosts.end(0, first), hosts.end(1, second)]
    for ended in ends:
        assert ended.code == 0, ended.err
        assert "lost" not in ended.err
    assert "is there, but its launcher has been waiting for a disk for" in ends[0].err


def test_a_name_and_a_way_that_come_later_are_waited_for(tmp_path: Path) -> None:
    """As in Kubernetes, where names appear once their machines are up."""
    job = script(tmp_path, RANK + "open(f'done-{rank}', 'w').write('x')\n")
    with two_hosts(tmp_path) as hosts, hosts.names_of(1) as names:
        hosts.cable("down")
        late = ("--main-address", "first.cluster", str(job))
        second = hosts.launch(1, *late)
        wait_for_words(tmp_path / "host-1.err", "waiting for the main machine: --main-address first.cluster does not")
        names.write_text("10.77.0.1 first.cluster\n")
        time.sleep(1.0)
        assert second.poll() is None, "there is no way yet"
        hosts.cable("up")
        first = hosts.launch(0, str(job))
        for number, process in enumerate((first, second)):
            ended = hosts.end(number, process)
            assert ended.code == 0, ended.err
        unknown = hosts.end(1, hosts.launch(1, "--join-seconds", "1", "--main-address", "nobody.cluster", str(job)))
    assert unknown.code == 1
    assert "--main-address nobody.cluster does not resolve" in unknown.err
    assert "for 1 s" in unknown.err


def test_ctrl_c_on_the_second_host_stops_both(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        both = [hosts.launch(number, str(script(tmp_path, PIDS))) for number in (0, 1)]
        workers = pids(tmp_path)
        os.killpg(both[1].pid, signal.SIGINT)
        first, second = (hosts.end(number, both[number]) for number in (0, 1))
        assert are_gone(workers) == []
    assert first.code == second.code == 130
    assert first.last_lines[-1] == second.last_lines[-1] == "drivetrain: stopped by SIGINT"


def train_on_two_hosts(folder: Path, hosts: Hosts, shift: int, cut_seconds: float) -> None:
    shim = clock_shim(folder)
    job = [str(SCRIPT), str(folder), "24"]
    more = {"LD_PRELOAD": shim, "CLOCK_SHIFT": str(shift)} if shift else {}
    # Past `ip`, which has no business with the shim.
    wrap = ("env", *(f"{name}={value}" for name, value in more.items())) if more else ()
    second = hosts.launch(1, *job, wrap=wrap, forks=True, PAUSE="0.1")
    first = hosts.launch(0, *job, forks=True, PAUSE="0.1")
    if cut_seconds:
        wait_for_step(folder, 4)
        hosts.cable("down")
        time.sleep(cut_seconds)
        hosts.cable("up")
    for number, process in enumerate((first, second)):
        ended = hosts.end(number, process)
        assert ended.code == 0, ended.err
        assert "Starting again" not in ended.err  # a short cut is waited out


def plain(folder: Path) -> list[float]:
    """The same job in this one process."""
    train(folder, 24)
    return losses(folder)


def test_training_on_two_hosts_with_a_wrong_clock_and_a_cut_cable(tmp_path: Path) -> None:
    """One host's clock is an hour behind, and the cable is out for 5 s: the losses are those of one process."""
    folder = tmp_path / "two"
    folder.mkdir()
    with two_hosts(folder) as hosts:
        train_on_two_hosts(folder, hosts, shift=-3600, cut_seconds=5)
    found, wanted = losses(folder), plain(tmp_path / "one")
    assert found == pytest.approx(wanted, rel=1e-12)
    assert len(found) == 24


@pytest.mark.soak
@pytest.mark.parametrize("shift", [0, 20, -20, 3600, -3600])
def test_no_clock_matters(tmp_path: Path, shift: int) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    with two_hosts(folder) as hosts:
        train_on_two_hosts(folder, hosts, shift, cut_seconds=0)
    assert losses(folder) == pytest.approx(plain(tmp_path / "one"), rel=1e-12)


@pytest.mark.soak
def test_a_cable_that_is_out_for_longer_costs_a_restart(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        job = [str(SCRIPT), str(tmp_path), "60"]
        both = [hosts.launch(host, "--node-seconds", "4", *job, PAUSE="0.1") for host in (0, 1)]
        wait_for_step(tmp_path, 6)
        hosts.cable("down")
        time.sleep(10)
        hosts.cable("up")
        first, second = (hosts.end(number, both[number]) for number in (0, 1))
    assert first.code == second.code == 0, first.err
    assert "Starting again from the checkpoint" in first.err
    assert losses(tmp_path)[-1] > 0
    assert len(losses(tmp_path)) == 60


def test_the_shim_shifts_the_wall_clock_only(tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    code = "import time; print(time.time(), time.monotonic())"
    shim = {"LD_PRELOAD": clock_shim(tmp_path), "CLOCK_SHIFT": "-3600"}
    real, shifted = (
        [float(word) for word in subprocess.check_output([sys.executable, "-c", code], env=environment(**more)).split()]
        for more in ({}, shim)
    )
    assert real[0] - shifted[0] == pytest.approx(3600, abs=60)
    assert abs(shifted[1] - real[1]) < 60
