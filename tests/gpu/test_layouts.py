"""Layouts on several GPUs train what one GPU trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.gpu.conftest import Figure
from tests.gpu.machine import curve_on, furthest, run_of, world_of
from tests.jobs import finish, job_config
from tests.runs import FAMILIES, GPT, config_of, curve_of, settings

STEPS = 10
TENSOR: dict[str, Any] = {"parallel__tp": 2, "parallel__sp": True}
OFFLOAD: dict[str, Any] = {"train__memory": ["full_host"]}
WIDE = FAMILIES["llama"] | {"hidden_size": 256, "ffn_size": 512, "vocab_size": 512, "seq_length": 128}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"parallel__tp": 2}),
    "tp 2 sp": (2, TENSOR),
    "tp 2 sp, nothing overlapped": (2, TENSOR | {"overlap__tp": False}),
    "pp 2": (2, {"parallel__pp": 2}),
    "pp 2 vpp 2": (2, {"parallel__pp": 2, "parallel__vpp": 2}),
    "dp 2 zero 0": (2, {"parallel__dp": 2, "parallel__zero": 0}),
    "dp 2 zero 1": (2, {"parallel__dp": 2, "parallel__zero": 1}),
    "dp 2 zero 2": (2, {"parallel__dp": 2, "parallel__zero": 2}),
    "cp 2 ulysses": (2, {"parallel__cp": 2, "parallel__cp_mode": "ulysses"}),
    "tp 2 sp, MLP in two tiles": (2, TENSOR | {"train__mlp_tiles": 2}),
    "pp 2 vpp 2, inputs in host memory": (2, {"parallel__pp": 2, "parallel__vpp": 2} | OFFLOAD),
    "tp 4 sp pp 2": (8, {"parallel__tp": 4, "parallel__sp": True, "parallel__pp": 2}),
    "tp 2 sp pp 2 dp 2": (8, TENSOR | {"parallel__pp": 2, "parallel__dp": 2}),
    "tp 2 sp pp 2 vpp 2 dp 2 zero 2": (
        8, TENSOR | {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2},
    ),
}  # fmt: skip
CASES = [pytest.param(name, marks=pytest.mark.gpu(count)) for name, (count, _) in LAYOUTS.items()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_curve_is_that_of_one_gpu(family: str, name: str, tmp_path: Path, figure: Figure) -> None:
    count, layout = LAYOUTS[name]
    common = {"train__precision": "fp32", "optimizer__lr": 1e-3}
    model = FAMILIES[family] | ({"num_heads": 4, "num_kv_heads": 4} if layout.get("parallel__tp") == 4 else {})
    alone = config_of(settings(model, tmp_path / "one", **common), tmp_path / "one")
    config = config_of(settings(model, tmp_path / "many", **common, **layout), tmp_path / "many")
    (expected,), found = world_of(1, curve_on, alone, STEPS), world_of(count, curve_on, config, STEPS)
    assert all(curve == found[0] for curve in found), "ranks disagree about loss or norm"
    difference = furthest(found[0], expected)
    figure("difference", difference)
    assert difference < 1e-5


KEYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ring": (2, {"parallel__cp": 2}),
    "ring of documents": (2, {"parallel__cp": 2, "parallel__cp_sharding": "document"}),
    "allgather": (2, {"parallel__cp": 2, "parallel__cp_mode": "allgather"}),
    "usp": (4, {"parallel__cp": 4, "parallel__cp_mode": "usp", "parallel__cp_a2a_size": 2}),
    "ring pp 2": (4, {"parallel__cp": 2, "parallel__pp": 2}),
    "hybrid pp 2": (
        4, {"parallel__dp": 2, "parallel__pp": 2, "parallel__hybrid_dp": True, "data__max_tokens_per_rank": 64},
    ),
}  # fmt: skip
"""Ways in which ranks exchange keys, whose kernels are for bf16."""
PACKED = {"data__attention_mask": "document", "data__document_length": 100}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu(count)) for name, (count, _) in KEYS.items()]
)
def test_ranks_that_exchange_keys(name: str, tmp_path: Path, figure: Figure) -> None:
    count, layout = KEYS[name]
    documents = PACKED if "document" in name or "hybrid" in name else {}
    common = {"train__precision": "bf16", "optimizer__lr": 1e-3, **documents}
    alone = config_of(settings(WIDE, tmp_path / "one", **common), tmp_path / "one")
    config = config_of(settings(WIDE, tmp_path / "many", **common, **layout), tmp_path / "many")
    (expected,), found = world_of(1, curve_on, alone, STEPS), world_of(count, curve_on, config, STEPS)
    difference = furthest(found[0], expected)
    figure("difference", difference)
    assert difference < 1e-2


@pytest.mark.gpu(4)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_on_four_gpus(recipe: str, tmp_path: Path, figure: Figure) -> None:
    common = {"train__precision": "fp8", "fp8__recipe": recipe, "optimizer__lr": 1e-3}
    alone = config_of(settings(WIDE, tmp_path / "one", **common), tmp_path / "one")
    config = config_of(settings(WIDE, tmp_path / "many", **common, **TENSOR, parallel__pp=2), tmp_path / "many")
    (expected,), found = world_of(1, curve_on, alone, STEPS), world_of(4, curve_on, config, STEPS)
    difference = furthest([[loss] for loss, _ in found[0]], [[loss] for loss, _ in expected])
    figure("difference", difference)
    assert difference < 2e-2


@pytest.mark.timeout(300)
@pytest.mark.gpu(4)
def test_a_checkpoint_goes_on_in_another_layout(tmp_path: Path, figure: Figure) -> None:
    run = {"train__precision": "fp32", "train__steps": 12, "checkpoint__every": 6, "optimizer__decay": "constant"}
    whole = finish(job_config(tmp_path / "whole", GPT, **run))
    finish(job_config(tmp_path / "first", GPT, **run, **TENSOR, parallel__pp=2), "train.steps=6")
    shutil.copytree(tmp_path / "first" / "runs", tmp_path / "second" / "runs")
    again = finish(job_config(tmp_path / "second", GPT, **run, parallel__dp=4, parallel__zero=2))
    difference = furthest([[step["loss"]] for step in again], [[step["loss"]] for step in whole])
    figure("difference", difference)
    assert difference < 2e-5


def outside(rank: Rank, config: Any) -> float:
    """GiB of a GPU's memory in use that torch's allocator has not reserved, after some steps."""
    import torch

    run = run_of(rank, config)
    curve_of(run, 3)
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**30


@pytest.mark.gpu(8, only=True)
def test_memory_outside_the_allocator(tmp_path: Path, figure: Figure) -> None:
    """Communicators, contexts and libraries."""
    layout = TENSOR | {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2}
    config = config_of(settings(GPT, tmp_path, train__precision="bf16", **layout), tmp_path)
    figure("outside the allocator", max(world_of(8, outside, config)), "GiB", most=4)
