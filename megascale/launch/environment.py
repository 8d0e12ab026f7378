"""Environment variables that training needs, on GPUs above all: name, value and why. What the user has set stays.

A rank gives them to itself before it imports torch, and so has them under every launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from megascale.core.process import usable_cores
from megascale.launch import flight

NEW_NAMES = (2, 9)
"""The version of torch whose names are the first ones below; earlier ones read `earlier`."""


@dataclass(frozen=True)
class Variable:
    """`also`: other names of the same setting; who has set one of them is left alone."""

    name: str
    value: str
    why: str
    earlier: str = ""
    also: tuple[str, ...] = ()


EVERYWHERE = (
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "32",
        "hardware queues of a GPU, 8 by default; a rank has about 16 streams (compute, one for each communicator and "
        "one that watches it), and those that share a queue wait for each other",
    ),
    Variable(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "memory that is freed in one size serves another: less is lost between blocks of changing sizes",
        "PYTORCH_CUDA_ALLOC_CONF",
        ("PYTORCH_HIP_ALLOC_CONF",),
    ),
)

OF_RUNS = (
    Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "a rank that waits too long has all ranks write what they were doing"),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "how many operations each rank remembers for that; 0 turns it off",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
    ),
    Variable(
        "TORCH_FR_DUMP_TEMP_FILE",
        "RUN/flight/HOST_rank_",
        "where they write it, each with its rank at the end; there the launcher looks for who is to blame",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    ),
)
"""`RUN` is the run's folder."""


def prepare(run: Path | None = None) -> None:
    """Set what is not set. Must come before torch is imported. `run`: the folder of a run of several ranks."""
    os.environ.update(defaults(os.environ, run))


def defaults(env: Mapping[str, str], run: Path | None = None, torch: tuple[int, int] | None = None) -> dict[str, str]:
    """What there is to add to an environment. `torch`: its version, by default that of the one installed."""
    torch = torch or _torch_version()
    found = {}
    for variable in (*EVERYWHERE, *(OF_RUNS if run else ())):
        names = [name for name in (variable.name, variable.earlier, *variable.also) if name]
        if not any(name in env for name in names):
            name = variable.earlier if variable.earlier and torch < NEW_NAMES else variable.name
            found[name] = flight.prefix(run) if run and variable.value.startswith("RUN/") else variable.value
    if "LOCAL_WORLD_SIZE" in env and "OMP_NUM_THREADS" not in env:
        found["OMP_NUM_THREADS"] = str(max(1, usable_cores() // int(env["LOCAL_WORLD_SIZE"])))
    return found


def _torch_version() -> tuple[int, int]:
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)
