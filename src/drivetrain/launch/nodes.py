"""The other machines of a job, as the supervisor of the main one sees them, and the channel between supervisors.

The channel is JSON over TCP, every message authenticated with a shared secret. Nothing is unpickled or run. Each side
draws a nonce, so no message of another connection can be played again, and numbers its messages, so none can be dropped
or repeated. A clock is read only to measure time that passes here.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.log import say
from drivetrain.launch.layout import Layout, listen_on

TOKEN = "DRIVETRAIN_TOKEN"
OTHER_SECRET = "its secret is another one"
BEAT_SECONDS = 1.0
STUCK_FACTOR = 20  # times the silence that counts as lost, for a machine that answers but whose launcher does nothing
_HEAD = struct.Struct("!I32s")
_LONGEST = 1 << 20
_NO_MAC = bytes(32)
Message = dict[str, Any]
_SAY_AFTER_SECONDS = 5.0
_SAME_CODE = {
    "script": "copy the same script to every machine, or put it on a shared disk",
    "drivetrain": "install the same drivetrain on every machine",
    "arguments": "start every machine with the same arguments",
}
NO_TOKEN = f"--output-dir has to be on a disk that all machines share; or set {TOKEN} to the same text on each"


class Channel:
    """One connection, after both sides drew their nonces. Never blocks.

    A thread sends heartbeats and receives, whatever the owner is doing: a shared disk that stalls is no lost machine.
    The heartbeats say for how long the owner has not called `poll`.
    """

    def __init__(self, connection: socket.socket, token: bytes, *, is_server: bool) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._token, self._is_server = connection, token, is_server
        self._own_nonce = secrets.token_bytes(16)
        self._key: bytes | None = None
        self._in, self._out = bytearray(), bytearray(self._own_nonce)
        self._num_sent = self._num_received = 0
        self._waiting: list[Message] = []  # until the other nonce is there
        self._received: list[Message] = []
        self.heard_at = self._beaten_at = self._polled_at = time.monotonic()
        self.stuck_seconds = 0.0  # for which the other side's owner has not listened, as of its last heartbeat
        self.closed_because = ""
        self._lock = threading.RLock()
        self._is_closed = threading.Event()
        threading.Thread(target=self._beat, name="drivetrain-heartbeat", daemon=True).start()

    def send(self, message: Message) -> None:
        with self._lock:
            if self._key is None:
                self._waiting.append(message)
                return
            assert "number" not in message, "that is the channel's own"
            body = json.dumps({"number": self._num_sent, **message}).encode()
            self._num_sent += 1
            self._out += _HEAD.pack(len(body), self._mac(body, from_server=self._is_server)) + body

    def poll(self) -> list[Message]:
        """Return the messages received. After the connection is lost, `closed_because` is set and there are none."""
        with self._lock:
            self._polled_at = time.monotonic()
            self._exchange()
            messages, self._received = self._received, []
            return messages

    def _beat(self) -> None:
        while not self._is_closed.wait(BEAT_SECONDS / 2):
            with self._lock:
                self._exchange()

    def _exchange(self) -> None:
        if self.closed_because:
            return
        now = time.monotonic()
        if self._key is not None and now - self._beaten_at >= BEAT_SECONDS:
            self._beaten_at = now
            self.send({"event": "beat", "stuck": round(now - self._polled_at, 1)})
        try:
            self._flush()
            self._receive()
        except OSError as error:
            self._lose(f"the connection broke ({error.strerror or error})")
        for message in self._parse():
            if message.get("event") == "beat":
                self.stuck_seconds = float(message.get("stuck", 0.0))
            else:
                self._received.append(message)

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.heard_at

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Send the buffered messages, and close. A receiver that is gone does not block this."""
        with self._lock:
            if not self.closed_because:
                with contextlib.suppress(OSError):
                    self._socket.setblocking(True)
                    self._socket.settimeout(1.0)
                    self._socket.sendall(self._out)
            self._lose(self.closed_because or "closed here")

    def _flush(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(self._out)
            except BlockingIOError:
                return
            del self._out[:sent]

    def _receive(self) -> None:
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._lose("the other side closed the connection")
                return
            self.heard_at = time.monotonic()
            self._in += data

    def _parse(self) -> list[Message]:
        if self._key is None:
            if len(self._in) < 16:
                return []
            other = bytes(self._in[:16])
            del self._in[:16]
            nonces = self._own_nonce + other if self._is_server else other + self._own_nonce
            self._key = hmac.digest(self._token, b"drivetrain launch" + nonces, "sha256")
            for message in self._waiting:
                self.send(message)
            self._waiting = []
        messages = []
        while len(self._in) >= _HEAD.size:
            length, mac = _HEAD.unpack(self._in[: _HEAD.size])
            if length > _LONGEST:
                self._lose("it sent something that is not a message")
                break
            if len(self._in) < _HEAD.size + length:
                break
            body = bytes(self._in[_HEAD.size : _HEAD.size + length])
            del self._in[: _HEAD.size + length]
            if not hmac.compare_digest(mac, self._mac(body, from_server=not self._is_server)):
                if self._is_server:
                    self.refuse_unheard(OTHER_SECRET)
                else:
                    self._lose(OTHER_SECRET if mac != _NO_MAC else body.decode(errors="replace"))
                break
            message = json.loads(body)
            if message.pop("number") != self._num_received:
                self._lose("a message is missing")
                break
            self._num_received += 1
            messages.append(message)
        return messages

    def refuse_unheard(self, reason: str) -> None:
        """Tell an unknown peer why it is refused; without a mac, since there is no common secret."""
        body = reason.encode()
        self._out += _HEAD.pack(len(body), _NO_MAC) + body
        self.close()

    def _mac(self, body: bytes, *, from_server: bool) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, (b"s" if from_server else b"c") + body, "sha256")

    def _lose(self, why: str) -> None:
        self.closed_because = why
        self._is_closed.set()
        self._socket.close()


