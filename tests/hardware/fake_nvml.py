"""A stand-in for the pynvml module: GPUs as data, and any call can be made to fail."""
# ruff: noqa: N802, N815 - the names are pynvml's

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1024**3


@dataclass
class FakeGpu:
    name: str = "NVIDIA L4"
    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    total: int = 24 * GIB
    reserved: int = GIB // 2
    free: int = 22 * GIB
    capability: tuple[int, int] = (8, 9)
    architecture: int = 8
    cores: int = 7424  # 58 SMs
    bus_id: str = "00000000:01:00.0"
    generation: int = 4
    width: int = 16
    numa_mask: int = 1
    compute_mode: int = 0
    processes: Sequence[int] = ()
    # link -> PCI address of the other GPU, or `switch`
    nvlinks: Mapping[int, str] = field(default_factory=dict)
    num_nvlink_ports: int = 0
    nvlink_megabytes_per_second: int = 25000
    mig_enabled: bool = False
    mig: Sequence["FakeMig"] = ()
    # function name -> NVML error code
    fails: Mapping[str, int] = field(default_factory=dict)


@dataclass
class FakeMig:
    uuid: str
    gpu_instance: int
    compute_instance: int = 0
    name: str = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    total: int = 5 * GIB
    free: int = 5 * GIB
    sms: int = 14
    parent: FakeGpu | None = None


class FakeNvml:
    """Answers like pynvml. `init_error` is what nvmlInit raises; `fails` names functions that fail for every GPU."""

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (),
        *,
        init_error: int | None = None,
        fails: Mapping[str, int] | None = None,
        ancestor: int = 20,
        driver: str | bytes = "580.159.03",
        cuda: int = 13000,
    ) -> None:
        self.gpus, self.init_error, self.fails = list(gpus), init_error, dict(fails or {})
        self.ancestor, self.driver, self.cuda = ancestor, driver, cuda
        self.inits = self.shutdowns = 0
        for gpu in self.gpus:
            for part in gpu.mig:
                part.parent = gpu

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML_"):
            return getattr(pynvml, name)
        if not name.startswith("nvml"):
            raise AttributeError(name)
        answer = getattr(type(self), f"_{name}", None)
        if answer is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            handle = arguments[0] if arguments else None
            own = handle.fails if isinstance(handle, FakeGpu) else {}
            if name in own or name in self.fails:
                raise pynvml.NVMLError(own.get(name, self.fails.get(name)))
            return answer(self, *arguments)

        return call

    def _nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.inits += 1

    def _nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def _nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self.driver

    def _nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def _nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        gpu = self.gpus[index]
        if "nvmlDeviceGetHandleByIndex" in gpu.fails:
            raise pynvml.NVMLError(gpu.fails["nvmlDeviceGetHandleByIndex"])
        return gpu

    def _nvmlDeviceGetUUID(self, handle: Any) -> str:
        return str(handle.uuid)

    def _nvmlDeviceGetName(self, handle: Any) -> str:
        return str(handle.name)

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> SimpleNamespace:
        if isinstance(handle, FakeMig):
            return SimpleNamespace(total=handle.total, free=handle.free, used=0, reserved=0)
        if version:
            used = handle.total - handle.reserved - handle.free
            return SimpleNamespace(total=handle.total, reserved=handle.reserved, free=handle.free, used=used)
        return SimpleNamespace(total=handle.total, free=handle.free, used=handle.total - handle.free)

    def _nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu) -> tuple[int, int]:
        return handle.capability

    def _nvmlDeviceGetArchitecture(self, handle: FakeGpu) -> int:
        return handle.architecture

    def _nvmlDeviceGetAttributes(self, handle: Any) -> SimpleNamespace:
        if not isinstance(handle, FakeMig):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(
            multiprocessorCount=handle.sms,
            gpuInstanceSliceCount=1,
            computeInstanceSliceCount=1,
            memorySizeMB=handle.total // 1024**2,
        )

    def _nvmlDeviceGetNumGpuCores(self, handle: FakeGpu) -> int:
        return handle.cores

    def _nvmlDeviceGetClockInfo(self, handle: FakeGpu, kind: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 345, pynvml.NVML_CLOCK_MEM: 405}[kind]

    def _nvmlDeviceGetMaxClockInfo(self, handle: FakeGpu, kind: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 2040, pynvml.NVML_CLOCK_MEM: 6251}[kind]

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: FakeGpu) -> int:
        return 72000

    def _nvmlDeviceGetPowerManagementLimit(self, handle: FakeGpu) -> int:
        return 75000

    def _nvmlDeviceGetPciInfo(self, handle: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(busId=handle.bus_id.encode())

    def _nvmlDeviceGetMaxPcieLinkGeneration(self, handle: FakeGpu) -> int:
        return handle.generation

    def _nvmlDeviceGetMaxPcieLinkWidth(self, handle: FakeGpu) -> int:
        return handle.width

    def _nvmlDeviceGetMemoryAffinity(self, handle: FakeGpu, size: int, scope: int) -> list[int]:
        return [handle.numa_mask]

    def _nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        return handle.compute_mode if isinstance(handle, FakeGpu) else 0

    def _nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in handle.processes]

    def _nvmlDeviceGetNvLinkState(self, handle: FakeGpu, link: int) -> int:
        if link >= handle.num_nvlink_ports:
            code = pynvml.NVML_ERROR_INVALID_ARGUMENT if handle.num_nvlink_ports else pynvml.NVML_ERROR_NOT_SUPPORTED
            raise pynvml.NVMLError(code)
        return int(link in handle.nvlinks)

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: FakeGpu, link: int) -> int:
        return 2 if handle.nvlinks[link] == "switch" else 0

    def _nvmlDeviceGetNvLinkRemotePciInfo(self, handle: FakeGpu, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=handle.nvlinks[link].encode())

    def _nvmlDeviceGetFieldValues(self, handle: FakeGpu, fields: Sequence[int]) -> list[SimpleNamespace]:
        assert list(fields) == [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=handle.nvlink_megabytes_per_second))]

    def _nvmlDeviceGetTopologyCommonAncestor(self, a: FakeGpu, b: FakeGpu) -> int:
        return self.ancestor

    def _nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        return [int(handle.mig_enabled), int(handle.mig_enabled)]

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeMig:
        if index >= len(handle.mig):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle.mig[index]

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: FakeMig) -> FakeGpu | None:
        return handle.parent

    def _nvmlDeviceGetGpuInstanceId(self, handle: FakeMig) -> int:
        return handle.gpu_instance

    def _nvmlDeviceGetComputeInstanceId(self, handle: FakeMig) -> int:
        return handle.compute_instance


def gpu_uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-4000-8000-{number:012x}"


def gpus(count: int, **facts: Any) -> list[FakeGpu]:
    """So many GPUs that differ in UUID and place on the bus."""
    return [
        FakeGpu(**{"uuid": gpu_uuid(number + 1), "bus_id": f"00000000:{number + 1:02X}:00.0", **facts})
        for number in range(count)
    ]
