"""Compares runs: which settings differ, which runs are pairs, and whether one setting is better than another.

Runs with the same configuration but for the seed are an *arm*. Two arms are compared seed by seed: runs of one seed
see the same samples in the same order and start from the same weights, so most of the noise is in both.
Where runs cannot be compared, the verdict says why, and is not a guess.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from drivetrain.core.aims import Aim, Mode
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import as_row, find_run, is_finished, read_yaml
from drivetrain.core.value import format_count, format_list
from drivetrain.report.paired_test import CONFIDENCE, PairedTest, fewest_pairs, paired_test, pairs_needed
from drivetrain.report.run_data import Row, RunData

Over = Literal["samples", "steps", "seconds"]
Kind = Literal["better", "worse", "cannot tell", "identical", "refused"]
SECONDS_APART = 0.05  # of each other: seconds are never equal

# Settings that change how a run is done, watched and saved, but not what it learns.
_NOT_LEARNED = (
    "run.", "device.", "watch.", "checkpoint.", "plan.", "distributed.", "data.num_workers", "data.total_workers",
    "data.pin_memory", "data.prefetch_factor", "data.resident", "compile.", "kernels.", "memory.",
)  # fmt: skip
_LEARNED = ("checkpoint.init_from", "distributed.sync_batchnorm")
_OF_A_START = ("run.", "watch.", "checkpoint.fresh")  # how a run was begun and watched says nothing about it
_OF_EVERY_RUN = ("name", "seed", "extensions")
_WORDS_OF_A_RUN = ("--seed", "--name", "--run-name", "--output-dir", "--output", "--out")  # in the flags of a script
_ORDER = ("num_samples", "shuffle", "order", "grouped by length")
_AUTO = "auto"  # as the flags call a setting that was not given
_MOST_SETTINGS_IN_LABEL = 3


@dataclass(frozen=True)
class RunOfArm:
    """A run as it is compared: its records, and what was configured."""

    data: RunData
    name: str
    config: Mapping[str, Any]
    fingerprint: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str) -> "RunOfArm":
        return cls(RunData.read(folder), name, dict(_flat(_document(folder / "config.yaml"))), _fingerprint(folder))

    @property
    def seed(self) -> Any:
        return self.data.job.get("seed")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What decides what is learned, by name, without the seed."""
        learned = {
            key: value
            for key, value in self.config.items()
            if key in _LEARNED or not key.startswith(_NOT_LEARNED)  # the seed is in the section `run`
        }
        job = {key: value for key, value in self.data.job.items() if key not in _OF_EVERY_RUN}
        code = {**self._marks("functions"), **self._marks("without_flags"), **self._marks("methods")}
        return {
            **{f"config: {key}": value for key, value in learned.items()},
            **{f"job: {key}": value for key, value in job.items()},
            "precision": self.data.plan.get("precision"),
            "flags of the script": " ".join(_without_seed(self.data.source.get("arguments") or ())),
            **{f"code: {name}": mark for name, mark in code.items()},
            **{f"model: {name or 'the whole'}": mark for name, mark in self._marks("parts").items()},
        }

    def _marks(self, kind: str) -> Mapping[str, str]:
        found = self.fingerprint.get(kind)
        return found if isinstance(found, Mapping) else {}

    @cached_property
    def totals(self) -> dict[str, list[float]]:
        """Steps, and the samples, items and seconds up to each."""
        rows = self.data.steps
        sums: dict[str, list[float]] = {"steps": [row["step"] for row in rows]}
        for name, key in (("samples", "samples"), ("items", "num_items"), ("seconds", "seconds")):
            total, found = 0.0, []
            for row in rows:
                total += row[key]
                found.append(total)
            sums[name] = found
        return sums

    def total(self, over: str) -> float:
        """Return how much of something the run had in all."""
        found = self.totals[over]
        return found[-1] if found else 0.0

    def validations(self, metric: str, over: str, upto: float) -> list[tuple[float, int]]:
        """Return the values of a metric within so much of `over`, each with its step."""
        steps, values = self.data.metric(metric)
        reached = dict(zip(self.totals["steps"], self.totals[over], strict=True))
        inside = [place for place, step in enumerate(steps) if reached.get(step, math.inf) <= upto]
        return [(values[place], int(steps[place])) for place in inside]

    @property
    def ended(self) -> str:
        """When the run ended, or had its last event: text that sorts by time."""
        row = self.data.event("finish", "stop", "start", "resume")
        return str(row.get("time", ""))


