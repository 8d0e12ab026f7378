"""Memory as torch's allocator sees it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes, beyond what was there before, that are allocated on the CPU at once while `function` runs."""
    return max(_course(function), default=0)


def held_bytes(function: Callable[[], Any]) -> int:
    """The bytes that `function` has allocated on the CPU and that are still in use when it returns."""
    return [0, *_course(function)][-1]


def _course(function: Callable[[], Any]) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        held = function()
    del held
    assert watch.profiler is not None
    events = [event for event in watch.profiler.kineto_results.events() if event.name() == "[memory]"]
    return list(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
