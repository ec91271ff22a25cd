"""What a job's data is taken for, what is said of it, and what is refused."""

import itertools
import math
import multiprocessing
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from drivetrain.core.errors import DrivetrainError
from drivetrain.data.division import Division
from drivetrain.data.external_order import ItemEntries
from drivetrain.data.keyed_items import Collated, Columns, KeyedItems, exactness_warnings, same
from drivetrain.data.loader import Loader
from drivetrain.data.source import sets_of, source_of
from tests.data.shapes import Counting, Numbers, Unequal

DATA = Numbers(20)


def first_batch(data: Any, global_batch: int = 4, **options: Any) -> Any:
    source = source_of(data)
    division = Division(source.samples_per_epoch(global_batch) or 0, global_batch, global_batch, 1)
    collate = options.pop("collate", None) or source.collate or default_collate
    loader = Loader(source, division, 0, 0, collate, shuffle=False, **options)
    with closing(loader):
        _, micro_batches = next(loader.batches(0, 1))
        return next(iter(micro_batches)).batch


@pytest.mark.parametrize(
    ("loader", "shuffle", "is_kept", "words"),
    [
        (DataLoader(DATA, 4), False, False, "shuffle=False"),
        (DataLoader(DATA, 4, shuffle=True), True, False, "shuffle=True"),
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)), None, True, "RandomSampler is used"),
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=5)), None, True, "RandomSampler is used"),
        (DataLoader(DATA, 4, sampler=RandomSampler(range(8))), None, True, "RandomSampler is used"),  # of the first 8
        (DataLoader(DATA, 4, sampler=SequentialSampler(range(8))), None, True, "SequentialSampler is used"),
        (DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 0)), True, False, "DistributedSampler is replaced"),
        (DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 1, shuffle=False)), False, False, "is replaced"),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False)), False, False, "of 4 is"),
    ],
)
def test_samplers(loader: Any, shuffle: bool | None, is_kept: bool, words: str) -> None:
    source = source_of(loader)
    assert source.global_batch == 4
    assert source.shuffle is shuffle
    assert (source.sampler is not None) is is_kept
    assert source.is_keyed is not is_kept
    assert any(words in note for note in source.notes)


def test_everything_of_a_loader_is_taken_and_said() -> None:
    def collate(items: list[Any]) -> Any:
        return items

    loader = DataLoader(
        DATA, 5, collate_fn=collate, num_workers=2, pin_memory=True, prefetch_factor=3, timeout=9, drop_last=True,
        worker_init_fn=print, multiprocessing_context="fork",
    )  # fmt: skip
    source = source_of(loader)
    assert source.dataset is DATA
    assert (source.collate, source.global_batch, source.drop_last) == (collate, 5, True)
    wishes = source.wishes
    assert (wishes.num_workers, wishes.prefetch_factor, wishes.pin_memory) == (2, 3, True)
    assert (wishes.timeout_seconds, wishes.init_function) == (9, print)
    assert wishes.context.get_start_method() == "fork"
    said = " ".join(source.notes)
    for word in ("2 workers", "pinned memory", "prefetch factor", "worker_init_fn", "timeout", "drop_last"):
        assert word in said


def test_a_workers_init_function_runs_there(tmp_path: Any) -> None:
    loader = DataLoader(DATA, 4, num_workers=1, worker_init_fn=lambda number: (tmp_path / str(number)).touch())
    assert first_batch(loader, num_workers=1).tolist() == [0, 1, 2, 3]
    assert (tmp_path / "0").exists()


