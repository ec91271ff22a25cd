"""Finds out why a job ended or hangs: its first failure, the rank that others wait for, the collectives reached."""

import contextlib
import json
import pickle
import re
import signal
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from drivetrain.core.launchers import END_FACTOR, END_LEAST_SECONDS, FACTOR, LEAST_SECONDS
from drivetrain.core.log import redacted

# ----------------------------------------------------------------------------------------------------------------------
# Reads which collectives a rank reached: from the dump of torch's flight recorder, or from NCCL's watchdog's log.
#
# When a collective of NCCL times out, torch writes a dump for every rank. It is a pickle of plain values; one that
# holds anything else is not read, so that nothing in it is run.

# For a worker: dump where the launcher looks. Older releases of torch know the second name only.
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_LONGEST_DUMP = 256 << 20
# `[PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected by watchdog at work sequence id: 9 PG status: last enqueued
# work: 9, last completed work: 8`, and `… Received a dump signal … Last enqueued NCCL work: 9, …`.
_IN_LOG = re.compile(
    r"\[PG ID \S+ PG GUID (\S+) Rank \d+\][^\n]*?last enqueued(?: NCCL)? work: (-?\d+), last completed(?: NCCL)? work: "
    r"(-?\d+)",
    re.IGNORECASE,
)
Reached = dict[str, dict[str, Any]]  # by group: how many it enqueued, which the last was, whether it waits in it


