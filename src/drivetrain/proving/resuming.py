"""Compares runs bit by bit: two alike, or one that was killed with one that was not; and finds what differs."""

from collections.abc import Mapping

import torch

from drivetrain.proving.case import Case, Update
from drivetrain.proving.classify import Classification, Kind
from drivetrain.proving.recorder import RankTrace, StepTrace, Trace
from drivetrain.proving.reference import ReferenceFacts

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
