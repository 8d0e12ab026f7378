"""Self-tests of backends: results and gradients for random inputs, or the changes of an optimizer's steps, compared
with the `torch` backend in fp64. `check_backends` and `difference` run them; `CASES` holds inputs by operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.backends import BACKENDS
from megascale.catalog.layers import NORMS
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.recipes import TENSOR
from megascale.config.train import OptimizerConfig
from megascale.device import detect_device
from megascale.layout.mask_blocks import mask_blocks
from megascale.layout.param_groups import ParamGroup
from megascale.layout.sequence_shard import TokenSpan, shard_sequence
from megascale.ops.boundaries import Boundaries
from megascale.ops.core_attention import AttentionMask
from megascale.ops.cross_entropy import Targets, no_reduce
from megascale.ops.optimizer import Segment, UpdateInput, UpdateRule, is_function
from megascale.ops.partial_attention import Accumulator, AttentionResult, Gradients
from megascale.ops.quantized import Quantized
from megascale.ops.recipe import Quantizer, build_recipe
from megascale.ops.rope import layer_rope, rope_table
from megascale.ops.select import BackendError, NotByDefault, OpContext, select_backend, unsupported_reason

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Tolerated difference by dtype, relative to a tensor's largest element."""

ZERO = 1e-12
"""Fraction of the largest element of a case below which a tensor counts as zero."""

TOKENS, SAMPLES = 128, 2

WINDOW_TOKENS = 384
"""Sequence length for sliding windows: several blocks, some of them skipped by kernels."""

RATE = 0.1
"""Learning rate and weight decay."""

CLIP_COEFFICIENT = 0.25
"""Clipping coefficient given to element-wise rules."""


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


@dataclass(frozen=True)
class OperationCase:
    """The test of an operation: functions for inputs in fp64, and for results with gradients."""

    inputs: Callable[[OpContext], list[Tensor]]
    results: Callable[[Any, OpContext, list[Tensor]], list[Tensor]]


