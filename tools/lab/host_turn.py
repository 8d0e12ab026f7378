"""The host's time from its read of a step's totals until the next step's first forward, when a GPU has nothing but
queued updates of weights.
"""

from __future__ import annotations

import socket
import time
from statistics import median
from unittest import mock

from megascale.bench.timed_steps import build_run
from megascale.config.loading import load_config
from megascale.core.rank import Rank
from megascale.device import detect_device
from megascale.train import step

NARROW = ("hidden_size=64", "ffn_size=128", "num_heads=2", "num_kv_heads=2", "vocab_size=256", "seq_length=32")
"""A model of as many layers, whose computations take no time."""

STEPS, WARM_UP = 40, 5


def host_turn(path: str) -> float:
    """Return the median milliseconds of steps on this CPU, which computes the updates of the narrow model as well."""
    overrides = [f"model.{each}" for each in NARROW]
    config, device = load_config(path, [*overrides, f"train.steps={STEPS}"], 1), detect_device(allow_gpu=False)
    run, reads, turns = build_run(config, device, Rank(0, 1, 0, socket.gethostname())), list[float](), list[float]()
    run.stages[0].register_forward_pre_hook(
        lambda *_: turns.append(time.perf_counter() - reads.pop()) if reads else None
    )
    with mock.patch(f"{step.__name__}.check_step_finite", lambda *_: reads.append(time.perf_counter())):
        for _ in range(STEPS):
            step.train_step(run, run.train_loader.batch(run.progress.samples))
    return 1e3 * median(turns[WARM_UP:])
