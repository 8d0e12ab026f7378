"""This process's rank and the rendezvous endpoint, from the environment variables of torchrun or Slurm."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megascale.core.env_numbers import whole_number

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
    Raises: ConfigError for a variable that is not a number in its range.
    """
    host = socket.gethostname()
    if "RANK" in env and "WORLD_SIZE" in env:
        world_size = whole_number(env, "WORLD_SIZE", least=1)
        rank = whole_number(env, "RANK", most=world_size - 1)
        return Rank(rank, world_size, whole_number(env, "LOCAL_RANK", rank), host)
    tasks = whole_number(env, "SLURM_STEP_NUM_TASKS", 1)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and tasks > 1:
        rank = whole_number(env, "SLURM_PROCID", most=tasks - 1)
        return Rank(rank, tasks, whole_number(env, "SLURM_LOCALID"), host)
    return None


def on_one_host(world_size: int, env: Mapping[str, str] = os.environ) -> bool:
    """Return True if torchrun, Slurm or megascale's launcher says that all ranks of the job are on this host."""
    nodes = env.get("SLURM_STEP_NUM_NODES")
    return env.get("LOCAL_WORLD_SIZE") == str(world_size) or ("LOCAL_WORLD_SIZE" not in env and nodes == "1")


def local_world_size(default: int, env: Mapping[str, str] = os.environ) -> int:
    """Number of the job's ranks on this host, from LOCAL_WORLD_SIZE of torchrun or our launcher.

    Raises: ConfigError for a variable that is not a number above 0.
    """
    return whole_number(env, "LOCAL_WORLD_SIZE", default, least=1)


def rendezvous_endpoint(env: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Host and port of rank 0's store, from MASTER_ADDR and MASTER_PORT or from a Slurm step; None without either.

    Rank 0 of a step runs on the first host of the step's list. The port depends on the job's and the step's numbers,
    because jobs that share a host need different ports.
    Raises: ConfigError for a variable that is not a number in its range.
    """
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if "SLURM_STEP_NODELIST" in env:
        # "rack[03-04,7]node[1-2],login" begins with rack03node1
        host = host or re.sub(r"\[(\d+)[^\]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).split(",")[0]
        job, step = whole_number(env, "SLURM_JOB_ID"), whole_number(env, "SLURM_STEP_ID")
        port = port or str(20000 + (10 * job + step) % 10000)
    return (host, whole_number({"MASTER_PORT": port or "29500"}, "MASTER_PORT", least=1, most=65_535)) if host else None
