"""A script for one process per GPU, as people write it: joins the others itself, trains, leaves."""

import asyncio
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from drivetrain.multi_gpu import MultiGPUConfig, create_multi_gpu_trainer, setup_distributed_environment
from tests.multi_gpu.parts import SequenceModel, Sequences


async def train(local_rank: int, folder: str) -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(local_rank)
    await train_together(folder)
    dist.destroy_process_group()


async def train_together(folder: str) -> None:
    config = MultiGPUConfig(
        training_mode="distributed",
        enable_distributed=True,
        backend="nccl",
        sync_bn=True,
        find_unused_parameters=False,
        broadcast_buffers=True,
    )
    trainer = create_multi_gpu_trainer(config=config)
    loader = trainer.setup_dataloader(Sequences(66), batch_size=8, num_workers=0, pin_memory=True)
    torch.manual_seed(dist.get_rank())  # each rank makes other weights; those of rank 0 count
    wrapped = trainer.initialize_training(SequenceModel())
    results = await trainer.train(max_epochs=2, experiment_name="distributed", output_dir=folder, report=False)
    told = {
        "wrapper": type(wrapped).__name__,
        "rank": dist.get_rank(),
        "samples": len(loader.sampler),
        "info": trainer.get_training_info()["distributed_info"],
        "loss": results["final_training_loss"],
        "steps": results["performance_summary"]["num_steps"],
        "weights": float(sum(value.detach().double().sum() for value in trainer.model.parameters())),
    }
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    trainer.cleanup()
    assert dist.is_initialized()  # whoever joined leaves


def trained_in_pool(folder: str) -> None:
    """In processes that have joined each other already, and whose environment does not say so."""
    before = dict(os.environ)
    asyncio.run(train_together(folder))
    assert dict(os.environ) == before


def main_worker(local_rank: int, world_size: int, folder: str) -> None:
    """For `torch.multiprocessing.spawn`, which sets no ranks."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(local_rank)
    asyncio.run(train(local_rank, folder))


def spawned(folder: str) -> None:
    setup_distributed_environment(world_size=2, backend="gloo")
    torch.multiprocessing.spawn(main_worker, args=(2, folder), nprocs=2, join=True)


if __name__ == "__main__":
    asyncio.run(train(int(os.environ["LOCAL_RANK"]), sys.argv[1]))
