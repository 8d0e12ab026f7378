"""Alerts for spikes: a loss or gradient norm far above its recent values, which may be the first sign of divergence.

A spike is no reason to restart: most heal (ByteRobust takes a factor of 5 for a signal to look at).
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

from megascale.config.fault import FaultConfig
from megascale.record.metrics import Alert
from megascale.train.run import Hook

if TYPE_CHECKING:
    from megascale.train.reporter import Reporter
    from megascale.train.run import Run, StepResult

WARM_UP_SHARE = 5  # A median needs the window's steps divided by this number


class SpikeMonitor:
    """The recent values of one metric. `add` detects the first value of a spike, and no other for `window` steps: the
    gradient norm of a run that has converged is all spikes.
    """

    def __init__(self, metric: str, factor: float, window: int) -> None:
        self._metric = metric
        self._factor = factor
        self._warm_up = max(window // WARM_UP_SHARE, 2)
        self._recent: deque[float] = deque(maxlen=window)
        self._in_spike = False
        self._window = window
        self._quiet_until = 0

    def add(self, step: int, value: float) -> Alert | None:
        """Add a step's value. Returns an alert at the first value above `factor` times the recent median."""
        median = statistics.median(self._recent) if len(self._recent) >= self._warm_up else 0.0
        was_in_spike, self._in_spike = self._in_spike, median > 0 and value > self._factor * median
        self._recent.append(value)
        if was_in_spike or not self._in_spike or step < self._quiet_until:
            return None
        self._quiet_until = step + self._window
        return Alert(step, self._metric, value, median)


class SpikeAlert(Hook):
    """Writes an alert for a spike of the loss or of the gradient norm, by `fault.spike_factor`."""

    def __init__(self, settings: FaultConfig, reporter: Reporter) -> None:
        self._reporter = reporter
        factor, window = settings.spike_factor, settings.spike_window
        self._loss = SpikeMonitor("loss", factor, window)
        self._grad_norm = SpikeMonitor("grad_norm", factor, window)

    def run_begins(self, run: Run) -> None:
        run.mesh.recorder.log.count("spikes", 0)

    def step_ends(self, run: Run, result: StepResult) -> None:
        if not result.loss_tokens:
            return
        for monitor, value in ((self._loss, result.loss), (self._grad_norm, result.grad_norm)):
            if alert := monitor.add(run.progress.step, value):
                self._reporter.write(alert)
                run.mesh.recorder.log.count("spikes")
