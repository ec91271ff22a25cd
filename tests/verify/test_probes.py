"""Each probe's own judgement: it passes what is right, and fails what is planted."""

import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.hardware import Precision
from drivetrain.verify.probe import ProbeSetup, failed
from drivetrain.verify.probes import rates, storage, training
from drivetrain.verify.probes import storage as loader
from drivetrain.verify.probes import training as compilation
from drivetrain.verify.probes import training as mixed_precision
from drivetrain.verify.probes import training as placement
from tests.verify.machines import gpu, machine

CPU = torch.device("cpu")


def make_setup(tmp_path: Path, *, num_gpus: int = 0, run_folder: Path | None = None) -> ProbeSetup:
    folder = run_folder or tmp_path / "runs"
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    return ProbeSetup(
        quick=True,
        hardware=machine(num_gpus),
        gpu_indices=tuple(range(num_gpus)),
        run_folder=str(folder),
        run_scratch=str(folder / ".drivetrain-verify-test" / "probe"),
        scratch=str(scratch),
    )


class TestMatmul:
    @pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
    def test_a_right_product_is_within_its_bound(self, precision: Precision) -> None:
        product = rates.measure_product(precision, CPU, budget_seconds=0.02)
        assert product.tflops > 0
        assert rates.judge_error(precision, product) is None
        # The bound is not so wide that it says nothing: the error is within a factor of 100.
        assert product.error > rates.error_bound(precision, product.size) / 100

    def test_the_rate_is_operations_over_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rates, "seconds_per_call", lambda *args, **kwargs: 1e-3)
        product = rates.measure_product("fp32", CPU, budget_seconds=1e-3)
        assert product.size == 64
        assert product.tflops == pytest.approx(2 * 64**3 / 1e-3 / 1e12)

    def test_sizes_grow_with_the_budget_and_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rates, "seconds_per_call", lambda *args, **kwargs: 1e-9)
        assert rates.measure_product("fp32", CPU, budget_seconds=1).size == rates.LARGEST_ON_CPU

    @pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
    def test_a_wrong_product_is_noticed(self, precision: Precision) -> None:
        left, right = rates._operands(256, precision, CPU)
        wrong = (left.float() @ right.float()).to(left.dtype)
        wrong[3, 5] += 40  # one element of 65,536, by less than three standard deviations
        error = rates.relative_error(wrong, left, right)
        failure = rates.judge_error(precision, rates.Product(256, 1.0, error))
        assert failure is not None
        assert failure.status == "failed"

    def test_not_a_number_is_noticed(self) -> None:
        failure = rates.judge_error("bf16", rates.Product(256, 1.0, math.nan))
        assert failure is not None

    def test_fp32_that_is_tf32_is_called_so(self) -> None:
        left, right = rates._operands(512, "fp32", CPU)
        # What the hardware does: both inputs to 11 bits, sums in fp32.
        as_tf32 = _to_tf32(left) @ _to_tf32(right)
        error = rates.relative_error(as_tf32, left, right)
        failure = rates.judge_error("fp32", rates.Product(512, 1.0, error))
        assert failure is not None
        assert "as tf32 has" in failure.detail
        assert "unset" in failure.remedy
        assert rates.judge_error("tf32", rates.Product(512, 1.0, error)) is None

    def test_tf32_that_is_fp32_is_called_so(self) -> None:
        failure = rates.judge_error("tf32", rates.Product(512, 1.0, 3e-7))
        assert failure is not None
        assert "not used" in failure.detail

    def test_a_cpu_has_no_tf32(self, tmp_path: Path) -> None:
        outcome = rates.tf32(make_setup(tmp_path))
        assert outcome.status == "not applicable"
        assert "no GPU" in outcome.detail

    def test_a_chip_without_bf16(self, tmp_path: Path) -> None:
        setup = make_setup(tmp_path, num_gpus=1)
        old = gpu(0, "NVIDIA GTX 1080", ("fp32", "fp16"))
        setup = setup.model_copy(update={"hardware": setup.hardware.model_copy(update={"gpus": (old,)})})
        outcome = rates.bf16(setup)
        assert (outcome.status, outcome.detail) == ("not applicable", "NVIDIA GTX 1080 has no bf16 hardware")

    def test_the_rates_are_the_cpus(self, tmp_path: Path) -> None:
        outcome = rates.fp32(make_setup(tmp_path))
        (rate,) = outcome.rates
        assert (rate.of, rate.quantity, rate.precision, rate.unit) == ("cpu", "matmul", "fp32", "TFLOP/s")

    def test_a_slow_gpu_among_equals_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        measured = iter([100.0, 98.0, 80.0, 99.0])
        monkeypatch.setattr(rates, "measure_product", lambda *args, **kwargs: rates.Product(8192, next(measured), 1e-3))
        outcome = rates.bf16(make_setup(tmp_path, num_gpus=4))
        assert outcome.status == "failed"
        assert outcome.detail == "GPU 2 (NVIDIA H200, GPU-2) is 19 % below the median of its kind"
        assert outcome.figure.startswith("80-100 TFLOP/s")
        assert outcome.rates == ()


