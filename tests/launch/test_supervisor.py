"""The supervisor with scripts that need no torch: quick, and everything it does is the real thing."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.jobs import are_gone, environment, launch, launching, script, wait_for, words_of

RANK = "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n"
# For scripts whose ranks do things one after the other, however late one of them is started.
IN_TURN = RANK + (
    "def tell(word):\n    open(word, 'w').close()\n"
    "def hear(word):\n    while not os.path.exists(word): time.sleep(0.01)\n"
)


def test_the_environment_and_the_arguments(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        RANK + "names = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'NODE_RANK']\n"
        "import json, helper\n"
        "facts = {name: os.environ[name] for name in names}\n"
        "facts |= {'port': int(os.environ['MASTER_PORT']), 'argv': sys.argv, 'main': __name__, 'file': __file__}\n"
        "facts |= {'cores': sorted(os.sched_getaffinity(0)), 'gpus': os.environ['CUDA_VISIBLE_DEVICES']}\n"
        "facts |= {'threads': os.environ['OMP_NUM_THREADS'], 'interface': os.environ['GLOO_SOCKET_IFNAME']}\n"
        "facts |= {'torch': 'torch' in sys.modules, 'secret': os.environ.get('DRIVETRAIN_TOKEN')}\n"
        "open(f'facts-{rank}', 'w').write(json.dumps(facts))\n"
        "print('hello from', rank)\n",
    )
    script(tmp_path, "", "helper.py")  # beside the script, as with plain python
    done = launch(tmp_path, "--tail-ranks", "all", str(job), "--num-processes", "9", "-x", OMP_NUM_THREADS="3")
    assert done.code == 0, done.err
    facts = [json.loads((tmp_path / f"facts-{rank}").read_text()) for rank in (0, 1)]
    for rank, found in enumerate(facts):
        assert (found["RANK"], found["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"], found["NODE_RANK"]) == ("2", "2", "0")
        assert found["argv"] == [str(job), "--num-processes", "9", "-x"]  # the script's, not ours
        assert (found["main"], found["file"], found["MASTER_ADDR"]) == ("__main__", str(job), "127.0.0.1")
        assert (found["gpus"], found["threads"], found["interface"]) == ("", "3", "lo")
        assert found["torch"] is False  # nothing heavy before the script
        assert found["secret"] is None
    assert facts[0]["port"] == facts[1]["port"] > 0
    assert sorted(done.out.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]


def test_cores_are_shared_out(tmp_path: Path) -> None:
    job = script(tmp_path, RANK + "open(f'cores-{rank}', 'w').write(repr(sorted(os.sched_getaffinity(0))))\n")
    assert launch(tmp_path, "--bind", "cores", str(job)).code == 0
    first, second = (set(eval((tmp_path / f"cores-{rank}").read_text())) for rank in (0, 1))
    mine = os.sched_getaffinity(0)
    if len(mine) > 1:
        assert first | second == mine
        assert not first & second


def test_the_first_to_fail_is_named_last(tmp_path: Path) -> None:
    """Rank 2 fails by itself; the others only lose it, and one of them says so earlier."""
    job = script(
        tmp_path,
        IN_TURN + "def collective():\n"
        "    raise RuntimeError('[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9')\n"
        "if rank == 2:\n"
        "    tell('2 is up')\n"
        "    hear('0 fails')\n"
        "    time.sleep(0.3)\n"
        "    {}['the key that is missing']\n"
        "if rank == 0:\n"
        "    hear('2 is up')\n"
        "    tell('0 fails')\n"
        "    collective()\n"
        "time.sleep(600)\n",
    )
    done = launch(tmp_path, str(job), num_processes=3)
    assert done.code == 1
    lines = done.last_lines
    assert lines[-1].startswith("  remedy: ")
    assert lines[-2] == "  cause:  exception"
    assert "  | KeyError: 'the key that is missing'" in lines
    assert sum("Traceback" in line for line in lines) == 1
    assert not any("Connection closed" in line for line in lines)
    (crash,) = (tmp_path / "runs" / "launch").glob("*/crash.json")
    found = json.loads(crash.read_text())
    assert (found["cause"], found["rank"], found["node"]) == ("exception", 2, 0)
    assert "job.py" in found["traceback"]
    assert [other["rank"] for other in found["others"]] == [0]
    assert "Connection closed by peer" in next(crash.parent.glob("*/rank-0.log")).read_text()  # nothing is lost


@pytest.mark.parametrize(
    ("line", "cause", "words", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal", "ended by SIGKILL, which came from outside", 137),
        ("import faulthandler; faulthandler._sigsegv()", "signal", "crashed with SIGSEGV", 139),
        ("sys.stderr.write('the disk is gone\\n'); sys.exit(3)", "exit", "the disk is gone", 3),
        ("raise MemoryError", "out of memory (host)", "MemoryError", 1),
        ("import nothing_like_this", "exception", "No module named 'nothing_like_this'", 1),
    ],
)
def test_the_class_of_the_cause(tmp_path: Path, line: str, cause: str, words: str, code: int) -> None:
    job = script(tmp_path, RANK + f"if rank == 1:\n    {line}\ntime.sleep(60)\n")
    done = launch(tmp_path, "--max-restarts", "0", str(job))
    assert done.code == code
    assert f"  cause:  {cause}" in done.last_lines[-2:]
    assert any(words in line for line in done.last_lines), done.err
    assert "rank 1" in done.err


def test_a_crash_in_native_code_shows_the_python_lines(tmp_path: Path) -> None:
    job = script(tmp_path, RANK + "def deep():\n    import faulthandler; faulthandler._sigsegv()\ndeep()\n")
    done = launch(tmp_path, "--max-restarts", "0", str(job), num_processes=1)
    assert "in deep" in done.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no such script"),
        ("x = 1\nif x\n    pass\n", "line 2: expected ':'"),
        ("x = '\0'", "null bytes"),
    ],
)
def test_a_script_that_cannot_run_is_said_once(tmp_path: Path, text: str | None, words: str) -> None:
    job = tmp_path / "job.py" if text is None else script(tmp_path, text)
    done = launch(tmp_path, str(job), num_processes=3)
    assert done.code in (1, 2)
    assert done.err.count(words) == 1
    assert len(done.last_lines) <= 4, done.err
    assert "remedy" in done.last_lines[-1]
    assert not (tmp_path / "runs").exists()


def test_an_error_that_all_ranks_have_is_said_once(tmp_path: Path) -> None:
    done = launch(tmp_path, str(script(tmp_path, "import nothing_like_this\n")), num_processes=3)
    assert done.err.count("Traceback") == 1
    assert done.err.count("ModuleNotFoundError") == 1
    assert "Traceback" not in done.out


def test_a_rank_that_leaves_early(tmp_path: Path) -> None:
    """It ends well; the others then lose it. The one that left is the cause."""
    job = script(
        tmp_path,
        IN_TURN + "if rank == 1:\n    tell('1 leaves')\n    sys.exit(0)\nhear('1 leaves')\ntime.sleep(1)\n"
        "raise RuntimeError('[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9')\n",
    )
    done = launch(tmp_path, str(job))
    assert done.code == 1
    assert "rank 1" in done.err.splitlines()[1]
    assert "ended with exit code 0 while other ranks were still at work" in done.err
    assert done.last_lines[-2] == "  cause:  left early"


def test_a_rank_that_never_comes_is_shown_with_its_stack(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        IN_TURN + "def at_the_wrong_place():\n    tell('1 is there')\n    time.sleep(600)\n"
        "if rank == 1:\n    at_the_wrong_place()\n"
        "hear('1 is there')\n"
        "time.sleep(0.5)\n"
        "raise RuntimeError('[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 500ms for recv')\n",
    )
    done = launch(tmp_path, "--max-restarts", "0", str(job))
    assert done.code == 1
    assert "rank 1" in done.err
    assert "in at_the_wrong_place" in done.err
    assert done.last_lines[-2] == "  cause:  timeout"


def test_the_rank_that_a_text_blames_is_named_with_its_own_step(tmp_path: Path) -> None:
    """Rank 0 waits for 1 and 2, and says it was 2."""
    job = script(
        tmp_path,
        IN_TURN + "from drivetrain.core.launchers import supervision\n"
        "supervision.step(3 + rank)\n"
        "def elsewhere():\n    tell(f'{rank} is there')\n    time.sleep(600)\n"
        "if rank:\n    elsewhere()\n"
        "hear('1 is there')\nhear('2 is there')\ntime.sleep(0.5)\n"
        "raise RuntimeError('[gloo] Ranks 2 failed to pass monitoredBarrier in 500 ms')\n",
    )
    done = launch(tmp_path, "--max-restarts", "0", str(job), num_processes=3)
    assert done.code == 1
    assert "rank 2 (node 0" in done.err
    assert "failed first after step 5" in done.err
    assert "in elsewhere" in done.err


def test_ranks_that_nccls_watchdog_aborted_are_not_blamed(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        IN_TURN + "def in_the_loader():\n    tell('1 is there')\n    time.sleep(600)\n"
        "if rank == 1:\n    in_the_loader()\n"
        "hear('1 is there')\n"
        "sys.stderr.write(f'[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\\n')\n"
        "os.abort()\n",
    )
    done = launch(tmp_path, "--max-restarts", "0", str(job), num_processes=3)
    assert "rank 1 (node 0" in done.err.splitlines()[1]
    assert "in in_the_loader" in done.err
    assert done.last_lines[-2] == "  cause:  timeout"


PIDS = (
    RANK + "import subprocess\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
    "open(f'.pids-{rank}', 'w').write(f'{os.getpid()} {child.pid}')\n"
    "os.rename(f'.pids-{rank}', f'pids-{rank}')\n"
    "time.sleep(100)\n"
)


def pids_of(folder: Path) -> list[int]:
    return [int(pid) for rank in (0, 1) for pid in wait_for(folder / f"pids-{rank}").split()]


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    """Workers, and their children; here its whole group is killed, as a shell's kill does."""
    with launching(tmp_path, str(script(tmp_path, PIDS))) as process:
        pids = pids_of(tmp_path)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert are_gone(pids) == []


