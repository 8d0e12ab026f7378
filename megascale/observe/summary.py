"""How much a rank communicated on each axis, and how much of that its compute waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megascale.core.events import COMPUTE, Event, RankEvents
from megascale.core.units import format_bytes
from megascale.observe.timeline import order


@dataclass(frozen=True)
class Share:
    """Means over the steps: calls, bytes, seconds of communication and seconds in which compute waited for it.

    Communications that overlap in time count once. `rank` is None in a mean over ranks.
    """

    rank: int | None
    axis: str
    calls: float
    bytes: float
    communication: float
    exposed: float

    @property
    def hidden(self) -> float | None:
        """The share of communication that compute did not wait for. It is 0 where compute waited longer than the
        communication took, and None where none took any time.
        """
        return max(0.0, 1 - self.exposed / self.communication) if self.communication else None

    def as_json(self) -> dict[str, Any]:
        """The fields with their units, per step."""
        return {
            "rank": self.rank,
            "axis": self.axis,
            "calls": self.calls,
            "bytes": self.bytes,
            "communication_s": self.communication,
            "exposed_s": self.exposed,
            "hidden": self.hidden,
        }


def summarize(events: RankEvents) -> list[Share]:
    """A rank's share on each axis that it used."""
    steps = len({event.step for event in events.events})
    axes: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events.events:
        if event.axis != COMPUTE:
            axes[event.axis].append(event)
    return [
        Share(
            rank=events.rank,
            axis=axis,
            calls=len(found) / steps,
            bytes=sum(event.bytes for event in found) / steps,
            communication=covered((event.start, event.end) for event in found) / steps,
            exposed=sum(event.exposed for event in found) / steps,
        )
        for axis, found in sorted(axes.items(), key=lambda item: order(item[0]))
    ]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def over_ranks(shares: Sequence[Share]) -> list[Share]:
    """The mean over ranks for each axis; a rank without an axis counts as 0."""
    ranks = len({share.rank for share in shares})
    axes = sorted({share.axis for share in shares}, key=order)

    def mean(axis: str, field: str) -> float:
        return sum(getattr(share, field) for share in shares if share.axis == axis) / ranks

    fields = ("calls", "bytes", "communication", "exposed")
    return [Share(None, axis, **{field: mean(axis, field) for field in fields}) for axis in axes]


def table(shares: Sequence[Share]) -> str:
    """Shares as lines of text under a heading."""
    lines = [("rank", "axis", "calls", "bytes", "communication", "exposed", "hidden")]
    for share in shares:
        lines.append(
            (
                "all" if share.rank is None else str(share.rank),
                share.axis,
                f"{share.calls:.1f}".removesuffix(".0"),
                format_bytes(share.bytes),
                f"{share.communication * 1e3:.3f} ms",
                f"{share.exposed * 1e3:.3f} ms",
                "-" if share.hidden is None else f"{share.hidden:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
