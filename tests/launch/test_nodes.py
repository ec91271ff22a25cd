"""The supervisors' way to talk: what was sent arrives, in order, and nothing else does."""

import os
import socket
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain import DrivetrainError
from drivetrain.launch.nodes import BEAT_SECONDS, OTHER_SECRET, TOKEN, Channel, make_token, read_token, token_file


def pair(server: bytes = b"one", client: bytes = b"one") -> tuple[Channel, Channel]:
    listening = socket.create_server(("127.0.0.1", 0))
    there = socket.create_connection(listening.getsockname())
    here, _ = listening.accept()
    listening.close()
    return Channel(here, server, is_server=True), Channel(there, client, is_server=False)


def exchange(sender: Channel, receiver: Channel, expected: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for number in range(60_000):
        sender.poll()
        found += receiver.poll()
        if len(found) >= expected or receiver.closed_because:
            break
        time.sleep(0.001 if number > 20 else 0)  # on a busy machine it takes a moment until it is there
    return found


@given(
    st.lists(st.dictionaries(st.sampled_from(["event", "a", "b"]), st.integers() | st.text(max_size=50)), max_size=5)
)
def test_messages_arrive_both_ways(messages: list[dict[str, object]]) -> None:
    messages = [message for message in messages if message.get("event") != "beat"]
    server, client = pair()
    for sender, receiver in ((client, server), (server, client)):
        for message in messages:
            sender.send(message)
        assert exchange(sender, receiver, len(messages)) == messages
    server.close()
    client.close()


def test_another_secret_gets_nothing() -> None:
    server, client = pair(b"one", b"two")
    client.send({"event": "hello"})
    assert exchange(client, server, 1) == []
    assert server.closed_because
    exchange(server, client, 1)
    assert client.closed_because == OTHER_SECRET


def test_a_changed_or_repeated_message_ends_the_talk() -> None:
    for tamper in (lambda data: data[:-3] + b"XX}", lambda data: data * 2):
        server, client = pair()
        client.poll()
        server.poll()
        client.poll()
        with client._lock:
            client.send({"event": "x", "value": 1})
            client._out[:] = tamper(bytes(client._out))
        found = exchange(client, server, 2)
        assert len(found) <= 1
        assert server.closed_because
        client.close()


def test_no_message_of_the_server_can_be_sent_back_to_it() -> None:
    server, client = pair()
    for channel in (client, server, client):
        channel.poll()
    with server._lock:
        server.send({"event": "x"})
        client._out += server._out
        server._out.clear()
    assert exchange(client, server, 1) == []
    assert server.closed_because


def test_garbage_is_no_message() -> None:
    server, client = pair()
    client._out += os.urandom(200)
    exchange(client, server, 1)
    assert server.closed_because


def test_the_secret_is_in_a_file_that_only_this_user_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    path = token_file(tmp_path, "10.0.0.1", 29400)
    assert read_token(path) is None
    token = make_token(path)
    assert read_token(path) == token
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert make_token(path) != token
    monkeypatch.setenv(TOKEN, "given")
    assert make_token(path) == read_token(path) == b"given"


def test_a_folder_that_cannot_hold_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(DrivetrainError, match="cannot be kept"):
        make_token(token_file(tmp_path / "file", "h", 1))


def test_heartbeats_do_not_need_their_owner() -> None:
    """A launcher that waits for a disk is heard of, and says for how long it has been waiting."""
    server, client = pair()
    for channel in (client, server, client):
        channel.poll()
    deadline = time.monotonic() + 120
    while server.stuck_seconds < 2.0 * BEAT_SECONDS and time.monotonic() < deadline:  # the client is not polled
        assert server.poll() == []
        time.sleep(0.01)
    assert server.stuck_seconds >= 2.0 * BEAT_SECONDS
    assert server.silent_seconds < server.stuck_seconds
    server.send({"event": "x"})
    server.poll()
    found: list[dict[str, object]] = []
    while not found and time.monotonic() < deadline:
        found = client.poll()
        time.sleep(0.01)
    assert found == [{"event": "x"}], "what came meanwhile is lost"
    server.close()
    client.close()
