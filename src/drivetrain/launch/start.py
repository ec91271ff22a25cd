"""Starts a job from its flags: the checks that need no other machine, then the supervisor or its follower.

A follower runs a machine that is not the main one: it obeys the main one, reports what happens, and never works alone.
"""

import os
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from drivetrain.config import FOREIGN
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.faults import ENVIRONMENT as FAULTS
from drivetrain.core.launchers import code_version, find_machines
from drivetrain.core.log import redacted_words, say
from drivetrain.core.processes import OrphanGuard, StopWish, hearing
from drivetrain.hardware import Hardware
from drivetrain.launch.layout import (
    LaunchOptions,
    Layout,
    interface_towards,
    make_layout,
    own_addresses,
    resolve_address,
)
from drivetrain.launch.nodes import NO_TOKEN, OTHER_SECRET, Channel, read_token, token_file
from drivetrain.launch.supervisor import TICK_SECONDS, Supervisor
from drivetrain.launch.workers import Crew, RankLogs, Standbys, Start, WorkerTask

_SAY_AFTER_SECONDS = 5.0
SKIP_PREFLIGHT = "DRIVETRAIN_SKIP_PREFLIGHT"


class Follower:
    """Follows the main machine. `run` returns the exit code that the main machine gave the job."""

    def __init__(
        self, task: WorkerTask, layout: Layout, options: LaunchOptions, output_dir: Path, code: dict[str, str]
    ) -> None:
        self._task, self._layout, self._options, self._output_dir = task, layout, options, output_dir
        self._code = code
        self._crew: Crew | None = None
        self._num_strangers = 0
        self._main = f"{layout.main_address}:{layout.main_port}"

    def run(self) -> int:
        if self._layout.main_address in own_addresses():
            raise DrivetrainError(
                f"--main-address {self._layout.main_address} is this machine itself, which is --node-rank "
                f"{self._layout.node_rank}",
                remedy="give the address of the machine with --node-rank 0, as this one reaches it",
            )
        guard = OrphanGuard()
        self._standbys = Standbys(self._task, self._options, guard)
        try:
            with hearing() as wish:
                seconds, lost = self._options.join_seconds, ""
                while True:
                    channel = self._connect(seconds, wish, lost)
                    if channel is None:
                        return wish.exit_code
                    try:
                        code = self._serve(channel, guard, wish)
                    finally:
                        # Before anything else, and before the main machine could be told that this one is back.
                        self._end_crew()
                    if code is not None:
                        channel.close()
                        return code
                    lost = channel.closed_because or f"nothing was heard of it for {self._options.node_seconds:g} s"
                    channel.close()
                    say(f"drivetrain: the main machine at {self._main} is lost: {lost}. The workers here were ended")
                    seconds = self._options.rejoin_seconds
        finally:
            self._standbys.close()
            guard.close()

    def _connect(self, seconds: float, wish: StopWish, lost: str) -> Channel | None:
        """Wait until the main machine answers, and return the connection. It may start later than this one."""
        began, said, why = time.monotonic(), False, ""
        path = token_file(self._output_dir, self._layout.main_address, self._layout.main_port)
        while time.monotonic() - began < seconds:
            if wish.signal is not None:
                return None
            token = read_token(path)
            connection = None
            try:
                connection = socket.create_connection((self._layout.main_address, self._layout.main_port), timeout=2.0)
            except OSError as error:
                why = error.strerror or str(error)
            if connection is not None and token is None:
                connection.close()
                why = f"it listens, but its secret is not in {path}. {NO_TOKEN}"
            elif connection is not None and token is not None:
                channel = Channel(connection, token, is_server=False)
                channel.send(self._hello())
                return channel
            if not said and time.monotonic() - began > _SAY_AFTER_SECONDS:
                said = True
                say(f"drivetrain: waiting for the main machine at {self._main}: {why}")
            time.sleep(0.2)
        if lost:
            raise DrivetrainError(
                f"cause: node lost. The main machine at {self._main} is lost ({lost}) and did not come back within "
                f"{seconds:g} s ({why}). The workers here were ended",
                remedy="look at that machine and the network between; then start the same commands again",
            )
        raise self._unreachable(f"{why}, for {seconds:g} s")

    def _unreachable(self, why: str) -> DrivetrainError:
        return DrivetrainError(
            f"the main machine cannot be reached at {self._main}: {why}",
            remedy="check --main-address and --main-port, start the machine with --node-rank 0, and let a firewall "
            "pass that port",
        )

    def _hello(self) -> dict[str, object]:
        layout = self._layout
        return {
            "event": "hello",
            "node_rank": layout.node_rank,
            "nodes": layout.nodes_in_words,
            "num_processes": layout.num_processes,
            "host": socket.gethostname(),
            "code": self._code,
        }

    def _serve(self, channel: Channel, guard: OrphanGuard, wish: StopWish) -> int | None:
        """Obey until the job ends, which returns its code, or the main machine is lost, which returns None."""
        told = False
        while True:
            for message in channel.poll():
                if message.get("do") == "stop":  # the signal may still come here as well
                    wish.share(int(str(message["signal"])))
                code = self._obey(message, channel, guard)
                if code is not None:
                    return code
            if channel.closed_because == OTHER_SECRET:
                self._num_strangers += 1
                if self._num_strangers > 3:  # a file of the job before may be read just before it is replaced
                    raise DrivetrainError(f"the main machine at {self._main} has another secret", remedy=NO_TOKEN)
            if channel.closed_because or channel.silent_seconds > self._options.node_seconds:
                return None
            if wish.signal is not None and not told:
                told = True
                channel.send({"event": "signal", "signal": int(wish.signal)})
            if wish.at_once:
                return wish.exit_code
            if self._crew is None:
                time.sleep(0.02)
                continue
            for event in self._crew.poll(TICK_SECONDS / 2):
                if event["event"] == "run" and self._options.log_dir is None:
                    self._crew.logs.move(Path(event["folder"]) / "logs")
                channel.send(event)

    def _obey(self, message: dict[str, object], channel: Channel, guard: OrphanGuard) -> int | None:
        match message.get("do"):
            case "start":
                self._end_crew()
                names = ("attempt", "first_rank", "world_size", "store_port", "place", "num_places")
                numbers = {name: int(str(message[name])) for name in names}
                start = Start(main_address=self._layout.main_address, **numbers)
                folder = self._options.log_dir or self._output_dir / "launch" / f"node-{self._layout.node_rank}"
                logs = RankLogs(folder, start.attempt, self._options.tail_ranks)
                self._crew = Crew(self._task, self._layout, start, logs, guard, None, self._standbys)
            case "stop" if self._crew is not None:
                self._crew.stop(int(str(message["signal"])))
            case "kill":
                if self._crew is None:
                    channel.send({"event": "gone"})
                else:
                    self._crew.kill()
            case "stack" if self._crew is not None:
                rank = int(str(message["rank"]))
                for of, text in self._crew.stacks_of([rank] if rank >= 0 else range(2**31)).items():
                    channel.send({"event": "stack", "rank": of, "text": text})
            case "say":
                say(f"drivetrain: {message['words']}")
            case "refuse":
                raise DrivetrainError(str(message["message"]), remedy=str(message["remedy"]))
            case "end":
                if words := str(message["words"]):
                    say(words)
                return int(str(message["code"]))
        return None

    def _end_crew(self) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None


