"""Sleep of a model with mixtures of experts: a hook that lets it sleep now and then, and what happens in a sleep.

Between sleeps the hook only notes which samples were seen. Its state is saved with every checkpoint; a sleep is over
before the next checkpoint is written, so a run that dies in one sleeps again, the same.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import Rehearsal, StepContext
from drivetrain.core.state import is_distributed
from drivetrain.moe.experts import Routing
from drivetrain.moe.lifecycle import Lifecycle
from drivetrain.moe.mixture import (
    MixtureOfExperts,
    Number,
    Whole,
    check_every,
    check_fields,
    mixtures_in,
    refuse_too_many,
)
from drivetrain.moe.replay import Replay, ReplayedSamples, Reservoir
from drivetrain.moe.slots import Slots, Surgery

# ----------------------------------------------------------------------------------------------------------------------
# One sleep: replay, specialize, merge, prune, reorganize.
#
# Every change is checked, and undone if the loss rises: on the validation set, where there is one, else on remembered
# samples that are never replayed. Those were trained on, and say little about the effect of a sleep on samples that the
# model has not seen. All decisions come from facts over all ranks, so every rank does the same.

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


# ----------------------------------------------------------------------------------------------------------------------
# The hook: it remembers samples, and decides when to sleep.

LOOKED_AT = 256  # samples of those seen since the last look that are read to learn their class
MOST_TOLD = 64  # classes for which each expert's share is reported
NEARER = 0.7  # the next sleep comes nearer by this factor with every expert grown since the last
CHILDHOOD = 2  # sleeps that an expert sees before it may be merged or pruned in one
CALMER, BUSIER = 1.25, 0.8  # factors of the interval after a sleep that changed no expert, and one that did

_CHANGES = {"merge": "merged", "prune": "pruned", "split": "split"}  # as events about experts have it


class Sleep:
    """A hook that remembers samples, and lets the model sleep when it is time: replay, specialize, merge, prune, split.

    Args:
        every: The steps between two looks at what was seen, and at whether it is time to sleep.
        rules: When it sleeps, and what it does then.
        label_of: Gets an item of the data set and returns its label. Default: the second of a pair.
        task_of: Gets an item and returns its task. Replay is balanced over (task, label).
        lifecycle: Is set to grow more or less readily, by how full the slots are.
        seed: Seed of what is drawn.

    Example:
        >>> from drivetrain.moe import Lifecycle, Sleep
        >>> lifecycle = Lifecycle(every=50)
        >>> hooks = [lifecycle, Sleep(every=25, lifecycle=lifecycle)]  # for dt.Job(hooks=…)
    """

    changes_data = False

    def __init__(
        self,
        every: int = 25,
        rules: SleepRules | None = None,
        *,
        label_of: Callable[[Any], Any] | None = None,
        task_of: Callable[[Any], Any] | None = None,
        lifecycle: Lifecycle | None = None,
        seed: int = 0,
    ) -> None:
        check_every("Sleep", every)
        self.every, self.rules = every, rules or SleepRules()
        self._label_of, self._task_of = label_of or second_of, task_of
        self._lifecycle, self._seed = lifecycle, seed
        self.reservoir = Reservoir(self.rules.reservoir, seed)
        self.interval = float(self.rules.interval)
        self.agreement = self.rules.agreement
        self.far_factor = 1.0
        self.history: list[dict[str, Any]] = []  # of each sleep
        self._seen = 0  # steps whose samples were looked at
        self._slept_at = 0
        self._ids: list[dict[str, int]] = []  # by layer: the next expert's number at the start, and at each sleep

    def check(self, context: StepContext) -> None:
        refuse_too_many(self.rules.max_experts, context.model, "SleepRules")
        if context.experts.rehearsal is None:
            raise DrivetrainError(
                "sleep replays samples by their number, and this run has none: its data can only be iterated, or its "
                "order is a sampler's, or the loop is your own",
                remedy="give the job a data set with __getitem__ and __len__ and use dt.train, or leave Sleep out",
            )
        if any(is_distributed(parameter) for parameter in context.model.parameters()):
            raise DrivetrainError(
                "sleep trains on remembered samples outside of steps, and fsdp holds parts of the weights",
                remedy="use --parallel-strategy ddp, or expert_parallel with --expert-rest ddp; or leave Sleep out",
            )

    def __call__(self, context: StepContext) -> None:
        self.check(context)
        rehearsal = context.experts.rehearsal
        assert rehearsal is not None
        self._remember(context, rehearsal)
        grown = self._num_grown(context)
        due = self._slept_at + max(self.rules.shortest, self.interval * NEARER**grown)
        if context.step >= due:
            self._sleep(context, rehearsal, grown)

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "reservoir": self.reservoir.state_dict(),
            "interval": self.interval,
            "agreement": self.agreement,
            "far_factor": self.far_factor,
            "history": [dict(night) for night in self.history],
            "seen": self._seen,
            "slept_at": self._slept_at,
            "ids": [dict(ids) for ids in self._ids],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reservoir.load_state_dict(state["reservoir"])
        self.interval, self.agreement = state["interval"], state["agreement"]
        self.history = [dict(night) for night in state["history"]]
        self._seen, self._slept_at = state["seen"], state["slept_at"]
        self._ids = [dict(ids) for ids in state["ids"]]
        self._set_far_factor(state["far_factor"])

    # Awake

    def _remember(self, context: StepContext, rehearsal: Rehearsal) -> None:
        samples = rehearsal.samples
        seen = [number for step in range(self._seen, context.step) for number in samples.of_step(step)]
        self._seen = context.step
        new = self.reservoir.unknown(seen, LOOKED_AT)
        for number, item in zip(new, samples.items(new) if new else [], strict=True):
            self.reservoir.add(number, self._group_of(item))

    def _group_of(self, item: Any) -> str:
        label = self._label_of(item)
        return str(label) if self._task_of is None else f"{self._task_of(item)}/{label}"

    def _num_grown(self, context: StepContext) -> int:
        """Return the number of experts grown since the last sleep, without splits in it."""
        now = _next_ids(context)
        if not self._ids:
            self._ids.append(now)
        return sum(now.values()) - sum(self._ids[-1].values())

    # Asleep

    def _sleep(self, context: StepContext, rehearsal: Rehearsal, grown: int) -> None:
        began = time.perf_counter()
        since = context.step - self._slept_at
        why = f"{since} steps awake" + (f", {grown} experts grown" if grown > 1 else ", an expert grown" * grown)
        experts = _num_experts(context)
        before = context.measure()
        cycle = len(self.history)
        young = self._ids[max(0, len(self._ids) - CHILDHOOD)]
        night = Night(context, rehearsal, self.rules, self.reservoir, cycle, self.agreement, self._seed, young, before)
        stages = night.run()
        specialisation = night.specialisation()
        after = context.measure()
        self._adapt(context, stages, grown)
        self._slept_at = context.step
        self._ids.append(_next_ids(context))
        facts: dict[str, Any] = {
            "step": context.step,
            "cycle": cycle + 1,
            "why": why,
            "remembered": len(self.reservoir),
            "classes": len(self.reservoir.groups),
            "stages": [stage.as_dict() for stage in stages],
            "experts": [experts, _num_experts(context)],
            "specialisation": round(specialisation, 6),
            "serves": night.serves() if len(self.reservoir.groups) <= MOST_TOLD else {},
            "before": dict(before),
            "after": dict(after),
            "interval": round(self.interval, 1),
            "agreement": round(self.agreement, 6),
            "far_factor": round(self.far_factor, 6),
            "seconds": round(time.perf_counter() - began, 4),
        }
        self.history.append(facts)
        self._tell_changes(context, [stage for stage in stages if stage.kept and stage.what in _CHANGES])
        context.tell("sleep", **facts)
        _say(context, facts, stages)

    def _tell_changes(self, context: StepContext, stages: list[Stage]) -> None:
        """Report changes to the run's event log, and to the knowledge graph."""
        knowledge = None if self._lifecycle is None else self._lifecycle.knowledge
        layers = mixtures_in(context.model)
        for stage in stages:
            facts = stage.facts
            context.tell("expert", step=context.step, what=_CHANGES[stage.what], **facts)
            name = facts["layer"]
            if knowledge is None:
                continue
            if stage.what == "split":
                knowledge.came(name, layers[name], facts["expert"], context.step, facts["parent"])
            else:
                knowledge.went(name, facts["expert"], facts.get("into"))

    def _adapt(self, context: StepContext, stages: list[Stage], grown: int) -> None:
        """Adapt thresholds and the time to the next sleep to the findings of this one."""
        rules, changes = self.rules, [stage for stage in stages if stage.what in _CHANGES]
        has_changed = grown > 0 or any(stage.kept for stage in changes)
        factor = BUSIER if has_changed else CALMER
        self.interval = min(max(self.interval * factor, float(rules.shortest)), float(rules.longest))
        merges = [stage.kept for stage in changes if stage.what == "merge"]
        if merges and not merges[-1]:
            self.agreement += (1 - self.agreement) * 0.25  # the merged experts were not similar enough
        elif not merges:
            self.agreement = max(self.agreement * 0.99, rules.agreement * 0.9)
        layers = [layer for layer in mixtures_in(context.model).values() if layer.can_grow]
        if layers:
            fill = max(int((layer.expert_ids >= 0).sum()) / layer.num_slots for layer in layers)
            factor = 1.1 if fill > 0.8 else 0.95 if fill < 0.5 and not grown else 1.0
            self._set_far_factor(min(max(self.far_factor * factor, 0.5), 4.0))

    def _set_far_factor(self, value: float) -> None:
        self.far_factor = value
        if self._lifecycle is not None:
            self._lifecycle.far_factor = value


