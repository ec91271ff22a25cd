"""A machine is lost again and again: what is left of the time, of the samples, and of the result.

Eight gloo ranks on four hosts, which are network namespaces of this machine (root and `ip` are needed; without them,
loopback addresses, which the result says). Every 45 to 75 seconds one of the hosts that take part, other than the
first, is lost with all of its processes (kill -9), and is back after `--repair` seconds. Four ways to go on:

- ours, a spare: a fifth host waits, and takes its place;
- ours, fewer: the other three go on, and it joins again at the next restart;
- ours, restart: the others wait for it;
- torchrun: `torchrun` with its elastic agent waits for it, too; DDP and torch.distributed.checkpoint, by hand.

A job that ends by itself is started again on all hosts after the same time, as somebody would do by hand; that is
counted. A step counts if the last checkpoint holds it. Every rank writes down the samples of its steps before that
checkpoint can be committed, so whatever is missing there was lost. The goodput is the number of steps that count, times
the median time of a step, over the whole time.

    python -m benchmarks.kills --minutes 20 --at-a-time 4    all four at the same time, on the same load
    python -m benchmarks.kills --table                       the tables of docs/how-it-works/reliability.md

A way that was measured with the same settings is kept: the same command goes on after an interruption.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
from tests.launch.hosts import Hosts, ip, some_hosts
from torch.distributed import checkpoint as dcp

import drivetrain
from benchmarks.contest import label
from benchmarks.kills_job import GLOBAL_BATCH, NUM_SAMPLES, loss_of, make_data, make_model
from drivetrain.checkpoint import Checkpoint
from drivetrain.core.goodput import read_account
from drivetrain.hardware import detect

REPOSITORY = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("kills_job.py")
RESULTS = Path(__file__).parent / "results"
DOCUMENT = REPOSITORY / "docs" / "how-it-works" / "reliability.md"
BEGIN, END = "<!-- begin: written by `python -m benchmarks.kills --table` -->", "<!-- end -->"
PORT = 29555
STOP_SECONDS = 240.0
NAMESPACES, LOOPBACK = "network namespaces", "loopback addresses"


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


class LoopbackHosts(Hosts):
    """Hosts that share the network of this machine: each has an address of the loopback network to itself."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__([""] * count, folder)
        self._network = f"127.{os.getpid() % 250 + 2}.{os.getpid() // 250 % 250}"
        self.main_address = self.address(0)

    def address(self, host: int) -> str:
        return f"{self._network}.{host + 1}"

    def interface(self, host: int) -> str:
        return "lo"

    def inside(self, host: int) -> list[str]:
        return []


