"""What travels between ranks that share out experts: a row for each expert of a token, or one for each rank of them.

Four gloo processes on the CPU, forward and backward of one layer of 16 experts, two for each token. Bytes are those
that leave a rank for another, counts included: exact, and the same each time. Times are of both ways in turns, so that
whatever else the machine does meets both alike, and of the processors too, which waits for others are no part of;
between processes of one machine a byte is cheap, so they say less of a cluster than the bytes do. `random`: any two
experts. `pairs`: each expert always with the same other one, on its rank (`together`) or not (`apart`).
"""

import datetime
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.core.world import World
from drivetrain.moe.experts import Experts, Routing, slots_of
from drivetrain.strategies.shared_experts import ExchangeDispatcher

RANKS, EXPERTS, K = 4, 16, 2
TOKENS, WIDTH, HIDDEN = 2048, 512, 64  # of each rank; experts are narrow, since they are not what is compared
ROUNDS = 15
BLOCKS = tuple(slot * RANKS // EXPERTS for slot in range(EXPERTS))
IN_TURNS = tuple(slot % RANKS for slot in range(EXPERTS))
CASES = {"random": ("random", BLOCKS), "pairs together": ("pairs", BLOCKS), "pairs apart": ("pairs", IN_TURNS)}
EACH_EXPERT, EACH_RANK = "a row for each expert", "a row for each rank"


class RowForEachExpert(ExchangeDispatcher):
    """An exchange in which no two experts of a token can share a rank."""

    def shares_rows(self, k: int) -> bool:
        return False


WAYS: dict[str, type[ExchangeDispatcher]] = {EACH_EXPERT: RowForEachExpert, EACH_RANK: ExchangeDispatcher}


def measure() -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(rank, folder)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank of the benchmark failed; its error stands above")
        found: dict[str, list[float]] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return found


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=120))
    found: dict[str, list[float]] = {}
    for name, (kind, placement) in CASES.items():
        found |= _compared(name, kind, placement)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _compared(name: str, kind: str, placement: tuple[int, ...]) -> dict[str, list[float]]:
    calls = {way: Call(dispatcher, kind, placement) for way, dispatcher in WAYS.items()}
    megabytes = {way: call.megabytes() for way, call in calls.items()}  # warms up, too
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in calls}
    for number in range(ROUNDS):
        for way in list(calls)[:: 1 if number % 2 else -1]:
            times[way].append(calls[way].milliseconds())
    result: dict[str, list[float]] = {}
    for way in calls:
        result[f"{name}: {way} (MB sent)"] = [megabytes[way]]
        for place, kind_of_time in enumerate(("ms", "ms of processors")):
            result[f"{name}: {way} ({kind_of_time})"] = [found[place] for found in times[way]]
    result[f"{name}: bytes, each rank / each expert"] = [megabytes[EACH_RANK] / megabytes[EACH_EXPERT]]
    for place, words in enumerate(("time", "time of processors")):
        pairs = zip(times[EACH_RANK], times[EACH_EXPERT], strict=True)
        result[f"{name}: {words}, each rank / each expert"] = [ours[place] / theirs[place] for ours, theirs in pairs]
    return result


class Call:
    def __init__(self, dispatcher: type[ExchangeDispatcher], kind: str, placement: tuple[int, ...]) -> None:
        assert dist.group.WORLD is not None
        rank = dist.get_rank()
        world = World(rank, RANKS, group=dist.group.WORLD)
        self._dispatcher = dispatcher(world, dist.group.WORLD, placement, [1.0] * RANKS)
        torch.manual_seed(rank)
        self._experts = Experts(WIDTH, [HIDDEN] * len(slots_of(placement, rank)), WIDTH)
        self._tokens = torch.randn(TOKENS, WIDTH, requires_grad=True)
        self._weights = torch.rand(TOKENS, K, requires_grad=True)
        self._upstream = torch.randn(TOKENS, WIDTH)
        self._routing = Routing(_chosen(kind), self._weights, torch.zeros(TOKENS, EXPERTS))

    def __call__(self) -> None:
        self._dispatcher(self._experts, self._tokens, self._routing).backward(self._upstream)

    def milliseconds(self) -> tuple[float, float]:
        """Return the time of one forward and backward: until all ranks are done, and of all processors together."""
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        self()
        work = torch.tensor(time.process_time() - worked, dtype=torch.float64)
        dist.all_reduce(work)  # waits for the others
        return (time.perf_counter() - began) * 1e3, work.item() * 1e3

    def megabytes(self) -> float:
        """Return what leaves any rank for another in one forward and backward."""
        with _counted() as sizes:
            self()
        total = torch.tensor(sum(sizes))
        dist.all_reduce(total)
        return total.item() / 1e6


def _chosen(kind: str) -> Tensor:
    if kind == "random":
        return torch.rand(TOKENS, EXPERTS).topk(K).indices
    first = torch.randint(0, EXPERTS, (TOKENS, 1))
    return torch.cat([first, first ^ 1], 1)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the bytes that this rank sends to others."""
    sizes: list[int] = []
    exchange, gather = dist.all_to_all_single, dist.all_gather

    def counting_exchange(result: Tensor, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Any:
        sizes.append((sum(sent) - sent[dist.get_rank()]) * rows.shape[1] * rows.element_size())
        return exchange(result, rows, received, sent, group=group)

    def counting_gather(results: list[Tensor], own: Tensor, group: Any) -> Any:
        sizes.append(own.numel() * own.element_size() * (RANKS - 1))
        return gather(results, own, group)

    with (
        mock.patch.object(dist, "all_to_all_single", counting_exchange),
        mock.patch.object(dist, "all_gather", counting_gather),
    ):
        yield sizes
