"""A graph of a layer's experts and of the concepts they serve; its edges decay unless they are seen again.

Experts are nodes by their number, concepts (labels, or clusters of inputs) by their name. It holds no tensors and reads
no clock: the same facts in the same order make the same graph, on every rank and after every restart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import fsum, isnan, log
from typing import Any, Literal, NamedTuple, Self, get_args

from drivetrain.core.errors import DrivetrainError

Relation = Literal["similarity", "co-activation", "parent", "composition", "split"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)
Node = int | str  # an expert's number, a concept's name
_Key = tuple[Any, Any, Any]  # the ends of an edge in their order, and the relation
VERSION = 1
_EXACT_COVER = 12  # up to this many concepts the smallest cover is found exactly; for more, greedily


@dataclass(frozen=True)
class Limits:
    """The decay of edges and their maximal number, which keep the graph small however long a run is."""

    memory: float = 0.9  # how much of a weight stays at a look; the rest is what was seen
    parent_memory: float = 0.99  # descent is seen once
    least: float = 0.02  # weaker edges go
    most_edges: int = 8  # per relation and node: an edge stays if it is among the strongest of one of its ends
    max_concepts: int = 64


class Edge(NamedTuple):
    """An edge between two experts, the older first, for a parent too; or from an expert to a concept (`composition`).

    Weights are above 0 and at most 1. `similarity`: their outputs, or their inputs, are the same. `co-activation`: how
    often they are chosen together. `composition`: the fraction of a concept's tokens that the expert gets. `split`:
    they have the same concepts, but not the same tokens.
    """

    one: Node
    other: Node
    relation: Relation
    weight: float


@dataclass
class ExpertFacts:
    activations: int = 0  # tokens it got
    specialisation: float = 0.0  # 0: all concepts alike; 1: one only
    last_use: int = 0  # the step
    born: int = 0


class Cover(NamedTuple):
    experts: list[int]
    missing: list[str]  # concepts that no expert serves


class KnowledgeGraph:
    """The graph, kept as plain tables, since every look visits all edges; `nx` is the same for networkx."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._facts: dict[int, ExpertFacts] = {}
        self._concepts: set[str] = set()
        self._weights: dict[_Key, float] = {}
        self.newest = -1  # the highest number an expert had

    @property
    def nx(self) -> Any:
        """Build a networkx graph of the present state; the relation is the key of an edge."""
        import networkx

        graph = networkx.MultiGraph()
        graph.add_nodes_from((number, asdict(self._facts[number])) for number in self.experts)
        graph.add_nodes_from(self.concepts)
        graph.add_edges_from(
            (one, other, relation, {"weight": weight}) for one, other, relation, weight in self.edges()
        )
        return graph

    # Who is there

    def __contains__(self, node: Node) -> bool:
        return node in self._facts or node in self._concepts

    @property
    def experts(self) -> list[int]:
        return sorted(self._facts)

    @property
    def concepts(self) -> list[str]:
        return sorted(self._concepts)

    def facts(self, number: int) -> ExpertFacts:
        self._check_there(number)
        return replace(self._facts[number])

    def add_expert(self, number: int, step: int, parent: int | None = None) -> None:
        if number <= self.newest:
            raise DrivetrainError(
                f"expert {number} cannot come: numbers up to {self.newest} were given, and are never given again",
                remedy=f"use {self.newest + 1} or more",
            )
        if parent is not None:
            self._check_there(parent)
        self._facts[number] = ExpertFacts(last_use=step, born=step)
        self.newest = number
        if parent is not None:
            self._weights[parent, number, "parent"] = 1.0

    def remove_expert(self, number: int, into: int | None = None) -> None:
        """Remove an expert with all its edges; the one it was merged `into` takes them over, the stronger of two."""
        self._check_there(number)
        if into is not None:
            self._check_there(into)
            self._hand_on(number, into)
        self._remove(number)

    def add_concept(self, name: str) -> None:
        """Add a concept. Where there are too many, the one with the weakest ties to experts is removed."""
        if name in self._concepts:
            return
        if len(self._concepts) >= self.limits.max_concepts:
            self._remove(min(self._concepts, key=lambda concept: (self._strength(concept), concept)))
        self._concepts.add(name)

    # What is seen

    def note(self, number: int, *, activations: int, last_use: int) -> None:
        self._check_there(number)
        facts = self._facts[number]
        facts.activations, facts.last_use = activations, last_use

    def correct(self, one: int, other: int, relation: Relation, weight: float) -> None:
        """Average an existing edge with a measured weight: a measurement counts as much as all that was seen before."""
        key = _key(one, other, relation)
        self._check_seen({key: weight})
        if key in self._weights:
            self._weights[key] = (self._weights[key] + weight) / 2

    def look(self, seen: Mapping[str, Mapping[tuple[Any, Any], float]]) -> None:
        """Move every edge towards what was seen of it in one look; edges that were not seen decay."""
        found = {
            _key(one, other, relation): weight
            for relation, edges in seen.items()
            for (one, other), weight in edges.items()
        }
        self._check_seen(found)
        memories = dict.fromkeys(RELATIONS, self.limits.memory) | {"parent": self.limits.parent_memory}
        for key, weight in self._weights.items():
            memory = memories[key[2]]
            self._weights[key] = min(memory * weight + (1 - memory) * found.pop(key, 0.0), 1.0)
        # The remaining edges are new: they start at the weight that was seen.
        self._weights |= {key: float(weight) for key, weight in found.items() if weight > 0}
        self._drop_weak()
        self._concepts &= {key[1] for key in self._weights}
        self._specialise()

    # Questions

    def edges(self, relation: Relation | None = None) -> list[Edge]:
        """Return the edges in an order that depends only on the edges themselves."""
        found = [Edge(*key, weight) for key, weight in self._weights.items() if relation in (None, key[2])]
        return sorted(found, key=lambda edge: (edge.relation, str(type(edge.other)), edge.one, edge.other))

    def weight(self, one: Node, other: Node, relation: Relation) -> float:
        return self._weights.get(_key(one, other, relation), 0.0)

    def similar(self, number: int, at_least: float = 0.7) -> list[tuple[int, float]]:
        """Return the similar experts, the most similar first."""
        self._check_there(number)
        found = [
            (other, weight)
            for other, relation, weight in self._ties(number)
            if relation == "similarity" and weight >= at_least
        ]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def most_similar(self, count: int, among: Iterable[int] | None = None) -> list[tuple[int, int]]:
        """Return pairs of experts, the most similar first."""
        wanted = set(self.experts if among is None else among)
        found = [
            (-weight, one, other)
            for (one, other, relation), weight in self._weights.items()
            if relation == "similarity" and one in wanted and other in wanted
        ]
        return [(one, other) for _, one, other in sorted(found)[:count]]

    def central(self, count: int | None = None) -> list[tuple[int, float]]:
        """Return experts by the mean weight of their edges over all other experts; the most central first."""
        experts = self.experts
        others = max(len(experts) - 1, 1)
        found = [(number, self._strength(number) / others) for number in experts]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))[:count]

    def dormant(self, step: int, idle_steps: int) -> list[int]:
        """Return the experts that were not used for more than `idle_steps` steps."""
        return [number for number in self.experts if step - self._facts[number].last_use > idle_steps]

    def isolated(self) -> list[int]:
        """Return the experts without an edge to another expert."""
        import networkx

        return sorted(networkx.isolates(self.nx.subgraph(self.experts)))

    def parent_of(self, number: int) -> int | None:
        self._check_there(number)
        found = (other for other, relation, _ in self._ties(number) if relation == "parent" and other < number)
        return next(found, None)

    def serving(self, concept: str) -> list[tuple[int, float]]:
        """Return the experts that get a concept's tokens, and their fraction; the largest first."""
        found = [(number, weight) for number, _, weight in self._ties(concept)]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def cover(self, concepts: Sequence[str], at_least: float = 0.1) -> Cover:
        """Return the fewest experts such that each concept has one that gets this fraction of its tokens.

        The result is minimal for up to 12 concepts; for more, the expert that adds most is taken each time, which is
        near it.
        """
        serves: dict[int, set[str]] = {}
        for concept in set(concepts):
            for number, weight in self.serving(concept):
                if weight >= at_least:
                    serves.setdefault(number, set()).add(concept)
        reachable = set().union(*serves.values()) if serves else set()
        missing = [concept for concept in concepts if concept not in reachable]
        find = _smallest_cover if len(reachable) <= _EXACT_COVER else _greedy_cover
        return Cover(find(serves, sorted(reachable)), missing)

    # JSON

    def as_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "newest": self.newest,
            "limits": asdict(self.limits),
            "experts": {str(number): asdict(self.facts(number)) for number in self.experts},
            "concepts": self.concepts,
            "edges": [list(edge) for edge in self.edges()],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        if stored.get("version") != VERSION:
            raise DrivetrainError(
                f"this knowledge graph has version {stored.get('version')}, and {VERSION} can be read",
                remedy="use the drivetrain that wrote it",
            )
        graph = cls(Limits(**stored["limits"]))
        graph.newest = stored["newest"]
        graph._facts = {int(number): ExpertFacts(**facts) for number, facts in stored["experts"].items()}
        graph._concepts = set(stored["concepts"])
        graph._weights = {_key(one, other, relation): weight for one, other, relation, weight in stored["edges"]}
        return graph

    # How it is kept

    def _ties(self, node: Node) -> list[tuple[Any, Any, float]]:
        """Return all edges of a node: the other node, relation and weight."""
        return [
            (other if one == node else one, relation, weight)
            for (one, other, relation), weight in self._weights.items()
            if node in (one, other)
        ]

    def _remove(self, node: Node) -> None:
        self._facts.pop(node, None)  # type: ignore[arg-type]
        self._concepts.discard(node)
        self._weights = {key: weight for key, weight in self._weights.items() if node not in key[:2]}

    def _strength(self, node: Node) -> float:
        """Return the total weight of its edges to experts. The sum does not depend on the order of edges.

        A restart changes that order.
        """
        return fsum(weight for other, _, weight in self._ties(node) if isinstance(other, int))

    def _specialise(self) -> None:
        """Set each expert's specialization: 1 − entropy of its fractions of all concepts ÷ that of equal ones.

        It stays as it is where nothing was seen.
        """
        parts: dict[int, list[float]] = {}
        for (number, _, relation), weight in self._weights.items():
            if relation == "composition":
                parts.setdefault(number, []).append(weight)
        most = log(max(len(self._concepts), 2))
        for number, weights in parts.items():
            total = fsum(weights)
            if total:
                entropy = -fsum(weight / total * log(weight / total) for weight in weights if weight)
                self._facts[number].specialisation = min(max(1.0 - entropy / most, 0.0), 1.0)

    def _hand_on(self, number: int, into: int) -> None:
        facts, gone = self._facts[into], self._facts[number]
        facts.activations += gone.activations
        facts.last_use = max(facts.last_use, gone.last_use)
        for other, relation, weight in self._ties(number):
            if other == into:
                continue
            if relation == "parent" and not (number < other and into < other):
                continue  # an expert keeps its parent, and none descends from a younger one
            key = _key(into, other, relation)
            self._weights[key] = max(weight, self._weights.get(key, 0.0))

    def _drop_weak(self) -> None:
        """Drop edges that are too weak, and those that are among the strongest of neither of their ends."""
        strongest: dict[tuple[Node, str], list[tuple[float, _Key]]] = {}
        for key, weight in self._weights.items():
            if weight >= self.limits.least:
                entry = (-weight, key)
                strongest.setdefault((key[0], key[2]), []).append(entry)
                strongest.setdefault((key[1], key[2]), []).append(entry)
        most = self.limits.most_edges
        few = [found if len(found) <= most else sorted(found)[:most] for found in strongest.values()]
        kept = {key for found in few for _, key in found}
        self._weights = {key: weight for key, weight in self._weights.items() if key in kept}

    def _check_there(self, number: int) -> None:
        if number not in self._facts:
            raise DrivetrainError(f"the graph has no expert {number}", remedy=f"one of {self.experts}")

    def _check_seen(self, found: Mapping[tuple[Node, Node, str], float]) -> None:
        for (one, other, relation), weight in found.items():
            if relation not in RELATIONS or relation == "parent":
                raise DrivetrainError(
                    f"{relation!r} is no relation that is seen at a look",
                    remedy=f"one of {', '.join(each for each in RELATIONS if each != 'parent')}",
                )
            if one not in self or other not in self or one == other:
                raise DrivetrainError(f"{relation} of {one} and {other}: not two nodes of the graph", remedy="add them")
            if isinstance(other, str) != (relation == "composition"):
                raise DrivetrainError(f"{relation} of {one} and {other}", remedy="composition is of expert and concept")
            if isnan(weight) or not 0 <= weight <= 1:
                raise DrivetrainError(f"{relation} of {one} and {other} is {weight}", remedy="a weight from 0 to 1")


