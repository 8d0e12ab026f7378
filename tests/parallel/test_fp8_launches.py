"""What the casts of an FP8 layer launch on a GPU, counted without one: kernels of Triton are noted instead of launched,
and torch's operators run on tensors without data. A copy from the host would be one more; none can wait for a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.commands.operator_bytes import noted_triton
from lab.launches import LaunchCounter
from megascale.catalog.recipes import RECIPES
from megascale.comm.mesh import Mesh
from megascale.config.run import RunConfig
from megascale.layout.chunks import fp8_layers
from megascale.layout.topology import Topology
from megascale.ops.fp8 import TORCH_KERNELS, Fp8Kernels
from megascale.parallel.fp8_linear import Fp8Gemms, build_linear_gemms
from megascale.parallel.fp8_state import Fp8State
from megascale.parallel.tp_overlap import TensorParallel
from megascale.plan.dryrun.fake_mesh import fake_mesh
from megascale.record.recorder import Recorder
from tests.parallel.test_fp8_linear import WIDE, configured, operands

LAYER, META = "attention.out", torch.device("meta")
OPERANDS = ("input", "weight", "gradient", "input for wgrad", "gradient for wgrad")
TWO_PASSES = ["zeros", "_fp8_amax", "_fp8_cast"]
"""A cast by the amax of a whole tensor, which begins with zero."""

ROWS = ["zeros", "_fp8_cast_rows"]
"""A cast that keeps the amaxes of columns too, for the cast of the transpose."""

LAUNCHES: dict[str, list[list[str]]] = {
    "tensorwise": [TWO_PASSES, TWO_PASSES, TWO_PASSES, [], []],
    "delayed": [["_fp8_cast"], ["_fp8_cast"], ["_fp8_cast"], [], []],
    "static": [["_fp8_cast"], ["_fp8_cast"], ["_fp8_cast"], [], []],
    "rowwise": [ROWS, [*ROWS, "_fp8_cast"], ROWS, ["_fp8_cast"], ["_fp8_cast"]],
    "blockwise": [["_fp8_cast"], ["_fp8_cast", "clone"], ["_fp8_cast"], ["_fp8_cast"], ["_fp8_cast"]],
}
"""By recipe, the launches for each of `OPERANDS`: weights once a step, the others once a micro-batch. blockwise copies
the weight's few scales for its transpose.
"""


def launches(configs: list[RunConfig], monitor: bool, with_triton: bool) -> dict[str, list[list[str]]]:
    counter, mesh = LaunchCounter(), fake_mesh(Topology(), 0, Recorder(), tied=False, collectives_in_pieces=True)
    results = {}
    with ExitStack() as stack:
        kernels = noted_triton(counter, stack) if with_triton else TORCH_KERNELS
        for config in configs:
            gemms = build_gemms(config, mesh, kernels, monitor)
            x, weight, grad = (torch.empty(each.shape, dtype=each.dtype, device=META) for each in operands(LAYER))
            x.requires_grad_()
            with counter, torch.no_grad():  # as in the forward of an autograd function
                taken = [counter.take() for _ in casts(gemms, x, weight, grad)]
            results[config.fp8.recipe] = [[launch.name for launch in each] for each in taken]
    return results


def build_gemms(config: RunConfig, mesh: Mesh, kernels: Fp8Kernels, monitor: bool) -> Fp8Gemms:
    layers = fp8_layers(config.model, config.train, config.fp8)
    state = Fp8State(config.model, config.fp8, layers, mesh, META, kernels)
    state.end_restore()  # a step later than the first: delayed scaling has a history
    state.begin_step(collect_stats=monitor)
    gemms = build_linear_gemms(f"layers.1.{LAYER}", state, TensorParallel(mesh.tp, False))
    assert isinstance(gemms, Fp8Gemms)
    return gemms


def casts(gemms: Fp8Gemms, x: Tensor, weight: Tensor, grad: Tensor) -> Iterator[None]:
    """Quantize each of `OPERANDS`, and yield when it is."""
    for each in OPERANDS:
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
    assert launches(configs, monitor, True) == LAUNCHES


def test_an_input_without_a_backward_is_cast_for_forward_alone(configs: list[RunConfig]) -> None:
    """Neither the transpose nor the amaxes of columns are written, as in evaluations and in forwards to be repeated."""
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")
    x = torch.empty(operands(LAYER)[0].shape, dtype=torch.bfloat16, device=META)
    counter, mesh = LaunchCounter(), fake_mesh(Topology(), 0, Recorder(), tied=False, collectives_in_pieces=True)
    with ExitStack() as stack:
        kernels = noted_triton(counter, stack)
        for config in configs:
            written = []
            for needed in (False, True):
                build_gemms(config, mesh, kernels, False).input_operand(x.detach().requires_grad_(needed))
                written.append(sum(launch.written for launch in counter.take() if "cast" in launch.name))
            more = {"tensor": x.numel(), "row": 4 * x.shape[-1], "block": 0}
            assert written[1] - written[0] == more[config.fp8.facts["granularity"]], config.fp8.recipe


def test_torchs_operators_are_counted_too(configs: list[RunConfig]) -> None:
    """The count sees what the kernels replace."""
    found = launches(configs, True, False)
    assert all(len(operators) >= 10 for recipe in found.values() for operators in recipe[:3])
