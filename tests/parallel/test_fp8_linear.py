"""FP8 linear layers: equal in every layout, close to bf16, and scales survive a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import RECIPES, ROW, ScaleBlock
from megascale.comm.mesh import Mesh, open_mesh
from megascale.comm.symmetric_memory import SymmetricMemory
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout import gpu_overlap
from megascale.layout.chunks import fp8_layers, fp8_weights
from megascale.layout.sequence_shard import shard_sequence
from megascale.layout.topology import Topology
from megascale.model.modules import Linear
from megascale.ops import fp8
from megascale.ops.fp8 import Fp8Kernels
from megascale.ops.quantized import Quantized
from megascale.parallel.fp8_linear import Fp8Gemms, build_linear_gemms
from megascale.parallel.fp8_state import Fp8State
from megascale.parallel.segments import finish
from megascale.parallel.tensor import column_parallel_linear, row_parallel_steps
from megascale.parallel.tp_overlap import LinearParams, TensorParallel
from megascale.plan.account.state_bytes import state_bytes
from tests.fused import serve_on_cpus
from tests.marks import only_quick
from tests.runs import LLAMA, build_run, config_of, curve_of, micro_batch, settings, train_curve, train_order
from tests.worlds import run_world

Array = np.ndarray

MODEL = LLAMA | {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 256, "seq_length": 128}
WIDE = MODEL | {"hidden_size": 256, "ffn_size": 512}  # shards over two ranks are whole blocks

NAMES = [name for name in RECIPES.names() if not RECIPES[name].facts["whole"]]
"""Recipes whose operands ranks may share."""

recipes = pytest.mark.parametrize("recipe", NAMES)


def configured(folder: Path, recipe: str, model: dict[str, Any] = MODEL, **more: Any) -> RunConfig:
    more = {"train__precision": "fp8", "batch__global": 2, "train__steps": 6, "optimizer__lr": 1e-3} | more
    return config_of(settings(model, folder, fp8__recipe=recipe, **more), folder).resolve(None)


def state_of(config: RunConfig, mesh: Mesh) -> Fp8State:
    return Fp8State(
        config.model, config.fp8, fp8_layers(config.model, config.train, config.fp8), mesh, torch.device("cpu")
    )


# Quantized operands of two ranks equal those of one process.


def operands(layer: str, tokens: int = 128) -> list[Tensor]:
    """Create an input [s, b, k], a weight [n, k] and an output gradient of a layer of `WIDE`, unsharded.

    Rows differ in magnitude: a scale computed from a shard alone is wrong.
    """
    n, k = {"attention.qkv": (768, 256), "attention.out": (256, 256)}[layer]
    generator = torch.Generator().manual_seed(0)
    results = []
    for shape in ((tokens, 1, k), (n, k), (tokens, 1, n)):
        sizes = torch.rand(shape, generator=generator) ** 8
        results.append((torch.randn(shape, generator=generator) * sizes).bfloat16())
    return results


LAYERS = ("attention.qkv", "attention.out")


def all_casts(rank: Rank, configs: list[RunConfig], sequence: bool) -> dict[tuple[str, str], list[Array]]:
    """Return the `casts` by recipe and layer."""
    mesh = open_mesh(Topology(tp=rank.world_size), rank.rank, tied=False)
    return {(config.fp8.recipe, layer): casts(mesh, config, layer, sequence) for config in configs for layer in LAYERS}


def casts(mesh: Mesh, config: RunConfig, layer: str, sequence: bool) -> list[Array]:
    """Quantize this rank's shards of the operands, and dequantize."""
    tp, index = mesh.tp.size, mesh.tp.index
    axis = TensorParallel(mesh.tp, sequence)
    scaling = state_of(config, mesh)
    gemms = build_linear_gemms(f"layers.1.{layer}", scaling, axis).of(micro_batch([0]))
    assert isinstance(gemms, Fp8Gemms)
    x, weight, grad = operands(layer)
    column = gemms.shard_dim == 0
    part = weight.chunk(tp, gemms.shard_dim)[index].contiguous()
    here = lambda t, cut: t.chunk(tp, cut)[index].contiguous()  # noqa: E731
    if column:
        x, grad = here(x, 0) if sequence else x, here(grad, 2)
    else:
        x, grad = here(x, 2), here(grad, 0) if sequence else grad
    results = [
        gemms.input_operand(x),
        gemms.weight_for_forward(part),
        gemms.weight_for_dgrad(part),
        gemms.grad_operand(grad),
    ]
    assert all(isinstance(each, Quantized) for each in results)
    return [each.dequantize().numpy() for each in results if isinstance(each, Quantized)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[RunConfig]:
    return [configured(tmp_path_factory.mktemp("wide"), recipe, WIDE) for recipe in NAMES]


@pytest.fixture(scope="module")
def quantized_alone(wide: list[RunConfig]) -> dict[tuple[str, str], list[Array]]:
    return run_world(1, all_casts, wide, False)[0]


@pytest.fixture(scope="module", params=only_quick([False, True], True))
def quantized(request: Any, wide: list[RunConfig]) -> tuple[bool, list[dict[tuple[str, str], list[Array]]]]:
    """Quantize on two ranks: whether they divide the sequence, and the `casts` by rank."""
    return request.param, run_world(2, all_casts, wide, request.param)


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("layer", LAYERS)
def test_two_ranks_quantize_as_one_process(recipe: str, layer: str, quantized: Any, quantized_alone: Any) -> None:
    sequence, ranks = quantized
    column = layer == "attention.qkv"
    cuts = [(0 if sequence else None) if column else 2, 0 if column else 1, 1 if column else 0,
            2 if column else (0 if sequence else None)]  # fmt: skip
    for index, cut in enumerate(cuts):
        parts = [rank[recipe, layer][index] for rank in ranks]
        together = parts[0] if cut is None else np.concatenate(parts, cut)
        operand = ("input", "weight", "transposed weight", "gradient")[index]
        if operand == "gradient" and column and RECIPES[recipe].facts["stochastic"]:
            continue  # the random bits are those of shards of q, k and v (`test_dither`)
        assert np.array_equal(together, quantized_alone[recipe, layer][index]), operand


def test_without_the_amax_all_reduce_operands_differ(tmp_path: Path, quantized_alone: Any) -> None:
    ranks = run_world(2, casts_without_reduction, [configured(tmp_path, "tensorwise", WIDE)], True)
    first, second = (rank["tensorwise", "attention.out"][0] for rank in ranks)
    assert not np.array_equal(np.concatenate([first, second], 2), quantized_alone["tensorwise", "attention.out"][0])


def casts_without_reduction(rank: Rank, *arguments: Any) -> dict[tuple[str, str], list[Array]]:
    from megascale.parallel import fp8_linear

    fp8_linear.all_reduce = lambda *_, **__: None  # type: ignore[assignment]
    return all_casts(rank, *arguments)


TOKENS = 512  # a run of consecutive tokens is a whole block on two ranks that exchange keys


def casts_of_shared_tokens(rank: Rank, configs: list[RunConfig], reduces: bool = True) -> dict[str, Array]:
    """Quantize the operands of all GEMMs, of this rank's tokens, by each recipe; return them as of all tokens, with
    zeros in place of other ranks'.
    """
    from megascale.parallel import fp8_linear

    if not reduces:
        fp8_linear.all_reduce = lambda *_, **__: None  # type: ignore[assignment]
    mesh = open_mesh(Topology(cp=rank.world_size), rank.rank, tied=False)
    shard = shard_sequence(TOKENS, rank.world_size, 1, rank.rank)
    places, batch = [place for span in shard.spans for place in range(*span)], micro_batch([0], shard=shard)
    x, _, grad = (t[places] if t.dim() == 3 else t for t in operands("attention.out", TOKENS))
    results = {}
    for config in configs:
        scaling = state_of(config, mesh)
        gemms = build_linear_gemms("layers.1.attention.out", scaling, TensorParallel(mesh.tp, False)).of(batch)
        assert isinstance(gemms, Fp8Gemms)
        x, grad = x.clone(), grad.clone()  # without the amaxes that another recipe has kept
        found: dict[str, Any] = {"X": gemms.input_operand(x), "dY": gemms.grad_operand(grad)}
        found["X^T"] = gemms.operand_for_wgrad("input", gemms.wgrad_source(x, found["X"]))
        found["dY^T"] = gemms.operand_for_wgrad("gradient", gemms.wgrad_source(grad, found["dY"]))
        results |= {f"{config.fp8.recipe} {name}": _placed(operand, places) for name, operand in found.items()}
    return results


def _placed(operand: Any, places: list[int]) -> Array:
    """An operand [tokens, features], or its transpose, among zeros for all tokens: [features, TOKENS]."""
    part = operand.dequantize()
    whole = torch.zeros(256, TOKENS)
    whole[:, places] = part.flatten(0, 1).t() if part.dim() == 3 else part
    return whole.numpy()


def test_ranks_that_share_sequences_quantize_as_one_process(wide: list[RunConfig]) -> None:
    (alone,) = run_world(1, casts_of_shared_tokens, wide)
    first, second = run_world(2, casts_of_shared_tokens, wide)
    assert [name for name, whole in alone.items() if not np.array_equal(first[name] + second[name], whole)] == []


@pytest.mark.slow
def test_without_the_amax_all_reduce_over_cp_operands_differ(tmp_path: Path) -> None:
    configs = [configured(tmp_path, recipe, WIDE) for recipe in ("tensorwise", "rowwise")]
    (alone,) = run_world(1, casts_of_shared_tokens, configs)
    first, second = run_world(2, casts_of_shared_tokens, configs, False)
    differ = {name for name, whole in alone.items() if not np.array_equal(first[name] + second[name], whole)}
    assert differ == {*(f"tensorwise {name}" for name in ("X", "dY", "X^T", "dY^T")), "rowwise X^T", "rowwise dY^T"}


# Full runs.


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "pp2": {"parallel__pp": 2},
    "dp2": {"parallel__dp": 2},
    "dp2 zero3": {"parallel__dp": 2, "parallel__zero": 3},
}


