"""Lays a knowledge graph out: experts on a circle, concepts around them, near the experts that serve them.

Circles are used, since nothing on one can overlap, and the picture of the next epoch looks much the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drivetrain.moe.knowledge.graph import KnowledgeGraph, Node

Point = tuple[float, float]
_TIES = ("similarity", "co-activation", "parent", "split")
_OUTER = 1.0
_SEARCHED = 24  # experts; the chain alone has to do for more


@dataclass(frozen=True)
class GraphLayout:
    places: Mapping[Node, Point]
    angles: Mapping[Node, float]
    inner: float  # radius of the experts' circle


def layout(graph: KnowledgeGraph) -> GraphLayout:
    experts = _in_a_ring(graph)
    inner = 0.62 if graph.concepts else 0.85
    angles: dict[Node, float] = dict(_evenly(experts))
    concepts = _around(graph, angles)
    angles |= concepts
    places: dict[Node, Point] = {
        node: _point(angle, _OUTER if node in concepts else inner if len(experts) > 1 else 0.0)
        for node, angle in angles.items()
    }
    return GraphLayout(places, angles, inner)


def _in_a_ring(graph: KnowledgeGraph) -> list[int]:
    """Order experts so that neighbours are tied: a chain of the strongest ties, then pairs swap while it helps."""
    ties = _ties(graph)
    left = list(graph.experts)
    ring: list[int] = []
    while left:
        best = max(left, key=lambda number: (ties.get((ring[-1], number), 0.0) if ring else 0.0, -number))
        ring.append(best)
        left.remove(best)
    for _ in range(4 if len(ring) <= _SEARCHED else 0):
        for first in range(len(ring)):
            for second in range(first + 1, len(ring)):
                before = _length(ring, ties)
                ring[first], ring[second] = ring[second], ring[first]
                if _length(ring, ties) >= before - 1e-12:
                    ring[first], ring[second] = ring[second], ring[first]
    return ring


def _ties(graph: KnowledgeGraph) -> dict[tuple[Node, Node], float]:
    """Return the weights of ties between experts, also through the concepts they share."""
    ties: dict[tuple[Node, Node], float] = {}

    def tie(one: Node, other: Node, weight: float) -> None:
        for pair in ((one, other), (other, one)):
            ties[pair] = ties.get(pair, 0.0) + weight

    for edge in graph.edges():
        if edge.relation in _TIES:
            tie(edge.one, edge.other, edge.weight)
    for concept in graph.concepts:
        serving = graph.serving(concept)
        for place, (one, first) in enumerate(serving):
            for other, second in serving[:place]:
                tie(one, other, first * second)
    return ties


def _length(ring: Sequence[int], ties: Mapping[tuple[Node, Node], float]) -> float:
    size = len(ring)
    where = {number: place for place, number in enumerate(ring)}
    return sum(
        weight * min(abs(where[one] - where[other]), size - abs(where[one] - where[other]))  # type: ignore[index]
        for (one, other), weight in ties.items()
    )


def _around(graph: KnowledgeGraph, angles: Mapping[Node, float]) -> dict[Node, float]:
    """Place each concept near its experts, all of them evenly apart, the whole rotated to where it fits best."""
    wanted: dict[str, float] = {}
    for concept in graph.concepts:
        serving = graph.serving(concept)
        east = sum(weight**2 * math.cos(angles[number]) for number, weight in serving)
        north = sum(weight**2 * math.sin(angles[number]) for number, weight in serving)
        wanted[concept] = math.atan2(north, east) % math.tau
    order = sorted(wanted, key=lambda concept: (wanted[concept], concept))
    count = len(order)
    if not count:
        return {}

    def cost(turn: float, shift: int) -> float:
        return sum(
            1 - math.cos(turn + math.tau * ((place + shift) % count) / count - wanted[concept])
            for place, concept in enumerate(order)
        )

    turns = [math.tau * step / (count * 12) for step in range(12)]
    shifts = range(count) if count <= 64 else range(1)
    turn, shift = min(((t, s) for t in turns for s in shifts), key=lambda pair: (cost(*pair), pair))
    return {concept: turn + math.tau * ((place + shift) % count) / count for place, concept in enumerate(order)}


def _evenly(nodes: Sequence[int]) -> list[tuple[int, float]]:
    return [(node, math.pi / 2 - math.tau * place / max(len(nodes), 1)) for place, node in enumerate(nodes)]


def _point(angle: float, radius: float) -> Point:
    return radius * math.cos(angle), radius * math.sin(angle)
