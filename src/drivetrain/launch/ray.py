"""Ray: one actor on each machine of a placement group, each of which runs one supervisor, as on several machines.

Ranks, restarts, hangs and machines in reserve stay with the supervisors. Ray finds the machines, and tells when one is
lost: an actor that dies is started again in its place, where its supervisor joins the others as any lost machine that
comes back. If the first is lost, which has the supervisor that decides, all are started again.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.log import say
from drivetrain.core.processes import StopWish, hearing
from drivetrain.launch.clusters import SlurmOptions, cores_of, gpus_of, launch_flags
from drivetrain.launch.layout import get_free_port
from drivetrain.launch.nodes import TOKEN

_THREADS = "OMP_NUM_THREADS"  # Ray sets it to the cores of an actor, which are those of several ranks
_SUPERVISOR = (
    "import sys; from drivetrain.core.processes import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "from drivetrain.cli import main; sys.exit(main(['launch', *sys.argv[2:]]))"
)
_SAY_AFTER_SECONDS = 5.0
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 60.0  # for an actor to start on a machine that is there
_LAST_SECONDS = 15.0  # for the other supervisors, after one has ended


class MachineActor:
    """The actor of one machine: runs a supervisor in a process of its own, which ends with the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def meeting_place(self) -> tuple[str, int]:
        """Return an address of this machine, and a port that is free there."""
        address = str(_ray().util.get_node_ip_address())
        return address, get_free_port(address)

    def run(self, words: Sequence[str], folder: str, environment: dict[str, str]) -> int:
        """Run a supervisor, and return its exit code."""
        if not Path(folder).is_dir():
            _say(f"there is no folder {folder} on this machine: start the command in one that all machines have")
            return 2
        kept = {name: value for name, value in os.environ.items() if name != _THREADS}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SUPERVISOR, str(os.getpid()), *words],
            cwd=folder,
            env={**kept, **environment},
            stdin=subprocess.DEVNULL,
        )
        return self._process.wait()

    def pass_on(self, number: int) -> None:
        """Send a signal to the supervisor."""
        if self._process is not None:
            self._process.send_signal(number)


