"""`--debug` cuts data, batch and length, and nothing else; what flags say goes before it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import Job, configure, train
from drivetrain.run.job_settings import debugged


class Plain(Dataset[Any]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(index)), torch.tensor(index % 2)


TENSORS = TensorDataset(torch.randn(1000, 4), torch.arange(1000) % 2)


def job(data: Any = TENSORS, **changes: Any) -> Job:
    given: dict[str, Any] = {"valid": TENSORS, "epochs": 7, "global_batch": 256} | changes
    return Job(
        name="mine",
        model=lambda: torch.nn.Linear(4, 2),
        data=data,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **given,
    )


@pytest.mark.parametrize("data", [TENSORS, Plain(), [TENSORS[i] for i in range(1000)], DataLoader(Plain(), 32)])
def test_data_of_any_kind_is_cut(data: Any) -> None:
    given = job(data)
    cut = debugged(given, configure(), 2)
    assert (cut.num_samples, cut.global_batch, cut.epochs, cut.name) == (100, 8, 1, "mine-debug")
    for index in (0, 99):
        assert torch.equal(cut.source.dataset[index][0], given.source.dataset[index][0])
    assert len(cut.valid_sets[""].dataset) == 100
    assert cut.num_steps == 13


def test_flags_go_before_it() -> None:
    config = configure(batch_size=16, accumulation_steps=2, epochs=3)
    cut = debugged(job(), config, 1)
    assert (cut.global_batch, cut.epochs) == (32, 7)  # the length is read from the configuration elsewhere
    assert debugged(job(), configure(batch_size=500), 1).num_samples == 500
    assert debugged(job(), configure(max_steps=2), 1).epochs == 7


def test_small_data_stays_whole() -> None:
    cut = debugged(
        job(TensorDataset(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)), global_batch=2), configure(), 1
    )
    assert (cut.num_samples, cut.global_batch) == (3, 3)


def test_what_can_only_be_iterated_is_limited_by_steps() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield torch.zeros(4), torch.tensor(0)

    cut = debugged(job(Endless(), epochs=None, max_steps=10_000, global_batch=2, valid=None), configure(), 1)
    assert (cut.max_steps, cut.global_batch) == (25, 2)
    assert "not cut" in cut.source.notes[0]


def test_a_run(tmp_path: Path) -> None:
    config = configure(debug=True, output_dir=tmp_path, gpu_mode="cpu", gpu_log_interval=0, report=False)
    result = train(job(), config, quiet=True)
    assert result.folder == tmp_path / "mine-debug"
    assert (result.finished, result.steps) == (True, 25)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    assert any("--debug: 100 of 1,000 samples, 4 per step" in note for row in events for note in row.get("notes", ()))
    assert not (result.folder / "gpu.jsonl").exists()  # an interval of 0 writes no rows