def test_nothing_outlives_a_failure(tmp_path: Path) -> None:
    text = PIDS.replace("time.sleep(100)\n", "") + "time.sleep(1 if rank else 100)\nraise ValueError\n"
    with launching(tmp_path, str(script(tmp_path, text))) as process:
        pids = pids_of(tmp_path)
        assert process.wait(240) == 1
        assert are_gone(pids) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_stop_ends_everything_with_one_message(tmp_path: Path, number: signal.Signals) -> None:
    with launching(tmp_path, str(script(tmp_path, PIDS))) as process:
        pids = pids_of(tmp_path)
        began = time.monotonic()
        os.killpg(process.pid, number)  # as a terminal does
        out, err = process.communicate(timeout=240)
        assert time.monotonic() - began < 60
        assert process.returncode == 128 + number
        assert are_gone(pids) == []
    assert "Traceback" not in out + err
    assert err.rstrip().splitlines()[-1] == f"drivetrain: stopped by {number.name}"


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    deaf = PIDS.replace("time.sleep(100)\n", "") + (
        "signal.signal(signal.SIGINT, lambda *_: open(f'asked-{rank}', 'w').write('x'))\n"
        "open(f'ready-{rank}', 'w').write('x')\n"
        "while True: time.sleep(1)\n"
    )
    with launching(tmp_path, str(script(tmp_path, deaf))) as process:
        pids = pids_of(tmp_path)
        for rank in (0, 1):
            wait_for(tmp_path / f"ready-{rank}")
        process.send_signal(signal.SIGINT)
        wait_for(tmp_path / "asked-0")
        time.sleep(0.5)
        assert process.poll() is None  # it waits for them to save
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
        assert time.monotonic() - began < 60
        assert process.returncode == 130
        assert are_gone(pids) == []
    assert "at once" in err.rstrip().splitlines()[-1]


