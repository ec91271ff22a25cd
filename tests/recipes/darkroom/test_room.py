"""The room against a step function of its own; the optimum and random actions against search and enumeration."""

import itertools
from collections import deque

import pytest
import torch

from drivetrain.recipes.darkroom.environment import Darkroom
from drivetrain.recipes.darkroom.play import random_return
from drivetrain.recipes.darkroom.source import ActorCritic, History


def walk(size: int, place: tuple[int, int], action: int) -> tuple[int, int]:
    """One step by cases, apart from the room's own tables."""
    x, y = place
    if action == 0 and x < size - 1:
        x += 1
    elif action == 1 and x > 0:
        x -= 1
    elif action == 2 and y < size - 1:
        y += 1
    elif action == 3 and y > 0:
        y -= 1
    return x, y


@pytest.mark.parametrize("size", [5, 9])
def test_steps_are_those_of_a_walk_by_cases(size: int) -> None:
    room = Darkroom(size, 20)
    assert divmod(room.start, size) == (size // 2, size // 2)
    generator = torch.Generator().manual_seed(0)
    goals = torch.arange(room.num_cells)
    cells = torch.randint(room.num_cells, goals.shape, generator=generator)
    places = [divmod(int(cell), size) for cell in cells]
    rewarded = 0
    for _ in range(60):
        actions = torch.randint(5, goals.shape, generator=generator)
        cells, rewards = room.step(cells, actions, goals)
        places = [walk(size, place, int(action)) for place, action in zip(places, actions, strict=True)]
        assert [divmod(int(cell), size) for cell in cells] == places
        assert rewards.tolist() == [
            float(place == divmod(int(g), size)) for place, g in zip(places, goals, strict=True)
        ]
        rewarded += int(rewards.sum())
    assert rewarded > 0


@pytest.mark.parametrize(("size", "horizon"), [(5, 10), (9, 20), (9, 5)])
def test_the_optimum_is_that_of_breadth_first_search(size: int, horizon: int) -> None:
    room = Darkroom(size, horizon)
    start = (size // 2, size // 2)
    steps_to, waiting = {start: 0}, deque([start])
    while waiting:
        place = waiting.popleft()
        for action in range(4):
            after = walk(size, place, action)
            if after not in steps_to:
                steps_to[after] = steps_to[place] + 1
                waiting.append(after)
    # The step that arrives pays, and so does each one after it; whoever starts there is first paid for staying.
    expected = [max(0, horizon - max(1, steps_to[divmod(cell, size)]) + 1) for cell in range(size**2)]
    assert room.best_return(torch.arange(size**2)).tolist() == expected


def test_random_actions_pay_what_all_walks_pay_on_average() -> None:
    size, horizon = 3, 4
    paid = torch.zeros(size**2, dtype=torch.float64)
    for actions in itertools.product(range(5), repeat=horizon):
        place = (1, 1)
        for action in actions:
            place = walk(size, place, action)
            paid[place[0] * size + place[1]] += 1
    expected = (paid / 5**horizon).float()
    torch.testing.assert_close(random_return(Darkroom(size, horizon), torch.arange(9)), expected)


def test_held_out_goals_are_spread_over_the_distances() -> None:
    room = Darkroom(9, 20)
    goals, held_out = room.split(16)
    assert sorted([*goals.tolist(), *held_out.tolist()]) == list(range(81))
    distances = room.distance(held_out)
    assert distances.tolist() == sorted(distances.tolist())
    assert set(distances.tolist()) == set(range(1, 9))
    assert float(distances.float().mean()) == pytest.approx(
        float(room.distance(torch.arange(81)).float().mean()), abs=0.2
    )
    assert torch.equal(held_out, room.split(16)[1])


def test_the_source_learns_from_random_to_nearly_the_optimum() -> None:
    room = Darkroom(5, 10)
    goals = torch.arange(25).repeat_interleave(2)
    history = ActorCritic(actor_rate=0.3).learn(room, goals, 160, seed=0)
    returns = history.rewards.sum(2).float()
    first, last = returns[:, :2].mean(), returns[:, -20:].mean()
    assert float(first) == pytest.approx(float(random_return(room, goals).mean()), abs=0.5)
    assert float(last / room.best_return(goals).mean()) > 0.85
    # A history is what the room does with its actions.
    cells = torch.full((len(goals),), room.start)
    for step in range(room.horizon):
        assert torch.equal(history.cells[:, 77, step].long(), cells)
        cells, rewards = room.step(cells, history.actions[:, 77, step].long(), goals)
        assert torch.equal(history.rewards[:, 77, step].float(), rewards)


def test_subsampled_histories_hold_every_episode_once_and_in_order() -> None:
    numbered = torch.arange(2 * 12, dtype=torch.uint8).view(2, 12, 1).expand(-1, -1, 3)
    kept = History(numbered, numbered, numbered).subsampled(4)
    assert kept.actions.shape == (8, 3, 3)
    assert kept.actions[:, :, 0].tolist() == [
        [learner * 12 + phase + 4 * place for place in range(3)] for learner in range(2) for phase in range(4)
    ]