def _to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class TestTiming:
    def test_gpus_of_different_models_are_not_compared(self) -> None:
        gpus = [gpu(0, "NVIDIA RTX 3090"), gpu(1, "NVIDIA GTX 1080")]
        assert rates.slow_gpus(gpus, [70.0, 9.0]) == []

    def test_fourteen_percent_are_no_failure(self) -> None:
        gpus = [gpu(0), gpu(1), gpu(2)]
        assert rates.slow_gpus(gpus, [100.0, 100.0, 86.0]) == []
        assert len(rates.slow_gpus(gpus, [100.0, 100.0, 84.0])) == 1

    @pytest.mark.parametrize(
        ("values", "text"),
        [([802.4], "802 X"), ([0.0713], "0.0713 X"), ([4301.0, 4350.0], "4,301-4,350 X"), ([1.401, 1.402], "1.4 X")],
    )
    def test_figures(self, values: list[float], text: str) -> None:
        assert rates.span(values, "X") == text

    def test_small_rates_have_a_smaller_unit(self) -> None:
        assert rates.flops_span([0.0713]) == "71.3 GFLOP/s"
        assert rates.flops_span([802.0]) == "802 TFLOP/s"

    def test_the_time_of_a_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 5.0

        def work() -> None:
            nonlocal now
            now += 0.02

        monkeypatch.setattr(rates.time, "perf_counter", lambda: now)
        assert rates.seconds_per_call(work, CPU, budget_seconds=0.1) == pytest.approx(0.02)

    def test_slow_work_is_not_repeated_for_long(self) -> None:
        calls = []

        def work() -> None:
            calls.append(1)
            time.sleep(0.05)

        rates.seconds_per_call(work, CPU, budget_seconds=0.01)
        assert len(calls) == 4


class TestPlacement:
    def test_on_a_cpu(self, tmp_path: Path) -> None:
        assert placement.placement(make_setup(tmp_path)).status == "passed"

    def test_a_check_that_sees_nothing_is_noticed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placement, "assert_on_device", lambda *args, **kwargs: None)
        outcome = placement.placement(make_setup(tmp_path))
        assert outcome.status == "failed"
        assert "was not noticed" in outcome.detail


class TestMixedPrecision:
    def test_on_a_cpu(self, tmp_path: Path) -> None:
        assert mixed_precision.mixed_precision(make_setup(tmp_path)).status == "passed"

    def test_an_optimizer_that_does_not_move(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)
        assert mixed_precision.scaled_step(CPU, torch.float16) == "a step did not move the weights"

    def test_a_scaler_that_does_not_skip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.amp.GradScaler, "step", lambda self, optimizer: optimizer.step())
        monkeypatch.setattr(torch.amp.GradScaler, "update", lambda self: None)
        assert "was taken, not skipped" in mixed_precision.scaled_step(CPU, torch.float16)

    def test_a_scale_that_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.amp.GradScaler, "update", lambda self: self._per_optimizer_states.clear())
        assert "the scale stayed" in mixed_precision.scaled_step(CPU, torch.float16)

    def test_autocast_that_does_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import contextlib

        monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
        assert mixed_precision.scaled_step(CPU, torch.bfloat16) == "autocast computed in torch.float32"


