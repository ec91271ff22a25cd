"""Jobs with torch schedulers, plateaus, several optimizers and several losses: proven, and with bugs planted."""

from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

import drivetrain as dt
from drivetrain import Job
from drivetrain.loop.stepper import Stepper
from drivetrain.proving import Case, Certificate, Extent, Kind, Subject, prove_subject
from drivetrain.proving.adapters import plain_subject
from drivetrain.strategies.base import StrategyParts
from drivetrain.strategies.ddp import DdpStrategy
from drivetrain.strategies.turns import TurnsStrategy
from tests.api.test_several_optimizers import Gan, adam, loss_d, noisy_loss_g, samples
from tests.proving.jobs import vector_job, vectors
from tests.proving.loops import Loop
from tests.proving.planted_schedules import ScheduleAhead, ScheduleByWorld

WHOLE = Extent(num_steps=6, max_world=1, repeats=False, only=("none",))
MICRO = Extent(num_steps=6, max_world=1, repeats=False, only=("micro-batches",))
WORLD = Extent(num_steps=6, repeats=False, only=("processes",))
RESUME = Extent(num_steps=8, max_world=1, divisions=False)


def prove(job: Job, folder: Path, extent: Extent, **settings: Any) -> Certificate:
    config = dt.configure(**settings)
    return dt.prove(job, config=config, extent=extent, output=folder / "certificate.json", quiet=True)


def assert_clean(certificate: Certificate, whats: Set[str] = frozenset()) -> None:
    odd = [f"{it.configuration}, {it.what}: {it.status} {it.verdict or it.detail}" for it in certificate.checks]
    assert {check.status for check in certificate.checks} - {"skipped"} == {"ok"}, odd
    assert whats <= {check.what for check in certificate.checks}, odd
    assert max(check.error or 0.0 for check in certificate.checks) < 1e-9


def kinds_of(certificate: Certificate) -> list[Kind]:
    assert not certificate.ok
    return [verdict.kind for verdict in certificate.verdicts]


# Schedules


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=200, pct_start=0.02)


def stairs(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 2, gamma=0.5)


def test_a_torch_scheduler_is_proven(tmp_path: Path) -> None:
    """It cycles the betas, too: without them the weights would differ."""
    certificate = prove(vector_job(schedule=one_cycle), tmp_path, replace(MICRO, repeats=True))
    assert_clean(certificate, whats={"lr", "weights", "resumes"})


@pytest.mark.parametrize(
    ("loop", "extent", "kind"),
    [(ScheduleByWorld, WORLD, Kind.SCHEDULE_BY_WORLD), (ScheduleAhead, WHOLE, Kind.SCHEDULE)],
)
def test_a_torch_scheduler_that_counts_something_else_is_found(loop: type[Loop], extent: Extent, kind: Kind) -> None:
    subject = Subject(lambda case: loop(case)(), loop.__name__)
    assert kinds_of(prove_subject(vector_job(schedule=stairs), subject, extent))[0] is kind


@pytest.mark.parametrize("schedule", [dt.OnPlateau(warmup_steps=4), ReduceLROnPlateau], ids=["ours", "torch's"])
def test_a_plateau_is_proven_with_a_constant_rate(tmp_path: Path, schedule: Any) -> None:
    job = vector_job(schedule=schedule, valid={"near": vectors(20), "far": vectors(12)}, valid_every=2)
    if isinstance(schedule, dt.OnPlateau):
        job = replace(job, schedule=replace(schedule, metric="valid_near_loss"))
    certificate = prove(job, tmp_path, WHOLE)
    assert_clean(certificate, whats={"lr"})
    assert sum("plateau" in note.lower() for note in certificate.notes) == 1


def test_a_wrong_warm_up_to_a_plateau_is_found() -> None:
    job = vector_job(schedule=dt.OnPlateau(warmup_steps=4), valid=vectors(20))
    subject = Subject(lambda case: ScheduleAhead(case)(), "ahead")
    assert kinds_of(prove_subject(job, subject, WHOLE))[0] is Kind.SCHEDULE


# Several optimizers of one loss


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def two_kinds(**changes: Any) -> Job:
    optimizers = {
        "matrices": dt.Optim(sgd, params=lambda name, it: it.dim() == 2, clip_norm=0.2, weight_decay=0.1),
        "rest": dt.Optim(adam(1e-2), clip_norm=0.1, schedule=stairs),
    }
    return vector_job(optimizer=optimizers, weight_decay=None, **changes)


def test_several_optimizers_of_one_loss_are_proven(tmp_path: Path) -> None:
    certificate = prove(two_kinds(), tmp_path, Extent(num_steps=7, only=("processes",)))
    assert_clean(certificate, whats={"lr", "clip norm", "gradient", "weights", "repeats", "resumes"})


def clipped_together(self: StrategyParts, together: Any) -> Tensor:
    """Clip the gradients of all optimizers by the norm of all of them."""
    return nn.utils.clip_grad_norm_(self.trained, self.clips[0].most or 1.0)


def rates_of_the_first(self: Any, step: int, num_steps: int | None) -> float:
    """Set the rate of every optimizer by the schedule of the first."""
    first = next(iter(self._rates.values()))
    rate: float = first.set(step, num_steps)
    return rate


def test_optimizers_that_are_mixed_up_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrategyParts, "_clip_each", clipped_together)
    assert Kind.CLIPPING in kinds_of(prove(two_kinds(), tmp_path, WHOLE))
    monkeypatch.undo()
    monkeypatch.setattr("drivetrain.loop.schedule.JointRates.set", rates_of_the_first)
    assert Kind.SCHEDULE in kinds_of(prove(two_kinds(), tmp_path, WHOLE))


# Several losses in turn

