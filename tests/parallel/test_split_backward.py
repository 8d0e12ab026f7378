"""A split backward is the same run to the last bit: the contributions to a weight's gradient keep their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.schedule.ir import Kind
from tests.parallel.experts.test_expert_layouts import SHARED
from tests.recorded_events import recorded_events
from tests.runs import GPT, build_run, config_of, curve_of, settings
from tests.worlds import run_world

MODELS = {"gpt": GPT, "experts": SHARED | {"balance_bias": True, "qk_norm": "head"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "tp2 sp pp2": {"tp": 2, "sp": True, "pp": 2},
    "pp2 dp2 zero2": {"pp": 2, "dp": 2, "zero": 2},
}
Curves = list[list[tuple[float, float]]]


def curves(rank: Rank, configs: list[RunConfig]) -> tuple[Curves, set[str]]:
    """Train with each configuration; return the curves, and the kinds of actions of the last one."""
    first, *others = configs
    run = build_run(rank, first)
    found = [curve_of(run, 3)]
    for config in others:
        found.append(curve_of(build_run(rank, config, run.mesh), 3))
    return found, {event.name for event in recorded_events(run.mesh.recorder)}


@pytest.mark.parametrize("precision", ["fp64", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_split_backward_is_the_same_run(model: str, layout: str, precision: str, tmp_path: Path) -> None:
    keys = {f"parallel__{key}": value for key, value in LAYOUTS[layout].items()} | {"train__precision": precision}
    tree = settings(MODELS[model], tmp_path, **keys)
    configs = [config_of(tree, tmp_path), config_of(tree, tmp_path, ["parallel.schedule=interleaved_zb"])]
    for (whole, split), kinds in run_world(configs[0].world_size, curves, configs):
        assert {Kind.B, Kind.I, Kind.W} <= kinds
        if layout.endswith("zero2"):  # the head's gradient, made in forward, joins the reduction of another micro-batch
            assert np.allclose(split, whole, rtol=1e-12 if precision == "fp64" else 1e-5, atol=0)
        else:
            assert split == whole
