"""Checksums of tensors: the same on every device and for every division of the rows, another for any other content."""

import random

import pytest
import torch
from torch import Tensor

from drivetrain.checkpoint import frozen
from drivetrain.checkpoint.frozen import BLOCK_WORDS, Region, checksums, total

TYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
# Rows of odd and even size, in one block and in several, without rows, and no dimension at all.
SHAPES = [(7,), (1001, 3), (5, 4096), (70001, 5), (300, 512), (), (0, 4), (4, 0)]


def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    return (values > 0) if dtype == torch.bool else values.to(dtype)


def of(tensor: Tensor) -> int:
    return checksums([Region(tensor, tuple(tensor.shape))])[0]


def splitmix(number: int) -> int:
    state = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return (state ^ (state >> 31)) | 1


def reference(words: list[int]) -> int:
    """Of words of 32 bits, as the module says it, without torch."""
    found = 0
    for index, word in enumerate(words):
        block, place = divmod(index, BLOCK_WORDS)
        product = word * (splitmix(place) % 2**32) % 2**32
        found += (product << 32 * (place % 2)) * splitmix(block + 2**32)
    return found % 2**64


@pytest.mark.parametrize("num_words", [1, 2, 9, BLOCK_WORDS, 2 * BLOCK_WORDS + 5])
def test_it_is_what_plain_arithmetic_gives(num_words: int) -> None:
    numbers = torch.randint(-(2**31), 2**31, (num_words,), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    assert of(numbers) == reference([number % 2**32 for number in numbers.tolist()])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_parts_add_up_to_the_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in SHAPES:
        whole = made(shape, dtype)
        expected = of(whole)
        if shape and shape[0] > 1:
            for num_parts in (2, 3, 5):
                parts, first = [], 0
                for part in whole.chunk(num_parts):
                    parts.append(checksums([Region(part, shape, first)])[0])
                    first += len(part)
                assert total(parts) == expected, (shape, num_parts)
        with monkeypatch.context() as larger:
            larger.setattr(frozen, "CPU_WORDS", 2**20)  # as on a GPU: many blocks at a time
            assert of(whole) == expected, shape


def test_any_change_shows() -> None:
    generator = random.Random(3)
    tensor = made((300, 1000), torch.float32)
    before = of(tensor)
    for _ in range(100):
        row, column, bit = generator.randrange(300), generator.randrange(1000), generator.randrange(32)
        changed = tensor.clone()
        changed.view(torch.int32)[row, column] ^= (1 << bit) if bit < 31 else -(2**31)
        assert of(changed) != before
    assert of(tensor.flip(0)) != before
    assert of(tensor.T.contiguous().view(300, 1000)) != before
    assert of(tensor[torch.randperm(300)]) != before
    zeros = torch.zeros(64, 64)
    assert len({of(zeros), of(-zeros), of(zeros + 1), of(zeros + 2), of(torch.eye(64))}) == 5


def test_what_lies_in_memory_in_another_way_has_the_same() -> None:
    images = made((8, 6, 3, 3), torch.float32)
    assert of(images.to(memory_format=torch.channels_last)) == of(images)
    assert of(images.transpose(0, 1).contiguous().transpose(0, 1)) == of(images)
    halves = made((9, 8), torch.bfloat16)
    assert of(torch.cat([halves.new_zeros(1), halves.flatten()])[1:].view(9, 8)) == of(halves)
    assert of(torch.conj(made((4,), torch.complex64))) == of(torch.conj(made((4,), torch.complex64)).resolve_conj())


@pytest.mark.gpu
def test_a_gpu_comes_to_the_same() -> None:
    for dtype in TYPES:
        for shape in [*SHAPES, (3000, 8192)]:
            tensor = made(shape, dtype)
            assert of(tensor.cuda()) == of(tensor), (dtype, shape)
