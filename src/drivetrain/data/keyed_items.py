"""Items of a dataset, with their randomness keyed by (seed, epoch, sample).

An item that draws from Python's, numpy's or torch's global generator gets the same numbers whichever process fetches
it, in whatever order, before or after a restart. Items that do not draw are not reseeded one by one: a planted state
shows after each batch whether anything was drawn, and only then is the batch fetched again, keyed. `Generators` finds
the random generators that a dataset holds itself, and detects whether something drew from them.
"""

import copy
import functools
import hashlib
import inspect
import os
import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from drivetrain.core.errors import DrivetrainError, returned
from drivetrain.core.log import notice
from drivetrain.core.value import format_gib
from drivetrain.data.batch import leaves
from drivetrain.data.division import key_of, mix

Collate = Callable[[list[Any]], Any]

_PLANT = 0x5EED
_EPOCH, _LAST = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # odd and far apart, as in `loop/stepper.py`
_LAST_EPOCH = 2**32  # beyond it are keys of items that are only looked at
Result = TypeVar("Result")
# The types that every version of torch gathers.
GATHERED = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip


def seed_all(key: int) -> None:
    """Seed all three global generators. About 9 µs, against 170 µs for `torch.manual_seed`, which also visits GPUs."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 1)


def _next_draws() -> tuple[float, float, float]:
    # A type and a device of its own: both defaults of torch may be set to others.
    drawn = torch.rand((), dtype=torch.float32, device="cpu")
    return random.random(), float(np.random.random_sample()), float(drawn)


@functools.lru_cache(8)
def _untouched(key: int) -> tuple[float, float, float]:
    """Return what is drawn next after generators were seeded, if nothing was drawn in between."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_all(key)
    draws = _next_draws()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return draws


def host_states() -> dict[str, Any]:
    """Return the states of Python's and numpy's generators by their names, to compare. It takes some 20 µs."""
    _, key, *rest = cast(Any, np.random.get_state())  # the rest has the second of a pair of normal numbers, too
    return {"Python's random generator": random.getstate(), "numpy's random generator": (key.tobytes(), *rest)}


def draws_anything(action: Callable[[], Any], key: int = _PLANT) -> tuple[bool, Any]:
    """Return whether an action draws from a global generator, all seeded by a key before, and its result."""
    expected = _untouched(key)
    seed_all(key)
    result = action()
    return _next_draws() != expected, result


class Draws(NamedTuple):
    """The global generators that an action was seen to draw from."""

    python: bool  # or numpy's
    torch: bool  # the CPU's or the device's


DRAWS_FROM_ALL = Draws(python=True, torch=True)


def what_draws(action: Callable[[], Result], device: torch.device) -> tuple[Draws, Result]:
    """Return the generators that an action draws from, and its result."""
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    seed_all(_PLANT)
    before = generator.get_state()
    result = action()
    moved = not torch.equal(before, generator.get_state())
    draws = _next_draws()
    expected = _untouched(_PLANT)
    return Draws(draws[:2] != expected[:2], moved or draws[2] != expected[2]), result


def moves_generators(action: Callable[[], Result]) -> tuple[bool, Result]:
    """Return whether an action draws from a global generator, which goes on from where it stands, and its result."""

    def states() -> tuple[Any, ...]:
        return host_states(), torch.default_generator.get_state().numpy().tobytes()

    before = states()
    result = action()
    return states() != before, result


class ItemError(DrivetrainError):
    """An item that could not be fetched, by its index. Takes one text, since loader workers rebuild it from one."""