class RayJob:
    """A job on the machines of a Ray cluster. `run` returns its exit code.

    Args:
        options: The flags of the launcher.
        words: The flags and the script, as each supervisor gets them.
    """

    def __init__(self, options: SlurmOptions, words: Sequence[str]) -> None:
        self._ray, self._options, self._words = _ray(), options, tuple(words)
        self._count = options.num_machines
        token = os.environ.get(TOKEN) or secrets.token_hex(32)
        self._environment = {TOKEN: token, **{name: os.environ[name] for name in (_THREADS,) if name in os.environ}}
        self._actors: list[Any] = []
        self._running: dict[Any, int] = {}  # what each supervisor will return, and which machine it is on
        self._place: tuple[str, int] = ("", 0)

    def run(self) -> int:
        with hearing() as wish:
            group = self._placement(wish)
            try:
                return wish.exit_code if group is None else self._supervised(group, wish)
            finally:
                self._end_all()
                if group is not None:
                    self._ray.util.remove_placement_group(group)

    def _placement(self, wish: StopWish) -> Any:
        """Return the places of all machines, once Ray has them; None after a signal."""
        need = {"CPU": cores_of(self._options), "GPU": self._num_gpus()}
        bundle = {name: number for name, number in need.items() if number}
        group = self._ray.util.placement_group([bundle] * self._count, strategy="STRICT_SPREAD")
        words = " and ".join(f"{number} {name}" for name, number in bundle.items())
        began, said = time.monotonic(), False
        while not group.wait(_POLL_SECONDS):
            waited = time.monotonic() - began
            if wish.has_come() or waited > self._options.join_seconds:
                self._ray.util.remove_placement_group(group)
            if wish.has_come():
                return None
            here = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            shown = "; ".join(", ".join(f"{one.get(name, 0):g} {name}" for name in bundle) for one in here)
            if waited > self._options.join_seconds:
                raise DrivetrainError(
                    f"Ray did not find {self._count} machines with {words} each within {waited:.0f} s; it has: {shown}",
                    remedy="`ray status` shows what is in use; --nodes, --num-gpus and --cpus say what is needed",
                )
            if not said and waited > _SAY_AFTER_SECONDS:
                said = True
                _say(f"waiting for {self._count} machines with {words} each; Ray has: {shown}")
        return group

    def _num_gpus(self) -> int:
        """Return the GPUs of each machine: those asked for, or all of the machines that have most."""
        asked = gpus_of(self._options)
        if asked is not None or self._options.cpu:
            return asked or 0
        found = sorted(int(node["Resources"].get("GPU", 0)) for node in self._ray.nodes() if node["Alive"])
        return found[-self._count] if len(found) >= self._count else 0

    def _supervised(self, group: Any, wish: StopWish) -> int:
        num_starts, told = 0, False
        while True:
            if not self._running:
                self._start_all(group)
                num_starts += 1
            done, _ = self._ray.wait(list(self._running), timeout=_POLL_SECONDS)
            if wish.at_once:
                return wish.exit_code
            if wish.has_come() and not told:
                told = True
                self._actors[0].pass_on.remote(wish.exit_code - 128)  # which tells the others
            for reference in done:
                rank = self._running.pop(reference)
                code = self._result(reference)
                if code is not None:
                    if rank == 0 or self._is_over(rank, code):
                        if self._running:
                            self._ray.wait([*self._running], num_returns=len(self._running), timeout=_LAST_SECONDS)
                        return code
                elif rank == 0 and (wish.has_come() or num_starts > self._options.max_restarts):
                    raise DrivetrainError(
                        "the machine with the supervisor is lost", remedy="start the same command again"
                    )
                elif rank == 0:
                    _say(f"the actor of node 0 is lost, which has the supervisor: starting all again, {num_starts} of "
                         f"{self._options.max_restarts}")  # fmt: skip
                    self._end_all()
                    break
                else:
                    _say(f"the actor of node {rank} is lost: starting it again")
                    self._start(group, rank)

    def _result(self, reference: Any) -> int | None:
        """Return the exit code of a supervisor; None if its actor is lost."""
        try:
            return int(self._ray.get(reference))
        except self._ray.exceptions.RayActorError:
            return None

    def _is_over(self, rank: int, code: int) -> bool:
        """Return whether the job is over since a machine other than the first has ended by itself."""
        main = [reference for reference, of in self._running.items() if of == 0]
        if not main or self._ray.wait(main, timeout=_LAST_SECONDS)[0]:
            return False  # the first one says how it ended
        if self._options.spares or self._options.least_nodes < self._options.most_nodes:
            return False
        _say(f"node {rank} ended with exit code {code}, and the others wait for it: they are ended")
        return True

    def _start_all(self, group: Any) -> None:
        self._actors = [self._actor(group, rank) for rank in range(self._count)]
        try:
            self._place = self._ray.get(self._actors[0].meeting_place.remote(), timeout=_ANSWER_SECONDS)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError) as error:
            raise DrivetrainError(
                f"the actor of the first machine did not start: {str(error).splitlines()[0]}",
                remedy="install drivetrain and ray in the Python environment of every machine of the cluster",
            ) from None
        for rank in range(self._count):
            self._run_on(rank)

    def _start(self, group: Any, rank: int) -> None:
        self._actors[rank] = self._actor(group, rank)
        self._run_on(rank)

    def _actor(self, group: Any, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = group.bundle_specs[rank]
        return self._ray.remote(MachineActor).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            max_concurrency=3,  # a signal is passed on while the supervisor runs
        ).remote()  # fmt: skip

    def _run_on(self, rank: int) -> None:
        address, port = self._place
        flags = [f"--nodes={self._options.nodes}"]
        if self._count > 1:
            flags += [f"--node-rank={rank}", f"--main-address={address}", f"--main-port={port}"]
        words = [*flags, *self._words]
        self._running[self._actors[rank].run.remote(words, str(Path.cwd()), self._environment)] = rank

    def _end_all(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._running.clear()
        self._actors = []


def launch_on_ray(
    options: SlurmOptions, script: Path, arguments: Sequence[str], output_dir: Path, more_flags: Sequence[str] = ()
) -> int:
    """Run a script on the machines of a Ray cluster; the exit code is the job's.

    Args:
        options: The flags of the launcher.
        script: The script, at the same path on every machine.
        arguments: Words for the script.
        output_dir: The folder of the runs, which all machines share.
        more_flags: Further flags for each supervisor.
    """
    others = [name for name in ("slurm", "kubernetes", "submit") if getattr(options, name, False)]
    given = options.model_fields_set & {"node_rank", "main_address", "main_port", "gpu_ids"}
    what = {**dict.fromkeys(others, "stands beside --ray"), **dict.fromkeys(sorted(given), "is decided by Ray")}
    if what:
        raise ConfigError(
            [Problem(f"--{name.replace('_', '-')}", why, None, "command line", "", "leave it out")
             for name, why in what.items()]
        )  # fmt: skip
    ray = _ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here
    ray.init(include_dashboard=False)
    try:
        words = [*launch_flags(options, output_dir.absolute()), *more_flags, str(script), *arguments]
        return RayJob(options, [word for word in words if not word.startswith("--nodes=")]).run()
    finally:
        ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise DrivetrainError(
            f"--ray needs the package ray: {error}",
            remedy='pip install "drivetrain[ray]", in the Python environment of every machine of the cluster',
        ) from None
    return ray


def _say(words: str) -> None:
    say(f"drivetrain: {words}")
