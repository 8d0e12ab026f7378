"""Every family: the same weights give the same logits, loss and gradients as in transformers, and the same run in every
layout.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.convert.families.config_json import FAMILIES
from megascale.convert.huggingface import PretrainedWeights
from megascale.convert.tensor_map import bias_names, read_region, tensor_map
from megascale.core.rank import Rank
from tests.convert.tiny import MIXTURES, TINY, as_saved, balance_biases, make_tiny, save_tiny
from tests.marks import only_quick
from tests.oracles.ours import LAYOUTS, Arrays, Batch, Result, compute, difference
from tests.oracles.test_transformers import wide
from tests.runs import build_run, config_of, curve_of, settings
from tests.worlds import run_world

BATCH = Batch()
QUICK = ("qwen 2.5", "qwen 3 mixture")
"""Families whose runs in several processes are quick tests: biases in part of the layers, and experts."""


def slow_unless_quick(name: str) -> Any:
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


def keys_of(given: PretrainedWeights) -> dict[str, Any]:
    return given.model.model_dump(by_alias=True, exclude_none=True, mode="json")


def ours_from(given: PretrainedWeights, theirs: dict[str, torch.Tensor]) -> Arrays:
    """Tensors of transformers, weights and biases of experts or gradients, by our names."""
    places = tensor_map(FAMILIES[given.config["model_type"]], given.model)
    left = {place.name for listed in places.values() for place in listed} - theirs.keys()
    assert theirs.keys() <= {place.name for listed in places.values() for place in listed}
    assert left in (set(), {places[name][0].name for name in bias_names(given.model).values()})
    found = {}
    for parameter in given.tensors:
        if places[parameter.name][0].name in left:
            continue
        tensor = read_region(places[parameter.name], parameter, lambda name, box: theirs[name][box], None)
        found[parameter.name] = tensor.double().numpy()
    return found


@cache
def reference(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], Arrays, Result]:
    """`[model]` keys, weights by our names, and what transformers computes with them in `dtype`."""
    save_tiny(name, folder)
    given = PretrainedWeights(folder)
    labels = BATCH.labels.roll(1, 1).masked_fill(BATCH.mask.roll(1, 1) == 0, -100)  # transformers shifts them itself
    with wide(dtype):
        net = make_tiny(name).to(dtype)
        out = net(BATCH.tokens, labels=labels, num_items_in_batch=1)
        out.loss.backward()
    named = {key: p.detach() for key, p in net.named_parameters()} | balance_biases(net)
    weights = ours_from(given, as_saved(net, named))
    gradients = {key: p.grad for key, p in net.named_parameters() if p.grad is not None}
    result = Result(out.logits.detach().double().numpy(), float(out.loss), ours_from(given, as_saved(net, gradients)))
    return keys_of(given), weights, result


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("name", only_quick(TINY, *(name for name in TINY if name not in MIXTURES)))  # those in fp64
def test_logits_and_gradients(name: str, folders: Path, tmp_path: Path) -> None:
    model, weights, theirs = reference(name, folders / name)
    found = difference(compute(model, weights, tmp_path, "fp32"), theirs)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_and_gradients_of_experts_in_fp64(name: str, folders: Path, tmp_path: Path) -> None:
    model, weights, theirs = reference(name, folders / name, torch.float64)
    found = difference(compute(model, weights, tmp_path, "fp64"), theirs)
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("name", [slow_unless_quick(name) for name in TINY])
def test_logits_and_gradients_in_tp_and_pp(name: str, folders: Path, tmp_path: Path) -> None:
    model, weights, theirs = reference(name, folders / name)
    layout = {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__zero": 0}
    found = difference(compute(model, weights, tmp_path, "fp32", **layout), theirs)
    assert max(found.values()) < 1e-5, found


WORLDS = {
    "one process": {}, "dp2": {"parallel__dp": 2}, "zero2": {"parallel__dp": 2, "parallel__zero": 2},
    **{name: LAYOUTS[name] for name in ("tp2 sp", "pp2", "tp2 sp pp2 vpp2")},
}  # fmt: skip
EXPERT_WORLDS = {"dp2 ep2": {"parallel__dp": 2, "parallel__ep": 2, "parallel__zero": 2}}


@pytest.mark.parametrize("name", [slow_unless_quick(name) for name in TINY])
def test_steps_from_foreign_weights_are_equal_in_all_layouts(name: str, folders: Path, tmp_path: Path) -> None:
    """Ten steps in fp64; three of the quick ones."""
    model, _, _ = reference(name, folders / name)
    layouts = WORLDS | (EXPERT_WORLDS if name in MIXTURES else {})
    count = 3 if name in QUICK else 10
    if name in QUICK:
        layouts = {key: layouts[key] for key in ("one process", "dp2 ep2" if name in MIXTURES else "tp2 sp pp2 vpp2")}
    curves = {}
    for key, layout in layouts.items():
        resume = {"checkpoint__resume": f"hf:{folders / name}"}
        run = {"train__steps": count, "batch__global": 4} | resume | layout
        config = config_of(settings(model, tmp_path / key, **run), tmp_path)
        curves[key] = run_world(config.world_size, steps, config)[0]
    first = np.array(curves.pop("one process"))
    assert len(first) == count and (first[:, 1] > 0).all()
    for key, curve in curves.items():
        np.testing.assert_allclose(np.array(curve), first, rtol=1e-10, err_msg=key)


def steps(rank: Rank, config: Any) -> list[tuple[float, float]]:
    """Load foreign weights and train. Returns (loss, gradient norm) of every step."""
    from megascale.train.resume import load_initial_state

    run = build_run(rank, config)
    load_initial_state(run, PretrainedWeights)
    run.buffers.finish_param_gather()
    return curve_of(run, config.train.steps)
