"""Linear layers in 8 bits: alike in every layout, near to bf16, and their scales survive a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.account.memory import state_bytes
from megascale.catalog.recipes import RECIPES
from megascale.comm.mesh import Mesh, open_mesh
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.chunks import eight_bit_weights
from megascale.layout.topology import Topology
from megascale.model.parts import Linear
from megascale.ops import fp8
from megascale.ops.fp8 import Grain, Kernels, Quantized, product
from megascale.parallel import overlap
from megascale.parallel.eight_bit import EightBit, Scaling, numerics_of
from megascale.parallel.overlap import Layer, TensorAxis
from megascale.parallel.tensor import column_linear, row_linear
from tests.fused import serve_on_cpus
from tests.marks import only_quick
from tests.runs import LLAMA, build_run, config_of, curve_of, settings, train_curve
from tests.worlds import run_world

Array = np.ndarray

MODEL = LLAMA | {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 256, "seq_length": 128}
WIDE = MODEL | {"hidden_size": 256, "ffn_size": 512}  # whose parts over two ranks are whole blocks

recipes = pytest.mark.parametrize("recipe", RECIPES.names())


def configured(folder: Path, recipe: str, model: dict[str, Any] = MODEL, **more: Any) -> RunConfig:
    more = {"train__precision": "fp8", "batch__global": 2, "train__steps": 6, "optimizer__lr": 1e-3} | more
    return config_of(settings(model, folder, fp8__recipe=recipe, **more), folder).resolve(None)


# What is cast, in two ranks as in one.


def operands(layer: str) -> list[Tensor]:
    """An input [s, b, k], a weight [n, k] and an output's gradient of a layer of `WIDE`, as one process has them. Rows
    differ in size, so that a scale that misses a part is a wrong one.
    """
    n, k = {"attention.qkv": (768, 256), "attention.out": (256, 256)}[layer]
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in ((128, 1, k), (n, k), (128, 1, n)):
        sizes = torch.rand(shape, generator=generator) ** 8
        found.append((torch.randn(shape, generator=generator) * sizes).bfloat16())
    return found


def casts(rank: Rank, config: RunConfig, layer: str, sequence: bool) -> list[Array]:
    """What this rank makes of its parts of the operands, as numbers again."""
    tp = rank.world
    group = open_mesh(Topology(tp=tp), rank.rank, tied=False)
    axis = TensorAxis(group.tp, sequence)
    scaling = Scaling(config, group, torch.device("cpu"))
    numerics = numerics_of(f"layers.1.{layer}", scaling, axis)
    assert isinstance(numerics, EightBit)
    x, weight, grad = operands(layer)
    column = numerics.split == 0
    part = weight.chunk(tp, numerics.split)[rank.rank].contiguous()
    here = lambda t, cut: t.chunk(tp, cut)[rank.rank].contiguous()  # noqa: E731
    if column:
        x, grad = here(x, 0) if sequence else x, here(grad, 2)
    else:
        x, grad = here(x, 2), here(grad, 0) if sequence else grad
    found = [numerics.input(x), numerics.weight(part), numerics.across(part), numerics.gradient(grad)]
    assert all(isinstance(each, Quantized) for each in found)
    return [each.dequantized().numpy() for each in found if isinstance(each, Quantized)]


@recipes
@pytest.mark.parametrize("sequence", only_quick([False, True], True))
@pytest.mark.parametrize("layer", ["attention.qkv", "attention.out"])
def test_two_ranks_cast_what_one_process_does(recipe: str, sequence: bool, layer: str, tmp_path: Path) -> None:
    config = configured(tmp_path, recipe, WIDE)
    (alone,) = run_world(1, casts, config, layer, False)
    ranks = run_world(2, casts, config, layer, sequence)
    column = layer == "attention.qkv"
    cuts = [(0 if sequence else None) if column else 2, 0 if column else 1, 1 if column else 0,
            2 if column else (0 if sequence else None)]  # fmt: skip
    for index, cut in enumerate(cuts):
        parts = [rank[index] for rank in ranks]
        together = parts[0] if cut is None else np.concatenate(parts, cut)
        assert np.array_equal(together, alone[index]), ("input", "weight", "across", "gradient")[index]


def test_without_the_largest_over_ranks_the_test_above_would_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, "tensorwise", WIDE)
    (alone,) = run_world(1, casts, config, "attention.out", False)
    ranks = run_world(2, casts_without_reduction, config, "attention.out", True)
    assert not np.array_equal(np.concatenate([rank[0] for rank in ranks], 2), alone[0])


def casts_without_reduction(rank: Rank, *arguments: Any) -> list[Array]:
    from megascale.parallel import eight_bit

    eight_bit.all_reduce = lambda *_, **__: None  # type: ignore[assignment]
    return casts(rank, *arguments)


# Whole runs.


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "pp2": {"parallel__pp": 2},
    "dp2": {"parallel__dp": 2},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[float, float]]]:
    folder = tmp_path_factory.mktemp("alone")
    return {recipe: run_world(1, train_curve, configured(folder, recipe, WIDE))[0] for recipe in RECIPES.names()}


@recipes
@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "tp2 sp"))
def test_layouts_train_alike(
    recipe: str, layout: str, alone: dict[str, list[tuple[float, float]]], tmp_path: Path
) -> None:
    """As near as sums in bf16 let them: a value that they round otherwise may fall to the next of 8 bits."""
    config = configured(tmp_path, recipe, WIDE, **LAYOUTS[layout])
    curve = run_world(config.world, train_curve, config)[0]
    for (loss, norm), (expected, expected_norm) in zip(curve, alone[recipe], strict=True):
        assert loss == pytest.approx(expected, rel=2e-3)
        assert norm == pytest.approx(expected_norm, rel=5e-2)


@recipes
def test_gradients_are_near_those_of_bf16(recipe: str, tmp_path: Path) -> None:
    wide = run_world(1, first_gradients, configured(tmp_path, recipe, train__precision="bf16"))[0]
    eight = run_world(1, first_gradients, configured(tmp_path, recipe))[0]
    assert wide.keys() == eight.keys()
    for name, expected in wide.items():
        assert distance(eight[name], expected) < 0.15, name
    chosen = {f"layers.{i}.{part}.weight" for i in (1, 2) for part in ("attention.qkv", "attention.out", "mlp.down")}
    assert all(distance(eight[name], wide[name]) > 0.01 for name in chosen)


def distance(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def first_gradients(rank: Rank, config: RunConfig) -> dict[str, Array]:
    run = build_run(rank, config)
    run.gradients.clear()
    run.scaling.begin(watch=False)
    run.pipeline.run(run.train_order, run.train.batch(0))
    buckets = list(run.gradients.finish())
    return {name: p.main_grad.numpy() for b in buckets for name, p in b.parameters.items()}


def test_the_first_and_last_layers_and_the_head_stay_in_bf16(tmp_path: Path) -> None:
    names = list(eight_bit_weights(configured(tmp_path, "tensorwise")))
    parts = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    assert names == [f"layers.{index}.{part}.weight" for index in (1, 2) for part in parts]
    every = eight_bit_weights(configured(tmp_path, "tensorwise", fp8__bf16_first=0, fp8__bf16_last=0))
    assert len(every) == 16 and not any("head" in name or "embedding" in name for name in every)


def test_weights_are_cast_once_a_step(tmp_path: Path) -> None:
    (counts,) = run_world(1, count_weight_casts, configured(tmp_path, "rowwise", batch__global=4))
    assert set(counts) == {2 * 8}  # along and across, 8 layers, whatever the number of micro-batches


def count_weight_casts(rank: Rank, config: RunConfig) -> list[int]:
    from megascale.train.step import train_step

    run, counts, real = build_run(rank, config), [], EightBit._cast

    def counting(self: EightBit, operand: str, x: Tensor, **more: Any) -> Quantized:
        counts[-1] += operand == "weight"
        return real(self, operand, x, **more)

    EightBit._cast = counting  # type: ignore[method-assign]
    for _ in range(2):
        counts.append(0)
        train_step(run, run.train.batch(run.progress.samples))
    return counts


@recipes
def test_every_product_in_8_bits_is_the_backends(recipe: str, tmp_path: Path) -> None:
    config = configured(tmp_path, recipe, batch__global=2, batch__micro=1)
    (count,) = run_world(1, count_products, config)
    assert count == 3 * 8 * 2  # output, input's and weight's gradient, 8 layers, 2 micro-batches


def count_products(rank: Rank, config: RunConfig) -> int:
    from megascale.train.step import train_step

    run, formats = build_run(rank, config), []

    def counting(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        formats.append(dtype)
        return product(a, b, dtype)

    run.scaling.kernels = Kernels(product=counting)
    train_step(run, run.train.batch(run.progress.samples))
    return len(formats)


ONE_OR_MORE: dict[str, dict[str, Any]] = {"one": {}, "tp2": {"parallel__tp": 2}, **LAYOUTS}


@pytest.mark.parametrize("recipe", only_quick(RECIPES.names(), "tensorwise"))
@pytest.mark.parametrize("layout", only_quick(ONE_OR_MORE, "one"))
def test_kernels_that_write_transposes_change_nothing(recipe: str, layout: str, tmp_path: Path) -> None:
    config = configured(tmp_path, recipe, WIDE, **ONE_OR_MORE[layout])
    for plain, both, copies, turned in run_world(config.world, gradients_by_both, config):
        assert plain.keys() == both.keys()
        assert all(np.array_equal(plain[name], both[name]) for name in plain)
        assert copies == 0
        if RECIPES[recipe].facts["grain"] == "tensor":  # with sp, what was gathered: two layers' inputs, two gradients
            assert turned == (4 * 2 * 2 if layout == "tp2 sp" else 0)


def gradients_by_both(rank: Rank, config: RunConfig) -> tuple[dict[str, Array], dict[str, Array], int, int]:
    """The gradients of two micro-batches by torch's kernels, and by one that writes both layouts; and with the second
    how many matrices in eight bits were copied to their transpose, and how often it wrote a transpose alone.
    """
    from megascale.parallel import eight_bit

    plain, copies, turned = first_gradients(rank, config), 0, 0
    transpose, make = Quantized.t, Scaling.__init__

    def counting(self: Quantized) -> Quantized:
        nonlocal copies
        copies += self.across is None
        return transpose(self)

    def kernel(
        x: Tensor, factor: Tensor, largest: float, dtype: torch.dtype, rows: bool
    ) -> tuple[Tensor | None, Tensor]:
        nonlocal turned
        turned += not rows
        return fp8.cast_transpose(x, factor, largest, dtype, rows)

    def with_kernel(self: Scaling, config: RunConfig, world: Any, device: torch.device, kernels: Kernels) -> None:
        make(self, config, world, device, Kernels(cast_transpose=kernel))

    Quantized.t, eight_bit.Scaling.__init__ = counting, with_kernel  # type: ignore[method-assign]
    return plain, first_gradients(rank, config), copies, turned


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_casts_of_weights_take_the_memory_that_is_planned(recipe: str, tmp_path: Path) -> None:
    config = configured(tmp_path, recipe, WIDE, parallel__pp=2)
    wide = configured(tmp_path, recipe, WIDE, parallel__pp=2, train__precision="bf16")
    found = run_world(2, cast_bytes, config)
    assert found == [state_bytes(config, rank).parameters - state_bytes(wide, rank).parameters for rank in (0, 1)]


def cast_bytes(rank: Rank, config: RunConfig) -> int:
    run = build_run(rank, config)
    curve_of(run, 1)
    layers = [module for stage in run.stages for module in stage.modules() if isinstance(module, Linear)]
    made = [layer.layer.numerics._weight for layer in layers if isinstance(layer.layer.numerics, EightBit)]
    return sum(cast.data.nbytes for weight in made for cast in (weight.along, weight.across) if cast is not None)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_resumed_run_goes_on_to_the_bit(recipe: str, tmp_path: Path) -> None:
    keys = {"checkpoint__every": 3, "train__steps": 6}
    whole = run_world(1, save_and_train, configured(tmp_path / "a", recipe, **keys), 6)[0]
    run_world(1, save_and_train, configured(tmp_path / "b", recipe, **keys), 3)
    rest = run_world(1, save_and_train, configured(tmp_path / "b", recipe, **keys), 3)[0]
    assert rest == whole[3:]


def save_and_train(rank: Rank, config: RunConfig, steps: int) -> list[tuple[float, float]]:
    from megascale.convert.huggingface import Pretrained
    from megascale.train.resume import resume

    run = build_run(rank, config)
    resume(run, Pretrained)
    curve = curve_of(run, steps)
    run.gradients.finish_gather()
    run.checkpoints.save(run.progress)
    return curve


@pytest.mark.parametrize(
    ("recipe", "before"), [("tensorwise", {}), ("delayed", {"fp8__history": 4}), ("delayed", {"fp8__bf16_first": 2})]
)
def test_a_history_begins_where_a_checkpoint_has_no_such(recipe: str, before: dict[str, int], tmp_path: Path) -> None:
    keys = {"checkpoint__every": 3, "train__steps": 6}
    run_world(1, save_and_train, configured(tmp_path, recipe, **keys, **before), 3)
    assert run_world(1, known_after_resuming, configured(tmp_path, "delayed", **keys), 3)[0] == (False, 3)


def known_after_resuming(rank: Rank, config: RunConfig, steps: int) -> tuple[bool, int]:
    """Whether there was a history, and how many steps were then made."""
    from megascale.convert.huggingface import Pretrained
    from megascale.train.resume import resume

    run = build_run(rank, config)
    resume(run, Pretrained)
    return run.scaling.known, len(curve_of(run, steps))


def test_a_history_is_the_largest_over_all_ranks(tmp_path: Path) -> None:
    config = configured(tmp_path, "delayed", parallel__tp=2, parallel__dp=2, train__steps=3)
    ranks = run_world(4, history_after, config)
    own, histories = zip(*ranks, strict=True)
    assert all(np.array_equal(history, histories[0]) for history in histories)
    for step in range(2):  # the newest first
        assert np.array_equal(np.max([seen[1 - step] for seen in own], 0), histories[0][:, step])
        assert any(not np.array_equal(seen[1 - step], histories[0][:, step]) for seen in own)
    assert (histories[0][:, :2] > 0).all() and not histories[0][:, 2:].any()


def history_after(rank: Rank, config: RunConfig) -> tuple[list[Array], Array]:
    """What this rank saw in each of two steps, and the history."""
    run, own = build_run(rank, config), []
    finish = run.scaling.finish

    def watched() -> None:
        own.append(run.scaling._amax.numpy().copy())
        finish()

    run.scaling.finish = watched
    curve_of(run, 2)
    return own, run.scaling.history.numpy()


def test_a_value_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    (message,) = run_world(1, poisoned, configured(tmp_path, "mu_unit"))
    assert "is not finite" in message or "nan" in message


def poisoned(rank: Rank, config: RunConfig) -> str:
    from megascale.core.errors import DivergenceError
    from megascale.train.step import train_step

    run = build_run(rank, config)
    run.gradients.buckets[0].parameters["layers.1.attention_norm.weight"].data[0] = float("inf")
    try:
        train_step(run, run.train.batch(0))
    except DivergenceError as error:
        return str(error)
    return "it went on"


def test_what_casts_lose_is_told_for_each_operand(tmp_path: Path) -> None:
    (found,) = run_world(1, what_was_lost, configured(tmp_path, "mu_unit"))
    assert set(found) == {
        f"layers.{i}.{part}.{operand}" for i in (1, 2)
        for part in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
        for operand in ("input", "weight", "gradient")
    }  # fmt: skip
    assert all(each.amax > 0 and 0 <= each.saturated <= 1 and 0 <= each.underflow <= 1 for each in found.values())


def test_layers_side_by_side_share_what_is_cast(tmp_path: Path) -> None:
    config = configured(tmp_path, "rowwise", model__block="parallel")
    (found,) = run_world(1, what_was_lost, config)
    assert len(found) == 2 * (4 * 3 - 2) and not {"layers.1.mlp.gate_up.input", "layers.1.mlp.down.gradient"} & set(
        found
    )
    assert all(each.amax > 0 for each in found.values())
    (casts,) = run_world(1, count_casts, config)
    each = 2 * 2 * 3  # in two layers and two micro-batches, one for both of the MLP's or of attention's, and two
    assert casts == {"input": 2 * each, "gradient": 2 * each, "weight": 2 * 2 * 4}  # in both directions


def count_casts(rank: Rank, config: RunConfig) -> dict[str, int]:
    """The casts of a step."""
    from megascale.train.step import train_step

    run, counts, real = build_run(rank, config), dict.fromkeys(("input", "gradient", "weight"), 0), EightBit._cast

    def counting(self: EightBit, operand: str, x: Tensor, **more: Any) -> Quantized:
        counts[operand] += 1
        return real(self, operand, x, **more)

    EightBit._cast = counting  # type: ignore[method-assign]
    train_step(run, run.train.batch(0))
    return counts


FUSED = {
    "rowwise": ["fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"],
    "blockwise": [],
}
"""Of a column-parallel layer's forward, a row-parallel layer's and its backward what goes through fused operators. Of
`rowwise` the gradient travels before it is cast.
"""

ONE_SCALE = ["fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter", "fused_all_gather_scaled_matmul"]


@pytest.mark.parametrize("recipe", only_quick(RECIPES.names(), "tensorwise", "rowwise", "blockwise"))
def test_fused_operators_multiply_in_eight_bits(recipe: str, tmp_path: Path) -> None:
    for called, plain, fused in run_world(2, with_fused_operators, configured(tmp_path, recipe, WIDE)):
        assert called == FUSED.get(recipe, ONE_SCALE)
        for name, expected in plain.items():
            error = np.linalg.norm(fused[name] - expected)
            assert error <= (5e-3 if called else 0) * np.linalg.norm(expected), name


def with_fused_operators(rank: Rank, config: RunConfig) -> tuple[list[str], dict[str, Array], dict[str, Array]]:
    """Which fused operators were called, and what came out without them and with them."""
    overlap.GPU_ROWS = 64
    mesh, called = open_mesh(Topology(tp=2), rank.rank, tied=False), serve_on_cpus()
    plain, fused = (
        two_layers(rank, config, mesh, TensorAxis(mesh.tp, sequence=True, fused=fused)) for fused in (False, True)
    )
    return called, plain, fused


def two_layers(rank: Rank, config: RunConfig, mesh: Mesh, axis: TensorAxis) -> dict[str, Array]:
    """Results and gradients of a column-parallel and of a row-parallel layer, narrow ones."""
    scaling, found = Scaling(config, mesh, torch.device("cpu")), dict[str, Array]()
    for name, linear, cuts, n in (
        ("attention.qkv", column_linear, (0, 0, 2), 256),
        ("attention.out", row_linear, (2, 1, 0), 128),
    ):
        x, weight, grad = operands(name)
        whole = x, weight[:n], grad[..., :n]
        x, weight, grad = (each.chunk(2, cut)[rank.rank].contiguous() for each, cut in zip(whole, cuts, strict=True))
        x.requires_grad_()
        weight.requires_grad_()
        bias = torch.ones(len(weight), dtype=torch.bfloat16)
        layer = Layer(weight, bias, numerics_of(f"layers.1.{name}", scaling, axis))
        out = linear(x, layer, axis)
        out.backward(grad)
        assert x.grad is not None and weight.grad is not None
        for what, tensor in (("output", out), ("input", x.grad), ("weight", weight.grad)):
            found[f"{name} {what}"] = tensor.detach().float().numpy()
    return found


def what_was_lost(rank: Rank, config: RunConfig) -> Any:
    from megascale.train.step import train_step

    run = build_run(rank, config)
    train_step(run, run.train.batch(0))
    return run.scaling.take_lost()


def test_a_grain_of_squares_is_for_weights() -> None:
    with pytest.raises(AssertionError):
        Quantized(torch.zeros(2, 2), torch.ones(2, 1), Grain.ROW).t()


@pytest.mark.slow
def test_compiled_casts_are_the_same(tmp_path: Path) -> None:
    plain, fused = (
        run_world(1, train_curve, configured(tmp_path, "rowwise", backends__linear=backend, train__steps=3))[0]
        for backend in ("torch", "compile")
    )
    assert fused == plain
