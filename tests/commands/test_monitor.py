"""`drivetrain monitor`: what it shows of good, dead and damaged runs; its server under attack, and in a browser."""

import fcntl
import http.client
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from drivetrain.cli import main
from drivetrain.commands import monitor
from drivetrain.commands.monitor import MachineWatch, running_folders, screen
from drivetrain.commands.monitor_server import MonitorServer
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import RunFolder
from tests.commands.test_status import made
from tests.report.test_page import CHROMIUM, FLAGS, HOSTILE, chromium_starts, in_browser, make_folder


def seen(output_dir: Path, run: Path | None = None) -> dict[str, Any]:
    """What is shown of the runs below a folder: others of this machine go on meanwhile."""
    found = MachineWatch(output_dir, run).look()
    found["runs"] = [row for row in found["runs"] if row["folder"].startswith(str(output_dir))]
    return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]


def shown(found: dict[str, Any], width: int, height: int | None = None) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(screen(found, width, height))
    return captured.get()


def test_no_run(tmp_path: Path, capsys: Any) -> None:
    found = seen(tmp_path / "missing")
    assert found["runs"] == []
    assert [row["device"] for row in found["devices"]][-1] == "host"
    assert "no runs below" in shown(found, 80)
    with pytest.raises(DrivetrainError, match="no folder of a run"):
        MachineWatch(tmp_path, Path("nothing"))
    assert main(["monitor", "--json", "--output-dir", str(tmp_path)]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"time", "output_dir", "runs", "devices", "note"}


