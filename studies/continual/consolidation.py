"""Elastic weight consolidation: weights that earlier tasks needed are held near where those tasks left them.

After each task the Fisher information of every weight is taken, over the task's inputs and the network's *own*
predictions: the mean over samples of Σ over classes of p(class) × (d log p(class) / d weight)². Each task pulls with
strength / 2 × Fisher × (weight − weight then)². The sum of these parabolas over tasks is one parabola around their
weighted mean, plus a constant: so what is kept does not grow, and the gradient is that of all tasks.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

CHUNK = 32  # samples whose gradients are held at once, each for every class


class Consolidated(nn.Module):
    """A network with penalties towards earlier weights. They are saved with the weights, for resumed runs, too."""

    def __init__(self, network: nn.Module, strength: float) -> None:
        super().__init__()
        self.network, self.strength = network, strength
        for name, value in network.named_parameters():
            self.register_buffer(_of("importance", name), torch.zeros_like(value, requires_grad=False))
            self.register_buffer(_of("anchor", name), torch.zeros_like(value, requires_grad=False))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.network(inputs)
        return outputs

    def penalty(self) -> Tensor:
        """Return the penalty to add to a mean loss. 0 before the first task."""
        parts = [
            (self.get_buffer(_of("importance", name)) * (value - self.get_buffer(_of("anchor", name))).square()).sum()
            for name, value in self.network.named_parameters()
        ]
        return self.strength / 2 * torch.stack(parts).sum()

    @torch.no_grad()
    def consolidate(self, inputs: Tensor) -> None:
        """Consolidate after a task, whose inputs these are."""
        found = fisher(self.network, inputs)
        for name, value in self.network.named_parameters():
            importance, anchor = self.get_buffer(_of("importance", name)), self.get_buffer(_of("anchor", name))
            total = importance + found[name]
            mean = (importance * anchor + found[name] * value) / total
            anchor.copy_(torch.where(total > 0, mean, value))  # where nothing pulls, 0 / 0
            importance.copy_(total)


def fisher(network: nn.Module, inputs: Tensor, chunk: int = CHUNK) -> dict[str, Tensor]:
    """Return the diagonal, by name of parameter. The expectation over classes is exact, not sampled."""
    weights = {name: value.detach() for name, value in network.named_parameters()}

    def log_probability(weights: dict[str, Tensor], row: Tensor, is_class: Tensor) -> Tensor:
        logits = functional_call(network, weights, (row.unsqueeze(0),))[0]
        return (functional.log_softmax(logits, -1) * is_class).sum()

    of_a_class = vmap(grad(log_probability), in_dims=(None, None, 0))
    of_samples = vmap(of_a_class, in_dims=(None, 0, None))
    total = {name: torch.zeros_like(value) for name, value in weights.items()}
    for rows in torch.split(inputs, chunk):
        with torch.no_grad():
            probabilities = network(rows).softmax(-1)
        classes = torch.eye(probabilities.shape[1], dtype=rows.dtype, device=rows.device)
        for name, gradients in of_samples(weights, rows, classes).items():
            total[name] += torch.einsum("sc,sc...->...", probabilities, gradients.square()) / len(inputs)
    return total


def _of(what: str, name: str) -> str:
    """Return the name of a buffer, which may have no dots."""
    return f"{what}_{name.replace('.', '_')}"
