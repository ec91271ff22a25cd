"""A hook that keeps a graph of every mixture's experts, from facts over all ranks: the same graph everywhere.

It sees a sample of the last micro-batch's tokens, which layers keep anyway, so between looks it costs nothing. Concepts
are labels, or online clusters of a layer's inputs, equal on all ranks. For these, tokens are mapped by a fixed
projection to a few numbers, which nearly preserves distances: so the state is small, whatever the width of the layer.

Another hook writes graphs and expert placement into the run folder, for the figures of the report.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

from drivetrain.core.hook import StepContext
from drivetrain.core.knowledge_graph import KnowledgeGraph, Limits
from drivetrain.core.run_folder import write_atomically
from drivetrain.core.world import World
from drivetrain.moe.experts import share_together
from drivetrain.moe.mixture import MixtureOfExperts, check_every, mixtures_in, route

DIMENSIONS = 16
MEMORY = 0.9  # how much of a center stays at each look
FAR = 6.0  # times the usual square distance: new
NEW_SHARE = 0.1  # the least fraction of a look's tokens for a new cluster
FORGOTTEN_SHARE = 0.005  # of tokens, over looks: the cluster goes
_ROUNDS = 8  # of looking for the first centers
TOGETHER_MEMORY = 0.9  # how much of the shares by which experts are placed stays at each look
FOLDER = "knowledge"


@dataclass
class Clusters:
    """The clusters of a layer's inputs. Numbers are never reused. The whole state is JSON."""

    first: int = 8  # how many to begin with
    most: int = 16
    numbers: list[int] = field(default_factory=list)
    centres: list[list[float]] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)  # mean square distance from the center
    shares: list[float] = field(default_factory=list)  # of tokens, over looks
    next_number: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, tokens: Tensor, world: World) -> tuple[Tensor, list[str]]:
        """Return each token's cluster as an index into the names, -1 if far from all, and the names.

        Then learn from the tokens. All ranks call it together.
        """
        points = tokens.double() @ _projection(tokens.shape[1]).to(tokens.device)
        if not self.numbers:
            self._begin(points, world)
        if not self.numbers:  # rank 0 had no tokens
            return torch.full((len(points),), -1, device=points.device), []
        names = [f"cluster {number}" for number in self.numbers]
        centres = torch.tensor(self.centres, dtype=torch.float64, device=points.device)
        spreads = torch.tensor(self.spreads, dtype=torch.float64, device=points.device)
        least, nearest = torch.cdist(points, centres).square().min(1)
        is_new = (least > FAR * spreads[nearest]) & (spreads[nearest] > 0)
        self._learn(points, nearest, least, is_new, world)
        return torch.where(is_new, -1, nearest), names

    def _begin(self, points: Tensor, world: World) -> None:
        """Place the first centers by rank 0's tokens: far apart at first, then each the mean of its nearest tokens."""
        centres = world.agree(_first_centres(points, self.first).tolist() if world.is_main else None)
        for centre in centres:
            self._add(centre, 0.0)

    def _learn(self, points: Tensor, nearest: Tensor, least: Tensor, is_new: Tensor, world: World) -> None:
        count, width = len(self.numbers), points.shape[1]
        facts = points.new_zeros(count + 1, width + 2)  # of each cluster and of what is new: sum, squares, tokens
        to = torch.where(is_new, count, nearest)
        facts[:, :width].index_add_(0, to, points)
        facts[:, width].index_add_(0, to, least)
        facts[:, width + 1].index_add_(0, to, torch.ones_like(least))
        table = world.all_reduce(facts).tolist()  # the host waits
        everything = sum(row[-1] for row in table) or 1.0
        for place, (*sums, squares, tokens) in enumerate(table[:-1]):
            share = tokens / everything
            is_first = self.spreads[place] == 0.0
            memory = 0.0 if is_first else MEMORY
            self.shares[place] = memory * self.shares[place] + (1 - memory) * share
            if tokens:
                centre = self.centres[place]
                self.centres[place] = [
                    memory * c + (1 - memory) * s / tokens for c, s in zip(centre, sums, strict=True)
                ]
                self.spreads[place] = memory * self.spreads[place] + (1 - memory) * squares / tokens
        *sums, _, tokens = table[-1]
        known = [spread for spread in self.spreads if spread > 0]
        if tokens > NEW_SHARE * everything and known and self._has_room():
            self._add([total / tokens for total in sums], sum(known) / len(known), tokens / everything)

    def _has_room(self) -> bool:
        """Return whether a cluster can be added; if necessary, remove one that is hardly seen any more."""
        if len(self.numbers) < self.most:
            return True
        least = min(range(len(self.numbers)), key=lambda place: self.shares[place])
        if self.shares[least] > FORGOTTEN_SHARE:
            return False
        for kept in (self.numbers, self.centres, self.spreads, self.shares):
            del kept[least]
        return True

    def _add(self, centre: list[float], spread: float, share: float = 0.0) -> None:
        self.numbers.append(self.next_number)
        self.centres.append(centre)
        self.spreads.append(spread)
        self.shares.append(share)
        self.next_number += 1


