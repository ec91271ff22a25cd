"""`model(**batch).loss` of `transformers` with padding: any division trains like whole batches, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.checkpoint import Checkpointer
from drivetrain.config import configure
from drivetrain.core.world import World
from drivetrain.data.division import SampleStream
from tests.api.tiny_transformers import ARCHITECTURES, SAMPLES, data_of, loss, make
from tests.gloo_pool import GlooPool

BATCH, STEPS, SEED = 8, 3, 2
QUICK = ("gpt2", "llama", "bert", "t5", "bert tokens")  # one of each kind of head, and the one most people train


def job_of(name: str) -> Job:
    return Job(
        name="transformer",
        model=make(name),
        data=data_of(name),
        loss=loss,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.5),
        global_batch=BATCH,
        max_steps=STEPS,
        seed=SEED,
    )


def trained(folder: str, name: str, micro_batch: int, **settings: Any) -> tuple[float, dict[str, Any], dict[str, Any]]:
    torch.set_num_threads(1)
    config = configure(output_dir=Path(folder), batch_size=micro_batch, quiet=True, report=False, **settings)
    result = train(job_of(name), config)
    checkpoint = Checkpointer(result.folder / "checkpoints", World(), 1).latest()
    assert checkpoint is not None
    weights = {key: checkpoint.read(key) for key in checkpoint.keys if key.startswith("model/")}
    return 0.0 if result.last is None else result.last.loss, weights, checkpoint.meta["loss"]


def plain_loop(name: str) -> tuple[float, dict[str, Any]]:
    """Whole batches: every token that counts has the same weight."""
    job = job_of(name)
    torch.manual_seed(SEED)
    model = job.model().train()  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for step in range(STEPS):
        samples = SampleStream(SAMPLES, SEED).samples(0, step * BATCH, (step + 1) * BATCH)
        value = loss(model, torch.utils.data.default_collate([job.data[int(sample)] for sample in samples]))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return float(value.detach()), {f"model/{key}": tensor for key, tensor in model.state_dict().items()}


def difference(name: str, found: tuple[float, dict[str, Any], dict[str, Any]]) -> float:
    """The largest difference of the last loss and of all weights from the plain loop's; checks what is counted."""
    final_loss, weights, rule = found
    reference, expected = plain_loop(name)
    assert rule["by"] == "tokens", rule
    assert rule["count"]["path"] == ["labels"]
    assert rule["count"]["part"] == ("from the second" if ARCHITECTURES[name][2] == "causal" else "all")
    of_weights = max(float((weights[key] - expected[key]).abs().max()) for key in weights)
    return max(abs(final_loss - reference), of_weights)


@pytest.mark.parametrize("name", QUICK)
def test_micro_batches_equal_whole_batches(tmp_path: Path, name: str) -> None:
    assert difference(name, trained(str(tmp_path), name, 2)) < 1e-9


KINDS = {
    "bert question answering": ("samples", ""),
    "bert classification": ("samples", ""),
    "mixtral with router loss": ("samples", "the loss is not a mean or a sum over samples"),
}


@pytest.mark.parametrize("name", KINDS)
def test_other_heads_are_called_what_they_are(tmp_path: Path, name: str) -> None:
    _, _, rule = trained(str(tmp_path), name, 2)
    assert rule["by"] == KINDS[name][0]
    assert rule["holds_division"].startswith(KINDS[name][1])
    assert bool(rule["holds_division"]) == bool(KINDS[name][1])


@pytest.mark.soak
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("micro_batch", [1, 2, 8])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_division_equals_whole_batches(
    gloo_pool: GlooPool, tmp_path: Path, name: str, micro_batch: int, world: int
) -> None:
    assert difference(name, gloo_pool.run(trained, str(tmp_path), name, micro_batch, world=world)[0]) < 1e-9
