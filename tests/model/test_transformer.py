"""Properties of a stage; tests/oracles compares its output with other implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale.config.model import ModelConfig
from megascale.layout.parameters import all_params
from megascale.layout.topology import Coord, Topology
from megascale.model.initialize import init_parameters
from megascale.model.transformer import Stage
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.rng import Dropout
from tests.logits import logits_of
from tests.runs import FAMILIES, given

SEQUENCE, VOCABULARY = 16, 101

families = pytest.mark.parametrize("model", FAMILIES.values(), ids=list(FAMILIES))


def stage_of(model: dict[str, Any]) -> Stage:
    config = ModelConfig.model_validate(model | {"init_std": 0.2})
    parameters = {}
    for parameter in all_params(config):
        target = torch.empty(parameter.local_shape(Topology()), dtype=torch.float64)
        init_parameters([(target, parameter)], Topology(), Coord(), seed=0)
        parameters[parameter.name] = nn.Parameter(target)
    return Stage(given(config, parameters), range(config.num_layers), True, True)


def micro_batch(tokens: Tensor | None, labels: Tensor | None = None) -> MicroBatch:
    return MicroBatch(tokens, labels, None, Dropout(0.0, 0, [0], torch.device("cpu")))


def tokens_of(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (SEQUENCE, 1), generator=torch.Generator().manual_seed(seed))


def logits(stage: Stage, tokens: Tensor) -> Tensor:
    return logits_of(stage, micro_batch(tokens))[:, 0, :VOCABULARY]


@families
def test_a_token_changes_later_positions_only(model: dict[str, Any]) -> None:
    stage, tokens = stage_of(model), tokens_of(0)
    before = logits(stage, tokens)
    for position in range(SEQUENCE):
        changed = tokens.clone()
        changed[position] = (changed[position] + 1) % VOCABULARY
        after = logits(stage, changed)
        differs = (after - before).abs().amax(-1) > 1e-9
        assert differs.tolist() == [i >= position for i in range(SEQUENCE)]


@families
def test_samples_do_not_see_each_other(model: dict[str, Any]) -> None:
    stage, tokens = stage_of(model), torch.cat([tokens_of(0), tokens_of(1)], 1)
    together = logits_of(stage, micro_batch(tokens))
    for row in range(2):
        torch.testing.assert_close(together[:, row, :VOCABULARY], logits(stage, tokens[:, row : row + 1]))


@families
def test_equal_tokens_differ_by_position(model: dict[str, Any]) -> None:
    stage = stage_of(model)
    out = logits(stage, torch.cat([torch.tensor([[1], [2]]), torch.full((SEQUENCE - 2, 1), 3)]))
    assert len(out[2:].round(decimals=9).unique(dim=0)) == SEQUENCE - 2


@families
def test_a_stage_names_its_missing_input(model: dict[str, Any]) -> None:
    stage = stage_of(model)
    with pytest.raises(ValueError, match="the first stage needs tokens"):
        stage(None, micro_batch(None))
    with pytest.raises(ValueError, match="a stage with a head needs labels"):
        stage(None, micro_batch(tokens_of(0)))


def test_zero_centered_gains_start_as_gains_of_one() -> None:
    stages = [stage_of(FAMILIES["llama"] | {"norm": norm}) for norm in ("rmsnorm", "rmsnorm_1p")]
    ones, zeros = (stage.head.norm.weight.unique().tolist() for stage in stages if stage.head is not None)
    assert (ones, zeros) == ([1.0], [0.0])
    assert torch.equal(*(logits(stage, tokens_of(0)) for stage in stages))


@families
def test_the_parallel_block_is_its_definition(model: dict[str, Any]) -> None:
    """Compare with x + attention(norm(x)) + mlp(norm(x)), from the modules of the serial block."""
    stage = stage_of(model | {"block": "parallel"})
    batch, x = micro_batch(None), torch.randn(SEQUENCE, 1, model["hidden_size"], dtype=torch.float64)
    x.requires_grad_()
    block: Any = stage.layers["0"]
    normed = block.attention_norm(x)
    expected = x + block.attention(normed, batch) + block.mlp(normed, batch)
    weight = block.mlp.down.weight
    wanted = torch.autograd.grad(expected.square().sum(), [x, weight, block.attention.qkv.weight])
    results = block(x, batch)
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(results.square().sum(), [x, weight, block.attention.qkv.weight])
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)
    assert block.mlp_norm is block.attention_norm
