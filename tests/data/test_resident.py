"""Resident data: the bits of the ordinary path, in the stream's order; and what must never be resident is not."""

import functools
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler, default_collate

from drivetrain.data import resident as resident_copy
from drivetrain.data.division import Division, SampleStream
from drivetrain.data.feed import NumbersAhead, ResidentFeed, feed_for
from drivetrain.data.keyed_items import Columns
from drivetrain.data.loader import Loader
from drivetrain.data.resident import NotResidentError, Resident, Rows, identical, make_resident, why_not_resident
from drivetrain.data.source import source_of
from tests.data.shapes import Counting
from tests.data.test_loader import Broken, Noisy, Numbers, OwnGenerator, SeldomNoisy

CPU = torch.device("cpu")
PLENTY = 1e12
Pair = namedtuple("Pair", "left right")


class Made(Dataset[Any]):
    """Items by a function of their number."""

    def __init__(self, size: int, item: Callable[[int], Any]) -> None:
        self.size, self.item = size, item

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def resident_of(data: Any, collate: Any = default_collate, limit: float = PLENTY, **options: Any) -> Resident:
    return make_resident(source_of(data), collate, CPU, limit, **options)


def batches(
    data: Any, division: Division, rank: int, resident: Resident | None, steps: range, collate: Any = default_collate,
    **options: Any,
) -> list[Any]:  # fmt: skip
    channels_last = options.pop("channels_last", False)
    feed = feed_for(CPU, channels_last=channels_last)
    loader = Loader(data, division, rank, 5, collate, resident=resident, feed=feed, **options)
    found = [(place, list(parts)) for place, parts in loader.batches(steps.start, steps.stop)]
    assert not any(isinstance(micro.batch, Rows) for _, parts in found for micro in parts)
    return [found, loader.position]


def assert_same(one: list[Any], other: list[Any]) -> None:
    """Places, weights, and every bit of every micro-batch."""
    assert one[1] == other[1]
    assert [place for place, _ in one[0]] == [place for place, _ in other[0]]
    for (_, parts), (_, others) in zip(one[0], other[0], strict=True):
        assert [part[1:] for part in parts] == [part[1:] for part in others]
        for part, expected in zip(parts, others, strict=True):
            assert identical(part.batch, expected.batch), (part.batch, expected.batch)


IMAGES = torch.arange(23 * 3 * 4 * 5, dtype=torch.float32).view(23, 3, 4, 5)
LABELS = torch.arange(23)
KINDS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorDataset(IMAGES, LABELS),
    "named": lambda: Columns({"x": IMAGES.double(), "y": LABELS.to(torch.int8)}),
    "tensor": lambda: IMAGES,
    "numbers": lambda: torch.arange(23),
    "subset": lambda: Subset(TensorDataset(torch.cat([IMAGES, -IMAGES]), torch.arange(46)), list(range(45, -1, -2))),
    "list of pairs": lambda: [(IMAGES[index].clone(), index) for index in range(23)],
    "dictionaries": lambda: Made(23, lambda n: {"x": IMAGES[n], "deep": [n / 3, (n % 2 == 0, np.float32(n))]}),
    "named tuples": lambda: Made(23, lambda n: Pair(np.full((2, 2), n, np.int16), OrderedDict(a=n, b=-n))),
    "single numbers": lambda: Made(23, lambda n: n * 1.5),
    "turned images": lambda: Made(23, lambda n: (np.full((4, 5, 3), n, np.float32).transpose(2, 0, 1), n)),
    "one channel": lambda: TensorDataset(IMAGES[:, :1].clone(), LABELS),
    "other types": lambda: TensorDataset(LABELS.to(torch.uint16), IMAGES.to(torch.float8_e5m2), IMAGES * 1j),
    "nan": lambda: Made(23, lambda n: torch.tensor([n, float("nan"), -0.0])),
    "strided": lambda: TensorDataset(IMAGES.permute(0, 2, 3, 1), LABELS.expand(4, 23).t()),
}  # fmt: skip


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_the_ordinary_path(kind: str, channels_last: bool) -> None:
    """Over worlds, micro-batches, ragged ends and epochs; the layout in memory too."""
    data = KINDS[kind]()
    resident = resident_of(data, channels_last=channels_last)
    for world, global_batch, micro_batch in ((1, 5, 5), (1, 10, 4), (2, 7, 3), (3, 10, 2), (4, 3, 1), (2, 23, 40)):
        division = Division(23, global_batch, micro_batch, world)
        for rank in range(world):
            steps = range(1, 3 * division.steps_per_epoch)
            expected = batches(data, division, rank, None, steps, channels_last=channels_last)
            assert_same(batches(data, division, rank, resident, steps), expected)


