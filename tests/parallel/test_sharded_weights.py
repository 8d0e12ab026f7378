"""Fully sharded weights: a run has the bits of zero = 2, gathers two units at a time, and reads no released weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config.run import RunConfig
from megascale.parallel.sharded_weights import SLOTS, ShardedWeights
from megascale.plan.account.traffic import step_traffic
from tests.runs import GPT, LLAMA, MODELS, config_of, curve_of, settings, traffic_of
from tests.thread_world import run_threads

MIXTRAL = LLAMA | {"experts": 4, "experts_per_token": 2, "expert_ffn_size": 16}
BF16 = {"train__precision": "bf16"}
V = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zb_v"}
FULL = {"train__recompute": "full"}
POW2 = {"fp8__scale": "pow2"}

SMALL = {"hidden_size": 64, "seq_length": 32}
TENSORS, GPT_TENSORS = (
    (LLAMA | SMALL | {"ffn_size": 96}),
    (GPT | SMALL | {"tie_embeddings": False}),
)
BLOCKS = LLAMA | {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 256, "seq_length": 128}
EXPERTS = BLOCKS | {"experts": 4, "experts_per_token": 2, "expert_ffn_size": 128}


def fp8(recipe: str) -> dict[str, Any]:
    return {"train__precision": "fp8", "fp8__recipe": recipe, "batch__global": 4}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied dp4 bf16": (GPT, {"parallel__dp": 4, **BF16}),
    "dp2 tp2 sp": (GPT, {"parallel__dp": 2, "parallel__tp": 2, "parallel__sp": True, "model__dropout": 0.1}),
    "dp2 cp2 bf16, full recomputation": (LLAMA, {"parallel__dp": 2, "parallel__cp": 2, **FULL, **BF16}),
    "dp2 pp2 vpp2 bf16, full recomputation": (
        LLAMA, {"parallel__dp": 2, "parallel__pp": 2, "parallel__vpp": 2, **FULL, **BF16},
    ),
    "tied dp2 pp2 vpp2": (GPT, {"parallel__dp": 2, "parallel__pp": 2, "parallel__vpp": 2}),
    "tied dp2 pp2 vpp3, ends without layers": (GPT, {"parallel__dp": 2, "parallel__pp": 2, "parallel__vpp": 3}),
    "dp2 pp2 gpipe bf16": (
        MODELS["neox"], {"parallel__dp": 2, "parallel__pp": 2, "parallel__schedule": "gpipe", **BF16},
    ),
    "dp2 pp2, a layer": (LLAMA, {"parallel__dp": 2, "parallel__pp": 2, "parallel__layers_per_chunk": [3, 1]}),
    "one rank": (GPT, {}),
    "tied dp2 tp2, no overlap": (
        MODELS["gemma2"], {"parallel__dp": 2, "parallel__tp": 2, "overlap__dp": False, "overlap__tp": False},
    ),
    "dp2 v": (LLAMA, {"parallel__dp": 2, **V}),
    "tied dp2 v bf16, selective recomputation": (
        GPT, {"parallel__dp": 2, **V, "train__recompute": "selective", **BF16},
    ),
    "tied dp2 zb_h1": (GPT, {"parallel__dp": 2, "parallel__pp": 2, "parallel__schedule": "zb_h1"}),
    "dp4 ep2 bf16, full recomputation": (
        MIXTRAL | {"dense_layers": 1}, {"parallel__dp": 4, "parallel__ep": 2, **FULL, **BF16},
    ),
    "dp2 tp2 sp ep4": (MIXTRAL, {"parallel__dp": 2, "parallel__tp": 2, "parallel__sp": True, "parallel__ep": 4}),
    "muon dp2": (LLAMA, {"parallel__dp": 2, "optimizer__name": "muon"}),
    "muon dp4 ep2": (MIXTRAL, {"parallel__dp": 4, "parallel__ep": 2, "optimizer__name": "muon"}),
    "lamb dp2 tp2": (GPT, {"parallel__dp": 2, "parallel__tp": 2, "optimizer__name": "lamb"}),
    "compensated dp2": (
        LLAMA, {"parallel__dp": 2, **BF16, "optimizer__master_weights": "bf16_compensated"},
    ),
    "offload, averages dp2": (
        LLAMA,
        {"parallel__dp": 2, "train__memory": ["full_host"], "train__weight_average": "ema", **BF16},
    ),
    "noise scale, guard dp2": (GPT, {"parallel__dp": 2, "train__noise_scale_every": 1, "optimizer__zclip": True}),
    "chunks dp2 pp2": (
        LLAMA,
        {
            "parallel__dp": 2, "parallel__pp": 2, "data__sequence_chunk_tokens": 4, "data__sequence_chunks_saved": 2,
        },
    ),
    "skipped stages dp2 pp4": (LLAMA, {"parallel__dp": 2, "parallel__pp": 4, "parallel__skip_ratio": 0.25}),
    "documents, tiles dp2": (
        LLAMA,
        {
            "parallel__dp": 2, "data__attention_mask": "document", "data__document_length": 5, "train__mlp_tiles": 2,
        },
    ),
    "fp8 tensorwise dp4": (TENSORS, {"parallel__dp": 4, **fp8("tensorwise")}),
    "fp8 tensorwise dp2 tp2 sp, biases": (
        GPT_TENSORS, {"parallel__dp": 2, "parallel__tp": 2, "parallel__sp": True, **fp8("tensorwise")},
    ),
    "fp8 tensorwise dp2 cp2, muon": (
        TENSORS, {"parallel__dp": 2, "parallel__cp": 2, **fp8("tensorwise"), "optimizer__name": "muon"},
    ),
    "fp8 delayed dp2 pp2 vpp2, full recomputation": (
        TENSORS, {"parallel__dp": 2, "parallel__pp": 2, "parallel__vpp": 2, **FULL, **fp8("delayed")},
    ),
    "fp8 delayed dp4 in groups, averages": (
        TENSORS, {"parallel__dp": 4, "parallel__dp_shard": 2, "train__weight_average": "ema", **fp8("delayed")},
    ),
    "fp8 static dp2 v, all layers": (
        TENSORS,
        {"parallel__dp": 2, **V, **fp8("static"), "fp8__first_layers_bf16": 0, "fp8__last_layers_bf16": 0},
    ),
    "fp8 rowwise dp2 tp2, full recomputation": (
        TENSORS, {"parallel__dp": 2, "parallel__tp": 2, **FULL, **fp8("rowwise")},
    ),
    "fp8 rowwise dp2 ep2": (EXPERTS, {"parallel__dp": 2, "parallel__ep": 2, **fp8("rowwise")}),
    "fp8 rowwise pow2 dp2 tp2": (TENSORS, {"parallel__dp": 2, "parallel__tp": 2, **fp8("rowwise"), **POW2}),
    "fp8 rowwise pow2 dp2 ep2": (EXPERTS, {"parallel__dp": 2, "parallel__ep": 2, **fp8("rowwise"), **POW2}),
    "fp8 blockwise pow2 dp4": (BLOCKS, {"parallel__dp": 4, **fp8("blockwise"), **POW2}),
    "fp8 blockwise dp4": (BLOCKS, {"parallel__dp": 4, **fp8("blockwise")}),
    "fp8 blockwise dp4 ep2": (EXPERTS, {"parallel__dp": 4, "parallel__ep": 2, **fp8("blockwise")}),
    "fp8 tensorwise, one rank": (TENSORS, fp8("tensorwise")),
}  # fmt: skip
QUICK = ("dp2 pp2 vpp2 bf16, full recomputation", "fp8 tensorwise dp4")


def trained(run: Any) -> tuple[list[float], list[Any]]:
    """Train, with evaluations before, between and after; return all figures, and the state's bytes."""
    from megascale.train.evaluate import evaluate

    figures = []
    for _ in range(2):
        figures.append(evaluate(run).valid_loss)
        figures += [number for pair in curve_of(run, 2) for number in pair]
    figures.append(evaluate(run).valid_loss)
    return figures, [tensor.view(torch.uint8).numpy().tobytes() for tensor in run.optimizer.flat_tensors()]


