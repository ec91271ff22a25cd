"""What is known of a layer's experts and of what they work on: a graph whose edges fade unless they are seen again.

Experts are nodes by their number, concepts (labels, or clusters of inputs) by their name. It holds no tensors and asks
no clock: the same facts in the same order make the same graph, on every rank and after every restart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum, isnan, log
from typing import Any, Literal, NamedTuple, Self, get_args

from drivetrain.core.errors import DrivetrainError

Relation = Literal["similarity", "co-activation", "parent", "composition", "split"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)
Node = int | str  # an expert's number, a concept's name
VERSION = 1
_EXACT_COVER = 12  # of so many concepts the smallest cover is found by trying all; of more, step by step


@dataclass(frozen=True)
class Limits:
    """How long edges last, and how many there may be: what keeps the graph small however long a run is."""

    memory: float = 0.9  # how much of a weight stays at a look; the rest is what was seen
    parent_memory: float = 0.99  # descent is seen once
    least: float = 0.02  # weaker edges go
    most_edges: int = 8  # of a relation: those stay that are among so many strongest of one of their ends
    max_concepts: int = 64


class Edge(NamedTuple):
    """Between two experts, the older first, for a parent too; or from an expert to a concept (`composition`).

    Weights are above 0 and at most 1. `similarity`: they say the same, or are given the same. `co-activation`: how
    often they are chosen together. `composition`: which part of a concept's tokens the expert gets. `split`: they have
    the same concepts, but not the same tokens.
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
    """`nx` is the networkx graph, with the relation as the key of an edge; read it, and change it by these methods."""

    def __init__(self, limits: Limits | None = None) -> None:
        import networkx

        self.limits = limits or Limits()
        self.nx: Any = networkx.MultiGraph()
        self.newest = -1  # the highest number an expert had

    # Who is there

    @property
    def experts(self) -> list[int]:
        return sorted(node for node in self.nx if isinstance(node, int))

    @property
    def concepts(self) -> list[str]:
        return sorted(node for node in self.nx if isinstance(node, str))

    def facts(self, number: int) -> ExpertFacts:
        self._check_there(number)
        return ExpertFacts(**self.nx.nodes[number])

    def add_expert(self, number: int, step: int, parent: int | None = None) -> None:
        if number <= self.newest:
            raise DrivetrainError(
                f"expert {number} cannot come: numbers up to {self.newest} were given, and are never given again",
                remedy=f"use {self.newest + 1} or more",
            )
        if parent is not None:
            self._check_there(parent)
        self.nx.add_node(number, **asdict(ExpertFacts(last_use=step, born=step)))
        self.newest = number
        if parent is not None:
            self.nx.add_edge(parent, number, "parent", weight=1.0)

    def remove_expert(self, number: int, into: int | None = None) -> None:
        """With all its edges; what it was merged `into` takes them over, the stronger of two."""
        self._check_there(number)
        if into is not None:
            self._check_there(into)
            self._hand_on(number, into)
        self.nx.remove_node(number)

    def add_concept(self, name: str) -> None:
        """Where there are too many, the one that the experts have least of goes."""
        if name in self.nx:
            return
        if len(self.concepts) >= self.limits.max_concepts:
            self.nx.remove_node(min(self.concepts, key=lambda concept: (self._strength(concept), concept)))
        self.nx.add_node(name)

    # What is seen

    def note(self, number: int, *, activations: int, last_use: int) -> None:
        self._check_there(number)
        self.nx.nodes[number].update(activations=activations, last_use=last_use)

    def correct(self, one: int, other: int, relation: Relation, weight: float) -> None:
        """What was measured counts for as much as all that was seen before. Only of edges that there are."""
        self._check_seen({_key(one, other, relation): weight})
        found = self.nx.get_edge_data(one, other, relation)
        if found:
            found["weight"] = (found["weight"] + weight) / 2

    def look(self, seen: Mapping[str, Mapping[tuple[Any, Any], float]]) -> None:
        """One look: every edge moves towards what was seen of it, and what was not seen fades."""
        found = {
            _key(one, other, relation): weight
            for relation, edges in seen.items()
            for (one, other), weight in edges.items()
        }
        self._check_seen(found)
        for one, other, relation, facts in list(self.nx.edges(keys=True, data=True)):
            memory = self.limits.parent_memory if relation == "parent" else self.limits.memory
            now = found.pop(_key(one, other, relation), 0.0)
            facts["weight"] = min(memory * facts["weight"] + (1 - memory) * now, 1.0)
        for (one, other, relation), weight in found.items():  # nothing was known of them, so all is news
            if weight > 0:
                self.nx.add_edge(one, other, relation, weight=float(weight))
        self._drop_weak()
        self.nx.remove_nodes_from([concept for concept in self.concepts if not self.nx.adj[concept]])
        for number in self.experts:
            self._specialise(number)

    # Questions

    def edges(self, relation: Relation | None = None) -> list[Edge]:
        """In an order that depends on nothing but what they are."""
        found = [
            Edge(*_key(one, other, kind), weight)
            for one, other, kind, weight in self.nx.edges(keys=True, data="weight")
            if relation in (None, kind)
        ]
        return sorted(found, key=lambda edge: (edge.relation, str(type(edge.other)), edge.one, edge.other))

    def weight(self, one: Node, other: Node, relation: Relation) -> float:
        found = self.nx.get_edge_data(one, other, relation)
        return float(found["weight"]) if found else 0.0

    def similar(self, number: int, at_least: float = 0.7) -> list[tuple[int, float]]:
        """The most similar first."""
        self._check_there(number)
        found = [
            (other, facts["similarity"]["weight"])
            for other, facts in self.nx.adj[number].items()
            if "similarity" in facts and facts["similarity"]["weight"] >= at_least
        ]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def most_similar(self, count: int, among: Iterable[int] | None = None) -> list[tuple[int, int]]:
        """Pairs, the most similar first."""
        wanted = set(self.experts if among is None else among)
        found = [edge for edge in self.edges("similarity") if edge.one in wanted and edge.other in wanted]
        found.sort(key=lambda edge: (-edge.weight, edge.one, edge.other))
        return [(int(edge.one), int(edge.other)) for edge in found[:count]]

    def central(self, count: int | None = None) -> list[tuple[int, float]]:
        """By the weight of what ties an expert to others, over how many others there are; the most central first."""
        experts = self.experts
        others = max(len(experts) - 1, 1)
        found = [(number, self._strength(number) / others) for number in experts]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))[:count]

    def dormant(self, step: int, idle_steps: int) -> list[int]:
        """Not used for more than so many steps."""
        return [number for number in self.experts if step - self.nx.nodes[number]["last_use"] > idle_steps]

    def isolated(self) -> list[int]:
        """Tied to no other expert."""
        import networkx

        return sorted(networkx.isolates(self.nx.subgraph(self.experts)))

    def parent_of(self, number: int) -> int | None:
        self._check_there(number)
        found = [other for other, facts in self.nx.adj[number].items() if "parent" in facts and other < number]
        return found[0] if found else None

    def serving(self, concept: str) -> list[tuple[int, float]]:
        """Who gets its tokens, and which part; the largest first."""
        found = [(number, self.weight(number, concept, "composition")) for number in self.nx.adj.get(concept, ())]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def cover(self, concepts: Sequence[str], at_least: float = 0.1) -> Cover:
        """The fewest experts of which each concept has one that gets this part of its tokens.

        The fewest there are for up to 12 concepts; for more, always the one that adds most, which is near it.
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
        for number, facts in stored["experts"].items():
            graph.nx.add_node(int(number), **facts)
        graph.nx.add_nodes_from(stored["concepts"])
        for one, other, relation, weight in stored["edges"]:
            graph.nx.add_edge(one, other, relation, weight=weight)
        return graph

    # How it is kept

    def _strength(self, node: Node) -> float:
        """Of all that ties it to experts. The order of edges, which a restart changes, does not matter to this sum."""
        found = self.nx.edges(node, data="weight")
        return fsum(weight for _, other, weight in found if isinstance(other, int))

    def _specialise(self, number: int) -> None:
        """1 − the entropy of an expert's parts of all concepts, over that of equal ones. Nothing seen, nothing new."""
        weights = [facts["composition"]["weight"] for facts in self.nx.adj[number].values() if "composition" in facts]
        total, most = fsum(weights), log(max(len(self.concepts), 2))
        if total:
            entropy = -fsum(weight / total * log(weight / total) for weight in weights if weight)
            self.nx.nodes[number]["specialisation"] = min(max(1.0 - entropy / most, 0.0), 1.0)

    def _hand_on(self, number: int, into: int) -> None:
        facts, gone = self.nx.nodes[into], self.nx.nodes[number]
        facts["activations"] += gone["activations"]
        facts["last_use"] = max(facts["last_use"], gone["last_use"])
        for _, other, relation, weight in list(self.nx.edges(number, keys=True, data="weight")):
            if other == into:
                continue
            if relation == "parent" and not (number < other and into < other):
                continue  # who has a parent keeps it, and nobody descends from one who is younger
            self.nx.add_edge(into, other, relation, weight=max(weight, self.weight(into, other, relation)))

    def _drop_weak(self) -> None:
        """Too weak ones, and those that are among the strongest of neither of their ends."""
        strongest: dict[tuple[Node, str], list[tuple[float, str, tuple[Any, ...]]]] = {}
        gone = []
        for edge in self.edges():
            key = edge[:3]
            if edge.weight < self.limits.least:
                gone.append(key)
                continue
            for end in (edge.one, edge.other):
                strongest.setdefault((end, edge.relation), []).append((-edge.weight, str(key), key))
        kept = {key for found in strongest.values() for _, _, key in sorted(found)[: self.limits.most_edges]}
        everything = {key for found in strongest.values() for _, _, key in found}
        self.nx.remove_edges_from([*gone, *(everything - kept)])

    def _check_there(self, number: int) -> None:
        if number not in self.nx:
            raise DrivetrainError(f"the graph has no expert {number}", remedy=f"one of {self.experts}")

    def _check_seen(self, found: Mapping[tuple[Node, Node, str], float]) -> None:
        for (one, other, relation), weight in found.items():
            if relation not in RELATIONS or relation == "parent":
                raise DrivetrainError(
                    f"{relation!r} is no relation that is seen at a look",
                    remedy=f"one of {', '.join(each for each in RELATIONS if each != 'parent')}",
                )
            if one not in self.nx or other not in self.nx or one == other:
                raise DrivetrainError(f"{relation} of {one} and {other}: not two nodes of the graph", remedy="add them")
            if isinstance(other, str) != (relation == "composition"):
                raise DrivetrainError(f"{relation} of {one} and {other}", remedy="composition is of expert and concept")
            if isnan(weight) or not 0 <= weight <= 1:
                raise DrivetrainError(f"{relation} of {one} and {other} is {weight}", remedy="a weight from 0 to 1")


def _key(one: Any, other: Any, relation: Any) -> tuple[Any, Any, Any]:
    """The older expert first; an expert before a concept."""
    turned = isinstance(one, str) or (isinstance(other, int) and other < one)
    return (other, one, relation) if turned else (one, other, relation)


def _smallest_cover(serves: Mapping[int, set[str]], wanted: Sequence[str]) -> list[int]:
    """Which sets of concepts can be covered by one expert, by two, and so on, until it is all of them."""
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