def test_ctrl_c_before_a_worker_is_up(tmp_path: Path) -> None:
    with launching(tmp_path, str(script(tmp_path, "import time; time.sleep(100)\n"))) as process:
        deadline = time.monotonic() + 240
        while not (tmp_path / "runs").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 130
    assert "Traceback" not in err


def test_restarts_need_progress(tmp_path: Path) -> None:
    """A script that tells nothing of its steps fails once; killed from outside, it is started again a few times."""
    count = "open(f'count-{rank}', 'a').write('x')\n"
    job = script(tmp_path, RANK + count + "raise ValueError('the same')\n")
    done = launch(tmp_path, str(job), num_processes=1)
    assert done.code == 1
    assert (tmp_path / "count-0").read_text() == "x"

    (tmp_path / "count-0").unlink()
    job = script(tmp_path, RANK + count + "os.kill(os.getpid(), signal.SIGKILL)\n")
    done = launch(tmp_path, "--max-restarts", "2", str(job), num_processes=1)
    assert done.code == 137
    assert (tmp_path / "count-0").read_text() == "xxx"
    assert "not started again: 2 restarts of --max-restarts are used up" in done.err


def test_a_run_that_is_finished_is_not_started_again(tmp_path: Path) -> None:
    """A rank that is killed after the end: a restart would train a new run from its beginning."""
    job = script(
        tmp_path,
        RANK + "from drivetrain.core.launchers import supervision\n"
        "from pathlib import Path\n"
        "open('count', 'a').write('x')\n"
        "Path('run').mkdir(exist_ok=True)\n"
        "supervision.run(str(Path('run').absolute()))\n"
        "supervision.step(3)\n"
        "Path('run', 'finished.json').write_text('{}')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    done = launch(tmp_path, str(job), num_processes=1)
    assert done.code == 137
    assert (tmp_path / "count").read_text() == "x"
    assert "not started again: its run is finished" in done.err
    assert json.loads((tmp_path / "run" / "crash.json").read_text())["step"] == 3


def test_a_script_of_several_jobs_goes_on_in_the_one_it_had_come_to(tmp_path: Path) -> None:
    """It is killed between two jobs, and in the second, which has come to fewer steps than the first."""
    job = script(
        tmp_path,
        RANK + "from drivetrain.core.launchers import supervision\n"
        "from drivetrain.core.run_folder import mark_script\n"
        "from pathlib import Path\n"
        "open('count', 'a').write('x')\n"
        "attempt = len(Path('count').read_text())\n"
        "def begin(name, step):\n"
        "    Path(name).mkdir(exist_ok=True)\n"
        "    mark_script(Path(name).absolute())\n"
        "    supervision.run(str(Path(name).absolute()))\n"
        "    supervision.tell('resumed', step=step)\n"
        "def die(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "begin('first', 24 if attempt > 1 else 0)\n"
        "if attempt == 1:\n"
        "    supervision.step(24)\n"
        "    supervision.tell('checkpoint', step=24)\n"
        "    Path('first', 'finished.json').write_text('{}')\n"
        "    die()\n"
        "begin('second', 4 if attempt > 2 else 0)\n"
        "if attempt == 2:\n"
        "    supervision.tell('checkpoint', step=4)\n"
        "    supervision.step(5)\n"
        "    die()\n"
        "if attempt == 3: die()\n",
    )
    done = launch(tmp_path, str(job), num_processes=1)
    assert done.code == 0, done.err
    found = [line for line in done.err.splitlines() if "failed first" in line or "Starting again" in line]
    wanted = (
        ("failed first after step 24 (", "Starting again from the end of first, restart 1 of 3"),
        ("failed first after step 5 (", "Starting again from the checkpoint of step 4 of second, restart 2 of 3"),
        ("failed first (", "Starting again from the checkpoint of step 4 of second, restart 3 of 3"),
    )
    for line, words in zip(found, (words for pair in wanted for words in pair), strict=True):
        assert words in line


# A run of one rank that needs no torch. `count`, in the folder that the job is started in, has a letter per start.
RUN = RANK + (
    "from pathlib import Path\n"
    "from drivetrain.core.launchers import supervision\n"
    "with open('count', 'a') as file: file.write('x')\n"
    "again, run = len(open('count').read()) > 1, Path(os.environ['RUN'])\n"
    "run.mkdir(parents=True, exist_ok=True)\n"
    "supervision.run(str(run))\n"
    "supervision.step(5 if again else 3)\n"
    "time.sleep(0.5)\n"  # for the supervisor to hear of it
)
ENDS = "if not again: os.kill(os.getpid(), signal.SIGKILL)\nsupervision.tell('end', finished=True)\n"


def test_a_full_disk_does_not_end_the_watch(tmp_path: Path, small_disk: Path) -> None:
    """Neither while ranks print nor when the next attempt begins, whose logs cannot be made."""
    job = script(
        tmp_path,
        RUN + "if not again:\n"
        "    from itertools import count\n"
        "    try:\n"
        "        with open(run.parent / 'ballast', 'wb', buffering=0) as file:\n"
        "            while file.write(bytes(4096)): pass\n"
        "    except OSError: pass\n"
        "    try:\n"
        "        for number in count(): (run.parent / f'{number}').touch()\n"  # nor is there room for names
        "    except OSError: pass\n"
        "print('x' * 100_000)\n"
        "print('again' if again else 'first', flush=True)\n" + ENDS,
    )
    done = launch(tmp_path, str(job), num_processes=1, RUN=str(small_disk / "run"))
    assert (done.code, done.out.split()[1::2]) == (0, ["first", "again"]), done.err
    assert "Traceback" not in done.err
    assert f"{small_disk}/run/logs/attempt-0" in done.err
    assert done.err.count("cannot be written to (No space left on device): the job goes on without") == 3, done.err


def test_a_full_disk_behind_standard_error_does_not_end_the_watch(tmp_path: Path) -> None:
    job = script(tmp_path, RUN + ENDS)
    with Path("/dev/full").open("w") as full:
        words = words_of(tmp_path, str(job), num_processes=1)
        env = environment(RUN=str(tmp_path / "run"))
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, stderr=full, check=False)
    assert done.returncode == 0
    assert (tmp_path / "count").read_text() == "xx"


