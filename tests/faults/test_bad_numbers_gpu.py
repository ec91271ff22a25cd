"""Bad numbers on a GPU: a fused optimizer skips on the device, others go back; both come to the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import drivetrain as dt
from drivetrain.data.division import SampleStream
from drivetrain.strategies.base import BadStepGate
from tests.api.jobs import Variant, Vectors, run
from tests.faults.events import events
from tests.waits import refuse_waits

pytestmark = pytest.mark.gpu
VARIANT = Variant(dtype=torch.float32, steps=14, save_every=4, num_samples=640)
BAD = 7
SETTINGS = {"auto_optimize": False, "precision": "fp32"}


def poisoned() -> Vectors:
    """Data of which one sample of step 7 is not finite."""
    data = Vectors(VARIANT)
    (sample,) = SampleStream(VARIANT.num_samples, VARIANT.seed).samples(0, (BAD - 1) * 32, (BAD - 1) * 32 + 1).tolist()
    data.inputs[sample] = torch.inf
    return data


def trained(folder: Path, *, fused: bool, capture: str = "off") -> Any:
    return run(
        str(folder),
        VARIANT,
        gpu_mode="auto",
        settings={**SETTINGS, "capture": capture, "resident": "on" if capture == "on" else "off"},
        data=poisoned(),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=fused),
    )


@pytest.mark.parametrize("capture", ["off", "on"])
def test_a_fused_optimizer_skips_without_going_back(tmp_path: Path, capture: str) -> None:
    found = trained(tmp_path, fused=True, capture=capture)
    assert found.resumed_from == 0
    assert [row["step"] for row in found.rows if row["skipped"]] == [BAD]
    (told,) = events(tmp_path / "suite", "bad step")
    assert told["skipped"]
    assert all(np.isfinite(value).all() for value in found.weights.values())


@pytest.mark.parametrize("capture", ["off", "on"])
def test_another_optimizer_goes_back_and_comes_to_the_same(tmp_path: Path, capture: str) -> None:
    found = trained(tmp_path / "back", fused=False, capture=capture)
    assert found.resumed_from == 4
    assert [row["step"] for row in found.rows if row["skipped"]] == [BAD]
    skipped = trained(tmp_path / "skipped", fused=True)
    for name, value in skipped.weights.items():
        np.testing.assert_allclose(found.weights[name], value, rtol=1e-5, atol=1e-6)


def test_the_host_does_not_wait_for_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = refuse_waits(monkeypatch)
    run(
        str(tmp_path),
        VARIANT,
        gpu_mode="auto",
        settings={**SETTINGS, "capture": "off", "resident": "off"},
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    )
    assert calls


def test_the_gate_takes_two_kernels() -> None:
    """It is part of every step: of a small one that is captured, each kernel is a hundredth."""
    weight = torch.zeros(4, device="cuda", requires_grad=True)
    optimizer, gate = torch.optim.AdamW([weight], fused=True), BadStepGate()
    gate.is_on = True
    for bad in (False, True):
        loss = torch.full((), torch.inf if bad else 1.0, device="cuda")
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            flag = gate.closes(optimizer, [loss])
            torch.cuda.synchronize()
        kernels = [
            event.name for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        assert 0 < len(kernels) <= 2, kernels
        assert isinstance(flag, torch.Tensor)
        assert flag.item() == float(bad)


@pytest.mark.parametrize("capture", ["off", "on"])
def test_all_of_several_optimizers_skip(tmp_path: Path, capture: str) -> None:
    """Two that follow one loss, against one for all: the same weights, though one batch is bad."""

    def fused(groups: Any) -> Any:
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    both = {"first": dt.Optim(fused, params="layers.0.*"), "rest": dt.Optim(fused)}
    found = {}
    for name, optimizer in {"one": fused, "two": both}.items():
        found[name] = run(
            str(tmp_path / name),
            VARIANT,
            gpu_mode="auto",
            settings={**SETTINGS, "capture": capture, "resident": "off"},
            data=poisoned(),
            optimizer=optimizer,
            clip_norm=None,
        )
        assert [row["step"] for row in found[name].rows if row["skipped"]] == [BAD]
    for name, value in found["one"].weights.items():
        np.testing.assert_allclose(found["two"].weights[name], value, rtol=1e-4, atol=1e-6)