class Drawn(Sampler[list[int]]):
    """Batches of sizes drawn from a global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(5):
            yield list(range(int(torch.randint(1, 20, ()))))


def test_a_batch_sampler_says_its_size_or_its_largest_batch_does() -> None:
    assert source_of(DataLoader(DATA, batch_sampler=Unequal(20))).global_batch == 5
    assert source_of(DataLoader(DATA, batch_sampler=[[4], [1, 2, 3], [4]])).global_batch == 3
    before = torch.get_rng_state()
    assert len({source_of(DataLoader(DATA, batch_sampler=Drawn())).global_batch for _ in range(5)}) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_by_name() -> None:
    inputs, labels = torch.randn(10, 3), np.arange(10)
    data = {"inputs": inputs, "labels": labels}
    assert isinstance(source_of(data).dataset, Columns)
    gathered = first_batch(data)
    fetched = first_batch(data, collate=lambda items: default_collate(items))
    for batch in (gathered, fetched):
        assert torch.equal(batch["inputs"], inputs[:4])
        assert batch["labels"].tolist() == [0, 1, 2, 3]


def test_items_that_are_dictionaries_and_data_sets_that_fetch_many() -> None:
    asked: list[list[int]] = []

    class Rows:
        """As tables of rows behave: an item is a dictionary, and many can be had at once."""

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> dict[str, Any]:
            raise AssertionError("it can give many at once")

        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            asked.append(indices)
            return [{"x": index, "name": f"row {index}"} for index in indices]

    batch = first_batch(Rows())
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert batch["name"] == ["row 0", "row 1", "row 2", "row 3"]
    assert asked == [[0, 1, 2, 3]]


def test_many_at_once_are_keyed_one_by_one_if_they_draw() -> None:
    class Noisy(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [index + torch.rand(()).item() for index in indices]

    together = KeyedItems(Noisy(10), 3).__getitems__([(0, 1), (0, 2)])
    assert together == [KeyedItems(Noisy(10), 3).__getitems__([(0, sample)])[0] for sample in (1, 2)]


def test_many_at_once_name_the_one_that_raises() -> None:
    class Broken(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [{0: 0, 1: 1}[index] for index in indices]

    with pytest.raises(DrivetrainError, match="item 2 of the data set raised KeyError"):
        first_batch(Broken(10))

    class Short(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return indices[1:]

    with pytest.raises(DrivetrainError, match="returned 3 items for 4"):
        first_batch(Short(10))


def test_keys_that_are_no_numbers() -> None:
    class Named(Sampler[str]):
        def __iter__(self) -> Any:
            yield from ("a", "b", "c", "d")

    class ByName(Numbers):
        def __getitem__(self, index: Any) -> Any:
            return {"a": 1, "b": 2, "c": 3, "d": 4}[index] + torch.rand(())

    loader = DataLoader(ByName(4), 4, sampler=Named())
    assert first_batch(loader).int().tolist() == [1, 2, 3, 4]
    assert torch.equal(first_batch(loader), first_batch(loader))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (3, "expected a Dataset, got int: it has neither __len__ and __getitem__ nor __iter__"),
        ("data.csv", "expected a Dataset, got str"),
        ({}, "empty"),
        ({"x": torch.zeros(3), "y": torch.zeros(4)}, "unequal length: {'x': 3, 'y': 4}"),
        ({"x": [1, 2, 3]}, "got list for 'x'"),
        ({"x": np.array(["a", "b"])}, "'x' cannot be made a tensor"),
        ((torch.zeros(100, 3), torch.zeros(100, dtype=torch.long)), "2 tensors of 100 rows is taken for 2 items"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (DataLoader(Counting(4), batch_size=None), "batch_size=None"),
    ],
)
def test_what_cannot_be_trained_on(data: Any, words: str) -> None:
    with pytest.raises(DrivetrainError) as caught:
        source_of(data)
    assert words in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (DataLoader(DATA, 4), range(20)),
        (DataLoader(DATA, 4, sampler=SubsetRandomSampler([7, 3, 12])), [3, 7, 12]),
        (DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(20))), range(20)),
        (DataLoader(DATA, batch_sampler=[[5, 4], [9]]), [4, 5, 9]),
    ],
)
def test_a_sampler_chooses_what_is_held_out(loader: Any, samples: Any) -> None:
    """The sampler was ignored: the part that it leaves out, perhaps the training set, was validated as well."""
    before = torch.get_rng_state()
    (source,) = sets_of(loader).values()
    assert torch.equal(torch.get_rng_state(), before)
    assert source.is_keyed
    found = [source.dataset[number] for number in range(len(source.dataset))]
    assert found == [DATA[sample] for sample in samples]


def test_a_sampler_without_end_is_refused_for_what_is_held_out() -> None:
    with pytest.raises(DrivetrainError, match="yields more than 320 samples of 20") as caught:
        sets_of(DataLoader(DATA, 4, sampler=itertools.count()))  # type: ignore[arg-type]
    assert "Subset(" in str(caught.value.remedy)


def test_a_data_frame_is_refused_with_what_to_give() -> None:
    """Its [0] is a column: with as many columns as rows, and numbers for names, columns were trained on as samples."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(np.zeros((3, 4)))
    for data, words in ((frame, "a column and not a row"), ({"x": frame, "y": frame[0]}, "got DataFrame for 'x'")):
        with pytest.raises(DrivetrainError, match=words) as caught:
            source_of(data)
        assert 'df["y"].to_numpy(' in str(caught.value.remedy)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_function_that_raises(num_workers: int) -> None:
    unequal = [torch.zeros(number) for number in range(6)]
    with pytest.raises(DrivetrainError, match="default_collate could not make a batch of 4 items") as caught:
        first_batch(unequal, num_workers=num_workers)
    assert "remedy: items of unequal shapes" in str(caught.value)
    assert "torch/utils/data/_utils/collate.py" not in str(caught.value), "what torch did inside tells nobody anything"


def test_a_collate_function_of_ones_own_shows_where_it_raised() -> None:
    def broken(items: list[Any]) -> Any:
        raise KeyError("here")

    with pytest.raises(DrivetrainError, match="broken could not make a batch of 4 items") as caught:
        Collated(broken)([1, 2, 3, 4])
    assert 'raise KeyError("here")' in str(caught.value)


