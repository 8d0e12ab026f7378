"""The Triton kernel that merges parts of attention, run on a CPU by Triton's interpreter if triton is installed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megascale.ops.partial_attention import Accumulator
from tests.ops.interpreter import Launches, compile_for_hopper, interpreted

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

MODULE = "megascale.ops.merge_parts"
Places = tuple[Tensor | slice, Tensor | slice]
PLACES: dict[str, Places] = {
    "a run of a row": (slice(1, 2), slice(3, 40)),
    "runs of all rows": (slice(0, 2), slice(5, 46)),
    "anywhere": (torch.tensor([0, 1] * 20), torch.arange(40).flip(0)),
}


@pytest.fixture
def kernel() -> Iterator[Callable[..., None]]:
    with interpreted(MODULE) as module:
        yield module.merge_part


@pytest.mark.parametrize("gathers", [True, False])
def test_it_compiles_for_hopper(gathers: bool) -> None:
    from megascale.ops.merge_parts import QUERIES

    sizes = ("m", "heads", "d", "first_row", "first_place", "run")
    strides = ("row_stride", "head_stride", "place_stride", "lse_row_stride", "lse_head_stride", "lse_place_stride")
    types = {"sums": "*fp32", "sums_lse": "*fp32", "out": "*bf16", "lse": "*fp32"}
    types |= {"rows": "*i64", "places": "*i64"} if gathers else {"rows": "*fp32", "places": "*fp32"}
    types |= dict.fromkeys((*sizes, *strides), "i32")
    constants = {"gathers": gathers, "QUERIES": QUERIES, "WIDTH": 128}
    assert compile_for_hopper(MODULE, "_merge_part", types, constants).count("ld.global") > 2


def test_it_is_not_compiled_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a part is, and however long."""
    from megascale.ops import merge_parts

    launches, total = Launches(merge_parts._merge_part), Accumulator(torch.empty(2, 3, 48, 8))
    monkeypatch.setattr(merge_parts, "_merge_part", launches)
    for rows, places in ((slice(0, 1), slice(0, 1)), (slice(0, 2), slice(1, 17)), (slice(1, 2), slice(16, 48))):
        m = (rows.stop - rows.start) * (places.stop - places.start)
        merge_parts.merge_part((total.out, total.lse), rows, places, torch.zeros(m, 3, 8), torch.zeros(3, m))
    assert len(launches.found) == 3 and len(set(launches.found)) == 1


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
