"""Resident data on a GPU: the bits of the ordinary path, in memory that is taken once, and a host that never waits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from drivetrain.config import configure
from drivetrain.data import feed
from drivetrain.data.division import Division
from drivetrain.data.feed import feed_for
from drivetrain.data.loader import Loader
from drivetrain.data.resident import NotResidentError, Resident, identical, make_resident
from drivetrain.data.source import source_of
from drivetrain.run.memory import Residency
from tests.api.jobs import Variant, run
from tests.api.test_resume import assert_identical
from tests.data.test_resident import KINDS, Made, assert_same
from tests.data.test_resident_training import VARIANT, events, make_data
from tests.waits import refuse_waits

pytestmark = pytest.mark.gpu

CYCLES = 200_000_000  # some tenth of a second on any GPU


def gpu() -> torch.device:
    return torch.device("cuda", 0)


def resident_of(data: Any, **options: Any) -> Resident:
    return make_resident(source_of(data), default_collate, gpu(), options.pop("limit", 1e11), **options)


def batches(
    data: Any, division: Division, rank: int, steps: range, *, channels_last: bool, **options: Any
) -> list[Any]:
    feed = feed_for(gpu(), channels_last=channels_last)
    loader = Loader(data, division, rank, 5, default_collate, pin_memory=True, feed=feed, **options)
    found = [(place, list(parts)) for place, parts in loader.batches(steps.start, steps.stop)]
    return [found, loader.position]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "other types"])
def test_the_bits_of_the_ordinary_path(kind: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "FIRST_NUMBERS", 10)
    monkeypatch.setattr(feed, "FOLLOWING_NUMBERS", 20)
    data = KINDS[kind]()
    resident = resident_of(data, channels_last=channels_last)
    assert all(column.rows.device == gpu() for column in resident.columns)
    for world, global_batch, micro_batch in ((1, 5, 5), (2, 7, 3), (3, 10, 2)):
        division = Division(23, global_batch, micro_batch, world)
        for rank in range(world):
            steps = range(1, 2 * division.steps_per_epoch + 1)
            expected = batches(data, division, rank, steps, channels_last=channels_last)
            found = batches(data, division, rank, steps, channels_last=channels_last, resident=resident)
            for _, parts in found[0]:
                for part in parts:
                    assert all(leaf.device == gpu() for leaf in _tensors(part.batch))
            assert_same(found, expected)


def test_types_that_torch_does_not_gather_everywhere() -> None:
    data, samples = KINDS["other types"](), torch.tensor([4, 0, 22, 4])
    here = make_resident(source_of(data), default_collate, torch.device("cpu"), 1e11).gather(samples)
    there = resident_of(data).gather(samples.to(gpu()))
    assert all(tensor.device == gpu() for tensor in there)
    assert identical(there, here)


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    torch.utils._pytree.tree_map_only(torch.Tensor, found.append, batch)
    return found


def test_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many pieces of numbers; the device is kept busy, and every batch is handed out long before it is done."""
    monkeypatch.setattr(feed, "FIRST_NUMBERS", 1000)
    monkeypatch.setattr(feed, "FOLLOWING_NUMBERS", 4000)
    data = TensorDataset(torch.randn(5000, 8), torch.arange(5000))
    resident = resident_of(data)

    def loop(last: int) -> list[torch.Tensor]:
        loader = Loader(data, Division(5000, 100, 50, 1), 0, 5, default_collate, resident=resident)
        return [micro.batch[1] for _, parts in loader.batches(0, last) for micro in parts]

    loop(100)
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(CYCLES)
        found = loop(100)  # some 400 kernels: the driver holds about a thousand before the host has to wait
        event.record()
        assert not event.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    by_epoch = torch.cat(found).view(2, 5000).cpu()
    assert all(torch.equal(epoch.sort().values, torch.arange(5000)) for epoch in by_epoch)


