"""Before a model is made: every way in which ranks can disagree is found, with rank and remedy, on all ranks alike."""

import random
import resource
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from drivetrain import DrivetrainError
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.world import World
from drivetrain.data import source
from drivetrain.data.keyed_items import KeyedItems
from drivetrain.hardware import detect
from drivetrain.run import preflight as module
from drivetrain.run.preflight import is_wanted, preflight
from tests.api.jobs import Variant, make_job
from tests.gloo_pool import GlooPool
from tests.hardware_fixtures import load

JOB = {"name": "x", "num_samples": 100, "global_batch": 8}


def fly(folder: str, change: dict[str, Any], data: Any = None) -> Any:
    """On every rank; rank 1 differs by `change`. Returns what was found, or the error in words."""
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), group=dist.group.WORLD)
    mine = change if world.rank == 1 else {}
    output = Path(folder) / "other" if "folder" in mine else Path(folder)
    config = configure(output_dir=output, **mine.get("config", {}))
    job = {**JOB, **mine.get("job", {})}
    original = module.code_version
    module.SHOWN_AFTER_SECONDS = 0.2
    if "code" in mine:
        module.code_version = lambda script: {**original(script), **mine["code"]}
    try:
        items = None if data is None else {"training": KeyedItems(data, 0)}
        found = preflight(world, config, detect(output), job, "", 60, items)
    except DrivetrainError as error:
        return str(error)
    finally:
        module.code_version = original
    return {"rates": found.gigabytes_per_second, "hosts": found.hosts, "compared": found.num_compared}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_good_world_passes_with_its_figures(gloo_pool, tmp_path: Path, world: int) -> None:
    answers = gloo_pool.run(fly, str(tmp_path), {}, world=world)
    for answer in answers:
        assert set(answer["rates"]) == {"all_reduce", "broadcast", "all_gather", "all_to_all"}
        assert all(rate > 0 for rate in answer["rates"].values())
        assert len(answer["hosts"]) == 1
    assert list(tmp_path.iterdir()) == []  # it leaves nothing


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"code": {"torch": "1.0"}}, "runs other code than rank 0"),
        ({"config": {"seed": 3}}, "run.seed is 3 there and 0 on rank 0"),
        ({"job": {"num_samples": 99}}, "has another data set than rank 0"),
        ({"job": {"global_batch": 9}}, "global_batch is 9 there and 8 on rank 0"),
        ({"folder": True}, "does not see in"),
    ],
)
def test_a_rank_that_differs_is_named(gloo_pool, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    for answer in gloo_pool.run(fly, str(tmp_path), change, world=2):
        assert isinstance(answer, str), "it passed"
        assert words in answer
        assert "rank 1 on " in answer
        assert "remedy: " in answer


def wrong_numbers(folder: str) -> Any:
    original = dist.all_gather

    def swapped(parts: list[torch.Tensor], own: torch.Tensor, *group: Any, **more: Any) -> Any:
        work = original(parts, own, *group, **more)
        if own.is_floating_point() and dist.get_rank() == 1 and more.get("async_op"):
            work.wait()
            parts.reverse()
        return work

    dist.all_gather = swapped
    try:
        return fly(folder, {})
    finally:
        dist.all_gather = original


def test_wrong_numbers_are_noticed(gloo_pool, tmp_path: Path) -> None:
    for answer in gloo_pool.run(wrong_numbers, str(tmp_path), world=2):
        assert "rank 1 on " in answer
        assert "all_gather over gloo gave wrong numbers" in answer


def test_gpus_that_two_ranks_share_or_that_are_full() -> None:
    """The facts of machines that are not here."""
    gpu = load("4x-l4").gpus[0]
    total = gpu.memory_total_bytes
    one = {"rank": 0, "host": "a", "backend": "nccl", "device": [gpu.uuid, "cuda:0", total, total]}
    two = {**one, "rank": 1}
    problem = module._own_devices([one, two])
    assert problem is not None
    assert "rank 1 on a and rank 0 on a use the same GPU, cuda:0" in str(problem)
    assert module._own_devices([one, {**two, "backend": "gloo"}]) is None
    full = {**two, "device": ["other", "cuda:1", total // 100, total]}
    assert "rank 1 on a: only 0.2 of 22 GiB are free on cuda:1" in str(module._free_memory([one, full]))
    assert module._free_memory([one, two]) is None


def test_when_there_is_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    two = World(0, 2, 0, group=object())  # type: ignore[arg-type]
    assert is_wanted(configure(), two)
    assert not is_wanted(configure(), World())
    assert not is_wanted(configure(skip_preflight=True), two)
    monkeypatch.setenv(module.SKIP, "1")
    assert not is_wanted(configure(), two)


# Samples


class Made(torch.utils.data.Dataset[Any]):
    """40 items, made by a function of (rank, number)."""

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        self.rank, self.make = dist.get_rank() if dist.is_initialized() else 0, make
        self.read: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        return self.make(self.rank, number)


def pixels(number: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, 16, 16), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)


def reversed_there(rank: int, number: int) -> Any:
    number = 39 - number if rank else number
    return pixels(number), number % 10


def other_classes(rank: int, number: int) -> Any:
    return {"image": pixels(number).numpy(), "label": (number + rank) % 10}


def other_texts(rank: int, number: int) -> Any:
    return f"sentence {number + rank}"


def other_fractions(rank: int, number: int) -> Any:
    return (pixels(39 - number if rank else number) / 255 + torch.rand(())).bfloat16()  # what it draws is keyed


def mostly_zeros(rank: int, number: int) -> Any:
    found = np.zeros(5000, dtype=np.float32)
    found[np.random.default_rng([rank, number]).choice(5000, 80, replace=False)] = 1
    return found


def one_only(rank: int, number: int) -> Any:
    return number + (rank and number == 39)


DIFFERENT = [reversed_there, other_classes, other_texts, other_fractions, mostly_zeros, one_only]


def look(folder: str, number: int, kinds: str) -> Any:
    make = {"different": DIFFERENT, "alike": [make for make, _ in ALIKE]}[kinds][number]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "READING_SECONDS", 60.0)  # however busy the machine is
        return fly(folder, {}, make() if isinstance(make, type) else Made(make))


@pytest.mark.parametrize("number", range(len(DIFFERENT)), ids=[make.__name__ for make in DIFFERENT])
def test_samples_that_are_other_ones_on_a_rank_are_noticed(gloo_pool: GlooPool, tmp_path: Path, number: int) -> None:
    for answer in gloo_pool.run(look, str(tmp_path), number, "different", world=2):
        assert isinstance(answer, str), "it passed"
        assert "rank 1 on " in answer
        assert f"sample {39 if DIFFERENT[number] is one_only else 0} of the training set is another one there" in answer
        assert "remedy: every rank needs all samples, in the same order: sort the names that os.listdir" in answer


def keyed_noise(rank: int, number: int) -> Any:
    return torch.rand(3) + random.random() + np.random.rand(), number


def rounded_otherwise(rank: int, number: int) -> Any:
    return pixels(number) / 255 * (1 + 1e-6 * rank), number


def decoded_otherwise(rank: int, number: int) -> Any:
    noise = torch.randint(0, 3, (3, 16, 16), generator=torch.Generator().manual_seed(rank))
    return (pixels(number) + noise).clamp(max=255).to(torch.uint8), number


def lies_elsewhere(rank: int, number: int) -> Any:
    return pixels(number), f"/scratch/node{rank}/{number}.png"


def only_names(rank: int, number: int) -> Any:
    return Path(f"/scratch/node{rank}/{number}.png"), {"label": number}


class Coins(Made):
    """A coin that nobody can see: the same on two ranks half of the time, and the same twice half of the time."""

    def __init__(self) -> None:
        super().__init__(lambda rank, number: pixels(number) if secrets.randbits(1) else pixels(number).flip(2))


class OwnGenerator(Made):
    """Other ones on each rank, and rarely another one when it is read again."""

    def __init__(self) -> None:
        super().__init__(self.item)
        self.generator = np.random.default_rng(self.rank)

    def item(self, rank: int, number: int) -> Any:
        return int(self.generator.integers(0, 2**40) < 2**39) + 10 * rank


class SystemCoins(Made):
    def __init__(self) -> None:
        super().__init__(lambda rank, number: self.generator.random() < 0.99 or rank)
        self.generator = random.SystemRandom()


class Counted(Made):
    def __init__(self) -> None:
        super().__init__(lambda rank, number: len(self.read) + 100 * rank)


def odd(rank: int, number: int) -> Any:
    return {"thing": object(), "sparse": torch.eye(3).to_sparse(), "objects": np.array([object()]), "none": None}


def raises(rank: int, number: int) -> Any:
    raise OSError(f"no such file on {rank}")


def raises_there(rank: int, number: int) -> Any:
    return 1 / (1 - rank) + number


def endless(rank: int, number: int) -> Any:
    found: list[Any] = [rank]
    found.append(found)
    return found


class Lazy(Mapping[str, Any]):
    """As a file of many samples: its values are read when they are asked for."""

    read = 0

    def __getitem__(self, key: str) -> Any:
        self.read += 1
        raise RuntimeError("the file is closed")

    def __iter__(self) -> Iterator[str]:
        return iter("abc")

    def __len__(self) -> int:
        return 3


class Proxy:
    __slots__ = ("held",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class HoldsFiles(Made):
    def __init__(self) -> None:
        super().__init__(lambda rank, number: number)
        self.file, self.proxy = Lazy(), Proxy()


def many_kinds(rank: int, number: int) -> Any:
    return {
        "mask": torch.arange(70) % 2 == 0,
        "complex": torch.tensor([1j, complex("nan")]),
        "numbers": [1, 2.5, float("nan"), float("inf")],
        "time": np.datetime64("2026-01-01"),
        "large": 2**80,
        "nothing": torch.zeros(0, 3),
        ("a", 1): True,
        "half": np.float16(2),
    }


ALIKE: list[tuple[Any, int]] = [
    (keyed_noise, 8),
    (rounded_otherwise, 0),  # they are not alike to the bit, and yet let pass
    (decoded_otherwise, 0),
    (lies_elsewhere, 0),
    (only_names, 0),
    (Coins, 0),
    (OwnGenerator, 0),
    (SystemCoins, 0),
    (Counted, 0),
    (odd, 0),
    (raises, 0),
    (raises_there, 0),
    (endless, 0),
    (many_kinds, 8),
    (HoldsFiles, 8),
]


@pytest.mark.parametrize("number", range(len(ALIKE)), ids=[make.__name__ for make, _ in ALIKE])
def test_what_may_differ_is_no_alarm(gloo_pool: GlooPool, tmp_path: Path, number: int) -> None:
    for answer in gloo_pool.run(look, str(tmp_path), number, "alike", world=2):
        assert not isinstance(answer, str), answer
        assert answer["compared"] == ALIKE[number][1] or ALIKE[number][0] is Coins


def test_what_a_data_set_holds_is_not_read_to_look_for_generators() -> None:
    data = HoldsFiles()
    assert set(source.glance(KeyedItems(data, 0), seconds=600).digests) >= {0, len(data) - 1}
    assert data.file.read == 0


def test_looking_at_a_large_item_takes_no_copies_of_it() -> None:
    """Many ranks of a machine look at one at once."""

    class Large:
        def __init__(self) -> None:
            self.items = [torch.zeros(50_000_000, dtype=torch.bfloat16), np.zeros(50_000_000, np.float16)]

        def __len__(self) -> int:
            return 2

        def __getitem__(self, number: int) -> Any:
            return self.items[number]

    data = KeyedItems(Large(), 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert set(source.glance(data, seconds=600).sketches) == {0, 1}  # however busy the machine is
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown < 60_000_000, "an item is 100 MB"


def test_looking_at_samples_moves_no_generator() -> None:
    class Drawing(Made):
        def __init__(self) -> None:
            super().__init__(
                lambda rank, number: (self.one.random(), self.two.integers(9), torch.rand(1), np.random.rand())
            )
            self.one, self.two, self.three = random.Random(1), np.random.default_rng(1), torch.Generator()

    data = Drawing()

    def states() -> Any:
        own = data.one.getstate(), repr(data.two.bit_generator.state), data.three.get_state().tolist()
        return own, random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]

    before = states()
    found = source.glance(KeyedItems(data, 0))
    assert data.read
    assert found == (40, {}, {}), "its items are not keyed"
    source.are_steady(KeyedItems(data, 0), {3: ""})
    assert states() == before


def test_slow_items_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "READING_SECONDS", 0.05)
    monkeypatch.setattr(module, "READING_SECONDS", 0.05)
    slow, other = Made(lambda rank, number: time.sleep(0.1) or number), Made(lambda rank, number: number)
    found = module._glances({"training": KeyedItems(slow, 0), "validation": KeyedItems(other, 0)})
    assert slow.read == [0]
    assert list(found["training"].digests) == [0]
    assert other.read == []
    assert found["validation"].length == 40
    monkeypatch.setattr(source, "AGAIN_SECONDS", 0.05)
    assert not source.are_steady(KeyedItems(slow, 0), found["training"].digests), "no time to be sure: no alarm"


def train_on(folder: str, broken: str) -> str:
    job = make_job(Variant(steps=2, num_samples=20, global_batch=4))
    rank = dist.get_rank()
    files = [(torch.full((6,), float(number), dtype=torch.float64), number % 4) for number in range(20)]
    listed = files[::-1] if rank else files
    valid = {"order": listed, "length": files[rank:], "": files}.get(broken.removeprefix("valid "), files)
    data = listed if broken == "order" else files
    changed = replace(job, data=data, valid=valid if broken != "order" else None)
    try:
        train(changed, configure(output_dir=folder, gpu_mode="cpu", report=False, num_workers=0), quiet=True)
    except DrivetrainError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("order", "sample 0 of the training set is another one there"),
        ("valid order", "sample 0 of the validation set is another one there"),
        ("valid length", "the validation set has 19 samples there and 20 on rank 0"),
        ("", ""),
    ],
)
def test_a_run_with_files_in_another_order_is_refused(
    gloo_pool: GlooPool, tmp_path: Path, broken: str, words: str
) -> None:
    for answer in gloo_pool.run(train_on, str(tmp_path), broken, world=2):
        assert (words in answer) if words else answer == ""


def test_one_process_reads_nothing_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "glance", lambda items: pytest.fail("there is nobody to compare with"))
    train(make_job(Variant(steps=1)), configure(output_dir=tmp_path, gpu_mode="cpu", report=False), quiet=True)