class TestCompilation:
    """Without the compiler itself: the whole command's test runs that."""

    def test_no_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        outcome = compilation.compilation(make_setup(tmp_path))
        assert outcome.status == "failed"
        assert outcome.remedy == "apt-get install g++"

    def test_nothing_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "compile", lambda model: model)
        torch._dynamo.utils.counters.clear()
        outcome = compilation.compile_and_compare(nn.Linear(32, 8), CPU, with_backward=True)
        assert outcome.status == "failed"
        assert "nothing was compiled" in outcome.detail
        assert "unset TORCH_COMPILE_DISABLE" in outcome.remedy

    @pytest.fixture
    def counted(self) -> Iterator[None]:
        torch._dynamo.utils.counters["stats"]["unique_graphs"] = 1
        yield
        torch._dynamo.utils.counters.clear()

    @pytest.mark.usefixtures("counted")
    def test_equal_to_eager(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "compile", lambda model: model)
        outcome = compilation.compile_and_compare(nn.Linear(32, 8), CPU, with_backward=True)
        assert outcome.status == "passed"
        assert "forward and backward" in outcome.detail

    @pytest.mark.usefixtures("counted")
    @pytest.mark.parametrize(
        ("wrong", "cause"),
        [
            (lambda model: lambda x: model(x) + 0.01, "the compiled result differs"),
            (lambda model: lambda x: model(x) + 0.1 * (model(x) - model(x).detach()), "the compiled gradients differ"),
        ],
    )
    def test_different_from_eager(self, monkeypatch: pytest.MonkeyPatch, wrong: Any, cause: str) -> None:
        monkeypatch.setattr(torch, "compile", wrong)
        outcome = compilation.compile_and_compare(nn.Linear(32, 8), CPU, with_backward=True)
        assert outcome.status == "failed"
        assert cause in outcome.detail


class TestCopies:
    def test_no_gpu(self, tmp_path: Path) -> None:
        outcome = rates.host_and_device(make_setup(tmp_path))
        assert outcome.status == "not applicable"
        assert "no GPU" in outcome.detail

    def test_memory_counts_both_ways(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rates, "seconds_per_call", lambda *args, **kwargs: 1.0)
        assert rates.measure_memory(CPU, num_bytes=1000, budget_seconds=1) == pytest.approx(2 * 1000 / 1e9)

    def test_the_rate_is_the_cpus(self, tmp_path: Path) -> None:
        outcome = rates.within_memory(make_setup(tmp_path))
        assert "read + written" in outcome.figure
        (rate,) = outcome.rates
        assert (rate.of, rate.quantity, rate.unit) == ("cpu", "memory", "GB/s")
        assert rate.value > 0.1

    def test_a_copy_that_blocks_is_noticed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        blocking = rates.HostCopies(50, 50, 5, 5, returned_early=False)
        monkeypatch.setattr(rates, "measure_host_copies", lambda *args, **kwargs: blocking)
        outcome = rates.host_and_device(make_setup(tmp_path, num_gpus=1))
        assert outcome.status == "failed"
        assert outcome.remedy == "unset CUDA_LAUNCH_BLOCKING"

    def test_bytes_that_change_are_noticed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rates, "measure_host_copies", lambda *args, **kwargs: "bytes changed")
        assert rates.host_and_device(make_setup(tmp_path, num_gpus=1)).status == "failed"


