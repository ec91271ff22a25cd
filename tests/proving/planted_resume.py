"""Checkpoints that do not hold everything, or cannot be read back."""

from typing import Any

import torch
import torch.distributed as dist

from tests.proving.loops import Loop
from tests.proving.planted_data import OwnOrder


class OptimizerNotRestored(Loop):
    """transformers#23034: the optimizer's state is not in the checkpoint."""

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        self.step = state["step"]


class ScheduleNotRestored(Loop):
    """transformers#25852: the scheduler is not saved, and warms up again."""

    def load_state(self, state: dict[str, Any]) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.step = state["step"]


class StepCountLost(Loop):
    """flashoptim#3: the moments come back, and the count that corrects their bias does not."""

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        for values in self.optimizer.state.values():
            values["step"] = torch.zeros_like(values["step"])


class EpochBeginsAnew(OwnOrder):
    """accelerate#3996, EasyR1#57: the sampler's place is not saved, and the epoch is read from its start."""

    offset = 0

    def chosen(self, step: int) -> list[tuple[int, ...]]:
        return super().chosen(min(step - self.offset, self.case.num_steps - 1))

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.offset = self.step


class FirstEpochsOrder(OwnOrder):
    """accelerate#4195: a continued run has the right position in the order of epoch 0."""

    resumed = False

    def chosen(self, step: int) -> list[tuple[int, ...]]:
        return super().chosen(step % self.per_epoch if self.resumed else step)

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.resumed = True


class EpochSkipped(Loop):
    """verl#7401: continuing from an epoch's end skips steps, and the run ends early with exit code 0."""

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.step += 2


class GeneratorNotRestored(Loop):
    """torchtitan and Lightning save no generator state: dropout goes on from another place."""

    def seed_step(self) -> None:
        pass


class BuffersNotSaved(Loop):
    """pytorch#63916: buffers that are assigned anew fall out of what is synchronised and saved."""

    def load_state(self, state: dict[str, Any]) -> None:
        buffers = {name for name, _ in self.model.named_buffers()}
        kept = {name: value for name, value in self.model.state_dict().items() if name in buffers}
        super().load_state({**state, "model": {**state["model"], **kept}})


class SavedInPlace(Loop):
    """A checkpoint is written over the last one, and a kill leaves neither."""

    def save(self) -> None:
        if self.rank == 0:
            with self.path.open("wb") as file:
                file.write(b"not yet")
                file.flush()
                with (self.case.folder / "lock").open("w"):
                    pass
                file.seek(0)
                torch.save(self.state(), file)
        if self.world > 1:
            dist.barrier()
