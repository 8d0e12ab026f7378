"""The curves of a run: loss, gradient norm, throughput, MFU and validation loss by step, from `metrics.jsonl`.

Resumes are joined: where a later record has a step that was recorded before, training went back, and the later record
and those after it count.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

METRICS = ("loss", "grad_norm", "lr", "step_time_s", "tokens_per_s", "mfu_full", "mfu_causal", "peak_memory_bytes")
"""Metrics of logged steps that have a curve. A curve lacks what a record lacks, such as MFU without a peak: NaN."""

MOST_POINTS = 2000
"""Most points of a drawn curve."""


class Spike(NamedTuple):
    """An alert: after `step`, `metric` was `value`, far above `recent`, its recent median."""

    step: int
    metric: str
    value: float
    recent: float


@dataclass(frozen=True)
class Curves:
    """`steps`: of the records, ascending. `values`: an array by metric. `valid`: (step, validation loss)."""

    steps: np.ndarray
    values: Mapping[str, np.ndarray]
    valid: tuple[tuple[int, float], ...] = ()
    spikes: tuple[Spike, ...] = ()

    @cached_property
    def last(self) -> dict[str, float]:
        """The values of the last record."""
        return {name: float(column[-1]) for name, column in self.values.items()} if len(self.steps) else {}

    @property
    def last_step(self) -> int:
        """The step of the last record, 0 without one."""
        return int(self.steps[-1]) if len(self.steps) else 0

    def drawn(self, metric: str, points: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and finite values of a metric, thinned to about `points`: of each part of the curve its lowest
        and its highest value, so that no spike is lost.
        """
        keep = np.isfinite(self.values[metric])
        return thin_curve(self.steps[keep], self.values[metric][keep], points)


def thin_curve(x: np.ndarray, y: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and highest point of each of `points` / 2 parts of a curve, and its last point."""
    if len(x) <= points:
        return x, y
    edges = np.linspace(0, len(x), max(1, points // 2) + 1).astype(int)
    kept = {len(x) - 1}
    for start, end in itertools.pairwise(edges):
        if end > start:
            kept |= {start + int(np.argmin(y[start:end])), start + int(np.argmax(y[start:end]))}
    index = np.array(sorted(kept))
    return x[index], y[index]


class MetricsFile:
    """A file of metrics, of which `read` parses what is new. A file that was replaced or cut, as by a resume, is read
    from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._steps: list[int] = []
        self._columns: dict[str, list[float]] = {name: [] for name in METRICS}
        self._valid: list[tuple[int, float]] = []
        self._spikes: list[Spike] = []
        self._curves: Curves | None = None

    def read(self) -> Curves:
        """Return the curves of all whole lines. An absent file is empty. Raises: OSError"""
        if text := self._new_text():
            for line in text.splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # a line cut by a full disk
                    self._add(json.loads(line))
            self._curves = None
        if self._curves is None:
            columns = {name: np.array(column, dtype=float) for name, column in self._columns.items()}
            steps = np.array(self._steps, dtype=np.int64)
            self._curves = Curves(steps, columns, tuple(self._valid), tuple(self._spikes))
        return self._curves

    def _new_text(self) -> bytes:
        try:
            file = open(self._path, "rb")  # noqa: SIM115  closed below
        except FileNotFoundError:
            return b""
        with file:
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._inode or facts.st_size < self._offset:
                self._forget()
                self._inode = facts.st_ino
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole

    def _add(self, record: dict[str, Any]) -> None:
        """Add a record. Raises: ValueError, TypeError or KeyError for anything else"""
        step = int(record["step"])
        if "loss" in record:
            values = {name: float(record.get(name, math.nan)) for name in METRICS}
            self._go_back_to(step)
            self._steps.append(step)
            for name, value in values.items():
                self._columns[name].append(value)
        elif "valid_loss" in record:
            entry = (step, float(record["valid_loss"]))
            while self._valid and self._valid[-1][0] >= step:
                self._valid.pop()
            self._valid.append(entry)
        elif "alert" in record:
            self._spikes.append(Spike(step, str(record["alert"]), float(record["value"]), float(record["recent"])))

    def _go_back_to(self, step: int) -> None:
        """Drop the records of `step` and later."""
        if self._steps and self._steps[-1] >= step:
            first = bisect.bisect_left(self._steps, step)
            del self._steps[first:]
            for column in self._columns.values():
                del column[first:]
