"""A run whose steps were all skipped has trained nothing, and does not end as if it had."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain as dt
from drivetrain.config import configure
from drivetrain.strategies import StrategyParts
from tests.api.jobs import Variant, Vectors, make_job, make_model, vector_loss
from tests.gloo_pool import GlooPool

VARIANT = Variant("mlp", torch.float32, 12, steps=4, num_samples=24, save_every=2)
WORDS = r"all 4 steps were skipped, since their gradients were not finite: nothing was trained"


def skipping(up_to: int) -> Any:
    """Steps as with infinite gradients in fp16: the first so many leave the weights alone."""
    calls, move = [0], StrategyParts.move

    def moved(self: StrategyParts, *arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        return (None, 1.0) if calls[0] <= up_to else move(self, *arguments, **more)

    return moved


def train(folder: str, strategy: str, up_to: int) -> str:
    """How it ended."""
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False, parallel_strategy=strategy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StrategyParts, "move", skipping(up_to))
        try:
            result = dt.train(make_job(VARIANT), config, quiet=True)
        except dt.DrivetrainError as error:
            return str(error)
    return f"finished: {result.finished}"


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_all_steps_skipped_is_an_error(gloo_pool: GlooPool, tmp_path: Path, strategy: str, world: int) -> None:
    for _ in range(2):  # and still one when it is begun again, with nothing left to do
        for found in gloo_pool.run(train, str(tmp_path), strategy, 4, world=world):
            assert "all 4 steps were skipped" in found
            assert "--precision bf16" in found
    assert not (tmp_path / "suite" / "finished.json").exists()


def test_one_step_that_was_not_skipped_is_enough(tmp_path: Path) -> None:
    assert train(str(tmp_path), "single", 3) == "finished: True"
    rows = [json.loads(line) for line in (tmp_path / "suite" / "steps.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [True, True, True, False]


def test_a_loop_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrategyParts, "move", skipping(4))
    model = make_model(VARIANT)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, report=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = dt.drive(model, optimizer, Vectors(VARIANT), global_batch=12, max_steps=4, config=config, quiet=True)

    def loop() -> None:
        for batch in run:
            run.backward(vector_loss(run.model, batch))
            run.step()

    with pytest.raises(dt.DrivetrainError, match=WORDS):
        loop()
    assert not run.finished
