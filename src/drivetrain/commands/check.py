"""Commands about this machine and its configuration: `check`, `config`, `verify`. Loading them loads no torch."""

import datetime
import json
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from drivetrain import __version__
from drivetrain.commands.command import Command
from drivetrain.config import Flag, Resolved
from drivetrain.config.settings import SECTIONS, SETTINGS
from drivetrain.core.value import format_count, format_gib
from drivetrain.hardware import Gpu, Hardware, Note, detect
from drivetrain.plan import Choice, Pins, Settings, choose_settings
from drivetrain.verify.probe import Report
from drivetrain.verify.runner import (
    PRELOAD,
    PlainProgress,
    choose,
    chosen_gpus,
    console_for,
    progress,
    run_probes,
    save_rates,
    show_checklist,
    show_saving,
    show_summary,
)

# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain check`: what is here, what would be used, what is wrong and how to fix it, on one screen.
#
# It only reads: no CUDA context is made, nothing is written, torch is not imported.

COMMAND_CHECK = Command(
    summary="What is here, what would be used, what is wrong and how to fix it.",
    obeys=(
        "run.output_dir",
        "device.mode",
        "device.device",
        "device.ids",
        "precision",
        "memory.activations",
        "batch.size",
        "batch.accumulation",
        "distributed.strategy",
        "data.num_workers",
        "data.pin_memory",
        "data.prefetch_factor",
    ),
)
EXAMPLES_CHECK = (
    "drivetrain check                                   this machine",
    "drivetrain check --batch-size 64 --precision bf16  with some things fixed",
    "drivetrain check --json                            for a program",
)

MAX_WIDTH = 100
_LIST_AT_MOST = 8


class CheckOptions(BaseModel):
    json_output: Annotated[bool, Flag("json")] = Field(
        False, description="print one JSON document instead of the screen"
    )


def run_check(options: CheckOptions, resolved: Resolved) -> int:
    hardware = detect(resolved.config.run.output_dir)
    settings = as_run(choose_settings(hardware, Pins(**resolved.config.pins())))
    ready = is_ready(hardware)
    if options.json_output:
        print(json.dumps(as_document(hardware, settings), indent=2))
    else:
        console = Console(highlight=False, soft_wrap=False)
        console.width = min(console.width, MAX_WIDTH)
        render(console, hardware, settings)
    return 0 if ready else 1


def as_run(settings: Settings) -> Settings:
    """Return the settings with the batch as a run divides it: the rules say how large a step is, the run how it is cut.

    With a size that is asked for, a step is one micro-batch on each device. On a CPU a process takes its whole share of
    a step at once.
    """
    micro, accumulation = settings.micro_batch, settings.accumulation
    if accumulation.pinned:
        return settings
    if micro.pinned:
        accumulation = Choice(value=1, reason="a step is what was asked for, on each device")
    elif settings.devices.value == ("cpu",):
        micro = Choice(value=settings.effective_batch, reason="all of a step: on a CPU smaller parts gain nothing")
        accumulation = Choice(value=1, reason="follows")
    whole = micro.value * accumulation.value * len(settings.devices.value)
    return settings.model_copy(update={"micro_batch": micro, "accumulation": accumulation, "effective_batch": whole})


def is_ready(hardware: Hardware) -> bool:
    return not any(note.severity == "problem" for note in hardware.notes)


def as_document(hardware: Hardware, settings: Settings) -> dict[str, Any]:
    return {
        "drivetrain": __version__,
        "ready": is_ready(hardware),
        "settings": settings.model_dump(mode="json"),
        "hardware": hardware.model_dump(mode="json"),
    }


def render(console: Console, hardware: Hardware, settings: Settings) -> None:
    """The screen. Everything on it is also in the JSON."""
    software = hardware.software
    torch = f"torch {software.torch}" if software.torch else "torch missing"
    system = f"{software.platform.split('-')[0]} {hardware.cpu.machine}"
    console.print(Text(f"drivetrain {__version__} · python {software.python} · {torch} · {system}", "bold"))
    _section(console, "Machine", _machine_rows(hardware))
    _section(console, "Would be used here (by rule: nothing was measured on your model yet)", _settings_rows(settings))
    _section(console, "Optional packages", [("", _packages(hardware))])
    _readiness(console, hardware)


