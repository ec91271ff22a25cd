"""Plans for machines that are not here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from drivetrain import DrivetrainError, Job
from drivetrain.api.measuring import plan
from drivetrain.cli import main
from drivetrain.config import configure
from drivetrain.core.precision import Precision
from drivetrain.hardware.catalogue import machine_named, machine_of_memory
from drivetrain.plan.fitting import Simulated, simulate
from drivetrain.plan.forecast import TimeForecast
from drivetrain.plan.knobs import StepWay
from drivetrain.plan.plan import Choice, Forecast, MemoryForecast, Plan
from drivetrain.plan.tune import Measurement, Tried
from drivetrain.planning.other_machine import EXPECTED, MeasuredStep, plan_elsewhere
from drivetrain.run import memory
from drivetrain.run.memory import needs_of
from tests.hardware_fixtures import load

HERE = load("cpu-2core")
WIDTH, NUM_BLOCKS = 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs + self.down(self.up(inputs).tanh())
        return result


class Stack(nn.Module):
    """A row of blocks over 32 positions: activations outweigh the weights from a few samples on."""

    def __init__(self, norm: bool = False, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        result: Tensor = self.norm(inputs)
        return result


@pytest.fixture(autouse=True, scope="module")
def each_step_is_followed_once() -> Iterator[None]:
    """Most plans here are of one model, for other machines: a step of a size and precision is the same in all."""
    found: dict[Any, Simulated] = {}

    def once(model: nn.Module, loss: Any, batch: Any, precision: Precision, *change: Any, **how: Any) -> Simulated:
        if type(model) is not Stack or getattr(loss, "__closure__", loss) is not None:
            return simulate(model, loss, batch, precision, *change, **how)
        where = {weight.device for weight in model.parameters()}
        key = (repr(model), str(where), loss.__code__, batch.shape, repr(precision), change, str(how))
        if key not in found:
            found[key] = simulate(model, loss, batch, precision, *change, **how)
        return found[key]

    with mock.patch.object(memory, "simulate", once):
        yield


def make_job(norm: bool = False, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": "stack",
        "model": lambda: Stack(norm),
        "data": torch.randn(256, 32, WIDTH),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "global_batch": 64,
        "max_steps": 4,
        **changes,
    }
    return Job(**values)


def short_stack() -> nn.Module:
    """For plans in which there is room for everything: to follow a step takes as long as it has operations."""
    return Stack(num_blocks=2)


WEIGHTS = sum(p.numel() * 4 for p in Stack().parameters())


def planned(num_gpus: int, gigabytes: float, job: Job | None = None, **settings: Any) -> Plan:
    return plan_elsewhere(job or make_job(), configure(**settings), machine_of_memory(num_gpus, gigabytes), HERE)


def values(plan: Plan) -> dict[str, Any]:
    return {name: choice.value for name, choice in plan.choices.items()}


def test_there_is_room() -> None:
    plan = plan_elsewhere(make_job(), configure(), machine_named("4xL4"), HERE)
    assert values(plan) == {
        "distributed.strategy": "ddp",
        "precision.dtype": "bf16",
        "batch.size": 16,
        "batch.accumulation": 1,
        "memory.activations": "keep",
    }
    assert not plan.measured
    assert plan.notes[0] == "For 4 × L4, by rule and memory model; nothing was measured there."
    memory = plan.forecast.memory
    assert (memory.parameters, memory.gradients) == (WEIGHTS, WEIGHTS)
    assert memory.optimizer == pytest.approx(2 * WEIGHTS, rel=0.001)
    assert all(choice.reason for choice in plan.choices.values())
    assert values(plan_elsewhere(make_job(), configure(), machine_named("T4"), HERE))["precision.dtype"] == "fp16"


def test_the_global_batch_is_held_by_accumulating() -> None:
    plan = planned(2, 0.012)
    found = values(plan)
    assert found["distributed.strategy"] == "ddp"
    assert 1 < found["batch.size"] < 32
    assert found["batch.size"] * found["batch.accumulation"] >= 32
    assert plan.global_batch == 64
    assert plan.forecast.memory.total <= 0.012e9 * 0.97 * 0.9


def test_less_and_less_memory_takes_more_and_more_means() -> None:
    assert values(planned(1, 0.0066))["memory.activations"] == "keep"
    # Weights, gradients and moments take 4.3 MB: they have to be divided or moved.
    assert values(planned(8, 0.004))["distributed.strategy"] == "fsdp"
    alone = values(planned(1, 0.0045))
    assert alone["distributed.strategy"] == "deepspeed"
    assert alone["deepspeed.offload_optimizer"] is True


def test_nothing_fits() -> None:
    with pytest.raises(DrivetrainError) as caught:
        planned(1, 0.001)
    told = str(caught.value)
    assert "not even one sample at a time fits on 1 × a GPU with 0.001 GB" in told
    assert "weights by module: blocks 1.0" in told
    assert "activations by module: blocks" in told
    assert "remedy: cheapest first:\n    1. " in told


@pytest.mark.parametrize("is_followed", [True, False])
def test_what_runs_out_of_memory_here_is_explained(tmp_path: Path, is_followed: bool) -> None:
    """A step that runs out of memory where it is measured; on shapes alone it can be followed, or not even there."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if not (is_followed and isinstance(batch, FakeTensor)):
            raise torch.OutOfMemoryError("out of memory")
        return model(batch).square().mean()

    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, gpu_memory_fraction=1e-4, batch_size=8)
    with pytest.raises(DrivetrainError) as caught:
        plan(make_job(loss=loss), config, measure=True)
    told = str(caught.value)
    assert "8 samples at a time do not fit on cpu: a step needs " in told
    assert "free × 0.0001)" in told
    assert ("activations by module: blocks" in told) is is_followed
    assert ("activations are not known" in told) is not is_followed


