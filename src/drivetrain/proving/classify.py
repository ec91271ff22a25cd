"""Classifies differences (what kind of bug, and whose), and keeps every check in one certificate."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from drivetrain.core.precision import as_real
from drivetrain.core.run_folder import write_atomically
from drivetrain.proving.case import Case, decay_of
from drivetrain.proving.compare import Difference, Floor, errors
from drivetrain.proving.recorder import Trace
from drivetrain.proving.reference import (
    DIVIDED,
    Bug,
    PartKind,
    ReferenceOutcome,
    ReferencePiece,
    fit,
    misfit_of,
    shares_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# Classifies a difference: what kind of bug, and whose. Direct observations decide directly, simulations the rest.
#
# A hypothesis is a way of going wrong. It is right if the plain loop, made to go wrong in that way, gives the trainer's
# numbers.

Whose = Literal["trainer", "job", "unknown"]


class Kind(StrEnum):
    """The kinds of bug that are distinguished."""

    MEAN_OF_MEANS = "mean of means"
    SCALED_BY_WORLD = "scaled by the world"
    SCALED_BY_ACCUMULATION = "scaled by the accumulation"
    SCALED = "gradient scaled"
    MISSING_REDUCTION = "missing reduction"
    LOST_MICRO_BATCH = "micro-batch lost"
    LOST_GRADIENT = "gradient lost"
    NOT_CLEARED = "gradients not cleared"
    CLIPPING = "clipping"
    SCHEDULE_BY_WORLD = "schedule × world"
    SCHEDULE_BY_ACCUMULATION = "schedule × accumulation"
    SCHEDULE = "schedule"
    TURNS = "turns"
    STALE = "stale weights"
    GLOBAL_BATCH = "global batch"
    DATA_ORDER = "data order"
    DUPLICATED = "duplicated samples"
    LOST = "lost samples"
    RANDOMNESS_BY_RANK = "randomness keyed by rank"
    RANDOMNESS_NOT_RESTORED = "randomness not restored"
    STARTING_WEIGHTS = "starting weights differ"
    BUFFERS = "buffers not synchronised"
    STATE_NOT_SAVED = "state not saved"
    WEIGHT_DECAY = "weight decay"
    MOMENTS_LOST = "optimizer state lost"
    NOT_REPEATABLE = "non-repeatable kernel"
    REPORTED = "reported figures"
    WRONG_WEIGHTS = "wrong weighting"
    PRECISION = "low precision"
    COUPLED = "coupled loss"
    FAILED = "run failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Classification:
    """The kind of a bug, whose it is, and the first place where it shows."""

    kind: Kind
    whose: Whose
    where: str  # the first tensor, sample or step that is off
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.whose}'s): {self.where}" + (f"; {self.detail}" if self.detail else "")


# What is seen directly


def judge_turns(case: Case, trace: Trace) -> Classification | None:
    """Check that the optimizers of several losses step in the order of the losses, in the steps that they are due in.

    And that each turn of a step trains on the same samples.
    """
    for number in range(trace.num_steps):
        right = case.update(number)
        for rank, seen in enumerate(rank.steps[number] for rank in trace.ranks):
            if seen.turn != right.turn:
                detail = f"rank {rank} steps the optimizers of the loss {seen.turn!r} instead"
                return Classification(Kind.TURNS, "trainer", str(right), detail)
        first = case.num_updates(right.step)
        mine, theirs = Counter(trace.samples(number)), Counter(trace.samples(first))
        if mine != theirs:
            odd = sorted((mine - theirs).keys() | (theirs - mine).keys())
            detail = f"the turns of a step train on the same samples, and sample {odd[0]} is in one of them only"
            return Classification(Kind.TURNS, "trainer", str(right), detail)
    return None


def judge_samples(case: Case, trace: Trace, base: Trace | None) -> Classification | None:
    """Check that every sample comes once per epoch, in steps of the global batch, the same in every configuration."""
    verdict = _judge_epochs(case, trace) if case.job.source.is_keyed else None
    if verdict is not None or base is None:
        return verdict
    for step in range(min(trace.num_steps, base.num_steps)):
        mine, theirs = Counter(trace.samples(step)), Counter(base.samples(step))
        if mine != theirs:
            odd = sorted((mine - theirs).keys() | (theirs - mine).keys())
            where = f"sample {odd[0]} in step {step + 1}"
            detail = f"step {step + 1} trains on {_short(sorted(mine))} here and on {_short(sorted(theirs))} in the "
            return Classification(Kind.DATA_ORDER, "trainer", where, detail + "whole-batch run")
    return None


def _judge_epochs(case: Case, trace: Trace) -> Classification | None:
    """Walk through the steps; an epoch ends when all its samples were seen."""
    num_samples = case.num_samples
    seen: set[int] = set()
    epochs: list[list[int]] = [[]]
    for step in range(trace.num_steps):
        samples, batch = trace.samples(step), case.samples_of(step)
        twice = [number for number, count in Counter(samples).items() if count > 1]
        if twice:
            return Classification(
                Kind.DUPLICATED, "trainer", f"sample {twice[0]} in step {step + 1}", f"{len(twice)} samples twice"
            )
        left = num_samples - len(seen)
        again = [number for number in samples if number in seen]
        missing = sorted(set(range(num_samples)) - seen)
        if again and left < batch and not set(missing) <= set(samples):
            where = f"sample {missing[0]} of epoch {len(epochs)}"
            return Classification(
                Kind.LOST, "trainer", where, f"{len(missing)} samples of the epoch were never trained on"
            )
        if again:
            return Classification(
                Kind.DUPLICATED,
                "trainer",
                f"sample {again[0]} in step {step + 1}",
                f"it came before in epoch {len(epochs)}, while {left} others had not",
            )
        if len(samples) != min(batch, left):
            kind = Kind.LOST if len(samples) < min(batch, left) else Kind.GLOBAL_BATCH
            if len(samples) in (batch * case.world_size, batch * case.world_size * _accumulation(case)):
                kind = Kind.GLOBAL_BATCH
            return Classification(
                kind,
                "trainer",
                f"step {step + 1}",
                f"it has {len(samples)} samples over all ranks, and a step of this job has {min(batch, left)}",
            )
        seen |= set(samples)
        epochs[-1].extend(samples)
        if len(seen) == num_samples:
            seen = set()
            epochs.append([])
    whole = [epoch for epoch in epochs if len(epoch) == num_samples]
    if case.job.shuffle and len(whole) > 1 and num_samples > 4:
        for number, epoch in enumerate(whole[1:], 2):
            if epoch == whole[0]:
                return Classification(
                    Kind.DATA_ORDER, "trainer", f"epoch {number}", "it has the very order of epoch 1 although shuffled"
                )
    return None


def judge_start(trace: Trace, truth: ReferenceOutcome, floor: Floor) -> Classification | None:
    """Check that every rank starts with the weights that the user's model has."""
    for rank, seen in enumerate(trace.ranks):
        weights = seen.steps[0].weights if seen.steps else None
        for name, value in (weights or {}).items():
            right = truth.first_weights.get(name)
            if right is None or right.shape != value.shape:
                continue
            right, value = as_real(right).double(), as_real(value).double()
            size = float(right.abs().max()) if right.numel() else 0.0
            if float((value - right).abs().max()) > floor.least_gradient_limit * max(size, 1e-3):
                detail = f"rank {rank} starts with other weights than the model is made with"
                return Classification(Kind.STARTING_WEIGHTS, "trainer", name, detail)
    return None


