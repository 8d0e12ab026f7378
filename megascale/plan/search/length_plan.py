"""A plan for sequences of unequal lengths (`LengthPlan`): steps drawn from a distribution, on a static cp mesh, by
hybrid data parallelism, and in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

import numpy as np

from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.units import format_bytes
from megascale.plan.account.chunk_memory import ChunkMemory, chunk_memory, with_context
from megascale.plan.account.context_bytes import CONTEXT_MODES, ContextMode, context_bytes
from megascale.plan.account.memory import fullest_rank
from megascale.plan.search.length_distribution import LengthDistribution
from megascale.plan.simulate.length_step import LengthStep, Pool, chunked_step, hybrid_step, static_step
from megascale.plan.simulate.profiles import Hardware, Stack
from megascale.plan.simulate.sequence_times import SequenceTimes

CHUNKS = (2048, 4096, 8192, 16384, 32768)
"""Tokens of a chunk that are searched."""

KEPT = (1, 2, 4, 8, 16)
"""Numbers of kept chunks that are searched."""

GRAIN = 256
"""Tokens per rank are planned in multiples."""


@dataclass(frozen=True)
class StrategyCost:
    """A way to train on the drawn steps, in means over them. `context_bytes`: sent by all ranks in a step; `bound`: of
    the makespan, for any plan.
    """

    name: str
    step_s: float
    tokens_per_s: float
    makespan: float
    bound: float
    context_bytes: float
    microbatches: tuple[int, int]


@dataclass(frozen=True)
class LengthPlan:
    """A resolved configuration with steps of unequal sequences. `max_tokens`: of a rank in a micro-batch;
    `chunk_tokens` and `keep`: of a plan in chunks, without if 0; `steps`: number of steps to draw.
    """

    config: RunConfig
    hardware: Hardware
    stack: Stack
    lengths: LengthDistribution
    max_tokens: int
    chunk_tokens: int = 0
    keep: int = 1
    steps: int = 4
    draws: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.config.train.seed)
        tokens = self.config.batch.total * self.config.model.seq_length
        object.__setattr__(self, "draws", [self.lengths.step(generator, tokens) for _ in range(self.steps)])
        if (longest := self.longest) > self.pool.ranks * self.max_tokens:
            what = f"the longest sequence has {longest:,} tokens, {self.pool.ranks} ranks hold {self.max_tokens:,} each"
            raise ConfigError([Problem("command line", "--lengths", what, "more devices, or --max-tokens-per-rank")])

    @cached_property
    def times(self) -> SequenceTimes:
        return SequenceTimes(self.config, self.hardware, self.stack, self.max_tokens)

    @cached_property
    def pool(self) -> Pool:
        """The dp x cp ranks."""
        return self._pool(self.times)

    def pool_of_chunks(self, chunk_tokens: int) -> Pool:
        """The dp x cp ranks on chunks, whose GEMMs have other shapes."""
        return self._pool(replace(self.times, max_tokens=chunk_tokens))

    def _pool(self, times: SequenceTimes) -> Pool:
        p = self.config.parallel
        message = times.parts.times.message if p.pp > 1 else 0.0
        return Pool(self.config.dp * p.cp, times.max_tokens, times.work, p.pp, times.forward_share, message)

    @property
    def longest(self) -> int:
        """Tokens of the longest drawn sequence."""
        return max(map(max, self.draws))

    @property
    def mean_tokens(self) -> float:
        """Tokens of a step."""
        return fmean(map(sum, self.draws))

    @cached_property
    def static_cp(self) -> int:
        """The narrowest cp of a static mesh for the longest sequence: a divisor of the pool."""
        least = math.ceil(self.longest / self.max_tokens)
        return next(cp for cp in range(least, self.pool.ranks + 1) if self.pool.ranks % cp == 0)

    @cached_property
    def ways(self) -> list[StrategyCost]:
        """The ways to train, a static mesh first."""
        cp, pool = self.static_cp, self.pool
        ways = [
            self._way(f"static cp {cp}", [static_step(lengths, pool, cp) for lengths in self.draws]),
            self._way(
                f"static cp {cp}, balanced", [static_step(lengths, pool, cp, balanced=True) for lengths in self.draws]
            ),
            self._way("hybrid", [hybrid_step(lengths, pool)[0] for lengths in self.draws]),
        ]
        if self.chunk_tokens:
            chunk_pool = self.pool_of_chunks(self.chunk_tokens)
            chunked = [chunked_step(lengths, chunk_pool, self.chunk_tokens, self.keep) for lengths in self.draws]
            ways.append(self._way(f"chunks of {self.chunk_tokens:,}, K = {self.keep}", chunked))
        return ways

    def _way(self, name: str, steps: list[LengthStep]) -> StrategyCost:
        pool = self.pool
        bounds = [pool.bound(lengths) for lengths in self.draws]
        makespan = fmean(step.makespan for step in steps)
        step_s = fmean(self.times.parts.seconds(step.makespan) for step in steps)
        sent = fmean(map(self._context_bytes, steps))
        counts = min(step.microbatches[0] for step in steps), max(step.microbatches[1] for step in steps)
        return StrategyCost(name, step_s, self.mean_tokens / step_s, makespan, fmean(bounds), sent, counts)

    def _context_bytes(self, step: LengthStep) -> float:
        """Bytes that all ranks send for keys and values of all layers, forward and backward."""
        rings = (ranks * context_bytes("ring", tokens, ranks, self.times.heads).total for tokens, ranks in step.rings)
        return sum(rings) * self.config.parallel.tp * self.config.model.num_layers

    def mode_rows(self) -> Iterator[tuple[int, dict[ContextMode, tuple[float, float]], int | None]]:
        """Yield numbers of ranks, with (bytes of a rank and layer, exposed seconds of a stage) by mode for the longest
        sequence, and the crossover from Ulysses to a ring.
        """
        times, ranks = self.times, 2
        while ranks <= self.pool.ranks:
            sent = {
                mode: (
                    context_bytes(mode, self.longest, ranks, times.heads).total,
                    times.exposed(mode, self.longest, ranks),
                )
                for mode in CONTEXT_MODES
            }
            yield ranks, sent, times.crossover(ranks, max(self.longest, self.lengths.longest))
            ranks *= 2

    def chunked_memory(self, chunk_tokens: int, keep: int) -> ChunkMemory:
        """Memory of the fullest rank in chunks."""
        args = chunk_tokens, keep, self.longest, self.stack.storage
        ranks = [chunk_memory(self.config, stage, *args) for stage in range(self.config.parallel.pp)]
        return max(ranks, key=lambda rank: rank.total)


def choose_chunks(plan: LengthPlan) -> tuple[int, int]:
    """Search the tokens of a chunk and the number of kept chunks with the shortest first step, of those that fit.

    Raises: ConfigError if none fits
    """
    limit, found = plan.hardware.memory_limit(plan.config.world_size), list[tuple[float, int, int]]()
    for chunk_tokens in CHUNKS:
        fitting = [keep for keep in KEPT if plan.chunked_memory(chunk_tokens, keep).total <= limit]
        pool = plan.pool_of_chunks(chunk_tokens) if fitting else plan.pool
        found += [(chunked_step(plan.draws[0], pool, chunk_tokens, k).makespan, chunk_tokens, k) for k in fitting]
    if not found:
        least = format_bytes(plan.chunked_memory(CHUNKS[0], KEPT[0]).total)
        what = f"chunks of {CHUNKS[0]} tokens take {least}, and {format_bytes(limit)} are there"
        raise ConfigError([Problem("command line", "--chunk-tokens auto", what, "more of parallel.tp or parallel.pp")])
    _, chunk_tokens, keep = min(found)
    return chunk_tokens, keep


def fitting_tokens(config: RunConfig, hardware: Hardware, stack: Stack, longest: int) -> int:
    """Return the most tokens of a micro-batch that fit a rank's memory, a multiple of `GRAIN`, up to `longest`.

    Raises: ConfigError if the fewest do not fit
    """
    limit = hardware.memory_limit(config.world_size)

    def fits(count: int) -> bool:
        alone = with_context(config, count * GRAIN)
        return fullest_rank(alone, stack.storage, limit).total <= limit

    low, high = 0, -(-longest // GRAIN) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        what = f"a micro-batch of {GRAIN} tokens does not fit in memory"
        raise ConfigError([Problem("command line", "--lengths", what, "more of parallel.tp, parallel.pp or --gpus")])
    return low * GRAIN
