"""The forecast of memory on a GPU, against the allocator's own peak."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain import DrivetrainError, Job
from drivetrain.api.measuring import plan
from drivetrain.config import configure
from drivetrain.core.precision import Precision
from drivetrain.plan.fitting import count_held, forecast_held, simulate
from drivetrain.plan.forecast import MemoryModel, Peak, next_size_to_measure
from drivetrain.recipes.gpt import CONTEXT, VOCABULARY, SmallGpt
from drivetrain.run.memory import peak_meter

pytestmark = pytest.mark.gpu
GB = 10**9


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=next(model.parameters()).device.type == "cuda")


def gpt() -> nn.Module:
    return SmallGpt(width=768, num_layers=12, num_heads=12)


def gpt_batch(size: int) -> list[Tensor]:
    return [torch.zeros(size, CONTEXT, dtype=torch.long)] * 2


def gpt_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]).view(-1, VOCABULARY).float(), batch[1].view(-1))


def resnet() -> nn.Module:
    made: nn.Module = pytest.importorskip("torchvision").models.resnet50()
    return made


def image_batch(size: int) -> list[Tensor]:
    return [torch.zeros(size, 3, 224, 224), torch.zeros(size, dtype=torch.long)]


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Tensor]], Callable[..., Tensor]]] = {
    "gpt": (gpt, gpt_batch, gpt_loss),
    "resnet": (resnet, image_batch, image_loss),
}


@pytest.mark.parametrize("kind", KINDS)
def test_small_steps_forecast_a_large_one(kind: str) -> None:
    """bf16 autocast, fused AdamW, eager: within 5 % at 128 samples, from at most four smaller steps."""
    make, batch_of, loss = KINDS[kind]
    device = torch.device("cuda")
    model = make().to(device)
    optimizer = adamw(model)
    meter = peak_meter(device)
    assert not meter.is_coarse

    def peak(size: int) -> int:
        """Of a step, with all that is held."""
        batch = [part.to(device) for part in batch_of(size)]
        for _ in range(2):  # the first makes the optimizer's state
            meter.reset()
            held = torch.cuda.memory_allocated(device)
            with torch.autocast("cuda", torch.bfloat16):
                value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        return meter.peak_bytes() + held

    peaks = [Peak(2, peak(2))]
    state = count_held(model, optimizer)
    held = state.parameters + state.buffers + state.optimizer
    while (size := next_size_to_measure(peaks, 100 * GB, 128, held)) is not None:
        peaks.append(Peak(size, peak(size)))
    assert len(peaks) <= 4
    assert max(each.micro_batch for each in peaks) < 128
    forecast, found = MemoryModel.fitted(peaks, held).peak_bytes(128), peak(128)
    print(f"{kind}: {peaks} forecast {forecast / GB:.2f} GB, measured {found / GB:.2f} GB")
    assert forecast == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_followed_on_shapes_takes_as_much_here(kind: str) -> None:
    """Counted with a CPU's kernels and autocast rules: within 20 % of what a GPU's take."""
    make, batch_of, loss = KINDS[kind]
    model, device = make(), torch.device("cuda")
    followed = simulate(model, loss, batch_of(32), Precision("bf16", "cpu"))
    model, batch = model.to(device), [part.to(device) for part in batch_of(32)]
    meter = peak_meter(device)
    for _ in range(2):
        model.zero_grad()
        meter.reset()
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(model, batch)
        value.backward()
    print(f"{kind}: followed {followed.peak_bytes / GB:.3f} GB, measured {meter.peak_bytes() / GB:.3f} GB")
    assert followed.peak_bytes == pytest.approx(meter.peak_bytes(), rel=0.2)


def test_what_is_held_is_known_beforehand() -> None:
    model = gpt().cuda()
    forecast, optimizer = forecast_held(model, adamw), adamw(model)
    gpt_loss(model, [part.cuda() for part in gpt_batch(1)]).backward()
    optimizer.step()
    found = count_held(model, optimizer)
    assert forecast.parameters == found.parameters
    assert forecast.optimizer == pytest.approx(found.optimizer, rel=0.001)


@pytest.mark.parametrize("of_weights", [1.6, 0.5])
def test_a_model_that_does_not_fit_is_explained(of_weights: float, tmp_path: Path) -> None:
    """Of 85 M parameters the process may hold the weights and no copy of them; then not even the weights."""
    job = Job(
        name="large",
        model=gpt,
        data=[(torch.zeros(CONTEXT, dtype=torch.long),) * 2] * 64,
        loss=gpt_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        global_batch=8,
        max_steps=100,
    )
    weights = sum(parameter.numel() * 4 for parameter in gpt().parameters())
    part = of_weights * weights / torch.cuda.get_device_properties(0).total_memory
    config = configure(output_dir=tmp_path, gpu_memory_fraction=part, gpu_mode="single_gpu", num_workers=0)
    torch.cuda.set_per_process_memory_fraction(part)
    try:
        with pytest.raises(DrivetrainError) as caught:
            plan(job, config, measure=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    told = str(caught.value)
    print(told)
    assert "not even one sample at a time fits on cuda:0" in told
    assert "weights by module: blocks" in told
    assert ("with FSDP" if of_weights > 1 else "ZeRO") in told