def in_modes(model: dict[str, Any], layout: dict[str, Any], folder: Path) -> tuple[RunConfig, list[RunConfig]]:
    """Return the configuration with zero = 2, and those with sharded weights, of equal buckets."""
    modes = ["keep", "forward", *(["microbatch"] if "parallel__vpp" in layout else [])]
    two = {"parallel__zero": 2, "overlap__bucket_bytes": 1}
    others = [{"parallel__zero": 3, "parallel__reshard": mode} for mode in modes]
    one, *rest = [config_of(settings(model, folder, **EVALUATED, **layout, **mode), folder) for mode in (two, *others)]
    return one, rest


EVALUATED = {"train__eval_every": 100, "train__eval_steps": 1}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_sharded_weights_have_the_bits_of_zero_2(name: str, tmp_path: Path) -> None:
    model, layout = CASES[name]
    config, sharded = in_modes(model, layout, tmp_path)
    expected = run_threads(config, trained)
    for other in sharded:
        assert run_threads(other, trained) == expected, other.parallel.reshard


def peak_of_a_step(run: Any) -> tuple[int, int, list[bool], int]:
    """Return the most units with memory in a step, the slots, whether parameters are NaN after it, and the most full
    gradients.
    """
    from megascale.train.step import train_step

    weights: ShardedWeights = run.buffers._sharded
    units, gradients = list[int](), list[int]()

    def noting(function: Any) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            units.append(sum(bool(use.wholes) for use in weights._uses))
            gradients.append(sum(bucket.storage.full_grad is not None for bucket in run.buffers.buckets))
            return result

        return noted

    for name in ("gather", "enter", "leave", "release"):
        setattr(weights, name, noting(getattr(weights, name)))
    train_step(run, run.train_loader.batch(0))
    parameters = [p for chunk in run.buffers.chunks for bucket in chunk for p in bucket.parameters.values()]
    return max(units), len(weights._free), [bool(p.isnan().all()) for p in parameters], max(gradients)


