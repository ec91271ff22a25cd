"""A probe and its results. A probe is named, not held: its code is loaded in the process that runs it alone.

Results are values: they cross a process boundary as JSON and are what `--json` prints.
"""

from typing import Literal

from pydantic import Field

from drivetrain.core.value import Value
from drivetrain.hardware import Accelerator, Gpu, Hardware, Precision, Software

Status = Literal["passed", "failed", "not applicable"]
Quantity = Literal["matmul", "memory", "host to device", "device to host", "write", "read"]


class Probe(Value):
    """One thing to verify: a row of `PROBES` in the file of its function, of literals, which is read without torch."""

    name: str = Field(pattern=r"^[a-z0-9-]+$", description="as `--only` takes it")
    title: str = Field(description="as the checklist shows it")
    function: str = Field(
        pattern=r"^[\w.]+:\w+$", description="`module:function`; takes a ProbeSetup, returns an Outcome"
    )
    measures_rates: bool = Field(default=False, description="runs with nothing beside it, so that its figures are true")
    is_slow: bool = Field(default=False, description="started before the others where several run at once")
    # The limits are for slow machines: five to ten times what a small one takes.
    time_limit_seconds: float = Field(default=60.0, gt=0)
    quick_limit_seconds: float | None = Field(default=None, gt=0, description="after which `--quick` leaves it out")
    order: int = Field(default=1000, description="its place in the checklist; those of one number stand by name")


class MeasuredRate(Value):
    """One speed of one part of this machine, in the terms in which Hardware keeps it."""

    of: str = Field(description="`cpu`, `disk`, or the UUID of a GPU")
    quantity: Quantity
    precision: Precision | None = Field(default=None, description="for a matmul")
    value: float = Field(gt=0)
    unit: Literal["TFLOP/s", "GB/s"]


class Outcome(Value):
    """The outcome that a probe returns."""

    status: Status
    figure: str = Field(default="", description="what was measured, in a few words")
    detail: str = Field(default="", description="the cause where it failed; the reason where it does not apply")
    remedy: str = Field(default="", description="what to do, with the command to type")
    rates: tuple[MeasuredRate, ...] = ()


def passed(figure: str, *, detail: str = "", rates: tuple[MeasuredRate, ...] = ()) -> Outcome:
    return Outcome(status="passed", figure=figure, detail=detail, rates=rates)


def failed(detail: str, *, remedy: str, figure: str = "") -> Outcome:
    return Outcome(status="failed", figure=figure, detail=detail, remedy=remedy)


def not_applicable(reason: str) -> Outcome:
    return Outcome(status="not applicable", detail=reason)


class ProbeResult(Outcome):
    """One row of the checklist."""

    name: str
    title: str
    seconds: float = Field(ge=0, description="from its start to its end, including the creation of its process")
    output_tail: str = Field(default="", description="the end of what it printed; kept only where it failed")


class ProbeSetup(Value):
    """The setup of a probe: how thorough to be, on which devices, and where it may write."""

    quick: bool
    hardware: Hardware
    gpu_indices: tuple[int, ...] = Field(description="the chosen GPUs as torch counts them; empty: the CPU")
    run_folder: str = Field(description="where training would write; it may not exist yet")
    run_scratch: str = Field(description="a folder below run_folder that the probe may create; removed after it")
    scratch: str = Field(description="an empty folder of the probe's own, readable by this user only; removed after it")

    @property
    def devices(self) -> tuple[str, ...]:
        """The chosen devices by torch's names."""
        if self.gpu_indices:
            return tuple(f"cuda:{index}" for index in self.gpu_indices)
        return ("cpu",)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The facts of the chosen GPUs, in the order of `devices`."""
        known = {gpu.index: gpu for gpu in self.hardware.gpus}
        return tuple(known[index] for index in self.gpu_indices)


class Report(Value):
    """Everything that `drivetrain verify --json` prints."""

    date: str = Field(description="start, ISO 8601 with time zone")
    total_seconds: float
    quick: bool
    succeeded: bool = Field(description="nothing failed")
    accelerator: Accelerator
    devices: tuple[str, ...]
    software: Software
    results: tuple[ProbeResult, ...]
    saved_to: str | None = None
