"""A small network on data of MNIST's size: a step captured by hand against `dt.train` that captures, interleaved.

By hand is as fast as it gets: the data on the device, the whole step with the gather of its batch in one CUDA graph, no
loss looked at. Steps per second are over the last two thirds of a run, from the times at which steps were given to the
device: the queue is full by then, so that the device sets the pace.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure

ROUNDS = 3
STEPS = 6000
BATCH = 128
NUM_SAMPLES = 60_000


def measure() -> dict[str, list[float]]:
    if not torch.cuda.is_available():
        raise SystemExit("capture needs a GPU")
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.rand(NUM_SAMPLES, 784, generator=generator), torch.randint(0, 10, (NUM_SAMPLES,), generator=generator)
    )
    samples: dict[str, list[float]] = {
        "captured by hand (steps per second)": [],
        "drivetrain, captured (steps per second)": [],
        "drivetrain, not captured (steps per second)": [],
    }
    by_hand(data, STEPS // 10), by_drivetrain(data, STEPS // 10, "on")
    for _ in range(ROUNDS):
        hand, captured, plain = (
            by_hand(data, STEPS),
            by_drivetrain(data, STEPS, "on"),
            by_drivetrain(data, STEPS // 4, "off"),
        )
        for values, found in zip(samples.values(), (hand, captured, plain), strict=True):
            values.append(found)
    hand_rates, ours, _ = samples.values()
    samples["drivetrain against by hand (ratio)"] = [b / a for a, b in zip(hand_rates, ours, strict=True)]
    return samples


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def loss_of(network: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(network(batch[0]), batch[1])


def by_hand(data: TensorDataset, steps: int) -> float:
    """Train in bf16, as drivetrain does by itself there; the order is made on the device, once per epoch."""
    torch.manual_seed(0)
    inputs, labels = (tensor.cuda() for tensor in data.tensors)
    network = model().cuda()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True, capturable=True)
    chosen = torch.zeros(BATCH, dtype=torch.int64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(network, (inputs.index_select(0, chosen), labels.index_select(0, chosen)))
        loss.backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    per_epoch = NUM_SAMPLES // BATCH
    order = torch.randperm(NUM_SAMPLES, device="cuda")
    for number in range(steps):
        if number == steps // 3:
            torch.cuda.synchronize()
            began = time.perf_counter()
        place = number % per_epoch
        if place == 0:
            order = torch.randperm(NUM_SAMPLES, device="cuda")
        chosen.copy_(order[place * BATCH : (place + 1) * BATCH])
        graph.replay()
    torch.cuda.synchronize()
    return (steps - steps // 3) / (time.perf_counter() - began)


def by_drivetrain(data: TensorDataset, steps: int, capture: str, **others: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            name="capture",
            model=model,
            data=data,
            loss=loss_of,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
            global_batch=BATCH,
            max_steps=steps,
            checkpoint_every=steps,
        )
        settings: dict[str, Any] = {
            "capture": capture,
            "precision": "bf16",
            "auto_optimize": False,
            "resident": "on",
            "report": False,
            **others,
        }
        result = train(job, configure(output_dir=folder, gpu_mode="single_gpu", **settings), quiet=True)
        rows = [json.loads(line) for line in (Path(result.folder) / "steps.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (Path(result.folder) / "events.jsonl").read_text().splitlines()]
    (finish,) = [event for event in events if event["event"] == "finish"]
    if capture == "on" and "replayed" not in finish["capture"]:
        raise SystemExit(f"nothing was captured: {finish['capture']}")
    kept = rows[steps // 3 :]
    return len(kept) / sum(row["seconds"] for row in kept)
