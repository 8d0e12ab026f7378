"""Communication per rank and axis: calls, bytes, time, and the exposed time, in which compute waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megascale.core.units import format_bytes
from megascale.operate.show.chrome_trace import axis_sort_key
from megascale.record.events import COMPUTE, Event, RankEvents


@dataclass(frozen=True)
class AxisCommunication:
    """Communication of a rank on an axis, as means per step: calls, bytes, seconds in flight, exposed seconds.

    The time in flight is the union of all spans: overlapping communication counts once. `rank` is None for a mean over
    ranks.
    """

    rank: int | None
    axis: str
    calls: float
    bytes: float
    communication_s: float
    exposed_s: float

    @property
    def hidden(self) -> float | None:
        """The hidden share of the communication time, 1 - exposed / communication, but at least 0. None without any
        communication time.
        """
        return max(0.0, 1 - self.exposed_s / self.communication_s) if self.communication_s else None

    def as_json(self) -> dict[str, Any]:
        """The fields, per step, and the hidden share."""
        return asdict(self) | {"hidden": self.hidden}


def summarize(events: RankEvents) -> list[AxisCommunication]:
    """The communication of a rank on all axes with events."""
    steps = len({event.step for event in events.events})
    axes: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events.events:
        if event.axis != COMPUTE:
            axes[event.axis].append(event)
    return [
        AxisCommunication(
            rank=events.rank,
            axis=axis,
            calls=len(axis_events) / steps,
            bytes=sum(event.bytes for event in axis_events) / steps,
            communication_s=union_length((event.start, event.end) for event in axis_events) / steps,
            exposed_s=sum(event.exposed for event in axis_events) / steps,
        )
        for axis, axis_events in sorted(axes.items(), key=lambda item: axis_sort_key(item[0]))
    ]


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def mean_over_ranks(shares: Sequence[AxisCommunication]) -> list[AxisCommunication]:
    """The mean over ranks per axis. A rank without communication on an axis counts as 0."""
    ranks = len({share.rank for share in shares})
    axes = sorted({share.axis for share in shares}, key=axis_sort_key)

    def mean(axis: str, field: str) -> float:
        return sum(getattr(share, field) for share in shares if share.axis == axis) / ranks

    fields = ("calls", "bytes", "communication_s", "exposed_s")
    return [AxisCommunication(None, axis, **{field: mean(axis, field) for field in fields}) for axis in axes]


def format_shares(shares: Sequence[AxisCommunication]) -> str:
    """Format a table with a heading."""
    lines = [("rank", "axis", "calls", "bytes", "communication", "exposed", "hidden")]
    lines += [
        (
            "all" if share.rank is None else str(share.rank), share.axis, f"{share.calls:.1f}".removesuffix(".0"),
            format_bytes(share.bytes), f"{share.communication_s * 1e3:.3f} ms", f"{share.exposed_s * 1e3:.3f} ms",
            "-" if share.hidden is None else f"{share.hidden:.1%}",
        )
        for share in shares
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
