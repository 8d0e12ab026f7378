"""A plan for sequences of unequal lengths (`LengthPlan`): steps drawn from a distribution, on a static cp mesh, by
hybrid data parallelism, and in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import numpy as np

from megascale.core.errors import ConfigError, Problem
from megascale.core.units import format_bytes
from megascale.plan.account.chunk_memory import ChunkMemory, chunk_memory, with_context
from megascale.plan.account.context_bytes import CONTEXT_MODES, ContextMode, context_bytes
from megascale.plan.account.memory import JobMemory
from megascale.plan.search.length_distribution import LengthDistribution
from megascale.plan.simulate.length_step import LengthStep, Pool, chunked_step, hybrid_step, static_step
from megascale.plan.simulate.sequence_times import SequenceTimes

CHUNKS = (2048, 4096, 8192, 16384, 32768)  # tokens of a chunk that are searched
KEPT = (1, 2, 4, 8, 16)  # numbers of kept chunks that are searched
GRAIN = 256  # tokens per rank are planned in multiples


@dataclass(frozen=True)
class StrategyCost:
    """A way to train on the drawn steps, in means over them. `context_bytes`: sent by all ranks in a step; `bound`: of
    the makespan, for any plan; `padding`: rows of padding over tokens.
    """

    name: str
    step_s: float
    tokens_per_s: float
    makespan: float
    bound: float
    context_bytes: float
    microbatches: tuple[int, int]
    padding: float


@dataclass(frozen=True)
class LengthPlan:
    """Steps of unequal sequences. `chunk_tokens` and `keep`: of a plan in chunks, without if 0; `steps`: how many are
    drawn.
    """

    times: SequenceTimes
    lengths: LengthDistribution
    chunk_tokens: int = 0
    keep: int = 1
    steps: int = 4

    def __post_init__(self) -> None:
        if self.longest > self.pool.ranks * self.times.max_tokens:
            ranks = f"{self.pool.ranks} ranks hold {self.times.max_tokens:,} each"
            what = f"the longest sequence has {self.longest:,} tokens, {ranks}"
            raise ConfigError([Problem("command line", "--lengths", what, "more devices, or --max-tokens-per-rank")])

    @cached_property
    def draws(self) -> list[list[int]]:
        config = self.times.config
        generator = np.random.default_rng(config.train.seed)
        tokens = config.batch.total * config.model.seq_length
        return [self.lengths.step(generator, tokens) for _ in range(self.steps)]

    @cached_property
    def pool(self) -> Pool:
        """The dp x cp ranks."""
        return self.times.pool

    @cached_property
    def longest(self) -> int:
        return max(map(max, self.draws))

    @property
    def mean_tokens(self) -> float:
        return fmean(map(sum, self.draws))

    @cached_property
    def ways(self) -> list[StrategyCost]:
        """The ways to train, a static mesh first."""
        pool, draws = self.pool, self.draws
        least = math.ceil(self.longest / pool.max_tokens)  # the narrowest static mesh for the longest sequence
        cp = next(cp for cp in range(least, pool.ranks + 1) if pool.ranks % cp == 0)
        steps = {
            f"static cp {cp}": [static_step(lengths, pool, cp) for lengths in draws],
            f"static cp {cp}, balanced": [static_step(lengths, pool, cp, balanced=True) for lengths in draws],
            "hybrid": [hybrid_step(lengths, pool)[0] for lengths in draws],
        }
        if tokens := self.chunk_tokens:
            chunks = replace(self.times, max_tokens=tokens).pool
            chunked = [chunked_step(lengths, chunks, tokens, self.keep) for lengths in draws]
            steps[f"chunks of {tokens:,}, K = {self.keep}"] = chunked
        return [self._way(name, each) for name, each in steps.items()]

    def _way(self, name: str, steps: list[LengthStep]) -> StrategyCost:
        bounds = [self.pool.bound(lengths) for lengths in self.draws]
        makespan = fmean(step.makespan for step in steps)
        step_s = fmean(self.times.parts.seconds(step.makespan) for step in steps)
        sent = fmean(map(self._context_bytes, steps))
        counts = min(step.microbatches[0] for step in steps), max(step.microbatches[1] for step in steps)
        padding = fmean(step.padding for step in steps) / self.mean_tokens
        return StrategyCost(name, step_s, self.mean_tokens / step_s, makespan, fmean(bounds), sent, counts, padding)

    def _context_bytes(self, step: LengthStep) -> float:
        """Bytes that all ranks send for keys and values of all layers, forward and backward."""
        config, heads = self.times.config, self.times.heads
        rings = (ranks * sum(context_bytes("ring", tokens, ranks, heads)) for tokens, ranks in step.rings)
        return sum(rings) * config.parallel.tp * config.model.num_layers

    def mode_rows(self) -> Iterator[tuple[int, dict[ContextMode, tuple[float, float]], int | None]]:
        """Yield numbers of ranks, with (bytes of a rank and layer, exposed seconds of a stage) by mode for the longest
        sequence, and the crossover from Ulysses to a ring.
        """
        times, longest, ranks = self.times, self.longest, 2
        while ranks <= self.pool.ranks:
            sent = {mode: sum(context_bytes(mode, longest, ranks, times.heads)) for mode in CONTEXT_MODES}
            costs = {mode: (size, times.exposed(mode, longest, ranks)) for mode, size in sent.items()}
            yield ranks, costs, times.crossover(ranks, max(longest, self.lengths.longest))
            ranks *= 2

    def chunked_memory(self, chunk_tokens: int, keep: int) -> ChunkMemory:
        job = JobMemory(self.times.config, self.times.stack.storage)
        stages = range(job.config.parallel.pp)
        ranks = [chunk_memory(job, stage, chunk_tokens, keep, self.longest) for stage in stages]
        return max(ranks, key=lambda rank: rank.total)


def choose_chunks(plan: LengthPlan) -> tuple[int, int]:
    """Search the tokens of a chunk and the number of kept chunks with the shortest first step, of those that fit.

    Raises: ConfigError if none fits
    """
    limit, found = plan.times.hardware.memory_limit(plan.times.config.world_size), list[tuple[float, int, int]]()
    for tokens in CHUNKS:
        fitting = [keep for keep in KEPT if plan.chunked_memory(tokens, keep).total <= limit]
        pool = replace(plan.times, max_tokens=tokens).pool if fitting else plan.pool
        found += [(chunked_step(plan.draws[0], pool, tokens, k).makespan, tokens, k) for k in fitting]
    if not found:
        least = format_bytes(plan.chunked_memory(CHUNKS[0], KEPT[0]).total)
        what = f"chunks of {CHUNKS[0]} tokens take {least}, and {format_bytes(limit)} are there"
        raise ConfigError([Problem("command line", "--chunk-tokens auto", what, "more of parallel.tp or parallel.pp")])
    _, chunk_tokens, keep = min(found)
    return chunk_tokens, keep


def fitting_tokens(job: JobMemory, limit: float, longest: int) -> int:
    """Return the most tokens of a micro-batch that fit `limit` bytes of a rank, a multiple of `GRAIN`, up to `longest`.

    Raises: ConfigError if the fewest do not fit
    """
    low, high = 0, -(-longest // GRAIN) + 1
    while high - low > 1:
        middle = (low + high) // 2
        alone = JobMemory(with_context(job.config, middle * GRAIN), job.storage)
        low, high = (middle, high) if alone.fullest(limit).total <= limit else (low, middle)
    if low == 0:
        what = f"a micro-batch of {GRAIN} tokens does not fit in memory"
        raise ConfigError([Problem("command line", "--lengths", what, "more of parallel.tp, parallel.pp or --gpus")])
    return low * GRAIN
