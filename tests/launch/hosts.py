"""Hosts on this machine: network namespaces, two with a cable between them, or more on a switch."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from tests.launch.jobs import Ended, environment
from tests.warm_python import WarmProcess

ADDRESSES = tuple(f"10.77.0.{number}" for number in range(1, 9))


def _skip(why: str) -> NoReturn:
    import pytest  # not needed by benchmarks, which make hosts as well

    pytest.skip(why)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


class Hosts:
    """`launch` starts one `drivetrain launch` per host; `cable` cuts and mends the link."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names, self.folder = names, folder
        self.main_address = ADDRESSES[0]
        self.processes: list[subprocess.Popen[str] | WarmProcess] = []

    def address(self, host: int) -> str:
        return ADDRESSES[host]

    def interface(self, host: int) -> str:
        return f"cable{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What stands before a command that runs on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def launch(
        self,
        host: int,
        *words: str,
        wrap: tuple[str, ...] = (),
        forks: bool = False,
        nodes: str = "2",
        num_processes: int = 2,
        **more: str,
    ) -> subprocess.Popen[str] | WarmProcess:
        """Start one launcher. `forks` spares the workers the import of torch."""
        flags = ["--cpu", "--num-processes", str(num_processes), "--nodes", nodes, "--node-rank", str(host)]
        flags += ["--main-address", self.main_address, "--output-dir", str(self.folder / "runs")]
        return self.launch_words(host, [*flags, *words], wrap, forks=forks, **more)

    def launch_words(
        self, host: int, words: Sequence[str], wrap: tuple[str, ...] = (), *, forks: bool = False, **more: str
    ) -> subprocess.Popen[str] | WarmProcess:
        """Start one launcher with these words and no others."""
        outputs = [(self.folder / f"host-{host}.{name}").open("a") for name in ("out", "err")]
        name = self.names[host]
        process: subprocess.Popen[str] | WarmProcess
        if forks and not wrap and not (Path("/etc/netns") / name).exists():  # only a mount of its own shows these files
            command = ["-m", "tests.launch.forked_workers", "--inside", name, "launch", *words]
            out, err = (file.fileno() for file in outputs)
            process = WarmProcess(command, cwd=self.folder, env=environment(**more), stdout=out, stderr=err)
        else:
            module = "tests.launch.forked_workers" if forks else "drivetrain"
            process = subprocess.Popen(
                [*self.inside(host), *wrap, sys.executable, "-m", module, "launch", *words],
                stdout=outputs[0],
                stderr=outputs[1],
                text=True,
                env=environment(**more),
                cwd=self.folder,
                start_new_session=True,
            )
        for file in outputs:
            file.close()
        self.processes.append(process)
        return process

    def end(self, host: int, process: subprocess.Popen[str] | WarmProcess, seconds: float = 200) -> Ended:
        began = time.monotonic()
        code = process.wait(seconds)
        out, err = ((self.folder / f"host-{host}.{name}").read_text() for name in ("out", "err"))
        return Ended(code, out, err, time.monotonic() - began)

    @contextmanager
    def names_of(self, host: int) -> Iterator[Path]:
        """The file of the names that a host knows, instead of this machine's."""
        folder = Path("/etc/netns") / self.names[host]
        folder.mkdir(parents=True)
        try:
            (folder / "hosts").write_text("")
            (folder / "nsswitch.conf").write_text("hosts: files\n")
            yield folder / "hosts"
        finally:
            shutil.rmtree(folder)

    def cable(self, state: str, host: int = 1) -> None:
        ip("-n", self.names[host], "link", "set", f"cable{host + 1}", state)


def two_hosts(folder: Path) -> AbstractContextManager[Hosts]:
    return some_hosts(folder, 2)


def _plug_in(names: Sequence[str], switch: str) -> None:
    """Two hosts have one cable; each of more has one to a switch, which is a namespace as well."""
    if len(names) == 2:
        ip("-n", names[0], "link", "add", "cable1", "type", "veth", "peer", "name", "cable2", "netns", names[1])
        return
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "switch", "type", "bridge")
    ip("-n", switch, "link", "set", "switch", "up")
    for number, name in enumerate(names, start=1):
        ip(
            "-n",
            switch,
            "link",
            "add",
            f"port{number}",
            "type",
            "veth",
            "peer",
            "name",
            f"cable{number}",
            "netns",
            name,
        )
        ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")


@contextmanager
def some_hosts(folder: Path, count: int) -> Iterator[Hosts]:
    """Skips where this machine does not allow it."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        _skip("network namespaces need root and `ip`")
    names = [f"dt-{os.getpid()}-{'abcdefgh'[number]}" for number in range(count)]
    switch = f"dt-{os.getpid()}-switch"
    hosts = Hosts(names, folder)
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            _plug_in(names, switch)
            for number, (name, address) in enumerate(zip(names, ADDRESSES, strict=False), start=1):
                cable = f"cable{number}"
                ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", cable, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            _skip(f"network namespaces cannot be made here: {error}")
        yield hosts
    finally:
        for process in hosts.processes:
            process.kill()
            process.wait()
        for name in (*names, switch):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def clock_shim(folder: Path) -> str:
    """A library that shifts the wall clock of whoever preloads it, by CLOCK_SHIFT seconds."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        _skip("no C compiler")
    path = folder / "clock_shim.so"
    source = Path(__file__).with_name("clock_shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(source)], check=True, timeout=60)
    return str(path)
