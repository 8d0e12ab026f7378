"""Which process of a job this is, as torchrun or Slurm say in the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


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

    A batch script has SLURM_PROCID too, but no step of its own tasks: there the answer is None.
    """
    host = socket.gethostname()
    if "RANK" in env and "WORLD_SIZE" in env:
        rank = int(env["RANK"])
        return Rank(rank, int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", rank)), host)
    if env.get("SLURM_STEP_ID", "").isdigit() and "SLURM_PROCID" in env:
        tasks = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
        return Rank(int(env["SLURM_PROCID"]), tasks, int(env.get("SLURM_LOCALID", "0")), host)
    return None
