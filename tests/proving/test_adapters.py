"""Every adapter trains whole batches as the plain loop does, and a mean of micro-batches' means is found in it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from drivetrain.core.errors import DrivetrainError
from drivetrain.proving import Case, Certificate, Extent, Kind, Subject, prove_subject
from drivetrain.proving.adapters import ADAPTERS, LoopState, accumulation_steps, find_subject, plain_subject
from tests.proving.jobs import token_job, vector_job

QUICK = Extent(num_steps=4, max_world=1, repeats=False, only=("micro-batches",))
PACKAGES = {"accelerate": "accelerate", "lightning": "lightning", "hf": "transformers", "deepspeed": "deepspeed"}
CASES = [
    pytest.param(name, marks=pytest.mark.deepspeed) if name == "deepspeed" else name
    for name in ADAPTERS
    if name != "plain"
]


def failed(certificate: Certificate, configuration: str) -> list[tuple[str, str]]:
    return [
        (check.what, check.verdict.kind if check.verdict else "")
        for check in certificate.checks
        if check.configuration.startswith(configuration) and check.status != "ok"
    ]


@pytest.mark.parametrize("name", CASES)
def test_whole_batches_are_right_and_a_mean_of_means_is_found(name: str) -> None:
    pytest.importorskip(PACKAGES[name])
    certificate = prove_subject(token_job(global_batch=8), ADAPTERS[name](), QUICK)
    assert failed(certificate, "1 process, whole batches") == []
    assert failed(certificate, "micro-batches of 2") == [("gradient", Kind.MEAN_OF_MEANS), ("weights", "")]


def test_a_mean_over_samples_in_even_micro_batches_is_right_with_accelerate() -> None:
    pytest.importorskip("accelerate")
    assert prove_subject(vector_job(global_batch=8), ADAPTERS["accelerate"](), QUICK).ok


def test_plain_loop_of_the_guides_takes_a_mean_of_means() -> None:
    certificate = prove_subject(token_job(), plain_subject(), QUICK)
    assert failed(certificate, "1 process, whole batches") == []
    assert failed(certificate, "micro-batches of 2") == [("gradient", Kind.MEAN_OF_MEANS), ("weights", "")]


def by_tokens(state: LoopState, micro_batches: Sequence[Any]) -> None:
    counts = [int((batch["batch"]["labels"] != -100).sum()) for batch in micro_batches]
    state.optimizer.zero_grad()
    for batch, tokens in zip(micro_batches, counts, strict=True):
        (state.case.loss(state.model, batch) * tokens / sum(counts)).backward()
    state.optimizer.step()
    state.scheduler.step()


def test_plain_loop_with_a_step_of_ones_own_is_right() -> None:
    assert prove_subject(token_job(), plain_subject(by_tokens, max_world=1), QUICK).ok


def with_closure(case: Case) -> None:
    """Computes gradients inside `optimizer.step(closure)`, as Lightning does."""
    model = case.model()
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer)
    for step in range(case.num_steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = case.loss(model, case.batch(case.order[step]))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        scheduler.step()


def test_gradients_that_a_closure_computes_are_seen() -> None:
    subject = Subject(with_closure, "closures", max_world=1, workers=False, micro_batches=False)
    assert prove_subject(vector_job(), subject, QUICK).ok


def test_batches_that_do_not_divide_are_rounded_with_a_note() -> None:
    pytest.importorskip("accelerate")
    extent = Extent(num_steps=2, max_world=1, repeats=False, only=("none",))
    certificate = prove_subject(token_job(global_batch=9), ADAPTERS["accelerate"](), extent)
    assert certificate.ok
    assert any("global batch 8 instead of 9" in note for note in certificate.notes)


def test_trainers_are_found_by_name() -> None:
    assert find_subject("plain").name == "plain loop"
    assert find_subject("tests.proving.test_adapters:with_closure").run is with_closure
    for wrong in ("acelerate", "no.module:run", "drivetrain:__version__"):
        with pytest.raises(DrivetrainError, match=wrong):
            find_subject(wrong)


def test_an_accumulation_that_does_not_divide_is_refused() -> None:
    case = Case("odd", token_job(), global_batch=9, micro_batch=2)
    with pytest.raises(DrivetrainError, match="global batch of 9"):
        accumulation_steps(case)
