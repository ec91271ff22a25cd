"""The hook that fills the graph: against plain counting, alike on all ranks, and what the lifecycle makes of it."""

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.core.hook import Hook, StepContext
from drivetrain.core.world import World
from drivetrain.moe import Balance, Knowledge, Lifecycle, Limits, MixtureOfExperts, Rules, Settlement, Slots
from drivetrain.moe.knowledge import Clusters
from drivetrain.moe.mixture import agreements
from tests.api.jobs import Trained, Variant
from tests.gloo_pool import GlooPool
from tests.moe.jobs import Mixture, run_mixture
from tests.moe.test_lifecycle import NEVER, RULES, layer_of, look
from tests.strategies.test_expert_parallel import EXPERT_PARALLEL

NUM_LABELS = 4


def first_of(batch: Any) -> Tensor:
    found: Tensor = batch[1]
    return found


def mixture() -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(4, 5, 8, k=2, num_slots=7, balance=Balance(0.0))
    Slots(layer).prune(2)
    return layer


def data(count: int = 90) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, NUM_LABELS, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator) + 2.0 * labels.unsqueeze(1), labels


def seen(knowledge: Knowledge, layer: MixtureOfExperts, batch: Any, world: World | None = None, step: int = 1) -> None:
    layer(batch[0])
    Settlement(layer).settle()
    knowledge(StepContext(step, 0, layer, world or World(), Path(), batch=lambda: batch))


def test_edges_are_what_plain_counting_finds() -> None:
    layer, knowledge = mixture(), Knowledge(labels=first_of, names=["zero", "one"])
    assert isinstance(knowledge, Hook)
    tokens, labels = data()
    seen(knowledge, layer, (tokens, labels))
    graph = knowledge.graphs[""]
    ids = layer.expert_ids.tolist()
    chosen = [{ids[slot] for slot in row} for row in layer.router(tokens).chosen.tolist()]
    count = Counter(number for row in chosen for number in row)
    assert graph.experts == [0, 1, 3, 4]
    for one, other in combinations(graph.experts, 2):
        both = sum({one, other} <= row for row in chosen)
        expected = both / (count[one] * count[other]) ** 0.5
        weight = graph.weight(one, other, "co-activation")
        assert weight == pytest.approx(expected if expected >= 0.02 else 0.0)
    names = ["zero", "one", "label 2", "label 3"]
    assert graph.concepts == sorted(names)
    for number in graph.experts:
        for label, name in enumerate(names):
            of_label = [row for row, found in zip(chosen, labels.tolist(), strict=True) if found == label]
            expected = sum(number in row for row in of_label) / len(of_label)
            assert graph.weight(number, name, "composition") == pytest.approx(expected if expected >= 0.02 else 0.0)
        assert graph.facts(number).activations == count[number]
        assert graph.facts(number).last_use == (1 if count[number] else 0) or count[number] == 0
    shares = layer.together / 0.1  # one look of a memory of 0.9
    slots = {number: slot for slot, number in enumerate(ids) if number >= 0}
    for one, other in combinations(graph.experts, 2):
        both = sum({one, other} <= row for row in chosen)
        assert float(shares[slots[one], slots[other]]) == pytest.approx(both / len(tokens), rel=1e-5)
    assert not layer.together.diagonal().any()


def test_labels_of_samples_go_for_all_their_tokens_and_strange_ones_for_none() -> None:
    layer = mixture()
    tokens, labels = data(24)
    sequences = tokens.view(6, 4, 4)
    by_sample, by_token = Knowledge(labels=first_of), Knowledge(labels=first_of)
    seen(by_sample, layer, (sequences, labels[:6]))
    seen(by_token, layer, (sequences, labels[:6].repeat_interleave(4).view(6, 4)))
    assert by_sample.graphs[""].edges("composition") == by_token.graphs[""].edges("composition") != []
    strange = Knowledge(labels=first_of, limits=Limits(max_concepts=3))
    seen(strange, layer, (tokens, torch.full((24,), -100)))
    assert strange.graphs[""].concepts == []
    seen(strange, layer, (tokens, torch.arange(24)), step=2)
    assert strange.graphs[""].concepts == ["label 0", "label 1", "label 2"]


