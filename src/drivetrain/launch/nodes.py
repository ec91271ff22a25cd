"""The other machines of a job, as the supervisor of the main one sees them."""

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError
from drivetrain.launch.control import TOKEN, Channel, Message, make_token, token_file
from drivetrain.launch.layout import Layout
from drivetrain.launch.network import listen_on

_SAY_AFTER_SECONDS = 5.0


@dataclass
class Node:
    """A machine that has joined, with what it reported about itself."""

    rank: int
    host: str
    num_processes: int
    channel: Channel


class Nodes:
    """Waits for the machines, and keeps the connection to each. With one machine there are none, and no socket."""

    def __init__(self, layout: Layout, output_dir: Path, code: Mapping[str, str], silence_seconds: float) -> None:
        self._layout, self._code, self._silence_seconds = layout, dict(code), silence_seconds
        self._strangers: list[Channel] = []
        self.here: dict[int, Node] = {}
        self._hosts: dict[int, str] = {}
        self._listening: socket.socket | None = None
        if layout.nodes > 1:
            self._listening = listen_on(layout.main_address, layout.main_port, "the launchers cannot meet")
            self._listening.setblocking(False)
            self._token_file = token_file(output_dir, layout.main_address, layout.main_port)
            self._token = make_token(self._token_file)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self._layout.nodes) if rank not in self.here]

    def gather(self, seconds: float, wants_to_stop: Callable[[], bool]) -> list[int]:
        """Wait until all machines have joined, and return those that have not.

        A machine that does not fit ends the job, by name.
        """
        began = time.monotonic()
        said = False
        while self.missing and time.monotonic() - began < seconds and not wants_to_stop():
            self.poll()
            if not said and time.monotonic() - began > _SAY_AFTER_SECONDS:
                said = True
                at = f"{self._layout.main_address}:{self._layout.main_port}"
                names = ", ".join(map(str, self.missing))
                print(f"drivetrain: waiting at {at} for node {names} of {self._layout.nodes}", file=sys.stderr)
            time.sleep(0.02)
        return self.missing

    def poll(self) -> list[tuple[int, Message]]:
        """Return the messages of the machines; newcomers are admitted on the way."""
        self._accept()
        said = [(node.rank, message) for node in self.here.values() for message in node.channel.poll()]
        for channel in [*self._strangers]:
            for message in channel.poll():
                self._strangers.remove(channel)
                self._meet(channel, message)
                break
            else:
                if channel.closed_because or channel.silent_seconds > self._silence_seconds:
                    self._turn_away(channel)
        return said

    def lost(self) -> list[tuple[Node, str]]:
        """Return machines whose connection is gone, or that were silent for too long; they may come again."""
        gone = []
        for node in [*self.here.values()]:
            why = node.channel.closed_because
            if not why and node.channel.silent_seconds > self._silence_seconds:
                why = f"nothing was heard of it for {self._silence_seconds:g} s"
            if why:
                node.channel.close()
                del self.here[node.rank]
                gone.append((node, why))
        return gone

    def tell(self, what: str, **facts: Any) -> None:
        for node in self.here.values():
            node.channel.send({"do": what, **facts})
            node.channel.poll()

    def host(self, rank: int) -> str:
        return self._hosts.get(rank, "?")

    def close(self) -> None:
        for channel in [*self._strangers, *(node.channel for node in self.here.values())]:
            channel.close()
        if self._listening is not None:
            self._listening.close()
            with contextlib.suppress(OSError):
                self._token_file.unlink()
                self._token_file.parent.rmdir()

    def _accept(self) -> None:
        while self._listening is not None:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # no connection is waiting
                return
            self._strangers.append(Channel(connection, self._token, is_server=True))

    def _turn_away(self, channel: Channel) -> None:
        self._strangers.remove(channel)
        if not channel.closed_because:
            channel.close()

    def _meet(self, channel: Channel, hello: Message) -> None:
        rank, host = int(hello["node_rank"]), str(hello["host"])
        problem = self._problem(rank, host, hello)
        if problem is not None:
            channel.send({"do": "refuse", "message": problem.message, "remedy": problem.remedy})
            channel.poll()
            channel.close()
            raise problem
        self._hosts[rank] = host
        self.here[rank] = Node(rank, host, int(hello["num_processes"]), channel)

    def _problem(self, rank: int, host: str, hello: Message) -> DrivetrainError | None:
        name = f"node {rank} ({host})"
        if hello["nodes"] != self._layout.nodes:
            return DrivetrainError(
                f"{name} was started with --nodes {hello['nodes']}, node 0 with --nodes {self._layout.nodes}",
                remedy="give the same number on every machine",
            )
        if not 0 < rank < self._layout.nodes or rank in self.here:
            return DrivetrainError(
                f"{name}: that --node-rank is {'taken by ' + self.host(rank) if rank in self.here else 'wrong'}",
                remedy=f"every machine has its own, from 0 to {self._layout.nodes - 1}",
            )
        for what, ours in self._code.items():
            theirs = hello["code"].get(what, "missing")
            if theirs != ours:
                return DrivetrainError(
                    f"{name} has other code than node 0: {what} is {theirs} there and {ours} here",
                    remedy=_SAME_CODE.get(what, f"install the same {what} on every machine"),
                )
        return None


_SAME_CODE = {
    "script": "copy the same script to every machine, or put it on a shared disk",
    "drivetrain": "install the same drivetrain on every machine",
    "arguments": "start every machine with the same arguments",
}
NO_TOKEN = f"--output-dir has to be on a disk that all machines share; or set {TOKEN} to the same text on each"
