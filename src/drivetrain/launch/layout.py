"""Decides how many processes this machine starts, on which devices, cores and interface; refuses what cannot work.

`LaunchOptions` are the flags of `drivetrain launch` and `drivetrain train` that say how many processes there are, and
where. Addresses, ports and interfaces are found here too.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import BaseModel, BeforeValidator, Field

from drivetrain.config import Allowed
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.launchers import LOOPBACK
from drivetrain.hardware import Hardware

DEFAULT_PORT = 29400
NODES = Path("/sys/devices/system/node")
# A user who set one of these knows better.
_THREADS = "OMP_NUM_THREADS"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


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
    nodes: Annotated[str, BeforeValidator(str), Allowed("a number, or least:most, such as 3:4")] = Field(
        "1",
        pattern=r"^[1-9]\d{0,3}(:[1-9]\d{0,3})?$",
        description="machines that take part; 3:4 goes on with 3 of 4 where one is lost and does not come back "
        "(default: 1)",
    )
    spares: int = Field(
        0,
        ge=0,
        le=64,
        description="further machines that wait, and take the place of one that is lost; on one machine, GPUs "
        "(default: 0)",
    )
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
    standby: bool = Field(
        False,
        description="keep a process beside each rank that has imported torch already, so that a restart is quicker; "
        "some 0.3 GB of memory each",
    )
    hang_seconds: float = Field(
        60,
        ge=0,
        allow_inf_nan=False,
        description="a job in which no step ends for so long, and for 20 times as long as its steps take, is ended and "
        "started again; it is reported after a sixth of that, and 5 steps; 0 never ends one (default: 60)",
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

    @property
    def most_nodes(self) -> int:
        """The machines that take part where none is lost."""
        return int(self.nodes.rpartition(":")[2])

    @property
    def least_nodes(self) -> int:
        """The machines that are enough to go on."""
        return int(self.nodes.partition(":")[0])

    @property
    def num_machines(self) -> int:
        """The machines that are started, those in reserve included."""
        return self.most_nodes + (self.spares if self.most_nodes > 1 else 0)


def get_free_port(address: str = LOOPBACK) -> int:
    """Return a port that was free just now. Another process may take it: if it matters, bind it and keep the socket.

    Args:
        address: The address that it is free on.

    Example:
        >>> dt.get_free_port() > 0
        True
    """
    with socket.socket() as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])


def listen_on(address: str, port: int, what: str) -> socket.socket:
    """Return a listening socket on one address. Port 0 is any free one."""
    listening = socket.socket(_family(address), socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
        listening.listen(512)
    except OSError as error:
        listening.close()
        if error.errno in (98, 48):
            raise DrivetrainError(
                f"{what}: port {port} of {address} is taken{_by_whom(port)}",
                remedy=f"end that process, or choose another with --main-port (free now: {get_free_port(address)})",
            ) from None
        raise DrivetrainError(
            f"{what}: {address} is not an address of this machine ({error.strerror})",
            remedy=f"on the node with --node-rank 0, --main-address is one of its own: {', '.join(own_addresses())}",
        ) from None
    return listening


def resolve_address(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DrivetrainError(
            f"--main-address {host} does not resolve on {socket.gethostname()}: {error.strerror}",
            remedy="give the address of the node with --node-rank 0 as numbers, such as 10.0.0.1",
        ) from None
    return str(sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine; those that others can reach first."""
    found = [address for _, address in _interfaces()]
    return sorted(found, key=lambda address: ipaddress.ip_address(address).is_loopback)


def interface_of(address: str) -> str:
    """Return the interface that has an address of this machine; empty if none has."""
    return next((name for name, own in _interfaces() if own == address), "")


def loopback_interface() -> str:
    return interface_of(LOOPBACK) or "lo"


