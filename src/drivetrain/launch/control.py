"""Connects the supervisors of several machines: JSON over TCP, every message authenticated with a shared secret.

Nothing is unpickled or run. Each side draws a nonce, so no message of another connection can be played again, and
numbers its messages, so none can be dropped or repeated. A clock is read only to measure time that passes here.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError

TOKEN = "DRIVETRAIN_TOKEN"
OTHER_SECRET = "its secret is another one"
BEAT_SECONDS = 1.0
_HEAD = struct.Struct("!I32s")
_LONGEST = 1 << 20
_NO_MAC = bytes(32)
Message = dict[str, Any]


class Channel:
    """One connection, after both sides drew their nonces. Never blocks; `poll` sends, receives and sends heartbeats."""

    def __init__(self, connection: socket.socket, token: bytes, *, is_server: bool) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._token, self._is_server = connection, token, is_server
        self._own_nonce = secrets.token_bytes(16)
        self._key: bytes | None = None
        self._in, self._out = bytearray(), bytearray(self._own_nonce)
        self._num_sent = self._num_received = 0
        self._waiting: list[Message] = []  # until the other nonce is there
        self.heard_at = self._beaten_at = time.monotonic()
        self.closed_because = ""

    def send(self, message: Message) -> None:
        if self._key is None:
            self._waiting.append(message)
            return
        body = json.dumps({"number": self._num_sent, **message}).encode()
        self._num_sent += 1
        self._out += _HEAD.pack(len(body), self._mac(body, from_server=self._is_server)) + body

    def poll(self) -> list[Message]:
        """Return the messages received. After the connection is lost, `closed_because` is set and there are none."""
        if self.closed_because:
            return []
        now = time.monotonic()
        if self._key is not None and now - self._beaten_at >= BEAT_SECONDS:
            self._beaten_at = now
            self.send({"event": "beat"})
        try:
            self._flush()
            self._receive()
        except OSError as error:
            self._lose(f"the connection broke ({error.strerror or error})")
        messages = self._parse()
        return [message for message in messages if message.get("event") != "beat"]

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.heard_at

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Send the buffered messages, and close. A receiver that is gone does not block this."""
        if not self.closed_because:
            with contextlib.suppress(OSError):
                self._socket.setblocking(True)
                self._socket.settimeout(1.0)
                self._socket.sendall(self._out)
        self._socket.close()
        self.closed_because = self.closed_because or "closed here"

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