def test_a_model_that_is_too_large_for_this_machine() -> None:
    """It is made of shapes; one that has to be made in full is refused before it fills the memory."""
    width = 20_000  # squared, in float32: 1.6 GB

    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(25)))

    data = torch.randn(16, 1).expand(16, width)
    found = planned(16, 80, make_job(model=layers, data=data, global_batch=16))
    assert values(found)["distributed.strategy"] == "fsdp"
    assert found.forecast.memory.parameters == pytest.approx(40e9 / 16, rel=0.01)

    def looks_at_values() -> nn.Module:
        assert nn.Linear(2, 2).weight.sum().item() < 10
        return nn.Linear(5 * width, 5 * width)

    small = make_job(model=looks_at_values, data=data, global_batch=16)
    memory = HERE.memory.model_copy(update={"total_bytes": 8 * 10**9})
    with pytest.raises(DrivetrainError, match=r"it has 8 GB, and the weights take 40 GB"):
        plan_elsewhere(small, configure(), machine_of_memory(16, 80), HERE.model_copy(update={"memory": memory}))


@pytest.mark.parametrize("as_shapes", [True, False])
def test_shapes_need_what_the_real_model_needs(as_shapes: bool) -> None:
    def factory() -> nn.Module:
        assert as_shapes or torch.empty(()).item() is not None  # no value can be asked for of a shape
        return short_stack()

    assert planned(2, 24, make_job(model=factory)).forecast == planned(2, 24, make_job(model=short_stack())).forecast


def test_what_is_pinned_holds() -> None:
    short = make_job(model=short_stack)
    assert values(planned(2, 24, short, batch_size=4))["batch.size"] == 4
    assert values(planned(2, 24, short, accumulation_steps=4))["batch.size"] == 8
    assert values(planned(2, 24, short, activations="recompute"))["memory.activations"] == "recompute"
    assert values(planned(2, 24, short, precision="fp32"))["precision.dtype"] == "fp32"
    with pytest.raises(DrivetrainError):
        planned(1, 0.0045, parallel_strategy="single")
    sharded = planned(2, 24, short, parallel_strategy="fsdp").choices["distributed.strategy"]
    assert (sharded.value, sharded.reason[:9]) == ("fsdp", "asked for")
    with pytest.raises(DrivetrainError, match=r"expert_parallel on .* is not planned for another machine"):
        planned(2, 24, short, parallel_strategy="expert_parallel")
    less = planned(1, 0.012, gpu_memory_fraction=0.6).choices["batch.size"].value
    assert less < planned(1, 0.012, gpu_memory_fraction=1.0).choices["batch.size"].value


def test_batch_normalisation_keeps_a_rank_s_share_together() -> None:
    plan = planned(2, 24, make_job(norm=True))
    assert plan.choices["batch.size"].value == 32
    assert "part of what is learned" in plan.choices["batch.size"].reason


