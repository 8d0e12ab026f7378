"""Memory use by torch's CPU allocator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the peak of bytes allocated on the CPU while `function` runs, above the bytes at its start."""
    return max(_course(function), default=0)


def held_bytes(function: Callable[[], Any]) -> int:
    """Return the bytes allocated on the CPU by `function` and still in use at its return."""
    return [0, *_course(function)][-1]


def _course(function: Callable[[], Any]) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        held = function()
    del held
    assert watch.profiler is not None
    events = [event for event in watch.profiler.kineto_results.events() if event.name() == "[memory]"]
    return list(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