def _key(one: Any, other: Any, relation: Any) -> _Key:
    """Return the key of an edge: the older expert first; an expert before a concept."""
    turned = isinstance(one, str) or (isinstance(other, int) and other < one)
    return (other, one, relation) if turned else (one, other, relation)


def _smallest_cover(serves: Mapping[int, set[str]], wanted: Sequence[str]) -> list[int]:
    """Find the sets of concepts that one expert can cover, then two, and so on, until all are covered."""
    bits = {concept: 1 << place for place, concept in enumerate(wanted)}
    masks = {number: sum(bits[concept] for concept in serves[number]) for number in sorted(serves)}
    everything = (1 << len(wanted)) - 1
    reached: dict[int, list[int]] = {0: []}
    while everything not in reached:
        step: dict[int, list[int]] = {}
        for covered, numbers in reached.items():
            for number, mask in masks.items():
                if covered | mask not in reached:
                    step.setdefault(covered | mask, [*numbers, number])
        reached |= step
    return sorted(reached[everything])


def _greedy_cover(serves: Mapping[int, set[str]], wanted: Sequence[str]) -> list[int]:
    left, found = set(wanted), []
    while left:
        best = min(serves, key=lambda number: (-len(serves[number] & left), number))
        found.append(best)
        left -= serves[best]
    return sorted(found)
