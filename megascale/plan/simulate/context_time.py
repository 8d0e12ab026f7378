"""Exposed time of what ranks that share sequences exchange in attention."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config.run import RunConfig
from megascale.layout import blocks
from megascale.plan.account.context_traffic import context_traffic
from megascale.plan.simulate.link_time import Route, group_route
from megascale.plan.simulate.profiles import Hardware


@dataclass(frozen=True)
class ContextRoutes:
    """The links of ranks that exchange heads, and of those that exchange keys and values. `slowdown`: as in
    `StageTimes`.
    """

    heads: Route
    keys: Route
    slowdown: float

    @classmethod
    def from_config(cls, config: RunConfig, hardware: Hardware) -> ContextRoutes:
        p, world = config.parallel, config.world_size
        heads = group_route(hardware, p.cp_heads, p.tp, world, together=p.tp)
        keys = group_route(hardware, p.cp_keys, p.tp * p.cp_heads, world, together=p.tp)
        return cls(heads, keys, 1 - hardware.attained.overlap)

    def exposed(self, config: RunConfig, part: blocks.AttentionSpec, attention: float, backward: int) -> float:
        """Exposed seconds of a pass of attention that computes for `attention` seconds. Only keys and values that
        travel in a ring overlap with it.
        """
        p, total = config.parallel, 0.0
        hidden = attention * (p.cp_keys - 1) / p.cp_keys if config.overlap.cp else 0.0
        for sent in context_traffic(config, part, backward=bool(backward)):
            if sent.operation == "send_on":
                seconds = self.keys.message(sent.bytes / sent.calls) * sent.calls
                total += max(self.slowdown * seconds, seconds - hidden)
            else:
                route, ranks = (self.heads, p.cp_heads) if sent.group == "cp.heads" else (self.keys, p.cp_keys)
                total += route.collective("all_gather", sent.bytes, ranks)  # the others move as much as an all-gather
        return total