def judge_ranks(trace: Trace, floor: Floor) -> Classification | None:
    """Check that ranks that hold whole copies step with the same gradients."""
    first = trace.main
    for step in range(trace.num_steps):
        mine = first.steps[step].gradients
        for rank, other in enumerate(trace.ranks[1:], 1):
            theirs = other.steps[step].gradients
            if mine is None or theirs is None:
                continue
            found = errors(theirs, mine)
            off = [name for name, error in found.items() if not error <= floor.gradient_limit(name)]
            if off:
                detail = f"in step {step + 1} rank {rank} has another gradient than rank 0"
                if len(off) < len(found):
                    detail += f" for {len(off)} of {len(found)} tensors"
                return Classification(Kind.MISSING_REDUCTION, "trainer", off[0], detail)
    return None


def judge_learning_rates(case: Case, trace: Trace, truth: ReferenceOutcome) -> Classification | None:
    """Check that the schedule counts optimizer steps, and nothing else."""
    for number in range(min(trace.num_steps, len(truth.learning_rates))):
        seen, right = trace.main.steps[number].learning_rates, truth.learning_rates[number]
        if len(seen) != len(right) or all(_close(a, b) for a, b in zip(seen, right, strict=True)):
            continue
        where = f"learning rate of {case.update(number)}"
        odd = next(place for place, pair in enumerate(zip(seen, right, strict=True)) if not _close(*pair))
        kind, detail = Kind.SCHEDULE, f"{seen[odd]:.6g} instead of {right[odd]:.6g}"
        for named, hypothesis in _schedules(case):
            if _follows(case, trace, truth, hypothesis):
                return Classification(named, "trainer", where, f"{detail}: {_in_words(named)}")
        return Classification(kind, "trainer", where, detail)
    return None


