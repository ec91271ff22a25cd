"""Host memory that a rank's state is copied into, so that training can go on while a file is made of the copy.

The memory is kept from save to save. Tensors on the CPU are copied before `take` returns. For tensors on a GPU, `take`
only enqueues the copies; later work of the training stream sees the state after the copy:

- Where device memory is plentiful, the state is cloned there, at the speed of that memory, and the clone goes to the
  host in the background, over a separate stream.
- Where it is not, the state itself goes to the host, and the training stream waits for that, at the speed of the bus.

The host waits for neither, except in `until_copied`, which the writer's thread calls.
"""

import math
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.state import Shard

PIECE_BYTES = 64 * 2**20  # pinning takes a lock that launches need, too; so it is done piece by piece
ALIGNMENT = 64
LEFT_FREE = 0.1  # of a device's memory, besides a clone: a later step may need more than the first
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 2**20


class StagingLayout(NamedTuple):
    """The memory that a tensor needs; one state after the other has the same."""

    device: torch.device
    dtype: torch.dtype
    shape: torch.Size


@dataclass
class StagingPiece:
    """Memory for some of the tensors."""

    capacity: int
    used: int = 0
    offsets: dict[int, int] = field(default_factory=dict)  # number of a tensor -> its first byte

    def views(self, memory: Tensor, layouts: Sequence[StagingLayout]) -> dict[int, Tensor]:
        return {
            number: memory[offset : offset + _num_bytes(layouts[number])]
            .view(layouts[number].dtype)
            .view(layouts[number].shape)
            for number, offset in self.offsets.items()
        }


class Staging:
    """Copies one state at a time: the last one must be done with before the next. Used by one thread at a time."""

    def __init__(self, *, clones: bool | None = None) -> None:
        self._clones = clones  # on the device; None: where it has the memory
        self._layouts: list[StagingLayout] = []
        self._copies: list[_Copy] = []

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Allocate the memory for a state like this one. It takes time: do it before the first `take`, in a thread."""
        layouts = [StagingLayout(shard.tensor.device, shard.tensor.dtype, shard.tensor.shape) for shard in shards]
        if layouts == self._layouts:
            return
        self._layouts, self._copies = [], []  # the old memory is freed first
        numbers: dict[torch.device, list[int]] = {}
        for number, layout in enumerate(layouts):
            numbers.setdefault(layout.device, []).append(number)
        self._copies = [
            _CudaCopy(device, layouts, own, self._clones) if device.type == "cuda" else _Copy(layouts, own)
            for device, own in numbers.items()
        ]
        self._layouts = layouts

    @torch.no_grad()
    def take(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return the same shards in host memory: complete after `until_copied`. The tensors may be changed at once."""
        self.prepare(shards)
        staged = list(shards)
        for copied in self._copies:
            copied.take([shards[number].tensor for number in copied.numbers])
            for number, view in zip(copied.numbers, copied.views, strict=True):
                shard = shards[number]
                staged[number] = Shard(shard.key, view, shard.global_shape, shard.offsets, shard.is_part)
        return staged

    def until_copied(self) -> None:
        """Wait until the copies are complete; the host waits for the device here."""
        for copied in self._copies:
            copied.until_copied()


class _Copy:
    """Copies tensors that are in host memory already, or that no stream orders."""

    def __init__(self, layouts: Sequence[StagingLayout], numbers: Sequence[int], *, pinned: bool = False) -> None:
        self._pieces = _packed(layouts, numbers)
        self._memory = [(_pinned_memory if pinned else _host_memory)(piece.used) for piece in self._pieces]
        views: dict[int, Tensor] = {}
        for piece, memory in zip(self._pieces, self._memory, strict=True):
            views |= piece.views(memory, layouts)
        self.numbers = list(views)
        self.views = list(views.values())

    def take(self, tensors: list[Tensor]) -> None:
        if tensors:
            torch._foreach_copy_(self.views, tensors)

    def until_copied(self) -> None:
        pass


