"""A model is refused before it takes memory that is not there, and not for memory that it has given back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain import DrivetrainError
from drivetrain.checkpoint import WeightsTaken
from drivetrain.core.world import World
from drivetrain.moe import MixtureOfExperts, Slots
from drivetrain.monitor.recorder import NoRunRecorder
from drivetrain.run.model_factory import make_model, take_weights, write_down

HUGE = 200_000  # squared, in float32: 160 GB
MANY = 10**9


def test_weights_without_end_are_refused_before_they_are_filled() -> None:
    with pytest.raises(DrivetrainError) as caught:
        make_model(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(HUGE, HUGE)), MANY)
    # Which weight it is comes after that, unless the kernel has refused the memory before there was one.
    assert "it has 1 GB, and the weights take 160 GB" in str(caught.value)
    assert "fsdp" in caught.value.remedy
    assert nn.Linear(2, 2).weight.shape == (2, 2), "models made afterwards are not watched"
    with torch.device("meta"):
        nn.Linear(HUGE, HUGE)


def test_many_small_ones_count_too() -> None:
    with pytest.raises(DrivetrainError, match="does not fit"):
        make_model(lambda: nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(24))), 1_000_000)
    make_model(lambda: nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(23))), 1_000_000)


def test_shared_and_dropped_weights_count_once() -> None:
    def factory() -> nn.Module:
        for _ in range(30):  # each is gone before the next
            nn.Linear(100, 100)
        first, second = nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)
        second.weight = first.weight
        return nn.Sequential(first, second, *(nn.Linear(100, 100, bias=False) for _ in range(2)))

    assert len([*make_model(factory, 140_000).parameters()]) == 3


def test_weights_that_became_smaller_count_as_they_are() -> None:
    def factory() -> nn.Module:
        halves = nn.Sequential(*(nn.Linear(100, 100, bias=False).bfloat16() for _ in range(4)))
        twin = nn.Linear(100, 100, bias=False).bfloat16()
        twin.weight = nn.Parameter(halves[0].weight.detach())  # of the same memory
        return nn.Sequential(halves, twin)

    assert make_model(factory, 140_000) is not None
    with pytest.raises(DrivetrainError, match="does not fit"):
        make_model(factory, 100_000)


def test_what_is_not_known_or_elsewhere_is_not_refused() -> None:
    make_model(lambda: nn.Linear(100, 100), 0)
    make_model(lambda: nn.Linear(HUGE, HUGE, device="meta"), MANY)


def test_only_a_module_is_a_model() -> None:
    with pytest.raises(DrivetrainError, match="the model function returned str"):
        make_model(lambda: "model", MANY)


class Model(torch.nn.Module):
    def __init__(self, num_slots: int = 6, hidden: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 5)
        self.mixture = MixtureOfExperts(5, 2, hidden, num_slots=num_slots)


def taken_from(folder: Path, source: Model, model: Model) -> WeightsTaken:
    save_file(source.state_dict(), folder / "w.safetensors")
    return take_weights(folder / "w.safetensors", model, World())


def grown(model: Model) -> Model:
    slots = Slots(model.mixture)
    for _ in range(2):
        slot = slots.grow(0)
        assert slot is not None
        slots.activate(slot)
    return model


def test_another_number_of_active_experts_is_said_in_a_line(tmp_path: Path) -> None:
    source, model = grown(Model()), Model()
    taken = taken_from(tmp_path, source, model)
    assert taken.lines[1:] == ("mixture has 4 active experts now, as there; it was made with 2",)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in source.state_dict().items())
    assert taken_from(tmp_path, Model(), Model()).lines[1:] == ()


def test_another_number_of_slots_starts_the_mixture_anew_and_says_why(tmp_path: Path) -> None:
    source, model = grown(Model(num_slots=8)), Model()
    before = {name: value.clone() for name, value in model.mixture.state_dict().items()}
    taken = taken_from(tmp_path, source, model)
    assert taken.lines[1:] == (
        "mixture starts anew with its 2 active experts, none of its weights are used: it has 8 slots there and 6 in "
        "the model; make it with num_slots=8 to take them",
    )
    assert taken.taken == ("first.bias", "first.weight")
    assert taken.left_out == ("mixture.next_id",)
    assert all(torch.equal(value, before[name]) for name, value in model.mixture.state_dict().items())


def test_experts_of_another_width_are_not_active_without_weights(tmp_path: Path) -> None:
    """Taking over who is active, and not what they know, would leave experts that are all zeros for good."""
    model = Model(hidden=7)
    taken = taken_from(tmp_path, grown(Model()), model)
    assert int(model.mixture.router.active.sum()) == 2
    (line,) = taken.lines[1:]
    assert "mixture.experts.w_in is (6, 4, 5) there and (6, 7, 5) in the model" in line


class Said(NoRunRecorder):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_each_line_is_said_for_itself(tmp_path: Path) -> None:
    books = Said()
    write_down(taken_from(tmp_path, grown(Model()), Model()), books)
    assert books.lines[0].startswith("  weights    ")
    assert books.lines[1].startswith("             mixture has 4")
