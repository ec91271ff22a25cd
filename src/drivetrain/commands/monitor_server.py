"""The page of `drivetrain monitor --web`: runs and devices live in a browser of this machine, from run folders alone.

Not everyone who can reach a port of this machine may see the runs: it listens on the loopback address, where other
users and pages of other sites are strangers. A link has a token that opens it once and becomes a cookie that scripts
cannot read and other sites cannot send. Requests under another name are refused (a site may let its name point here),
as is everything but GET. No file is served by its path: runs are looked up among those that were found.
"""

import hmac
import json
import secrets
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from drivetrain.commands.monitor import MachineWatch, MonitorOptions
from drivetrain.config import Resolved
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import is_held
from drivetrain.report import PICTURES, RunData, summary
from drivetrain.report.page import live_figures, page, policy, sheet
from drivetrain.report.page import text as in_html

Look = Callable[[], dict[str, Any]]
MOST_AT_ONCE = 16  # requests; more wait
REQUEST_SECONDS = 10.0  # that a request may take to arrive
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_REFUSALS = {
    HTTPStatus.BAD_REQUEST: "The request cannot be read.",
    HTTPStatus.FORBIDDEN: "Open the link that `drivetrain monitor --web` printed last; each opens it once.",
    HTTPStatus.NOT_FOUND: "There is no such page. The run may have been removed.",
    HTTPStatus.METHOD_NOT_ALLOWED: "Pages are only read here.",
    HTTPStatus.MISDIRECTED_REQUEST: "This is the monitor of another address. Use the link as it was printed.",
}


