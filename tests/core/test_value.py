"""Quantities as users read them."""

import pytest

from drivetrain.core.value import (
    GIB,
    MIB,
    format_bytes,
    format_count,
    format_digits,
    format_gib,
    format_list,
    format_seconds,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (3304, "3.3 kB"),
        (999_400, "999 kB"),
        (999_999, "1 MB"),
        (188_160_000, "188 MB"),
        (1.6e9, "1.6 GB"),
        (160e9, "160 GB"),
        (12_345e9, "12,345 GB"),
    ],
)
def test_a_size_has_three_digits_and_a_decimal_unit(num_bytes: float, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(64 * MIB, "64 MiB"), (GIB, "1.0 GiB"), (23.5 * GIB, "23.5 GiB"), (512 * GIB, "512 GiB")],
)
def test_memory_has_a_binary_unit(num_bytes: float, expected: str) -> None:
    assert format_gib(num_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.00001, "0.01 ms"), (0.0123, "12.3 ms"), (0.9999, "1 s"), (1.5, "1.5 s"), (99.95, "100 s"), (4000, "4,000 s")],
)
def test_a_duration_is_in_milliseconds_or_seconds(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


def test_no_number_has_an_exponent() -> None:
    assert [format_digits(value) for value in (0.0123, 999.6, 123456.0)] == ["0.0123", "1,000", "123,456"]


def test_counts_and_lists_read_as_sentences() -> None:
    assert [format_count(number, "worker") for number in (0, 1, 2)] == ["no workers", "1 worker", "2 workers"]
    assert [format_list(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]


def test_seconds_may_have_their_unit() -> None:
    assert [float(parse_seconds(text)) for text in ("60s", "60", "1.5s")] == [60, 60, 1.5]
