"""One sleep of a model with mixtures of experts: replay, specialize, merge, prune, reorganize.

Every change is checked, and undone if the loss rises: on the validation set, where there is one, else on remembered
samples that are never replayed. Those were trained on, and say little about the effect of a sleep on samples that the
model has not seen. All decisions come from facts over all ranks, so every rank does the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import Rehearsal, StepContext
from drivetrain.moe.experts import Routing
from drivetrain.moe.mixture import MixtureOfExperts, Number, Whole, check_fields, mixtures_in
from drivetrain.moe.replay import Replay, ReplayedSamples, Reservoir
from drivetrain.moe.slots import Slots, Surgery

PROBES = 256  # tokens of each rank on which outputs of experts are compared


@dataclass(frozen=True)
class SleepRules:
    """The rules for when a model sleeps, and what it does then.

    Args:
        interval: Steps between two sleeps at first; growth in between brings the next one nearer.
        shortest: The fewest steps between two sleeps.
        longest: The most.
        reservoir: Samples that are remembered, equally many of each task and class.
        replay_steps: Steps of replay in a sleep.
        replay_batch: Samples of each of them.
        micro_batch: Samples that are computed at once, on each rank.
        rate: The learning rate of a sleep, as a share of the job's at that time.
        specialise_steps: Steps of the routers alone; 0: none.
        specialise_weight: The weight of the mutual information of experts and classes, which is added to the loss.
        agreement: How well the outputs of two experts agree for them to be tried as one; adapted from sleep to sleep.
        idle_share: The share of an even share of the reservoir's tokens below which an expert is idle.
        busy_share: An expert with more than this many even shares that serves many classes is split.
        focus: The specialization from which on an expert is not split: 1 serves one class, 0 all alike.
        min_experts: The fewest experts of a layer.
        max_experts: The most. Default: as many as there are slots.
        tolerance: By how much all of a sleep but replay may raise the loss, relative; replay: not at all.

    Example:
        >>> from drivetrain.moe import Sleep, SleepRules
        >>> hook = Sleep(rules=SleepRules(interval=200, replay_steps=10))
    """

    interval: Annotated[int, Whole(1)] = 300
    shortest: Annotated[int, Whole(1)] = 100
    longest: Annotated[int, Whole(1)] = 2000
    reservoir: Annotated[int, Whole(1)] = 1000
    replay_steps: Annotated[int, Whole(0)] = 30
    replay_batch: Annotated[int, Whole(1)] = 64
    micro_batch: Annotated[int, Whole(1)] = 256
    rate: Annotated[float, Number(0, finite=True)] = 0.5
    specialise_steps: Annotated[int, Whole(0)] = 10
    specialise_weight: Annotated[float, Number(0, finite=True)] = 1.0
    agreement: Annotated[float, Number()] = 0.9
    idle_share: Annotated[float, Number()] = 0.1
    busy_share: Annotated[float, Number()] = 1.25
    focus: Annotated[float, Number()] = 0.6
    min_experts: Annotated[int, Whole(0)] = 2
    max_experts: Annotated[int | None, Whole(1, or_none=True)] = None
    tolerance: Annotated[float, Number()] = 0.01

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.shortest <= self.interval <= self.longest:
            raise DrivetrainError(
                f"SleepRules: interval is {self.interval}, shortest {self.shortest} and longest {self.longest}",
                remedy="give an interval from the shortest to the longest",
            )


@dataclass(frozen=True)
class Stage:
    """The result of one stage of a sleep."""

    what: str  # replay, specialize, merge, prune, split
    kept: bool
    loss: tuple[float, float]  # that it was checked on, before and after
    words: str
    facts: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        loss = [round(value, 6) for value in self.loss]
        return {"what": self.what, "kept": self.kept, "loss": loss, "words": self.words, **self.facts}


class Night:
    """One sleep. `run` does all stages and returns the result of each."""

    def __init__(
        self,
        context: StepContext,
        rehearsal: Rehearsal,
        rules: SleepRules,
        reservoir: Reservoir,
        cycle: int,
        agreement: float,
        seed: int,
        young: Mapping[str, int] | None = None,
        measured: Mapping[str, float] | None = None,
    ) -> None:
        self._context, self._rules, self._reservoir, self._cycle = context, rules, reservoir, cycle
        self._agreement, self._seed = agreement, seed
        self._young = young or {}  # by layer: experts from this number on are too young to go
        self._layers = mixtures_in(context.model)
        self._replay = Replay(context, rehearsal, rules.micro_batch)
        self._groups = list(reservoir.groups)
        self._checked = reservoir.checked or [kept[0] for kept in reservoir.groups.values() if len(kept) > 1]
        self._loss: float | None = (measured or {}).get("valid_loss")  # of the model as it is; None: not known yet
        self._at_first = math.nan
        self._seen: dict[str, ReplayedSamples] | None = None
        self.stages: list[Stage] = []

    def run(self) -> list[Stage]:
        if not self._checked and "valid_loss" not in self._context.measure():
            return self.stages  # nothing could be checked: what is remembered is one sample of each group
        self._at_first = self._now()
        self._rehearse()
        self._specialise()
        for name, layer in self._layers.items():
            rules = self._rules
            surgery = Surgery(layer, self._context.experts.companions, rules.min_experts, rules.max_experts)
            self._merge(name, layer, surgery)
            self._prune(name, layer, surgery)
            self._split(name, layer, surgery)
        return self.stages

    def specialisation(self) -> float:
        """Return how much experts specialize in one class, over all layers: 1 is one class each, 0 a uniform mix."""
        found = [_focus(self._table(layer, self._looked()[name]).sum(2)) for name, layer in self._layers.items()]
        weights = [float(load.sum()) for _, load in found]
        focused = sum(float((focus * load).sum()) for focus, load in found)
        return focused / max(sum(weights), 1.0)

    def serves(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return, by layer, expert and class, the fraction of the class's remembered tokens that goes to the expert."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for name, layer in self._layers.items():
            table = self._table(layer, self._looked()[name]).sum(2)
            shares = (table / table.sum(0).clamp_min(1)).tolist()
            found[name] = {
                str(number): {group: round(part, 4) for group, part in zip(self._groups, shares[slot], strict=True)}
                for slot, number in Slots(layer).ids.items()
            }
        return found

    # Replay

    def _rehearse(self) -> None:
        rules = self._rules
        if not rules.replay_steps or not self._draw(1, 0):
            return
        before, put_back = self._now(), self._replay.saved()
        with self._replay.learning(rules.rate):
            for number in range(rules.replay_steps):
                self._replay.step(self._draw(rules.replay_batch, number))
        words = f"{rules.replay_steps} × {rules.replay_batch} samples of {len(self._groups)} groups replayed"
        self._judge("replay", before, put_back, words, harm=0.0)

    def _specialise(self) -> None:
        """Train the routers alone to separate classes by expert, in addition to the loss."""
        rules = self._rules
        if not rules.specialise_steps or len(self._groups) < 2 or not self._layers or not self._draw(1, 0):
            return
        routers = {id(layer.router.weight) for layer in self._layers.values()}
        put_back, loss, before = self._replay.saved(), self._now(), self.specialisation()
        with self._replay.learning(rules.rate):
            for number in range(rules.specialise_steps):
                # At most what is computed at once: the table has to be over all of it, in any number of ranks.
                count = min(rules.replay_batch, rules.micro_batch)
                self._replay.step(self._draw(count, rules.replay_steps + number), routers, self._told)
        self._seen = None
        after = self.specialisation()
        is_worse = after <= before
        words = f"experts' specialization {before:.2f} → {after:.2f}"
        facts: dict[str, Any] = {"specialisation": [round(before, 6), round(after, 6)]}
        harm = -math.inf if is_worse else None
        self._judge("specialise", loss, put_back, words, harm, **facts)

    def _told(self, numbers: Sequence[int], weight: int, routings: Mapping[str, Routing]) -> Tensor | None:
        """Return the negative mutual information of experts and classes, as this rank's tokens change it.

        It is a function of a table over all ranks' tokens; so its gradient by the table, times this rank's table, has
        the gradient that one process with all tokens would have.
        """
        total: Tensor | None = None
        groups = self._group_numbers(numbers)
        for name, routing in routings.items():
            layer = self._layers[name]
            scores = layer.router.score(routing.logits)
            scores = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
            sample = torch.arange(len(scores), device=scores.device) * len(numbers) // len(scores)
            classes = torch.nn.functional.one_hot(groups.to(scores.device)[sample], len(self._groups))
            table = weight * scores.T @ classes.to(scores.dtype)
            everyones = self._context.world.all_reduce(table.detach().double().clone()).requires_grad_()
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(-_mutual_information(everyones), everyones)
            found = self._rules.specialise_weight * (slope.to(table) * table).sum()
            total = found if total is None else total + found
        return total

    # Coming and going

    def _merge(self, name: str, layer: MixtureOfExperts, surgery: Surgery) -> None:
        """Merge the two that agree best, if the model is no worse for it."""
        active, ids = surgery.slots.active, surgery.slots.ids
        grown_up = self._grown_up(name, surgery.slots)
        if not grown_up or not surgery.can_lose:
            return
        tokens = self._looked()[name].tokens[:PROBES].to(layer.experts.w_in.dtype)
        pairs = [
            (other, one)
            for first, one in enumerate(active)
            for other in active[:first]
            if one in grown_up and other in grown_up
        ]
        if not pairs:
            return
        found = surgery.agreement(pairs, tokens, active, self._context.world)
        agreement, (into, gone) = max(zip(found, pairs, strict=True), key=lambda pair: pair[0])
        if agreement < self._agreement:
            return
        before = self._now()
        words = f"expert {ids[gone]} merged into {ids[into]}: their outputs agree to {agreement:.1%}"
        facts = {"expert": ids[gone], "into": ids[into], "agreement": round(agreement, 6)}
        surgery.merge(
            into,
            gone,
            lambda undo: self._judge("merge", before, undo, words, layer=name, **facts),
            moves_centroid=True,
        )

    def _prune(self, name: str, layer: MixtureOfExperts, surgery: Surgery) -> None:
        """Prune the idlest expert, if it is idle and the model is no worse without it."""
        active, ids = surgery.slots.active, surgery.slots.ids
        grown_up = self._grown_up(name, surgery.slots)
        if not grown_up or not surgery.can_lose:
            return
        load = self._table(layer, self._looked()[name]).sum((1, 2))
        slot = min(grown_up, key=lambda slot: (float(load[slot]), slot))
        share = float(load[slot] * len(active) / load.sum().clamp_min(1))
        if share >= self._rules.idle_share:
            return
        before = self._now()
        words = f"expert {ids[slot]} pruned: it had {share:.1%} of an even share of what is remembered"
        facts = {"expert": ids[slot], "share": round(share, 6)}
        surgery.prune(slot, lambda undo: self._judge("prune", before, undo, words, layer=name, **facts))

    def _split(self, name: str, layer: MixtureOfExperts, surgery: Surgery) -> None:
        """Split a busy expert that serves many classes: a child gets half of them, if the model is no worse for it."""
        rules, slots, active = self._rules, surgery.slots, surgery.slots.active
        if not layer.can_grow or not surgery.has_room or len(self._groups) < 2 or not self._draw(1, 0):
            return
        seen = self._looked()[name]
        table = self._table(layer, seen)
        focus, load = _focus(table.sum(2))
        shares = load * len(active) / load.sum().clamp_min(1)
        parent = max(active, key=lambda slot: (float(load[slot]), -slot))
        if float(shares[parent]) < rules.busy_share or float(focus[parent]) >= rules.focus:
            return
        halves = _halves(self._means(seen, parent), table[parent].sum(1).cpu())
        if halves is None:
            return
        before, put_back = self._now(), self._replay.saved()
        slot = surgery.grow(parent, seed=self._seed)
        if slot is None:
            return
        self._lean(layer, parent, slot, halves.centres)
        slots.activate(slot)
        with self._replay.learning(rules.rate):
            for number in range(rules.specialise_steps):
                key = rules.replay_steps + rules.specialise_steps + number
                self._replay.step(self._draw(rules.replay_batch, key))

        def take_back() -> None:
            slots.prune(slot)
            put_back()

        taken = [self._groups[index] for index in halves.second]
        words = (
            f"expert {slots.ids[parent]} split: it had {float(shares[parent]):.1f} × an even share of many classes; "
            f"expert {slots.ids[slot]} takes {', '.join(taken)}"
        )
        facts: dict[str, Any] = {
            "expert": slots.ids[slot],
            "parent": slots.ids[parent],
            "classes": taken,
        }
        if self._judge("split", before, take_back, words, layer=name, **facts):
            layer.centroids[parent] = halves.centres[0].to(layer.centroids)
            surgery.settle(slot, parent, halves.centres[1])

    @torch.no_grad()
    def _lean(self, layer: MixtureOfExperts, parent: int, child: int, centres: Tensor) -> None:
        """Tilt the router so that logits of parent and child differ by 1 either way at the centers of the halves."""
        wanted = torch.tensor([-0.5, 0.5], dtype=torch.float64)
        direction = (torch.linalg.pinv(centres) @ wanted).to(layer.router.weight)
        tensors = [layer.router.weight.data, self._context.experts.companions(layer.router.weight).get("average")]
        for tensor in tensors:
            if tensor is not None:
                tensor[parent] -= direction
                tensor[child] += direction

    # What all of it needs

    def _grown_up(self, name: str, slots: Slots) -> list[int]:
        """Return the slots that may be removed: a child is much like its parent, and has to be given time."""
        first_young = self._young.get(name)
        return [slot for slot in slots.active if first_young is None or slots.ids[slot] < first_young]

    def _judge(
        self,
        what: str,
        before: float,
        take_back: Callable[[], None],
        words: str,
        harm: float | None = None,
        **facts: Any,
    ) -> bool:
        """Keep a change if the loss rose by at most the allowed harm, over that before it and that before the sleep.

        Otherwise undo it: stages of a sleep that each do a little harm would add up.
        """
        after = self._judged_loss()
        allowed = self._rules.tolerance if harm is None else harm
        limits = [_raised(before, allowed), _raised(self._at_first, max(allowed, self._rules.tolerance))]
        is_allowed = math.isfinite(after) and allowed != -math.inf
        kept = is_allowed and all(after <= limit for limit in limits if not math.isnan(limit))
        if not kept:
            take_back()
        self._seen = None
        self._loss = after if kept else before
        self.stages.append(Stage(what, kept, (before, after), words, facts))
        return kept

    def _now(self) -> float:
        """Return the loss of the model as it is; measured once."""
        if self._loss is None:
            self._loss = self._judged_loss()
        return self._loss

    def _judged_loss(self) -> float:
        """Return the loss on the validation set, where there is one: memorized samples say little about others."""
        found = self._context.measure()
        return found["valid_loss"] if "valid_loss" in found else self._replay.loss(self._checked)

    def _draw(self, count: int, number: int) -> list[int]:
        """Draw samples to train on, none of which is used for checks."""
        return self._reservoir.draw(count, self._cycle, number, without=self._checked)

    def _looked(self) -> dict[str, ReplayedSamples]:
        """Return the remembered samples as they reach the mixtures now."""
        if self._seen is None:
            self._seen = self._replay.look(self._everything)
        return self._seen

    @property
    def _everything(self) -> list[int]:
        return [number for kept in self._reservoir.groups.values() for number in kept]

    def _group_numbers(self, numbers: Sequence[int]) -> Tensor:
        places = {name: index for index, name in enumerate(self._groups)}
        return torch.tensor([places[self._reservoir.group_of(number)] for number in numbers])

    def _table(self, layer: MixtureOfExperts, seen: ReplayedSamples) -> Tensor:
        """Return (slots, classes, choices): how many of the remembered tokens chose an expert, on all ranks."""
        device, num_classes, k = seen.tokens.device, len(self._groups), seen.chosen.shape[1]
        classes = self._group_numbers(seen.numbers).to(device)[seen.sample]
        places = (seen.chosen * num_classes + classes[:, None]) * k + torch.arange(k, device=device)
        table = torch.zeros(layer.num_slots * num_classes * k, dtype=torch.float64, device=device)
        table.scatter_add_(0, places.flatten(), torch.ones_like(places.flatten(), dtype=torch.float64))
        return self._context.world.all_reduce(table).view(layer.num_slots, num_classes, k)

    def _means(self, seen: ReplayedSamples, slot: int) -> Tensor:
        """Return (classes, inputs): the mean of an expert's tokens of each class, on all ranks."""
        classes = self._group_numbers(seen.numbers).to(seen.tokens.device)[seen.sample]
        chose = (seen.chosen == slot).any(1)
        sums = torch.zeros(len(self._groups), seen.tokens.shape[1] + 1, dtype=torch.float64, device=classes.device)
        ones = torch.ones(len(seen.tokens), 1, dtype=torch.float64, device=classes.device)
        sums.index_add_(0, classes[chose], torch.cat([seen.tokens.double(), ones], 1)[chose])
        self._context.world.all_reduce(sums)
        return (sums[:, :-1] / sums[:, -1:].clamp_min(1)).cpu()


