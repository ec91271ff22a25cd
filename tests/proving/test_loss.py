"""Jobs whose loss has named parts: trained right they are proven, and planted bugs are found and classed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drivetrain as dt
from drivetrain import Job, LossSum
from drivetrain.config import configure
from drivetrain.proving import Case, Certificate, Extent, Kind, Subject, prove_subject
from drivetrain.proving.loss import KeyedDraws, dropout_off, turn_dropout_off
from drivetrain.proving.reference import train as plain_train
from drivetrain.proving.reference import undivided
from tests.api.test_loss_parts import (
    WEIGHTS,
    count,
    loss_of_means,
    loss_of_routed,
    loss_of_sums,
    make_job,
    per_sample,
    sums,
)
from tests.proving.loops import Loop
from tests.proving.planted_resume import OptimizerNotRestored

MICRO = Extent(num_steps=4, repeats=False, only=("micro-batches",))
WORLD = Extent(num_steps=4, repeats=False, only=("processes",))
RESUME = Extent(num_steps=6, divisions=False)


def ramp(step: int) -> float:
    return 0.1 + 0.2 * step


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def parts_job(**changes: Any) -> Job:
    return make_job(**{"optimizer": adam, "max_steps": 100, "loss_weights": WEIGHTS | {"findings": ramp}, **changes})


class PartsLoop(Loop):
    """Weights each part of a micro-batch by its share of what that part counts in the whole step."""

    def train_step(self) -> None:
        self.clear()
        total = 0.0
        for numbers in self.micro_batches():
            if not numbers:
                continue
            _, batch = next(self.loaded)
            for name, mean in self.case.loss(self.model, batch).items():
                share = self.share(name, batch, numbers)
                if not share:
                    continue
                value = (mean.total / mean.count if isinstance(mean, LossSum) else mean) * share * self.factor(name)
                self.backward(value)
                total += float(value.detach())
        self.reduce()
        self.report(total, self.clip())
        self.update()

    def factor(self, name: str) -> float:
        weight = (self.case.job.loss_weights or {}).get(name, 1.0)
        return weight(self.step) if callable(weight) else weight

    def share(self, name: str, batch: Any, numbers: tuple[int, ...]) -> float:
        counter, everything = self.case.job.count, self.case.order[self.step]
        counts = {} if counter is None else counter(batch["batch"])
        if counter is None or name not in counts:
            return len(numbers) / len(everything)
        return float(counts[name]) / float(counter(self.case.batch(everything)["batch"])[name])

    def backward(self, value: Tensor) -> None:
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]


class AnswersByMeanOfMeans(PartsLoop):
    """One part counts every micro-batch alike, however many answers are in it."""

    def share(self, name: str, batch: Any, numbers: tuple[int, ...]) -> float:
        if name != "answer" or not int(count(batch["batch"])["answer"]):
            return super().share(name, batch, numbers)
        return 1 / len(self.micro_batches()) / self.world


class EveryPartBySamples(PartsLoop):
    """All parts are weighted by samples, as if none had a count of its own."""

    def share(self, name: str, batch: Any, numbers: tuple[int, ...]) -> float:
        known = count(batch["batch"])
        if name in known and not int(known[name]):
            return 0.0
        return len(numbers) / len(self.case.order[self.step])


class RanksHaveTheirOwnCounts(PartsLoop):
    """The counts are not reduced: every rank divides by its own, and the ranks are averaged."""

    def share(self, name: str, batch: Any, numbers: tuple[int, ...]) -> float:
        own = [number for micro_batch in self.micro_batches() for number in micro_batch]
        known, every = count(batch["batch"]), count(self.case.batch(own)["batch"])
        if name in known:
            return float(known[name]) / float(every[name]) / self.world
        return len(numbers) / len(own) / self.world


class PartLost(PartsLoop):
    """One part is recorded and never trained."""

    def share(self, name: str, batch: Any, numbers: tuple[int, ...]) -> float:
        return 0.0 if name == "size" else super().share(name, batch, numbers)


class WeightsIgnored(PartsLoop):
    """Weights that are numbers are not applied."""

    def factor(self, name: str) -> float:
        return 1.0 if name == "size" else super().factor(name)


class StateNotSaved(PartsLoop, OptimizerNotRestored):
    """The checkpoint lacks the optimizer's state."""


def prove_loop(loop: type[Loop], job: Job, extent: Extent) -> Certificate:
    return prove_subject(job, Subject(lambda case: loop(case)(), loop.__name__), extent)


