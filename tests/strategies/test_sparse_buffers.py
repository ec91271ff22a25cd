"""Models with a sparse buffer, such as the adjacency matrix of a graph."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.core.isolation import copied
from tests.gloo_pool import GlooPool

STEPS, RATE = 5, 0.3
LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def edges() -> Tensor:
    return (torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) > 0.5).double()


class GraphNet(nn.Module):
    """Sums over neighbors, by a matrix of this layout; None: by a dense one that is no buffer."""

    def __init__(self, layout: str | None, *, persistent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner, self.outer = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.dense = edges()
        if layout is not None:
            self.register_buffer("graph", edges().to_sparse(layout=LAYOUTS[layout]), persistent=persistent)

    def forward(self, nodes: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(nodes))
        columns = hidden.transpose(0, 1).flatten(1)
        sums = self.dense @ columns if getattr(self, "graph", None) is None else self.graph @ columns
        result: Tensor = self.outer(sums.view(5, len(nodes), 4).mean(0))
        return result


def data() -> TensorDataset:
    nodes = torch.randn(12, 5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return TensorDataset(nodes, (nodes.sum((1, 2)) > 0).long())


def train(folder: str, layout: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    job = dt.Job(
        name="graph",
        model=lambda: GraphNet(layout),
        data=data(),
        valid=data(),
        valid_every=2,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=RATE),
        global_batch=12,
        max_steps=STEPS,
    )
    config = dt.configure(output_dir=folder, gpu_mode="cpu", batch_size=3, num_workers=0, report=False, **settings)
    result = dt.train(job, config, quiet=True)
    return dict(result.model.state_dict()) if result.is_main else {}


def by_hand() -> dict[str, Tensor]:
    model = GraphNet(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    nodes, labels = data().tensors
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(model(nodes), labels).backward()
        optimizer.step()
    return model.state_dict()


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    **{layout: (1, layout, {}) for layout in LAYOUTS},
    "ddp": (2, "coo", {"parallel_strategy": "ddp"}),
    "fsdp": (2, "csr", {"parallel_strategy": "fsdp"}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_trained_as_by_hand(gloo_pool: GlooPool, tmp_path: Path, name: str) -> None:
    world, layout, settings = CASES[name]
    found = gloo_pool.run(train, str(tmp_path), layout, settings, world=world)[0]
    expected = by_hand()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=0, atol=1e-12), key


def test_one_that_would_be_saved_is_refused(tmp_path: Path) -> None:
    job = dt.Job(
        name="graph",
        model=lambda: GraphNet("coo", persistent=True),
        data=data(),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=RATE),
        global_batch=12,
        max_steps=STEPS,
    )
    with pytest.raises(dt.DrivetrainError, match="graph of the model is a sparse tensor") as caught:
        dt.train(job, dt.configure(output_dir=str(tmp_path), gpu_mode="cpu"), quiet=True)
    assert "persistent=False" in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_has_its_own(layout: str) -> None:
    model = GraphNet(layout)
    copy = copied(model)
    assert copy.graph is not model.graph
    assert torch.equal(copy.graph.to_dense(), model.graph.to_dense())
    assert copy.graph.layout == model.graph.layout
