"""The settings of a run's event store. Each rank notes them in its event ring, where its collector finds them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megascale.config.run import RunConfig
from megascale.core.env_numbers import whole_number
from megascale.core.event_ring import EventRing, RingIdentity, event_ring_path, open_event_ring
from megascale.core.flight_record import ATTEMPT_VARIABLE
from megascale.core.flight_writer import FlightRecordWriter
from megascale.core.rank import NODE_VARIABLE, Rank


@dataclass(frozen=True)
class StoreSettings:
    """`url`: of the store; `node`: of the rank. `interval_s`, `max_bytes`, `events_h`: as `observe.store_*`.
    `tensorboard`: folder of the run's TensorBoard events, or "". `in_run`: the store is in the run's folder.
    """

    url: str
    node: str
    interval_s: float = 10.0
    max_bytes: int = 2 << 30
    events_h: float = 24.0
    tensorboard: str = ""
    in_run: bool = False

    @classmethod
    def from_config(cls, config: RunConfig, env: Mapping[str, str] = os.environ) -> StoreSettings:
        """Return the settings of a rank on this host."""
        observe = config.observe
        return cls(
            config.store_folder,
            env.get(NODE_VARIABLE) or socket.gethostname(),
            observe.store_interval_s,
            observe.store_bytes,
            observe.store_events_h,
            str(config.folder / "tensorboard") if observe.tensorboard else "",
            observe.store_dir is None,
        )

    @classmethod
    def from_note(cls, note: Mapping[str, Any]) -> StoreSettings:
        """Return the settings in the note of a ring."""
        return cls(**note)


def open_ring_of_rank(config: RunConfig, rank: Rank, flight: FlightRecordWriter) -> EventRing | None:
    """Begin this process's event ring beside its flight record. None without `observe.store`, without a file of the
    flight record, or if the ring cannot be made (a warning on stderr).
    """
    if not config.observe.store or flight.path is None:
        return None
    attempt = whole_number(os.environ, ATTEMPT_VARIABLE)
    identity = RingIdentity(rank.rank, rank.world_size, attempt, asdict(StoreSettings.from_config(config)))
    path = event_ring_path(flight.path)
    try:
        return open_event_ring(path, identity)
    except OSError as error:
        print(f"WARNING: no event ring {path}: {error.strerror or error}", file=sys.stderr)
        return None
