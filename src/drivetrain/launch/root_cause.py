"""Finds the root cause of a job's end: of all failures the first that no other caused; its class and remedy."""

import json
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from drivetrain.core.safe_text import redacted
from drivetrain.launch.flight_recorder import Reached, reached_by_log

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
