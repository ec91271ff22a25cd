"""The rules, as tables over machines that are not here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.hardware import Hardware
from drivetrain.plan import TARGET_BATCH, Pins, choose_settings
from drivetrain.plan.rules import choose_strategy
from tests.hardware_fixtures import load, names

GB = 10**9


def with_free_memory(machine: str, gigabytes: float, num_gpus: int | None = None) -> Hardware:
    hardware = load(machine)
    gpus = [gpu.model_copy(update={"memory_free_bytes": int(gigabytes * GB)}) for gpu in hardware.gpus[:num_gpus]]
    return hardware.model_copy(update={"gpus": tuple(gpus)})


@pytest.mark.parametrize(
    ("gigabytes", "micro_batch", "accumulation"),
    [
        (80, 16, 4),
        (20, 16, 4),
        (19.99, 12, 5),
        (14, 12, 5),
        (13.99, 8, 8),
        (10, 8, 8),
        (9.99, 4, 16),
        (6, 4, 16),
        (5.99, 2, 32),
        (0.1, 2, 32),
    ],
)
def test_the_table_for_four_gpus(gigabytes: float, micro_batch: int, accumulation: int) -> None:
    settings = choose_settings(with_free_memory("4x-l4", gigabytes))
    assert (settings.micro_batch.value, settings.accumulation.value) == (micro_batch, accumulation)
    assert settings.effective_batch == micro_batch * accumulation * 4


@pytest.mark.parametrize(
    ("machine", "strategy", "precision", "micro_batch", "accumulation", "effective"),
    [
        ("cpu-2core", "single", "fp32", 4, 64, 256),
        ("4x-l4", "ddp", "bf16", 16, 4, 256),
        ("h200", "single", "bf16", 16, 16, 256),
        ("8x-a100-80gb", "ddp", "bf16", 16, 2, 256),
        ("2x-rtx3090", "ddp", "bf16", 16, 8, 256),
        ("mixed-3090-1080", "ddp", "fp16", 4, 32, 256),
    ],
)
def test_what_each_machine_gets(
    machine: str, strategy: str, precision: str, micro_batch: int, accumulation: int, effective: int
) -> None:
    settings = choose_settings(load(machine))
    assert settings.strategy.value == strategy
    assert settings.precision.value == precision
    assert settings.micro_batch.value == micro_batch
    assert settings.accumulation.value == accumulation
    assert settings.effective_batch == effective


@pytest.mark.parametrize("machine", names())
def test_data_parallel_only_where_it_is_asked_for(machine: str) -> None:
    hardware = load(machine)
    by_rule = choose_settings(hardware).strategy
    assert by_rule.value == ("ddp" if len(hardware.gpus) > 1 else "single")
    assert not by_rule.pinned
    asked = choose_settings(hardware, Pins(strategy="data_parallel")).strategy
    assert (asked.value, asked.pinned) == ("data_parallel", True)


def test_the_oldest_gpu_decides_the_precision_and_is_named() -> None:
    precision = choose_settings(load("mixed-3090-1080")).precision
    assert precision.value == "fp16"
    assert "1080" in precision.reason
    assert choose_settings(load("mixed-3090-1080"), Pins(device_ids=(0,))).precision.value == "bf16"


def test_memory_that_others_hold_is_not_counted() -> None:
    roomy, crowded = with_free_memory("2x-rtx3090", 24), with_free_memory("2x-rtx3090", 7)
    assert choose_settings(roomy).micro_batch.value == 16
    assert choose_settings(crowded).micro_batch.value == 4
    assert choose_settings(crowded).activations.value == "recompute"


def test_small_shared_memory_means_no_workers() -> None:
    hardware = load("4x-l4")
    small = hardware.model_copy(update={"memory": hardware.memory.model_copy(update={"shm_total_bytes": 64 * 1024**2})})
    assert choose_settings(hardware).num_workers.value > 0
    assert choose_settings(small).num_workers.value == 0
    assert "/dev/shm" in choose_settings(small).num_workers.reason


def test_modes_and_devices() -> None:
    four = load("4x-l4")
    assert choose_settings(four, Pins(gpu_mode="cpu")).devices.value == ("cpu",)
    assert choose_settings(four, Pins(gpu_mode="single_gpu")).devices.value == ("cuda:0",)
    assert choose_settings(four, Pins(device="cuda:2")).devices.value == ("cuda:2",)
    assert choose_settings(four, Pins(device="cuda")).devices.value == ("cuda:0",)
    assert choose_settings(four, Pins(device_ids=(3, 1))).devices.value == ("cuda:3", "cuda:1")
    assert choose_settings(four, Pins(gpu_mode="multi_gpu")).strategy.value == "ddp"


@given(
    machine=st.sampled_from(names()),
    micro_batch=st.none() | st.integers(1, 4096),
    accumulation=st.none() | st.integers(1, 512),
    num_workers=st.none() | st.integers(0, 64),
    precision=st.sampled_from(["auto", "fp32", "bf16"]),
)
def test_what_is_pinned_is_never_overridden(machine, micro_batch, accumulation, num_workers, precision) -> None:
    pins = Pins(micro_batch=micro_batch, accumulation=accumulation, num_workers=num_workers, precision=precision)
    settings = choose_settings(load(machine), pins)
    for pin, choice in (
        (micro_batch, settings.micro_batch),
        (accumulation, settings.accumulation),
        (num_workers, settings.num_workers),
        (None if precision == "auto" else precision, settings.precision),
    ):
        assert choice.pinned == (pin is not None)
        assert pin is None or choice.value == pin
        assert choice.reason
    num_devices = len(settings.devices.value)
    product = settings.micro_batch.value * settings.accumulation.value * num_devices
    assert settings.effective_batch == product
    if accumulation is None and settings.micro_batch.value * num_devices <= TARGET_BATCH:
        assert TARGET_BATCH - settings.micro_batch.value * num_devices < product <= TARGET_BATCH


@pytest.mark.parametrize(
    ("held_gb", "free_gb", "ranks", "expected", "why"),
    [
        (None, 0, 1, "single", "one process"),
        (None, 80, 1, "single", "one process"),
        (500, 80, 1, "single", "one process"),
        (None, 80, 4, "ddp", "whole copy"),
        (64, 80, 4, "ddp", "take 64 GB, and 80 GB are free on a GPU: a whole copy on each"),
        (64.1, 80, 4, "fsdp", "a part of 16 GB on each of 4"),
        (256, 80, 4, "fsdp", "a part of 64 GB on each of 4"),
        (257, 80, 4, "fsdp", "even a part of 64.2 GB on each of 4 is too much"),
    ],
)
def test_a_model_that_does_not_fit_whole_is_sharded(
    held_gb: float | None, free_gb: float, ranks: int, expected: str, why: str
) -> None:
    held = None if held_gb is None else int(held_gb * GB)
    choice = choose_strategy(held, int(free_gb * GB), ranks)
    assert choice.value == expected
    assert why in choice.reason
    assert ("--fsdp-offload" in str(choice.alternatives)) == ("too much" in choice.reason)


@pytest.mark.parametrize(
    ("held_gb", "offloaded_gb", "ranks", "expected"),
    [
        (64, 32, 1, "single"),
        (100, 50, 1, "deepspeed"),
        (200, 100, 1, "single"),  # it does not fit either, and the error says what would
        (200, 25, 4, "fsdp"),
        (400, 50, 4, "deepspeed"),
        (800, 100, 4, "fsdp"),
    ],
)
def test_deepspeed_is_taken_where_nothing_else_fits(
    held_gb: float, offloaded_gb: float, ranks: int, expected: str
) -> None:
    choice = choose_strategy(held_gb * GB, 80 * GB, ranks, offloaded_gb * GB)
    assert choice.value == expected
    assert ("host memory" in choice.reason) == (expected == "deepspeed")
    assert choose_strategy(held_gb * GB, 80 * GB, ranks).value != "deepspeed", "not where it cannot be used"


def test_the_zero_stage_is_that_of_the_strategy() -> None:
    four = load("4x-l4")
    assert choose_settings(four, Pins()).zero_stage.value == 0
    assert choose_settings(four, Pins(strategy="deepspeed")).zero_stage.value == 2
    assert choose_settings(four, Pins(strategy="deepspeed", zero_stage=3)).zero_stage.value == 3


@pytest.mark.parametrize("pins", [Pins(precision="bf16"), Pins(mixed=True)])
def test_bf16_on_a_cpu_without_instructions_for_it_says_so(pins: Pins) -> None:
    """torch itself prints fifty lines of C++ frames there, which the run leaves out."""
    machine = load("cpu-2core")
    without, with_it = (
        choose_settings(machine.model_copy(update={"cpu": machine.cpu.model_copy(update={"precisions": known})}), pins)
        for known in (("fp64", "fp32"), ("fp64", "fp32", "bf16"))
    )
    assert "no instructions for it: expect it to be slower" in without.precision.reason
    assert "instructions" not in with_it.precision.reason
    assert without.precision.pinned
    assert with_it.precision.pinned
    four = with_free_memory("4x-l4", 20)
    assert choose_settings(four, Pins(precision="bf16")).precision.reason == "asked for"
