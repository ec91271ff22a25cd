"""Checks before a model is made that all ranks mean the same run, have a device each, and reach each other.

What would show up an hour later as a hang or as wrong numbers is found in a fraction of a second, with node, rank and
remedy. A world of one has nothing to compare.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.launchers import code_version
from drivetrain.core.value import GIB
from drivetrain.core.world import World
from drivetrain.data.keyed_items import KeyedItems
from drivetrain.data.source import READING_SECONDS, Glance, are_steady, difference, glance
from drivetrain.hardware import Hardware
from drivetrain.job import Job

SKIP = "DRIVETRAIN_SKIP_PREFLIGHT"
TIMEOUT_SECONDS = 60.0
SHOWN_AFTER_SECONDS = 5.0  # a network file system may show a new file a moment later
LEAST_FREE = 0.05  # of a device's memory: with less, another process has it
_TRIED_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}


@dataclass(frozen=True)
class Preflight:
    """The findings of the preflight, stored among the run's events."""

    seconds: float
    gigabytes_per_second: dict[str, float]  # by collective
    hosts: tuple[str, ...]
    num_compared: int = 0  # samples that were found alike on all ranks


def is_wanted(config: Config, world: World) -> bool:
    return world.size > 1 and not config.distributed.skip_preflight and not os.environ.get(SKIP)


def run_preflight(job: Job, config: Config, hardware: Hardware, world: World, script: str) -> Preflight | None:
    """Check before anything large is made that the ranks mean the same run and reach each other.

    Returns None where that is not wanted.
    """
    if not is_wanted(config, world):
        return None
    sources = {"training": job.source}
    sources |= {f"validation {name}".strip(): source for name, source in job.valid_sets.items()}
    sources |= {f"test {name}".strip(): source for name, source in job.test_sets.items()}
    data = {name: KeyedItems(source.dataset, job.seed) for name, source in sources.items() if not source.is_iterable}
    return preflight(world, config, hardware, job.identity(), script, config.distributed.timeout_seconds, data)


def preflight(
    world: World,
    config: Config,
    hardware: Hardware,
    job: dict[str, Any],
    script: str,
    timeout_seconds: float,
    data: Mapping[str, KeyedItems] | None = None,
) -> Preflight:
    """Run the checks on all ranks; raises the same on all of them. `data` are data sets by name, to compare."""
    began = time.monotonic()
    limit = min(TIMEOUT_SECONDS, timeout_seconds)
    _first_meeting(world, limit)
    told = world.gather(_own_facts(world, config, hardware, job, script))
    for check in (_same_code, _same_config, _same_job, _own_devices, _free_memory):
        problem = check(told)
        if problem is not None:
            raise problem
    num_compared = _same_samples(world, data or {}, told)
    _shared_folder(world, config.run.output_dir, told)
    rates = _try_collectives(world, limit, told)
    hosts = tuple(dict.fromkeys(fact["host"] for fact in told))
    return Preflight(time.monotonic() - began, rates, hosts, num_compared)


def _own_facts(world: World, config: Config, hardware: Hardware, job: dict[str, Any], script: str) -> dict[str, Any]:
    gpu = next((gpu for gpu in hardware.gpus if world.device.type == "cuda" and gpu.index == world.device.index), None)
    settings = config.model_dump(mode="json")
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "code": code_version(script),
        "config": {
            f"{section}.{name}": value for section, fields in settings.items() for name, value in fields.items()
        },
        "job": json.loads(json.dumps(job, default=str)),
        "device": None if gpu is None else [gpu.uuid, str(world.device), gpu.memory_free_bytes, gpu.memory_total_bytes],
        "backend": dist.get_backend(world.group),
    }


Told = Sequence[dict[str, Any]]


def _where(fact: dict[str, Any]) -> str:
    return f"rank {fact['rank']} on {fact['host']}"


def _differences(told: Told, of: str) -> list[tuple[dict[str, Any], str]]:
    first = told[0][of]
    return [
        (fact, f"{name} is {fact[of].get(name)!r} there and {first.get(name)!r} on rank 0")
        for fact in told
        for name in sorted({*first, *fact[of]})
        if fact[of].get(name) != first.get(name)
    ]


def _same_code(told: Told) -> DrivetrainError | None:
    for fact, what in _differences(told, "code"):
        return DrivetrainError(
            f"{_where(fact)} runs other code than rank 0 on {told[0]['host']}: {what}",
            remedy="copy the same script to every node and install the same versions there",
        )
    return None


