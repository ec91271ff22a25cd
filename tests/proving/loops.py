"""A plain distributed loop that does everything right, in small methods. Planted bugs override one of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain.proving import Case


class Loop:
    """Trains a case: weights every micro-batch by its share of what the loss counts, reduces, clips, steps, saves."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.world, self.rank = case.world_size, case.rank

    def __call__(self) -> nn.Module:
        case = self.case
        if self.world > 1:
            dist.init_process_group("gloo")
        torch.manual_seed(case.seed)
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()
        self.scheduler = case.scheduler(self.optimizer)
        self.step = 0
        self.resume()
        self.loaded = self.batches()
        while self.step < case.num_steps:
            self.seed_step()
            self.train_step()
            self.step += 1
            if case.save_every and self.step % case.save_every == 0:
                self.save()
        return self.model

    # Parts

    def make_model(self) -> nn.Module:
        return self.case.model()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self.model)

    def seed_step(self) -> None:
        """Randomness keyed by step and rank, so that it is the same after a restart."""
        torch.manual_seed(self.case.seed * 1000 + self.step * 10 + self.rank)

    def micro_batches(self) -> list[tuple[int, ...]]:
        return self.case.micro_batches(self.step)

    def batches(self) -> Iterator[tuple[tuple[int, ...], Any]]:
        """This rank's micro-batches from here to the end of the run, with the numbers of their samples."""
        chosen = [
            numbers
            for step in range(self.step, self.case.num_steps)
            for numbers in self.case.micro_batches(step)
            if numbers
        ]
        loader = DataLoader(
            self.case.data, batch_sampler=chosen, collate_fn=self.case.collate, num_workers=self.case.num_workers
        )
        return zip(chosen, loader, strict=True)

    # One step

    def train_step(self) -> None:
        self.clear()
        micro_batches = self.micro_batches()
        loss = 0.0
        for number, numbers in enumerate(micro_batches):
            if not numbers:
                continue
            _, batch = next(self.loaded)
            value = self.case.loss(self.model, batch)
            weight = self.weight(batch, numbers, number, len(micro_batches))
            self.backward(value * weight)
            loss += float(value.detach()) * weight
        self.reduce()
        norm = self.clip()
        self.report(loss, norm)
        self.update()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def weight(self, batch: Any, numbers: tuple[int, ...], number: int, num_micro_batches: int) -> float:
        """The share of the step's items that this micro-batch holds."""
        inner = batch["batch"]
        if isinstance(inner, dict) and "labels" in inner:
            every = self.case.batch(self.case.order[self.step])["batch"]["labels"]
            return int((inner["labels"] != -100).sum()) / int((every != -100).sum())
        return len(numbers) / len(self.case.order[self.step])

    def backward(self, value: Tensor) -> None:
        value.backward()  # type: ignore[no-untyped-call]

    def reduce(self) -> None:
        if self.world > 1:
            for parameter in self.model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
            if self.step + 1 < self.case.num_steps:
                self.share_buffers()

    def share_buffers(self) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def clip(self) -> float | None:
        if self.case.clip_norm is None:
            return None
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip_norm))

    def report(self, loss: float, norm: float | None) -> None:
        if self.world > 1:
            total = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(total)
            loss = float(total)
        self.case.recorder.report(self.step, loss=loss, grad_norm=norm)

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    # Checkpoints

    @property
    def path(self) -> Path:
        return self.case.folder / "checkpoint.pt"

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]

    def save(self) -> None:
        if self.rank == 0:
            beside = self.path.with_suffix(".part")
            with beside.open("wb") as file:
                torch.save(self.state(), file)
            beside.replace(self.path)
        if self.world > 1:
            dist.barrier()

    def resume(self) -> None:
        if self.path.exists():
            self.load_state(torch.load(self.path, weights_only=False))


def right(case: Case) -> nn.Module:
    return Loop(case)()