def test_a_run_that_goes_on_is_found_wherever_it_is(tmp_path: Path) -> None:
    """A process does not see its own locks, but the folder is found by the open file of the lock."""
    run = made(tmp_path / "elsewhere" / "mine")
    try:
        assert run.path in running_folders()
        assert [row["folder"] for row in seen(tmp_path / "elsewhere", run.path)["runs"]] == [str(run.path)]
    finally:
        run.close()
    assert run.path not in running_folders()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_screen_fits(tmp_path: Path, width: int) -> None:
    failure = '{"event": "failure", "cause": "killed", "step": 4, "time": "x"}\n'
    made(tmp_path / "dead", attempts_jsonl=failure).close()
    made(tmp_path / "stopped", events_jsonl='{"event": "stop", "step": 10, "because": "asked to"}\n').close()
    found = seen(tmp_path)
    found["runs"][0] |= {"state": "running", "seconds_left": 75.0, "idle_seconds": 90.0, "goodput": 0.5}
    text = shown(found, width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for words in ("step 10 of 100", "loss 0.1", "ETA 1 min 15 s", "goodput 50%", "no step was recorded for 1 min 30 s"):
        assert words in flat, words
    assert "16 samples/s" in flat
    few = shown(found, width, height=14)
    assert len(few.splitlines()) <= 14
    assert "1 more" in " ".join(few.split())


LONG = "a-very-long-name-" + "x" * 100 + "-its-end"
WIDE = "長い名前の実験" * 8


@pytest.mark.parametrize("width", [30, 80, 120])
def test_long_and_wide_names_fit(tmp_path: Path, width: int) -> None:
    """Of a long name the beginning and the end are shown, figures stay whole, and what is continued is indented."""
    for name in (LONG, WIDE, "short"):
        made(tmp_path / name, job={"name": "töne"}).close()
    found = seen(tmp_path)
    for row in found["runs"]:
        row |= {"state": "running", "seconds_left": 0.117, "goodput": 0.5, "metrics": {"valid_cents": 241.8}}
        row["cause"] = "its process ended without a word: killed, or the machine went down; the same command goes on"
    text = shown(found, width)
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width
    assert sum(line.startswith("a-very-long") and line.endswith("-its-end (töne)  running") for line in lines) == (
        1 if width > 30 else 0
    )
    for whole in ("step 10 of 100", "cents 241.8", "16 samples/s", "goodput 50%", "checkpoint 8", "ETA 1 s"):
        assert sum(whole in line for line in lines) == 3, whole
    blocks = text.split("\n\n")[1:]
    assert all(line.startswith("  ") for block in blocks for line in block.splitlines()[1:])
    for height in range(5, 60, 3):
        assert len(shown(found, width, height).splitlines()) <= height, height


def test_runs_keep_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that go on by their names, those of the output folder first; the others after them, the latest first."""
    monkeypatch.setattr(monitor, "running_folders", lambda: [elsewhere.path])
    elsewhere = made(tmp_path / "elsewhere" / "aaa")
    runs = [made(tmp_path / "runs" / name) for name in ("c", "a", "b")]
    for name in ("old", "older"):
        made(tmp_path / "runs" / name).close()
    os.utime(tmp_path / "runs" / "older" / "job.yaml", (1, 1))
    os.utime(tmp_path / "runs" / "older" / "steps.jsonl", (1, 1))
    watch = MachineWatch(tmp_path / "runs")
    for newest in ("a", "b", "c"):
        os.utime(tmp_path / "runs" / newest / "steps.jsonl")
        assert [Path(row["folder"]).name for row in watch.look()["runs"]] == ["a", "b", "c", "aaa", "old", "older"]
    for run in (elsewhere, *runs):
        run.close()


class Terminal:
    """`drivetrain monitor` on a terminal of its own."""

    def __init__(self, run: Path, rows: int = 24, columns: int = 80) -> None:
        self.outer, self.inner = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.inner)
        command = [sys.executable, "-m", "drivetrain", "monitor", str(run), "--every", "0.2"]
        streams = {"stdin": self.inner, "stdout": self.inner, "stderr": self.inner}
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(command, **streams, env=env | {"TERM": "xterm"}, start_new_session=True)
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.outer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, words: str) -> str:
        """Read until some words are shown, and return what came since the last call."""
        while words not in self.text:
            self.text += os.read(self.outer, 65536).decode(errors="replace")
        found, self.text = self.text, ""
        return found

    def rest(self) -> str:
        """Return all that is shown until it ends; its terminal must be as it was."""
        self.process.wait(timeout=240)
        os.set_blocking(self.outer, False)
        with suppress(OSError):
            while data := os.read(self.outer, 65536):
                self.text += data.decode(errors="replace")
        assert termios.tcgetattr(self.inner) == self.before
        os.close(self.outer)
        os.close(self.inner)
        return self.text


@pytest.mark.parametrize("how", ["q", "Ctrl-C", "SIGTERM"])
def test_the_terminal_is_left_as_it_was(tmp_path: Path, how: str) -> None:
    made(tmp_path / "mine").close()
    terminal = Terminal(tmp_path / "mine")
    terminal.until("checkpoint 8")
    os.write(terminal.outer, b"typed\n\n")
    shown = terminal.until("checkpoint 8")
    assert "typed" not in shown, "what is typed does not disturb the screen"
    if how == "q":
        os.write(terminal.outer, b"q")
    else:
        terminal.process.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)
    text = terminal.rest()
    assert "Traceback" not in text
    assert terminal.process.returncode == (143 if how == "SIGTERM" else 0)
    _, left, after = text.rpartition("\x1b[?1049l")
    assert left, "the screen of before is back"
    assert "\x1b[?25h" in text, "and its cursor"
    if how != "SIGTERM":
        assert "checkpoint 8" in after, "what was seen last stays"


def test_a_terminal_that_changes_its_size_is_filled_again(tmp_path: Path) -> None:
    made(tmp_path / LONG).close()
    terminal = Terminal(tmp_path / LONG, rows=10, columns=40)
    assert "-its-end" in terminal.until("checkpoint 8")
    terminal.resize(20, 200)
    terminal.until(LONG)
    os.write(terminal.outer, b"q")
    terminal.rest()


def test_damaged_and_closed_runs_hide_no_other(tmp_path: Path) -> None:
    made(tmp_path / "good").close()
    made(tmp_path / "bad").close()
    (tmp_path / "bad" / "steps.jsonl").write_text('{"step": {}, "seconds": "x", "loss": NaN}\n\x00\xff\n{"step": 3}\n')
    (tmp_path / "bad" / "gpu.jsonl").write_bytes(b"\x00" * 2000)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "job.yaml").write_bytes(b"{\xff: [")
    (tmp_path / "infinite").mkdir()
    (tmp_path / "infinite" / "job.yaml").write_text("name: infinite\n")
    (tmp_path / "infinite" / "steps.jsonl").write_text('{"step": 1, "loss": Infinity, "seconds": 1, "samples": 2}\n')
    found = {row["name"]: row for row in seen(tmp_path)["runs"]}
    assert set(found) == {"mine", "bad", "torn", "infinite"}
    assert found["bad"]["state"] == "unreadable"
    assert "damaged" in found["bad"]["cause"]
    assert found["infinite"]["loss"] is None
    shown(seen(tmp_path), 80)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_run_of_another_user_is_named(tmp_path: Path) -> None:
    run = made(tmp_path / "theirs")
    run.close()
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to("/tmp") or path.is_relative_to("/dev/shm"):
            path.chmod(path.stat().st_mode | 0o055)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            from drivetrain.commands.monitor import runs_in

            os.write(writer, repr([(each.name, each.state, each.cause) for each in runs_in(tmp_path)]).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 4096).decode() == "[('theirs', 'unreadable', 'it is closed to others by root')]"


def test_what_a_run_is_called_cannot_move_the_cursor(tmp_path: Path) -> None:
    (tmp_path / "two\nlines").mkdir()
    (tmp_path / "two\nlines" / "job.yaml").write_text(json.dumps({"name": "\x1b[2J\x1b]0;hacked\x07[red]markup[/red]"}))
    text = shown(seen(tmp_path), 80 + len(str(tmp_path)))  # so that the folder is not broken
    assert "\x1b" not in text
    assert "[red]markup[/red]" in text
    assert not [line for line in text.splitlines() if line.startswith("lines")]
    assert text.count("two\\x0aline") == 2  # its title and its folder


# ---- the server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MonitorServer]:
    make_folder(tmp_path / "runs" / "first")
    (tmp_path / "secret.txt").write_text("secret")
    watch = MachineWatch(tmp_path / "runs")
    found = MonitorServer(watch.look, every=0.2)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def ask(server: MonitorServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            if value:
                connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def entered(server: MonitorServer) -> str:
    status, headers, _ = ask(server, server.url.partition(str(server.server_port))[2])
    assert status == 303
    assert headers["location"] == "/"
    assert {"HttpOnly", "SameSite=Strict"} <= set(headers["set-cookie"].split("; "))
    return headers["set-cookie"].partition(";")[0]


def test_a_link_opens_once(server: MonitorServer) -> None:
    link = server.url.partition(str(server.server_port))[2]
    cookie = entered(server)
    assert ask(server, link)[0] == 403, "the token is used up"
    status, headers, text = ask(server, "/", Cookie=cookie)
    assert status == 200
    assert "Runs of this machine" in text
    assert headers["cache-control"] == "no-store"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    rows = json.loads(ask(server, "/data.json", Cookie=cookie)[2])["runs"]
    own = next(row for row in rows if row["folder"].endswith("runs/first"))
    status, _, page = ask(server, f"/run/{own['id']}", Cookie=cookie)
    assert status == 200
    assert "Loss" in page
    figures = json.loads(ask(server, f"/run/{own['id']}/figures.json", Cookie=cookie)[2])
    assert figures["charts"][0]["title"] == "Loss"
    assert figures["about"].startswith("finished after 300 steps")


def test_strangers_get_nothing(server: MonitorServer) -> None:
    for path in ("/", "/data.json", "/run/x", "/?token=", "/?token=wrong", "/?token=%00", "/?token=a&token=b"):
        status, headers, text = ask(server, path)
        assert status == 403, path
        assert headers["cache-control"] == "no-store"
        assert "first" not in text
    name, _, value = entered(server).partition("=")
    for cookie in (f"{name}=", f"{name}={value[:-1]}", f"other={value}", f"{name}={value}x", f"{name}=é"):
        assert ask(server, "/data.json", Cookie=cookie)[0] == 403, cookie


def test_another_name_for_this_machine_is_refused(server: MonitorServer) -> None:
    """A site can let its name point to 127.0.0.1: the browser then takes the monitor for a part of that site."""
    cookie, port = entered(server), server.server_port
    link = server.url.partition(str(port))[2]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port}.evil.example",
        f"[::1]:{port}",
    ):
        assert ask(server, "/data.json", Host=host, Cookie=cookie)[0] == 421, host
        assert ask(server, link, Host=host)[0] == 421, "nor does it use up the token"
    assert ask(server, "/data.json", Host="", Cookie=cookie)[0] == 400
    assert ask(server, "/data.json", Host=f"localhost:{port}", Cookie=cookie)[0] == 200
    for site in ("cross-site", "same-site"):
        found = ask(server, "/data.json", Cookie=cookie, Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")
        assert found[0] == 403, "a page of another port is another site"
        assert ask(server, "/data.json", Cookie=cookie, Sec_Fetch_Site=site)[0] == 403, "without saying what it is for"


def test_a_request_of_another_origin_is_refused(server: MonitorServer) -> None:
    cookie, port = entered(server), server.server_port
    link = server.url.partition(str(port))[2]
    foreign = ("https://evil.example", "null", f"http://127.0.0.1:{port + 1}", f"https://127.0.0.1:{port}")
    for origin in (*foreign, f"http://localhost:{port}"):
        for more in ({}, {"Sec_Fetch_Mode": "navigate"}):
            assert ask(server, "/data.json", Cookie=cookie, Origin=origin, **more)[0] == 403, origin
        assert ask(server, link, Origin=origin)[0] == 403, "nor does it use up the token"
    assert ask(server, "/data.json", Cookie=cookie, Origin=f"http://127.0.0.1:{port}")[0] == 200
    local = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    assert ask(server, "/data.json", Cookie=cookie, **local)[0] == 200
    assert ask(server, link)[0] == 303


def test_what_cannot_be_parsed_is_refused_without_an_echo(server: MonitorServer) -> None:
    host = f"Host: 127.0.0.1:{server.server_port}".encode()
    for request in (
        b"GET http://[ HTTP/1.0\r\n" + host,
        b"\0\xff<script>",
        b"GET / HTTP/9.9",
        b"BREW / HTTP/1.0\r\n" + host,
    ):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
            connection.sendall(request + b"\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert re.search(rb"(400|501|505) ", answer), request
        assert b"script" not in answer.partition(b"\r\n\r\n")[2]
    assert ask(server, "/")[0] == 403, "it goes on"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT"])
def test_only_get(server: MonitorServer, method: str) -> None:
    status, headers, text = ask(server, "/data.json", method, Cookie=entered(server))
    assert (status, headers.get("allow"), text) == (405, "GET", "")


def test_no_path_leads_to_a_file(server: MonitorServer) -> None:
    cookie = entered(server)
    rows = json.loads(ask(server, "/data.json", Cookie=cookie)[2])["runs"]
    own = next(row["id"] for row in rows if row["folder"].endswith("runs/first"))
    for path in (
        "/../secret.txt", "/run/..", f"/run/{own}/../../secret.txt", f"/run/{own}/%2e%2e/%2e%2e/secret.txt",
        f"/run/{own}/steps.jsonl", f"/run/{own}/figures.json/..", "/run/first", "//secret.txt", "/run//etc/passwd",
        f"/run/{own}%2f..%2f..%2fsecret.txt", "/run/" + "../" * 20 + "etc/passwd", "/etc/passwd", f"/run/{own}\\..",
    ):  # fmt: skip
        status, _, text = ask(server, path, Cookie=cookie)
        assert status == 404, path
        assert not path.startswith("/run/first") or '<a href="/">All runs</a>' in text, "no page is a dead end"
        assert "secret" not in text
        assert "root:" not in text
    away = server.url.partition(str(server.server_port))[2].replace("/?", "//evil.example/?")
    assert ask(server, away)[1]["location"] == "/evil.example", "a link does not lead away"


def test_names_full_of_html_are_text(tmp_path: Path, server: MonitorServer) -> None:
    folder = tmp_path / "runs" / f"a{HOSTILE.replace('/', '')}"
    make_folder(folder, name=HOSTILE)
    cookie = entered(server)
    status, headers, text = ask(server, "/data.json", Cookie=cookie)
    assert status == 200
    assert headers["content-type"].startswith("application/json")
    row = next(row for row in json.loads(text)["runs"] if row["name"] == HOSTILE)
    page = ask(server, f"/run/{row['id']}", Cookie=cookie)[2]
    assert "<img src=x" not in page
    assert page.count("<script>") == 2
    if chromium_starts():
        dom = opened(tmp_path, server.url)
        assert "<img src=" not in dom
        assert "<title>Runs of this machine</title>" in dom
        assert "&lt;img src=x onerror" in dom


def opened(folder: Path, url: str, *flags: str) -> str:
    """Return the page in a headless browser after some seconds of its own time."""
    assert CHROMIUM is not None
    options = [*FLAGS, "--virtual-time-budget=6000", "--enable-logging=stderr"]
    options += [f"--user-data-dir={folder / 'profile'}", *flags]
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", url], capture_output=True, text=True, timeout=240, check=True
    )
    problems = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert problems == []
    return done.stdout


@in_browser
def test_live_in_a_browser(tmp_path: Path, server: MonitorServer) -> None:
    """Steps are recorded while the pages are open: they show the later ones, on the overview and on the run's page."""
    run = RunFolder.claim(tmp_path / "runs", "going-on", {"name": "going-on", "num_steps": 100_000})
    log, ends = run.log("steps.jsonl"), threading.Event()

    def train() -> None:
        for step in range(1, 100_000):
            row = {"step": step, "epoch": 0, "samples": 8, "loss": 1 / step, "num_items": 8, "seconds": 0.01}
            log.append({**row, "lr": 0.1, "skipped": False})
            log.flush()
            if ends.wait(0.01):
                return

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        while not (run.path / "steps.jsonl").stat().st_size:
            time.sleep(0.01)
        dom = opened(tmp_path, server.url)
        assert int(re.findall(r'data-renewed="(\d+)"', dom)[0]) >= 2
        assert "going-on" in dom
        assert 'data-lost=""' in dom
        name = next(row["id"] for row in server.look()["runs"] if row["folder"].endswith("going-on"))
        dom = opened(tmp_path, server.url.replace("/?", f"/run/{name}?"))
        assert int(re.findall(r'data-renewed="(\d+)"', dom)[0]) >= 1, "the curves were drawn again"
        assert re.search(r'id="about">running: step [\d,]+ of 100,000, about .* left<', dom)
        assert "<title>going-on</title>" in dom
        assert 'data-lost=""' in dom
    finally:
        ends.set()
        thread.join()
        log.close()
        run.close()


def test_large_rates_are_written_out() -> None:
    assert [monitor._rate(value) for value in (1_268_400.0, 999.96, 0.01234)] == ["1,268,400", "1000", "0.01234"]
