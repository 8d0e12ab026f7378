"""Dataset decomposition (Pouransari et al. 2024, "Dataset Decomposition"): `data.packing = "decompose"`.

Documents are cut into pieces whose lengths are powers of two, from `data.min_piece` to `model.seq_length`. A bucket has
the pieces of one length. A turn is `data.bucket_samples` successive samples, by default a step, from one bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megascale.config.finding import Finding, Rule

MIN_PIECE = 256
"""Tokens of the shortest pieces by default, as in the paper."""

CYCLE = 128
"""Turns of a cycle of a curriculum by default."""


@dataclass(frozen=True)
class Decomposition:
    """`pieces`: tokens of the pieces of each bucket, ascending; `turn`: samples of a turn; `odds` that a turn is of a
    bucket, as long as the `cycle` of that many turns has one of it left. Without odds, buckets are mixed evenly.
    """

    pieces: Sequence[int]
    turn: int
    odds: Sequence[float] | None
    cycle: int


def min_piece(config: Any) -> int:
    """Tokens of the shortest pieces."""
    return int(config.data.min_piece or min(MIN_PIECE, config.model.seq_length))


def piece_lengths(config: Any) -> list[int]:
    """The lengths of pieces, ascending: those from the shortest to a sample by factors of two."""
    lengths = [min_piece(config)]
    while lengths[-1] < config.model.seq_length:
        lengths.append(2 * lengths[-1])
    return lengths


def decomposition(config: Any) -> Decomposition:
    """The decomposition of a run's training data."""
    pieces, curriculum = piece_lengths(config), config.data.curriculum
    count = len(pieces)
    named = {
        "mixed": None,
        "grow_linear": [count - place for place in range(count)],
        "grow_p2": [2 ** (count - 1 - place) for place in range(count)],
    }
    odds = named[curriculum] if isinstance(curriculum, str) else curriculum
    return Decomposition(pieces, config.data.bucket_samples or config.batch.total, odds, config.data.cycle or CYCLE)


def is_decomposed(config: Any, split: str) -> bool:
    """Return True if the samples of a split are of one bucket each; those of evaluations are concatenated."""
    return bool(config.data.packing == "decompose" and split == "train")


def decomposed_documents(c: Any) -> Iterator[Finding]:
    """Check that keys of decomposition have an effect, and that lengths are powers of two."""
    d, s = c.data, c.model.seq_length
    if d.packing != "decompose":
        given = {key: getattr(d, key) for key in ("min_piece", "bucket_samples", "curriculum", "cycle")}
        for key in (key for key, value in given.items() if value not in (None, "mixed")):
            hint = "packing = decompose, or remove the key"
            yield Finding(f"data.{key}", f"has no effect with packing = {d.packing}", hint)
        return
    if d.mask != "document":
        message = "decompose fills samples with unrelated pieces, which must not attend to each other"
        yield Finding("data.packing", message, "data.mask = document")
    least = min_piece(c)
    if least == 1 and not d.boundary_loss:
        yield Finding("data.min_piece", "pieces of one token have no label", "2 or more")
    if _is_power(s) and _is_power(least) and least <= s:
        yield from _turns(c, decomposition(c))
        return
    if not _is_power(s):
        yield Finding("model.seq_length", f"packing = decompose needs a power of two, not {s}", _near_powers(s))
    elif not _is_power(least) or least > s:
        message = f"{least} is no power of two up to seq_length = {s}"
        yield Finding("data.min_piece", message, _near_powers(min(least, s)))


def _turns(c: Any, found: Decomposition) -> Iterator[Finding]:
    """Check the curriculum, and that weights of the blend change between turns."""
    if found.odds is None and c.data.cycle is not None:
        yield Finding("data.cycle", "has no effect with curriculum = mixed", "a curriculum, or remove the key")
    if found.odds is not None and len(found.odds) != len(found.pieces):
        message = f"{len(found.odds)} odds for pieces of {', '.join(map(str, found.pieces))} tokens"
        yield Finding("data.curriculum", message, f"{len(found.pieces)} odds")
    unit, of = found.turn, "bucket_samples"
    if found.odds is not None:
        unit, of = unit * found.cycle, "bucket_samples x cycle"
    for place in (place for place, _ in c.data.weights if place % unit):
        message = f"place {place} is no multiple of {of} = {unit}, as it must be with packing = decompose"
        yield Finding("data.weights", message, f"{place // unit * unit + unit}")


def _is_power(size: int) -> bool:
    return not size & (size - 1)


def _near_powers(size: int) -> str:
    low = int(2 ** (size.bit_length() - 1))
    return f"{low}" if low == size else f"{low} or {2 * low}"


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = ((("model", "batch", "data"), decomposed_documents),)
"""(sections that the rule reads, rule), as in `rules`."""
