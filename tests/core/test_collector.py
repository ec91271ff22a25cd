"""Objects set aside for a run: garbage is collected before, theirs is not looked through, all is as it was after."""

import gc
import weakref

from drivetrain.core.collector import SetAside


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
