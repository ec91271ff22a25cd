"""Algorithm distillation on the darkroom: a transformer that learns, in its context, to find goals it never saw.

`drivetrain train darkroom` lets simple learners look for the goals of a dark room, trains a transformer to predict
their actions from their histories, and then lets it play for held-out goals with frozen weights.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.api.training import Result, export
from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.metrics import LossSum
from drivetrain.core.schedules import WarmupCosine
from drivetrain.hardware import detect
from drivetrain.hardware.device import DeviceManager
from drivetrain.job import Job
from drivetrain.recipes.darkroom.contexts import UNCOUNTED, Context
from drivetrain.recipes.darkroom.environment import NUM_ACTIONS, Darkroom
from drivetrain.recipes.darkroom.scores import PICTURE, SCORES, score, write_scores
from drivetrain.recipes.darkroom.source import ActorCritic
from drivetrain.recipes.darkroom.transformer import DistillationTransformer
from drivetrain.recipes.facts import RecipeFacts

SETTINGS = "darkroom.json"
LEAST_EPISODES = 4  # of a context: with fewer there is little to learn from


@dataclass(frozen=True)
class DarkroomSize:
    """The sizes of model and data."""

    room: int
    horizon: int
    num_held_out: int
    num_learners: int  # of the source, for each goal
    source_episodes: int
    subsample: int  # of the source's episodes, so that a context shows progress
    actor_rate: float
    n_transit: int
    n_embd: int
    n_layer: int
    n_head: int
    batch: int
    max_steps: int
    learning_rate: float
    episodes: int  # played for each held-out goal
    walkers: int  # that play for each held-out goal


SIZES = {
    "small": DarkroomSize(5, 10, 5, 16, 160, 4, 0.3, 40, 32, 2, 2, 64, 1200, 2e-3, 120, 8),
    "full": DarkroomSize(9, 20, 16, 32, 400, 16, 0.2, 160, 128, 4, 4, 256, 5000, 1e-3, 300, 8),
}


def job(config: Config) -> Job:
    size = _sized(config)
    room, source = Darkroom(size.room, size.horizon), ActorCritic(actor_rate=size.actor_rate)
    context = Context(config.recipe.context, size.n_transit // size.horizon, size.horizon)
    goals, held_out = room.split(size.num_held_out)
    # Each goal has several learners; each of their episodes is in one of the subsampled histories.
    learned = source.learn(room, goals.repeat_interleave(size.num_learners), size.source_episodes, config.run.seed)
    held_out_learned = source.learn(room, held_out.repeat_interleave(2), size.source_episodes, config.run.seed + 1)
    contexts = context.training_set(learned.subsampled(size.subsample))
    settings = {
        "size": asdict(size),
        "context": context.kind,
        "seed": config.run.seed,
        "device": str(DeviceManager(detect(), config.device.mode, config.device.device, config.device.ids).device),
    }
    shown = learned.rewards[:, -size.source_episodes // 6 :].sum(2).float().mean() / room.best_return(goals).mean()
    said = (
        f"{len(goals)} goals in a {size.room}×{size.room} room, {len(held_out)} held out; {len(contexts):,} contexts "
        f"of up to {context.num_episodes} episodes; the source ends at {shown:.0%} of the optimum"
    )
    facts = {"contexts": len(contexts), "held_out_goals": held_out.tolist(), "source_part_of_optimum": float(shown)}
    rate = config.optimizer.learning_rate or size.learning_rate
    return Job(
        name="darkroom" if context.kind == "plain" else f"darkroom-{context.kind}",
        model=lambda: make_model(size),
        data=contexts,
        valid=context.training_set(held_out_learned.subsampled(size.subsample)),
        valid_every=max(1, size.max_steps // 6),
        loss=action_loss,
        metrics={"accuracy": accuracy},
        items="actions",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99)),
        global_batch=None if config.batch_asked.is_set else size.batch,
        default_batch=size.batch,
        epochs=config.budget.epochs,
        max_steps=config.budget.max_steps or (None if config.budget.epochs else size.max_steps),
        checkpoint_every=max(1, size.max_steps // 6),
        seed=config.run.seed,
        schedule=WarmupCosine(warmup_steps=size.max_steps // 20, floor=0.05),
        clip_norm=1.0,
        weight_decay=0.01,
        hooks=[RecipeFacts([said], {SETTINGS: settings}, **facts)],
    )


def _sized(config: Config) -> DarkroomSize:
    """Returns the chosen size with the keys that were given, or refuses a context that cannot be."""
    given = {
        "n_embd": config.recipe.tf_n_embd,
        "n_layer": config.recipe.tf_n_layer,
        "n_transit": config.recipe.n_transit,
    }
    size = replace(SIZES[config.recipe.size], **{name: value for name, value in given.items() if value is not None})
    problems = []
    step = 2 * size.horizon  # halves of a context are whole episodes
    least = LEAST_EPISODES * size.horizon
    if size.n_transit % step or size.n_transit < least:
        problems.append(
            Problem(
                "recipe.n_transit",
                f"a context is an even number of whole episodes of {size.horizon} steps, and at least {LEAST_EPISODES}",
                size.n_transit,
                allowed=f"{least}, {least + step}, {least + 2 * step}, …",
                remedy=f"--n-transit {max(least, round(size.n_transit / step) * step)}",
            )
        )
    kept = size.source_episodes // size.subsample
    if size.n_transit > kept * size.horizon:
        problems.append(
            Problem(
                "recipe.n_transit",
                f"a history has {kept} episodes of {size.horizon} steps",
                size.n_transit,
                allowed=f"at most {kept * size.horizon}",
                remedy=f"--n-transit {kept // 2 * step}",
            )
        )
    if size.n_embd % size.n_head:
        problems.append(
            Problem(
                "recipe.tf_n_embd",
                f"{size.n_head} attention heads share it",
                size.n_embd,
                allowed=f"a multiple of {size.n_head}",
                remedy=f"--tf-n-embd {max(1, round(size.n_embd / size.n_head)) * size.n_head}",
            )
        )
    if problems:
        raise ConfigError(problems)
    return size


def make_model(size: DarkroomSize) -> DistillationTransformer:
    room = Darkroom(size.room, size.horizon)
    return DistillationTransformer(room, size.n_transit, size.n_embd, size.n_layer, size.n_head)


def action_loss(model: nn.Module, batch: list[Tensor]) -> LossSum:
    """Sums over the steps that count, and counts them: a short context weighs what it holds."""
    *steps, labels = batch
    logits = model(*steps).view(-1, NUM_ACTIONS).float()
    total = functional.cross_entropy(logits, labels.flatten().long(), ignore_index=UNCOUNTED, reduction="sum")
    return LossSum(total, (labels != UNCOUNTED).sum())


def accuracy(logits: Tensor, batch: list[Tensor]) -> LossSum:
    """Returns how many of the source's actions are the most likely ones. 1 is out of reach: the source samples."""
    labels = batch[-1]
    return LossSum((logits.argmax(2) == labels).sum(), (labels != UNCOUNTED).sum())


