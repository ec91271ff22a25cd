"""LBFGS and SAM in a driven loop: a closure over the whole global batch, equal to a plain loop, exact on resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drivetrain as dt
from drivetrain.data.division import SampleStream
from tests.api.jobs import Sentences, Trained, Variant, Vectors, make_model, read, token_loss, vector_loss
from tests.api.test_resume import PlantedError, assert_identical
from tests.gloo_pool import GlooPool

# 3 steps per epoch, the last of them ragged.
VECTORS = Variant("mlp", torch.float64, global_batch=24, steps=5, num_samples=60)
TOKENS = Variant("transformer", torch.float64, global_batch=12, steps=3, num_samples=30)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is usually written: it wraps an optimizer and shares its groups."""

    def __init__(self, parameters: Any, rho: float = 0.05, **settings: Any) -> None:
        super().__init__(parameters, {"rho": rho, **settings})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack(norms).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")
    return Sam(parameters, lr=0.1, momentum=0.9)


def plain(kind: str, variant: Variant, clip_norm: float | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """The same as anybody would write it: whole batches, one device."""
    torch.manual_seed(variant.seed)
    model = make_model(variant)
    data: Any = Vectors(variant)
    optimizer: Any = make_optimizer(kind, model.parameters())
    stream, losses = SampleStream(variant.num_samples, variant.seed), []
    per_epoch = -(-variant.num_samples // variant.global_batch)
    for step in range(variant.steps):
        start = step % per_epoch * variant.global_batch
        order = stream.samples(step // per_epoch, start, min(start + variant.global_batch, variant.num_samples))
        inputs, labels = data.inputs[order], data.labels[order]

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            return loss

        loss = closure() if kind == "sam" else functional.cross_entropy(model(inputs), labels)
        before = loss.item()
        optimizer.step(closure)
        losses.append(before)
    return losses, model.state_dict()


def drive(
    folder: str, kind: str, variant: Variant = VECTORS, at_step: int = -1, micro_batch: int = 5, **settings: Any
) -> Trained | None:
    torch.manual_seed(variant.seed)
    model = make_model(variant)
    config = dt.configure(output_dir=folder, gpu_mode="cpu", batch_size=micro_batch, report=False)
    run = dt.drive(
        model,
        make_optimizer(kind, model.parameters()),
        Vectors(variant),
        global_batch=variant.global_batch,
        max_steps=variant.steps,
        seed=variant.seed,
        checkpoint_every=2,
        config=config,
        quiet=True,
        **settings,
    )
    for _ in run:
        if run.steps == at_step:
            raise PlantedError
        run.step(lambda batch: vector_loss(run.model, batch))
    return read(run.folder, run.resumed_from) if run.world.is_main else None


@pytest.mark.parametrize("kind", ["lbfgs", "sam"])
@pytest.mark.parametrize("world", [1, 2])
def test_it_is_the_plain_loop(gloo_pool: GlooPool, tmp_path: Path, kind: str, world: int) -> None:
    losses, weights = plain(kind, VECTORS)
    found = gloo_pool.run(drive, str(tmp_path), kind, world=world)[0]
    np.testing.assert_allclose(found.losses, losses, rtol=0, atol=1e-10)
    for name, value in weights.items():
        np.testing.assert_allclose(found.weights[f"model/{name}"], value.numpy(), rtol=0, atol=1e-9)


def test_gradients_are_clipped_in_each_evaluation(tmp_path: Path) -> None:
    losses, weights = plain("lbfgs", VECTORS, clip_norm=0.05)
    found = drive(str(tmp_path), "lbfgs", clip_norm=0.05)
    assert found is not None
    np.testing.assert_allclose(found.losses, losses, rtol=0, atol=1e-10)
    for name, value in weights.items():
        np.testing.assert_allclose(found.weights[f"model/{name}"], value.numpy(), rtol=0, atol=1e-9)


def crash(folder: str, kind: str, variant: Variant, at_step: int) -> bool:
    try:
        drive(folder, kind, variant, at_step)
    except PlantedError:
        return True
    return False


@pytest.mark.parametrize(("kind", "world"), [("lbfgs", 1), ("sam", 1), ("lbfgs", 2)])
def test_a_crash_changes_nothing(gloo_pool: GlooPool, tmp_path: Path, kind: str, world: int) -> None:
    variant = Variant("mlp", torch.float32, global_batch=24, steps=5, num_samples=60, dropout=0.2)
    whole = gloo_pool.run(drive, str(tmp_path / "whole"), kind, variant, world=world)[0]
    assert gloo_pool.run(crash, str(tmp_path / "same"), kind, variant, 3, world=world)[0]
    again = gloo_pool.run(drive, str(tmp_path / "same"), kind, variant, world=world)[0]
    assert again.resumed_from == 3
    assert_identical(again, whole)


def test_a_mean_over_tokens_is_one(tmp_path: Path) -> None:
    """Sums and counts of all batches are added up before the division, in each evaluation."""

    def trained(micro_batch: int) -> list[float]:
        torch.manual_seed(0)
        model = make_model(TOKENS)
        run = dt.drive(
            model,
            make_optimizer("lbfgs", model.parameters()),
            Sentences(TOKENS),
            name=f"by-{micro_batch}",
            global_batch=12,
            max_steps=3,
            config=dt.configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=micro_batch, report=False),
            quiet=True,
        )
        for _ in run:
            run.step(lambda batch: token_loss(run.model, batch))
        return read(run.folder).losses

    assert trained(5) == pytest.approx(trained(12), abs=1e-10)


def test_an_ordinary_optimizer_takes_a_closure_too(tmp_path: Path) -> None:
    def trained(name: str, with_closure: bool) -> Trained:
        torch.manual_seed(0)
        model = make_model(VECTORS)
        run = dt.drive(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            Vectors(VECTORS),
            name=name,
            global_batch=24,
            max_steps=4,
            config=dt.configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=5, report=False),
            quiet=True,
        )
        for batch in run:
            if with_closure:
                run.step(lambda batch: vector_loss(run.model, batch))
            else:
                run.backward(vector_loss(run.model, batch))
                run.step()
        return read(run.folder)

    one, other = trained("with", True), trained("without", False)
    assert one.losses == other.losses
    assert all(np.array_equal(one.weights[key], other.weights[key]) for key in other.weights)


def test_what_is_logged_is_of_the_first_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_model(VECTORS)
    run = dt.drive(
        model,
        make_optimizer("lbfgs", model.parameters()),
        Vectors(VECTORS),
        global_batch=24,
        max_steps=2,
        config=dt.configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=5, report=False),
        quiet=True,
    )

    def loss(batch: Any) -> Tensor:
        value = vector_loss(run.model, batch)
        dt.log("again", value)
        return value

    for _ in run:
        run.step(loss)
    rows = read(run.folder).rows
    assert [row["again"] for row in rows] == pytest.approx([row["loss"] for row in rows], abs=1e-12)


