"""A machine is lost again and again: what is left of the time, of the samples, and of the result.

Eight gloo ranks on four hosts, which are network namespaces of this machine (root and `ip` are needed). Every 45 to 75
seconds one of the hosts that take part, other than the first, is lost with all of its processes (kill -9), and is back
after `--repair` seconds. Four ways to go on:

- ours, a spare: a fifth host waits, and takes its place;
- ours, fewer: the other three go on, and it joins again at the next restart;
- ours, restart: the others wait for it;
- torchrun: `torchrun` with its elastic agent waits for it, too; DDP and torch.distributed.checkpoint, by hand.

The goodput is the number of steps that still count at the end, times the median time of a step, over the whole time.

    python -m benchmarks.kills --minutes 20
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from tests.launch.hosts import ADDRESSES, Hosts, some_hosts
from torch.distributed import checkpoint as dcp

import drivetrain
from benchmarks.contest import label
from benchmarks.kills_job import GLOBAL_BATCH, NUM_SAMPLES, loss_of, make_data, make_model
from drivetrain.checkpoint import Checkpoint
from drivetrain.core.goodput import read_account
from drivetrain.hardware import detect

SCRIPT = Path(__file__).with_name("kills_job.py")
RESULTS = Path(__file__).parent / "results"
PORT = 29555


@dataclass(frozen=True)
class Way:
    """One way to go on."""

    nodes: str
    flags: tuple[str, ...] = ()
    num_hosts: int = 4
    is_ours: bool = True


WAYS = {
    "ours, a spare": Way("4", ("--spares", "1"), num_hosts=5),
    "ours, fewer": Way("3:4", ("--rejoin-seconds", "2")),
    "ours, restart": Way("4", ("--rejoin-seconds", "600")),
    "torchrun + DCP": Way("4", is_ours=False),
}


def start(way: Way, hosts: Hosts, host: int) -> subprocess.Popen[str]:
    if way.is_ours:
        flags = ("--max-restarts", "1000", "--node-seconds", "5", *way.flags)
        return hosts.launch(host, *flags, str(SCRIPT), "ours", str(hosts.folder), nodes=way.nodes)
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "4", "--nproc-per-node", "2",
        "--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-id", "kills",
        "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}",
        "--rdzv-conf", f"is_host={int(host == 0)},join_timeout=600", "--local-addr", ADDRESSES[host],
        str(SCRIPT), "plain", str(hosts.folder),
    ]  # fmt: skip
    output = (hosts.folder / f"host-{host}.err").open("a")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"cable{host + 1}"}
    process = subprocess.Popen(
        ["ip", "netns", "exec", hosts.names[host], *words],
        stdout=output, stderr=output, text=True, env=environment, cwd=hosts.folder, start_new_session=True,
    )  # fmt: skip
    hosts.processes.append(process)
    return process


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [child for child in psutil.Process(process.pid).children(recursive=True) if child.is_running()]
    return []


def lose(process: subprocess.Popen[str]) -> None:
    """End a host as a power cut does: all of its processes at once."""
    found = workers_of(process)
    process.kill()
    for child in found:
        with suppress(psutil.Error):
            child.kill()
    process.wait()


def takes_part(process: subprocess.Popen[str]) -> bool:
    return process.poll() is None and sum("kills_job" in " ".join(_words(one)) for one in workers_of(process)) >= 2


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def run(way: Way, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(arguments.seed)
    fewest, most = arguments.every
    with some_hosts(folder, way.num_hosts) as hosts:
        began = time.monotonic()
        running = {host: start(way, hosts, host) for host in range(way.num_hosts)}
        due, back = began + chance.uniform(fewest, most), dict[int, float]()
        num_kills = 0
        while time.monotonic() - began < 60 * arguments.minutes:
            now = time.monotonic()
            for host in [host for host, at in back.items() if now > at]:
                del back[host]
                running[host] = start(way, hosts, host)
            able = [host for host, process in running.items() if host and host not in back and takes_part(process)]
            if now > due and able:
                victim = chance.choice(able)
                lose(running[victim])
                back[victim], due = now + arguments.repair, now + chance.uniform(fewest, most)
                num_kills += 1
            if running[0].poll() is not None:
                break
            time.sleep(0.2)
        ended = "" if running[0].poll() is None else last_words(folder)
        for host in () if ended else back:  # so that those who wait for it can stop
            running[host] = start(way, hosts, host)
        (folder / "stop").write_text("")
        if way.is_ours and not ended:
            running[0].send_signal(signal.SIGINT)
        running[0].wait(240)
        wall = time.monotonic() - began
    busy = round(os.getloadavg()[1], 1)  # over the last five minutes; eight ranks and their launchers are about ten
    return {"kills": num_kills, "wall_seconds": round(wall, 1), "load": busy, "ended_early": ended} | measured(
        way, folder, wall
    )


def measured(way: Way, folder: Path, wall: float) -> dict[str, Any]:
    kept = kept_steps(folder, way)
    rows = diaries(folder)
    times: dict[int, list[float]] = {}
    last: dict[int, tuple[float, int]] = {}  # of each step, when rank 0 did it last, and in which process
    for rank, step, at, pid, _ in sorted(rows, key=lambda row: row[2]):
        if rank == 0:
            times.setdefault(pid, []).append(at)
            last[step] = at, pid
    samples: dict[int, list[int]] = {step: [] for step in last}
    for _, step, _, pid, numbers in rows:
        if step in last and last[step][1] == pid:  # a step may have been done several times: the last one counts
            samples[step] += numbers
    apart = [later - earlier for of in times.values() for earlier, later in pairwise(of)]
    step_seconds = median(apart) if apart else 0.0
    lost, twice = lost_samples([samples.get(step, []) for step in range(1, kept + 1)])
    account = read_account(folder / "runs" / "kills") if way.is_ours else None
    done = sum(1 for rank, *_ in rows if rank == 0)
    return {
        "steps_kept": kept,
        "steps_done_again": done - kept,
        "step_seconds": round(step_seconds, 4),
        "goodput": round(kept * step_seconds / wall, 4),
        "own_account": None if account is None else round(account.goodput, 4),
        "samples_lost": lost,
        "samples_twice": twice,
        "final_loss": final_loss(way, folder, kept) if kept else None,
    }


def diaries(folder: Path) -> list[tuple[int, int, float, int, list[int]]]:
    found = []
    for path in folder.glob("diary-*"):
        for line in path.read_text().splitlines():
            step, at, pid, numbers = line.split()
            rank = int(path.name.partition("-")[2])
            found.append((rank, int(step), float(at), int(pid), [int(number) for number in numbers.split(",")]))
    return found


def kept_steps(folder: Path, way: Way) -> int:
    path = folder / "runs" / "kills" / "steps.jsonl" if way.is_ours else folder / "latest"
    if not path.exists():
        return 0
    return len(path.read_text().splitlines()) if way.is_ours else int(path.read_text())


def last_words(folder: Path) -> str:
    """Return the last line that the first host wrote."""
    return next((line for line in reversed((folder / "host-0.err").read_text().splitlines()) if line.strip()), "?")[
        :300
    ]


def lost_samples(steps: list[list[int]]) -> tuple[int, int]:
    """Samples that are missing in whole epochs, and those that come twice in an epoch."""
    per_epoch, lost, twice = NUM_SAMPLES // GLOBAL_BATCH, 0, 0
    for first in range(0, len(steps), per_epoch):
        epoch = steps[first : first + per_epoch]
        counts = Counter(number for numbers in epoch for number in numbers)
        twice += sum(count - 1 for count in counts.values())
        lost += GLOBAL_BATCH * len(epoch) - len(counts)
    return lost, twice


def final_loss(way: Way, folder: Path, step: int) -> float:
    """Return the loss over all samples, with the weights that were saved last."""
    model = make_model()
    if way.is_ours:
        checkpoint = Checkpoint.latest_in(folder / "runs" / "kills" / "checkpoints")
        assert checkpoint is not None
        model.load_state_dict({name: checkpoint.read(f"model/{name}") for name in model.state_dict()})
    else:
        state: dict[str, Any] = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder / f"step-{step}")
        model.load_state_dict(state["model"])
    with torch.no_grad():
        return round(float(loss_of(model, make_data()[:])), 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=20.0, help="of each way (default: 20)")
    parser.add_argument("--every", type=_seconds, default=(45.0, 75.0), help="seconds between kills (default: 45:75)")
    parser.add_argument("--repair", type=float, default=30.0, help="seconds until a lost host is back (default: 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=WAYS, action="append", help="this way; may be given several times")
    parser.add_argument("--label", default="", help="what to know about this measurement; kept with it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    hardware = detect()
    found = dict[str, Any]()
    for name in arguments.only or WAYS:
        with tempfile.TemporaryDirectory(prefix="drivetrain-kills-") as folder:
            found[name] = {"minutes": arguments.minutes, **run(WAYS[name], Path(folder), arguments)}
        print(name, json.dumps(found[name]), flush=True)
    path = arguments.out / f"kills-{label(hardware)}.json"
    if arguments.only and path.exists():  # the others stay as they were
        found = json.loads(path.read_text())["ways"] | found
    document = {
        "benchmark": "kills",
        "command": f"python -m benchmarks.kills --minutes {arguments.minutes:g}",
        "label": arguments.label,
        "seconds_between_kills": arguments.every,
        "repair_seconds": arguments.repair,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": hardware.cpu.model, "cores": hardware.cpu.num_usable, "python": platform.python_version()},
        "versions": {"drivetrain": drivetrain.__version__, "torch": torch.__version__},
        "ways": found,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"written to {path}")


def _seconds(text: str) -> tuple[float, float]:
    first, _, last = text.partition(":")
    return float(first), float(last or first)


if __name__ == "__main__":
    main()
