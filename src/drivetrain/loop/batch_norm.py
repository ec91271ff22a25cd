"""Computes the statistics of batch-norm layers anew, over training samples, for weights that no step has trained."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from drivetrain.core.hook import settlement_of
from drivetrain.core.isolation import buffers_kept
from drivetrain.core.logged import collecting
from drivetrain.core.precision import Precision
from drivetrain.core.widths import widened
from drivetrain.core.world import World
from drivetrain.data.loader import Loader
from drivetrain.loop.validation import micro_batches, seed_validation
from drivetrain.strategies.base import LossFunction
from drivetrain.strategies.ema import batch_norms, statistics_of


class BatchNormPass:
    """Runs the model over samples as in training, and averages what its batch-norm layers see, over all ranks.

    The statistics are means over the samples' batches. Layers in evaluation mode keep theirs. Weights and
    buffers are left as they were. All ranks call it together.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        make_loader: Callable[[], Loader],
        precision: Precision,
        world: World,
        seed: int,
    ) -> None:
        self._model, self._loss, self._make_loader = model, loss, make_loader
        self._precision, self._world, self._seed = precision, world, seed
        self._loader: Loader | None = None

    @torch.no_grad()
    def __call__(self) -> Sequence[Tensor]:
        """Return the running mean and variance of each layer in turn, for the weights that are in the model now."""
        self._loader = self._loader or self._make_loader()
        model = self._model
        layers = batch_norms(model)
        is_frozen = [not layer.training for layer in layers for _ in range(2)]  # in evaluation mode during training
        live = [buffer for layer in layers for buffer in statistics_of(layer)]
        sums = [widened(torch.zeros_like(buffer)) for buffer in live]
        count = widened(torch.zeros((), device=live[0].device))
        momenta = [(layer, layer.momentum) for layer in layers]
        seed_validation(self._seed)
        try:
            for layer in layers:
                layer.momentum = 1.0  # type: ignore[assignment]  # what it keeps is then the batch's own
            with buffers_kept(model):
                for micro in micro_batches(self._loader):
                    with collecting(), self._precision.around_forward() or nullcontext():
                        self._loss(model, micro.batch)
                    if micro.weight:
                        torch._foreach_add_(sums, [widened(buffer) for buffer in live], alpha=micro.num_samples)
                        count += micro.num_samples
        finally:
            settlement_of(model).forget()
            for layer, momentum in momenta:
                layer.momentum = momentum
        together = self._world.all_reduce(torch.cat([count.reshape(1), *(total.flatten() for total in sums)]))
        parts = torch.split(together[1:] / together[0], [total.numel() for total in sums])
        return [
            buffer if frozen else part.view_as(buffer)
            for part, buffer, frozen in zip(parts, live, is_frozen, strict=True)
        ]