class KeyedItems(Dataset[Any]):
    """A map-style dataset whose items are fetched in batches of (epoch, sample).

    Args:
        dataset: The data set.
        seed: The job's seed.
        is_drawn_after: Whether more than a model may draw after the items of a batch: its collate function.
    """

    def __init__(self, dataset: Any, seed: int, *, is_drawn_after: bool = True) -> None:
        self.dataset = dataset
        self.seed, self._is_drawn_after = seed, is_drawn_after
        self._plant: tuple[tuple[int, int], int] | None = None  # for which epoch and worker, and the key
        self.draws = False  # becomes true, and stays so, with the first batch that drew
        self._fetches_many = hasattr(dataset, "__getitems__")
        self._set_epoch = getattr(dataset, "set_epoch", None)  # as samplers have it; other items in each epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[tuple[int, Any]]) -> list[Any]:
        """Fetch items. What is drawn after them is keyed by them, too: the collate function is called next."""
        if self._set_epoch is not None and keys:
            self._begin(keys[0][0])
        items = self._items_of(keys)
        if keys:
            (epoch, first), (_, last) = keys[0], keys[-1]
            key = mix(mix(self.seed + epoch * _EPOCH + _in_numbers(first)) + _in_numbers(last) * _LAST + len(keys))
            if self._is_drawn_after:
                seed_all(key)
            else:
                torch.default_generator.manual_seed(key >> 1)
        return items

    def _items_of(self, keys: Sequence[tuple[int, Any]]) -> list[Any]:
        if not self.draws and keys:
            key = self._plant_of(keys[0][0])
            self.draws, items = draws_anything(lambda: self._fetch_all([sample for _, sample in keys]), key)
            if not self.draws:
                return cast(list[Any], items)
        return [self.keyed(epoch, sample) for epoch, sample in keys]

    def _plant_of(self, epoch: int) -> int:
        """Return a key: an item may seed a generator by torch.initial_seed(), others in each worker and epoch."""
        worker = get_worker_info()
        place = epoch, 0 if worker is None else worker.id + 1
        if self._plant is None or self._plant[0] != place:
            self._plant = place, key_of(self.seed, *place, _PLANT)
        return self._plant[1]

    def keyed(self, epoch: int, sample: Any) -> Any:
        if self._set_epoch is not None:
            self._begin(epoch)
        seed_all(key_of(self.seed, epoch, _in_numbers(sample)))
        return self._fetch(sample)

    def _begin(self, epoch: int) -> None:
        """Tell the data set the epoch, every time: others may read from it in between."""
        assert self._set_epoch is not None
        self._set_epoch(epoch if epoch <= _LAST_EPOCH else 0)

    def _fetch_all(self, samples: list[Any]) -> list[Any]:
        """Fetch all at once where the dataset can; one by one after an error, to name the item that raised it."""
        if self._fetches_many:
            try:
                items = list(self.dataset.__getitems__(samples))
            except Exception:  # noqa: BLE001  (the item that raises it does so again below)
                return [self._fetch(sample) for sample in samples]
            if len(items) != len(samples):
                raise ItemError(
                    f"__getitems__ of {type(self.dataset).__name__} returned {len(items)} items for {len(samples)}\n"
                    "  remedy: return a list of as many items as it is given samples"
                )
            return items
        return [self._fetch(sample) for sample in samples]

    def _fetch(self, sample: Any) -> Any:
        try:
            return self.dataset.__getitems__([sample])[0] if self._fetches_many else self.dataset[sample]
        except Exception as error:
            if (full := full_shared_memory(error)) is not None:
                raise full from None
            trace = "".join(traceback.format_exception(error)).rstrip()
            raise ItemError(
                f"item {sample} of the data set raised {type(error).__name__}: {error}\n"
                f"  remedy: `dataset[{sample!r}]` shows it alone\n{trace}"
            ) from error


def spread_over(num_samples: int, at_most: int) -> list[int]:
    """Return the numbers of a few samples: the first, the last, and some between."""
    count = min(at_most, num_samples)
    return [round(number * (num_samples - 1) / max(1, count - 1)) for number in range(count)]


def _in_numbers(sample: Any) -> int:
    """Return a number for a sample: a sampler may hand out keys that are none, such as names."""
    if isinstance(sample, int):
        return sample
    return int.from_bytes(hashlib.blake2b(repr(sample).encode(), digest_size=8).digest(), "little")


_SHARED_MEMORY = Path("/dev/shm")
_IS_FULL = re.compile(r"</torch_.*No space left on device|unable to write to file </torch_", re.DOTALL)
_BUS_ERROR = "killed by signal: Bus error"  # by torch, of a worker; a page of shared memory that is not to be had


def full_shared_memory(error: BaseException) -> DrivetrainError | None:
    """Return what to raise for an error which says that shared memory is full; None for any other."""
    texts = [str(error), str(error.__cause__)]
    if any(_BUS_ERROR in text for text in texts):
        return no_shared_memory("a loader's worker was killed by a bus error: a file that it maps was cut off, or ")
    return no_shared_memory() if any(_IS_FULL.search(text) for text in texts) else None


def no_shared_memory(before: str = "") -> DrivetrainError:
    """Return the error for workers that have no shared memory left to hand over their batches."""
    try:
        space = os.statvfs(_SHARED_MEMORY)
        size = f" of {format_gib(space.f_blocks * space.f_frsize)}"
    except OSError:
        size = ""
    return DrivetrainError(
        f"{before}{_SHARED_MEMORY}{size}, the shared memory in which workers hand over their batches, is full",
        remedy="use fewer workers (--num-workers; 0 needs none of it) or a smaller micro-batch (--batch-size), or "
        "enlarge it: docker run --shm-size=8g (or --ipc=host), in Kubernetes an emptyDir of medium Memory at /dev/shm, "
        "elsewhere sudo mount -o remount,size=8G /dev/shm",
    )


