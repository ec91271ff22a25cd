"""A copy of a state in host memory: what was there at the time of the call, in memory that is used again."""

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.checkpoint.staging import ALIGNMENT, PIECE_BYTES, Staging, StagingLayout, _packed
from drivetrain.checkpoint.tensor_file import CODES
from drivetrain.core.state import Shard

CPU = torch.device("cpu")


def shard(key: str, tensor: torch.Tensor) -> Shard:
    return Shard.whole(key, tensor)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_type_and_odd_shapes(dtype: torch.dtype) -> None:
    values = torch.arange(24).remainder(2).to(dtype)
    tensors = [values[0].clone(), values.clone(), values[:0], values.view(2, 3, 4), values.view(4, 6).t(), values[::5]]
    before = [tensor.clone() for tensor in tensors]
    staging = Staging()
    staged = staging.take([shard(str(number), tensor) for number, tensor in enumerate(tensors)])
    for tensor in tensors:
        tensor.zero_()
    staging.until_copied()
    for copied, expected in zip(staged, before, strict=True):
        assert copied.tensor.dtype == dtype
        assert copied.tensor.shape == expected.shape
        assert copied.tensor.is_contiguous()
        assert torch.equal(copied.tensor.view(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_conjugates_parameters_and_inference_tensors_are_copied_by_value() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj()
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        inferred = torch.ones(2)
    staged = Staging().take([shard("c", conjugate), shard("p", parameter), shard("i", inferred)])
    assert not staged[0].tensor.is_conj()
    assert staged[0].tensor.tolist() == [1 - 2j, 3 + 1j]
    assert not staged[1].tensor.requires_grad


def test_memory_is_used_again_and_grows_with_the_state() -> None:
    staging = Staging()
    first = staging.take([shard("w", torch.full((1000,), 1.0))])[0].tensor
    second = staging.take([shard("w", torch.full((1000,), 2.0))])[0].tensor
    assert first.data_ptr() == second.data_ptr()
    grown = staging.take([shard("w", torch.full((1001,), 3.0)), shard("new", torch.ones(2))])
    assert [float(part.tensor.sum()) for part in grown] == [3003.0, 2.0]
    assert staging.take([]) == []


def test_prepared_in_another_thread() -> None:
    state = [shard("w", torch.full((5, 7), 4.0))]
    staging = Staging()
    thread = threading.Thread(target=staging.prepare, args=(state,))
    thread.start()
    thread.join()
    place = staging._copies[0].views[0].data_ptr()
    assert staging.take(state)[0].tensor.data_ptr() == place
    assert torch.equal(staging.take(state)[0].tensor, state[0].tensor)


@given(st.lists(st.integers(0, 3 * PIECE_BYTES // 2), max_size=40))
def test_pieces_hold_every_tensor_once_and_apart(sizes: list[int]) -> None:
    layouts = [StagingLayout(CPU, torch.uint8, torch.Size([size])) for size in sizes]
    pieces = _packed(layouts, range(len(layouts)))
    assert sorted(number for piece in pieces for number in piece.offsets) == list(range(len(sizes)))
    for piece in pieces:
        assert piece.used <= piece.capacity
        assert piece.capacity & (piece.capacity - 1) == 0
        spans = sorted((offset, offset + sizes[number]) for number, offset in piece.offsets.items())
        assert all(start % ALIGNMENT == 0 for start, _ in spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert spans[-1][1] <= piece.used
    small = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    assert sum(piece.used for piece in pieces) == small
