"""The order of samples with `data.packing = "decompose"`, by arithmetic: a bucket for each turn, a dataset for each
sample. No torch.

The turns are a blend of the buckets by their samples, so that all buckets of a dataset come to the end of an epoch
together. With a curriculum the turns of each cycle are drawn again: the same ones, but in an order by odds. The samples
of a bucket are a blend of its datasets. Which bucket, dataset and sample a place in the order has follows from its
number, whatever reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from megascale.core.seeds import seed_of
from megascale.data.mix.blend import ChangingBlend, Part, SampleOrder


class Curriculum:
    """The turns of a blend of buckets, those of each `cycle` of turns in an order drawn by `odds`: as long as a bucket
    has turns left in the cycle, the next one is of it in proportion to its odds.
    """

    def __init__(self, blend: ChangingBlend, odds: Sequence[float], cycle: int, seed: int) -> None:
        self._blend = blend
        self._odds = list(odds)
        self._cycle = cycle
        self._seed = seed
        self._turns = lru_cache(maxsize=4)(self._draw)

    def locate(self, index: int) -> tuple[int, int]:
        cycle, place = divmod(index, self._cycle)
        bucket = self._turns(cycle)[place]
        return bucket, self.count(bucket, index)

    def count(self, bucket: int, turns: int) -> int:
        cycle, place = divmod(turns, self._cycle)
        drawn = self._turns(cycle)[:place].count(bucket) if place else 0
        return self._blend.count(bucket, turns - place) + drawn

    def _draw(self, cycle: int) -> list[int]:
        first = cycle * self._cycle
        left = [self._blend.count(bucket, first + self._cycle) - self._blend.count(bucket, first)
                for bucket in range(len(self._odds))]  # fmt: skip
        random = np.random.RandomState(seed_of(self._seed, "curriculum", cycle) % 2**32)
        turns = []
        for draw in random.random_sample(self._cycle).tolist():
            present = [bucket for bucket, count in enumerate(left) if count]
            sums = list(accumulate(self._odds[bucket] for bucket in present))
            bucket = next(bucket for bucket, total in zip(present, sums, strict=True) if draw * sums[-1] < total)
            left[bucket] -= 1
            turns.append(bucket)
        return turns


class BucketOrder:
    """The order of samples of datasets in buckets. `samples` [datasets][buckets]: of an epoch. `parts`: weights of the
    datasets from a place on, which begins a turn and, with a curriculum, a cycle. `turn`: samples of a turn. `odds`,
    `cycle`, `seed`: of a curriculum.

    Source dataset * buckets + bucket is the bucket of a dataset.
    """

    def __init__(
        self,
        samples: Sequence[Sequence[int]],
        parts: Sequence[Part],
        turn: int,
        odds: Sequence[float] | None,
        cycle: int,
        seed: int,
    ) -> None:
        self._buckets = len(samples[0])
        self._turn = turn
        shares = [[count / sum(counts) for count in counts] for counts in samples]  # of a dataset in its buckets
        weights = [
            (start, [[weight * share for weight, share in zip(weights, column, strict=True)]
                     for column in zip(*shares, strict=True)])
            for start, weights in parts
        ]  # fmt: skip
        blend = ChangingBlend([(start // turn, [sum(bucket) for bucket in found]) for start, found in weights])
        self._turns: SampleOrder = blend if odds is None else Curriculum(blend, odds, cycle, seed)
        self._datasets = [
            ChangingBlend([(self._before(bucket, start), found[bucket]) for start, found in weights])
            for bucket in range(self._buckets)
        ]

    def _before(self, bucket: int, samples: int) -> int:
        """Samples of a bucket among the first `samples`."""
        turns, rest = divmod(samples, self._turn)
        drawn = rest if rest and self._turns.locate(turns)[0] == bucket else 0
        return self._turns.count(bucket, turns) * self._turn + drawn

    def locate(self, index: int) -> tuple[int, int]:
        turn, place = divmod(index, self._turn)
        bucket, before = self._turns.locate(turn)
        dataset, number = self._datasets[bucket].locate(before * self._turn + place)
        return dataset * self._buckets + bucket, number

    def count(self, dataset: int, samples: int) -> int:
        dataset, bucket = divmod(dataset, self._buckets)
        return self._datasets[bucket].count(dataset, self._before(bucket, samples))
