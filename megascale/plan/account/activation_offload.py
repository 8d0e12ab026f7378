"""Offload of activations to host memory: the bytes that `train.activation_offload` keeps there (`host_bytes`), and
what selective offload of a long sequence would (ByteScale, Ge et al. 2025): `offload_share`, `ranks_with_offload`.

Block inputs leave over PCIe while the next layer computes. For a sequence of s tokens, Act(s) bytes and T(s) seconds of
a layer's forward, l layers, of which the first and the last stay, and C tokens that a rank holds:

    share r <= T(s) B / Act(s)               what leaves in a layer's time at B bytes/s, all of it at most
    ranks D = ceil((2 Act(s) + (1 - r) (l - 2) Act(s)) / (l Act(C)))

T(s) has a part in s^2, so that long sequences hide all of their offload, and need a fraction of the ranks.
"""

from __future__ import annotations

import math

from megascale.config.run import RunConfig
from megascale.layout.chunks import stages_of
from megascale.layout.recompute_policy import recompute_policy
from megascale.plan.account.memory import rank_order
from megascale.plan.account.sizes import micro_batch_sizes
from megascale.schedule.ir import Kind


def host_bytes(config: RunConfig, stage: int) -> int:
    """Count the most bytes of block inputs that a rank of a stage has in host memory, of a resolved configuration."""
    layout, order = stages_of(config), rank_order(config, stage)
    offloads = [recompute_policy(config.train, chunk).offload for chunk in range(layout.vpp)]
    layers = [len(layout.layers(layout.index(stage, chunk))) * kept for chunk, kept in enumerate(offloads)]
    dropped = {action[1:] for action in order if action.kind is Kind.R}
    held = most = 0
    for kind, chunk, microbatch in order:
        if kind in (Kind.B, Kind.W):
            held -= layers[chunk]
        elif kind is Kind.R or (kind is Kind.F and (chunk, microbatch) not in dropped):
            held += layers[chunk]
        most = max(most, held)
    return most * micro_batch_sizes(config).stream


def offload_share(layer_s: float, layer_bytes: float, bandwidth: float) -> float:
    """Return the share of a layer's activations that leaves while a layer computes."""
    return min(1.0, layer_s * bandwidth / layer_bytes)


def ranks_with_offload(tokens: int, max_tokens: int, layers: int, share: float) -> int:
    """Count the ranks that hold a sequence of `tokens`, at `max_tokens` without offload, if `share` of each layer but
    two is in host memory.
    """
    resident = 2 + (1 - share) * (layers - 2) if layers > 2 else layers
    return max(1, math.ceil(tokens * resident / (layers * max_tokens) - 1e-9))
