"""This process's rank and the rendezvous endpoint, from the environment variables of a launcher.

| variables | meaning |
|---|---|
| RANK and WORLD_SIZE, of torchrun or an operator | a rank, also inside srun or mpirun |
| SLURM_STEP_ID and SLURM_PROCID, several tasks | a rank of srun |
| the same with SLURM_PTY_PORT | the shell of `srun --pty`, in which a user starts a job of many ranks: no rank |
| the same with a single task, or SLURM_PROCID alone | a shell on a node (salloc), a batch script: no rank |
| OMPI_COMM_WORLD_RANK, PMI_RANK and others, several | a rank of mpirun |
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megascale.core.env_numbers import whole_number
from megascale.core.errors import ConfigError, Problem
from megascale.core.process import die_with_parent

STORE_VARIABLE = "MEGASCALE_STORE"
"""`host:port` of the store, set by megascale's launcher; on rank 0 `host:port:fd`, `fd` being the listening socket."""

NODE_VARIABLE = "MEGASCALE_NODE"
"""Environment variable: name of the node, set by `driver.scheduler`. Ranks of different nodes share no memory, even if
both nodes are processes of a single host.
"""

MAX_RANKS_NAMED = 16

_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Rank, number of ranks and local rank under Open MPI, MVAPICH2, LSF's jsrun, and MPICH or Intel MPI."""


@dataclass(frozen=True)
class Rank:
    """This process's place in the job. `rank` is global, `local_rank` counts on this host. `variables`: those of the
    environment that say so, "" for ranks that no launcher started.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    variables: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.host}"


def rank_from_environment(env: Mapping[str, str] = os.environ) -> Rank | None:
    """Read the rank from the variables in the table above; None for a process that is no rank.

    Raises: ConfigError for a variable that is not a number, for variables that contradict each other, and for a second
    task of `srun --pty`.
    """
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in env and other in env:
            hint = f"set both, or unset {other}, and megascale train starts the ranks"
            raise ConfigError([_problem(other, f"{env[other]!r}, but {name} is not set", hint)])
    if "RANK" in env:
        return _rank(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    tasks = whole_number(env, "SLURM_STEP_NUM_TASKS", 1)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        if tasks == 1:
            return None
        if "SLURM_PTY_PORT" not in env:
            return _rank(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        if whole_number(env, "SLURM_PROCID"):
            what = "srun --pty gives its terminal to task 0; this is another task"
            raise ConfigError([_problem("SLURM_PTY_PORT", what, "srun without --pty, or with --ntasks 1")])
        return None
    found = [names for names in _MPI_VARIABLES if names[0] in env and whole_number(env, names[1], 1) > 1]
    return _rank(env, *found[0]) if found else None


def _rank(env: Mapping[str, str], name: str, size: str, local: str, local_size: str = "") -> Rank:
    """Read the rank from variables of these names. Without a local rank all ranks are on this host."""
    world_size = whole_number(env, size, least=1)
    rank = whole_number(env, name, most=world_size - 1)
    on_host = whole_number(env, local_size, world_size, least=1, most=world_size)
    local_rank = whole_number(env, local, rank % on_host, most=on_host - 1)
    return Rank(rank, world_size, local_rank, socket.gethostname(), f"{name}={rank} and {size}={world_size}")


def on_one_host(world_size: int, env: Mapping[str, str] = os.environ) -> bool:
    """Return True if torchrun, Slurm or megascale's launcher says that all ranks of the job are on this host."""
    nodes = env.get("SLURM_STEP_NUM_NODES")
    return env.get("LOCAL_WORLD_SIZE") == str(world_size) or ("LOCAL_WORLD_SIZE" not in env and nodes == "1")


def local_world_size(default: int, env: Mapping[str, str] = os.environ) -> int:
    """Number of the job's ranks on this host, from LOCAL_WORLD_SIZE of torchrun or our launcher.

    Raises: ConfigError for a variable that is not a number above 0.
    """
    return whole_number(env, "LOCAL_WORLD_SIZE", default, least=1)


def die_with_torchrun() -> None:
    """Let this process end with torchrun, if that has started it: a killed torchrun leaves its workers running."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())


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
        if port is None:
            job, step = whole_number(env, "SLURM_JOB_ID"), whole_number(env, "SLURM_STEP_ID")
            port = str(20000 + (10 * job + step) % 10000)
    port = "29500" if port is None else port
    return (host, whole_number({"MASTER_PORT": port}, "MASTER_PORT", least=1, most=65_535)) if host else None


def launcher_store(env: Mapping[str, str] = os.environ) -> tuple[str, int, int | None] | None:
    """Host and port of the store of megascale's launcher, and rank 0's listening descriptor; None under another.

    Raises: ConfigError for a malformed variable.
    """
    if STORE_VARIABLE not in env:
        return None
    match = re.fullmatch(r"([^:]+):(\d{1,5})(?::(\d{1,9}))?", env[STORE_VARIABLE])
    if match is None:
        hint = "unset the variable: megascale train sets it for its ranks"
        raise ConfigError([_problem(STORE_VARIABLE, f"{env[STORE_VARIABLE]!r} is not host:port", hint)])
    return match[1], int(match[2]), int(match[3]) if match[3] else None


def _problem(name: str, message: str, hint: str = "") -> Problem:
    return Problem("environment", name, message, hint or "unset the variable, or start the ranks with torchrun or srun")


def format_ranks(ranks: Sequence[int], most: int = MAX_RANKS_NAMED) -> str:
    """Return "rank 1" or "ranks 1, 2 and 7 more"."""
    rest = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{rest}"
