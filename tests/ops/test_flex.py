"""FlexAttention: block masks, and results against torch's attention. CPUs support only its forward."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megascale.config.sparse_pattern import SparsePattern
from megascale.ops import compiled
from megascale.ops.boundaries import Boundaries
from megascale.ops.core_attention import AttentionMask, causal_attention, torch_attend
from megascale.ops.flex import BLOCK, block_mask, flex

CPU = torch.device("cpu")


def qkv(s: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, s, 16), (2, kv_heads, s, 16), (2, kv_heads, s, 16)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@given(s=st.integers(1, 4 * BLOCK + 9), window=st.integers(1, 3 * BLOCK + 9))
def test_block_classes_match_the_mask(s: int, window: int) -> None:
    """Every block with a visible element is listed, and full blocks have no masked element."""
    blocks = block_mask(window, range(1), s, CPU, None)
    distance = torch.arange(s)[:, None] - torch.arange(s)
    visible = (distance >= 0) & (distance < window)
    count = -(-s // BLOCK)
    for row in range(count):
        listed = {
            name: set(indices[0, 0, row, : counts[0, 0, row]].tolist())
            for name, counts, indices in [
                ("partial", blocks.kv_num_blocks, blocks.kv_indices),
                ("full", blocks.full_kv_num_blocks, blocks.full_kv_indices),
            ]
        }
        for column in range(count):
            block = visible[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            assert (column in listed["partial"] | listed["full"]) == bool(block.any())
            assert column not in listed["full"] or bool(block.all())


@pytest.mark.parametrize("window", [1, 100, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_block_masks_equal_those_of_create_block_mask(window: int) -> None:
    s = 4 * BLOCK
    actual = block_mask(window, range(1), s, CPU, None)
    expected = create_block_mask(actual.mask_mod, None, None, s, s, device="cpu", BLOCK_SIZE=BLOCK)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    for name in ("q_num_blocks", "full_q_num_blocks"):  # read by backward
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert actual.seq_lengths == expected.seq_lengths and actual.BLOCK_SIZE == expected.BLOCK_SIZE


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("window", [1, 100, 2 * BLOCK, None, 1000])
def test_attention_equals_torchs(heads: int, kv_heads: int, window: int | None) -> None:
    given = qkv(3 * BLOCK + 5, heads, kv_heads, torch.float64)
    for scale, softcap in ((None, None), (0.1, None), (0.4, 1.5)):
        expected = causal_attention(*given, window, scale, softcap)
        ours = flex(flex_attention, scale, softcap)(*given, AttentionMask(window))
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_compiled_attention_equals_torchs() -> None:
    given, window = qkv(4 * BLOCK + 5, 4, 2, torch.float32), 2 * BLOCK + 3
    attend = flex(compiled.compile_function(flex_attention))
    with torch.no_grad():
        torch.testing.assert_close(attend(*given, AttentionMask(window)), causal_attention(*given, window))


@pytest.mark.slow
def test_compiled_sparse_attention_equals_torchs() -> None:
    given, boundaries = qkv(2 * BLOCK + 50, 8, 2, torch.float32), Boundaries(((0, 100), (0,)), 2 * BLOCK + 50, CPU)
    attend = flex(compiled.compile_function(flex_attention))
    with torch.no_grad():
        for bounds in (None, boundaries):
            mask = AttentionMask(SparsePattern(1, 4, 32), bounds, heads=range(8, 16))
            torch.testing.assert_close(attend(*given, mask), torch_attend()(*given, mask))


def test_every_window_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows exceed torch's default recompile limit, beyond which FlexAttention would compute all scores."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("torch._dynamo.config.fail_on_recompile_limit_hit", True)
    given = qkv(BLOCK + 5, 2, 2, torch.float32)
    attend = flex(compiled.compile_function(flex_attention))
    with torch.no_grad():
        for window in range(1, 11):
            torch.testing.assert_close(attend(*given, AttentionMask(window)), causal_attention(*given, window))


SPARSE = [SparsePattern(1, 2, 128), SparsePattern(2, 4, 64), SparsePattern(1, 3, 200), SparsePattern(3, 4, 50)]
STARTS = ((0, 100, 128, 300, 301), (0,))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("pattern", SPARSE, ids=repr)
def test_sparse_block_classes_match_the_mask(pattern: SparsePattern, packed: bool) -> None:
    """Every block with a visible element is listed for its head, and full blocks have no masked element."""
    s, heads = 3 * BLOCK + 9, range(3, 7)
    boundaries = Boundaries(STARTS, s, CPU) if packed else None
    blocks = block_mask(pattern, heads, s, CPU, boundaries)
    places = torch.arange(s)
    skipped = full = 0
    for row, head in itertools.product(range(2 if packed else 1), range(len(heads))):
        place = torch.tensor(row), torch.tensor(head), places[:, None], places
        visible = blocks.mask_mod(*place)
        assert torch.equal(visible, seen_by(pattern, heads[head], s, STARTS[row] if packed else (0,)))
        for line, column in itertools.product(range(4), range(4)):
            part = visible[line * BLOCK : (line + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            at = row, head, line
            partly = column in blocks.kv_indices[at][: blocks.kv_num_blocks[at]]
            wholly = column in blocks.full_kv_indices[at][: blocks.full_kv_num_blocks[at]]
            assert bool(part.all()) or not wholly
            assert partly or wholly or not part.any()
            assert not (partly and wholly)
            skipped, full = skipped + (not partly and not wholly and column <= line), full + wholly
    assert pattern.block != BLOCK or (full > 0 and skipped > 0), "blocks of the kernel's size cost nothing more"


def seen_by(pattern: SparsePattern, head: int, s: int, starts: tuple[int, ...]) -> Tensor:
    places = torch.arange(s)
    document = torch.bucketize(places, torch.tensor(starts), right=True) - 1
    own = (places - torch.tensor(starts)[document]) // pattern.block
    near, strided = own[:, None] - own < pattern.local_blocks, (own + head) % pattern.stride == 0
    return (near | strided) & (places <= places[:, None]) & (document == document[:, None])


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
def test_sparse_attention_equals_torchs(heads: int, kv_heads: int, packed: bool) -> None:
    given = qkv(2 * BLOCK + 50, heads, kv_heads, torch.float64)
    boundaries = Boundaries(tuple(row[:4] for row in STARTS), 2 * BLOCK + 50, CPU) if packed else None
    for pattern in SPARSE[:2]:
        mask = AttentionMask(pattern, boundaries, heads=range(3, 3 + heads))
        torch.testing.assert_close(
            flex(flex_attention)(*given, mask), torch_attend()(*given, mask), rtol=1e-12, atol=1e-12
        )
