"""Cases of `ops.selftest`: attention, norms, activations, rope and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.layers import NORMS
from megascale.layout.sequence_shard import TokenSpan, shard_sequence
from megascale.ops.boundaries import Boundaries
from megascale.ops.core_attention import AttentionMask
from megascale.ops.cross_entropy import Targets, no_reduce
from megascale.ops.head_blocks import add_backward, add_forward
from megascale.ops.partial_attention import Accumulator, AttentionResult, Gradients
from megascale.ops.rope import layer_rope, rope_table
from megascale.ops.select import OpContext

TOKENS, SAMPLES = 128, 2

WINDOW_TOKENS = 384  # sequence length for sliding windows: several blocks, some of them skipped by kernels


@dataclass(frozen=True)
class OperationCase:
    """The test of an operation: functions for inputs in fp64, and for results with gradients."""

    inputs: Callable[[OpContext], list[Tensor]]
    results: Callable[[Any, OpContext, list[Tensor]], list[Tensor]]


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Draw tensors from one generator; equal shapes get different values."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return fp32, or the wider dtype of x."""
    return torch.promote_types(x.dtype, torch.float32)


def _differentiated(call: Callable[[Any, OpContext, list[Tensor]], Tensor]) -> Any:
    """Return a function for the result and autograd's gradients, with an upstream gradient of ones and twos."""

    def results(function: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
        out = call(function, context, [leaf.requires_grad_() for leaf in leaves])
        upstream = torch.arange(out.numel(), device=out.device).remainder(2).add(1).view(out.shape).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    return results


def _attention(context: OpContext) -> list[Tensor]:
    m = context.model
    heads = [n // context.tp for n in (m.num_heads, m.num_kv_heads, m.num_kv_heads)]
    tokens = min(WINDOW_TOKENS if any(m.windows) else TOKENS, m.seq_length)
    return draw(*((SAMPLES, n, tokens, m.qk_head_dim) for n in heads))


def _mask(context: OpContext, q: Tensor) -> AttentionMask:
    """Return the mask of the model's sparse pattern, or of its smallest window, or of a third of the sequence if
    smaller, and with a document mask of three documents in a row.
    """
    s, model = q.shape[2], context.model
    windows = [window for window in model.windows if isinstance(window, int)]
    starts = tuple(sorted({0, s // 3, s // 2}))
    boundaries = Boundaries((starts,) * len(q), s, q.device) if context.document_mask else None
    reach = model.sparse_pattern or (min(*windows, max(1, s // 3)) if windows else None)
    return AttentionMask(reach, boundaries, heads=range(q.shape[1]))


def _attend(attend: Any, context: OpContext, leaves: list[Tensor]) -> Tensor:
    return attend(*leaves, _mask(context, leaves[0]))


def _attend_in_parts(partial: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
    """Return the results of two parts of a sequence that two ranks share, and the gradients, as `_attend` attends."""
    s = leaves[0].shape[2] // 4 * 4
    q, k, v = (t[:, :, :s] for t in leaves)
    mask, results = _mask(context, q), []
    for rank in range(2):
        shard = shard_sequence(s, 2, 1, rank)
        visible = mask.blocks(shard.spans, (TokenSpan(0, s),), s)
        own, total = torch.cat([q[:, :, slice(*span)] for span in shard.spans], 2), Accumulator(q[:, :, : shard.size])
        add_forward(partial, total, own, k, v, visible)
        out = total.out.to(q.dtype)
        grads = Gradients(*(torch.zeros(t.shape, dtype=total.lse.dtype, device=t.device) for t in (own, k, v)))
        attended = AttentionResult(own, out, total.lse, torch.ones_like(out))
        add_backward(partial, grads, attended, k, v, visible)
        results += [total.out, *grads]
    return results


def _norm(context: OpContext) -> list[Tensor]:
    h = context.model.hidden_size
    x, weight, bias = draw((TOKENS, SAMPLES, h), (h,), (h,))
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
    return draw((TOKENS, SAMPLES, (m.num_heads + 2 * m.num_kv_heads) // context.tp, m.rope_head_dim or m.head_dim))


def _rotated(rotate: Any, context: OpContext, leaves: list[Tensor]) -> Tensor:
    (heads,), m = leaves, context.model
    table = rope_table(TOKENS, layer_rope(m, 0), wide_dtype(heads), heads.device)
    return rotate(heads, (m.num_heads + m.num_kv_heads) // context.tp, *table)


def _activation(context: OpContext) -> list[Tensor]:
    m = context.model
    return draw((TOKENS, SAMPLES, m.ffn_size // context.tp * (2 if m.gated else 1)))


def _loss(cross_entropy: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
    """Return an unsharded loss and its gradient, which the operation computes itself."""
    (logits,), n = leaves, context.model.vocab_size
    columns = torch.arange(TOKENS, device=logits.device) % n
    targets = Targets(columns, torch.ones(TOKENS, dtype=wide_dtype(logits), device=logits.device), n)
    loss, gradient = cross_entropy(logits, targets, no_reduce, True)
    return [loss.view(1), gradient]


LAYER_CASES = {
    "attention": OperationCase(_attention, _differentiated(_attend)),
    "partial_attention": OperationCase(_attention, _attend_in_parts),
    "rope": OperationCase(_heads, _differentiated(_rotated)),
    "norm": OperationCase(_norm, _differentiated(_normalize)),
    "add_norm": OperationCase(_add_norm, _differentiated(_add_normalize)),
    "activation": OperationCase(_activation, _differentiated(lambda activate, context, leaves: activate(*leaves))),
    "cross_entropy": OperationCase(lambda context: draw((TOKENS, context.model.vocab_size)), _loss),
}
"""Test cases of the operations between GEMMs."""
