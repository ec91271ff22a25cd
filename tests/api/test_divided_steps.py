"""What a loop is told of divided steps that are not the whole ones, and that it is told where they are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

import drivetrain as dt
from drivetrain.api.driving import Drive
from drivetrain.api.loop_checks import _Outputs

LENGTHS = torch.tensor([3, 5, 2, 4, 1, 5, 5, 2, 3, 1, 4, 2, 5, 1, 2, 3])
Loss = Callable[[nn.Module, Tensor], Tensor]


def is_there(batch: Tensor) -> Tensor:
    """Return which of the five numbers of each sample count."""
    return torch.arange(5) < batch[:, :1]


def pairs(model: nn.Module, batch: Tensor) -> Tensor:
    ours, theirs = model(batch), model(batch * 0.9)
    return functional.cross_entropy(ours @ theirs.T, torch.arange(len(batch)))


def views_in_one_batch(model: nn.Module, batch: Tensor) -> Tensor:
    both = functional.normalize(model(torch.cat([batch, batch * 0.9])), dim=1)
    likeness = (both @ both.T).masked_fill(torch.eye(len(both), dtype=torch.bool), -9.0)
    return functional.cross_entropy(likeness, torch.arange(len(both)).roll(len(batch)))


def views_of_a_sample(model: nn.Module, batch: Tensor) -> Tensor:
    ours, theirs = model(torch.cat([batch, batch * 0.9])).chunk(2)
    return (ours - theirs).square().sum(1).mean() + ours.logsumexp(1).mean()


def by_parts(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss of a model whose parts are called one after the other: the last one's output is looked at."""
    assert isinstance(model, nn.Sequential)
    return functional.mse_loss(model[2](model[1](model[0](batch))), batch)


class WithTemperature(nn.Module):
    """Returns a number of no sample beside its features, as CLIP does."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.scale = layers, nn.Parameter(torch.ones(()))

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(batch), self.scale.exp()


def hardest(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.mse_loss(model(batch), batch, reduction="none").mean(1).topk(2).values.mean()


def median(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().sum(1).median()


def worst(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).abs().sum(1).max()


def best_of_each_number(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).abs().min(0).values.mean()


def hardest_sorted(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().sum(1).sort(descending=True).values[:2].mean()


COMPARES = {
    "the hardest": hardest,
    "the hardest, sorted": hardest_sorted,
    "the worst": worst,
    "the best of each number": best_of_each_number,
    "a median": median,
    "pairs": pairs,
    "views in one batch": views_in_one_batch,
    "a root of a mean": lambda model, batch: functional.mse_loss(model(batch), batch).sqrt(),
    "spread over the batch": lambda model, batch: (1 - model(batch).std(0)).relu().mean(),
}
OVER_OTHERS = {
    "a sum by its mask": lambda model, batch: (
        ((model(batch) - batch).square() * is_there(batch)).sum() / is_there(batch).sum()
    ),
    "a mean of what is there": lambda model, batch: (
        2 * functional.mse_loss(model(batch)[is_there(batch)], batch[is_there(batch)])
    ),
}
BY_WEIGHTS = {
    "weights of the samples": lambda model, batch: (
        ((model(batch) - batch).square().mean(1) * batch[:, 0].sqrt()).sum() / batch[:, 0].sqrt().sum()
    ),
    "a mask and an epsilon": lambda model, batch: (
        ((model(batch) - batch).square() * is_there(batch)).sum() / (is_there(batch).sum() + 1e-8)
    ),
    "a sum of torch's": lambda model, batch: (
        functional.mse_loss(model(batch) * is_there(batch), batch * is_there(batch), reduction="sum")
        / is_there(batch).sum()
    ),
    "sums of two terms": lambda model, batch: (
        (((model(batch) - batch).square() * is_there(batch)).sum() + model(batch).abs().sum()) / is_there(batch).sum()
    ),
    "a product with weights": lambda model, batch: (
        (model(batch) - batch).square().mean(1).dot(batch[:, 0]) / batch[:, 0].sum()
    ),
}


def given_gradients(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a loss whose gradients the loop has computed, of weights whose rows are a multiple of the samples."""
    first = torch.func.functional_call(model, {name: it.detach() for name, it in model.named_parameters()}, (batch,))
    parameters = [it for it in model.parameters() if it.shape[0] % 2 == 0]
    return sum((it * first.mean()).sum() for it in parameters)  # type: ignore[return-value]


