"""A capacity of experts: in a sequence of T tokens an expert takes at most ceil(factor k T / experts) slots, those of
the largest weights, of equal ones the first. The rule reads a whole sequence and nothing else: no layout changes it.
Padding is none of the T tokens, and takes no slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megascale.comm.collectives import all_gather
from megascale.comm.group import Group
from megascale.config.model import ModelConfig
from megascale.device import copy_to_device
from megascale.parallel.experts.rank_tokens import RankTokens
from megascale.parallel.microbatch import MicroBatch
from megascale.record.label import Label


@dataclass(frozen=True)
class Capacity:
    """The limit on slots. `group`: the ranks that share sequences; `tokens`: of this rank."""

    factor: float
    model: ModelConfig
    group: Group
    tokens: RankTokens

    def slots(self, tokens: int) -> int:
        """Return the most slots of an expert in a sequence of `tokens`."""
        return math.ceil(self.factor * self.model.experts_per_token * tokens / self.model.experts)

    def dropped(self, weights: Tensor, experts: Tensor, batch: MicroBatch, label: Label) -> Tensor:
        """Return a mask [t, k] of the slots that find no room, for `weights` and `experts` [t, k]; padding has the
        number of experts.
        """
        (count, _), size, device = weights.shape, self.model.experts, weights.device
        positions = self.tokens.positions(count, batch, device)
        columns = torch.arange(count, device=device) % self.tokens.micro
        key = columns.unsqueeze(1) * (size + 1) + experts
        facts = torch.stack([key.double(), weights.double(), positions.unsqueeze(1).expand_as(key).double()])
        own = facts.view(3, -1).t().contiguous()
        every = own.new_empty(self.group.size * len(own), 3)
        all_gather(self.group, every, own, label=label.with_suffix("weights"))
        first = self.group.index * len(own)
        rank = _rank_in_group(every)[first : first + len(own)].view(weights.shape)
        if batch.boundaries is None:
            return rank >= self.slots(self.model.seq_length)
        slots = copy_to_device(np.array([*map(self.slots, batch.boundaries.filled)]), device)
        return (rank >= slots[columns].unsqueeze(1)) & (experts < size)


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
