"""Shows what docs/benchmarks/prove-trainers.md claims without the prover: only torch and the trainer itself.

`python -m benchmarks.prove_trainers_by_hand [NAME ...]` runs each claim in a process of its own (two with torchrun) and
prints what it saw. The model has one weight, and SGD with a learning rate of 1 makes the step its gradient.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

COUNTS = (1, 2, 4, 3, 1)  # valid tokens of each sample; sample n has tokens of value 10 ** n


class Samples(Dataset[Any]):
    """Five padded samples. The gradient of a token is its value, so that a step shows what counted how much."""

    def __len__(self) -> int:
        return len(COUNTS)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        valid = torch.arange(4) < COUNTS[number]
        return {"values": torch.where(valid, 10.0**number, 0.0), "valid": valid}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, values: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.weight * values).sum() / valid.sum()}


def gradient(samples: list[int]) -> float:
    """The mean over the valid tokens of these samples."""
    return sum(COUNTS[number] * 10.0**number for number in samples) / sum(COUNTS[number] for number in samples)


def expected(first: str) -> None:
    print(f"  whole batches of 4 would step by {gradient([0, 1, 2, 3]):.4f} and {gradient([4]):.4f}")
    means = (gradient([0, 1]) + gradient([2, 3])) / 2
    print(
        f"  means of batches of 2 would step by {means:.4f}, and a last one halved by {gradient([4]) / 2:.4f}; {first}:"
    )


def accelerate_accumulation() -> None:
    from accelerate import Accelerator

    expected("Accelerate steps by")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Samples(), batch_size=2))
    before = 0.0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            after = float(accelerator.unwrap_model(model).weight)
            print(f"  {before - after:.4f}")
            before = after


def lightning_accumulation() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.before = Model(), 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            after = float(self.model.weight.detach())
            if after != self.before:
                print(f"  {self.before - after:.4f}")
            self.before = after

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    expected("Lightning steps by")
    _lightning_trainer(max_epochs=1, accumulate_grad_batches=2).fit(Module(), DataLoader(Samples(), batch_size=2))


def hf_accumulation() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Show(TrainerCallback):  # type: ignore[misc]
        before = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            after = float(more["model"].weight.detach())
            print(f"  {self.before - after:.4f}")
            self.before = after

    expected("the Trainer steps by")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            remove_unused_columns=False,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        Trainer(model, arguments, train_dataset=Samples(), optimizers=(optimizer, schedule), callbacks=[Show()]).train()


def deepspeed_accumulation() -> None:
    import deepspeed

    expected("DeepSpeed steps by, with the epoch's five samples and then the first ones again")
    model = Model()
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    _alone()
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    before = 0.0
    for epoch in range(2):
        for number, batch in enumerate(DataLoader(Samples(), batch_size=2)):
            engine.backward(engine(**batch)["loss"])
            engine.step()
            after = float(model.weight.detach())
            if after != before:
                print(f"  {before - after:.4f} after batch {number + 1} of epoch {epoch + 1}")
            before = after


def deepspeed_resume() -> None:
    """The next random number after a checkpoint, without and with an interruption."""
    import deepspeed

    _alone()
    deepspeed.init_distributed("gloo")
    with tempfile.TemporaryDirectory() as folder:
        for words in ("uninterrupted", "continued"):
            torch.manual_seed(3)
            model = Model()
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
                config={"train_batch_size": 1, "steps_per_print": 10**9},
            )
            if words == "uninterrupted":
                torch.rand(())
                engine.save_checkpoint(folder)
            else:
                engine.load_checkpoint(folder)
            print(f"  {words}: {float(torch.rand(())):.6f}")


def accelerate_schedule() -> None:
    """Two processes: the schedule counts optimizer steps × processes; the order is another; samples come twice."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(3)
    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(list(range(9)), batch_size=4 // accelerator.num_processes, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    rates, seen = [], []
    for batch in loader:
        rates.append(round(optimizer.param_groups[0]["lr"], 4))
        seen.append(sorted(accelerator.gather(batch).tolist()))
        accelerator.backward(model(batch.float(), torch.ones(1))["loss"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        print(f"  {accelerator.num_processes} processes: learning rates {rates}, samples of each step {seen}")


def accelerate_resume() -> None:
    """One process, saved after 2 of 6 batches: the order after load_state, and the next draw."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    def run(folder: str, skip: int, *, seedable: bool) -> tuple[list[Any], float]:
        set_seed(3)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
        data: Any = list(range(12))
        loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True))
        active = loader
        if skip:
            accelerator.load_state(folder)
            active = accelerator.skip_first_batches(loader, skip)
        seen, draw = [], 0.0
        for number, batch in enumerate(active, skip):
            if number == 2:
                draw = float(torch.rand(()))  # what dropout would draw
            seen.append(batch.tolist())
            if number == 1 and not skip:
                accelerator.save_state(folder)
        accelerator.free_memory()
        return seen[2 - skip :], draw

    for seedable in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            print(f"  use_seedable_sampler={seedable}: batches 3-6 and the draw before batch 3")
            print(f"    uninterrupted {run(folder, 0, seedable=seedable)}")
            print(f"    continued     {run(folder, 2, seedable=seedable)}")


def lightning_resume() -> None:
    """One process, saved after 2 of 6 batches: the batches after fit(ckpt_path=...)."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.seen = Model(), []  # type: Model, list[Any]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen.append((self.trainer.global_step, batch.tolist()))
            loss: Tensor = self.model(batch.float(), torch.ones(1))["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    data: Any = list(range(12))
    with tempfile.TemporaryDirectory() as folder:
        for words in ("uninterrupted", "continued"):
            lightning.seed_everything(3, verbose=False)
            module = Module()
            saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
            trainer = _lightning_trainer(max_steps=6, callbacks=[saving], enable_checkpointing=True)
            start = str(Path(folder) / "step=2.ckpt") if words == "continued" else None
            trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True), ckpt_path=start)
            print(f"  {words}: step and samples {module.seen}")


def lightning_processes() -> None:
    """Two processes: the samples of each step of an epoch of nine."""
    import lightning
    import torch.distributed as dist

    world = int(os.environ.get("WORLD_SIZE", "1"))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.seen = Model(), []  # type: Model, list[Any]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen.append(batch.tolist())
            loss: Tensor = self.model(batch.float(), torch.ones(1))["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    lightning.seed_everything(3, verbose=False)
    data: Any = list(range(9))
    module = Module()
    trainer = _lightning_trainer(max_epochs=1, devices=world, strategy="ddp" if world > 1 else "auto")
    trainer.fit(module, DataLoader(data, batch_size=4 // world, shuffle=True))
    parts: list[Any] = [module.seen]
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, module.seen)
    if trainer.is_global_zero:
        print(f"  {world} processes: {[sorted(chain(*step)) for step in zip(*parts, strict=True)]}")


def hf_processes() -> None:
    """Two processes: the samples of each step of an epoch of nine."""
    import torch.distributed as dist
    from transformers import Trainer, TrainingArguments

    world, seen = int(os.environ.get("WORLD_SIZE", "1")), []

    class Module(Model):
        def forward(self, numbers: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            seen.append(numbers.tolist())
            return super().forward(numbers.float(), torch.ones(1))

    data: Any = [{"numbers": number} for number in range(9)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=4 // world,
            seed=3,
            use_cpu=True,
            ddp_backend="gloo" if world > 1 else None,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            remove_unused_columns=False,
        )
        Trainer(Module(), arguments, train_dataset=data).train()
    parts: list[Any] = [seen]
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, seen)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"  {world} processes: {[sorted(chain(*step)) for step in zip(*parts, strict=True)]}")


def ranks_of_unequal_tokens() -> None:
    """Two processes, plain DistributedDataParallel: the mean over ranks of each rank's mean."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    rank = dist.get_rank()
    batch = torch.utils.data.default_collate([Samples()[number] for number in ([0, 1], [2, 3])[rank]])
    model(**batch)["loss"].backward()
    if rank == 0:
        means = (gradient([0, 1]) + gradient([2, 3])) / 2
        seen = float(model.module.weight.grad)
        print(
            f"  DDP gives {seen:.4f}; the mean of means is {means:.4f}, "
            f"and the whole batch has {gradient([0, 1, 2, 3]):.4f}"
        )
    dist.destroy_process_group()


def _alone() -> None:
    """Say that this is the only process; DeepSpeed would ask MPI otherwise."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")


def _lightning_trainer(**changes: Any) -> Any:
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(**{"devices": 1, "enable_checkpointing": False, **quiet, **changes})


ALONE: dict[str, Callable[[], None]] = {
    "accelerate-accumulation": accelerate_accumulation,
    "lightning-accumulation": lightning_accumulation,
    "hf-accumulation": hf_accumulation,
    "deepspeed-accumulation": deepspeed_accumulation,
    "accelerate-processes": accelerate_schedule,
    "lightning-processes": lightning_processes,
    "hf-processes": hf_processes,
    "accelerate-resume": accelerate_resume,
    "lightning-resume": lightning_resume,
    "deepspeed-resume": deepspeed_resume,
}
TOGETHER: dict[str, Callable[[], None]] = {
    "accelerate-processes": accelerate_schedule,
    "lightning-processes": lightning_processes,
    "hf-processes": hf_processes,
    "ddp": ranks_of_unequal_tokens,
}


def main(names: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    for name in names or [*ALONE, *(name for name in TOGETHER if name not in ALONE)]:
        print(f"{name}:", flush=True)
        for table, launcher in ((ALONE, []), (TOGETHER, ["-m", "torch.distributed.run", "--nproc-per-node", "2"])):
            if name in table:
                command = [sys.executable, *launcher, "-m", "benchmarks.prove_trainers_by_hand", "--here", name]
                _show(subprocess.run(command, env=environment, capture_output=True, text=True, check=False))


def _show(ended: subprocess.CompletedProcess[str]) -> None:
    lines = [line for line in ended.stdout.splitlines() if line.startswith("  ")]
    print("\n".join(lines) if ended.returncode == 0 else f"  failed:\n{ended.stderr[-1500:]}", flush=True)


@contextlib.contextmanager
def _process_group_ended() -> Iterator[None]:
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        with _process_group_ended():
            found = TOGETHER if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ALONE
            found[sys.argv[2]]()
    else:
        main(sys.argv[1:])
