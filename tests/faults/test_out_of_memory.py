"""A step that is out of memory is repeated from the same state with smaller micro-batches."""

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain import DrivetrainError, every
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.run.recovery import find_shortage
from tests.api.jobs import Mlp, Variant, Vectors, make_job, plain_loop, run, vector_loss
from tests.faults.events import events
from tests.gloo_pool import GlooPool
from tests.launch.jobs import launch
from tests.run.test_memory import Hungry

VARIANT = Variant(steps=12, save_every=4)
SCRIPT = Path(__file__).parent.parent / "launch" / "training_script.py"


def assert_as_plain(found: Any, variant: Variant = VARIANT) -> None:
    losses, weights = plain_loop(variant)
    np.testing.assert_allclose(found.losses, losses, rtol=0, atol=1e-12)
    for name, value in weights.items():
        np.testing.assert_allclose(found.weights[name], value, rtol=0, atol=1e-12)


def test_the_step_is_repeated_and_nothing_before_it(tmp_path: Path, capfd: Any) -> None:
    found = run(str(tmp_path), VARIANT, loss=(loss := Hungry(16, 200)))
    assert_as_plain(found)
    assert found is not None
    assert (loss.failures, found.resumed_from) == (1, 0)
    assert [row["step"] for row in events(tmp_path / "suite", "out of memory")] == [6]
    assert len(events(tmp_path / "suite", "start")) == 1, "no second start"
    words = "step 6 was out of memory (in the forward, 2.00 GiB more asked for) with micro-batches of 32 samples"
    assert words in capfd.readouterr().err
    assert json.loads((tmp_path / "suite" / "memory.json").read_text())["caps"] == [[5, 16]]


def test_the_allocator_of_the_host_refuses(tmp_path: Path, capfd: Any) -> None:
    """In torch's own words, which differ between its wheels."""

    def refused_above_16(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) > 16:
            torch.empty(1 << 50, dtype=torch.uint8)  # more than a process can address
        return vector_loss(model, batch)

    found = run(str(tmp_path), VARIANT, loss=refused_above_16)
    assert_as_plain(found)
    assert "out of memory" in capfd.readouterr().err


def test_with_worker_processes(tmp_path: Path) -> None:
    assert_as_plain(run(str(tmp_path), VARIANT, loss=Hungry(8, 200), num_workers=1))


def test_a_resume_divides_every_step_as_it_was_divided(tmp_path: Path) -> None:
    """To the bit, though it begins before the step that was out of memory, and is not out of memory itself."""

    class Interrupted(Hungry):
        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            if self.num_samples > 245:
                raise KeyError("planted")
            return super().__call__(model, batch)

    whole = run(str(tmp_path / "whole"), VARIANT, loss=Hungry(16, 200))
    with pytest.raises(KeyError):
        run(str(tmp_path / "parts"), VARIANT, loss=Interrupted(16, 200))
    found = run(str(tmp_path / "parts"), VARIANT)
    assert whole is not None
    assert found is not None
    assert found.resumed_from == 4
    assert found.rows == whole.rows
    for name, value in whole.weights.items():
        np.testing.assert_array_equal(found.weights[name], value)


class Counting(Mlp):
    """Counts its forwards in a buffer, and uses it: a repeated step would count twice."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(0.0)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += len(inputs)
        return super().forward(inputs) * (1 + self.calls / 1e4)


def test_a_forward_that_changes_buffers_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    whole = run(str(tmp_path / "whole"), VARIANT, 8, model=lambda: Counting().double())
    found = run(str(tmp_path / "hungry"), VARIANT, loss=Hungry(8, 200), model=lambda: Counting().double())
    assert whole is not None
    assert found is not None
    assert found.resumed_from == 4
    assert found.weights["model/calls"] == whole.weights["model/calls"] == 150 + 150 + 64, "each sample once"


def test_memory_that_runs_out_in_the_optimizers_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights may have moved: it goes on from the checkpoint."""
    calls, step = [0], torch.optim.AdamW.step

    def failing(self: Any, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 7:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB.")
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", failing)
    found = run(str(tmp_path), VARIANT)
    assert_as_plain(found)
    assert found is not None
    assert found.resumed_from == 4


def test_batch_norm_is_never_halved(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()

    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    with pytest.raises(DrivetrainError, match=r"out of memory \(in the forward.* cannot be made smaller") as raised:
        train(make_job(VARIANT, loss=Hungry(8, 300), model=model), config, quiet=True)
    assert "recompute" in raised.value.remedy


def test_the_module_and_the_phase_are_named() -> None:
    class Greedy(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …")

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Greedy()))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(torch.ones(1, 2))
    found = find_shortage(raised.value, model)
    assert (found.module, found.asked) == ("1.1", "2.50 GiB")


@pytest.mark.parametrize("num_steps_before", [0, 5])
def test_memory_that_runs_out_while_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, num_steps_before: int
) -> None:
    """Before the first step, and in the middle of the run, where something has to be compiled anew.

    The compiler takes the model apart, and is out of memory when it is to make code; what it makes then is the model.
    """
    from torch._inductor import compile_fx

    sizes: list[int] = []

    def make_code(graph: Any, inputs: list[Tensor], **options: Any) -> Any:
        tensors = [each for each in inputs if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)]
        found = [len(each) for each in tensors if each.shape[1:] == (6,)]
        sizes.append(max(found, default=0))  # 0: what is tried beforehand
        if sizes[-1] > 16 and len(steps) >= num_steps_before:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return graph.forward

    steps: list[int] = []

    def count(context: Any) -> None:
        steps.append(context.step)
        if context.step == num_steps_before:
            torch.compiler.reset()

    monkeypatch.setattr(compile_fx, "compile_fx", make_code)
    torch.compiler.reset()
    settings = {"compile": True, "compile_mode": "default"}
    hooks = [every(1, count)] if num_steps_before else []
    found = run(str(tmp_path), VARIANT, settings=settings, hooks=hooks)
    torch.compiler.reset()
    assert_as_plain(found)
    assert sizes[-1] == 16
    assert max(sizes) == 32
    assert "compiling" in capfd.readouterr().err