MEANS = {
    "the largest of each sample": lambda model, batch: (model(batch) - batch).abs().max(1).values.mean(),
    "scaled by the largest weight": lambda model, batch: (
        functional.mse_loss(model(batch), batch) * next(model.parameters())[:4].abs().max()
    ),
    "gradients that the loop computes": given_gradients,
    "the best of each sample": lambda model, batch: model(batch).topk(2).values.mean(),
    "plain": lambda model, batch: functional.mse_loss(model(batch), batch),
    "views of a sample": views_of_a_sample,
    "by parts": by_parts,
    "by samples": lambda model, batch: torch.stack([model(row[None]).square().mean() for row in batch]).mean(),
    "a sum by the samples": lambda model, batch: (model(batch) - batch).square().sum() / len(batch),
    "a count that stays": lambda model, batch: (model(batch) - batch).square().mean(1).sum() / 4,
}


def noisy(items: list[Tensor]) -> Tensor:
    return torch.stack(items) * (1 + 0.1 * torch.rand(()))


def looped(
    folder: Path,
    loss: Loss,
    micro_batch: int,
    *,
    norm: bool = False,
    closure: bool = False,
    collate: Callable[[list[Tensor]], Tensor] = torch.stack,
    lengths: Tensor = LENGTHS,
) -> Tensor:
    torch.manual_seed(0)
    first = nn.Linear(5, 6)
    model = nn.Sequential(spectral_norm(first) if norm else first, nn.Tanh(), nn.Linear(6, 5)).double()
    data = torch.randn(16, 5, dtype=torch.float64)
    data[:, 0] = lengths
    make = torch.optim.LBFGS if closure else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.01, **({"max_iter": 2} if closure else {}))
    config = dt.configure(output_dir=folder, batch_size=micro_batch, gpu_mode="cpu", report=False)
    run = dt.drive(
        model,
        optimizer,
        list(data),
        name="loop",
        global_batch=8,
        epochs=1,
        shuffle=False,
        collate=collate,
        config=config,
    )
    for batch in run:
        if closure:
            run.step(lambda batch: loss(model, batch))
        else:
            run.backward(loss(model, batch))
            run.step()
    return torch.cat([it.detach().flatten() for it in model.parameters()])


def told(folder: Path, capsys: pytest.CaptureFixture[str], loss: Loss, micro_batch: int, **more: Any) -> list[str]:
    looped(folder, loss, micro_batch, **more)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("  loss ")]


@pytest.mark.parametrize("closure", [False, True])
def test_a_loss_that_compares_samples_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], closure: bool
) -> None:
    for number, loss in enumerate(COMPARES.values()):
        (line,) = told(tmp_path / str(number), capsys, loss, 4, closure=closure)
        assert "compares the samples of a batch with each other" in line
        assert "--batch-size" in line
    assert told(tmp_path / "whole", capsys, pairs, 8, closure=closure) == []


def test_a_mean_over_something_else_than_samples_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, loss in enumerate(OVER_OTHERS.values()):
        (line,) = told(tmp_path / str(number), capsys, loss, 4)
        assert "a mean over 14 values in a batch of 4 samples and 13 in one of 4" in line
        assert "dt.LossSum(sum, count)" in line
        assert told(tmp_path / f"whole {number}", capsys, loss, 8) == []


