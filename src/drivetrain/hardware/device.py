"""The one device manager: chooses the devices of a run, and checks that tensors are where they belong."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, get_args

from drivetrain.core.errors import DrivetrainError, nothing_trains
from drivetrain.core.value import GIB, Value
from drivetrain.hardware.facts import Gpu, Hardware
from drivetrain.hardware.gpu_drivers import read_utilization

if TYPE_CHECKING:
    import torch

GpuMode = Literal["auto", "cpu", "single_gpu", "multi_gpu"]

_NAMED_AT_MOST = 8


class DeviceMemory(Value):
    """The memory of one device in bytes. On a CPU torch does not count: zeros, and None where zero would be wrong."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    total_bytes: int | None = None
    free_bytes: int | None = None


def canonical_device(device: "str | int | torch.device") -> "torch.device":
    """Return the device with its index, so that equal ones compare equal: `cuda` is the current GPU, `cpu:0` `cpu`."""
    import torch

    try:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DrivetrainError(
            f"{device!r} is not a device", remedy="use auto, cpu, cuda or cuda:0, cuda:1, …"
        ) from error
    if wanted.type in ("cpu", "meta"):
        return torch.device(wanted.type)
    if ":" in str(wanted):
        return wanted
    # Asking for the current GPU would start CUDA; until it is started, that is the first one.
    current = torch.cuda.current_device() if wanted.type == "cuda" and _cuda_is_started() else 0
    return torch.device(wanted.type, current)


