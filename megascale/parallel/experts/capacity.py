"""A capacity of experts: in a sequence of T tokens an expert takes at most ceil(factor k T / experts) slots, those of
the largest weights, of equal ones the first. The rule reads a whole sequence and nothing else: no layout changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.collectives import all_gather
from megascale.comm.group import Group
from megascale.config.model import ModelConfig
from megascale.layout.sequence_shard import TokenSpan, cut
from megascale.parallel.microbatch import MicroBatch
from megascale.record.label import Label


@dataclass(frozen=True)
class Capacity:
    """The limit on slots. `group`: the ranks that share sequences; `tp_index`: of this rank, which has the positions of
    its shard in the order of tp; `micro`: sequences of a micro-batch.
    """

    factor: float
    model: ModelConfig
    group: Group
    tp_index: int
    micro: int

    @property
    def slots(self) -> int:
        """The most slots of an expert in a sequence."""
        model = self.model
        return math.ceil(self.factor * model.experts_per_token * model.seq_length / model.experts)

    def dropped(self, weights: Tensor, experts: Tensor, batch: MicroBatch, label: Label) -> Tensor:
        """Return a mask [t, k] of the slots that find no room, for `weights` and `experts` [t, k]."""
        positions = self._positions(len(weights) // self.micro, batch, weights.device)
        columns = torch.arange(len(weights), device=weights.device) % self.micro
        key = columns.unsqueeze(1) * self.model.experts + experts
        facts = torch.stack([key.double(), weights.double(), positions.unsqueeze(1).expand_as(key).double()])
        own = facts.view(3, -1).t().contiguous()
        every = own.new_empty(self.group.size * len(own), 3)
        all_gather(self.group, every, own, label=label.with_suffix("weights"))
        first = self.group.index * len(own)
        return (_rank_in_group(every)[first : first + len(own)] >= self.slots).view(weights.shape)

    def _positions(self, rows: int, batch: MicroBatch, device: torch.device) -> Tensor:
        """Return the position in its sequence of each token [t] of this rank."""
        spans = (TokenSpan(0, self.model.seq_length),) if batch.shard is None else batch.shard.spans
        mine = cut(spans, self.tp_index * rows, (self.tp_index + 1) * rows)
        found = torch.cat([torch.arange(*span, device=device) for span in mine])
        return found.repeat_interleave(self.micro, output_size=len(found) * self.micro)


def _rank_in_group(facts: Tensor) -> Tensor:
    """Return the rank [n] of each row (group, weight, position) in its group: larger weights, then smaller positions
    first.
    """
    order = facts[:, 2].argsort(stable=True)
    order = order[(-facts[order, 1]).argsort(stable=True)]
    order = order[facts[order, 0].argsort(stable=True)]
    groups = facts[order, 0]
    ranks = torch.empty(len(facts), dtype=torch.int64, device=facts.device)
    ranks[order] = torch.arange(len(facts), device=facts.device) - torch.searchsorted(groups, groups)
    return ranks
