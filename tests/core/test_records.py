"""How a step's numbers reach the host, and how they are written."""

import json
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.core.records import Noted, Reading, StepOutcome, StepRecord

CPU = torch.device("cpu")
NUMBERS = st.floats() | st.integers(-(10**6), 10**6)


@given(st.tuples(st.integers(1), st.integers(0), st.integers(1), NUMBERS, NUMBERS, NUMBERS), st.none() | NUMBERS)
def test_a_record_is_written_as_json_writes_it(numbers: Any, norm: Any) -> None:
    record = StepRecord(*numbers, norm, 1.5e-4, skipped=norm is None)
    assert record.as_json() == json.dumps(record._asdict())


def outcome(value: Tensor, norm: Tensor | None = None, num_items: Any = 4.0) -> StepOutcome:
    return StepOutcome([(value, 2.0)], num_items, 0.0, norm)


@given(
    windows=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=12), min_size=1, max_size=4),
    together=st.integers(1, 7),
    norms=st.booleans(),
)
def test_what_is_noted_is_what_is_read(windows: list[list[int]], together: int, norms: bool) -> None:
    """Windows of steps of any sizes: places grow within one, and begin anew with the next."""
    noted, readings, expected = Noted(64, CPU), [], []
    number = 0
    for sizes in windows:
        place = 0
        for size in sizes:
            number += 1
            norm = torch.tensor(float(-number)) if norms else None
            found = outcome(torch.tensor(float(number)), norm)
            readings.append(Reading(found._replace(note=noted.expect(place)), CPU))
            noted.keep(torch.tensor([place]), found)
            expected.append((2.0 * number, 4.0, 0.0, -number if norms else None, 0.0))
            place += size
            if noted.num_unsent >= together:
                noted.send()
    assert [reading.values() for reading in readings] == expected
    assert [reading.values() for reading in readings] == expected, "they can be asked again"


@given(
    stretches=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=12),
    size=st.integers(1, 5),
    together=st.integers(1, 9),
    length=st.integers(40, 100),
)
def test_of_a_stretch_each_step_is_read(
    stretches: list[tuple[int, int]], size: int, together: int, length: int
) -> None:
    """Steps alone and several in a row, of which only some are begun; over the ends of windows."""
    noted, readings, expected = Noted(length, CPU), [], []
    place = number = 0
    for most, fewer in stretches:
        if place + most * size > length:
            place = 0
        note, count = noted.expect(place, most, size), max(0, most - fewer)
        if not count:  # a wish to stop came first; the note is nobody's
            noted.cut(note, 0)
            assert note not in noted._unsent
            continue
        found = outcome(torch.tensor(0.0))
        for begun in range(count):
            number += 1
            found = outcome(torch.tensor(float(number)))
            noted.keep(torch.tensor([place + begun * size]), found)
        noted.cut(note, count)
        expected.append([(2.0 * n, 4.0, 0.0, None, 0.0) for n in range(number - count + 1, number + 1)])
        readings.append(Reading(found._replace(note=note), CPU))
        place += count * size
        if noted.num_unsent >= together:
            noted.send()
            assert noted.num_unsent == 0
    assert [reading.all_values() for reading in readings] == expected


def test_a_count_that_only_the_device_knows_is_noted_too() -> None:
    noted = Noted(8, CPU)
    found = outcome(torch.tensor(3.0, dtype=torch.float64), num_items=torch.tensor(5))
    noted.keep(torch.tensor([2]), found)
    reading = Reading(found._replace(note=noted.expect(2)), CPU)
    assert reading.is_there(0.0)
    assert reading.values() == (6.0, 5.0, 0.0, None, 0.0)


def test_a_single_number_keeps_its_bits() -> None:
    noted = Noted(4, CPU)
    value = torch.tensor(1 / 3)
    noted.keep(torch.tensor([0]), outcome(value))
    assert noted.expect(0).take() == [[float(value)]]