def test_the_line_is_the_peak_of_a_step_that_is_followed() -> None:
    """Needs are a line from at most 16 samples; a step of 64 that is followed lies on it."""
    job = make_job()
    needs = needs_of(job, Stack(), "fp32", 64, 10**9)
    followed = simulate(Stack(), job.loss, torch.zeros(64, 32, WIDTH), Precision("fp32", "cpu"), accumulates=True)
    assert needs.keep.peak_bytes(64) == pytest.approx(needs.held.total + followed.peak_bytes, rel=0.01)
    assert needs.recompute.peak_bytes(64) < 0.6 * needs.keep.peak_bytes(64)
    assert needs.block_bytes == WEIGHTS // NUM_BLOCKS


@pytest.mark.parametrize(
    ("length", "flags", "num_samples"),
    [
        ({"epochs": 3}, {}, 3 * 256),
        ({"epochs": 3}, {"max_steps": 5}, 256 + 200),  # steps of 100, 100, 56, 100, 100
        ({"epochs": 3}, {"max_steps": 1000}, 3 * 256),
        ({"epochs": 3}, {"epochs": 7}, 7 * 256),
        ({"max_steps": 1000}, {}, 333 * 256 + 100),
        ({"max_steps": 1000}, {"max_steps": 2}, 200),
    ],
)
def test_the_forecast_is_for_as_many_samples_as_asked_for(
    length: dict[str, int], flags: dict[str, int], num_samples: int
) -> None:
    job = make_job(**{"model": short_stack, "max_steps": None, "global_batch": 100, **length})
    assert planned(1, 80, job, **flags).forecast.num_samples == num_samples


def test_time_follows_from_flops_and_data_sheets() -> None:
    """By hand: 989.4 TFLOP/s of an H100 at a stated half, and the FLOPs that shapes give."""
    width = 8192
    inputs = torch.randn(1, 1, 1).expand(64, 64, width)
    job = make_job(model=lambda: nn.Linear(width, width, bias=False), data=inputs)
    found = plan_elsewhere(job, configure(), machine_named("2x8xH100"), HERE, of_peak=0.5).forecast.time
    assert found is not None
    first, last = found.rows[0], found.row
    flops = 2 * 2 * 64 * 64 * width**2  # forward, and the gradient of the weights
    optimizer = 2 * 4 * 4 * width**2 / (3350e9 * EXPECTED.of_bandwidth)  # weight, gradient, two moments, both ways
    assert first.step_seconds == pytest.approx(flops / (0.5 * 989.4e12) + optimizer, rel=0.01)
    assert last.num_devices == 16
    num_bytes = 4 * width**2
    assert found.sent_bytes == pytest.approx(2 * 15 / 16 * num_bytes)
    # One layer has nothing to hide its exchange behind but what is before its last bucket: the network is the limit.
    assert last.exchange_seconds > found.sent_bytes / (400e9 * EXPECTED.of_network)
    assert last.job_seconds == pytest.approx(4 * last.step_seconds)
    assert any("50% of 989 TFLOP/s in bf16, as stated" in each for each in found.assumes)
    alone = plan_elsewhere(job, configure(), machine_of_memory(2, 80), HERE)
    assert alone.forecast.time is None
    assert "the rate of such a GPU is not known" in " ".join(alone.notes)


def test_a_measured_step_is_scaled_by_the_rates_of_both_gpus() -> None:
    """The same GPU takes the same time; another is between the ratios of its FLOP/s and of its memory."""
    flops = 64 * 2 * 2 * WIDTH  # of one sample, whatever it is
    h200 = MeasuredStep("recorded", "recorded", 1e-3, 989.4e12, 4800e9)
    assert h200.on(989.4e12, 4800e9, flops) == (1.0, 1.0, 1.0)
    expected, best, worst = h200.on(312e12, 2039e9, flops)
    assert (best, worst) == pytest.approx((4800 / 2039, 989.4 / 312))
    assert best <= expected <= worst
    time = plan_elsewhere(make_job(), configure(), machine_named("H200"), HERE, h200).forecast.time
    assert time is not None
    assert (time.basis, time.row.step_seconds) == ("recorded", pytest.approx(64e-3))