class MonitorServer(ThreadingHTTPServer):
    """Serves the page on the loopback address.

    Args:
        look: Returns what is seen, as plain values.
        port: The port; 0: any that is free.
        every: The seconds between two looks of the page.
        opened: Called when a link was used, with the next one.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, look: Look, port: int = 0, every: float = 2.0, opened: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.every = every
        self._look, self._opened = look, opened
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._token, self._cookie = secrets.token_urlsafe(24), secrets.token_urlsafe(32)
        self._built: dict[str, tuple[object, str]] = {}  # by run: what its files were like, and its figures

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset(f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost"))

    @property
    def url(self) -> str:
        """The link that opens the page once."""
        return f"http://127.0.0.1:{self.server_port}/?token={self._token}"

    @property
    def cookie_name(self) -> str:
        return f"drivetrain-monitor-{self.server_port}"  # browsers send a cookie to every port of a machine

    def exchange(self, token: str) -> str | None:
        """Return the cookie for a token, which is void from then on; None if it is not the token."""
        with self._lock:
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return None
            self._token = secrets.token_urlsafe(24)
        if self._opened is not None:
            self._opened(self.url)
        return self._cookie

    def is_known(self, cookie: str) -> bool:
        return hmac.compare_digest(cookie.encode(), self._cookie.encode())

    def look(self) -> dict[str, Any]:
        with self._lock:  # devices are asked by one at a time
            return self._look()

    def folder_of(self, identity: str) -> Path | None:
        """Return the folder of a run that is on the page, by its number there."""
        return next((Path(row["folder"]) for row in self.look()["runs"] if row["id"] == identity), None)

    def figures_of(self, identity: str, folder: Path) -> str:
        """Return the figures of a run's page as JSON: those of before where its records have not changed."""
        files = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.glob("*.jsonl"))]
        state = (files, is_held(folder))  # a process that is killed writes nothing
        known = self._built.get(identity)
        if known is None or known[0] != state:
            known = (state, json.dumps(live_figures(RunData.read(folder)), allow_nan=False))
            self._built[identity] = known
        return known[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        self._room.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that goes away is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    server: MonitorServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "drivetrain", ""
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        """Answer a request for a page or its figures."""
        host = self.headers.get("Host", "")
        if host not in self.server.hosts:
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST if host else HTTPStatus.BAD_REQUEST)
        if self.headers.get("Origin", f"http://{host}") != f"http://{host}":
            return self._refuse(HTTPStatus.FORBIDDEN)
        is_navigation = self.headers.get("Sec-Fetch-Mode") == "navigate"
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not is_navigation:
            return self._refuse(HTTPStatus.FORBIDDEN)  # a page of another port, which counts as the same site
        try:
            address = urlsplit(self.path)
            tokens = parse_qs(address.query).get("token", [])
        except ValueError:
            return self._refuse(HTTPStatus.BAD_REQUEST)
        parts = [part for part in address.path.split("/") if part]
        if tokens:
            return self._open(tokens[0], f"/{'/'.join(parts)}")
        if not self.server.is_known(self._sent_cookie()):
            return self._refuse(HTTPStatus.FORBIDDEN)
        return self._answer(parts)

    def _open(self, token: str, path: str) -> None:
        """Swap the token for a cookie, and lead to the address without it."""
        cookie = self.server.exchange(token)
        if cookie is None:
            return self._refuse(HTTPStatus.FORBIDDEN)
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", path)
        self.send_header("Set-Cookie", f"{self.server.cookie_name}={cookie}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def _sent_cookie(self) -> str:
        for part in self.headers.get("Cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.server.cookie_name:
                return value
        return ""

    def _answer(self, parts: list[str]) -> None:
        if not parts:
            return self._send("text/html", sheet("Runs of this machine", _BODY, ("monitor.js",), live=True), True)
        if parts == ["data.json"]:
            seen = {**self.server.look(), "every": self.server.every}
            return self._send("application/json", json.dumps(seen, allow_nan=False))
        if parts[0] == "run" and len(parts) <= 3 and len(parts) > 1:
            folder = self.server.folder_of(parts[1])
            if folder is not None and parts[2:] in ([], ["figures.json"]):
                return self._run(parts[1], folder, is_page=len(parts) == 2)
            if len(parts) == 2:
                words = "There is no such run any more: it was removed, or other runs are newer."
                return self._send_words("No such run", words, HTTPStatus.NOT_FOUND)
        return self._refuse(HTTPStatus.NOT_FOUND)

    def _run(self, identity: str, folder: Path, *, is_page: bool) -> None:
        try:
            if not is_page:
                return self._send("application/json", self.server.figures_of(identity, folder))
            data = RunData.read(folder)
            text = page(data, summary(data), PICTURES, live=True)
        except Exception as error:  # noqa: BLE001 - damaged records are no reason to end the monitor
            words = f"The records of this run cannot be shown: {type(error).__name__}: {error}"
            if not is_page:
                return self._send("text/plain", words, status=HTTPStatus.INTERNAL_SERVER_ERROR)
            return self._send_words("This run cannot be shown", words, HTTPStatus.INTERNAL_SERVER_ERROR)
        return self._send("text/html", text, is_page=True)

    def _send_words(self, title: str, words: str, status: HTTPStatus) -> None:
        """Answer with a page that says why there is none, and leads back to the list."""
        body = f'<header><h1>{in_html(title)}</h1><p class="about">{in_html(words)}</p></header>'
        back = '<main><p><a href="/">All runs</a></p></main>'
        self._send("text/html", sheet(title, body + back, ("monitor.js",)), is_page=True, status=status)

    def _send(self, kind: str, text: str, is_page: bool = False, status: HTTPStatus = HTTPStatus.OK) -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if not is_page:  # a page brings its own policy, which names its scripts
            self.send_header("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'; sandbox")
        else:
            self.send_header("Content-Security-Policy", f"{policy(text)}; frame-ancestors 'none'; base-uri 'none'")
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: HTTPStatus) -> None:
        self._send("text/plain", f"{status.value} {status.phrase}. {_REFUSALS.get(status, '')}\n", status=status)

    def do_POST(self) -> None:
        """Refuse: nothing can be changed here."""
        self.send_response(HTTPStatus.METHOD_NOT_ALLOWED)
        self.send_header("Allow", "GET")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_POST  # noqa: N815 - as the base class calls them

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what cannot be parsed without repeating any of it."""
        self._refuse(HTTPStatus(code))

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        """Write no log: its lines would hold tokens."""


_BODY = (
    '<header><h1>Runs of this machine</h1><p class="about" id="about">Looking …</p></header>'
    '<main><div id="devices" class="cards" aria-label="Devices"></div><div id="runs" aria-label="Runs"></div></main>'
)


def run(options: MonitorOptions, resolved: Resolved) -> int:
    """Serve the page until Ctrl-C. Returns the exit code."""
    watch = MachineWatch(resolved.config.run.output_dir, options.run)

    def opened(url: str) -> None:
        print(f"opened; for another browser: {url}", flush=True)

    try:
        server = MonitorServer(watch.look, options.port, options.every, opened)
    except OSError as error:
        raise DrivetrainError(
            f"port {options.port} cannot be used: {error.strerror}", remedy="choose another --port, or leave it out"
        ) from None
    print(f"open this link in a browser on this machine: {server.url}")
    forward = f"ssh -L {server.server_port}:127.0.0.1:{server.server_port} HOST"
    print(f"it opens once. From elsewhere, first `{forward}`, then the same link. Ctrl-C ends it.", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("\ndrivetrain monitor: ended", file=sys.stderr)
    finally:
        server.server_close()
    return 0
