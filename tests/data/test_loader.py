"""The loader: the same samples in the same order for every world and number of workers; randomness keyed by sample."""

import ctypes
import errno
import gc
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.precision import num_threads
from drivetrain.data.division import Division
from drivetrain.data.keyed_items import KeyedItems, moves_generators, same
from drivetrain.data.loader import Loader, cheapest_workers
from drivetrain.loop.validation import seed_validation
from tests import warm_python
from tests.hardware.children import child_environ
from tests.simulated_clock import SimulatedClock


class Numbers(Dataset[Any]):
    """Items that are their own index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Noisy(Numbers):
    """Items with noise from all three global generators."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


class SeldomNoisy(Numbers):
    """Only one item in fifty draws."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random() if index % 50 == 7 else 0.0], dtype=torch.float64)


class OwnGenerator(Numbers):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2, generator=self.generator)


class SeededByTorch(Numbers):
    """Makes a generator in each process that reads it, as advised against the same draws in all workers."""

    generator: np.random.Generator | None = None

    def __getitem__(self, index: int) -> Tensor:
        self.generator = self.generator or np.random.default_rng(torch.initial_seed())
        own = np.random.default_rng(torch.initial_seed() + index)
        return torch.tensor([index, self.generator.random(), own.random()], dtype=torch.float64)


class Broken(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        if index == 13:
            raise KeyError("no such picture")
        return torch.tensor(index)


def loader(
    dataset: Dataset[Any], global_batch: int, micro_batch: int, world: int = 1, rank: int = 0, **options: Any
) -> Loader:
    division = Division(len(dataset), global_batch, micro_batch, world)  # type: ignore[arg-type]
    return Loader(dataset, division, rank, options.pop("seed", 5), options.pop("collate", default_collate), **options)


def items_by_step(dataset: Dataset[Any], world: int, steps: range, **options: Any) -> list[list[Any]]:
    """What all ranks together saw in each step, in the order of ranks and micro-steps, weight 0 left out."""
    found: list[list[Any]] = [[] for _ in steps]
    for rank in range(world):
        source = loader(dataset, world=world, rank=rank, **options)
        for number, (_, parts) in enumerate(source.batches(steps.start, steps.stop)):
            for part in parts:
                if part.weight:
                    assert len(part.batch) == part.num_samples
                    found[number] += part.batch.tolist()
    return found


@settings(max_examples=30)
@given(
    size=st.integers(1, 90),
    global_batch=st.integers(1, 40),
    micro_batch=st.integers(1, 20),
    world=st.integers(1, 5),
    first=st.integers(0, 12),
)
def test_the_global_order_knows_nothing_of_the_world(size, global_batch, micro_batch, world, first) -> None:
    steps = range(first, first + 4)
    reference = items_by_step(Numbers(size), 1, steps, global_batch=global_batch, micro_batch=size)
    assert items_by_step(Numbers(size), world, steps, global_batch=global_batch, micro_batch=micro_batch) == reference


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("dataset", [Numbers(40), Noisy(40), SeldomNoisy(120)], ids=["plain", "noisy", "seldom"])
def test_workers_and_worlds_change_nothing(dataset: Dataset[Any], num_workers: int) -> None:
    steps = range(12)
    reference = items_by_step(dataset, 1, steps, global_batch=16, micro_batch=16)
    assert items_by_step(dataset, 1, steps, global_batch=16, micro_batch=5, num_workers=num_workers) == reference
    assert items_by_step(dataset, 2, steps, global_batch=16, micro_batch=3, num_workers=num_workers) == reference


def test_noise_differs_between_epochs_and_samples() -> None:
    rows = [row for step in items_by_step(Noisy(8), 1, range(2), global_batch=8, micro_batch=8) for row in step]
    for column in (1, 2, 3):
        assert len({row[column] for row in rows}) == 16


def test_a_model_that_begins_to_draw_draws_other_numbers_with_each_batch() -> None:
    """Steps set no generators for a model that was not seen to draw, as with a dropout that is 0 at first."""
    drawn = []
    for _, parts in loader(Numbers(20), 4, 2).batches(0, 5):
        for _ in parts:
            drawn.append(torch.rand(()).item())
    assert len(set(drawn)) == 10


def test_generators_seeded_by_torch_differ_between_workers_and_epochs() -> None:
    """Draws of torch are looked for from one state, which was the seed of each of them."""
    steps = items_by_step(SeededByTorch(8), 1, range(4), global_batch=4, micro_batch=2, num_workers=2)
    rows = [row for step in steps for row in step]
    for column in (1, 2):
        assert len({row[column] for row in rows}) == 16


def test_starting_in_the_middle_sees_what_a_whole_pass_saw() -> None:
    whole = items_by_step(Noisy(50), 1, range(20), global_batch=8, micro_batch=8)
    assert items_by_step(Noisy(50), 1, range(11, 20), global_batch=8, micro_batch=8, num_workers=2) == whole[11:]


def test_tensors_are_gathered_with_the_same_bits() -> None:
    tensors = TensorDataset(torch.randn(40, 3), torch.arange(40))
    source = loader(tensors, 16, 16)
    assert source._gathers
    for place, parts in source.batches(0, 3):
        (part,) = parts
        one_by_one = default_collate([tensors[sample] for sample in source.samples_of(place)])
        assert all(torch.equal(a, b) for a, b in zip(part.batch, one_by_one, strict=True))


def test_items_that_do_not_draw_are_not_reseeded_one_by_one() -> None:
    items = KeyedItems(Numbers(10), 0)
    items.__getitems__([(0, 1), (0, 2)])
    assert items.draws is False
    noisy = KeyedItems(Noisy(10), 0)
    noisy.__getitems__([(0, 1)])
    assert noisy.draws is True


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_item_that_raises_is_named(num_workers: int) -> None:
    source = loader(Broken(20), 20, 20, num_workers=num_workers, shuffle=False)
    with pytest.raises(Exception, match="item 13 of the data set raised KeyError"), closing(source):
        [list(parts) for _, parts in source.batches(0, 1)]


def full(*_: Any) -> Any:
    """Fail as torch does where a tensor is put into shared memory that is full."""
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)")


def killed(*_: Any) -> Any:
    """Die as a process does that touches a page of shared memory which is not to be had."""
    os.kill(os.getpid(), signal.SIGBUS)


class Unsent:
    """A batch that is made, and cannot be sent to another process."""

    def __init__(self, reason: Callable[..., Any]) -> None:
        self.reason = reason

    def __reduce__(self) -> Any:
        return self.reason()


def not_picklable() -> Any:
    raise TypeError("cannot pickle this")


IN_SMALL_SHARED_MEMORY = """
import torch
from torch.utils.data import default_collate
from tests.data.test_loader import Wide, loader
for collate in (default_collate, lambda items: torch.stack(items)):
    source = loader(Wide(16), 8, 8, collate=collate, num_workers=2)
    try:
        list(source.batches(0, 2))
    except Exception as error:
        print(type(error).__name__, error)
