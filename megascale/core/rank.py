"""Which process of a job this is, and where its processes meet, as torchrun or Slurm say in the environment."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megascale.core.errors import ConfigError, Problem

STORE = "MEGASCALE_STORE"
"""Set by our own launcher to `host:port`; on rank 0 `host:port:fd` with the socket that already listens there."""


@dataclass(frozen=True)
class Rank:
    """This process's place in the job. `rank` is global, `local` counts on this host."""

    rank: int
    world: int
    local: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world} on {self.host}"


def from_environment(env: Mapping[str, str] = os.environ) -> Rank | None:
    """The rank that torchrun (RANK, WORLD_SIZE) or srun (SLURM_PROCID in a step) gave this process; None outside both.

    A batch script has SLURM_PROCID too, but no step. A step of one task is a shell on a node (`srun --pty bash`, salloc
    on many clusters), where a job of many ranks may be started: there, too, the answer is None.
    Raises: ConfigError for a variable that is no number.
    """
    host = socket.gethostname()
    if "RANK" in env and "WORLD_SIZE" in env:
        rank = _number(env, "RANK")
        return Rank(rank, _number(env, "WORLD_SIZE"), _number(env, "LOCAL_RANK", rank), host)
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", 1)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and tasks > 1:
        return Rank(_number(env, "SLURM_PROCID"), tasks, _number(env, "SLURM_LOCALID", 0), host)
    return None


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    text = env.get(name, str(default))
    if not text.isdecimal():
        mend = "unset it, or start the ranks with torchrun or srun, which set it"
        raise ConfigError([Problem("environment", name, f"{text!r} is not a whole number", mend)])
    return int(text)


def meeting_place(env: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Host and port of rank 0's store: MASTER_ADDR and MASTER_PORT, else those of a Slurm step; None if neither says.

    A step's rank 0 runs on the first host of its list; the port follows from the job and the step, so that neighbours
    do not meet by mistake.
    Raises: ConfigError for a variable that is no number.
    """
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if "SLURM_STEP_NODELIST" in env:
        # "rack[03-04,7]node[1-2],login" begins with rack03node1
        host = host or re.sub(r"\[(\d+)[^\]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).split(",")[0]
        port = port or str(20000 + (10 * _number(env, "SLURM_JOB_ID") + _number(env, "SLURM_STEP_ID")) % 10000)
    return (host, _number({"MASTER_PORT": port or "29500"}, "MASTER_PORT")) if host else None