@dataclass(frozen=True)
class Arm:
    """Runs that differ by nothing but the seed."""

    label: str
    runs: tuple[RunOfArm, ...]

    @property
    def seeds(self) -> list[Any]:
        return [run.seed for run in self.runs]


@dataclass(frozen=True)
class ArmVerdict:
    """Says what the comparison of an arm with the first one shows."""

    arm: str
    baseline: str
    kind: Kind
    words: str
    pairs: tuple[tuple[str, str, float], ...] = ()  # baseline, other, and the other's value less the baseline's
    test: PairedTest | None = None
    relative: float | None = None  # the mean difference as a share of the baseline's mean
    is_paired: bool = False  # whether the runs of a pair have the same seed


@dataclass(frozen=True)
class RunComparison:
    """Several runs side by side. `verdicts` says which arm is better than the first one, or why that is not known."""

    metric: str
    which: str
    over: Over
    upto: float  # how much of it the values are within; inf: all
    confidence: float
    wants_more: bool
    arms: tuple[Arm, ...]
    verdicts: tuple[ArmVerdict, ...]
    differences: tuple[tuple[str, tuple[str, ...]], ...]  # a setting, and its value in each arm
    notes: tuple[str, ...] = field(default=())

    @property
    def runs(self) -> list[RunOfArm]:
        return [run for arm in self.arms for run in arm.runs]

    def value(self, run: RunOfArm) -> float | None:
        """Return the value of the metric by which a run is compared."""
        found = self.value_and_step(run)
        return None if found is None else found[0]

    def value_and_step(self, run: RunOfArm) -> tuple[float, int] | None:
        """Return that value and its step; None where the run was not validated."""
        found = run.validations(self.metric, self.over, self.upto)
        numbers = [each for each in found if not math.isnan(each[0])]
        if self.which == "last" or not numbers:
            return found[-1] if found else None
        return (max if self.wants_more else min)(numbers, key=lambda each: each[0])

    @property
    def is_refused(self) -> bool:
        return any(verdict.kind == "refused" for verdict in self.verdicts)

    def rows(self) -> list[Row]:
        """Return the table of runs."""
        found: list[Row] = []
        for arm in self.arms:
            for run in arm.runs:
                value = self.value_and_step(run)
                row: Row = {"run": run.name, "arm": arm.label, "seed": run.seed, "steps": int(run.total("steps"))}
                row |= {"samples": int(run.total("samples")), "seconds": run.total("seconds")}
                found.append(row | {self.metric: value and value[0], "at step": value and value[1]})
        return found

    def as_plain(self) -> Row:
        """Return all of it as values for JSON."""
        return {
            "metric": self.metric,
            "better": "more" if self.wants_more else "less",
            "value": self.which,
            "over": self.over,
            "upto": None if math.isinf(self.upto) else self.upto,
            "confidence": self.confidence,
            "runs": [row | {"folder": str(run.data.folder)} for row, run in zip(self.rows(), self.runs, strict=True)],
            "arms": [{"label": arm.label, "runs": [run.name for run in arm.runs]} for arm in self.arms],
            "verdicts": [_plain_verdict(verdict) for verdict in self.verdicts],
            "differences": [{"setting": name, "values": list(values)} for name, values in self.differences],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        head = ["run", "seed", "steps", "samples", "seconds", self.metric]
        lines = [
            [row["run"], row["seed"], f"{row['steps']:,}", f"{row['samples']:,}", f"{row['seconds']:.1f}",
             "none" if row[self.metric] is None else f"{row[self.metric]:.6g}"]
            for row in self.rows()
        ]  # fmt: skip
        told = _columns([head, *lines])
        if self.differences:
            heads = ["what differs", *(arm.label for arm in self.arms)]
            told += ["", *_columns([heads, *([name, *values] for name, values in self.differences)])]
        told += ["", *(verdict.words for verdict in self.verdicts)]
        return "\n".join([*told, *(f"note: {note}" for note in self.notes)])


def compare(
    runs: Sequence[Path | str] | Mapping[str, Sequence[Path | str]],
    *,
    metric: str = "",
    mode: Mode = "auto",
    which: Literal["last", "best"] = "last",
    over: Over = "samples",
    common: bool = False,
    confidence: float = CONFIDENCE,
    output_dir: Path | str = "runs",
) -> RunComparison:
    """Compare runs: those that differ by the seed alone are an arm, and each arm is compared with that of the first.

    Args:
        runs: The folders of two or more runs, or their names below `output_dir`. Or a dictionary of such lists, each an
            arm by its name, the first of which the others are compared with.
        metric: The validation metric that decides. Default: `valid_loss`, or the only one there is.
        mode: Whether less (`min`) or more (`max`) of it is better; `auto` goes by the name.
        which: The `last` value of each run, or its `best`.
        over: What the runs must have had equally much of: `samples`, `steps` or `seconds`.
        common: Whether to compare runs of other lengths, and unfinished ones, at the last point that all reached.
        confidence: How often, at least, all verdicts and intervals are right, however often they are looked at.
        output_dir: The folder of all runs.

    Returns:
        The runs, what differs between them, and a verdict for each arm. As text, it is a table.

    Example:
        >>> from dataclasses import replace
        >>> valid = torch.utils.data.TensorDataset(torch.rand(8, 1), torch.rand(8, 1))
        >>> for seed in (0, 1):
        ...     one = replace(job, valid=valid, seed=seed, name=f"line-{seed}")
        ...     folder = dt.train(one, quiet=True).folder
        >>> dt.compare(["line-0", "line-1"]).verdicts[0].kind
        'cannot tell'
    """
    groups = runs if isinstance(runs, Mapping) else {"": runs}
    read = read_runs([Path(run) for members in groups.values() for run in members], Path(output_dir))
    metric = metric or _usual_metric(read)
    aim = Aim(metric, mode)
    if not aim.is_clear:
        raise DrivetrainError(
            f"whether less or more of {metric} is better is not known from its name", remedy="add --mode min or max"
        )
    _refuse_without(read, metric)
    if not common:
        _refuse_unfinished(read)
    arms = _arms(read) if groups is not runs else _given_arms(groups, read, Path(output_dir))
    upto = min(run.total(over) for run in read) if common else math.inf
    draft = RunComparison(metric, which, over, upto, confidence, aim.wants_more, arms, (), _differences(arms))
    return _with_verdicts(draft)


def read_runs(runs: Sequence[Path], output_dir: Path) -> list[RunOfArm]:
    """Read runs by their folders or names. At least two are needed, each once."""
    folders = list(dict.fromkeys(find_run(run, output_dir) for run in runs))
    if len(folders) < 2:
        raise DrivetrainError(
            "there is one run, and nothing to compare it with" if folders else "no runs are named",
            remedy=f"name two or more; `drivetrain status` shows those below {output_dir}",
        )
    names = [folder.name for folder in folders]
    return [RunOfArm.read(folder, folder.name if names.count(folder.name) == 1 else str(folder)) for folder in folders]


def _usual_metric(runs: Sequence[RunOfArm]) -> str:
    names = [name for name in runs[0].data.metric_names if name.startswith("valid_")]
    return "valid_loss" if "valid_loss" in names or not names else names[0]


def _refuse_without(runs: Sequence[RunOfArm], metric: str) -> None:
    """Refuse runs that have no validation, or not by this metric."""
    for run in runs:
        if metric in run.data.metric_names:
            continue
        if not run.data.steps:
            raise DrivetrainError(f"{run.name} has no step yet", remedy="train it, or leave it out")
        if not run.data.metrics:
            raise DrivetrainError(
                f"{run.name} has no validation: there is nothing to compare it by",
                remedy="give its job a validation set (valid=…) and train it again; `drivetrain report` shows one run",
            )
        names = [name for name in run.data.metric_names if all(name in other.data.metric_names for other in runs)]
        remedy = f"--metric {names[0]}; all have {format_list(names)}" if names else "they have no metric in common"
        raise DrivetrainError(f"{run.name} has no metric {metric}", remedy=remedy)


def _refuse_unfinished(runs: Sequence[RunOfArm]) -> None:
    for run in runs:
        if run.data.lost:
            raise DrivetrainError(
                f"the records of {run.name} end {run.data.lost}",
                remedy="restore its steps.jsonl; or --common compares at the last point that all records have",
            )
    unfinished = [run for run in runs if not is_finished(run.data.folder)]
    if unfinished:
        steps = [
            f"{run.name} is at step {int(run.total('steps')):,} of {run.data.job.get('num_steps') or 'unknown'}"
            for run in unfinished
        ]
        raise DrivetrainError(
            f"not finished: {'; '.join(steps)}",
            remedy="let them finish: the same command goes on; or --common compares at the last point that all reached",
        )


# Arms and pairs


def _arms(runs: Sequence[RunOfArm]) -> tuple[Arm, ...]:
    """Divide runs into arms, in the order in which they are named."""
    same_python = len({run.fingerprint.get("python") for run in runs}) == 1
    same_torch = len({run.fingerprint.get("torch") for run in runs}) == 1
    groups: list[tuple[dict[str, Any], list[RunOfArm]]] = []
    for run in runs:
        facts = {
            key: value
            for key, value in run.settings.items()
            if (same_python or not key.startswith("code: ")) and (same_torch or not key.startswith("model: "))
        }
        group = next((each for known, each in groups if known == facts and not _has_other_samples(run, each)), None)
        if group is None:
            groups.append((facts, [run]))
        else:
            group.append(run)
    labels = _labels([facts for facts, _ in groups], _shared_names([members for _, members in groups]))
    return tuple(Arm(label, tuple(members)) for label, (_, members) in zip(labels, groups, strict=True))


def _has_other_samples(run: RunOfArm, arm: Sequence[RunOfArm]) -> bool:
    """Return whether a run of this seed in an arm saw other training samples, as far as both have digests of them.

    Those of another seed say nothing: what is drawn for a sample depends on the seed.
    """
    return any(_changed_samples(other, run) for other in arm if other.seed == run.seed)


def _changed_samples(one: RunOfArm, other: RunOfArm) -> bool:
    marks = [
        ((run.fingerprint.get("samples") or {}).get("training") or {}).get("digests") or {} for run in (one, other)
    ]
    is_same_machine = one.fingerprint.get("machine") == other.fingerprint.get("machine")
    return is_same_machine and any(marks[1].get(number, mark) != mark for number, mark in marks[0].items())


def _given_arms(
    groups: Mapping[str, Sequence[Path | str]], runs: Sequence[RunOfArm], output_dir: Path
) -> tuple[Arm, ...]:
    """Return the arms that the caller made."""
    by_folder = {run.data.folder: run for run in runs}
    return tuple(
        Arm(label, tuple(by_folder[find_run(Path(member), output_dir)] for member in members))
        for label, members in groups.items()
        if members
    )


def _shared_names(groups: Sequence[Sequence[RunOfArm]]) -> list[str]:
    """Return what the names of each group's runs begin with, such as `base` of `base-0` and `base-1`."""
    firsts = [members[0].name for members in groups]
    begins = [_common_start([run.name for run in members]).rstrip("0123456789-_.") for members in groups]
    found = [begin if len(members) > 1 else members[0].name for begin, members in zip(begins, groups, strict=True)]
    return found if all(found) and len(set(found)) == len(found) else firsts


def _common_start(names: Sequence[str]) -> str:
    letters = zip(*names, strict=False)
    return "".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, letters))