leaf = st.sampled_from(["tensor", "array", "scalar", "int", "float", "bool"])
structure = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2),
    ),
    max_leaves=5,
)


def built(shape: Any, number: int) -> Any:
    """An item of that structure, different for each number."""
    if isinstance(shape, dict):
        return {key: built(value, number + 1) for key, value in shape.items()}
    if isinstance(shape, (list, tuple)):
        return type(shape)(built(value, number + place) for place, value in enumerate(shape))
    return {
        "tensor": torch.full((2, 1), number, dtype=torch.float16),
        "array": np.arange(3, dtype=np.int32) * number,
        "scalar": np.float64(number / 7),
        "int": number,
        "float": number / 3,
        "bool": number % 3 == 0,
    }[shape]


@settings(max_examples=40, deadline=None)
@given(shape=structure, size=st.integers(1, 30), global_batch=st.integers(1, 12), world=st.integers(1, 3))
def test_any_structure(shape: Any, size: int, global_batch: int, world: int) -> None:
    data = Made(size, functools.partial(built, shape))
    resident = resident_of(data)
    division = Division(size, global_batch, 4, world)
    steps = range(2 * division.steps_per_epoch + 1)
    rank = size % world
    assert_same(batches(data, division, rank, resident, steps), batches(data, division, rank, None, steps))


LATER_SIZES = st.sampled_from([(), (), ((7, 3), (20, 30)), ((2, 50), (31, 1), (33, 12))])  # global batches after steps


def growing(division: Division, later: tuple[tuple[int, int], ...]) -> Division:
    if not later:
        return division
    most = division.num_samples
    sizes = tuple((first, min(size, most)) for first, size in ((0, division.global_batch), *later))
    return replace(division, global_batch=max(size for _, size in sizes), batch_sizes=sizes)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 400),
    global_batch=st.integers(1, 90),
    micro_batch=st.integers(1, 90),
    world=st.integers(1, 4),
    first=st.integers(0, 60),
    count=st.integers(1, 60),
    pieces=st.sampled_from([(1, 1), (50, 300), (8192, 65536)]),
    shuffle=st.booleans(),
    later=LATER_SIZES,
)
def test_numbers_ahead_are_those_of_the_stream(
    size: int,
    global_batch: int,
    micro_batch: int,
    world: int,
    first: int,
    count: int,
    pieces: Any,
    shuffle: bool,
    later: Any,
) -> None:
    stream = SampleStream(size, 3, shuffle=shuffle)
    division = growing(Division(size, global_batch, micro_batch, world), later)
    resident = resident_of(torch.arange(size))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("drivetrain.data.feed.FIRST_NUMBERS", pieces[0])
        patched.setattr("drivetrain.data.feed.FOLLOWING_NUMBERS", pieces[1])
        for rank in range(world):
            ahead = NumbersAhead(stream, division, rank, first, first + count, resident)
            for step in range(first, first + count):
                place = division.place(step)
                parts = division.micro_steps(place, rank)
                expected = [stream.samples(place.epoch, part.start, part.stop).tolist() for part in parts]
                assert [rows.samples.tolist() for rows in ahead.take(parts)] == expected
            ahead.close()


