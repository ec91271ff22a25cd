"""The methods that are compared, each as a job: the same stream of samples, the same optimizer, as many steps.

One row of `METHODS` states how each differs. The tuned values are in `Settings`; every method is tried with equally
many.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.core.hook import Hook
from drivetrain.job import Job
from drivetrain.moe import Lifecycle, Rules, Sleep, SleepRules
from studies.continual.consolidation import Consolidated
from studies.continual.diary import ConsolidateAfterTasks, Diary
from studies.continual.networks import Dense, Mixture, RankByNearness
from studies.continual.tasks import Stream, Task


@dataclass(frozen=True)
class Scale:
    """The sizes that are the same for all methods."""

    hidden: int  # of an expert
    max_experts: int  # of a mixture: a fixed one has them all from the start
    batch: int
    steps_per_task: int
    remembered: int  # samples, by those who replay
    num_classes: int = 10
    first_experts: int = 2  # of a growing mixture
    chosen: int = 2  # experts of each sample, where a router that learns chooses
    look: int = 5  # steps between two looks of the hook that adds and removes experts
    nap: int = 50  # steps between two replays
    replay_steps: int = 25
    replay_batch: int = 64


@dataclass(frozen=True)
class MethodSettings:
    """The settings that are tuned for each method."""

    learning_rate: float
    strength: float = 0.0  # with which earlier tasks hold weights
    far: float = 1.15  # from all centroids, relative to what is usual: beyond, a sample is new
    memory: float = 0.99  # of centroids: how much stays at each look
    replay_rate: float = 1.0  # of the learning rate, in replay


@dataclass(frozen=True)
class Method:
    about: str
    network: Literal["dense", "fixed", "growing"]
    size: Literal["total", "active"] = "total"  # of the fixed mixture, which a dense network has
    consolidates: bool = False
    replays: bool = False
    by_nearness: bool = False
    mixed: bool = False  # all tasks at once: no method, but what could be reached


METHODS = {
    "joint": Method("dense, all tasks mixed together: a bound", "dense", mixed=True),
    "dense": Method("one network as large as all experts together", "dense"),
    "dense-small": Method("one network as large as the experts of one sample", "dense", size="active"),
    "ewc": Method("dense, elastic weight consolidation", "dense", consolidates=True),
    "dense+replay": Method("dense, replays as the growing one does asleep", "dense", replays=True),
    "fixed": Method("all experts from the start, learned router", "fixed"),
    "fixed-near": Method("all experts from the start, nearest centroid", "fixed", by_nearness=True),
    "fixed+replay": Method("fixed, replays as well", "fixed", replays=True),
    "growing": Method("experts grown where inputs are new", "growing", by_nearness=True),
    "growing+sleep": Method("growing, and sleeps: replay, merge, prune", "growing", by_nearness=True, replays=True),
}


def trials_of(method: Method) -> tuple[MethodSettings, ...]:
    """Return four settings for each method: two learning rates × two of its own setting, or four learning rates."""
    if method.network == "growing":
        return tuple(MethodSettings(rate, memory=memory) for rate in (3e-3, 1e-2) for memory in (0.9, 0.99))
    if method.consolidates:
        return tuple(MethodSettings(rate, strength=strength) for rate in (1e-3, 3e-3) for strength in (30.0, 300.0))
    if method.replays:
        return tuple(MethodSettings(rate, replay_rate=factor) for rate in (3e-3, 1e-2) for factor in (0.5, 1.0))
    return tuple(MethodSettings(rate) for rate in (3e-4, 1e-3, 3e-3, 1e-2))


def make_job(
    name: str, method: Method, tasks: Sequence[Task], scale: Scale, settings: MethodSettings, seed: int
) -> tuple[Job, Diary]:
    """Return the job, and the hook that records how it went."""
    diary = Diary(tasks, scale.look, scale.steps_per_task)
    num_pixels = tasks[0].train.pixels.shape[1]
    job = Job(
        name=name,
        model=lambda: make_network(method, num_pixels, scale, settings),
        data=Stream(tasks, scale.steps_per_task, scale.batch, seed, mixed=method.mixed),
        loss=_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=settings.learning_rate),
        global_batch=scale.batch,
        epochs=1,
        shuffle=False,
        seed=seed,
        hooks=[*_hooks(method, tasks, scale, settings, seed), diary],
        keep_last=1,
        length_is_read=True,  # that of its tasks
    )
    return job, diary


def make_network(method: Method, num_pixels: int, scale: Scale, settings: MethodSettings) -> nn.Module:
    most = scale.max_experts
    if method.network == "dense":
        width = scale.hidden * (most if method.size == "total" else scale.chosen)
        dense = Dense(num_pixels, width, scale.num_classes)
        return Consolidated(dense, settings.strength) if method.consolidates else dense
    first = most if method.network == "fixed" else scale.first_experts
    return Mixture(
        num_pixels,
        scale.hidden,
        scale.num_classes,
        first,
        most + (method.network == "fixed" and method.by_nearness),  # centroids are kept where there is room to grow
        k=1 if method.by_nearness else scale.chosen,
        by_nearness=method.by_nearness,
    )


def _loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    return loss + model.penalty() if isinstance(model, Consolidated) else loss


def _hooks(method: Method, tasks: Sequence[Task], scale: Scale, settings: MethodSettings, seed: int) -> list[Hook]:
    """Return the hooks in the order of their calls: those that change experts before those that rank them."""
    hooks: list[Hook] = []
    lifecycle = None
    if method.by_nearness:
        lifecycle = Lifecycle(scale.look, _growth(scale, settings), seed)
        hooks.append(lifecycle)
    if method.replays:
        rules = SleepRules(
            # All who replay do it at the same times, as often and as much.
            interval=scale.nap,
            shortest=scale.nap,
            longest=scale.nap,
            reservoir=scale.remembered,
            replay_steps=scale.replay_steps,
            replay_batch=scale.replay_batch,
            rate=settings.replay_rate,
            specialise_steps=0,
            focus=-1.0,  # no splits: they lean routers, and nearness has nothing to lean
            max_experts=scale.max_experts,
        )
        if method.network == "fixed":
            rules = replace(rules, min_experts=scale.max_experts)
        hooks.append(Sleep(scale.look, rules, task_of=lambda item: int(item[2]), lifecycle=lifecycle, seed=seed))
    if method.by_nearness:
        hooks.append(RankByNearness(scale.look))
    if method.consolidates:
        hooks.append(ConsolidateAfterTasks(tasks, scale.steps_per_task))
    return hooks


def _growth(scale: Scale, settings: MethodSettings) -> Rules:
    """Return the rules of growth: quick, never merged or pruned awake.

    Samples that come before an expert is grown are trained into one of other tasks. It grows for new inputs alone:
    samples go to the nearest centroid, and an expert that is grown for the loss has none yet.
    """
    return Rules(
        max_experts=scale.max_experts,
        far=settings.far,
        memory=settings.memory,
        high_loss=math.inf,
        patience=2,
        cooldown=2,
        idle_looks=10**9,
        agreement=2.0,
    )
