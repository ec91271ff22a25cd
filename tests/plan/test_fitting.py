"""What fits how, and what is said where nothing does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain.core.precision import Precision
from drivetrain.plan.fitting import (
    Held,
    MemoryLayout,
    Needs,
    by_group,
    does_not_fit,
    first_that_fits,
    layouts,
    simulate,
    ways_out,
)
from drivetrain.plan.forecast import FRAGMENTATION, MemoryModel

GB = 10**9


def needs(weights: float, kept: float, again: float | None = None, block: float = 0.0, base: float = 0.0) -> Needs:
    """With AdamW; weights, and activations of one sample kept and recomputed, in GB."""
    held = Held(parameters=round(weights * GB), gradients=round(weights * GB), optimizer=round(2 * weights * GB))
    fixed = held.total + base * GB

    return Needs(
        held=held,
        keep=MemoryModel(fixed_bytes=fixed, sample_bytes=kept * GB),
        recompute=None if again is None else MemoryModel(fixed_bytes=fixed, sample_bytes=again * GB),
        activation_bytes=round(kept * GB),
        block_bytes=round(block * GB),
        weights={"tokens": GB // 10, "blocks.0.mlp": GB, "blocks.1.mlp": GB},
        activations={"": GB // 5, "blocks.0.mlp": GB, "blocks.1": GB},
    )


@pytest.mark.parametrize(
    ("weights", "kept", "again", "num_gpus", "expected"),
    [
        (1, 2, 0.5, 1, MemoryLayout(strategy="single")),
        (1, 2, 0.5, 4, MemoryLayout(strategy="ddp", num_gpus=4)),
        (1, 30, 0.5, 1, MemoryLayout(strategy="single", recomputes=True)),
        (1, 30, 0.5, 4, MemoryLayout(strategy="ddp", num_gpus=4, recomputes=True)),
        (8, 2, 0.5, 4, MemoryLayout(strategy="fsdp", num_gpus=4)),
        (8, 20, 0.5, 4, MemoryLayout(strategy="fsdp", num_gpus=4, recomputes=True)),
        (7, 2, 0.5, 1, MemoryLayout(strategy="deepspeed", zero_stage=2, offloads_optimizer=True)),
        (7, 30, 0.5, 1, MemoryLayout(strategy="deepspeed", zero_stage=2, offloads_optimizer=True, recomputes=True)),
        (16, 2, 0.5, 2, MemoryLayout(strategy="deepspeed", num_gpus=2, zero_stage=3, offloads_optimizer=True)),
        (40, 2, 0.5, 1, None),
        (1, 30, None, 1, None),
        (1, 30, None, 8, None),  # one sample's activations are not divided by any of these
    ],
)
def test_the_cheapest_that_fits_24_gb(weights, kept, again, num_gpus, expected) -> None:
    assert first_that_fits(needs(weights, kept, again), 24 * GB, num_gpus) == expected


def test_what_each_device_holds() -> None:
    need = needs(8, 2, block=0.5)
    sharded = MemoryLayout(strategy="fsdp", num_gpus=4).forecast(need, 3)
    assert (sharded.parameters, sharded.gradients, sharded.optimizer) == (2 * GB, 2 * GB, 4 * GB)
    assert sharded.activations == 6 * GB
    assert sharded.workspace == 1.5 * GB  # three blocks are whole at a time
    assert sharded.total == 15.5 * GB
    whole = MemoryLayout(strategy="ddp", num_gpus=4).forecast(need, 3)
    assert (whole.parameters, whole.gradients, whole.optimizer, whole.workspace) == (8 * GB, 8 * GB, 16 * GB, 0)
    offloaded = MemoryLayout(strategy="deepspeed", num_gpus=4, zero_stage=2, offloads_optimizer=True).forecast(need, 1)
    assert (offloaded.parameters, offloaded.gradients, offloaded.optimizer) == (8 * GB, 2 * GB, 0)


@given(
    st.floats(0.01, 60),
    st.floats(0.01, 40),
    st.none() | st.floats(0.01, 40),
    st.integers(1, 64),
    st.integers(1, 150),
    st.floats(0, 2),
)
def test_what_is_said_to_fit_fits(weights, kept, again, num_gpus, limit_gb, block) -> None:
    need = needs(weights, kept, again, block)
    limit = limit_gb * GB
    found = first_that_fits(need, limit, num_gpus)
    if found is None:
        assert all(not layout.largest(need, limit, 1) for layout in layouts(num_gpus))
        assert all(way.saves_bytes > 0 for way in ways_out(need, limit, num_gpus))
    else:
        size = found.largest(need, limit, 512)
        forecast = found.forecast(need, size)
        assert forecast.total <= limit * (1 - FRAGMENTATION) + 512
        if size < 512:
            assert found.forecast(need, size + 1).total > limit * (1 - FRAGMENTATION) - 512


def test_ways_out_are_ranked_and_honest() -> None:
    need = needs(8, 10, 1, block=0.5)  # 32 GB held, 42 GB with a sample
    ways = ways_out(need, 24 * GB, 1)
    enough = [way.is_enough for way in ways]
    assert enough == sorted(enough, reverse=True), "those that are enough come first"
    assert [way.what.split()[0] for way in ways if way.is_enough] == ["2"]
    # On two GPUs it takes 32/2 + 1.5 + 10 = 27.5 GB with activations kept, and 18.5 with blocks recomputed.
    assert next(way for way in ways if "FSDP" in way.what).saves_bytes == pytest.approx(23.5 * GB)
    assert first_that_fits(need, 24 * GB, 2) == MemoryLayout(strategy="fsdp", num_gpus=2, recomputes=True)


def test_few_gpus_and_recomputing_come_before_many() -> None:
    need = needs(8, 30, 1, block=0.5)
    sharded = next(way for way in ways_out(need, 24 * GB, 1) if "FSDP" in way.what)
    assert sharded.what.startswith("2 GPUs like this one with FSDP and --activations recompute")


def test_the_explanation() -> None:
    need = needs(2, 30, 4, block=0.25)
    error = does_not_fit(need, 21.6 * GB, "cuda:0", "21.6 GB to use (24 GB × 0.9)")
    told = str(error)
    for words in (
        "not even one sample at a time fits on cuda:0: a step needs 38 GB, and there is 21.6 GB to use",
        "parameters        2 GB",
        "optimizer         4 GB",
        "activations      30 GB",
        "weights by module: blocks 2 GB, tokens 100 MB",
        "activations by module: blocks 2 GB, the loss and the rest 200 MB",
        "1. --activations recompute",
        "saves 26 GB)",
        "so that a sample takes 43% of what it takes now",
        "host memory, which needs 6 GB there; slower steps (saves 4 GB, not enough alone)",
    ):
        assert words in told, told


def test_where_nothing_helps_but_more_memory() -> None:
    need = Needs(
        held=Held(parameters=30 * GB), keep=MemoryModel(fixed_bytes=30 * GB, sample_bytes=GB), block_bytes=30 * GB
    )
    assert ways_out(need, 24 * GB, 1) == []
    assert "a GPU with more memory" in str(does_not_fit(need, 24 * GB, "cuda:0", "24 GB"))


def test_modules_of_a_list_count_together() -> None:
    sizes = {"blocks.0.mlp": 1, "blocks.1": 2, "model.layers.3.up": 4, "head": 8, "": 16, "0": 32, "1.norm": 64}
    assert by_group(sizes) == {
        "1.norm": 64,
        "0": 32,
        "the loss and the rest": 16,
        "head": 8,
        "model.layers": 4,
        "blocks": 3,
    }


def test_flops_are_counted_on_shapes_alone() -> None:
    """Of two linear layers: forward, gradient of the weights, and that of the inputs except the first layer's."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    found = simulate(model, lambda model, batch: model(batch).sum(), torch.zeros(5, 8), Precision("fp32", "cpu"))
    first, second = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    assert found.flops == 2 * first + 3 * second