class DeviceManager:
    """The devices of a run, decided once from the request and the hardware.

    Args:
        hardware: The machine, from `detect`.
        mode: How many devices: auto, cpu, single_gpu or multi_gpu.
        device: Which kind, or exactly which one: auto, cpu, cuda or cuda:n.
        ids: Which GPUs, as this process counts them. Default: all.

    Example:
        >>> dt.DeviceManager(dt.detect(), mode="cpu").device
        device(type='cpu')
    """

    def __init__(
        self,
        hardware: Hardware,
        mode: GpuMode = "auto",
        device: "str | torch.device" = "auto",
        ids: Sequence[int] | None = None,
    ) -> None:
        self.hardware = hardware
        if str(device).partition(":")[0] == "mps":
            _check_apple(hardware, mode, ids)
            names: Sequence[str] = ["mps:0"]
        else:
            indices = _gpu_indices(hardware, mode, str(device), ids)
            names = [f"cuda:{index}" for index in indices] if indices else ["cpu"]
        self.devices: tuple[torch.device, ...] = tuple(canonical_device(name) for name in names)

    @property
    def device(self) -> "torch.device":
        """The first device: the only one, unless several GPUs are used."""
        return self.devices[0]

    @property
    def uses_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def mode(self) -> GpuMode:
        """The mode that was decided; never `auto`."""
        if not self.uses_gpu:
            return "cpu"
        return "multi_gpu" if len(self.devices) > 1 else "single_gpu"

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The facts about the GPUs in use, in the order of `devices`."""
        if not self.uses_gpu:
            return ()
        known = {gpu.index: gpu for gpu in self.hardware.gpus}
        return tuple(known[device.index] for device in self.devices)

    def memory_stats(self, device: "str | torch.device | None" = None) -> DeviceMemory:
        """Return the memory that torch holds on a device, now and at its peak. Does not initialize CUDA."""
        import torch

        wanted = self.device if device is None else canonical_device(device)
        if wanted.type == "cpu":
            return DeviceMemory()
        if wanted.type == "mps":
            return _apple_memory(self.hardware)
        if not _cuda_is_started():
            gpu = next((gpu for gpu in self.hardware.gpus if gpu.index == wanted.index), None)
            return DeviceMemory(
                total_bytes=gpu.memory_total_bytes if gpu else None, free_bytes=gpu.memory_free_bytes if gpu else None
            )
        free, total = torch.cuda.mem_get_info(wanted)
        return DeviceMemory(
            allocated_bytes=torch.cuda.memory_allocated(wanted),
            reserved_bytes=torch.cuda.memory_reserved(wanted),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(wanted),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(wanted),
            total_bytes=total,
            free_bytes=free,
        )

    def get_device_info(self, device: "str | torch.device | None" = None) -> dict[str, Any]:
        """Return what is known of one device: its kind, name, memory and utilization. Starts CUDA on none.

        Every key exists on every machine; what cannot be known there is None. Memory is in bytes, and once more with
        `_gb` in units of 2^30 bytes; on a CPU it is the host's, as far as this process may use it.

        Args:
            device: one of the devices; None is the first one in use.

        Example:
            >>> manager = DeviceManager(detect(), mode="cpu")
            >>> manager.get_device_info()["device_type"]
            'cpu'
        """
        wanted = self.device if device is None else canonical_device(device)
        gpu = next((gpu for gpu in self.hardware.gpus if wanted.type != "cpu" and gpu.index == wanted.index), None)
        stats, host = self.memory_stats(wanted), self.hardware.memory
        on_cpu = wanted.type == "cpu"
        total = host.total_bytes if on_cpu else stats.total_bytes
        free = host.free_bytes if on_cpu else stats.free_bytes
        used = None if total is None or free is None else total - free
        gpu_utilization, memory_utilization = (None, None) if gpu is None else read_utilization(gpu)
        memory = {"total_memory": total, "free_memory": free, "used_memory": used}
        return {
            "device_type": wanted.type,
            "cuda_available": bool(_usable_gpus(self.hardware)),
            "device_count": len(_usable_gpus(self.hardware)),
            "current_device": str(wanted),
            "device_name": self.hardware.cpu.model if on_cpu else gpu.name if gpu else None,
            "compute_capability": gpu.capability if gpu else None,
            **memory,
            **{f"{name}_gb": None if value is None else value / GIB for name, value in memory.items()},
            "gpu_utilization": gpu_utilization,
            "memory_utilization": memory_utilization,
        }

    def log_memory_usage(
        self, step: int | None = None, prefix: str = "", log: Callable[[str], object] | None = None
    ) -> str:
        """Write one line on the memory of each device in use, and return it.

        Args:
            step: the step to name in the line; None leaves it out.
            prefix: words to begin the line with.
            log: where the line goes, such as `logging.getLogger(__name__).info`; None is standard error.

        Example:
            >>> DeviceManager(detect(), mode="cpu").log_memory_usage(step=3, log=lambda line: None)[:11]
            'step 3: cpu'
        """
        words = [prefix] if prefix else []
        words += [f"step {step}"] if step is not None else []
        line = ": ".join([*words, "; ".join(map(self._memory_in_words, self.devices))])
        if log is None:
            print(line, file=sys.stderr, flush=True)
        else:
            log(line)
        return line

    def _memory_in_words(self, device: "torch.device") -> str:
        info = self.get_device_info(device)
        total, used = info["total_memory_gb"], info["used_memory_gb"]
        whole = "" if total is None or used is None else f"{used:.2f} of {total:.2f} GiB used"
        if device.type == "cpu":
            return f"{device} {whole} (torch does not count memory on a CPU)"
        stats = self.memory_stats(device)
        counted = f"{stats.allocated_bytes / GIB:.2f} GiB allocated, {stats.reserved_bytes / GIB:.2f} GiB reserved"
        peak = f"peak {stats.peak_allocated_bytes / GIB:.2f} GiB"
        busy = "" if info["gpu_utilization"] is None else f"GPU {info['gpu_utilization']:.0f} % busy"
        return f"{device} {', '.join(filter(None, [counted, peak, whole, busy]))}"

    def verify_training_setup(self, model: "torch.nn.Module", batch: Any = None) -> dict[str, Any]:
        """Check that a model can be trained on this manager's device as it is, and return what was checked.

        Raises `DrivetrainError` that names the tensors which are elsewhere, or says that no parameter is trained, or
        that the batch holds no tensor.

        Args:
            model: the module to be trained.
            batch: one batch of it, in any containers; None checks the model alone.

        Example:
            >>> import torch
            >>> DeviceManager(detect(), mode="cpu").verify_training_setup(torch.nn.Linear(2, 1))["num_trained"]
            3
        """
        self.assert_on_device(model=model, **({} if batch is None else {"batch": batch}))
        parameters = list(model.parameters())
        num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        if not num_trained:
            raise nothing_trains(len(parameters))
        num_tensors = 0 if batch is None else sum(1 for _ in _devices_in("batch", batch, set()))
        if batch is not None and not num_tensors:
            raise DrivetrainError(
                f"the batch ({type(batch).__name__}) holds no tensor", remedy="give a batch as the model gets it"
            )
        return {
            "device": str(self.device),
            "model_on_device": True,
            "batch_on_device": None if batch is None else True,
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "num_trained": num_trained,
            "num_batch_tensors": num_tensors,
            "is_training": model.training,
        }

    def assert_on_device(self, **things: Any) -> None:
        """Check that everything given is on `device`; see the function of the same name."""
        assert_on_device(self.device, **things)

    def __repr__(self) -> str:
        return f"DeviceManager({self.mode}: {', '.join(map(str, self.devices))})"


def assert_on_device(device: "str | torch.device", **things: Any) -> None:
    """Raise unless every tensor in these modules, tensors and containers is on the device; name those elsewhere.

    Args:
        device: Where everything should be.
        things: Modules, tensors, and containers of them, under the names that an error calls them by.

    Example:
        >>> dt.assert_on_device("cpu", model=torch.nn.Linear(1, 1), batch=[torch.zeros(2)])
    """
    expected = canonical_device(device)
    misplaced = [
        f"{path} is on {where}"
        for name, thing in things.items()
        for path, where in _devices_in(name, thing, set())
        if where != expected
    ]
    if not misplaced:
        return
    shown = misplaced[:_NAMED_AT_MOST]
    if len(misplaced) > len(shown):
        shown.append(f"and {len(misplaced) - _NAMED_AT_MOST} more")
    count = "1 tensor is" if len(misplaced) == 1 else f"{len(misplaced)} tensors are"
    remedy = f'move them with .to("{expected}") before the step'
    if any(line.endswith(" meta") for line in shown):
        remedy += f'; on meta there is no data yet: module.to_empty(device="{expected}"), then initialize it'
    raise DrivetrainError("\n    ".join([f"{count} not on {expected}:", *shown]), remedy=remedy)


def has_apple_gpu(hardware: Hardware) -> bool:
    """Return whether this machine has an Apple GPU."""
    return any(gpu.vendor == "apple" for gpu in hardware.gpus)


def _check_apple(hardware: Hardware, mode: GpuMode, ids: Sequence[int] | None) -> None:
    if mode in ("cpu", "multi_gpu") or ids is not None:
        asked = _what_was_asked(mode, "mps", ids)
        raise DrivetrainError(f"{asked} contradict each other", remedy="leave out all but --device mps")
    if not has_apple_gpu(hardware):
        raise DrivetrainError("device mps: this machine has no Apple GPU", remedy="use auto, cpu, cuda or cuda:0")


def _apple_memory(hardware: Hardware) -> DeviceMemory:
    """Return the memory that torch holds on an Apple GPU, which shares the host's."""
    import torch

    if not torch.backends.mps.is_available():
        return DeviceMemory(total_bytes=hardware.memory.total_bytes, free_bytes=hardware.memory.free_bytes)
    held, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    total = torch.mps.recommended_max_memory()
    return DeviceMemory(
        allocated_bytes=held,
        reserved_bytes=reserved,
        peak_allocated_bytes=held,  # torch keeps no peak there
        peak_reserved_bytes=reserved,
        total_bytes=total,
        free_bytes=max(0, total - reserved),
    )