def interface_towards(address: str) -> str:
    """Return the interface by which this machine would reach an address; empty if there is no way."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: it only asks the routing table
        except OSError:
            return ""
        return interface_of(str(probe.getsockname()[0]))


def interface_names() -> list[str]:
    return sorted({name for name, _ in _interfaces()})


def _interfaces() -> list[tuple[str, str]]:
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _by_whom(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return ""
    for entry in connections:
        if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN and entry.pid:
            try:
                return f" by process {entry.pid} ({psutil.Process(entry.pid).name()})"
            except psutil.Error:
                return f" by process {entry.pid}"
    return ""


def numa_cores(root: Path = NODES) -> dict[int, list[int]]:
    """Return the cores of each NUMA node, as far as this process may use them."""
    allowed = os.sched_getaffinity(0) if root == NODES else None
    found = {}
    for folder in sorted(root.glob("node[0-9]*")):
        try:
            cores = _parse((folder / "cpulist").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        usable = [core for core in cores if allowed is None or core in allowed]
        if usable:
            found[int(folder.name[4:])] = usable
    return found


def choose_cores(
    bind: str, num_processes: int, gpu_nodes: Sequence[int | None], numa: Mapping[int, Sequence[int]]
) -> list[list[int]]:
    """Return each local rank's cores; empty where it is not bound. `gpu_nodes` are the NUMA nodes of the ranks' GPUs.

    Ranks of one NUMA node share its cores equally. There are never fewer cores than ranks in a share: then no rank is
    bound, because two ranks on one core are worse off than two ranks that the kernel moves around.
    """
    unbound: list[list[int]] = [[] for _ in range(num_processes)]
    everything = sorted(core for cores in numa.values() for core in cores)
    if bind == "none" or (bind == "auto" and len(numa) < 2) or not everything:
        return unbound
    homes: dict[int, int | None]
    if bind == "cores":
        homes = dict.fromkeys(range(num_processes), 0)
        pools: Mapping[int, Sequence[int]] = {0: everything}
    else:
        nodes = sorted(numa)
        homes = {
            rank: gpu_nodes[rank] if rank < len(gpu_nodes) and gpu_nodes[rank] in numa else nodes[
                rank * len(nodes) // num_processes
            ]
            for rank in range(num_processes)
        }  # fmt: skip
        pools = numa
    chosen = unbound
    for home, pool in pools.items():
        ranks = [rank for rank in range(num_processes) if homes[rank] == home]
        if len(pool) < len(ranks):
            return [[] for _ in range(num_processes)]
        for place, rank in enumerate(ranks):
            begin, end = place * len(pool) // len(ranks), (place + 1) * len(pool) // len(ranks)
            chosen[rank] = list(pool[begin:end])
    return chosen


def _parse(text: str) -> list[int]:
    """Parse a list of cores: `0-3,8` are the cores 0, 1, 2, 3 and 8."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    return cores


