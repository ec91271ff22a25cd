"""Starts the workers, watches them, restarts them while that makes sense, and reports why the job ended."""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.goodput import ATTEMPTS, stamp, start_marks
from drivetrain.core.log import say
from drivetrain.core.processes import OrphanGuard, StopWish, hearing
from drivetrain.core.run_folder import JsonLines, is_finished, is_script_killed
from drivetrain.launch.clusters import submitted_at
from drivetrain.launch.layout import LaunchOptions, Layout, listen_on
from drivetrain.launch.nodes import Nodes
from drivetrain.launch.root_cause import (
    LEFT_EARLY,
    NODE_LOST,
    REFUSED,
    SIGNAL,
    TIMEOUT,
    Failure,
    HangWatch,
    as_json,
    blamed_ranks,
    first_cause,
    from_wire,
    hang_in_words,
    hung,
    in_words,
    left_early,
    never_came,
    node_lost,
    odd_ranks,
    waited_for,
    write_stacks,
)
from drivetrain.launch.workers import STACK_SECONDS, Crew, Event, RankLogs, Standbys, Start, WorkerTask, without

# ----------------------------------------------------------------------------------------------------------------------
# The supervisor's rows in a run's account of its time: it outlives the workers, and knows when each attempt ended.


class AttemptLog:
    """Appends rows to `attempts.jsonl` in the run folder; they wait until that is known."""

    def __init__(self, submitted: float | None) -> None:
        self._folder: Path | None = None
        self._waiting: list[dict[str, Any]] = []
        self._is_told = False  # that they cannot be written
        seconds = start_marks.take(0.0)["seconds"]  # of this process, before it came here
        self.note("launch", seconds=seconds, **({} if submitted is None else {"submitted": submitted}))

    def note(self, event: str, **facts: Any) -> None:
        self._waiting.append({"event": event, **facts, **stamp()})
        self._write()

    def into(self, folder: Path) -> None:
        self._folder = folder
        self._write()

    def _write(self) -> None:
        if self._folder is None or not self._waiting:
            return
        path = self._folder / ATTEMPTS
        try:
            log = JsonLines(path)
            for row in self._waiting:
                log.append(row)
            log.close()
            self._waiting = []
        except OSError as error:  # a full disk must not end the watch; the rows wait
            if not self._is_told:
                without(path, error)
            self._is_told = True


# ----------------------------------------------------------------------------------------------------------------------
# Starts the workers, watches them, restarts them while that makes sense, and reports why the job ended.
#
# The world is fixed: every attempt has all ranks of all machines, or does not begin. Every attempt has its own store.
# Time is measured with the monotonic clock only. On several machines this is the main one; `follower` is the others.

TICK_SECONDS = 0.1
# After a failure: for ranks that noticed nothing, for ranks that are on their way out, and where every rank only
# suffered, for the one that did it.
UNAWARE_SECONDS, LEAVING_SECONDS, CULPRIT_SECONDS = 0.5, 3.0, 10.0
SAVING_SECONDS = 30.0  # after a failure: for a rank that is finishing a checkpoint with the others
GONE_SECONDS = 10.0  # killed processes are gone sooner; a machine that cannot say so is lost
DIFFERENT_AT_MOST = 12  # restarts beyond --max-restarts that do something differently: 4096 samples halved to one
OUTSIDE_AT_MOST = 3  # failures from outside in a row that may come without progress


@dataclass
class _Reached:
    """How far a run came, in all attempts."""

    step: int = 0
    checkpoint: int = 0

    def at_least(self, step: int, checkpoint: int) -> None:
        self.step, self.checkpoint = max(self.step, step), max(self.checkpoint, checkpoint)


