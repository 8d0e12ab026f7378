"""Dropout masks: their rate, their seeds, and shards as slices of the global mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megascale.parallel.rng import Dropout, seed_of

CPU = torch.device("cpu")
S, H = 32, 48


def dropout(*samples: int, probability: float = 0.3, seed: int = 5) -> Dropout:
    return Dropout(probability, seed, samples, CPU)


def hidden_mask(drop: Dropout, place: str = "layers.0.mlp.down", batch: int = 1) -> Tensor:
    """Return the keep mask of [s, b, h]."""
    return drop.hidden_dropout(torch.ones(S, batch, H), place, 0, S) != 0


def attention_mask(drop: Dropout, place: str = "layers.0.attention", heads: range = range(1)) -> Tensor:
    mask = drop.attention_keep_mask(place, heads, S)
    assert mask is not None
    return mask


def independent(one: Tensor, other: Tensor, keep: float) -> bool:
    """Return True if two masks agree as often as independent masks, within five standard deviations."""
    agree = keep**2 + (1 - keep) ** 2
    results = float((one == other).double().mean())
    return abs(results - agree) < 5 * math.sqrt(agree * (1 - agree) / one.numel())


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_rate_and_scale(probability: float) -> None:
    drop = dropout(*range(20), probability=probability)
    out = drop.hidden_dropout(torch.full((S, 20, H), 3.0), "embedding", 0, S)
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 3 / (1 - probability)))
    weights = attention_mask(drop, heads=range(4))
    for mask in (kept, weights):
        deviation = math.sqrt(probability * (1 - probability) / mask.numel())
        assert abs(float(mask.double().mean()) - (1 - probability)) < 5 * deviation
    assert weights.dtype == torch.bool and weights.shape == (20, 4, S, S)


def test_no_dropout_draws_nothing() -> None:
    x = torch.ones(S, 1, H)
    drop = dropout(0, probability=0.0)
    assert drop.hidden_dropout(x, "embedding", 0, S) is x
    assert drop.attention_keep_mask("layers.0.attention", range(4), S) is None


def test_the_gradient_has_the_same_mask() -> None:
    x = torch.ones(S, 1, H, requires_grad=True)
    out = dropout(3).hidden_dropout(x, "embedding", 0, S)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out)


def test_masks_are_reproducible() -> None:
    """From other objects and after other draws, as in recomputation and other layouts."""
    first, second = dropout(3), dropout(3)
    attention_mask(second)
    hidden_mask(second, "embedding")
    assert torch.equal(hidden_mask(first), hidden_mask(second))
    assert torch.equal(attention_mask(first), attention_mask(second))
    assert torch.equal(attention_mask(first), attention_mask(first))


@pytest.mark.parametrize(
    "other",
    [
        lambda: hidden_mask(dropout(4)),
        lambda: hidden_mask(dropout(3, seed=6)),
        lambda: hidden_mask(dropout(3), "layers.1.mlp.down"),
        lambda: hidden_mask(dropout(3), "layers.0.attention.out"),
    ],
    ids=["sample", "seed", "layer", "place"],
)
def test_hidden_masks_differ(other: object) -> None:
    assert independent(hidden_mask(dropout(3)), other(), 0.7)  # type: ignore[operator]


@pytest.mark.parametrize(
    "other",
    [
        lambda: attention_mask(dropout(4)),
        lambda: attention_mask(dropout(3, seed=6)),
        lambda: attention_mask(dropout(3), "layers.1.attention"),
        lambda: attention_mask(dropout(3), heads=range(1, 2)),
    ],
    ids=["sample", "seed", "layer", "head"],
)
def test_attention_masks_differ(other: object) -> None:
    assert independent(attention_mask(dropout(3)), other(), 0.7)  # type: ignore[operator]


def test_samples_and_heads_have_different_masks() -> None:
    """A sample's mask does not depend on the other samples of the batch."""
    together = dropout(3, 8, 5)
    hidden = hidden_mask(together, batch=3)
    attention = attention_mask(together, heads=range(4))
    for row, sample in enumerate((3, 8, 5)):
        assert torch.equal(hidden[:, row : row + 1], hidden_mask(dropout(sample)))
        assert torch.equal(attention[row : row + 1], attention_mask(dropout(sample), heads=range(4)))
    assert independent(hidden[:, 0], hidden[:, 1], 0.7) and independent(attention[0, 0], attention[0, 1], 0.7)


def test_a_rank_slices_the_global_mask() -> None:
    """Sequence parallelism slices positions, tensor parallelism slices heads."""
    x = torch.randn(S, 2, H, generator=torch.Generator().manual_seed(0))
    drop = dropout(3, 8)
    parts = [drop.hidden_dropout(part, "embedding", index * S // 4, S) for index, part in enumerate(x.chunk(4))]
    assert torch.equal(torch.cat(parts), drop.hidden_dropout(x, "embedding", 0, S))
    halves = [attention_mask(drop, heads=heads) for heads in (range(2), range(2, 4))]
    assert torch.equal(torch.cat(halves, 1), attention_mask(drop, heads=range(4)))


def test_seeds_are_equal_in_every_process() -> None:
    """Python's own hashes differ by process. A change of this value would change every resumed run."""
    assert seed_of(5, "dropout", "embedding", 3) == 0x3B13CC27DD24838E
    assert 0 <= seed_of("any") < 1 << 63
    assert len({seed_of(seed, "weight", name) for seed in range(50) for name in "abc"}) == 150
