"""The hook: grows where inputs are new or the loss stays high, merges what agrees, prunes what is idle.

Alike on all ranks, and resumed.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.hook import Hook, StepContext
from drivetrain.core.world import World
from drivetrain.moe import Balance, Lifecycle, LoadReport, MixtureOfExperts, Rules, Slots, mixtures_in
from tests.api.jobs import Trained, Variant
from tests.gloo_pool import GlooPool
from tests.moe.jobs import Mixture, run_mixture
from tests.strategies.test_expert_parallel import EXPERT_PARALLEL, distances, sgd

NEVER = {"agreement": 2.0, "idle_looks": 10**9}


def layer_of(**changes: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(4, 3, 8, k=1, num_slots=6, balance=Balance(0.0), **changes)


def look(hook: Lifecycle, model: nn.Module, tokens: Tensor, step: int, loss: float = math.nan) -> list[str]:
    """One look after a step on these tokens; what happened."""
    before = len(hook.history)
    (layer,) = mixtures_in(model).values()
    layer(tokens)
    layer.load.copy_(layer.tally.on(torch.device("cpu")))
    layer.tally.forget()
    hook(StepContext(step, 0, model, World(), Path(), loss=loss))
    return [event["what"] for event in hook.history[before:]]


def test_new_inputs_grow_an_expert_and_known_ones_do_not() -> None:
    hook = Lifecycle(1, Rules(patience=2, cooldown=3, max_experts=4, **NEVER))
    layer = layer_of()
    generator = torch.Generator().manual_seed(1)

    def tokens(shift: float) -> Tensor:
        return torch.randn(60, 4, generator=generator) + shift

    assert isinstance(hook, Hook)
    assert not any(look(hook, layer, tokens(0.0), step) for step in range(10)), "nothing is new"
    happened = [look(hook, layer, torch.cat([tokens(0.0), tokens(12.0)]), step) for step in range(10, 20)]
    assert happened[:4] == [[], ["grown"], ["active"], []], "after two looks in a row; it takes part one look later"
    assert [event for events in happened for event in events] == ["grown", "active"], "no more than four experts"
    assert hook.history[0]["expert"] == 3
    assert sorted(Slots(layer).ids.values()) == [0, 1, 2, 3]


def test_a_token_that_is_not_finite_spoils_nobody() -> None:
    hook, layer = Lifecycle(1, Rules(**NEVER)), layer_of()
    tokens = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    look(hook, layer, tokens, 0)
    tokens[7] = math.inf
    look(hook, layer, tokens, 1)
    assert layer.centroids.isfinite().all()
    assert layer.spreads.isfinite().all()


def grown_at(losses: list[float], **changes: Any) -> tuple[list[int], Lifecycle, MixtureOfExperts]:
    """At which looks, from 0, an expert is grown where nothing but the loss tells of a need."""
    hook = Lifecycle(1, Rules(**{"far": 1e9, "patience": 2, "cooldown": 3, **NEVER, **changes}))
    layer = layer_of()
    tokens = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    happened = [look(hook, layer, tokens, step, loss) for step, loss in enumerate(losses)]
    return [number for number, events in enumerate(happened) if "grown" in events], hook, layer


LEARNT = [2.0, 1.0, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]  # its average comes down to nearly 0.3


@pytest.mark.parametrize(
    ("name", "losses", "growths"),
    [
        ("it falls", LEARNT, []),
        ("high at once, and found so twice", [*LEARNT, 1.5, 1.5], [10]),
        ("high once", [*LEARNT, 1.5, *[0.3] * 6], []),
        ("one step that is much too high leaves a high average for long", [*LEARNT, 300.0, *[0.3] * 6], []),
        ("high, not high, high", [*LEARNT, 1.5, 0.3, 1.5, 0.3, 1.5, 0.3], []),
        ("higher, but not twice as high", [*LEARNT, *[0.55] * 10], []),
        ("nothing was counted in between: it is neither high nor low", [*LEARNT, 1.5, math.nan, 1.5], [11]),
        ("high for long: cooldown, and no more than six slots", [*LEARNT, *[1.5] * 30], [10, 14, 18]),
        ("high from the start is how it begins", [2.0] * 20, []),
        ("next to nothing, and many times that", [2.0, *[1e-6] * 30, *[1e-3] * 10], []),
        ("0, and next to nothing", [2.0, *[0.0] * 30, *[1e-3] * 10], []),
        ("next to nothing, and then a lot", [2.0, *[1e-6] * 30, 1.0, 1.0], [32]),
        ("below 0 there is no twice", [-1.0] * 5 + [-0.1] * 10, []),
    ],
)
def test_a_loss_that_stays_high_grows_an_expert(name: str, losses: list[float], growths: list[int]) -> None:
    found, _, layer = grown_at(losses)
    assert found == growths, name
    assert len(Slots(layer).ids) == 3 + len(growths)


def test_an_expert_grown_for_the_loss_comes_from_the_busiest_and_says_why() -> None:
    _, hook, layer = grown_at([*LEARNT, *[1.5] * 3])
    grown, active = hook.history
    tokens = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    first = layer_of()
    most = int(first.router(tokens).chosen[:, 0].bincount(minlength=6).argmax())
    assert (grown["what"], grown["expert"], grown["parent"], active["what"]) == ("grown", 3, most, "active")
    lowest = LEARNT[0]
    for loss in LEARNT[1:]:
        lowest = (lowest + loss) / 2  # it only falls
    assert grown["why"] == f"loss 1.2 has been above 2 × the lowest, {lowest:.3g}, for 2 looks"
    assert layer.spreads[3] > 0, "it has learned what its tokens are like from those it was given"


def test_growth_for_the_loss_is_turned_off_with_infinity_and_obeys_the_cap() -> None:
    losses = [*LEARNT, *[1.5] * 30]
    assert grown_at(losses, high_loss=math.inf)[0] == []
    assert grown_at(losses, high_loss=10.0)[0] == []
    assert grown_at(losses, max_experts=4)[0] == [10]
    assert grown_at(losses, patience=5)[0] == [13, 18, 23]


def test_whatever_grows_an_expert_starts_both_counts_anew() -> None:
    """New inputs that raise the loss are one need, not two; they are what is told of."""
    hook = Lifecycle(1, Rules(patience=2, cooldown=0, **NEVER))
    layer, generator = layer_of(), torch.Generator().manual_seed(1)

    def tokens(shift: float) -> Tensor:
        return torch.randn(60, 4, generator=generator) + shift

    for step, loss in enumerate(LEARNT):
        look(hook, layer, tokens(0.0), step, loss)
    mixed = torch.cat([tokens(0.0), tokens(12.0)])
    assert [look(hook, layer, mixed, 9 + step, 1.5) for step in range(2)] == [[], ["grown"]]
    assert hook.history[-1]["why"].endswith("of tokens are new to all experts")
    happened = [look(hook, layer, tokens(0.0), 11 + step, 1.5) for step in range(2)]
    assert happened == [["active"], ["grown"]], "two looks after the other, not one"
    assert hook.history[-1]["why"].startswith("loss 1.4")


def test_a_count_goes_on_where_it_was_saved() -> None:
    tokens = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    rules = Rules(far=1e9, patience=3, cooldown=3, **NEVER)
    whole, layer = Lifecycle(1, rules), layer_of()
    losses = [*LEARNT, *[1.5] * 12]
    for step, loss in enumerate(losses):
        if step == 11:  # two of three looks
            saved = json.loads(json.dumps(whole.state_dict(), allow_nan=False))
            resumed, other = Lifecycle(1, rules), layer_of()
            other.load_state_dict(layer.state_dict())
        look(whole, layer, tokens, step, loss)
    resumed.load_state_dict(saved)
    assert look(resumed, other, tokens, 11, losses[11]) == ["grown"]
    for step in range(12, len(losses)):
        look(resumed, other, tokens, step, losses[step])
    assert resumed.state_dict() == whole.state_dict()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in layer.state_dict().items())


def test_what_was_saved_before_losses_were_looked_at_can_be_resumed() -> None:
    _, hook, _ = grown_at(LEARNT)
    state = json.loads(json.dumps(hook.state_dict()))
    old = {"looks", "num_new", "grown_at", "waiting", "shares", "idle", "refused"}
    state["stories"] = {
        name: {key: value for key, value in story.items() if key in old} for name, story in state["stories"].items()
    }
    resumed = Lifecycle(1)
    resumed.load_state_dict(state)
    assert look(resumed, layer_of(), torch.randn(60, 4), 0, 5.0) == []


def test_idle_experts_go_while_enough_are_left() -> None:
    hook = Lifecycle(1, Rules(agreement=2.0, far=1e9, idle_looks=2, min_experts=2))
    layer = layer_of()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[1, 0] = 1.0  # all that have a positive first number go to one expert
    tokens = torch.rand(50, 4) + 0.1
    happened = [event for step in range(60) for event in look(hook, layer, tokens, step)]
    assert happened == ["pruned"]
    assert len(Slots(layer).active) == 2
    assert 1 in Slots(layer).active


@pytest.mark.parametrize(("scores", "outcome"), [("sigmoid", "merged"), ("softmax", "not merged")])
def test_experts_that_agree_are_merged_where_the_layer_then_says_the_same(scores: str, outcome: str) -> None:
    """With softmax, one expert in place of two gets nearly twice the weight of either: the check finds that."""
    hook = Lifecycle(1, Rules(agreement=0.95, harm=0.05, idle_looks=10**9, far=1e9, min_experts=2))
    layer = layer_of(scores=scores)
    tokens = torch.randn(200, 4, generator=torch.Generator().manual_seed(3))
    assert look(hook, layer, tokens, 0) == [], "independent ones do not agree"
    slots = Slots(layer)
    slot = slots.grow(1, noise=1e-3)
    assert slot is not None
    slots.activate(slot)
    before = layer(tokens).detach()
    assert look(hook, layer, tokens, 1) == [outcome]
    assert hook.history[-1]["expert"] == 3
    assert hook.history[-1]["into"] == 1
    assert slots.ids == {0: 0, 1: 1, 2: 2} | ({} if outcome == "merged" else {slot: 3})
    assert (layer(tokens) - before).norm() < 0.1 * before.norm(), "all tokens, a few of them at a border"


def test_a_merge_that_does_harm_is_taken_back_and_not_tried_again() -> None:
    hook = Lifecycle(1, Rules(agreement=0.0, harm=1e-6, idle_looks=10**9, far=1e9, min_experts=2))
    layer = layer_of()
    tokens = torch.randn(200, 4, generator=torch.Generator().manual_seed(3))
    before = {name: value.clone() for name, value in layer.state_dict().items() if "centroid" not in name}
    happened = [look(hook, layer, tokens, step) for step in range(6)]
    assert happened == [["not merged"]] * 3 + [[]] * 3, "each pair once"
    after = layer.state_dict()
    kept = [name for name in before if name not in ("spreads", "load")]
    assert all(torch.equal(before[name], after[name]) for name in kept)


# In training

RULES = Rules(far=1.01, new_share=0.01, patience=1, cooldown=1, agreement=2.0, idle_share=0.3, idle_looks=3)


def train(folder: str, shares: bool, crash_at_call: int, micro_batch: int) -> Trained | None:
    variant = Variant(dtype=torch.float32, steps=12, global_batch=30, num_samples=90, save_every=4)
    changes = {"hooks": [Lifecycle(3, RULES), LoadReport(4)], "ema": 0.9}
    settings = EXPERT_PARALLEL if shares else {}
    wanted = Mixture(num_experts=3, num_slots=6, dtype=torch.float32)
    return run_mixture(folder, variant, wanted, micro_batch, settings, crash_at_call, changes)


@pytest.mark.parametrize(("world", "shares", "crash_at_call"), [(1, False, 31), (2, True, 31)])
def test_a_resumed_run_has_the_same_bits(
    gloo_pool: GlooPool, tmp_path: Path, world: int, shares: bool, crash_at_call: int
) -> None:
    """Through growth and pruning, before and after the stop."""
    micro_batch = 10 if world == 1 else 5
    folders = [str(tmp_path / name) for name in ("whole", "parts")]
    args = (shares, 0, micro_batch)
    whole = gloo_pool.run(train, folders[0], *args, world=world)[0]
    crashed = gloo_pool.run(train, folders[1], shares, crash_at_call, micro_batch, world=world)[0]
    assert crashed is None
    resumed = gloo_pool.run(train, folders[1], *args, world=world)[0]
    assert 0 < resumed.resumed_from < 12
    assert int(whole.weights["model/mixture.next_id"]) > 3, "something grew"
    events = [json.loads(line) for line in (tmp_path / "whole" / "suite" / "events.jsonl").read_text().splitlines()]
    assert "grown" in [event["what"] for event in events if event["event"] == "expert"]
    loads = [event for event in events if event["event"] == "load"]
    assert [event["step"] for event in loads] == [4, 8, 12]
    assert all(event["layer"] == "mixture" and 0 < event["entropy"] <= 1 for event in loads)
    assert (max(event["straggler"] for event in loads) > 1) == (world > 1)
    assert resumed.rows == whole.rows
    ours, theirs = resumed.weights | resumed.state, whole.weights | whole.state
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


# A loss that rises

RISING = Rules(far=1e9, patience=3, cooldown=2, high_loss=1.2, agreement=2.0, idle_looks=10**9)


def falls_then_rises(step: int) -> float:
    """Much too far from some step on, so the loss rises; and stays where it then is."""
    return 3.0 if step < 12 else 3000.0 if step < 18 else 0.0


class Losses:
    """What hooks are told of the loss."""

    every = 1

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def __call__(self, context: StepContext) -> None:
        self.seen[context.step] = context.loss

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def train_rising(folder: str, shares: bool, crash_at_call: int, micro_batch: int) -> Trained | None:
    variant = Variant(dtype=torch.float32, steps=24, global_batch=30, num_samples=90, save_every=2)
    hook, losses = Lifecycle(2, RISING), Losses()
    changes = {"hooks": [hook, losses], "schedule": falls_then_rises, "weight_decay": 0.0}
    wanted = Mixture(num_experts=3, num_slots=6, dtype=torch.float32)
    settings = EXPERT_PARALLEL if shares else {}
    found = run_mixture(folder, variant, wanted, micro_batch, settings, crash_at_call, changes)
    rank = dist.get_rank() if dist.is_initialized() else 0
    text = json.dumps({"hook": hook.state_dict(), "losses": losses.seen})
    (Path(folder) / f"told-{rank}.json").write_text(text)
    return found


@pytest.mark.parametrize(("world", "shares"), [(1, False), (2, False), (2, True)])
def test_ranks_see_one_loss_and_grow_alike_for_it_and_resumed_in_the_middle_of_the_count(
    gloo_pool: GlooPool, tmp_path: Path, world: int, shares: bool
) -> None:
    micro_batch = 30 // world  # a call of the loss for each step
    folders = [tmp_path / name for name in ("whole", "parts")]
    for folder in folders:
        folder.mkdir()

    def go(folder: Path, crash_at_call: int) -> Any:
        args = (str(folder), shares, crash_at_call, micro_batch)
        return gloo_pool.run(train_rising, *args, world=world)[0]

    def told(folder: Path) -> Any:
        texts = {path.read_text() for path in folder.glob("told-*.json")}
        assert len(list(folder.glob("told-*.json"))) == world
        assert len(texts) == 1, "on every rank the same, to the bit"
        return json.loads(texts.pop())

    whole = go(folders[0], 0)
    of_whole = told(folders[0])
    assert list(of_whole["losses"].values()) == whole.losses, "of the step that was just done, over all ranks"
    grown = [event for event in of_whole["hook"]["history"] if event["what"] == "grown"]
    assert grown
    assert all(event["why"].startswith("loss ") for event in grown)
    step = grown[0]["step"]
    assert step > 12, "while it fell, nothing was missing"
    assert go(folders[1], step) is None
    (story,) = told(folders[1])["hook"]["stories"].values()
    assert story["num_high"] == RISING.patience - 1
    resumed = go(folders[1], 0)
    assert step - 2 <= resumed.resumed_from < step, "after the last look before, with its count"
    assert told(folders[1])["hook"] == of_whole["hook"]
    ours, theirs = resumed.weights | resumed.state, whole.weights | whole.state
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


class Planned:
    """Growth, activation, pruning at given steps: the same in every world."""

    every = 2

    def __call__(self, context: StepContext) -> None:
        (layer,) = mixtures_in(context.model).values()
        slots = Slots(layer, context.experts.companions)
        if context.step == 4:
            slots.grow(1, noise=0.1)
        elif context.step == 6:
            slots.activate(max(slots.ids, key=lambda slot: slots.ids[slot]))
        elif context.step == 10:
            slots.prune(next(slot for slot, number in slots.ids.items() if number == 0))
            slots.activate(slots.grow(next(slot for slot, number in slots.ids.items() if number == 2), noise=0.1) or 0)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def train_planned(folder: str, shares: bool, micro_batch: int) -> Trained | None:
    variant = Variant(steps=16, global_batch=30, num_samples=90)
    changes = {"hooks": [Planned()], "ema": 0.9, "optimizer": sgd}
    settings = EXPERT_PARALLEL if shares else {}
    return run_mixture(folder, variant, Mixture(num_experts=3, num_slots=5), micro_batch, settings, changes=changes)


@pytest.mark.parametrize(("world", "shares"), [(2, False), (3, True)])
def test_growth_in_the_middle_of_a_run_is_the_same_in_any_world(
    gloo_pool: GlooPool, tmp_path: Path, world: int, shares: bool
) -> None:
    """Slots may differ, as a new expert goes to whoever has the least to do; experts, by number, do not."""
    alone = train_planned(str(tmp_path / "alone"), False, 30)
    args = (str(tmp_path / "shared"), shares, 5)
    shared = gloo_pool.run(train_planned, *args, world=world)[0]
    assert alone is not None
    alone, shared = by_number(alone), by_number(shared)
    found = distances(shared, alone)
    assert max(found.values()) < 1e-9, found


def by_number(trained: Trained) -> Trained:
    """Rows in the order of experts' numbers instead of slots."""
    order = np.argsort(trained.weights["model/mixture.expert_ids"], kind="stable")

    def sorted_rows(tensors: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value[order] if "mixture." in key and value.ndim and len(value) == len(order) else value
            for key, value in tensors.items()
            if "centroids" not in key and "spreads" not in key
        }

    return Trained(
        trained.losses, trained.rows, sorted_rows(trained.weights), sorted_rows(trained.state), trained.resumed_from
    )
