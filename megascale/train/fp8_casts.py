"""FP8 casts in training: the statistics of a step (`Fp8Steps`), and a monitor whose alerts come before the loss
diverges (`CastMonitor`).
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median

from megascale.config.backends import Fp8Config
from megascale.core.files import exists
from megascale.parallel.fp8_state import CastStats, Fp8State
from megascale.record.metrics import Alert
from megascale.train.run import Hook, Run
from megascale.train.step import is_logged_step

RISES = {"saturated": 1e-3, "underflow": 0.05, "kurtosis": 12.0}
"""Statistics whose rise raises an alert, and values below which none does; the normal distribution's kurtosis is 3."""

RISE_FACTOR = 4.0  # ratio to the recent median above which a value has risen
MAX_RMS = 2.0  # largest factor between an RMS and its static scale
TINY = 1e-30  # stands for an RMS of zero
RECENT, WARM_UP = 20, 3  # records in a median, and before the first alert

WORDS = {
    "saturated": "share of saturated elements of",
    "underflow": "share of elements that underflow to zero of",
    "kurtosis": "kurtosis of",
    "rms": f"factor beyond {MAX_RMS:g} between RMS and static scale of",
}


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


class RecipeChanges(Hook):
    """Says which recipe of `fp8.schedule` runs from a step on: at a change, and in a run that resumes behind one."""

    def __init__(self, say: Callable[[str], None], recipe: str) -> None:
        self._say, self._running = say, recipe

    def step_begins(self, run: Run) -> None:
        share = run.progress.samples / run.config.samples
        begun = [change for start, change in run.config.fp8.schedule if start <= share]
        if begun and begun[-1] != self._running:
            self._say(f"step {run.progress.step + 1} and later run {begun[-1]} by fp8.schedule")
            self._running = begun[-1]


class CastMonitor:
    """Recent statistics of every operand. `static`: scales are static, and fit as long as an RMS is within MAX_RMS."""

    def __init__(self, *, static: bool = False) -> None:
        self._limits = {**RISES, "rms": MAX_RMS} if static else RISES
        self._recent: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._unusual: set[tuple[str, str]] = set()
        self._records = 0

    @classmethod
    def of(cls, fp8: Fp8Config) -> CastMonitor:
        """Return the monitor of a run. An RMS is over a static scale in all phases, or has no limit."""
        return cls(static=all(phase.facts["scaling"] == "static" for _, phase in fp8.phases))

    def load_history(self, metrics: Path) -> None:
        """Restore the recent statistics of a resumed run from the metrics file, if there is one."""
        text = metrics.read_text(encoding="utf-8") if exists(metrics, optional=True) else ""
        for line in [line for line in text.splitlines() if '"fp8"' in line][-RECENT:]:
            record = json.loads(line)
            with suppress(TypeError):  # another version's statistics
                stats = {name: CastStats(**values) for name, values in record["fp8"].items()}
                list(self.update(record["step"], stats))  # alerts were written then

    def update(self, step: int, cast_stats: Mapping[str, CastStats]) -> Iterator[Alert]:
        """Add a record. Yields an alert for each statistic that is unusual for operands of which it was not before."""
        for kind, limit in self._limits.items():
            found = dict[str, tuple[float, float]]()
            for name, stats in cast_stats.items():
                key, value = (name, kind), float(getattr(stats, kind))
                value = value if kind != "rms" else max(value, 1 / max(value, TINY))  # how far it is from 1
                recent = self._recent[key]
                usual = median(recent) if recent else value
                if value <= (limit if kind == "rms" else max(limit, RISE_FACTOR * usual)):
                    self._unusual.discard(key)
                elif self._records >= WARM_UP and key not in self._unusual:
                    self._unusual.add(key)
                    found[name] = value, usual
                recent.append(value)
            if found:
                worst = max(found, key=lambda name: found[name])
                others = f" and {len(found) - 1} more" if len(found) > 1 else ""
                yield Alert(step, f"{WORDS[kind]} {worst}{others}", *found[worst])
        self._records += bool(cast_stats)
