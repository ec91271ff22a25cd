"""What a save costs the steps around it: beside training against waiting for it, a save every 20 steps, interleaved.

`saving` is GPT-2 124M with AdamW in bf16 on a GPU: 1.5 GB per checkpoint. `saving-cpu` is a network of 8 million
weights on the CPU, 100 MB per checkpoint, where the thread that writes takes its share of the cores. A step is long
enough for a save to end before the next one is due; were it not, the next would wait, and `waited` would say so.

Of each save beside training a line is printed: the longest gap between two micro-steps after it. `saving-explained`
says, too, what both threads were doing then; looking at them takes a share of the time itself.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from benchmarks import gpt2
from benchmarks.threads import Threads
from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.checkpoint import Shard
from drivetrain.checkpoint.staging import Staging
from drivetrain.config import configure

ROUNDS = 2
EVERY = 20
WARM_UP = 5
BESIDE = "beside training"
RUNS = ((BESIDE, True, 80), ("waiting", False, 40), (BESIDE, True, 80))  # in this order; with the steps of each

Loss = Callable[[nn.Module, Any], Tensor]


def measure(*, explains: bool = False) -> dict[str, list[float]]:
    """Measure on a GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("saving needs a GPU; saving-cpu does not")
    micro_batches = 8
    num_samples = gpt2.BATCH * micro_batches * 4
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, gpt2.VOCABULARY, (num_samples, gpt2.CONTEXT + 1), generator=generator)
    data = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    settings = {"gpu_mode": "single_gpu", "precision": "bf16", "batch_size": gpt2.BATCH, "capture": "off"}
    return {
        **_both_ways_to_copy(),
        **_compare(gpt2.Gpt2, gpt2.loss_of, data, gpt2.BATCH * micro_batches, micro_batches, settings, explains),
    }


def measure_explained() -> dict[str, list[float]]:
    return measure(explains=True)


def _both_ways_to_copy() -> dict[str, list[float]]:
    """Measure for how long a copy of the state holds up the stream that trains, and the host."""
    model = gpt2.Gpt2().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shards = [Shard.whole(name, value) for name, value in model.state_dict().items()]
    for number, state in enumerate(optimizer.state.values()):
        shards += [Shard.whole(f"{number}/{name}", value) for name, value in state.items()]
    samples: dict[str, list[float]] = {}
    for way, clones in (("cloned on the device", True), ("copied while training waits", False)):
        staging = Staging(clones=clones)
        began = time.perf_counter()
        staging.prepare(shards)
        samples[f"{way}: getting the memory, once (ms)"] = [1e3 * (time.perf_counter() - began)]
        for _ in range(1 + 5 * ROUNDS):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            before.record()
            began = time.perf_counter()
            staging.take(shards)
            host = time.perf_counter() - began
            after.record()
            staging.until_copied()
            whole = time.perf_counter() - began
            torch.cuda.synchronize()
            for name, value in (
                ("training stream (ms)", before.elapsed_time(after)),
                ("host (ms)", 1e3 * host),
                ("until it is in host memory (ms)", 1e3 * whole),
            ):
                samples.setdefault(f"{way}: {name}", []).append(value)
    return {name: values[1:] if len(values) > 1 else values for name, values in samples.items()}  # without the first


def measure_on_cpu() -> dict[str, list[float]]:
    data = TensorDataset(torch.randn(4096, 1024), torch.randint(0, 10, (4096,)))
    return _compare(_network, _classify, data, 64, 1, {"gpu_mode": "cpu"})


def _network() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def _classify(network: nn.Module, batch: list[Tensor]) -> Tensor:
    return functional.cross_entropy(network(batch[0]), batch[1])


def _compare(
    model: Callable[[], nn.Module],
    loss: Loss,
    data: TensorDataset,
    global_batch: int,
    micro_batches: int,
    settings: dict[str, Any],
    explains: bool = False,
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for way, beside, num_steps in RUNS:
        marks: list[float] = []

        def timed_loss(network: nn.Module, batch: Any, marks: list[float] = marks) -> Tensor:
            marks.append(time.perf_counter())
            return loss(network, batch)

        watched = Threads() if explains else nullcontext()
        with tempfile.TemporaryDirectory() as folder, watched as threads:
            job = Job(
                name="saving",
                model=model,
                data=data,
                loss=timed_loss,
                optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4),
                global_batch=global_batch,
                max_steps=num_steps,
                checkpoint_every=EVERY,
                keep_last=1,
            )
            # How a step is run is fixed: what is compared is saving.
            config = configure(
                output_dir=folder, async_save=beside, compile=False, auto_optimize=False, report=False, **settings
            )
            train(job, config, quiet=True)
            events = _checkpoints(Path(folder) / "saving" / "events.jsonl")
        marks = marks[-num_steps * micro_batches :]
        for name, value in _figures(marks[::micro_batches], events, num_steps):
            samples.setdefault(f"{way}: {name}", []).append(value)
        if beside:
            samples.setdefault(f"{way}: longest extra time between micro-steps around a save (ms)", []).extend(
                _gaps(marks, micro_batches, num_steps, threads)
            )
    return samples


def _gaps(marks: list[float], micro_batches: int, num_steps: int, threads: Threads | None) -> list[float]:
    """Return the longest gap after each save, and a line about it."""
    gaps = [(after - before, before) for before, after in pairwise(marks)]
    usual = statistics.median(gap for gap, _ in gaps[WARM_UP * micro_batches : (EVERY - 1) * micro_batches])
    found = []
    for number, saved in enumerate(range(EVERY, num_steps, EVERY)):
        after = gaps[saved * micro_batches - 1 : (saved + EVERY) * micro_batches - 1]
        longest, began = max(after)
        found.append(1e3 * (longest - usual))
        which = "first" if number == 0 else "later"
        then = "" if threads is None else f"; then {threads.between(began, began + longest)}"
        print(
            f"  {which} save, of step {saved}: longest gap {found[-1]:.1f} ms more than the usual {1e3 * usual:.1f}, "
            f"{began - after[0][1]:.3f} s after it began{then}"
        )
    return found


def _checkpoints(path: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event["event"] == "checkpoint"]


def _figures(starts: list[float], events: list[dict[str, Any]], num_steps: int) -> list[tuple[str, float]]:
    """Return the figures of one run. A step lasts from its first forward to the next step's, whatever is between."""
    steps = [after - before for before, after in pairwise(starts)]
    usual = statistics.median(steps[WARM_UP : EVERY - 1])
    figures = [("usual step (ms)", usual * 1e3)]
    for saved in range(EVERY, num_steps, EVERY):
        extra = [1e3 * (seconds - usual) for seconds in steps[saved - 1 : saved - 1 + EVERY]]
        figures.append(("longest extra time of a step around a save (ms)", max(extra)))
        figures.append(("extra time of all steps until the next save (ms)", sum(extra)))
    for event in events:
        if event["step"] < num_steps:
            figures.append(("until it is on the disk (ms)", 1e3 * event["seconds"]))
            if "waited_seconds" in event:
                figures.append(("copying (ms)", 1e3 * (event["stalled_seconds"] - event["waited_seconds"])))
                figures.append(("waited for the save before (ms)", 1e3 * event["waited_seconds"]))
    return figures