def _section(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    console.print(Text(title, "bold cyan"))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(f"  {name}" if name else "", text)
    console.print(table)


def _machine_rows(hardware: Hardware) -> list[tuple[str, str]]:
    cpu, memory, disk = hardware.cpu, hardware.memory, hardware.disk
    cores = f"{cpu.num_usable} cores"
    if cpu.num_usable < cpu.num_logical:
        limits = [f"affinity {cpu.num_affinity}"] if cpu.num_affinity < cpu.num_logical else []
        limits += [f"cgroup quota {cpu.quota_cores:g}"] if cpu.quota_cores is not None else []
        cores = f"{cpu.num_usable} of {cpu.num_logical} cores usable ({', '.join(limits)})"
    shm = f"/dev/shm {format_gib(memory.shm_total_bytes)}"
    limit = (
        f" ({memory.limited_by} limit; the host has {format_gib(memory.host_total_bytes)})" if memory.limited_by else ""
    )
    mount = f"{disk.filesystem}, {'network' if disk.is_network else 'local'}"
    rows = [
        ("CPU", f"{cpu.model}, {cores}, {', '.join(cpu.precisions)}"),
        ("Memory", f"{format_gib(memory.total_bytes)}, {format_gib(memory.free_bytes)} free{limit}; {shm}"),
        ("Disk", f"{format_gib(disk.free_bytes)} free of {format_gib(disk.total_bytes)} for {disk.path} ({mount})"),
    ]
    groups = list(_gpu_groups(hardware.gpus))
    for group in groups[:_LIST_AT_MOST]:
        rows.append(("GPU", _gpu_line(group)))
    if len(groups) > _LIST_AT_MOST:
        rows.append(("", f"and {len(groups) - _LIST_AT_MOST} more (--json lists all)"))
    if not groups:
        rows.append(("GPU", "none"))
    if len(hardware.gpus) > 1:
        totals = [gpu.memory_total_bytes for gpu in hardware.gpus]
        rows.append(
            ("", f"{len(totals)} GPUs: {format_gib(sum(totals))} in all, {format_gib(min(totals))} on the smallest")
        )
    if hardware.gpus:
        software = hardware.software
        versions = [f"driver {software.driver}" if software.driver else ""]
        versions += [
            f"CUDA {software.torch_cuda} (driver can do {software.driver_cuda})" if software.driver_cuda else ""
        ]
        versions += [
            f"cuDNN {software.cudnn}" if software.cudnn else "",
            f"NCCL {software.nccl}" if software.nccl else "",
        ]
        shown = ", ".join(version for version in versions if version)
        if shown:
            rows.append(("", shown))
    if hardware.links:
        rows.append(("Links", _links(hardware)))
    return rows


def _gpu_groups(gpus: tuple[Gpu, ...]) -> Iterator[list[Gpu]]:
    def key(gpu: Gpu) -> tuple[Any, ...]:
        return (gpu.name, gpu.memory_total_bytes, gpu.mig is None)

    for _, group in groupby(gpus, key):
        yield list(group)


def _gpu_line(group: list[Gpu]) -> str:
    first = group[0]
    least_free = min(gpu.memory_free_bytes for gpu in group)
    indices = f"cuda:{first.index}" if len(group) == 1 else f"cuda:{first.index}-{group[-1].index}"
    parts = [f"{len(group)} × {first.name}" if len(group) > 1 else first.name]
    parts[0] += f" ({indices}{', MIG ' + first.mig.profile if first.mig else ''})"
    parts.append(
        f"{format_gib(first.memory_total_bytes)}{' each' if len(group) > 1 else ''}, {format_gib(least_free)} free"
    )
    if first.capability:
        parts.append(f"capability {first.capability[0]}.{first.capability[1]}")
    if first.num_sms:
        parts.append(f"{first.num_sms} SMs")
    if first.power_limit_watts:
        parts.append(f"{first.power_limit_watts:.0f} W")
    for precision in ("bf16", "fp16", "fp32"):
        if precision in first.peaks:
            rate = first.peaks[precision]
            parts.append(f"{precision} {rate.value:.0f} {rate.unit} ({rate.origin})")
            break
    return ", ".join(parts)


def _links(hardware: Hardware) -> str:
    kinds: dict[str, int] = {}
    for link in hardware.links:
        kinds[link.kind] = kinds.get(link.kind, 0) + 1
    if len(kinds) == 1:
        return f"{next(iter(kinds))} between all GPUs"
    return ", ".join(f"{kind} between {count} pairs" for kind, count in sorted(kinds.items()))


def _settings_rows(settings: Settings) -> list[tuple[str, str]]:
    micro, accumulation, devices = settings.micro_batch, settings.accumulation, settings.devices
    product = f"{micro.value} × {accumulation.value} × {len(devices.value)} = {settings.effective_batch}"
    shown_devices = devices.value[0] if len(devices.value) == 1 else f"{devices.value[0]} to {devices.value[-1]}"
    return [
        ("devices", f"{shown_devices}: {devices.reason}"),
        ("strategy", _because(settings.strategy)),
        ("precision", _because(settings.precision)),
        ("micro-batch", _because(micro)),
        ("accumulation", _because(accumulation)),
        ("effective batch", f"{product} (micro-batch × accumulation × devices); a job's own wins"),
        ("checkpointing", f"{settings.activations.value} activations: {settings.activations.reason}"),
        ("ZeRO stage", _because(settings.zero_stage)),
        (
            "workers",
            f"{_because(settings.num_workers)}; prefetch {settings.prefetch_factor.value}; none for data in memory",
        ),
    ]


def _because(choice: Choice[Any]) -> str:
    value = (
        {True: "on", False: "off"}.get(choice.value, choice.value) if isinstance(choice.value, bool) else choice.value
    )
    return f"{value}: {choice.reason}"


def _packages(hardware: Hardware) -> str:
    packages = hardware.software.packages
    found = ", ".join(f"{name} {version}" for name, version in packages.items() if version) or "none"
    missing = " ".join(name for name, version in packages.items() if not version)
    return f"found: {found}" + (f"; missing: {missing.replace(' ', ', ')} (pip install NAME)" if missing else "")


def _readiness(console: Console, hardware: Hardware) -> None:
    counts = {
        severity: sum(note.severity == severity for note in hardware.notes) for severity in ("problem", "warning")
    }
    if counts["problem"]:
        verdict = Text(
            f"Not ready: {format_count(counts['problem'], 'problem')}, {format_count(counts['warning'], 'warning')}",
            "bold red",
        )
    elif counts["warning"]:
        verdict = Text(f"Ready, with {format_count(counts['warning'], 'warning')}", "bold yellow")
    else:
        verdict = Text("Ready. `drivetrain verify` does real work on every part and measures it.", "bold green")
    order = {"problem": 0, "warning": 1, "info": 2}
    for note in sorted(hardware.notes, key=lambda note: order[note.severity]):
        console.print(_note(note))
    console.print(verdict)


def _note(note: Note) -> Text:
    marks = {"problem": "✗", "warning": "!", "info": "·"}
    style = {"problem": "red", "warning": "yellow", "info": ""}[note.severity]
    text = Text(f"{marks[note.severity]} {note.sentence}", style)
    if note.remedy:
        text.append(f" Remedy: {note.remedy}", "default")
    return text


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain config`: shows the effective configuration, and the source of each value.

COMMAND_CONFIG = Command(summary="Prints the effective configuration, and where each value came from.", all_but=())
EXAMPLES_CONFIG = (
    "drivetrain config                                  every key with its default",
    "drivetrain config --config train.yaml --epochs 3   what would be used, and where it is from",
    "drivetrain config > train.yaml                     a file to start from",
)


class ConfigOptions(BaseModel):
    json_output: Annotated[bool, Flag("json")] = Field(False, description="print JSON instead of YAML")


def run_config(options: ConfigOptions, resolved: Resolved) -> int:
    sys.stdout.write(as_json(resolved) if options.json_output else as_yaml(resolved))
    return 0


def as_yaml(resolved: Resolved) -> str:
    """Return YAML that can be used as a configuration file again, with the source of each value after it."""
    values = resolved.config.model_dump(mode="json")
    lines = []
    for section, about in SECTIONS.items():
        lines.append(f"{section}:  # {about.splitlines()[0]}")
        for setting in SETTINGS:
            if setting.section == section:
                entry = f"  {setting.field}: {_scalar(values[section][setting.field], setting.takes_auto)}"
                lines.append(f"{entry:<34} # {resolved.source(setting.name)}")
    return "\n".join(lines) + "\n"


def as_json(resolved: Resolved) -> str:
    values = resolved.config.model_dump(mode="json")
    table = {
        setting.name: {
            "value": values[setting.section][setting.field],
            "source": resolved.source(setting.name),
        }
        for setting in SETTINGS
    }
    return json.dumps(table, indent=2) + "\n"


def _scalar(value: Any, takes_auto: bool) -> str:
    if value is None and takes_auto:
        return "auto"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain verify`: does real work on every part of this machine and prints a checklist.
#
# Nothing here loads torch: a torch that is broken has to become a row of the checklist, too.

COMMAND_VERIFY = Command(
    summary="Does real work on every part of this machine and prints a checklist; exits 0 only if nothing failed.",
    obeys=("run.output_dir", "device.mode", "device.device", "device.ids"),
)
EXAMPLES_VERIFY = (
    "drivetrain verify",
    "drivetrain verify --quick",
    "drivetrain verify --save",
    "drivetrain verify --only matmul,disk --output-dir /data/runs",
)


class VerifyOptions(BaseModel):
    """The options of `drivetrain verify`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quick: bool = Field(False, description="smaller work and rougher figures, in a fraction of the time")
    save: bool = Field(False, description="keep the measured rates; plans and `drivetrain check` use them from then on")
    json_output: Annotated[bool, Flag("json")] = Field(False, description="print one JSON document and nothing else")
    only: tuple[str, ...] = Field((), description="names of the probes to run; matmul means all of them (default: all)")
    time_limit_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="limit of each probe (auto: each its own, 60 or 180)"
    )


def run_verify(options: VerifyOptions, resolved: Resolved) -> int:
    """Run the command. Returns 0 if nothing failed, 1 otherwise."""
    config = resolved.config
    probes = choose(options.only)
    if options.time_limit_seconds is not None:
        limits = {"time_limit_seconds": options.time_limit_seconds, "quick_limit_seconds": None}
        probes = tuple(probe.model_copy(update=limits) for probe in probes)
    started, date = time.monotonic(), datetime.datetime.now().astimezone()
    hardware = detect(config.run.output_dir)
    gpu_indices = chosen_gpus(hardware, config)
    stdout, stderr = console_for(sys.stdout), console_for(sys.stderr)
    with progress(stderr, len(probes), None if options.json_output else stdout) as watcher:
        results = run_probes(
            probes,
            hardware=hardware,
            gpu_indices=gpu_indices,
            run_folder=config.run.output_dir,
            quick=options.quick,
            # One at a time tells what each takes; `--quick` is for those who wait.
            num_at_once=min(2, hardware.cpu.num_usable) if options.quick else 1,
            watcher=watcher,
            preload=PRELOAD,
        )
    saved_to = save_rates(hardware, results, quick=options.quick) if options.save else None
    report = Report(
        date=date.isoformat(timespec="seconds"),
        total_seconds=round(time.monotonic() - started, 3),
        quick=options.quick,
        succeeded=all(result.status != "failed" for result in results),
        accelerator=hardware.accelerator if gpu_indices else "cpu",
        devices=tuple(f"cuda:{index}" for index in gpu_indices) or ("cpu",),
        software=hardware.software,
        results=results,
        saved_to=str(saved_to) if saved_to is not None else None,
    )
    if options.json_output:
        print(report.to_json())
    else:
        if not isinstance(watcher, PlainProgress):  # it has printed each row
            show_checklist(results, stdout)
        if options.save:
            show_saving(report, stdout)
        show_summary(report, stdout)
    return 0 if report.succeeded else 1
