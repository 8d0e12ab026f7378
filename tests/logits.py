"""Logits of a stage with all layers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megascale.model.transformer import Stage
from megascale.ops.cross_entropy import soft_cap
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.tensor import column_parallel_linear
from megascale.parallel.tp_overlap import LinearParams


@torch.no_grad()
def logits_of(stage: Stage, batch: MicroBatch) -> Tensor:
    """Compute this rank's columns of the logits, [s, b, rows of the head], padding included."""
    head, normed = stage.head, list[Tensor]()
    assert head is not None
    hook = head.norm.register_forward_hook(lambda norm, x, out: normed.append(out))
    stage(None, replace(batch, labels=batch.tokens))
    hook.remove()
    (x,) = normed
    logits = column_parallel_linear(x, LinearParams(head.weight), head._tp)
    return soft_cap(logits, head._cross_entropy.cap)