def test_two_who_look_at_one_step_look_once() -> None:
    layer, knowledge = mixture(), Knowledge(labels=first_of)
    seen(knowledge, layer, data())
    before = json.dumps(knowledge.graphs[""].as_json())
    knowledge(StepContext(1, 0, layer, World(), Path(), batch=lambda: data()))
    assert json.dumps(knowledge.graphs[""].as_json()) == before


def test_experts_that_others_grew_or_pruned_are_noticed() -> None:
    layer, knowledge = mixture(), Knowledge(labels=first_of)
    seen(knowledge, layer, data())
    slots = Slots(layer)
    slots.prune(0)
    slot = slots.grow(1)
    assert slot is not None
    seen(knowledge, layer, data(), step=2)
    assert knowledge.graphs[""].experts == [1, 3, 4, 5]


# On several ranks


def parts_seen(world_size: int, has_labels: bool) -> list[Any]:
    world = World.join([torch.device("cpu")]) if world_size > 1 else World()
    layer, knowledge = mixture(), Knowledge(labels=first_of if has_labels else None)
    tokens, labels = data()
    found = []
    for step in range(3):
        mine = slice(world.rank, None, world_size)
        batch = (tokens[mine] + step, labels[mine])
        layer(batch[0])
        end = Settlement(layer)
        end.group = world.group
        end.settle()
        # The last rank has no batch of its own at the second look: it holds tokens of another step, which do not count.
        gone = world_size > 1 and step == 1 and world.rank == world_size - 1
        context = StepContext(
            step, 0, layer, world, Path(), batch=lambda batch=batch, gone=gone: None if gone else batch
        )
        knowledge(context)
        found.append(json.loads(json.dumps(knowledge.state_dict())))
    return found


@pytest.mark.parametrize("has_labels", [True, False])
def test_every_rank_holds_the_same_graph_and_it_is_that_of_all_tokens(gloo_pool: GlooPool, has_labels: bool) -> None:
    ranks = gloo_pool.run(parts_seen, 3, has_labels, world=3)
    assert ranks[0] == ranks[1] == ranks[2]
    if has_labels:
        alone = parts_seen(1, True)
        ours, theirs = ranks[0][0]["graphs"][""], alone[0]["graphs"][""]
        assert ours["experts"].keys() == theirs["experts"].keys()
        assert [edge[:3] for edge in ours["edges"]] == [edge[:3] for edge in theirs["edges"]]
        np.testing.assert_allclose([edge[3] for edge in ours["edges"]], [edge[3] for edge in theirs["edges"]], 1e-9)


def test_clusters_find_what_is_apart_and_what_is_new() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 20 * torch.randn(4, 32, generator=generator)

    def tokens(kinds: list[int]) -> tuple[Tensor, Tensor]:
        kind = torch.tensor(kinds).repeat_interleave(30)
        return centres[kind] + torch.randn(len(kind), 32, generator=generator), kind

    clusters = Clusters(first=3, most=4)
    for kinds in [[0, 1, 2]] * 3:
        points, kind = tokens(kinds)
        places, names = clusters.of(points, World())
        assert len(names) == 3
        assert {len(set(places[kind == each].tolist())) for each in kinds} == {1}, "each kind is in one cluster"
        assert len(set(places.tolist())) == 3
    points, kind = tokens([0, 1, 2, 3])
    places, _ = clusters.of(points, World())
    assert set(places[kind == 3].tolist()) == {-1}, "far from all"
    places, names = clusters.of(tokens([0, 1, 2, 3])[0], World())
    assert names[-1] == "cluster 3"
    assert len(set(places.tolist())) == 4


# What the lifecycle makes of it


def test_a_new_expert_comes_from_who_serves_its_concept() -> None:
    """New tokens are nearest to another expert, but bear the label that this one serves."""
    knowledge = Knowledge(labels=first_of)
    layer = mixture()
    seen(knowledge, layer, data())
    graph = knowledge.graphs[""]
    assert knowledge.parent("", {0: 0.5, 1: 0.3, 3: 0.2, 4: 0.0}, {}) == 0
    best = graph.serving("label 3")[0][0]
    worst = next(number for number in graph.experts if number != best)
    nearest = {number: 0.3 if number == worst else 0.25 if number == best else 0.0 for number in graph.experts}
    assert knowledge.parent("", nearest, {"label 3": 1.0}) == best
    hook = Lifecycle(1, Rules(patience=2, cooldown=3, max_experts=4, **NEVER), knowledge=Knowledge())
    small = layer_of()
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        tokens = torch.randn(60, 4, generator=generator)
        look(hook, small, torch.cat([tokens, tokens + 12.0]) if step > 9 else tokens, step)
    grown = next(event for event in hook.history if event["what"] == "grown")
    assert hook.knowledge is not None
    assert hook.knowledge.graphs[""].parent_of(grown["expert"]) == grown["parent"]


