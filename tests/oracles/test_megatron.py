"""The same weights give the same logits, loss and gradients as megatron-core's GPTModel."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracles.ours import LAYOUTS, MODELS, Arrays, Result, compute, difference

NAMES = ["gpt gelu tied", "llama untied"]


@cache
def references(precision: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What megatron-core computed, by model."""
    root = Path(__file__).parents[2]
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "tests.oracles.megatron_on_cpu", precision, str(folder), *NAMES]
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: dict(np.load(folder / f"{name}.npz")) for name in NAMES}


def reference(name: str, precision: str, folder: Path) -> tuple[Arrays, Result]:
    """Weights by our names, and what megatron-core computes with them."""
    found = references(precision, folder / precision)[name]
    weights, gradients = (
        ours_from_megatron(
            {key.removeprefix(what): numbers for key, numbers in found.items() if key.startswith(what)}, MODELS[name]
        )
        for what in ("weight/", "gradient/")
    )
    return weights, Result(found["logits"], float(found["loss"]), gradients)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


def split_qkv(fused: Any, groups: int, head: int) -> list[Any]:
    """q, k and v of megatron-core's fused rows: for each group of queries its heads, then its key, then its value."""
    by_group = fused.reshape(groups, -1, head, *fused.shape[1:])
    heads = by_group.shape[1] - 2
    parts = np.split(by_group, [heads, heads + 1], axis=1)
    return [part.reshape(-1, *fused.shape[1:]) for part in parts]


def ours_from_megatron(theirs: Arrays, model: dict[str, Any]) -> Arrays:
    """Tensors of megatron-core, weights or gradients, by our names."""
    left, found = dict(theirs), {}
    kinds = ("weight", "bias") if model.get("bias", True) else ("weight",)
    groups, head = model.get("num_kv_heads", model["num_heads"]), model["hidden_size"] // model["num_heads"]
    found["embedding.token.weight"] = left.pop("embedding.word_embeddings.weight")
    if "position" not in model:
        found["embedding.position.weight"] = left.pop("embedding.position_embeddings.weight")
    if not model.get("tie_embeddings", True):
        found["head.weight"] = left.pop("output_layer.weight")
    for kind in kinds:
        found[f"final_norm.{kind}"] = left.pop(f"decoder.final_layernorm.{kind}")
        for index in range(model["num_layers"]):
            ours, there = f"layers.{index}", f"decoder.layers.{index}"
            found[f"{ours}.attention_norm.{kind}"] = left.pop(f"{there}.input_layernorm.{kind}")
            found[f"{ours}.mlp_norm.{kind}"] = left.pop(f"{there}.pre_mlp_layernorm.{kind}")
            qkv = split_qkv(left.pop(f"{there}.self_attention.linear_qkv.{kind}"), groups, head)
            for part, numbers in zip("qkv", qkv, strict=True):
                found[f"{ours}.attention.{part}.{kind}"] = numbers
            found[f"{ours}.attention.out.{kind}"] = left.pop(f"{there}.self_attention.linear_proj.{kind}")
            up = left.pop(f"{there}.mlp.linear_fc1.{kind}")
            if "position" in model:
                found[f"{ours}.mlp.gate.{kind}"], up = np.split(up, 2)
            found[f"{ours}.mlp.up.{kind}"] = up
            found[f"{ours}.mlp.down.{kind}"] = left.pop(f"{there}.mlp.linear_fc2.{kind}")
    assert not left, f"of megatron-core's tensors nobody compares {list(left)}"
    return found


@pytest.mark.parametrize("layout", ["one process", "tp2 sp pp2 vpp2"])
@pytest.mark.parametrize("name", NAMES)
def test_fp64(name: str, layout: str, folder: Path, tmp_path: Path) -> None:
    weights, theirs = reference(name, "fp64", folder)
    found = difference(compute(MODELS[name], weights, tmp_path, "fp64", **LAYOUTS[layout]), theirs)
    assert max(found.values()) < 1e-12, found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fp32(name: str, folder: Path, tmp_path: Path) -> None:
    """With megatron-core's number formats as they are."""
    weights, theirs = reference(name, "fp32", folder)
    found = difference(compute(MODELS[name], weights, tmp_path, "fp32"), theirs)
    assert max(found.values()) < 1e-5, found
