"""Auxiliary objectives (`train.objectives`): terms of the loss over the hidden states before the head, by plug-ins.

An objective sees each sample when it is read (`SampleView`), and chooses what its terms are of; that tells their count
before the step. On the last stage it then computes the sum of the terms from the hidden states of whole sequences. With
N labels, and n terms in the step, the loss has weight N / n times the sum: the weight times the mean of the terms.

    x [s / tp, b, h] or a shard of cp    all-gather    whole [s, b, h]    objective    sum
                          own rows of    <----------    gradient

All ranks of tp and cp that share the sequences compute the same sum. A rank keeps the gradient of its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megascale.catalog.objectives import OBJECTIVES
from megascale.comm.collectives import all_gather
from megascale.comm.group import Group
from megascale.comm.mesh import Mesh
from megascale.config.train import TrainConfig
from megascale.layout.sequence_shard import SequenceShard
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.tp_overlap import TensorParallel
from megascale.record.label import FORWARD, Label

CP_AXES = ("cp",)  # along which ranks share the sequences of an objective
LABEL = Label("objectives", direction=FORWARD)  # event label of the all-gathers


@dataclass(frozen=True)
class SampleView:
    """The part of a sample that an objective sees: the sample's number in the run, its tokens [s], i64, the
    [start, stop) of its documents without padding, one without a document mask; and `drawn`, a number in [0, 1) for
    this sample and this objective, the same in every layout.
    """

    sample: int
    tokens: np.ndarray
    documents: list[tuple[int, int]]
    drawn: float


class Objective(Protocol):
    """An objective, made with its options as keyword arguments. It has no parameters of its own."""

    def choose(self, view: SampleView) -> np.ndarray:
        """Return what the terms of a sample are of [n, k], such as places of tokens; [0, k] for none."""

    def loss(self, hidden_sbh: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of the terms, whose samples are `rows` [n] of the micro-batch, and choices `chosen` [n, k]."""


def load_objectives(train: TrainConfig) -> dict[str, Objective]:
    """Load the objectives of a run, by name."""
    return {str(table["type"]): _load(**table) for table in train.objectives}


def _load(type: str, weight: float, **options: Any) -> Objective:
    objective: Objective = OBJECTIVES[type].load()(**options)
    return objective


def open_objectives(train: TrainConfig, tp: TensorParallel, mesh: Mesh) -> AuxiliaryObjectives | None:
    """Return the objectives of a run; None without any. A collective of all ranks."""
    return AuxiliaryObjectives(load_objectives(train), tp, mesh.group(*CP_AXES)) if train.objectives else None


@dataclass(frozen=True)
class AuxiliaryObjectives:
    """The objectives of the last stage. `cp`: the ranks that share sequences."""

    objectives: Mapping[str, Objective]
    tp: TensorParallel
    cp: Group

    def losses(self, x_sbh: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        """Return the terms of the loss by name, of the hidden states x [s, b, h] or this rank's shard of them, and
        leave the sums in the micro-batch. An objective of weight 0 is only measured.
        """
        terms, wide = dict[str, Tensor](), torch.promote_types(x_sbh.dtype, torch.float32)
        whole = _Whole.apply(x_sbh, self.tp, self.cp, batch.shard)
        for name, targets in batch.objectives.items():
            if not len(targets.rows):
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and targets.constant is not None):
                loss = self.objectives[name].loss(whole, targets.rows, targets.chosen).to(wide)
            if targets.count:
                batch.measured_losses[name] = loss.detach(), targets.count
            if loss.requires_grad and targets.constant is not None:
                terms[f"weighted {name}"] = loss * targets.constant.to(wide)
        return terms


class _Whole(torch.autograd.Function):
    """The hidden states of whole sequences, from the shards of tp and cp ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, cp: Group, shard: SequenceShard | None) -> Tensor:
        full, _ = tp.gather(x, LABEL)
        first = tp.index * len(x) if tp.activations_sharded else 0
        ctx.own = slice(first, first + len(x))
        if shard is None:
            return full.view_as(full)
        parts = full.new_empty(cp.size * len(full), *full.shape[1:])
        all_gather(cp, parts, full.contiguous(), label=LABEL)
        order = torch.cat([torch.arange(*span) for part in shard.parts for span in part]).to(x.device)
        ctx.own = order[cp.index * len(full) :][ctx.own]
        return torch.empty_like(parts).index_copy_(0, order, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.own].contiguous(), None, None, None