@settings(max_examples=60, deadline=None)
@given(
    whole_steps=st.integers(0, 20),
    left_over=st.sampled_from([0, 0, 1, 7]),
    global_batch=st.integers(1, 40),
    micro_batch=st.integers(1, 60),
    world=st.sampled_from([1, 1, 2]),
    first=st.integers(0, 30),
    pieces=st.sampled_from([(1, 1), (50, 300), (8192, 65536)]),
    wishes=st.lists(st.integers(0, 30), max_size=40),
    later=LATER_SIZES,
)
def test_steps_that_are_passed_over(
    whole_steps: int,
    left_over: int,
    global_batch: int,
    micro_batch: int,
    world: int,
    first: int,
    pieces: Any,
    wishes: list[int],
    later: Any,
) -> None:
    """What is yielded and what is passed over are together all steps, with the samples of the stream, in order."""
    size = max(1, whole_steps * global_batch + left_over)
    data = torch.arange(size)
    source, division = source_of(data), growing(Division(size, global_batch, micro_batch, world), later)
    stream, count = SampleStream(size, 5), 60
    resident = resident_of(data)
    wanted = iter(wishes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("drivetrain.data.feed.FIRST_NUMBERS", pieces[0])
        patched.setattr("drivetrain.data.feed.FOLLOWING_NUMBERS", pieces[1])
        loader = Loader(source, division, 0, 5, default_collate, resident=resident)
        assert isinstance(loader.feed, ResidentFeed)
        loader.feed.gathers = False
        following = first
        for place, micro_batches in loader.batches(first, first + count):
            assert place == division.place(following)
            rows = [micro.batch for micro in micro_batches]
            parts = division.micro_steps(place, 0)
            expected = [stream.samples(place.epoch, part.start, part.stop).tolist() for part in parts]
            assert [found.samples.tolist() for found in rows] == expected
            following += 1
            stretch = loader.alike()
            if stretch is not None:
                assert world == 1
                assert len(rows) == 1
                stretch = stretch.shortened(next(wanted, 3))
            if stretch is None or not stretch.num_steps:
                continue
            assert stretch.start == rows[0].start + rows[0].count
            for number in range(stretch.num_steps):
                passed = division.place(following + number)
                found = Rows(resident, None, rows[0].window, stretch.start + number * rows[0].count, rows[0].count)
                assert found.samples.tolist() == stream.samples(passed.epoch, passed.start, passed.stop).tolist()
                assert not passed.ends_epoch
                assert passed.num_samples == place.num_samples
            assert (stretch.first, stretch.last) == (division.place(following), passed)
            loader.pass_over(stretch)
            following += stretch.num_steps
            assert loader.position.step == following
        assert following == first + count
        loader.close()


def test_another_samplers_order_and_keys_that_are_no_numbers() -> None:
    data = TensorDataset(torch.randn(20, 3), torch.arange(20))
    weighted = DataLoader(data, 6, sampler=WeightedRandomSampler([1.0] * 20, 33))
    backwards = DataLoader(data, 6, sampler=[-1, -2, 3, 4, -5, 6, 7, 19])  # which a list understands
    for loader in (weighted, backwards):
        source = source_of(loader)
        resident = make_resident(source, default_collate, CPU, PLENTY)
        division = Division(0, 6, 4, 2)
        for rank in range(2):
            found = batches(source, division, rank, resident, range(9))
            assert_same(found, batches(source, division, rank, None, range(9)))


def test_the_first_micro_batch_is_the_ordinary_one() -> None:
    data = TensorDataset(torch.randn(20, 3), torch.arange(20))
    for given_data in (data, DataLoader(data, 6, sampler=WeightedRandomSampler([1.0] * 20, 33))):
        source = source_of(given_data)
        division = Division(20, 6, 4, 1)
        ordinary = Loader(source, division, 0, 5, default_collate)
        loader = Loader(
            source, division, 0, 5, default_collate, resident=make_resident(source, default_collate, CPU, 1e9)
        )
        assert identical(loader.first(8).batch, ordinary.first(8).batch)
        steps = [[micro.batch for micro in parts] for _, parts in loader.batches(0, 8)]
        expected = [[micro.batch for micro in parts] for _, parts in ordinary.batches(0, 8)]
        assert identical(steps, expected)


def test_gathering_into_given_buffers() -> None:
    for kind in ("tensors", "dictionaries", "other types"):
        resident = resident_of(KINDS[kind](), channels_last=True)
        samples = torch.tensor([3, 1, 22])
        expected, buffers = resident.gather(samples), resident.gather(torch.tensor([0, 0, 0]))
        addresses = [tensor.data_ptr() for tensor in resident_copy.leaves_of(buffers)]
        filled = resident.gather(samples, out=buffers)
        assert identical(filled, expected)
        assert [tensor.data_ptr() for tensor in resident_copy.leaves_of(filled)] == addresses
    with pytest.raises(ValueError, match="2 samples do not go into a batch of 3"):
        resident.gather(samples[:2], out=buffers)


def test_rows_can_be_taken_instead_of_batches() -> None:
    """What a recorded step wants: the numbers, to gather by inside of it."""
    data = TensorDataset(torch.randn(20, 3), torch.arange(20))
    loader = Loader(data, Division(20, 6, 4, 1), 0, 5, default_collate, resident=resident_of(data))
    assert isinstance(loader.feed, ResidentFeed)
    loader.feed.gathers = False
    expected = batches(data, Division(20, 6, 4, 1), 0, None, range(4))[0]
    for (_, parts), (_, others) in zip(loader.batches(0, 4), expected, strict=True):
        for part, other in zip(parts, others, strict=True):
            assert isinstance(part.batch, Rows)
            assert identical(part.batch.gather(), other.batch)
            assert part.batch.samples.tolist() == other.batch[1].tolist()


def test_nothing_is_copied_that_is_there() -> None:
    images = torch.randn(10, 3)
    resident = resident_of(TensorDataset(images))
    assert resident.columns[0].rows.data_ptr() == images.data_ptr()


class Ragged(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(3 if index != 33 else 4)


class OwnSeldom(Numbers):
    """A generator of its own, for one item in fifty: reading a few items twice would not show it."""

    def __init__(self, size: int, generator: Any) -> None:
        super().__init__(size)
        self.transforms = [functools.partial(self.noise, generator)]

    @staticmethod
    def noise(generator: Any, index: int) -> float:
        if index % 50 != 7:
            return 0.0
        if isinstance(generator, torch.Generator):
            return float(torch.rand((), generator=generator))
        return float(generator.random() if hasattr(generator, "random") else generator.random_sample())

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(sum(transform(index) for transform in self.transforms))


_hidden = np.random.default_rng(0)


class HiddenSeldom(Numbers):
    """The same, with a generator that stands beside the class."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(_hidden.random() if index % 50 == 7 else 0.0)


class Growing(Numbers):
    """Changes with every reading, without any generator."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.readings = 0

    def __getitem__(self, index: int) -> Tensor:
        self.readings += 1
        return torch.tensor(self.readings)


class SameMemory(Numbers):
    """Every item in the same buffer."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.buffer = torch.zeros(2)

    def __getitem__(self, index: int) -> Tensor:
        return self.buffer.fill_(index)


def turned_over(items: list[Any]) -> Any:
    return default_collate(items[::-1])


def with_noise(items: list[Any]) -> Any:
    return default_collate(items) + torch.rand(1).item() * 0


def failing(items: list[Any]) -> Any:
    raise RuntimeError("no batch today")


def nothing_to_do(worker: int) -> None: ...


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "iterable": (Counting(9), default_collate, "it can only be iterated"),
    "random": (Noisy(9), default_collate, "its items draw random numbers (seen in item 0)"),
    "seldom random": (SeldomNoisy(400), default_collate, "its items draw random numbers (seen in items 0 to 399)"),
    "own generator": (OwnGenerator(9), default_collate, "draw from a generator of their own"),
    "own torch generator, seldom": (OwnSeldom(400, torch.Generator()), default_collate, "a generator of their own"),
    "own numpy generator, seldom": (OwnSeldom(400, np.random.default_rng(1)), default_collate, "of their own"),
    "own old numpy generator": (OwnSeldom(400, np.random.RandomState(1)), default_collate, "a generator of their own"),
    "own Python generator, seldom": (OwnSeldom(400, random.Random(1)), default_collate, "a generator of their own"),
    "hidden generator, seldom": (HiddenSeldom(400), default_collate, "a generator of their own"),
    "changing": (Growing(9), default_collate, "its items differ when they are read twice"),
    "the same memory": (SameMemory(9), default_collate, "differ when they are read twice"),
    "shapes": (
        Ragged(60), default_collate,
        "its items are not alike: item 33 is a Tensor of float32 and shape (4,), and item 0 is a Tensor of float32 and "
        "shape (3,)",
    ),
    "types": (Made(9, lambda n: {"x": n if n else 1.0}), default_collate, "['x'] is of type int, and item 0['x']"),
    "keys": (Made(9, lambda n: {"x": n, **({"y": n} if n == 8 else {})}), default_collate, "a dict with ['x', 'y']"),
    "texts": (Made(9, lambda n: (n, str(n))), default_collate, "its items hold str, and only numbers can be gathered"),
    "texts between numbers": (
        Made(9, lambda n: {"x": n, "name": str(n), "spacing": (1.0, 2.0)}), default_collate, "its items hold str",
    ),
    "objects": (Made(9, lambda n: object()), default_collate, "its items cannot be stacked"),
    "sparse": (Made(9, lambda n: torch.eye(3).to_sparse()), default_collate, "cannot be stacked: Batches of sparse"),
    "sparse tensors": (TensorDataset(torch.eye(9).to_sparse()), default_collate, "layout sparse_coo"),
    "gradients": (TensorDataset(torch.zeros(9, 2, requires_grad=True)), default_collate, "require gradients"),
    "no numbers": (Made(9, lambda n: ()), default_collate, "its items hold no numbers"),
    "broken": (Broken(20), default_collate, "item 13 of the data set raised KeyError"),
    "collate, other order": (Numbers(9), turned_over, "function turned_over does something else than stack"),
    "collate, random": (Numbers(9), with_noise, "its collate function with_noise draws random numbers"),
    "collate, tensors": (TensorDataset(LABELS), turned_over, "turned_over does something else than stack"),
    "collate, failing": (Numbers(9), failing, "failing raised RuntimeError: no batch today"),
    "worker_init_fn": (
        DataLoader(Numbers(9), 2, num_workers=1, worker_init_fn=nothing_to_do), default_collate,
        "its worker_init_fn may decide what items are",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "num_workers"),
    [*((case, 0) for case in REFUSED), *((case, 2) for case in REFUSED if "seldom" in case or case == "shapes")],
)
def test_what_cannot_be_resident_is_refused_with_the_reason(
    case: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, collate, reason = REFUSED[case]
    if num_workers:
        monkeypatch.setattr(resident_copy, "CHUNK_ITEMS", 20)
        reason = reason.replace("items 0 to 399", "items 0 to 19")
    with pytest.raises(NotResidentError) as caught:
        make_resident(source_of(data), collate, CPU, PLENTY, num_workers=num_workers)
    assert reason in caught.value.message
    assert caught.value.remedy


def test_what_a_few_items_tell() -> None:
    assert why_not_resident(source_of(Noisy(9)), default_collate, PLENTY).startswith("its items draw random numbers")
    assert why_not_resident(source_of(Numbers(9)), default_collate, PLENTY) == ""


@pytest.mark.parametrize("data", [TensorDataset(torch.zeros(10, 100)), Made(10, lambda n: torch.zeros(100))])
def test_too_large(data: Any) -> None:
    reason = "it takes 4 kB, and 3 kB may be used for it"
    assert why_not_resident(source_of(data), default_collate, 3000) == reason
    with pytest.raises(NotResidentError, match=reason):
        resident_of(data, limit=3000)
    assert resident_of(data, limit=4000).num_bytes == 4000


def test_a_collate_function_that_only_stacks() -> None:
    def padded(items: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(items, batch_first=True)

    data = Made(30, lambda n: torch.full((3,), float(n)))
    resident = resident_of(data, padded)
    division = Division(30, 8, 8, 1)
    found = batches(data, division, 0, resident, range(8), padded)
    assert_same(found, batches(data, division, 0, None, range(8), padded))
    with pytest.raises(NotResidentError, match="not alike"):
        resident_of(Ragged(60), padded)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_with_workers_and_progress(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_copy, "SECONDS_OF_SILENCE", 0.0)
    monkeypatch.setattr(resident_copy, "CHUNK_ITEMS", 7)
    said: list[str] = []
    resident = resident_of(Numbers(100), num_workers=num_workers, say=said.append)
    assert resident.gather(torch.arange(100)).tolist() == list(range(100))
    assert any("7 of 100 items" in text for text in said)


def test_what_cannot_be_sent_to_workers_is_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_copy, "CHUNK_ITEMS", 7)
    data = DataLoader(Made(60, lambda n: n), 5, num_workers=2, multiprocessing_context="spawn")
    resident = make_resident(source_of(data), default_collate, CPU, PLENTY, num_workers=2)
    assert resident.gather(torch.arange(60)).tolist() == list(range(60))


def test_the_global_generators_stay_where_they_were() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.random_sample()), float(torch.rand(()))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    resident_of(Numbers(50))
    why_not_resident(source_of(Noisy(9)), default_collate, PLENTY)
    assert draws() == expected


@pytest.mark.parametrize("kind", ["tensors", "one channel", "other types", "dictionaries"])
def test_turned_after_it_was_made(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan settles on channels-last when the data is there already; and there may be no memory to turn it."""
    data, samples = KINDS[kind](), torch.tensor([2, 0, 21])
    turned = resident_of(data)
    plain = turned.gather(samples)
    turned.turn(True)
    expected = resident_of(data, channels_last=True).gather(samples)
    assert identical(turned.gather(samples), expected)
    turned.turn(False)
    assert identical(turned.gather(samples), plain)

    def no_memory(self: Tensor, *args: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    late = resident_of(data)
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "permute", no_memory)
        late.turn(True)
    assert identical(late.gather(samples), expected)
    assert identical(late.gather(samples, out=resident_of(data, channels_last=True).gather(samples * 0)), expected)
