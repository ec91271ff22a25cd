"""A hook that lets a model with mixtures of experts sleep now and then: it replays remembered samples, and tidies up.

Between sleeps it only notes which samples were seen. Its state is saved with every checkpoint; a sleep is over before
the next checkpoint is written, so a run that dies in one sleeps again, the same.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import Rehearsal, StepContext
from drivetrain.core.state import is_distributed
from drivetrain.moe.lifecycle import Lifecycle
from drivetrain.moe.mixture import check_every, mixtures_in, refuse_too_many
from drivetrain.moe.replay import Reservoir
from drivetrain.moe.sleep_cycle import Night, SleepRules, Stage

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
