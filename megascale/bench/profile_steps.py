"""Training steps of small models, from which a hardware profile takes the costs beyond GEMMs, attention and links."""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megascale.bench.cost_fit import Measurement
from megascale.bench.timed_steps import build_run, take_step
from megascale.comm.totals import device_barrier
from megascale.config.run import RunConfig
from megascale.core.process import usable_cores
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.train.run import Run
from megascale.train.scheduled_gc import without_automatic_gc

FORMATS = ("fp32", "bf16")
"""Precisions to measure. Steps in the first precision also give the costs that do not depend on precision."""


class ModelCase(NamedTuple):
    """A small model with heads of HEAD_DIM, and its batch, for timed steps."""

    layers: int
    hidden: int
    ffn: int
    seq: int
    vocab: int
    micro: int
    total: int


CASES = (
    ModelCase(1, 64, 192, 32, 256, 1, 4),
    ModelCase(4, 64, 192, 32, 256, 1, 4),
    ModelCase(2, 128, 384, 128, 512, 2, 4),
    ModelCase(6, 128, 384, 128, 512, 2, 4),
    ModelCase(1, 128, 384, 256, 4096, 4, 4),
    ModelCase(1, 256, 704, 32, 16384, 1, 1),
    ModelCase(2, 256, 704, 128, 512, 2, 2),
    ModelCase(3, 256, 704, 256, 512, 4, 4),
    ModelCase(2, 384, 1024, 256, 512, 2, 2),
)
"""Cases with few and many layers, narrow and wide, with small and large vocabularies, to separate the costs."""

OVERSUBSCRIBED_CASE = ModelCase(4, 256, 704, 256, 512, 2, 16)
"""Model for ranks that share cores, with tp 2 and pp 2; the batch is per replica."""

SINGLE_RANK_CASE = OVERSUBSCRIBED_CASE._replace(total=4)
"""Model that a single rank per core trains between the oversubscribed steps."""

HEAD_DIM = 32
ROUNDS = 5
OVERSUBSCRIBED_ROUNDS = 10
WARM_UP = 1


@dataclass(frozen=True)
class OversubscribedSteps:
    """Seconds of steps of OVERSUBSCRIBED_CASE with `ranks` ranks, and of SINGLE_RANK_CASE steps between them."""

    ranks: int
    seconds: tuple[float, ...]
    single_rank_seconds: tuple[float, ...]


def measure_oversubscribed(device: Device, rank: Rank) -> OversubscribedSteps:
    """Time steps of all ranks of a job, several per core; between them, steps of a single rank on every core."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = oversubscribed_config(rank.world_size, folder)
        run = build_run(config, device, rank)
        single_run = build_run(single_rank_config(folder), device)
    seconds: list[float] = []
    local_seconds: list[float] = []
    with without_automatic_gc():
        for _ in range(WARM_UP + OVERSUBSCRIBED_ROUNDS):
            device_barrier(run.mesh, device.torch_device)
            start = time.perf_counter()
            take_step(run)
            device_barrier(run.mesh, device.torch_device)
            seconds.append(time.perf_counter() - start)
            if rank.rank < usable_cores():
                local_seconds.append(_cpu_seconds(single_run))
    gathered = run.mesh.world.control.all_gather(local_seconds[WARM_UP:], "single-rank steps")
    single_rank = [value for values in gathered for value in values]
    return OversubscribedSteps(rank.world_size, tuple(seconds[WARM_UP:]), tuple(single_rank))


def single_rank_config(folder: str) -> RunConfig:
    """Return the configuration of a single rank's steps between the oversubscribed ones."""
    return case_config(SINGLE_RANK_CASE, FORMATS[0], folder)


def oversubscribed_config(ranks: int, folder: str) -> RunConfig:
    """Return the configuration of `ranks` ranks that share cores."""
    parallel = {"tp": 2 - ranks % 2, "pp": 2 if ranks % 4 == 0 else 1}
    replicas = ranks // math.prod(parallel.values())
    case = OVERSUBSCRIBED_CASE._replace(total=OVERSUBSCRIBED_CASE.total * replicas)
    return case_config(case, FORMATS[0], folder, dp=replicas, **parallel)


def time_case(case: ModelCase, name: str, device: Device) -> list[Measurement]:
    """Time training steps in seconds of this process's processor time."""
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(case_config(case, name, folder), device)
    with without_automatic_gc():
        seconds = [_cpu_seconds(run) for _ in range(WARM_UP + ROUNDS)]
    return [Measurement((), tuple(seconds[WARM_UP:]))]


def _cpu_seconds(run: Run) -> float:
    start = time.process_time()
    take_step(run)
    return time.process_time() - start


def case_config(case: ModelCase, name: str, folder: str, **parallel: int) -> RunConfig:
    """Return the configuration of a case in a precision, whose files are in `folder`."""
    tree = {
        "name": "profile",
        "output_dir": folder,
        "model": {
            "num_layers": case.layers, "hidden_size": case.hidden, "num_heads": case.hidden // HEAD_DIM,
            "ffn_size": case.ffn, "vocab_size": case.vocab, "seq_length": case.seq, "norm": "rmsnorm",
            "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
        },
        "parallel": parallel,
        "batch": {"micro": case.micro, "global": case.total},
        "train": {"steps": WARM_UP + OVERSUBSCRIBED_ROUNDS, "precision": name},
        "optimizer": {"lr": 1e-3},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
        "observe": {"tensorboard": False},
    }  # fmt: skip
    return RunConfig.model_validate(tree).resolve(None)
