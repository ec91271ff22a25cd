"""Parameters that are unfrozen, frozen, replaced, added or removed while a run is under way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain as dt
from drivetrain.config import configure
from tests.api.jobs import Variant, Vectors, make_job, make_model, vector_loss

VARIANT = Variant("mlp", torch.float32, 12, steps=6, num_samples=60, save_every=2)


def frozen_model() -> nn.Module:
    model = make_model(VARIANT)
    model.get_submodule("layers.0").requires_grad_(False)
    return model


def unfreeze(model: nn.Module) -> None:
    model.get_submodule("layers.0").requires_grad_(True)


def freeze(model: nn.Module) -> None:
    model.get_submodule("layers.3").requires_grad_(False)


def replace(model: nn.Module) -> None:
    model.get_submodule("layers.3").weight = nn.Parameter(torch.zeros(24, 24))


def add(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2)


def remove(model: nn.Module) -> None:
    del model.get_submodule("layers.3").bias


class Change:
    """Changes the model after a step, and again when it is told of a checkpoint after that."""

    every = 1

    def __init__(self, change: Callable[[nn.Module], None], at: int) -> None:
        self.change, self.at = change, at

    def __call__(self, context: dt.StepContext) -> None:
        if context.step == self.at:
            self.change(context.model)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def train(folder: Path, **changes: Any) -> dt.Result:
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False)
    return dt.train(make_job(VARIANT, **{"model": frozen_model, **changes}), config, quiet=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            unfreeze,
            r"requires_grad of layers\.0\.weight was set after training had begun: what trains was settled before",
        ),
        (freeze, r"requires_grad of layers\.3\.weight was cleared after training had begun"),
        (replace, r"layers\.3\.weight was replaced by another tensor"),
        (add, r"extra\.weight was added to the model"),
        (remove, r"layers\.3\.bias was taken out of the model"),
    ],
)
def test_a_hook_that_changes_what_is_trained_is_refused(
    tmp_path: Path, change: Callable[[nn.Module], None], words: str
) -> None:
    with pytest.raises(dt.DrivetrainError, match=words) as caught:
        train(tmp_path, hooks=[Change(change, at=3)])
    assert "init_from" in caught.value.remedy
    rows = (tmp_path / "suite" / "steps.jsonl").read_text().splitlines()
    assert len(rows) == 3, "at the step boundary where it happened"


def test_a_loss_that_unfreezes_is_refused_at_the_next_save(tmp_path: Path) -> None:
    reached: list[nn.Module] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if reached:
            unfreeze(model)
        return vector_loss(model, batch)

    class Rarely(Change):
        every = 3  # it does not run again before the next save

    with pytest.raises(dt.DrivetrainError, match=r"requires_grad of layers\.0\.weight was set"):
        train(tmp_path, loss=loss, hooks=[Rarely(reached.append, at=3)])
    assert [path.name for path in (tmp_path / "suite" / "checkpoints").glob("step-*")] == ["step-00000002"]


def test_a_hook_that_unfreezes_when_it_is_loaded_is_refused(tmp_path: Path) -> None:
    model: list[nn.Module] = []

    def made() -> nn.Module:
        model[:] = [frozen_model()]
        return model[0]

    class Late(Change):
        def __call__(self, context: dt.StepContext) -> None:
            if context.step == self.at:
                raise RuntimeError("planted")

        def load_state_dict(self, state: Any) -> None:
            self.change(model[0])

    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, model=made, hooks=[Late(unfreeze, at=3)])
    with pytest.raises(dt.DrivetrainError, match=r"requires_grad of layers\.0\.weight was set"):
        train(tmp_path, model=made, hooks=[Late(unfreeze, at=0)])


def drive(folder: Path, model: nn.Module, change: Callable[[nn.Module], None], at: int) -> Any:
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    run = dt.drive(
        model,
        optimizer,
        Vectors(VARIANT),
        global_batch=12,
        max_steps=6,
        checkpoint_every=2,
        config=config,
        quiet=True,
    )
    for batch in run:
        if run.steps == at:
            change(model)
        run.backward(vector_loss(run.model, batch))
        run.step()
    return run


def test_a_loop_of_ones_own_that_unfreezes_is_refused_in_that_step(tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match=r"requires_grad of layers\.0\.weight was set"):
        drive(tmp_path, frozen_model(), unfreeze, at=2)
    rows = (tmp_path / "drive" / "steps.jsonl").read_text().splitlines()
    assert len(rows) == 2


def test_a_loop_of_ones_own_may_freeze_and_is_told_what_that_means(tmp_path: Path) -> None:
    run = drive(tmp_path, make_model(VARIANT), freeze, at=2)
    assert run.finished
    events = [json.loads(line) for line in (tmp_path / "drive" / "events.jsonl").read_text().splitlines()]
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert len(notes) == 1
    assert "requires_grad of layers.3.weight was cleared" in notes[0]
