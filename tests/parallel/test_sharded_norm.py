"""Norms over a width that tp shards: results and gradients equal those of one rank with all columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.layout.topology import Topology
from megascale.ops.norm import rms_norm, rms_norm_1p
from megascale.parallel.sharded_norm import sharded_rms_norms
from megascale.parallel.tp_overlap import TensorParallel
from megascale.record.label import Label
from tests.thread_world import simulate

TOKENS, SAMPLES, WIDTHS, EPS = 5, 2, (24, 8), 1e-3


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Two inputs, two gains, two gradients of the results."""
    generator = torch.Generator().manual_seed(0)
    shapes = [*((TOKENS, SAMPLES, width) for width in WIDTHS), *((width,) for width in WIDTHS)]
    shapes += shapes[:2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results(outputs: Any, leaves: list[Tensor], upstream: list[Tensor]) -> list[Any]:
    found = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
    assert all(tensor.dtype == leaves[0].dtype for tensor in found)
    return [tensor.detach().double().numpy() for tensor in found]


def on_rank(mesh: Mesh, dtype: torch.dtype, offset: float) -> list[Any]:
    """Normalize this rank's columns; the second input is a view of a wider tensor, as keys are."""
    *leaves, first, second = [t.chunk(mesh.tp.size, -1)[mesh.rank].clone() for t in tensors(dtype)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    inputs = [leaves[0], torch.cat([leaves[1], leaves[1]], -1)[..., : leaves[1].shape[-1]]]
    label = Label.for_layer(0, "qk norm")
    outputs = sharded_rms_norms(inputs, leaves[2:], EPS, TensorParallel(mesh.tp), label, offset)
    return results(outputs, leaves, [first, second])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2.0**-6)], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_columns_of_ranks_equal_one_norm(offset: float, dtype: torch.dtype, tolerance: float) -> None:
    *leaves, first, second = [t.double() for t in tensors(dtype)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    norm = rms_norm_1p if offset else rms_norm
    outputs = [norm(x, gain, None, EPS) for x, gain in zip(leaves[:2], leaves[2:], strict=True)]
    expected = results(outputs, leaves, [first, second])
    ranks = simulate(Topology(tp=2), lambda mesh: on_rank(mesh, dtype, offset))
    for index, exact in enumerate(expected):
        ours = np.concatenate([rank[index] for rank in ranks], -1)
        assert np.abs(ours - exact).max() < tolerance * np.abs(exact).max()
