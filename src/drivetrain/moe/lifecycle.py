"""A hook that adds and removes experts.

They are grown where inputs are new or the loss stays high, merged where two agree, pruned where idle.

All decisions are made at a step's end from facts over all ranks, so every rank does the same. The state is saved: in
the layer (its experts, and the statistics of their tokens) and in this hook's state (for how long a condition has
held).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from drivetrain.core.hook import StepContext
from drivetrain.core.world import World
from drivetrain.moe.experts import exchanges
from drivetrain.moe.knowledge import Knowledge, Seen
from drivetrain.moe.mixture import (
    MixtureOfExperts,
    Number,
    Whole,
    check_every,
    check_fields,
    mixtures_in,
    outputs,
    refuse_too_many,
    route,
)
from drivetrain.moe.slots import Surgery

LOAD_MEMORY = 0.8
LOSS_MEMORY = 0.5  # at each look: short, as a look comes every so many steps
# The loss is high only if this fraction of its improvement since the first look is lost again. The ratio to the lowest
# loss alone says little where that is near 0, and what is near 0 depends on the loss.
LOST_SHARE = 0.1
PROBES = 64  # tokens on which outputs of experts are compared; as many others check a merge
CANDIDATES = 4  # pairs whose outputs are compared at a look, where a graph says which


@dataclass(frozen=True)
class Rules:
    """The rules for adding and removing experts. A look is one call of the hook.

    A token is new if its square distance from the nearest centroid is `far` times what is usual for that expert's
    tokens.

    Args:
        max_experts: The most experts of a layer. Default: as many as there are slots.
        min_experts: The fewest.
        far: From which distance on a token is new.
        memory: How much of a centroid stays at each look: more, if tasks follow each other.
        new_share: The share of a look's tokens that are new, for it to count.
        high_loss: A loss above this many times the lowest average over looks so far counts, too; inf: none does.
        patience: Looks in a row that count, before an expert is grown.
        cooldown: Looks between two growths.
        noise: The noise on a new expert's weights, relative to its parent's.
        idle_share: The share of the mean load below which an expert is idle.
        idle_looks: Looks in a row, before an idle expert is pruned.
        agreement: How well the outputs of two experts agree on probes for them to be merged: 1 is the same.
        harm: How much a merge may change the layer's outputs on other tokens, relative to them.
        move_looks: Looks between two rearrangements, where experts are on several ranks and a graph has their
            co-activations.

    Example:
        >>> from drivetrain.moe import Lifecycle, Rules
        >>> hook = Lifecycle(rules=Rules(max_experts=16, patience=3))
    """

    max_experts: Annotated[int | None, Whole(1, or_none=True)] = None
    min_experts: Annotated[int, Whole(0)] = 2
    far: Annotated[float, Number(0)] = 4.0
    memory: Annotated[float, Number(0, 1)] = 0.9
    new_share: Annotated[float, Number(0, 1)] = 0.2
    high_loss: Annotated[float, Number(1)] = 2.0
    patience: Annotated[int, Whole(1)] = 2
    cooldown: Annotated[int, Whole(0)] = 3
    noise: Annotated[float, Number(0, finite=True)] = 0.02
    idle_share: Annotated[float, Number()] = 0.05
    idle_looks: Annotated[int, Whole(1)] = 10
    agreement: Annotated[float, Number()] = 0.98
    harm: Annotated[float, Number(0)] = 0.02
    move_looks: Annotated[int, Whole(1)] = 20

    def __post_init__(self) -> None:
        check_fields(self)


# One line for the terminal; an expert that was grown is active from the next look on, which is not reported again.
_WORDS = {
    "grown": "expert {expert} grown from {parent}: {why}; now {count}",
    "merged": "expert {expert} merged into {into}: their outputs agree to {agreement:.1%}; now {count}",
    "pruned": "expert {expert} pruned: its load was {share:.1%} of an even share for long",
}


@dataclass
class _Story:
    """The hook's state of one layer."""

    looks: int = 0
    num_new: int = 0  # looks in a row with many new tokens
    num_high: int = 0  # looks in a row with a high loss
    loss: float | None = None  # average over looks
    first_loss: float | None = None
    lowest_loss: float | None = None  # of the averages
    grown_at: int = -(10**9)  # which look
    waiting: list[int] = field(default_factory=list)  # numbers of experts that are activated at the next look
    shares: dict[str, float] = field(default_factory=dict)  # by number: mean load over looks, 1 is an even share
    idle: dict[str, int] = field(default_factory=dict)  # by number: looks in a row
    refused: list[list[int]] = field(default_factory=list)  # pairs whose merge did harm


