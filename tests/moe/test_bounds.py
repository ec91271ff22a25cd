"""Settings that cannot be meant are refused when they are made, all at once, with what is allowed."""

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import StepContext
from drivetrain.core.world import World
from drivetrain.moe import (
    Balance,
    Knowledge,
    KnowledgeFiles,
    Lifecycle,
    LoadReport,
    MixtureOfExperts,
    Rules,
    Sleep,
    SleepRules,
)


@pytest.mark.parametrize(
    ("made", "name", "value", "allowed"),
    [
        (Rules, "far", -1, "a number from 0"),
        (Rules, "far", math.nan, "a number from 0"),
        (Rules, "patience", 0, "a whole number from 1"),
        (Rules, "cooldown", -1, "a whole number from 0"),
        (Rules, "max_experts", 0, "a whole number from 1, or None"),
        (Rules, "new_share", 3, "a number from 0 to 1"),
        (Rules, "memory", 2, "a number from 0 to 1"),
        (Rules, "idle_share", math.nan, "a number"),
        (Rules, "noise", math.inf, "a finite number from 0"),
        (Rules, "move_looks", 0, "a whole number from 1"),
        (SleepRules, "rate", -1, "a finite number from 0"),
        (SleepRules, "reservoir", -4, "a whole number from 1"),
        (SleepRules, "interval", -5, "a whole number from 1"),
        (SleepRules, "replay_steps", -1, "a whole number from 0"),
        (SleepRules, "replay_batch", 0, "a whole number from 1"),
        (SleepRules, "replay_batch", 2.5, "a whole number from 1"),
        (Balance, "auxiliary", -1, "a finite number from 0"),
        (Balance, "bias_rate", math.nan, "a finite number from 0"),
        (Balance, "z", "much", "a finite number from 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(made: Any, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(DrivetrainError) as caught:
        made(**{name: value})
    assert caught.value.message == f"{made.__name__}: {name} is {value!r}"
    assert caught.value.remedy == f"give {name} {allowed}"


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(DrivetrainError, match="Rules: far is -1, patience is -2") as caught:
        Rules(far=-1, patience=-2)
    assert caught.value.remedy == "give far a number from 0; patience a whole number from 1"


@pytest.mark.parametrize("times", [{"interval": 50}, {"interval": 5000}, {"shortest": 400}, {"longest": 200}])
def test_times_of_sleep_that_contradict_each_other(times: dict[str, int]) -> None:
    with pytest.raises(DrivetrainError, match="interval is") as caught:
        SleepRules(**times)
    assert "from the shortest to the longest" in caught.value.remedy


def test_what_turns_a_part_off_is_allowed() -> None:
    Balance(0, 0, 0)
    Rules(cooldown=0, noise=0, high_loss=math.inf, agreement=2.0, far=math.inf, idle_share=-1.0)
    SleepRules(replay_steps=0, specialise_steps=0, specialise_weight=0, focus=-1.0, tolerance=-1.0, idle_share=-1.0)
    assert KnowledgeFiles(Knowledge()).every == "epoch"


@pytest.mark.parametrize("every", [0, -4, 2.5, True, None, "step"])
@pytest.mark.parametrize("hook", [Lifecycle, Sleep, LoadReport, Knowledge])
def test_hooks_are_called_every_so_many_steps_or_epochs(hook: Any, every: Any) -> None:
    with pytest.raises(DrivetrainError, match=f"{hook.__name__}: every is {every!r}") as caught:
        hook(every=every)
    assert "a whole number of steps from 1, or 'epoch'" in caught.value.remedy


def test_more_experts_than_there_are_slots_for_are_refused_before_the_first_step() -> None:
    model = nn.ModuleList([MixtureOfExperts(4, 2, 8, num_slots=3), MixtureOfExperts(4, 2, 8, num_slots=5)])
    context = StepContext(0, 0, model, World(), Path())
    for hook in (Lifecycle(rules=Rules(max_experts=6)), Sleep(rules=SleepRules(max_experts=6))):
        with pytest.raises(DrivetrainError, match="max_experts is 6, and the model's mixtures have room for 5"):
            hook.check(context)
    Lifecycle(rules=Rules(max_experts=5)).check(context)
