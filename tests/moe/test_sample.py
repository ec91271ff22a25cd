"""What a layer keeps for whoever looks at it after a step: the tokens that counted, once each, and who got how many."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from drivetrain.core.hook import StepContext
from drivetrain.core.isolation import uncounted
from drivetrain.moe import Balance, MixtureOfExperts, Settlement, Slots
from tests.api.jobs import Variant
from tests.gloo_pool import GlooPool
from tests.moe.jobs import Mixture, run_mixture, the_mixture

CPU = torch.device("cpu")


def layer_of(**changes: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(4, 3, 8, k=2, num_slots=5, balance=Balance(0.0), **changes)


def test_the_sample_is_of_the_last_tokens_that_counted() -> None:
    layer = layer_of()
    first, second = torch.randn(6, 4), torch.randn(2, 5, 4)
    layer(first)
    tokens, per_sample = layer.tally.sampled(CPU)
    assert torch.equal(tokens, first)
    assert per_sample == 1
    layer(second)
    tokens, per_sample = layer.tally.sampled(CPU)
    assert torch.equal(tokens, second.flatten(0, 1))
    assert per_sample == 5
    with uncounted(layer):
        layer(first)
    layer.eval()
    layer(first)
    assert torch.equal(layer.tally.sampled(CPU)[0], second.flatten(0, 1)), "weight 0 and validation change nothing"


def test_what_is_computed_again_is_not_kept_again() -> None:
    layer = layer_of()
    inputs = torch.randn(6, 4, requires_grad=True)
    output = checkpoint(layer, inputs, use_reentrant=False)
    layer.tally.samples.clear()
    output.sum().backward()
    assert layer.tally.sampled(CPU)[0].shape[0] == 0


def test_a_compiled_layer_keeps_the_same() -> None:
    layer = layer_of(way="dense")
    tokens = torch.randn(7, 4)
    torch.compile(layer, backend="aot_eager")(tokens)
    assert torch.equal(layer.tally.sampled(CPU)[0], tokens)
    with uncounted(layer):
        torch.compile(layer, backend="aot_eager")(tokens + 1)
    assert torch.equal(layer.tally.sampled(CPU)[0], tokens)


def test_uses_add_up_and_go_with_their_expert() -> None:
    layer = layer_of()
    end = Settlement(layer)
    expected = torch.zeros(5, dtype=torch.int64)
    for _ in range(3):
        layer(torch.randn(20, 4))
        end.settle()
        expected += layer.load
    assert torch.equal(layer.uses, expected)
    assert expected.sum() == 3 * 20 * 2
    slots = Slots(layer)
    layer.together[0, 1] = layer.together[1, 0] = 0.5
    slots.merge(0, 2, 0.5)
    assert layer.uses[0] == expected[0] + expected[2]
    slots.activate(slots.grow(0) or 0)
    put_back = slots.saved([0, 1])
    slots.merge(0, 1, 0.5)
    assert layer.uses.tolist() == [expected.sum(), 0, 0, 0, 0]
    assert not layer.together.any()
    put_back()
    assert layer.together[0, 1] == 0.5
    assert layer.uses[1] == expected[1]


class Eavesdropper:
    """Compares the layer's sample with the batch it is told of."""

    every = 2

    def __init__(self) -> None:
        self.sizes: list[int | None] = []

    def __call__(self, context: StepContext) -> None:
        batch = context.batch()
        self.sizes.append(None if batch is None else len(batch[0]))
        if batch is None:
            return
        layer = the_mixture(context.model)
        tokens, per_sample = layer.tally.sampled(CPU)
        assert per_sample == 1
        assert len(tokens) == len(batch[0]) == len(batch[1])
        # The layer before it has moved since, by one step of a small rate: so they are close and not equal.
        again = context.model.first(batch[0])  # type: ignore[operator]
        assert (again - tokens).abs().max() < 0.2
        assert len(tokens) == 1 or (again.roll(1, 0) - tokens).abs().max() > 0.2

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def eavesdrop(folder: str, global_batch: int, micro_batch: int) -> list[int | None]:
    hook = Eavesdropper()
    variant = Variant(steps=6, global_batch=global_batch, num_samples=60)
    run_mixture(folder, variant, Mixture(num_slots=7), micro_batch, changes={"hooks": [hook]})
    return hook.sizes


@pytest.mark.parametrize(
    ("world", "global_batch", "micro_batch", "expected"),
    [(1, 10, 10, [[10]]), (1, 10, 4, [[2]]), (3, 10, 4, [[3], [3], [4]]), (3, 4, 1, [[1], [1], [1]])],
)
def test_a_hook_sees_the_batch_that_the_sample_is_of(
    gloo_pool: GlooPool, tmp_path: Path, world: int, global_batch: int, micro_batch: int, expected: list[list[int]]
) -> None:
    """In the last case two ranks end the step with a sample at weight 0: it is neither kept nor told."""
    args = (str(tmp_path), global_batch, micro_batch)
    found = gloo_pool.run(eavesdrop, *args, world=world)
    assert found == [sizes * 3 for sizes in expected]
