"""The tensor-parallel plan by rule (Redco, Tan et al. 2023): the dimensions that tp shards follow from the matrices'
order and sizes, and no other plan has fewer collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from megascale.config.model import ModelConfig
from megascale.layout.blocks import block_spec
from megascale.layout.parameters import all_params
from megascale.plan.account.sizes import micro_batch_sizes
from tests.runs import config_of, settings

PRESETS = {"gpt2-124m": 4, "gpt3-175b": 8, "llama3-8b": 8, "qwen2.5-7b": 4, "qwen3-8b": 8}
"""Models, and a tp that divides their heads."""

VOCABULARY = ("embedding.token.weight", "head.weight")

OUTPUTS, INPUTS = 0, 1
"""The dimensions of a matrix [outputs, inputs]."""


def derived_plan(model: ModelConfig, tp: int) -> dict[str, int | None]:
    """Return the sharded dimension of every tensor. Matrices of layers alternate, those beside each other alike;
    embedding and head are sharded along the vocabulary; a bias as the outputs of its matrix; others not at all.
    """
    plan: dict[str, int | None] = {}
    matrices = 0
    for param in all_params(model):
        dimension: int | None = None
        if param.name.startswith("layers.") and len(param.parts[0].shape) == 2:
            dimension, matrices = matrices % 2, matrices + 1
        elif param.name in VOCABULARY or plan.get(param.parts[0].name.replace(".bias", ".weight")) == OUTPUTS:
            dimension = OUTPUTS
        for part in param.parts:
            units = 0 if dimension is None else part.shape[dimension] // (part.head_dim or 1)
            divides = units % tp == 0 or param.name in VOCABULARY  # which is padded to a multiple
            plan[part.name] = dimension if divides else None
    return plan


@pytest.mark.parametrize("preset", PRESETS)
def test_the_rule_derives_the_plan(preset: str, tmp_path: Path) -> None:
    config = config_of(settings({"preset": preset}, tmp_path, parallel__tp=PRESETS[preset]), tmp_path)
    plan = {part.name: part.sharding.get("tp") for param in all_params(config.model) for part in param.parts}
    assert derived_plan(config.model, PRESETS[preset]) == plan
    assert {OUTPUTS, INPUTS, None} == set(plan.values())


def collectives(plan: Sequence[int]) -> int:
    """Count the collectives of a forward through the matrices of a block, in branches of two: a matrix sharded along
    its outputs needs all of its input, one along its inputs sums its output, and a branch ends with all of it.
    """
    count, split = 0, False
    for number, dimension in enumerate(plan):
        count += split if dimension == OUTPUTS else 1
        split = dimension == OUTPUTS
        if number % 2:
            count, split = count + split, False
    return count


@pytest.mark.parametrize("preset", PRESETS)
def test_no_plan_has_fewer_collectives(preset: str, tmp_path: Path) -> None:
    config = config_of(settings({"preset": preset}, tmp_path, parallel__tp=PRESETS[preset]), tmp_path)
    groups = [part for part in block_spec(config.model, 0) if part.linears]
    plan = tuple(OUTPUTS if group.enters else INPUTS for group in groups)
    counts = {each: collectives(each) for each in itertools.product((OUTPUTS, INPUTS), repeat=len(groups))}
    assert [each for each, count in counts.items() if count == min(counts.values())] == [plan]
    sent = [each for group in groups for each in group.traffic(micro_batch_sizes(config))]
    assert len(sent) == counts[plan] == 2
