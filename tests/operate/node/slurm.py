"""A Slurm cluster of this one host: munged, slurmctld and a slurmd for each node, with own ports, keys and state."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 60
CPUS = 4
"""Cores that the node reports, so that four tasks fit on any machine."""

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout={slurmd_timeout}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait={kill_wait}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why Slurm cannot run here; an empty text if it can."""
    needed = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
    absent = [program for program in needed if shutil.which(program, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm)"
    return "" if os.geteuid() == 0 else "slurmd must be root"


class Slurm:
    """The cluster while the context is open. `folder` holds all its files. `nodes`: one, named as this host, or
    several on this host, n0 to n{nodes-1}. `slurmd_timeout`: seconds until a silent node is down.
    """

    def __init__(self, folder: Path, kill_wait: int = 30, nodes: int = 1, slurmd_timeout: int = 300) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(nodes)] if nodes > 1 else [_host()]
        self._slurmd_timeout = slurmd_timeout
        self._slurmd: dict[str, subprocess.Popen] = {}
        self.env = dict(os.environ, SLURM_CONF=str(folder / "slurm.conf"), PATH=_path())
        self._kill_wait = kill_wait
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Slurm:
        self.folder.mkdir(parents=True)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        ctld_port, *ports = _free_ports(1 + len(self.nodes))
        node = "NodeName={} NodeHostname={} NodeAddr=127.0.0.1 Port={} CPUs={} State=UNKNOWN"
        lines = [node.format(name, _host(), port, CPUS) for name, port in zip(self.nodes, ports, strict=True)]
        values = {"host": _host(), "folder": self.folder, "ctld_port": ctld_port, "kill_wait": self._kill_wait}
        values |= {"slurmd_timeout": self._slurmd_timeout, "nodes": "\n".join(lines)}
        (self.folder / "slurm.conf").write_text(CONF.format(**values))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        try:
            self._start_munged(key)
            self._start("slurmctld", "-D", "-c")
            for node in self.nodes:
                self._slurmd[node] = self._start("slurmd", "-D", "-N", node)
            self._wait(
                lambda: self.ask("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(self.nodes), "not idle"
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if len(self._slurmd) == len(self.nodes):
            for job in self.ask("squeue", "-h", "-o", "%A").split():
                self.ask("scancel", "--full", "--signal=KILL", job)
            self._wait(lambda: not self.ask("squeue", "-h").strip(), "jobs outlive the cluster")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *command: str) -> str:
        """The output of a Slurm command; nothing if it fails."""
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False).stdout

    def submit(self, *arguments: str, folder: Path, env: dict[str, str] | None = None) -> str:
        """The id of a job submitted by `sbatch ARGUMENTS` in a folder."""
        command = ["sbatch", "--parsable", *arguments]
        result = subprocess.run(
            command, env=self.env | (env or {}), cwd=folder, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """The output of `scontrol show job`."""
        fields = self.ask("scontrol", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def end(self, job: str, seconds: float = 120) -> tuple[str, str]:
        """State and exit code (`status:signal`) of a job, once it has ended."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self._wait(lambda: self.state(job).get("JobState") in ended, f"job {job} has not ended", seconds)
        state = self.state(job)
        return state["JobState"], state["ExitCode"]

    def kill_node(self, node: str) -> None:
        """Kill a node like a power cut: its slurmd, and the steps and tasks on it."""
        self._slurmd[node].kill()
        while pids := self.processes(node):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def restart_node(self, node: str) -> None:
        """Start the slurmd of a killed node."""
        self._slurmd[node].wait()
        self._daemons.remove(self._slurmd[node])
        self._slurmd[node] = self._start("slurmd", "-D", "-N", node)

    def processes(self, node: str) -> list[int]:
        """The processes of jobs on a node, and the slurmstepds over them."""
        mark, found = f"SLURMD_NODENAME={node}".encode(), set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if mark in variables and f"SLURM_CONF={self.env['SLURM_CONF']}".encode() in variables:
                    found.add(int(folder.name))
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    if b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes():
                        found.add(parent)
        return sorted(found)

    def _start(self, *command: str) -> subprocess.Popen:
        log = (self.folder / f"{command[0]}.out").open("ab")
        self._daemons.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))
        return self._daemons[-1]

    def _start_munged(self, key: Path) -> None:
        files = {
            "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munge.seed",
        }  # fmt: skip
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._wait((self.folder / "munge.socket").exists, "munged has not started")

    def _wait(self, done: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"{what}: {self._logs()}"
            time.sleep(0.2)

    def _logs(self) -> str:
        logs = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in logs)


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