def start(
    words: tuple[str, ...],
    script: Path | None,
    options: LaunchOptions,
    hardware: Hardware,
    output_dir: Path,
    *,
    skip_preflight: bool,
    foreign: Collection[str] = (),
    inject: str = "",
) -> int:
    """Run `words` in every worker until they end; the exit code is the job's.

    `foreign` are the fields among the words that a file for another trainer set; `inject` are faults for a script.
    """
    if script is not None:
        check_script(script)
    options = by_environment(options)
    if options.main_address and options.num_machines > 1:
        _await_way(options.main_address, options.join_seconds)
    layout = make_layout(options, hardware)
    environment = {SKIP_PREFLIGHT: "1"} if skip_preflight else {}
    if foreign:
        environment[FOREIGN] = ",".join(sorted(foreign))
    if inject:
        environment[FAULTS] = inject
    task = WorkerTask(words, environment)
    code = {**code_version("" if script is None else str(script)), "arguments": " ".join(redacted_words(words[1:]))}
    if layout.node_rank == 0 and os.environ.get("DRIVETRAIN_LAUNCHED"):
        raise DrivetrainError(
            "this process was started by `drivetrain launch` itself", remedy="launch once, from the outside"
        )
    if layout.node_rank == 0:
        spares = f" and {layout.spares} in reserve" if layout.spares else ""
        machines = f"{layout.nodes} machine{'s' if layout.nodes > 1 else ''}{spares}, "
        machines = machines if layout.num_machines > 1 else ""
        number = f"{layout.num_processes} process{'es' if layout.num_processes > 1 else ''}"
        here = " here" if layout.num_machines > 1 else ""
        say(f"drivetrain: {machines}{', '.join([number + here, *layout.notes])}")
    kind = Supervisor if layout.node_rank == 0 else Follower
    return kind(task, layout, options, output_dir, code).run()


