"""Gradients that are wrong: weighting, scale, reduction, clearing, clipping. Each bug was somebody's release."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.proving.loops import Loop


class MeanOfMeans(Loop):
    """transformers#34191, trl#2175: every micro-batch's token mean counts alike, however many tokens it has."""

    def weight(self, batch: Any, numbers: tuple[int, ...], number: int, num_micro_batches: int) -> float:
        return 1 / num_micro_batches / self.world


class RanksCountAlike(Loop):
    """Megatron-LM#7452: ranks with unequal token counts are averaged as if they had the same number."""

    def weight(self, batch: Any, numbers: tuple[int, ...], number: int, num_micro_batches: int) -> float:
        own = [n for micro_batch in self.case.micro_batches(self.step) for n in micro_batch]
        labels = self.case.batch(own)["batch"]["labels"]
        return int((batch["batch"]["labels"] != -100).sum()) / int((labels != -100).sum()) / self.world


class SamplesInsteadOfTokens(Loop):
    """verl#5625: micro-batches weigh by their sequences while the loss is a mean over tokens."""

    def weight(self, batch: Any, numbers: tuple[int, ...], number: int, num_micro_batches: int) -> float:
        return len(numbers) / len(self.case.order[self.step])


class FixedDivisor(Loop):
    """pytorch-lightning#19987, ms-swift#10084: a window of fewer micro-batches is divided by the configured number."""

    def weight(self, batch: Any, numbers: tuple[int, ...], number: int, num_micro_batches: int) -> float:
        share = -(-self.case.global_batch // self.world)
        return 1 / -(-share // self.case.micro_batch) / self.world


class NotDivided(Loop):
    """pytorch-lightning#87, nanoGPT#206: micro-batches' gradients are added up and never divided."""

    def weight(self, batch: Any, numbers: tuple[int, ...], number: int, num_micro_batches: int) -> float:
        right = super().weight(batch, numbers, number, num_micro_batches)
        share = -(-self.case.global_batch // self.world)
        return right * -(-share // self.case.micro_batch)


class SummedOverRanks(Loop):
    """transformers#40799: the step's loss is summed over processes after it was divided for one of them."""

    def weight(self, batch: Any, numbers: tuple[int, ...], number: int, num_micro_batches: int) -> float:
        return super().weight(batch, numbers, number, num_micro_batches) * self.world


class DividedTwice(Loop):
    """transformers#34645: averaging over ranks is applied to a loss that was already divided by the global count."""

    def reduce(self) -> None:
        super().reduce()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.world


class OneTensorDoubled(Loop):
    """pytorch#160285: gradients of parameters that two groups hold are reduced by both."""

    def reduce(self) -> None:
        super().reduce()
        if self.world > 1:
            weight = dict(self.model.named_parameters())["hidden.weight"]
            assert weight.grad is not None
            dist.all_reduce(weight.grad)


class NotReduced(Loop):
    """minimind#853, RAE#40: the forward bypasses the DDP wrapper, so nothing is ever reduced."""

    def reduce(self) -> None:
        if self.world > 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= self.world


class OneTensorNotReduced(Loop):
    """pytorch#112152: DDP with unused or toggled parameters leaves some gradients local, without a word."""

    def reduce(self) -> None:
        weight = dict(self.model.named_parameters())["head.bias"]
        assert weight.grad is not None
        own = weight.grad.clone()
        super().reduce()
        weight.grad = own


class LastMicroBatchOnly(Loop):
    """DeepSpeed#7981: with several backwards per step, only the last one's gradients reach the optimizer."""

    def backward(self, value: Tensor) -> None:
        self.optimizer.zero_grad()
        super().backward(value)


class FirstMicroBatchLost(Loop):
    """DeepSpeed#7718: ZeRO-2 drops the gradients of the first micro-batch of a window."""

    def train_step(self) -> None:
        self.seen = 0
        super().train_step()

    def backward(self, value: Tensor) -> None:
        super().backward(value)
        self.seen += 1
        if self.seen == 1 and len(self.micro_batches()) > 1:
            self.optimizer.zero_grad()


class SecondUseLost(Loop):
    """DeepSpeed#8224: the gradient of a submodule is lost where it is used in a way that hooks do not see."""

    def reduce(self) -> None:
        super().reduce()
        dict(self.model.named_parameters())["hidden.weight"].grad = None


class NotCleared(Loop):
    """accelerate#641: a wrapped zero_grad is skipped outside of its context, and old gradients stay."""

    def clear(self) -> None:
        pass


class ReducedInLowPrecision(Loop):
    """accelerate#3979: the upcast to float32 silently does nothing, and gradients are rounded to bfloat16."""

    def reduce(self) -> None:
        super().reduce()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)


class ClippedPerMicroBatch(Loop):
    """transformers#1563, diffusers#721: clipping stands behind every backward instead of before the step."""

    def backward(self, value: Tensor) -> None:
        before = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad()
        super().backward(value)
        if self.case.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip_norm)
        for name, parameter in self.model.named_parameters():
            if name in before:
                assert parameter.grad is not None
                parameter.grad += before[name]

    def clip(self) -> float | None:
        return None


class ClippedPerRank(Loop):
    """Automodel#3816: every group clips by its own norm before gradients are reduced."""

    def reduce(self) -> None:
        if self.case.clip_norm is not None:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad *= self.world
            nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip_norm)
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad /= self.world
        super().reduce()

    def clip(self) -> float | None:
        return None


class NormLeavesSomeOut(Loop):
    """Megatron-LM#5916: the norm of all gradients omits the experts' where two kinds of parallelism meet."""

    def clip(self) -> float | None:
        if self.case.clip_norm is None:
            return None
        parameters = list(self.model.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters[1:] if p.grad is not None])
        nn.utils.clip_grads_with_norm_(parameters, self.case.clip_norm, norm)
        return float(norm)


class NormsAveraged(Loop):
    """DeepSpeed#8475: the ranks' norms are averaged instead of the norm of the reduced gradient taken."""

    def reduce(self) -> None:
        own = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if self.world > 1:
            dist.all_reduce(own)
        self.norm = own / self.world
        super().reduce()

    def clip(self) -> float | None:
        if self.case.clip_norm is None:
            return None
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.case.clip_norm, self.norm)
        return float(self.norm)


class ClippedWhileScaled(Loop):
    """pytorch/examples#1196: gradients are clipped before the loss scale is taken out of them."""

    def clip(self) -> float | None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, 1024.0)
        norm = super().clip()
        torch._foreach_div_(gradients, 1024.0)
        return norm


class LossDividedInLog(Loop):
    """pytorch-lightning#2569: what is logged is the loss divided by the number of micro-batches."""

    def report(self, loss: float, norm: float | None) -> None:
        super().report(loss / len(self.micro_batches()), norm)
