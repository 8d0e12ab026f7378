"""Launches of a layer and their bytes, counted without a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lab.commands.operator_bytes import BF16, CONFIG, WEIGHTS, count, recipe_config, table
from lab.launches import Launch, LaunchCounter
from megascale.layout.blocks import block_spec
from megascale.layout.recompute_policy import NO_RECOMPUTE
from megascale.plan.simulate import profiles
from megascale.plan.simulate.chunk_time import block_times
from megascale.plan.simulate.layer_time import LayerTimes

TOKENS, HIDDEN, INNER, QKV = 8192, 4096, 14336, 6144
LINEARS = ((HIDDEN, QKV), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))  # inputs and outputs
INPUTS = sum(k for k, _ in LINEARS) * TOKENS
GRADIENTS = sum(n for _, n in LINEARS) * TOKENS


def of(launches: list[Launch], name: str) -> tuple[int, int, int]:
    """Return the number of launches of a name, and their bytes read and written."""
    found = [launch for launch in launches if launch.name == name]
    return len(found), sum(launch.read for launch in found), sum(launch.written for launch in found)


def test_a_layer_in_bf16_has_a_launch_for_every_operand() -> None:
    launches, weights = count(recipe_config(CONFIG, BF16)), sum(k * n for k, n in LINEARS)
    assert of(launches, "mm") == (8, 2 * (INPUTS + GRADIENTS + 2 * weights), 2 * (GRADIENTS + INPUTS))
    assert of(launches, "addmm") == (4, 2 * (INPUTS + GRADIENTS) + 4 * weights, 4 * weights)
    stream = 2 * TOKENS * HIDDEN
    assert of(launches, "add, rmsnorm") == (1, 2 * stream + 2 * HIDDEN, 2 * stream)
    assert of(launches, "add, rmsnorm backward")[1:] == (3 * stream + 2 * HIDDEN, stream + 2 * HIDDEN)
    assert of(launches, "swiglu")[1:] == (2 * TOKENS * 2 * INNER, 2 * TOKENS * INNER)
    assert of(launches, "dot_product_attention")[1:] == (2 * TOKENS * QKV, stream)
    assert Counter(launch.name for launch in launches)["rope"] == 2
    assert of(launches, WEIGHTS) == (0, 0, 0)


def test_casts_by_their_own_amax_read_what_no_kernel_knows_twice() -> None:
    """Inputs and output gradients of four layers; an FP8 copy and its transpose are written, with a scale in fp32. The
    amaxes of norms' and SwiGLU's results, and of SwiGLU's gradient, are known: those of attention's result and gradient
    and of the gradients of both branches take a pass.
    """
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")
    launches, elements = count(recipe_config(CONFIG, "tensorwise")), INPUTS + GRADIENTS
    assert of(launches, "_fp8_cast") == (8, 2 * elements + 4 * 8, 2 * elements + 4 * 8)
    assert of(launches, "_fp8_amax") == (4, 2 * (3 * HIDDEN + QKV) * TOKENS, 4 * 4)
    assert of(launches, "_swiglu") == (2, 2 * 5 * INNER * TOKENS, 2 * 3 * INNER * TOKENS)
    assert of(launches, "amax")[:2] == (2, TOKENS * 2 * 2), "of the norms' rows"
    assert of(launches, "_fp8_gemm")[0] == 4 and of(launches, "_scaled_mm")[0] == 8
    assert of(launches, WEIGHTS)[0] == 12
    assert of(launches, "copy_")[0] == 0, "GEMMs write their results themselves"


@pytest.mark.parametrize("recipe", ["delayed", "static"])
def test_casts_by_a_known_scale_read_what_swiglu_does_not_cast(recipe: str) -> None:
    """SwiGLU writes 16 bits, and FP8 in both layouts: four bytes an element, and the scale."""
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")
    launches, elements = count(recipe_config(CONFIG, recipe)), INPUTS + GRADIENTS - 3 * INNER * TOKENS
    assert of(launches, "_fp8_cast") == (6, 2 * elements + 4 * 6, 2 * elements + 4 * 6)
    assert of(launches, "_swiglu") == (2, 2 * 5 * INNER * TOKENS + 2 * 4, 4 * 3 * INNER * TOKENS + 2 * 4)
    assert of(launches, "_fp8_amax")[0] == of(launches, "amax")[0] == 0
    assert of(launches, "_fp8_gemm")[0] == 4 and of(launches, "_scaled_mm")[0] == 8
    assert of(launches, WEIGHTS)[0] == 4


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "static"])
def test_plans_move_the_counted_bytes_of_casts(recipe: str) -> None:
    """In fp8 passes take longer by the casts, whose scales and amaxes, a number or a row's, a plan leaves out."""
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")
    config, stack = recipe_config(CONFIG, recipe), profiles.stack("megascale")
    stack = stack.model_copy(update={"attained": stack.attained.model_copy(update={"passes": 1.0, "slowdown": 1.0})})
    layers, block = LayerTimes.from_config(config, profiles.hardware("h200"), stack), block_spec(config.model, 0)
    with_casts, without = (block_times(layers, block, fp8, NO_RECOMPUTE) for fp8 in (True, False))
    seconds = sum(
        a.elementwise - b.elementwise
        for a, b in ((with_casts.forward, without.forward), (with_casts.backward, without.backward))
    )
    moved = sum(each.read + each.written for each in count(config) if each.name in ("_fp8_cast", "_fp8_amax"))
    moved += 2 * 3 * INNER * TOKENS * (recipe != "tensorwise")  # the FP8 that SwiGLU writes
    assert seconds * layers.kernels.bandwidth == pytest.approx(moved, rel=1e-6)


def test_scales_of_rows_read_an_operand_once_for_each_direction() -> None:
    """The first cast finds the maxima of columns, the scales of the second: 6 bytes an element, and the scales."""
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")
    launches, elements = count(recipe_config(CONFIG, "rowwise")), INPUTS + GRADIENTS
    columns = 4 * (INPUTS + GRADIENTS) // TOKENS
    assert of(launches, "_fp8_cast_rows") == (8, 2 * elements, elements + 4 * 8 * TOKENS + columns)
    assert of(launches, "_fp8_cast") == (8, 2 * elements + columns, elements + columns)
    assert of(launches, "_fp8_amax")[0] == 0


def test_operators_on_tensors_without_data_are_counted() -> None:
    counter = LaunchCounter()
    x = torch.empty(4, 8, device="meta")
    with counter:
        x.t().add_(1)
        torch.add(x, x, out=torch.empty_like(x))
        x.sum()
    assert counter.take() == [Launch("add_", 128, 128), Launch("add", 128, 128), Launch("sum", 128, 4)]
    assert not counter.take()


def test_the_table_has_a_row_for_every_operator() -> None:
    head, *rows, total = table({"bf16": [Launch("mm", 2_000_000, 1_000_000)], "x": [Launch(WEIGHTS, 0, 5_000_000)]})
    assert head == ["operator", "bf16", "x"]
    assert rows == [["mm", "1: 2 + 1", ""], [WEIGHTS, "", "1: 0 + 5"]]
    assert total == ["sum of a micro-batch", "1: 2 + 1", ""]