@dataclass(frozen=True)
class Layout:
    """One machine's part of a job."""

    nodes: int  # that take part where none is lost
    node_rank: int  # which of the machines this is, those in reserve behind the others
    main_address: str  # numbers, not a name
    main_port: int
    num_processes: int
    environment: dict[str, str]  # the same for all processes here
    cores: tuple[tuple[int, ...], ...]  # per local rank; empty: not bound
    notes: tuple[str, ...]  # what was chosen, in words
    least_nodes: int = 1
    spares: int = 0
    gpus: tuple[str, ...] = ()  # the UUIDs of those in use, by local rank; none where a process has no GPU of its own
    spare_gpus: tuple[str, ...] = ()

    @property
    def num_machines(self) -> int:
        return self.nodes + (self.spares if self.nodes > 1 else 0)

    def without_gpu(self, local_rank: int) -> "Layout | None":
        """Return the layout with a GPU in reserve in the place of one that is broken; None if there is none."""
        if not self.spare_gpus or local_rank >= len(self.gpus):
            return None
        gpus = (*self.gpus[:local_rank], self.spare_gpus[0], *self.gpus[local_rank + 1 :])
        environment = {**self.environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        return replace(self, gpus=gpus, spare_gpus=self.spare_gpus[1:], environment=environment)

    @property
    def nodes_in_words(self) -> str:
        """The number of machines as on the command line: all of them were started with the same."""
        least = f"{self.least_nodes}:" if self.least_nodes < self.nodes else ""
        return f"--nodes {least}{self.nodes}" + (f" --spares {self.spares}" if self.spares else "")


def make_layout(options: LaunchOptions, hardware: Hardware, environ: Mapping[str, str] | None = None) -> Layout:
    environ = os.environ if environ is None else environ
    problems: list[Problem] = []
    gpus, spares = _with_spares(options, _gpus(options, hardware, problems), hardware, problems)
    num_processes = _num_processes(options, len(gpus), problems)
    node_rank, address = _nodes(options, problems)
    if problems:
        raise ConfigError(problems)
    address = LOOPBACK if options.num_machines == 1 else resolve_address(address)
    interface, how = _interface(options, node_rank, address)

    environment, notes = {}, []
    if options.cpu or not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif len(gpus) < len(hardware.gpus):
        uuids = [hardware.gpus[index].uuid for index in gpus]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    if _THREADS not in environ:
        threads = max(1, hardware.cpu.num_usable // num_processes)
        environment[_THREADS] = str(threads)
        notes.append(f"{threads} thread{'s' if threads > 1 else ''} each")
    if interface and not any(name in environ for name in _INTERFACES):
        environment |= dict.fromkeys(_INTERFACES, interface)
        notes.append(f"interface {interface}{how}")
    near = [hardware.gpus[gpus[rank % len(gpus)]].numa_node for rank in range(num_processes)] if gpus else []
    cores = choose_cores(options.bind, num_processes, near, numa_cores())
    if any(cores):
        notes.append(f"bound to {min(map(len, cores))} cores each")
    return Layout(
        nodes=options.most_nodes,
        least_nodes=options.least_nodes,
        spares=options.spares,
        gpus=tuple(hardware.gpus[index].uuid for index in gpus) if num_processes == len(gpus) else (),
        spare_gpus=tuple(hardware.gpus[index].uuid for index in spares),
        node_rank=node_rank,
        main_address=address,
        main_port=options.main_port,
        num_processes=num_processes,
        environment=environment,
        cores=tuple(map(tuple, cores)),
        notes=tuple(notes),
    )


def _problem(flag: str, message: str, value: object, allowed: str = "", remedy: str = "") -> Problem:
    return Problem(flag, message, value, "command line", allowed, remedy)


def _gpus(options: LaunchOptions, hardware: Hardware, problems: list[Problem]) -> list[int]:
    """Return the indices of the GPUs to use; none means the CPU."""
    here = list(range(len(hardware.gpus))) if hardware.accelerator in ("cuda", "rocm") else []
    asked = [
        flag
        for flag, value in (("--cpu", options.cpu), ("--num-gpus", options.num_gpus), ("--gpu-ids", options.gpu_ids))
        if value
    ]
    if len(asked) > 1:
        problems.append(
            _problem(asked[1], f"stands beside {asked[0]}: both choose the devices", None, remedy="keep one")
        )
        return []
    words = f"{len(here)} GPU{'s' if len(here) > 1 else ''} {'are' if len(here) > 1 else 'is'} visible" if here else (
        "no GPU is visible"
    )  # fmt: skip
    if options.cpu:
        return []
    if options.num_gpus is not None:
        if options.num_gpus > len(here):
            remedy = f"--num-gpus {len(here)}, or `drivetrain check`" if here else "--cpu, or `drivetrain check`"
            problems.append(
                _problem("--num-gpus", f"asks for {options.num_gpus}: {words}", options.num_gpus, "", remedy)
            )
        return here[: options.num_gpus]
    if options.gpu_ids is not None:
        ids = options.gpu_ids
        missing = sorted({index for index in ids if index not in here})
        if missing:
            allowed = f"0 to {here[-1]}" if here else ""
            problems.append(
                _problem("--gpu-ids", f"there is no GPU {', '.join(map(str, missing))}: {words}", ids, allowed,
                         "`drivetrain check` lists them")
            )  # fmt: skip
        elif len(set(ids)) < len(ids):
            problems.append(_problem("--gpu-ids", f"{list(ids)} names a GPU twice", ids, remedy="name each once"))
        return list(ids)
    return here


def _with_spares(
    options: LaunchOptions, gpus: list[int], hardware: Hardware, problems: list[Problem]
) -> tuple[list[int], list[int]]:
    """Return the GPUs to use and those in reserve, where one machine takes part: further ones, else the last of all."""
    if not options.spares or options.most_nodes > 1:
        return gpus, []
    others = [index for index in range(len(hardware.gpus)) if index not in gpus] if gpus else []
    if not others:
        gpus, others = gpus[: -options.spares], gpus[-options.spares :]
    if len(others) < options.spares or not gpus:
        problems.append(
            _problem("--spares", "one machine takes part, and it has no GPU to keep in reserve", options.spares, "0",
                     "fewer --num-gpus, or --nodes 2 or more; a lost process is started again without a spare")
        )  # fmt: skip
    return gpus, others[: options.spares]


def _num_processes(options: LaunchOptions, num_gpus: int, problems: list[Problem]) -> int:
    number = options.num_processes or num_gpus or 1
    if num_gpus and number > num_gpus and not options.share_gpus and not problems:
        problems.append(
            _problem(
                "--num-processes",
                f"{number} processes for {num_gpus} GPU{'s' if num_gpus > 1 else ''}: each needs one of its own",
                number,
                f"1 to {num_gpus}",
                f"--num-processes {num_gpus}; or --share-gpus (slow, over gloo); or --cpu",
            )
        )
    return number


def _nodes(options: LaunchOptions, problems: list[Problem]) -> tuple[int, str]:
    if options.least_nodes > options.most_nodes:
        problems.append(_problem("--nodes", "the least is more than the most", options.nodes, remedy="such as 3:4"))
    if options.num_machines == 1:
        if options.node_rank or options.main_address:
            flag = "--node-rank" if options.node_rank else "--main-address"
            problems.append(_problem(flag, "one machine takes part", None, remedy="say how many with --nodes"))
        return 0, LOOPBACK
    missing = [
        flag
        for flag, value in (("--node-rank", options.node_rank), ("--main-address", options.main_address))
        if value is None
    ]
    for flag in missing:
        example = "10.0.0.1, the same on every machine" if flag == "--main-address" else "0 on the main machine"
        problems.append(_problem(flag, f"is missing: --nodes {options.nodes} needs it", None, "", f"{flag} {example}"))
    if options.node_rank is not None and options.node_rank >= options.num_machines:
        problems.append(
            _problem("--node-rank", f"is {options.node_rank} of {options.num_machines}", options.node_rank,
                     f"0 to {options.num_machines - 1}", "each machine has its own, counted from 0")
        )  # fmt: skip
    return options.node_rank or 0, options.main_address or ""


def _interface(options: LaunchOptions, node_rank: int, address: str) -> tuple[str, str]:
    """Return the interface that workers talk over, and how it was found."""
    if options.interface is not None:
        if options.interface not in interface_names():
            names = ", ".join(interface_names())
            raise ConfigError([_problem("--interface", "there is no such interface", options.interface, names)])
        return options.interface, ""
    if options.num_machines == 1:
        return loopback_interface(), ""
    found = interface_of(address) if node_rank == 0 else interface_towards(address)
    return found, f" (towards {address})" if found else ""
