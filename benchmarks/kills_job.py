"""The job of `benchmarks.kills`: in drivetrain (`ours`), and by hand with DDP and distributed checkpoints (`plain`).

Run as a script: ours|plain FOLDER. The same model, data, optimizer and number of samples per step; every rank writes
down which samples each step had. A step takes `PAUSE` seconds at least. A file FOLDER/stop ends the plain one.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import drivetrain as dt

NUM_SAMPLES, GLOBAL_BATCH, SAVE_EVERY = 4800, 48, 20
PAUSE = float(os.environ.get("PAUSE", "0.1"))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs[:, :3].sum(1) > 0).long(), torch.arange(NUM_SAMPLES))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2)).double()


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


class Diary:
    """Writes down the samples of every step of a rank."""

    every = 1

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.attempt = 0  # the process of rank 0, which tells attempts apart

    def write(self, rank: int, step: int, numbers: Tensor) -> None:
        with (self._folder / f"diary-{rank}").open("a") as file:
            file.write(f"{step} {time.monotonic()} {self.attempt} {','.join(map(str, numbers.tolist()))}\n")
        time.sleep(PAUSE)

    def __call__(self, context: dt.StepContext) -> None:
        self.attempt = self.attempt or int(context.world.agree(os.getpid()))
        self.write(context.world.rank, context.step, context.batch()[2])

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def ours(folder: Path) -> None:
    job = dt.Job(
        name="kills",
        model=make_model,
        data=make_data(),
        loss=loss_of,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        hooks=[Diary(folder)],
        global_batch=GLOBAL_BATCH,
        max_steps=1_000_000,
        checkpoint_every=SAVE_EVERY,
    )
    # By rule, as what is measured here is not the plan: 32 ranks that compile at once on one machine take minutes.
    settings = {"output_dir": folder / "runs", "num_workers": 0, "gpu_mode": "cpu", "report": False}
    dt.train(job, dt.configure(**settings, auto_optimize=False))


def plain(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, diary, latest = make_data(), Diary(folder), folder / "latest"
    first = torch.tensor(os.getpid())
    dist.broadcast(first, 0)
    diary.attempt = int(first)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, seed=0)
    loader = DataLoader(data, GLOBAL_BATCH // world, sampler=sampler)
    per_epoch, step = len(loader), 0
    if latest.exists():
        step = int(latest.read_text())
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder / f"step-{step}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    while True:
        sampler.set_epoch(step // per_epoch)
        for number, batch in enumerate(loader):
            if number < step % per_epoch:
                continue
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            step += 1
            diary.write(rank, step, batch[2])
            wants_stop = torch.tensor(float((folder / "stop").exists()))
            dist.all_reduce(wants_stop)
            if step % SAVE_EVERY == 0 or wants_stop:
                weights, moments = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{step}")
                if rank == 0:
                    (folder / "latest.new").write_text(str(step))
                    (folder / "latest.new").replace(latest)
                dist.barrier()
            if wants_stop:
                dist.destroy_process_group()
                return
            if step % per_epoch == 0:
                break


if __name__ == "__main__":
    {"ours": ours, "plain": plain}[sys.argv[1]](Path(sys.argv[2]))