@pytest.mark.parametrize(("scores", "outcome"), [("sigmoid", "merged"), ("softmax", "not merged")])
def test_a_copy_is_found_by_the_graph_and_merged(scores: str, outcome: str) -> None:
    rules = Rules(agreement=0.95, harm=0.05, idle_looks=10**9, far=1e9, min_experts=2)
    hook = Lifecycle(1, rules, knowledge=Knowledge())
    layer = layer_of(scores=scores)
    tokens = torch.randn(200, 4, generator=torch.Generator().manual_seed(3))
    assert look(hook, layer, tokens, 0) == []
    slots = Slots(layer)
    slots.activate(slots.grow(1, noise=1e-3) or 0)
    assert look(hook, layer, tokens, 1) == [outcome]
    assert hook.knowledge is not None
    graph = hook.knowledge.graphs[""]
    assert graph.experts == ([0, 1, 2] if outcome == "merged" else [0, 1, 2, 3])


def test_only_candidates_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def noted(layer: MixtureOfExperts, tokens: Tensor, slots: list[int], world: World) -> list[list[float]]:
        compared.append(len(slots))
        return agreements(layer, tokens, slots, world)

    monkeypatch.setattr("drivetrain.moe.slots.agreements", noted)
    torch.manual_seed(0)
    layer = MixtureOfExperts(4, 40, 8, k=1, num_slots=41, balance=Balance(0.0))
    rules = Rules(far=1e9, idle_looks=10**9)
    look(Lifecycle(1, rules), layer, torch.randn(200, 4), 0)
    look(Lifecycle(1, rules, knowledge=Knowledge()), layer, torch.randn(200, 4), 1)
    assert compared[0] == 40
    assert compared[1] <= 10


# In training


def train(folder: str, shares: bool, crash_at_call: int, micro_batch: int, has_labels: bool) -> Trained | None:
    variant = Variant(dtype=torch.float32, steps=12, global_batch=30, num_samples=90, save_every=4)
    knowledge = Knowledge(labels=first_of if has_labels else None)
    changes = {"hooks": [Lifecycle(3, RULES, knowledge=knowledge)], "ema": 0.9}
    settings = EXPERT_PARALLEL if shares else {}
    wanted = Mixture(num_experts=3, num_slots=6, dtype=torch.float32)
    found = run_mixture(folder, variant, wanted, micro_batch, settings, crash_at_call, changes)
    text = json.dumps(knowledge.state_dict())
    rank = dist.get_rank() if dist.is_initialized() else 0
    (Path(folder) / f"graph-{rank}.json").write_text(text)
    return found


@pytest.mark.parametrize(("world", "shares", "has_labels"), [(1, False, True), (2, True, True), (2, False, False)])
def test_a_resumed_run_has_the_same_graph_to_the_bit(
    gloo_pool: GlooPool, tmp_path: Path, world: int, shares: bool, has_labels: bool
) -> None:
    micro_batch = 10 if world == 1 else 5
    folders = [tmp_path / name for name in ("whole", "parts")]
    for folder in folders:
        folder.mkdir()

    def go(folder: Path, crash_at_call: int) -> Any:
        args = (str(folder), shares, crash_at_call, micro_batch, has_labels)
        return gloo_pool.run(train, *args, world=world)[0]

    whole = go(folders[0], 0)
    assert go(folders[1], 29) is None
    resumed = go(folders[1], 0)
    assert 0 < resumed.resumed_from < 12
    assert resumed.rows == whole.rows
    ours, theirs = resumed.weights | resumed.state, whole.weights | whole.state
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
    assert len(list(folders[0].glob("graph-*.json"))) == world
    texts = {path.read_text() for folder in folders for path in folder.glob("graph-*.json")}
    assert len(texts) == 1, "every rank's, resumed or not"
    state = json.loads(texts.pop())
    (graph,) = state["graphs"].values()
    assert {edge[2] for edge in graph["edges"]} >= {"similarity", "co-activation", "composition", "parent"}