"""


class Wide(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(500_000)


@pytest.mark.parametrize("collate", [full, lambda items: Unsent(full), killed], ids=["made", "sent", "killed"])
def test_full_shared_memory_is_not_blamed_on_the_collate_function(collate: Callable[..., Any]) -> None:
    source = loader(Numbers(8), 4, 4, collate=collate, num_workers=1)
    with pytest.raises(DrivetrainError, match=r"/dev/shm of .* is full") as told, closing(source):
        list(source.batches(0, 2))
    assert "--num-workers" in told.value.remedy
    assert "--shm-size" in told.value.remedy
    assert "collate" not in str(told.value)
    assert "could not make a batch" not in str(told.value)


def test_a_batch_that_cannot_be_sent_is_told_and_not_awaited() -> None:
    source = loader(Numbers(8), 4, 4, collate=lambda items: Unsent(not_picklable), num_workers=1)
    with (
        pytest.raises(DrivetrainError, match="could not send its batch: TypeError: cannot pickle this"),
        closing(source),
    ):
        list(source.batches(0, 2))


def test_a_collate_function_that_finds_a_disk_full_is_told_as_its_own() -> None:
    def caching(items: list[Any]) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DrivetrainError, match="caching could not make a batch"):
        list(loader(Numbers(8), 4, 4, collate=caching).batches(0, 1))


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root and unshare")
def test_a_real_small_shared_memory_is_told() -> None:
    shell = f'mount -t tmpfs -o size=8m tmpfs /dev/shm || exit 77; exec "{sys.executable}" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", shell, "sh", IN_SMALL_SHARED_MEMORY]
    done = subprocess.run(
        command,
        env=child_environ(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("nothing may be mounted here")
    told = [line for line in done.stdout.splitlines() if "remedy" not in line]
    assert [line.split(" of ")[0] for line in told] == ["DrivetrainError /dev/shm"] * 2, done.stderr
    assert all("8 MiB" in line and line.endswith("is full") for line in told)


def test_what_cannot_be_exact_is_said() -> None:
    with pytest.warns(UserWarning, match="generator of its own"):
        loader(OwnGenerator(10), 4, 4).warn_if_inexact()

    def noisy_collate(items: list[Any]) -> Any:
        return default_collate(items) + torch.rand(())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader(Noisy(10), 4, 4).warn_if_inexact() == []
        assert loader(Numbers(10), 4, 4, collate=noisy_collate).warn_if_inexact() == []
    assert loader(Numbers(10), 4, 4, collate=noisy_collate).collate_draws()
    assert not loader(Noisy(10), 4, 4).collate_draws()


def test_closing_ends_the_workers_at_once() -> None:
    source = loader(Numbers(400), 4, 4, num_workers=2)
    before = set(psutil.Process().children())
    batches = source.batches(0, 100)
    next(batches)
    workers = set(psutil.Process().children()) - before
    assert len(workers) >= 2
    source.close()
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]


class Pictures(Numbers):
    """Items with noise that are summed up: how a sum is rounded depends on the number of threads."""

    def __getitem__(self, index: int) -> Tensor:
        pixels = torch.rand(200_000) + np.random.random() + random.random()
        return torch.stack([pixels.sum(), pixels.std()])


def drawn_with(source: Loader) -> list[Any]:
    """Return the batches of a whole set, and what a model would draw in this process with each."""
    seed_validation(3)
    with closing(source):
        return [
            (micro.batch, torch.rand(2), random.random(), np.random.random())
            for _, parts in source.batches(0, 1)
            for micro in parts
        ]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the processes that were started."""
    found: list[str] = []
    start = multiprocessing.process.BaseProcess.start

    def counted(process: Any) -> None:
        found.append(process.name)
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", counted)
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "dataset",
    [Noisy(40), SeldomNoisy(120), Pictures(10), TensorDataset(torch.randn(40, 3))],
    ids=["noisy", "seldom", "pictures", "tensors"],
)
def test_a_small_set_is_read_here_as_workers_would(
    dataset: Any, threads: int, started: list[str], simulated_clock: SimulatedClock
) -> None:
    options: dict[str, Any] = {"num_workers": 2, "shuffle": False}
    with num_threads(threads):
        by_workers = drawn_with(loader(dataset, len(dataset), 9, **options))
        assert len(started) == 2
        source = loader(dataset, len(dataset), 9, **options, weighs_workers=True)
        for _ in range(3):
            assert same(drawn_with(source), by_workers)
        assert len(started) == 2, "it started no worker"
        assert torch.get_num_threads() == threads