def test_a_sum_by_its_weights_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a plain sum by a whole number was: weights, and a mask with an epsilon, went on as means over samples."""
    for number, loss in enumerate(BY_WEIGHTS.values()):
        (line,) = told(tmp_path / str(number), capsys, loss, 4)
        assert "is taken for a mean over samples" in line
        assert "dt.LossSum(sum, count)" in line
        assert told(tmp_path / f"whole {number}", capsys, loss, 8) == []


@pytest.mark.parametrize("way", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_clips_a_part_of_the_gradient_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    def clip(it: Tensor) -> Tensor | None:
        if way == "register_hook":
            return it.clamp(-0.01, 0.01)
        assert it.grad is not None
        it.grad.clamp_(-0.01, 0.01)
        return None

    for micro_batch in (4, 8):
        getattr((model := nn.Linear(5, 5)).weight, way)(clip)
        for batch in (run := driven(tmp_path / str(micro_batch), model, micro_batch)):
            run.backward(functional.mse_loss(model(batch), batch))
            run.step()
        lines = [line for line in capsys.readouterr().out.splitlines() if "a hook of weight gets the gradient" in line]
        assert len(lines) == (micro_batch == 4)


def test_a_weight_of_the_positive_that_each_batch_has_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def balanced(model: nn.Module, batch: Tensor, of: Tensor | None = None) -> Tensor:
        labels = (batch[:, :1] > 2).double()
        positive = (labels if of is None else (of > 2).double()).mean().clamp(0.1, 0.9)
        return functional.binary_cross_entropy_with_logits(
            model(batch)[:, :1], labels, pos_weight=(1 - positive) / positive
        )

    (line,) = told(tmp_path / "divided", capsys, balanced, 4)
    assert "its pos_weight is computed from each batch" in line
    assert told(tmp_path / "whole", capsys, balanced, 8) == []
    assert told(tmp_path / "of all", capsys, lambda *given: balanced(*given, LENGTHS), 4) == []


@pytest.mark.parametrize("correction", [0, 1])
def test_advantages_that_each_batch_normalizes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], correction: int
) -> None:
    """They have no gradient, so that nothing was seen of samples that meet in them."""

    def clipped(model: nn.Module, batch: Tensor, of: Tensor | None = None) -> Tensor:
        returns, others = batch[:, 0], batch[:, 0] if of is None else of.double()
        advantages = (returns - others.mean()) / (others.std(correction=correction) + 1e-8)
        ratio = model(batch)[:, 0].exp()
        return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    (line,) = told(tmp_path / "divided", capsys, clipped, 4)
    assert "normalized advantages" in line
    assert told(tmp_path / "whole", capsys, clipped, 8) == []
    assert told(tmp_path / "of all", capsys, lambda *given: clipped(*given, LENGTHS), 4) == []


def test_a_sum_by_the_samples_of_the_whole_step_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was taken for a mean over the batch, so its gradients were as many times too small as the step has batches."""

    def by_step(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch).square().sum() / 8

    (line,) = told(tmp_path / "divided", capsys, by_step, 4)
    assert "--loss-weighting sum" in line
    assert told(tmp_path / "whole", capsys, by_step, 8) == []


def test_a_sum_over_what_a_mask_leaves_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no number of values that follows the samples, and went on as a mean in silence."""

    def over_mask(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch)[is_there(batch)].square().sum()

    (line,) = told(tmp_path / "divided", capsys, over_mask, 4)
    assert "--loss-weighting sum" in line
    assert told(tmp_path / "whole", capsys, over_mask, 8) == []


def test_as_many_labels_in_a_batch_as_samples_in_a_step_are_no_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One such batch was enough for the advice to add up the batches, whatever the others were divided by."""
    lengths = torch.tensor([1, 2, 3, 2, 5, 4, 1, 3, 2, 2, 1, 1, 4, 2, 3, 5])  # 8 in the first batch
    (line,) = told(tmp_path, capsys, BY_WEIGHTS["a sum of torch's"], 4, lengths=lengths)
    assert "it is a mean over 8 values" in line


@pytest.mark.timeout(60)
@pytest.mark.parametrize("divisor", [1, 8])
def test_a_sum_of_thousands_of_terms_is_looked_at_soon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], divisor: int
) -> None:
    def term_by_term(model: nn.Module, batch: Tensor) -> Tensor:
        total = (model(batch) - batch).square().sum()
        for _ in range(2000):
            total = 0.5 * total + 0.5 * total
        return total if divisor == 1 else total / divisor

    assert all("--loss-weighting sum" in line for line in told(tmp_path, capsys, term_by_term, 4))


def of_what_is_there(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch)[is_there(batch).any(1)].square().sum()


def mean_or_nothing(model: nn.Module, batch: Tensor) -> Tensor:
    there, out = is_there(batch), model(batch)
    return (out - batch)[there].square().mean() if there.any() else 0 * out.sum()


def pairs_or_nothing(model: nn.Module, batch: Tensor) -> Tensor:
    there, out = is_there(batch).any(1), model(batch)
    return (functional.mse_loss(out, batch).sqrt() if there.any() else 0 * out.sum()).mean()


def labels_or_nothing(model: nn.Module, batch: Tensor) -> Tensor:
    labels = torch.where(torch.arange(5) < batch[:, :1], batch.argsort(1), -100)[:, 0]
    out = model(batch)
    return functional.cross_entropy(out, labels) if (labels >= 0).any() else 0 * out.sum()


SHOWN_LATE = {
    "like a sum": of_what_is_there,
    "is a mean over": mean_or_nothing,
    "compares the samples": pairs_or_nothing,
    "labels that are not ignored": labels_or_nothing,
}


@pytest.mark.parametrize("words", SHOWN_LATE)
def test_batches_that_count_nothing_leave_it_open_what_a_loss_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """The first three answered it, if only by what they did not show, so a sum went on as a mean in silence."""
    lengths = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 2, 1, 0, 5, 5])
    assert any(words in line for line in told(tmp_path / "divided", capsys, SHOWN_LATE[words], 2, lengths=lengths))
    assert told(tmp_path / "whole", capsys, SHOWN_LATE[words], 8, lengths=lengths) == []


