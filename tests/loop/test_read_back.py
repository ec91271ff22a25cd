"""How a step's numbers reach the host, and how they are written."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.core.metrics import SKIPPED_IF_BAD, PartLoss, PartTotals, StepOutcome, StepRecord
from drivetrain.core.run_folder import RESERVED_NAMES
from drivetrain.loop.read_back import DeviceResultTable, Reading

CPU = torch.device("cpu")
NUMBERS = st.floats() | st.integers(-(10**6), 10**6)


@given(st.tuples(st.integers(1), st.integers(0), st.integers(1), NUMBERS, NUMBERS, NUMBERS), st.none() | NUMBERS)
def test_a_record_is_written_as_json_writes_it(numbers: Any, norm: Any) -> None:
    record = StepRecord(*numbers, norm, 1.5e-4, skipped=norm is None)
    values = {name: value for name, value in record._asdict().items() if name not in ("parts", "logged")}
    assert record.as_json() == json.dumps(values)
    assert (*values, "time") == RESERVED_NAMES, "no logged value has one of these names"
    parts = {
        'an "odd" name': PartLoss(0.25, 3.0),
        "size": PartLoss(1.5, record.num_items),
        "none": PartLoss(math.nan, 0.0),
    }
    values |= {'loss_an "odd" name': 0.25, 'num_items_an "odd" name': 3.0, "loss_size": 1.5}
    found = json.loads(record._replace(num_items=7.0, parts=parts | {"size": PartLoss(1.5, 7.0)}).as_json())
    expected = json.loads(json.dumps(values | {"num_items": 7.0, "loss_none": None, "num_items_none": 0.0}))
    assert repr(found) == repr({name: expected[name] for name in found})
    assert len(found) == len(expected)


def outcome(value: Tensor, norm: Tensor | None = None, num_items: Any = 4.0) -> StepOutcome:
    return StepOutcome([(value, 2.0)], num_items, 0.0, norm)


@given(
    windows=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=12), min_size=1, max_size=4),
    together=st.integers(1, 7),
    norms=st.booleans(),
)
def test_what_is_noted_is_what_is_read(windows: list[list[int]], together: int, norms: bool) -> None:
    """Windows of steps of any sizes: places grow within one, and begin anew with the next."""
    table, readings, expected = DeviceResultTable(64, CPU), [], []
    number = 0
    for sizes in windows:
        place = 0
        for size in sizes:
            number += 1
            norm = torch.tensor(float(-number)) if norms else None
            found = outcome(torch.tensor(float(number)), norm)
            readings.append(Reading(found._replace(rows=table.expect(place)), CPU))
            table.keep(torch.tensor([place]), found)
            expected.append((2.0 * number, 4.0, 0.0, -number if norms else None, 0.0, None, None))
            place += size
            if table.num_unsent >= together:
                table.send()
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
    table, readings, expected = DeviceResultTable(length, CPU), [], []
    place = number = 0
    for most, fewer in stretches:
        if place + most * size > length:
            place = 0
        note, count = table.expect(place, most, size), max(0, most - fewer)
        if not count:  # a wish to stop came first; the note is nobody's
            table.cut(note, 0)
            assert note not in table._unsent
            continue
        found = outcome(torch.tensor(0.0))
        for begun in range(count):
            number += 1
            found = outcome(torch.tensor(float(number)))
            table.keep(torch.tensor([place + begun * size]), found)
        table.cut(note, count)
        expected.append([(2.0 * n, 4.0, 0.0, None, 0.0, None, None) for n in range(number - count + 1, number + 1)])
        readings.append(Reading(found._replace(rows=note), CPU))
        place += count * size
        if table.num_unsent >= together:
            table.send()
            assert table.num_unsent == 0
    assert [reading.all_values() for reading in readings] == expected


def test_a_count_that_only_the_device_knows_is_noted_too() -> None:
    table = DeviceResultTable(8, CPU)
    found = outcome(torch.tensor(3.0, dtype=torch.float64), num_items=torch.tensor(5))
    table.keep(torch.tensor([2]), found)
    reading = Reading(found._replace(rows=table.expect(2)), CPU)
    assert reading.is_there(0.0)
    assert reading.values() == (6.0, 5.0, 0.0, None, 0.0, None, None)


def test_a_single_number_keeps_its_bits() -> None:
    table = DeviceResultTable(4, CPU)
    value = torch.tensor(1 / 3)
    table.keep(torch.tensor([0]), outcome(value))
    assert table.expect(0).take() == [[float(value)]]


def test_named_parts_are_noted_however_many_there_are() -> None:
    reader: Any = object()
    named = PartTotals(torch.arange(20, dtype=torch.float64), reader)
    for norm in (None, torch.tensor(2.5)):
        found = StepOutcome([], 4.0, 0.0, norm, named=named)
        table = DeviceResultTable(8, CPU, num_other_values=20)
        table.keep(torch.tensor([3]), found)
        expected = (0.0, 4.0, 0.0, None if norm is None else 2.5, 0.0, (reader, [float(n) for n in range(20)]), None)
        assert Reading(found._replace(rows=table.expect(3)), CPU).values() == expected
        assert Reading(found, CPU).values() == expected


@pytest.mark.parametrize(
    ("loss", "norm", "skipped"),
    [(1.5, None, 0.0), (1.5, 2.0, 0.0), (math.nan, None, 1.0), (-math.inf, 2.0, 1.0), (1.5, math.inf, 1.0)],
)
def test_a_gate_on_the_device_is_known_by_the_numbers_it_saw(loss: float, norm: float | None, skipped: float) -> None:
    found = outcome(torch.tensor(loss), None if norm is None else torch.tensor(norm))._replace(skipped=SKIPPED_IF_BAD)
    assert Reading(found, CPU).values().skipped == skipped
    table = DeviceResultTable(4, CPU)
    reading = Reading(found._replace(rows=table.expect(0)), CPU)
    table.keep(torch.tensor([0]), found)
    assert reading.values().skipped == skipped