def _labels(facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Name arms by the settings in which they differ, where those are few, else by their first runs."""
    keys = list(dict.fromkeys(key for known in facts for key in known))
    varied = [key for key in keys if any(known.get(key) != facts[0].get(key) for known in facts)]
    told = [key for key in varied if key.startswith(("config: ", "flags "))]
    told = told or [key for key in varied if key.startswith("job: ")]
    if not told or len(told) > _MOST_SETTINGS_IN_LABEL:
        return list(names)
    labels = [", ".join(_label(key, known.get(key)) for key in told) for known in facts]
    return labels if len(set(labels)) == len(labels) else list(names)


def _label(key: str, value: Any) -> str:
    if key.startswith("flags "):
        return str(value or "no flags")
    return f"{key.rpartition('.')[2].rpartition(': ')[2]}={_AUTO if value is None else value}"


def _pairs(first: Arm, other: Arm) -> tuple[list[tuple[RunOfArm, RunOfArm]], bool, list[str]]:
    """Return the pairs in the order in which they were complete, whether they share seeds, and what was left out."""
    notes = list[str]()
    of_first, of_other = (_by_seed(arm, notes) for arm in (first, other))
    shared = [seed for seed in of_first if seed in of_other]
    if shared:
        alone = [run.name for found in (of_first, of_other) for seed, run in found.items() if seed not in shared]
        if alone:
            notes.append(f"without a run of the same seed in the other arm, and not used: {format_list(alone)}")
        pairs = [(of_first[seed], of_other[seed]) for seed in shared]
    else:
        pairs = list(zip(of_first.values(), of_other.values(), strict=False))
    return sorted(pairs, key=lambda pair: max(run.ended for run in pair)), bool(shared), notes


def _by_seed(arm: Arm, notes: list[str]) -> dict[Any, RunOfArm]:
    """Return the first run of each seed."""
    found: dict[Any, RunOfArm] = {}
    for run in arm.runs:
        first = found.setdefault(run.seed, run)
        if first is not run:
            notes.append(f"{run.name} has the configuration and the seed of {first.name}, and is not used")
    return found


# Verdicts


def _with_verdicts(draft: RunComparison) -> RunComparison:
    """Add the verdict on each arm. With several, the chance of any false one is shared among them."""
    notes = list(_warnings(draft))
    first, others = draft.arms[0], draft.arms[1:]
    verdicts = [] if others else [_one_arm(draft, first)]
    confidence = 1 - (1 - draft.confidence) / max(1, len(others))
    for arm in others:
        verdicts.append(_verdict(draft, first, arm, confidence, notes))
    return replace(draft, verdicts=tuple(verdicts), notes=tuple(dict.fromkeys(notes)))


def _verdict(draft: RunComparison, first: Arm, arm: Arm, confidence: float, notes: list[str]) -> ArmVerdict:
    pairs, is_paired, left_out = _pairs(first, arm)
    notes += left_out
    bare = ArmVerdict(arm.label, first.label, "refused", "", is_paired=is_paired)
    reasons = (_why_not(draft, one, other) for one, other in pairs)
    why = next(filter(None, reasons), "")
    values = [(draft.value(one), draft.value(other)) for one, other in pairs]
    known = [(one, other) for one, other in values if one is not None and other is not None]
    if len(known) < len(values) or not all(math.isfinite(value) for pair in known for value in pair):
        why = why or f"not every run has a finite {draft.metric} there"
    if why:
        return replace(bare, words=f"refused: {arm.label} and {first.label} cannot be compared: {why}")
    if not is_paired:
        matched = "runs are matched by their order, which is valid but takes many more runs"
        notes.append(f"{first.label} and {arm.label} share no seed: {matched}")
    notes += _unlike_samples(*pairs[0]) if is_paired else []
    differences = [other - one for one, other in known]
    base = sum(one for one, _ in known) / len(known)
    test = paired_test(differences, confidence)
    told = tuple((one.name, other.name, value) for (one, other), value in zip(pairs, differences, strict=True))
    relative = test.mean / abs(base) if base else None
    return _judged(draft, replace(bare, pairs=told, test=test, relative=relative), test)


def _judged(draft: RunComparison, bare: ArmVerdict, test: PairedTest) -> ArmVerdict:
    """Add the verdict and its sentence."""
    confidence = 1 - 1 / test.threshold
    differences = [value for _, _, value in bare.pairs]
    pairs = format_count(test.num_pairs, "pair")
    if not any(differences) and bare.is_paired:
        words = f"{bare.arm} and {bare.baseline} have the same {draft.metric} in {pairs} by seed, to the last digit"
        return replace(bare, kind="identical", words=f"identical: {words}: the change has no effect on it")
    share = "" if bare.relative is None else f" ({bare.relative:+.2%})"
    by = "by seed" if bare.is_paired else "of other seeds"
    measured = f"{draft.metric} {test.mean:+.4g}{share} in {pairs} {by}"
    if not math.isinf(test.low):
        measured += f", between {test.low:+.4g} and {test.high:+.4g} ({confidence:.4g} confidence at every look)"
    if test.is_found:
        kind: Kind = "better" if (test.mean > 0) == draft.wants_more else "worse"
        words = f"{kind}: {bare.arm} than {bare.baseline}: {measured}; e-value {test.e_value:.3g}"
        return replace(bare, kind=kind, words=words)
    why = f"e-value {test.e_value:.3g} of the {test.threshold:.3g} needed"
    if test.num_pairs == 1:
        alone = "one run against one of another seed: the seed alone may make this difference"
        why = "one pair of runs, which may differ by chance" if bare.is_paired else alone
    words = f"cannot tell: {bare.arm} against {bare.baseline}: {measured}; {why}. {_more(test, differences)}"
    return replace(bare, kind="cannot tell", words=words)


def _more(test: PairedTest, differences: Sequence[float]) -> str:
    """Return what would bring a verdict."""
    confidence = 1 - 1 / test.threshold
    fewest = fewest_pairs(confidence)
    if test.num_pairs < fewest:
        return f"A verdict takes at least {fewest} pairs that agree: run both with the same {fewest} seeds"
    needed = pairs_needed(differences, confidence)
    if needed is None or needed > 20 * test.num_pairs:
        return "With a difference this small beside the noise, more seeds are unlikely to tell"
    return f"If the next pairs are like these, about {max(needed, test.num_pairs + 1)} pairs would tell"


def _one_arm(draft: RunComparison, arm: Arm) -> ArmVerdict:
    """Say what several seeds of one configuration show: how much the seed alone changes."""
    first = {repr(run.seed): run for run in reversed(arm.runs)}
    why = next(filter(None, (_other_data(first[repr(run.seed)], run) for run in arm.runs)), "")
    if why:
        return ArmVerdict(arm.label, arm.label, "refused", f"refused: the runs cannot be compared: {why}")
    values = [value for value in (draft.value(run) for run in arm.runs) if value is not None and math.isfinite(value)]
    words = "all runs have one configuration, and differ by the seed: one seed is no better than another"
    if len({repr(run.seed) for run in arm.runs}) == 1:
        words = "all runs have one configuration and one seed"
    if len(values) > 1:
        words += f". {draft.metric} is {mean(values):.6g} with a standard deviation of {stdev(values):.3g}"
    return ArmVerdict(arm.label, arm.label, "cannot tell", f"cannot tell: {words}")


def _why_not(draft: RunComparison, one: RunOfArm, other: RunOfArm) -> str:
    """Return why two runs cannot be compared, in words; empty if they can."""
    return _other_data(one, other) or _other_metric(draft.metric, one, other) or _other_budget(draft, one, other)


def _other_data(one: RunOfArm, other: RunOfArm) -> str:
    """Compare the validation sets by their lengths, and by the samples of which both have a digest."""
    sets = [_validation_sets(run) for run in (one, other)]
    if sets[0].keys() != sets[1].keys() and all(sets):
        return f"they have other validation sets: {format_list([*sets[0]])} and {format_list([*sets[1]])}"
    for name in sets[0].keys() & sets[1].keys():
        lengths = [found[name].get("length") for found in sets]
        if lengths[0] != lengths[1]:
            return f"the {name} data has {lengths[0]} samples in {one.name} and {lengths[1]} in {other.name}"
        digests = [found[name].get("digests") or {} for found in sets]
        changed = [number for number in digests[0] if digests[1].get(number, digests[0][number]) != digests[0][number]]
        if changed and one.fingerprint.get("machine") == other.fingerprint.get("machine"):
            return f"sample {changed[0]} of the {name} data is another one in {other.name} than in {one.name}"
    return ""


def _validation_sets(run: RunOfArm) -> dict[str, Any]:
    samples = run.fingerprint.get("samples") or {}
    return {name: found for name, found in samples.items() if name.startswith("validation") and isinstance(found, dict)}


def _other_metric(metric: str, one: RunOfArm, other: RunOfArm) -> str:
    """Find out whether the metric was computed by other code."""
    if one.fingerprint.get("python") != other.fingerprint.get("python"):
        return ""  # bytecode is another one in every version
    marks = [run.fingerprint.get("functions") or {} for run in (one, other)]
    is_loss = metric.endswith("_loss") or "_loss_" in metric
    if is_loss and one.data.job.get("loss_weights") != other.data.job.get("loss_weights"):
        return f"{metric} is another metric in each: the weights of the loss differ; compare by another --metric"
    for name in marks[0].keys() & marks[1].keys():
        kind, _, rest = name.partition(" ")
        concerns = is_loss if kind == "loss" else kind == "metric" and metric.endswith(f"_{rest}")
        if concerns and marks[0][name] != marks[1][name]:
            return f"{metric} is another metric in each: the code of the {name} differs; compare by another --metric"
    return ""


def _other_budget(draft: RunComparison, one: RunOfArm, other: RunOfArm) -> str:
    if not math.isinf(draft.upto):
        return ""
    asked = [[run.data.job.get(key) for key in ("num_steps", "global_batch", "num_samples")] for run in (one, other)]
    if draft.over != "seconds" and asked[0] == asked[1] and asked[0][0] is not None:
        return ""  # one may have stopped early by itself
    totals = [run.total(draft.over) for run in (one, other)]
    apart = abs(totals[0] - totals[1])
    if apart <= (SECONDS_APART * max(totals) if draft.over == "seconds" else 0):
        return ""
    return (
        f"they had other budgets: {totals[0]:,.6g} {draft.over} in {one.name} and {totals[1]:,.6g} in {other.name}; "
        "train them equally long, or --common compares at the last point that all reached"
    )


# Remarks


def _warnings(draft: RunComparison) -> Iterator[str]:
    for run in draft.runs:
        yield from (f"{run.name}: {damage}" for damage in run.data.damage)
        changed = run.data.event("job changed")
        if changed:
            what = format_list([str(change) for change in changed.get("changes") or ()])
            yield f"{run.name}: its job changed at step {changed.get('step')}: {what}"
    machines = sorted({_machine(run) for run in draft.runs})
    if len(machines) > 1:
        yield f"the runs were on other machines ({format_list(machines)}): their seconds are not comparable"
    for key, what in (("python", "code"), ("torch", "models")):
        versions = sorted({str(run.fingerprint.get(key)) for run in draft.runs})
        if len(versions) > 1:
            yield f"the runs had {key} {format_list(versions)}: whether they had the same {what} is not known"
    if not math.isinf(draft.upto):
        within = f"values are those within {draft.upto:,.6g} {draft.over}, which all runs had"
        yield f"{within}; a schedule that was not over yet counts as it stood"


def _unlike_samples(one: RunOfArm, other: RunOfArm) -> list[str]:
    """Say whether two runs of one seed saw other samples, or in another order."""
    unlike = [key.replace("_", " ") for key in _ORDER if one.data.job.get(key) != other.data.job.get(key)]
    if _changed_samples(one, other):
        unlike.append("the samples themselves")
    if not unlike:
        return []
    words = f"{one.name} and {other.name} have one seed, but other training samples"
    return [f"{words}: pairing helps less; what differs: {format_list(unlike)}"]


def _machine(run: RunOfArm) -> str:
    gpus = [str(gpu.get("name", "GPU")) for gpu in run.data.hardware.get("gpus") or ()]
    cpu = (run.data.hardware.get("cpu") or {}).get("model", "unknown")
    return format_list(sorted(set(gpus))) if gpus and run.data.plan.get("device") != "cpu" else str(cpu)


def _differences(arms: Sequence[Arm]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return what differs between arms: settings, plan, code and machine, with its values in each arm."""
    facts = [[_shown_facts(run) for run in arm.runs] for arm in arms]
    keys = list(dict.fromkeys(key for runs in facts for known in runs for key in known))
    found = []
    for key in keys:
        values = tuple(" / ".join(dict.fromkeys(_short(known.get(key)) for known in runs)) for runs in facts)
        if key.startswith("config: "):
            values = tuple(_AUTO if value == "None" else value for value in values)
        if len(set(values)) > 1:
            found.append((key, _as_letters(values) if key.startswith(("code: ", "model: ")) else values))
    return tuple(found)


def _shown_facts(run: RunOfArm) -> dict[str, Any]:
    others = {
        f"config: {key}": value
        for key, value in run.config.items()
        if key.startswith(_NOT_LEARNED) and not key.startswith(_OF_A_START)
    }
    choices = run.data.plan.get("choices") or {}
    plan = {f"plan: {name}": it.get("value") for name, it in choices.items() if isinstance(it, dict)}
    rates = [row["lr"] for row in run.data.steps if isinstance(row.get("lr"), float)]
    facts = {"machine": _machine(run), "torch": run.fingerprint.get("torch")}
    return {"highest learning rate": max(rates, default=None), **run.settings, **others, **plan, **facts}


def _as_letters(values: Sequence[str]) -> tuple[str, ...]:
    """Return versions of code as letters: a hash tells a reader nothing but whether it is the same."""
    known = [value for value in dict.fromkeys(values) if value != "None"]
    return tuple(
        "not there" if value == "None" else f"version {chr(ord('A') + known.index(value) % 26)}" for value in values
    )


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


# Reading


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(inner, Mapping):
            yield from _flat(inner, name)
        else:
            yield name, inner


def _document(path: Path) -> Any:
    try:
        return read_yaml(path)
    except (OSError, ValueError):
        return {}


def _fingerprint(folder: Path) -> dict[str, Any]:
    try:
        return as_row((folder / "fingerprint.json").read_bytes()) or {}
    except OSError:
        return {}


def _without_seed(arguments: Sequence[Any]) -> Iterator[str]:
    """Yield the flags of a script without those that name the run or its seed, and without their values."""
    words = [str(word) for word in arguments]
    for place, word in enumerate(words):
        name, _, _ = word.replace("_", "-").partition("=")
        before = words[place - 1].replace("_", "-") if place else ""
        if name not in _WORDS_OF_A_RUN and before not in _WORDS_OF_A_RUN:
            yield word


def _columns(rows: Sequence[Sequence[object]]) -> list[str]:
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[place]) for row in texts) for place in range(len(texts[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def _plain_verdict(verdict: ArmVerdict) -> Row:
    test = verdict.test
    return {
        "arm": verdict.arm,
        "baseline": verdict.baseline,
        "verdict": verdict.kind,
        "words": verdict.words,
        "paired_by_seed": verdict.is_paired,
        "pairs": [{"baseline": one, "run": other, "difference": value} for one, other, value in verdict.pairs],
        "mean_difference": test and test.mean,
        "relative": verdict.relative,
        "interval": None if test is None or math.isinf(test.low) else [test.low, test.high],
        "e_value": test and (test.e_value if math.isfinite(test.e_value) else None),
        "p_value": test and test.p_value,
        "needed_e_value": test and test.threshold,
    }
