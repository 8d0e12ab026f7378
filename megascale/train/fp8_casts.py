"""FP8 casts in training: the statistics of a step (`Fp8Steps`), and a monitor that warns of a rise in saturation or
underflow before the loss diverges (`CastMonitor`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from megascale.core.files import exists
from megascale.parallel.fp8_state import CastStats, Fp8State
from megascale.train.run import Hook, Run
from megascale.train.step import is_logged_step

MIN_SHARE = {"saturated": 1e-3, "underflow": 0.05}  # shares of a tensor's elements below which no rise is reported
RISE_FACTOR = 4.0  # ratio of a share to the running mean above which a rise is reported
EMA_DECAY = 0.9  # decay of the running means per record
WARM_UP_RECORDS = 3  # records before the first warning; also the largest number of tensors in a warning


class Fp8Steps(Hook):
    """Begins the statistics of a step, and moves them to the history of delayed scaling after its last backward."""

    def __init__(self, state: Fp8State) -> None:
        self._state = state

    def step_begins(self, run: Run) -> None:
        step = run.progress.step + 1
        logged = is_logged_step(run.config.train, step)
        share = run.progress.samples / run.config.samples
        self._state.begin_step(step, share, collect_stats=run.config.fp8.monitor and logged)

    def backwards_end(self, run: Run) -> None:
        self._state.update_history()


class CastMonitor:
    """Exponential moving averages of every tensor's saturated and underflowed shares."""

    def __init__(self) -> None:
        self._running_means: dict[tuple[str, str], float] = {}
        self._records = 0

    def load_history(self, metrics: Path) -> None:
        """Restore the running means of a resumed run from the metrics file, if there is one."""
        text = metrics.read_text(encoding="utf-8") if exists(metrics, optional=True) else ""
        for line in text.splitlines():
            stats = json.loads(line).get("fp8") or {}
            for _ in self.update({name: CastStats(**values) for name, values in stats.items()}):
                pass  # warnings were printed then

    def update(self, cast_stats: Mapping[str, CastStats]) -> Iterator[str]:
        """Add a record. Yields warnings of tensors whose saturation or underflow rose."""
        if not cast_stats:
            return
        for kind, min_share in MIN_SHARE.items():
            shares = {name: float(getattr(stats, kind)) for name, stats in cast_stats.items()}
            means = {name: self._running_means.get((name, kind), share) for name, share in shares.items()}
            increased = [n for n, share in shares.items() if share > max(min_share, RISE_FACTOR * means[n])]
            if increased and self._records >= WARM_UP_RECORDS:
                examples = ", ".join(
                    f"{name} {shares[name]:.1%} (usually {means[name]:.1%})" for name in increased[:WARM_UP_RECORDS]
                )
                rest = f" and {len(increased) - WARM_UP_RECORDS} more" if len(increased) > WARM_UP_RECORDS else ""
                verb = "saturate" if kind == "saturated" else "underflow to zero"
                yield f"more elements than usual {verb} in fp8: {examples}{rest}"
            for name, share in shares.items():
                self._running_means[name, kind] = EMA_DECAY * means[name] + (1 - EMA_DECAY) * share
        self._records += 1