def assert_clean(certificate: Certificate) -> None:
    odd = [f"{check.configuration}, {check.what}: {check.verdict}" for check in certificate.checks]
    assert {check.status for check in certificate.checks} - {"skipped"} == {"ok"}, odd


def test_the_reference_is_the_undivided_batch_of_the_definitions() -> None:
    """The plain loop of the prover against one that computes every part from its definition."""
    job = parts_job()
    order = tuple(tuple(range(start, start + 10)) for start in (0, 10, 20, 30))
    case = Case("reference", job, num_steps=4, global_batch=10, micro_batch=10, num_samples=40, order=order)
    found = plain_train(case, undivided(order))
    torch.manual_seed(case.seed)
    model = job.model().double()
    optimizer = adam(model.parameters())
    for step, numbers in enumerate(order):
        batch = {name: column[list(numbers)] for name, column in job.data.items()}
        total = torch.zeros((), dtype=torch.float64)
        for name, (value, number) in sums(model, batch).items():
            weight: Any = job.loss_weights[name]
            total = total + (weight(step) if callable(weight) else weight) * value / number
        assert found.losses[step] == pytest.approx(total.item(), rel=1e-12)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-10, atol=1e-12)


def proven(job: Job, folder: Path, extent: Extent, **values: Any) -> Certificate:
    config = configure(**values)
    return dt.prove(job, None, config, extent=extent, output=folder / "certificate.json", quiet=True)


def test_masked_parts_are_proven_through_micro_batches_processes_and_kills(tmp_path: Path) -> None:
    extent = Extent(num_steps=6, only=("micro-batches", "processes"))
    certificate = proven(parts_job(clip_norm=1.0), tmp_path, extent, parallel_strategy="ddp")
    assert_clean(certificate)
    assert certificate.facts["loss"] == "parts"
    assert certificate.facts["parts"] == {"answer": "counted", "findings": "counted", "size": "samples"}
    configurations = " ".join(check.configuration for check in certificate.checks)
    assert "micro-batches of" in configurations
    assert "2 processes, ddp" in configurations
    assert "kill -9" in configurations
    assert "as it is" in configurations


def without_count(**changes: Any) -> Job:
    return parts_job(loss=per_sample, loss_weights=None, count=None, **changes)


def routed(**changes: Any) -> Job:
    return parts_job(loss=loss_of_routed, **changes)


def test_parts_that_are_divided_by_samples_are_proven(tmp_path: Path) -> None:
    assert_clean(proven(without_count(), tmp_path, MICRO))


def test_parts_that_batches_leave_out_are_proven(tmp_path: Path) -> None:
    assert_clean(proven(routed(), tmp_path, WORLD, parallel_strategy="ddp", find_unused_parameters=True))


def test_sums_without_a_count_are_proven_in_whole_batches(tmp_path: Path) -> None:
    certificate = proven(parts_job(loss=loss_of_sums, count=None), tmp_path, MICRO)
    assert_clean(certificate)
    assert any("'answer'" in note and "Job.count" in note for note in certificate.notes), certificate.notes


def test_a_part_that_lacks_its_count_is_the_jobs_own(tmp_path: Path) -> None:
    certificate = proven(parts_job(count=lambda batch: {"answer": count(batch)["answer"]}), tmp_path, MICRO)
    assert certificate.ok, [str(verdict) for verdict in certificate.verdicts]
    (verdict, *_) = certificate.verdicts
    assert (verdict.kind, verdict.whose) == (Kind.MEAN_OF_MEANS, "job"), str(verdict)
    assert "'findings'" in verdict.detail
    assert "Job.count" in verdict.detail


@pytest.mark.parametrize(
    ("loop", "extent", "kind", "words"),
    [
        (AnswersByMeanOfMeans, MICRO, Kind.MEAN_OF_MEANS, "'answer'"),
        pytest.param(EveryPartBySamples, MICRO, Kind.MEAN_OF_MEANS, "by their samples", marks=pytest.mark.soak),
        pytest.param(RanksHaveTheirOwnCounts, WORLD, Kind.MEAN_OF_MEANS, "every rank", marks=pytest.mark.soak),
        (PartLost, MICRO, Kind.LOST_GRADIENT, "'size'"),
        pytest.param(WeightsIgnored, MICRO, Kind.WRONG_WEIGHTS, "'size' counts 0.5", marks=pytest.mark.soak),
        (StateNotSaved, RESUME, Kind.STATE_NOT_SAVED, "optimizer"),
    ],
)
def test_planted_bugs_are_found(loop: type[Loop], extent: Extent, kind: Kind, words: str) -> None:
    certificate = prove_loop(loop, parts_job(), extent)
    assert not certificate.ok, "not found"
    first = certificate.verdicts[0]
    assert first.kind == kind, [str(verdict) for verdict in certificate.verdicts]
    assert words in str(first), str(first)


