"""What one core of a processor does, in seconds of its own time: matrix products and attention, by size and format.

The clock is the process's own time on a core: what else the machine does meanwhile does not count, but for what it
takes of the caches and of the way to memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.bench.fit import Sample

SHAPES = (
    (32, 32, 32), (64, 64, 64), (128, 128, 128), (64, 512, 512), (256, 256, 256), (512, 128, 512), (512, 512, 128),
    (512, 512, 1536), (512, 320, 4096), (768, 768, 768), (1024, 1024, 1024), (1024, 512, 2048),
)  # fmt: skip
"""x [m, k] times a weight [n, k], as m, k and n."""

ATTENTIONS = (
    (8, 128, 64), (4, 256, 32), (4, 256, 64), (4, 256, 128), (4, 512, 64), (2, 1024, 32), (2, 1024, 64), (2, 1024, 128),
)  # fmt: skip
"""Heads, keys and width of a head."""

ROUNDS = 5
"""Times that each is measured."""

TIMING_S = 2e-3
"""Operations are timed in groups that take so long at least."""


def timed(work: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, ...]:
    """Seconds of this process's time that `work` takes, `rounds` times."""
    work()
    start = time.process_time()
    work()
    once = time.process_time() - start
    group = max(1, math.ceil(TIMING_S / max(once, 1e-7)))
    found = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(group):
            work()
        found.append((time.process_time() - start) / group)
    return tuple(found)


def products(dtype: torch.dtype) -> list[Sample]:
    """A linear layer's three products of each shape: of its forward, and for the gradients of its input and of its
    weight, which is added to what there is. Amounts: calls, FLOPs, bytes.
    """
    return [_product(m, k, n, dtype) for m, k, n in SHAPES]


def _product(m: int, k: int, n: int, dtype: torch.dtype) -> Sample:
    x, weight, grad = (torch.randn(*shape).to(dtype) for shape in ((m, k), (n, k), (m, n)))
    into = torch.zeros(n, k, dtype=dtype)

    def three() -> None:
        torch.mm(x, weight.t())
        torch.mm(grad, weight)
        into.addmm_(grad.t(), x)

    moved = x.nbytes + weight.nbytes + grad.nbytes
    return Sample((3, 3 * 2 * m * k * n, 3 * moved), timed(three))


def attention(dtype: torch.dtype, *, backward: bool) -> list[Sample]:
    """Causal attention of each size. Amounts: FLOPs of what the mask leaves; what they would be if a query saw one
    key, and if a head were one number wide.
    """
    return [_attention(*size, dtype, backward) for size in ATTENTIONS]


def _attention(heads: int, keys: int, width: int, dtype: torch.dtype, backward: bool) -> Sample:
    q, k, v = (_leaf(heads, keys, width, dtype) for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn(heads * keys * width).to(dtype).view_as(out)
    of_a_key = 2 * 2 * heads * keys * width * (2.5 if backward else 1)  # a backward forms the scores again

    def there() -> None:
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def back() -> None:
        torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return Sample((of_a_key * keys / 2, of_a_key, of_a_key * keys / 2 / width), timed(back if backward else there))


def _leaf(heads: int, keys: int, width: int, dtype: torch.dtype) -> Tensor:
    """[1, heads, keys, width], with the heads of a token side by side as a layer has them."""
    return torch.randn(keys, 1, heads, width).to(dtype).permute(1, 2, 0, 3).requires_grad_()
