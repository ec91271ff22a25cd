"""A weight that no rank used in a step has no gradient there, as in a plain loop: decay and momentum leave it alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.fsdp import FSDPModule

import drivetrain as dt
from tests.gloo_pool import GlooPool
from tests.strategies import usage_runs

needs_unused = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch cannot reduce unused shards"
)


def assert_as_plain(trained: Any, kind: str) -> None:
    weights = usage_runs.plain_weights(kind)
    apart = {name: float(np.abs(trained.weights[name] - value).max()) for name, value in weights.items()}
    assert max(apart.values()) < 1e-12, apart


@needs_unused
@pytest.mark.parametrize(
    "settings",
    [{}, {"fsdp_accumulate": "shards"}, {"fsdp_offload": True}, {"activations": "recompute"}, {"batch_size": 4}],
    ids=str,
)
def test_fsdp_leaves_unused_weights_alone(gloo_pool: GlooPool, tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"parallel_strategy": "fsdp", **settings}
    trained = gloo_pool.run(usage_runs.run_rare, str(tmp_path), "branch", settings, world=2)[0]
    assert_as_plain(trained, "branch")


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 3)])
def test_every_strategy_does(gloo_pool: GlooPool, tmp_path: Path, strategy: str, world: int) -> None:
    if strategy == "fsdp" and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch cannot reduce unused shards")
    settings = {"parallel_strategy": strategy, **({} if strategy != "single" else {"find_unused_parameters": False})}
    trained = gloo_pool.run(usage_runs.run_rare, str(tmp_path), "branch", settings, world=world)[0]
    assert_as_plain(trained, "branch")


@needs_unused
@pytest.mark.parametrize("rest", ["ddp", "fsdp"])
def test_a_mixture_that_did_not_run(gloo_pool: GlooPool, tmp_path: Path, rest: str) -> None:
    settings = {"parallel_strategy": "expert_parallel", "expert_rest": rest, "batch_size": 4}
    trained = gloo_pool.run(usage_runs.run_rare, str(tmp_path), "mixture", settings, world=2)[0]
    assert_as_plain(trained, "mixture")


@pytest.mark.parametrize("from_call", [1, 3])
def test_ranks_that_use_other_weights_are_refused_without_it(
    gloo_pool: GlooPool, tmp_path: Path, from_call: int
) -> None:
    """Both weights have the same shape: nothing else would notice that their gradients were added."""
    with pytest.raises(dt.DrivetrainError, match="would add the gradients of one weight to those of another"):
        gloo_pool.run(usage_runs.run_alternating, str(tmp_path), from_call, world=2)


def test_ddp_takes_no_step_with_gradients_that_were_not_reduced(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Torch notices it in the next forward, if there is one. By then the step was taken, and may have been saved."""
    with pytest.raises(dt.DrivetrainError, match=r"no gradient reached scale, branch\.weight, branch\.bias") as raised:
        gloo_pool.run(usage_runs.run_at_the_end, str(tmp_path), world=2)
    assert "--find-unused-parameters" in str(raised.value)
    saved = [path.name for path in (tmp_path / "end" / "checkpoints").glob("step-*")]
    assert saved == ["step-00000001"]