class Slow(Numbers):
    """Items that take long, by a clock that only this process has."""

    def __init__(self, size: int, seconds: float, spend: Callable[[float], None]) -> None:
        super().__init__(size)
        self.seconds, self.spend = seconds, spend

    def __getitem__(self, index: int) -> Tensor:
        self.spend(self.seconds)
        return super().__getitem__(index)


def test_a_set_that_takes_long_is_read_by_workers(simulated_clock: SimulatedClock, started: list[str]) -> None:
    before, data = simulated_clock.now, Slow(40, 0.5, simulated_clock.spend)
    drawn_with(loader(data, 40, 10, num_workers=2, shuffle=False, weighs_workers=True))
    assert len(started) == 2
    assert simulated_clock.now - before < 2.1, "two items twice show that it can be read here; no more of it was"
    data.seconds = 0.001
    source = loader(data, 40, 10, num_workers=2, shuffle=False, weighs_workers=True)
    drawn_with(source)
    for seconds in (0.5, 0.001, 0.5, 0.5):  # once it had to wait for the disk; twice in turn, it will again
        data.seconds = seconds
        drawn_with(source)
    assert len(started) == 2
    drawn_with(source)
    assert len(started) == 4


def test_workers_of_a_whole_set_by_their_cost() -> None:
    found = {seconds: cheapest_workers(seconds, 8, 0.1) for seconds in (0.0, 0.1, 0.2, 0.3, 1.0, 3.0, 10.0, math.inf)}
    assert found == {0.0: 0, 0.1: 0, 0.2: 0, 0.3: 1, 1.0: 2, 3.0: 4, 10.0: 8, math.inf: 8}
    assert cheapest_workers(10.0, 8, 2.5) == 1


