"""Objects set aside for a run: garbage is collected before, theirs is not looked through, all is as it was after."""

import gc
import subprocess
import sys
import weakref

import pytest

from drivetrain.core.gc_freeze import SetAside


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


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
from drivetrain.core.gc_freeze import forking

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
