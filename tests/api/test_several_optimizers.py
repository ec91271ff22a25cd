"""Several optimizers in one job, and several losses in turn: against a plain loop in float64, and through resume."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drivetrain as dt
from tests.core.test_muon import PlainMuon
from tests.gloo_pool import GlooPool

NUM_STEPS, GLOBAL_BATCH = 6, 14
WIDTH = 6


class Gan(nn.Module):
    """A generator and a discriminator. The loss calls one or the other through `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
        self.disc = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, which: str, inputs: Tensor) -> Tensor:
        made: Tensor = self.gen(inputs) if which == "gen" else self.disc(inputs)
        return made


def make_gan() -> nn.Module:
    torch.manual_seed(7)
    return Gan().double()


def make_layers() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()


def samples() -> Tensor:
    return torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def loss_d(model: Any, batch: Tensor) -> Tensor:
    fake = model("gen", batch[:, :4]).detach()
    real = functional.softplus(-model("disc", batch[:, 4:])).mean()
    return real + functional.softplus(model("disc", fake)).mean()


def loss_g(model: Any, batch: Tensor) -> Tensor:
    return functional.softplus(-model("disc", model("gen", batch[:, :4]))).mean()


def counted_loss_g(model: Any, batch: Tensor) -> dt.LossSum:
    """The same over some of the samples, counted."""
    kept = (batch[:, 0] > -0.5).to(batch)
    values = functional.softplus(-model("disc", model("gen", batch[:, :4]))).squeeze(1)
    return dt.LossSum((values * kept).sum(), kept.sum())


def noisy_loss_g(model: Any, batch: Tensor) -> Tensor:
    noise = torch.randn(len(batch), 4, dtype=batch.dtype, device=batch.device)
    return functional.softplus(-model("disc", model("gen", noise))).mean()


def regression(model: Any, batch: Tensor) -> Tensor:
    return (model(batch[:, :4]) - batch[:, 4:]).square().mean()


def adam(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.Adam(params, lr=rate)


DISC = dt.Optim(adam(1e-2), params="disc.*", loss="d", clip_norm=0.3)
GEN = dt.Optim(adam(2e-2), params="gen.*", loss="g", schedule=dt.WarmupCosine(warmup_steps=3))


def gan_job(folder: str, **changes: Any) -> dt.Job:
    given: dict[str, Any] = {
        "name": "gan",
        "model": make_gan,
        "data": samples(),
        "loss": {"d": loss_d, "g": loss_g},
        "optimizer": {"d": DISC, "g": GEN},
        "global_batch": GLOBAL_BATCH,
        "max_steps": NUM_STEPS,
        "shuffle": False,
    }
    return dt.Job(**(given | changes))


def two_kinds_job(folder: str, **changes: Any) -> dt.Job:
    """One loss: Muon for the matrices, AdamW for the rest."""
    given: dict[str, Any] = {
        "name": "kinds",
        "model": make_layers,
        "data": samples(),
        "loss": regression,
        "optimizer": {
            "matrices": dt.Optim(muon, params=lambda name, it: it.dim() == 2, clip_norm=0.2),
            "rest": dt.Optim(adam(1e-2), clip_norm=0.1, schedule=dt.StepDecay(4)),
        },
        "global_batch": GLOBAL_BATCH,
        "max_steps": NUM_STEPS,
        "shuffle": False,
    }
    return dt.Job(**(given | changes))


def make_deep_layers() -> nn.Module:
    """Matrices of 6, 5 and 2 rows: three ranks have unequal parts of them, and of the last one of them nothing."""
    torch.manual_seed(7)
    layers = nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 2)
    return nn.Sequential(*layers).double()


def muon_job(folder: str, **changes: Any) -> dt.Job:
    given = {"optimizer": dt.muon_with_adamw(0.02, 1e-2, dtype="fp32"), "clip_norm": 0.2, "model": make_deep_layers}
    return two_kinds_job(folder, **(given | changes))


def plain_muon() -> tuple[list[float], dict[str, Tensor]]:
    model = make_deep_layers()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    optimizers: list[Any] = [PlainMuon(matrices, 0.02), torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.0)]
    losses = []
    for batch in batches():
        loss = regression(model, batch)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(matrices, 0.2)
        nn.utils.clip_grad_norm_(rest, 0.2)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


JOBS = {
    "gan": lambda folder: gan_job(folder),
    "gan, counted": lambda folder: gan_job(folder, loss={"d": loss_d, "g": counted_loss_g}),
    "gan, every 2": lambda folder: gan_job(folder, optimizer={"d": DISC, "g": replace(GEN, every=2)}),
    "two kinds": lambda folder: two_kinds_job(folder),
    "muon": lambda folder: muon_job(folder),
}


def train(
    folder: str, name: str, micro_batch: int, strategy: str | None = None, **settings: Any
) -> tuple[list[Any], Any]:
    """Return the records of the run, and the weights and optimizer state of its last checkpoint."""
    job = JOBS[name](folder)
    given = {"output_dir": folder, "batch_size": micro_batch, "gpu_mode": "cpu", "num_workers": 0, **settings}
    if strategy:
        given["parallel_strategy"], _, copies = strategy.partition(", ")
        given |= {"fsdp_replicas": int(copies.split()[0])} if copies else {}
    result = dt.train(job, dt.configure(**given), quiet=True)
    return records_of(result.folder), state_of(result.folder)


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def state_of(folder: Path) -> dict[str, Tensor]:
    from drivetrain.checkpoint import Checkpointer
    from drivetrain.core.world import World

    checkpoint = Checkpointer(folder / "checkpoints", World(), 3).latest()
    assert checkpoint is not None
    return {key: checkpoint.read(key) for key in checkpoint.keys}


def batches() -> list[Tensor]:
    """The global batches of the job's steps, in order: the last one of an epoch is smaller."""
    epoch = list(samples().split(GLOBAL_BATCH))
    return [epoch[step % len(epoch)] for step in range(NUM_STEPS)]


def plain_gan(
    counted: bool = False, every: int = 1, clips: bool = True
) -> tuple[list[tuple[float, float | None]], dict[str, Tensor]]:
    model: Any = make_gan()
    of_d = torch.optim.Adam(model.disc.parameters(), lr=1e-2)
    of_g = torch.optim.Adam(model.gen.parameters(), lr=2e-2)
    schedule, losses = dt.WarmupCosine(warmup_steps=3), []
    for step, batch in enumerate(batches()):
        of_d.zero_grad()
        loss = loss_d(model, batch)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.disc.parameters(), 0.3)
        of_d.step()
        found: float | None = None
        if step % every == 0:
            of_g.param_groups[0]["lr"] = 2e-2 * schedule.factor(step, NUM_STEPS)
            of_g.zero_grad()
            if counted:
                total = counted_loss_g(model, batch)
                own = total.total / total.count
            else:
                own = loss_g(model, batch)
            own.backward()
            of_g.step()
            found = own.item()
        losses.append((loss.item(), found))
    return losses, dict(model.state_dict())


def plain_two_kinds() -> tuple[list[float], dict[str, Tensor]]:
    model = make_layers()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    optimizers = muon([{"params": matrices}]), torch.optim.Adam(rest, lr=1e-2)
    schedule, losses = dt.StepDecay(4), []
    for step, batch in enumerate(batches()):
        loss = regression(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(matrices, 0.2)
        nn.utils.clip_grad_norm_(rest, 0.1)
        optimizers[1].param_groups[0]["lr"] = 1e-2 * schedule.factor(step, NUM_STEPS)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


# "two kinds" has torch.optim.Muon, whose iteration is in bf16: a gradient that was rounded otherwise moves it by 1e-3.
CASES = [
    ("gan", 1, 14, None),
    ("gan", 1, 4, None),
    ("gan", 2, 3, "ddp"),
    ("gan", 3, 14, "ddp"),
    ("gan", 2, 3, "fsdp"),
    ("gan", 3, 2, "fsdp"),
    ("gan, counted", 1, 4, None),
    ("gan, counted", 2, 3, "ddp"),
    ("gan, counted", 3, 3, "fsdp"),
    ("gan, every 2", 1, 4, None),
    ("gan, every 2", 2, 3, "ddp"),
    ("gan, every 2", 2, 7, "fsdp"),
    ("two kinds", 1, 14, None),
    ("muon", 1, 14, None),
    ("muon", 1, 4, None),
    ("muon", 2, 3, "ddp"),
    ("muon", 3, 3, "ddp"),
    ("muon", 2, 3, "fsdp"),
    ("muon", 3, 2, "fsdp"),
    ("muon", 4, 2, "fsdp, 2 copies"),
]


@pytest.mark.parametrize(("name", "world", "micro_batch", "strategy"), CASES)
def test_float64_equals_the_plain_loop(
    gloo_pool: GlooPool, tmp_path: Path, name: str, world: int, micro_batch: int, strategy: str | None
) -> None:
    records, state = gloo_pool.run(train, str(tmp_path), name, micro_batch, strategy, world=world)[0]
    tolerance = 1e-7 if name == "muon" else 1e-10  # its iteration is in float32
    if name in ("two kinds", "muon"):
        losses, weights = plain_two_kinds() if name == "two kinds" else plain_muon()
        assert [record["loss"] for record in records] == pytest.approx(losses, abs=tolerance)
    else:
        both, weights = plain_gan(counted="counted" in name, every=2 if "every" in name else 1)
        assert [record["loss_d"] for record in records] == pytest.approx([loss for loss, _ in both], abs=1e-10)
        found = [record["loss_g"] for record in records]
        assert [loss is None for loss in found] == [loss is None for _, loss in both]
        for loss, wanted in zip(found, (loss for _, loss in both), strict=True):
            assert loss is None or loss == pytest.approx(wanted, abs=1e-10)
    for key, value in weights.items():
        torch.testing.assert_close(state[f"model/{key}"], value, rtol=0, atol=tolerance)


class StopError(Exception):
    """Ends a run in the middle."""


def stop_at_5(context: dt.StepContext) -> None:
    if context.step == 5:
        raise StopError


def noisy_job(folder: str, **changes: Any) -> dt.Job:
    """Both turns draw at random; a moving average follows; a checkpoint after steps 3 and 6."""
    loss = {"d": noisy_loss_d, "g": noisy_loss_g}
    return gan_job(folder, loss=loss, ema=0.9, checkpoint_every=3, shuffle=True, **changes)


def noisy_loss_d(model: Any, batch: Tensor) -> Tensor:
    return loss_d(model, batch + 0.1 * torch.randn_like(batch))


def stopped_and_resumed(folder: str, stops: bool, strategy: str | None) -> tuple[list[Any], Any]:
    given = {"output_dir": folder, "batch_size": 3, "gpu_mode": "cpu", "num_workers": 0, "report": False}
    config = dt.configure(**given, **({"parallel_strategy": strategy} if strategy else {}))
    hooks = [dt.every(1, stop_at_5)]
    if stops:
        with pytest.raises(StopError):
            dt.train(noisy_job(folder, hooks=hooks), config, quiet=True)
        hooks = [dt.every(1, lambda context: None)]
    else:
        hooks = [dt.every(1, lambda context: None)]
    result = dt.train(noisy_job(folder, hooks=hooks), config, quiet=True)
    assert result.resumed_from == (3 if stops else 0)
    return records_of(result.folder), state_of(result.folder)


@pytest.mark.parametrize(("world", "strategy"), [(1, None), (2, "ddp"), (2, "fsdp")])
def test_a_resumed_run_is_the_same_to_the_bit(
    gloo_pool: GlooPool, tmp_path: Path, world: int, strategy: str | None
) -> None:
    folder = str(tmp_path)
    whole, state = gloo_pool.run(stopped_and_resumed, folder + "/whole", False, strategy, world=world)[0]
    again, other = gloo_pool.run(stopped_and_resumed, folder + "/again", True, strategy, world=world)[0]
    assert state.keys() == other.keys()
    assert any(key.startswith("ema/") for key in state)
    assert sum(key.startswith("optimizer/") for key in state) == 3 * len(dict(make_gan().named_parameters()))
    for key, value in state.items():
        assert torch.equal(value, other[key]), key
    assert [row["loss"] for row in again[-6:]] == [row["loss"] for row in whole[-6:]]


def begun_sharded(folder: str) -> str:
    """Train some steps with Muon on rows of matrices. Return what is said of torch's own."""
    config = dt.configure(
        output_dir=folder, gpu_mode="cpu", num_workers=0, report=False, parallel_strategy="fsdp", batch_size=4
    )
    dt.train(muon_job(folder, max_steps=5), config, quiet=True)
    with pytest.raises(dt.DrivetrainError) as refused:
        dt.train(two_kinds_job(folder), config, quiet=True)
    return f"{refused.value.message}; {refused.value.remedy}"


def test_rows_of_momentum_become_whole_again(gloo_pool: GlooPool, tmp_path: Path) -> None:
    said = gloo_pool.run(begun_sharded, str(tmp_path), world=2)[0]
    assert "dt.Muon" in said
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, report=False)
    result = dt.train(muon_job(""), config, quiet=True, extend=True)
    assert result.resumed_from == 5
    losses, weights = plain_muon()
    assert [row["loss"] for row in records_of(result.folder)] == pytest.approx(losses, abs=1e-7)
    for key, value in weights.items():
        torch.testing.assert_close(state_of(result.folder)[f"model/{key}"], value, rtol=0, atol=1e-7)


def drawing_d(model: Any, batch: Tensor) -> Tensor:
    dt.log("drawn_d", torch.rand(()).double())
    return loss_d(model, batch)


def drawing_g(model: Any, batch: Tensor) -> Tensor:
    dt.log("drawn_g", torch.rand(()).double())
    return loss_g(model, batch)


def test_each_turn_draws_its_own_numbers_and_logs(tmp_path: Path) -> None:
    job = gan_job(str(tmp_path), loss={"d": drawing_d, "g": drawing_g})
    result = dt.train(job, dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False), quiet=True)
    rows = records_of(result.folder)
    drawn = [row[name] for row in rows for name in ("drawn_d", "drawn_g")]
    assert len(set(drawn)) == 2 * NUM_STEPS
    assert all(0 <= value < 1 for value in drawn)


def test_validation_and_a_plateau_for_one_of_them(tmp_path: Path) -> None:
    """The metric of one turn decides on the rate of its optimizer alone."""
    held_out = samples()[:11]
    plateau = dt.OnPlateau(metric="valid_loss_d", patience=0, factor=0.5, threshold=0.9)  # nothing improves so much
    job = gan_job(
        str(tmp_path),
        valid=held_out,
        valid_every=3,
        max_steps=9,
        optimizer={"d": replace(DISC, schedule=plateau), "g": replace(GEN, schedule=None)},
        best=dt.Aim("valid_loss_g"),
    )
    result = dt.train(job, dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False), quiet=True)
    rows = records_of(result.folder)
    assert [row["lr_d"] for row in rows] == [1e-2] * 6 + [5e-3] * 3
    assert {row["lr_g"] for row in rows} == {2e-2}
    model: Any = result.model
    with torch.no_grad():
        values = {"d": loss_d(model, held_out).item(), "g": loss_g(model, held_out).item()}
    assert result.best is not None
    assert result.best.value == pytest.approx(values["g"], abs=1e-12)
    last = json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["valid_loss"] == pytest.approx(last["valid_loss_d"] + last["valid_loss_g"], abs=1e-12)


def test_a_finished_run_is_extended(tmp_path: Path) -> None:
    """Schedules that do not depend on the length go on to the bit; those that do have to be asked about."""
    constant = {"d": DISC, "g": replace(GEN, schedule=None)}
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    dt.train(gan_job("", optimizer=constant, max_steps=5), config, quiet=True)
    longer = dt.train(gan_job("", optimizer=constant), config, quiet=True, extend=True)
    whole = dt.train(gan_job("", optimizer=constant, name="whole"), config, quiet=True)
    first, second = state_of(longer.folder), state_of(whole.folder)
    assert all(torch.equal(first[key], value) for key, value in second.items())
    dt.train(gan_job("", name="cosine", max_steps=5), config, quiet=True)
    with pytest.raises(dt.DrivetrainError, match="depends on the number of steps"):
        dt.train(gan_job("", name="cosine"), config, quiet=True, extend=True)


def batch_changing(model: Any, batch: Tensor) -> Tensor:
    batch *= 0.5
    return loss_d(model, batch)


BAD = {
    "an unknown loss": ({"optimizer": {"d": DISC, "g": replace(GEN, loss="gen")}}, "trains by the loss 'gen'"),
    "a loss without an optimizer": ({"optimizer": {"d": replace(DISC, params="*")}}, "no optimizer follows the loss"),
    "one optimizer for several losses": ({"optimizer": adam(0.1)}, "no optimizer names its loss"),
    "a function in place of Optim": ({"optimizer": {"d": adam(0.1), "g": GEN}}, "'d' is function, expected dt.Optim"),
    "a shared parameter": ({"optimizer": {"d": DISC, "g": replace(GEN, params="*")}}, "both train disc.0.weight"),
    "a pattern of nothing": (
        {"optimizer": {"d": DISC, "g": replace(GEN, params="generator.*")}},
        "no optimizer trains",
    ),
    "two with the rest": (
        {"optimizer": {"d": replace(DISC, params=None), "g": replace(GEN, params=None)}},
        "only one of them can have the rest",
    ),
    "never trained in some steps": (
        {"optimizer": {"d": replace(DISC, every=2), "g": replace(GEN, every=3)}},
        "steps that train nothing",
    ),
    "a scheduler of another optimizer": (
        {
            "optimizer": {
                "d": DISC,
                "g": replace(
                    GEN, schedule=torch.optim.lr_scheduler.StepLR(adam(0.1)([nn.Parameter(torch.ones(1))]), 3)
                ),
            }
        },
        "made with another optimizer",
    ),
    "a plateau without validation": (
        {"optimizer": {"d": DISC, "g": replace(GEN, schedule=dt.OnPlateau())}},
        "there is no validation set",
    ),
    "a loss that is no function": ({"loss": {"d": loss_d, "g": 3}}, "'g' is int, expected a function"),
    "weights of parts": ({"loss_weights": {"d": 2.0}}, "the job has several losses"),
    "a changed batch": ({"loss": {"d": batch_changing, "g": loss_g}}, "changes its batch in place"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_words(tmp_path: Path, name: str) -> None:
    changes, words = BAD[name]
    with pytest.raises(dt.DrivetrainError, match=words) as caught:
        dt.train(gan_job("", **changes), dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False), quiet=True)
    assert "remedy" in str(caught.value) or caught.value.remedy
    assert not list(tmp_path.glob("*/checkpoints/*"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 0.1}, "several optimizers"),
        ({"warmup_steps": 3}, "several optimizers"),
        ({"weight_decay": 0.1}, "several optimizers"),
    ],
)
def test_settings_of_one_optimizer_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(dt.DrivetrainError, match=words):
        dt.train(gan_job(""), dt.configure(output_dir=tmp_path, gpu_mode="cpu", **settings), quiet=True)


def test_what_looks_at_one_optimizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match="several optimizers"):
        dt.find_lr(gan_job(""), dt.configure(output_dir=tmp_path, gpu_mode="cpu"))