def by_environment(options: LaunchOptions, environ: Mapping[str, str] | None = None) -> LaunchOptions:
    """Fill in what a scheduler of machines says: how many, which one, where the first is, unless flags do."""
    machines = find_machines(environ)
    needed = ("nodes", "node_rank", "main_address")
    given = options.model_fields_set.intersection(needed)
    is_alone = "nodes" in given and options.num_machines == 1
    if machines is None or machines.nodes == 1 or is_alone or len(given) == len(needed):
        return options
    found = {
        "nodes": str(machines.nodes) if machines.nodes else None,
        "node_rank": machines.node_rank,
        "main_address": machines.main_address or None,
        "main_port": machines.main_port or None,
        "num_processes": machines.num_processes or None,
    }
    kept = {name: value for name, value in found.items() if value is not None and name not in options.model_fields_set}
    missing = [f"--{name.replace('_', '-')}" for name in needed if name not in kept and name not in given]
    if missing:
        raise DrivetrainError(
            f"{machines.scheduler} runs this as one of several machines ({machines.told_by}), but does not say all: "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            remedy="give what is missing, the same on all machines: drivetrain launch --nodes N --main-address HOST "
            "train.py; for a separate job on each, --nodes 1",
        )
    return options.model_copy(update=kept)


def _await_way(host: str, seconds: float) -> None:
    """Wait until the name of the main machine resolves and a way leads there: both may appear after this machine."""
    began, said = time.monotonic(), False
    while True:
        waited = time.monotonic() - began
        try:
            if interface_towards(resolve_address(host)) or waited > seconds:
                return  # the rest is found out by the one who connects
            why = f"no way leads to {host}"
        except DrivetrainError as error:
            if waited > seconds:
                raise DrivetrainError(f"{error.message}, for {seconds:g} s", remedy=error.remedy) from None
            why = error.message
        if not said and waited > _SAY_AFTER_SECONDS:
            said = True
            say(f"drivetrain: waiting for the main machine: {why}")
        time.sleep(min(0.5, seconds / 4))


def check_script(path: Path) -> None:
    """Check the script once, here, instead of once per rank."""
    if not path.is_file():
        raise ConfigError([Problem(str(path), "there is no such script", remedy="give the path of a Python file")])
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        shown = (error.text or "").strip() if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        message = f"{path}{line}: {what}" + (f"\n    {shown}" if shown else "")
        raise DrivetrainError(message, remedy="fix that line; nothing was started") from None
