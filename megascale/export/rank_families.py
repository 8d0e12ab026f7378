"""Metrics of the ranks of a host in Prometheus' form, from their flight records: read when they are asked for, without
the ranks' help. A rank whose process has ended has no series.

The job's own numbers, such as its loss, come with rank 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from megascale.core.flight_reader import read_flight_record
from megascale.core.flight_record import FlightRecord, FlightRecordError
from megascale.core.process import process_exists, process_facts
from megascale.export.families import Family, Labels

_JOB = {
    "loss": Family("loss", "gauge", "mean loss of the last step"),
    "grad_norm": Family("grad_norm", "gauge", "norm of the gradients of the last step, before clipping"),
    "tokens": Family("tokens", "counter", "tokens that all ranks have processed"),
    "flops": Family("model_flops", "counter", "model FLOPs of all ranks, full-attention convention"),
    "peak_flops": Family("peak_flops_per_second", "gauge", "peak FLOP/s of all devices, where it is known"),
    "spikes": Family("spike_alerts", "counter", "spikes of the loss or of the gradient norm"),
    "checkpoint_step": Family("checkpoint_step", "gauge", "step of the last complete checkpoint of this attempt"),
    "checkpoint_time": Family("checkpoint_timestamp_seconds", "gauge", "when it was complete"),
}
"""Families by the name of a total in the flight record."""


def read_records(paths: Mapping[int, Path]) -> dict[int, FlightRecord]:
    """Read the records of ranks whose processes run. `paths`: by rank; another thread may add to them."""
    records = {}
    for rank, path in dict(paths).items():
        with contextlib.suppress(OSError, FlightRecordError):
            record = read_flight_record(path)
            if process_exists(record.pid):
                records[rank] = record
    return records


def rank_families(records: Mapping[int, FlightRecord], labels: Labels) -> Iterable[Family]:
    """Return the families of ranks. `labels`: of all series."""
    phase = Family("rank_phase", "gauge", "1: what the rank does now")
    step = Family("rank_step", "gauge", "current step, from 1")
    idle = Family("rank_idle_seconds", "gauge", "time without progress")
    silent = Family("rank_heartbeat_age_seconds", "gauge", "time without a beat of the rank's heartbeat thread")
    step_time = Family("rank_step_time_seconds", "gauge", "median time of recent steps")
    started = Family("rank_start_time_seconds", "gauge", "start of the rank's process, Unix time")
    memory = Family("rank_resident_memory_bytes", "gauge", "memory of the rank's process on the host")
    world = Family("world_size", "gauge", "ranks of the job's attempt")
    for rank, record in records.items():
        of_rank = labels | {"rank": str(rank)}
        phase.add(1, of_rank | {"phase": str(record.phase)})
        step.add(record.step, of_rank)
        idle.add(record.idle_s, of_rank)
        silent.add(record.silent_s, of_rank)
        started.add(record.start, of_rank)
        memory.add(process_facts(record.pid)[1], of_rank)
        if record.step_time_s:
            step_time.add(record.step_time_s, of_rank)
    families = [phase, step, idle, silent, step_time, started, memory, world]
    if 0 in records:
        world.add(records[0].world, labels)
        families += _job_families(records[0], labels)
    return [family for family in families if family.samples]


def _job_families(record: FlightRecord, labels: Labels) -> Iterable[Family]:
    for name, family in _JOB.items():
        if name in record.totals:
            yield Family(family.name, family.kind, family.help, [(labels, record.totals[name])])