def _raised(loss: float, by: float) -> float:
    """Return the loss raised by a fraction of its size, which is larger also where a loss is below 0."""
    return loss + by * abs(loss)


@dataclass(frozen=True)
class _Halves:
    centres: Tensor  # (2, inputs)
    second: list[int]  # classes of the second half


def _halves(means: Tensor, counts: Tensor) -> _Halves | None:
    """Cluster classes into two by the means of their tokens; None where there are not two."""
    there = [index for index, count in enumerate(counts.tolist()) if count >= 2]
    if len(there) < 2:
        return None
    points, weights = means[there], counts[there].unsqueeze(1)
    apart = torch.cdist(points, points)
    first, second = divmod(int(apart.argmax()), len(there))
    centres = points[[first, second]].clone()
    for _ in range(10):
        is_second = torch.cdist(points, centres).argmin(1).bool()
        if is_second.all() or not is_second.any():
            return None
        for half, chosen in enumerate((~is_second, is_second)):
            centres[half] = (points[chosen] * weights[chosen]).sum(0) / weights[chosen].sum()
    return _Halves(centres, [there[index] for index, found in enumerate(is_second.tolist()) if found])


def _focus(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 − entropy of each expert's classes ÷ that of a uniform mix, and the load, from (slots, classes)."""
    load = table.sum(1)
    shares = table / load.clamp_min(1).unsqueeze(1)
    entropy = -(shares * shares.clamp_min(1e-30).log()).sum(1)
    return 1 - entropy / math.log(max(table.shape[1], 2)), load


def _mutual_information(table: Tensor) -> Tensor:
    """Return the mutual information of rows and columns of a table of weights, in nats."""
    joint = table / table.sum()
    apart = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    tiny = 1e-30
    return (joint * (joint.clamp_min(tiny).log() - apart.clamp_min(tiny).log())).sum()
