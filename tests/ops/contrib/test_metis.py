"""Metis: few large singular values beside a residual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.core.errors import ConfigError
from megascale.ops.contrib.metis import largest_vectors
from megascale.ops.recipe import build_recipe
from tests.parallel.test_fp8_linear import configured


def spectrum(*sizes: float) -> Tensor:
    """Return Gaussian numbers [256, 512], and in their span directions of these sizes."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, len(sizes), generator=generator)).Q for n in (256, 512))
    return (left * torch.tensor(sizes)) @ right.t() + torch.randn(256, 512, generator=generator)


def test_vectors_span_the_largest_singular_values() -> None:
    x = spectrum(4000.0, 2000.0, 1000.0)
    left, sizes, right = largest_vectors(x, 8)
    torch.testing.assert_close(sizes[:3], torch.linalg.svdvals(x)[:3], rtol=1e-4, atol=0)
    assert torch.linalg.norm(x - (left * sizes) @ right.t()) < 1.05 * torch.linalg.norm(torch.randn(256, 512))


def test_a_matrix_of_three_directions_has_a_smaller_error_than_in_nvfp4() -> None:
    x = spectrum(4000.0, 2000.0, 1000.0).bfloat16()
    errors = {
        name: float((build_recipe(name).rows["input"].encode(x).dequantize() - x.float()).norm() / x.float().norm())
        for name in ("nvfp4", "metis")
    }
    assert errors["metis"] < errors["nvfp4"] / 2


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_ranks_that_shard_matrices_are_refused(axis: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"parallel.{axis}.*the fp8 recipe metis needs whole ones"):
        configured(tmp_path, "metis", **dict[str, Any]({f"parallel__{axis}": 2}))
