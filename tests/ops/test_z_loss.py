"""The z-loss in the gradient of the fused loss: as autograd's, over a sharded vocabulary, and not in the loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.layout.topology import Topology
from megascale.ops.compiled import fused_gradient, fused_statistics
from megascale.ops.cross_entropy import CrossEntropy, Targets, gradient, statistics
from tests.thread_world import simulate

TOKENS, VOCABULARY, COEFFICIENT = 6, 16, 0.03
KERNELS = {"torch": (statistics, gradient), "fused": (fused_statistics, fused_gradient)}


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 1.0], dtype=torch.float64)
    return logits, labels, weights


def expected(cap: float | None) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy, and the gradient with the z-loss, by autograd."""
    logits, labels, weights = drawn()
    leaf = logits.requires_grad_()
    scores = leaf if cap is None else cap * torch.tanh(leaf / cap)
    z = scores.logsumexp(1)
    losses = (z - scores.gather(1, labels.unsqueeze(1)).squeeze(1)) * weights
    (losses + COEFFICIENT * weights * z.square()).sum().backward()
    assert leaf.grad is not None
    return losses.sum().detach(), leaf.grad


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_autograd_s_gradient(tp: int, kernels: str, cap: float | None) -> None:
    logits, labels, weights = drawn()
    width = VOCABULARY // tp

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        first = mesh.tp.index * width
        targets = Targets(labels - first, weights, width)
        function = CrossEntropy(*KERNELS[kernels], cap, COEFFICIENT)
        shard = logits[:, first : first + width].clone()
        loss, grad = function(shard, targets, lambda *given, **named: all_reduce(mesh.tp, *given, **named), True)
        assert grad is not None
        return loss, grad

    ranks = simulate(Topology(tp=tp), body)
    loss, grad = expected(cap)
    assert all(torch.allclose(ours, loss, rtol=1e-12) for ours, _ in ranks)
    torch.testing.assert_close(torch.cat([part for _, part in ranks], 1), grad, rtol=1e-11, atol=1e-13)
