"""Experts come and go without a trace where there should be none: bits, optimizer, numbers of experts."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.moe import Balance, MixtureOfExperts, Settlement, Slots
from drivetrain.strategies import Average


class Learner:
    """A layer in training, with all that goes with it."""

    def __init__(self, way: str = "dense", optimizer: str = "adamw") -> None:
        torch.manual_seed(0)
        self.layer = MixtureOfExperts(
            6,
            3,
            [4, 8, 8],
            5,
            k=2,
            num_slots=6,
            balance=Balance(1e-2, 1e-2),
            way=way,  # type: ignore[arg-type]
        )
        makers: dict[str, Any] = {
            "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.1, amsgrad=True),
            "sgd": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9),
        }
        self.optimizer = makers[optimizer](self.layer.parameters())
        self.average = Average(self.layer, 0.9)
        self.settlement = Settlement(self.layer)
        self.slots = Slots(self.layer, self.companions)
        self.steps = 0

    def companions(self, parameter: Tensor) -> Mapping[str, Tensor]:
        state = {**self.optimizer.state.get(parameter, {}), "average": self.average.of(parameter)}
        return {
            name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    def step(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.steps)
        inputs, targets = torch.randn(20, 6, generator=generator), torch.randn(20, 5, generator=generator)
        self.optimizer.zero_grad()
        output: Tensor = self.layer(inputs)
        (output - targets).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.layer.parameters(), 0.1)
        self.optimizer.step()
        self.average.update()
        self.settlement.settle()
        self.steps += 1
        return output.detach()

    def everything(self) -> dict[str, Tensor]:
        found = {name: value.clone() for name, value in self.layer.state_dict().items() if name != "next_id"}
        for name, parameter in self.layer.named_parameters():
            found |= {f"{name}/{kind}": value.clone() for kind, value in self.companions(parameter).items()}
        return found

    def rows(self, slots: list[int]) -> dict[str, Tensor]:
        return {name: value[slots] for name, value in self.everything().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", ["dense", "loop"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_growing_while_masked_changes_no_bit(way: str, optimizer: str) -> None:
    """Not of outputs, not of any other expert's weights, moments or average; over many steps, with clipping."""
    plain, growing = Learner(way, optimizer), Learner(way, optimizer)
    for step in range(12):
        assert torch.equal(plain.step(), growing.step())
        if step in (3, 5):
            growing.slots.grow(step % 3)
    assert same(plain.rows([0, 1, 2, 5]), growing.rows([0, 1, 2, 5]))
    assert growing.slots.ids == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}


def test_a_grown_expert_starts_near_its_parent_with_its_sense_of_scale() -> None:
    learner = Learner()
    for _ in range(5):
        learner.step()
    slot = learner.slots.grow(0, noise=0.01)
    assert slot == 3
    found = learner.everything()
    for name, value in found.items():
        if name.endswith("exp_avg_sq"):
            assert torch.equal(value[3], value[0])
            assert value[0].any()
        elif name.endswith("exp_avg"):
            assert not value[3].any()
            assert value[0].any()
    weight = found["experts.w_in"]
    assert not torch.equal(weight[3], weight[0])
    assert (weight[3] - weight[0]).norm() < 0.03 * weight[0].norm()
    assert not weight[3, 4:].any(), "a copy of a narrow expert is as narrow"
    assert torch.equal(weight[3] != 0, weight[0] != 0)


def test_once_active_it_takes_part_and_learns_in_steps_of_the_usual_length() -> None:
    learner = Learner()
    for _ in range(30):
        learner.step()
    slot = learner.slots.grow(1)
    assert slot is not None
    learner.slots.activate(slot)
    before = learner.layer.experts.w_in.detach().clone()
    learner.step()
    moved = (learner.layer.experts.w_in.detach() - before).abs()
    assert learner.layer.load[slot] > 0
    assert 0 < moved[slot].max() < 2 * 0.02, "Adam with both moments at zero would take steps several times too long"


actions = st.lists(
    st.tuples(st.sampled_from(["grow", "activate", "prune", "merge", "step"]), st.integers(0, 5), st.integers(0, 5)),
    max_size=12,
)