DISC = dt.Optim(adam(1e-2), params="disc.*", loss="d", clip_norm=0.3)
GEN = dt.Optim(adam(2e-2), params="gen.*", loss="g", schedule=dt.WarmupCosine(warmup_steps=3))


def gan(**changes: Any) -> Job:
    given: dict[str, Any] = {
        "name": "gan",
        "model": Gan,
        "data": samples().float(),
        "loss": {"d": loss_d, "g": noisy_loss_g},
        "optimizer": {"d": DISC, "g": replace(GEN, every=2)},
        "global_batch": 9,
        "max_steps": 200,
    }
    return Job(**(given | changes))


def test_losses_in_turn_are_proven(tmp_path: Path) -> None:
    certificate = prove(gan(), tmp_path, Extent(num_steps=7, only=("processes",)))
    assert_clean(certificate, whats={"turns", "loss of 'd'", "loss of 'g'", "lr", "gradient", "weights", "resumes"})
    assert any("fsdp" in check.configuration for check in certificate.checks)


def three_optimizers() -> Job:
    """Two of them follow the loss of the generator."""
    optimizers = {
        "d": replace(DISC, schedule=stairs),
        "g": replace(GEN, params="gen.0.*", weight_decay=0.1),
        "last": dt.Optim(sgd, loss="g", clip_norm=0.1),
    }
    return gan(optimizer=optimizers)


@pytest.mark.soak
@pytest.mark.parametrize("job", [two_kinds, gan, three_optimizers])
def test_one_to_three_processes_and_six_kills(tmp_path: Path, job: Callable[[], Job]) -> None:
    assert_clean(dt.prove(job(), full=True, output=tmp_path / "certificate.json", quiet=True))


def every_turn(self: TurnsStrategy, step: int) -> list[int]:
    """Take all turns in every step."""
    return list(range(len(self.turns)))


def stale_weights(self: Stepper, strategy: TurnsStrategy, place: Any, micro_batches: Any, stop: bool) -> Any:
    """Compute the gradients of every turn with the weights that the step began with."""
    parameters = strategy._all
    before = [parameter.detach().clone() for parameter in parameters]
    for turn in strategy.due(place.step):
        with strategy.taking(turn, stop):
            now = [parameter.detach().clone() for parameter in parameters]
            put(parameters, before)
            for micro in micro_batches:
                self.forward_backward(self.begin(place, micro, turn), place, micro)
            put(parameters, now)
    return self.end(stop)


def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def one_not_reduced(self: DdpStrategy, *args: Any) -> Tensor:
    """Leave out the all-reduce of the generator's turn, as DDP does that was made while its parameters were frozen."""
    is_generator = self._parts.optimizer.param_groups[0]["initial_lr"] == 2e-2
    with self._ddp.no_sync() if is_generator else nullcontext():
        return CALL(self, *args)


def one_not_restored(self: TurnsStrategy, source: Any) -> None:
    """Forget the state of the second turn's optimizer."""
    LOAD(self, source)
    optimizer = self._given[1].parts.optimizer
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        del optimizer.state[parameter]


CALL, LOAD = DdpStrategy._call, TurnsStrategy.load
PLANTED: dict[str, tuple[Any, str, Callable[..., Any], Extent, Kind, str]] = {
    "every": (TurnsStrategy, "due", every_turn, WHOLE, Kind.TURNS, "step 3, turn 'd'"),
    "stale": (Stepper, "_run_turns", stale_weights, WHOLE, Kind.STALE, "gen.0.weight"),
    "not restored": (TurnsStrategy, "load", one_not_restored, RESUME, Kind.STATE_NOT_SAVED, "optimizer/gen.0.weight"),
    "not reduced": (DdpStrategy, "_call", one_not_reduced, WORLD, Kind.MISSING_REDUCTION, "gen.0.weight"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_turns_that_go_wrong_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, bug, extent, kind, where = PLANTED[name]
    monkeypatch.setattr(owner, attribute, bug)
    certificate = prove(gan(), tmp_path, extent, parallel_strategy="ddp")
    assert kinds_of(certificate)[0] is kind
    assert where in certificate.verdicts[0].where


# Other trainers


def by_hand(case: Case, *, clears: bool = True) -> nn.Module:
    """Train on one process with what a case offers; `clears`: whether gradients are cleared before each turn."""
    model = case.model()
    optimizers = case.optimizers(model)
    schedulers = [case.scheduler(optimizer, name) for name, optimizer in optimizers.items()]
    for step in range(case.num_steps):
        for turn in case.due(step):
            if clears:
                model.zero_grad()
            for numbers in case.micro_batches(step):
                loss = case.loss(model, case.batch(numbers), turn=turn.name)
                (loss * len(numbers) / len(case.order[step])).backward()
            for name in turn.optimizers:
                held = [parameter for group in optimizers[name].param_groups for parameter in group["params"]]
                nn.utils.clip_grad_norm_(held, case.clip_norms[name] or torch.inf)
            with case.recorder.one_step():
                for name in turn.optimizers:
                    optimizers[name].step()
        for scheduler in schedulers:
            scheduler.step()
    return model


def test_a_loop_by_hand_is_proven_and_its_bug_found() -> None:
    """The generator's turn leaves gradients on the discriminator, which its own turn clears, or not."""
    assert_clean(prove_subject(three_optimizers(), Subject(by_hand, "by hand", resumes=False), MICRO))
    subject = Subject(lambda case: by_hand(case, clears=False), "by hand", resumes=False)
    assert not prove_subject(three_optimizers(), subject, MICRO).ok


def test_trainers_with_one_optimizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match="driven with one"):
        dt.prove(gan(), plain_subject(), output=tmp_path / "certificate.json", quiet=True)
