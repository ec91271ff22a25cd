"""Chooses the CPU cores of each process, so that it works next to its GPU and its memory."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def numa_cores(root: Path = NODES) -> dict[int, list[int]]:
    """Return the cores of each NUMA node, as far as this process may use them."""
    allowed = os.sched_getaffinity(0) if root == NODES else None
    found = {}
    for folder in sorted(root.glob("node[0-9]*")):
        try:
            cores = _parse((folder / "cpulist").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        usable = [core for core in cores if allowed is None or core in allowed]
        if usable:
            found[int(folder.name[4:])] = usable
    return found


def choose_cores(
    bind: str, num_processes: int, gpu_nodes: Sequence[int | None], numa: Mapping[int, Sequence[int]]
) -> list[list[int]]:
    """Return each local rank's cores; empty where it is not bound. `gpu_nodes` are the NUMA nodes of the ranks' GPUs.

    Ranks of one NUMA node share its cores equally. There are never fewer cores than ranks in a share: then no rank is
    bound, because two ranks on one core are worse off than two ranks that the kernel moves around.
    """
    unbound: list[list[int]] = [[] for _ in range(num_processes)]
    everything = sorted(core for cores in numa.values() for core in cores)
    if bind == "none" or (bind == "auto" and len(numa) < 2) or not everything:
        return unbound
    homes: dict[int, int | None]
    if bind == "cores":
        homes = dict.fromkeys(range(num_processes), 0)
        pools: Mapping[int, Sequence[int]] = {0: everything}
    else:
        nodes = sorted(numa)
        homes = {
            rank: gpu_nodes[rank] if rank < len(gpu_nodes) and gpu_nodes[rank] in numa else nodes[
                rank * len(nodes) // num_processes
            ]
            for rank in range(num_processes)
        }  # fmt: skip
        pools = numa
    chosen = unbound
    for home, pool in pools.items():
        ranks = [rank for rank in range(num_processes) if homes[rank] == home]
        if len(pool) < len(ranks):
            return [[] for _ in range(num_processes)]
        for place, rank in enumerate(ranks):
            begin, end = place * len(pool) // len(ranks), (place + 1) * len(pool) // len(ranks)
            chosen[rank] = list(pool[begin:end])
    return chosen


def _parse(text: str) -> list[int]:
    """Parse a list of cores: `0-3,8` are the cores 0, 1, 2, 3 and 8."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    return cores