class Failing(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        raise OSError("the disk is gone")


def test_what_cannot_be_read_twice_is_read_by_workers(started: list[str]) -> None:
    """A worker has a copy of the data set: what an item does to it is gone with the worker."""
    options: dict[str, Any] = {"num_workers": 2, "shuffle": False}
    by_workers = drawn_with(loader(OwnGenerator(20), 20, 10, **options))
    source = loader(OwnGenerator(20), 20, 10, **options, weighs_workers=True)
    for _ in range(2):
        assert same(drawn_with(source), by_workers)
    assert len(started) == 6
    with pytest.raises(DrivetrainError, match="item 0 of the data set raised OSError"):
        drawn_with(loader(Failing(20), 20, 10, num_workers=2, shuffle=False, weighs_workers=True))


class Stuck(Numbers):
    """One item never comes, in native code that holds Python's lock: no handler and no thread runs in that process."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 11:
            Path("stuck").touch()
            ctypes.PyDLL(None).sleep(1000)
        return torch.tensor(index)


@pytest.mark.parametrize("closes", [True, False])
def test_no_worker_that_is_stuck_is_waited_for(tmp_path: Path, closes: bool) -> None:
    """Neither when the loader is closed nor, if it never is, when the process ends."""
    code = (
        "import sys, torch, pathlib; from tests.data.test_loader import Stuck, loader\n"
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2\n"
        "source = loader(Stuck(16), 4, 4, num_workers=1, shuffle=False)\n"
        "batches = source.batches(0, 4)\n"
        "step, parts = next(batches)\n"
        "list(parts)\n"
        "while not pathlib.Path('stuck').exists(): pass\n"
        f"{'source.close()' if closes else ''}\n"
        "print('over')\n"
    )
    done = warm_python.run(["-c", code], cwd=tmp_path, timeout=240)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


class Remains:
    """Something in a cycle that must not be destroyed by another process than the one that made it."""

    def __init__(self, file: Path) -> None:
        self.file, self.cycle = file, self

    def __del__(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collecting(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        gc.collect()
        return torch.tensor(index)


def test_workers_do_not_collect_what_this_process_left_behind(tmp_path: Path) -> None:
    file = tmp_path / "destroyed"
    gc.collect()
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        Remains(file)  # garbage at once, but nobody has collected it yet
        loader = Loader(Collecting(), Division(8, 4, 4, 1), 0, 0, default_collate, num_workers=2)
        assert len(list(loader.batches(0, 2))) == 2
        loader.close()
        assert not file.exists()
        assert gc.get_freeze_count() == frozen, "only the workers' collectors are held back"
    finally:
        gc.enable()
    gc.collect()
    assert file.read_text().split() == [str(os.getpid())]


def test_the_second_of_a_pair_of_normal_numbers_is_a_draw() -> None:
    """numpy makes two at a time: the second moves nothing of its generator but what it keeps."""
    np.random.seed(0)
    np.random.randn()
    assert moves_generators(np.random.randn)[0]
    assert not moves_generators(list)[0]