def token_file(folder: Path, address: str, port: int) -> Path:
    return folder / ".launch" / f"{address.replace(':', '_')}-{port}.token"


def make_token(path: Path) -> bytes:
    """Return the job's secret: from the environment, or a new one in the shared folder that only this user can read."""
    if given := os.environ.get(TOKEN, ""):
        return given.encode()
    token = secrets.token_hex(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token)
    except OSError as error:
        raise DrivetrainError(
            f"the secret of the job cannot be kept in {path.parent}: {error.strerror}",
            remedy=f"name a folder that all machines share with --output-dir, or set {TOKEN} to the same text on each",
        ) from None
    return token.encode()


def read_token(path: Path) -> bytes | None:
    """Return the token that the main machine made; None as long as there is none."""
    if given := os.environ.get(TOKEN, ""):
        return given.encode()
    try:
        return path.read_bytes() or None
    except OSError:
        return None


@dataclass
class Node:
    """A machine that has joined, with what it reported about itself."""

    rank: int
    host: str
    num_processes: int
    channel: Channel


class Nodes:
    """Waits for the machines, and keeps the connection to each. With one machine there are none, and no socket.

    `seats` are those that take part besides this one, in the order of their ranks; the others are in reserve. A machine
    in reserve takes the seat of one that is lost, and so its ranks: that one is in reserve if it comes back.
    """

    def __init__(self, layout: Layout, output_dir: Path, code: Mapping[str, str], silence_seconds: float) -> None:
        self._layout, self._code, self._silence_seconds = layout, dict(code), silence_seconds
        self._strangers: list[Channel] = []
        self.here: dict[int, Node] = {}
        self.seats = list(range(1, layout.nodes))
        self._sizes: dict[int, int] = {}  # the processes of each seat, as of the machine that had it first
        self._hosts: dict[int, str] = {}
        self._said_stuck: set[int] = set()
        self._listening: socket.socket | None = None
        if layout.num_machines > 1:
            self._listening = listen_on(layout.main_address, layout.main_port, "the launchers cannot meet")
            self._listening.setblocking(False)
            self._token_file = token_file(output_dir, layout.main_address, layout.main_port)
            self._token = make_token(self._token_file)

    @property
    def missing(self) -> list[int]:
        """The machines that have a seat and are not here."""
        return [rank for rank in self.seats if rank not in self.here]

    @property
    def seated(self) -> list[Node]:
        return [self.here[rank] for rank in self.seats if rank in self.here]

    def fill(self) -> bool:
        """Fill or take away the seats of machines that are not here. Return whether that is possible."""
        self.replace_lost()
        self.go_on_with_fewer()
        return not self.missing

    def replace_lost(self) -> None:
        """Give the seats of machines that are not here to machines in reserve, and say so."""
        for seat, rank in enumerate(self.seats):
            size = self._sizes.get(seat)
            found = [other for other in self._reserve if size in (None, other.num_processes)]
            if rank not in self.here and found:
                self.seats[seat] = found[0].rank
                _say(f"node {found[0].rank} ({found[0].host}) takes the place of node {rank}")

    def go_on_with_fewer(self) -> None:
        """Take away the seats that are empty, if enough machines are left, and say so."""
        left = [rank for rank in self.seats if rank in self.here]
        if not self.missing or 1 + len(left) < self._layout.least_nodes:
            return
        gone, self.seats = self.missing, left
        self._sizes = {}
        _say(
            f"going on with {1 + len(left)} of {self._layout.nodes} machines; node {', '.join(map(str, gone))} joins "
            "at the next restart after it is back"
        )

    def seat_all(self) -> None:
        """Give seats that were taken away to machines that have come since, and say so. Called before every attempt."""
        while len(self.seats) < self._layout.nodes - 1 and self._reserve:
            node = self._reserve[0]
            _say(f"node {node.rank} ({node.host}) takes part again")
            self.seats = sorted([*self.seats, node.rank])
            self._sizes = {}
        if not self.missing:
            self._sizes = {seat: self.here[rank].num_processes for seat, rank in enumerate(self.seats)}

    def want_all(self) -> None:
        """Have all machines take part from now on; those that are not here are missing."""
        absent = [rank for rank in range(1, self._layout.num_machines) if rank not in self.seats]
        absent.sort(key=lambda rank: rank not in self.here)
        self.seats = sorted([*self.seats, *absent[: self._layout.nodes - 1 - len(self.seats)]])

    @property
    def _reserve(self) -> list[Node]:
        return [node for rank, node in sorted(self.here.items()) if rank not in self.seats]

    def gather(self, seconds: float, wants_to_stop: Callable[[], bool], *, replaces: bool = False) -> list[int]:
        """Wait until all machines that have a seat have joined, and return those that have not.

        A machine that does not fit ends the job, by name. With `replaces`, machines in reserve fill seats meanwhile.
        """
        began = time.monotonic()
        said = False
        while self.missing and time.monotonic() - began < seconds and not wants_to_stop():
            self.poll()
            if replaces:
                self.replace_lost()
            if not said and time.monotonic() - began > _SAY_AFTER_SECONDS:
                said = True
                at = f"{self._layout.main_address}:{self._layout.main_port}"
                names = ", ".join(map(str, self.missing))
                _say(f"waiting at {at} for node {names} of {self._layout.nodes}")
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
            if not why:
                why = self._stuck(node)
            if why:
                node.channel.close()
                del self.here[node.rank]
                gone.append((node, why))
        return gone

    def _stuck(self, node: Node) -> str:
        """Say once that a launcher answers but does nothing; return why it counts as lost, if that lasts long."""
        seconds = node.channel.stuck_seconds
        if seconds < self._silence_seconds:
            self._said_stuck.discard(node.rank)
        elif node.rank not in self._said_stuck:
            self._said_stuck.add(node.rank)
            words = f"node {node.rank} ({node.host}) is there, but its launcher has been waiting for a disk for"
            _say(f"{words} {seconds:.0f} s; going on")
        longest = STUCK_FACTOR * self._silence_seconds
        return f"its launcher has been waiting for a disk for {longest:g} s" if seconds > longest else ""

    def tell(self, what: str, *, reserve: bool = False, **facts: Any) -> None:
        """Send something to the machines that take part; with `reserve`, to those in reserve as well."""
        for node in self.here.values() if reserve else self.seated:
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
        is_back = rank in self._hosts
        self._hosts[rank] = host
        self.here[rank] = Node(rank, host, int(hello["num_processes"]), channel)
        if rank not in self.seats:
            full = len(self.seats) == self._layout.nodes - 1
            waits = "waits in reserve" if full else "joins at the next restart"
            words = f"node {rank} ({host}) is {'back' if is_back else 'here'}; it {waits}"
            channel.send({"do": "say", "words": words})
            _say(words)

    def _problem(self, rank: int, host: str, hello: Message) -> DrivetrainError | None:
        name = f"node {rank} ({host})"
        if hello["nodes"] != self._layout.nodes_in_words:
            return DrivetrainError(
                f"{name} was started with {hello['nodes']}, node 0 with {self._layout.nodes_in_words}",
                remedy="give the same numbers on every machine",
            )
        if not 0 < rank < self._layout.num_machines or rank in self.here:
            return DrivetrainError(
                f"{name}: that --node-rank is {'taken by ' + self.host(rank) if rank in self.here else 'wrong'}",
                remedy=f"every machine has its own, from 0 to {self._layout.num_machines - 1}",
            )
        for what, ours in self._code.items():
            theirs = hello["code"].get(what, "missing")
            if theirs != ours:
                return DrivetrainError(
                    f"{name} has other code than node 0: {what} is {theirs} there and {ours} here",
                    remedy=_SAME_CODE.get(what, f"install the same {what} on every machine"),
                )
        return None


def _say(words: str) -> None:
    say(f"drivetrain: {words}")