MOVED = RUN + (
    "print('seen', flush=True)\n"
    "log = run / 'logs' / f'attempt-{int(again)}' / 'rank-0.log'\n"
    "while 'seen' not in (log.read_text() if log.exists() else ''): time.sleep(0.01)\n"
    "if not again: run.rename(run.with_name('moved'))\n"
)


@pytest.mark.parametrize("restarts", [True, False])
def test_a_run_folder_that_was_moved_is_not_made_again(tmp_path: Path, restarts: bool) -> None:
    """One with nothing but logs and crash.json in it would keep the next start from taking the name."""
    job = script(tmp_path, MOVED + ENDS)
    flags = () if restarts else ("--max-restarts", "0")
    done = launch(tmp_path, *flags, str(job), num_processes=1, RUN=str(tmp_path / "run"))
    assert "Traceback" not in done.err
    log = tmp_path / "moved" / "logs" / "attempt-0" / "rank-0.log"
    assert "seen" in log.read_text()
    assert done.code == (0 if restarts else 137), done.err
    if restarts:
        assert (tmp_path / "run" / "logs" / "attempt-1" / "rank-0.log").exists()
    else:
        assert not (tmp_path / "run").exists()
        assert f"  log:    {log}" in done.last_lines, "where it is now"
        report = next(line.split()[-1] for line in done.last_lines if line.startswith("  report:"))
        assert json.loads(Path(report).read_text())["step"] == 3


