"""The pictures of the graph and of who lives where: nothing lies on anything else, all comes from the folder."""

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.moe import Knowledge, KnowledgeFiles, KnowledgeGraph, Lifecycle
from drivetrain.report import _epochs, write_report
from drivetrain.report.graph_picture import (
    _radii,
    _shown,
    draw_graph,
    draw_knowledge,
    draw_placement,
    draw_places,
    layout,
)
from drivetrain.report.run_data import RunData
from tests.api.jobs import Variant
from tests.core.test_knowledge_graph import deeds, told
from tests.moe.jobs import Mixture, run_mixture
from tests.moe.test_lifecycle import RULES
from tests.report.test_report import pixels, run_without_torch


@settings(max_examples=40)
@given(deeds, st.integers(0, 3))
def test_no_node_lies_on_another(what: list[tuple[str, Any]], step: int) -> None:
    graph = told(what)
    plan = layout(graph)
    assert plan.places.keys() == set(graph.experts) | set(graph.concepts)
    radii: dict[Any, float] = {**_radii(graph, plan), **dict.fromkeys(graph.concepts, 0.026)}
    for one, other in combinations(plan.places, 2):
        assert math.dist(plan.places[one], plan.places[other]) > radii[one] + radii[other]
    assert layout(KnowledgeGraph.from_json(graph.as_json())) == plan, "a restart draws the same"


def test_what_is_strong_is_shown_and_in_order() -> None:
    graph = KnowledgeGraph()
    for number in range(12):
        graph.add_expert(number, 0)
    graph.look({"similarity": {(one, other): (one + other) / 22 for one, other in combinations(range(12), 2)}})
    weights = [edge.weight for edge in _shown(graph)]
    assert weights == sorted(weights), "the strongest above"
    assert max(weights) == max(edge.weight for edge in graph.edges())
    assert 0 < len(weights) <= 2 * 12


@pytest.mark.parametrize("num_experts", [0, 1, 2, 30])
def test_graphs_of_any_size_can_be_drawn(num_experts: int) -> None:
    graph = KnowledgeGraph()
    for number in range(num_experts):
        graph.add_expert(number, 0, parent=number // 2 if number else None)
    for number in range(num_experts):
        graph.add_concept(f"a concept with quite a long name {number}")
    served = {(number, f"a concept with quite a long name {number}"): 0.5 for number in range(num_experts)}
    graph.look({"composition": served})
    width, height, num_bytes = pixels(draw_graph(graph, 10, "name"))
    assert (width, height) == (1380, 984)
    assert num_bytes > 50


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_placements_of_any_size_can_be_drawn(num_ranks: int) -> None:
    graph = KnowledgeGraph()
    for number in range(9):
        graph.add_expert(number, 0)
    graph.look({"co-activation": {(0, 1): 0.5, (1, 8): 0.4}})
    layer = {
        "graph": graph.as_json(),
        "ranks": [slot % num_ranks for slot in range(10)],
        "capabilities": [1.0] * num_ranks,
        "experts": [*range(9), -1],
        "loads": [5] * 9 + [0],
        "together": 0.5,
    }
    _, _, num_bytes = pixels(draw_placement(layer, "name", "words"))
    assert num_bytes > 50


def test_from_a_run_to_its_pictures(tmp_path: Path) -> None:
    """What is written is what the run had; tokens are those of the epoch, which a resumed run knows too."""
    variant = Variant(dtype=torch.float32, steps=18, global_batch=15, num_samples=90, save_every=9)
    wanted = Mixture(num_experts=3, num_slots=6, dtype=torch.float32)
    knowledge = Knowledge(labels=lambda batch: batch[1])
    hooks = [Lifecycle(3, RULES, knowledge=knowledge), KnowledgeFiles(knowledge)]
    run_mixture(str(tmp_path), variant, wanted, 15, crash_at_call=11, changes={"hooks": hooks})
    knowledge = Knowledge(labels=lambda batch: batch[1])
    hooks = [Lifecycle(3, RULES, knowledge=knowledge), KnowledgeFiles(knowledge)]
    run_mixture(str(tmp_path), variant, wanted, 15, changes={"hooks": hooks})
    folder = tmp_path / "suite"
    names = sorted(path.name for path in (folder / "knowledge").iterdir())
    assert names == ["epoch_0001.json", "epoch_0002.json", "epoch_0003.json"]
    for epoch, name in enumerate(names, start=1):
        found = json.loads((folder / "knowledge" / name).read_text())
        assert (found["epoch"], found["step"]) == (epoch, 6 * epoch)
        assert sum(found["layers"]["mixture"]["loads"]) == 90 * 2, "every token of the epoch went to two"
    assert found["layers"]["mixture"]["graph"] == json.loads(json.dumps(knowledge.graphs["mixture"].as_json()))
    data = RunData.read(folder)
    assert draw_knowledge(data, epoch=7) is None
    assert draw_places(data) is None, "one device"
    assert write_report(folder) == []
    for name in ("knowledge_graph", *(f"knowledge_graph_epoch_{epoch}" for epoch in (1, 2, 3))):
        assert pixels((folder / f"{name}.png").read_bytes())[2] > 50
    assert "What the experts know" in (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    assert "report.html" in run_without_torch(f"assert main(['report', {str(folder)!r}]) == 0")


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [1]), (4, [1, 2, 3, 4]), (101, [1, 21, 41, 61, 81, 101])])
def test_of_many_epochs_some_are_drawn(tmp_path: Path, count: int, expected: list[int]) -> None:
    (tmp_path / "knowledge").mkdir()
    for epoch in range(1, count + 1):
        (tmp_path / "knowledge" / f"epoch_{epoch:04d}.json").touch()
    assert _epochs(tmp_path) == expected


def test_graphs_of_epochs_that_are_drawn_no_more_go(tmp_path: Path) -> None:
    """After a resume other epochs are the ones between; where nothing is known of any, what is there stays."""
    old = tmp_path / "knowledge_graph_epoch_3.png"
    old.touch()
    write_report(tmp_path)
    assert old.exists()
    (tmp_path / "knowledge").mkdir()
    (tmp_path / "knowledge" / "epoch_0001.json").write_text('{"step": 1, "epoch": 1, "layers": {}}')
    write_report(tmp_path)
    assert not old.exists()
