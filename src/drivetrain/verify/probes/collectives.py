"""Checks processes that communicate: each collective gives the right numbers, and how fast an all-reduce is."""

import datetime
import multiprocessing
import os
import socket
import statistics
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from drivetrain.core.processes import die_with_parent
from drivetrain.core.value import MIB, Value, format_digits
from drivetrain.core.world import synchronize
from drivetrain.verify.probe import Outcome, Probe, ProbeSetup, failed, not_applicable, passed

PROBES = (
    Probe(
        name="gloo",
        title="collectives, gloo",
        function="drivetrain.verify.probes.collectives:gloo",
        measures_rates=True,
        order=110,
    ),
    Probe(
        name="nccl",
        title="collectives, NCCL",
        function="drivetrain.verify.probes.collectives:nccl",
        measures_rates=True,
        order=120,
    ),
)


class CollectiveFigures(Value):
    """The findings of one rank. Ranks do not agree on anything here: each reports its own."""

    problems: tuple[str, ...]
    seconds_per_all_reduce: float
    num_bytes: int
    world: int

    @property
    def bus_gigabytes(self) -> float:
        """The GB/s that cross each link: an all-reduce moves 2 (n-1)/n of the bytes, with any algorithm."""
        return 2 * (self.world - 1) / self.world * self.num_bytes / self.seconds_per_all_reduce / 1e9


def measure_collectives(
    group: dist.ProcessGroup | None, device: torch.device, *, num_bytes: int, num_repeats: int = 5
) -> CollectiveFigures:
    """Check every collective and time the all-reduce. Called by all ranks of the group at once."""
    problems = tuple(check_collectives(group, device))
    tensor = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    dist.all_reduce(tensor, group=group)  # connections are made at the first use
    times = []
    for _ in range(num_repeats):
        dist.barrier(group=group)
        synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        synchronize(device)
        times.append(time.perf_counter() - started)
    return CollectiveFigures(
        problems=problems,
        seconds_per_all_reduce=statistics.median(times),
        num_bytes=tensor.nbytes,
        world=dist.get_world_size(group),
    )


def check_collectives(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[str]:
    """Check every collective that training uses, with whole numbers, so that the right result is known exactly."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def is_wrong(got: torch.Tensor, wanted: list[float]) -> str:
        return "" if got.tolist() == wanted else f"gave {got.tolist()} on rank {rank}, not {wanted}"

    def numbers(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    # A different value per rank and place: an exchange of ranks or places cannot go unnoticed.
    summed = numbers(rank + 1, 10 * rank)
    dist.all_reduce(summed, group=group)
    total = world * (world - 1) / 2
    if wrong := is_wrong(summed, [total + world, 10 * total]):
        yield f"all_reduce {wrong}"

    sent = numbers(rank, 7 + rank)
    last = world - 1
    dist.broadcast(sent, src=dist.get_global_rank(group, last) if group is not None else last, group=group)
    if wrong := is_wrong(sent, [last, 7 + last]):
        yield f"broadcast {wrong}"

    parts = [numbers(-1, -1) for _ in range(world)]
    dist.all_gather(parts, numbers(rank, rank * rank), group=group)
    if wrong := is_wrong(torch.cat(parts), [value for other in range(world) for value in (other, other * other)]):
        yield f"all_gather {wrong}"

    # Rank r sends d + 1 numbers to rank d, as a mixture of experts does with its tokens: uneven shares.
    shares = [other + 1 for other in range(world)]
    outgoing = numbers(*(100 * rank + other for other in range(world) for _ in range(other + 1)))
    incoming = numbers(*[-1] * (world * (rank + 1)))
    dist.all_to_all_single(incoming, outgoing, [rank + 1] * world, shares, group=group)
    if wrong := is_wrong(incoming, [100 * other + rank for other in range(world) for _ in range(rank + 1)]):
        yield f"all_to_all_single {wrong}"


def loopback_name() -> str:
    """Return the interface that no other machine can reach: `lo` on Linux."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET and address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"


def gloo(setup: ProbeSetup) -> Outcome:
    num_bytes = (16 if setup.quick else 64) * MIB
    return run_ranks("gloo", ["cpu", "cpu"], Path(setup.scratch), num_bytes)


def nccl(setup: ProbeSetup) -> Outcome:
    if not setup.gpu_indices:
        return not_applicable("no GPU was chosen")
    if len(setup.gpu_indices) < 2:
        return not_applicable("one GPU was chosen; NCCL connects two or more")
    return run_ranks("nccl", list(setup.devices), Path(setup.scratch), (64 if setup.quick else 512) * MIB)


def run_ranks(backend: str, devices: list[str], folder: Path, num_bytes: int) -> Outcome:
    """Fork one process per device: torch is loaded already, and nothing was computed yet."""
    # A file in a folder of our own: a TCP store would listen on every interface of the machine.
    store = folder / "store"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback_name()
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank, device in enumerate(devices):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(theirs, backend, rank, len(devices), device, str(store), num_bytes), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    remedy = (
        "NCCL_DEBUG=INFO drivetrain verify --only nccl --json shows what NCCL saw; NCCL_P2P_DISABLE=1 avoids the links"
        if backend == "nccl"
        else "ip link set lo up; drivetrain verify --only gloo --json shows the end of its output"
    )
    figures: list[CollectiveFigures] = []
    deaths: list[str] = []
    errors: list[str] = []
    open_connections = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    # After a failure the others get a moment: they may hang in a collective, or be the cause and not have ended yet.
    while open_connections and (ready := wait(list(open_connections), 1.0 if deaths or errors else None)):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = open_connections.pop(connection)
            try:
                answer = connection.recv_bytes().decode()
            except EOFError:
                ranks[rank][0].join(1)
                deaths.append(f"rank {rank} ended with code {ranks[rank][0].exitcode}")
                continue
            if answer.startswith("{"):
                figures.append(CollectiveFigures.from_json(answer))
            else:
                errors.append(f"rank {rank}: {answer}")
    if deaths or errors:
        # A rank that died is the cause; the others only lost their connection to it.
        return failed((deaths + errors)[0], remedy=remedy)
    if problems := [problem for figure in figures for problem in figure.problems]:
        return failed("; ".join(problems), remedy=remedy)
    slowest = max(figures, key=lambda figure: figure.seconds_per_all_reduce)
    return passed(
        f"{format_digits(slowest.bus_gigabytes)} GB/s all-reduce, {len(devices)} ranks",
        detail=f"all_reduce ({num_bytes // MIB} MiB, bus bandwidth), broadcast, all_gather, all_to_all: exact",
    )


def _rank_main(
    answer: Connection, backend: str, rank: int, world: int, device_name: str, store: str, num_bytes: int
) -> None:
    die_with_parent()
    try:
        device = torch.device(device_name)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=30),
        )
        figures = measure_collectives(None, device, num_bytes=num_bytes)
        answer.send_bytes(figures.model_dump_json().encode())
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001  (told to the process that waits for this one)
        traceback.print_exc()
        answer.send_bytes((f"{type(error).__name__}: {error}".splitlines()[0]).encode())
