"""Multi-token prediction in plans: FLOPs, traffic, state and memory against dry runs, and FLOPs by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.model import ModelConfig
from megascale.layout.parameters import active_parameter_count, layer_params, parameter_count
from megascale.plan.account.flops import token_flops
from tests.plan.account.test_against_dry_run import compare
from tests.plan.account.test_expert_memory import LARGE, SHARED
from tests.runs import LLAMA, config_of, settings

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
    "experts ep8": (EXPERTS, {"parallel__dp": 8, "parallel__ep": 8, "parallel__pp": 2}),
    "fp8": (TWO, {"train__precision": "fp8", "fp8__last_layers_bf16": 0, "fp8__first_layers_bf16": 0}),
}
QUICK = ("sp pp2 zero2", "experts ep8")


@pytest.mark.parametrize("name", [pytest.param(it, marks=() if it in QUICK else pytest.mark.slow) for it in CASES])
def test_the_last_stage_is_that_of_a_dry_run(name: str, tmp_path: Path) -> None:
    model, keys = CASES[name]
    changes = {"train__precision": "bf16", "batch__micro": 2, "batch__global": 16} | keys
    config = config_of(settings(model, tmp_path, **changes), tmp_path)
    peak, error = compare(config, config.world_size - 1)
    print(f"{name}: {peak / 1e9:.2f} GB {error:+.2%}")
    assert -0.03 < error < 0.05