def _cuda_is_started() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _devices_in(path: str, thing: Any, seen: set[int]) -> "Iterator[tuple[str, torch.device]]":
    import torch

    if isinstance(thing, torch.Tensor):
        yield path, canonical_device(thing.device)
        return
    if isinstance(thing, str | bytes) or id(thing) in seen:
        return
    children = list(_children(path, thing))
    if not children:
        return
    seen.add(id(thing))  # a container that holds itself must not hold us forever
    for child_path, child in children:
        yield from _devices_in(child_path, child, seen)


def _children(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(thing, torch.nn.Module):
        for name, tensor in (*thing.named_parameters(), *thing.named_buffers()):
            yield f"{path}.{name}", tensor
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield f"{path}[{key!r}]", value
    elif isinstance(thing, tuple) and hasattr(thing, "_fields"):
        for name, value in zip(thing._fields, thing, strict=True):
            yield f"{path}.{name}", value
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        for field in dataclasses.fields(thing):
            yield f"{path}.{field.name}", getattr(thing, field.name, None)
    elif isinstance(thing, Sequence | Set) and not isinstance(thing, range):
        for index, value in enumerate(thing):
            yield f"{path}[{index}]", value


def _gpu_indices(hardware: Hardware, mode: GpuMode, device: str, ids: Sequence[int] | None) -> tuple[int, ...]:
    """Return the indices of the GPUs to use; none means the CPU."""
    if mode not in get_args(GpuMode):
        raise DrivetrainError(f"{mode!r} is not a GPU mode", remedy=f"use one of {', '.join(get_args(GpuMode))}")
    kind, number = _kind_and_number(device)
    asked = _what_was_asked(mode, device, ids)
    if mode == "cpu" or kind == "cpu":
        if ids is not None or kind == "cuda" or mode in ("single_gpu", "multi_gpu"):
            raise DrivetrainError(f"{asked} contradict each other", remedy="ask for the CPU or for GPUs, not for both")
        return ()
    needs_gpu = kind == "cuda" or ids is not None or mode != "auto"
    available = _usable_gpus(hardware)
    if not available:
        if needs_gpu:
            raise _no_gpu_error(hardware, asked)
        return ()
    if ids is not None and number is not None and list(ids) != [number]:
        raise DrivetrainError(f"{asked} contradict each other", remedy="give the device or the ids, not both")
    wanted = tuple(ids) if ids is not None else (number,) if number is not None else available
    _check_there(wanted, available, asked)
    if mode == "single_gpu" and len(wanted) > 1:
        if ids is not None:
            raise DrivetrainError(f"{asked} contradict each other", remedy="name one id, or use multi_gpu")
        return wanted[:1]
    if mode == "multi_gpu" and len(wanted) < 2:
        here = f"{len(available)} GPU{'s' if len(available) > 1 else ''} can be used here"
        raise DrivetrainError(f"{asked} needs at least two GPUs; {here}", remedy="use auto or single_gpu")
    return wanted


def _kind_and_number(device: str) -> tuple[str, int | None]:
    if device == "auto":
        return "auto", None
    if device == "cuda":
        return "cuda", None
    wanted = canonical_device(device)
    if wanted.type not in ("cpu", "cuda"):
        raise DrivetrainError(
            f"device {device!r}: drivetrain trains on CUDA, ROCm, an Apple GPU or the CPU",
            remedy="use auto, cpu, cuda, cuda:0 or mps",
        )
    return wanted.type, wanted.index


def _what_was_asked(mode: str, device: str, ids: Sequence[int] | None) -> str:
    parts = [f"mode {mode}"] if mode != "auto" else []
    parts += [f"device {device}"] if device != "auto" else []
    parts += [f"device ids {list(ids)}"] if ids is not None else []
    return " and ".join(parts) or "mode auto"


def _usable_gpus(hardware: Hardware) -> tuple[int, ...]:
    return tuple(gpu.index for gpu in hardware.gpus) if hardware.accelerator in ("cuda", "rocm") else ()


def _check_there(wanted: Sequence[int], available: Sequence[int], asked: str) -> None:
    if not wanted:
        raise DrivetrainError(f"{asked}: no GPU is named", remedy="name at least one, or leave the ids out")
    if len(set(wanted)) < len(wanted):
        raise DrivetrainError(f"{asked}: a GPU is named twice", remedy="name each once")
    missing = [index for index in wanted if index not in available]
    if missing:
        there = ", ".join(f"cuda:{index}" for index in available)
        missing_names = ", ".join(f"cuda:{index}" for index in missing)
        raise DrivetrainError(
            f"{asked}: there is no {missing_names} here; this process may use {there}",
            remedy="nvidia-smi -L lists all GPUs; CUDA_VISIBLE_DEVICES says which of them this process sees",
        )


def _no_gpu_error(hardware: Hardware, asked: str) -> DrivetrainError:
    reasons = [note for note in hardware.notes if note.severity in ("problem", "warning") and "GPU" in note.sentence]
    reasons = reasons or [note for note in hardware.notes if "GPU" in note.sentence]
    because = "".join(f"\n    {note.sentence}" for note in reasons)
    remedies = [note.remedy for note in reasons if note.remedy]
    return DrivetrainError(
        f"{asked}: there is no GPU that can be used here{'.' if not because else ':'}{because}",
        remedy=remedies[0] if remedies else "use mode auto or cpu; drivetrain check says what is here",
    )
