"""A split backward is the same run to the last bit: the contributions to a weight's gradient keep their order."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.stages import v_shaped
from megascale.schedule.ir import Kind
from megascale.schedule.lower import lower
from tests.marks import only_quick_rows
from tests.parallel.experts.test_expert_layouts import SHARED
from tests.recorded_events import recorded_events
from tests.runs import GPT, build_run, config_of, curve_of, settings
from tests.schedule.orders import any_order
from tests.thread_world import run_threads
from tests.train.test_prediction_steps import TIED, TWO
from tests.worlds import run_world

MODELS = {
    "gpt": GPT,
    "untied": GPT | {"tie_embeddings": False},
    "experts": SHARED | {"balance_bias": True, "qk_norm": "head"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "tp2 sp pp2": {"tp": 2, "sp": True, "pp": 2},
    "pp2 dp2 zero2": {"pp": 2, "dp": 2, "zero": 2},
    "pp2 v": {"pp": 2, "vpp": 2},
    "tp2 sp pp2 v": {"tp": 2, "sp": True, "pp": 2, "vpp": 2},
}
"""Layouts; those with a v run `zb_v`, the others `interleaved_zb`."""

ORDERED = {"gpt": GPT, "tied depths": TIED, "depths": TWO, "experts": MODELS["experts"]}
Curves = list[list[tuple[float, float]]]


def curves(rank: Rank, configs: list[RunConfig]) -> tuple[Curves, set[str]]:
    """Train with each configuration; return the curves, and the kinds of actions of all."""
    runs = [build_run(rank, config) for config in configs]
    found = [curve_of(run, 3) for run in runs]
    return found, {event.name for run in runs for event in recorded_events(run.mesh.recorder)}


QUICK = [
    ("untied", "pp2 v", "fp64"), ("untied", "pp2 dp2 zero2", "fp64"), ("experts", "pp2 vpp2", "fp64"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout", "precision"), only_quick_rows(itertools.product(MODELS, LAYOUTS, ["fp64", "bf16"]), *QUICK)
)
def test_split_backward_is_the_same_run(model: str, layout: str, precision: str, tmp_path: Path) -> None:
    keys = {f"parallel__{key}": value for key, value in LAYOUTS[layout].items()} | {"train__precision": precision}
    if layout.endswith(
        " v"
    ):  # a norm adds stages up by rank: its last bit is that of the placement, clipping would use it
        keys["optimizer__clip_norm"] = 0.0
    tree = settings(MODELS[model], tmp_path, **keys)
    schedule = "zb_v" if layout.endswith(" v") else "interleaved_zb"
    configs = [config_of(tree, tmp_path), config_of(tree, tmp_path, [f"parallel.schedule={schedule}"])]
    for (whole, split), kinds in run_world(configs[0].world_size, curves, configs):
        assert {Kind.B, Kind.I, Kind.W} <= kinds
        if layout.endswith("zero2"):
            # A loss adds to the head's gradient in forward, before the W and the reduction of the micro-batch before
            # it. Of one step's sums only this one has another order: a last bit, which two updates and experts carry
            # to 1.5e-13 of the third step.
            exact, later = (1e-15, 1e-12 if model == "experts" else 1e-13) if precision == "fp64" else (1e-5, 1e-5)
            assert np.allclose(split[0], whole[0], rtol=exact, atol=0)
            assert np.allclose(split, whole, rtol=later, atol=0)
        elif layout.endswith(" v") and model == "gpt":  # gradients of head and embedding are added on one rank
            assert np.allclose(split, whole, rtol=1e-10 if precision == "fp64" else 1e-2, atol=0)
        elif layout.endswith(" v"):
            assert [loss for loss, _ in split] == [loss for loss, _ in whole]
            assert np.allclose(split, whole, rtol=1e-15, atol=0)
        else:
            assert split == whole


@pytest.mark.parametrize(
    ("model", "zero"),
    only_quick_rows(itertools.product(ORDERED, [0, 2]), ("gpt", 2), ("tied depths", 0), ("depths", 2), ("experts", 0)),
)
def test_any_order_on_a_v_is_the_same_run(zero: int, model: str, tmp_path: Path) -> None:
    """With the embedding and the head on one rank: W of either chunk may be the last."""
    tree = settings(ORDERED[model], tmp_path, train__steps=2, batch__global=4, optimizer__warmup_steps=0)
    (alone,) = run_threads(config_of(tree, tmp_path), lambda run: curve_of(run, 2))
    v = {"parallel.pp": 2, "parallel.vpp": 2, "parallel.schedule": "zb_v", "parallel.dp": 2, "parallel.zero": zero}
    config = config_of(tree, tmp_path, [f"{key}={value}" for key, value in v.items()])
    placement = v_shaped(2, 2)
    compute = any_order(placement, config.num_microbatches, random.Random(model), split=True)
    orders = lower(compute, placement, reduce_each=zero == 2)

    def train(run: Any) -> list[tuple[float, float]]:
        run.order_of = lambda count, training: orders[run.mesh.coord.pp]
        return curve_of(run, 2)

    for found in run_threads(config, train):
        assert np.allclose(found, alone, rtol=1e-10, atol=0)
