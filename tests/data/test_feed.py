"""Batches of every structure, and the feed's order of things. What it does on a GPU: test_feed_gpu.py."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.data.batch import MicroBatch, map_tensors, moved, to_device
from drivetrain.data.feed import NoFeed, feed_for, one_ahead
from drivetrain.job import Job

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    image: Tensor
    name: str
    derived: int = field(init=False, default=7)


class Custom:
    """Knows how to move itself, and takes nothing but the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> "Custom":
        return Custom(self.tensor.to(device))


def test_every_structure_keeps_its_type() -> None:
    one = torch.ones(2)
    default = defaultdict(list, x=one)
    batch = {
        "ordered": OrderedDict(x=one),
        "default": default,
        "user": UserDict(x=one),
        "list": [one, (one, "text", 3, None)],
        "named": Pair(one, one),
        "dataclass": Frozen(one, "a"),
        "custom": Custom(one),
    }
    there = to_device(batch, META)
    assert type(there["ordered"]) is OrderedDict
    assert there["default"].default_factory is list
    assert type(there["user"]) is UserDict
    assert isinstance(there["named"], Pair)
    assert there["list"][1][1:] == ("text", 3, None)
    assert (there["dataclass"].name, there["dataclass"].derived) == ("a", 7)
    for tensor in (
        there["ordered"]["x"],
        there["default"]["x"],
        there["user"]["x"],
        there["list"][0],
        there["list"][1][0],
        there["named"].left,
        there["dataclass"].image,
        there["custom"].tensor,
    ):
        assert tensor.device == META
    assert batch["list"][0].device == CPU  # the batch itself is left as it was


def test_a_packed_sequence_moves_by_itself() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    there = moved(packed, META)
    assert isinstance(there, PackedSequence)
    assert there.data.device == META
    assert there.batch_sizes.device == CPU


def test_a_batch_without_tensors_passes() -> None:
    assert to_device(["a", {"b": 3}], META) == ["a", {"b": 3}]
    assert map_tensors(torch.clone, "text") == "text"


def test_on_a_cpu_there_is_no_feed() -> None:
    feed = feed_for(CPU)
    assert isinstance(feed, NoFeed)
    steps: Any = iter(())
    assert feed.steps(steps) is steps


def steps_of(log: list[str], counts: list[int], fails_at: int = -1) -> Any:
    number = 0

    def micro_batches(step: int, count: int) -> Any:
        nonlocal number
        for part in range(count):
            if number == fails_at:
                raise OSError("planted")
            log.append(f"fetch {number}")
            yield MicroBatch(number, 1, 1, part, part == count - 1)
            number += 1

    for step, count in enumerate(counts):
        yield step, micro_batches(step, count)


def run_ahead(counts: list[int], fails_at: int = -1) -> tuple[list[str], list[list[int]]]:
    log: list[str] = []
    seen: list[list[int]] = []
    fed = one_ahead(steps_of(log, counts, fails_at), lambda micro: micro, lambda micro: micro)
    try:
        for _, micro_batches in fed:
            step: list[int] = []
            for micro in micro_batches:
                log.append(f"compute {micro.batch}")
                step.append(micro.batch)
            seen.append(step)
    except OSError:
        log.append("raised")
    return log, seen


def test_the_next_one_is_fetched_before_this_one_computes_over_the_ends_of_steps() -> None:
    log, seen = run_ahead([2, 1, 1])
    assert seen == [[0, 1], [2], [3]]
    assert log == [
        "fetch 0", "fetch 1", "compute 0", "fetch 2", "compute 1", "fetch 3", "compute 2", "compute 3",
    ]  # fmt: skip


def test_a_step_that_is_not_used_up_is_passed_over() -> None:
    fed = one_ahead(steps_of([], [2, 1, 2]), lambda micro: micro, lambda micro: micro)
    assert [step for step, _ in fed] == [0, 1, 2]


@pytest.mark.parametrize("fails_at", range(5))
def test_a_failure_waits_for_its_turn(fails_at: int) -> None:
    """The steps before it are whole; a step that it stands in is not ended as if it were."""
    log, seen = run_ahead([2, 1, 2], fails_at)
    assert log[-1] == "raised"
    assert [entry for entry in log if entry.startswith("compute")] == [f"compute {n}" for n in range(fails_at)]
    assert seen == [step for step in ([0, 1], [2], [3, 4]) if max(step) < fails_at]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.formats: set[bool] = set()

    def forward(self, images: Tensor) -> Tensor:
        self.formats.add(images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous())
        assert self.first.weight.is_contiguous(memory_format=torch.channels_last) == (self.formats == {True})
        result: Tensor = self.out(torch.relu(self.first(images)).mean((2, 3)))
        return result


def test_channels_last_changes_the_format_and_not_the_values(tmp_path: Any) -> None:
    images = torch.randn(24, 3, 6, 6, dtype=torch.float64)
    data = {"images": images, "labels": torch.randint(0, 4, (24,))}
    losses = {}
    for wanted in ("auto", "on", "off"):
        models: list[Convolutions] = []

        def model(models: list[Convolutions] = models) -> nn.Module:
            models.append(Convolutions().double())
            return models[-1]

        job = Job(
            name=wanted,
            model=model,
            data=data,
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch["images"]), batch["labels"]),
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
            global_batch=8,
            epochs=2,
        )
        # The probe of the loss runs before a format is chosen.
        given = {"channels_last": wanted, "loss_weighting": "samples"}
        result = train(job, configure(output_dir=tmp_path, gpu_mode="cpu", report=False, **given), quiet=True)
        assert result.last is not None
        assert models[0].formats == {wanted == "on"}
        losses[wanted] = result.last.loss
    assert losses["on"] == pytest.approx(losses["off"], abs=1e-10)
    assert losses["auto"] == losses["off"]