def _differentiated(call: Callable[[Any, OpContext, list[Tensor]], Tensor]) -> Any:
    """Return a function for the result and autograd's gradients, with an upstream gradient of ones and twos."""

    def results(function: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
        out = call(function, context, [leaf.requires_grad_() for leaf in leaves])
        upstream = torch.arange(out.numel(), device=out.device).remainder(2).add(1).view(out.shape).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    return results


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Draw tensors from one generator; equal shapes get different values."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _attention(context: OpContext) -> list[Tensor]:
    m = context.model
    heads = [n // context.tp for n in (m.num_heads, m.num_kv_heads, m.num_kv_heads)]
    tokens = min(WINDOW_TOKENS if any(m.windows) else TOKENS, m.seq_length)
    return _random(*((SAMPLES, n, tokens, m.head_dim) for n in heads))


def _mask(context: OpContext, s: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the model's smallest window, or a third of the sequence if smaller, and with a document mask the starts of
    three documents in a row.
    """
    windows = [window for window in context.model.windows if window]
    starts = tuple(sorted({0, s // 3, s // 2})) if context.document_mask else None
    return min(*windows, max(1, s // 3)) if windows else None, starts


def _attend(attend: Any, context: OpContext, leaves: list[Tensor]) -> Tensor:
    b, _, s, _ = leaves[0].shape
    window, starts = _mask(context, s)
    boundaries = None if starts is None else Boundaries((starts,) * b, s, leaves[0].device)
    return attend(*leaves, AttentionMask(window, boundaries))


def _attend_in_parts(partial: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
    """Return the results of two parts of a sequence that two ranks share, and the gradients, as `_attend` attends."""
    s = leaves[0].shape[2] // 4 * 4
    q, k, v = (t[:, :, :s] for t in leaves)
    window, starts = _mask(context, s)
    results = []
    for rank in range(2):
        shard = shard_sequence(s, 2, 1, rank)
        blocks = mask_blocks(shard.spans, (TokenSpan(0, s),), window, None if starts is None else [starts] * len(q), s)
        own, total = torch.cat([q[:, :, slice(*span)] for span in shard.spans], 2), Accumulator(q[:, :, : shard.size])
        partial.add_forward(total, own, k, v, blocks)
        out = total.out.to(q.dtype)
        grads = Gradients(*(torch.zeros(t.shape, dtype=total.lse.dtype, device=t.device) for t in (own, k, v)))
        partial.add_backward(grads, AttentionResult(own, out, total.lse, torch.ones_like(out)), k, v, blocks)
        results += [total.out, *grads]
    return results


def _norm(context: OpContext) -> list[Tensor]:
    h = context.model.hidden_size
    x, weight, bias = _random((TOKENS, SAMPLES, h), (h,), (h,))
    return [x, 1 + weight / 4, *([bias] if NORMS[context.model.norm].facts["bias"] else [])]


def _normalize(normalize: Any, context: OpContext, leaves: list[Tensor]) -> Tensor:
    x, weight, *bias = leaves
    return normalize(x, weight, bias[0] if bias else None, context.model.norm_eps)


def _add_norm(context: OpContext) -> list[Tensor]:
    x, *rest = _norm(context)
    return [x, x.flip(0) / 2, *rest]


def _add_normalize(add_normalize: Any, context: OpContext, leaves: list[Tensor]) -> Tensor:
    x, branch, weight, *bias = leaves
    return torch.cat(add_normalize(x, branch, weight, bias[0] if bias else None, context.model.norm_eps), -1)


def _heads(context: OpContext) -> list[Tensor]:
    """Draw this rank's queries, keys and values in one tensor."""
    m = context.model
    return _random((TOKENS, SAMPLES, (m.num_heads + 2 * m.num_kv_heads) // context.tp, m.head_dim))


def _rotated(rotate: Any, context: OpContext, leaves: list[Tensor]) -> Tensor:
    (heads,), m = leaves, context.model
    table = rope_table(TOKENS, layer_rope(m, 0), _wide(heads), heads.device)
    return rotate(heads, (m.num_heads + m.num_kv_heads) // context.tp, *table)


def _activation(context: OpContext) -> list[Tensor]:
    m = context.model
    return _random((TOKENS, SAMPLES, m.ffn_size // context.tp * (2 if m.gated else 1)))


def _loss(cross_entropy: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
    """Return an unsharded loss and its gradient, which the operation computes itself."""
    (logits,), n = leaves, context.model.vocab_size
    columns = torch.arange(TOKENS, device=logits.device) % n
    targets = Targets(columns, torch.ones(TOKENS, dtype=_wide(logits), device=logits.device), n)
    loss, gradient = cross_entropy(logits, targets, no_reduce, True)
    return [loss.view(1), gradient]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _matrices(context: OpContext) -> list[Tensor]:
    """Draw matrices with growing rows and columns, to expose a misplaced scale."""
    k = context.model.hidden_size
    pair = _random((TOKENS, k), (2 * TOKENS, k))
    return [x * torch.linspace(1, 4, x.shape[0]).view(-1, 1) * torch.linspace(1, 4, k) for x in pair]


def _multiply(kernels: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
    """Return the casts of a recipe's linear layers, with transposes, and under FP8 two GEMMs: output and wgrad."""
    (x, weight), recipe = leaves, build_recipe(context.recipe or "tensorwise", kernels)

    def quantize(x: Tensor, quantizer: Quantizer) -> Quantized:
        return quantizer.encode(x, quantizer.scale(quantizer.amax(x)), with_transpose=True)

    def matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        if context.dtype == torch.float64:
            return a.dequantize().double() @ b.dequantize().double().t()
        return recipe.gemm(a, b, dtype)

    forward = quantize(x, recipe.input), quantize(weight, recipe.weight)
    backward = quantize(x, recipe.gradient), quantize(weight, recipe.input)
    both_ways = recipe.weight.block.serves_transpose
    weight_t = forward[1].t() if both_ways else quantize(recipe.weight.turned(weight), recipe.weight)
    x_t = quantize(recipe.gradient.turned(x), recipe.gradient)
    casts = [operand.dequantize() for operand in (*forward, *backward, weight_t, x_t)]
    if context.recipe is None:
        return casts
    wide = torch.float32 if recipe.gradient.block == TENSOR else context.dtype
    return [*casts, matmul(*forward, context.dtype), matmul(*backward, wide)]


def _accumulate(wgrad: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
    """Accumulate two micro-batches of output gradients and inputs; the first must overwrite NaN."""
    grad, x = leaves
    total = torch.full((grad.shape[1], x.shape[1]), math.nan, dtype=_wide(grad), device=x.device)
    wgrad(total, grad, x, False)
    first = total.clone()
    wgrad(total, 3 * grad, x, True)
    return [first, total]


def _weights(context: OpContext) -> list[Tensor]:
    """Draw weights and gradients of a matrix and of a bias."""
    h = context.model.hidden_size
    return _random((TOKENS * h,), (TOKENS * h,), (h,), (h,))


def _directions(rule: UpdateRule, context: OpContext, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the directions of two updates of a matrix, with the default options."""
    group, directions, state = ParamGroup(context.optimizer, weight_decay=0.0), [], dict[str, Tensor]()
    for name, shape in group.state_shapes(tuple(grad.shape)).items():
        state[name] = grad.new_zeros(shape, dtype=torch.uint8 if name in group.facts["uint8"] else grad.dtype)
    for step in (1, 2):
        first, options = step == 1, group.all_options
        direction, state = rule(UpdateInput(grad * step, state, step, options, weight, None, "weight", first, RATE))
        directions.append(direction)
    return directions


def _update(rule: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
    """Return the weight changes and the state after two optimizer steps, in fp32 or wider; of a rule that is a function
    the directions of a matrix.
    """
    before, grads = ([leaf.to(_wide(leaf)) for leaf in leaves[n::2]] for n in (0, 1))
    if is_function(rule):
        return _directions(rule, context, before[0].view(TOKENS, -1), grads[0].view(TOKENS, -1))
    segments = []
    for weight, grad, is_matrix in zip(before, grads, (True, False), strict=True):
        state = {name: torch.zeros_like(weight) for name in rule.state_names}
        segments.append(Segment(weight.clone(), grad.clone(), state, is_matrix=is_matrix, weight_decay=is_matrix))
    updated = rule(segments, OptimizerConfig(name=context.optimizer, lr=RATE, weight_decay=RATE))
    no_skip = torch.zeros((), device=before[0].device)
    factor = torch.full_like(no_skip, CLIP_COEFFICIENT, dtype=torch.float64)
    for step in (1, 2):
        for segment, grad in zip(segments, grads, strict=True):
            segment.grad.copy_(grad * step)
        if OPTIMIZERS[context.optimizer].facts["unit_of_work"] == "elements":
            updated.step(RATE, step, factor, no_skip)
        else:
            updated.compute_updates(step, no_skip)
            norms = [tensor.double().norm() for tensor in (segments[0].weight, segments[0].grad)]
            updated.apply_updates(RATE, torch.stack(norms).view(2, 1), no_skip)
    changes = [segment.weight - weight for segment, weight in zip(segments, before, strict=True)]
    return [*changes, *(segment.state[name] for segment in segments for name in rule.state_names)]


CASES = {
    "linear": OperationCase(_matrices, _multiply),
    "attention": OperationCase(_attention, _differentiated(_attend)),
    "partial_attention": OperationCase(_attention, _attend_in_parts),
    "rope": OperationCase(_heads, _differentiated(_rotated)),
    "norm": OperationCase(_norm, _differentiated(_normalize)),
    "add_norm": OperationCase(_add_norm, _differentiated(_add_normalize)),
    "activation": OperationCase(_activation, _differentiated(lambda activate, context, leaves: activate(*leaves))),
    "cross_entropy": OperationCase(lambda context: _random((TOKENS, context.model.vocab_size)), _loss),
    "wgrad": OperationCase(
        lambda context: _random((TOKENS, 2 * TOKENS), (TOKENS, context.model.hidden_size)), _accumulate
    ),
    "optimizer": OperationCase(_weights, _update),
}
"""Test cases by operation."""