def record_run(folder: Path, seconds: list[float], busy_percent: float | None, **of_plan: Any) -> None:
    """Write what a run on one H200 leaves behind, with steps of 64 samples that take so long."""
    folder.mkdir(exist_ok=True)
    gpu = machine_named("H200").gpus()[0]
    (folder / "hardware.json").write_text(json.dumps({"gpus": [json.loads(gpu.to_json())]}))
    (folder / "plan.yaml").write_text(
        json.dumps({"num_devices": 1, "device": "cuda:0", "precision": "bf16", "accumulation": 1, **of_plan})
    )
    row = {"epoch": 0, "samples": 64, "num_items": 64, "loss": 1.0}
    rows = [{**row, "step": n, "seconds": each} for n, each in enumerate(seconds, 1)]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    looks = [(0, 0.0), *((step, busy_percent) for step in range(2, len(seconds) - 1)), (len(seconds), 0.0)]
    devices = [{"step": n, "device": "gpu0", "utilisation_percent": it} for n, it in looks if busy_percent is not None]
    devices += [{"step": n, "device": "cpu", "utilisation_percent": 100.0} for n, _ in looks]
    (folder / "gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in devices))


def test_a_run_on_a_gpu_is_what_a_forecast_can_start_from(tmp_path: Path) -> None:
    record_run(tmp_path, [9.0, 9.0, 0.2, 0.2, 0.2, 0.3, 0.1, 0.2], None)
    found = MeasuredStep.of_run(tmp_path)
    assert (found.sample_seconds, found.peak, found.bandwidth) == pytest.approx((0.2 / 64, 989.4e12, 4800e9))
    record_run(tmp_path, [0.2] * 8, None, num_devices=4)
    with pytest.raises(DrivetrainError, match="several GPUs"):
        MeasuredStep.of_run(tmp_path)


def forecast_from(folder: Path, machine: str = "8xH200") -> TimeForecast:
    time = plan_elsewhere(
        make_job(), configure(), machine_named(machine), HERE, MeasuredStep.of_run(folder)
    ).forecast.time
    assert time is not None
    return time


def test_what_the_host_takes_to_launch_is_not_divided_by_the_number_of_gpus(tmp_path: Path) -> None:
    """Of a step of 25 ms the GPU computes for 2: 8 GPUs spare at most 7/8 of these, and the host is as slow as before.

    By hand: a step takes 23 ms in which the GPU waits and 2 / 8 ms of work, or, where this work is done while the
    host launches the next kernel, all of the 25 ms.
    """
    record_run(tmp_path, [0.025] * 12, 8.0)
    time = forecast_from(tmp_path)
    first, last = time.rows[0], time.row
    assert first.step_seconds == pytest.approx(0.025)
    best, worst = last.step_seconds_range
    assert best == pytest.approx(0.023 + 0.002 / 8, rel=0.02)
    assert last.step_seconds == pytest.approx(0.025, rel=0.02)
    assert 0.025 <= worst < 0.026, "the exchange of a small model is all that is added"
    assert last.speedup < 1.1
    assert any("busy for 8% of the time" in each and "does not shrink" in each for each in time.assumes)
    # A GPU of a third of the rates has three times the work, still less than what the host takes.
    assert forecast_from(tmp_path, "A100-80").row.step_seconds == pytest.approx(0.025, rel=0.01)
    # In two micro-steps, half of which one GPU may do at once, the host launches half as much.
    record_run(tmp_path, [0.025] * 12, 8.0, accumulation=2)
    assert forecast_from(tmp_path, "H200").row.step_seconds == pytest.approx(0.0125)


def test_a_busy_gpu_shares_its_work(tmp_path: Path) -> None:
    """What is busy all the time divides; of what no telemetry is recorded, the range and the words say what is not."""
    record_run(tmp_path, [2.5] * 12, 100.0)
    time = forecast_from(tmp_path)
    assert time.row.speedup == pytest.approx(8, rel=0.01)
    record_run(tmp_path, [2.5] * 12, 90.0)
    half_idle = forecast_from(tmp_path).row
    # By hand: the GPU waits in a tenth of the step at least, and in a fifth if it computes for half of that time.
    assert half_idle.step_seconds_range[0] == pytest.approx(0.25 + 0.9 * 2.5 / 8, rel=0.01)
    assert half_idle.step_seconds == pytest.approx(0.5 + 0.8 * 2.5 / 8, rel=0.01)
    record_run(tmp_path, [0.0025] * 12, None)
    time = forecast_from(tmp_path)
    assert any("how busy the GPU was is not recorded" in each for each in time.assumes)
    assert time.row.step_seconds_range[1] >= 0.0025, "nothing says that it is not all launching"


def test_waiting_for_data_is_not_launching(tmp_path: Path) -> None:
    """Of 100 ms a step waits 50 for data, which is told; in the other 50 the GPU computes all the time."""
    record_run(tmp_path, [0.1] * 12, 50.0)
    row = {"step": 12, "steps": 12, "seconds": 1.2, "phase_steps": 12, "phases": {"data": 0.05, "forward": 0.05}}
    (tmp_path / "speed.jsonl").write_text(json.dumps(row) + "\n")
    time = forecast_from(tmp_path)
    assert time.rows[0].step_seconds == pytest.approx(0.05)
    assert time.row.speedup > 7
    assert any("50 ms for which each step waited for data are left out" in each for each in time.assumes)


def test_a_measured_launch_is_the_least_that_a_micro_step_takes() -> None:
    """The host launches for 8 of 10 ms: 8 GPUs, which have 10 / 8 ms of work each, still wait for these 8."""
    measured = MeasuredStep("measured", "measured", 0.01 / 64, 989.4e12, 4800e9, 0.0, 64, None, 0.008)
    time = plan_elsewhere(make_job(), configure(), machine_named("8xH200"), HERE, measured).forecast.time
    assert time is not None
    assert [time.rows[0].step_seconds, time.row.compute_seconds] == pytest.approx([0.01, 0.008])
    assert any("8 ms to launch a micro-step" in each for each in time.assumes)


def test_what_was_measured_here_knows_what_is_launched() -> None:
    """Of two sizes that were tried, 8 samples take 9 ms and 64 take 10: of the latter the host launches for 0.8."""
    tried = [(8, 9e-3, 0.99), (64, 10e-3, 0.8)]
    values = {"distributed.strategy": "single", "precision.dtype": "bf16", "batch.size": 64}
    found = Plan(
        job="stack",
        global_batch=64,
        num_steps=4,
        choices={name: Choice(value=value, reason="measured") for name, value in values.items()},
        forecast=Forecast(memory=MemoryForecast(parameters=1, gradients=1), step_seconds=10e-3),
        tried=tuple(
            Tried(
                way=StepWay(micro_batch=size, precision="bf16"),
                measurement=Measurement(sample_seconds=seconds / size, launch_share=share),
            )
            for size, seconds, share in tried
        ),
        measured=True,
    )
    step = MeasuredStep.of_plan(found, machine_named("H200").hardware(HERE))
    assert (step.launch_seconds, step.micro_batch) == (pytest.approx(8e-3), 64)


def test_settings_suit_the_machine_that_is_planned_for(capsys: Any) -> None:
    """A laptop without a GPU may ask what fp16 does on two of them."""
    assert main(["plan", "digits", "--for", "2xT4", "--precision", "fp16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"]["precision.dtype"]["value"] == "fp16"


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch, drivetrain as dt\n"
        "dt.train(dt.Job(name='mine', model=lambda: torch.nn.Linear(3, 2), data=torch.randn(32, 3),\n"
        "    loss=lambda m, b: m(b).square().mean(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),\n"
        "    global_batch=8, epochs=1))\n"
    )
    flags = ["--output-dir", str(tmp_path / "runs")]
    assert main(["plan", str(script), "--for", "2xH100", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["choices"]["batch.size"]["value"] == 4
    assert found["forecast"]["memory"]["optimizer"] == 0
    assert [row["num_devices"] for row in found["forecast"]["time"]["rows"]] == [1, 2]
    assert found["forecast"]["time"]["basis"] == "counted"
    assert main(["plan", str(script), "--gpus", "2", "--gpu-memory", "24", *flags]) == 0
    assert "nothing was measured there" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--for", "4xL44"], "did you mean `L4`?"),
        (["--for", "4xL4", "--gpus", "2"], "it says already"),
        (["--gpus", "2"], "--gpus 8 --gpu-memory 24"),
        (["--for", "4xL4", "--measure"], "there is no GPU to measure on"),
        (["--for", "4xL4", "--mfu", "0.4", "--measure"], "keep one of them"),
        (["--mfu", "0.4"], "add --for"),
        (["--for", "0xL4"], "0 GPUs"),
    ],
)
def test_what_contradicts_itself(flags: list[str], said: str, capsys: Any) -> None:
    assert main(["plan", "digits", *flags]) in (1, 2)
    assert said in capsys.readouterr().err