def test_each_evaluation_draws_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_model(VECTORS)
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=12, report=False)
    made = make_optimizer("lbfgs", model.parameters())
    run = dt.drive(model, made, Vectors(VECTORS), global_batch=24, max_steps=1, config=config, quiet=True)
    drawn: list[float] = []

    def loss(batch: Any) -> Tensor:
        drawn.append(torch.rand(()).item())
        return vector_loss(run.model, batch)

    for _ in run:
        run.step(loss)
    assert len(drawn) > 2
    assert drawn == [drawn[0], drawn[1]] * (len(drawn) // 2)
    assert drawn[0] != drawn[1]


def looped(folder: Path, body: Any, batch_size: int | None = None) -> None:
    model = make_model(VECTORS)
    made = make_optimizer("lbfgs", model.parameters())
    config = dt.configure(output_dir=folder, gpu_mode="cpu", report=False, batch_size=batch_size)
    run = dt.drive(model, made, Vectors(VECTORS), global_batch=24, epochs=1, config=config, quiet=True)
    for batch in run:
        body(run, batch)


def test_mistakes(tmp_path: Path) -> None:
    def as_usual(run: Any, batch: Any) -> None:
        run.backward(vector_loss(run.model, batch))
        run.step()

    with pytest.raises(dt.DrivetrainError, match="needs a closure") as raised:
        looped(tmp_path / "usual", as_usual)
    assert "run.step(lambda batch" in raised.value.remedy

    def twice(run: Any, batch: Any) -> None:
        """As the two backwards of SAM are written."""
        run.backward(vector_loss(run.model, batch))
        run.backward(vector_loss(run.model, batch))

    with pytest.raises(dt.DrivetrainError, match="needs a closure"):
        looped(tmp_path / "twice", twice)

    def both(run: Any, batch: Any) -> None:
        run.backward(vector_loss(run.model, batch))
        run.step(lambda batch: vector_loss(run.model, batch))

    with pytest.raises(dt.DrivetrainError, match="computes the loss itself"):
        looped(tmp_path / "both", both)


def test_closures_as_torch_has_them(tmp_path: Path) -> None:
    """One without a batch raised a TypeError; one that clears gradients lost those of the batches before."""

    def without_a_batch(run: Any, batch: Any) -> None:
        run.step(lambda: vector_loss(run.model, batch))

    def clearing(run: Any, batch: Any) -> None:
        def closure(batch: Any) -> Tensor:
            run.model.zero_grad()
            return vector_loss(run.model, batch)

        run.step(closure)

    def backward(run: Any, batch: Any) -> None:
        def closure(batch: Any) -> Tensor:
            loss = vector_loss(run.model, batch)
            loss.backward()
            return loss

        run.step(closure)

    wrong = {
        without_a_batch: "takes no batch",
        clearing: "has cleared or computed gradients",
        backward: "has cleared or computed gradients",
    }
    for number, (body, words) in enumerate(wrong.items()):
        with pytest.raises(dt.DrivetrainError, match=words) as raised:
            looped(tmp_path / str(number), body, batch_size=8)
        assert "run.step(lambda batch" in raised.value.remedy


def sharded(folder: str) -> str:
    config = dt.configure(output_dir=folder, gpu_mode="cpu", report=False, parallel_strategy="fsdp")
    model = make_model(VECTORS)
    made = make_optimizer("lbfgs", model.parameters())
    try:
        dt.drive(model, made, Vectors(VECTORS), global_batch=24, epochs=1, config=config, quiet=True)
    except dt.DrivetrainError as error:
        return error.message
    return ""


def test_shards_are_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    for words in gloo_pool.run(sharded, str(tmp_path), world=2):
        assert "each process has a part of the model" in words
    assert not list(tmp_path.iterdir())
