"""Initial weights depend on the seed, the global name and the index in the tensor, not on the layout."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_examples
from hypothesis import strategies as st

from megascale.config.model import ModelConfig
from megascale.core.rank import Rank
from megascale.layout.parameters import all_params
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import Coord, Topology
from megascale.model import initialize
from megascale.model.initialize import init_parameters
from tests.marks import only_quick
from tests.oracles.ours import Piece, boxes_of, join, parameters_of
from tests.runs import FAMILIES, GPT, build_run, config_of, curve_of, settings
from tests.thread_world import run_threads
from tests.worlds import run_world

SEED = 7


def local(
    parameter: ParamSpec, rank: int, tp: int, dtype: torch.dtype = torch.float32, seed: int = SEED, threads: int = 1
) -> torch.Tensor:
    """Initialize a rank's shard in memory that is not zero."""
    topology = Topology(tp=tp)
    target = torch.full(parameter.local_shape(topology), 1e9, dtype=dtype)
    init_parameters([(target, parameter)], topology, Coord(tp=rank), seed, threads)
    return target


def pieces(parameter: ParamSpec, tp: int) -> list[list[Piece]]:
    """Assemble the global tensors from all tp ranks, and check that padding is zero."""
    results = []
    for rank in range(tp):
        target, row = local(parameter, rank, tp), 0
        mine = []
        for tensor in parameter.parts:
            offset, size = tensor.local_box(Topology(tp=tp), Coord(tp=rank))
            box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            mine.append((tensor.name, box, target[row : row + size[0]].clone().numpy()))
            target[row : row + size[0]] = 0
            row += size[0]
        assert not target.any(), f"padding of {parameter.name} is not zero"
        results.append(mine)
    return results


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    """Draw a small model, and a tp that can shard the model."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    kv_heads = tp * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    llama = draw(st.booleans())
    model = ModelConfig.model_validate(
        {
            "num_layers": draw(st.integers(1, 3)),
            "hidden_size": heads * 2 * draw(st.integers(1, 2)),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "ffn_size": tp * draw(st.integers(1, 9)),
            "vocab_size": draw(st.integers(1, 60)),
            "seq_length": draw(st.integers(1, 16)),
            "norm": "rmsnorm" if llama else "layernorm",
            "activation": "swiglu" if llama else "gelu",
            "position": "rope" if llama else "learned",
            "bias": draw(st.booleans()),
            "tie_embeddings": draw(st.booleans()),
        }
    )
    return model, tp


@pytest.mark.parametrize("count", only_quick([12, 40], 12))
def test_every_tp_holds_the_same_tensors(count: int) -> None:
    """A shard may start and end inside a block."""

    @settings_of_examples(max_examples=count)
    @given(models(), st.sampled_from([1, 50, 333, 1 << 20]))
    def check(drawn: tuple[ModelConfig, int], block: int) -> None:
        model, tp = drawn
        with patch.object(initialize, "BLOCK", block):
            for parameter in all_params(model):
                shapes = {tensor.name: tensor.shape for tensor in parameter.parts}
                expected, results = join(shapes, pieces(parameter, 1)), join(shapes, pieces(parameter, tp))
                assert all((results[name] == expected[name]).all() for name in shapes)

    check()


def test_a_tensor_of_many_blocks() -> None:
    """Uses the real block size."""
    parameter = ParamSpec("wide", (TensorSpec("wide", (2_500, 1_024), {"tp": 0}, std=0.1),))
    results = torch.cat([local(parameter, rank, 4) for rank in range(4)])
    assert torch.equal(results, local(parameter, 0, 1))
    assert torch.equal(results, local(parameter, 0, 1, threads=3))
    first, second = (
        results[: initialize.BLOCK // 1_024],
        results[initialize.BLOCK // 1_024 :][: initialize.BLOCK // 1_024],
    )
    assert not torch.equal(first, second)
    assert abs(float(results.mean())) < 5 * 0.1 / math.sqrt(results.numel())
    assert abs(float(results.std()) / 0.1 - 1) < 5 / math.sqrt(2 * results.numel())


def test_a_column_sharded_matrix_is_the_same_matrix() -> None:
    parameter = ParamSpec("tall", (TensorSpec("tall", (30, 1_000), {"tp": 1}, std=0.1),))
    with patch.object(initialize, "BLOCK", 7_000):
        results = torch.cat([local(parameter, rank, 8) for rank in range(8)], 1)
        assert torch.equal(results, local(parameter, 0, 1))


def test_names_and_seeds_give_different_tensors() -> None:
    def draw(name: str, seed: int) -> torch.Tensor:
        return local(ParamSpec("p", (TensorSpec(name, (8, 8), std=1.0),)), 0, 1, seed=seed)

    drawn = [draw("a", 0), draw("b", 0), draw("a", 1)]
    assert len({tuple(t.flatten().tolist()) for t in drawn}) == 3
    assert torch.equal(draw("a", 0), drawn[0])


def test_fused_and_separate_tensors_are_equal() -> None:
    q, k = TensorSpec("q", (8, 4), {"tp": 0}, std=1.0), TensorSpec("k", (4, 4), {"tp": 0}, std=1.0)
    fused = local(ParamSpec("qk", (q, k)), 1, 2)
    assert torch.equal(fused, torch.cat([local(ParamSpec("q", (q,)), 1, 2), local(ParamSpec("k", (k,)), 1, 2)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_round_the_same_elements(dtype: torch.dtype) -> None:
    parameter = ParamSpec("p", (TensorSpec("p", (16, 16), std=1.0),))
    assert torch.equal(local(parameter, 0, 1, dtype), local(parameter, 0, 1).to(dtype))


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_torch_s_default_dtype_changes_no_step(default: torch.dtype, precision: str, tmp_path: Path) -> None:
    """Neither weights nor dropout, nor scales of FP8."""
    keys = {"train__precision": precision, "model__dropout": 0.1, "batch__global": 2}
    keys |= {"fp8__first_layers_bf16": 0, "fp8__last_layers_bf16": 0} if precision == "fp8" else {}
    config = config_of(settings(GPT | {"num_layers": 1}, tmp_path, **keys), tmp_path)
    (expected,) = run_threads(config, lambda run: curve_of(run, 2))
    try:
        torch.set_default_dtype(default)
        assert run_threads(config, lambda run: curve_of(run, 2)) == [expected]
    finally:
        torch.set_default_dtype(torch.float32)


def test_initial_distribution_by_kind_of_tensor() -> None:
    model = ModelConfig.model_validate(
        {"num_layers": 8, "hidden_size": 64, "num_heads": 4, "vocab_size": 500, "seq_length": 64, "init_std": 0.5}
    )
    for parameter in all_params(model):
        start = local(parameter, 0, 1)
        if parameter.name.endswith(".bias"):
            assert not start.any()
        elif parameter.name.endswith("norm.weight"):
            assert (start == 1).all()
        else:
            residual = parameter.name.endswith(("out.weight", "down.weight"))
            std = 0.5 / math.sqrt(2 * 8) if residual else 0.5
            numbers = start[: parameter.parts[0].shape[0]] if "token" in parameter.name else start
            assert abs(float(numbers.std()) / std - 1) < 5 / math.sqrt(2 * numbers.numel()), parameter.name


def _built(rank: Rank, config: object) -> list[Piece]:
    run = build_run(rank, config)  # type: ignore[arg-type]
    return [
        (tensor.name, box, target[rows].detach().clone().numpy())
        for target, _, parameter in parameters_of(run)
        for tensor, box, rows in boxes_of(parameter, run.mesh)
    ]


@pytest.mark.parametrize("family", only_quick(FAMILIES, "llama"))
def test_runs_of_any_layout_start_from_the_same_weights(family: str, tmp_path: Path) -> None:
    layouts = [{}, {"parallel__tp": 2, "parallel__pp": 2, "parallel__vpp": 2, "parallel__sp": True}]
    results = []
    for layout in layouts:
        config = config_of(settings(FAMILIES[family], tmp_path, **layout), tmp_path)
        shapes = {tensor.name: tensor.shape for parameter in all_params(config.model) for tensor in parameter.parts}
        results.append(join(shapes, run_world(config.world_size, _built, config)))
    assert all(np.array_equal(results[0][name], results[1][name]) for name in results[0])
