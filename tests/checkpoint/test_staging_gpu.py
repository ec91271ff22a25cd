"""Copies of a state that is on a GPU: right whatever the training stream does next, and without a wait of the host."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from drivetrain.checkpoint import BackgroundSaver, Checkpoint, Checkpointer, Shard, staging
from drivetrain.checkpoint.staging import PIECE_BYTES, Staging, _CudaCopy
from drivetrain.core.world import World
from drivetrain.run import CheckpointSaver
from tests.api.jobs import Variant, run
from tests.checkpoint.frozen_runs import Adapted
from tests.checkpoint.test_frozen import SEEN, UNSEEN, Change, backbone, frozen_shard

pytestmark = pytest.mark.gpu

LONG = 2_000_000_000  # cycles: about a second of a GPU
BOTH_WAYS = pytest.mark.parametrize("clones", [True, False], ids=["clone", "wait"])


def big_state() -> tuple[nn.Module, torch.optim.Optimizer, list[Shard]]:
    """Some 400 MB with the optimizer's part: long enough under way to be overtaken, were nothing done about it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    shards = [Shard.whole(name, value) for name, value in model.state_dict().items()]
    for number, state in enumerate(optimizer.state.values()):
        shards += [Shard.whole(f"{number}/{field}", value) for field, value in state.items()]
    return model, optimizer, shards


def plain(shards: list[Shard]) -> dict[str, Tensor]:
    return {shard.key: shard.tensor.detach().cpu() for shard in shards}


@BOTH_WAYS
def test_what_the_next_steps_do_is_not_in_the_copy(clones: bool) -> None:
    _, optimizer, shards = big_state()
    copies = Staging(clones=clones)
    copies.prepare(shards)
    for _ in range(3):
        expected = plain(shards)
        torch.cuda.synchronize()
        staged = copies.take(shards)
        for _ in range(3):
            optimizer.step()
        copies.until_copied()
        torch.cuda.synchronize()
        assert all(torch.equal(shard.tensor, expected[shard.key]) for shard in staged)
        assert not torch.equal(shards[0].tensor.cpu(), expected[shards[0].key])