@given(actions)
@settings(max_examples=40)
def test_after_any_story_slots_and_numbers_hold(story: list[tuple[str, int, int]]) -> None:
    """Numbers are never given twice; empty slots are all zeros; enough experts are left; it still learns."""
    learner = Learner()
    learner.step()
    given = {0, 1, 2}
    for what, first, second in story:
        slots, before = learner.slots, learner.slots.ids
        try:
            if what == "grow":
                slot = slots.grow(first)
                if slot is not None:
                    assert slots.ids[slot] not in given
                    given.add(slots.ids[slot])
            elif what == "activate":
                slots.activate(first)
            elif what == "prune":
                slots.prune(first)
            elif what == "merge" and first != second:
                slots.merge(first, second, 0.5)
            else:
                learner.step()
        except DrivetrainError:
            if what != "merge":
                assert slots.ids == before, "what is refused changes nothing"
        empty = [slot for slot in range(6) if slot not in slots.ids]
        rows = learner.rows(empty)
        assert not rows.pop("expert_ids").add(1).any()
        assert rows.pop("router.mask").isneginf().all()
        assert all(not value.any() for value in rows.values())
        assert len(slots.active) >= learner.layer.k
        assert set(slots.active) <= set(slots.ids)
    assert learner.step().isfinite().all()


@given(st.integers(0, 2), st.integers(0, 4), st.booleans())
@settings(max_examples=15)
def test_growing_and_pruning_is_as_if_nothing_had_been(parent: int, steps: int, slowly: bool) -> None:
    plain, growing = Learner(), Learner()
    for learner in (plain, growing):
        for _ in range(3):
            learner.step()
    slot = growing.slots.grow(parent)
    assert slot is not None
    for _ in range(steps if slowly else 0):
        plain.step()
        growing.step()
    growing.slots.prune(slot)
    assert same(plain.everything(), growing.everything())
    assert torch.equal(plain.step(), growing.step())
    assert growing.slots.grow(parent) == slot, "the slot is used again"
    assert growing.slots.ids[slot] == 4, "the number is not"


def test_a_merge_of_a_copy_with_its_parent_is_the_parent() -> None:
    learner = Learner()
    for _ in range(3):
        learner.step()
    before = learner.rows([1])
    slot = learner.slots.grow(1, noise=0.0)
    assert slot is not None
    learner.slots.merge(1, slot, 0.25)
    after = learner.rows([1])
    kept = [name for name in before if "exp_avg" not in name or "sq" in name]
    assert all(torch.allclose(before[name].double(), after[name].double(), rtol=1e-6) for name in kept)
    assert slot not in learner.slots.ids


def test_what_was_saved_can_be_put_back() -> None:
    learner = Learner()
    learner.step()
    before = learner.everything()
    put_back = learner.slots.saved([0, 1])
    learner.slots.activate(learner.slots.grow(0) or 0)
    learner.slots.prune(3)
    learner.slots.merge(0, 1, 0.5)
    assert not same(before, learner.everything())
    put_back()
    assert same(before, learner.everything())


def test_growth_does_not_compile_again() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    learner = Learner()
    compiled = torch.compile(learner.layer, backend="eager", fullgraph=True)
    inputs = torch.randn(20, 6)
    compiled(inputs)
    learner.settlement.forget()  # as every step does
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for parent in (0, 1, 2):
        slot = learner.slots.grow(parent)
        assert slot is not None
        learner.slots.activate(slot)
        assert torch.allclose(compiled(inputs), copy.deepcopy(learner.layer)(inputs), atol=1e-6)
        learner.settlement.forget()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert learner.slots.grow(0) is None, "all slots are taken"


def test_who_is_there_is_read_again_after_any_change() -> None:
    layer, other = (MixtureOfExperts(4, count, 8, k=1, num_slots=5) for count in (3, 2))
    slots = Slots(layer)
    assert (slots.active, list(slots.ids)) == ([0, 1, 2], [0, 1, 2])
    layer.load_state_dict(other.state_dict(), assign=True)
    assert (slots.active, list(slots.ids)) == ([0, 1], [0, 1])
    grown = slots.grow(0)
    assert (slots.active, list(slots.ids)) == ([0, 1], [0, 1, grown])
    layer.double()
    slots.activate(2)
    assert slots.active == [0, 1, 2]


def test_what_cannot_be_is_refused() -> None:
    slots = Learner().slots
    with pytest.raises(DrivetrainError, match="holds no expert"):
        slots.grow(4)
    slots.prune(2)
    with pytest.raises(DrivetrainError, match="every token goes to 2"):
        slots.prune(1)
