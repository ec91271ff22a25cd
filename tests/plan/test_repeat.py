"""Which way is followed where the fastest does not repeat: decided from made-up trials."""

from typing import Any

import pytest

from drivetrain.plan.knobs import StepWay
from drivetrain.plan.tune import Bits, Repeatability, RepeatTrial, find_repeatable

FAST = StepWay(micro_batch=8, precision="bf16", compile_mode="default")


class World:
    """What repeats, and at what cost; `tried` is in the order of trying, `compiled_anew` are those of fresh processes.

    What does not repeat differs in this process already, or, with `here`, only in a fresh one.
    """

    def __init__(
        self, repeating: dict[StepWay, float | None], *, here: bool = False, problems: dict[StepWay, str] | None = None
    ):
        self.repeating, self.here, self.problems = repeating, here, problems or {}
        self.tried: list[StepWay] = []
        self.compiled_anew: list[StepWay] = []

    def attempt_here(self, way: StepWay) -> RepeatTrial:
        self.tried.append(way)
        if way in self.problems:
            return RepeatTrial(way=way, problem=self.problems[way])
        repeats = self.here or way in self.repeating
        difference = "" if repeats else "model/a"
        return RepeatTrial(way=way, repeats=repeats, difference=difference, repeats_here=repeats, processes=1)

    def attempt_elsewhere(self, way: StepWay) -> RepeatTrial:
        self.compiled_anew.append(way)
        repeats = way in self.repeating
        return RepeatTrial(way=way, repeats=repeats, difference="" if repeats else "model/a")

    def find(self, chosen: StepWay = FAST, **options: Any) -> tuple[StepWay, Repeatability]:
        stop = options.pop("stop", lambda: "")
        given = {"pinned": set(), "is_cudnn": False, "eager_cost": 0.5, **options}
        here, elsewhere = self.attempt_here, self.attempt_elsewhere
        return find_repeatable(chosen, here, elsewhere, self.repeating.get, stop, **given)


def test_a_way_that_repeats_is_kept() -> None:
    world = World({FAST: None})
    way, found = world.find()
    assert (way, found.value, world.tried) == (FAST, True, [FAST])
    assert world.compiled_anew == [FAST]
    assert found.as_plain()["value"] == "yes"


@pytest.mark.parametrize(("cost", "taken"), [(0.02, True), (0.03, True), (0.031, False), (None, False)])
def test_what_repeats_is_taken_for_at_most_three_percent(cost: float | None, taken: bool) -> None:
    strict = FAST.but(repeat="strict")
    world = World({strict: cost})
    way, found = world.find()
    assert way == (strict if taken else FAST)
    assert found.value is taken
    assert world.compiled_anew == ([strict] if taken else []), "a fresh process compiles what would be taken, only"
    if not taken:
        assert "repeat in one process, at" in found.reason
        assert "--deterministic" in found.reason
    if cost is not None:
        assert f"{100 * cost:+.1f} %" in found.reason


def test_kernels_that_differ_in_one_process_are_not_fixed_by_choosing_them_without_timing() -> None:
    world = World({FAST.but(repeat="strict"): 0.01})
    world.find()
    assert world.tried == [FAST, FAST.but(repeat="strict")]
    world = World({FAST.but(repeat="fixed"): 0.01}, here=True)
    assert world.find()[0] == FAST.but(repeat="fixed")
    world = World({FAST.but(repeat="fixed"): 0.01})
    assert world.find(is_cudnn=True)[0] == FAST.but(repeat="fixed"), "cuDNN has deterministic kernels"


def test_the_compiler_is_left_out_where_that_costs_least() -> None:
    eager, strict = FAST.but(compile_mode=None, repeat="strict"), FAST.but(repeat="strict")
    assert World({eager: 0.01, strict: 0.2}).find(eager_cost=0.0)[0] == eager
    way, found = World({eager: 0.4}).find()
    assert (way, found.value) == (FAST, False)
    assert "--no-compile --deterministic" in found.reason
    world = World({eager: 0.4, strict: 0.2})
    assert "+20.0 %" in world.find()[1].reason
    assert eager not in world.tried, "it is known to be dearer"
    world = World({eager: 0.01})
    assert world.find(pinned={"compile_mode"})[0] == FAST
    assert eager not in world.tried


def test_what_the_user_asked_for_is_followed_and_made_to_repeat() -> None:
    strict = FAST.but(repeat="strict")
    eager = strict.but(compile_mode=None)
    world = World({eager: 0.8})
    way, found = world.find(strict, pinned={"repeat"})
    assert (way, found.value) == (eager, True), "exactness was asked for, at any price"
    assert world.tried == [strict, eager]
    way, found = World({}).find(strict, pinned={"repeat"})
    assert (way, found.value) == (strict, False)
    assert "nothing that was tried repeats" in found.reason


def test_without_time_the_fastest_is_followed_and_said_not_to_repeat() -> None:
    world = World({FAST.but(repeat="strict"): 0.01})
    way, found = world.find(stop=lambda: "the job is short")
    assert (way, found.value, world.tried) == (FAST, False, [FAST])
    assert "the job is short" in found.reason


def test_what_cannot_be_tried_is_no_verdict() -> None:
    way, found = World({}, problems={FAST: "out of memory"}).find()
    assert (way, found.value) == (FAST, None)
    strict = FAST.but(repeat="strict")
    way, found = World({}, problems={strict: "RuntimeError: no deterministic kernel"}).find(pinned={"compile_mode"})
    assert (way, found.value) == (FAST, False)
    assert "no deterministic kernel" in found.reason


def test_the_first_difference_is_named() -> None:
    one = Bits(losses=("1", "2"), tensors={"model/a": "x", "model/b": "y"})
    assert one.difference(one) == ""
    assert one.difference(Bits(losses=("1", "3"), tensors=one.tensors)) == "the loss of step 2"
    assert one.difference(Bits(losses=("1", "2"), tensors={"model/a": "x"})) == "model/b after step 2"
    assert one.difference(Bits(losses=("1",), tensors=one.tensors)) == "the number of steps"
