"""The capacity of experts: which slots are dropped, by a rule over whole sequences."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch

from megascale.comm.group import single_rank_group
from megascale.config.model import ModelConfig
from megascale.parallel.experts.capacity import Capacity
from megascale.parallel.experts.rank_tokens import RankTokens
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.rng import Dropout
from megascale.record.label import Label
from tests.runs import LLAMA

POSITIONS, SAMPLES, CHOSEN = 16, 2, 3
BATCH = MicroBatch(None, None, None, Dropout(0.0, 0, [0], torch.device("cpu")))
MODEL = ModelConfig.model_validate(LLAMA | {"seq_length": POSITIONS, "experts": 8, "experts_per_token": CHOSEN})


@pytest.mark.parametrize(("factor", "slots"), [(1.0, 6), (0.5, 3), (1.2, 8), (0.01, 1)])
def test_an_expert_keeps_the_largest_weights_of_a_sequence(factor: float, slots: int) -> None:
    """Of equal weights, of which there are many here, those at the first positions."""
    capacity = Capacity(factor, MODEL, single_rank_group("tp"), RankTokens(POSITIONS, SAMPLES))
    assert capacity.slots(POSITIONS) == slots
    draw = random.Random(factor)
    experts = torch.tensor([draw.sample(range(8), CHOSEN) for _ in range(POSITIONS * SAMPLES)])
    weights = torch.tensor([[draw.randrange(3) / 4 for _ in range(CHOSEN)] for _ in experts])
    by_expert = defaultdict(list)
    for token, chosen in enumerate(experts.tolist()):
        for slot, expert in enumerate(chosen):
            by_expert[token % SAMPLES, expert].append((-float(weights[token, slot]), token // SAMPLES, (token, slot)))
    expected = torch.zeros_like(experts, dtype=torch.bool)
    for wanted in by_expert.values():
        for _, _, place in sorted(wanted)[slots:]:
            expected[place] = True
    assert torch.equal(capacity.dropped(weights, experts, BATCH, Label("experts")), expected)