def second_of(item: Any) -> Any:
    """Return the label of a pair, or of an item with an entry named label or target; one for all without any."""
    found: Any = None
    if isinstance(item, Mapping):
        names = [name for name in ("label", "labels", "target", "targets") if name in item]
        found = item[names[0]] if names else None
    elif isinstance(item, (list, tuple)) and len(item) >= 2:
        found = item[1]
    if hasattr(found, "numel") and found.numel() == 1:
        found = found.item()
    return found if isinstance(found, (int, str)) else "all"


def _next_ids(context: StepContext) -> dict[str, int]:
    return {name: int(layer.next_id) for name, layer in mixtures_in(context.model).items()}


def _num_experts(context: StepContext) -> int:
    return sum(int(layer.router.active.sum()) for layer in mixtures_in(context.model).values())


def _say(context: StepContext, facts: Mapping[str, Any], stages: list[Stage]) -> None:
    step = f"step {context.step:>6}   "
    context.say(f"{step}sleep {facts['cycle']}: {facts['why']}; remembers {facts['remembered']} samples")
    for stage in stages:
        before, after = stage.loss
        outcome = f"loss {before:.4f} → {after:.4f}" + ("" if stage.kept else ", taken back")
        context.say(f"{step}  {stage.words} ({outcome})")
    effect = [
        f"{name.removeprefix('valid_').replace('_', ' ')} {value:.4f} → {facts['after'][name]:.4f}"
        for name, value in facts["before"].items()
    ]
    effect.append(f"experts {facts['experts'][0]} → {facts['experts'][1]}")
    context.say(f"{step}awake after {facts['seconds']:.1f} s: " + ", ".join(effect))
