"""The settings of a run's event store. Each rank notes them in its log, where its collector finds them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megascale.config.train import ObserveConfig
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
    def of_rank(cls, observe: ObserveConfig, url: str, folder: Path, env: Mapping[str, str] = os.environ) -> Self:
        """Return the settings of a rank on this host. `url`, `folder`: of its run's store, and of the run."""
        return cls(
            url, env.get(NODE_VARIABLE) or socket.gethostname(), observe.store_interval_s, observe.store_bytes,
            observe.store_events_h if observe.store_events else 0.0,
            str(folder / "tensorboard") if observe.tensorboard else "", observe.store_dir is None,
        )  # fmt: skip
