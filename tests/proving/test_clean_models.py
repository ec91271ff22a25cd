"""Models of every kind, trained right: 0 false alarms."""

from pathlib import Path

import pytest
import torch
from torch import nn

import drivetrain as dt
from drivetrain.proving import Case, Certificate, Extent, Subject, prove_subject
from drivetrain.proving.compare import errors
from tests.proving.loops import Loop
from tests.proving.models import ARCHITECTURES, OWN, transformer

SHORT = ("mlp-tanh", "cnn-batch-norm", "cnn-batch-norm-sum", "lstm", "vae", "routed")
COUPLED = {"cnn-batch-norm", "cnn-batch-norm-sum"}
BY_DRIVETRAIN = {"routed", "cnn-batch-norm-sum"}  # a trainer that knows what it trains: experts' loads, and sums


def assert_clean(certificate: Certificate, name: str) -> None:
    failures = [f"{check.configuration}, {check.what}: {check.detail}" for check in certificate.checks]
    assert certificate.ok, [str(verdict) for verdict in certificate.verdicts] + failures
    allowed = {"job"} if name in COUPLED else set()
    assert {verdict.whose for verdict in certificate.verdicts} <= allowed, [str(v) for v in certificate.verdicts]
    statuses = {check.status for check in certificate.checks}
    assert statuses <= {"ok", "skipped"} | allowed, certificate.checks


@pytest.mark.parametrize("name", SHORT)
def test_a_clean_model_raises_no_alarm(name: str, tmp_path: Path) -> None:
    job = OWN[name]()

    def run(case: Case) -> nn.Module:
        return Loop(case)()

    if name in BY_DRIVETRAIN:
        extent = Extent(num_steps=6, repeats=False, only=("micro-batches",))
        certificate = dt.prove(job, extent=extent, output=tmp_path / "certificate.json", quiet=True)
    else:
        extent = Extent(num_steps=6, repeats=False, only=("micro-batches", "processes"))
        certificate = prove_subject(job, Subject(run), extent)
    assert_clean(certificate, name)


def test_complex_weights_are_proven(tmp_path: Path) -> None:
    """In float64, clipped, and sharded: their two parts count alike."""
    extent = Extent(num_steps=6, repeats=False, only=("micro-batches", "processes"))
    certificate = dt.prove(OWN["fourier"](), extent=extent, output=tmp_path / "certificate.json", quiet=True)
    assert_clean(certificate, "fourier")
    assert certificate.facts["compared_in"] == "float64"
    right = {"w": torch.ones(2, dtype=torch.complex64)}
    assert errors({"w": right["w"] + 0.5j}, right) == {"w": 0.5}


@pytest.mark.soak
@pytest.mark.parametrize("name", OWN)
def test_no_model_of_our_own_raises_an_alarm(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("certificate") / "certificate.json"
    assert_clean(dt.prove(OWN[name](), output=path, quiet=True), name)


@pytest.mark.soak
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_transformer_raises_an_alarm(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("certificate") / "certificate.json"
    assert_clean(dt.prove(transformer(name), output=path, quiet=True), name)


def test_there_are_enough_of_them() -> None:
    assert len(OWN) + len(ARCHITECTURES) >= 40
