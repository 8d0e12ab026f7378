"""Multi-token prediction in plans: FLOPs, traffic, state and memory against dry runs, and FLOPs by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest

from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.parameters import active_parameter_count, parameter_count
from megascale.plan.account.flops import token_flops
from megascale.plan.simulate import profiles
from megascale.plan.simulate.chunk_time import chunk_times
from megascale.plan.simulate.layer_time import LayerTimes
from tests.drawn import jobs, ranks_of
from tests.marks import only_quick
from tests.plan.account.test_against_dry_run import compare, drawn
from tests.plan.account.test_expert_memory import LARGE, SHARED
from tests.runs import config_of, settings

TWO = LARGE | {"mtp_layers": 2}
TIED = LARGE | {"mtp_layers": 1, "tie_embeddings": True}
EXPERTS = SHARED | {"mtp_layers": 1, "router_score": "sigmoid", "balance_bias": True}
SP = {"parallel__tp": 2, "parallel__sp": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": (TWO, {}),
    "full": (TWO, {"train__recompute": "full"}),
    "selective": (TWO, {"train__recompute": "selective"}),
    "sp pp2 zero2": (TWO, SP | {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2}),
    "tied pp2 vpp2": (TIED, {"parallel__pp": 2, "parallel__vpp": 2}),
    "tp2 sp": (TIED, SP),
    "cp2 dp2 zero2": (TWO, {"parallel__cp": 2, "parallel__dp": 2, "parallel__zero": 2}),
    "experts ep8": (EXPERTS, {"parallel__dp": 8, "parallel__ep": 8, "parallel__pp": 2, "moe__z_loss_weight": 0.01}),
    "fp8": (TWO, {"train__precision": "fp8", "fp8__last_layers_bf16": 0, "fp8__first_layers_bf16": 0}),
}
QUICK = ("experts ep8",)


@pytest.mark.parametrize("name", [pytest.param(it, marks=() if it in QUICK else pytest.mark.slow) for it in CASES])
def test_the_last_stage_is_that_of_a_dry_run(name: str, tmp_path: Path) -> None:
    model, keys = CASES[name]
    changes = {"train__precision": "bf16", "batch__micro": 2, "batch__global": 16} | keys
    config = config_of(settings(model, tmp_path, **changes), tmp_path)
    peak, error = compare(config, config.world_size - 1)
    print(f"{name}: {peak / 1e9:.2f} GB {error:+.2%}")
    assert -0.03 < error < 0.05


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", only_quick([1, 100], 1))
def test_communication_flops_and_state_of_last_ranks(count: int) -> None:
    @hypothesis.settings(drawn, max_examples=count)
    @hypothesis.given(jobs(experts=True, depths=True))
    def check(config: RunConfig) -> None:
        compare(config, ranks_of(config)[-1])

    check()


def test_flops_of_a_depth_by_hand() -> None:
    """6 x (2 h^2 + active block + head) and attention, for GLM-4.5-Air at 4,096 tokens."""
    without, one, two = (
        ModelConfig.model_validate({"preset": "glm4.5-air", "seq_length": 4096, "mtp_layers": depths})
        for depths in (0, 1, 2)
    )
    h, heads, width = 4096, 96 * 128, 1408
    block = h * (2 * heads + 2 * 8 * 128) + 3 * h * width * (8 + 1) + h * 128
    flops = 6 * (2 * h**2 + block + h * 151_552) + 3 * 4096 * 2 * heads
    first, second, third = (token_flops(model).causal for model in (without, one, two))
    assert second - first == third - second == flops
    # active parameters of a depth beside the shared head, with the norms of embedding, hidden state, block and head,
    # and the biases of q, k and v; GLM-4.5-Air's files have copies of the embedding and the head beside them
    more = active_parameter_count(one) - active_parameter_count(without)
    assert more == 2 * h**2 + block + 5 * h + heads + 2 * 8 * 128
    assert parameter_count(one) + 2 * h * 151_552 == pytest.approx(110.47e9, rel=1e-4)


def test_the_last_stage_has_the_further_depths(tmp_path: Path) -> None:
    """The slowest stage of a plan is theirs, by a block, a head and a projection each."""
    plans = []
    for depths in (0, 1, 2):
        tree = settings(LARGE | {"mtp_layers": depths}, tmp_path, parallel__pp=2, train__precision="bf16")
        config = config_of(tree, tmp_path)
        layers = LayerTimes.from_config(config, profiles.hardware("h100"), profiles.stack("megascale"))
        plans.append(chunk_times(layers))
    first, last = ([plan[stage, 0].total for plan in plans] for stage in (0, 1))
    assert first[0] == first[1] == first[2]
    assert last[2] - last[1] == pytest.approx(last[1] - last[0]) and last[1] > 1.5 * last[0]