def _schedules(case: Case) -> Iterator[tuple[Kind, Callable[[int], int]]]:
    world, accumulation = case.world_size, _accumulation(case)
    if world > 1:
        yield Kind.SCHEDULE_BY_WORLD, lambda step: step * world
        yield Kind.SCHEDULE_BY_WORLD, lambda step: (step + 1) * world - 1
        yield Kind.SCHEDULE_BY_WORLD, lambda step: step // world
    if accumulation > 1:
        yield Kind.SCHEDULE_BY_ACCUMULATION, lambda step: step * accumulation
        yield Kind.SCHEDULE_BY_ACCUMULATION, lambda step: (step + 1) * accumulation - 1
        yield Kind.SCHEDULE_BY_ACCUMULATION, lambda step: step // accumulation
    yield Kind.SCHEDULE, lambda step: step + 1
    yield Kind.SCHEDULE, lambda step: max(0, step - 1)


def _follows(case: Case, trace: Trace, truth: ReferenceOutcome, asked: Callable[[int], int]) -> bool:
    for number in range(trace.num_steps):
        step, turn = case.update(number)
        table, seen = truth.rate_tables[turn], trace.main.steps[number].learning_rates
        if asked(step) >= len(table) or not all(map(_close, seen, table[asked(step)])):
            return False
    return True


def _in_words(kind: Kind) -> str:
    return {
        Kind.SCHEDULE_BY_WORLD: "the schedule advances with the number of processes",
        Kind.SCHEDULE_BY_ACCUMULATION: "the schedule advances with every micro-batch",
    }.get(kind, "the schedule is a step ahead or behind")


# The gradient of one step


def judge_gradient(
    case: Case,
    seen: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    pieces: Sequence[ReferencePiece],
    difference: Difference,
    floor: Floor,
    parts: Mapping[str, PartKind],
) -> Classification:
    """Find the weights of the micro-batches' gradients that give what the optimizer saw.

    Named parts of the loss have separate weights: there a piece is one part of one micro-batch.
    """
    off = [
        name for name, error in errors(seen, truth).items() if name in truth and not error <= floor.gradient_limit(name)
    ]
    names = off or list(truth)
    where = f"gradient of {difference.name}"
    if all(name not in seen or not seen[name].any() for name in names):
        return Classification(Kind.LOST_GRADIENT, "trainer", where, f"{len(names)} of {len(truth)} tensors get none")
    columns = torch.stack([_flat(piece.gradients, names, truth) for piece in pieces], 1)
    target, right = _flat(seen, names, truth), _flat(truth, names, truth)
    limit = max(10 * floor.least_gradient_limit, 1e-7)
    true_weights, true_misfit = fit(columns, right)
    part = "" if len(off) == len(truth) else f", {len(off)} of {len(truth)} tensors"
    if parts:
        stated = torch.tensor(shares_of(pieces), dtype=torch.float64)
        if misfit_of(columns, right, stated) < limit:
            true_weights = stated  # those of a fit are not unique where a part has no gradient
        elif misfit_of(columns, target, stated) < limit:
            return _coupled(where) if "coupled" in parts.values() else _uncounted(where, parts)
    if true_misfit > limit and _is_best_mix(columns, target, right, pieces, limit):
        return _coupled(where)
    verdict = _judge_part_weights(columns, target, pieces, true_weights, where, limit) if parts else None
    if verdict is not None:
        return verdict
    for kind, factors, words in _in_some_parts(_weightings(case, pieces, true_weights), pieces, true_weights):
        weights = torch.tensor(factors, dtype=torch.float64)
        if misfit_of(columns, target, weights) < limit and misfit_of(columns, right, weights) > limit:
            if true_misfit > limit and kind is Kind.MEAN_OF_MEANS:
                return _coupled(where)
            return Classification(kind, "trainer", where, words + part)
    scale = float(torch.dot(target, right) / torch.dot(right, right).clamp_min(1e-300))
    if float((target - scale * right).norm()) <= limit * float(target.norm()):
        kind, words = _scale_kind(case, scale)
        return Classification(kind, "trainer", where, words + part)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        is_close = float((target - right).norm()) < 0.1 * float(right.norm())
        if is_close and dtype != floor.dtype and all(_is_rounded(seen[name], dtype) for name in names if name in seen):
            short = str(dtype).removeprefix("torch.")
            return Classification(Kind.PRECISION, "trainer", where, f"its entries are rounded to {short}{part}")
    found, misfit = fit(columns, target)
    shown = ", ".join(f"{float(weight):.3g}" for weight in found[:8])
    if misfit < limit:
        return Classification(Kind.WRONG_WEIGHTS, "trainer", where, f"micro-batches count {shown}{part}")
    return Classification(Kind.UNKNOWN, "unknown", where, f"it is no mix of the micro-batches' gradients{part}")


