"""Watches a run's devices: what they do, in gpu.jsonl, and their memory over the epochs.

A thread asks NVML, torch's allocator and the kernel. It asks only about the GPUs that the run uses, by UUID, and
creates a CUDA context on none. What cannot be read on this machine is left out of the rows, and `missing` says why.

Of each epoch the peak of memory is told, with a warning near the limit; epochs that are over in a moment are reported
together. Releasing the cache costs time, and the memory is soon allocated again. It helps only where the cache holds
much unused memory while other processes find none left: then, and only at the end of an epoch, it is done.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import torch

from drivetrain.core.metrics import StepRecord
from drivetrain.core.run_folder import JsonLines
from drivetrain.core.value import GIB
from drivetrain.hardware import Gpu
from drivetrain.hardware.gpu_drivers import HostReader, Nvml, NvmlReader, Row, label

HIGH = 0.95  # of the device's memory
UNUSED_CACHE, LITTLE_LEFT = 0.25, 0.05
LEAST_SECONDS = 0.5  # between two looks: one takes a millisecond or two


def torch_memory(device: torch.device) -> Row:
    """Return what this process holds on its GPU by torch's own count. Does not initialize CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    stats: Mapping[str, int] = torch.cuda.memory_stats(device)
    names = {
        "memory_allocated_gib": "allocated_bytes.all.current",
        "memory_reserved_gib": "reserved_bytes.all.current",
        "memory_peak_gib": "allocated_bytes.all.peak",
        "memory_peak_reserved_gib": "reserved_bytes.all.peak",
    }
    row: Row = {name: round(stats.get(key, 0) / GIB, 3) for name, key in names.items()}
    return {**row, "allocation_retries": stats.get("num_alloc_retries", 0)}


class Sampler:
    """Writes a row per device every `every_n_steps`, or every few seconds; one at the start and one at the end."""

    SECONDS = 5.0  # between rows where no number of steps was asked for
    FIRST_SECONDS = 1.0  # after the row of the start: a short run is to have one from its midst
    LEAST_SECONDS = 0.2  # between rows in any case: short steps are not slowed down by being watched
    PATIENCE_SECONDS = 2.0  # at the end, for a driver that does not answer

    def __init__(
        self,
        log: JsonLines,
        gpus: Sequence[Gpu],
        own: tuple[Gpu, torch.device] | None,
        every_n_steps: int | None,
        first_step: int,
        report: Callable[[str], None],
        nvml: Nvml | None = None,
    ) -> None:
        self.latest: dict[str, Row] = {}  # by device
        self._log, self._own, self._every, self._report = log, own, every_n_steps, report
        self._nvml, self._host = NvmlReader(nvml, gpus), HostReader()
        self.missing = self._nvml.missing
        self._step = first_step
        self._asked, self._ends = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="gpu sampler", daemon=True)
        self._thread.start()

    def at_step(self, step: int) -> None:
        """Note the step. Costs an assignment, and now and then the setting of a flag."""
        self._step = step
        if self._every is not None and step % self._every == 0:
            self._asked.set()

    def close(self) -> None:
        self._ends = True
        self._asked.set()
        self._thread.join(self.PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._report("the GPU sampler waits for a driver that does not answer; it is left behind")

    def _work(self) -> None:
        try:
            patience = self.FIRST_SECONDS
            while True:
                is_last = self._ends
                self._sample()
                if is_last:
                    break
                began = time.monotonic()
                self._asked.wait(patience if self._every is None else None)
                patience = self.SECONDS
                self._asked.clear()
                spare = began + self.LEAST_SECONDS - time.monotonic()
                if spare > 0 and not self._ends:
                    time.sleep(spare)
            self._log.close()
        except Exception as error:  # noqa: BLE001 - a disk that is full, a driver that went away: not the run's affair
            self._report(f"gpu.jsonl ends here: {type(error).__name__}: {error}")
        self._nvml.close()

    def _sample(self) -> None:
        rows = self._nvml.read()
        if self._own is not None:
            gpu, device = self._own
            rows[label(gpu)] = {**rows.get(label(gpu), {}), **torch_memory(device)}
        rows["cpu"] = self._host.read()
        self.latest = rows
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        step = self._step
        for name, row in rows.items():
            self._log.append({"step": step, "time": now, "device": name, **row})
        self._log.flush()


class MemoryWatch(Protocol):
    def observe(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class NoMemoryWatch:
    """Watches nothing: torch does not count the memory of a CPU."""

    def observe(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class CudaMemoryWatch:
    """Watches a GPU. `tell` gets the facts of each epoch; `warn` a sentence, once per run."""

    def __init__(self, device: torch.device, tell: Callable[..., None], warn: Callable[[str], None]) -> None:
        self._device, self._tell, self._warn = device, tell, warn
        self._epoch: int | None = None
        self._step = 0
        self._warned = False
        self._told = -math.inf
        torch.cuda.reset_peak_memory_stats(device)

    def observe(self, record: StepRecord) -> None:
        if self._epoch is None:
            self._epoch = record.epoch
        elif record.epoch != self._epoch:
            if time.monotonic() - self._told >= LEAST_SECONDS:
                self._end_epoch()
            self._epoch = record.epoch
        self._step = record.step

    def close(self) -> None:
        if self._epoch is not None:
            self._end_epoch()

    def _end_epoch(self) -> None:
        device = self._device
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_reserved(device)
        facts: dict[str, Any] = {
            "epoch": self._epoch,
            "step": self._step,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": peak,
            "total_bytes": total,
        }
        if peak > HIGH * total and not self._warned:
            self._warned = True
            self._warn(
                f"{peak / total:.0%} of the memory of {device} was held in epoch {(self._epoch or 0) + 1}. "
                "Remedy before it runs out: a smaller --batch-size (the global batch stays), or --activations recompute"
            )
        if reserved - allocated > UNUSED_CACHE * total and free < LITTLE_LEFT * total:
            torch.cuda.empty_cache()
            facts["cache_given_back_bytes"] = reserved - torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._told = time.monotonic()
        self._tell("memory", **facts)


def watch_memory(device: torch.device, tell: Callable[..., None], warn: Callable[[str], None]) -> MemoryWatch:
    return CudaMemoryWatch(device, tell, warn) if device.type == "cuda" else NoMemoryWatch()
