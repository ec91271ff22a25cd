"""A private SLURM on this machine: two nodes, its own key, ports and folder, on loopback; gone after the tests."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from drivetrain.launch.layout import get_free_port

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
JobRequeue=1
KillWait=5
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=tests Nodes=n[0-1] Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
"""


def is_possible() -> bool:
    tools = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in tools)


class Cluster:
    def __init__(self) -> None:
        # munge wants a socket that every user can reach, so no folder above may be private, as pytest's own are.
        self.folder = folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        folder.chmod(0o755)
        (folder / "state").mkdir()
        try:
            self._start(folder)
        except BaseException:
            self._stop()
            raise

    def _start(self, folder: Path) -> None:
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.call(
            "munged", f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed", "--num-threads=2",
        )  # fmt: skip
        ports = [get_free_port() for _ in range(3)]
        host = socket.gethostname().split(".")[0]
        (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, ports=ports, folder=folder))
        self.call("slurmctld", "-i")
        for node in ("n0", "n1"):
            self.call("slurmd", "-N", node)
        self.until(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "two idle nodes", 30)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: str, timeout: float = 60) -> str:
        # Into files: daemons keep what they inherit, and a pipe would never end.
        with (self.folder / "call.out").open("w+") as out:
            subprocess.run(words, stdout=out, stderr=out, env=self.environment, timeout=timeout, check=False)
            out.seek(0)
            return out.read()

    def until(self, condition, what: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} not within {seconds} s"
            time.sleep(0.1)

    def state(self, job: str) -> dict[str, str]:
        words = self.call("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def close(self) -> None:
        self.call("scancel", "--user=root")
        self.until(lambda: not self.call("squeue", "-h").strip(), "no jobs", 30)
        self._stop()

    def _stop(self) -> None:
        for path in [*self.folder.glob("slurmd-*.pid"), self.folder / "slurmctld.pid", self.folder / "munged.pid"]:
            if path.exists():
                pid = int(path.read_text())
                os.kill(pid, signal.SIGTERM)
                self.until(lambda pid=pid: not _is_alive(pid), f"the end of {path.name}", 20)
        shutil.rmtree(self.folder)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
