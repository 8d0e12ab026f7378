"""Self-tests of backends: results and gradients for random inputs, or the changes of an optimizer's steps, compared
with the `torch` backend in fp64. `check_backends` and `difference` run them; `CASES` holds inputs by operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megascale.catalog.backends import BACKENDS
from megascale.device import detect_device
from megascale.layout.param_groups import ParamGroup
from megascale.ops.select import BackendError, NotByDefault, OpContext, select_backend, unsupported_reason
from megascale.ops.selftest_layers import LAYER_CASES, OperationCase
from megascale.ops.selftest_weights import WEIGHT_CASES

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Tolerated difference by dtype, relative to a tensor's largest element."""

ZERO = 1e-12  # fraction of the largest element of a case below which a tensor counts as zero


@dataclass(frozen=True)
class BackendReport:
    """The state of a backend of an operation.

    `supported`: selectable by `backends`. `reason`: why unsupported, or, if `supported`, why auto skips the backend.
    `difference` or `error`: the outcome of the self-test; both None without a test.
    """

    operation: str
    backend: str
    chosen: bool
    supported: bool
    reason: str | None = None
    difference: float | None = None
    error: str | None = None
    tolerance: float = 0.0

    @property
    def failed(self) -> bool:
        """Return True if a supported backend raised an error or exceeded the tolerance."""
        return self.error is not None or (self.difference is not None and self.difference > self.tolerance)


@dataclass(frozen=True)
class OperationReport:
    """Reports on the backends of an operation. `problem`: why none can be selected."""

    operation: str
    verdicts: tuple[BackendReport, ...]
    problem: str | None = None


def check_backends(operation: str, context: OpContext) -> OperationReport:
    """Query every backend of an operation, and test the supported ones."""
    chosen, problem, verdicts = None, None, []
    try:
        chosen = select_backend(operation, context).backend
    except BackendError as error:
        problem = str(error)
    testable = operation != "optimizer" or is_comparable(context.optimizer)
    for name in BACKENDS[operation].names():
        reason = unsupported_reason(operation, name, context)
        supported = reason is None or isinstance(reason, NotByDefault)
        tolerance = TOLERANCES[context.dtype]
        verdict = BackendReport(operation, name, name == chosen, supported, reason, tolerance=tolerance)
        if supported and testable:
            try:
                worst = difference(operation, name, context)
            except Exception as error:  # a library may raise anything, and the report shows it
                verdict = replace(verdict, error=f"{type(error).__name__}: {error}".splitlines()[0])
            else:
                nan = math.isnan(worst)
                verdict = replace(verdict, error="gives NaN") if nan else replace(verdict, difference=worst)
        verdicts.append(verdict)
    return OperationReport(operation, tuple(verdicts), problem)


def is_comparable(optimizer: str) -> bool:
    """Return False for a rule with decompositions of matrices, whose bases rounding decides."""
    return "update_gap" not in ParamGroup(optimizer, weight_decay=0.0).all_options


def difference(operation: str, backend: str, context: OpContext) -> float:
    """Return the largest difference of result and gradients, relative to the tensor's largest element, or to the case's
    largest if the tensor is zero up to fp64 rounding. NaN if any tensor contains NaN.
    """
    case = CASES[operation]
    inputs = [tensor.to(context.device.torch_device, context.dtype) for tensor in case.inputs(context)]
    tested = _results(case, operation, backend, context, inputs)
    fp64 = replace(context, dtype=torch.float64, compiled=False)
    if unsupported_reason(operation, "torch", fp64):  # attention in parts: a kernel for CPUs
        fp64 = replace(fp64, device=detect_device(allow_gpu=False))
    exact_inputs = [tensor.to(fp64.device.torch_device, torch.float64) for tensor in inputs]
    expected = [exact.to(tested[0].device) for exact in _results(case, operation, "torch", fp64, exact_inputs)]
    largest = torch.stack([exact.abs().max() for exact in expected])
    largest = largest.where(largest > ZERO * largest.max(), largest.max()).clamp(min=ZERO)
    errors = [(result.double() - exact).abs().max() for result, exact in zip(tested, expected, strict=True)]
    return float((torch.stack(errors) / largest).max())  # Python's max would miss a NaN after the first element


def _results(
    case: OperationCase, operation: str, backend: str, context: OpContext, inputs: Sequence[Tensor]
) -> list[Tensor]:
    function = BACKENDS[operation][backend].load()().build(context)
    return case.results(function, context, [tensor.detach().clone() for tensor in inputs])


CASES = LAYER_CASES | WEIGHT_CASES  # test cases by operation