def kind_of_hosts() -> str:
    """Return what hosts are made of here: namespaces have to be allowed, not only possible."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return LOOPBACK
    name = f"dt-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.SubprocessError):
        return LOOPBACK
    return NAMESPACES


@contextmanager
def hosts_of(kind: str, folder: Path, count: int) -> Iterator[Hosts]:
    if kind == NAMESPACES:
        with some_hosts(folder, count) as hosts:
            yield hosts
        return
    hosts = LoopbackHosts(count, folder)
    try:
        yield hosts
    finally:
        for process in hosts.processes:
            lose(process)


def start(way: Way, hosts: Hosts, host: int) -> subprocess.Popen[str]:
    if way.is_ours:
        flags = ("--max-restarts", "1000", "--node-seconds", "5", "--interface", hosts.interface(host), *way.flags)
        return hosts.launch(host, *flags, str(SCRIPT), "ours", str(hosts.folder), nodes=way.nodes)
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "4", "--nproc-per-node", "2",
        "--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-id", "kills",
        "--rdzv-endpoint", f"{hosts.main_address}:{PORT}",
        "--rdzv-conf", f"is_host={int(host == 0)},join_timeout=600", "--local-addr", hosts.address(host),
        str(SCRIPT), "plain", str(hosts.folder),
    ]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": hosts.interface(host)}
    with (hosts.folder / f"host-{host}.err").open("a") as output:
        process = subprocess.Popen(
            [*hosts.inside(host), *words],
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


def run(way: Way, folder: Path, arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    with hosts_of(kind, folder, way.num_hosts) as hosts:
        began = time.monotonic()
        lane = Lane(way, hosts, arguments)
        while time.monotonic() - began < 60 * arguments.minutes:
            lane.look(time.monotonic())
            time.sleep(0.2)
        problem = lane.stop()
        wall = time.monotonic() - began
    busy = round(os.getloadavg()[1], 1)  # over the last five minutes; eight ranks and their launchers are about ten
    facts = {"kills": lane.num_kills, "started_again_by_hand": len(lane.endings), "wall_seconds": round(wall, 1)}
    facts |= {"load": busy, "endings": [*lane.endings, *([problem] if problem else [])], "hosts": kind}
    return facts | measured(way, folder, wall)


class Lane:
    """One way at work: loses hosts and brings them back, and starts all again where the job has ended by itself."""

    def __init__(self, way: Way, hosts: Hosts, arguments: argparse.Namespace) -> None:
        self._way, self._hosts, self._repair, self._every = way, hosts, arguments.repair, arguments.every
        self._chance = random.Random(arguments.seed)
        self._back: dict[int, float] = {}  # when a lost host is back
        self.due = time.monotonic() + self._chance.uniform(*self._every)
        self._running = {host: start(way, hosts, host) for host in range(way.num_hosts)}
        self.num_kills, self.endings = 0, list[str]()

    def look(self, now: float) -> None:
        for host in [host for host, at in self._back.items() if now > at]:
            del self._back[host]
            self._running[host] = start(self._way, self._hosts, host)
        if 0 not in self._back and self._running[0].poll() is not None:
            # As somebody does who looks at the job: everything is ended, and the same commands are started again.
            self.endings.append(last_words(self._hosts.folder))
            for host, process in self._running.items():
                lose(process)
                self._back[host] = now + self._repair
        able = [host for host, one in self._running.items() if host and host not in self._back and takes_part(one)]
        if now > self.due:
            # One that is due while the job is down meets nothing: it does not wait for the job's first step.
            self.due = now + self._chance.uniform(*self._every)
            if able and (self._hosts.folder / "diary-0").exists():
                victim = self._chance.choice(able)
                lose(self._running[victim])
                self._back[victim] = now + self._repair
                self.num_kills += 1

    def stop(self) -> str:
        """Have the job save and end; return what went wrong with that."""
        for host in self._back:  # so that those who wait for it can stop
            self._running[host] = start(self._way, self._hosts, host)
        (self._hosts.folder / "stop").write_text("")
        if self._way.is_ours:
            self._running[0].send_signal(signal.SIGTERM)
        try:
            self._running[0].wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it did not stop within {STOP_SECONDS:g} s: {last_words(self._hosts.folder)}"
        return ""


class Row(NamedTuple):
    """One line of a rank's diary: a step that it did."""

    rank: int
    step: int
    at: float
    attempt: int
    samples: list[int]


def measured(way: Way, folder: Path, wall: float) -> dict[str, Any]:
    kept, rows = kept_steps(folder, way), diaries(folder)
    times: dict[int, list[float]] = {}
    for row in sorted((row for row in rows if row.rank == 0), key=lambda row: row.at):
        times.setdefault(row.attempt, []).append(row.at)
    apart = [later - earlier for of in times.values() for earlier, later in pairwise(of)]
    step_seconds = median(apart) if apart else 0.0
    lost, twice = lost_samples(kept_samples(rows, kept))
    account = read_account(folder / "runs" / "kills") if way.is_ours else None
    return {
        "steps_kept": kept,
        "steps_done_again": sum(1 for row in rows if row.rank == 0) - kept,
        "step_seconds": round(step_seconds, 4),
        "goodput": round(kept * step_seconds / wall, 4),
        "own_account": None if account is None else round(account.goodput, 4),
        "samples_lost": lost,
        "samples_twice": twice,
        "final_loss": final_loss(way, folder, kept) if kept else None,
    }


