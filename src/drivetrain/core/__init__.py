"""Values and errors that every other room may use. Imports nothing of drivetrain's own."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Built with mimalloc, as for Arm, torch gives free memory back to the system after 10 ms, and gets it anew page by page
# in the next step: 7 to 11 % of a step on a CPU. It is read once, when torch is loaded. Other builds do not read it.
MEMORY_KEPT = {"MIMALLOC_PURGE_DELAY": "1000"}  # ms


@contextmanager
def loading_modules() -> Iterator[None]:
    """Collect no garbage while modules are imported: what they make stays, and to look for it takes 0.3 s.

    Nor are these objects looked at as new ones right after it, in 0.3 s more: they join the oldest, as they would then.
    Where all of them were there before, none join: to count what is frozen, each object of that is visited.
    """
    collects, num_before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if collects and len(sys.modules) > num_before and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if collects:
            gc.enable()
