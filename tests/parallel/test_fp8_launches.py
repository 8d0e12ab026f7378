"""What the casts of an FP8 layer launch on a GPU, counted without one: kernels of Triton are noted instead of launched,
and torch's operators run on tensors without data. A copy from the host would be one more; none can wait for a value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.catalog.recipes import RECIPES
from megascale.comm.mesh import open_mesh
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.chunks import fp8_layers
from megascale.layout.topology import Topology
from megascale.ops.fp8 import TORCH_KERNELS, Fp8Kernels
from megascale.parallel.fp8_linear import Fp8Gemms, build_linear_gemms
from megascale.parallel.fp8_state import Fp8State
from megascale.parallel.tp_overlap import TensorParallel
from tests.parallel.test_fp8_linear import WIDE, configured, operands
from tests.worlds import run_world

LAYER, META = "attention.out", torch.device("meta")
OPERANDS = ("input", "weight", "gradient", "input for wgrad", "gradient for wgrad")
TWO_PASSES = ["zeros", "_fp8_amax", "_fp8_cast"]
"""A cast by the amax of a whole tensor, or of columns: the amax begins with zero."""

LAUNCHES: dict[str, list[list[str]]] = {
    "tensorwise": [TWO_PASSES, TWO_PASSES, TWO_PASSES, [], []],
    "delayed": [["_fp8_cast"], ["_fp8_cast"], ["_fp8_cast"], [], []],
    "static": [["_fp8_cast"], ["_fp8_cast"], ["_fp8_cast"], [], []],
    "rowwise": [["_fp8_cast_rows"], ["_fp8_cast_rows", *TWO_PASSES], ["_fp8_cast_rows"], TWO_PASSES, TWO_PASSES],
    "blockwise": [["_fp8_cast"], ["_fp8_cast", "clone"], ["_fp8_cast"], ["_fp8_cast"], ["_fp8_cast"]],
}
"""By recipe, the launches for each of `OPERANDS`: weights once a step, the others once a micro-batch. blockwise copies
the weight's few scales for its transpose.
"""


class Launched(TorchDispatchMode):
    """Notes operators but views and allocations."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, results = func.overloadpacket.__name__, func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in results)
        if not is_view and name not in ("empty", "new_empty"):
            self._found.append(name)
        return func(*args, **(kwargs or {}))


class Noted:
    """Stands in for a kernel of Triton."""

    def __init__(self, name: str, found: list[str]) -> None:
        self._name, self._found = name, found

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: self._found.append(self._name)


def launches(rank: Rank, configs: list[RunConfig], monitor: bool, with_triton: bool) -> dict[str, list[list[str]]]:
    found, kernels = list[str](), TORCH_KERNELS
    if with_triton:
        from megascale.ops import cast_transpose

        for name in ("_fp8_amax", "_fp8_cast", "_fp8_cast_rows"):
            setattr(cast_transpose, name, Noted(name, found))
        kernels = Fp8Kernels(cast_transpose.amax, cast_transpose.cast, strided=True)
    mesh = open_mesh(Topology(), rank.rank, tied=False)
    results = {}
    for config in configs:
        layers = fp8_layers(config.model, config.train, config.fp8)
        state = Fp8State(config.model, config.fp8, layers, mesh, META, kernels)
        state.end_restore()  # a step later than the first: delayed scaling has a history
        state.begin_step(collect_stats=monitor)
        gemms = build_linear_gemms(f"layers.1.{LAYER}", state, TensorParallel(mesh.tp, False))
        assert isinstance(gemms, Fp8Gemms)
        x, weight, grad = (torch.empty(each.shape, dtype=each.dtype, device=META) for each in operands(LAYER))
        with Launched(found):
            results[config.fp8.recipe] = [found[:] for _ in casts(gemms, x, weight, grad, found)]
    return results


def casts(gemms: Fp8Gemms, x: Tensor, weight: Tensor, grad: Tensor, found: list[str]) -> Any:
    """Quantize each of `OPERANDS`, and yield when it is."""
    for each in OPERANDS:
        found.clear()
        if each == "input":
            of_x = gemms.input_operand(x)
        elif each == "weight":
            gemms.weight_for_forward(weight)
            gemms.weight_for_dgrad(weight)
        elif each == "gradient":
            of_grad = gemms.grad_operand(grad)
        elif each == "input for wgrad":
            gemms.operand_for_wgrad("input", gemms.wgrad_source(x, of_x))
        else:
            gemms.operand_for_wgrad("gradient", gemms.wgrad_source(grad, of_grad))
        yield


@pytest.fixture
def configs(tmp_path: Path) -> list[RunConfig]:
    return [configured(tmp_path, recipe, WIDE) for recipe in RECIPES.names()]


@pytest.mark.parametrize("monitor", [False, True])
def test_casts_launch_the_counted_kernels_alone(configs: list[RunConfig], monitor: bool) -> None:
    """The monitor counts in these kernels."""
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")
    (found,) = run_world(1, launches, configs, monitor, True)
    assert found == LAUNCHES


def test_torchs_operators_are_counted_too(configs: list[RunConfig]) -> None:
    """The count sees what the kernels replace."""
    (found,) = run_world(1, launches, configs, True, False)
    assert all(len(operators) >= 10 for recipe in found.values() for operators in recipe[:3])