class TestLoader:
    @pytest.mark.parametrize(("cores", "counts"), [(1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1, 2)), (64, (0, 1, 2, 4))])
    def test_workers_up_to_the_cores(self, cores: int, counts: tuple[int, ...]) -> None:
        assert loader.worker_counts(cores) == counts

    @pytest.mark.parametrize(
        ("indices", "problem"),
        [
            ([0, 1, 2, 3], ""),
            ([0, 1, 2], "3 samples arrived instead of 4"),
            ([0, 1, 2, 3, 3], "5 samples arrived instead of 4"),
            ([0, 2, 1, 3], "samples arrived out of order from place 1 on"),
            ([0, 1, 1, 3], "samples arrived out of order from place 2 on"),
        ],
    )
    def test_order(self, indices: list[int], problem: str) -> None:
        samples = loader.MadeUpImages(4)
        batches = [(torch.stack([samples[index][0]]), torch.tensor([index])) for index in indices]
        assert loader.problem_with_order(batches, 4) == problem

    def test_a_tmpdir_in_which_workers_would_hang(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 80)))
        outcome = loader.loader(make_setup(tmp_path))
        assert outcome.status == "failed"
        assert outcome.remedy == "export TMPDIR=/tmp"

    def test_content(self) -> None:
        image, _ = loader.MadeUpImages(4)[2]
        assert "another sample's content" in loader.problem_with_order([(image[None], torch.tensor([1]))], 4)


