"""The settings of a run's event store. Each rank notes them in its log, where its collector finds them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascale.config.run import RunConfig
from megascale.core.rank import NODE_VARIABLE


@dataclass(frozen=True)
class StoreSettings:
    """`url`: of the store; `node`: of the rank. `interval_s`, `max_bytes`, `events_h`: as `observe.store_*`; 0 hours:
    no single events. `tensorboard`: folder of the run's TensorBoard events, or "". `in_run`: the store is in the run's
    folder.
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
            observe.store_events_h if observe.events else 0.0,
            str(config.folder / "tensorboard") if observe.tensorboard else "",
            observe.store_dir is None,
        )

    @classmethod
    def from_note(cls, note: Mapping[str, Any]) -> StoreSettings:
        """Return the settings in the note of a log."""
        return cls(**note)
