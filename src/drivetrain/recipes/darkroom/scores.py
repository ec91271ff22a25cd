"""Scores what is learned in context on held-out goals, beside random actions, the source and the optimum."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from torch import Tensor

from drivetrain.recipes.darkroom.contexts import Context
from drivetrain.recipes.darkroom.environment import Darkroom
from drivetrain.recipes.darkroom.play import play, random_return
from drivetrain.recipes.darkroom.source import ActorCritic
from drivetrain.recipes.darkroom.transformer import DistillationTransformer

SCORES, PICTURE = "in_context.json", "return_by_episode.png"


@dataclass(frozen=True)
class DarkroomScores:
    """Mean returns over held-out goals. `first` and `last` are over the first and last sixth of the episodes."""

    random: float
    optimum: float
    source: list[float]  # by episode
    transformer: list[float]  # by episode
    goals: list[dict[str, float]]  # by goal: cell, distance, optimum, random, source and transformer (both last)

    @property
    def num_last(self) -> int:
        return max(1, len(self.transformer) // 6)

    @property
    def first(self) -> float:
        return sum(self.transformer[: self.num_last]) / self.num_last

    @property
    def last(self) -> float:
        return sum(self.transformer[-self.num_last :]) / self.num_last

    @property
    def source_last(self) -> float:
        return sum(self.source[-self.num_last :]) / self.num_last

    def summary(self) -> dict[str, float]:
        """Returns the figures that are compared between runs."""
        return {
            "first": self.first,
            "last": self.last,
            "part_of_optimum": self.last / self.optimum,
            "times_random": self.last / self.random,
            "source_last": self.source_last,
            "random": self.random,
            "optimum": self.optimum,
        }


def score(
    model: DistillationTransformer,
    room: Darkroom,
    context: Context,
    source: ActorCritic,
    goals: Tensor,
    num_walkers: int,
    num_episodes: int,
    seed: int,
) -> DarkroomScores:
    """Lets `num_walkers` walkers for each goal play, and as many new learners of the source's kind learn."""
    each = goals.repeat_interleave(num_walkers)
    played = play(model.eval(), room, context, each, num_episodes, seed).cpu()
    learned = source.learn(room, each, num_episodes, seed + 1).rewards.sum(2).float()
    random, best = random_return(room, goals), room.best_return(goals)
    last = slice(-max(1, num_episodes // 6), None)
    rows = [
        {
            "cell": int(goal),
            "distance": int(room.distance(goal)),
            "optimum": float(best[number]),
            "random": float(random[number]),
            "source": float(learned[each == goal, last].mean()),
            "transformer": float(played[each == goal, last].mean()),
        }
        for number, goal in enumerate(goals)
    ]
    curves = learned.mean(0).tolist(), played.mean(0).tolist()
    return DarkroomScores(float(random.mean()), float(best.mean()), *curves, goals=rows)


def write_scores(folder: Path, scores: DarkroomScores) -> None:
    """Writes them as JSON and as a picture of the return by episode."""
    text = json.dumps({"summary": scores.summary(), **asdict(scores)}, indent=1)
    (folder / SCORES).write_text(text + "\n", encoding="utf-8")
    draw(folder / PICTURE, [scores])


def read_scores(path: Path) -> DarkroomScores:
    """Returns what `write_scores` wrote."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return DarkroomScores(**{field.name: kept[field.name] for field in fields(DarkroomScores)})


def draw(path: Path, runs: list[DarkroomScores], title: str = "") -> None:
    """Draws the return by episode of some runs, each thin, and their mean, beside the baselines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, color in (("transformer", "C0"), ("source", "C1")):
        curves = [_smoothed(getattr(run, name)) for run in runs]
        for curve in curves if len(curves) > 1 else ():
            axes.plot(range(1, len(curve) + 1), curve, color=color, alpha=0.3, linewidth=0.8)
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        about = {"transformer": "transformer, frozen weights", "source": "source, learning by gradient"}[name]
        axes.plot(range(1, len(mean) + 1), mean, color=color, label=about)
    axes.axhline(runs[0].optimum, color="0.4", linestyle="--", label=f"optimum {runs[0].optimum:.1f}")
    axes.axhline(runs[0].random, color="0.4", linestyle=":", label=f"random actions {runs[0].random:.2f}")
    axes.set_xlabel("episode")
    axes.set_ylabel("return on held-out goals (mean of 5 episodes)")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _smoothed(values: list[float], width: int = 5) -> list[float]:
    """Returns the mean of each value and the four before it, as far as there are any."""
    return [sum(part) / len(part) for part in (values[max(0, end - width) : end] for end in range(1, len(values) + 1))]