Curve = list[tuple[float, float]]


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Curve]:
    """A function that returns the curve of a recipe in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return cache(lambda recipe: run_world(1, train_curve, configured(folder, recipe, WIDE), 3)[0])


@pytest.mark.parametrize("recipe", only_quick(NAMES, "delayed"))
@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "tp2 sp"))
def test_layouts_train_equally(recipe: str, layout: str, trained_alone: Callable[[str], Curve], tmp_path: Path) -> None:
    """As close as bf16 sums permit: an element rounded differently may quantize to the next FP8 value."""
    config = configured(tmp_path, recipe, WIDE, **LAYOUTS[layout])
    curve = run_world(config.world_size, train_curve, config, 3)[0]
    for (loss, norm), (expected, expected_norm) in zip(curve, trained_alone(recipe), strict=True):
        assert loss == pytest.approx(expected, rel=2e-3)
        assert norm == pytest.approx(expected_norm, rel=5e-2)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Array]]:
    """Compute a first step's gradients in bf16 and by each recipe."""
    folder = tmp_path_factory.mktemp("gradients")
    configs = {recipe: configured(folder, recipe) for recipe in NAMES}
    configs["bf16"] = configured(folder, "tensorwise", train__precision="bf16")
    return run_world(1, all_gradients, configs)[0]


