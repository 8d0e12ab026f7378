"""Dataset decomposition (Pouransari et al. 2024, "Dataset Decomposition"): `data.packing = "decompose"`.

Documents are cut into pieces whose lengths are powers of two, from `data.decompose_min_length` to `model.seq_length`. A
bucket has the pieces of one length. A turn is `data.decompose_bucket_samples` successive samples, by default a step,
from one bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascale.config.data import DataConfig
from megascale.config.model import ModelConfig
from megascale.config.train import BatchConfig

MIN_PIECE = 256  # tokens of the shortest pieces by default, as in the paper
CYCLE = 128  # turns of a cycle of a curriculum by default


@dataclass(frozen=True)
class Decomposition:
    """`pieces`: tokens of the pieces of each bucket, ascending; `turn`: samples of a turn; `odds` that a turn is of a
    bucket, as long as the `cycle` of that many turns has one of it left. Without odds, buckets are mixed evenly.
    """

    pieces: Sequence[int]
    turn: int
    odds: Sequence[float] | None
    cycle: int


def decompose_min_length(model: ModelConfig, data: DataConfig) -> int:
    """Tokens of the shortest pieces."""
    return data.decompose_min_length or min(MIN_PIECE, model.seq_length)


def decomposition(model: ModelConfig, batch: BatchConfig, data: DataConfig) -> Decomposition:
    """The decomposition of a run's training data."""
    pieces = [decompose_min_length(model, data)]
    while pieces[-1] < model.seq_length:
        pieces.append(2 * pieces[-1])
    places = range(len(pieces), 0, -1)
    named: dict[str, list[float]] = {"grow_linear": [*places], "grow_p2": [2 ** (place - 1) for place in places]}
    odds = named.get(data.curriculum) if isinstance(data.curriculum, str) else data.curriculum
    return Decomposition(pieces, data.decompose_bucket_samples or batch.total, odds, data.decompose_cycle or CYCLE)


def is_decomposed(data: DataConfig, split: str) -> bool:
    """Return True if the samples of a split are of one bucket each; those of evaluations are concatenated."""
    return data.packing == "decompose" and split == "train"
