"""Finds addresses, ports and interfaces."""

import ipaddress
import socket

import psutil

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.launchers import LOOPBACK


def get_free_port(address: str = LOOPBACK) -> int:
    """Return a port that was free just now. Another process may take it: if it matters, bind it and keep the socket."""
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