def _is_best_mix(
    columns: Tensor, target: Tensor, right: Tensor, pieces: Sequence[ReferencePiece], limit: float
) -> bool:
    """Return whether a mix of parts that cannot give the truth is as near to it as a mean or a sum of them is."""
    weights, misfit = fit(columns, target)
    total = sum(map(len, _samples_of(pieces).values()))
    by_samples = torch.tensor([len(piece.samples) / total for piece in pieces], dtype=torch.float64)
    nearest = min(misfit_of(columns, right, simple) for simple in (by_samples, torch.ones_like(by_samples)))
    return misfit < limit and misfit_of(columns, right, weights) <= nearest * (1 + 1e-6)


def _is_rounded(value: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(value.to(dtype).to(value.dtype), value)


def _coupled(where: str) -> Classification:
    return Classification(
        Kind.COUPLED,
        "job",
        where,
        "samples of a batch act on each other (batch statistics, in-batch negatives): how a batch is divided is part "
        "of what is learned, and the trainer did with the parts what can be done",
    )


def _uncounted(where: str, parts: Mapping[str, PartKind]) -> Classification:
    odd = ", ".join(f"{name!r}" for name, kind in parts.items() if kind == "uncounted")
    return Classification(
        Kind.MEAN_OF_MEANS,
        "job",
        where,
        f"the part {odd} of the loss is no mean over samples, nor over what Job.count counts for it, and the trainer "
        "divided it by what the job states: let Job.count count its items, or return dt.LossSum",
    )


def _samples_of(pieces: Sequence[ReferencePiece]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the samples of each micro-batch."""
    return {(piece.rank, piece.number): piece.samples for piece in pieces}


def _in_some_parts(
    weightings: Iterator[tuple[Kind, list[float], str]], pieces: Sequence[ReferencePiece], true_weights: Tensor
) -> Iterator[tuple[Kind, list[float], str]]:
    """Yield each weighting for the whole loss; of named parts, also for those with a count, and for each alone."""
    names = list(dict.fromkeys(piece.part for piece in pieces))
    counted = list(dict.fromkeys(piece.part for piece in pieces if piece.count is not None))
    scopes = [names, *([counted] if 1 < len(counted) < len(names) else [])]
    scopes += [[name] for name in names] if len(names) > 1 else []
    true = true_weights.tolist()
    for kind, factors, words in weightings:
        for scope in scopes:
            mixed = [own if p.part in scope else t for own, t, p in zip(factors, true, pieces, strict=True)]
            of = "" if scope is names else f", in the part{'s' if len(scope) > 1 else ''} {', '.join(map(repr, scope))}"
            yield kind, mixed, words + of


def _judge_part_weights(
    columns: Tensor, target: Tensor, pieces: Sequence[ReferencePiece], true_weights: Tensor, where: str, limit: float
) -> Classification | None:
    """Find out whether each part is right in itself, and one of them counts too much, too little or not at all."""
    names = list(dict.fromkeys(piece.part for piece in pieces))
    weighted = columns * true_weights
    of_parts = torch.stack(
        [weighted[:, [number for number, p in enumerate(pieces) if p.part == name]].sum(1) for name in names], 1
    )
    factors, misfit = fit(of_parts, target)
    if misfit > limit:
        return None
    odd = {
        name: float(factor)
        for name, factor, column in zip(names, factors, of_parts.T, strict=True)
        if abs(float(factor) - 1) > 1e-4 and column.any()
    }
    if not odd or (len(odd) == len(names) and max(odd.values()) - min(odd.values()) < 1e-4):
        return None  # a factor of the whole loss
    shown = ", ".join(f"the part {name!r} counts {factor:.4g} times what it should" for name, factor in odd.items())
    if all(abs(factor) < 1e-4 for factor in odd.values()):
        lost = f"the part{'s' if len(odd) > 1 else ''} {', '.join(map(repr, odd))} of the loss did not reach it"
        return Classification(Kind.LOST_GRADIENT, "trainer", where, lost)
    return Classification(Kind.WRONG_WEIGHTS, "trainer", where, shown)


def _weightings(
    case: Case, pieces: Sequence[ReferencePiece], true_weights: Tensor
) -> Iterator[tuple[Kind, list[float], str]]:
    """Yield known ways of weighting micro-batches wrongly, likeliest first."""
    world = max(case.world_size, 1 + max(piece.rank for piece in pieces))
    micro_batches = _samples_of(pieces)
    total = sum(map(len, micro_batches.values()))
    by_rank = Counter(rank for rank, _ in micro_batches)
    samples_of = Counter[int]()
    for (rank, _), samples in micro_batches.items():
        samples_of[rank] += len(samples)
    nominal = _accumulation(case)
    by_samples = [len(piece.samples) / total for piece in pieces]
    means = [1 / len(micro_batches) for _ in pieces]
    of_ranks = [len(piece.samples) / samples_of[piece.rank] / world for piece in pieces]
    of_both = [1 / by_rank[piece.rank] / world for piece in pieces]
    fixed = [1 / nominal / world for _ in pieces]
    true = true_weights.tolist()
    true_of: dict[tuple[int, str], float] = {}
    for piece, weight in zip(pieces, true, strict=True):
        true_of[piece.rank, piece.part] = true_of.get((piece.rank, piece.part), 0.0) + weight
    of_true_ranks = [
        weight / (true_of[piece.rank, piece.part] or 1.0) / world for piece, weight in zip(pieces, true, strict=True)
    ]
    yield Kind.MEAN_OF_MEANS, by_samples, "micro-batches count by their samples, and the loss counts something else"
    yield Kind.MEAN_OF_MEANS, means, "every micro-batch counts alike, however much it holds"
    yield Kind.MEAN_OF_MEANS, of_ranks, "every rank counts alike, however much it holds"
    yield Kind.MEAN_OF_MEANS, of_true_ranks, "every rank's own mean counts alike, however much it is of"
    yield Kind.MEAN_OF_MEANS, of_both, "every micro-batch of a rank counts alike, and every rank"
    yield Kind.MEAN_OF_MEANS, fixed, f"the sum is divided by {nominal} micro-batches where there are fewer"
    for factor in (world, 1 / world):
        for weights in (true, by_samples, means, of_both):
            if world > 1:
                kind, words = _scale_kind(case, factor)
                yield kind, [factor * weight for weight in weights], words
    for factor in (nominal, 1 / nominal, nominal * world, 1 / (nominal * world)):
        for weights in (true, by_samples, means, of_both):
            if nominal > 1:
                kind, words = _scale_kind(case, factor)
                yield kind, [factor * weight for weight in weights], words
    for rank in by_rank if len(by_rank) > 1 else ():
        own = [piece.rank == rank for piece in pieces]
        for weights in (of_ranks, of_true_ranks, of_both, true):
            for factor in (world, 1.0, 1 / world):
                words = f"only rank {rank}'s samples count"
                yield (
                    Kind.MISSING_REDUCTION,
                    [factor * w if o else 0.0 for w, o in zip(weights, own, strict=True)],
                    words,
                )
    yield from _subsets(pieces, by_rank, true, by_samples, fixed, of_both, nominal)


def _subsets(
    pieces: Sequence[ReferencePiece], by_rank: Mapping[int, int], *weightings: object
) -> Iterator[tuple[Kind, list[float], str]]:
    *candidates, nominal = weightings
    assert isinstance(nominal, int)
    last = [piece.number == by_rank[piece.rank] - 1 for piece in pieces]
    first = [piece.number == 0 for piece in pieces]
    cases = (
        (last, "only the last micro-batch counts"),
        (first, "only the first micro-batch counts"),
        ([not flag for flag in last], "the last micro-batch is left out"),
        ([not flag for flag in first], "the first micro-batch is left out"),
    )
    for kept, words in cases:
        for weights in candidates:
            assert isinstance(weights, list)
            for factor in (1.0, float(nominal), len(_samples_of(pieces))):
                mixed = [factor * weight if keep else 0.0 for weight, keep in zip(weights, kept, strict=True)]
                yield Kind.LOST_MICRO_BATCH, mixed, words
            yield Kind.LOST_MICRO_BATCH, _renormalized(pieces, weights, kept), words


def _renormalized(pieces: Sequence[ReferencePiece], weights: Sequence[float], kept: Sequence[bool]) -> list[float]:
    """Return the weights of those that are kept, so that they add up to 1 in each part."""
    rest: dict[str, float] = {}
    for piece, weight, keep in zip(pieces, weights, kept, strict=True):
        rest[piece.part] = rest.get(piece.part, 0.0) + (weight if keep else 0.0)
    return [
        weight / (rest[piece.part] or 1.0) if keep else 0.0
        for piece, weight, keep in zip(pieces, weights, kept, strict=True)
    ]


def _scale_kind(case: Case, factor: float) -> tuple[Kind, str]:
    world, accumulation = case.world_size, _accumulation(case)
    shown = f"{factor:.4g} times the right gradient"
    for kind, number, what in (
        (Kind.SCALED_BY_WORLD, world, "processes"),
        (Kind.SCALED_BY_ACCUMULATION, accumulation, "micro-batches"),
        (Kind.SCALED_BY_ACCUMULATION, accumulation * world, "micro-batches of all processes"),
    ):
        if number > 1 and _close(factor, number, 1e-6):
            return kind, f"{shown}: it is not divided by the {number} {what}"
        if number > 1 and _close(factor, 1 / number, 1e-6):
            return kind, f"{shown}: it is divided once too often by the {number} {what}"
    return Kind.SCALED, shown


# Weights after several steps


def step_hypotheses(case: Case, trace: Trace) -> Iterator[tuple[Kind, Bug, str]]:
    """Yield ways of going wrong that show only over several steps, or only in weights."""
    yield Kind.NOT_CLEARED, Bug(clears="never"), "gradients of earlier steps are still there"
    if case.clips:
        yield from clip_hypotheses(case)
    if any(decay_of(case.job, name) is not None for name in case.job.optims or ("",)):
        yield Kind.WEIGHT_DECAY, Bug(decays_all=True), "parameters of one dimension are decayed, too"
    per_epoch = -(-case.num_samples // case.global_batch)
    for number in dict.fromkeys((1, per_epoch)):
        if number < case.num_steps:
            steps = range(number, case.num_steps, number)
            words = "the optimizer's state is lost in every step" if number == 1 else "… at every epoch's end"
            yield Kind.MOMENTS_LOST, Bug(forgets_moments_at=tuple(steps)), words
    yield Kind.SCHEDULE, Bug(schedule=lambda step, world, micro: step + 1), "the schedule is a step ahead"


def clip_hypotheses(case: Case) -> Iterator[tuple[Kind, Bug, str]]:
    weight, world, accumulation = DIVIDED.weight, case.world_size, _accumulation(case)
    yield Kind.CLIPPING, Bug(clip="never"), "gradients are not clipped"
    yield Kind.CLIPPING, Bug(weight=weight, clip="micro_batch"), "each micro-batch's gradient is clipped by itself"
    yield Kind.CLIPPING, Bug(weight=weight, clip="rank"), "each rank clips its own gradient before they are reduced"
    for number, what in ((world, "processes"), (accumulation, "micro-batches"), (world * accumulation, "both")):
        if number > 1:
            words = f"the norm is that of a gradient {{}} by the {number} {what}"
            yield Kind.CLIPPING, Bug(norm_scale=float(number)), words.format("multiplied")
            yield Kind.CLIPPING, Bug(norm_scale=1 / number), words.format("divided")
            yield Kind.CLIPPING, Bug(norm_scale=number**0.5), words.format("summed in squares")
            yield Kind.CLIPPING, Bug(norm_scale=number**-0.5), words.format("averaged in squares")


def _flat(gradients: Mapping[str, Tensor], names: Sequence[str], like: Mapping[str, Tensor]) -> Tensor:
    parts = [
        as_real(gradients[name] if name in gradients else torch.zeros_like(like[name])).double().reshape(-1)
        for name in names
    ]
    whole = torch.cat(parts)
    return whole[:: max(1, whole.numel() // 200_000)]


def _accumulation(case: Case) -> int:
    share = -(-case.global_batch // case.world_size)
    return max(1, -(-share // case.micro_batch))


def _close(left: float, right: float, limit: float = 1e-5) -> bool:
    return abs(left - right) <= limit * max(abs(left), abs(right), 1e-12)


def _short(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return f"[{shown}{', …' if len(numbers) > 6 else ''}]"


# ----------------------------------------------------------------------------------------------------------------------
# The result of `prove`: one value with every check, written as JSON and printed as a table.

FORMAT = 1
Status = Literal["ok", "job", "failed", "unknown", "skipped"]
_GRAVITY = ("ok", "skipped", "unknown", "job", "failed")
MARKS: Mapping[str, str] = {"ok": "✓", "job": "job", "failed": "✗", "unknown": "?", "skipped": "–"}


@dataclass(frozen=True)
class Check:
    """One thing that was compared in one configuration.

    `ok`: equal; `job`: it differs, and cannot be otherwise with this job; `failed`: it differs; `unknown`: rounding
    alone may explain it, or nothing can be said; `skipped`: not done, for the reason in `detail`.
    """

    configuration: str
    what: str
    status: Status
    error: float | None = None  # relative
    limit: float | None = None  # what rounding explains
    detail: str = ""
    verdict: Classification | None = None


@dataclass
class Certificate:
    """The outcome of a proof. `ok` is true if nothing failed and every difference is the job's own.

    Attributes:
        job: the job's name.
        trainer: the trainer that was tried.
        facts: what was found out about the job, and what was compared with what.
        checks: every check, in the order in which they were made.
        notes: what the reader must know: what was reduced, left out or could not be told.
    """

    job: str
    trainer: str
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    path: Path | None = None

    @property
    def ok(self) -> bool:
        return not any(check.status == "failed" for check in self.checks)

    @property
    def verdicts(self) -> list[Classification]:
        """The different verdicts: failures first, then those that are due to the job."""
        found: dict[tuple[str, str], Classification] = {}
        for check in sorted(self.checks, key=lambda check: check.status != "failed"):
            if check.verdict is not None:
                found.setdefault((check.verdict.kind, check.verdict.where), check.verdict)
        return list(found.values())

    def to_json(self) -> str:
        values = asdict(self)
        values.pop("path")
        return json.dumps({"format": FORMAT, "ok": self.ok, **values}, indent=2, default=str)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # /dev/null, a pipe: written to, never replaced
            path.write_text(self.to_json() + "\n", encoding="utf-8")
            self.path = path
            return
        self.path = write_atomically(path, self.to_json() + "\n")

    def show(self, console: Console) -> None:
        """Print a line for every configuration with what was compared in it; differences are explained below."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", show_header=False)
        table.title = f"{self.job}, trained by {self.trainer}"
        table.add_column(justify="center")
        table.add_column(overflow="fold", max_width=42)
        table.add_column(overflow="fold")
        for row in dict.fromkeys(check.configuration for check in self.checks):
            own = [check for check in self.checks if check.configuration == row]
            worst = max(own, key=lambda check: _GRAVITY.index(check.status)).status
            cells = (check.what if check.status == "ok" else f"{MARKS[check.status]} {check.what}" for check in own)
            table.add_row(MARKS[worst], row, ", ".join(cells))
        console.print(table)
        console.print()
        told = set()
        for check in self.checks:
            words = str(check.verdict) if check.verdict is not None else check.detail
            if check.status != "ok" and words and words not in told:
                told.add(words)
                line = f"{MARKS[check.status]} {check.configuration}, {check.what}: {words}"
                console.print(line, soft_wrap=True, markup=False)
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True, markup=False)
        result = "nothing differs that rounding does not explain" if self.ok else "NOT proven: see above"
        if self.ok and any(check.status == "job" for check in self.checks):
            result = "the trainer is right; what differs is the job's own"
        elif self.ok and any(check.status == "unknown" for check in self.checks):
            result = "nothing differs that rounding does not explain, in what could be compared"
        console.print(f"{result} ({len(self.checks)} checks, {self.seconds:.0f} s)")
