"""Linear layers with scales of powers of two: codes that are saved, gathered or made anew give the same operands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.comm.mesh import open_mesh
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.topology import Topology
from megascale.ops.quantized import Quantized
from megascale.parallel.fp8_linear import Fp8Gemms, build_linear_gemms
from megascale.parallel.tp_overlap import TensorParallel
from megascale.record.label import Label
from tests.marks import only_quick
from tests.parallel.test_fp8_linear import WIDE, casts_of_shared_tokens, configured, first_gradients, operands, state_of
from tests.runs import train_curve
from tests.worlds import run_world

POW2 = {"fp8__scale": "pow2"}
PIECES = ("rowwise", "blockwise")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[RunConfig]:
    folder = tmp_path_factory.mktemp("wide")
    return [configured(folder, recipe, WIDE, **POW2) for recipe in ("tensorwise", *PIECES)]


def gathered_operands(rank: Rank, configs: list[RunConfig]) -> dict[str, list[np.ndarray]]:
    """Return the operands of all tokens that ranks have after an all-gather of their codes, or of all that they save:
    X, X^T of a column-parallel layer, dY, dY^T of a row-parallel one.
    """
    mesh, found = open_mesh(Topology(tp=rank.world_size), rank.rank, tied=False), {}
    axis = TensorParallel(mesh.tp, sequence_parallel=True)
    for config in configs:
        state, results = state_of(config, mesh), list[Quantized]()
        column, row = (
            build_linear_gemms(f"layers.1.{name}", state, axis) for name in ("attention.qkv", "attention.out")
        )
        assert isinstance(column, Fp8Gemms) and isinstance(row, Fp8Gemms)
        x, _, _ = (each.chunk(rank.world_size)[rank.rank] for each in operands("attention.qkv"))
        _, _, grad = operands("attention.out")
        grad = grad.chunk(rank.world_size)[rank.rank]
        operand = column.input_operand(x)
        source = column.wgrad_source(x, operand)
        assert isinstance(source, Quantized), "codes are saved"
        restored = source.constructor()(*source.tensors)
        full, arriving = axis.gather_operand(restored, Label.from_part("x"))
        arriving.wait()
        sent = row.before_all_gather(grad)
        assert isinstance(sent, Quantized), "codes are gathered"
        full_grad, arriving = axis.gather_operand(sent, Label.from_part("grad"))
        arriving.wait()
        for name, gemms, each in (("input", column, full), ("gradient", row, row.after_all_gather(full_grad))):
            results += [each, gemms.operand_for_wgrad(name, each)]  # type: ignore[arg-type, list-item]
        found[config.fp8.recipe] = [each.dequantize().flatten(0, -2).numpy() for each in results]
    return found


def test_gathered_codes_are_those_of_one_process(wide: list[RunConfig]) -> None:
    (alone,) = run_world(1, gathered_operands, wide)
    for rank in run_world(2, gathered_operands, wide):
        for recipe, results in rank.items():
            assert all(map(np.array_equal, results, alone[recipe])), recipe


def test_ranks_that_share_sequences_quantize_as_one_process(wide: list[RunConfig]) -> None:
    (alone,) = run_world(1, casts_of_shared_tokens, wide)
    first, second = run_world(2, casts_of_shared_tokens, wide)
    assert [name for name, whole in alone.items() if not np.array_equal(first[name] + second[name], whole)] == []


def test_codes_in_place_of_inputs_change_no_gradient(tmp_path: Path) -> None:
    """A recomputed layer casts again; a layer that saves its codes does not."""
    configs = [
        configured(tmp_path, "rowwise", WIDE, train__recompute=recompute, **POW2) for recompute in ("none", "full")
    ]
    saved, again = (run_world(1, first_gradients, config)[0] for config in configs)
    assert saved.keys() == again.keys() and all(np.array_equal(saved[name], again[name]) for name in saved)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "cp2": {"parallel__cp": 2, "model__seq_length": 512},
    "pp2": {"parallel__pp": 2},
    "dp2 zero3": {"parallel__dp": 2, "parallel__zero": 3},
    "two micro-batches": {"batch__micro": 1},
}


@pytest.mark.parametrize("recipe", only_quick(["tensorwise", *PIECES], "rowwise"))
@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "tp2 sp"))
def test_layouts_train_equally(recipe: str, layout: str, tmp_path: Path) -> None:
    """As close as bf16 sums permit: an element rounded differently may quantize to the next FP8 value."""
    keys = LAYOUTS[layout] | {
        "batch__micro": LAYOUTS[layout].get("batch__micro", 2 // LAYOUTS[layout].get("parallel__dp", 1))
    }
    config = configured(tmp_path, recipe, WIDE, **keys, **POW2)
    length = {"model__seq_length": config.model.seq_length}
    curve = run_world(config.world_size, train_curve, config, 3)[0]
    alone = run_world(1, train_curve, configured(tmp_path, recipe, WIDE, batch__micro=2, **length, **POW2), 3)[0]
    for (loss, norm), (expected, expected_norm) in zip(curve, alone, strict=True):
        assert loss == pytest.approx(expected, rel=2e-3)
        assert norm == pytest.approx(expected_norm, rel=5e-2)
