"""Rotary embedding against its definition, a rotation of complex numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megascale.ops import compiled
from megascale.ops.compiled import CompiledRope
from megascale.ops.rope import Rope, layer_rope, rope_table, rotate_heads, rotation
from megascale.ops.selftest import difference
from tests.ops.settings import setting

S, B, D, THETA = 9, 2, 8, 500.0
CPU = torch.device("cpu")


def formula(x_sbnd: Tensor, turned: int) -> Tensor:
    """Rotate the complex number of elements i and i + d/2 by position / theta^(2 i / d), in fp64."""
    x = x_sbnd[:, :, :turned]
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    rows = []
    for position in range(S):
        angles = torch.tensor([position / THETA ** (2 * i / D) for i in range(D // 2)], dtype=torch.float64)
        rows.append(pairs[position] * torch.polar(torch.ones_like(angles), angles))
    out = torch.stack(rows)
    return torch.cat([torch.cat([out.real, out.imag], -1), x_sbnd[:, :, turned:]], 2)


def heads(dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(S, B, 5, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_()


def upstream(dtype: torch.dtype) -> Tensor:
    return torch.randn(S, B, 5, D, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotate", [rotate_heads, rotation])
def test_a_part_of_a_head_rotates_as_a_head_of_that_size(rotate: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x, table = heads(dtype), rope_table(S, Rope(D // 2, THETA), torch.promote_types(dtype, torch.float32), CPU)
    expected = torch.cat([rotate(x[..., : D // 2], 3, *table), x[..., D // 2 :]], -1)
    ours = rotate(x, 3, *table)
    assert torch.equal(ours, expected) and not torch.equal(ours, x)
    gradients = [torch.autograd.grad(out, x, upstream(dtype))[0] for out in (ours, expected)]
    assert torch.equal(*gradients)


def test_layers_with_a_window_have_a_base_of_their_own() -> None:
    """Their frequencies are not scaled, whether or not the window is shorter than the sequence."""
    keys = {"type": "linear", "factor": 2.0}
    model = setting(window=[99, 0], local_rope_theta=50.0, rope_scaling=keys, rotary_fraction=0.5).model
    far = layer_rope(model, 1)
    assert layer_rope(model, 0) == layer_rope(model, 2) == Rope(4, 50.0)
    assert (far.d, far.theta, dict(far.scaling)) == (4, 10_000.0, keys | {"original_seq_length": 16})
    tables = [rope_table(S, rope, torch.float64, CPU) for rope in (far, Rope(4, 10_000.0))]
    torch.testing.assert_close(tables[0][1][2::2], tables[1][1][1:5], rtol=1e-12, atol=0)


@pytest.mark.parametrize("turned", [3, 5])
@pytest.mark.parametrize("rotate", [rotate_heads, rotation])
def test_fp64_equals_the_formula(turned: int, rotate: Callable[..., Tensor]) -> None:
    x = heads()
    ours, expected = rotate(x, turned, *rope_table(S, Rope(D, THETA), torch.float64, CPU)), formula(x, turned)
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(out, x, upstream(torch.float64))[0] for out in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)
    assert torch.equal(ours[:, :, turned:], x[:, :, turned:]), "values do not turn"


def test_gradients_pass_gradcheck() -> None:
    table = rope_table(S, Rope(D, THETA), torch.float64, CPU)
    assert torch.autograd.gradcheck(lambda x: rotate_heads(x, 3, *table), heads())


@pytest.mark.parametrize("rotate", [rotate_heads, rotation])
def test_bf16_is_rotated_in_fp32_and_rounded_once(rotate: Callable[..., Tensor]) -> None:
    x = heads(torch.bfloat16)
    ours = rotate(x, 3, *rope_table(S, Rope(D, THETA), torch.float32, CPU))
    exact = x.detach().double().requires_grad_()
    expected = formula(exact, 3)
    gradients = [torch.autograd.grad(out, leaf, upstream(out.dtype))[0] for out, leaf in ((ours, x), (expected, exact))]
    for actual, wanted in [(ours, expected), gradients]:
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), wanted, rtol=1.01 * 2.0**-8, atol=1e-6)


def test_far_positions_are_exact_in_fp32() -> None:
    """Angles computed in fp32 would be off by 1e-2 at position 100,000."""
    cos, sin = rope_table(100_001, Rope(4, 10_000.0), torch.float32, CPU)
    angles = torch.tensor([100_000.0, 1_000.0], dtype=torch.float64)
    torch.testing.assert_close(cos[-1, 0, 0].double(), angles.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin[-1, 0, 0].double(), angles.sin(), rtol=0, atol=1e-7)


def test_scores_depend_on_distance_alone() -> None:
    q, k = (torch.randn(D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (2, 3))
    both = torch.stack([q, k]).expand(S, 1, 2, D)
    turned = rotate_heads(both, 2, *rope_table(S, Rope(D, THETA), torch.float64, CPU))[:, 0]
    scores = turned[:, 0] @ turned[:, 1].T
    for distance in range(-S + 1, S):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert len(scores[0].round(decimals=6).unique()) == S


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_compiled_formula_equals_torchs_in_forward_and_backward(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compile_function", lambda formula: formula)
    x, table = heads(dtype), rope_table(S, Rope(D, THETA), torch.promote_types(dtype, torch.float32), CPU)
    results = []
    for rotate in (rotate_heads, CompiledRope().build(setting())):
        out = rotate(x, 3, *table)
        results.append((out, *torch.autograd.grad(out, x, upstream(dtype))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_only_cos_and_sin_are_saved_for_backward() -> None:
    x, table, saved = heads(), rope_table(S, Rope(D, THETA), torch.float64, CPU), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rotate_heads(x, 3, *table)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in table]


@pytest.mark.slow
def test_compiled_forward_and_backward_are_one_kernel_each() -> None:
    from torch._inductor import metrics

    metrics.reset()
    assert difference("rope", "compile", setting(torch.bfloat16)) < 2.0**-7
    assert metrics.generated_kernel_count == 2
