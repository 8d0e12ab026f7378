"""Training steps of a tiny model with fixed weights and data: weights after the steps are equal to the bit on healthy
nodes with the same hardware and software, because nothing in training depends on time or place.

The ranks of the group split the model as training does: tensor-parallel within a pair, then pipeline, then data
parallelism (ByteRobust's alignment test), so the node's links take part. The steps run twice: a node whose own runs
differ is named without other nodes.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Mapping
from typing import Any

import torch

from megascale.bench.checks.rank_group import rank_group
from megascale.bench.timed_steps import build_run, time_steps
from megascale.config.loading import load_config_tree
from megascale.config.run import RunConfig
from megascale.operate.health.checks.result import CheckResult
from megascale.train.run import Run

TINY = """
name = "tiny-step"
[model]
num_layers = 4
hidden_size = 128
num_heads = 4
num_kv_heads = 2
vocab_size = 512
seq_length = 128
norm = "rmsnorm"
activation = "swiglu"
position = "rope"
bias = false
tie_embeddings = false
[batch]
micro = 1
global = 8
[train]
steps = 2
[optimizer]
lr = 1e-3
[data]
mock = true
[checkpoint]
every = 0
[observe]
tensorboard = false
record_events = false
"""

STEPS = 2

REPEATED = "differs from run to run"

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0"}
"""Variables that cuBLAS reads when it starts."""


def check_tiny_step(arguments: Mapping[str, Any]) -> CheckResult:
    """Train STEPS steps twice; the digest is of all weights of this rank and the losses."""
    os.environ.update(DETERMINISTIC)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with rank_group(arguments) as (rank, device):
        config = tiny_config(rank.world_size, "fp32" if device.is_cpu else "bf16")
        digests = [train_and_digest(build_run(config, device, rank)) for _ in range(2)]
    digest = digests[0] if digests[0] == digests[1] else REPEATED
    kind = f"{torch.backends.cpu.get_cpu_capability()}" if device.is_cpu else ".".join(map(str, device.capability))
    platform = f"{device.name} {kind}, torch {torch.__version__}, {rank.world_size} ranks"
    return CheckResult("tiny_step", digest=digest, platform=platform)


def tiny_config(world: int, precision: str) -> RunConfig:
    """Return the resolved configuration of `world` ranks: tp 2, pp 2, then dp, as far as `world` divides."""
    tp = 2 if world % 2 == 0 else 1
    pp = 2 if world % 4 == 0 else 1
    layout = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"train.precision={precision}"]
    dp = world // tp // pp
    batch = [f"batch.global={dp * -(-8 // dp)}"]
    return load_config_tree(tomllib.loads(TINY), "the tiny step", [*layout, *batch], world)


def train_and_digest(run: Run) -> str:
    """Train from the initial weights; return the fingerprint, to the bit, of the losses and of this rank's weights."""
    _, losses = time_steps(run, STEPS)
    digest = hashlib.sha256(" ".join(loss.hex() for loss in losses).encode())
    for bucket in run.buffers.buckets:
        bucket.storage.acquire_weights()
        digest.update(bucket.weights.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