class Lifecycle:
    """A hook that grows, merges and prunes the experts of every mixture that has room to grow.

    Args:
        every: The steps between two looks.
        rules: When experts come and go.
        seed: Seed of what is drawn for a new expert.
        knowledge: Decides about parents and pairs to merge by its graphs, which are kept and saved with this hook.

    Example:
        >>> from drivetrain.moe import Lifecycle, Rules
        >>> hooks = [Lifecycle(every=50, rules=Rules(max_experts=16))]  # for dt.Job(hooks=…)
    """

    changes_data = False

    def __init__(
        self, every: int = 100, rules: Rules | None = None, seed: int = 0, knowledge: Knowledge | None = None
    ) -> None:
        check_every("Lifecycle", every)
        self.every, self._rules, self._seed, self.knowledge = every, rules or Rules(), seed, knowledge
        self._stories: dict[str, _Story] = {}
        self.far_factor = 1.0  # of what counts as new; the hook that adapts it saves it, and restores it on resume
        self.history: list[dict[str, Any]] = []  # all that happened, in words and numbers

    def check(self, context: StepContext) -> None:
        refuse_too_many(self._rules.max_experts, context.model, "Rules")
        if not any(layer.can_grow for layer in mixtures_in(context.model).values()):
            context.say(
                "Lifecycle has nothing to do: the model has no MixtureOfExperts with more slots than experts "
                "(num_slots), so none can come or go"
            )

    def __call__(self, context: StepContext) -> None:
        for name, layer in mixtures_in(context.model).items():
            if layer.can_grow:
                story = self._stories.setdefault(name, _Story())
                rules = replace(self._rules, far=self._rules.far * self.far_factor)
                _Look(rules, self._seed, context, name, layer, story, self.history, self.knowledge).run()

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "stories": {name: asdict(story) for name, story in self._stories.items()},
            "history": [dict(event) for event in self.history],
            "knowledge": None if self.knowledge is None else dict(self.knowledge.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stories = {name: _Story(**values) for name, values in state["stories"].items()}
        self.history = [dict(event) for event in state["history"]]
        if self.knowledge is not None and state.get("knowledge"):
            self.knowledge.load_state_dict(state["knowledge"])


class _Look:
    """One look at one layer."""

    def __init__(
        self,
        rules: Rules,
        seed: int,
        context: StepContext,
        name: str,
        layer: MixtureOfExperts,
        story: _Story,
        history: list[dict[str, Any]],
        knowledge: Knowledge | None,
    ) -> None:
        self._rules, self._seed, self._context, self._name = rules, seed, context, name
        self._layer, self._story, self._history = layer, story, history
        self._surgery = Surgery(layer, context.experts.companions, rules.min_experts, rules.max_experts)
        self._slots = self._surgery.slots
        self._knowledge = knowledge
        self._seen: Seen | None = None

    @torch.no_grad()
    def run(self) -> None:
        story = self._story
        story.looks += 1
        self._activate_waiting()
        if self._knowledge is not None:
            self._seen = self._knowledge.look(self._context, self._name, self._layer)
        self._watch_loads()
        self._prune()
        tokens = self._layer.tally.sample_on(self._layer.centroids.device).to(self._layer.centroids.dtype)
        self._merge(tokens)
        self._grow(tokens)
        if self._knowledge is not None and story.looks % self._rules.move_looks == 0:
            self._move()

    # Coming

    def _activate_waiting(self) -> None:
        places = {number: slot for slot, number in self._slots.ids.items()}
        for number in self._story.waiting:
            if number in places:
                self._slots.activate(places[number])
                self._tell("active", number)
        self._story.waiting = []

    def _grow(self, tokens: Tensor) -> None:
        rules, story = self._rules, self._story
        found = self._novelty(tokens)
        is_new = found.share > rules.new_share
        story.num_new = story.num_new + 1 if is_new else 0
        self._watch_loss()
        there = self._slots.ids
        why = self._reason(found)
        if why is None or story.looks - story.grown_at <= rules.cooldown or not self._surgery.has_room:
            return
        parent = found.parent if is_new else found.busiest
        slot = self._surgery.grow(parent, noise=rules.noise, seed=self._seed)
        if slot is None:
            return
        number = self._slots.ids[slot]
        if is_new:  # else it learns what its tokens are like once it has some, as the first experts did
            self._surgery.settle(slot, parent, found.mean)
        # Both counts: new inputs raise the loss too, and that is one need. A new expert has to show its effect first.
        story.grown_at, story.num_new, story.num_high = story.looks, 0, 0
        story.waiting.append(number)
        if self._knowledge is not None:
            self._knowledge.came(self._name, self._layer, number, self._context.step, there[parent])
        self._tell("grown", number, parent=there[parent], new_share=round(found.share, 4), why=why)

    def _reason(self, found: "_Novelty") -> str | None:
        rules, story = self._rules, self._story
        if story.num_new >= rules.patience:
            return f"{found.share:.0%} of tokens are new to all experts"
        if story.num_high and story.num_high >= rules.patience:
            bound = f"{rules.high_loss:g} × the lowest, {story.lowest_loss:.3g},"
            return f"loss {story.loss:.3g} has been above {bound} for {story.num_high} looks"
        return None

    def _watch_loss(self) -> None:
        """Track the loss, which is of all layers together: each that has room may grow for it."""
        story, loss = self._story, self._context.loss
        if not math.isfinite(loss):
            return  # nothing was counted: that is neither high nor low
        if story.loss is None or story.first_loss is None or story.lowest_loss is None:
            story.loss = story.first_loss = story.lowest_loss = loss  # no look is high before something was learned
            return
        story.loss = LOSS_MEMORY * story.loss + (1 - LOSS_MEMORY) * loss
        story.lowest_loss = lowest = min(story.lowest_loss, story.loss)
        # The loss at this look has to be high, too: one outlier step leaves a high average for many looks.
        loss = min(loss, story.loss)
        # The ratio test is meaningless for negative losses.
        is_high = lowest >= 0 and loss > self._rules.high_loss * lowest
        is_high = is_high and loss - lowest > LOST_SHARE * (story.first_loss - lowest)
        story.num_high = story.num_high + 1 if is_high else 0

    def _novelty(self, tokens: Tensor) -> "_Novelty":
        """Count tokens far from all centroids, with their nearest experts and mean; then update the centroids."""
        layer, active = self._layer, self._slots.active
        tokens = tokens.nan_to_num(0.0, 0.0, 0.0)  # one that is not finite would spoil the sums of all
        chosen = route(self._layer, tokens).chosen[:, 0]
        spreads = layer.spreads.tolist()
        known = [slot for slot in active if spreads[slot] > 0]
        width, slots = tokens.shape[1], layer.num_slots
        num_concepts = len(self._seen.names) if self._seen else 0
        # One row of facts, summed over ranks and read at once: each wait for the device costs as much as some kernels.
        facts = torch.zeros(2 * slots + num_concepts + width, dtype=torch.float64, device=tokens.device)
        sizes = [slots, slots, num_concepts, width]
        count, num_new, about, total_new = torch.split(facts, sizes)
        wide = tokens.double()
        if known:
            places = torch.tensor(known, device=tokens.device)
            least, nearest = torch.cdist(tokens, layer.centroids[places]).square().min(1)
            is_new = (least > self._rules.far * layer.spreads[places][nearest]).double()
            num_new += is_new @ _one_hot(places[nearest], slots)
            total_new += is_new @ wide
            if self._seen is not None and num_concepts:
                concepts = self._seen.concepts
                about += is_new[: len(concepts)] @ _one_hot(concepts, num_concepts)
        is_chosen = _one_hot(chosen, slots)
        sums = is_chosen.T @ wide
        count += is_chosen.sum(0)
        self._sum(sums, facts)
        self._learn(wide, chosen, is_chosen, sums, count)
        loads, news, abouts, _ = (part.tolist() for part in torch.split(facts.cpu(), sizes))
        many = sum(news)
        parent = self._parent(news, abouts)
        busiest = max(active, key=lambda slot: loads[slot])
        mean = (total_new / max(many, 1.0)).to(layer.centroids)
        return _Novelty(many / max(sum(loads), 1.0), parent, mean, busiest)

    def _parent(self, num_new: list[float], about: list[float]) -> int:
        """Return the slot that most new tokens are nearest to; with a graph, one that also serves their concepts."""
        many, active = sum(num_new), self._slots.active
        nearest = max(range(len(num_new)), key=lambda slot: num_new[slot])
        if self._knowledge is None or self._seen is None or not many:
            return nearest
        ids = self._slots.ids
        shares = {ids[slot]: num_new[slot] / many for slot in active}
        concepts = {name: count / many for name, count in zip(self._seen.names, about, strict=True) if count}
        found = self._knowledge.parent(self._name, shares, concepts)
        return next(slot for slot in active if ids[slot] == found)

    def _learn(self, tokens: Tensor, chosen: Tensor, is_chosen: Tensor, sums: Tensor, count: Tensor) -> None:
        """Move centroids and spreads towards the inputs of their experts."""
        layer = self._layer
        seen = count > 0
        mean = (sums / count.clamp_min(1).unsqueeze(1)).to(layer.centroids)
        is_first = (layer.spreads == 0) & seen
        memory = torch.where(is_first, 0.0, self._rules.memory)
        memory = torch.where(seen, memory, 1.0)
        layer.centroids.copy_(torch.lerp(mean, layer.centroids, memory.unsqueeze(1).to(layer.centroids)))
        squares = (tokens - layer.centroids[chosen]).square().sum(1) @ is_chosen
        self._sum(squares)
        spread = (squares / count.clamp_min(1)).to(layer.spreads)
        layer.spreads.copy_(torch.lerp(spread, layer.spreads, memory.to(layer.spreads)))

    # Moving

    def _move(self) -> None:
        """Move experts that are chosen together to one rank, as far as no rank gets too much work."""
        layer, ids = self._layer, self._slots.ids
        placement, capabilities = layer.dispatcher.placement(layer.num_slots)
        # Over looks: one step's loads may be of a small batch.
        shares, active = self._story.shares, set(self._slots.active)
        costs = [
            max(shares.get(str(ids[slot]), 1.0), 0.01) if slot in active else 0.0 for slot in range(layer.num_slots)
        ]
        pairs = exchanges(costs, placement, capabilities, layer.together)
        for one, other in self._context.world.agree(
            pairs
        ):  # as where experts are placed at first: hosts may round differently
            self._slots.exchange(one, other)
        for slot, number in self._slots.ids.items():
            before = next(place for place, each in ids.items() if each == number)
            if placement[before] != placement[slot]:
                self._tell("moved", number, rank=placement[slot], from_rank=placement[before])

    # Going

    def _watch_loads(self) -> None:
        """Track idle experts by the last step's loads, which are over all ranks."""
        story, load = self._story, self._layer.load.tolist()
        active, ids = self._slots.active, self._slots.ids
        total = sum(load)
        if not total:
            return
        for slot in active:
            number, share = str(ids[slot]), load[slot] * len(active) / total
            before = story.shares.get(number, 1.0)
            story.shares[number] = LOAD_MEMORY * before + (1 - LOAD_MEMORY) * share
            is_idle = story.shares[number] < self._rules.idle_share
            story.idle[number] = story.idle.get(number, 0) + 1 if is_idle else 0

    def _prune(self) -> None:
        """Prune the idlest expert that has been so for long enough, while enough are left."""
        story, rules, ids = self._story, self._rules, self._slots.ids
        idle = [slot for slot in self._slots.active if story.idle.get(str(ids[slot]), 0) >= rules.idle_looks]
        if idle and self._surgery.can_lose:
            slot = min(idle, key=lambda slot: story.shares[str(ids[slot])])
            self._tell("pruned", ids[slot], share=round(story.shares[str(ids[slot])], 4))
            self._forget(ids[slot])
            self._surgery.prune(slot)

    def _merge(self, tokens: Tensor) -> None:
        """Merge the two that agree best on some tokens, if the layer's output is then the same on others."""
        rules, story, ids, active = self._rules, self._story, self._slots.ids, self._slots.active
        if rules.agreement > 1 or not self._surgery.can_lose:
            return
        probes, others = tokens[0::2][:PROBES], tokens[1::2][:PROBES]
        best, into, gone = 0.0, -1, -1
        pairs = self._pairs(active)
        compared = sorted({slot for pair in pairs for slot in pair})
        agreements = self._surgery.agreement(pairs, probes, compared, self._context.world)
        for (other, one), found in zip(pairs, agreements, strict=True):
            if self._knowledge is not None:
                self._knowledge.measured(self._name, ids[one], ids[other], found)
            if sorted([ids[one], ids[other]]) not in story.refused and found > max(best, rules.agreement):
                best, into, gone = found, other, one
        if into < 0:
            return
        before = outputs(self._layer, others)
        harm = 0.0

        def is_harmless(undo: Callable[[], None]) -> bool:
            nonlocal harm
            change = (outputs(self._layer, others) - before).double().square().sum()
            size = before.double().square().sum()
            self._sum(change, size)
            harm = (change / size.clamp_min(1e-30)).sqrt().item()
            if harm > rules.harm:
                undo()
                return False
            return True

        is_merged = self._surgery.merge(into, gone, is_harmless)
        if is_merged:
            self._forget(ids[gone], ids[into])
        else:
            story.refused.append(sorted([ids[into], ids[gone]]))
        facts = {"into": ids[into], "agreement": round(best, 4), "harm": round(harm, 4)}
        self._tell("merged" if is_merged else "not merged", ids[gone], **facts)

    def _pairs(self, active: list[int]) -> list[tuple[int, int]]:
        """Return pairs of slots, the lower first: those that a graph considers similar; without one, all pairs."""
        if self._knowledge is None:
            return [(other, one) for first, one in enumerate(active) for other in active[:first]]
        places = {number: slot for slot, number in self._slots.ids.items()}
        numbers = [number for number in places if places[number] in active]
        found = self._knowledge.alike(self._name, numbers, CANDIDATES, self._story.looks)
        return [tuple(sorted((places[one], places[other]))) for one, other in found]  # type: ignore[misc]

    # What all of it needs

    def _sum(self, *tensors: Tensor) -> None:
        world: World = self._context.world
        for tensor in tensors:
            world.all_reduce(tensor)

    def _forget(self, number: int, into: int | None = None) -> None:
        if self._knowledge is not None:
            self._knowledge.went(self._name, number, into)
        self._story.shares.pop(str(number), None)
        self._story.idle.pop(str(number), None)

    def _tell(self, what: str, number: int, **more: Any) -> None:
        facts = {"step": self._context.step, "layer": self._name, "what": what, "expert": number, **more}
        self._history.append(facts)
        self._context.tell("expert", **facts)
        words = _WORDS.get(what)
        if words is not None:
            line = words.format(expert=number, count=len(self._slots.ids), **more)
            self._context.say(f"step {self._context.step:>6}   {line}")


def _one_hot(places: Tensor, count: int) -> Tensor:
    """Return a one-hot matrix: products with it sum by place in a fixed order, unlike index_add on a GPU."""
    return (places.unsqueeze(1) == torch.arange(count, device=places.device)).double()


@dataclass(frozen=True)
class _Novelty:
    share: float  # of all tokens
    parent: int  # the slot that most new ones are nearest to
    mean: Tensor  # of the new ones
    busiest: int  # the slot that gets most of all tokens