@dataclass
class _Attempt:
    """The state of one attempt, as far as known."""

    number: int
    world_size: int
    failures: list[Failure] = field(default_factory=list)
    left: dict[int, Failure] = field(default_factory=dict)  # ranks that ended well, and when
    interrupted: set[int] = field(default_factory=set)
    exited: set[int] = field(default_factory=set)  # ranks that reported a failure or interruption, and are gone
    ended: dict[int, bool] = field(default_factory=dict)  # ranks whose run ended, and whether it is finished
    nodes_gone: set[int] = field(default_factory=set)  # whose workers have all ended
    stacks: dict[int, str] = field(default_factory=dict)
    runs: dict[int, Path] = field(default_factory=dict)  # of each rank: several jobs of one script
    run_folder: Path | None = None  # of the run that began last
    step: int = 0  # of that run
    stepped_at: float = 0.0  # when the last report of a step came
    checkpoint: int = 0
    hangs: HangWatch = field(default_factory=HangWatch)
    hang: Failure | None = None  # that was reported, and may still resolve itself

    @property
    def ranks_out(self) -> set[int]:
        told = {failure.rank for failure in self.failures if failure.rank is not None}
        return {*self.left, *self.interrupted, *told}

    def begin(self, rank: int, folder: Path) -> None:
        """Note that a rank has begun a run; the first one that leaves the run before is ahead of the others."""
        if folder != self.run_folder and self.runs.get(rank) == self.run_folder:
            self.run_folder, self.step, self.checkpoint = folder, 0, 0
        self.runs[rank] = folder

    def come_to(self, rank: int, step: int) -> None:
        """Note the step of a rank, unless it is still in the run before."""
        if step > self.step and self.runs.get(rank, self.run_folder) == self.run_folder:
            self.step, self.stepped_at = step, time.monotonic()


@dataclass(frozen=True)
class _Outcome:
    cause: Failure | None = None
    ended_well: bool = False  # all ranks did, by themselves
    others: tuple[Failure, ...] = ()


