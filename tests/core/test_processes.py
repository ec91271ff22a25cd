"""Processes that are supervised: none outlives what started it."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable

import psutil
import pytest

from drivetrain.core.processes import OrphanGuard, SetAside, descendants, kill_tree, restore_handler, stopping_cleanly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part in it is Linux's")

SLEEP = "import time; time.sleep(600)"
# Prints the pid of a child that moved to a group of its own.
LEAVES_A_CHILD = (
    "import subprocess, sys, time\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True, stdout=-3)\n"
    "print(child.pid, flush=True)\n"
)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(code: str) -> tuple[subprocess.Popen[str], int]:
    """Start a process in a group of its own; returns it with the number that it says first."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_tree_is_killed_with_those_that_left_the_group() -> None:
    process, child = start(LEAVES_A_CHILD + "time.sleep(600)\n")
    assert [found.pid for found in descendants(process.pid)] == [child]
    kill_tree(process.pid)
    process.wait(120)
    until(lambda: is_gone(child))


def test_what_is_gone_has_no_descendants_and_can_be_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert descendants(process.pid) == []
    kill_tree(process.pid)


def test_a_process_dies_with_its_parent() -> None:
    code = (
        "import os, time\n"
        "from drivetrain.core.processes import die_with_parent\n"
        "told, tell = os.pipe()\n"
        "parent = os.getpid()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    die_with_parent(parent)\n"
        "    os.write(tell, b'.')\n"
        "    time.sleep(600)\n"
        "os.read(told, 1)\n"
        "print(child, flush=True)\n"
        "time.sleep(600)\n"
    )
    process, child = start(code)
    process.kill()
    process.wait()
    until(lambda: is_gone(child))


def test_orphans_are_adopted_and_killed() -> None:
    code = (
        "import os, subprocess, sys\n"
        "from drivetrain.core.processes import adopt_orphans, descendants, kill_strays\n"
        "adopt_orphans()\n"
        f"done = subprocess.run([sys.executable, '-c', {LEAVES_A_CHILD!r}], stdout=-1, text=True)\n"
        "assert [found.pid for found in descendants(os.getpid())] == [int(done.stdout)]\n"
        "kill_strays()\n"
        "assert descendants(os.getpid()) == []\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_guard_kills_the_groups_of_a_killed_supervisor() -> None:
    code = (
        "import subprocess, sys, time\n"
        "from drivetrain.core.processes import OrphanGuard\n"
        "guard = OrphanGuard()\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
        "guard.add(child.pid)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process, child = start(code)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: is_gone(child))


def test_the_guard_forgets_a_group_that_has_ended() -> None:
    guard = OrphanGuard()
    child = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    guard.add(child.pid)
    guard.remove(child.pid)
    guard.close()
    assert child.poll() is None
    kill_tree(child.pid)
    child.wait()


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_there_is_set_aside_and_garbage_is_not_kept() -> None:
    before = gc.get_freeze_count()
    lost = weakref.ref(Ring())
    aside = SetAside()
    aside.begin()
    try:
        assert lost() is None
        assert gc.get_freeze_count() > before + 10_000
        assert len(gc.get_objects()) < 10_000  # what a collection has to look through
        later = weakref.ref(Ring())
        gc.collect()
        assert later() is None
    finally:
        aside.end()
    assert gc.get_freeze_count() == 0


def test_only_who_began_ends_it() -> None:
    first, second = SetAside(), SetAside()
    first.begin()
    second.begin()
    second.end()
    second.end()
    assert gc.get_freeze_count() > 0
    first.end()
    assert gc.get_freeze_count() == 0


CHILD = """
import contextlib, gc, os, sys

def busy():
    return [[] for _ in range(100_000)]

os.register_at_fork(after_in_child=busy)  # as threading does: before anything of ours is asked
from drivetrain.core.processes import forking

class Bomb:
    def __init__(self):
        self.itself, self.home = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.home:
            os._exit(7)

gc.collect()
gc.disable()
Bomb()
gc.enable()
with forking() if sys.argv[1] == "guarded" else contextlib.nullcontext():
    child = os.fork()
    if not child:
        lost = busy()
        os._exit(0 if gc.isenabled() else 8)
    found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert gc.isenabled() == (sys.argv[1] != "guarded")
assert gc.isenabled()
sys.exit(found)
"""


@pytest.mark.parametrize(("how", "code"), [("guarded", 0), ("as it is", 7)])
def test_a_forked_child_does_not_collect_what_its_parent_left(how: str, code: int) -> None:
    """Nor while others' handlers run in it; its own garbage is collected as ever."""
    assert subprocess.run([sys.executable, "-c", CHILD, how], check=False).returncode == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2])
def test_a_handler_that_was_not_set_from_python_becomes_the_default(number: int) -> None:
    """`signal.signal` returns None for it, which it does not take."""
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, lambda *_: None)
    try:
        restore_handler(number, None)
        assert signal.getsignal(number) == default
    finally:
        restore_handler(number, before)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("has_own", [False, True])
def test_a_handler_of_the_script_is_set_aside_and_put_back_and_that_is_told(has_own: bool) -> None:
    def own(number: int, frame: object) -> None:
        raise AssertionError("it was called")

    said: list[str] = []
    before = signal.signal(signal.SIGUSR1, own if has_own else signal.SIG_DFL)
    try:
        with stopping_cleanly(lambda: None, said.append):
            signal.raise_signal(signal.SIGUSR1)
        assert said[0].startswith("SIGUSR1: stopping after this step")
        assert ("own handler is not called" in said[0]) is has_own
        assert signal.getsignal(signal.SIGUSR1) is (own if has_own else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGUSR1, before)
