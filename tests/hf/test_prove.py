"""`dt.prove` of jobs of `dt.hf`: an adapter on frozen weights, with several validation sets and a plateau."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import drivetrain as dt
from drivetrain.proving import Certificate, Extent, Kind
from drivetrain.strategies.ddp import DdpStrategy
from tests.hf.samples import samples
from tests.hf.test_export import adapted

CALL = DdpStrategy._call


def prove(folder: Path, extent: Extent) -> Certificate:
    job = dt.hf.job(
        adapted(),
        samples(count=30),
        name="lora",
        max_steps=100,
        global_batch=7,
        lr=0.01,
        valid={"near": samples(count=8), "far": samples(count=5)},
        valid_every=2,
        best=dt.Aim("valid_far_loss"),
        early_stopping=dt.EarlyStopping(patience=3, metric="valid_near_loss"),
        schedule=dt.OnPlateau(metric="valid_near_loss", warmup_steps=3),
    )
    config = dt.configure(parallel_strategy="ddp")
    return dt.prove(job, config=config, extent=extent, output=folder / "certificate.json", quiet=True)


def test_lora_with_validation_sets_is_proven(tmp_path: Path) -> None:
    certificate = prove(tmp_path, Extent(num_steps=5, repeats=False, only=("processes",)))
    odd = [f"{it.configuration}, {it.what}: {it.verdict or it.detail}" for it in certificate.checks]
    assert {check.status for check in certificate.checks} == {"ok"}, odd
    assert {"ranks agree", "lr", "gradient", "weights"} <= {it.what for it in certificate.checks}
    assert certificate.facts["loss"] == "weighted"  # a mean over tokens
    assert sum("plateau" in note for note in certificate.notes) == 1


def never_reduced(self: DdpStrategy, *args: Any) -> Tensor:
    with self._ddp.no_sync():
        return CALL(self, *args)


@pytest.mark.soak
def test_an_adapter_that_is_not_reduced_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DdpStrategy, "_call", never_reduced)
    certificate = prove(tmp_path, Extent(num_steps=3, repeats=False, only=("processes",)))
    assert not certificate.ok
    assert certificate.verdicts[0].kind is Kind.MISSING_REDUCTION
    assert "lora_B" in certificate.verdicts[0].where