# Every rank has its own, and none of them changes what is trained.
_OWN_SETTINGS = ("device.ids", "device.device", "run.output_dir", "watch.quiet")


def _same_config(told: Told) -> DrivetrainError | None:
    for fact, what in _differences(told, "config"):
        if not what.startswith(_OWN_SETTINGS):
            return DrivetrainError(
                f"{_where(fact)} has another configuration than rank 0 on {told[0]['host']}: {what}",
                remedy="start every node with the same flags and the same configuration file",
            )
    return None


def _same_job(told: Told) -> DrivetrainError | None:
    for fact, what in _differences(told, "job"):
        length = what.startswith("num_samples")
        return DrivetrainError(
            f"{_where(fact)} has another {'data set' if length else 'job'} than rank 0 on {told[0]['host']}: {what}",
            remedy="every rank loads the whole data set, and drivetrain divides it; check the files on that node"
            if length
            else "every rank has to build the same job",
        )
    return None


def _same_samples(world: World, data: Mapping[str, KeyedItems], told: Told) -> int:
    """Compare samples between ranks, and return how many are alike.

    Samples that differ are checked again: only those that are certain to be another sample count.
    """
    seen = _glances(data)
    by_rank = world.gather({name: [found.length, list(found.digests.items())] for name, found in seen.items()})
    num_compared = 0
    for name, (length, first) in by_rank[0].items():
        theirs = [found[name] for found in by_rank if name in found]
        if len(theirs) < world.size:
            continue  # the job itself differs
        for fact, (other, _) in zip(told, theirs, strict=True):
            if other != length:
                raise _other_samples(fact, told, f"the {name} set has {other} samples there and {length} on rank 0")
        digests = [dict(found) for _, found in theirs]
        common = [sample for sample, _ in first if all(sample in found for found in digests)]
        differing = [sample for sample in common if any(found[sample] != digests[0][sample] for found in digests)]
        num_compared += len(common) - len(differing)
        if differing:
            _refuse_if_sure(world, name, data[name], seen[name], differing, told)
    return num_compared


def _glances(data: Mapping[str, KeyedItems]) -> dict[str, Glance]:
    """Read a few samples of each data set. Slow items are not read for more than one data set."""
    found: dict[str, Glance] = {}
    began = time.monotonic()
    for name, items in data.items():
        is_late = time.monotonic() - began > READING_SECONDS
        found[name] = Glance(len(items), {}, {}) if is_late else glance(items)
    return found


def _refuse_if_sure(
    world: World, name: str, items: KeyedItems, seen: Glance, differing: Sequence[int], told: Told
) -> None:
    sketches = world.gather([seen.sketches[sample] for sample in differing])
    problems = [
        (fact, sample, what)
        for sample, *by_rank in zip(differing, *sketches, strict=True)
        for fact, sketch in zip(told, by_rank, strict=True)
        if (what := difference(sketch, by_rank[0]))
    ]
    if problems and all(world.gather(are_steady(items, seen.digests))):
        fact, sample, what = problems[0]
        raise _other_samples(fact, told, f"sample {sample} of the {name} set is another one there: {what}")


def _other_samples(fact: dict[str, Any], told: Told, what: str) -> DrivetrainError:
    return DrivetrainError(
        f"{_where(fact)} has other samples than rank 0 on {told[0]['host']}: {what}",
        remedy="every rank needs all samples, in the same order: sort the names that os.listdir and glob return, have "
        "the same files on every node, seed what is drawn while the data set is made, and leave dividing it to "
        "drivetrain; where they may differ: --skip-preflight",
    )


def _own_devices(told: Told) -> DrivetrainError | None:
    seen: dict[str, dict[str, Any]] = {}
    for fact in told:
        if fact["device"] is None or fact["backend"] != "nccl":
            continue
        other = seen.setdefault(fact["device"][0], fact)
        if other is not fact:
            return DrivetrainError(
                f"{_where(fact)} and {_where(other)} use the same GPU, {fact['device'][1]} ({fact['device'][0]})",
                remedy="start as many processes as there are GPUs, and let the launcher set LOCAL_RANK",
            )
    return None


def _free_memory(told: Told) -> DrivetrainError | None:
    for fact in told:
        if fact["device"] is not None and fact["device"][2] < LEAST_FREE * fact["device"][3]:
            free, total = (number / GIB for number in fact["device"][2:])
            return DrivetrainError(
                f"{_where(fact)}: only {free:.1f} of {total:.0f} GiB are free on {fact['device'][1]}",
                remedy="`nvidia-smi` names the process that has the rest; end it, or choose other GPUs with --gpu-ids",
            )
    return None


