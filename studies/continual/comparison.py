"""Compares all methods over all seeds, on the same tasks, streams and steps, and computes the results."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

from torch import nn

from drivetrain.api.training import train
from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from studies.continual.methods import METHODS, MethodSettings, Scale, make_job, make_network, trials_of
from studies.continual.scores import Scores, scores_of
from studies.continual.tasks import Images, TaskKind, held_out, make_tasks

FILE = "continual.json"
TUNING_SEEDS = (1000,)  # settings are chosen with other seeds, and other test samples, than results come from


@dataclass(frozen=True)
class MethodOutcome:
    """The outcome of one method, trained once over all tasks."""

    method: str
    seed: int
    settings: MethodSettings
    matrix: list[list[float]]  # row i: after task i; column j: accuracy on the test set of task j
    experts: list[list[int]]  # [step, experts], where their number changes
    seconds: float

    @property
    def scores(self) -> Scores:
        return scores_of(self.matrix)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "MethodOutcome":
        return cls(**{**values, "settings": MethodSettings(**values["settings"])})


@dataclass(frozen=True)
class Study:
    """The setup of a comparison. Two with the same description have the same results."""

    data: str
    tasks: TaskKind
    num_tasks: int
    scale: Scale
    train: Images = field(repr=False, compare=False)
    test: Images = field(repr=False, compare=False)

    def describe(self) -> dict[str, Any]:
        return {"data": self.data, "tasks": self.tasks, "num_tasks": self.num_tasks, "scale": asdict(self.scale)}

    def size_of(self, method: str) -> dict[str, int]:
        """Return the number of parameters with all experts, and of those that one sample uses."""
        chosen, scale = METHODS[method], self.scale
        model = make_network(chosen, self.train.pixels.shape[1], scale, MethodSettings(0.0))
        total = num_parameters(model)
        if chosen.network == "dense":
            return {"total": total, "active": total}
        width, k = self.train.pixels.shape[1] + chosen.by_nearness, 1 if chosen.by_nearness else scale.chosen
        expert = (width + 1) * scale.hidden + (scale.hidden + 1) * scale.num_classes
        router = width * scale.max_experts
        return {"total": scale.max_experts * expert + router, "active": k * expert + router}

    @property
    def num_steps(self) -> int:
        return self.num_tasks * self.scale.steps_per_task

    def num_samples(self, method: str) -> int:
        """Return the number of samples on which a gradient was taken, replays included."""
        scale = self.scale
        replayed = self.num_steps // scale.nap * scale.replay_steps * scale.replay_batch
        return self.num_steps * scale.batch + replayed * METHODS[method].replays


class ComparisonProgress(Protocol):
    """Gets the progress of a comparison."""

    def begins(self, method: str, seed: int, why: str) -> None: ...

    def task_done(self, method: str, accuracies: list[float]) -> None: ...

    def ended(self, outcome: MethodOutcome, why: str) -> None: ...


class Book:
    """Keeps the results in their file, written after every run, so that an interrupted comparison can go on."""

    def __init__(self, folder: Path, study: Study) -> None:
        self.path, self.study = folder / FILE, study
        self.outcomes: list[MethodOutcome] = []
        self.tuning: list[dict[str, Any]] = []
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            found = json.loads(self.path.read_bytes())
        except ValueError as error:
            raise DrivetrainError(f"{self.path} is damaged: {error}", remedy="choose another --name") from None
        if found["study"] != self.study.describe():
            raise DrivetrainError(f"{self.path} is of another comparison", remedy="give this one another --name")
        self.outcomes = [MethodOutcome.from_json(values) for values in found["runs"]]
        self.tuning = list(found["tuning"])

    def write(self) -> None:
        document = {
            "study": self.study.describe(),
            "summary": summary(self.study, self.outcomes),
            "tuning": self.tuning,
            "runs": [asdict(outcome) for outcome in self.outcomes],
        }
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(self.path)

    def found(self, method: str, seed: int, settings: MethodSettings) -> MethodOutcome | None:
        wanted = (method, seed, settings)
        return next((one for one in self.outcomes if (one.method, one.seed, one.settings) == wanted), None)

    def chosen(self, method: str) -> MethodSettings | None:
        """Return the settings that tuning found best, if all trials of the method are done."""
        found = {MethodSettings(**row["settings"]): row["accuracy"] for row in self.tuning if row["method"] == method}
        trials = trials_of(METHODS[method])
        return max(trials, key=lambda trial: found[trial]) if found.keys() >= set(trials) else None


def compare(
    book: Book,
    settings_of: Callable[[str], MethodSettings],
    methods: Sequence[str],
    seeds: Sequence[int],
    config: Config,
    told: ComparisonProgress,
) -> list[MethodOutcome]:
    """Compare seed by seed, so that an interrupted comparison has whole rows."""
    study = book.study
    for seed in seeds:
        for method in methods:
            settings = settings_of(method)
            if book.found(method, seed, settings) is None:
                outcome = run_one(study, method, seed, settings, config, told)
                book.outcomes = [one for one in book.outcomes if (one.method, one.seed) != (method, seed)]
                book.outcomes.append(outcome)
                book.write()
    wanted = [book.found(method, seed, settings_of(method)) for method in methods for seed in seeds]
    return [outcome for outcome in wanted if outcome is not None]


def tune(book: Book, method: str, config: Config, told: ComparisonProgress) -> MethodSettings:
    """Return the settings with the best final accuracy of a few, on samples held out of the training set."""
    study = book.study
    train, tried = held_out(study.train)
    inner = Study(study.data, study.tasks, study.num_tasks, study.scale, train, tried)
    for settings in trials_of(METHODS[method]):
        is_known = any((row["method"], row["settings"]) == (method, asdict(settings)) for row in book.tuning)
        if not is_known:
            runs = [run_one(inner, method, seed, settings, config, told, "tuning") for seed in TUNING_SEEDS]
            mean = fmean(run.scores.accuracy for run in runs)
            book.tuning.append({"method": method, "settings": asdict(settings), "accuracy": mean})
            book.write()
    best = book.chosen(method)
    assert best is not None
    return best


def run_one(
    study: Study,
    method: str,
    seed: int,
    settings: MethodSettings,
    config: Config,
    told: ComparisonProgress,
    why: str = "",
) -> MethodOutcome:
    """Train one method. The seed also decides the tasks: other orders of pixels, other classes together."""
    tasks = make_tasks(study.tasks, study.train, study.test, study.num_tasks, seed)
    own = "".join(f"-{value:g}" for value in asdict(settings).values()) if why else ""
    name = f"{why}{'-' * bool(why)}{method.replace('+', '-')}-seed-{seed}{own}"
    job, diary = make_job(name, METHODS[method], tasks, study.scale, settings, seed)
    told.begins(method, seed, why)
    diary.on_task = lambda accuracies: told.task_done(method, accuracies)
    began = time.monotonic()
    result = train(job, config, quiet=True)
    if not result.finished:
        raise KeyboardInterrupt  # what it had is saved, and it goes on from there
    outcome = MethodOutcome(method, seed, settings, diary.matrix, diary.experts, round(time.monotonic() - began, 2))
    told.ended(outcome, why)
    return outcome


def summary(study: Study, outcomes: Sequence[MethodOutcome]) -> dict[str, Any]:
    """Return means and standard deviations over seeds, method by method."""
    found: dict[str, Any] = {}
    for method in METHODS:
        own = [outcome for outcome in outcomes if outcome.method == method]
        if not own:
            continue
        scores = [outcome.scores for outcome in own]
        named = ("accuracy", "learned", "forgetting", "backward_transfer", "retention")
        found[method] = {
            "seeds": len(own),
            **{name: mean_and_spread([getattr(one, name) for one in scores]) for name in named},
            "experts": fmean(outcome.experts[-1][1] if outcome.experts else 0 for outcome in own),
            "parameters": study.size_of(method),
            "samples": study.num_samples(method),
            "seconds": round(fmean(outcome.seconds for outcome in own), 2),
        }
    return found


def mean_and_spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(fmean(values), 5),
        "spread": round(stdev(values), 5) if len(values) > 1 else 0.0,
        "least": round(min(values), 5),
        "most": round(max(values), 5),
    }


@dataclass(frozen=True)
class Margin:
    """The margin by which one method is better than another, over the seeds that both have."""

    better: str
    than: str
    mean: float
    spread: float  # the larger of both methods' standard deviations over seeds
    least: float  # of the differences, seed by seed

    @property
    def is_clear(self) -> bool:
        return self.mean > self.spread


def margin(outcomes: Sequence[MethodOutcome], better: str, than: str) -> Margin | None:
    first, second = (
        {outcome.seed: outcome.scores.accuracy for outcome in outcomes if outcome.method == method}
        for method in (better, than)
    )
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 2:
        return None
    differences = [first[seed] - second[seed] for seed in seeds]
    spread = max(stdev([one[seed] for seed in seeds]) for one in (first, second))
    return Margin(better, than, fmean(differences), spread, min(differences))


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
