"""The forecast of `drivetrain plan --for` against reality.

`python -m benchmarks forecast`: 1 to 4 gloo processes of this machine, with one thread each, run the same global batch.
The model of plan/forecast.py gets three things: the step of one process at the whole global batch and at a quarter of
it, and an all-reduce of two sizes between two processes. It then says what a step takes at half the batch, and on 2, 3
and 4 processes; `dt.benchmark_performance` says what it took. Processes that have a core of their own are pinned to it.
More processes than cores cannot show how a real machine of so many devices scales: they show that the cores are what is
shared. Where it is allowed, the processes run in real time (SCHED_RR), so that other work on the machine waits. Linux
stops such processes for the last 50 ms of each second in which they did not rest (`sched_rt_runtime_us`): each
measurement begins after a rest. They keep free memory as processes do that `drivetrain` starts.

`python -m benchmarks forecast-guides`: the forecast for the jobs of the guides' tables, beside what these claim.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import drivetrain as dt
from drivetrain.core import MEMORY_KEPT
from drivetrain.plan.forecast import Interconnect, Pace, StepCost, StepWork, step_time

ROUNDS, STEPS = 3, 12
REST_SECONDS = 1.0  # the period over which Linux counts what processes in real time may use: 0.95 s of each
MOST_PROCESSES = 4
MEGABYTE = 2**20
LINK_BYTES = (64 * 1024, 16 * MEGABYTE)
BATCH = 64
# Width of the one weight matrix, and how many positions of a sample it is applied to.
CASES = {"computing": (256, 64), "exchanging": (1600, 1)}
# What the guides claim, over one GPU: the first of one L4, the second of one RTX 3090, whatever the others are.
L4_CLAIMS = {2: 1.9, 4: 3.5, 8: 6.5}
DARKROOM_CLAIMS = {"2xRTX 3090": 1.8, "4xA100-40": 3.2, "8xA100-40": 5.3}
XRAY = ("chest-xray-vqa", "--config", "examples/chest-xray-vqa.yaml")
DARKROOM = ("darkroom", "--config", "examples/darkroom.yaml", "--tf_n_embd", "64", "--max-steps", "50000")
DARKROOM_BATCH = 1024  # on all GPUs together: 2 × 512, 4 × 256, 8 × 128


def job_of(case: str, batch: int) -> dt.Job:
    """Return the job of a case, with a global batch of so many samples."""
    width, length = CASES[case]
    return dt.Job(
        name=case,
        model=lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh()),
        data=torch.randn(BATCH, length, width, generator=torch.Generator().manual_seed(0)),
        loss=lambda model, inputs: model(inputs).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        global_batch=batch,
        max_steps=100,
    )


def rank_main(rank: int, size: int, folder: Path, number: int) -> None:
    """Measure all cases as one of `size` processes; rank 0 writes what it found."""
    measure_performance = dt.benchmark_performance  # loads what it needs, which takes longer than 0.95 s
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    cores = sorted(os.sched_getaffinity(0))
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for case in CASES:
        for batch in (BATCH, BATCH // 2, BATCH // 4) if size == 1 else (BATCH,):
            config = dt.configure(gpu_mode="cpu", num_workers=0, output_dir=folder / "runs", precision="fp32")
            time.sleep(REST_SECONDS)
            seconds = measure_performance(job_of(case, batch), config, num_iterations=STEPS).step_seconds
            found[f"{case} {batch}"] = seconds
    if size == 2:
        found |= _links(rank, folder, number)
    if rank == 0:
        (folder / f"found-{size}-{number}.json").write_text(json.dumps(found), encoding="utf-8")


def _links(rank: int, folder: Path, number: int) -> dict[str, float]:
    store = dist.FileStore(str(folder / f"links-{number}"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for size in LINK_BYTES:
        time.sleep(REST_SECONDS)
        tensor, seconds = torch.zeros(size // 4), []
        for _ in range(15):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - begin)
        found[f"all-reduce {size}"] = statistics.median(seconds[3:])
    dist.destroy_process_group()
    return found


def _launched(size: int, folder: Path, number: int) -> dict[str, float]:
    """Run so many processes, and return what rank 0 found."""
    port = str(29_700 + 10 * number + size)
    processes = []
    for rank in range(size):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environ = {**MEMORY_KEPT, **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        environ |= {name: str(value) for name, value in world.items()} if size > 1 else {}
        words = [sys.executable, "-m", "benchmarks.forecast", str(rank), str(size), str(folder), str(number)]
        processes.append(subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a process of the benchmark failed; its error stands above")
    found: dict[str, float] = json.loads((folder / f"found-{size}-{number}.json").read_text(encoding="utf-8"))
    return found


def forecast(case: str, alone: dict[int, float], links: Interconnect, size: int, batch: int) -> float:
    """Return the forecast step of a case, from the step of one process at two batch sizes."""
    whole, quarter = alone[BATCH], alone[BATCH // 4]
    sample = (whole - quarter) / (BATCH - BATCH // 4)
    cost = StepCost(sample_seconds=sample, micro_step_seconds=max(0.0, whole - BATCH * sample))
    width, _ = CASES[case]
    work = StepWork(global_batch=batch, micro_batch=batch, gradient_bytes=4 * (width * width + width))
    # Collectives of gloo run on the cores that compute: nothing is hidden.
    return step_time(Pace(cost=cost, links=links, overlap=0.0), work, size).total


def measure() -> dict[str, list[float]]:
    """Return the forecast and measured milliseconds of each round, and by how many percent they differ."""
    with tempfile.TemporaryDirectory() as name:
        sizes = range(1, MOST_PROCESSES + 1)
        return judged([{size: _launched(size, Path(name), number) for size in sizes} for number in range(ROUNDS)])


def judged(rounds: list[dict[int, dict[str, float]]]) -> dict[str, list[float]]:
    """Return forecasts beside what was measured in the same round, by the number of processes."""
    found: dict[str, list[float]] = {}
    num_cores = len(os.sched_getaffinity(0))
    for each in rounds:
        small, large = (each[2][f"all-reduce {size}"] for size in LINK_BYTES)
        rate = (LINK_BYTES[1] - LINK_BYTES[0]) / (large - small)
        hop = max(0.0, small - LINK_BYTES[0] / rate) / 2
        links = Interconnect(bytes_per_second=rate, hop_seconds=hop, num_cores=num_cores)
        _add(found, "all-reduce between two processes (MB/s)", rate / 1e6)
        for case in CASES:
            alone = {batch: each[1][f"{case} {batch}"] for batch in (BATCH, BATCH // 2, BATCH // 4)}
            asked = [(1, BATCH // 2), *((size, BATCH) for size in range(2, MOST_PROCESSES + 1))]
            for size, batch in asked:
                words = f"{case}, {size} process{'es' * (size > 1)}, batch {batch}"
                _add(found, f"{words}: forecast (ms)", 1e3 * forecast(case, alone, links, size, batch))
                _add(found, f"{words}: measured (ms)", 1e3 * each[size][f"{case} {batch}"])
    for words in [name.removesuffix(": forecast (ms)") for name in found if name.endswith(": forecast (ms)")]:
        expected, real = (statistics.median(found[f"{words}: {what} (ms)"]) for what in ("forecast", "measured"))
        found[f"{words}: forecast off by (%)"] = [100 * (expected / real - 1)]
    return found


def _add(found: dict[str, list[float]], name: str, value: float) -> None:
    found.setdefault(name, []).append(value)


def guides() -> dict[str, list[float]]:
    """Return the forecast speedups for the jobs of the guides' tables, beside what these claim."""
    found: dict[str, list[float]] = {}
    for row in _planned(*XRAY, "--for", f"{max(L4_CLAIMS)}xL4"):
        if row["num_devices"] in L4_CLAIMS:
            number = row["num_devices"]
            found |= _beside(f"chest-xray-vqa, full size, {number}xL4", L4_CLAIMS[number], row["speedup"])
    seconds = {}
    for machine in ("1xRTX 3090", *DARKROOM_CLAIMS):
        batch = DARKROOM_BATCH // int(machine.split("x")[0])
        words = (*DARKROOM, "--batch_size", str(batch), "--precision", "fp16", "--for", machine)
        seconds[machine] = _planned(*words)[-1]["step_seconds"]
    for machine, claim in DARKROOM_CLAIMS.items():
        speedup = seconds["1xRTX 3090"] / seconds[machine]
        found |= _beside(f"darkroom, full size, {machine} over 1xRTX 3090", claim, speedup)
    return found


def _planned(*words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "drivetrain", "plan", *words, "--json"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    rows: list[dict[str, Any]] = found["forecast"]["time"]["rows"]
    return rows


def _beside(job: str, claimed: float, forecast: float) -> dict[str, list[float]]:
    off = 100 * (forecast / claimed - 1)
    return {f"{job}: claimed (×)": [claimed], f"{job}: forecast (×)": [forecast], f"{job}: forecast off by (%)": [off]}


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