@BOTH_WAYS
def test_the_copy_is_of_what_the_stream_had_been_given_before(clones: bool) -> None:
    """The device is far behind the host: what is copied are the values that its last orders lead to."""
    tensor = torch.zeros(64 * 2**20 // 4, device="cuda")
    copies = Staging(clones=clones)
    copies.prepare([Shard.whole("w", tensor)])
    torch.cuda._sleep(LONG)
    tensor.fill_(1)
    staged = copies.take([Shard.whole("w", tensor)])[0].tensor
    tensor.fill_(2)
    copies.until_copied()
    assert staged.eq(1).all()
    assert tensor.eq(2).all()


def longest_launch(work: Callable[[], object]) -> float:
    """Return the longest of the launches while a thread does `work`, in seconds."""
    tensor, thread, seconds = torch.zeros(1, device="cuda"), threading.Thread(target=work), [0.0]
    torch.cuda.synchronize()
    thread.start()
    while thread.is_alive():
        began = time.perf_counter()
        tensor.add_(1)
        seconds.append(time.perf_counter() - began)
        if len(seconds) % 50 == 0:
            torch.cuda.synchronize()
    return max(seconds)


def test_launches_go_on_while_memory_is_pinned() -> None:
    """The driver's lock is not held while the system gets the pages. Stock torch stops all launches for that long."""
    _, _, shards = big_state()
    copies = Staging(clones=False)
    stock: list[Tensor] = []

    def pin() -> None:
        stock.extend(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(4))

    assert 2 * longest_launch(lambda: copies.prepare(shards)) < longest_launch(pin)
    assert all(memory.is_pinned() for memory in copies._copies[0]._memory)


def test_memory_that_is_done_with_is_not_pinned_any_more() -> None:
    copies = Staging(clones=False)
    copies.prepare([Shard.whole("w", torch.ones(2**20, device="cuda"))])
    staged = copies.take([Shard.whole("w", torch.ones(2**20, device="cuda"))])[0].tensor
    copies.until_copied()
    address, unregister = copies._copies[0]._memory[0].data_ptr(), torch.cuda.cudart().cudaHostUnregister
    del copies
    assert staged.is_pinned()  # for as long as any part of it is in use
    assert staged.eq(1).all()
    del staged
    assert int(unregister(address)) != 0
    with suppress(RuntimeError):  # the error of the line above
        torch.zeros(1, device="cuda")


def test_memory_that_cannot_be_pinned_is_used_as_it_is() -> None:
    memory = staging._pinned_memory(2**21)
    assert not staging._pin(memory)  # it is already
    assert torch.ones(1, device="cuda").add_(1).item() == 2  # the error is not left to the next launch
    tensor = torch.arange(2**20, device="cuda")
    with mock.patch.object(staging, "_pin", return_value=False):
        copies = Staging(clones=False)
        copies.prepare([Shard.whole("w", tensor)])
    assert not copies._copies[0]._memory[0].is_pinned()
    staged = copies.take([Shard.whole("w", tensor)])[0].tensor
    copies.until_copied()
    assert torch.equal(staged, tensor.cpu())


@BOTH_WAYS
def test_the_host_does_not_wait(clones: bool) -> None:
    _, optimizer, shards = big_state()
    copies = Staging(clones=clones)
    copies.prepare(shards)
    copies.take(shards)  # what the first call sets up aside
    copies.until_copied()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.perf_counter()
        copies.take(shards)
        optimizer.step()
        seconds = time.perf_counter() - began
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query(), "the device was done too soon for this to show anything"
    assert seconds < 0.05
    copies.until_copied()


@BOTH_WAYS
def test_mixed_types_odd_shapes_and_tensors_that_are_on_the_host(clones: bool) -> None:
    values = torch.arange(24, device="cuda")
    tensors = [
        values.bfloat16().view(4, 6).t(),
        values.double()[::5],
        values[0] > 0,
        values.float().view(2, 3, 4),
        values[:0],
        values.to(torch.uint8),
        torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last),
        torch.arange(5.0),  # as the step counts of an optimizer that is not fused
    ]
    expected = [tensor.cpu().clone() for tensor in tensors]
    copies = Staging(clones=clones)
    staged = copies.take([Shard.whole(str(number), tensor) for number, tensor in enumerate(tensors)])
    for tensor in tensors:
        tensor.zero_()
    copies.until_copied()
    for shard, value in zip(staged, expected, strict=True):
        assert shard.tensor.device.type == "cpu"
        assert shard.tensor.dtype == value.dtype
        assert torch.equal(shard.tensor, value)


def test_the_memory_is_pinned_and_the_way_chosen_by_what_is_free() -> None:
    shards = [Shard.whole("w", torch.ones(1000, device="cuda"))]
    for has_room in (True, False):
        copies = Staging()
        with mock.patch.object(staging, "has_room", lambda *_, answer=has_room: answer):
            copies.prepare(shards)
        (copy,) = copies._copies
        assert isinstance(copy, _CudaCopy)
        assert copy.clones == has_room
        assert all(view.is_pinned() for view in copy.views)
    free, total = torch.cuda.mem_get_info()
    device = torch.device("cuda", torch.cuda.current_device())
    assert staging.has_room(device, int(free - 0.11 * total))
    assert not staging.has_room(device, int(free - 0.09 * total))


@BOTH_WAYS
def test_a_checkpoint_of_a_state_that_changes_at_once(tmp_path: Path, clones: bool) -> None:
    _, optimizer, shards = big_state()
    saver = BackgroundSaver(Checkpointer(tmp_path / "c", World()), World(), Staging(clones=clones))
    saver.prepare(shards, {})
    for step in (1, 2):
        expected = plain(shards)
        saver.begin(step, shards, {})
        optimizer.step()
        saver.judged()
        saver.finish()
        with Checkpoint.open(tmp_path / "c" / f"step-{step:08d}") as found:
            assert all(torch.equal(found.read(key), value) for key, value in expected.items())


