"""Made-up machines to verify on."""

from drivetrain.core.value import GIB
from drivetrain.hardware import Cpu, Disk, Gpu, Hardware, Memory, Precision, Software

PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "tf32", "fp16", "bf16")


def gpu(index: int, name: str = "NVIDIA H200", precisions: tuple[Precision, ...] = PRECISIONS) -> Gpu:
    return Gpu(
        index=index,
        physical_index=index,
        uuid=f"GPU-{index}",
        name=name,
        vendor="nvidia",
        architecture="Hopper",
        memory_total_bytes=80 * GIB,
        memory_free_bytes=79 * GIB,
        precisions=precisions,
    )


def machine(num_gpus: int = 0, *, num_cores: int = 2, run_folder: str = "runs") -> Hardware:
    return Hardware(
        accelerator="cuda" if num_gpus else "cpu",
        gpus=tuple(gpu(index) for index in range(num_gpus)),
        cpu=Cpu(
            model="made up",
            machine="x86_64",
            num_logical=num_cores,
            num_affinity=num_cores,
            num_usable=num_cores,
            precisions=("fp64", "fp32"),
        ),
        memory=Memory(
            total_bytes=8 * GIB, free_bytes=6 * GIB, host_total_bytes=8 * GIB, shm_total_bytes=GIB, shm_free_bytes=GIB
        ),
        disk=Disk(path=run_folder, total_bytes=100 * GIB, free_bytes=50 * GIB, filesystem="ext4", is_network=False),
        software=Software(python="3.11.7", platform="Linux", torch="2.13.0+cpu", torch_backend="cpu"),
    )
