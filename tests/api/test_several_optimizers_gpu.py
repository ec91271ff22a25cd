"""On a GPU: several optimizers and losses in turn, captured, compiled, in low precision and on two processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drivetrain as dt
from tests.api.test_several_optimizers import Gan, records_of, state_of
from tests.gloo_pool import GlooPool
from tests.waits import refuse_waits

pytestmark = pytest.mark.gpu

NUM_STEPS = 60


def make_gan() -> nn.Module:
    torch.manual_seed(7)
    return Gan()


def samples() -> Tensor:
    return torch.randn(608, 6, generator=torch.Generator().manual_seed(3))


def loss_d(model: Any, batch: Tensor) -> Tensor:
    noise = torch.randn(len(batch), 4, device=batch.device)
    fake = model("gen", noise).detach()
    dt.log("real", model("disc", batch[:, 4:]).mean())
    real = functional.softplus(-model("disc", batch[:, 4:])).mean()
    return real + functional.softplus(model("disc", fake)).mean()


def loss_g(model: Any, batch: Tensor) -> Tensor:
    noise = torch.randn(len(batch), 4, device=batch.device)
    return functional.softplus(-model("disc", model("gen", noise))).mean()


def exploding_loss_g(model: Any, batch: Tensor) -> Tensor:
    """Finite, and its gradients overflow once they are scaled up in the first steps."""
    return loss_g(model, batch) * 1e4


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def gan_job(**changes: Any) -> dt.Job:
    given: dict[str, Any] = {
        "name": "gan",
        "model": make_gan,
        "data": samples(),
        "loss": {"d": loss_d, "g": loss_g},
        "optimizer": {
            "d": dt.Optim(adam, params="disc.*", clip_norm=1.0),
            "g": dt.Optim(adam, params="gen.*", schedule=dt.WarmupCosine(warmup_steps=5)),
        },
        "global_batch": 32,
        "max_steps": NUM_STEPS,
        "ema": 0.9,
        "checkpoint_every": 30,
    }
    return dt.Job(**(given | changes))


def trained(folder: Path, job: dt.Job, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor], str]:
    given = {"precision": "fp32", "monitor_gpu": False, "auto_optimize": False, "report": False, "resident": "off"}
    result = dt.train(job, dt.configure(output_dir=folder, gpu_mode="single_gpu", **(given | settings)), quiet=True)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    captured = [event["capture"] for event in events if "capture" in event]
    return records_of(result.folder), state_of(result.folder), str(captured[-1])


@pytest.mark.parametrize("resident", ["off", "on"])
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"compile": True}], ids=["fp32", "bf16", "compiled"])
def test_captured_turns_are_those_without_capture(tmp_path: Path, settings: dict[str, Any], resident: str) -> None:
    given = settings | {"resident": resident}
    rows, plain, _ = trained(tmp_path / "plain", gan_job(), capture="off", **given)
    again, found, words = trained(tmp_path / "captured", gan_job(), capture="on", **given)
    assert "steps replayed" in words, words
    for key, value in plain.items():
        assert torch.equal(found[key], value), key
    for row, other in zip(rows, again, strict=True):
        assert {**row, "seconds": 0, "grad_norm": 0} == {**other, "seconds": 0, "grad_norm": 0}


def test_a_captured_run_resumes_to_the_bit(tmp_path: Path) -> None:
    _, whole, _ = trained(tmp_path / "whole", gan_job(), capture="on")
    trained(tmp_path / "again", gan_job(max_steps=NUM_STEPS, hooks=[dt.every(30, stop)]), capture="on")
    _, again, words = trained(tmp_path / "again", gan_job(hooks=[dt.every(30, lambda context: None)]), capture="on")
    assert "steps replayed" in words
    assert all(torch.equal(again[key], value) for key, value in whole.items())


def stop(context: dt.StepContext) -> dt.Verdict | None:
    import os
    import signal

    if context.step == 30:
        os.kill(os.getpid(), signal.SIGINT)
    return None


def test_a_turn_whose_gradients_overflow_is_skipped_alone(tmp_path: Path) -> None:
    job = gan_job(loss={"d": loss_d, "g": exploding_loss_g}, max_steps=1, checkpoint_every=1, ema=None)
    rows, state, _ = trained(tmp_path, job, precision="fp16", capture="off")
    before = make_gan().state_dict()
    assert rows[0]["skipped"]
    assert all(torch.equal(state[f"model/{name}"].cpu(), value) for name, value in before.items() if "gen" in name)
    assert not any(torch.equal(state[f"model/{name}"].cpu(), value) for name, value in before.items() if "disc" in name)


def test_no_step_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = refuse_waits(monkeypatch)
    trained(tmp_path, gan_job(ema=None), capture="off")
    assert len(calls) > NUM_STEPS


def on_ranks(folder: str, strategy: str) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    config = dt.configure(
        output_dir=folder, backend="gloo", precision="fp32", parallel_strategy=strategy, batch_size=8, report=False
    )
    quiet = {"d": quiet_d, "g": quiet_g}
    result = dt.train(gan_job(loss=quiet, max_steps=8, ema=None, checkpoint_every=8), config, quiet=True)
    return records_of(result.folder), {key: value.cpu() for key, value in state_of(result.folder).items()}


def quiet_d(model: Any, batch: Tensor) -> Tensor:
    fake = model("gen", batch[:, :4]).detach()
    return functional.softplus(-model("disc", batch[:, 4:])).mean() + functional.softplus(model("disc", fake)).mean()


def quiet_g(model: Any, batch: Tensor) -> Tensor:
    return functional.softplus(-model("disc", model("gen", batch[:, :4]))).mean()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_on_one_gpu(gloo_pool: GlooPool, tmp_path: Path, strategy: str) -> None:
    rows, state = gloo_pool.run(on_ranks, str(tmp_path / "two"), strategy, world=2)[0]
    job = gan_job(loss={"d": quiet_d, "g": quiet_g}, max_steps=8, ema=None, checkpoint_every=8)
    alone, whole, _ = trained(tmp_path / "one", job, capture="off")
    for row, other in zip(rows, alone, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
    for key, value in whole.items():
        torch.testing.assert_close(state[key], value.cpu(), rtol=1e-4, atol=1e-5)
