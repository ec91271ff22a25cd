"""Compares a trainer with the plain loop, and runs with each other bit by bit; finds out why they differ."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.precision import as_real
from drivetrain.proving import reference
from drivetrain.proving.case import Case, Subject, Update
from drivetrain.proving.classify import (
    Certificate,
    Check,
    Classification,
    Kind,
    Status,
    clip_hypotheses,
    judge_gradient,
    judge_learning_rates,
    judge_ranks,
    judge_samples,
    judge_start,
    judge_turns,
    step_hypotheses,
)
from drivetrain.proving.compare import (
    Difference,
    Floor,
    errors,
    gradient_difference,
    largest_error,
    step_difference,
    weight_difference,
)
from drivetrain.proving.processes import Workplace
from drivetrain.proving.recorder import RankTrace, StepTrace, Trace
from drivetrain.proving.reference import (
    AS_A_SUM,
    AS_STATED,
    BY_SAMPLES,
    Bug,
    Division,
    ReferenceFacts,
    ReferenceOutcome,
)

# ----------------------------------------------------------------------------------------------------------------------
# Compares a trainer with the plain loop: samples, gradients, learning rates, weights; finds out why they differ.

START, SAMPLES, LOSS, RATES, GRADIENT, NORM, WEIGHTS, RANKS, TURNS = (
    "start", "samples", "loss", "lr", "gradient", "clip norm", "weights", "ranks agree", "turns",
)  # fmt: skip


class Comparison:
    """Compares runs of a trainer with the plain loop, case by case."""

    def __init__(
        self,
        subject: Subject,
        workplace: Workplace,
        certificate: Certificate,
        facts: ReferenceFacts,
        floor: Floor,
        truth: Callable[[Case, Sequence[Sequence[int]]], ReferenceOutcome],
    ) -> None:
        self._subject, self._workplace, self._certificate = subject, workplace, certificate
        self._facts, self._floor, self._truth = facts, floor, truth
        self.base: Trace | None = None  # of the first case

    def compare(self, case: Case) -> None:
        """Run a case, compare it step by step, and add what was found to the certificate."""
        trace = self._workplace.run(self._subject.run, case)
        checks: dict[str, Check] = {}

        def add(what: str, status: Status, verdict: Classification | None = None, **more: Any) -> None:
            if status == "failed" and self._facts.remembers and what.startswith((GRADIENT, LOSS, NORM, WEIGHTS)):
                status, verdict = "unknown", None
                more["detail"] = "what is learned depends on how often the loss was called, here and in a plain loop"
            checks[what] = Check(case.name, what, status, verdict=verdict, **more)

        if trace.error:
            failed = Classification(Kind.FAILED, "unknown", case.name, first_line(trace.error))
            self._certificate.checks.append(Check(case.name, SAMPLES, "failed", detail=trace.error, verdict=failed))
            return
        if trace.num_steps == 0 or not trace.samples(0):
            failed = Classification(Kind.FAILED, "trainer", case.name, "no optimizer step was seen")
            self._certificate.checks.append(Check(case.name, SAMPLES, "failed", verdict=failed))
            return
        if case.job.turns:
            verdict = judge_turns(case, trace)
            add(TURNS, "failed" if verdict else "ok", verdict)
            if verdict is not None:  # what follows is compared turn by turn
                self._certificate.checks.extend(checks.values())
                return
        verdict = self._judge_samples(case, trace)
        add(SAMPLES, "failed" if verdict else "ok", verdict)
        if self.base is None:
            self.base = trace
        samples = [trace.samples(step) for step in range(trace.num_steps)]
        truth = self._truth(case, samples)
        verdict = judge_start(trace, truth, self._floor)
        add(START, "failed" if verdict else "ok", verdict)
        if verdict is not None:
            self._certificate.checks.extend(checks.values())
            return
        if case.world_size > 1:
            verdict = judge_ranks(trace, self._floor)
            add(RANKS, "failed" if verdict else "ok", verdict)
        verdict = judge_learning_rates(case, trace, truth)
        add(RATES, "failed" if verdict else "ok", verdict)
        # Steps after a wrong learning rate have other weights, and so other gradients.
        num_steps = 1 if RATES in checks and checks[RATES].status == "failed" else trace.num_steps
        self._compare_gradients(case, trace, truth, add, num_steps)
        self._compare_reports(case, trace, truth, add)
        settled = any(check.status in ("failed", "job") for check in checks.values())
        self._compare_weights(case, trace, truth, add, explained=settled)
        self._certificate.checks.extend(checks.values())

    def _judge_samples(self, case: Case, trace: Trace) -> Classification | None:
        """Look at the samples of every step: with several losses, of its first turn."""
        firsts = [case.num_updates(step) for step in range(case.update(trace.num_steps - 1).step + 1)]
        base = None if self.base is None else self.base.only([n for n in firsts if n < self.base.num_steps])
        verdict = judge_samples(case, trace.only(firsts), base)
        right = case.num_updates(case.num_steps)
        if verdict is None and trace.num_steps != right:
            detail = f"{trace.num_steps} optimizer steps instead of {right}"
            verdict = Classification(Kind.GLOBAL_BATCH, "trainer", str(case.update(trace.num_steps)), detail)
        return verdict

    def _compare_gradients(
        self, case: Case, trace: Trace, truth: ReferenceOutcome, add: Callable[..., None], num_steps: int
    ) -> None:
        """Look for the first step whose gradient is off although the weights before it are right."""
        seen = [step.gradients for step in trace.main.steps]
        if not seen or seen[0] is None:
            return add(GRADIENT, "skipped", detail="the trainer's gradients could not be seen")
        step, found = self._first_odd_gradient(trace, truth, num_steps)
        if found is None:
            firsts = zip(seen[: max(1, len(case.job.turns))], truth.gradients, strict=False)
            error = max(largest_error(errors(own or {}, right)) for own, right in firsts)
            return add(GRADIENT, "ok", error=error, limit=self._floor.least_gradient_limit)
        verdict = _classed(lambda: self._why_gradient(case, trace, truth, step, found), f"gradient of {found.name}")
        status: Status = "job" if verdict.whose == "job" else "failed"
        detail = f"in {case.update(step)}, {found}"
        return add(GRADIENT, status, verdict, error=found.error, limit=found.limit, detail=detail)

    def _first_odd_gradient(
        self, trace: Trace, truth: ReferenceOutcome, num_steps: int
    ) -> tuple[int, Difference | None]:
        for step in range(min(num_steps, trace.num_steps, len(truth.gradients))):
            seen = trace.main.steps[step].gradients
            weights = trace.main.steps[step].weights
            if seen is None or weights is None or step_difference(weights, truth, step, self._floor) is not None:
                break
            found = gradient_difference(seen, truth.gradients[step], self._floor, is_first=step == 0)
            if found is not None:
                return step, found
        return 0, None

    def _why_gradient(
        self, case: Case, trace: Trace, truth: ReferenceOutcome, step: int, difference: Difference
    ) -> Classification:
        """Look at the gradient before clipping, where the job clips: clipping hides scales, and is a suspect itself."""
        where = f"gradient of {difference.name}"
        if case.clips:
            clipped, seen_clipped = case, trace
            case = case.without_clipping()
            trace = self._workplace.run(self._subject.run, case)
            if trace.error or not trace.num_steps:
                return Classification(Kind.CLIPPING, "trainer", where, "without clipping the run fails")
            truth = self._truth(case, [trace.samples(number) for number in range(trace.num_steps)])
            step, free = self._first_odd_gradient(trace, truth, trace.num_steps)
            if free is None:
                return self._why_clipping(clipped, seen_clipped, where)
            difference = free
            where = f"gradient of {difference.name}"
        seen = trace.main.steps[step].gradients or {}
        right = truth.gradients[step]
        turn = case.update(step).turn
        earlier = [number for number in range(step) if case.update(number).turn == turn]
        if earlier:
            before = trace.main.steps[earlier[-1]].gradients or {}
            summed = {name: value + before[name] if name in before else value for name, value in right.items()}
            if gradient_difference(seen, summed, self._floor, is_first=False) is None:
                words = f"{case.update(step)} still holds the gradient of {case.update(earlier[-1])}"
                return Classification(Kind.NOT_CLEARED, "trainer", where, words)
        divisions = [trace.division(number) for number in range(step + 1)]
        if self._is_stale(case, seen, divisions):
            words = f"in {case.update(step)} it is that of the weights before the turns of this step"
            return Classification(Kind.STALE, "trainer", where, words)
        pieces = self._workplace.apart(lambda: reference.pieces(case, divisions[-1], divisions[:-1]))
        return judge_gradient(case, seen, right, pieces, difference, self._floor, self._facts.of(turn).parts)

    def _is_stale(self, case: Case, seen: Mapping[str, torch.Tensor], divisions: Sequence[Division]) -> bool:
        """Return whether the gradient of a turn is that of the weights which the step began with."""
        number = len(divisions) - 1
        first = case.num_updates(case.update(number).step)
        if first == number:
            return False
        whole = [[[sample for rank in divisions[-1] for samples in rank for sample in samples]]]
        parts = self._workplace.apart(lambda: reference.pieces(case, whole, divisions[:first], number))
        names = parts[0].gradients
        summed = {name: torch.stack([part.gradients[name] for part in parts]).sum(0) for name in names}
        return gradient_difference(seen, summed, self._floor, is_first=False) is None

    def _why_clipping(self, case: Case, trace: Trace, where: str) -> Classification:
        """Find out how gradients are clipped wrongly: unclipped, all is right."""
        divisions = [trace.division(step) for step in range(trace.num_steps)]
        for kind, bug, words in clip_hypotheses(case):
            simulated = self._simulated(case, divisions, bug)
            _, found = self._first_odd_gradient(trace, simulated, trace.num_steps)
            if found is None:
                return Classification(kind, "trainer", where, words)
        return Classification(
            Kind.CLIPPING, "trainer", where, "unclipped it is right; the norm it is clipped by is not"
        )

    def _simulated(self, case: Case, divisions: Sequence[Division], bug: Bug) -> ReferenceOutcome:
        return self._workplace.apart(lambda: reference.train(case, divisions, bug, case.keep_gradients))

    def _compare_reports(self, case: Case, trace: Trace, truth: ReferenceOutcome, add: Callable[..., None]) -> None:
        """Compare what the trainer itself reports of its first step: the loss of each turn, where there are several."""
        report = trace.reported(0)
        limit = 10 * self._floor.least_gradient_limit
        found = [(NORM, report.grad_norm if report else None, math.hypot(*truth.norms[: max(1, len(case.due(0)))]))]
        if not case.job.turns:
            found.insert(0, (LOSS, report.loss if report else None, truth.losses[0]))
        for number, turn in enumerate(case.due(0)):
            of_turn = trace.reported(0, turn.name)
            found.append((f"{LOSS} of {turn.name!r}", of_turn.loss if of_turn else None, truth.losses[number]))
        for what, said, right in found:
            if said is None or (what == NORM and not case.clips):
                continue
            error = abs(said - right) / max(abs(right), 1e-12)
            if error <= limit:
                add(what, "ok", error=error, limit=limit)
                continue
            detail = f"{said:.6g} is reported for step 1, and the undivided batch has {right:.6g}"
            if self._facts.depends_on_division and sum(map(len, trace.division(0))) > 1:
                kind = Kind.COUPLED if self._facts.loss_kind == "coupled" else Kind.MEAN_OF_MEANS
                add(what, "job", Classification(kind, "job", f"{what} of step 1", detail), error=error, limit=limit)
            else:
                verdict = Classification(Kind.REPORTED, "trainer", f"{what} of step 1", detail)
                add(what, "failed", verdict, error=error, limit=limit)

    def _compare_weights(
        self, case: Case, trace: Trace, truth: ReferenceOutcome, add: Callable[..., None], *, explained: bool
    ) -> None:
        seen = trace.main.weights
        if not seen:
            return add(WEIGHTS, "skipped", detail="the trainer did not hand its weights over")
        if not self._floor.tells_weights:
            return add(WEIGHTS, "unknown", detail="this job amplifies rounding too much to compare so many steps")
        buffers = self._why_buffers(case, trace)
        if buffers is not None:
            return add(WEIGHTS, "failed", buffers)
        found = self._first_odd_weight(trace, truth) or weight_difference(seen, truth, self._floor)
        if found is None:
            error = largest_error(errors({**truth.weights, **seen}, truth.weights, truth.first_weights))
            return add(WEIGHTS, "ok", error=error)
        facts = {"error": found.error, "limit": found.limit, "detail": str(found)}
        if explained:
            job = self._facts.depends_on_division and self._matches_parts(case, trace)
            return add(WEIGHTS, "job" if job else "failed", **facts)
        verdict = _classed(lambda: self._why_weights(case, trace, found.name), found.name)
        return add(WEIGHTS, "job" if verdict.whose == "job" else "failed", verdict, **facts)

    def _first_odd_weight(self, trace: Trace, truth: ReferenceOutcome) -> Difference | None:
        """Return the first parameter that is off, at the first step before which one is."""
        for step in range(min(trace.num_steps, len(truth.step_weights))):
            weights = trace.main.steps[step].weights
            found = None if weights is None else step_difference(weights, truth, step, self._floor)
            if found is not None:
                return found
        return None

    def _matches_parts(self, case: Case, trace: Trace) -> bool:
        """Return whether the trainer did what the plain loop does with the same micro-batches.

        That is their mean by samples, or their sum; of named parts, what their counts say.
        """
        divisions = [trace.division(step) for step in range(trace.num_steps)]
        several = bool(case.job.turns)
        for bug in (AS_STATED,) if self._facts.parts else (BY_SAMPLES, AS_A_SUM, *((AS_STATED,) if several else ())):
            simulated = self._simulated(case, divisions, bug)
            names = set(simulated.weights) - {name for ranks in simulated.rank_buffers for name in ranks}
            seen = {name: value for name, value in trace.main.weights.items() if name in names}
            if weight_difference(seen, simulated, self._floor) is None:
                return True
        return False

    def _why_buffers(self, case: Case, trace: Trace) -> Classification | None:
        """Find out whether every rank kept separate buffers, by simulating just that."""
        if case.world_size == 1:
            return None
        divisions = [trace.division(step) for step in range(trace.num_steps)]
        names = [name for name in trace.ranks[1].weights if _differs(trace, name)]
        buffers = [name for name in names if name not in (trace.main.steps[0].gradients or {})]
        if not buffers or len(buffers) != len(names):
            return None
        apart = self._workplace.apart(
            lambda: reference.train(case, divisions, Bug(weight=BY_SAMPLES.weight, buffers="apart"))
        )
        alone, own = apart.rank_buffers[1], trace.ranks[1].weights
        name = buffers[0]
        if name not in alone or not _alike(own[name], alone[name]):
            return None
        shared = self._workplace.apart(lambda: reference.train(case, divisions, BY_SAMPLES))
        if _alike(own[name], shared.rank_buffers[1][name]):
            return None
        return Classification(Kind.BUFFERS, "trainer", name, "every rank keeps buffers of its own samples alone")

    def _why_weights(self, case: Case, trace: Trace, name: str) -> Classification:
        divisions = [trace.division(step) for step in range(trace.num_steps)]
        if self._facts.depends_on_division and self._matches_parts(case, trace):
            return Classification(Kind.COUPLED, "job", name, "how a batch is divided is part of what is learned")
        for kind, bug, words in step_hypotheses(case, trace):
            simulated = self._simulated(case, divisions, bug)
            if weight_difference(trace.main.weights, simulated, self._floor) is None:
                return Classification(kind, "trainer", name, words)
        if self._facts.draws_unkeyed:
            words = "the loss draws random numbers that cannot be replayed for parts of a batch"
            return Classification(Kind.COUPLED, "job", name, words)
        return Classification(Kind.UNKNOWN, "unknown", name, "the first two steps' gradients are right")


def _differs(trace: Trace, name: str) -> bool:
    mine, theirs = trace.main.weights.get(name), trace.ranks[1].weights[name]
    return mine is not None and not _alike(mine, theirs)


def _alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    left, right = as_real(left).double(), as_real(right).double()
    scale = float(right.abs().max()) if right.numel() else 0.0
    return not left.numel() or float((left - right).abs().max()) <= 1e-6 * max(scale, 1e-9)


def _classed(judge: Callable[[], Classification], where: str) -> Classification:
    """Return the result of a judgement; where the plain loop itself fails on the parts, a verdict that says so."""
    try:
        return judge()
    except DrivetrainError as error:
        return Classification(
            Kind.UNKNOWN, "unknown", where, f"the plain loop fails on its parts: {first_line(error.message)}"
        )


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


# ----------------------------------------------------------------------------------------------------------------------
# Compares runs bit by bit: two alike, or one that was killed with one that was not; and finds what differs.

_WEIGHTS, _OPTIMIZER = "weights/", "optimizer/"


def judge_repeat(case: Case, first: Trace, second: Trace, facts: ReferenceFacts) -> Classification | None:
    """Compare two runs from the start, in fresh processes."""
    for trace in (first, second):
        if trace.error:
            return Classification(Kind.FAILED, "unknown", case.name, trace.error.splitlines()[0])
    for step in range(min(first.num_steps, second.num_steps)):
        for rank, (one, other) in enumerate(zip(first.ranks, second.ranks, strict=True)):
            pair = one.steps[step], other.steps[step]
            verdict = _first_difference(*pair, case.update(step), rank, facts, repeated=True)
            if verdict is not None:
                return verdict
    return _final(first, second, facts, Kind.NOT_REPEATABLE, "two runs end with other bits")


def judge_items(first: Trace, other: Trace) -> Classification | None:
    """Check that what an item draws follows from the sample, and not from the process that reads it."""
    if other.error:
        return Classification(Kind.FAILED, "unknown", "one process", other.error.splitlines()[0])
    right = _contents(other)
    for (step, number), digest in _contents(first).items():
        if right.get((step, number), digest) != digest:
            detail = "read by other processes it holds something else: what it draws follows from who reads it"
            return Classification(Kind.RANDOMNESS_BY_RANK, "trainer", f"sample {number} in step {step + 1}", detail)
    return None


def _contents(trace: Trace) -> dict[tuple[int, int], int]:
    return {
        (step, number): digest
        for rank in trace.ranks
        for step, seen in enumerate(rank.steps)
        for micro_batch in seen.micro_batches
        if micro_batch.weight
        for number, digest in zip(micro_batch.numbers, micro_batch.content, strict=False)
    }


def judge_same_weights(first: Trace, other: Trace) -> Classification | None:
    """Compare two runs that should end with the same bits, whatever happened on the way."""
    for trace in (first, other):
        if trace.error:
            return Classification(Kind.FAILED, "unknown", "one process", trace.error.splitlines()[0])
    name = _odd_weight(first.main, other.main)
    detail = "the job's own data and loss give other bits than the same with its samples numbered"
    return Classification(Kind.UNKNOWN, "unknown", name, detail) if name else None


def judge_resume(
    case: Case, whole: Trace, killed: Trace, resumed: Trace, facts: ReferenceFacts
) -> Classification | None:
    """Compare a run that was killed and started again with one that was never stopped."""
    if killed.error:
        return Classification(Kind.FAILED, "unknown", case.name, killed.error.splitlines()[0])
    if resumed.error:
        last = resumed.error.splitlines()[0]
        return Classification(Kind.STATE_NOT_SAVED, "trainer", case.name, f"it cannot be continued: {last}")
    if resumed.num_steps == 0:
        return _final(whole, resumed, facts, Kind.STATE_NOT_SAVED, "the continued run ends with other weights")
    start, verdict = _resumed_at(whole, resumed)
    if verdict is not None:
        return verdict
    for step in range(resumed.num_steps):
        if start + step >= whole.num_steps:
            detail = f"{start + resumed.num_steps} steps in all instead of {whole.num_steps}"
            return Classification(Kind.STATE_NOT_SAVED, "trainer", str(case.update(start + step)), detail)
        for rank, (one, other) in enumerate(zip(whole.ranks, resumed.ranks, strict=True)):
            pair = one.steps[start + step], other.steps[step]
            verdict = _first_difference(*pair, case.update(start + step), rank, facts, repeated=False)
            if verdict is not None:
                return _of_position(case, verdict, whole, resumed, start, step)
    if start + resumed.num_steps < whole.num_steps:
        detail = f"{start + resumed.num_steps} steps in all instead of {whole.num_steps}"
        return Classification(Kind.STATE_NOT_SAVED, "trainer", "number of steps", detail)
    return _final(whole, resumed, facts, Kind.STATE_NOT_SAVED, "the continued run ends with other weights")


def continued_from(case: Case, whole: Trace, resumed: Trace) -> int | None:
    """Return the step that a continued run went on from; None if it cannot be told."""
    if not resumed.num_steps or not whole.num_steps:
        return None
    start, verdict = _resumed_at(whole, resumed)
    return case.update(start).step if verdict is None else None


def _resumed_at(whole: Trace, resumed: Trace) -> tuple[int, Classification | None]:
    """Return the step whose weights the continued run began with; what is missing, where there is no such step."""
    mine = _part(resumed.main.steps[0], _WEIGHTS)
    best, best_step, odd = -1, 0, ""
    for step, other in enumerate(whole.main.steps):
        theirs = _part(other, _WEIGHTS)
        off = [name for name in theirs if mine.get(name) != theirs[name]]
        if not off:
            return step, None
        if len(theirs) - len(off) > best:
            best, best_step, odd = len(theirs) - len(off), step, off[0]
    detail = f"the continued run begins with weights of no step; closest is step {best_step}"
    return 0, Classification(Kind.STATE_NOT_SAVED, "trainer", odd.removeprefix(_WEIGHTS), detail)


def _first_difference(
    right: StepTrace, seen: StepTrace, place: Update, rank: int, facts: ReferenceFacts, *, repeated: bool
) -> Classification | None:
    """Return what differs first before or in a step: weights, samples, learning rate, optimizer state, losses."""
    off = _odd(_part(right, _WEIGHTS), _part(seen, _WEIGHTS))
    if off:
        name = off.removeprefix(_WEIGHTS)
        if repeated:
            return Classification(
                Kind.NOT_REPEATABLE, "unknown", name, f"before {place}, with the same samples and the same losses"
            )
        detail = f"before {place}: something that moves weights was not restored"
        return Classification(Kind.STATE_NOT_SAVED, "unknown", name, detail)
    mine, theirs = right.samples, seen.samples
    if mine != theirs:
        odd = sorted(set(theirs) ^ set(mine)) or list(theirs)
        detail = f"rank {rank} trains on {list(theirs[:6])} instead of {list(mine[:6])}"
        return Classification(Kind.DATA_ORDER, "trainer", f"sample {odd[0]} in {place}", detail)
    if right.learning_rates != seen.learning_rates:
        kind = Kind.SCHEDULE if repeated else Kind.STATE_NOT_SAVED
        pairs = zip(seen.learning_rates, right.learning_rates, strict=False)
        mine_rate, right_rate = next(pair for pair in pairs if pair[0] != pair[1])
        detail = f"{mine_rate:.6g} instead of {right_rate:.6g}: the schedule's place"
        return Classification(kind, "trainer", f"learning rate of {place}", detail)
    off = _odd(_part(right, _OPTIMIZER), _part(seen, _OPTIMIZER))
    if off:
        kind = Kind.NOT_REPEATABLE if repeated else Kind.STATE_NOT_SAVED
        return Classification(kind, "trainer", off, f"the optimizer's state differs before {place}")
    return _loss_difference(right, seen, place, rank, facts, repeated=repeated)


def _loss_difference(
    right: StepTrace, seen: StepTrace, place: Update, rank: int, facts: ReferenceFacts, *, repeated: bool
) -> Classification | None:
    """Explain losses that differ although weights, samples and optimizer are the same."""
    for number, (one, other) in enumerate(zip(right.micro_batches, seen.micro_batches, strict=False)):
        where = f"loss of {place}, micro-batch {number + 1}, rank {rank}"
        if one.content != other.content:
            detail = "items read again hold something else: what they draw is not replayed"
            return Classification(Kind.RANDOMNESS_NOT_RESTORED, "trainer", where, detail)
        if one.loss == other.loss or (one.loss != one.loss and other.loss != other.loss):
            continue
        detail = f"{other.loss:.9g} instead of {one.loss:.9g} with the same weights and samples"
        if facts.remembers:
            words = "; the model or the loss keeps state outside of parameters and buffers, which no checkpoint sees"
            return Classification(Kind.STATE_NOT_SAVED, "job", where, detail + words)
        if facts.model_draws:
            return Classification(Kind.RANDOMNESS_NOT_RESTORED, "trainer", where, detail)
        kind = Kind.NOT_REPEATABLE if repeated else Kind.STATE_NOT_SAVED
        return Classification(kind, "unknown", where, detail)
    if right.grad_norm != seen.grad_norm and not _both_nan(right.grad_norm, seen.grad_norm):
        kind = Kind.NOT_REPEATABLE if repeated else Kind.STATE_NOT_SAVED
        detail = f"norm {seen.grad_norm:.9g} instead of {right.grad_norm:.9g} with the same losses"
        return Classification(kind, "unknown", f"gradient of {place}", detail)
    return None


def _of_position(
    case: Case, verdict: Classification, whole: Trace, resumed: Trace, start: int, step: int
) -> Classification:
    """Explain samples that are not those that would have come next."""
    if verdict.kind is not Kind.DATA_ORDER or start == 0:
        return verdict
    got, first = set(resumed.samples(step)), case.update(start).step
    per_epoch = -(-case.num_samples // case.global_batch)
    begins = case.num_updates(first - first % per_epoch)
    if first % per_epoch and got in (set(whole.samples(begins)), set(whole.samples(0))):
        detail = f"{verdict.detail}; the epoch begins anew: samples come twice, others not at all"
        return Classification(Kind.DUPLICATED, "trainer", verdict.where, detail)
    later = [set(whole.samples(ahead)) for ahead in range(start + step + 1, whole.num_steps)]
    if got in later:
        return Classification(Kind.LOST, "trainer", verdict.where, f"{verdict.detail}; samples were skipped")
    return verdict


def _final(whole: Trace, other: Trace, facts: ReferenceFacts, kind: Kind, words: str) -> Classification | None:
    for mine, theirs in zip(whole.ranks, other.ranks, strict=True):
        name = _odd_weight(mine, theirs)
        if name:
            return Classification(kind, "unknown", name, words)
    return None


def _odd_weight(mine: RankTrace, theirs: RankTrace) -> str:
    if not mine.weights or not theirs.weights:
        return ""
    for name, value in mine.weights.items():
        other = theirs.weights.get(name)
        if other is None or value.shape != other.shape or not torch.equal(value, other):
            if other is not None and value.shape == other.shape and bool((value.isnan() & other.isnan()).any()):
                continue
            return name
    return ""


def _odd(right: Mapping[str, int], seen: Mapping[str, int]) -> str:
    for name, digest in right.items():
        if seen.get(name) != digest:
            return name
    return next((name for name in seen if name not in right), "")


def _part(step: StepTrace, prefix: str) -> dict[str, int]:
    return {name: digest for name, digest in (step.digests or {}).items() if name.startswith(prefix)}


def _both_nan(left: float, right: float) -> bool:
    return left != left and right != right
