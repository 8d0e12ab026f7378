"""The wall time of a run's steps, from the first to the last of a cube: inside of them and outside, over all attempts.

Steps that the cube lacks, because the store has rows of them from some ranks only or from none, are left out: their
time is known, but not what was done in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megascale.operate.diagnose.slow.step_cube import Booleans, Columns, Floats, Integers, StepCube

BETWEEN, RESTARTS, LOST, PROFILED = "between steps", "restarts", "lost steps", "profiled steps"


@dataclass(frozen=True)
class WallTime:
    """Seconds `inside_s` of a cube's steps without those under a profiler, and `outside` by part, as means over ranks.
    `left_out` steps took `left_out_s`, which is no part of either.
    """

    inside_s: float
    outside: Mapping[str, float]
    left_out: int = 0
    left_out_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.inside_s + sum(self.outside.values())


def wall_time(cube: StepCube, steps: Columns, profiled: Booleans) -> WallTime:
    """Return the wall time of a cube's steps. `steps`: the table, with all attempts, and also with steps that the cube
    lacks. `profiled`: rows of it.
    """
    if not len(cube.steps):
        return WallTime(0.0, {})
    last, times = int(cube.steps[-1]), _StepTimes.of_table(cube, steps, profiled)
    attempt, number, took = times.attempt, times.number, times.end - times.start
    newest = np.zeros(int(number.max()) + 1, np.int64)
    np.maximum.at(newest, number, attempt)
    stays = (attempt == newest[number]) & (number <= last)  # most of the others a later attempt ran again
    known = stays & np.isin(number, cube.steps)
    same = np.diff(attempt) == 0
    absent, apart = np.where(same, np.diff(number) - 1, 0), times.start[1:] - times.end[:-1]
    left_out_s = float(took[stays & ~known].sum() + apart[absent > 0].sum())
    inside_s = float(took[known & ~times.profiled].sum())
    outside = {
        BETWEEN: 0.0, RESTARTS: float(apart[~same].clip(0).sum()), LOST: float(took[~stays].sum()),
        PROFILED: float(took[known & times.profiled].sum()),
    }  # fmt: skip
    whole = float(times.end.max() - times.start.min())
    outside[BETWEEN] = max(0.0, whole - left_out_s - inside_s - sum(outside.values()))
    named = {name: seconds for name, seconds in outside.items() if seconds}
    return WallTime(inside_s, named, int((stays & ~known).sum() + absent.sum()), left_out_s)


@dataclass(frozen=True)
class _StepTimes:
    """The steps of each attempt, in their order: `start` and `end` in seconds since the first, as means over ranks."""

    attempt: Integers
    number: Integers
    profiled: Booleans
    start: Floats
    end: Floats

    @classmethod
    def of_table(cls, cube: StepCube, steps: Columns, profiled: Booleans) -> _StepTimes:
        """Read the steps from a cube's first on; of the last attempt up to the cube's last: the next are not whole."""
        attempt, number, rank = (np.asarray(steps[name]).astype(np.int64) for name in ("attempt", "step", "rank"))
        ahead = (attempt == attempt.max()) & (number > cube.steps[-1])
        mine = (number >= cube.steps[0]) & ~ahead & (cube.places.index(rank) >= 0)
        keys, at, ranks = np.unique(
            np.stack([attempt[mine], number[mine]]), axis=1, return_inverse=True, return_counts=True
        )
        at, zero_ns = at.reshape(-1), np.asarray(steps["start_ns"])[mine].min()
        start, end = (
            np.bincount(at, (np.asarray(steps[name])[mine] - zero_ns) / 1e9) / ranks for name in ("start_ns", "end_ns")
        )
        return cls(keys[0], keys[1], np.bincount(at, profiled[mine]) > 0, start, end)
