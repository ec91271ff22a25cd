"""A loop of the user's own with several models and optimizers: together, and in turn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain as dt
from tests.api.test_several_optimizers import (
    GLOBAL_BATCH,
    NUM_STEPS,
    Gan,
    loss_d,
    loss_g,
    make_gan,
    plain_gan,
    records_of,
    samples,
    state_of,
)
from tests.gloo_pool import GlooPool


class Parts(nn.Module):
    """Calls the models of a dictionary as `Gan` does."""

    def __init__(self, models: Any) -> None:
        super().__init__()
        self.models = models

    def forward(self, which: str, inputs: Tensor) -> Tensor:
        made: Tensor = self.models[which](inputs)
        return made


def begun(folder: str, micro_batch: int, **changes: Any) -> Any:
    gan: Any = make_gan()
    models = {"gen": gan.gen, "disc": gan.disc}
    optimizers = {
        "d": torch.optim.Adam(gan.disc.parameters(), lr=1e-2),
        "g": torch.optim.Adam(gan.gen.parameters(), lr=2e-2),
    }
    settings = changes.pop("settings", {})
    config = dt.configure(
        output_dir=folder, gpu_mode="cpu", batch_size=micro_batch, num_workers=0, report=False, **settings
    )
    given: dict[str, Any] = {
        "turns": True,
        "name": "driven",
        "global_batch": GLOBAL_BATCH,
        "max_steps": NUM_STEPS,
        "shuffle": False,
        "schedule": {"g": dt.WarmupCosine(warmup_steps=3)},
    }
    return dt.drive(models, optimizers, samples(), config=config, quiet=True, **(given | changes))


def looped(folder: str, micro_batch: int, stop_at: int | None = None, **changes: Any) -> Any:
    run = begun(folder, micro_batch, **changes)
    parts = Parts(run.model)
    for batch in run:
        if stop_at is not None and run.steps == stop_at and run.turn == "g":
            break  # in the middle of a step
        run.backward(loss_d(parts, batch) if run.turn == "d" else loss_g(parts, batch))
        run.step()
    return records_of(run.folder), state_of(run.folder), run.resumed_from


@pytest.mark.parametrize(("world", "micro_batch", "strategy"), [(1, 14, None), (1, 4, None), (2, 3, "ddp")])
def test_float64_equals_the_plain_loop(
    gloo_pool: GlooPool, tmp_path: Path, world: int, micro_batch: int, strategy: str | None
) -> None:
    settings = {"parallel_strategy": strategy} if strategy else {}
    rows, state, _ = gloo_pool.run(driven, str(tmp_path), micro_batch, settings, world=world)[0]
    losses, weights = plain_gan(clips=False)
    assert [row["loss_d"] for row in rows] == pytest.approx([loss for loss, _ in losses], abs=1e-10)
    assert [row["loss_g"] for row in rows] == pytest.approx([loss for _, loss in losses], abs=1e-10)
    for key, value in weights.items():
        torch.testing.assert_close(state[f"model/{key}"], value, rtol=0, atol=1e-10)


def driven(folder: str, micro_batch: int, settings: dict[str, Any]) -> Any:
    return looped(folder, micro_batch, settings=settings)


@pytest.mark.parametrize("micro_batch", [14, 4])
def test_a_turn_of_every_third_step_equals_the_plain_loop(tmp_path: Path, micro_batch: int) -> None:
    """A critic that is trained more often than its generator; resumed, too."""
    losses, weights = plain_gan(every=3, clips=False)
    run = begun(str(tmp_path), micro_batch, turns={"g": 3}, checkpoint_every=1)
    parts, expected, got = Parts(run.model), len(run), 0
    for batch in run:
        got += 1
        run.backward(loss_d(parts, batch) if run.turn == "d" else loss_g(parts, batch))
        run.step()
    assert got == expected
    rows, state = records_of(run.folder), state_of(run.folder)
    assert [row["loss_d"] for row in rows] == pytest.approx([loss for loss, _ in losses], abs=1e-10)
    found = [row["loss_g"] for row in rows if row.get("loss_g") is not None]
    assert found == pytest.approx([loss for _, loss in losses if loss is not None], abs=1e-10)
    for key, value in weights.items():
        torch.testing.assert_close(state[f"model/{key}"], value, rtol=0, atol=1e-10)

    again = begun(str(tmp_path / "again"), micro_batch, turns={"g": 3}, checkpoint_every=1)
    parts = Parts(again.model)
    for batch in again:
        if again.steps == 4:
            break
        again.backward(loss_d(parts, batch) if again.turn == "d" else loss_g(parts, batch))
        again.step()
    del again
    _, resumed, resumed_from = looped(str(tmp_path / "again"), micro_batch, turns={"g": 3}, checkpoint_every=1)
    assert resumed_from == 4
    assert all(torch.equal(value, state[key]) for key, value in resumed.items())


def test_left_in_the_middle_of_a_step_and_resumed(tmp_path: Path) -> None:
    _, whole, _ = looped(str(tmp_path / "whole"), 14, checkpoint_every=3)
    looped_until = str(tmp_path / "again")
    run = begun(looped_until, 14, checkpoint_every=3)
    parts = Parts(run.model)
    for batch in run:
        if run.steps == 5 and run.turn == "g":
            break
        run.backward(loss_d(parts, batch) if run.turn == "d" else loss_g(parts, batch))
        run.step()
    del run
    _, again, resumed_from = looped(looped_until, 14, checkpoint_every=3)
    assert resumed_from == 3, "half a step is not saved"
    assert all(torch.equal(again[key], value) for key, value in whole.items())


def test_only_the_parameters_of_the_turn_have_gradients(tmp_path: Path) -> None:
    run = begun(str(tmp_path), 14, max_steps=2)
    parts, seen = Parts(run.model), []
    for batch in run:
        seen.append((run.turn, *({p.requires_grad for p in run.model[name].parameters()} for name in ("gen", "disc"))))
        run.backward(loss_d(parts, batch) if run.turn == "d" else loss_g(parts, batch))
        run.step()
    assert seen == [("d", {False}, {True}), ("g", {True}, {False})] * 2
    assert all(parameter.requires_grad for parameter in run.model.parameters())


def test_what_another_turn_computed_is_nothing_to_learn_from(tmp_path: Path) -> None:
    """Many scripts compute a generator's samples once, for both of its turns."""
    run = begun(str(tmp_path), GLOBAL_BATCH)
    parts = Parts(run.model)
    made = torch.zeros(())
    for batch in run:
        if run.turn == "g":
            break
        made = parts("gen", torch.ones(len(batch), 4, dtype=batch.dtype)).sum()
        run.backward(loss_d(parts, batch))
        run.step()
    with pytest.raises(dt.DrivetrainError, match="in the turn of 'g' does not depend") as raised:
        run.backward(made)
    assert "in that turn" in raised.value.remedy


