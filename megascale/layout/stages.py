"""Virtual pipeline stages: where they are (`Placement`), and which layers they have (`Stages`).

With p pipeline ranks and v model chunks per rank the network is split in order into p v virtual stages. A placement is
the only map between stages and chunks of ranks:

    looped    stage = chunk p + rank (Narayanan et al. 2021, 2.2): for p = v = 2, rank 0 has stages 0 and 2, rank 1 has
              1 and 3
    V         odd chunks run backwards (Qi et al. 2024): rank 0 has stages 0 and 3, rank 1 has 1 and 2

A micro-batch visits all stages, or, in a partial pipeline, skips some between the first and the last (SkipPipe, Blagoev
et al. 2025). Its path depends on its number alone: skips go around these stages, which are skipped equally often.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise

from megascale.catalog.schedules import SCHEDULES
from megascale.core.registry import CardError

MAX_PERIOD = 1000  # most micro-batches until skips repeat
RECENT = 64  # cached splits and placements: queries about a configuration ask for its own repeatedly

Place = tuple[int, int]
"""A pipeline rank and one of its model chunks."""

Link = tuple[int, int]
"""Two pipeline ranks that exchange messages, the lower first."""


@dataclass(frozen=True, eq=False)
class Placement:
    """The places of virtual stages. `stages`: by rank and chunk, the stage.

    `barriers`: of vocabulary parallelism, between the forward and the backward of a micro-batch; 0 without it
    (`schedule.shared_vocabulary`). With it a rank has a chunk more, `v`, its rows of the vocabulary; together they are
    stage `count`. `skip_ratio`: the share of the stages between the first and the last that micro-batches skip.
    """

    stages: tuple[tuple[int, ...], ...]
    barriers: int = 0
    skip_ratio: float = 0.0

    @cached_property
    def p(self) -> int:
        """Number of pipeline ranks."""
        return len(self.stages)

    @cached_property
    def v(self) -> int:
        """Number of model chunks per rank."""
        return len(self.stages[0])

    @cached_property
    def count(self) -> int:
        return len(self.places)

    def stage(self, rank: int, chunk: int) -> int:
        return self.stages[rank][chunk] if chunk < self.v else self.count

    @cached_property
    def places(self) -> tuple[Place, ...]:
        at = {stage: (rank, chunk) for rank, own in enumerate(self.stages) for chunk, stage in enumerate(own)}
        return tuple(at[stage] for stage in range(len(at)))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The stages that micro-batches visit: micro-batch i those of path i mod the number of paths."""
        share, inner = Fraction(self.skip_ratio).limit_denominator(MAX_PERIOD), self.count - 2
        cuts = [-(-i * share.numerator * inner // share.denominator) for i in range(share.denominator + 1)]
        skipped = [{1 + skip % inner for skip in range(*cut)} for cut in pairwise(cuts)]
        return tuple(tuple(stage for stage in range(self.count) if stage not in each) for each in skipped)

    def path(self, microbatch: int) -> tuple[int, ...]:
        return self.paths[microbatch % len(self.paths)]

    def along_path(self, stage: int, step: int, microbatch: int) -> int | None:
        """Find the stage that is `step` stages after a stage on a micro-batch's path, None beyond its ends."""
        path = self.path(microbatch)
        at = bisect_left(path, stage) + step
        return path[at] if 0 <= at < len(path) else None

    def counted_paths(self, m: int) -> Counter[tuple[int, ...]]:
        """Count the paths of m micro-batches."""
        counts = Counter[tuple[int, ...]]()
        for at, path in enumerate(self.paths):
            counts[path] += len(range(at, m, len(self.paths)))
        return counts

    def visits(self, rank: int, chunk: int, m: int) -> int:
        """Count the micro-batches, of m, that visit a chunk; all pass over rows of the vocabulary."""
        paths, stage = self.counted_paths(m), self.stage(rank, chunk)
        return m if len(paths) == 1 else sum(count for path, count in paths.items() if stage in path)

    @cached_property
    def whole(self) -> Placement:
        """The placement for micro-batches that skip nothing, of an evaluation."""
        return replace(self, skip_ratio=0.0) if self.skip_ratio else self

    @property
    def ends(self) -> tuple[int, int]:
        """The ranks of the first and of the last stage."""
        return self.places[0][0], self.places[-1][0]

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The pairs of ranks that have consecutive stages of a path, or of an evaluation."""
        hops = {hop for path in (*self.paths, range(self.count)) for hop in pairwise(path)}
        pairs = {(self.places[one][0], self.places[other][0]) for one, other in hops}
        return tuple(sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}))


@lru_cache(RECENT)
def looped(p: int, v: int) -> Placement:
    """Place stage s as chunk s // p on rank s % p: the stages go around the ranks v times."""
    return Placement(tuple(tuple(range(rank, p * v, p)) for rank in range(p)))


@lru_cache(RECENT)
def v_shaped(p: int, v: int) -> Placement:
    """Place even chunks down the ranks, as if looped, and odd chunks back up: chunks meet on the same rank."""
    return Placement(
        tuple(tuple((c + 1) * p - 1 - rank if c % 2 else c * p + rank for c in range(v)) for rank in range(p))
    )


PLACEMENTS = {"loop": looped, "v": v_shaped}  # functions (p, v) by the name in a schedule's facts


@lru_cache(RECENT)
def placement_of(schedule: str | None, p: int, v: int, barriers: int = 0, skip_ratio: float = 0.0) -> Placement:
    """Place the virtual stages as a schedule needs them; None: the default schedule of a configuration.

    Raises: CardError for a plug-in without a placement
    """
    name = card.facts["placement"] if (card := SCHEDULES.cards.get(schedule or "")) else "loop"
    if name not in PLACEMENTS:
        raise CardError(
            f"schedule {schedule!r} has the unknown placement {name!r}", hint=f"one of {', '.join(PLACEMENTS)}"
        )
    placed = PLACEMENTS[name](p, v)
    return replace(placed, barriers=barriers, skip_ratio=skip_ratio) if barriers or skip_ratio else placed


@dataclass(frozen=True)
class Stages:
    """The layers of the virtual stages: stage s has layers [starts[s], starts[s + 1])."""

    placement: Placement
    starts: tuple[int, ...]

    @property
    def vpp(self) -> int:
        return self.placement.v

    @property
    def count(self) -> int:
        return self.placement.count

    def index(self, rank: int, chunk: int) -> int:
        return self.placement.stage(rank, chunk)

    def layers(self, stage: int) -> range:
        return range(self.starts[stage], self.starts[stage + 1])

    def computed_shares(self, m: int) -> dict[int, float]:
        """Return by layer the share of the m micro-batches of a step that it computes."""
        m = m if self.placement.skip_ratio else 1
        visits = [self.placement.visits(*place, m) for place in self.placement.places]
        return {layer: visits[stage] / m for stage in range(self.count) for layer in self.layers(stage)}


@lru_cache(RECENT)
def split_layers(num_layers: int, placement: Placement, layers_per_chunk: tuple[int, ...] | None = None) -> Stages:
    """Split the layers as evenly as possible, or by `layers_per_chunk`.

    Left-over layers go to the stages after the first, a layer per stage: the first and the last stage, with embedding
    and head, come last, and the layers of two ranks differ by at most 1.
    """
    count = placement.count
    quotient, extra = divmod(num_layers, count)
    even = tuple(quotient + (1 <= stage <= extra) for stage in range(count))
    sizes = even if layers_per_chunk is None else layers_per_chunk
    starts = [0]
    for layers in sizes:
        starts.append(starts[-1] + layers)
    if len(starts) != count + 1 or starts[-1] != num_layers:
        raise ValueError(f"{list(sizes)} does not split {num_layers} layers into {count} chunks")
    return Stages(placement, tuple(starts))
