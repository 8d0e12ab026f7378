"""This process's rank and the rendezvous endpoint, from the environment variables of torchrun or Slurm."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megascale.core.errors import ConfigError, Problem

STORE_VARIABLE = "MEGASCALE_STORE"
"""`host:port` of the store, set by megascale's launcher; on rank 0 `host:port:fd`, `fd` being the listening socket."""


@dataclass(frozen=True)
class Rank:
    """This process's place in the job. `rank` is global, `local_rank` counts on this host."""

    rank: int
    world_size: int
    local_rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.host}"


def rank_from_environment(env: Mapping[str, str] = os.environ) -> Rank | None:
    """Read the rank from torchrun's RANK and WORLD_SIZE or from srun's SLURM_PROCID in a step; None without either.

    A batch script has SLURM_PROCID but no step. A step of one task is a shell on a node (`srun --pty bash`, salloc on
    many clusters) in which a user may start a job of many ranks; both give None.
    Raises: ConfigError for a variable that is not a number.
    """
    host = socket.gethostname()
    if "RANK" in env and "WORLD_SIZE" in env:
        rank = _number(env, "RANK")
        return Rank(rank, _number(env, "WORLD_SIZE"), _number(env, "LOCAL_RANK", rank), host)
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", 1)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and tasks > 1:
        return Rank(_number(env, "SLURM_PROCID"), tasks, _number(env, "SLURM_LOCALID", 0), host)
    return None


def on_one_host(world_size: int, env: Mapping[str, str] = os.environ) -> bool:
    """Return True if torchrun, Slurm or megascale's launcher says that all ranks of the job are on this host."""
    nodes = env.get("SLURM_STEP_NUM_NODES")
    return env.get("LOCAL_WORLD_SIZE") == str(world_size) or ("LOCAL_WORLD_SIZE" not in env and nodes == "1")


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    text = env.get(name, str(default))
    if not text.isdecimal():
        hint = "unset the variable, or start the ranks with torchrun or srun"
        raise ConfigError([Problem("environment", name, f"{text!r} is not a whole number", hint)])
    return int(text)


def rendezvous_endpoint(env: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Host and port of rank 0's store, from MASTER_ADDR and MASTER_PORT or from a Slurm step; None without either.

    Rank 0 of a step runs on the first host of the step's list. The port depends on the job's and the step's numbers,
    because jobs that share a host need different ports.
    Raises: ConfigError for a variable that is not a number.
    """
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if "SLURM_STEP_NODELIST" in env:
        # "rack[03-04,7]node[1-2],login" begins with rack03node1
        host = host or re.sub(r"\[(\d+)[^\]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).split(",")[0]
        port = port or str(20000 + (10 * _number(env, "SLURM_JOB_ID") + _number(env, "SLURM_STEP_ID")) % 10000)
    return (host, _number({"MASTER_PORT": port or "29500"}, "MASTER_PORT")) if host else None