def test_steps_that_are_divided_later_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps in one batch used up the looks, so nothing was said of a global batch that grows."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD((model := nn.Linear(5, 5)).parameters(), lr=0.01)
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False, batch_size=4)
    data, sizes = torch.randn(48, 5), {0: 4, 4: 8}
    run = dt.drive(model, optimizer, data, name="grows", global_batch=sizes, epochs=1, config=config)
    for batch in run:
        run.backward((model(batch) - batch).square().sum())
        run.step()
    assert capsys.readouterr().out.count("looks like a sum over its batch") == 1


def test_parts_of_a_loss_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a dictionary nothing was said, whatever its parts were."""
    for number, loss in enumerate([pairs, OVER_OTHERS["a sum by its mask"], hardest]):
        for micro_batch in (4, 8):
            named = told(
                tmp_path / f"{number} {micro_batch}",
                capsys,
                lambda model, batch, loss=loss: {"first": MEANS["plain"](model, batch), "other": loss(model, batch)},  # type: ignore[misc]
                micro_batch,
            )
            assert len(named) == (micro_batch == 4)


def test_buffers_that_each_forward_changes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of spectral normalization went on once per batch, and nothing said so."""
    (line,) = told(tmp_path / "divided", capsys, MEANS["plain"], 4, norm=True)
    assert "each forward pass changes 0.parametrizations.weight.0._u" in line
    assert told(tmp_path / "whole", capsys, MEANS["plain"], 8, norm=True) == []


def test_what_a_collate_function_draws_for_a_batch_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = told(tmp_path / "divided", capsys, MEANS["plain"], 4, collate=noisy)
    assert "the collate function draws random numbers for each batch that it makes" in line
    assert told(tmp_path / "whole", capsys, MEANS["plain"], 8, collate=noisy) == []


class Replacing(nn.Module):
    """Replaces its buffers instead of writing to them: a moving mean, and a cache that grows with its input."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.layer, self.moves, self.num_calls = nn.Linear(5, 5), moves, 0
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("cache", torch.zeros(0))

    def forward(self, batch: Tensor) -> Tensor:
        self.num_calls += 1
        self.cache = torch.ones(self.num_calls)
        self.mean = 0.9 * self.mean + 0.1 * batch.mean(0) if self.moves else self.mean.clone()
        return self.layer(batch)


@pytest.mark.parametrize("moves", [True, False])
def test_buffers_that_each_forward_replaces_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], moves: bool
) -> None:
    """Only those that were written to were seen, so the codes of a VQ-VAE moved once for each batch in silence."""
    model = Replacing(moves=moves)
    run = driven(tmp_path, model)
    for batch in run:
        run.backward(functional.mse_loss(model(batch), batch))
        run.step()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  loss ")]
    assert [" changes mean," in line for line in lines] == [True] * moves


def test_a_loop_that_is_left_after_its_forward_has_replaced_buffers_goes_on_from_before(tmp_path: Path) -> None:
    model = Replacing(moves=True)
    run = driven(tmp_path, model)
    for number, batch in enumerate(run):
        loss = functional.mse_loss(model(batch), batch)
        if number == 2:  # the first of the second step
            break
        run.backward(loss)
        run.step()
    assert not run.finished
    model = Replacing(moves=True)
    again = driven(tmp_path, model)
    assert again.steps == 0  # that of step 1 would hold what a batch of step 2 left behind


@pytest.mark.parametrize("name", MEANS)
def test_of_a_mean_over_samples_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert told(tmp_path / "divided", capsys, MEANS[name], 2 if name.startswith("gradients") else 4) == []


def test_looking_changes_no_bit_and_leaves_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = looped(tmp_path / "looked", pairs, 4)
    monkeypatch.setattr(_Outputs, "watch", lambda self: None)
    assert torch.equal(looped(tmp_path / "not looked", pairs, 4), expected)
    monkeypatch.undo()
    model = nn.Linear(2, 2)
    outputs = _Outputs(model)
    outputs.watch()
    assert len(model._forward_hooks) == 1
    outputs.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_features_beside_a_temperature_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = WithTemperature(nn.Linear(5, 5))
    run = driven(tmp_path, model)
    for batch in run:
        (ours, scale), (theirs, _) = model(batch), model(batch * 0.9)
        run.backward(functional.cross_entropy(scale * ours @ theirs.T, torch.arange(len(batch))))
        run.step()
    assert "it compares the samples of a batch with each other" in " ".join(capsys.readouterr().out.split())


# What loops do for the sake of another trainer


def driven(folder: Path, model: nn.Module, micro_batch: int = 4) -> Drive:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([it for it in model.parameters() if it.requires_grad], lr=0.1)
    config = dt.configure(output_dir=folder, gpu_mode="cpu", report=False, batch_size=micro_batch)
    return dt.drive(model, optimizer, torch.randn(48, 5), name="divided", global_batch=8, epochs=1, config=config)


@pytest.mark.parametrize(("micro_batch", "once"), [(4, False), (4, True), (8, False)])
def test_a_teacher_that_is_moved_with_each_batch_is_told(
    tmp_path: Path, micro_batch: int, once: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.ModuleDict({"student": nn.Linear(5, 5), "teacher": nn.Linear(5, 5).requires_grad_(False)})
    run = driven(tmp_path, model, micro_batch)
    for batch in run:
        run.backward(functional.mse_loss(model["student"](batch), model["teacher"](batch)))
        run.step()
        if not (once and run.accumulating):
            for ours, theirs in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)
    told = [line for line in capsys.readouterr().out.splitlines() if "after each batch of a step" in line]
    assert len(told) == (micro_batch == 4 and not once)
    assert all("teacher.weight" in line for line in told)


class Tempered(nn.Module):
    """Notes down a length, as some models do, which is no setting."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.temperature, self.num_rows = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.0)), 1.0, 0

    def forward(self, batch: Tensor) -> Tensor:
        self.num_rows = len(batch)
        result: Tensor = self.layers(batch) / self.temperature
        return result