def test_no_file_says_what_no_rank_said(tmp_path: Path) -> None:
    """A job that goes well leaves its logs, and nothing on the screen but what rank 0 printed."""
    done = launch(tmp_path, str(script(tmp_path, RANK + "print('from', rank)\n")))
    assert (done.code, done.out) == (0, "from 0\n")
    logs = sorted((tmp_path / "runs" / "launch").glob("*/attempt-0/rank-*.log"))
    assert [path.read_text() for path in logs] == ["from 0\n", "from 1\n"]
    assert not list((tmp_path / "runs").rglob("crash.json"))


def test_the_supervisor_does_not_load_torch(tmp_path: Path) -> None:
    job = script(tmp_path, "print('ran')\n")
    code = (
        "import sys; from drivetrain.cli import main\n"
        f"code = main(['launch', '--cpu', '--output-dir', {str(tmp_path / 'runs')!r}, {str(job)!r}])\n"
        "print(code, sorted({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment()
    )
    assert done.stdout == "ran\n0 []\n", done.stderr


def test_a_port_that_is_taken_on_several_nodes(tmp_path: Path) -> None:
    job = script(tmp_path, "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--nodes", "2", "--node-rank", "0", "--main-address", "127.0.0.1", "--main-port", port]
        done = launch(tmp_path, *flags, str(job))
    assert done.code == 1
    assert f"port {port} of 127.0.0.1 is taken by process {os.getpid()}" in done.err
    assert "remedy" in done.last_lines[-1]