_LEAVE_OUT = "Samples that cannot be read are better left out of the data set: torch.utils.data.Subset(dataset, good)"


class Collated:
    """A collate function whose errors tell what they are about."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate
        self.first_drew: bool | None = None  # whether it drew random numbers for the first batch
        self._had_rows: bool | None = False  # whether the batches so far had a row per item; None: it was told

    def __call__(self, items: list[Any]) -> Any:
        try:
            if self.first_drew is None:
                self.first_drew, batch = moves_generators(functools.partial(self.collate, items))
            else:
                batch = self.collate(items)
        except DrivetrainError:
            raise
        except Exception as error:  # noqa: BLE001  (told below, as one of ours)
            if (full := full_shared_memory(error)) is not None:  # the function of a worker makes its batch there
                raise full from None
            # Of torch's own function a traceback says nothing that the error does not.
            is_own = self.collate is not default_collate
            trace = "\n" + "".join(traceback.format_exception(error)).rstrip() if is_own else ""
            name = getattr(self.collate, "__name__", type(self.collate).__name__)
            kinds = ", ".join(sorted({type(item).__name__ for item in items}))
            remedy = "items of unequal shapes or kinds need a collate function of your own: Job(collate=...)"
            raise ItemError(
                f"{name} could not make a batch of {len(items)} items ({kinds}): {type(error).__name__}: {error}\n"
                f"  remedy: {f'it gets any number of items, also one. {_LEAVE_OUT}' if is_own else remedy}{trace}"
            ) from (error if is_own else None)
        if batch is None:
            raise ItemError(f"the collate function {returned(batch)}\n  remedy: return the batch. {_LEAVE_OUT}")
        # A function with `packs` puts several samples into a row, and its loss counts what is in them.
        if self.collate is not default_collate and not getattr(self.collate, "packs", False):
            self._look_at_rows(batch, len(items))
        return batch

    def _look_at_rows(self, batch: Any, num_items: int) -> None:
        """Tell once of a function that leaves items out: a mean over the rest is taken for one over all items."""
        rows = {len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
        if self._had_rows and len(rows) == 1 and max(rows) < num_items:
            self._had_rows = None
            notice(
                f"the collate function returned a batch of {max(rows)} rows for {num_items} items: unless the loss is "
                f"a dt.LossSum(sum, count), it counts as a mean over {num_items}, and depends on the micro-batch. "
                f"{_LEAVE_OUT}"
            )
        elif rows == {num_items} and num_items > 1 and self._had_rows is not None:
            self._had_rows = True


class Columns(Dataset[dict[str, Tensor]]):
    """Tensors of equal length by name; an item is a dictionary of their rows."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        return {name: tensor[sample] for name, tensor in self.tensors.items()}


def gathers(dataset: Any, collate: Collate) -> bool:
    """Return whether batches can be gathered from tensors: bitwise as fetching item by item, without the loop."""
    if type(dataset) not in (TensorDataset, Columns) or collate is not default_collate:
        return False
    tensors = dataset.tensors.values() if isinstance(dataset, Columns) else dataset.tensors
    return all(tensor.dtype in GATHERED for tensor in tensors)


def gather(dataset: TensorDataset | Columns, samples: Tensor, *, pin_memory: bool = False) -> Any:
    """Gather a batch without indexing by `tensor[samples]`, which wakes all threads even for a small batch.

    That takes 0.2 to 17 ms of a step on a machine with 16 cores.
    """
    rows = _pinned_rows if pin_memory else _rows
    if isinstance(dataset, Columns):
        return {name: rows(tensor, samples) for name, tensor in dataset.tensors.items()}
    return [rows(tensor, samples) for tensor in dataset.tensors]


def _rows(tensor: Tensor, samples: Tensor) -> Tensor:
    return tensor.index_select(0, samples)


