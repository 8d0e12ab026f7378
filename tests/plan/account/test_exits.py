"""Early exits in plans: FLOPs, traffic, state and memory against dry runs, and FLOPs and times by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.model import ModelConfig
from megascale.layout.parameters import parameter_count
from megascale.plan.account.flops import token_flops
from megascale.plan.simulate import profiles
from megascale.plan.simulate.chunk_time import chunk_times
from megascale.plan.simulate.layer_time import LayerTimes
from tests.plan.account.test_against_dry_run import compare
from tests.plan.account.test_expert_memory import LARGE
from tests.runs import config_of, settings

TWO = LARGE | {"exits": [1, 3]}
SP = {"parallel__tp": 2, "parallel__sp": True}
V = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zb_v"}
FEW_SAMPLES = {"batch__micro": 1, "batch__global": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": (TWO, {}),
    "tied sp": (TWO | {"tie_embeddings": True}, SP),
    "full": (TWO, {"train__recompute": "full"}),
    "pp2": (TWO, {"parallel__pp": 2}),
    "sp pp4 zero2": (TWO, SP | {"parallel__pp": 4, "parallel__dp": 2, "parallel__zero": 2}),
    "pp2 chunks": (TWO, {"parallel__pp": 2, "data__sequence_chunk_tokens": 2048} | FEW_SAMPLES),
    "v": (TWO, V),
    "v zero2": (TWO, V | {"parallel__dp": 2, "parallel__zero": 2}),
    "pp2 vpp2 zero2": (TWO, {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2}),
}
QUICK = ("pp2",)


@pytest.mark.parametrize("name", [pytest.param(it, marks=() if it in QUICK else pytest.mark.slow) for it in CASES])
def test_stages_are_those_of_a_dry_run(name: str, tmp_path: Path) -> None:
    model, keys = CASES[name]
    changes = {"train__precision": "bf16", "batch__micro": 2} | keys
    changes.setdefault("batch__global", 8 * keys.get("parallel__dp", 1))
    config = config_of(settings(model, tmp_path, **changes), tmp_path)
    ranks = config.world_size // config.parallel.pp
    for stage in range(config.parallel.pp):
        peak, error = compare(config, stage * ranks)
        print(f"{name} {stage}: {peak / 1e9:.2f} GB {error:+.2%}")
        assert -0.03 < error < (0.1 if name == "v zero2" else 0.05)  # as without exits


def test_flops_and_parameters_of_an_exit_by_hand() -> None:
    """A head of h x V, whose GEMM runs three times, and a norm."""
    keys = {"preset": "llama3-8b", "seq_length": 4096}
    without, one = (ModelConfig.model_validate(keys | {"exits": exits}) for exits in ([], [16]))
    assert token_flops(one).causal - token_flops(without).causal == 6 * 4096 * 128_256
    assert parameter_count(one) - parameter_count(without) == 4096 * 128_256 + 4096


def test_the_stage_of_an_exit_has_its_time(tmp_path: Path) -> None:
    plans = []
    for exits in ([], [1]):
        config = config_of(
            settings(LARGE | {"exits": exits}, tmp_path, parallel__pp=2, train__precision="bf16"), tmp_path
        )
        layers = LayerTimes.from_config(config, profiles.hardware("h100"), profiles.stack("megascale"))
        plans.append(chunk_times(layers))
    more = [plans[1][stage, 0].total - plans[0][stage, 0].total for stage in (0, 1)]
    assert more[0] == pytest.approx(layers.head().total) and more[1] == 0
