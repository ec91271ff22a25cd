"""Saves that are killed at every point. Run as a program: it forks a world per point, so torch is imported once.

`python -m tests.checkpoint.crashing FOLDER WAY/WORLD/RANK…` saves step 1 and, with `keep_last` 1, step 2, during which
that rank of a world of that size is killed: for each point in a folder `FOLDER/WAY-WORLD-RANK-POINT`. A way is
`waiting`, `beside` (a thread saves), `abandoned` (a thread saves, and the step turns out to be bad) or `discarding`
(steps 2 and 3 are there, and are removed). In `frozen` a thread saves step 2 with frozen weights, which step 1 does not
have, so that they are written; in `moved` step 1 shares frozen weights with no later one, and they are removed.
A point is the number of an operation on the disk, and `before`, `inside` or `after` it (`3-inside`); `0-never` is the
run without a kill. For each it prints a line of JSON: the exit codes of all ranks, and the operations that the killed
one had begun.
"""

import datetime
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from drivetrain.checkpoint import BackgroundSaver, Checkpointer, Files, Shard
from drivetrain.checkpoint.files import Written
from drivetrain.core.world import World

ROWS = 12  # divides by every size of world


class CountingFiles(Files):
    """Writes down every operation, and kills the process at the chosen one."""

    def __init__(self, point: str, log: Path) -> None:
        number, _, self._moment = point.partition("-")
        self._fatal, self._log, self._count = int(number), log, 0

    def _reached(self, moment: str) -> None:
        if self._count == self._fatal and moment == self._moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def _start(self, operation: str) -> None:
        self._count += 1
        with self._log.open("a") as log:
            log.write(operation + "\n")
        self._reached("before")

    def make_folder(self, path: Path) -> None:
        self._start("make_folder")
        super().make_folder(path)
        self._reached("after")

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        self._start(f"write_file {path.name}")
        written = super().write_file(path, self._torn(chunks))
        self._reached("after")
        return written

    def _torn(self, chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            yield view[: len(view) // 2]
            self._reached("inside")
            yield view[len(view) // 2 :]

    def fsync_folder(self, path: Path) -> None:
        self._start("fsync_folder")
        super().fsync_folder(path)
        self._reached("after")

    def rename(self, source: Path, target: Path) -> None:
        self._start(f"rename to {target.name[:6]}")
        super().rename(source, target)
        self._reached("after")

    def remove_file(self, path: Path) -> None:
        self._start("remove_file")
        super().remove_file(path)
        self._reached("after")

    def remove_folder(self, path: Path) -> None:
        self._start("remove_folder")
        super().remove_folder(path)
        self._reached("after")


def shards_of(step: int, rank: int, size: int) -> list[Shard]:
    """Every element of a step's tensors is the step's number, so that a mix of two steps shows."""
    rows = torch.full((ROWS, 3), float(step)).chunk(size)
    start = sum(len(part) for part in rows[:rank])
    return [
        Shard("w", rows[rank], (ROWS, 3), (start, 0)),
        Shard(f"only on {rank}", torch.full((5,), step), (5,), (0,)),
    ]


def frozen_shards_of(step: int, rank: int, size: int, number: float) -> list[Shard]:
    """The same with a frozen weight, every element of which is the number."""
    rows = torch.full((ROWS, 2), number).chunk(size)
    start = sum(len(part) for part in rows[:rank])
    frozen = Shard("frozen", rows[rank], (ROWS, 2), (start, 0), is_part=True, is_untrained=True)
    return [*shards_of(step, rank, size), frozen]


def points_of(operations: list[str]) -> list[str]:
    """Before and after each operation; and inside, where it is not one call of the system."""
    return [
        f"{number}-{moment}"
        for number, operation in enumerate(operations, start=1)
        for moment in (("before", "inside", "after") if "write_file" in operation else ("before", "after"))
    ]


def rank_main(folder: Path, way: str, rank: int, size: int, files: Files | None) -> None:
    group = None
    if size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(folder.with_name(f"{folder.name}.store")), size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120)
        )
        group = dist.group.WORLD
    world = World(rank, size, group=group)
    first = Checkpointer(folder, world)
    first.save(1, frozen_shards_of(1, rank, size, 7.0) if way == "moved" else shards_of(1, rank, size), {"step": 1})
    world.barrier()
    if way == "discarding":
        for step in (2, 3):
            Checkpointer(folder, world).save(step, shards_of(step, rank, size), {"step": step})
        world.barrier()
    checkpointer = Checkpointer(folder, world, keep_last=1, files=files)
    if way == "discarding":
        checkpointer.discard_after(1)
    elif way == "waiting":
        checkpointer.save(2, shards_of(2, rank, size), {"step": 2})
    else:
        saver = BackgroundSaver(checkpointer, world)
        shards = shards_of(2, rank, size)
        if way in ("frozen", "moved"):
            checkpointer.latest()
            shards = frozen_shards_of(2, rank, size, 7.0)
        if way == "moved":
            checkpointer.frozen.watch(shards)
            shards = frozen_shards_of(2, rank, size, 8.0)
        saver.begin(2, shards, {"step": 2})
        if way == "abandoned":
            saver.abandon()
        else:
            saver.judged()
        saver.finish()


def run_point(folder: Path, way: str, size: int, fatal_rank: int, point: str) -> list[str]:
    """The operations that the killed rank had begun."""
    log = folder.with_name(f"{folder.name}.log")
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with Path(os.devnull).open("w") as nothing:
                    os.dup2(nothing.fileno(), 2)  # the ranks that are left complain, as they should
                rank_main(folder, way, rank, size, CountingFiles(point, log) if rank == fatal_rank else None)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    operations = log.read_text().splitlines() if log.exists() else []
    result = {
        "way": way,
        "size": size,
        "fatal_rank": fatal_rank,
        "point": point,
        "codes": codes,
        "operations": operations,
    }
    print(json.dumps({**result, "folder": str(folder)}), flush=True)
    return operations


def main() -> None:
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        way, *numbers = case.split("/")
        size, fatal_rank = map(int, numbers)
        start = Path(sys.argv[1]) / f"{way}-{size}-{fatal_rank}-"
        operations = run_point(Path(f"{start}0-never"), way, size, fatal_rank, "0-never")
        for point in points_of(operations):
            run_point(Path(f"{start}{point}"), way, size, fatal_rank, point)


if __name__ == "__main__":
    main()