def _pinned_rows(tensor: Tensor, samples: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        return tensor.index_select(0, samples)
    out = torch.empty((len(samples), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, samples, out=out)


def collate_draws(items: KeyedItems, collate: Collate) -> bool:
    """Return whether a collate function draws from a global generator, found out by a batch of two items."""
    first = items.__getitems__([(0, sample) for sample in range(min(2, len(items)))])
    drew, _ = draws_anything(lambda: collate(first))
    return drew


def exactness_warnings(items: KeyedItems, collate: Collate) -> list[str]:
    """Return what prevents exact repetition, found by fetching two items twice."""
    found = []
    samples = range(min(2, len(items)))
    first = [items.keyed(0, sample) for sample in samples]
    with suppress(Exception):  # whatever an object of the user's raises
        first = copy.deepcopy(first)  # an item may be a view of what the data set changes
    second = [items.keyed(0, sample) for sample in samples]
    if not same(first, second):
        found.append(
            "the data set gives other items when asked twice, though Python's, numpy's and torch's generators were set "
            "alike: it has a generator of its own, or a clock, or changes its items in place. A resumed run will see "
            "other items. Remedy: draw from the global generators, and return new tensors"
        )
    collate(first)  # which makes its generators now, perhaps
    own = Generators([collate])
    before = own.states()
    with own.kept():
        collate(first)
        if own.states() != before:
            found.append(
                "the collate function draws from a random generator of its own: other numbers with another number of "
                "workers, and in a resumed run. Remedy: draw from the global generators of torch, numpy or Python, "
                "which are set for each batch"
            )
    return found


def same(one: Any, other: Any) -> bool:
    """Return whether two items hold the same numbers. Things that cannot be compared count as the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.layout is not torch.strided or other.layout is not torch.strided:
            return one.layout == other.layout and same(_entries_of(one), _entries_of(other))
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        is_nan_aware = one.is_floating_point() or one.is_complex()
        return torch.equal(one, other) or (is_nan_aware and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (str, bytes, int, float, bool, type(None))):
        return bool(one == other) or (one != one and other != other)
    return True


def _entries_of(tensor: Tensor) -> Any:
    """Return what a sparse or jagged tensor holds, as plain tensors; None for other layouts: they are not compared."""
    if tensor.layout is torch.jagged:  # whose shape is a symbol of its own
        jagged: Any = tensor
        return jagged.offsets(), jagged.values()
    try:
        entries = tensor.detach().to_sparse(layout=torch.sparse_coo).coalesce()
    except (RuntimeError, NotImplementedError):
        return None
    return entries.shape, entries.indices(), entries.values()


class Generators:
    """The generators that objects hold: in attributes, containers, closures, and in the globals their functions name.

    The search is not complete; but an augmentation with a private generator, used for a few items only, is found here
    where reading some items twice would not show it.
    """

    MOST_OBJECTS = 5000
    _KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    _METHODS = ("__getitem__", "__getitems__", "__call__", "forward")

    def __init__(self, things: list[Any]) -> None:
        self._found: list[Any] = []
        seen: set[int] = set()
        left = list(things)
        while left and len(seen) < self.MOST_OBJECTS:
            thing = left.pop()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if isinstance(thing, self._KINDS):
                self._found.append(thing)
            else:
                with suppress(Exception):  # an object that cannot be inspected counts as holding none
                    left.extend(self._inside(thing))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._found.extend(torch.cuda.default_generators)

    def states(self) -> list[Any]:
        return [_state(generator) for generator in self._found]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators on exit, whatever draws from them inside."""
        setters = [_setter(generator) for generator in self._found]
        try:
            yield
        finally:
            for put_back in setters:
                put_back()

    @classmethod
    def _inside(cls, thing: Any) -> list[Any]:
        if thing is None or isinstance(thing, (str, bytes, int, float, complex, Tensor, np.ndarray, type)):
            return []
        if isinstance(thing, dict):  # other mappings may read from a file whatever is asked for
            return list(islice(thing.values(), cls.MOST_OBJECTS))
        if isinstance(thing, (list, tuple, set, frozenset)):
            return list(islice(thing, cls.MOST_OBJECTS))
        if isinstance(thing, functools.partial):
            return [thing.func, *thing.args, *thing.keywords.values()]
        if inspect.ismethod(thing):
            return [thing.__self__, thing.__func__]
        if inspect.isfunction(thing):
            return _named_by(thing)
        if inspect.ismodule(thing) or inspect.isbuiltin(thing):
            return []
        methods = [getattr(type(thing), name, None) for name in cls._METHODS]
        slots = [getattr(thing, name, None) for kind in type(thing).__mro__ for name in _slots(kind)]
        return [*getattr(thing, "__dict__", {}).values(), *slots, *filter(inspect.isfunction, methods)]


def _slots(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [str(name) for name in slots]


def _named_by(function: Any) -> list[Any]:
    """Return a function's closure, and the generators and functions among the globals that it names."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    kinds = Generators._KINDS
    own = function.__module__
    return found + [
        thing for thing in named if isinstance(thing, kinds) or (inspect.isfunction(thing) and thing.__module__ == own)
    ]


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        _, keys, *rest = generator.get_state(legacy=True)
        return (np.asarray(keys).tobytes(), rest)
    if isinstance(generator, random.SystemRandom):
        return object()  # it has none, and every draw is a new one: never the same
    return generator.getstate()


def _setter(generator: Any) -> Callable[[], None]:
    """Return a function that restores a generator to its present state."""
    if isinstance(generator, random.SystemRandom):
        return lambda: None
    if isinstance(generator, np.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())
