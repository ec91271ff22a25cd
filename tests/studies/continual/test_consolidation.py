"""Elastic weight consolidation against a reference that is written the long way, in float64."""

import copy

import pytest
import torch
from studies.continual.consolidation import Consolidated, fisher
from torch import Tensor, nn
from torch.nn import functional


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)).double()


def inputs(num_samples: int, seed: int) -> Tensor:
    return torch.randn(num_samples, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fisher_the_long_way(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Sample by sample, class by class: p(class) × the square of the gradient of log p(class)."""
    total = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for row in tokens:
        probabilities = model(row).detach().softmax(-1)
        for label, probability in enumerate(probabilities):
            model.zero_grad()
            functional.log_softmax(model(row), -1)[label].backward()
            for name, value in model.named_parameters():
                total[name] += probability * value.grad.square() / len(tokens)
    model.zero_grad()
    return total


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_fisher(chunk: int) -> None:
    model, tokens = network(), inputs(7, 1)
    expected = fisher_the_long_way(copy.deepcopy(model), tokens)
    found = fisher(model, tokens, chunk)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-10, abs=1e-14), name
    assert all(value.grad is None for value in model.parameters())


def test_it_is_not_the_gradient_of_the_labels() -> None:
    """The Fisher of labels that are taken as given is another thing: it vanishes where all labels are learned."""
    model, tokens = network(), inputs(6, 2)
    labels = model(tokens).argmax(1)
    total = torch.zeros_like(next(model.parameters()))
    for row, label in zip(tokens, labels, strict=True):
        model.zero_grad()
        functional.cross_entropy(model(row), label).backward()
        total += next(model.parameters()).grad.square() / len(tokens)
    assert not torch.allclose(total, fisher(model, tokens, 100)["0.weight"], rtol=0.05)


def test_the_gradient_is_that_of_the_sum_over_tasks() -> None:
    """What is kept is of one task's size, however many there were; its gradient is that of all their penalties."""
    consolidated, strength = Consolidated(network(), strength=3.0), 3.0
    kept: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for task in range(3):
        with torch.no_grad():  # as if it had been trained
            for value in consolidated.network.parameters():
                value += 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(task)).double()
        tokens = inputs(6, 10 + task)
        reference = copy.deepcopy(consolidated.network)
        kept.append(
            (
                fisher_the_long_way(reference, tokens),
                {name: value.detach().clone() for name, value in reference.named_parameters()},
            )
        )
        consolidated.consolidate(tokens)
    with torch.no_grad():
        for value in consolidated.network.parameters():
            value += 0.1

    reference = copy.deepcopy(consolidated.network)
    penalty = torch.zeros((), dtype=torch.float64)
    for importance, anchor in kept:
        for name, value in reference.named_parameters():
            penalty = penalty + strength / 2 * (importance[name] * (value - anchor[name]).square()).sum()
    penalty.backward()
    consolidated.penalty().backward()
    for (name, expected), found in zip(reference.named_parameters(), consolidated.network.parameters(), strict=True):
        assert found.grad == pytest.approx(expected.grad, rel=1e-9, abs=1e-12), name


def test_before_the_first_task_nothing_pulls() -> None:
    consolidated = Consolidated(network(), strength=100.0)
    consolidated.penalty().backward()
    assert float(consolidated.penalty().detach()) == 0.0
    assert all(value.grad is None or not value.grad.any() for value in consolidated.parameters())


def test_what_it_knows_is_saved_with_the_weights() -> None:
    consolidated, twin = Consolidated(network(), strength=2.0), Consolidated(network(5), strength=2.0)
    consolidated.consolidate(inputs(4, 1))
    twin.load_state_dict(consolidated.state_dict())
    with torch.no_grad():
        for one in (consolidated, twin):
            for value in one.network.parameters():
                value += 0.1
    assert twin.penalty().item() == consolidated.penalty().item() > 0


def test_outputs_are_the_networks() -> None:
    consolidated = Consolidated(network(), strength=1.0)
    assert torch.equal(consolidated(inputs(3, 0)), consolidated.network(inputs(3, 0)))