class TestCheckpoint:
    def test_same_bits(self, tmp_path: Path) -> None:
        outcome = storage.checkpoint(make_setup(tmp_path))
        assert outcome.status == "passed"
        assert "same bits" in outcome.figure

    def test_a_changed_bit_is_noticed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def flips(path: Path) -> dict[str, torch.Tensor]:
            tensors = real(path)
            tensors["model.0.bias"].view(torch.uint8)[0] ^= 1
            return tensors

        real = storage.load_file
        monkeypatch.setattr(storage, "load_file", flips)
        outcome = storage.checkpoint(make_setup(tmp_path))
        assert outcome.status == "failed"
        assert "1 of 19 tensors came back changed: model.0.bias" in outcome.detail

    def test_an_optimizer_that_forgets_is_noticed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def forgets(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
            real(model, optimizer, {key: value.clone() for key, value in tensors.items()})
            for state in optimizer.state.values():
                state["exp_avg"].zero_()

        real = storage.load_state_tensors
        monkeypatch.setattr(storage, "load_state_tensors", forgets)
        outcome = storage.checkpoint(make_setup(tmp_path))
        assert "the step after loading differs" in outcome.detail

    @pytest.mark.parametrize(
        "other",
        [torch.tensor([0.0]), torch.tensor([-0.0, 0.0]), torch.tensor([-0.0], dtype=torch.bfloat16), None],
    )
    def test_bits_are_compared_not_values(self, other: torch.Tensor | None) -> None:
        left = {"x": torch.tensor([-0.0])}
        assert storage.differences(left, {"x": other} if other is not None else {}) == ["x"]
        assert storage.differences({"x": torch.tensor([math.nan])}, {"x": torch.tensor([math.nan])}) == []


class TestDisk:
    def test_writes_and_reads(self, tmp_path: Path) -> None:
        outcome = storage.disk(make_setup(tmp_path))
        assert outcome.status == "passed"
        assert outcome.rates[0].quantity == "write"
        assert all(rate.of == "disk" and rate.value > 0 for rate in outcome.rates)

    def test_bytes_that_change_are_noticed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def spoil(path: Path) -> bool:
            with path.open("r+b") as file:
                file.seek(20_000_000)
                byte = file.read(1)
                file.seek(20_000_000)
                file.write(bytes([byte[0] ^ 1]))
            return True

        monkeypatch.setattr(storage, "drop_from_page_cache", spoil)
        assert storage.disk(make_setup(tmp_path)).detail == "bytes came back changed"

    def test_a_slow_disk_gets_fewer_bytes(self, tmp_path: Path) -> None:
        written, _ = storage.write_chunks(tmp_path / "file", b"x" * storage.CHUNK_BYTES, 1 << 40, limit_seconds=0.05)
        assert 0 < written < 1 << 33
        assert (tmp_path / "file").stat().st_size == written

    def test_a_file_in_place_of_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "runs").write_text("not a folder")
        for probe in (storage.disk, storage.checkpoint):
            outcome = probe(make_setup(tmp_path))
            assert outcome.status == "failed"
            assert "cannot write to" in outcome.detail
            assert "--output-dir" in outcome.remedy

    @pytest.fixture
    def mounts(self, tmp_path: Path) -> Iterator[Path]:
        folder = tmp_path / "mounted"
        folder.mkdir()
        yield folder
        while subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode == 0:
            pass

    def mount(self, *arguments: str) -> None:
        if os.geteuid() != 0 or subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount")

    def test_a_disk_that_is_too_small(self, tmp_path: Path, mounts: Path) -> None:
        self.mount("-t", "tmpfs", "-o", "size=40m", "tmpfs", str(mounts))
        outcome = storage.disk(make_setup(tmp_path, run_folder=mounts))
        assert outcome.status == "failed"
        assert outcome.detail == f"40 MiB are free at {mounts}, but 128 MiB are needed"
        assert not list(mounts.glob("**/speed"))

    def test_a_disk_that_fills_up_meanwhile(
        self, tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.mount("-t", "tmpfs", "-o", "size=40m", "tmpfs", str(mounts))
        monkeypatch.setattr(storage, "lack_of_room", lambda *args: None)
        outcome = storage.disk(make_setup(tmp_path, run_folder=mounts))
        assert outcome.status == "failed"
        assert "No space left" in outcome.detail
        assert "--output-dir" in outcome.remedy

    def test_memory_is_not_called_a_disk(self, tmp_path: Path, mounts: Path) -> None:
        self.mount("-t", "tmpfs", "-o", "size=300m", "tmpfs", str(mounts))
        outcome = storage.disk(make_setup(tmp_path, run_folder=mounts))
        assert "may be from memory" in outcome.detail
        assert [rate.quantity for rate in outcome.rates] == ["write"]

    def test_a_folder_that_may_not_be_written(self, tmp_path: Path, mounts: Path) -> None:
        self.mount("-t", "tmpfs", "-o", "ro", "tmpfs", str(mounts))
        for probe in (storage.disk, storage.checkpoint):
            outcome = probe(make_setup(tmp_path, run_folder=mounts))
            assert outcome.status == "failed"
            assert outcome.detail == f"cannot write to {mounts}: Read-only file system"


class TestTraining:
    def test_two_steps(self) -> None:
        losses = training.train_two_steps(CPU, seed=7)
        assert training.judge(losses, training.train_two_steps(CPU, seed=7)) == ""

    def test_another_seed_is_noticed(self) -> None:
        problem = training.judge(training.train_two_steps(CPU, seed=7), training.train_two_steps(CPU, seed=8))
        assert "two runs from one seed differ" in problem

    def test_a_loss_that_rises_is_noticed(self) -> None:
        losses = training.train_two_steps(CPU, seed=7, learning_rate=50)
        assert "does not fall" in training.judge(losses, losses)

    def test_a_loss_that_explodes_is_noticed(self) -> None:
        assert "not finite" in training.judge([1.0, math.inf, math.nan], [1.0, math.inf, math.nan])


class TestUtilisation:
    def test_busy_and_idle(self) -> None:
        assert rates.judge_busyness({"GPU 0": 99.0, "GPU 1": 80.0}).status == "passed"
        outcome = rates.judge_busyness({"GPU 0": 99.0, "GPU 1": 41.0})
        assert outcome.status == "failed"
        assert "GPU 1 41 %" in outcome.detail
        assert "GPU 0" not in outcome.detail
        assert "nvidia-smi" in outcome.remedy

    def test_no_gpu(self, tmp_path: Path) -> None:
        assert rates.utilization(make_setup(tmp_path)).status == "not applicable"


def test_a_failure_cannot_be_made_without_a_remedy() -> None:
    with pytest.raises(TypeError, match="remedy"):
        failed("cause")  # type: ignore[call-arg]
