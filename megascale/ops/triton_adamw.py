"""A Triton kernel of AdamW, which also rounds the weights for GEMMs, and writes no gradient.

Memory traffic of a step in bytes per parameter, with bf16 weights and fp32 optimizer state (`optim.adamw`: 42):

| pass | read | written |
|---|---|---|
| gradient norm | gradient 4 | |
| this kernel | gradient, master, two moments 16 | master, two moments, weight 14 |
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megascale.config.train import OptimizerConfig
from megascale.ops.optimizer import Segment

BLOCK = 1024  # elements of a program: two reads of 16 bytes per thread and tensor


class TritonAdamW:
    """AdamW (`optim.adamw`) for segments in fp32. 1 - beta and bias corrections are rounded from fp64."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    writes_rounded = True

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._segments, self._config = segments, config

    def step(self, lr: float, step: int, grad_factor: Tensor, skip: Tensor) -> None:
        c, (beta1, beta2) = self._config, self._config.betas
        first, second = (1 - beta**step if c.bias_correction else 1.0 for beta in c.betas)
        for s in self._segments:
            n, decay = s.weight.numel(), lr * c.weight_decay if s.weight_decay else 0.0
            _adamw[triton.cdiv(n, BLOCK),](
                s.weight, s.grad, *(s.state[name] for name in self.state_names), s.rounded, grad_factor, skip, n,
                lr / first, decay, beta1, 1 - beta1, beta2, 1 - beta2, second**0.5, c.eps, BLOCK,
            )  # fmt: skip


# Triton evaluates annotations when it compiles, and knows none but its own
@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def] # noqa: PLR0913
    weight, grad, exp_avg, exp_avg_sq, rounded, grad_factor, skip, n,
    step_size, decay, beta1, rest1, beta2, rest2, correction, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a block of flat tensors [n], unless `skip` is 1. `rounded`: None, or weights in another dtype."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tl.where(tl.load(skip) == 1.0, 0, n)
    g = tl.load(grad + index, mask=inside, other=0.0) * tl.load(grad_factor).to(tl.float32)
    w = tl.load(weight + index, mask=inside, other=0.0)
    m = beta1 * tl.load(exp_avg + index, mask=inside, other=0.0) + rest1 * g
    v = beta2 * tl.load(exp_avg_sq + index, mask=inside, other=0.0) + rest2 * g * g
    w = w - decay * w - step_size * m / (tl.sqrt(v) / correction + eps)
    tl.store(exp_avg + index, m, mask=inside)
    tl.store(exp_avg_sq + index, v, mask=inside)
    tl.store(weight + index, w, mask=inside)
    if rounded is not None:
        tl.store(rounded + index, w.to(rounded.dtype.element_ty), mask=inside)
