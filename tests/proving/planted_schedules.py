"""Schedules, parameter groups and starting points that are wrong."""

import torch
import torch.distributed as dist
from torch import nn

from tests.proving.loops import Loop


class ScheduleByWorld(Loop):
    """accelerate#2926, #2142, transformers#24088: the schedule takes a step for every process."""

    def update(self) -> None:
        self.optimizer.step()
        for _ in range(self.world):
            self.scheduler.step()


class ScheduleByMicroBatch(Loop):
    """accelerate#1382: the schedule takes a step for every micro-batch instead of every optimizer step."""

    def update(self) -> None:
        self.optimizer.step()
        share = -(-self.case.global_batch // self.world)
        for _ in range(-(-share // self.case.micro_batch)):
            self.scheduler.step()


class ScheduleAhead(Loop):
    """The scheduler steps before the optimizer, so the first learning rate is never used."""

    def update(self) -> None:
        self.scheduler.step()
        self.optimizer.step()


class EverythingDecays(Loop):
    """One parameter group for everything decays biases and norms, too."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        decay = self.case.job.weight_decay
        return self.case.optimizer([{"params": list(self.model.parameters()), "weight_decay": decay}])


class MomentsLostEachEpoch(Loop):
    """pytorch-lightning#850: the optimizer is made anew at the end of every epoch."""

    def train_step(self) -> None:
        per_epoch = -(-self.case.num_samples // self.case.global_batch)
        if self.step and self.step % per_epoch == 0:
            self.optimizer.state.clear()
        super().train_step()


class OwnStartingWeights(Loop):
    """pytorch-image-models#1519: a seed that differs by rank makes weights differ, too, where none is broadcast."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        torch.manual_seed(self.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
        return model


class OwnBuffers(Loop):
    """pytorch-image-models#110: apex's DDP does not synchronise the buffers of batch norm."""

    def share_buffers(self) -> None:
        pass


class KernelDoesNotRepeat(Loop):
    """Megatron-LM#2369: atomics add in another order in every run."""

    def reduce(self) -> None:
        super().reduce()
        noise = int.from_bytes(open("/dev/urandom", "rb").read(4), "big") / 2**32  # noqa: SIM115, PTH123
        if self.world > 1:
            shared = torch.tensor(noise, dtype=torch.float64)
            dist.broadcast(shared, 0)
            noise = float(shared)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 1 + 1e-6 * noise
