"""Metrics of the ranks of a host in Prometheus' form, from their logs: read when they are asked for, without the
ranks' help. A rank whose process has ended has no series.

The job's own numbers, such as its loss, come with rank 0; only its size comes with every host, because rank 0 may be
the one that is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascale.core.process import process_facts
from megascale.operate.store.families import Families, Labels, MetricFamily
from megascale.record.rank_state import RankState

if TYPE_CHECKING:
    from megascale.operate.store.collector import Collector
    from megascale.operate.store.node_rows import RankRows

_OF_STATE = {
    "loss": ("loss", "mean loss of the last step"),
    "grad_norm": ("grad_norm", "norm of the gradients of the last step, before clipping"),
    "checkpoint_step": ("checkpoint_step", "step of the last complete checkpoint of this attempt"),
    "checkpoint_time": ("checkpoint_timestamp_seconds", "completion of the last checkpoint of this attempt, Unix time"),
}
_COUNTS = {
    "spikes": ("spike_alerts", "spikes of the loss or of the gradient norm"),
    "skipped_steps": ("skipped_steps", "steps that were not applied: a spike, or no label"),
    "checkpoint_failures": ("checkpoint_failures", "checkpoints that could not be written"),
}
"""The job's gauges and counters by the name of a total in rank 0's state."""


def rank_families(collector: Collector, labels: Labels) -> list[MetricFamily]:
    """Return the families of the ranks that a collector knows. `labels`: of all series."""
    found, known, states = Families(labels), collector.ranks, collector.live_states()
    for rank, state in states.items():
        _add_state(found, {"rank": str(rank)}, state)
    for rank, rows in sorted(known.items()):
        if rank in states:
            _add_totals(found, {"rank": str(rank)}, states[rank], rows)
    if states:
        found.gauge("world_size", "ranks of the job's attempt", max(state.world for state in states.values()))
    if 0 in states:
        _add_job(found, states[0], known.get(0))
    return list(found)


def _add_job(found: Families, state: RankState, rows: RankRows | None) -> None:
    """Add what rank 0 knows of the job. `rows`: of the work of all ranks since the start of this attempt."""
    for add, of_state in ((found.gauge, _OF_STATE), (found.counter, _COUNTS)):
        for name, described in of_state.items():
            if name in state.totals:
                add(*described, state.totals[name])
    if rows is not None:
        found.counter("tokens", "tokens that all ranks have processed", rows.totals.tokens)
        found.counter("model_flops", "model FLOPs of all ranks, full-attention convention", rows.totals.flops)
        if peak := state.peak_flops * state.world:
            found.gauge("peak_flops_per_second", "peak FLOP/s of all devices together", peak)


def _add_state(found: Families, rank: Labels, state: RankState) -> None:
    found.gauge("rank_phase", "1: what the rank does now", 1, rank | {"phase": str(state.phase)})
    found.gauge("rank_step", "current step, from 1", state.step, rank)
    found.gauge("rank_idle_seconds", "time without progress", state.idle_s, rank)
    beat = "time without a beat of the rank's heartbeat thread"
    found.gauge("rank_heartbeat_age_seconds", beat, state.silent_s, rank)
    if state.step_time_s:
        found.gauge("rank_step_time_seconds", "median time of recent steps", state.step_time_s, rank)
    found.gauge("rank_start_time_seconds", "start of the rank's process, Unix time", state.start, rank)
    memory = process_facts(state.pid)[1]
    found.gauge("rank_resident_memory_bytes", "memory of the rank's process on the host", memory, rank)


def _add_totals(found: Families, rank: Labels, state: RankState, rows: RankRows) -> None:
    totals = rows.totals
    compute_s, exposed_s, host_s = totals.seconds(rows.log.texts())
    place = {axis: str(index) for axis, index in state.coord.items()}
    found.gauge("rank_info", "1: the rank's place in the layout", 1, rank | place)
    found.counter("rank_train_seconds", "time of steps, without evaluations and saves", totals.train_s, rank)
    compute = "time of compute, without waits for communication"
    found.counter("rank_compute_seconds", compute, compute_s, rank)
    exposed = "time in which compute waited, by axis"
    for axis, seconds in exposed_s.items():
        found.counter("rank_exposed_communication_seconds", exposed, seconds, rank | {"axis": axis})
    host = "time in which training waited for the host, by activity"
    for activity, seconds in host_s.items():
        found.counter("rank_host_seconds", host, seconds, rank | {"activity": activity})
    found.counter("rank_events_lost", "events that were overwritten before they were read", totals.lost, rank)
