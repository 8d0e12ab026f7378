"""Sums over all events that were drained of a rank's log: the rank's counters, for metrics.

Texts are indices of the log's texts, which are resolved when the sums are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megascale.record.events import COMPUTE, HOST_AXIS

if TYPE_CHECKING:
    from megascale.record.log_reader import Drained

_AXIS = 1 << 16  # a key is the index of the axis times this number, plus the index of the name


@dataclass
class RankTotals:
    """Sums since the rank's start, which never decrease. `train_s`: time of steps, without evaluations and saves;
    `lost`: events that were overwritten before they were read. One thread adds, others may read.
    """

    train_s: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    lost: int = 0
    _busy: dict[int, float] = field(default_factory=dict)
    _exposed: dict[int, float] = field(default_factory=dict)

    def add(self, drained: Drained) -> None:
        """Add new events and steps."""
        import numpy as np

        events, steps = drained.events, drained.steps
        self.train_s += float(steps["train"].sum())
        self.tokens += int(steps["tokens"].sum())
        self.flops += float(steps["flops"].sum())
        self.lost += drained.lost
        keys, place = np.unique(events["axis"].astype(np.int64) * _AXIS + events["name"], return_inverse=True)
        busy = np.maximum(events["end"] - events["start"] - events["exposed"], 0.0)  # rounded: a bit below 0
        for sums, times in ((self._busy, busy), (self._exposed, events["exposed"])):
            for key, seconds in zip(keys.tolist(), np.bincount(place, times, len(keys)).tolist(), strict=True):
                sums[key] = sums.get(key, 0.0) + seconds

    def compute_s(self, texts: Sequence[str]) -> float:
        """Return the time of actions of compute, without the waits in them. `texts`: of the log."""
        return _sums(self._busy, texts, lambda axis, name: axis if axis == COMPUTE else "").get(COMPUTE, 0.0)

    def exposed_s(self, texts: Sequence[str]) -> dict[str, float]:
        """Return the time in which compute waited for communication, by axis."""
        return _sums(self._exposed, texts, lambda axis, name: "" if axis in (COMPUTE, HOST_AXIS) else axis)

    def host_s(self, texts: Sequence[str]) -> dict[str, float]:
        """Return the time that training waited for an activity of the host, such as data, by name."""
        return _sums(self._exposed, texts, lambda axis, name: name if axis == HOST_AXIS else "")


def _sums(sums: dict[int, float], texts: Sequence[str], name_of: Callable[[str, str], str]) -> dict[str, float]:
    """Return sums by what `name_of` returns for axis and name; without those for which it is empty."""
    found: dict[str, float] = {}
    for key, seconds in sums.copy().items():
        axis, name = divmod(key, _AXIS)
        if axis < len(texts) and name < len(texts) and (label := name_of(texts[axis], texts[name])):
            found[label] = found.get(label, 0.0) + seconds
    return found