@pytest.mark.soak
@pytest.mark.parametrize("job", [parts_job, without_count, routed])
def test_the_right_loop_raises_no_alarm(job: Any) -> None:
    # Without momentum and decay: this loop gives heads that nothing uses a gradient of zero, and they would move.
    made = job(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    assert_clean(prove_loop(PartsLoop, made, Extent(num_steps=8, max_world=3, num_kills=3, full=True)))


@pytest.mark.soak
def test_a_tutorial_loop_takes_means_of_means() -> None:
    from drivetrain.proving.adapters import plain_subject

    first = prove_subject(parts_job(), plain_subject(), MICRO).verdicts[0]
    assert (first.kind, first.whose) == (Kind.MEAN_OF_MEANS, "trainer"), str(first)


@pytest.mark.soak
@pytest.mark.parametrize("loss", [loss_of_means, loss_of_sums])
def test_every_configuration_is_proven(loss: Any, tmp_path: Path) -> None:
    extent = Extent(num_steps=12, max_world=3, num_kills=3, full=True, time_limit_seconds=600.0)
    assert_clean(proven(parts_job(loss=loss), tmp_path, extent))


def test_a_scalar_is_at_hand_for_trainers_that_know_no_parts(tmp_path: Path) -> None:
    job = parts_job()

    def run(case: Case) -> Any:
        model = case.model()
        optimizer = case.optimizer(model)
        for step in range(case.num_steps):
            optimizer.zero_grad()
            assert isinstance(case.loss(model, case.batch(case.order[step]), is_training=False), Mapping)
            case.scalar_loss(model, case.batch(case.order[step]), step).backward()
            optimizer.step()
        return model

    extent = Extent(num_steps=4, max_world=1, repeats=False, only=("none",))
    assert_clean(dt.prove(job, run, extent=extent, output=tmp_path / "c.json", quiet=True))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "rand": lambda inputs: torch.rand(len(inputs), 3),
    "randn": lambda inputs: torch.randn(len(inputs), 2, 5),
    "randint": lambda inputs: torch.randint(0, 50, (len(inputs), 4)),
    "normal_": lambda inputs: torch.empty_like(inputs).normal_(),
    "bernoulli": lambda inputs: torch.bernoulli(inputs.sigmoid()),
    "several rows": lambda inputs: torch.rand(len(inputs) * 2, 3).view(len(inputs), -1),
    "gumbel": lambda inputs: functional.gumbel_softmax(inputs),
}


@pytest.mark.parametrize("name", DRAWS)
def test_parts_draw_what_the_whole_batch_draws(name: str) -> None:
    inputs, numbers = torch.linspace(-1, 1, 28).view(7, 4), [5, 0, 9, 3, 2, 8, 1]

    def drawn(places: list[int]) -> Tensor:
        with KeyedDraws([numbers[place] for place in places], 3):
            return DRAWS[name](inputs[places])

    whole = drawn(list(range(7)))
    assert torch.equal(torch.cat([drawn([0, 1]), drawn([2]), drawn([3, 4, 5, 6])]), whole)
    assert torch.equal(drawn([6, 0]), whole[[6, 0]])
    assert len(whole.reshape(7, -1).unique(dim=0)) == 7


def test_a_draw_for_the_whole_batch_is_the_same_in_every_part() -> None:
    values = []
    for numbers in ([1, 2, 3], [1], [2, 3]):
        with KeyedDraws(numbers, 0):
            values.append(float(torch.rand(())))
    assert len(set(values)) == 1


def test_dropout_is_off_in_modules_functions_and_attention() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.5, batch_first=True)
    lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5)
    inputs = torch.randn(2, 3, 8)
    for model in (layer, lstm):
        turn_dropout_off(model)
    with dropout_off():
        assert torch.equal(layer(inputs), layer(inputs))
        assert torch.equal(lstm(inputs)[0], lstm(inputs)[0])
        assert torch.equal(functional.dropout(inputs, 0.5, True), inputs)
        first, second = (functional.scaled_dot_product_attention(inputs, inputs, inputs, None, 0.5) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(functional.dropout(inputs, 0.5, True), inputs)