class Supervisor:
    """Supervises a job. `run` returns the exit code."""

    def __init__(
        self, task: WorkerTask, layout: Layout, options: LaunchOptions, output_dir: Path, code: dict[str, str]
    ) -> None:
        self._task, self._layout, self._options, self._code = task, layout, options, code
        self._output_dir = output_dir
        self._run_folder: Path | None = None
        self._first_logs = output_dir / "launch" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
        self._reached = defaultdict[Path | None, _Reached](_Reached)  # by the folder of the run
        self._outside_in_a_row = 0
        self._before: Failure | None = None
        self._log = AttemptLog(submitted_at(output_dir))

    def run(self) -> int:
        self._nodes = Nodes(self._layout, self._output_dir, self._code, self._options.node_seconds)
        self._guard = OrphanGuard()
        self._standbys = Standbys(self._task, self._options, self._guard)
        try:
            with hearing() as wish:
                self._wish = wish
                code, words = self._run()
            self._nodes.tell("end", reserve=True, code=code, words=words)
            self._log.note("end", code=code)
            if words:
                say(words)
            return code
        except DrivetrainError as error:
            self._nodes.tell("refuse", reserve=True, message=error.message, remedy=error.remedy)
            raise
        finally:
            self._nodes.close()
            self._standbys.close()
            self._guard.close()

    def _run(self) -> tuple[int, str]:
        """Return the exit code, and the final message for the screen of every machine."""
        missing = self._nodes.gather(self._options.join_seconds, self._wish.has_come)
        if self._wish.has_come():
            return self._wish.exit_code, f"drivetrain: {self._wish.name} before anything was started"
        if missing and not self._nodes.fill():
            raise _not_here(self._layout, self._nodes.missing, self._options.join_seconds)
        number = 0
        while True:
            self._nodes.seat_all()
            watch = HangWatch(self._options.hang_seconds)
            attempt = _Attempt(number, self._layout.num_processes + sum(self._sizes), hangs=watch)
            self._log.note("attempt", number=number, world_size=attempt.world_size)
            outcome = self._attempt(attempt)
            cause = outcome.cause
            finished = outcome.ended_well and all(attempt.ended.values()) and not attempt.interrupted
            if self._wish.has_come() and not finished:
                return self._wish.exit_code, _stopped_in_words(self._wish, attempt, cause, self._best.checkpoint)
            if cause is None:
                return (0, "") if finished else (130, "")
            self._write_crash(cause, outcome.others, attempt, last=False)
            step = max(attempt.step, cause.step)
            self._log.note(
                "failure", cause=cause.kind, rank=cause.rank, step=step, failed_at=cause.at,
                progress_at=attempt.stepped_at, noticed_after=cause.noticed_after,
            )  # fmt: skip
            why_not = self._why_not_again(cause, attempt) or self._why_not_all_here(cause)
            why_not = self._why_not_whole_again(cause, attempt) if why_not == "-" else why_not
            if self._wish.has_come():
                return self._wish.exit_code, _stopped_in_words(self._wish, attempt, cause, self._best.checkpoint)
            if why_not:
                path = self._write_crash(cause, outcome.others, attempt, last=True)
                reason = "" if why_not == "-" else why_not
                return _exit_code(cause), in_words(cause, number, outcome.others, path, reason)
            number += 1
            self._layout = _with_whole_gpus(self._layout, cause)
            say(self._restart_in_words(cause, number))

    def _why_not_all_here(self, cause: Failure) -> str:
        """Wait for lost machines, which may come back. Returns why there is no start, where one does not."""
        seconds = self._options.rejoin_seconds
        self._nodes.replace_lost()
        if self._nodes.missing:
            say(
                f"drivetrain: {cause.where} failed first ({cause.kind}: {cause.headline.splitlines()[0]}).\n"
                f"  All workers were ended; waiting up to {seconds:g} s for node "
                f"{', '.join(map(str, self._nodes.missing))} to come back"
            )
        missing = self._nodes.gather(seconds, self._wish.has_come, replaces=True)
        if not missing or self._wish.has_come() or self._nodes.fill():
            return ""
        missing = self._nodes.missing
        return f"node {', '.join(map(str, missing))} did not come back within {seconds:g} s"

    def _why_not_whole_again(self, cause: Failure, attempt: _Attempt) -> str:
        """Wait for all machines where the job refuses to go on with fewer. Return `-` if that is not the matter."""
        if cause.kind != REFUSED or len(self._nodes.seats) == self._layout.nodes - 1:
            return "-"
        self._nodes.want_all()
        words = f"the job does not go on with fewer machines: {cause.headline.splitlines()[0]}"
        seconds = self._options.join_seconds
        say(f"drivetrain: {words}.\n  Waiting up to {seconds:g} s for the others")
        missing = self._nodes.gather(seconds, self._wish.has_come, replaces=True)
        return f"{words}; node {', '.join(map(str, missing))} did not come back" if missing else ""

    def _restart_in_words(self, cause: Failure, number: int) -> str:
        after = f" after step {cause.step}" if cause.step else ""
        place = _place_in_words(self._run_folder, self._reached)
        differently = f" with {cause.goes_on_with}" if cause.goes_on_with else ""
        return (
            f"drivetrain: {cause.where} failed first{after} ({cause.kind}: {cause.headline.splitlines()[0]}).\n"
            f"  Starting again from {place}{differently}, restart {number} of {self._options.max_restarts}"
        )

    @property
    def _best(self) -> _Reached:
        return self._reached[self._run_folder]

    @property
    def _sizes(self) -> list[int]:
        return [node.num_processes for node in self._nodes.seated]

    def _attempt(self, attempt: _Attempt) -> _Outcome:
        layout = self._layout
        # Bound here and handed to rank 0: no other process can take the port in between, and nothing listens elsewhere.
        store = listen_on(layout.main_address, 0, "the ranks cannot meet")
        try:
            port, num_places = store.getsockname()[1], 1 + len(self._nodes.seats)
            start = Start(attempt.number, 0, attempt.world_size, layout.main_address, port, num_places=num_places)
            first = layout.num_processes
            for place, node in enumerate(self._nodes.seated, start=1):
                facts = {"world_size": start.world_size, "store_port": port, "place": place, "num_places": num_places}
                node.channel.send({"do": "start", "attempt": attempt.number, "first_rank": first, **facts})
                first += node.num_processes
            logs = RankLogs(self._log_folder(), attempt.number, self._options.tail_ranks)
            crew = Crew(self._task, layout, start, logs, self._guard, store, self._standbys)
        finally:
            store.close()  # rank 0 has its own; when it dies, the others notice
        try:
            return self._watch(attempt, crew)
        finally:
            crew.close()

    def _watch(self, attempt: _Attempt, crew: Crew) -> _Outcome:
        failed_at: float | None = None
        stopping_at: float | None = None
        while True:
            self._listen(attempt, crew, TICK_SECONDS)
            now = time.monotonic()
            if self._wish.has_come() and stopping_at is None:
                stopping_at = now
                number = self._wish.exit_code - 128
                self._nodes.tell("stop", signal=number)
                crew.stop(number)
            if stopping_at is not None and (self._wish.at_once or now - stopping_at > self._options.stop_seconds):
                self._end_all(attempt, crew)
                return _Outcome()
            if not attempt.failures and stopping_at is None:
                self._look_for_hang(attempt, crew)
            if attempt.failures or (stopping_at is not None and attempt.interrupted):
                failed_at = failed_at or now
                if self._is_settled(attempt, crew, now - failed_at):
                    cause = self._find_cause(attempt, crew) if attempt.failures else None
                    self._end_all(attempt, crew)
                    return _Outcome(cause, others=tuple(attempt.failures))
            elif len(attempt.nodes_gone) == self._num_nodes:
                return _Outcome(ended_well=True)

    def _listen(self, attempt: _Attempt, crew: Crew, seconds: float) -> None:
        for event in crew.poll(seconds):
            self._take(attempt, crew, 0, event)
        for node, message in self._nodes.poll():
            if node in self._nodes.seats or message.get("event") == "signal":
                self._take(attempt, crew, node, message)
        for lost, why in self._nodes.lost():
            if lost.rank not in self._nodes.seats:
                say(f"drivetrain: node {lost.rank} ({lost.host}), which was in reserve, is lost: {why}")
                continue
            silent = lost.channel.silent_seconds
            attempt.failures.append(node_lost(lost.rank, lost.host, why, time.monotonic(), silent))
            attempt.nodes_gone.add(lost.rank)

    def _take(self, attempt: _Attempt, crew: Crew, node: int, event: Event) -> None:
        kind, rank = event.get("event"), int(event.get("rank", -1))
        place: dict[str, Any] = {"rank": rank, "node": node, "host": self._host(node), "pid": None}
        place["at"] = time.monotonic()
        if kind == "step":
            attempt.come_to(rank, event["step"])
        elif kind == "resumed":
            self._best.at_least(event["step"], event["step"])
        elif kind == "checkpoint":
            attempt.checkpoint = max(attempt.checkpoint, event["step"])
        elif kind == "run":
            if self._run_folder is None:
                with suppress(OSError):
                    Path(event["folder"], "crash.json").unlink(missing_ok=True)  # of an earlier start
            self._run_folder = Path(event["folder"])
            attempt.begin(rank, self._run_folder)
            self._log.into(self._run_folder)
            if self._options.log_dir is None:
                crew.logs.move(self._run_folder / "logs")
        elif kind == "end":
            attempt.ended[rank] = bool(event["finished"])
        elif kind == "failure":
            failure = from_wire(event["failure"])
            attempt.failures.append(replace(failure, at=time.monotonic() - event["age"]))
        elif kind == "left":
            attempt.left[rank] = left_early(**place)
            if self._run_folder is not None and attempt.step and rank not in attempt.ended:
                attempt.failures.append(attempt.left[rank])  # others of its run are still at it
        elif kind == "interrupted":
            attempt.interrupted.add(rank)
            if not self._wish.has_come():
                headline = "ended by SIGINT, which came from outside"
                attempt.failures.append(Failure(SIGNAL, headline=headline, signal="SIGINT", **place))
        elif kind == "ended":
            attempt.exited.add(rank)
        elif kind == "stack":
            attempt.stacks[rank] = event["text"]
        elif kind == "progress":
            attempt.hangs.observe(rank, event["step"], event["phase"], event["frozen"], time.monotonic())
            attempt.come_to(rank, event["step"])
        elif kind == "gone":
            attempt.nodes_gone.add(node)
        elif kind == "signal":
            self._wish.share(int(event["signal"]))

    def _is_settled(self, attempt: _Attempt, crew: Crew, seconds: float) -> bool:
        """Return whether all reports that belong to a failure have arrived."""
        if len(attempt.nodes_gone) == self._num_nodes:
            return True
        if not attempt.failures or any(failure.kind == NODE_LOST for failure in attempt.failures):
            return seconds > LEAVING_SECONDS
        # A save cannot end without a rank that does not come; otherwise the ranks complete it first.
        saving = {one.rank for one in attempt.failures if one.saving and one.kind != TIMEOUT} - attempt.exited
        if saving and seconds <= SAVING_SECONDS:
            return False
        everyone_knows = len(attempt.ranks_out) == attempt.world_size
        if all(failure.follows for failure in attempt.failures):
            waited = any(failure.kind == TIMEOUT for failure in attempt.failures)
            return everyone_knows or seconds > (LEAVING_SECONDS if waited else CULPRIT_SECONDS)
        return seconds > (LEAVING_SECONDS if everyone_knows else UNAWARE_SECONDS)

    def _find_cause(self, attempt: _Attempt, crew: Crew) -> Failure:
        cause = first_cause(attempt.failures, list(attempt.left.values()))
        silent = sorted(set(range(attempt.world_size)) - attempt.ranks_out)
        silent = [rank for rank in silent if rank in waited_for(attempt.failures)] or silent
        blamed = [rank for one in attempt.failures if one.follows for rank in blamed_ranks(one.exception)]
        candidates = [rank for rank in blamed if rank in silent] or (silent if cause.kind == TIMEOUT else [])
        if cause.follows and candidates:
            rank = candidates[0]
            node = self._node_of(rank)
            step = attempt.hangs.ranks[rank].step if rank in attempt.hangs.ranks else cause.step
            place = {"rank": rank, "node": node, "host": self._host(node), "pid": crew.pid_of(rank), "step": step}
            place["noticed_after"] = cause.at - attempt.stepped_at if attempt.stepped_at else None
            return never_came(cause, self._stacks(attempt, crew, [rank])[rank], at=cause.at, **place)
        if cause.rank is not None and cause.node == 0:
            cause = replace(cause, log=str(crew.logs.path_now(cause.rank)))  # it may have moved since
        return cause

    def _stacks(self, attempt: _Attempt, crew: Crew, ranks: Collection[int]) -> dict[int, str]:
        """Return the stacks of ranks here and on other machines, as far as they answer in time."""
        attempt.stacks.clear()
        elsewhere = {rank for rank in ranks if self._node_of(rank) != 0}
        if elsewhere:
            self._nodes.tell("stack", rank=-1 if len(elsewhere) > 1 else next(iter(elsewhere)))
        found = crew.stacks_of(ranks)
        deadline = time.monotonic() + STACK_SECONDS + 2.0
        while not elsewhere <= attempt.stacks.keys() and time.monotonic() < deadline:
            self._listen(attempt, crew, TICK_SECONDS)
        return {rank: {**attempt.stacks, **found}.get(rank, "") for rank in ranks}

    def _look_for_hang(self, attempt: _Attempt, crew: Crew) -> None:
        """Report a job in which no step ends, with the stacks of all ranks, and have it ended after some more time."""
        stall = attempt.hangs.stall(time.monotonic())
        if stall is None or (attempt.hang is not None and not stall.is_over):
            attempt.hang = None if stall is None else attempt.hang
            return
        if attempt.hang is None:
            stacks = self._stacks(attempt, crew, sorted(attempt.hangs.ranks))
            odd = odd_ranks(stacks, stall.frozen)
            rank = odd[0] if odd else 0
            node = self._node_of(rank)
            place = {"rank": rank, "node": node, "host": self._host(node), "pid": crew.pid_of(rank)}
            words = hang_in_words(stall, odd, attempt.hangs)
            place |= {"step": attempt.hangs.ranks[rank].step, "at": 0.0, "noticed_after": stall.seconds}
            attempt.hang = hung(words, stacks.get(rank, ""), **place)
            path = write_stacks(crew.logs.folder, stall, stacks)
            say(f"drivetrain: {attempt.hang.where}: {words}.\n  The stacks of all ranks are in {path}")
            self._log.note("hang", rank=rank, step=stall.step, seconds=stall.seconds)
        if stall.is_over:
            attempt.failures.append(replace(attempt.hang, at=time.monotonic()))

    def _node_of(self, rank: int) -> int:
        first = self._layout.num_processes
        if rank < first:
            return 0
        for node in self._nodes.seated:
            first += node.num_processes
            if rank < first:
                return node.rank
        return self._nodes.seats[-1] if self._nodes.seats else 0

    @property
    def _num_nodes(self) -> int:
        """The machines that take part in this attempt."""
        return 1 + len(self._nodes.seats)

    def _end_all(self, attempt: _Attempt, crew: Crew) -> None:
        """End all workers of this attempt everywhere; a machine that is cut off will have ended its own."""
        self._nodes.tell("kill")
        crew.kill()
        deadline = time.monotonic() + GONE_SECONDS
        while len(attempt.nodes_gone) < self._num_nodes and time.monotonic() < deadline:
            self._listen(attempt, crew, TICK_SECONDS)

    def _why_not_again(self, cause: Failure, attempt: _Attempt) -> str:
        """Return why the job is not restarted; `-` where the reason is not worth reporting; empty if it is."""
        limit = self._options.max_restarts
        made_progress = attempt.checkpoint > self._best.checkpoint or attempt.step > self._best.step
        self._best.at_least(attempt.step, attempt.checkpoint)
        before, self._before = self._before, cause
        from_outside = cause.kind == NODE_LOST or (cause.kind == SIGNAL and cause.signal in ("SIGKILL", "SIGTERM"))
        self._outside_in_a_row = 0 if made_progress else self._outside_in_a_row + from_outside
        if not cause.is_ours_to_retry or limit == 0:
            return "-"
        if (folder := self._run_folder) is not None and is_finished(folder) and not is_script_killed(folder):
            return "its run is finished; another start would begin a new one"
        if cause.goes_on_with and attempt.number < limit + DIFFERENT_AT_MOST:
            return ""
        if attempt.number >= limit:
            return f"{limit} restart{'s' if limit > 1 else ''} of --max-restarts are used up"
        if before is not None and cause.resembles(before):
            return "the same error at the same step came twice"
        if made_progress or (from_outside and self._outside_in_a_row <= OUTSIDE_AT_MOST):
            return ""
        return "no step was made since the last start" if attempt.number or self._run_folder else "-"

    def _log_folder(self) -> Path:
        if self._options.log_dir is not None:
            return self._options.log_dir
        folder = _unless_gone(self._run_folder)
        return self._first_logs if folder is None else folder / "logs"

    def _write_crash(self, cause: Failure, others: tuple[Failure, ...], attempt: _Attempt, *, last: bool) -> str:
        """Write crash.json in the log folder of the attempt, or in the run's folder for the one that ended the job."""
        logs = self._log_folder()
        folder = (_unless_gone(self._run_folder) or logs) if last else logs / f"attempt-{attempt.number}"
        return _written(folder / "crash.json", as_json(cause, attempt.number, others, datetime.now(UTC).isoformat()))

    def _host(self, node: int) -> str:
        return socket.gethostname() if node == 0 else self._nodes.host(node)


