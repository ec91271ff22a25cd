"""No prediction sees what comes after it, and play reads exactly what training reads."""

import pytest
import torch

from drivetrain.recipes.darkroom.contexts import UNCOUNTED, Context
from drivetrain.recipes.darkroom.environment import Darkroom
from drivetrain.recipes.darkroom.play import play
from drivetrain.recipes.darkroom.recipe import accuracy, action_loss
from drivetrain.recipes.darkroom.source import History
from drivetrain.recipes.darkroom.transformer import BEGIN, CURRENT, CUT, PREVIOUS, DistillationTransformer

ROOM = Darkroom(5, 3)
KINDS = ("plain", "two-region")


def make_model(context: Context) -> DistillationTransformer:
    torch.manual_seed(0)
    model = DistillationTransformer(ROOM, context.num_episodes * ROOM.horizon, 16, 2, 2).double().eval()
    for parameter in model.parameters():  # far from zero, so that whatever is read makes a difference
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_history(num: int = 2, num_episodes: int = 9, seed: int = 0) -> History:
    generator = torch.Generator().manual_seed(seed)
    shape = (num, num_episodes, ROOM.horizon)
    return History(
        *(torch.randint(most, shape, generator=generator, dtype=torch.uint8) for most in (ROOM.num_cells, 5, 2))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_step_changes_no_earlier_prediction(kind) -> None:
    """Step by step, each of cell, action and reward; what comes before does change predictions."""
    context = Context(kind, 4, ROOM.horizon)
    model, history = make_model(context), make_history(num=1)
    *steps, labels = context.training_set(history).tensors
    length = labels.shape[1]
    logits = model(*steps)
    for place in range(length):
        cells, before, rewards, regions = (each.clone() for each in steps)
        cells[:, place] = (cells[:, place] + 7) % ROOM.num_cells
        if place + 1 < length:  # the action and reward of this step stand in the next token
            before[:, place + 1] = (before[:, place + 1] + 1) % 5
            rewards[:, place + 1] = 1 - rewards[:, place + 1]
        changed = model(cells, before, rewards, regions)
        assert torch.equal(changed[:, :place], logits[:, :place])
        assert bool((changed[:, place:] != logits[:, place:]).any(dim=2).all())

        # Not even its own action: only the cell of the query is read with it.
        own = model(steps[0], before, rewards, regions)
        assert torch.equal(own[:, : place + 1], logits[:, : place + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_the_actions_taken_after_what_is_read(kind) -> None:
    context = Context(kind, 4, ROOM.horizon)
    history = make_history(num=1)
    cells, before, rewards, regions, labels = (each.long() for each in context.training_set(history).tensors)
    flat = [each.flatten().tolist() for each in history]
    length, begins = 4 * ROOM.horizon, [0, 2, 4]
    half = length // 2
    expected = [(begin * ROOM.horizon, 0 if kind == "plain" else half, length) for begin in begins]
    if kind == "two-region":  # a beginning without a previous region, and padding behind it
        expected.insert(0, (0, 0, half))
    assert len(labels) == len(expected)
    for row, (first, current, end) in enumerate(expected):
        for place in range(length):
            step = first + place
            if place >= end:
                assert labels[row, place] == UNCOUNTED
                continue
            is_begin = first == 0
            assert cells[row, place] == flat[0][step]
            assert before[row, place] == (flat[1][step - 1] if place else BEGIN if is_begin else CUT)
            assert rewards[row, place] == (flat[2][step - 1] if place else 0)
            assert regions[row, place] == (PREVIOUS if place < current else CURRENT)
            assert labels[row, place] == (flat[1][step] if place >= current else UNCOUNTED)


def test_padding_and_the_previous_region_do_not_count() -> None:
    context = Context("two-region", 4, ROOM.horizon)
    model, batch = make_model(context), [*context.training_set(make_history()).tensors]
    *steps, labels = batch
    logits = model(*steps)
    chosen = [(row, place) for row in range(len(labels)) for place in range(12) if labels[row, place] != UNCOUNTED]
    assert len(chosen) == len(labels) * 6
    by_hand = -sum(logits[row, place].log_softmax(0)[int(labels[row, place])] for row, place in chosen)
    found = action_loss(model, batch)
    assert found.count == len(chosen)
    torch.testing.assert_close(found.total.double(), by_hand, rtol=1e-5, atol=0)
    right = sum(int(logits[row, place].argmax()) == int(labels[row, place]) for row, place in chosen)
    counted = accuracy(logits, batch)
    assert (int(counted.total), int(counted.count)) == (right, len(chosen))


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        ("plain", [(0, 0), (0, 0), (0, 0), (0, 0), (1, 1), (2, 2)]),
        ("two-region", [(0, 0), (0, 0), (0, 2), (0, 2), (2, 4), (2, 4)]),
    ],
)
def test_what_is_seen_from_each_episode(kind, bounds: list[tuple[int, int]]) -> None:
    assert [Context(kind, 4, ROOM.horizon).bounds(episode) for episode in range(6)] == bounds


class Watched(DistillationTransformer):
    """Keeps the logits of each single step that it is asked for."""

    def extend(self, cells, before, rewards, regions, cache=None):
        logits, after = super().extend(cells, before, rewards, regions, cache)
        if cells.shape[1] == 1:
            self.asked.append((cells[:, 0].clone(), logits[:, 0]))
        return logits, after


@pytest.mark.parametrize("kind", KINDS)
def test_play_predicts_what_a_whole_context_without_a_cache_predicts(kind) -> None:
    """The game is replayed step by step from its record, each context written out by hand."""
    context = Context(kind, 4, ROOM.horizon)
    model = make_model(context)
    model.__class__, model.asked = Watched, []
    goals, num_episodes = torch.tensor([7, 13, 24]), 9
    returns = play(model, ROOM, context, goals, num_episodes, seed=3)
    asked = model.asked
    model.__class__ = DistillationTransformer
    assert returns.shape == (3, num_episodes)
    assert len(asked) == num_episodes * ROOM.horizon

    generator = torch.Generator().manual_seed(3)
    cells, actions, rewards = [], [], []
    cell = torch.full((3,), ROOM.start)
    for step, (at, logits) in enumerate(asked):
        episode = step // ROOM.horizon
        if step % ROOM.horizon == 0:
            cell = torch.full((3,), ROOM.start)
        assert torch.equal(at, cell.to(torch.uint8))
        first, current = (each * ROOM.horizon for each in context.bounds(episode))
        cells.append(cell)
        opens = torch.full((3,), CUT if first else BEGIN)
        before = torch.stack([opens, *actions[first:step]], dim=1)
        paid = torch.stack([torch.zeros(3), *rewards[first:step]], dim=1)
        regions = torch.tensor([PREVIOUS if each < current else CURRENT for each in range(first, step + 1)]).expand(
            3, -1
        )
        whole = model(torch.stack(cells[first:], dim=1), before, paid, regions)
        torch.testing.assert_close(logits, whole[:, -1], rtol=1e-9, atol=1e-9)
        action = torch.multinomial(logits.float().softmax(1), 1, generator=generator).squeeze(1)
        cell, reward = ROOM.step(cell, action, goals)
        actions.append(action)
        rewards.append(reward)
    assert torch.equal(torch.stack(rewards, dim=1).view(3, num_episodes, -1).sum(2), returns)
    assert float(returns.sum()) > 0