def validated(folder: str, most: int | None) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; with `most`, of a rank 0 that can validate no more samples at once."""

    is_first = not dist.is_initialized() or dist.get_rank() == 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if most is not None and not model.training and len(batch[0]) > most and is_first:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return vector_loss(model, batch)

    variant = Variant(steps=4, save_every=2)
    run(folder, variant, loss=loss, valid=Vectors(variant), valid_every=2, metrics={"first": first_class})
    rows = [json.loads(line) for line in (Path(folder) / "suite" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith("valid_")} for row in rows]


def first_class(output: Tensor, batch: Any) -> Tensor:
    return (output.argmax(1) == 0).double().mean()


@pytest.mark.parametrize("world", [1, 2])
def test_a_validation_begins_again_with_smaller_batches(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    whole = gloo_pool.run(validated, str(tmp_path / "whole"), None, world=world)[0]
    found = gloo_pool.run(validated, str(tmp_path / "hungry"), 5, world=world)[0]
    assert len(whole) == len(found) == 2
    assert not (tmp_path / "hungry" / "suite" / "memory.json").exists(), "training had memory enough"
    for row, other in zip(whole, found, strict=True):
        assert row.keys() == other.keys()
        np.testing.assert_allclose(list(row.values()), list(other.values()), rtol=1e-12)


def test_a_rank_that_is_out_of_memory_restarts_all_with_smaller_ones(tmp_path: Path) -> None:
    done = launch(tmp_path, "--inject", "oom@5:rank1", str(SCRIPT), str(tmp_path), "8", forks=True)
    assert done.code == 0, done.err
    assert "with micro-batches of 3 samples, restart 1" in done.err
    assert json.loads((tmp_path / "runs" / "launched" / "memory.json").read_text())["micro_batch"] == 3


def test_one_launched_process_repeats_its_step(tmp_path: Path) -> None:
    done = launch(tmp_path, "--inject", "oom@5", str(SCRIPT), str(tmp_path), "8", forks=True, num_processes=1)
    assert done.code == 0, done.err
    assert "restart" not in done.err
    assert [row["step"] for row in events(tmp_path / "runs" / "launched", "out of memory")] == [5]


@pytest.mark.gpu
def test_a_step_that_is_too_large_for_the_gpu(tmp_path: Path) -> None:
    """Activations of 64 samples are too many for the part of the memory that is allowed; of some fewer they are not."""
    variant = Variant(dtype=torch.float32, steps=6, global_batch=64, num_samples=640, save_every=3)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 2**20), nn.Linear(2**20, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]

    total = torch.cuda.get_device_properties(0).total_memory
    settings = {"capture": "off", "auto_optimize": False, "precision": "fp32"}
    whole = run(str(tmp_path / "whole"), variant, gpu_mode="auto", settings=settings, model=Wide)
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()  # by other tests of this process
    # Weights, gradients and moments take 180 MB; 64 samples take 64 × 4 MB for each of two activations, and gradients.
    torch.cuda.set_per_process_memory_fraction((held + 0.6e9) / total)
    try:
        found = run(str(tmp_path / "hungry"), variant, gpu_mode="auto", settings=settings, model=Wide)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert whole is not None
    assert found is not None
    np.testing.assert_allclose(found.losses, whole.losses, rtol=1e-4)
    assert events(tmp_path / "hungry" / "suite", "micro-batch capped")
    assert found.resumed_from == 0