def test_two_units_are_gathered_at_a_time(tmp_path: Path) -> None:
    """Of six; a tied embedding's gradient waits for the embedding's backward."""
    for model, most in ((LLAMA, 1), (GPT, 2)):
        config = config_of(settings(model, tmp_path, parallel__dp=2, parallel__zero=3), tmp_path)
        for units, free, missing, gradients in run_threads(config, peak_of_a_step):
            assert units == free == SLOTS and all(missing)
            assert gradients <= most + 1  # those of the head are added in forward


def without(run: Any, name: str) -> str:
    """Train after a function of the weights does nothing; return the error's text, or "finite", or "not finite"."""
    from megascale.core.errors import DivergenceError
    from megascale.train.step import train_step

    setattr(run.buffers._sharded, name, lambda *arguments, **named: None)
    try:
        return "finite" if np.isfinite(train_step(run, run.train_loader.batch(0)).grad_norm) else "not finite"
    except (AssertionError, DivergenceError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_layer_without_its_weights_shows(tmp_path: Path) -> None:
    """Unplugged: without the wait that binds gathered weights every loss is NaN; units out of order are refused."""
    config = config_of(settings(LLAMA, tmp_path, parallel__zero=3), tmp_path)
    assert run_threads(config, lambda run: without(run, "enter"))[0].startswith("DivergenceError")
    assert "runs before" in run_threads(config, lambda run: without(run, "leave"))[0]


def sent_in_a_step(run: Any) -> dict[str, tuple[int, int]]:
    """Return calls and bytes over dp of a step, from the event log."""
    from megascale.train.step import train_step

    train_step(run, run.train_loader.batch(0))
    return traffic_of(run, 1)["dp"]


@pytest.mark.parametrize(
    ("reshard", "layout"),
    [
        ("forward", {}),
        pytest.param("keep", {}, marks=pytest.mark.slow),
        pytest.param("forward", {"parallel__pp": 2}, marks=pytest.mark.slow),
        pytest.param("microbatch", {"parallel__pp": 2, "parallel__vpp": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("model", [LLAMA, pytest.param(GPT, marks=pytest.mark.slow)], ids=["untied", "tied"])
def test_bytes_are_those_of_the_formula(
    model: dict[str, Any], reshard: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    """A unit is gathered in forward and in backward; the last one of a forward stays for the backward after it, and the
    first one of that for the next forward.
    """
    tree = settings(model, tmp_path, parallel__dp=2, parallel__zero=3, parallel__reshard=reshard, **layout)
    config = config_of(tree, tmp_path)
    m = config.num_microbatches
    ranks: Sequence[dict[str, tuple[int, int]]] = run_threads(config, sent_in_a_step)
    for rank, sent in enumerate(ranks):
        from megascale.layout.topology import topology_of

        planned = step_traffic(config, topology_of(config.parallel).coord(rank))
        for operation in ("all_gather", "reduce_scatter"):
            assert sent[operation] == planned["dp", operation]
    if model is LLAMA and not layout:
        units = config.model.num_layers + 2
        gathers = {"keep": units, "forward": 2 * m * units - m - (m - 1)}[reshard]
        assert ranks[0]["all_gather"][0] == gathers
        assert ranks[0]["reduce_scatter"][0] == m * units
