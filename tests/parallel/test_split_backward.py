"""A split backward is the same run to the last bit: the contributions to a weight's gradient keep their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from tests.parallel.experts.test_expert_layouts import SHARED
from tests.runs import GPT, LLAMA, build_run, config_of, curve_of, settings
from tests.worlds import run_world

MODELS = {"gpt": GPT, "llama": LLAMA, "experts": SHARED | {"balance_bias": True, "qk_norm": "head"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "tp2 sp pp2": {"tp": 2, "sp": True, "pp": 2},
    "pp2 dp2 zero2": {"pp": 2, "dp": 2, "zero": 2},
}


def curves(rank: Rank, configs: list[RunConfig]) -> list[list[tuple[float, float]]]:
    mesh = build_run(rank, configs[0]).mesh
    return [curve_of(build_run(rank, config, mesh), 3) for config in configs]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_split_backward_is_the_same_run(model: str, layout: str, precision: str, tmp_path: Path) -> None:
    keys = LAYOUTS[layout]
    many = keys.get("vpp", 1) > 1
    changes = {f"parallel__{key}": value for key, value in keys.items()} | {"train__precision": precision}
    schedules = ["interleaved_1f1b", "interleaved_zb"] if many else ["1f1b", "zb_h1"]
    configs = [
        config_of(settings(MODELS[model], tmp_path, parallel__schedule=name, **changes), tmp_path) for name in schedules
    ]
    for whole, split in run_world(configs[0].world_size, curves, configs):
        if keys.get("zero") == 2:  # the head's gradient, made in forward, joins the reduction of another micro-batch
            assert np.allclose(split, whole, rtol=1e-13 if precision == "fp64" else 1e-5, atol=0)
        else:
            assert split == whole