def test_a_list_of_items_is_a_data_set() -> None:
    assert source_of([(1, 2), (3, 4)]).is_keyed
    assert first_batch([(torch.tensor(number), number) for number in range(8)])[1].tolist() == [0, 1, 2, 3]


class Handle(Numbers):
    """Cannot be pickled."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.open = lambda: None


@pytest.fixture
def spawn() -> Any:
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(method, force=True)


def in_a_notebook(monkeypatch: pytest.MonkeyPatch, made: Callable[[], Any]) -> Any:
    """As if it were defined in a session that no file holds."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    data = made()
    monkeypatch.setattr(type(data), "__module__", "__main__")
    return data


@pytest.mark.usefixtures("spawn")
def test_what_cannot_be_sent_to_workers_is_loaded_here_if_nobody_asked_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Local(Numbers):
        pass

    for data, words in (
        (Handle(20), "pickle"),
        (in_a_notebook(monkeypatch, lambda: Local(20)), "is defined in this session"),
    ):
        loader = Loader(data, Division(20, 4, 4, 1), 0, 0, default_collate, num_workers=1, may_do_without_workers=True)
        with closing(loader):
            assert len([place for place, _ in loader.batches(0, 5)]) == 5
        assert "loaded in the training process" in loader.notes[0]
        assert words in loader.notes[0]
        pinned = Loader(data, Division(20, 4, 4, 1), 0, 0, default_collate, num_workers=1)
        with closing(pinned), pytest.raises(DrivetrainError, match="1 workers could not be started") as caught:
            next(pinned.batches(0, 5))
        assert "--num-workers 0" in caught.value.remedy


def test_gathering_into_columns_gives_the_same_bits() -> None:
    tensors = TensorDataset(torch.randn(30, 4), torch.arange(30))
    named = {"a": tensors.tensors[0], "b": tensors.tensors[1]}
    first, second = first_batch(tensors), first_batch(named)
    assert torch.equal(first[0], second["a"])
    assert torch.equal(first[1], second["b"])


def test_items_with_nan_are_the_same_when_asked_twice() -> None:
    items = TensorDataset(torch.tensor([[1.0, math.nan]] * 2))
    assert exactness_warnings(KeyedItems(items, 0), default_collate) == []
    assert not same(torch.tensor([math.nan]), torch.tensor([1.0]))


class Masking:
    """Masks with a generator of its own, made when it is needed first, as a collator of transformers with a seed."""

    generator: torch.Generator | None = None

    def __call__(self, items: list[Any]) -> Any:
        self.generator = self.generator or torch.Generator().manual_seed(3)
        return default_collate(items) * torch.rand(len(items), 1, generator=self.generator)


def test_a_collate_function_with_a_generator_of_its_own_is_reported() -> None:
    found = exactness_warnings(KeyedItems(torch.ones(4, 2), 0), Collated(Masking()))
    assert ["the collate function draws from a random generator of its own" in text for text in found] == [True]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.jagged])
def test_items_of_sparse_and_jagged_tensors_are_compared(layout: torch.layout) -> None:
    """A graph with its adjacency was refused with torch's words on operators and backends."""

    def made(value: float) -> torch.Tensor:
        if layout is torch.jagged:
            return torch.nested.nested_tensor([torch.ones(2), torch.full((3,), value)], layout=layout)
        return (torch.eye(3) * value).to_sparse(layout=layout)

    assert same((made(2.0), 1), (made(2.0), 1))
    assert not same((made(2.0), 1), (made(3.0), 1))
    assert not same(made(2.0), torch.eye(3) * 2)
    assert exactness_warnings(KeyedItems([(made(2.0), 1)], 0), lambda items: items[0]) == []


@pytest.mark.parametrize("buffer_size", [None, 6])
def test_a_shuffle_buffer_that_no_state_holds_loses_no_items(buffer_size: int | None) -> None:
    """Streams of Hugging Face, shuffled by a buffer: a resumed run never saw the items that were in it."""
    datasets = pytest.importorskip("datasets")

    def made() -> Any:
        stream = datasets.Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset(num_shards=3)
        return stream if buffer_size is None else stream.shuffle(seed=0, buffer_size=buffer_size)

    def numbers(entries: ItemEntries, start: int, state: Any, count: int) -> list[int]:
        items = entries.begin(1, start, state)
        return [item["x"] for _, item in zip(range(count), items, strict=False)]

    whole = numbers(ItemEntries(made(), 0), 0, None, 24)
    assert sorted(whole) == list(range(24))
    entries = ItemEntries(made(), 0)
    assert numbers(entries, 0, None, 9) == whole[:9]
    state = entries.state()
    assert numbers(ItemEntries(made(), 0), 9, state, 24) == whole[9:]
    told = any("items in its shuffle buffer" in note for note in source_of(made()).notes)
    assert told is (state is None) is (buffer_size is not None)
