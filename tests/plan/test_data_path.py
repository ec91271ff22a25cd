"""The data path as a pure decision: what is measured goes in, a choice with its reason comes out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.plan.rules import DataFigures, DataPath, choose_data_path, workers_worth

GIB = 1024**3
MS = 1e-3
RESIDENT = DataPath(resident=True)


def figures(**changes: Any) -> DataFigures:
    """40 ms to read what a step computes in 10; a long job, and plenty of everything."""
    values = {
        "read_seconds": 40 * MS, "step_seconds": 10 * MS, "steps_left": 10_000, "steps_per_epoch": 500,
        "num_bytes": GIB, "batch_bytes": 1_000_000, "free_bytes": 40 * GIB, "num_spare_cores": 15,
        "shm_bytes": 64 * GIB,
    }  # fmt: skip
    return DataFigures(**{**values, **changes})


def fetched(num_workers: int, prefetch_factor: int = 2) -> DataPath:
    return DataPath(num_workers=num_workers, prefetch_factor=prefetch_factor if num_workers else 0)


@pytest.mark.parametrize(
    ("changes", "wanted", "expected", "words"),
    [
        # Workers that keep up cost nothing: holding the data on the device gains nothing.
        ({}, "auto", fetched(4), "4 workers keep up"),
        ({"read_seconds": 41 * MS}, "auto", fetched(5), "5 workers keep up"),
        ({"read_seconds": 0.1 * MS}, "auto", fetched(0), "no workers are needed"),
        ({"slowest_read_seconds": 90 * MS}, "auto", fetched(4, 4), "4 workers keep up"),
        # Too few of them: then it pays, if the job is long enough.
        ({"num_spare_cores": 1}, "auto", RESIDENT, "with 1 worker it would be 400 s against 120 s"),
        ({"num_spare_cores": 1, "steps_left": 600}, "auto", fetched(1), "would gain too little: 24 s against 26 s"),
        ({"num_spare_cores": 1, "steps_left": 800}, "auto", RESIDENT, "20 s of it to read it once"),
        ({"num_spare_cores": 1, "steps_left": None}, "auto", RESIDENT, "40 ms a step against 10"),
        ({"num_spare_cores": 0}, "auto", RESIDENT, "with no workers it would be 500 s against 120 s"),
        ({"shm_bytes": 64 * 1024**2}, "auto", RESIDENT, "with no workers"),
        ({"shm_bytes": GIB, "batch_bytes": 100_000_000}, "auto", RESIDENT, "with 2 workers"),
        # A perceptron on data in memory.
        (
            {"is_in_memory": True, "read_seconds": 0.08 * MS, "step_seconds": 0.17 * MS, "num_bytes": 188_000_000},
            "auto", RESIDENT, "188 MB on the device",
        ),
        ({"is_in_memory": True, "read_seconds": 0.1 * MS}, "auto", RESIDENT, "to copy it once"),
        ({"is_in_memory": True, "read_seconds": 0.1 * MS, "steps_left": 1}, "auto", fetched(0), "too little"),
        # What cannot be.
        ({"why_not_resident": "it draws", "num_spare_cores": 1}, "auto", fetched(1), "not resident: it draws"),
        ({"num_bytes": None, "num_spare_cores": 1}, "auto", fetched(1), "memory it takes is not known"),
        ({"num_bytes": 30 * GIB, "num_spare_cores": 1}, "auto", fetched(1), "it takes 32.2 GB, and half of"),
        ({"free_bytes": 0, "num_spare_cores": 1}, "auto", fetched(1), "a step leaves nothing free"),
        # What was asked for.
        ({}, "on", RESIDENT, "asked for"),
        ({"num_spare_cores": 1}, "off", fetched(1), "4 workers would keep up, and there can be 1 (1 spare cores)"),
    ],
)  # fmt: skip
def test_each_case(changes: dict[str, Any], wanted: Any, expected: DataPath, words: str) -> None:
    choice = choose_data_path(figures(**changes), wanted)
    assert choice.value == expected, choice.reason
    assert words in choice.reason
    assert choice.pinned is (wanted == "on")


@pytest.mark.parametrize("wanted", ["auto", "off"])
def test_workers_that_were_asked_for(wanted: Any) -> None:
    choice = choose_data_path(figures(num_spare_cores=0), wanted, 7)
    assert choice.value == fetched(7)
    assert choice.pinned


@pytest.mark.parametrize(
    ("read", "rest", "cores", "busy", "left", "workers"),
    [
        (30 * MS, 10 * MS, 2, 1, 1000, 2),  # 40 ms; 30 with one worker; with two the 40 ms of work of two cores: 20
        (30 * MS, 10 * MS, 2, 2, 1000, 2),  # the model keeps both busy: 25
        (30 * MS, 10 * MS, 2, 1, 30, 0),  # 0.6 s saved, by two processes that take a second to start
        (0.2 * MS, 10 * MS, 2, 1, 10**6, 0),
        (10 * MS, 10 * MS, 4, 4, 1000, 1),  # 12.5 at best: the cores are the limit, whatever the number
        (30 * MS, 10 * MS, 1, 1, 1000, 0),
        (80 * MS, 10 * MS, 16, 1, None, 8),
    ],
)
def test_workers_on_the_cores_of_the_model(
    read: float, rest: float, cores: int, busy: int, left: int | None, workers: int
) -> None:
    assert workers_worth(read, rest, cores, busy, left) == workers


@given(
    read=st.floats(1e-6, 10),
    step=st.floats(1e-6, 10),
    cores=st.integers(0, 64),
    left=st.one_of(st.none(), st.integers(0, 10**6)),
    size=st.integers(1, 10**12),
    free=st.integers(0, 10**12),
    in_memory=st.booleans(),
    problem=st.sampled_from(["", "its items draw random numbers"]),
)
def test_never_what_cannot_be(
    read: float, step: float, cores: int, left: int | None, size: int, free: int, in_memory: bool, problem: str
) -> None:
    given_figures = figures(
        read_seconds=read, step_seconds=step, num_spare_cores=cores, steps_left=left, num_bytes=size, free_bytes=free,
        is_in_memory=in_memory, why_not_resident=problem,
    )  # fmt: skip
    choice = choose_data_path(given_figures)
    assert choice.reason
    assert choice.value.num_workers <= min(cores, 8)
    assert (choice.value.prefetch_factor > 0) is (choice.value.num_workers > 0)
    if choice.value.resident:
        assert not problem
        assert size <= free / 2