def test_several_optimizers_of_one_backward(tmp_path: Path) -> None:
    """All step after one backward, each by its own schedule."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    torch.manual_seed(7)
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    def made(layers: Any) -> dict[str, torch.optim.Optimizer]:
        return {
            "first": torch.optim.SGD(layers[0].parameters(), lr=0.1, momentum=0.9),
            "last": torch.optim.Adam(layers[2].parameters(), lr=1e-2),
        }

    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=5, report=False)
    run = dt.drive(model, made(model), samples(), config=config, global_batch=10, epochs=2, shuffle=False, quiet=True)
    for batch in run:
        assert run.turn == ""
        run.backward((run.model(batch[:, :4]) - batch[:, 4:]).square().mean())
        run.step()
    optimizers = made(other)
    for batch in [*samples().split(10), *samples().split(10)]:
        (other(batch[:, :4]) - batch[:, 4:]).square().mean().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    for value, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
    state = state_of(run.folder)
    assert {"optimizer/0.weight/momentum_buffer", "optimizer/2.weight/exp_avg"} <= state.keys()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"schedule": {"x": dt.Constant()}}, "'x' is none of the optimizers"),
    ({"optimizers": {"d"}}, "turns are for several optimizers"),
    ({"turns": {"x": 2}}, "'x' is none of the optimizers"),
    ({"turns": {"d": 2, "g": 3}}, "no optimizer has a turn in each step"),
]


@pytest.mark.parametrize(("changes", "words"), BAD)
def test_bad_calls(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    gan: Any = Gan()
    optimizers = {"d": torch.optim.Adam(gan.disc.parameters()), "g": torch.optim.Adam(gan.gen.parameters())}
    kept = changes.pop("optimizers", set(optimizers))
    chosen = {name: it for name, it in optimizers.items() if name in kept}
    with pytest.raises(dt.ConfigError, match=words):
        dt.drive(gan, chosen, samples(), **{"turns": True, "global_batch": 4, "epochs": 1, "quiet": True, **changes})


def test_a_parameter_of_two_optimizers_and_one_of_none(tmp_path: Path) -> None:
    gan: Any = Gan()
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    shared = {"d": torch.optim.Adam(gan.parameters()), "g": torch.optim.Adam(gan.gen.parameters())}
    with pytest.raises(dt.DrivetrainError, match=r"both train gen\.0\.weight"):
        dt.drive(gan, shared, samples(), turns=True, global_batch=4, epochs=1, quiet=True, config=config)
    missing = {"d": torch.optim.Adam(gan.disc[0].parameters()), "g": torch.optim.Adam(gan.gen.parameters())}
    with pytest.raises(dt.DrivetrainError, match=r"no optimizer trains disc.2.weight"):
        dt.drive(gan, missing, samples(), turns=True, global_batch=4, epochs=1, quiet=True, config=config)
