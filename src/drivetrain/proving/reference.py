"""The plain loop that trainers are compared with, and the same loop with known bugs planted.

It shares no code with the trainer: whole batches of explicitly given samples, one process, float64 where the model can.
Of Drivetrain it uses what the user's job holds, and the library of mixtures of experts, which is part of models.

With several losses, everything is counted in updates: a division, a loss, a gradient for each turn of each step. In an
update only the parameters of its turn have gradients.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.isolation import frozen_to_copy
from drivetrain.core.precision import as_real
from drivetrain.moe.mixture import Settlement, auxiliary_loss
from drivetrain.proving.case import (
    Case,
    RateTable,
    build_model,
    decay_of,
    loss_of,
    parameter_groups,
    parameters_of,
    plain_batch,
)
from drivetrain.proving.loss import (
    AUXILIARY,
    WHOLE,
    PartMean,
    generators_kept,
    part_means,
    part_weight,
    seed_generators,
    state_of_generators,
    turn_dropout_off,
    weighted_sum,
)

MOST_RATES = 4096  # steps whose rates are tabled
Division = Sequence[Sequence[Sequence[int]]]  # of one step: of each rank, the samples of its micro-batches
LossKind = Literal["samples", "weighted", "sum", "coupled", "parts", "uncounted"]
PartKind = Literal["samples", "counted", "uncounted", "coupled"]


@dataclass(frozen=True)
class Bug:
    """The bug to simulate. The default is none: every step is the user's loss on the undivided batch.

    Attributes:
        weight: the factor of a micro-batch's own mean in the step's gradient, from (its samples, the samples of all,
            the number of micro-batches of its rank, the number of ranks, its number on its rank); `right`: whatever
            gives the undivided batch's gradient; `stated`: named parts by their counts, all else by samples. None: the
            batch is not divided.
        clears: when gradients are cleared: before every step, or never.
        clip: what is clipped: the step's gradient, each micro-batch's, each rank's before reduction; or nothing.
        norm_scale: what the norm is mistaken by: clipping happens as if it were this much larger.
        schedule: from (step, ranks, micro-batches of a rank) to the step that the schedule is asked for.
        forgets_moments_at: steps of the job before which the optimizer's state is lost.
        buffers: how the ranks' buffers come together: rank 0's before each forward, or never.
        decays_all: whether parameters that the job leaves out of weight decay get it, too.
    """

    weight: Callable[[int, int, int, int, int], float] | Literal["right", "stated"] | None = None
    clears: Literal["step", "never"] = "step"
    clip: Literal["step", "micro_batch", "rank", "never"] = "step"
    norm_scale: float = 1.0
    schedule: Callable[[int, int, int], int] | None = None
    forgets_moments_at: Sequence[int] = ()
    buffers: Literal["shared", "apart"] = "shared"
    decays_all: bool = False
    loss_scale: float = 1.0  # no bug: what the loss is multiplied by and gradients are divided by again


NO_BUG = Bug()
DIVIDED = Bug(weight="right")
BY_SAMPLES = Bug(weight=lambda own, total, micro_batches, ranks, number: own / total)
AS_STATED = Bug(weight="stated")
AS_A_SUM = Bug(weight=lambda own, total, micro_batches, ranks, number: 1.0)


@dataclass
class ReferenceOutcome:
    """The results of a plain loop."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # before clipping
    learning_rates: list[tuple[float, ...]] = field(default_factory=list)
    rate_tables: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)  # by turn: of each step of the job
    own_norms: list[dict[str, float]] = field(default_factory=list)  # by optimizer
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # after clipping, of the first steps
    first_weights: dict[str, Tensor] = field(default_factory=dict)
    step_weights: list[dict[str, Tensor]] = field(default_factory=list)  # before each of the first steps
    weights: dict[str, Tensor] = field(default_factory=dict)
    rank_buffers: list[dict[str, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class ReferencePiece:
    """One micro-batch of a step, or one named part of its loss: the gradient of its mean at the step's weights.

    The gradient of a named part has the part's weight in the loss.
    """

    rank: int
    number: int  # on its rank
    samples: tuple[int, ...]
    gradients: Mapping[str, Tensor]
    loss: float
    part: str = WHOLE
    count: float | None = None  # of the part's items in this micro-batch; None: it is divided by samples


@dataclass(frozen=True)
class ReferenceFacts:
    """The facts that were found about a job before anything is compared."""

    dtype: torch.dtype | None  # what it is compared in
    why_not_double: str
    keys_draws: bool  # whether the loss draws random numbers with dropout off
    draws_unkeyed: bool  # and some of them could not be keyed by sample
    loss_kind: LossKind
    shares: tuple[float, ...]  # the weights of the three parts that fit best
    misfit: float  # of that fit, relative
    num_parameters: int
    seconds_per_sample: float
    least_part: int  # samples that a micro-batch must have: batch statistics need two
    items_draw: bool  # whether reading an item draws random numbers
    model_draws: bool  # whether the loss draws as the user has it, dropout included
    remembers: bool  # whether a second call on the same batch, weights, buffers and seeds gives another loss, or
    # a call changes weights that are frozen
    parts: Mapping[str, PartKind] = field(default_factory=dict)  # of a loss with named parts, what each is
    late_parts: tuple[str, ...] = ()  # those whose count only a forward tells
    of_turns: Mapping[str, "ReferenceFacts"] = field(default_factory=dict)  # for several losses, of each by itself

    def of(self, turn: str) -> "ReferenceFacts":
        """Return the facts about the loss of a turn; about the only one under an empty name."""
        return self.of_turns[turn] if turn else self

    @property
    def depends_on_division(self) -> bool:
        """Whether the division of a batch is part of what is learned, with this job and any trainer."""
        return self.loss_kind in ("coupled", "uncounted")


@dataclass(frozen=True)
class _Member:
    """One of the optimizers of a plain loop, with what belongs to it."""

    name: str
    turn: str
    optimizer: Optimizer
    parameters: Sequence[nn.Parameter]
    rates: RateTable


def train(case: Case, divisions: Sequence[Division], bug: Bug = NO_BUG, keep_gradients: int = 2) -> ReferenceOutcome:
    """Train on these samples, update by update, and return everything that a trainer may be compared by."""
    model, members = _made(case, bug)
    settlement = Settlement(model)
    cases = {turn: case.of_turn(turn) for turn in dict.fromkeys(member.turn for member in members)}
    outcome = ReferenceOutcome(first_weights=_state(model))
    if bug is NO_BUG:
        outcome.rate_tables = {turn: _rate_table(case, members, turn) for turn in cases}
    num_ranks = max((len(division) for division in divisions), default=1)
    buffers = [_buffers(model) for _ in range(num_ranks)] if bug.weight is not None else []
    for number, division in enumerate(divisions):
        step, turn = case.update(number)
        own = [member for member in members if member.turn == turn]
        if number < keep_gradients:
            outcome.step_weights.append(_parameters(model))
        if step in bug.forgets_moments_at:
            for member in own:
                member.optimizer.state.clear()
        if bug.clears == "step":
            model.zero_grad()
        with _only_training(members, own):
            loss = _backward(cases[turn], model, division, bug, buffers, step)
        norms = {member.name: _norm(member.parameters) * bug.norm_scale for member in own}
        for member in own:
            _clip(case, bug, member, norms[member.name])
        asked = step
        if bug.schedule is not None:
            asked = bug.schedule(step, len(division), max(len(rank) for rank in division))
        for member in own:
            member.rates.set(asked)
        outcome.losses.append(loss)
        outcome.own_norms.append(norms)
        outcome.norms.append(math.hypot(*norms.values()))
        groups = [group for member in own for group in member.optimizer.param_groups]
        outcome.learning_rates.append(tuple(float(group["lr"]) for group in groups))
        if number < keep_gradients:
            outcome.gradients.append({name: value.cpu() for name, value in gradients_of(model).items()})
        for member in own:
            member.optimizer.step()
        if settlement.layers:
            settlement.settle()
    outcome.weights = _state(model)
    outcome.rank_buffers = [{name: value.cpu() for name, value in own.items()} for own in buffers]
    return outcome


def _rate_table(case: Case, members: Sequence[_Member], turn: str) -> list[tuple[float, ...]]:
    """Return the rates of a turn's optimizers by step, for as many as a wrong count of steps may ask for."""
    found: list[tuple[float, ...]] = []
    own = [member for member in members if member.turn == turn]
    for step in range(min(MOST_RATES, case.num_steps * case.global_batch)):
        try:
            found.append(tuple(rate for member in own for rate in member.rates.rates(step)))
        except Exception:
            if step < case.num_steps:
                raise
            break  # a schedule need not go further than the job
    return found


@contextmanager
def _only_training(members: Sequence[_Member], own: Sequence[_Member]) -> Iterator[None]:
    """Freeze the parameters of the other turns."""
    others = [parameter for member in members if member not in own for parameter in member.parameters]
    for parameter in others:
        parameter.requires_grad_(False)
    yield
    for parameter in others:
        parameter.requires_grad_(True)


def undivided(samples: Sequence[Sequence[int]]) -> list[Division]:
    """Return steps of whole batches."""
    return [[[list(numbers)]] for numbers in samples]


def pieces(
    case: Case, division: Division, before: Sequence[Division] = (), number: int | None = None
) -> list[ReferencePiece]:
    """Return the gradient of every micro-batch of an update, after the right updates before it.

    Args:
        case: the case.
        division: how the update is divided.
        before: how those before it were divided.
        number: which update it is; default: the one that follows.
    """
    step, turn = case.update(len(before) if number is None else number)
    weights = train(case, before).weights if before else None
    case = case.of_turn(turn)
    model, _ = _made(case, NO_BUG)
    found = []
    if weights is not None:
        model.load_state_dict(weights)
    for rank, micro_batches in enumerate(division):
        for place, samples in enumerate(micro_batches):
            for name, part in _each_part(case, model, samples) if samples else ():
                model.zero_grad()
                loss = _weighed(case, name, part, step)
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                gradients = {key: value.cpu() for key, value in _all_gradients(model).items()}
                found.append(
                    ReferencePiece(rank, place, tuple(samples), gradients, float(loss.detach()), name, part.count)
                )
    return found


def shares_of(pieces: Sequence[ReferencePiece]) -> list[float]:
    """Return the weight of each piece by what the job states: its part's count in the step, else its samples."""
    samples = {(piece.rank, piece.number): len(piece.samples) for piece in pieces}
    totals: dict[str, float] = {}
    for piece in pieces:
        totals[piece.part] = totals.get(piece.part, 0.0) + (piece.count or 0.0)
    return [
        len(piece.samples) / sum(samples.values()) if piece.count is None else piece.count / (totals[piece.part] or 1.0)
        for piece in pieces
    ]


def find_facts(case: Case) -> ReferenceFacts:
    """Try the job on one batch; with several losses, each by itself."""
    if not case.job.turns:
        return _facts_of(case)
    found = {turn.name: _facts_of(case.of_turn(turn.name)) for turn in case.job.turns}
    every = list(found.values())
    odd = next((it.loss_kind for kind in ("coupled", "uncounted") for it in every if it.loss_kind == kind), None)
    alike = len({it.loss_kind for it in every}) == 1
    return replace(
        every[0],
        dtype=None if any(it.dtype is None for it in every) else every[0].dtype,
        why_not_double=next((it.why_not_double for it in every if it.why_not_double), ""),
        keys_draws=any(it.keys_draws for it in every),
        draws_unkeyed=any(it.draws_unkeyed for it in every),
        loss_kind=odd or (every[0].loss_kind if alike else "weighted"),
        shares=(),
        misfit=max(it.misfit for it in every),
        seconds_per_sample=sum(it.seconds_per_sample for it in every),
        least_part=max(it.least_part for it in every),
        items_draw=any(it.items_draw for it in every),
        model_draws=any(it.model_draws for it in every),
        remembers=any(it.remembers for it in every),
        parts={},
        late_parts=tuple(name for it in every for name in it.late_parts),
        of_turns=found,
    )


def _facts_of(case: Case) -> ReferenceFacts:
    """Try the job on one batch: what it can be computed in, what it draws, what kind of loss it has."""
    numbers = list(case.order[0])
    why_not_double = ""
    try:
        _one_step(replace(case, dtype=torch.float64), numbers)
        case = replace(case, dtype=torch.float64)
    except Exception as error:  # noqa: BLE001  (any error means that the model cannot)
        why_not_double = f"{type(error).__name__}: {error}".splitlines()[0]
        case = replace(case, dtype=None)
    keys_draws = _draws(case, numbers)
    case = replace(case, keys_draws=keys_draws)
    draws_unkeyed = keys_draws and _varies(case, numbers)
    began = time.perf_counter()
    num_parameters = _one_step(case, numbers)
    seconds = (time.perf_counter() - began) / len(numbers)
    least = 1 if _takes(case, numbers[:1]) else 2
    means = _named(case, numbers)
    kinds = part_kinds(case, numbers, least) if WHOLE not in means else {}
    kind: LossKind
    shares: tuple[float, ...]
    if kinds:
        odd = [found for found in kinds.values() if found in ("coupled", "uncounted")]
        kind, shares, misfit = ("coupled" if "coupled" in odd else "uncounted" if odd else "parts"), (), 0.0
    else:
        kind, shares, misfit = loss_kind(case, numbers, least)
    return ReferenceFacts(
        case.dtype,
        why_not_double,
        keys_draws,
        draws_unkeyed,
        kind,
        shares,
        misfit,
        num_parameters,
        seconds,
        least,
        _items_draw(case, numbers),
        _draws(replace(case, randomness="own"), numbers),
        _remembers(replace(case, randomness="own"), numbers),
        kinds,
        tuple(name for name, part in means.items() if part.is_late),
    )


def loss_kind(case: Case, numbers: Sequence[int], least: int = 1) -> tuple[LossKind, tuple[float, ...], float]:
    """Fit the gradient of a batch by those of three unequal parts of it, and read the kind of loss from the weights."""
    numbers = list(numbers)[:24]
    count = len(numbers)
    parts = _cut(numbers, least)
    if len(parts) < 2:
        return "samples", (), 0.0
    whole = _flat(pieces(case, [[numbers]])[0].gradients)
    columns = torch.stack([_flat(pieces(case, [[part]])[0].gradients) for part in parts], 1)
    shares, misfit = fit(columns, whole)
    by_samples = torch.tensor([len(part) / count for part in parts], dtype=torch.float64)
    tolerance = _tolerance(case)
    found = tuple(float(share) for share in shares)
    if misfit_of(columns, whole, by_samples) < tolerance:
        return "samples", tuple(by_samples.tolist()), misfit
    if misfit > tolerance:
        return "coupled", found, misfit
    if misfit_of(columns, whole, torch.ones_like(by_samples)) < tolerance:
        return "sum", found, misfit
    return "weighted", found, misfit


def part_kinds(case: Case, numbers: Sequence[int], least: int = 1) -> dict[str, PartKind]:
    """Find out for each named part whether it is a mean over what the job says that it is."""
    numbers = list(numbers)[:24]
    divided = pieces(case, [_cut(numbers, least)])
    found: dict[str, PartKind] = {}
    for whole in pieces(case, [[numbers]]):
        own = [piece for piece in divided if piece.part == whole.part]
        target = _flat(whole.gradients)
        if len(own) < 2 or not target.any():
            found[whole.part] = "samples" if whole.count is None else "counted"
            continue
        columns = torch.stack([_flat(piece.gradients) for piece in own], 1)
        # A batch that leaves a part out still has its samples.
        shares = [len(piece.samples) / len(numbers) for piece in own] if whole.count is None else shares_of(own)
        if misfit_of(columns, target, torch.tensor(shares, dtype=torch.float64)) < _tolerance(case):
            found[whole.part] = "samples" if whole.count is None else "counted"
        else:
            found[whole.part] = "coupled" if fit(columns, target)[1] > _tolerance(case) else "uncounted"
    return found


def _cut(numbers: list[int], least: int) -> list[list[int]]:
    """Return three unequal parts of a batch; two, where they would be too small."""
    count = len(numbers)
    cuts = sorted({0, least * max(1, count // 6), count // 2, count})
    parts = [numbers[start:stop] for start, stop in pairwise(cuts)]
    if min(map(len, parts)) < least:
        parts = [part for part in (numbers[: count // 2], numbers[count // 2 :]) if len(part) >= least]
    return parts


def _tolerance(case: Case) -> float:
    return 1e-7 if case.dtype == torch.float64 else 1e-3


def fit(columns: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Return the weights with which columns come closest to a target, and the relative residual."""
    weights = torch.linalg.lstsq(columns, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    return weights, misfit_of(columns, target, weights)


def misfit_of(columns: Tensor, target: Tensor, weights: Tensor) -> float:
    size = float(target.norm()) or 1.0
    return float((columns @ weights - target).norm()) / size


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad).detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _all_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every parameter that trains; zeros where there is none."""
    found = gradients_of(model)
    return {
        name: found[name] if name in found else torch.zeros_like(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _made(case: Case, bug: Bug) -> tuple[nn.Module, list[_Member]]:
    """Build the model, and the optimizers over it. Parameters that none of them holds are frozen."""
    model = build_model(case.job, case.seed, case.dtype).to(case.device)
    if case.randomness == "off":
        turn_dropout_off(model)
    members = []
    for name, own in parameters_of(case.job, model).items():
        decay = decay_of(case.job, name)
        groups = parameter_groups(own.values(), None if bug.decays_all else decay)
        if bug.decays_all and decay is not None:
            groups[0]["weight_decay"] = decay
        optim = case.job.optims.get(name)
        make: Any = case.job.optimizer if optim is None else optim.make
        optimizer: Optimizer = make(groups)
        turn = (optim.loss or name) if optim is not None and case.job.turns else ""
        members.append(_Member(name, turn, optimizer, list(own.values()), RateTable(case, name, optimizer)))
    held = {parameter for member in members for parameter in member.parameters}
    for parameter in model.parameters():
        if parameter not in held:
            parameter.requires_grad_(False)
    return model, members


def _backward(
    case: Case, model: nn.Module, division: Division, bug: Bug, buffers: list[dict[str, Tensor]], step: int
) -> float:
    """Accumulate the gradient of a step, and return the loss of the undivided batch or of its parts."""
    everything = [number for rank in division for micro_batch in rank for number in micro_batch]
    if bug.weight is None:
        value = _own_mean(case, model, everything, step)
        if value.requires_grad:  # not so where a step has no item of any part
            (value * bug.loss_scale).backward()  # type: ignore[no-untyped-call]
        if bug.loss_scale != 1.0:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= bug.loss_scale
        return float(value.detach())
    before = {name: tensor.clone() for name, tensor in gradients_of(model).items()}
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    touched: set[str] = set()
    loss = 0.0
    known = _right_weights(case, model, division, step) if bug.weight == "right" else {}
    if bug.weight == "stated":
        known = _stated_weights(case, model, division)
    for rank, micro_batches in enumerate(division):
        _put_buffers(model, buffers[0 if bug.buffers == "shared" else rank])
        of_rank = {name: torch.zeros_like(tensor) for name, tensor in total.items()}
        for number, samples in enumerate(micro_batches):
            if not samples:
                continue
            model.zero_grad()
            for name, part in _means(case, model, samples).items():
                if isinstance(bug.weight, str):
                    weight = known[rank, number, name]
                else:
                    weight = bug.weight(len(samples), len(everything), len(micro_batches), len(division), number)
                value = _weighed(case, name, part, step)
                if value.requires_grad:
                    (value * weight).backward(retain_graph=True)  # type: ignore[no-untyped-call]
                loss += float(value.detach()) * len(samples) / len(everything)
            found = gradients_of(model)
            touched |= found.keys()
            scales = _clip_scales(case, model, found) if bug.clip == "micro_batch" else {}
            for name, gradient in found.items():
                of_rank[name] += gradient * scales.get(name, 1.0)
        scales = {}
        if bug.clip == "rank":  # each rank clips what it has before the ranks' gradients are averaged
            scales = _clip_scales(case, model, {name: value * len(division) for name, value in of_rank.items()})
        for name in total:
            total[name] += of_rank[name] * scales.get(name, 1.0)
        buffers[rank] = _buffers(model)
    if bug.buffers == "shared" and buffers:
        _put_buffers(model, buffers[0])
    for name, parameter in model.named_parameters():
        if name in touched or name in before:
            parameter.grad = total[name] + before.get(name, torch.zeros_like(total[name]))
    return loss


def _right_weights(case: Case, model: nn.Module, division: Division, step: int) -> dict[tuple[int, int, str], float]:
    """Return the weights of the micro-batches' gradients that give the undivided batch's, at the model's weights."""
    kept = _buffers(model)

    def gradient(value: Tensor) -> Tensor:
        model.zero_grad()
        if value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
        return _flat(_all_gradients(model))

    columns: dict[tuple[int, int, str], Tensor] = {}
    for rank, own in enumerate(division):
        for number, samples in enumerate(own):
            for name, part in _each_part(case, model, samples) if samples else ():
                columns[rank, number, name] = gradient(_weighed(case, name, part, step))
    whole = gradient(
        _own_mean(case, model, [number for own in division for samples in own for number in samples], step)
    )
    weights, _ = fit(torch.stack(list(columns.values()), 1), whole)
    model.zero_grad()
    _put_buffers(model, kept)
    return {place: float(weight) for place, weight in zip(columns, weights, strict=True)}


def _stated_weights(case: Case, model: nn.Module, division: Division) -> dict[tuple[int, int, str], float]:
    """Return the weights of the micro-batches' own means by what the job states: counts of parts, else samples."""
    kept = _buffers(model)
    found = []
    for rank, own in enumerate(division):
        for number, samples in enumerate(own):
            for name, part in _means(case, model, samples).items() if samples else ():
                found.append(ReferencePiece(rank, number, tuple(samples), {}, 0.0, name, part.count))
    _put_buffers(model, kept)
    shares = shares_of(found)
    return {(piece.rank, piece.number, piece.part): share for piece, share in zip(found, shares, strict=True)}


def _means(case: Case, model: nn.Module, numbers: Sequence[int]) -> dict[str, PartMean]:
    """Return the user's loss of these samples as one batch, part by part, with what mixtures of experts add to it."""
    batch = plain_batch(case, numbers)
    found = part_means(case.job, loss_of(case, model, batch, numbers), batch)
    auxiliary = auxiliary_loss(model)
    if auxiliary is None:
        return found
    if WHOLE in found:
        return {WHOLE: PartMean(found[WHOLE].mean + auxiliary)}
    return {**found, AUXILIARY: PartMean(auxiliary)}


def _weighed(case: Case, name: str, part: PartMean, step: int) -> Tensor:
    return part.mean if name in (WHOLE, AUXILIARY) else part.mean * part_weight(case.job, name, step)


def _own_mean(case: Case, model: nn.Module, numbers: Sequence[int], step: int = 0) -> Tensor:
    """Return the user's loss of these samples as one batch, with what mixtures of experts add to it."""
    parts = _means(case, model, numbers)
    auxiliary = parts.pop(AUXILIARY, None)
    value = weighted_sum(case.job, parts, step)
    return value if auxiliary is None else value + auxiliary.mean


def _named(case: Case, numbers: Sequence[int]) -> dict[str, PartMean]:
    """Return the parts of a batch's loss at the first weights."""
    return _means(case, _made(case, NO_BUG)[0], numbers)


def _each_part(case: Case, model: nn.Module, numbers: Sequence[int]) -> Iterator[tuple[str, PartMean]]:
    """Yield each part of a batch's loss, from a separate forward; buffers are restored after it."""
    names: list[str] = []
    done = 0
    while done < max(1, len(names)):
        kept = _buffers(model)
        parts = _means(case, model, numbers)
        names = names or list(parts)
        yield names[done], parts[names[done]]
        _put_buffers(model, kept)
        done += 1


def _clip_scales(case: Case, model: nn.Module, gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return what each gradient is multiplied by, clipped by the norm of its optimizer's parameters among these."""
    found = dict.fromkeys(gradients, 1.0)
    for name, own in parameters_of(case.job, model).items():
        most, norms = case.clip_of(name), [as_real(gradients[key]).double().norm() for key in own if key in gradients]
        if most is not None and norms:
            scale = min(1.0, most / (float(torch.stack(norms).norm()) + 1e-6))
            found.update({key: scale for key in own if key in gradients})
    return found


def _clip(case: Case, bug: Bug, member: _Member, norm: float) -> None:
    """Clip the gradient of an optimizer by its own norm."""
    most = case.clip_of(member.name)
    if most is None or bug.clip != "step":
        return
    scale = most / (norm + 1e-6)
    for parameter in member.parameters:
        if parameter.grad is not None and scale < 1.0:
            parameter.grad.mul_(scale)


def _norm(parameters: Sequence[nn.Parameter]) -> float:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [as_real(value.to_dense() if value.is_sparse else value).double().norm() for value in gradients]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.detach().to("cpu", copy=True)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_buffers()}


def _put_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in values:
                buffer.copy_(values[name])


def _flat(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return gradients as one vector of at most some hundred thousand entries, evenly taken."""
    whole = torch.cat([as_real(tensor).double().reshape(-1) for tensor in gradients.values()])
    return whole[:: max(1, whole.numel() // 200_000)]


def _one_step(case: Case, numbers: Sequence[int]) -> int:
    model, members = _made(case, NO_BUG)
    _own_mean(case, model, numbers).backward()  # type: ignore[no-untyped-call]
    for member in members:
        member.optimizer.step()
    return sum(parameter.numel() for parameter in model.parameters())


def _takes(case: Case, numbers: Sequence[int]) -> bool:
    """Return whether the loss can be computed for so few samples."""
    try:
        _one_step(case, numbers)
    except (ValueError, RuntimeError):
        return False
    return True


def _draws(case: Case, numbers: Sequence[int]) -> bool:
    """Return whether the loss draws from a global generator although dropout is off."""
    model, _ = _made(case, NO_BUG)
    batch = plain_batch(case, numbers)
    with generators_kept():
        before = state_of_generators()
        loss_of(case, model, batch, numbers)
        return state_of_generators() != before


def _varies(case: Case, numbers: Sequence[int]) -> bool:
    """Return whether the loss still varies with the generators' state although its draws are keyed."""
    values = []
    for seed in (1, 2):
        model, _ = _made(case, NO_BUG)
        with generators_kept():
            seed_generators(seed)
            values.append(float(_own_mean(case, model, numbers).detach()))
    return values[0] != values[1]


def _items_draw(case: Case, numbers: Sequence[int]) -> bool:
    data: Any = case.job.source.dataset
    with generators_kept():
        before = state_of_generators()
        for number in numbers[:4]:
            _ = data[number] if not hasattr(data, "__getitems__") else data.__getitems__([number])
        return state_of_generators() != before


def _remembers(case: Case, numbers: Sequence[int]) -> bool:
    """Return whether the model or the loss keeps something between calls that is no buffer or trained weight."""
    model, _ = _made(case, NO_BUG)
    frozen = [(weight, weight.detach().clone()) for weight in frozen_to_copy(model)]
    versions = [weight._version for weight, _ in frozen]
    batch = plain_batch(case, numbers)
    values = []
    buffers = _buffers(model)
    for _ in range(3):
        _put_buffers(model, buffers)
        with generators_kept():
            seed_generators(1)
            result = loss_of(case, model, batch, numbers)
        auxiliary_loss(model)
        Settlement(model).forget()
        values.append(float(weighted_sum(case.job, part_means(case.job, result, batch), 0).detach()))
    moved = [weight._version for weight, _ in frozen] != versions
    moved |= any(not torch.equal(weight, before) for weight, before in frozen)
    return moved or len(set(values)) > 1