def diaries(folder: Path) -> list[Row]:
    """Return what the ranks wrote down. A line without its end was cut off by a kill, and so was its step."""
    found = []
    for path in folder.glob("diary-*"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, at, attempt, numbers = line.split()
                samples = [int(number) for number in numbers.split(",")]
                found.append(Row(int(path.name.partition("-")[2]), int(step), float(at), int(attempt), samples))
    return found


def kept_samples(rows: Sequence[Row], kept: int) -> list[list[int]]:
    """Return the samples of each step that counts. Of a step that was done several times, the last time counts."""
    last = {row.step: row.attempt for row in sorted(rows, key=lambda row: row.at) if row.rank == 0}
    samples: dict[int, list[int]] = {}
    for row in rows:
        if last.get(row.step) == row.attempt:
            samples.setdefault(row.step, []).extend(row.samples)
    return [samples.get(step, []) for step in range(1, kept + 1)]


def kept_steps(folder: Path, way: Way) -> int:
    """Return the step of the last checkpoint: what was done beyond it has to be done again."""
    if not way.is_ours:
        return int((folder / "latest").read_text()) if (folder / "latest").exists() else 0
    checkpoint = Checkpoint.latest_in(folder / "runs" / "kills" / "checkpoints")
    return 0 if checkpoint is None else checkpoint.step


def last_words(folder: Path) -> str:
    """Return the last line that the first host wrote."""
    lines = (folder / "host-0.err").read_text().splitlines()
    return next((line for line in reversed(lines) if line.strip()), "?")[:300]


def lost_samples(steps: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return samples that are missing in the steps of each epoch, and those that come twice in an epoch."""
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


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what has to be the same for two ways to be compared."""
    return {
        "minutes": arguments.minutes,
        "seconds_between_kills": list(arguments.every),
        "repair_seconds": arguments.repair,
        "seed": arguments.seed,
        "at_a_time": arguments.at_a_time,
    }


def measure_all(names: Sequence[str], arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure ways, some of them at the same time, each in a process of its own. Yield what is done."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-kills-results-") as folder:
        waiting, running = list(names), dict[str, subprocess.Popen[bytes]]()
        try:
            while waiting or running:
                while waiting and len(running) < arguments.at_a_time:
                    name = waiting.pop(0)
                    running[name] = _start_lane(name, Path(folder, name), arguments)
                    print(f"{datetime.now(UTC):%H:%M:%S} {name}: {arguments.minutes:g} minutes", flush=True)
                time.sleep(0.5)
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    code, path = running.pop(name).returncode, Path(folder, name)
                    if code or not path.exists():
                        print(f"{name} failed with exit code {code}; the others go on", flush=True)
                        continue
                    yield name, json.loads(path.read_text())
        finally:
            for process in running.values():
                process.terminate()  # it takes its hosts with it
                process.wait()


def _start_lane(name: str, path: Path, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    words = ["--lane", name, "--into", str(path), "--minutes", f"{arguments.minutes}", "--seed", f"{arguments.seed}"]
    words += ["--every", "{}:{}".format(*arguments.every), "--repair", f"{arguments.repair}"]
    words += ["--hosts", arguments.hosts] if arguments.hosts else []
    source = os.pathsep.join(filter(None, [str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    return subprocess.Popen([sys.executable, "-m", "benchmarks.kills", *words], env=environment, cwd=REPOSITORY)


def run_lane(arguments: argparse.Namespace) -> None:
    """Measure one way in this process, and write the result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are ended
    with tempfile.TemporaryDirectory(prefix="drivetrain-kills-") as folder:
        found = run(WAYS[arguments.lane], Path(folder), arguments, arguments.hosts or kind_of_hosts())
    arguments.into.write_text(json.dumps(found))


def table(document: dict[str, Any]) -> str:
    """Return the result as a table in Markdown."""
    settings, machine = document["settings"], document["machine"]
    ways = {name: document["ways"][name] for name in WAYS if name in document["ways"]}
    fewest, most = settings["seconds_between_kills"]
    at_a_time = settings["at_a_time"]
    together = f"{at_a_time} ways at a time" if at_a_time > 1 else "one way after the other"
    hosts = ", ".join(sorted({way["hosts"] for way in ways.values()}))
    lines = [
        f"Eight gloo ranks on four hosts ({hosts}); a host is lost every {fewest:g} to {most:g} s, and is back after "
        f"{settings['repair_seconds']:g} s; {settings['minutes']:g} minutes, {together}. `{document['command']}`; "
        f"{machine['cpu']}, {machine['cores']} cores; torch {document['versions']['torch']}; {document['time'][:10]}.",
        "",
        "| | hosts lost | started again by hand | goodput | steps that count | done again | a step (s) | "
        "samples lost | twice | final loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, way in ways.items():
        figures = [f"{way['kills']}", f"{way['started_again_by_hand']}", f"{way['goodput']:.1%}"]
        figures += [f"{way['steps_kept']:,}", f"{way['steps_done_again']:,}"]
        figures += [f"{way['step_seconds']:.3g}", f"{way['samples_lost']:,}", f"{way['samples_twice']:,}"]
        lines.append(f"| {name} | {' | '.join(figures)} | {way['final_loss']} |")
    return "\n".join(lines)


def write_tables(paths: Sequence[Path], document: Path = DOCUMENT) -> None:
    text = document.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{document} has no lines {BEGIN} and {END}")
    figures = "\n\n".join(table(json.loads(path.read_text(encoding="utf-8"))) for path in paths)
    document.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of each way (default: 20)")
    parser.add_argument("--every", type=_seconds, default=(45.0, 75.0), help="seconds between kills (default: 45:75)")
    parser.add_argument("--repair", type=float, default=30.0, help="seconds until a lost host is back (default: 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=WAYS, action="append", help="this way; may be given several times")
    parser.add_argument("--at-a-time", type=int, default=1, metavar="N", help="ways, on their own hosts (default: 1)")
    parser.add_argument("--again", action="store_true", help="also those that were measured with these settings before")
    parser.add_argument("--table", action="store_true", help="only write the tables into the documentation")
    parser.add_argument("--hosts", choices=(NAMESPACES, LOOPBACK), help="default: namespaces where they are allowed")
    parser.add_argument("--label", default="", help="what to know about this measurement; kept with it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--lane", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lane:
        run_lane(arguments)
        return
    hardware, settings = detect(), settings_of(arguments)
    path = arguments.out / f"kills-{label(hardware)}.json"
    if arguments.table:
        paths = sorted(arguments.out.glob("kills-*.json"))
        if not paths:
            raise SystemExit(f"there is no result in {arguments.out}: leave --table out")
        write_tables(paths)
        return
    found = json.loads(path.read_text()) if path.exists() else {}
    ways = found["ways"] if found.get("settings") == settings else {}
    names = [name for name in arguments.only or WAYS if arguments.again or name not in ways]
    kept = [name for name in arguments.only or WAYS if name not in names]
    if kept:
        print(f"kept from {path}: {'; '.join(kept)} (--again measures them anew)", flush=True)
    for name, result in measure_all(names, arguments):
        ways[name] = result
        print(name, json.dumps(result), flush=True)
        document = {
            "benchmark": "kills",
            "command": "python -m " + " ".join(["benchmarks.kills", *sys.argv[1:]]),
            "label": arguments.label,
            "settings": settings,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {
                "cpu": hardware.cpu.model, "cores": hardware.cpu.num_usable, "python": platform.python_version(),
            },
            "versions": {"drivetrain": drivetrain.__version__, "torch": torch.__version__},
            "ways": {way: ways[way] for way in WAYS if way in ways},
        }  # fmt: skip
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _seconds(text: str) -> tuple[float, float]:
    first, _, last = text.partition(":")
    return float(first), float(last or first)


if __name__ == "__main__":
    main()