def files_of(folder: Path) -> dict[str, bytes]:
    checkpoints = folder / "suite" / "checkpoints"
    return {str(path.relative_to(checkpoints)): path.read_bytes() for path in sorted(checkpoints.rglob("*.*"))}


def test_whole_runs_save_the_same_either_way(tmp_path: Path) -> None:
    variant = replace(Variant(dtype=torch.float32), steps=20, save_every=3)
    for way, beside in (("beside", True), ("waiting", False)):
        settings: dict[str, Any] = {"precision": "fp32", "async_save": beside}
        run(str(tmp_path / way), variant, 8, 0, "single_gpu", settings)
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "waiting")


@pytest.mark.parametrize("model", [None, Adapted], ids=["trained", "frozen"])
def test_the_loop_does_not_wait_where_a_save_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: type[nn.Module] | None
) -> None:
    begun: list[int] = []
    original: Callable[..., Any] = CheckpointSaver._begin

    def watched(self: CheckpointSaver, step: int, *, may_wait: bool) -> Any:
        begun.append(step)
        assert may_wait == (step == 20), "the host has waited for the last step anyway"
        assert self._saver is not None
        self._saver.wait()  # a save that is still under way is another matter
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self, step, may_wait=may_wait)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(CheckpointSaver, "_begin", watched)
    variant = replace(Variant(dtype=torch.float32), steps=20, save_every=4)
    changes = {} if model is None else {"model": model}
    run(str(tmp_path), variant, 8, 0, "single_gpu", {"precision": "fp32"}, **changes)
    assert begun == [4, 8, 12, 16, 20]
    lines = (tmp_path / "suite" / "events.jsonl").read_text().splitlines()
    assert [event["step"] for event in map(json.loads, lines) if event["event"] == "checkpoint"] == begun


@pytest.mark.alone
@pytest.mark.parametrize("change", [SEEN, UNSEEN])
def test_frozen_weights_that_change_once_are_stored_right(tmp_path: Path, change: Change) -> None:
    """The device is busy when each save begins, so that its checksums are known long after.

    Not the first, nor the first that stores a frozen weight: CUDA may load kernels and pin memory on an idle device.
    """
    weights = backbone().cuda()
    checkpointer = Checkpointer(tmp_path, World(), 9)
    saver = BackgroundSaver(checkpointer, World())
    checkpointer.frozen.watch([frozen_shard("model/backbone", weights)])
    for step in (1, 2, 3, 4):
        if step == 3:
            change(weights)
        if step > 1:
            torch.cuda._sleep(LONG // 4)
        began = time.monotonic()
        saver.begin(step, [frozen_shard("model/backbone", weights)], {})
        assert step in {1, 3} or time.monotonic() - began < 0.1, "the host does not wait"
        saver.judged()
        saver.finish()
    for step, added in ((1, 0), (2, 0), (3, 1), (4, 1)):
        stored = Checkpoint.open(tmp_path / f"step-{step:08d}").read("model/backbone")
        assert torch.equal(stored, backbone() + added)


def test_a_frozen_weight_that_moves_in_every_step_is_stored_right(tmp_path: Path) -> None:
    weights = backbone().cuda()
    checkpointer = Checkpointer(tmp_path, World(), 9)
    saver = BackgroundSaver(checkpointer, World())
    shards = [frozen_shard("model/backbone", weights)]
    checkpointer.frozen.watch(shards)
    UNSEEN(weights)
    saver.prepare(shards, {})
    for step in (2, 3):
        UNSEEN(weights)
        torch.cuda._sleep(LONG // 4)
        saver.begin(step, shards, {})
        saver.judged()
        UNSEEN(weights)
        saver.finish()
    for step, added in ((2, 2), (3, 4)):
        stored = Checkpoint.open(tmp_path / f"step-{step:08d}").read("model/backbone")
        assert torch.equal(stored, backbone() + added)