def test_a_node_that_does_not_come(tmp_path: Path) -> None:
    job = script(tmp_path, "")
    flags = ["--nodes", "2", "--node-rank", "0", "--main-address", "127.0.0.1", "--join-seconds", "1"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    done = launch(tmp_path, *flags, "--main-port", port, str(job))
    assert done.code == 1
    assert f"node 1 of 2 did not come to 127.0.0.1:{port} within 1 s" in done.err
    assert "--node-rank 1" in done.last_lines[-1]


def test_only_the_monotonic_clock_is_read() -> None:
    """A wall clock that jumps changes nothing if nobody looks at it. Only names of folders and reports may."""
    folder = Path(__file__).parents[2] / "src" / "drivetrain" / "launch"
    for path in folder.glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert "time.time" not in line, path
            if "datetime.now" in line:
                assert "isoformat" in line or "Ymd" in line.replace("%", "").replace(":", ""), (path, line)


def test_the_kernel_out_of_memory_has_a_name(tmp_path: Path) -> None:
    """A memory control group around the whole job; a rank that eats more than it holds is killed by the kernel."""
    group = Path("/sys/fs/cgroup/memory") / f"drivetrain-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    except OSError:
        pytest.skip("no memory control group (v1) can be made here")
    job = script(
        tmp_path,
        RANK
        + "if rank == 1:\n    time.sleep(0.5)\n    eaten = [b'x' * (8 << 20) for _ in range(100)]\ntime.sleep(60)\n",
    )
    command = [sys.executable, "-m", "drivetrain", "launch", "--cpu", "--num-processes", "2", "--max-restarts", "0"]
    inside = f"echo $$ > {group}/cgroup.procs && exec {' '.join(command)} --output-dir runs {job}"
    try:
        done = subprocess.run(
            ["bash", "-c", inside],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment(),
            cwd=tmp_path,
        )
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)
    assert done.returncode == 137, done.stderr
    lines = done.stderr.rstrip().splitlines()
    assert lines[-2] == "  cause:  out of memory (host)"
    assert "rank 1" in done.stderr


def test_a_rank_that_is_finishing_a_checkpoint_is_not_killed_before(tmp_path: Path) -> None:
    """It reports its error first, since it may have to wait for a rank that never answers."""
    job = script(
        tmp_path,
        IN_TURN + "from drivetrain.core.launchers import supervision\n"
        "if rank == 1: time.sleep(600)\n"
        "error = ValueError('planted')\n"
        "supervision.failed(error, saving=True)\n"
        "time.sleep(2)\n"  # longer than the others get
        "tell('saved')\n"
        "raise error\n",
    )
    done = launch(tmp_path, str(job))
    assert done.code == 1
    assert (tmp_path / "saved").exists()
    assert done.err.count("ValueError: planted") == 1


def test_a_checkpoint_that_waits_for_a_silent_rank_is_not_waited_for(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        IN_TURN + "from drivetrain.core.launchers import supervision\n"
        "if rank == 1: time.sleep(600)\n"
        "supervision.failed(RuntimeError('gloo: Timed out waiting 2000ms for recv operation'), saving=True)\n"
        "time.sleep(15)\n"
        "tell('waited')\n",
    )
    done = launch(tmp_path, str(job))
    assert done.code != 0
    assert not (tmp_path / "waited").exists()
    assert "rank 1" in done.err
    assert "did not come to a collective that rank 0 waited for" in done.err