class _PlainValues(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain value")


def dump_environment(environ: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the variables that make torch dump to `prefix` and the rank, except those that the user has set.

    Args:
        environ: The environment of the launcher.
        prefix: The beginning of the path of a dump.
    """
    ours = {DUMP_ON_TIMEOUT: "1"}
    if not any(name in environ for name in DUMP_FILES):
        ours |= dict.fromkeys(DUMP_FILES, prefix)
    return {name: value for name, value in ours.items() if name not in environ}


def reached_by_dump(path: Path) -> Reached:
    """Return the last collective of each group that a rank enqueued; empty without a dump that can be read.

    Args:
        path: The file that the flight recorder wrote.
    """
    with suppress(OSError, pickle.UnpicklingError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        if path.stat().st_size > _LONGEST_DUMP:
            return {}
        with path.open("rb") as file:
            dump = _PlainValues(file).load()
        found: Reached = {}
        for entry in dump["entries"]:
            if entry.get("is_p2p"):
                continue
            name, description = map(str, entry["process_group"])
            group = f"{name}({description})" if description not in ("", "undefined") else name
            number = int(entry["collective_seq_id"])
            if number >= found.get(group, {"number": -1})["number"]:
                operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
                ranks = dump["pg_config"].get(name, {}).get("ranks", "")
                found[group] = {
                    "number": number,
                    "operation": f"{operation} of {entry['input_sizes']}"[:200],
                    "waits": entry["state"] != "completed",
                    "ranks": [int(rank) for rank in re.findall(r"\d+", str(ranks))],
                }
        return found
    return {}


def reached_by_log(text: str) -> Reached:
    """Return how many collectives of each group a rank enqueued, as far as NCCL's watchdog wrote it into its log.

    Args:
        text: The end of the log.
    """
    return {
        group: {"number": int(enqueued), "operation": "", "waits": enqueued != completed, "ranks": []}
        for group, enqueued, completed in _IN_LOG.findall(text)
    }


# ----------------------------------------------------------------------------------------------------------------------
# Finds out that a job hangs, by the steps of its ranks, and which rank it hangs on, by their stacks.
#
# Ranks of a job go in step: if one hangs, the others wait for it in a collective, and no rank makes progress. A hang is
# reported and ended by the times that steps took so far; what is not a step (planning, compiling, validation, hooks)
# has limits of its own. The odd one out is the rank that is stopped, that waits for nothing, or that waits elsewhere.

OTHER_SECONDS, OTHER_END_SECONDS = 120.0, 600.0  # of phases that are not steps, where nothing is known of them
START_SECONDS = 600.0  # of planning and compiling: reported, never ended
_NEVER = float("inf")
_FRAME = re.compile(r'^\s+File "([^"]*)", line \d+ in (\S+)', re.MULTILINE)
# Frames of a rank that waits for the others, or for the device, which waits for them.
_WAITS = re.compile(
    r"torch/distributed/|torch/nn/parallel/|torch/autograd/graph\.py|drivetrain/strategies/"
    r"|drivetrain/loop/read_back\.py|torch/cuda/streams\.py|drivetrain/core/world\.py"
)
_OF_STEPS = re.compile(r"drivetrain/strategies/|drivetrain/loop/read_back\.py")


@dataclass
class _Rank:
    step: int = 0
    phase: str = "start"
    at: float = 0.0  # when it last made progress
    frozen_at: float | None = None  # since when its process is stopped


@dataclass(frozen=True)
class Stall:
    """A job in which nothing happens."""

    seconds: float
    step: int  # the newest that any rank has reported
    median: float  # seconds of a step
    is_over: bool  # it has lasted long enough to be ended
    frozen: frozenset[int] = frozenset()  # ranks whose process is stopped


@dataclass
class HangWatch:
    """Watches the progress of all ranks of one attempt, on the clock of the caller."""

    least_seconds: float = END_LEAST_SECONDS  # before anything is ended; 0: nothing is watched
    ranks: dict[int, _Rank] = field(default_factory=dict)
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    _longest: dict[str, float] = field(default_factory=dict)  # seconds of a phase that is not a step

    def observe(self, rank: int, step: int, phase: str, frozen: bool, now: float) -> None:
        """Take what a rank reports.

        Args:
            rank: The rank.
            step: How many steps it has read back.
            phase: What it does.
            frozen: Whether its process is stopped.
            now: The time.
        """
        before = self.ranks.setdefault(rank, _Rank(at=now))
        if (step, phase) != (before.step, before.phase):
            if step > before.step > 0 and phase == before.phase == "step":
                self._rates.append((now - before.at) / (step - before.step))
            elif before.phase not in ("step", phase):
                self._longest[before.phase] = max(self._longest.get(before.phase, 0.0), now - before.at)
            before.step, before.phase, before.at = step, phase, now
        before.frozen_at = (before.frozen_at or now) if frozen else None

    def stall(self, now: float) -> Stall | None:
        """Return how the job hangs, once that is to be reported; None while it may be at work.

        Args:
            now: The time.
        """
        if not self.least_seconds or not self.ranks:
            return None
        frozen = {rank: now - it.frozen_at for rank, it in self.ranks.items() if it.frozen_at is not None}
        seconds = now - max(it.at for it in self.ranks.values())
        limits = [self._limits(it.phase) for it in self.ranks.values()]
        report, end = max(limit[0] for limit in limits), max(limit[1] for limit in limits)
        if frozen:
            report, end = min(report, self._limits("step")[0]), min(end, self._limits("step")[1])
            seconds = min(seconds, max(frozen.values()))
        if seconds < report:
            return None
        step = max(it.step for it in self.ranks.values())
        return Stall(seconds, step, self.median, seconds >= end, frozenset(frozen))

    @property
    def median(self) -> float:
        return statistics.median(self._rates) if self._rates else 0.0

    def _limits(self, phase: str) -> tuple[float, float]:
        """Return after how many seconds without progress a phase is reported, and ended."""
        scale = self.least_seconds / END_LEAST_SECONDS
        if phase == "step":
            median = self.median
            return max(LEAST_SECONDS * scale, FACTOR * median), max(self.least_seconds, END_FACTOR * median)
        if phase == "end":
            return _NEVER, _NEVER  # the rest of a script is its own
        if phase in ("start", "compile"):
            return START_SECONDS, _NEVER
        longest = self._longest.get(phase)
        if longest is None:
            return OTHER_SECONDS, _NEVER
        end = max(OTHER_END_SECONDS, END_FACTOR * longest) if phase == "validation" else _NEVER
        return max(OTHER_SECONDS, FACTOR * longest), end


def main_stack(text: str) -> list[tuple[str, str]]:
    """Return the frames of the main thread, innermost first, from what `faulthandler` dumped of all threads.

    Args:
        text: The dump; of several, the last.
    """
    threads = [_FRAME.findall(part) for part in re.split(r"(?m)^(?:Current thread|Thread) 0x", text)]
    main = [frames for frames in threads if frames and frames[-1][1] == "<module>"]
    return (main or [frames for frames in threads if frames] or [[]])[-1]


def odd_ranks(stacks: Mapping[int, str], frozen: frozenset[int] = frozenset()) -> list[int]:
    """Return the ranks that the others wait for, as far as their stacks tell; none if they do not tell.

    Args:
        stacks: What each rank's `faulthandler` dumped; empty where it did not answer.
        frozen: Ranks whose process is stopped.
    """
    if frozen:
        return sorted(frozen)
    if len(stacks) == 1:
        return list(stacks)
    frames = {rank: main_stack(text) for rank, text in stacks.items()}
    silent = [rank for rank, found in frames.items() if not found]
    at_work = [rank for rank, found in frames.items() if found and not _waits(found)]
    if silent or at_work:
        return sorted(silent or at_work) if len(silent or at_work) < len(frames) else []
    elsewhere = [rank for rank, found in frames.items() if not any(_OF_STEPS.search(file) for file, _ in found)]
    if 0 < len(elsewhere) < len(frames):
        return sorted(elsewhere)
    places = Counter(tuple(found) for found in frames.values())
    (most, count), *others = places.most_common()
    if others and count > others[0][1]:
        return sorted(rank for rank, found in frames.items() if tuple(found) != most)
    return []


def _waits(frames: list[tuple[str, str]]) -> bool:
    """Return whether one of the innermost frames is one that waits for others."""
    return any(_WAITS.search(file) for file, _ in frames[:4])


def hang_in_words(stall: Stall, odd: Sequence[int], watch: HangWatch) -> str:
    """Return what is known of a hang, in a line.

    Args:
        stall: The hang.
        odd: The ranks that the others wait for.
        watch: What each rank does.
    """
    usual = f", and one takes {stall.median:.2g} s" if stall.median else ""
    words = f"no step has ended for {stall.seconds:.0f} s after step {stall.step}{usual}"
    if not odd:
        return f"{words}; all ranks wait, and their stacks do not tell for which"
    if stall.frozen:
        return f"{words}; its process is stopped (SIGSTOP, or a debugger)"
    phase = watch.ranks[odd[0]].phase
    what = "" if phase == "step" else f", in {phase}"
    if len(watch.ranks) == 1:
        return f"{words}{what}"
    others = f" (and rank {', '.join(map(str, odd[1:]))})" if len(odd) > 1 else ""
    return f"{words}; the other ranks wait for it{others}{what}"


def write_stacks(folder: Path, stall: Stall, stacks: Mapping[int, str]) -> Path:
    """Write the stacks of all ranks beside their logs, and return the file.

    Args:
        folder: The folder of the logs.
        stall: The hang.
        stacks: The stack of each rank; empty where it did not answer.
    """
    path = folder / f"hang-after-step-{stall.step}.txt"
    parts = [f"rank {rank}\n{text or '(no answer)'}\n" for rank, text in sorted(stacks.items())]
    with contextlib.suppress(OSError):
        path.write_text("\n".join(parts), encoding="utf-8")
    return path


# ----------------------------------------------------------------------------------------------------------------------
# Finds the root cause of a job's end: of all failures the first that no other caused; its class and remedy.

EXCEPTION = "exception"
DEVICE_MEMORY = "out of memory (device)"
HOST_MEMORY = "out of memory (host)"
SIGNAL = "signal"
TIMEOUT = "timeout"
NODE_LOST = "node lost"
LEFT_EARLY = "left early"
EXIT = "exit"
REFUSED = "refused"  # in words of ours: the input is wrong, and trying again does not help

# What a rank says when another is gone. Of gloo, of NCCL, of the store.
_LOST_A_PEER = re.compile(
    r"connection (was )?(closed|reset) by (remote )?peer|connection reset|broken pipe|connection refused|socket closed"
    r"|failed to (recv|send), got|(recv|send)Value ?failed|remote process exited|remote process has|ncclRemoteError"
    r"|communicator was aborted|pair closure|client socket has failed to connect|connection was likely closed"
    r"|Ranks? \d+(, ?\d+)* (successfully|failed to pass)|lost connection|Unable to connect|peer closed",
    re.IGNORECASE,
)
_WAITED_IN_VAIN = re.compile(
    r"timed out|time ?out|did not answer within|wait timeout after",
    re.IGNORECASE,
)
_FROM_COLLECTIVES = re.compile(
    r"Dist(Backend|Network|Store)?Error|gloo|nccl|ProcessGroup|c10d|TCPStore|collective|monitoredBarrier|torch.distributed",
    re.IGNORECASE,
)
# What NCCL's watchdog writes before it aborts a rank that waited: that rank is not to blame. As in the source of torch,
# and in logs of users.
_ABORTED_WAITING = re.compile(
    r"Watchdog caught collective operation timeout|Received a dump signal due to a collective timeout"
    r"|Heartbeat monitor timed out|ProcessGroupNCCL's watchdog got stuck for"
)
_WATCHDOG_ENDED = re.compile(r"watchdog thread terminated with exception: (.*)")  # for any reason
_GIL_HELD = re.compile(r"Could not acquire GIL within \d+ ms on exit")
# Of gloo's monitored barrier, and of the report that TORCH_NCCL_DESYNC_DEBUG asks for. The rank after `collective
# timeout from` is the first that waited in vain: it is not to blame.
_BLAMED = re.compile(
    r"Ranks? (\d+(?:, ?\d+)*) failed to (?:pass|respond)|ranks \[(\d+(?:, ?\d+)*)\] are the lagging ranks"
    r"|\[(\d+(?:, ?\d+)*)\] finished collective #\d+, but didn't join",
    re.IGNORECASE,
)
_DEVICE_MEMORY = re.compile(r"CUDA out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED|OutOfMemoryError")
_LOADER_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: (Killed|Terminated)")
_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|std::bad_alloc|MemoryError")


@dataclass(frozen=True)
class Failure:
    """One rank that failed, or one node that was lost."""

    kind: str
    rank: int | None
    node: int
    host: str
    pid: int | None
    headline: str
    traceback: str = ""
    remedy: str = ""
    step: int = 0
    exit_code: int | None = None
    signal: str = ""
    exception: str = ""
    follows: bool = False  # from the failure of another rank, by its looks
    at: float = 0.0  # when, on the clock of the supervisor that decides
    log: str = ""
    goes_on_with: str = ""  # what another start does differently by itself, such as smaller micro-batches
    saving: bool = False  # a checkpoint was still being written when it was reported
    noticed_after: float | None = None  # seconds from the fault to its report, at most; None if that is not known
    collectives: Reached = field(default_factory=dict)  # of NCCL, where its watchdog ended the wait

    @property
    def where(self) -> str:
        if self.rank is None:
            return f"node {self.node} ({self.host})"
        pid = f", pid {self.pid}" if self.pid else ""
        return f"rank {self.rank} (node {self.node}, {self.host}{pid})"

    @property
    def blames_gpu(self) -> bool:
        """Whether its words say that a GPU is broken, and not that the program is wrong."""
        words = f"{self.headline}\n{self.traceback}"
        return self.kind in (EXCEPTION, SIGNAL, EXIT) and bool(_BROKEN_GPU.search(words))

    @property
    def is_ours_to_retry(self) -> bool:
        """Whether the same start can succeed: not where the input is wrong, nor where a rank left by itself."""
        return self.kind not in (REFUSED, LEFT_EARLY)

    def resembles(self, other: "Failure") -> bool:
        """Return whether it is the same error at the same step: it would come a third time."""
        by_itself = self.kind in (EXCEPTION, DEVICE_MEMORY, EXIT)
        return by_itself and (self.kind, self.exception, self.step) == (other.kind, other.exception, other.step)


def failure_from_error(error: Mapping[str, Any], **place: Any) -> Failure:
    """Return the failure of a worker from its report of an exception."""
    kind, message, trace = str(error["type"]), str(error["message"]), str(error["traceback"])
    first_line = message.splitlines()[0] if message else ""
    exception = f"{kind}: {first_line}" if first_line else kind
    code = int(error.get("exit_code", 1))  # 2 for wrong input, as without a launcher
    common: dict[str, Any] = {"exception": exception, "step": int(error.get("step", 0)), "exit_code": code, **place}
    common |= {"saving": bool(error.get("saving")), "goes_on_with": str(error.get("goes_on_with", ""))}
    if error.get("expected"):
        follows = bool(_LOST_A_PEER.search(f"{message}\n{error.get('origin', '')}"))
        return Failure(
            REFUSED, headline=message, remedy=str(error.get("remedy", "")), follows=follows, **common
        )  # fmt: skip
    origin = str(error.get("origin") or f"{kind}: {message}")
    if _DEVICE_MEMORY.search(f"{kind}: {message}"):
        remedy = "a smaller --batch-size (the global batch stays), --activations recompute, or more GPUs"
        return Failure(DEVICE_MEMORY, headline=exception, traceback=trace, remedy=remedy, **common)
    if _HOST_MEMORY.search(f"{kind}: {message}"):
        return Failure(HOST_MEMORY, headline=exception, traceback=trace, remedy=_LESS_HOST_MEMORY, **common)
    loader_killed = _LOADER_KILLED.search(f"{origin}\n{message}")
    if loader_killed:
        name = "SIGKILL" if loader_killed[1] == "Killed" else "SIGTERM"
        headline = f"a process that loads its data was ended by {name}, which came from outside"
        return Failure(SIGNAL, headline=headline, traceback=trace, remedy=_KILLED_FROM_OUTSIDE, signal=name, **common)
    is_collective = bool(_FROM_COLLECTIVES.search(f"{origin}\n{trace}"))
    if is_collective and _LOST_A_PEER.search(origin):
        remedy = "another rank went away; its own log may say why"
        return Failure(EXCEPTION, headline=exception, traceback=trace, remedy=remedy, follows=True, **common)
    if is_collective and _WAITED_IN_VAIN.search(origin):
        remedy = "a rank did not come; a slow save or a long data step can be allowed with --timeout-seconds"
        return Failure(TIMEOUT, headline=exception, traceback=trace, remedy=remedy, follows=True, **common)
    return Failure(EXCEPTION, headline=exception, traceback=trace, remedy=_remedy_of(kind), **common)


def failure_from_exit(code: int, *, out_of_memory: bool, said: str, searched: str = "", **place: Any) -> Failure:
    """Return the failure of a worker that ended without a report: by a signal, or with its own exit code.

    `said` are the last lines of its log, which are shown; `searched` is more of its end.
    """
    if code < 0:
        name = _signal_name(-code)
        common = {"signal": name, "exit_code": 128 - code, "traceback": said, **place}
        if -code == signal.SIGKILL and out_of_memory:
            headline = "the kernel killed it: the memory of this machine or of its control group was used up"
            return Failure(HOST_MEMORY, headline=headline, remedy=_LESS_HOST_MEMORY, **common)
        if -code in (signal.SIGKILL, signal.SIGTERM):
            headline = f"ended by {name}, which came from outside"
            return Failure(SIGNAL, headline=headline, remedy=_KILLED_FROM_OUTSIDE, **common)
        if -code == signal.SIGABRT and (found := _aborted_by_nccl(searched or said, common)) is not None:
            return found
        headline = f"crashed with {name}"
        remedy = "native code crashed; the Python lines it was at stand above"
        return Failure(SIGNAL, headline=headline, remedy=remedy, **common)
    headline = f"ended with exit code {code} and without an exception"
    return Failure(
        EXIT, headline=headline, remedy="the script called sys.exit or os._exit; its output stands above",
        exit_code=code, traceback=said, **place,
    )  # fmt: skip


def _aborted_by_nccl(log: str, common: Mapping[str, Any]) -> Failure | None:
    """Return the failure of a rank that NCCL's watchdog aborted; None if its log does not say so.

    A watchdog also ends for an error of its own GPU, which another rank did not cause.
    """
    remedy = "another rank did not come; a slow save or a long data step can be allowed with --timeout-seconds"
    ended = _WATCHDOG_ENDED.findall(log)
    if _GIL_HELD.search(log):
        headline = "aborted by NCCL's watchdog: a thread of this rank held the GIL, and its collectives did not go on"
        remedy = "look for a native call that waits without releasing the GIL; the Python lines it was at stand above"
        return Failure(TIMEOUT, headline=headline, remedy=remedy, **common)
    if _ABORTED_WAITING.search(log):
        facts = {"exception": "NCCL watchdog", "collectives": reached_by_log(log), **common}
        headline = "aborted by NCCL's watchdog: it waited in a collective for another rank"
        desync = _BLAMED.search(log)
        facts["exception"] += f": {desync.group()}" if desync else ""
        return Failure(TIMEOUT, headline=headline, remedy=remedy, follows=True, **facts)
    if ended:
        headline = f"aborted by NCCL's watchdog: {ended[-1]}"
        follows = bool(_LOST_A_PEER.search(ended[-1]))
        remedy = "another rank went away; its own log may say why" if follows else _REMEDIES["torch.AcceleratorError"]
        return Failure(EXCEPTION, headline=headline, remedy=remedy, exception=ended[-1], follows=follows, **common)
    return None


def first_cause(failures: Sequence[Failure], left: Sequence[Failure] = ()) -> Failure:
    """Return the failure that the others follow from.

    What a rank did by itself comes before what it suffered, then the earlier before the later. `left` are ranks that
    ended with code 0: if all others only suffered, the first to leave is the cause.
    """
    by_itself = [failure for failure in failures if not failure.follows]
    if by_itself:
        lost = [failure for failure in by_itself if failure.kind == NODE_LOST]
        # Workers of a node that went away are killed by their own supervisor: that is no cause of anything.
        return min([failure for failure in by_itself if failure.kind != NODE_LOST] or lost, key=lambda one: one.at)
    if left:
        return min(left, key=lambda one: one.at)
    return _behind(failures) or min(failures, key=lambda one: one.at)


def _behind(failures: Sequence[Failure]) -> Failure | None:
    """Return the rank that did not reach a collective that others of its group waited in, or called another one."""
    for group in sorted({group for one in failures for group in one.collectives}):
        at = sorted(
            ((one.collectives[group]["number"], one.rank or 0, one) for one in failures if group in one.collectives),
            key=lambda found: found[:2],
        )
        if len(at) < 2:
            continue
        (least, _, behind), (most, _, ahead) = at[0], at[-1]
        if least < at[1][0]:
            operation = ahead.collectives[group]["operation"]
            words = f"did not come to a collective that the others waited for{f' ({operation})' if operation else ''}: "
            words += f"it had enqueued {least} of group {group}, rank {ahead.rank} {most}"
            return replace(behind, headline=words)
        called = Counter(one.collectives[group]["operation"] for _, _, one in at)
        if least == most and len(called) == 2:
            (usual, _), (odd, _) = called.most_common()
            culprit = next(one for _, _, one in at if one.collectives[group]["operation"] == odd)
            words = f"called {odd} as collective {most} of group {group}, where others called {usual}"
            return replace(culprit, headline=words)
    return None


def waited_for(failures: Sequence[Failure]) -> set[int]:
    """Return the ranks of the groups whose collectives timed out, as far as that is known."""
    of = (facts for one in failures for facts in one.collectives.values() if facts["waits"])
    return {rank for facts in of for rank in facts["ranks"]}


def blamed_ranks(text: str) -> list[int]:
    """Return the ranks that the text of an error blames, such as that of gloo's monitored barrier.

    Args:
        text: The text.
    """
    found = _BLAMED.search(text)
    if found is None:
        return []
    return [int(number) for number in re.findall(r"\d+", next(filter(None, found.groups())))]


def left_early(**place: Any) -> Failure:
    return Failure(
        LEFT_EARLY,
        headline="ended with exit code 0 while other ranks were still at work",
        remedy="every rank has to run the same steps: look for a return, exit or break that only some ranks reach",
        exit_code=0,
        **place,
    )


def never_came(waiting: Failure, stack: str, **place: Any) -> Failure:
    """Return the failure of a rank that is still alive, and that the others waited for in a collective."""
    return Failure(
        TIMEOUT,
        headline=f"did not come to a collective that rank {waiting.rank} waited for ({waiting.exception})",
        traceback=f"it was at:\n{stack}" if stack else "",
        remedy="every rank has to run the same steps; where it is only slow, --timeout-seconds",
        **place,
    )


def hung(words: str, stack: str, **place: Any) -> Failure:
    """Return the failure of a rank that all others wait for."""
    return Failure(
        TIMEOUT,
        headline=words,
        traceback=f"it was at:\n{stack}" if stack else "",
        remedy="look at the lines it was at; where it is only slow, --hang-seconds allows for more",
        **place,
    )


def node_lost(node: int, host: str, why: str, at: float, silent_seconds: float) -> Failure:
    remedy = "look at that machine and the network between; then start the same command again: it goes on from there"
    return Failure(
        NODE_LOST, None, node, host, None, headline=why, remedy=remedy, at=at, noticed_after=silent_seconds
    )  # fmt: skip


def in_words(
    cause: Failure, attempt: int, others: Sequence[Failure] = (), report: str = "", not_again: str = ""
) -> str:
    """Return the last lines on the screen: traceback, class, remedy."""
    at = f" after step {cause.step}" if cause.step else ""
    again = f", attempt {attempt + 1}" if attempt else ""
    lines = [f"drivetrain: {cause.where} failed first{at}{again}"]
    if not_again:
        lines.append(f"  not started again: {not_again}")
    if cause.traceback:
        lines += [f"  | {line}" for line in cause.traceback.rstrip().splitlines()]
    if cause.kind == REFUSED or not cause.traceback.rstrip().endswith(cause.headline):
        lines += [f"  {line}" for line in cause.headline.splitlines()]
    if cause.log:
        lines.append(f"  log:    {cause.log}")
    also = sorted({one.rank for one in others if one.rank is not None and one.rank != cause.rank})
    if also:
        lines.append(f"  then:   rank{'s' if len(also) > 1 else ''} {', '.join(map(str, also))}")
    if report:
        lines.append(f"  report: {report}")
    lines.append(f"  cause:  {cause.kind}")
    if cause.remedy:
        lines.append(f"  remedy: {cause.remedy}")
    return "\n".join(lines)


def as_json(cause: Failure, attempt: int, others: Sequence[Failure], when: str) -> str:
    document = {
        "cause": cause.kind,
        **_without(asdict(cause), "kind", "follows", "at", "saving"),
        "attempt": attempt,
        "time": when,
        "others": [
            _without(asdict(replace(one, traceback=one.traceback[-2000:])), "at", "saving")
            for one in others
            if one != cause
        ],
    }
    return json.dumps(redacted(document), indent=2) + "\n"


def from_wire(facts: Mapping[str, Any]) -> Failure:
    return Failure(**facts)


_BROKEN_GPU = re.compile(
    r"uncorrectable (?:ECC|NVLink)|ECC error|GPU is lost|GPU has fallen off|hardware stack error|"
    r"CUDA-capable device\(s\) is/are busy or unavailable|no CUDA-capable device|Unable to determine the device handle",
    re.IGNORECASE,
)
_KILLED_FROM_OUTSIDE = "somebody or a scheduler killed it; `dmesg` tells if it was the kernel, for want of memory"
_LESS_HOST_MEMORY = "fewer --num-workers, fewer processes on this machine, or a larger memory limit"
_REMEDIES = {
    "ModuleNotFoundError": "install it into the environment of this Python on every node",
    "FileNotFoundError": "check the path; on several nodes the file has to be there on each",
    "PermissionError": "check the permissions of that path",
    "torch.AcceleratorError": "run once with CUDA_LAUNCH_BLOCKING=1: the error is then raised where it happens",
}


def _remedy_of(kind: str) -> str:
    return _REMEDIES.get(
        kind, "fix the line above, and start the same command again; a run of drivetrain goes on from its last save"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _without(facts: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in names}