def _shared_folder(world: World, folder: Path, told: Told) -> None:
    """Check that the folder is shared: rank 0 writes, all others look. All ranks save to one folder."""
    name, problem = f".preflight-{secrets.token_hex(8)}", ""
    if world.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"")
        except OSError as error:
            problem = f"{folder} cannot be written to: {error.strerror}"
    name, problem = world.agree([name, problem])
    deadline = time.monotonic() + SHOWN_AFTER_SECONDS
    while not (is_there := problem != "" or (folder / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = world.gather([is_there, str(folder.absolute())])
    if world.is_main:
        (folder / name).unlink(missing_ok=True)
    if problem:
        raise DrivetrainError(f"rank 0 on {told[0]['host']}: {problem}", remedy="name another --output-dir")
    for fact, (saw, path) in zip(told, found, strict=True):
        if not saw:
            raise DrivetrainError(
                f"{_where(fact)} does not see in {path} what rank 0 on {told[0]['host']} wrote to {found[0][1]}",
                remedy="give an --output-dir on a disk that all nodes share; every rank saves its part there",
            )


def _first_meeting(world: World, limit: float) -> None:
    """Make connections with a first collective: where the network blocks them, it hangs here."""
    try:
        _within(limit, lambda: dist.all_reduce(torch.ones(1, device=world.collective_device), async_op=True))
    except RuntimeError as error:
        raise DrivetrainError(
            f"rank {world.rank} on {socket.gethostname()} did not reach the other ranks within {limit:g} s over "
            f"{dist.get_backend(world.group)}: {str(error).splitlines()[0]}",
            remedy="name the network interface that connects the nodes: --interface NAME with `drivetrain launch`, "
            "else GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; a firewall must let the nodes talk on all ports",
        ) from error


def _try_collectives(world: World, limit: float, told: Told) -> dict[str, float]:
    """Try each collective that training uses, on values that reveal errors. Returns GB/s of each, per rank's bytes."""
    device = world.collective_device
    size, rank = world.size, world.rank
    count = _TRIED_BYTES[device.type] // 4 // size * size
    ones = torch.full((count,), float(rank + 1), device=device)
    total = size * (size + 1) / 2
    wanted = total

    def all_reduce() -> Any:
        return dist.all_reduce(ones, async_op=True)

    def broadcast() -> Any:
        return dist.broadcast(ones, src=0, async_op=True)

    gathered = [torch.empty(count // size, device=device) for _ in range(size)]

    def all_gather() -> Any:
        return dist.all_gather(gathered, torch.full((count // size,), float(rank), device=device), async_op=True)

    swapped = torch.empty(count, device=device)

    def all_to_all() -> Any:
        return dist.all_to_all_single(swapped, torch.full((count,), float(rank), device=device), async_op=True)

    rates: dict[str, float] = {}
    wrong = []
    tried: tuple[tuple[str, Callable[[], Any], Callable[[], bool]], ...] = (
        ("all_reduce", all_reduce, lambda: bool((ones == wanted).all())),
        ("broadcast", broadcast, lambda: bool((ones == wanted).all())),
        ("all_gather", all_gather, lambda: all(bool((part == other).all()) for other, part in enumerate(gathered))),
        ("all_to_all", all_to_all, lambda: swapped.view(size, -1)[:, 0].tolist() == list(range(size))),
    )
    for name, collective, is_right in tried:
        began = time.perf_counter()
        try:
            _within(limit, collective)
        except RuntimeError as error:
            raise DrivetrainError(
                f"{_where(told[rank])}: {name} over {dist.get_backend(world.group)} did not pass within {limit:g} s: "
                f"{str(error).splitlines()[0]}",
                remedy="`drivetrain verify` on each node tries its devices; then look at the network between them",
            ) from error
        rates[name] = round(count * 4 / max(time.perf_counter() - began, 1e-9) / 1e9, 3)
        if not is_right():
            wrong.append(name)
    answers = world.gather(wrong)
    for fact, names in zip(told, answers, strict=True):
        if names:
            raise DrivetrainError(
                f"{_where(fact)}: {', '.join(names)} over {fact['backend']} gave wrong numbers",
                remedy="`drivetrain verify` on that node; a device or a link is broken",
            )
    return rates


def _within(limit: float, collective: Callable[[], Any]) -> None:
    work = collective()
    if work is not None:
        work.wait(timedelta(seconds=limit))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # once, before training: the time measured is the time it took
