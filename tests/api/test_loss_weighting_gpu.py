"""On a GPU, where the plan divides steps by itself, compiles and captures: a mean over tokens stays one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.checkpoint import Checkpointer
from drivetrain.config import configure
from drivetrain.core.world import World
from drivetrain.data.division import SampleStream
from tests.api.test_loss_weighting import BATCH, SAMPLES, SEED, STEPS, Sentences, Tagger, cross_entropy, total

pytestmark = pytest.mark.gpu


class Dropping(Tagger):
    """With the fused dropout of GPUs, and an LSTM whose dropout is inside cuDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.lstm = nn.Dropout(0.4), nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)

    def forward(self, tokens: Any) -> Any:
        hidden, _ = self.lstm(self.drop(self.embedding(tokens)))
        return self.out(self.mix(hidden))


def run(folder: Path, loss: Any = cross_entropy, model: Any = Tagger, **settings: Any) -> tuple[Any, Any]:
    job = Job(
        name="weighted",
        model=model,
        data=Sentences(),
        loss=loss,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.3),
        global_batch=BATCH,
        max_steps=STEPS,
        seed=SEED,
    )
    result = train(job, configure(output_dir=folder, quiet=True, report=False, **{"precision": "fp32"} | settings))
    checkpoint = Checkpointer(result.folder / "checkpoints", World(), 1).latest()
    assert checkpoint is not None
    return checkpoint, checkpoint.meta["loss"]


def plain_loop(loss: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    model, data = Tagger().cuda(), Sentences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(STEPS):
        epoch, number = divmod(step, -(-SAMPLES // BATCH))
        samples = SampleStream(SAMPLES, SEED).samples(epoch, number * BATCH, min((number + 1) * BATCH, SAMPLES))
        batch = torch.utils.data.default_collate([data[int(sample)] for sample in samples])
        optimizer.zero_grad()
        loss(model, {key: value.cuda() for key, value in batch.items()}).backward()
        optimizer.step()
    return {key: value.cpu() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("loss", [cross_entropy, total])
@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 3}, {"capture": "on"}, {"capture": "on", "resident": "on"}, {"batch_size": 4, "compile": True}],
)
def test_any_division_equals_whole_batches(tmp_path: Path, loss: Any, settings: dict[str, Any]) -> None:
    checkpoint, rule = run(tmp_path, loss, **settings)
    assert rule["by"] == ("tokens" if loss is cross_entropy else "sum")
    for key, value in plain_loop(loss).items():
        assert torch.allclose(checkpoint.read(f"model/{key}"), value, atol=2e-5), key


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_dropout_and_low_precision_do_not_hide_it(tmp_path: Path, precision: str) -> None:
    _, rule = run(tmp_path, model=Dropping, precision=precision)
    assert (rule["by"], rule["holds_division"]) == ("tokens", "")