def _unless_gone(run_folder: Path | None) -> Path | None:
    """Return the run's folder, unless it was moved or deleted.

    It is not made anew: one with nothing but logs would keep the next start from taking the name.
    """
    return run_folder if run_folder is not None and run_folder.is_dir() else None


def _written(path: Path, text: str) -> str:
    """Write a file, and return where it is; empty where it could not be written, which is told."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        without(path, error)
        return ""
    return str(path)


def _not_here(layout: Layout, missing: list[int], seconds: float) -> DrivetrainError:
    return DrivetrainError(
        f"node {', '.join(map(str, missing))} of {layout.nodes} did not come to "
        f"{layout.main_address}:{layout.main_port} within {seconds:g} s",
        remedy=f"run the same command there with --node-rank {missing[0]} --main-address {layout.main_address} "
        f"--main-port {layout.main_port}; a firewall must let that port through",
    )


def _stopped_in_words(wish: StopWish, attempt: _Attempt, cause: Failure | None, best_checkpoint: int) -> str:
    saved = best_checkpoint if attempt.checkpoint == 0 else attempt.checkpoint
    words = f"drivetrain: stopped by {wish.name}"
    if wish.at_once:
        words += " at once, without saving"
    elif cause is not None and cause.kind != LEFT_EARLY and not cause.follows and cause.kind != SIGNAL:
        words = f"{in_words(cause, attempt.number)}\n{words} while it failed"
    if saved:
        words += f"; the checkpoint of step {saved} is saved, and the same command goes on from there"
    return words


def _place_in_words(folder: Path | None, reached: Mapping[Path | None, _Reached]) -> str:
    """Return where the next attempt goes on; with the name of the run where the script trains several."""
    if folder is not None and is_finished(folder):
        return f"the end of {folder.name}"
    step = reached[folder].checkpoint if folder in reached else 0
    place = f"the checkpoint of step {step}" if step else "the beginning"
    return place if folder is None or reached.keys() <= {None, folder} else f"{place} of {folder.name}"


def _with_whole_gpus(layout: Layout, cause: Failure) -> Layout:
    """Return the layout with a GPU in reserve in the place of one that failed."""
    found = layout.without_gpu(cause.rank) if cause.blames_gpu and cause.rank is not None else None
    if found is None or cause.rank is None:
        return layout
    before, now = layout.gpus[cause.rank], found.gpus[cause.rank]
    say(f"drivetrain: GPU {now} takes the place of GPU {before}, which is left alone")
    return found


def _exit_code(cause: Failure) -> int:
    code = cause.exit_code
    return code if code is not None and 0 < code < 256 else 1
