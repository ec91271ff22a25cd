"""A model is refused before it takes memory that is not there, and not for memory that it has given back."""

import pytest
import torch
from torch import nn

from drivetrain import DrivetrainError
from drivetrain.run.model_factory import make_model

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
    with pytest.raises(DrivetrainError, match="the model factory returned str"):
        make_model(lambda: "model", MANY)
