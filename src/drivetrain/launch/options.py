"""The flags of `drivetrain launch` and `drivetrain train` that say how many processes there are, and where."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from drivetrain.config import Allowed

DEFAULT_PORT = 29400


class LaunchOptions(BaseModel):
    num_processes: int | None = Field(
        None, ge=1, le=1024, description="processes on this machine (default: one per GPU; with --cpu, one)"
    )
    num_gpus: int | None = Field(None, ge=1, le=1024, description="use the first so many GPUs (default: all)")
    gpu_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, min_length=1, description="use these GPUs, counted after CUDA_VISIBLE_DEVICES, such as 0,1"
    )
    cpu: bool = Field(False, description="hide the GPUs from the processes")
    share_gpus: bool = Field(False, description="allow more processes than GPUs (over gloo; NCCL cannot)")
    nodes: int = Field(1, ge=1, le=4096, description="machines that take part (default: 1)")
    node_rank: int | None = Field(None, ge=0, description="which of them this is, from 0")
    main_address: str | None = Field(None, description="address of the machine with --node-rank 0")
    main_port: int = Field(
        DEFAULT_PORT, ge=1, le=65535, description=f"port there where launchers meet (default: {DEFAULT_PORT})"
    )
    interface: str | None = Field(
        None,
        description="network interface for gloo and NCCL (default: loopback; with --nodes, the way to the main one)",
    )
    max_restarts: int = Field(
        3, ge=0, description="start again after a failure this often, while progress is made (default: 3)"
    )
    tail_ranks: Annotated[str, Allowed("all, none, or ranks separated by commas")] = Field(
        "0", pattern=r"^(all|none|\d+(,\d+)*)$", description="ranks whose output is shown here (default: 0)"
    )
    log_dir: Path | None = Field(
        None, description="folder for the ranks' logs (default: logs/ in the run folder, or below --output-dir)"
    )
    bind: Literal["auto", "none", "numa", "cores"] = Field(
        "auto",
        description="tie processes to the cores near their GPU (numa), or to equal shares of all (cores); auto is numa "
        "on machines with several NUMA nodes (default: auto)",
    )
    join_seconds: float = Field(
        300, gt=0, allow_inf_nan=False, description="how long to wait for the other machines (default: 300)"
    )
    node_seconds: float = Field(
        15, ge=2, allow_inf_nan=False, description="a machine not heard of for so long counts as lost (default: 15)"
    )
    rejoin_seconds: float = Field(
        30, gt=0, allow_inf_nan=False, description="how long a lost machine may take to come back (default: 30)"
    )
    stop_seconds: float = Field(
        120, gt=0, allow_inf_nan=False, description="time to save after Ctrl-C or SIGTERM (default: 120)"
    )