# Of a worker, what it finds when its script begins; what names files, ports and this start is left out.
STOOD_BY = RANK + (
    "import fcntl, json\n"
    "from drivetrain.core.launchers import supervision\n"
    "from pathlib import Path\n"
    "import psutil\n"
    "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
    "varied = ('_FD', 'MASTER_PORT', 'RESTART_COUNT', 'CHANNEL', 'STACKS')\n"
    "def is_handed(n): return os.readlink(f'/proc/self/fd/{n}').startswith(('pipe:', 'socket:', '/memfd:'))\n"
    "handed = [n for n in range(3, 100) if os.path.lexists(f'/proc/self/fd/{n}') and is_handed(n)]\n"
    "facts = {'environment': {k: v for k, v in os.environ.items() if not k.endswith(varied)}, 'argv': sys.argv}\n"
    "facts |= {'path': sys.path, 'main': sorted(globals().keys()), 'cwd': os.getcwd(), 'name': __name__}\n"
    "facts |= {'blocked': sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), 'nice': os.nice(0)}\n"
    "facts |= {'handled': {n.name: str(signal.getsignal(n)).split(' at ')[0] for n in signal.Signals}}\n"
    "facts |= {'group': os.getpgid(0) == os.getsid(0) == os.getpid(), 'cores': sorted(os.sched_getaffinity(0))}\n"
    "facts |= {'inherited': sum(not fcntl.fcntl(n, fcntl.F_GETFD) for n in handed)}\n"
    "facts |= {'in': os.readlink('/proc/self/fd/0')}\n"
    "facts |= {'out': os.fstat(1) == os.fstat(2), 'terminal': sys.stdout.isatty(), 'parent': os.getppid()}\n"
    "facts |= {'threads': [thread.name for thread in __import__('threading').enumerate()]}\n"
    "Path(f'facts-{attempt}').write_text(json.dumps([facts, os.getpid(), 'torch' in sys.modules]))\n"
    "print('from attempt', attempt)\n"
    "Path('run').mkdir(exist_ok=True)\n"
    "supervision.run(str(Path('run').absolute()))\n"
    "supervision.step(1 + int(attempt))\n"
    "while attempt == '0':\n"  # until there is a further child besides the guard
    "    others = [one.pid for one in psutil.Process(os.getppid()).children() if one.pid != os.getpid()]\n"
    "    if len(others) == 2:\n"
    "        Path('others').write_text(json.dumps(others))\n"
    "        os.kill(os.getpid(), signal.SIGKILL)\n"
    "    time.sleep(0.01)\n"
    "supervision.tell('end', finished=True)\n"
)


def test_one_that_stood_by_is_a_worker_like_any_other(tmp_path: Path) -> None:
    done = launch(tmp_path, "--standby", str(script(tmp_path, STOOD_BY)), "--word", num_processes=1, SECRET="1")
    assert (done.code, done.out) == (0, "from attempt 0\nfrom attempt 1\n"), done.err
    (fresh, _, had_torch), (stood_by, pid, has_torch) = (
        json.loads((tmp_path / f"facts-{attempt}").read_text()) for attempt in (0, 1)
    )
    assert stood_by == fresh
    assert (had_torch, has_torch) == (False, True)  # its interpreter was started, and had imported, before
    others = json.loads((tmp_path / "others").read_text())
    assert pid in others
    assert are_gone(others) == []


def test_what_stands_by_dies_with_its_supervisor(tmp_path: Path) -> None:
    text = STOOD_BY.replace("os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(100)")
    with launching(tmp_path, "--standby", str(script(tmp_path, text)), num_processes=1, forks=True) as process:
        others = json.loads(wait_for(tmp_path / "others"))
        process.kill()
        assert are_gone(others) == []


def test_none_stands_by_for_a_script_that_changes_its_environment(tmp_path: Path) -> None:
    text = "import os\nos.environ['OMP_NUM_THREADS'] = '7'\n" + STOOD_BY.replace("len(others) == 2", "tell_twice()")
    twice = "def tell_twice():\n    time.sleep(1)\n    return True\n"
    done = launch(tmp_path, "--standby", str(script(tmp_path, twice + text)), num_processes=1, forks=True)
    assert done.code == 0
    assert "--standby has no effect: the script changes its environment (OMP_NUM_THREADS)" in done.err
    assert len(json.loads((tmp_path / "others").read_text())) == 1  # the guard alone