class _CudaCopy(_Copy):
    def __init__(
        self,
        device: torch.device,
        layouts: Sequence[StagingLayout],
        numbers: Sequence[int],
        clones: bool | None,
    ) -> None:
        with torch.cuda.device(device):  # a thread begins with another, and would make a context there
            super().__init__(layouts, numbers, pinned=True)
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            # Blocking: the thread that waits sleeps, and leaves its core to training.
            self._cloned, self._copied = torch.cuda.Event(), torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._clone_memory: list[Tensor] = []
        self._clone_views: list[Tensor] = []
        num_bytes = sum(piece.used for piece in self._pieces)
        if has_room(device, num_bytes) if clones is None else clones:
            self._make_clones(layouts, must=bool(clones))
        kinds: dict[torch.dtype, list[int]] = {}
        for place, view in enumerate(self.views):
            kinds.setdefault(view.dtype, []).append(place)
        self._kinds = list(kinds.values())

    @property
    def clones(self) -> bool:
        return bool(self._clone_memory)

    def _make_clones(self, layouts: Sequence[StagingLayout], *, must: bool) -> None:
        try:
            memory = [torch.empty(piece.used, dtype=torch.uint8, device=self._device) for piece in self._pieces]
        except torch.OutOfMemoryError:
            if must:
                raise
            return  # the memory was taken meanwhile; the other way needs none on the device
        views: dict[int, Tensor] = {}
        for piece, part in zip(self._pieces, memory, strict=True):
            views |= piece.views(part, layouts)
        self._clone_memory, self._clone_views = memory, [views[number] for number in self.numbers]

    def take(self, tensors: list[Tensor]) -> None:
        training = torch.cuda.current_stream(self._device)
        if self.clones:
            for places in self._kinds:  # one kernel or a few, if all are of one type
                torch._foreach_copy_([self._clone_views[place] for place in places], [tensors[p] for p in places])
            self._cloned.record(training)
            return
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            for view, tensor in zip(self.views, tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
            self._copied.record(self._stream)
        training.wait_event(self._copied)

    def until_copied(self) -> None:
        if self.clones:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._cloned)
                for host, clone in zip(self._memory, self._clone_memory, strict=True):
                    host.copy_(clone, non_blocking=True)
                self._copied.record(self._stream)
        self._copied.synchronize()


def _packed(layouts: Sequence[StagingLayout], numbers: Sequence[int]) -> list[StagingPiece]:
    """Pack large tensors first, each into the first piece with room. Sizes are powers of two, as pinned memory is."""
    sizes = {number: -(-_num_bytes(layouts[number]) // ALIGNMENT) * ALIGNMENT for number in numbers}
    usual = min(PIECE_BYTES, _power_of_two(sum(sizes.values())))
    pieces: list[StagingPiece] = []
    for number in sorted(numbers, key=lambda number: -sizes[number]):
        size = sizes[number]
        piece = next((piece for piece in pieces if piece.used + size <= piece.capacity), None)
        if piece is None:
            piece = StagingPiece(max(usual, _power_of_two(size)))
            pieces.append(piece)
        piece.offsets[number] = piece.used
        piece.used += size
    return pieces


def _host_memory(num_bytes: int) -> Tensor:
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    memory.numpy()[::PAGE_BYTES] = 0  # the system hands out pages when they are touched: here, not in the loop
    return memory


def _pinned_memory(num_bytes: int) -> Tensor:
    """Get memory that a device copies to by itself, of huge pages where the system has them.

    The lock of the driver is held for as long as pinning takes, and that is mostly getting the pages. They are touched
    before: then it takes a tenth of what `pin_memory=True` does. Where the system does not let us lock as much, the
    memory is not pinned: the copy takes longer, and is as right.
    """
    # Whole huge pages: for other lengths, a driver reported success and pinned nothing.
    length = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    pages = mmap.mmap(-1, length + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a page shared with a forked process would be copied, elsewhere
        with suppress(AttributeError, OSError):
            pages.madvise(getattr(mmap, advice))
    array = np.frombuffer(pages, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE_BYTES
    memory = torch.from_numpy(array)[start : start + length]
    memory.numpy()[::PAGE_BYTES] = 0
    if _pin(memory):
        # Before the pages are unmapped, which the array keeps, as the memory's storage keeps the array.
        weakref.finalize(array, _cudart().cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory[:num_bytes]


def _pin(memory: Tensor) -> bool:
    code = _cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code):
        with suppress(RuntimeError):  # which the next launch of this thread would report
            torch.zeros(1, device="cuda")
    return not int(code)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Return whether the device has room. Call it after a step, when torch has reserved what a step needs."""
    free, total = torch.cuda.mem_get_info(device)
    return num_bytes <= free - LEFT_FREE * total


def _num_bytes(layout: StagingLayout) -> int:
    return math.prod(layout.shape) * layout.dtype.itemsize


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
