"""The Triton kernel that merges parts of attention, run on a CPU by Triton's interpreter if triton is installed."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megascale.ops.partial_attention import Accumulator

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

Places = tuple[Tensor | slice, Tensor | slice]
PLACES: dict[str, Places] = {
    "a run of a row": (slice(1, 2), slice(3, 40)),
    "runs of all rows": (slice(0, 2), slice(5, 46)),
    "anywhere": (torch.tensor([0, 1] * 20), torch.arange(40).flip(0)),
}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is declared
    name = "megascale.ops.merge_parts"
    sys.modules.pop(name, None)
    yield importlib.import_module(name).merge_part
    del sys.modules[name]


@pytest.mark.parametrize("gathers", [True, False])
def test_it_compiles_for_hopper(gathers: bool) -> None:
    """Triton's compiler needs no GPU, and is stricter than its interpreter."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megascale.ops.merge_parts import QUERIES, _merge_part

    constants = {"gathers": gathers, "QUERIES": QUERIES, "WIDTH": 128}
    types = {"sums": "*fp32", "sums_lse": "*fp32", "out": "*bf16", "lse": "*fp32"}
    types |= {"rows": "*i64", "places": "*i64"} if gathers else {"rows": "*fp32", "places": "*fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in _merge_part.arg_names}
    compiled = compile(ASTSource(_merge_part, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["ptx"].count("ld.global") > 2


@pytest.mark.parametrize("d", [8, 40])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_it_adds_as_torchs_operators(places: Places, d: int, kernel: Callable[..., None]) -> None:
    """Queries that have seen no key, and parts with much larger and much smaller sums of exponentials."""
    rows, where = places
    draw = torch.Generator().manual_seed(0)
    q = torch.empty(2, 3, 48, d, dtype=torch.bfloat16)
    m = len(rows) if isinstance(rows, Tensor) else (rows.stop - rows.start) * len(range(48)[where])
    ours, theirs = Accumulator(q), Accumulator(q)
    for scale in (1.0, 30.0, 1e-3):
        out, lse = torch.randn(m, 3, d, generator=draw).bfloat16(), scale * torch.randn(3, m, generator=draw)
        kernel((ours.out, ours.lse), rows, where, out, lse)
        theirs.add_at(rows, where, out, lse)
        torch.testing.assert_close(ours.out, theirs.out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.lse, theirs.lse, rtol=1e-6, atol=1e-6)
    assert math.isinf(ours.lse[0, 0, 47]) and not ours.out[0, :, 47].any(), "the rest stays as it is"
