"""A synthetic job: a pipeline schedule whose ranks wait for each other, with slowdowns.

Every step runs the compute schedule of all stages on vectors over steps and replicas: a rank of a tensor-parallel group
waits for the slowest, a stage for its messages, a replica for the others' reductions, and everybody for the totals.
`fleet_tables` has the rows that an event store of the job has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lab import fleet_tables
from lab.fleet_times import FleetFault, FleetLayout, Floats, own_times
from megascale.layout.stages import looped
from megascale.schedule.dependencies import neighbours
from megascale.schedule.interleaved import interleaved_1f1b
from megascale.schedule.ir import Kind, build_schedule, each_action
from megascale.schedule.one_f_one_b import one_f_one_b

MESSAGE_S, TP_S, REDUCE_S, GATHER_S = 0.0004, 0.0006, 0.012, 0.002

PartKey = tuple[str, str, int]
"""Axis, name and chunk of a part of a step."""


@dataclass(frozen=True)
class PartSums:
    """A part of a step of all ranks, [S, pp, replica, tp]: sums of its events in seconds, their number and bytes."""

    total: Floats
    longest: Floats
    exposed: Floats
    count: Floats
    size: Floats


@dataclass(frozen=True)
class StageMessages:
    """Messages of a micro-batch between two stages: when each was `sent`, and `arrived`, [S, replica, tp]."""

    source: int
    target: int
    virtual_stage: int
    microbatch: int
    forward: bool
    sent: Floats
    arrived: Floats


class Fleet:
    """A job. `tables` has the columns of the event store; `seconds` [S]: the steps; `entered` [S, pp, replica, tp]:
    when ranks enter the last reduction of gradients, from the start of the step.
    """

    def __init__(
        self, layout: FleetLayout, seed: int = 0, fault: FleetFault = FleetFault(), *, noise: float = 0.02,
        events: int = 3, work: Floats | None = None, hiccups: float = 0.0,
        gc_recorded: bool = True,
    ) -> None:  # fmt: skip
        """`noise`, `work`, `hiccups`: see `own_times`. `events`: newest steps with messages. `gc_recorded`: False for
        pauses of an unknown cause.
        """
        self.layout, self.fault, self.draw = layout, fault, np.random.default_rng(seed)
        self.shape, self.rank = layout.shape, layout.ranks()
        self.node = self.rank // layout.node_ranks
        self.events, self.gc_recorded = events, gc_recorded
        self.work = np.ones(layout.steps) if work is None else work
        self.times = own_times(layout, fault, self.draw, noise=noise, work=self.work, hiccups=hiccups)
        self.paused = self.draw.integers(0, layout.microbatches, self.shape)  # micro-batch before which a rank pauses
        self.messages: list[StageMessages] = []
        self.parts: dict[PartKey, PartSums] = {}
        self._run()

    @cached_property
    def tables(self) -> dict[str, fleet_tables.Table]:
        """The tables of the event store, by name."""
        return fleet_tables.tables(self)

    def _run(self) -> None:
        """Run the schedule on vectors [S, dp], with times from the start of each step."""
        p = self.shape[1]
        chunks, m, times = self.layout.chunks, self.layout.microbatches, self.times
        schedule = build_schedule(one_f_one_b if chunks == 1 else interleaved_1f1b, p, chunks, m)
        orders = [[*each_action(order)] for order in schedule]
        placement, ready = looped(p, chunks), dict[tuple[Kind, int, int], Floats]()
        host = times.data.copy()
        clock = [host[:, stage] for stage in range(p)]  # [S, dp, tp]
        at = [0] * p
        while any(at[stage] < len(orders[stage]) for stage in range(p)):
            for stage in range(p):
                while at[stage] < len(orders[stage]):
                    kind, chunk, microbatch = action = orders[stage][at[stage]]
                    source, target = neighbours(action, stage, placement)
                    key = (kind, placement.stage(stage, chunk), microbatch)
                    if source is not None and key not in ready:
                        break
                    clock[stage] = self._act(stage, chunk, kind, microbatch, clock[stage], ready.pop(key, None))
                    if target is not None:
                        receiver, _ = placement.places[target]
                        ready[kind, target, microbatch] = self._send(
                            stage, receiver, kind, microbatch, target, clock[stage]
                        )
                    at[stage] += 1
        ends = np.stack(clock, 1)
        self._finish(ends)

    def _act(
        self, stage: int, chunk: int, kind: Kind, microbatch: int, now: Floats, arrival: Floats | None
    ) -> Floats:  # fmt: skip
        """Run an action of a stage's ranks at `now` [S, dp, tp], and return when it ends."""
        own = (self.times.forward if kind is Kind.F else self.times.backward)[:, stage, :, :, chunk]
        if kind is Kind.F and chunk == 0 and self.times.gc.any():
            now = now + self.times.gc[:, stage] * (self.paused[:, stage] == microbatch)
        start = now if arrival is None else np.maximum(now, arrival)
        done = start + own
        tp = TP_S if self.shape[3] > 1 else 0.0
        end = done.max(2, keepdims=True) + tp + 0 * done
        self._add(("compute", str(kind), chunk), stage, total=end - now, exposed=end - now - own, count=1)
        if self.shape[3] > 1:
            self._add(("tp", "all_reduce", chunk), stage, total=end - done, exposed=end - done, count=4, size=1 << 22)
        if arrival is not None:
            self._add(("pp", "receive", chunk), stage, total=start - now, exposed=start - now, count=1, size=1 << 22)
        return end

    def _send(self, stage: int, target: int, kind: Kind, microbatch: int, virtual: int, now: Floats) -> Floats:
        """Send to the next stage, and return the arrivals [S, dp, tp]."""
        delay = MESSAGE_S * self.draw.uniform(0.95, 1.1, now.shape)
        if self.layout.jitter:
            delay *= np.exp(self.layout.jitter * self.draw.standard_normal(now.shape))
        arrival = now + delay
        if self.fault.kind == "link":
            ends = self.node[stage], self.node[target]
            there = (ends[0] == self.fault.node) & ((ends[1] == self.fault.peer) | (self.fault.peer < 0))
            if self.fault.peer < 0:
                there |= ends[1] == self.fault.node
            slow = np.zeros(now.shape)
            slow[self.fault.since :] = there * MESSAGE_S * (self.fault.factor - 1)
            arrival = arrival + slow
        self._add(("pp", "send", -1), stage, total=arrival - now, exposed=0 * now, count=1, size=1 << 22)
        if self.events:
            newest = slice(-self.events, None)
            self.messages.append(
                StageMessages(stage, target, virtual, microbatch, kind is Kind.F, now[newest], arrival[newest])
            )
        return arrival

    def _finish(self, ends: Floats) -> None:
        """Reduce the gradients over dp, sum the totals, update and all-gather; `ends` [S, pp, dp, tp]."""
        times, d = self.times, self.shape[2]
        jitter = self.draw.uniform(0, 1e-4, self.shape)
        self.entered = ends + jitter
        slow = np.ones(self.shape)
        if self.fault.kind == "dp_group":
            slow[self.fault.since :] += (self.fault.factor - 1) * (self.rank % self.shape[3] == self.fault.rank)
        reduced = self.entered.max(2, keepdims=True) + (REDUCE_S * slow if d > 1 else 0.0)
        totals = (reduced + times.norm).max((1, 2, 3), keepdims=True) + 2e-4
        updated = totals + times.update
        end = updated.max((1, 2, 3), keepdims=True) + GATHER_S
        wait = reduced - self.entered
        for stage in range(self.shape[1]):
            norm, update = times.norm[:, stage], times.update[:, stage]
            self._add(("compute", "grad_norm", -1), stage, total=wait[:, stage] + norm, exposed=wait[:, stage], count=1)
            if d > 1:
                self._add(("dp", "reduce_scatter", 0), stage, total=wait[:, stage], exposed=wait[:, stage], count=1,
                          size=1 << 28)  # fmt: skip
            left = (totals - reduced - times.norm)[:, stage]
            self._add(("world", "all_reduce", -1), stage, total=left, exposed=left, count=1, size=64)
            self._add(("compute", "update", 0), stage, total=update, exposed=0 * update, count=1)
            left = (end - updated)[:, stage]
            if d > 1:
                self._add(("dp", "all_gather", 0), stage, total=left, exposed=left, count=1, size=1 << 27)
            self._add(("host", "data", -1), stage, total=times.data[:, stage], exposed=times.data[:, stage], count=1)
            if times.gc.any() and self.gc_recorded:
                self._add(("host", "gc", -1), stage, total=times.gc[:, stage], exposed=times.gc[:, stage], count=1)
        self.seconds = end[:, 0, 0, 0]

    def _add(self, part: PartKey, stage: int, *, total: Floats, exposed: Floats, count: int, size: int = 0) -> None:
        sums = self.parts.get(part)
        if sums is None:
            sums = self.parts[part] = PartSums(*(np.zeros(self.shape) for _ in range(5)))
        sums.total[:, stage] += total
        sums.exposed[:, stage] += exposed
        np.maximum(sums.longest[:, stage], total, out=sums.longest[:, stage])
        sums.count[:, stage] += count
        sums.size[:, stage] += size

    @property
    def starts(self) -> Floats:
        """The starts of the steps, in seconds after the first."""
        return np.concatenate([[0.0], np.cumsum(self.seconds)[:-1]])
