"""Runs the proof: which configurations are run, what is compared in each, and the verdict."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from drivetrain.core.aims import in_words
from drivetrain.core.errors import DrivetrainError
from drivetrain.job import Job
from drivetrain.proving import reference
from drivetrain.proving.case import PLATEAU_NOTE, Case, Subject, clip_norms_of, without_plateaus
from drivetrain.proving.classify import (
    Certificate,
    Check,
    Classification,
    Kind,
    Status,
)
from drivetrain.proving.compare import (
    Floor,
    weight_difference,
)
from drivetrain.proving.comparison import (
    WEIGHTS,
    Comparison,
    continued_from,
    first_line,
    judge_items,
    judge_repeat,
    judge_resume,
    judge_same_weights,
)
from drivetrain.proving.processes import Workplace
from drivetrain.proving.recorder import Kill, Trace
from drivetrain.proving.reference import (
    Bug,
    ReferenceFacts,
    ReferenceOutcome,
    undivided,
)

REPEATS, RESUMES, ITEMS = "repeats", "resumes", "items"
MOST_KEPT = 300_000  # parameters of models whose gradients are kept of every step
Say = Callable[[str], None]


@dataclass(frozen=True)
class Extent:
    """The extent of a proof. The default fits a minute for a small job; `full` tries the rest."""

    num_steps: int = 20
    max_world: int = 2
    num_kills: int = 1
    full: bool = False
    seed: int = 0
    divisions: bool = True
    repeats: bool = True
    only: tuple[str, ...] = ()  # of "micro-batches", "workers", "processes"; empty: all
    kill_in_save: bool = False  # whether the first kill comes in a save
    time_limit_seconds: float = 120.0
    budget_seconds: float = 45.0  # for computing; batches are cut where a job would take longer


FULL = Extent(max_world=3, num_kills=6, full=True, time_limit_seconds=600.0, budget_seconds=600.0)


def prove_subject(job: Job, subject: Subject, extent: Extent, say: Say = lambda text: None) -> Certificate:
    """Run a trainer in every configuration, compare it with the plain loop, and return what was found."""
    began = time.monotonic()
    with Workplace(extent.time_limit_seconds) as workplace:
        proof = _Proof(job, subject, extent, workplace, say)
        proof.run()
    proof.certificate.seconds = time.monotonic() - began
    return proof.certificate


class _Proof:
    """One proof in progress."""

    def __init__(self, job: Job, subject: Subject, extent: Extent, workplace: Workplace, say: Say) -> None:
        self._job, self._subject, self._extent = job, subject, extent
        self._work, self._say = workplace, say
        self.certificate = Certificate(job.name, subject.name)
        self._truths: dict[Any, ReferenceOutcome] = {}
        self._facts: ReferenceFacts
        self._floor: Floor
        self._base: Trace | None = None

    def run(self) -> None:
        self._say("trying the job out")
        job, self._job = self._job, without_plateaus(self._job, self._work.apart)
        if self._job is not job:
            self.certificate.notes.append(PLATEAU_NOTE)
        case = self._first_case()
        self._facts = facts = self._work.apart(lambda: reference.find_facts(case))
        num_updates = case.num_updates(case.num_steps)
        keep_gradients = num_updates if facts.num_parameters <= MOST_KEPT else max(2, len(case.job.turns))
        if not self._subject.double:
            facts = replace(facts, dtype=None, why_not_double=facts.why_not_double or "the trainer takes none")
            self._facts = facts
        case = replace(case, dtype=facts.dtype, keys_draws=facts.keys_draws, keep_gradients=keep_gradients)
        case = self._with_clipping(self._fitted(self._even(case)))
        self._record_facts(case)
        if self._extent.divisions:
            comparison = Comparison(self._subject, self._work, self.certificate, facts, self._floor, self._truth)
            for configuration in self._configurations(case):
                self._say(configuration.name)
                comparison.compare(configuration)
            self._base = comparison.base
            if self._subject.runs_as_it_is and not self._job.hooks:
                self._run_as_it_is(case)
        if self._extent.repeats:
            self._repeat_and_resume(case)

    # The cases

    def _first_case(self) -> Case:
        job, source = self._job, self._job.source
        if source.is_iterable:
            raise DrivetrainError(
                f"{type(source.dataset).__name__} can only be iterated: its samples have no numbers to check them by",
                remedy="prove the job on a map-style data set of some of its samples",
            )
        length = len(source.dataset)
        asked = min(job.largest_batch or 8, length)
        batch = self._divisible(asked)
        if batch != asked:
            self.certificate.notes.append(
                f"global batch {batch} instead of {asked}: it is micro-batch × accumulation steps × processes here"
            )
        num_samples = min(length, 6 * batch + max(1, batch // 2)) if source.is_keyed else length
        steps = self._extent.num_steps
        if job.max_steps is not None:
            steps = min(steps, job.max_steps)
        return Case(
            "1 process, whole batches",
            job,
            device=self._subject.device,
            num_steps=steps,
            global_batch=batch,
            micro_batch=batch,
            num_samples=num_samples,
            clip_norm=job.clip_norm,
            clip_norms=clip_norms_of(job),
            seed=job.seed,
            changes_batch=self._subject.changes_batch,
            order=_order(num_samples, batch, steps, job.seed, shuffle=job.shuffle),
        )

    def _even(self, case: Case) -> Case:
        """Return the case with no step of fewer samples, where a part of one sample cannot be computed."""
        if self._facts.least_part == 1 or not case.job.source.is_keyed:
            return case
        batch = max(2, case.global_batch)
        return _resized(case, case.num_steps, batch, max(batch, case.num_samples - case.num_samples % batch))

    def _fitted(self, case: Case) -> Case:
        """Return the case with smaller batches or fewer steps, where the job would take too long; a note reports it."""
        per_step = self._facts.seconds_per_sample * case.global_batch
        num_runs = 14 if not self._extent.full else 40
        affordable = self._extent.budget_seconds / num_runs / max(per_step, 1e-9)
        steps, batch = case.num_steps, case.global_batch
        if affordable >= steps:
            return case
        steps = max(8, min(steps, int(affordable)))
        if affordable < steps:
            reduced = max(6, min(batch, int(batch * affordable / steps)))
            reduced += (batch - reduced) % 2  # what two processes share unevenly stays so: faults hide there
            batch = self._divisible(min(batch, reduced))
        if (steps, batch) == (case.num_steps, case.global_batch):
            return case
        changes = [f"{steps} steps instead of {case.num_steps}"] if steps != case.num_steps else []
        changes += [f"global batch {batch} instead of {case.global_batch}"] if batch != case.global_batch else []
        self.certificate.notes.append(f"reduced to fit the time: {', '.join(changes)}")
        num_samples = min(case.num_samples, 6 * batch + max(1, batch // 2))
        return self._even(_resized(case, steps, batch, num_samples))

    def _divisible(self, batch: int) -> int:
        """Return the batch, or one close to it that two processes with two micro-batches make up, if it has to be."""
        return max(4, batch - batch % 4) if self._subject.even_divisions else batch

    def _with_clipping(self, case: Case) -> Case:
        """Measure rounding on this job; and let clipping act in some steps and not in others, where the job clips."""
        samples = case.by_update(case.order)
        truth = self._truth(case, samples)
        adjusted = self._acting_sometimes(case, truth)
        if adjusted is not case:
            case, truth = adjusted, self._truth(adjusted, samples)
        backwards = [tuple(reversed(numbers)) for numbers in samples]
        again = self._work.apart(lambda: reference.train(case, undivided(backwards), Bug(loss_scale=0.3)))
        self._floor = Floor.measured(truth, again, case.dtype, max(1, len(case.job.turns)))
        if self._floor.has_float32_parts:
            self.certificate.notes.append(
                "the model computes parts of itself in float32 even in float64: compared as far as that allows"
            )
        return case

    def _acting_sometimes(self, case: Case, truth: ReferenceOutcome) -> Case:
        """Return the case with norms to clip to that some steps exceed and others do not; a note reports changes."""
        for name in case.job.optims or ("",):
            most = case.clip_of(name)
            norms = [own[name] for own in truth.own_norms if name in own]
            acting = [most is not None and norm > most for norm in norms]
            if most is None or (any(acting) and not all(acting)):
                continue
            middle, of = _between(norms), f" of {name!r}" if name else ""
            self.certificate.notes.append(
                f"clip_norm{of} is {middle:.3g} here instead of {most:g}, so that it acts in some steps only"
            )
            if name:
                case = replace(case, clip_norms={**case.clip_norms, name: middle})
            else:
                case = replace(case, clip_norm=middle)
        return case

    def _configurations(self, case: Case) -> list[Case]:
        subject, extent, batch = self._subject, self._extent, case.global_batch
        least = self._facts.least_part
        even = subject.even_divisions
        uneven = _uneven([batch], 3, least, even=even)
        found = [case]
        if self._divides and batch > 1 and self._wants("micro-batches"):
            found.append(replace(case, name=f"micro-batches of {uneven}", micro_batch=uneven))
            if extent.full and least == 1:
                found.append(replace(case, name="micro-batches of 1", micro_batch=1))
        if subject.workers and self._wants("workers"):
            found.append(replace(case, name="2 loader workers", num_workers=2))
        world = min(2, subject.max_world, extent.max_world)
        for strategy in subject.strategies if world > 1 and self._wants("processes") else ():
            micro = _uneven([batch // 2, batch - batch // 2], 3, least, even=even) if self._divides else batch
            name = f"2 processes, {strategy}" + (f", micro-batches of {micro}" if self._divides else "")
            found.append(replace(case, name=name, world_size=2, micro_batch=micro, strategy=strategy))
            if extent.full and min(subject.max_world, extent.max_world) > 2:
                shares = [batch * (rank + 1) // 3 - batch * rank // 3 for rank in range(3)]
                micro = _uneven(shares, 2, least, even=even) if self._divides else batch
                found.append(
                    replace(
                        case,
                        name=f"3 processes, {strategy}, 1 loader worker",
                        world_size=3,
                        micro_batch=micro,
                        strategy=strategy,
                        num_workers=1 if subject.workers else 0,
                    )
                )
        return found

    @property
    def _divides(self) -> bool:
        """Whether a process's share of a step is cut into micro-batches."""
        return self._subject.micro_batches and not (self._subject.counts_beforehand and self._facts.late_parts)

    def _wants(self, what: str) -> bool:
        return not self._extent.only or what in self._extent.only

    def _run_as_it_is(self, case: Case) -> None:
        """Train with the job's own data and loss objects, which nothing watches, and compare the weights' bits."""
        self._say("as it is, unobserved")
        steps = min(6, case.num_steps)
        num_samples = len(case.job.source.dataset)
        seen = replace(
            case,
            name="as it is, unobserved",
            num_steps=steps,
            num_samples=num_samples,
            order=_order(num_samples, case.global_batch, steps, case.seed, shuffle=case.job.shuffle),
            clip_norm=self._job.clip_norm,
            clip_norms=clip_norms_of(self._job),
            dtype=None,
            randomness="own",
            keep_gradients=0,
        )
        observed = self._work.run(self._subject.run, seen)
        unobserved = self._work.run(self._subject.run, replace(seen, observed=False))
        self._add(seen.name, WEIGHTS, judge_same_weights(observed, unobserved))

    # Repeating and resuming

    def _repeat_and_resume(self, case: Case) -> None:
        subject, extent = self._subject, self._extent
        world = min(2, subject.max_world, extent.max_world)
        batch, least = case.global_batch, self._facts.least_part
        even, shares = subject.even_divisions, [batch // world, batch - batch // world]
        micro = _uneven(shares, 2, least, even=even) if self._divides else batch
        save_every = 3
        own = replace(
            case,
            name=f"{world} process{'es' if world > 1 else ''}, the job's own randomness",
            world_size=world,
            micro_batch=micro,
            num_steps=min(case.num_steps, 12),
            order=case.order[: min(case.num_steps, 12)],
            strategy=subject.strategies[0] if world > 1 else case.strategy,
            num_workers=1 if subject.workers else 0,
            clip_norm=self._job.clip_norm,
            clip_norms=clip_norms_of(self._job),
            dtype=None,
            randomness="own",
            observed=not self._job.hooks,
            digests=True,
            save_every=save_every,
        )
        self._say("running twice")
        first, second = (self._work.run(subject.run, own) for _ in range(2))
        self._add(own.name, REPEATS, judge_repeat(own, first, second, self._facts))
        if first.error or second.error:
            return
        if self._facts.items_draw:
            self._say("reading items in another process")
            alone = replace(own, world_size=1, num_workers=0, micro_batch=batch, save_every=None)
            self._add(own.name, ITEMS, judge_items(first, self._work.run(subject.run, alone)))
        if not subject.resumes:
            return
        for kill in _kills(own, extent):
            self._say(f"killing {kill}")
            again = replace(own, name=f"kill -9 {kill}", folder=self._work.new_folder())
            killed = self._work.run(subject.run, replace(again, kill=kill))
            if not killed.killed and not killed.error:
                detail = "the run ended before it could be killed there"
                self.certificate.checks.append(Check(again.name, RESUMES, "skipped", detail=detail))
                continue
            resumed = self._work.run(subject.run, again)
            start = continued_from(again, first, resumed)
            detail = "" if start is None else f"continued from step {start} of {own.num_steps}"
            self._add(again.name, RESUMES, judge_resume(again, first, killed, resumed, self._facts), detail)
        if extent.full and subject.changes_world and self._base is not None and self._floor.tells_weights:
            self._resume_elsewhere(case)

    def _resume_elsewhere(self, case: Case) -> None:
        """Kill a run of two processes, continue it on one and on three, and compare with the plain loop."""
        kill = Kill(max(3, case.num_steps // 2), "after_step")
        for world in (1, 3):
            if world > self._subject.max_world:
                continue
            name = f"kill -9 {kill}, continued by {world} instead of 2 processes"
            self._say(name)
            two = replace(
                case,
                name=name,
                world_size=2,
                micro_batch=_uneven(
                    [case.global_batch // 2], 2, self._facts.least_part, even=self._subject.even_divisions
                )
                if self._divides
                else case.global_batch,
                strategy=self._subject.strategies[0],
                save_every=2,
                folder=self._work.new_folder(),
            )
            self._work.run(self._subject.run, replace(two, kill=kill))
            other = replace(two, world_size=world, strategy=two.strategy if world > 1 else case.strategy)
            self._add(name, RESUMES, self._judge_elsewhere(other, self._work.run(self._subject.run, other)))

    def _judge_elsewhere(self, case: Case, resumed: Trace) -> Classification | None:
        assert self._base is not None
        if resumed.error:
            return Classification(Kind.STATE_NOT_SAVED, "trainer", case.name, first_line(resumed.error))
        samples = [self._base.samples(step) for step in range(self._base.num_steps)]
        start = len(samples) - resumed.num_steps
        for step in range(resumed.num_steps):
            odd = set(resumed.samples(step)) ^ set(samples[start + step])
            if odd:
                where = f"sample {min(odd)} in step {start + step + 1}"
                return Classification(Kind.DATA_ORDER, "trainer", where, "other samples than without the interruption")
        if self._facts.depends_on_division:
            return None  # how a batch is divided is part of what is learned, and it was divided differently
        found = weight_difference(resumed.main.weights, self._truth(case, samples), self._floor)
        if found is None:
            return None
        return Classification(Kind.STATE_NOT_SAVED, "trainer", found.name, str(found))

    def _add(self, configuration: str, what: str, verdict: Classification | None, detail: str = "") -> None:
        status: Status = "ok" if verdict is None else "job" if verdict.whose == "job" else "failed"
        self.certificate.checks.append(Check(configuration, what, status, detail=detail, verdict=verdict))

    # Facts

    def _truth(self, case: Case, samples: Sequence[Sequence[int]]) -> ReferenceOutcome:
        clips = (case.clip_norm, *case.clip_norms.values())
        key = (tuple(tuple(sorted(numbers)) for numbers in samples), clips, case.num_steps)
        if key not in self._truths:
            self._truths[key] = self._work.apart(
                lambda: reference.train(case, undivided(samples), keep_gradients=case.keep_gradients)
            )
        return self._truths[key]

    def _record_facts(self, case: Case) -> None:
        facts = self._facts
        self.certificate.facts = {
            "compared_in": str(case.dtype or torch.float32).removeprefix("torch."),
            "why_not_float64": facts.why_not_double,
            "loss": facts.loss_kind,
            "parts": dict(facts.parts),
            "turns": {name: {"loss": own.loss_kind, "parts": dict(own.parts)} for name, own in facts.of_turns.items()},
            "loss_shares": [round(share, 6) for share in facts.shares],
            "draws_besides_dropout": facts.keys_draws,
            "items_draw": facts.items_draw,
            "num_parameters": facts.num_parameters,
            "global_batch": {str(steps): size for steps, size in case.batch_sizes} or case.global_batch,
            "num_steps": case.num_steps,
            "num_samples": case.num_samples,
            "clip_norm": dict(case.clip_norms) or case.clip_norm,
            "device": case.device,
            "torch": torch.__version__,
        }
        if case.job.batch_sizes:
            words, here = in_words(case.job.batch_sizes), in_words(case.batch_sizes) or f"{case.global_batch} samples"
            self.certificate.notes.append(f"a step has {words} in the job, and {here} here")
        if facts.why_not_double:
            self.certificate.notes.append(f"compared in float32, not in float64: {facts.why_not_double}")
        if not self._divides and self._subject.micro_batches:
            late = ", ".join(map(repr, facts.late_parts))
            self.certificate.notes.append(
                f"one micro-batch per process: the part {late} of the loss is a LossSum that Job.count does not count, "
                "and the trainer takes none with several"
            )
        if facts.draws_unkeyed:
            self.certificate.notes.append(
                "the loss draws random numbers that cannot be replayed sample by sample; divisions cannot be compared"
            )
        if self._job.hooks:
            self.certificate.notes.append(
                "hooks are left out where the trainer is compared with the plain loop; where runs are repeated and "
                "continued they are in, and samples are not observed: hooks see batches as they are"
            )


def _order(num_samples: int, batch: int, num_steps: int, seed: int, *, shuffle: bool) -> tuple[tuple[int, ...], ...]:
    """Return sample numbers by step: every epoch a new permutation, its last step what is left."""
    steps: list[tuple[int, ...]] = []
    generator = torch.Generator().manual_seed(seed + 17)
    while len(steps) < num_steps:
        numbers = torch.randperm(num_samples, generator=generator).tolist() if shuffle else list(range(num_samples))
        steps += [tuple(numbers[start : start + batch]) for start in range(0, num_samples, batch)]
    return tuple(steps[:num_steps])


def _resized(case: Case, num_steps: int, batch: int, num_samples: int) -> Case:
    order = _order(num_samples, batch, num_steps, case.seed, shuffle=case.job.shuffle)
    return replace(
        case, num_steps=num_steps, global_batch=batch, micro_batch=batch, num_samples=num_samples, order=order
    )


def _uneven(shares: Sequence[int], parts: int, least: int, *, even: bool = False) -> int:
    """Return a micro-batch that cuts ranks' shares into parts, unequal ones if possible, none below the least.

    With `even`, into equal ones.
    """
    largest = max(shares)
    sizes = range(max(least, -(-largest // parts)), least - 1, -1)
    fitting = [size for size in sizes if all(share % size == 0 or share % size >= least for share in shares)]
    if even:
        return next((size for size in fitting if not any(share % size for share in shares)), largest)
    uneven = [size for size in fitting if any(share % size for share in shares)]
    return (uneven or fitting or [largest])[0]


def _between(norms: Sequence[float]) -> float:
    """Return a norm that some steps exceed and others do not."""
    finite = sorted(norm for norm in norms if math.isfinite(norm))
    return float(median(finite)) if finite else 1.0


def _kills(case: Case, extent: Extent) -> list[Kill]:
    """Return points to kill at, chosen by the seed: within a step, after one, in a save."""
    generator = torch.Generator().manual_seed(extent.seed + 1)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    last = max(2, case.num_steps - 2)
    first = min(last, (case.save_every or 1) + 1)
    step = draw(first, last)
    step = next((each for each in range(step, first - 1, -1) if len(case.due(each)) == len(case.job.turns)), step)
    found = [
        Kill(step, "micro_batch", 0, turn=max(0, len(case.due(step)) - 1)),
        Kill(draw(first, last), "saving", draw(0, 6)),
        Kill(draw(first, last), "after_step"),
        Kill(draw(first, last), "micro_batch", 1),
        Kill(draw(first, last), "saving", draw(0, 6)),
        Kill(draw(1, 2), "after_step"),
    ]
    if extent.kill_in_save:  # of two neighboring operations, one finds a file half written where there is such a time
        found = [Kill(first, "saving", number) for number in range(2, 2 + extent.num_kills)]
    return found[: extent.num_kills]
