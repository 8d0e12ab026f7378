"""Defaults of environment variables for training: name, value and reason. The user's own values take precedence.

A rank sets the defaults before it imports torch, under every launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from megascale.core.env_numbers import openmp_threads
from megascale.core.process import usable_cores
from megascale.core.rank import local_world_size
from megascale.operate.diagnose.hang import flight

RENAMED_IN_TORCH = (2, 9)  # the first version of torch that reads `name`; earlier versions read `old_name`


@dataclass(frozen=True)
class EnvDefault:
    """The default of an environment variable. `old_name`: its name before torch 2.9. `aliases`: further names of the
    setting; a variable set under any name keeps its value.
    """

    name: str
    value: str
    reason: str
    old_name: str = ""
    aliases: tuple[str, ...] = ()


COMMON_DEFAULTS = (
    EnvDefault(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "32",
        "hardware queues of a GPU, 8 by default; a rank has about 16 streams (compute, and two for each communicator), "
        "and streams that share a queue wait for each other",
    ),
    EnvDefault(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "memory freed in blocks of one size can be allocated in another size: less fragmentation",
        "PYTORCH_CUDA_ALLOC_CONF",
        ("PYTORCH_HIP_ALLOC_CONF",),
    ),
)

MULTI_RANK_DEFAULTS = (
    EnvDefault(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1",
        "a timeout makes all ranks dump NCCL's flight recorder: their last operations",
    ),
    EnvDefault(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "operations in the flight recorder of a rank; 0 turns the recorder off",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
    ),
    EnvDefault(
        "TORCH_FR_DUMP_TEMP_FILE",
        "RUN/flight/HOST_rank_",
        "path of a rank's dump, before the rank's number; the launcher reads the dumps to find the stuck rank",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    ),
)
"""Defaults for runs of several ranks. `RUN` stands for the run's folder."""

HOST_COUNTS = {
    "SLURM_JOB_NUM_NODES": "srun or launch/slurm.sbatch",
    "PBS_NUM_NODES": "launch/torchrun.sh on each host",
    "PET_NNODES": "torchrun in each pod",
}
"""Variables of shells and scripts with the number of the allocation's hosts, and what starts ranks on all of them."""


def warn_of_idle_hosts(world_size: int, env: Mapping[str, str] = os.environ) -> str:
    """Return a warning if the ranks that this process starts leave hosts of the allocation idle, else ""."""
    for name, launcher in HOST_COUNTS.items():
        hosts = env.get(name, "")
        if hosts.isascii() and hosts.isdecimal() and hosts not in ("0", "1"):
            what = f"all {world_size} ranks start on this host, one of {hosts} ({name})"
            return f"WARNING: {what}  -> {launcher} starts them on all"
    return ""


def set_defaults(run_folder: Path | None = None) -> None:
    """Set the variables that are not set. Call before importing torch. `run_folder`: for a run of several ranks."""
    os.environ.update(missing_defaults(os.environ, run_folder))


def missing_defaults(
    env: Mapping[str, str], run_folder: Path | None = None, torch_version: tuple[int, ...] | None = None
) -> dict[str, str]:
    """Return the variables to add to an environment. `torch_version`: by default the installed torch's."""
    torch_version = torch_version or tuple(map(int, version("torch").split(".")[:2]))
    missing = {}
    for variable in (*COMMON_DEFAULTS, *(MULTI_RANK_DEFAULTS if run_folder else ())):
        names = [name for name in (variable.name, variable.old_name, *variable.aliases) if name]
        if not any(name in env for name in names):
            name = variable.old_name if variable.old_name and torch_version < RENAMED_IN_TORCH else variable.name
            missing[name] = variable.value
            if run_folder and variable.value.startswith("RUN/"):
                missing[name] = flight.dump_prefix(run_folder)
    if "LOCAL_WORLD_SIZE" in env and openmp_threads(env) is None:
        missing["OMP_NUM_THREADS"] = str(max(1, usable_cores() // local_world_size(1, env)))
    return missing
