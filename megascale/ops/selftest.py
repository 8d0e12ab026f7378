"""Does a backend compute what its operation is? Its result and gradients for random numbers, or what an optimizer's
steps change, beside those of the `torch` backend in fp64.
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
from megascale.catalog.recipes import RECIPES
from megascale.config.train import OptimizerConfig
from megascale.ops.cross_entropy import Targets, unsharded
from megascale.ops.fp8 import Grain, Number, Quantized, cast, scale_of
from megascale.ops.optimizer import Segment
from megascale.ops.rope import rope_table
from megascale.ops.select import BackendError, Reluctance, Setting, refusal, select

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest relative difference by which a result may be rounded: of its largest number."""

ZERO = 1e-12
"""What is less, of the largest number of a case, is zero."""

TOKENS, SAMPLES = 128, 2

ATTENDED = 384
"""Tokens of attention in a window: several of the blocks in which kernels skip what a window leaves out."""

RATE = 0.1
"""Of learning, and of weight decay."""

CLIPPED = 0.25
"""The factor by which an element-wise rule clips gradients."""


@dataclass(frozen=True)
class Verdict:
    """What is to be said of one backend of an operation. `refusal`: why it cannot serve, or with `willing` why it does
    not unless it is asked for. `difference`: what its self-test found, or `error`, what it raised; neither without one.
    """

    operation: str
    backend: str
    chosen: bool
    willing: bool
    refusal: str | None = None
    difference: float | None = None
    error: str | None = None
    tolerance: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it would serve and computes something else, or nothing."""
        return self.error is not None or (self.difference is not None and self.difference > self.tolerance)


@dataclass(frozen=True)
class Examination:
    """All backends of one operation. `problem`: why none serves."""

    operation: str
    verdicts: tuple[Verdict, ...]
    problem: str | None = None


def examine(operation: str, setting: Setting) -> Examination:
    """Ask every backend of an operation, and test those that could serve."""
    chosen, problem = None, None
    try:
        chosen = select(operation, setting).backend
    except BackendError as error:
        problem = str(error)
    verdicts = [_judge(operation, name, name == chosen, setting) for name in BACKENDS[operation].names()]
    return Examination(operation, tuple(verdicts), problem)


def _judge(operation: str, backend: str, chosen: bool, setting: Setting) -> Verdict:
    reason = refusal(operation, backend, setting)
    willing = reason is None or isinstance(reason, Reluctance)
    verdict = Verdict(operation, backend, chosen, willing, reason, tolerance=TOLERANCES[setting.dtype])
    if not willing:
        return verdict
    try:
        found = difference(operation, backend, setting)
    except Exception as error:  # whatever a library raises is what is asked for
        return replace(verdict, error=f"{type(error).__name__}: {error}".splitlines()[0])
    return replace(verdict, error="gives NaN") if math.isnan(found) else replace(verdict, difference=found)


def difference(operation: str, backend: str, setting: Setting) -> float:
    """The largest relative difference of the result and the gradients, of each tensor's largest number, or where a
    tensor is zero but for fp64's rounding, of all tensors'; NaN if one of them has a NaN.
    """
    case = CASES[operation]
    numbers = [tensor.to(setting.device.torch, setting.dtype) for tensor in case.numbers(setting)]
    tested = _results(case, operation, backend, setting, numbers)
    exact = replace(setting, dtype=torch.float64, compiled=False)
    expected = _results(case, operation, "torch", exact, [tensor.double() for tensor in numbers])
    largest = torch.stack([true.abs().max() for true in expected])
    largest = largest.where(largest > ZERO * largest.max(), largest.max()).clamp(min=ZERO)
    each = [(ours.double() - true).abs().max() for ours, true in zip(tested, expected, strict=True)]
    return float((torch.stack(each) / largest).max())  # Python's max passes over a NaN that is not the first


def _results(case: Case, operation: str, backend: str, setting: Setting, numbers: Sequence[Tensor]) -> list[Tensor]:
    function = BACKENDS[operation][backend].load()().build(setting)
    return case.results(function, setting, [tensor.detach().clone() for tensor in numbers])


@dataclass(frozen=True)
class Case:
    """How an operation is tested: its inputs in fp64, and its result for them with the gradients."""

    numbers: Callable[[Setting], list[Tensor]]
    results: Callable[[Any, Setting, list[Tensor]], list[Tensor]]


def _differentiated(call: Callable[[Any, Setting, list[Tensor]], Tensor]) -> Any:
    """The results of an operation that autograd knows, for a gradient of ones and twos."""

    def results(function: Any, setting: Setting, leaves: list[Tensor]) -> list[Tensor]:
        out = call(function, setting, [leaf.requires_grad_() for leaf in leaves])
        upstream = torch.arange(out.numel(), device=out.device).remainder(2).add(1).view(out.shape).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    return results


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors that differ also where their shapes do not."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _attention(setting: Setting) -> list[Tensor]:
    m = setting.model
    heads = [n // setting.tp for n in (m.num_heads, m.num_kv_heads, m.num_kv_heads)]
    tokens = min(ATTENDED if any(m.windows) else TOKENS, m.seq_length)
    return _random(*((SAMPLES, n, tokens, m.head_dim) for n in heads))


def _attend(attend: Any, setting: Setting, leaves: list[Tensor]) -> Tensor:
    """In the smallest window of the model, or one that is small enough to leave out some of so few tokens."""
    windows = [window for window in setting.model.windows if window]
    window = min(*windows, max(1, leaves[0].shape[2] // 3)) if windows else None
    return attend(*leaves, window, None, 0.0)


def _norm(setting: Setting) -> list[Tensor]:
    h = setting.model.hidden_size
    x, weight, bias = _random((TOKENS, SAMPLES, h), (h,), (h,))
    return [x, 1 + weight / 4, *([bias] if NORMS[setting.model.norm].facts["bias"] else [])]


def _normalize(normalize: Any, setting: Setting, leaves: list[Tensor]) -> Tensor:
    x, weight, *bias = leaves
    return normalize(x, weight, bias[0] if bias else None, setting.model.norm_eps)


def _add_norm(setting: Setting) -> list[Tensor]:
    x, *rest = _norm(setting)
    return [x, x.flip(0) / 2, *rest]


def _add_normalize(add_normalize: Any, setting: Setting, leaves: list[Tensor]) -> Tensor:
    x, branch, weight, *bias = leaves
    return torch.cat(add_normalize(x, branch, weight, bias[0] if bias else None, setting.model.norm_eps), -1)


def _heads(setting: Setting) -> list[Tensor]:
    """Of this rank's queries, keys and values."""
    m = setting.model
    return _random((TOKENS, SAMPLES, (m.num_heads + 2 * m.num_kv_heads) // setting.tp, m.head_dim))


def _turned(rotate: Any, setting: Setting, leaves: list[Tensor]) -> Tensor:
    (heads,), m = leaves, setting.model
    wide = torch.promote_types(heads.dtype, torch.float32)
    table = rope_table(TOKENS, m.head_dim, m.rope_theta, wide, heads.device)
    return rotate(heads, (m.num_heads + m.num_kv_heads) // setting.tp, *table)


def _activation(setting: Setting) -> list[Tensor]:
    m = setting.model
    return _random((TOKENS, SAMPLES, m.ffn_size // setting.tp * (2 if m.gated else 1)))


def _logits(setting: Setting) -> list[Tensor]:
    return _random((TOKENS, setting.model.vocab_size))


def _loss(cross_entropy: Any, setting: Setting, leaves: list[Tensor]) -> list[Tensor]:
    """The loss of one process, which forms the gradient itself."""
    (logits,) = leaves
    wide = torch.promote_types(logits.dtype, torch.float32)
    columns = torch.arange(TOKENS, device=logits.device) % setting.model.vocab_size
    targets = Targets(columns, torch.ones(TOKENS, dtype=wide, device=logits.device), setting.model.vocab_size)
    loss, gradient = cross_entropy(logits, targets, unsharded, True)
    return [loss.view(1), gradient]


def _matrices(setting: Setting) -> list[Tensor]:
    """Their rows and columns grow, so that a scale in the wrong place shows."""
    k = setting.model.hidden_size
    found = _random((TOKENS, k), (2 * TOKENS, k))
    return [x * torch.linspace(1, 4, x.shape[0]).view(-1, 1) * torch.linspace(1, 4, k) for x in found]


def _multiply(kernels: Any, setting: Setting, leaves: list[Tensor]) -> list[Tensor]:
    """Casts as a recipe's layers make them, transposed too, and in eight bits two products: the output, the weight's
    gradient.
    """
    x, weight = leaves
    facts = RECIPES[setting.recipe or "tensorwise"].facts
    grain, gradient = Grain(facts["grain"]), Number[facts["gradient"].upper()]
    square = Grain.SQUARE if grain is Grain.BLOCK else grain

    def made(matrix: Tensor, number: Number, grain: Grain) -> Quantized:
        return cast(matrix, scale_of(kernels.amax(matrix, grain), number), number, grain, kernels, both=True)

    def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        if setting.dtype == torch.float64:
            return a.dequantized().double() @ b.dequantized().double().t()
        return kernels.product(a, b, dtype)

    output = made(x, Number.E4M3, grain), made(weight, Number.E4M3, square)
    back = made(x, gradient, grain), made(weight, Number.E4M3, grain)
    turned = output[1].t() if square is not Grain.ROW else made(kernels.turned(weight), Number.E4M3, grain)
    across = made(kernels.turned(x), gradient, grain)
    casts = [factor.dequantized() for factor in (*output, *back, turned, across)]
    if setting.recipe is None:
        return casts
    wide = torch.float32 if grain is Grain.TENSOR else setting.dtype
    return [*casts, product(*output, setting.dtype), product(*back, wide)]


def _factors(setting: Setting) -> list[Tensor]:
    """Of a weight's gradient: its output's gradient and its input."""
    return _random((TOKENS, 2 * TOKENS), (TOKENS, setting.model.hidden_size))


def _accumulate(wgrad: Any, setting: Setting, leaves: list[Tensor]) -> list[Tensor]:
    """The sum of two micro-batches, of which the first is written over what is no number."""
    grad, x = leaves
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = torch.full((grad.shape[1], x.shape[1]), math.nan, dtype=wide, device=x.device)
    wgrad(total, grad, x, False)
    first = total.clone()
    wgrad(total, 3 * grad, x, True)
    return [first, total]


def _weights(setting: Setting) -> list[Tensor]:
    """The weights and gradients of a matrix and of a bias."""
    h = setting.model.hidden_size
    return _random((TOKENS * h,), (TOKENS * h,), (h,), (h,))


def _update(rule: type[Any], setting: Setting, leaves: list[Tensor]) -> list[Tensor]:
    """How far two steps move weights, and the state after them, in the format in which an optimizer has them."""
    before, grads = ([leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves[n::2]] for n in (0, 1))
    segments = []
    for weight, grad, matrix in zip(before, grads, (True, False), strict=True):
        state = {name: torch.zeros_like(weight) for name in rule.state_names}
        segments.append(Segment(weight.clone(), grad.clone(), state, is_matrix=matrix, weight_decay=matrix))
    updated = rule(segments, OptimizerConfig(name=setting.optimizer, lr=RATE, weight_decay=RATE))
    go = torch.zeros((), device=before[0].device)
    factor = torch.full_like(go, CLIPPED, dtype=torch.float64)
    for step in (1, 2):
        for segment, grad in zip(segments, grads, strict=True):
            segment.grad.copy_(grad * step)
        if OPTIMIZERS[setting.optimizer].facts["needs"] == "elements":
            updated.step(RATE, step, factor, go)
        else:
            updated.direct(step, go)
            norms = [tensor.double().norm() for tensor in (segments[0].weight, segments[0].grad)]
            updated.apply(RATE, torch.stack(norms).view(2, 1), go)
    moves = [segment.weight - weight for segment, weight in zip(segments, before, strict=True)]
    return [*moves, *(segment.state[name] for segment in segments for name in rule.state_names)]


CASES = {
    "linear": Case(_matrices, _multiply),
    "attention": Case(_attention, _differentiated(_attend)),
    "rope": Case(_heads, _differentiated(_turned)),
    "norm": Case(_norm, _differentiated(_normalize)),
    "add_norm": Case(_add_norm, _differentiated(_add_normalize)),
    "activation": Case(_activation, _differentiated(lambda activate, setting, leaves: activate(*leaves))),
    "cross_entropy": Case(_logits, _loss),
    "wgrad": Case(_factors, _accumulate),
    "optimizer": Case(_weights, _update),
}
"""By operation."""
