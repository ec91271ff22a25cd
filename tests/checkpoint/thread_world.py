"""Ranks as threads of one process: a world for tests that need many small ones, without the price of processes."""

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from drivetrain.core.world import World

T = TypeVar("T")


class ThreadWorld(World):
    def __init__(self, rank: int, size: int, meeting: threading.Barrier, table: list[Any]) -> None:
        super().__init__()
        self.rank, self.size, self.local_rank = rank, size, rank
        self._meeting, self._table = meeting, table

    def gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = json.dumps(value)
        self._meeting.wait(120)
        answers = [json.loads(text) for text in self._table]
        self._meeting.wait(120)  # nobody writes the next value before all have read this one
        return answers

    def gather_to_main(self, value: Any) -> list[Any]:
        answers = self.gather(value)
        return answers if self.is_main else []

    def agree(self, value: Any) -> Any:
        return self.gather(value if self.is_main else None)[0]

    def barrier(self) -> None:
        self._meeting.wait(120)


def on_ranks(size: int, function: Callable[[World], T]) -> list[T]:
    """What the function returned on each rank; the error of the lowest rank that failed."""
    meeting, table = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}
    broken: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadWorld(rank, size, meeting, table))
        except threading.BrokenBarrierError as error:
            broken.append(error)
        except BaseException as error:  # noqa: BLE001  (raised again in the test's thread)
            errors[rank] = error
            meeting.abort()  # the other ranks would wait for this one

    if size == 1:
        return [function(World())]
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    if broken:
        raise broken[0]
    return results