@pytest.mark.parametrize("kind", ["items", "tensors", "sampler"])
def test_training_gives_the_same_bits_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    changes = {"data": make_data(kind), **({"global_batch": None} if kind == "sampler" else {})}
    settings = {"precision": "fp32", "auto_optimize": False}
    off = run(str(tmp_path / "off"), VARIANT, 5, 0, "single_gpu", {**settings, "resident": "off"}, **changes)
    refuse_waits(monkeypatch)
    on = run(str(tmp_path / "on"), VARIANT, 5, 0, "single_gpu", {**settings, "resident": "on"}, **changes)
    assert off is not None
    assert on is not None
    assert_identical(on, off)


def test_replayed_steps_on_resident_data(tmp_path: Path) -> None:
    """The replay gathers by itself: the same bits as with fetched batches, which are copied into place."""
    variant = Variant(global_batch=16, steps=60, num_samples=59, dtype=torch.float32)
    found = {}
    for name, settings in {
        "fetched": {"resident": "off", "capture": "on"},
        "resident": {"resident": "on", "capture": "on"},
        "not captured": {"resident": "on", "capture": "off"},
    }.items():
        given = {"precision": "fp32", "auto_optimize": False, **settings}
        found[name] = run(str(tmp_path / name), variant, 16, 0, "single_gpu", given)
        (finish,) = events(tmp_path / name / "suite", "finish")
        assert ("steps replayed" in finish["capture"]) is (settings["capture"] == "on"), finish
    assert found["resident"] is not None
    assert found["fetched"] is not None
    assert found["not captured"] is not None
    assert_identical(found["resident"], found["fetched"])
    assert found["resident"].losses == pytest.approx(found["not captured"].losses, abs=1e-6)


def test_memory_is_taken_once() -> None:
    data = TensorDataset(torch.randn(4096, 1024), torch.arange(4096))
    source = source_of(data)
    residency = Residency(configure(gpu_mode="single_gpu"), gpu(), 0, quiet=True)
    before = torch.cuda.memory_allocated(gpu())
    first = residency.of(source, default_collate, channels_last=False, num_workers=0, planned=None)
    assert first is not None
    taken = torch.cuda.memory_allocated(gpu()) - before
    assert first.num_bytes == 4096 * (4096 + 8)
    assert first.num_bytes <= taken < first.num_bytes + 4096
    assert residency.of(source, default_collate, channels_last=False, num_workers=0, planned=None) is first
    assert residency.of(source, default_collate, channels_last=True, num_workers=0, planned=None) is first
    assert torch.cuda.memory_allocated(gpu()) - before == taken
    assert residency.take_notes() == []


def test_what_does_not_fit_is_left_where_it_is() -> None:
    huge = Made(2**40, lambda n: torch.zeros(4096))
    with pytest.raises(NotResidentError, match=r"it takes .* may be used for it"):
        resident_of(huge)
    with pytest.raises(NotResidentError, match="there is no memory for its"):
        resident_of(huge, limit=float("inf"))
    free = torch.cuda.mem_get_info(gpu())[0]
    quarter = torch.empty(1).expand(free // 4 // 2, 1)  # of what it claims to be, nothing is there
    residency = Residency(configure(gpu_mode="single_gpu"), gpu(), 0, quiet=True)
    unread = source_of(TensorDataset(quarter))
    assert residency.of(unread, default_collate, channels_last=False, num_workers=0, planned=None) is None
    (note,) = residency.take_notes()
    assert "more than a quarter" in note


def test_a_recorded_gather_follows_the_numbers() -> None:
    """Inside a recorded step: static numbers in, static batch out."""
    data = {"x": torch.randn(100, 3, 8, 8), "y": torch.arange(100)}
    resident = resident_of(data, channels_last=True)
    samples = torch.zeros(16, dtype=torch.int64, device=gpu())
    batch = resident.gather(samples)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        resident.gather(samples, out=batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        resident.gather(samples, out=batch)
    for start in (3, 50, 84):
        numbers = torch.arange(start, start + 16, device=gpu())
        samples.copy_(numbers)
        graph.replay()
        assert identical(batch, resident.gather(numbers))
        assert batch["y"].tolist() == list(range(start, start + 16))
