"""Metrics of the ranks of a host in Prometheus' form, from their logs: read when they are asked for, without the
ranks' help. A rank whose process has ended has no series.

The job's own numbers, such as its loss, come with rank 0; only its size comes with every host, because rank 0 may be
the one that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megascale.core.process import process_facts
from megascale.operate.store.families import Labels, MetricFamily
from megascale.record.rank_state import RankState

if TYPE_CHECKING:
    from megascale.operate.store.collector import Collector
    from megascale.operate.store.node_rows import RankRows

_OF_STATE = {
    "loss": MetricFamily("loss", "gauge", "mean loss of the last step"),
    "grad_norm": MetricFamily("grad_norm", "gauge", "norm of the gradients of the last step, before clipping"),
    "spikes": MetricFamily("spike_alerts", "counter", "spikes of the loss or of the gradient norm"),
    "skipped_steps": MetricFamily("skipped_steps", "counter", "steps that were not applied: a spike, or no label"),
    "checkpoint_step": MetricFamily("checkpoint_step", "gauge", "step of the last complete checkpoint of this attempt"),
    "checkpoint_time": MetricFamily("checkpoint_timestamp_seconds", "gauge", "when it was complete, Unix time"),
    "checkpoint_failures": MetricFamily("checkpoint_failures", "counter", "checkpoints that could not be written"),
}
"""The job's families by the name of a total in rank 0's state."""


def rank_families(collector: Collector, labels: Labels) -> list[MetricFamily]:
    """Return the families of the ranks that a collector knows. `labels`: of all series."""
    known, states = collector.ranks, collector.live_states()
    rows = {rank: rows for rank, rows in sorted(known.items()) if rank in states}
    families = [*_families_of_states(states, labels), *_families_of_rows(rows, states, labels)]
    if states:
        world = max(state.world for state in states.values())
        families.append(MetricFamily("world_size", "gauge", "ranks of the job's attempt", [(labels, world)]))
    if 0 in states:
        families += _job_families(states[0], labels)
    if 0 in rows:
        families += _work_families(rows[0], states[0], labels)
    return [family for family in families if family.samples]


def _families_of_states(states: Mapping[int, RankState], labels: Labels) -> list[MetricFamily]:
    phase = MetricFamily("rank_phase", "gauge", "1: what the rank does now")
    step = MetricFamily("rank_step", "gauge", "current step, from 1")
    idle = MetricFamily("rank_idle_seconds", "gauge", "time without progress")
    silent = MetricFamily("rank_heartbeat_age_seconds", "gauge", "time without a beat of the rank's heartbeat thread")
    step_time = MetricFamily("rank_step_time_seconds", "gauge", "median time of recent steps")
    started = MetricFamily("rank_start_time_seconds", "gauge", "start of the rank's process, Unix time")
    memory = MetricFamily("rank_resident_memory_bytes", "gauge", "memory of the rank's process on the host")
    for rank, state in states.items():
        of_rank = labels | {"rank": str(rank)}
        phase.add(1, of_rank | {"phase": str(state.phase)})
        step.add(state.step, of_rank)
        idle.add(state.idle_s, of_rank)
        silent.add(state.silent_s, of_rank)
        started.add(state.start, of_rank)
        memory.add(process_facts(state.pid)[1], of_rank)
        if state.step_time_s:
            step_time.add(state.step_time_s, of_rank)
    return [phase, step, idle, silent, step_time, started, memory]


def _families_of_rows(
    rows_by_rank: Mapping[int, RankRows], states: Mapping[int, RankState], labels: Labels
) -> list[MetricFamily]:
    info = MetricFamily("rank_info", "gauge", "1: the rank's place in the layout")
    train = MetricFamily("rank_train_seconds", "counter", "time of steps, without evaluations and saves")
    compute = MetricFamily("rank_compute_seconds", "counter", "time of compute, without waits for communication")
    exposed = MetricFamily("rank_exposed_communication_seconds", "counter", "time in which compute waited, by axis")
    host = MetricFamily("rank_host_seconds", "counter", "time in which training waited for the host, by activity")
    lost = MetricFamily("rank_events_lost", "counter", "events that were overwritten before they were read")
    for rank, rows in rows_by_rank.items():
        of_rank, texts, totals = labels | {"rank": str(rank)}, rows.log.texts(), rows.totals
        info.add(1, of_rank | {axis: str(index) for axis, index in states[rank].coord.items()})
        train.add(totals.train_s, of_rank)
        compute.add(totals.compute_s(texts), of_rank)
        lost.add(totals.lost, of_rank)
        for axis, seconds in totals.exposed_s(texts).items():
            exposed.add(seconds, of_rank | {"axis": axis})
        for activity, seconds in totals.host_s(texts).items():
            host.add(seconds, of_rank | {"activity": activity})
    return [info, train, compute, exposed, host, lost]


def _job_families(state: RankState, labels: Labels) -> Iterator[MetricFamily]:
    for name, family in _OF_STATE.items():
        if name in state.totals:
            yield MetricFamily(family.name, family.kind, family.help, [(labels, state.totals[name])])


def _work_families(rows: RankRows, state: RankState, labels: Labels) -> Iterator[MetricFamily]:
    """The work of all ranks since the start of this attempt, by rank 0's log."""
    totals, peak = rows.totals, state.peak_flops * state.world
    yield MetricFamily("tokens", "counter", "tokens that all ranks have processed", [(labels, totals.tokens)])
    text = "model FLOPs of all ranks, full-attention convention"
    yield MetricFamily("model_flops", "counter", text, [(labels, totals.flops)])
    if peak:
        text = "peak FLOP/s of all devices together"
        yield MetricFamily("peak_flops_per_second", "gauge", text, [(labels, peak)])
