"""The samples of a step, and those of them that a data-parallel rank or a host reads: arithmetic alone. No torch.

A step trains on the `global_batch` samples after the consumed ones, which are dealt to micro-batches and data-parallel
ranks, micro-batches first. With micro_batch = 1 and dp = 2:

    sample         0  1  2  3 ...
    micro-batch    0  0  1  1
    dp rank        0  1  0  1

Every rank therefore knows the samples of every other rank, and no layout changes the samples of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megascale.config.batch_rampup import BatchSizes


@dataclass(frozen=True)
class BatchShape:
    """The split of a step's `global_batch` rows over `dp` ranks, in micro-batches of `micro_batch` rows. Of several
    `sites` each has an equal run of the rows, the first one those of `site` 0.
    """

    global_batch: int
    micro_batch: int
    dp: int
    site: int = 0
    sites: int = 1

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // (self.micro_batch * self.dp * self.sites)

    def rows(self, index: int, rank: int) -> range:
        """The rows of micro-batch `index` on data-parallel rank `rank`."""
        first = self.site * (self.global_batch // self.sites) + (index * self.dp + rank) * self.micro_batch
        return range(first, first + self.micro_batch)

    def rows_of(self, ranks: Sequence[int]) -> list[int]:
        """The rows of a step on several data-parallel ranks, ascending."""
        return [
            row
            for index in range(self.num_microbatches)
            for rank in sorted(set(ranks))
            for row in self.rows(index, rank)
        ]


@dataclass(frozen=True)
class StepOrder:
    """The steps of a split in the order in which they are read. `shape`: of the largest. `end`: samples of the run,
    after which no step follows; `again`: begin anew after them, as evaluations do. `sizes`: of batches in a ramp-up.
    """

    shape: BatchShape
    end: int
    again: bool = False
    sizes: BatchSizes | None = None

    def shape_at(self, consumed: int) -> BatchShape:
        """The shape of the step after `consumed` samples. Its rows are the first ones of the largest step."""
        return self.shape if self.sizes is None else replace(self.shape, global_batch=self.sizes.at(consumed))

    def after(self, consumed: int) -> int | None:
        """The samples consumed before the step that follows the one after `consumed` samples; None for the last."""
        following = consumed + self.shape_at(consumed).global_batch
        if following < self.end:
            return following
        return 0 if self.again else None


def reads_samples(mask: str, token_ranks: Collection[int], pp_rank: int) -> bool:
    """Return True if a pipeline rank needs samples: as one of the `token_ranks` (`layout.chunks`) their tokens, or with
    `mask` = "document" where they begin.
    """
    return pp_rank in token_ranks or mask == "document"
