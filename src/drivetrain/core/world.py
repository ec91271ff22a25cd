"""The process group of a run: rank, size, device, and the few collectives that decisions need.

One process is a world of one, not a special case: the same calls work and cost nothing. Only JSON and tensors are sent,
never pickled objects.
"""

import atexit
import ctypes
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.launchers import ProcessPlace, find_place, refuse_alone, tell_alone

T = TypeVar("T")

# Groups that were left last stay referenced until others are. The destructor of a gloo group waits for the group's
# threads while it holds Python's lock, and right after a collective a thread may still want that lock, to let go of a
# tensor: the one that drops the last reference then, DDP for example, would wait forever. A world has up to five.
_CLOSED: deque[dist.ProcessGroup | None] = deque(maxlen=5)


def _never_let_go() -> None:
    """Keep the closed groups of the parent for good: a fork has no threads that their destructor could wait for."""
    for group in _CLOSED:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _CLOSED.clear()


def _let_go() -> None:
    """Let closed groups end before Python does: afterwards their threads could not have its lock any more."""
    if _CLOSED:
        time.sleep(0.02)  # without the lock: what a thread still wants it for is done then
        _CLOSED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_never_let_go)
atexit.register(_let_go)


class World:
    """The processes of a run. `join()` makes one from the environment that a launcher sets."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if size > 1 and group is None:
            raise ValueError("a world of several processes needs their process group")
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.device = device or torch.device("cpu")
        self.group = group
        self._owns_group = False
        self._aside: World | None = None
        self._hosts: World | None = None
        self._timeout: timedelta | None = None  # of collectives; None: torch's own
        self._grids: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}

    @classmethod
    def join(
        cls,
        devices: Sequence[torch.device],
        *,
        backend: str | None = None,
        init_method: str | None = None,
        timeout_seconds: float = 600,
    ) -> "World":
        """Join the world that the launcher's environment describes; without a launcher, a world of one.

        Local ranks take the devices in turn. A process group that exists already is used as it is.
        """
        place = cls.detect()
        rank, size, local_rank = place.rank, place.size, place.local_rank
        joined_here = not dist.is_initialized()
        if not joined_here:
            rank, size = dist.get_rank(), dist.get_world_size()
        device = devices[local_rank % len(devices)]
        if device.type == "cuda":
            torch.cuda.set_device(device)  # streams, events and the user's `cuda` tensors belong there, too
        if size == 1:
            return cls(device=device)
        if joined_here:
            os.environ.update(place.environment)  # torch reads these, and so do users' libraries
            timeout = timedelta(seconds=timeout_seconds)
            dist.init_process_group(
                backend or choose_backend(place, devices),
                store=_next_store(init_method or "env://", rank, size, timeout),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
        world = cls(rank, size, local_rank, device, dist.group.WORLD)
        world._owns_group, world._timeout = joined_here, timedelta(seconds=timeout_seconds)
        return world

    @staticmethod
    def detect(environ: Mapping[str, str] | None = None) -> ProcessPlace:
        """Return the launcher of this process, and its ranks. Joins nothing.

        Raises where a scheduler says that there are several machines, and this process would train alone on one; tells
        of a job of SLURM whose other tasks were not started.
        """
        place = find_place(environ)
        refuse_alone(place, environ)
        tell_alone(place, environ)
        return place

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce the tensor in place and return it."""
        if self.group is not None:
            dist.all_reduce(tensor, op, self.group)
        return tensor

    def any(self, flag: bool) -> bool:
        """Return True on all ranks if the flag is true on any rank."""
        if self.group is None:
            return flag
        return bool(self.all_reduce(torch.tensor(int(flag), device=self.collective_device), dist.ReduceOp.MAX).item())

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers, on every rank."""
        if self.group is None:
            return number
        return int(self.all_reduce(torch.tensor(number, device=self.collective_device), dist.ReduceOp.MIN).item())

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank, in rank order. The value must survive JSON."""
        text = json.dumps(value).encode()
        if self.group is None:
            return [json.loads(text)]
        padded, sizes = self._padded(text)
        texts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(texts, padded, self.group)
        return [_value_in(own[:size]) for own, size in zip(texts, sizes, strict=True)]

    def gather_to_main(self, value: Any) -> list[Any]:
        """Return every rank's value on rank 0, in rank order; nothing on the others. The value must survive JSON.

        For values that grow with the number of ranks: only rank 0 has memory for all of them.
        """
        text = json.dumps(value).encode()
        if self.group is None:
            return [json.loads(text)]
        padded, sizes = self._padded(text)
        texts = [torch.empty_like(padded) for _ in sizes] if self.is_main else None
        dist.gather(padded, texts, group=self.group, group_dst=0)
        return [] if texts is None else [_value_in(own[:size]) for own, size in zip(texts, sizes, strict=True)]

    def _padded(self, text: bytes) -> tuple[Tensor, list[int]]:
        """Return this rank's text as a tensor that is as long as the longest rank's, and the lengths of all."""
        length = torch.tensor([len(text)], device=self.collective_device)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, self.group)
        sizes = [int(entry.item()) for entry in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.collective_device)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return padded, sizes

    def agree(self, value: Any) -> Any:
        """Return rank 0's value on every rank. The value must survive JSON."""
        text = json.dumps(value if self.is_main else None).encode()
        if self.group is None:
            return json.loads(text)
        length = torch.tensor([len(text)], device=self.collective_device)
        dist.broadcast(length, group=self.group, group_src=0)
        sent = torch.zeros(int(length.item()), dtype=torch.uint8, device=self.collective_device)
        if self.is_main:
            sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(sent, group=self.group, group_src=0)
        return _value_in(sent)

    def main_does(self, work: Callable[[], T]) -> T:
        """Have rank 0 do something; return its result, which has to be JSON, or raise its error, on every rank."""
        answer: dict[str, Any] = {}
        other: Exception | None = None
        if self.is_main:
            try:
                answer = {"value": work()}
            except DrivetrainError as error:
                answer = {"message": error.message, "remedy": error.remedy}
            except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks wait to hear of it)
                other = error
                message = f"rank 0 raised {type(error).__name__}: {error}"
                answer = {"message": message, "remedy": "see the traceback of rank 0"}
        answer = self.agree(answer)
        if other is not None:
            raise other
        if "message" in answer:
            raise DrivetrainError(answer["message"], remedy=answer["remedy"])
        value: T = answer["value"]
        return value

    def aside(self) -> "World":
        """Return a world of the same ranks over a separate gloo group, for one thread in the background of training.

        Collectives of two threads in one group would mix. Made at the first call, by all ranks together and in the
        thread that trains; belongs to this world, which closes it.
        """
        if self.group is None:
            return self
        if self._aside is None:
            self._aside = self._over_gloo(_ASIDE_TIMEOUT, "saving beside training", "save with --no-async-save")
        return self._aside

    def hosts(self) -> "World":
        """Return a world of the same ranks whose collectives do not wait for a device, for the thread that trains.

        Made at the first call, by all ranks together; belongs to this world, which closes it.
        """
        if self.group is None or dist.get_backend(self.group) == "gloo":
            return self
        if self._hosts is None:
            self._hosts = self._over_gloo(self._timeout, "steps that ranks replay together", "use --capture off")
        return self._hosts

    def _over_gloo(self, timeout: timedelta | None, what_for: str, otherwise: str) -> "World":
        try:
            group = dist.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            raise DrivetrainError(
                f"the ranks cannot meet over gloo, as {what_for} needs: {error}",
                remedy=f"name the network interface in GLOO_SOCKET_IFNAME, or {otherwise}",
            ) from None
        return World(self.rank, self.size, self.local_rank, group=group)

    def own_group(self) -> dist.ProcessGroup:
        """Return the process group; a world of one creates a group on demand and closes it together with itself."""
        if self.group is not None:
            return self.group
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            self._owns_group = True
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def grid(self, num_rows: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the groups of this rank's column and row, if ranks are written in so many rows, one after the other.

        Made at the first call, by all ranks together; they belong to this world, which closes them.
        """
        if num_rows not in self._grids:
            ranks = torch.arange(self.size).view(num_rows, -1)
            column, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())  # type: ignore[no-untyped-call]
            row, _ = dist.new_subgroups_by_enumeration(ranks.tolist())  # type: ignore[no-untyped-call]
            assert column is not None, "every rank is in one"
            assert row is not None, "every rank is in one"
            self._grids[num_rows] = column, row
        return self._grids[num_rows]

    def close(self) -> None:
        """Leave the groups that this world has made."""
        for group in (group for groups in self._grids.values() for group in groups):
            _CLOSED.append(group)
            dist.destroy_process_group(group)
        self._grids.clear()
        for other in filter(None, (self._aside, self._hosts)):
            _CLOSED.append(other.group)
            dist.destroy_process_group(other.group)
        self._aside = self._hosts = None
        if self._owns_group:
            _CLOSED.append(dist.group.WORLD)
            dist.destroy_process_group()
            self._owns_group = False

    @property
    def backend(self) -> str:
        """The backend of the collectives, such as `nccl`; empty for one process."""
        return "" if self.group is None else str(dist.get_backend(self.group))

    @property
    def collective_device(self) -> torch.device:
        """The device for tensors of collectives: gloo takes CPU tensors with any device."""
        return torch.device("cpu") if dist.get_backend(self.group) == "gloo" else self.device


def _value_in(text: Tensor) -> Any:
    """Return the value that was sent as JSON."""
    return json.loads(bytes(text.cpu().numpy()))


def choose_backend(place: ProcessPlace, devices: Sequence[torch.device]) -> str:
    """Return NCCL if each rank of this machine has a GPU. It refuses two ranks on one; gloo takes them."""
    if devices[0].type != "cuda":
        return "gloo"
    if place.local_is_guessed and place.size > len(devices):
        raise DrivetrainError(
            f"RANK and WORLD_SIZE say that there are {place.size} ranks, and nothing says which of them are on this "
            f"machine, which has {len(devices)} GPU{'s' if len(devices) > 1 else ''}",
            remedy="set LOCAL_RANK and LOCAL_WORLD_SIZE, counted on each machine (one process on each: 0 and 1); or "
            "start with `drivetrain launch` or `torchrun`; or choose gloo by --backend gloo",
        )
    return "nccl" if place.local_size <= len(devices) else "gloo"


_stores: dict[tuple[Any, ...], tuple[Any, Iterator[int]]] = {}  # each with the numbers of its groups


def _next_store(init_method: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the store for the next process group: a separate prefix of one store that lives as long as this process.

    A script may train several times, and groups come and go. A separate store for each would be made again on the same
    port while other ranks still use the one before, and so find addresses that no process listens on any more.
    """
    # Not that of a parent this process was forked from, nor of a launcher whose address has changed.
    key = (init_method, rank, size, os.getpid(), os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    if key not in _stores:
        made, _, _ = next(rendezvous(init_method, rank, size, timeout=timeout))
        if _outlives_starts(os.environ):
            made = dist.PrefixStore(agreed_prefix(made, rank, size, timeout), made)  # type: ignore[attr-defined]
        _stores[key] = made, count()
    store, numbers = _stores[key]
    store.set_timeout(timeout)
    return dist.PrefixStore(f"drivetrain-{next(numbers)}", store)  # type: ignore[attr-defined]


def _outlives_starts(environ: Mapping[str, str]) -> bool:
    """Return whether the store is that of torchrun, which keeps it when it starts the ranks again."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not environ.get("DRIVETRAIN_LAUNCHED")


def agreed_prefix(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Return a prefix that all ranks of this start have in common, and none of an earlier start has; collective.

    The addresses of an earlier start are still in the store, and a rank that is quicker than another would look for it
    there. Each rank asks under a number that no other had before, and rank 0 answers whatever was asked until all ranks
    of this start have its prefix. The number of the start will not do: torchrun's nodes count for themselves.
    """
    if rank:
        number = store.add("drivetrain-asked", 1)
        prefix = str(store.get(f"drivetrain-answer-{number}").decode())  # waits for it
        store.set(f"{prefix}-{rank}", "")
        return prefix
    prefix, answered, until = f"drivetrain-{secrets.token_hex(8)}", 0, time.monotonic() + timeout.total_seconds()
    while not store.check([f"{prefix}-{other}" for other in range(1, size)]):
        asked = store.add("drivetrain-asked", 0)
        for number in range(answered + 1, asked + 1):
            store.set(f"drivetrain-answer-{number}", prefix)
        answered = asked
        if time.monotonic() > until:
            raise DrivetrainError(
                f"not all of the {size} ranks came within {timeout.total_seconds():g} s",
                remedy="look at the output of the others; --timeout-seconds allows for more",
            )
        time.sleep(0.01)
    return prefix


# Between two words of a writer lie the slowest rank's file and a step. A rank that dies is noticed at once.
_ASIDE_TIMEOUT = timedelta(hours=1)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was enqueued; a CPU already has.

    Each call is a host wait: it belongs where something is timed, never in the loop.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
