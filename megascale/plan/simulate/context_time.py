"""Exposed time of what ranks that share sequences exchange in attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megascale.config.parallel import ParallelConfig
from megascale.layout.parts.traffic import CommOp
from megascale.plan.simulate.link_time import Route, group_route
from megascale.plan.simulate.profiles import Hardware


@dataclass(frozen=True)
class ContextRoutes:
    """The links of `cp_heads` ranks that exchange heads, and of `cp_keys` ranks that exchange keys and values.
    `slowdown`: as in `StageTimes`; `overlap`: a ring's messages overlap with attention.
    """

    heads: Route
    keys: Route
    cp_heads: int
    cp_keys: int
    slowdown: float
    overlap: bool

    @classmethod
    def of_layout(cls, hardware: Hardware, p: ParallelConfig, world: int, overlap: bool) -> ContextRoutes:
        """Find the links of a job of `world` ranks."""
        heads = group_route(hardware, p.cp_heads, p.tp, world, together=p.tp)
        keys = group_route(hardware, p.cp_keys, p.tp * p.cp_heads, world, together=p.tp)
        return cls(heads, keys, p.cp_heads, p.cp_keys, 1 - hardware.attained.overlap, overlap)

    def exposed(self, exchanges: Iterable[CommOp], attention: float) -> float:
        """Exposed seconds of the exchanges of a pass of attention that computes for `attention` seconds. Only keys and
        values that travel in a ring overlap with it.
        """
        total, hidden = 0.0, attention * (self.cp_keys - 1) / self.cp_keys if self.overlap else 0.0
        for sent in exchanges:
            if sent.operation == "send_on":
                seconds = self.keys.message(sent.bytes / sent.calls) * sent.calls
                total += max(self.slowdown * seconds, seconds - hidden)
            else:
                route, ranks = (self.heads, self.cp_heads) if sent.group == "cp.heads" else (self.keys, self.cp_keys)
                total += route.collective("all_gather", sent.bytes, ranks)  # the others move as much as an all-gather
        return total
