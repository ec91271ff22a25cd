"""Probes that go wrong in every way a real one can."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pydantic

from drivetrain.verify.probe import MeasuredRate, Outcome, ProbeSetup, not_applicable, passed


def good(setup: ProbeSetup) -> Outcome:
    return passed("fine", rates=(MeasuredRate(of="cpu", quantity="memory", value=12.5, unit="GB/s"),))


def no_use(setup: ProbeSetup) -> Outcome:
    return not_applicable("planted reason")


def says_where(setup: ProbeSetup) -> Outcome:
    """Uses both its folders, and tells about them and about its process."""
    (Path(setup.scratch) / "left-behind").write_text("x")
    Path(setup.run_scratch).mkdir(parents=True)
    (Path(setup.run_scratch) / "left-behind").write_text("x")
    mode = Path(setup.scratch).stat().st_mode & 0o777
    return passed(f"{os.getpid()} {mode:o} {setup.scratch} {setup.run_scratch} {os.environ.get('TMPDIR')}")


def crash(setup: ProbeSetup) -> Outcome:
    print("last words before the crash")
    os.kill(os.getpid(), signal.SIGSEGV)
    return passed("unreachable")


def abort(setup: ProbeSetup) -> Outcome:
    os.abort()


def exit_at_once(setup: ProbeSetup) -> Outcome:
    os._exit(3)


def exit_politely(setup: ProbeSetup) -> Outcome:
    sys.exit(0)


def raise_error(setup: ProbeSetup) -> Outcome:
    raise ZeroDivisionError("planted error")


def import_missing(setup: ProbeSetup) -> Outcome:
    import a_package_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401

    return passed("unreachable")


def hang(setup: ProbeSetup) -> Outcome:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.1)


def return_nothing(setup: ProbeSetup) -> Outcome:
    return None  # type: ignore[return-value]


def print_much(setup: ProbeSetup) -> Outcome:
    line = "x" * 99_999 + "\n"
    for _ in range(1000):
        sys.stdout.write(line)
    print("the very end")
    raise RuntimeError("after 100 MB of output")


def print_forever(setup: ProbeSetup) -> Outcome:
    while True:
        sys.stdout.write("y" * 65_536)


def close_its_output(setup: ProbeSetup) -> Outcome:
    """And tell how much time the zygote took meanwhile."""
    zygote = psutil.Process(os.getppid())
    os.close(1)
    os.close(2)
    before = sum(zygote.cpu_times()[:2])
    time.sleep(1)
    return passed(f"{sum(zygote.cpu_times()[:2]) - before}")


def leave_processes(setup: ProbeSetup) -> Outcome:
    """One that stays in the group, and one that leaves it as a daemon does; both outlive the probe."""
    in_group = subprocess.Popen(["sleep", "600"])
    away = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return passed(f"{in_group.pid} {away.pid}")


def leave_and_tell(setup: ProbeSetup) -> Outcome:
    outcome = leave_processes(setup)
    Path(setup.run_folder, "pids").write_text(outcome.figure)
    return outcome


def look_for_the_left(setup: ProbeSetup) -> Outcome:
    """Runs beside `leave_and_tell`: what it left in its group has to end with it, and not when all is over."""
    pids = Path(setup.run_folder, "pids")
    while not pids.exists():
        time.sleep(0.05)
    status = ""
    deadline = time.monotonic() + 60
    while status != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
        try:
            status = psutil.Process(int(pids.read_text().split()[0])).status()
        except psutil.NoSuchProcess:
            return passed("gone")
    return passed(status)


def hang_with_processes(setup: ProbeSetup) -> Outcome:
    outcome = leave_processes(setup)
    Path(setup.run_folder, "pids").write_text(outcome.figure)
    return hang(setup)


def allocate_too_much(setup: ProbeSetup) -> Outcome:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
    return passed(str(len(bytearray(1 << 32))))


def killed_for_memory(setup: ProbeSetup) -> Outcome:
    """What the kernel does to a process that takes too much."""
    os.kill(os.getpid(), signal.SIGKILL)
    return passed("unreachable")


def kill_the_zygote(setup: ProbeSetup) -> Outcome:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
    return passed("unreachable")


def note_time(setup: ProbeSetup) -> Outcome:
    started = time.monotonic()
    time.sleep(0.4)
    return passed(f"{started} {time.monotonic()}")


def meet(setup: ProbeSetup) -> Outcome:
    """Like `note_time`, but ends only when two of these run at once."""
    started = time.monotonic()
    Path(setup.run_folder, f"met-{os.getpid()}").touch()
    while len(list(Path(setup.run_folder).glob("met-*"))) < 2:
        time.sleep(0.02)
    return passed(f"{started} {time.monotonic()}")


def wait_for_interrupt(setup: ProbeSetup) -> Outcome:
    """Tells the test that it runs, with a process of its own, then waits."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(setup.run_scratch).mkdir(parents=True)
    Path(setup.run_folder).parent.joinpath("running").write_text(f"{os.getpid()} {child.pid} {setup.scratch}")
    return hang(setup)


def is_torch_loaded(setup: ProbeSetup) -> Outcome:
    return passed(f"{'torch' in sys.modules} {pydantic.VERSION}")