@pytest.mark.parametrize("where", ["rate", "temperature", "before", "validation"])
def test_settings_of_the_model_that_a_loop_changes_after_a_step_are_told(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run began with the rate of dropout that the model is made with, and nothing said so."""
    run = driven(tmp_path, model := Tempered(), 8)
    for batch in run:
        if where == "before":
            model.temperature = 1 / (1 + run.steps)
        run.backward(functional.mse_loss(model(batch), batch))
        run.step()
        if run.steps == 4 and where == "rate":
            model.layers[1].p = 0.3  # type: ignore[assignment]
        elif where == "temperature":
            model.temperature *= 0.9
        elif run.steps == 4 and where == "validation":
            model(torch.zeros(99, 5))
    told = [line for line in capsys.readouterr().out.splitlines() if "which no checkpoint holds" in line]
    names = {"rate": "layers.1.p", "temperature": "temperature"}
    assert len(told) == (where in names)
    assert all(f"it changes {names[where]} of the model after run.step()" in line for line in told)


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_validation_that_leaves_evaluation_mode_on_is_told(
    tmp_path: Path, goes_back: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dropout stayed off until a resume switched it on again."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1))
    for batch in (run := driven(tmp_path, model)):
        if goes_back:
            model.train()
        run.backward(functional.mse_loss(model(batch), batch))
        run.step()
        if run.steps == 2 and not run.accumulating:
            model.eval()
            model(batch)
    assert capsys.readouterr().out.count("it left the model in evaluation mode") == (not goes_back)


class Arguments:
    accum_iter = 2
    one_accumulated = 1


@pytest.mark.parametrize("name", ["accum_iter", "one_accumulated"])
def test_a_loss_that_is_divided_to_accumulate_is_told(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args, run, logged = Arguments(), driven(tmp_path, model := nn.Linear(5, 5)), 0.0
    if name == "accum_iter":
        for batch in run:
            loss = functional.mse_loss(model(batch), batch)
            loss /= args.accum_iter
            run.backward(loss)
            run.step()
    else:
        for batch in run:
            loss = functional.mse_loss(model(batch), batch)
            logged += loss.item() / args.accum_iter  # not what is learned from
            run.backward(loss / args.one_accumulated)
            run.step()
    told = [line for line in capsys.readouterr().out.splitlines() if "as if to accumulate gradients" in line]
    assert len(told) == (name == "accum_iter")
    assert all("args.accum_iter" in line for line in told)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaled_loss_is_refused(tmp_path: Path, enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    run = driven(tmp_path, model := nn.Linear(5, 5))

    def train() -> int:
        for batch in run:
            run.backward(scaler.scale(functional.mse_loss(model(batch), batch)))
            run.step()
        return run.steps

    if not enabled:
        assert train() == 6
        return
    with pytest.raises(dt.DrivetrainError, match="scales its loss with a GradScaler") as caught:
        train()
    assert "--precision fp16" in caught.value.remedy
