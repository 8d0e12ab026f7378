"""Auxiliary objectives (`train.objectives`): terms of the loss over the hidden states before the head, by plug-ins.

An objective sees each sample when it is read, and chooses the places whose hidden states each of its terms is of; that
tells their count before the step. On the last stage it then computes the sum of the terms. With N labels, and n terms
in the step, the loss has weight N / n times the sum: the weight times the mean of the terms.

    rows of x at the places, 0 of other ranks    all-reduce over tp, cp    states [n, k, h]    objective    sum
                          gradient of own rows   <--------------------------------------

All ranks of tp and cp that share the sequences compute the same sum. A rank keeps the gradient of its own rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from megascale.catalog.objectives import OBJECTIVES
from megascale.comm.collectives import all_reduce
from megascale.config.train import TrainConfig
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.tp_overlap import TensorParallel
from megascale.record.label import FORWARD, Label

if TYPE_CHECKING:
    from megascale.parallel.context_parallel import ContextParallel


class Objective(Protocol):
    """An objective, made with its options as keyword arguments. It has no parameters of its own."""

    def choose(self, tokens: np.ndarray, documents: list[tuple[int, int]]) -> np.ndarray:
        """Return for each term of a sample the places of its hidden states [n, k]; [0, k] without terms. The sample has
        `tokens` [s], i64, and the [start, stop) of `documents` without padding, of one without a document mask.
        """

    def loss(self, states: Tensor) -> Tensor:
        """Return the sum of the terms of these hidden states [n, k, h], in fp32 or wider."""


def load_objectives(train: TrainConfig) -> dict[str, Objective]:
    """Load the objectives of a run, by name."""
    options = [{key: table[key] for key in table.keys() - {"type", "weight"}} for table in train.objectives]
    names = [str(table["type"]) for table in train.objectives]
    return {name: OBJECTIVES[name].load()(**own) for name, own in zip(names, options, strict=True)}


def objective_losses(
    x_sbh: Tensor, batch: MicroBatch, tp: TensorParallel, cp: ContextParallel | None
) -> dict[str, Tensor]:
    """Return the terms of the loss by name, of the hidden states x [s, b, h] or this rank's shard of them, and leave
    the sums in the micro-batch. An objective of weight 0, without a constant, is only measured.
    """
    terms, wide = dict[str, Tensor](), torch.promote_types(x_sbh.dtype, torch.float32)
    groups = [tp.group] * tp.activations_sharded + ([cp.heads, cp.keys] if cp is not None else [])
    for name, targets in batch.objectives.items():
        if not len(targets.rows):
            continue
        places = targets.places - tp.index * len(x_sbh) if tp.activations_sharded else targets.places
        remote = (places < 0) | (places >= len(x_sbh))
        own = x_sbh[places.masked_fill(remote, 0), targets.rows.unsqueeze(1)].to(wide)
        own = own.masked_fill(remote.unsqueeze(-1), 0)
        states = own.detach().clone()
        for group in groups:
            all_reduce(group, states, label=Label("objectives", direction=FORWARD))
        loss = targets.loss(states if targets.constant is None else own + (states - own.detach()))
        if targets.count:
            batch.further_losses[name] = loss.detach()
        if loss.requires_grad and targets.constant is not None:
            terms[f"weighted {name}"] = loss * targets.constant.to(wide)
    return terms
