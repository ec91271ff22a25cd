"""A graph network over molecules of one size: gathers, scatters and small products."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals import Pace, Workload

WORDS = "message passing of 5 rounds, width 128, graphs of 32 nodes and 96 edges"


class Round(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        sent = self.message(torch.cat([nodes[sources], nodes[targets]], 1))
        received = torch.zeros_like(nodes, dtype=sent.dtype).index_add(0, targets, sent)
        changed: Tensor = self.norm(nodes + self.update(torch.cat([nodes, received], 1)))
        return changed


class GraphNet(nn.Module):
    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(16, width)
        self.rounds = nn.ModuleList(Round(width) for _ in range(rounds))
        self.head = nn.Linear(width, 1)

    def forward(self, kinds: Tensor, edges: Tensor) -> Tensor:
        graphs, size = kinds.shape
        first = torch.arange(graphs, device=kinds.device)[:, None] * size
        sources, targets = (edges[:, 0] + first).flatten(), (edges[:, 1] + first).flatten()
        nodes = self.kinds(kinds.flatten())
        for each in self.rounds:
            nodes = each(nodes, sources, targets)
        found: Tensor = self.head(nodes.view(graphs, size, -1).mean(1))
        return found


def workload(smoke: bool) -> Workload:
    width, rounds, size, num_edges, num_samples = (8, 2, 4, 6, 96) if smoke else (128, 5, 32, 96, 16_384)

    def data() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        kinds = torch.randint(0, 16, (num_samples, size), generator=generator)
        edges = torch.randint(0, size, (num_samples, 2, num_edges), generator=generator)
        return kinds, edges, torch.randn(num_samples, 1, generator=generator)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0], batch[1]).float(), batch[2])

    return Workload(
        model=lambda: GraphNet(width, rounds),
        loss=loss,
        data=data,
        global_batch=16 if smoke else 256,
        pace=Pace(2, 2, 2) if smoke else Pace(100, 50, 8),
        job_steps=40 if smoke else 20_000,
    )
