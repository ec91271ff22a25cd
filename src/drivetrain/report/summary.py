"""Summarizes a run in words."""

import statistics
from collections.abc import Iterable, Iterator

from drivetrain.core.aims import Aim
from drivetrain.core.goodput import NAMES
from drivetrain.core.safe_text import printable
from drivetrain.core.value import format_metric
from drivetrain.report.run_data import TESTED, Row, RunData, best_index

_FIGURES = {
    "utilisation_percent": "busy (%)",
    "memory_utilisation_percent": "memory busy (%)",
    "memory_used_gib": "memory used (GiB)",
    "memory_allocated_gib": "  allocated (GiB)",
    "memory_reserved_gib": "  reserved (GiB)",
    "temperature_c": "temperature (°C)",
    "power_watts": "power (W)",
    "clock_sm_mhz": "SM clock (MHz)",
    "clock_memory_mhz": "memory clock (MHz)",
    "process_cpu_percent": "this process (%)",
    "process_memory_gib": "this process (GiB)",
}


def summary(data: RunData) -> str:
    parts = [[*part(data)] for part in (_how, _result, _speed, _goodput, _phases, _verdict, _devices)]
    return printable("\n\n".join("\n".join(lines) for lines in parts if lines)) + "\n"


def _line(label: str, words: object) -> str:
    return f"{label:<21} {words}"


