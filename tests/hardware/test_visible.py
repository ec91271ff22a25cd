"""CUDA_VISIBLE_DEVICES, held against torch's own reader and the driver's documentation."""

import os
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from drivetrain.hardware.gpu_drivers import mig_matches, parse, select

UUIDS = ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932f9aa-0000-4106-c12f-20bd9faed9f6", "GPU-11111111-0000"]

entries = st.one_of(
    st.integers(-3, 9).map(str),
    st.text("0123456789+- gpGPUMIG-x", max_size=6),
    st.sampled_from([uuid[:size] for uuid in UUIDS for size in (4, 8, 12, 13, 40)]),
    st.sampled_from(["MIG-1", "MIG-2", "MIG-GPU-1/0/0", "", " 1", "1 ", "٣", "1gpu2", "+2", "-0", "007"]),
)
settings_ = st.lists(entries, max_size=5).map(",".join)


def torch_parse(value: str) -> list[int] | list[str] | None:
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": value}):
        try:
            return torch.cuda._parse_visible_devices()
        except ValueError:  # int("+"), int("²"): torch falls over, the driver does not
            return None


@given(settings_)
@example("")
@example("-1")
@example("0,1")
@example("1gpu2,2ampere")
@example("0,0")
@example("0,-1,0")
@example("GPU-1,GPU-1")
@example("GPU-1,0,GPU-2")
def test_reads_a_setting_as_torch_does(value: str) -> None:
    expected = torch_parse(value)
    if expected is not None and value.isascii():
        assert list(parse(value)) == expected


@given(st.text(max_size=30))
@example("9" * 10_000)
@example("0" * 10_000 + "1")
@example("-" + "9" * 10_000)
def test_no_text_makes_it_fail(value: str) -> None:
    chosen = select(value, UUIDS).positions
    assert len(set(chosen)) == len(chosen) <= len(UUIDS)


@given(
    st.lists(st.sampled_from([uuid[:size] for uuid in UUIDS for size in (4, 8, 12, 13, 40)]), min_size=1, max_size=4)
)
def test_picks_by_uuid_as_torch_does(prefixes: list[str]) -> None:
    value = ",".join(prefixes)
    candidates = [str(entry) for entry in torch_parse(value) or []]
    assert list(select(value, UUIDS).positions) == torch.cuda._transform_uuid_to_ordinals(candidates, UUIDS)


@pytest.mark.parametrize(
    ("value", "positions"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("2,1", (2, 1)),
        ("0,2,-1,1", (0, 2)),  # the example of the CUDA programming guide
        ("0,9,1", (0,)),
        ("1,1", ()),
        ("0,1,0", ()),
        ("1gpu2", (1,)),
        (" 1 , 2", (1, 2)),
        (UUIDS[2], (2,)),
        ("GPU-8932f937", (0,)),
        ("GPU-8932f9", ()),  # two GPUs begin so
        ("GPU-11,GPU-8932f937", (2, 0)),
        ("GPU-11,GPU-1111", ()),  # the same GPU twice
        ("GPU-11,0", (2,)),
        ("0,GPU-11", (0,)),
    ],
)
def test_positions(value: str | None, positions: tuple[int, ...]) -> None:
    assert select(value, UUIDS).positions == positions


def test_says_where_reading_stopped() -> None:
    assert select("0,9,1", UUIDS).stopped_at == "9"
    assert select("0,x,1", UUIDS).stopped_at == "x"
    assert select("0,1", UUIDS).stopped_at is None
    assert select("GPU-11,GPU-99", UUIDS).stopped_at == "GPU-99"
    assert select("1,1", UUIDS).repeated == "1"


def test_mig_by_uuid_and_by_the_older_form() -> None:
    device = ("MIG-aaaa-bbbb", UUIDS[0], 3, 1)
    assert mig_matches("MIG-aaaa-bbbb", *device)
    assert mig_matches("MIG-aaaa", *device)
    assert not mig_matches("MIG-b", *device)
    assert not mig_matches("MIG-", *device)
    assert mig_matches(f"MIG-{UUIDS[0]}/3/1", *device)
    assert not mig_matches(f"MIG-{UUIDS[0]}/3/0", *device)
    assert not mig_matches(f"MIG-{UUIDS[1]}/3/1", *device)