@lru_cache(maxsize=16)
def _projection(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, DIMENSIONS, generator=generator, dtype=torch.float64).div(DIMENSIONS**0.5)


def _first_centres(points: Tensor, count: int) -> Tensor:
    centres = points[:1]
    for _ in range(1, min(count, len(torch.unique(points, dim=0)))):
        furthest = torch.cdist(points, centres).min(1).values.argmax()
        centres = torch.cat([centres, points[furthest : furthest + 1]])
    for _ in range(_ROUNDS if len(points) else 0):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        counts = torch.bincount(nearest, minlength=len(centres)).unsqueeze(1)
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres


@dataclass(frozen=True)
class Seen:
    """One look at one layer: this rank's tokens, and their concepts."""

    tokens: Tensor
    concepts: Tensor  # of each token its place in `names`; -1: none that is known
    names: Sequence[str]


class Knowledge:
    """Keeps the graphs. Pass it to a `Lifecycle`, which then decides by them; or to a job as a hook, to observe.

    Args:
        every: The steps between two looks.
        labels: Gets a batch and returns the classes of its samples: whole numbers from 0 to below
            `limits.max_concepts`, one for each sample or one for each token; others, as the -100 of a loss, stand for
            none. Without it, concepts are clusters of the layer's inputs.
        names: Names of the labels.
        limits: How large the graphs may become.

    Example:
        >>> from drivetrain.moe import Knowledge, Lifecycle
        >>> hooks = [Lifecycle(knowledge=Knowledge(labels=lambda batch: batch[1]))]  # for dt.Job(hooks=…)
    """

    changes_data = False

    def __init__(
        self,
        every: int = 100,
        *,
        labels: Callable[[Any], Tensor] | None = None,
        names: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> None:
        check_every("Knowledge", every)
        self.every, self._labels, self._limits = every, labels, limits or Limits()
        given = dict(enumerate(names))
        self._names = [given.get(number, f"label {number}") for number in range(self._limits.max_concepts)]
        self.graphs: dict[str, KnowledgeGraph] = {}  # by the layer's name
        self._clusters: dict[str, Clusters] = {}
        self._last: dict[str, tuple[int, Seen]] = {}  # with its step, so that two callers at one step share a look

    def __call__(self, context: StepContext) -> None:
        for name, layer in mixtures_in(context.model).items():
            if layer.can_grow:
                self.look(context, name, layer)

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "graphs": {name: graph.as_json() for name, graph in self.graphs.items()},
            "clusters": {name: clusters.as_json() for name, clusters in self._clusters.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.graphs = {name: KnowledgeGraph.from_json(stored) for name, stored in state["graphs"].items()}
        self._clusters = {name: Clusters(**stored) for name, stored in state["clusters"].items()}
        self._last = {}

    # What happens to experts

    def came(self, name: str, layer: MixtureOfExperts, number: int, step: int, parent: int) -> None:
        graph = self._graph(name, layer, step, besides=number)
        graph.add_expert(number, step, parent=parent)

    def parent(self, name: str, nearest: Mapping[int, float], concepts: Mapping[str, float]) -> int:
        """Return the expert to grow a new one from: near its tokens, and serving their concepts.

        Both arguments are shares, by number and by concept.
        """
        graph = self.graphs[name]

        def score(number: int) -> float:
            served = (share * graph.weight(number, concept, "composition") for concept, share in concepts.items())
            return nearest[number] + sum(served)

        return min(nearest, key=lambda number: (-score(number), number))

    def alike(self, name: str, numbers: Sequence[int], count: int, turn: int) -> list[tuple[int, int]]:
        """Return pairs worth comparing: the most similar, and by turns one more, since others may agree as well."""
        found = self.graphs[name].most_similar(count, among=numbers)
        every = list(combinations(sorted(numbers), 2))
        return list(dict.fromkeys([*found, *every[turn % len(every) :][:1]])) if every else []

    def measured(self, name: str, one: int, other: int, similarity: float) -> None:
        self.graphs[name].correct(one, other, "similarity", min(max(similarity, 0.0), 1.0))

    def went(self, name: str, number: int, into: int | None = None) -> None:
        graph = self.graphs.get(name)
        if graph is not None and number in graph.experts:
            graph.remove_expert(number, into)

    # What is seen

    @torch.no_grad()
    def look(self, context: StepContext, name: str, layer: MixtureOfExperts) -> Seen:
        """Look at a layer at a step's end, on all ranks together. A second look at the same step returns the first."""
        step, last = context.step, self._last.get(name)
        if last is not None and last[0] == step:
            return last[1]
        graph = self._graph(name, layer, step)
        tokens, per_sample = layer.tally.sampled(layer.centroids.device)
        seen = self._seen(context, name, tokens, per_sample)
        _Facts(layer, seen, context).enter(graph)
        self._last[name] = step, seen
        return seen

    def _graph(self, name: str, layer: MixtureOfExperts, step: int, besides: int = -1) -> KnowledgeGraph:
        """Return the layer's graph, updated to hold exactly the layer's experts, however they were added or removed."""
        graph = self.graphs.setdefault(name, KnowledgeGraph(self._limits))
        there = sorted(number for number in layer.expert_ids.tolist() if number >= 0 and number != besides)
        for number in graph.experts:
            if number not in there:
                graph.remove_expert(number)
        for number in there:
            if number not in graph:
                graph.add_expert(number, step)
        return graph

    def _seen(self, context: StepContext, name: str, tokens: Tensor, per_sample: int) -> Seen:
        if self._labels is None:
            places, names = self._clusters.setdefault(name, Clusters()).of(tokens, context.world)
            return Seen(tokens, places, names)
        batch = context.batch()
        if batch is None:  # this rank had nothing to do; what it holds is of another step
            return Seen(tokens[:0], torch.zeros(0, dtype=torch.int64, device=tokens.device), self._names)
        return Seen(tokens, _per_token(self._labels(batch), tokens, per_sample, len(self._names)), self._names)


class _Facts:
    """The facts of one look at a layer, over all ranks; the host waits once."""

    def __init__(self, layer: MixtureOfExperts, seen: Seen, context: StepContext) -> None:
        self._layer, self._names, self._step = layer, list(seen.names), context.step
        ids, active = torch.stack([layer.expert_ids, layer.router.active.to(layer.expert_ids.dtype)]).tolist()
        self._slots = [slot for slot, number in enumerate(ids) if number >= 0 and active[slot]]
        self._numbers = [ids[slot] for slot in self._slots]
        num_slots, num_concepts = layer.num_slots, len(self._names)
        is_chosen = torch.zeros(len(seen.tokens), num_slots, dtype=torch.float64, device=seen.tokens.device)
        if len(seen.tokens):
            is_chosen.scatter_(1, route(layer, seen.tokens).chosen, 1.0)
        is_of = torch.zeros(len(seen.tokens), num_concepts + 1, dtype=torch.float64, device=seen.tokens.device)
        is_of.scatter_(1, seen.concepts.where(seen.concepts >= 0, num_concepts).unsqueeze(1), 1.0)
        parts = [
            is_chosen.T @ is_chosen,  # how many tokens chose both; on the diagonal, one
            is_chosen.T @ is_of[:, :-1],
            is_of[:, :-1].sum(0),
            torch.tensor(float(len(seen.tokens)), device=is_of.device, dtype=torch.float64),
            _alikeness(layer, self._slots)
            / context.world.size,  # ranks may differ in the last bit: their mean does not
            layer.uses.double() / context.world.size,
        ]
        flat = context.world.all_reduce(torch.cat([part.reshape(-1) for part in parts])).cpu()
        shapes = [part.shape for part in parts]
        pieces = torch.split(flat, [shape.numel() for shape in shapes])
        self._pairs, self._composed, self._of, tokens, self._alike, uses = (
            piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)
        )
        self._num_tokens, self._uses = float(tokens), [round(count) for count in uses.tolist()]

    def enter(self, graph: KnowledgeGraph) -> None:
        self._remember_who_works_together()
        for slot, number in zip(self._slots, self._numbers, strict=True):
            before, uses = graph.facts(number), self._uses[slot]
            graph.note(
                number,
                activations=uses,
                last_use=self._step if uses > before.activations else before.last_use,
            )
        if not self._num_tokens:  # no rank saw a token, so nothing decays either
            return
        for place, count in enumerate(self._of.tolist()):
            if count:
                graph.add_concept(self._names[place])
        most = graph.limits.most_edges
        numbers = dict(zip(self._slots, self._numbers, strict=True))
        together, split = self._shared()
        graph.look(
            {
                "similarity": _strongest(self._alike, self._slots, numbers, most),
                "co-activation": _strongest(together, self._slots, numbers, most),
                "split": _strongest(split, self._slots, numbers, most),
                "composition": self._served(graph, numbers, most),
            }
        )

    def _served(self, graph: KnowledgeGraph, numbers: Mapping[int, int], most: int) -> dict[tuple[int, str], float]:
        """Return the fraction of each concept's tokens that experts get: `most` experts of each concept."""
        shares = self._composed[self._slots] / self._of.clamp_min(1.0)
        best = shares.topk(min(most, len(self._slots)), 0)
        found: dict[tuple[int, str], float] = {}
        for values, rows in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            for place, (value, row) in enumerate(zip(values, rows, strict=True)):
                if value > 0 and self._names[place] in graph:
                    found[numbers[self._slots[row]], self._names[place]] = min(value, 1.0)
        return found

    def _shared(self) -> tuple[Tensor, Tensor]:
        """Return how often two are chosen together, 1 for always; and how similar their concepts are beyond that."""
        counts = self._pairs.diagonal()
        together = self._pairs / (counts.unsqueeze(1) * counts).sqrt().clamp_min(1.0)
        profiles = self._composed / self._composed.sum(1, keepdim=True).clamp_min(1.0)
        overlap = torch.minimum(profiles.unsqueeze(1), profiles.unsqueeze(0)).sum(2)
        return together.clamp(0, 1), (overlap - together).clamp(0, 1)

    def _remember_who_works_together(self) -> None:
        """Store co-activations in the layer, which is saved with the model: expert placement reads them there."""
        layer, shares = self._layer, self._pairs / max(self._num_tokens, 1.0)
        shares.fill_diagonal_(0.0)
        if self._num_tokens:
            layer.together.lerp_(shares.to(layer.together), 1 - TOGETHER_MEMORY)


def _per_token(labels: Tensor, tokens: Tensor, per_sample: int, most: int) -> Tensor:
    """Return each token's label; a sample's label applies to all its tokens, where there is one for each sample."""
    rows = torch.arange(len(tokens), device=tokens.device)
    flat = labels.to(tokens.device).reshape(-1).long()
    rows = rows // per_sample if labels.dim() == 1 and per_sample > 1 else rows
    if not len(flat):
        return torch.full_like(rows, -1)
    found = flat[rows.clamp_max(len(flat) - 1)]
    return found.where((rows < len(flat)) & (found >= 0) & (found < most), -1)


def _alikeness(layer: MixtureOfExperts, slots: Sequence[int]) -> Tensor:
    """Return (slots, slots), from 0 to 1: the similarity of router rows and of inputs, each relative to the mean."""
    result = torch.zeros(layer.num_slots, layer.num_slots, dtype=torch.float64, device=layer.centroids.device)
    index = torch.tensor(list(slots), device=result.device)
    routed = _cosines(layer.router.weight.detach()[index])
    given = _cosines(layer.centroids[index])
    is_known = layer.spreads[index] > 0
    both = torch.where(is_known.unsqueeze(1) & is_known, (routed + given) / 2, routed)
    result[index.unsqueeze(1), index] = both.clamp(0, 1)
    return result


def _cosines(rows: Tensor) -> Tensor:
    centred = rows.double() - rows.double().mean(0)
    unit: Tensor = centred / centred.norm(dim=1, keepdim=True).clamp_min(1e-30)
    return unit @ unit.T


def _strongest(
    weights: Tensor, slots: Sequence[int], numbers: Mapping[int, int], most: int
) -> dict[tuple[int, int], float]:
    """Return pairs of experts by number; `most` of each expert, which is all that the graph would keep."""
    index = torch.tensor(list(slots))
    among = weights[index.unsqueeze(1), index].clone()
    among.fill_diagonal_(0.0)
    best = among.topk(min(most, len(slots)), 1)
    found: dict[tuple[int, int], float] = {}
    for row, (values, places) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        for value, place in zip(values, places, strict=True):
            if value > 0:
                one, other = sorted((numbers[slots[row]], numbers[slots[place]]))
                found[one, other] = min(value, 1.0)
    return found


class KnowledgeFiles:
    """Writes `knowledge/epoch_0003.json` at the end of the third epoch, or `step_…` where it is written by steps."""

    changes_data = False

    def __init__(self, knowledge: Knowledge, every: int | Literal["epoch"] = "epoch") -> None:
        check_every("KnowledgeFiles", every)
        self.every, self._knowledge = every, knowledge
        self._uses: dict[str, dict[str, int]] = {}  # by layer and expert, when it was written last

    def __call__(self, context: StepContext) -> None:
        layers = {
            name: {"graph": self._knowledge.graphs[name].as_json(), **self._whereabouts(name, layer)}
            for name, layer in mixtures_in(context.model).items()
            if name in self._knowledge.graphs
        }
        if not context.world.is_main or not layers:
            return
        name = f"epoch_{context.epoch:04d}" if self.every == "epoch" else f"step_{context.step:08d}"
        folder = context.folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"step": context.step, "epoch": context.epoch, "layers": layers}) + "\n"
        write_atomically(folder / f"{name}.json", content)

    def state_dict(self) -> Mapping[str, Any]:
        return {"uses": {name: dict(uses) for name, uses in self._uses.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._uses = {name: dict(uses) for name, uses in state["uses"].items()}

    def _whereabouts(self, name: str, layer: MixtureOfExperts) -> dict[str, Any]:
        """Return, by slot, the rank, the expert's number (-1: free) and its tokens since the last file. The host waits.

        `together`: the fraction of all co-activation between experts of one rank.
        """
        ranks, capabilities = layer.dispatcher.placement(layer.num_slots)
        experts, uses = layer.expert_ids.tolist(), layer.uses.tolist()
        before = self._uses.get(name, {})
        self._uses[name] = {str(number): uses[slot] for slot, number in enumerate(experts) if number >= 0}
        return {
            "ranks": list(ranks),
            "capabilities": list(capabilities),
            "experts": experts,
            "loads": [max(uses[slot] - before.get(str(number), 0), 0) for slot, number in enumerate(experts)],
            "together": share_together(ranks, layer.together),
        }