def _how(data: RunData) -> Iterator[str]:
    end, plan = data.event("finish", "stop"), data.plan
    how = {"finish": "finished", "stop": "stopped before its end"}.get(str(end.get("event")), "not finished")
    yield f"{data.name}: {how}" + (f" ({end['because']})" if end.get("because") else "")
    yield ""
    if plan:
        yield _line("processes", f"{plan['world_size']} ({plan['strategy']})")
        yield _line("device", device_in_words(data))
        yield _line("precision", plan["precision"])
        count = int(plan.get("num_devices") or plan["world_size"])
        each = -(-plan["micro_batch"] * plan["world_size"] // count)
        batch = f"{each} × {plan['accumulation']} accumulated × {count} device{'s' if count > 1 else ''}"
        over_steps = plan.get("batch_over_steps")
        yield _line("global batch", f"{plan['global_batch']} ({batch})" + (f": {over_steps}" if over_steps else ""))
    yield _line("compilation", end.get("compilation", "unknown"))
    if end.get("capture"):
        yield _line("step capture", end["capture"])


def device_in_words(data: RunData) -> str:
    device, cpu = data.plan["device"], data.hardware.get("cpu", {})
    if device == "cpu":
        return f"cpu ({cpu.get('model', 'unknown')}, {cpu.get('num_usable', '?')} cores)"
    gpus = data.hardware.get("gpus", [])
    name = next((gpu["name"] for gpu in gpus if f"cuda:{gpu['index']}" == device), "")
    return f"{device} ({name})" if name else device


def _result(data: RunData) -> Iterator[str]:
    yield _line("optimizer steps", data.steps[-1]["step"] if data.steps else 0)
    skipped = sum(bool(row.get("skipped")) for row in data.steps)
    if skipped:
        yield _line(
            "skipped steps", f"{skipped} (a loss or a gradient was not finite; the weights stayed as they were)"
        )
    if data.epochs:
        yield _line("final loss", format_metric(data.epochs[-1].loss))
        for name in data.part_names:
            loss = data.part_loss(name)
            if loss is not None:
                yield _line(f"  {name.removeprefix('loss_').replace('_', ' ')}", format_metric(loss))
    for name in data.metric_names:
        _, values = data.metric(name)
        words = f"{format_metric(values[-1])} at the end"
        if Aim(name).is_clear:
            words += f", {format_metric(values[best_index(name, values)])} at best"
        yield _line(name.replace("_", " "), words)
    for name, value in data.tests[-1].items() if data.tests else ():
        if name.startswith("test_") and value is not None:
            yield _line(
                name.replace("_", " "), f"{format_metric(value)}, with the weights of step {data.tests[-1][TESTED]}"
            )


def _speed(data: RunData) -> Iterator[str]:
    seconds = sum(row["seconds"] for row in data.steps)
    if not seconds:
        return
    yield _line("training time", f"{seconds:.2f} s, checkpoints and validation aside")
    aside = sum(epoch.aside_seconds for epoch in data.epochs)
    if aside:
        whole = [epoch.whole_seconds for epoch in data.epochs]
        words = f"{statistics.mean(whole):.2f} s (mean), {max(whole):.2f} s at most, with validation and sleep"
        yield _line("time per epoch", words)
    interval = data.event("checkpoint interval")
    if interval:
        yield _line("checkpoints", interval["words"])
    yield _line("time per step", f"{1e3 * statistics.median(row['seconds'] for row in data.steps):.3f} ms (median)")
    fastest = max(epoch.samples / max(epoch.seconds, 1e-9) for epoch in data.epochs)
    over_all = sum(row["samples"] for row in data.steps) / seconds
    rate = median(row["samples_per_second"] for row in data.speed if "samples_per_second" in row)
    words = f"{over_all if rate is None else rate:,.0f} (median), {over_all:,.0f} over all, {fastest:,.0f} at best"
    yield _line("samples per second", words)
    rate = median(row["items_per_second"] for row in data.speed if "items_per_second" in row)
    if rate is not None:
        yield _line(f"{data.plan.get('items', 'items')} per second", f"{rate:,.0f} (median)")
    yield from _flops(data)


def _flops(data: RunData) -> Iterator[str]:
    flops = data.event("flops")
    if not flops:
        return
    yield _line("FLOPs per sample", f"{flops['flops_per_sample']:.4g} (forward and backward, as torch counts them)")
    peak, rate = flops["peak_flops_per_second"], median(row["mfu"] for row in data.speed if "mfu" in row)
    if peak is None:
        yield _line("MFU", "unknown: this device's peak rate is not in the table; drivetrain verify --save measures it")
    elif rate is not None:
        source = f"{flops['peak_origin']}: {flops['peak_source']}"
        yield _line("MFU", f"{rate:.1%} of {peak / 1e12:,.1f} TFLOP/s ({source})")


def _goodput(data: RunData) -> Iterator[str]:
    account = data.account
    if account is None or not account.wall_seconds:
        return
    yield f"Where the time of the run went, from its submission (goodput {account.in_words()})"
    for name, seconds in account.seconds.items():
        if seconds:
            yield f"  {NAMES[name]:<18} {seconds:>12.2f} s {seconds / account.wall_seconds:>7.1%}"
    if account.interruptions:
        yield f"  {'interruptions':<18} {account.failures_in_words()}"


def _phases(data: RunData) -> Iterator[str]:
    phases = data.phases
    if not phases:
        return
    clock = "the device's clock" if data.plan.get("device", "cpu") != "cpu" else "the host's clock"
    yield f"Where a step's time goes (mean of {data.num_timed_steps} steps, by {clock}, main process)"
    whole = sum(phases.values())
    for name, seconds in phases.items():
        yield f"  {name:<18} {1e3 * seconds:>10.3f} ms {seconds / whole:>7.1%}"
    yield f"  {'together':<18} {1e3 * whole:>10.3f} ms"


def _verdict(data: RunData) -> Iterator[str]:
    """Yield what the doctor found at the end; what it found last, if there was no end."""
    verdict = data.event("verdict")
    if not verdict:
        return
    yield f"What holds it up, the gravest first (judged on {verdict['steps']} steps)"
    for finding in verdict["findings"]:
        yield f"  {finding['kind']}: {finding['words']}"
        if finding["next_step"]:
            yield f"    next: {finding['next_step']}"


def _devices(data: RunData) -> Iterator[str]:
    for device in dict.fromkeys(row["device"] for row in data.devices):
        rows = [row for row in data.devices if row["device"] == device]
        yield f"{device:<22} {'mean':>10} {'max':>10} {'min':>10}   ({len(rows)} samples)"
        for key, label in _FIGURES.items():
            values = [row[key] for row in rows if key in row]
            if values:
                yield f"  {label:<20} {statistics.fmean(values):>10.1f} {max(values):>10.1f} {min(values):>10.1f}"
        yield from _memory_efficiency(rows)
        throttled = [reason for row in rows for reason in row.get("throttled", [])]
        if throttled:
            counts = ", ".join(f"{reason} ({throttled.count(reason)})" for reason in dict.fromkeys(throttled))
            yield f"  throttled in {sum(bool(row.get('throttled')) for row in rows)} samples: {counts}"
    for row in data.events:
        if row.get("event") == "note":
            yield f"note: {row['text']}"


def _memory_efficiency(rows: list[Row]) -> Iterator[str]:
    """Yield how much of the card the model needed, and how much of torch's reserved memory it used."""
    peak = max((row["memory_peak_gib"] for row in rows if "memory_peak_gib" in row), default=0.0)
    reserved = max((row["memory_peak_reserved_gib"] for row in rows if "memory_peak_reserved_gib" in row), default=0.0)
    total = next((row["memory_total_gib"] for row in rows if "memory_total_gib" in row), 0.0)
    if peak and reserved:
        of_total = f" = {peak / total:.0%} of the card" if total else ""
        yield f"  peak allocated {peak:.2f} GiB{of_total}, {peak / reserved:.0%} of what torch had reserved"


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
