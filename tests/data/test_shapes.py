"""Every shape of data: one order for every world and number of workers, each sample once, and from any step on."""

import itertools
import json
import random
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, default_collate

from drivetrain.core.errors import DrivetrainError
from drivetrain.data.division import Division, Place, Position
from drivetrain.data.loader import Loader
from drivetrain.data.source import source_of
from tests.data.shapes import KINDS, Counting, Lazy, Numbers, Shrinking, WithState, loaders, weighted

SEED = 11


class Seen(NamedTuple):
    places: list[Place]
    items: list[list[float]]  # of each step, all ranks
    positions: list[Position]  # behind each step


def disturb() -> None:
    """A model, a hook, anything draws between two steps, and not the same on two machines."""
    random.seed()
    np.random.seed()
    torch.default_generator.seed()


def see(
    data: Any,
    global_batch: int,
    *,
    world: int = 1,
    num_workers: int = 0,
    micro_batch: int = 3,
    start: Position | None = None,
    last_step: int | None = None,
    epochs: int | None = 2,
    tries: bool = False,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Seen:
    """What all ranks together see. `data` makes the data anew, as each process of a world would."""
    by_rank: list[Seen] = []
    for rank in range(world):
        source = source_of(data())
        division = Division(source.samples_per_epoch(global_batch) or 0, global_batch, micro_batch, world)
        seen = Seen([], [], [])
        loader = Loader(
            source,
            division,
            rank,
            SEED,
            collate,
            shuffle=source.shuffle is not False,
            num_workers=num_workers,
            start=start,
        )
        with closing(loader):
            if tries:
                loader.first(last_step, epochs)
            for place, micro_batches in loader.batches(start.step if start else 0, last_step, epochs):
                found: list[float] = []
                for number, micro in enumerate(micro_batches):
                    assert micro.is_last == (number == division.num_micro_steps(place) - 1)
                    if micro.weight:
                        assert len(micro.batch) == micro.num_samples
                        found += micro.batch.tolist()
                    disturb()
                seen.places.append(place)
                seen.items.append(found)
                seen.positions.append(loader.position)
        by_rank.append(seen)
    assert all(seen.places == by_rank[0].places and seen.positions == by_rank[0].positions for seen in by_rank)
    steps = zip(*(seen.items for seen in by_rank), strict=True)
    return Seen(by_rank[0].places, [list(itertools.chain(*step)) for step in steps], by_rank[0].positions)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(size=st.integers(1, 30), batch=st.integers(1, 12), world=st.integers(1, 3), micro=st.integers(1, 7))
def test_one_order_for_every_world_and_each_sample_once(kind, size, batch, world, micro) -> None:
    batch = min(batch, size)
    alone = see(lambda: loaders(size, batch)[kind], batch, micro_batch=size, epochs=2)
    together = see(lambda: loaders(size, batch)[kind], batch, world=world, micro_batch=micro, epochs=2, tries=True)
    assert together == alone
    for epoch in (0, 1):
        items = [
            int(item)
            for place, step in zip(alone.places, alone.items, strict=True)
            if place.epoch == epoch
            for item in step
        ]
        assert sorted(items) == list(range(size))
    assert [place.ends_epoch for place in alone.places].count(True) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_workers_change_nothing(kind: str, world: int) -> None:
    alone = see(lambda: loaders(20, 6)[kind], 6)
    assert see(lambda: loaders(20, 6)[kind], 6, world=world, num_workers=2, tries=world == 2) == alone


def drawing(items: list[Any]) -> Any:
    """Draw as MixUp does, and as masks of tokens: for the batch, and for each of its items."""
    batch = default_collate(items).double()
    for_all = torch.full((len(items), 2), random.random() + np.random.random(), dtype=torch.float64)
    return torch.cat([batch[:, None], for_all, torch.rand(len(items), 1, dtype=torch.float64)], dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_collate_function_draws_is_keyed(kind: str) -> None:
    """In each batch other numbers, and the same whoever makes it: they were the same in all batches of most data."""

    def data() -> Any:
        return loaders(24, 6)[kind]

    whole = see(data, 6, collate=drawing)
    rows = list(itertools.chain(*whole.items))
    batches = [step[first : first + 3] for step in whole.items for first in range(0, len(step), 3)]
    assert len({batch[0][1] for batch in batches}) == len(batches)
    assert len({row[3] for row in rows}) == len(rows)
    assert see(data, 6, collate=drawing, num_workers=2, tries=True) == whole
    if kind != "batch sampler":  # whose batches of unequal sizes two ranks divide in other ways
        assert see(data, 6, collate=drawing, world=2) == whole
    done = len(whole.places) // 2 + 1
    rest = see(data, 6, collate=drawing, start=whole.positions[done - 1], tries=True)
    assert rest == Seen(whole.places[done:], whole.items[done:], whole.positions[done:])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(st.data())
def test_from_any_step_on_the_same_follows(kind: str, data: st.DataObject) -> None:
    size, batch = data.draw(st.integers(2, 25)), data.draw(st.integers(1, 7))
    batch = min(batch, size)
    whole = see(lambda: loaders(size, batch)[kind], batch, epochs=3)
    done = data.draw(st.integers(0, len(whole.places)))
    position = whole.positions[done - 1] if done else Position()
    saved = Position.from_json(position.step, json.loads(json.dumps(position.to_json())))
    world, tries = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    rest = see(lambda: loaders(size, batch)[kind], batch, start=saved, epochs=3, world=world, tries=tries)
    assert rest == Seen(whole.places[done:], whole.items[done:], whole.positions[done:])


def test_positions_are_those_of_the_batches_used_not_of_the_ones_fetched_ahead() -> None:
    seen = see(lambda: WithState(20), 6, num_workers=1)
    assert [position.state for position in seen.positions[:3]] == [{"position": 6}, {"position": 12}, {"position": 18}]
    assert seen.positions[3] == Position(4, 1, 0, None)


def test_a_data_set_with_state_is_not_read_again() -> None:
    data = WithState(100)
    see(lambda: data, 10, start=Position(7, 0, 70, {"position": 70}), epochs=1)
    assert data.items_read == 30


def test_what_an_iterable_draws_is_keyed() -> None:
    """The same numbers whoever reads; others in each epoch."""
    first, second = see(lambda: Counting(8), 8).items
    assert [int(item) for item in first] == [int(item) for item in second]
    assert first != second
    assert len({item % 1 for item in first + second}) == 16
    assert see(lambda: Counting(8), 4, world=2, num_workers=1).items == [first[:4], first[4:], second[:4], second[4:]]


def test_a_sampler_that_repeats_samples_is_used_as_it_is() -> None:
    seen = see(lambda: weighted(30, 7), 7, world=2)
    assert seen == see(lambda: weighted(30, 7), 7, num_workers=2)
    assert len(set(itertools.chain(*seen.items[:5]))) < 30
    assert seen.items[:5] != seen.items[5:]


def test_a_samplers_own_generator_is_keyed_too() -> None:
    """One that goes on from epoch to epoch would give a resumed run another second epoch."""

    def data() -> Any:
        generator = torch.Generator().manual_seed(4)
        return DataLoader(Numbers(20), 5, sampler=RandomSampler(Numbers(20), replacement=True, generator=generator))

    whole = see(data, 5)
    assert whole.items[:4] != whole.items[4:]
    assert see(data, 5, start=Position(4, 1)).items == whole.items[4:]


def test_a_sampler_that_draws_as_it_is_read_is_not_disturbed_however_long_it_is() -> None:
    def data() -> Any:
        return DataLoader(Numbers(3000), 500, sampler=Lazy(3000))

    first, second = see(data, 500, epochs=1), see(data, 500, epochs=1)
    assert first == second
    assert sorted(itertools.chain(*first.items)) == list(range(3000))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_may_be_shorter_than_the_one_before(num_workers: int) -> None:
    seen = see(lambda: Shrinking(5), 2, epochs=4, num_workers=num_workers)
    assert [len(step) for step in seen.items] == [2, 2, 1, 2, 2, 2, 1, 2]
    assert [place.epoch for place in seen.places] == [0, 0, 0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("data", [Numbers(10), Counting(10)], ids=["map", "iterable"])
def test_drop_last(data: Any) -> None:
    seen = see(lambda: DataLoader(data, 4, drop_last=True), 4, world=2, epochs=3)
    assert [len(step) for step in seen.items] == [4] * 6
    assert [place.ends_epoch for place in seen.places] == [False, True] * 3


def test_the_end_is_not_read_past() -> None:
    """A generator is used up after an epoch: one must not ask it for another that nobody wants."""
    assert len(see(lambda: iter(range(10)), 4, epochs=1, tries=True).items) == 3
    assert len(see(lambda: iter(range(10)), 4, last_step=2, epochs=None).items) == 2
    with pytest.raises(DrivetrainError, match="can be read only once"):
        see(lambda: iter(range(10)), 4, last_step=5, epochs=None)


def test_nothing_to_read() -> None:
    with pytest.raises(DrivetrainError, match="Counting\\) yields nothing to train on in epoch 0") as caught:
        see(lambda: Counting(0), 4)
    assert caught.value.remedy


class BreaksAt:
    def __init__(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Any:
        for number in range(20):
            if number == self.position:
                raise OSError("the line is dead")
            yield number


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("at", [8, 9])
def test_an_item_that_raises_is_named_and_what_came_before_is_not_lost(at: int, num_workers: int) -> None:
    source = Loader(BreaksAt(at), Division(0, 4, 4, 1), 0, SEED, default_collate, num_workers=num_workers)
    seen = []

    def read() -> None:
        for _, micro_batches in source.batches(0, None, 1):
            seen.append([micro.batch.tolist() for micro in micro_batches])

    with (
        closing(source),
        pytest.raises(DrivetrainError, match=f"item {at} of epoch 0 raised OSError: the line is dead"),
    ):
        read()
    assert seen == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_state_that_is_not_json() -> None:
    class Bad(WithState):
        def state_dict(self) -> Any:
            return {"position": object()}

    with pytest.raises(DrivetrainError, match="cannot be saved as JSON"):
        see(lambda: Bad(10), 4)