@pytest.mark.parametrize("recipe", NAMES)
def test_gradients_are_close_to_bf16(recipe: str, gradients: dict[str, dict[str, Array]]) -> None:
    bf16_grads, fp8_grads = gradients["bf16"], gradients[recipe]
    assert bf16_grads.keys() == fp8_grads.keys()
    for name, expected in bf16_grads.items():
        assert distance(fp8_grads[name], expected) < (0.4 if recipe == "nvfp4" else 0.15), name
    chosen = {f"layers.{i}.{part}.weight" for i in (1, 2) for part in ("attention.qkv", "attention.out", "mlp.down")}
    assert all(distance(fp8_grads[name], bf16_grads[name]) > 0.01 for name in chosen)


def distance(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def all_gradients(rank: Rank, configs: dict[str, RunConfig]) -> dict[str, dict[str, Array]]:
    return {name: first_gradients(rank, config) for name, config in configs.items()}


def first_gradients(rank: Rank, config: RunConfig) -> dict[str, Array]:
    run = build_run(rank, config)
    run.buffers.begin_step()
    if run.fp8_state is not None:
        run.fp8_state.begin_step(collect_stats=False)
    run.pipeline.run_actions(train_order(run), run.train_loader.batch(0))
    buckets = list(run.buffers.finish_reductions())
    if config.parallel.zero == 3:  # shards alone are left
        return {bucket.label: bucket.grad.numpy() for bucket in buckets}
    return {name: p.main_grad.numpy() for b in buckets for name, p in b.parameters.items()}


def test_the_first_and_last_layers_and_the_head_stay_in_bf16(tmp_path: Path) -> None:
    default, all_layers = (
        configured(tmp_path, "tensorwise", **keys)
        for keys in ({}, {"fp8__first_layers_bf16": 0, "fp8__last_layers_bf16": 0})
    )
    names = list(fp8_weights(default.model, fp8_layers(default.model, default.train, default.fp8)))
    parts = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    assert names == [f"layers.{index}.{part}.weight" for index in (1, 2) for part in parts]
    every = fp8_weights(all_layers.model, fp8_layers(all_layers.model, all_layers.train, all_layers.fp8))
    assert len(every) == 16 and not any("head" in name or "embedding" in name for name in every)


def test_weights_are_quantized_once_per_step(tmp_path: Path) -> None:
    (counts,) = run_world(1, count_weight_casts, configured(tmp_path, "rowwise", batch__global=4))
    assert set(counts) == {2 * 8}  # for forward and dgrad, 8 layers, for any number of micro-batches


def count_weight_casts(rank: Rank, config: RunConfig) -> list[int]:
    from megascale.train.step import train_step

    run, counts, real = build_run(rank, config), [], Fp8Gemms._cast

    def counting(self: Fp8Gemms, operand: str, x: Tensor, **more: Any) -> Quantized:
        counts[-1] += operand == "weight"
        return real(self, operand, x, **more)

    Fp8Gemms._cast = counting  # type: ignore[method-assign]
    for _ in range(2):
        counts.append(0)
        train_step(run, run.train_loader.batch(run.progress.samples))
    return counts


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_forward_accumulates_fast_and_dgrad_on_request(recipe: str, tmp_path: Path) -> None:
    configs = [configured(tmp_path, recipe, fp8__fast_dgrad=fast) for fast in (False, True)]
    (flags,) = run_world(1, fast_accumulation, configs)
    assert flags == [{"forward": True, "dgrad": False}, {"forward": True, "dgrad": True}]


def fast_accumulation(rank: Rank, configs: list[RunConfig]) -> list[dict[str, bool]]:
    mesh = open_mesh(Topology(), rank.rank, tied=False)
    results, weight = [], torch.ones(128, 128, dtype=torch.bfloat16)
    for config in configs:
        gemms = build_linear_gemms("layers.1.attention.out", state_of(config, mesh), TensorParallel(mesh.tp, False))
        operands = {"forward": gemms.weight_for_forward(weight), "dgrad": gemms.weight_for_dgrad(weight)}
        results.append({name: each.use_fast_accum for name, each in operands.items() if isinstance(each, Quantized)})
    return results


def test_every_fp8_gemm_is_the_backends(tmp_path: Path) -> None:
    configs = [configured(tmp_path, recipe, batch__global=2, batch__micro=1) for recipe in NAMES]
    (counts,) = run_world(1, count_all_gemms, configs)
    # forward, dgrad and wgrad, 8 layers, 2 micro-batches
    assert counts == dict.fromkeys(NAMES, 3 * 8 * 2)


def count_all_gemms(rank: Rank, configs: list[RunConfig]) -> dict[str, int]:
    return {config.fp8.recipe: count_gemms(rank, config) for config in configs}


def count_gemms(rank: Rank, config: RunConfig) -> int:
    from megascale.train.step import train_step

    run, formats = build_run(rank, config), []
    recipe = run.fp8_state.recipe

    def counting(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        formats.append(dtype)
        return recipe.gemm(a, b, dtype)

    def counting_wgrad(total: Tensor, *given: Any) -> None:
        formats.append(total.dtype)
        recipe.wgrad(total, *given)

    run.fp8_state.recipe = replace(recipe, gemm=counting, wgrad=counting_wgrad)
    train_step(run, run.train_loader.batch(run.progress.samples))
    return len(formats)


ONE_OR_MORE: dict[str, dict[str, Any]] = {"one": {}, "tp2": {"parallel__tp": 2}, **LAYOUTS}


@pytest.mark.parametrize("recipe", only_quick(NAMES, "tensorwise"))
@pytest.mark.parametrize("layout", only_quick(ONE_OR_MORE, "one"))
def test_cast_transpose_kernels_change_no_gradient(recipe: str, layout: str, tmp_path: Path) -> None:
    """Weights that are gathered as codes with scales for both directions, and those in NVFP4, have one layout: dgrad
    transposes four in each layer.
    """
    config, facts = configured(tmp_path, recipe, WIDE, **ONE_OR_MORE[layout]), RECIPES[recipe].facts
    in_one_layout = (config.dp == 2 and facts["weight"].block.serves_transpose) or recipe == "nvfp4"
    weights = 4 * 2 // config.parallel.pp if in_one_layout else 0
    by_kernel = facts["granularity"] == "tensor"
    for plain, both, copies, turned in run_world(config.world_size, gradients_by_both, config):
        assert plain.keys() == both.keys()
        assert all(np.array_equal(plain[name], both[name]) for name in plain)
        assert copies == (0 if by_kernel else weights)
        if by_kernel:  # with sp, all-gathered operands too: two inputs, two gradients
            assert turned == (4 * 2 * 2 if layout == "tp2 sp" else weights)


def gradients_by_both(rank: Rank, config: RunConfig) -> tuple[dict[str, Array], dict[str, Array], int, int]:
    """Compute the gradients of two micro-batches with torch's kernels, and with a cast-transpose kernel.

    Also count, with the second, transposing copies of FP8 matrices, and calls that write the transpose only.
    """

    plain, copies, turned = first_gradients(rank, config), 0, 0
    transpose, make = Quantized.t, Fp8State.__init__

    def counting(self: Quantized) -> Quantized:
        nonlocal copies
        copies += self.transposed is None and not self.columnwise
        return transpose(self)

    def kernel(x: Tensor, expected: Any, block: ScaleBlock, element: Any, both: bool, *more: Any) -> Quantized:
        nonlocal turned
        turned += (view := x.dim() == 2 and not x.is_contiguous())
        rows = fp8.cast(x.contiguous(), expected, block, element, False, *more)
        if not both or view or not block.serves_transpose:
            return rows
        return replace(rows, transposed=rows.data.reshape(-1, x.shape[-1]).t().contiguous())

    def with_kernel(self: Fp8State, *given: Any, **more: Any) -> None:
        make(self, *given[:-1], Fp8Kernels(cast=kernel, strided=True), **more)

    Quantized.t, Fp8State.__init__ = counting, with_kernel  # type: ignore[method-assign]
    return plain, first_gradients(rank, config), copies, turned


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_fp8_weights_take_the_planned_memory(recipe: str, tmp_path: Path) -> None:
    config = configured(tmp_path, recipe, WIDE, parallel__pp=2)
    wide = configured(tmp_path, recipe, WIDE, parallel__pp=2, train__precision="bf16")
    results = run_world(2, cast_bytes, config)
    assert results == [state_bytes(config, rank).parameters - state_bytes(wide, rank).parameters for rank in (0, 1)]


def cast_bytes(rank: Rank, config: RunConfig) -> int:
    run = build_run(rank, config)
    curve_of(run, 1)
    layers = [module for stage in run.stages for module in stage.modules() if isinstance(module, Linear)]
    made = [layer.params.gemms._kept.operands for layer in layers if isinstance(layer.params.gemms, Fp8Gemms)]
    casts = [cast for weights in made for cast in weights]
    return sum(cast.nbytes + (cast.scale.nbytes if cast.block.k else 0) for cast in casts)  # of rows they count nothing


@pytest.mark.parametrize("recipe", only_quick(["delayed", "tensorwise"], "delayed"))
def test_a_resumed_run_is_bit_equal(recipe: str, tmp_path: Path) -> None:
    keys = {"checkpoint__every": 3, "train__steps": 6}
    uninterrupted = run_world(1, save_and_train, configured(tmp_path / "a", recipe, **keys), 6)[0]
    run_world(1, save_and_train, configured(tmp_path / "b", recipe, **keys), 3)
    resumed = run_world(1, save_and_train, configured(tmp_path / "b", recipe, **keys), 3)[0]
    assert resumed == uninterrupted[3:]


def save_and_train(rank: Rank, config: RunConfig, steps: int) -> list[tuple[float, float]]:
    from megascale.convert.huggingface import PretrainedWeights
    from megascale.train.resume import load_initial_state

    run = build_run(rank, config)
    load_initial_state(run, PretrainedWeights)
    curve = curve_of(run, steps)
    run.buffers.finish_param_gather()
    run.checkpoints.save(run.progress)
    return curve


@pytest.mark.parametrize(
    ("recipe", "before"),
    [
        pytest.param("tensorwise", {}, marks=pytest.mark.slow),
        ("delayed", {"fp8__history": 4}),
        pytest.param("delayed", {"fp8__first_layers_bf16": 2}, marks=pytest.mark.slow),
    ],
)
def test_amax_history_restarts_without_a_matching_history(recipe: str, before: dict[str, int], tmp_path: Path) -> None:
    keys = {"checkpoint__every": 3, "train__steps": 6}
    run_world(1, save_and_train, configured(tmp_path, recipe, **keys, **before), 3)
    assert run_world(1, history_after_resuming, configured(tmp_path, "delayed", **keys), 3)[0] == (False, 3)


def history_after_resuming(rank: Rank, config: RunConfig, steps: int) -> tuple[bool, int]:
    """Return whether the checkpoint gave a history, and the number of steps trained."""
    from megascale.convert.huggingface import PretrainedWeights
    from megascale.train.resume import load_initial_state

    run = build_run(rank, config)
    load_initial_state(run, PretrainedWeights)
    return run.fp8_state.has_history, len(curve_of(run, steps))


def test_amax_history_is_the_maximum_over_all_ranks(tmp_path: Path) -> None:
    config = configured(tmp_path, "delayed", parallel__tp=2, parallel__dp=2, train__steps=3)
    ranks = run_world(4, history_after, config)
    amaxes, histories = zip(*ranks, strict=True)
    assert all(np.array_equal(history, histories[0]) for history in histories)
    for step in range(2):  # newest first
        assert np.array_equal(np.max([seen[1 - step] for seen in amaxes], 0), histories[0][:, step])
        assert any(not np.array_equal(seen[1 - step], histories[0][:, step]) for seen in amaxes)
    assert (histories[0][:, :2] > 0).all() and not histories[0][:, 2:].any()


def history_after(rank: Rank, config: RunConfig) -> tuple[list[Array], Array]:
    """Return this rank's amax in two steps, and the history."""
    run, amaxes = build_run(rank, config), []
    finish = run.fp8_state.update_history

    def watched() -> None:
        amaxes.append(run.fp8_state._amax.numpy().copy())
        finish()

    run.fp8_state.update_history = watched
    curve_of(run, 2)
    return amaxes, run.fp8_state.history.numpy()


@pytest.mark.parametrize("recipe", ["static", "mxfp8"])
def test_a_non_finite_element_stops_the_run(recipe: str, tmp_path: Path) -> None:
    (message,) = run_world(1, poisoned, configured(tmp_path, recipe))
    assert "is not finite" in message or "nan" in message


def poisoned(rank: Rank, config: RunConfig) -> str:
    from megascale.core.errors import DivergenceError
    from megascale.train.step import train_step

    run = build_run(rank, config)
    run.buffers.buckets[0].parameters["layers.1.attention_norm.weight"].data[0] = float("inf")
    try:
        train_step(run, run.train_loader.batch(0))
    except DivergenceError as error:
        return str(error)
    return "it went on"


def test_cast_statistics_cover_every_operand(tmp_path: Path) -> None:
    (results,) = run_world(1, cast_stats_of_a_step, configured(tmp_path, "static"))
    assert set(results) == {
        f"layers.{i}.{part}.{operand}" for i in (1, 2)
        for part in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
        for operand in ("input", "weight", "gradient")
    }  # fmt: skip
    assert all(each.amax > 0 and 0 <= each.saturated <= 1 and 0 <= each.underflow <= 1 for each in results.values())
    weight = results["layers.1.mlp.gate_up.weight"]
    assert weight.rms == pytest.approx(1, rel=0.02), "over its initial deviation, the static scale"
    assert weight.kurtosis == pytest.approx(3, rel=0.05), "drawn from a normal distribution"


def test_layers_of_the_parallel_block_share_operands(tmp_path: Path) -> None:
    config = configured(tmp_path, "rowwise", model__block="parallel")
    (results,) = run_world(1, cast_stats_of_a_step, config)
    assert len(results) == 2 * (4 * 3 - 2) and not {"layers.1.mlp.gate_up.input", "layers.1.mlp.down.gradient"} & set(
        results
    )
    assert all(each.amax > 0 for each in results.values())
    (casts,) = run_world(1, count_casts, config)
    each = 2 * 2 * 3  # two layers, two micro-batches, three operands: a shared one and two
    assert casts == {"input": 2 * each, "gradient": 2 * each, "weight": 2 * 2 * 4}  # for forward and dgrad


def count_casts(rank: Rank, config: RunConfig) -> dict[str, int]:
    """Count the casts of a step."""
    from megascale.train.step import train_step

    run, counts, real = build_run(rank, config), dict.fromkeys(("input", "gradient", "weight"), 0), Fp8Gemms._cast

    def counting(self: Fp8Gemms, operand: str, x: Tensor, **more: Any) -> Quantized:
        counts[operand] += 1
        return real(self, operand, x, **more)

    Fp8Gemms._cast = counting  # type: ignore[method-assign]
    train_step(run, run.train_loader.batch(0))
    return counts


FUSED = {
    "rowwise": ["fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"],
    "blockwise": [],
    "mxfp8": [],
    "halo": ["fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"],
    "halo_int8": [],
}
"""Fused operators of a column-parallel forward, a row-parallel forward and its backward, by recipe. With scales
of rows the gradient is all-gathered before quantization.
"""

ONE_SCALE = ["fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter", "fused_all_gather_scaled_matmul"]


TO_NEAREST = [name for name in NAMES if not RECIPES[name].facts["stochastic"]]  # narrow layers have no random bits


@pytest.mark.parametrize("recipe", only_quick(TO_NEAREST, "tensorwise", "rowwise", "blockwise"))
def test_fused_operators_run_fp8_gemms(recipe: str, tmp_path: Path) -> None:
    for called, plain, fused in run_world(2, with_fused_operators, configured(tmp_path, recipe, WIDE)):
        assert called == FUSED.get(recipe, ONE_SCALE)
        for name, expected in plain.items():
            error = np.linalg.norm(fused[name] - expected)
            assert error <= (5e-3 if called else 0) * np.linalg.norm(expected), name


def with_fused_operators(rank: Rank, config: RunConfig) -> tuple[list[str], dict[str, Array], dict[str, Array]]:
    """Return the fused operators called, and the results without and with fused operators."""
    gpu_overlap.MIN_GPU_GEMM_ROWS = 64
    mesh, called = open_mesh(Topology(tp=2), rank.rank, tied=False), serve_on_cpus()
    plain, fused = (
        two_layers(rank, config, mesh, TensorParallel(mesh.tp, sequence_parallel=True, symmetric_memory=memory))
        for memory in (None, SymmetricMemory(mesh.tp))
    )
    return called, plain, fused


def two_layers(rank: Rank, config: RunConfig, mesh: Mesh, axis: TensorParallel) -> dict[str, Array]:
    """Compute outputs and gradients of a narrow column-parallel and a narrow row-parallel layer."""
    scaling, results = state_of(config, mesh), dict[str, Array]()
    for name, linear, cuts, n in (
        ("attention.qkv", column_parallel_linear, (0, 0, 2), 256),
        ("attention.out", lambda x, layer, tp: finish(row_parallel_steps([x], [layer], tp)), (2, 1, 0), 128),
    ):
        x, weight, grad = operands(name)
        full = x, weight[:n], grad[..., :n]
        x, weight, grad = (each.chunk(2, cut)[rank.rank].contiguous() for each, cut in zip(full, cuts, strict=True))
        x.requires_grad_()
        weight.requires_grad_()
        bias = torch.ones(len(weight), dtype=torch.bfloat16)
        layer = LinearParams(weight, bias, build_linear_gemms(f"layers.1.{name}", scaling, axis))
        out = linear(x, layer, axis)
        out.backward(grad)
        assert x.grad is not None and weight.grad is not None
        for what, tensor in (("output", out), ("input", x.grad), ("weight", weight.grad)):
            results[f"{name} {what}"] = tensor.detach().float().numpy()
    return results


def cast_stats_of_a_step(rank: Rank, config: RunConfig) -> Any:
    from megascale.train.step import train_step

    run = build_run(rank, config)
    train_step(run, run.train_loader.batch(0))
    return run.fp8_state.take_cast_stats()


def test_row_scales_have_no_transpose() -> None:
    with pytest.raises(AssertionError):
        Quantized(torch.zeros(2, 2), torch.ones(2, 1), ROW).t()
