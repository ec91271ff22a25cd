"""Every planted bug is found, classed and located; the loop without bugs raises no alarm."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Job
from drivetrain.proving import Case, Certificate, Extent, Kind, Subject, prove_subject
from tests.proving import planted_data, planted_gradients, planted_resume, planted_schedules
from tests.proving.jobs import mlp, token_job, vector_job, vectors
from tests.proving.loops import Loop
from tests.proving.planted_data import Noisy

QUICK = Extent(num_steps=8, repeats=False)
MICRO = Extent(num_steps=8, repeats=False, only=("micro-batches",))
WORLD = Extent(num_steps=8, repeats=False, only=("processes",))
WHOLE = Extent(num_steps=16, repeats=False, only=("none",))
REPEAT = Extent(num_steps=8, divisions=False, num_kills=0)
RESUME = Extent(num_steps=12, divisions=False)
RESUME_LATE = Extent(num_steps=12, divisions=False, seed=3)


@dataclass(frozen=True)
class Planted:
    """A bug, the job it shows on, where to look, and what has to be said of it."""

    loop: type[Loop]
    job: Any
    extent: Extent
    kind: Kind
    where: str
    configuration: str = ""
    detail: str = ""
    in_short_run: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


def clipped() -> Job:
    return token_job(clip_norm=0.5)


def normed() -> Job:
    return vector_job(model=partial(mlp, 0.0, nn.BatchNorm1d), global_batch=8)


def dropping() -> Job:
    return vector_job(model=partial(mlp, 0.3))


def noisy() -> Job:
    return vector_job(data=Noisy(vectors()))


def short_epochs() -> Job:
    return vector_job(data=vectors(20))


G, S, D, R = planted_gradients, planted_schedules, planted_data, planted_resume
PLANTED = [
    Planted(G.MeanOfMeans, token_job, MICRO, Kind.MEAN_OF_MEANS, "embedding.weight", in_short_run=True),
    Planted(G.RanksCountAlike, token_job, WORLD, Kind.MEAN_OF_MEANS, "embedding.weight"),
    Planted(G.SamplesInsteadOfTokens, token_job, MICRO, Kind.MEAN_OF_MEANS, "embedding.weight"),
    Planted(G.FixedDivisor, vector_job, MICRO, Kind.MEAN_OF_MEANS, "0.weight"),
    Planted(G.NotDivided, token_job, MICRO, Kind.SCALED_BY_ACCUMULATION, "embedding.weight"),
    Planted(G.SummedOverRanks, token_job, WORLD, Kind.SCALED_BY_WORLD, "embedding.weight", in_short_run=True),
    Planted(G.DividedTwice, token_job, WORLD, Kind.SCALED_BY_WORLD, "embedding.weight"),
    Planted(G.OneTensorDoubled, token_job, WORLD, Kind.SCALED_BY_WORLD, "hidden.weight"),
    Planted(G.NotReduced, token_job, WORLD, Kind.MISSING_REDUCTION, "embedding.weight", in_short_run=True),
    Planted(G.OneTensorNotReduced, token_job, WORLD, Kind.MISSING_REDUCTION, "head.bias"),
    Planted(G.LastMicroBatchOnly, token_job, MICRO, Kind.LOST_MICRO_BATCH, "embedding.weight"),
    Planted(G.FirstMicroBatchLost, token_job, MICRO, Kind.LOST_MICRO_BATCH, "embedding.weight"),
    Planted(G.SecondUseLost, token_job, WORLD, Kind.LOST_GRADIENT, "hidden.weight"),
    Planted(G.NotCleared, token_job, WHOLE, Kind.NOT_CLEARED, "embedding.weight"),
    Planted(G.ReducedInLowPrecision, token_job, WORLD, Kind.PRECISION, "embedding.weight"),
    Planted(G.ClippedPerMicroBatch, clipped, MICRO, Kind.CLIPPING, "embedding.weight"),
    Planted(G.ClippedPerRank, clipped, WORLD, Kind.CLIPPING, "embedding.weight", detail="each rank", in_short_run=True),
    Planted(G.NormLeavesSomeOut, clipped, WORLD, Kind.CLIPPING, "embedding.weight"),
    Planted(G.NormsAveraged, clipped, WORLD, Kind.CLIPPING, "embedding.weight"),
    Planted(G.ClippedWhileScaled, clipped, WHOLE, Kind.CLIPPING, "embedding.weight"),
    Planted(G.LossDividedInLog, token_job, MICRO, Kind.REPORTED, "loss of step 1"),
    Planted(S.ScheduleByWorld, vector_job, WORLD, Kind.SCHEDULE_BY_WORLD, "learning rate of step 2", in_short_run=True),
    Planted(S.ScheduleByMicroBatch, vector_job, MICRO, Kind.SCHEDULE_BY_ACCUMULATION, "learning rate of step 2"),
    Planted(S.ScheduleAhead, vector_job, WHOLE, Kind.SCHEDULE, "learning rate of step 1"),
    Planted(S.EverythingDecays, vector_job, WHOLE, Kind.WEIGHT_DECAY, "0.bias"),
    Planted(S.MomentsLostEachEpoch, vector_job, WHOLE, Kind.MOMENTS_LOST, "0.weight"),
    Planted(S.OwnStartingWeights, vector_job, WORLD, Kind.STARTING_WEIGHTS, "0.weight"),
    Planted(S.OwnBuffers, normed, WORLD, Kind.BUFFERS, "1.running_mean"),
    Planted(S.KernelDoesNotRepeat, vector_job, REPEAT, Kind.NOT_REPEATABLE, ""),
    Planted(D.PaddedToDivide, vector_job, WORLD, Kind.DUPLICATED, "in step 1", in_short_run=True),
    Planted(D.LastDropped, vector_job, WHOLE, Kind.LOST, "of epoch 1"),
    Planted(D.SameOrderEveryEpoch, vector_job, WHOLE, Kind.DATA_ORDER, "epoch 2"),
    Planted(D.OrderByWorld, vector_job, WORLD, Kind.DATA_ORDER, "in step 1"),
    Planted(D.EveryRankTheSame, vector_job, WORLD, Kind.DUPLICATED, "in step 1"),
    Planted(D.BatchTimesWorld, vector_job, WORLD, Kind.GLOBAL_BATCH, "step 1"),
    Planted(D.OrderNotSeeded, vector_job, REPEAT, Kind.DATA_ORDER, "in step 1"),
    Planted(D.NumpySeededByWorker, noisy, REPEAT, Kind.RANDOMNESS_BY_RANK, "sample"),
    Planted(R.OptimizerNotRestored, vector_job, RESUME, Kind.STATE_NOT_SAVED, "optimizer/0.weight", in_short_run=True),
    Planted(R.ScheduleNotRestored, vector_job, RESUME, Kind.STATE_NOT_SAVED, "learning rate of step"),
    Planted(R.StepCountLost, vector_job, RESUME, Kind.STATE_NOT_SAVED, "optimizer/0.weight/step"),
    Planted(R.EpochBeginsAnew, vector_job, RESUME, Kind.DUPLICATED, "in step"),
    Planted(R.FirstEpochsOrder, short_epochs, RESUME_LATE, Kind.DATA_ORDER, "in step"),
    Planted(R.EpochSkipped, vector_job, RESUME, Kind.LOST, "in step"),
    Planted(R.GeneratorNotRestored, dropping, RESUME, Kind.RANDOMNESS_NOT_RESTORED, "loss of step"),
    Planted(R.BuffersNotSaved, normed, RESUME, Kind.STATE_NOT_SAVED, "1.running_mean"),
    Planted(
        R.SavedInPlace,
        vector_job,
        Extent(num_steps=12, divisions=False, kill_in_save=True, num_kills=2),
        Kind.STATE_NOT_SAVED,
        "kill -9",
        detail="cannot be continued",
    ),
]  # fmt: skip


def prove(loop: type[Loop], job: Job, extent: Extent) -> Certificate:
    """Prove with time enough: on a busy machine, jobs are not to be reduced."""
    if extent.budget_seconds == Extent().budget_seconds:
        extent = replace(extent, budget_seconds=600.0)

    def run(case: Case) -> nn.Module:
        return loop(case)()

    return prove_subject(job, Subject(run, loop.__name__), extent)


def test_a_batch_that_processes_share_unevenly_stays_so_where_it_is_reduced() -> None:
    planted = next(each for each in PLANTED if each.loop is D.PaddedToDivide)
    certificate = prove(planted.loop, planted.job(), replace(planted.extent, budget_seconds=1e-3))
    assert any("global batch 7 instead of 9" in note for note in certificate.notes)
    assert [verdict.kind for verdict in certificate.verdicts][:1] == [planted.kind]


def check(planted: Planted) -> None:
    certificate = prove(planted.loop, planted.job(), planted.extent)
    assert not certificate.ok, "not found"
    first = certificate.verdicts[0]
    assert first.kind == planted.kind, [str(verdict) for verdict in certificate.verdicts]
    assert planted.where in first.where, str(first)
    assert planted.detail in first.detail, str(first)
    assert first.whose in ("trainer", "unknown"), str(first)


@pytest.mark.parametrize("planted", [p for p in PLANTED if p.in_short_run], ids=lambda p: p.loop.__name__)
def test_a_planted_bug_is_found(planted: Planted) -> None:
    check(planted)


@pytest.mark.soak
@pytest.mark.parametrize("planted", [p for p in PLANTED if not p.in_short_run], ids=lambda p: p.loop.__name__)
def test_every_planted_bug_is_found(planted: Planted) -> None:
    check(planted)


def test_there_are_enough_of_them() -> None:
    assert len(PLANTED) >= 25
    assert sum("#" in (p.loop.__doc__ or "") for p in PLANTED) >= 25  # modelled on public issues


def test_the_right_loop_raises_no_alarm() -> None:
    certificate = prove(Loop, clipped(), Extent(num_steps=8, only=("micro-batches", "processes")))
    assert certificate.ok, [str(verdict) for verdict in certificate.verdicts]
    assert not certificate.verdicts


@pytest.mark.soak
@pytest.mark.parametrize("job", [vector_job, token_job, clipped, normed, dropping, short_epochs])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_right_loop_never_raises_an_alarm(job: Any, seed: int) -> None:
    certificate = prove(Loop, job(), Extent(max_world=3, num_kills=6, full=True, seed=seed))
    assert certificate.ok, [str(verdict) for verdict in certificate.verdicts]


def test_whole_batches_of_a_random_model_are_compared_with_dropout_off() -> None:
    certificate = prove(Loop, dropping(), Extent(num_steps=8, repeats=False, only=("micro-batches",)))
    assert certificate.ok
    assert certificate.facts["compared_in"] == str(torch.float64).removeprefix("torch.")