def show(result: Result) -> None:
    """Plays for the held-out goals with the trained weights, and writes down what came of it."""
    weights = export(result)
    if not result.finished:
        print("\nThe held-out goals are played for once training is finished.")
        return
    kept: dict[str, Any] = json.loads((result.folder / SETTINGS).read_text(encoding="utf-8"))
    size = DarkroomSize(**kept["size"])
    room, source = Darkroom(size.room, size.horizon), ActorCritic(actor_rate=size.actor_rate)
    context = Context(kept["context"], size.n_transit // size.horizon, size.horizon)
    model = make_model(size)
    model.load_state_dict(load_file(weights))
    _, goals = room.split(size.num_held_out)
    scores = score(model.to(kept["device"]), room, context, source, goals, size.walkers, size.episodes, kept["seed"])
    write_scores(result.folder, scores)
    print(
        f"\nIn context, with frozen weights, on {len(goals)} goals it never saw: a return of {scores.first:.2f} over "
        f"the first {scores.num_last} episodes, and of {scores.last:.2f} over the last {scores.num_last} of "
        f"{size.episodes}: {scores.last / scores.optimum:.0%} of the optimum ({scores.optimum:.2f}), "
        f"{scores.last / scores.random:.1f} × random actions ({scores.random:.2f}). The source, which learns by "
        f"gradient, ends at {scores.source_last:.2f}."
    )
    print(f"{SCORES}, {PICTURE} and the weights (model.safetensors) are in {result.folder}.")
