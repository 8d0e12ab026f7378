"""The beginning of an attempt in the run's event store: collectors store this rank's events from then on."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import _get_default_store

from megascale.catalog.accelerators import Peak
from megascale.comm.clock import clock_offset
from megascale.comm.host_ranks import host_key
from megascale.core.env_numbers import whole_number
from megascale.core.storage import Location
from megascale.operate.store.table_files import begin_attempt
from megascale.record.log_files import ATTEMPT_VARIABLE

if TYPE_CHECKING:
    from megascale.train.run import Run


def begin_stored_attempt(run: Run, peak: Peak | None) -> None:
    """Begin an attempt. A collective of all ranks: rank 0 decides the attempt's number and says what its clock shows,
    and each host measures by how much rank 0's clock is ahead of its own.
    """
    world = run.mesh.world
    _, ahead_s = clock_offset(world, _get_default_store(), "start", host_key())
    attempt, epoch_ns = whole_number(os.environ, ATTEMPT_VARIABLE), time.time_ns() - time.monotonic_ns()
    if run.mesh.rank == 0:
        store = Location(run.config.store_folder, retry_s=0)
        try:
            attempt = begin_attempt(store, attempt, new_run=attempt == 0 and run.progress.step == 0)
        except OSError as error:
            print(f"WARNING: the event store {store} cannot be used: {error.strerror or error}", file=sys.stderr)
    attempt, first_ns = world.control.broadcast((attempt, epoch_ns), "event store")
    epoch_ns = first_ns + round(ahead_s * 1e9)  # ns since 1970 at the zero of this host's monotonic clock
    topology, place = run.mesh.topology, run.mesh.coord
    coord = place._asdict() | {axis: topology.index_in_group(place, axis) for axis in ("ep", "dp_shard")}
    run.mesh.recorder.log.set_ready(attempt, epoch_ns, coord, peak.flops if peak else 0)
