"""Where the GPU suite runs: on GPUs, or as a rehearsal on CPU processes that shows that the tests themselves run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.device import Device, detect_device, gpu_count, ranks_per_gpu
from tests.runs import build_run, curve_of
from tests.worlds import run_world

REHEARSAL = "MEGASCALE_REHEARSE_GPU_TESTS"
"""Environment variable: run on CPU processes what does not need a GPU. `tools/test_gpu.py --rehearse` sets it."""

PROCESSES = 8
"""Devices that a rehearsal has."""


def rehearsing() -> bool:
    """Whether CPU processes stand in for GPUs."""
    return REHEARSAL in os.environ


def available() -> int:
    """Ranks that this host has a device for: with NCCL_MULTI_RANK_GPU_ENABLE=1 two on each GPU."""
    return PROCESSES if rehearsing() else gpu_count() * ranks_per_gpu()


def world_of(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(rank, *arguments)` on each of `world` devices; the results in rank order."""
    return run_world(world, function, *arguments, gpu=not rehearsing())


def device_of(rank: Rank) -> Device:
    """The device of a rank that `world_of` started."""
    return detect_device(rank.local_rank, allow_gpu=not rehearsing())


def run_of(rank: Rank, config: RunConfig) -> Any:
    """A run built on this rank's device."""
    return build_run(rank, config, gpu=not rehearsing())


def curve_on(rank: Rank, config: RunConfig, steps: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a run on this rank's device."""
    return curve_of(run_of(rank, config), steps)


def furthest(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """The largest relative difference between two curves."""
    pairs = [(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)
