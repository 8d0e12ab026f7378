"""The most bytes that a rank holds at once in a step, beside its state: its actions are played, each with what it
keeps, what it needs while it runs, the messages that are awaited, and the whole gradients that exist with zero = 2.

What a caching allocator rounds up, and what kernels and libraries take for themselves, comes on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.chunks import eight_bit_layers, packed, stages_of
from megascale.layout.recompute import recompute_of
from megascale.plan.activations import INDEX, Sizes
from megascale.plan.ends import embedding_backward, head_forward
from megascale.plan.flops import block_weights
from megascale.plan.orders import Piece, done, kinds
from megascale.plan.tape import norm_backward
from megascale.plan.traffic import message_bytes
from megascale.plan.working import CASTS, block_backward, block_forward, first_forward
from megascale.schedule.lower import AHEAD

Starts = list[tuple[str, list[int]]]
"""The units that buckets of a chunk begin with, in the order of backwards, and the bytes of each whole gradient."""


Whole = tuple[tuple[tuple[tuple[int, int], int], ...], ...]
"""Whole gradients by chunk and run of units: to which backwards add, and which are being reduced."""


@dataclass(frozen=True)
class PeakBytes:
    """When a rank holds most, beside its state. `kept`: activations for backwards; `gradients`: whole ones, with
    zero = 2; `working`: what operations need while they run, messages, tokens, and tables.
    """

    kept: int = 0
    gradients: int = 0
    working: int = 0

    @cached_property
    def total(self) -> int:
        return self.kept + self.gradients + self.working


@dataclass(frozen=True)
class ChunkBytes:
    """Of a chunk for one micro-batch: what it keeps, and the most that is there beyond what is kept when its forward
    begins, and its backward. `first`: in the first forward, beyond what the `casts` of its weights take. `backward`: in
    each run of units whose gradients are reduced together, and how much of what it keeps is released when that run is
    done.
    """

    kept: int
    first: int
    forward: int
    backward: tuple[tuple[int, int], ...]
    casts: int


class Stage(NamedTuple):
    """What a rank of a pipeline stage has: its chunks, of each the units that its buckets begin with; and what it
    `does`.
    """

    chunks: list[ChunkBytes]
    units: list[Starts]
    does: Actions


def stage_of(config: RunConfig, pp_rank: int, kept: Sequence[int]) -> Stage:
    """Of a resolved configuration. `kept`: by each chunk, of a micro-batch."""
    units, known, chunks = first_units(config, pp_rank), dict[object, ChunkBytes](), []
    for chunk, own in enumerate(kept):
        kind = chunk_kind(config, pp_rank, chunk), *(tuple(sizes) for _, sizes in units[chunk])
        if kind not in known:
            known[kind] = _chunk(config, pp_rank, chunk, own, units[chunk])
        chunks.append(known[kind])
    return Stage(chunks, units, Actions(config, pp_rank, chunks, units))


def peak_bytes(config: RunConfig, pp_rank: int, order: Iterable[Piece], stage: Stage) -> PeakBytes:
    """On a rank of pipeline stage `pp_rank`, of a resolved configuration, that does what `order` says."""
    does, size, always = stage.does, message_bytes(config), _always(config, pp_rank)
    grows = [(-1 if kind.backward else 1) * stage.chunks[kind.chunk].kept for kind in kinds(len(stage.chunks))]
    here, kept, highest, fullest = does.begin, 0, 0, PeakBytes()
    for numbers, awaited, times in order:
        left = times
        while left:
            before, begun = here, kept
            for number, receives in zip(numbers, awaited, strict=True):
                if number not in here.after:
                    does.find(here, number)
                moment, most, here = here.after[number]
                total = kept + most + size * receives
                if total > highest:
                    highest, fullest = total, moment.beside(kept, size * receives + always)
                kept += grows[number]
            left -= 1
            if left and here is before:  # so it will be: none is fuller than this time and the last
                kept += (left - 1) * (kept - begun)
                left = 1
    return fullest


class _Moment(NamedTuple):
    """Bytes at one time in an action: of what was kept before it, what is `released` by then; whole `gradients`; and
    what else is there, but for messages that are awaited.
    """

    released: int
    gradients: int
    working: int

    @property
    def total(self) -> int:
        return self.gradients + self.working - self.released

    def beside(self, kept: int, others: int) -> PeakBytes:
        """With what was kept before, and others."""
        working = self.working + others  # less than nothing where more is released than is needed
        return PeakBytes(kept - self.released + min(0, working), self.gradients, max(0, working))


class _State(NamedTuple):
    """A rank between two actions: the whole gradients that there are, and the bytes of weights that are not cast yet;
    and `after` each action that was done then, by its number, its fullest moment, the bytes of that, and what the rank
    is next.
    """

    gradients: Whole
    lacking: int
    after: dict[int, tuple[_Moment, int, _State]]


class Actions:
    """Those of a rank, found when they are first done. What one takes depends on its chunk, and on what the rank is."""

    def __init__(self, config: RunConfig, pp_rank: int, chunks: list[ChunkBytes], units: list[Starts]) -> None:
        self._chunks, self._rooms, layout = chunks, Rooms(config, units), stages_of(config)
        self._last = [layout.index(pp_rank, chunk) == layout.count - 1 for chunk in range(config.parallel.vpp)]
        self._grad = Sizes(config).residual
        self._known: dict[tuple[Whole, int], _State] = {}
        self.begin = self._state(sum(chunk.casts for chunk in chunks))

    def find(self, here: _State, number: int) -> None:
        """What comes of an action."""
        self._rooms.whole, (chunk, backward, first) = here.gradients, done(number)
        lacking = here.lacking - (self._chunks[chunk].casts if first and not backward else 0)
        moments = self._backward(chunk) if backward else self._forward(chunk, lacking if first else None)
        moment = max(moments, key=lambda moment: moment.total)
        here.after[number] = moment, moment.total, self._state(lacking)

    def _state(self, lacking: int) -> _State:
        whole = self._rooms.whole
        return self._known.setdefault((whole, lacking), _State(whole, lacking, {}))

    def _forward(self, number: int, lacking: int | None) -> Iterator[_Moment]:
        """`lacking`: then, if it is the first."""
        chunk = self._chunks[number]
        if self._last[number]:
            self._rooms.loss(number)
        yield _Moment(0, self._rooms.total, chunk.forward if lacking is None else chunk.first - lacking)

    def _backward(self, number: int) -> Iterator[_Moment]:
        chunk, rooms = self._chunks[number], self._rooms
        rooms.backward(number)
        arrived = 0 if self._last[number] else self._grad  # stays until the backward's end
        for run, (working, released) in enumerate(chunk.backward):
            yield _Moment(0, rooms.total, working)
            rooms.reduce(number, run)
            inside = run < len(chunk.backward) - 1
            yield _Moment(released, rooms.total, self._grad + arrived if inside else 0)
            rooms.settle()


def ceiling(config: RunConfig, pp_rank: int, stage: Stage, activations: int) -> int:
    """As much as a rank holds beside its state and whole gradients, or more, without playing its actions.
    `activations`: the most that is kept at once, with what is computed again.
    """
    grad = Sizes(config).residual
    needs = [max(chunk.first, chunk.forward, 2 * grad, *(most for most, _ in chunk.backward)) for chunk in stage.chunks]
    awaited = AHEAD if config.overlap.pp and config.parallel.pp > 1 else 0
    if config.parallel.pp == 2:  # in the sender's order: never more than there are
        awaited *= 2 * config.parallel.vpp * config.micro_batches
    return activations + max(needs) + message_bytes(config) * awaited + _always(config, pp_rank)


def whole_gradients(stage: Stage) -> int:
    """As much as whole gradients take at once, or more: those of a chunk and of the head, as many that are being
    reduced, and the shards that this gives, which are no larger.
    """
    chunks = [sum(sum(sizes) for _, sizes in chunk) for chunk in stage.units]
    return 3 * (max(chunks) + chunks[-1])


def chunk_kind(config: RunConfig, pp_rank: int, chunk: int) -> tuple[object, ...]:
    """The same for chunks that do the same."""
    layout, windows, cast = stages_of(config), config.model.windows, eight_bit_layers(config)
    index = layout.index(pp_rank, chunk)
    layers = [(windows[layer], layer in cast) for layer in layout.layers(index)]
    return index == 0, index == layout.count - 1, recompute_of(config.train, chunk), *layers


def _chunk(config: RunConfig, pp_rank: int, chunk: int, kept: int, starts: Starts) -> ChunkBytes:
    sizes, layout, recompute = Sizes(config), stages_of(config), recompute_of(config.train, chunk)
    windows, cast, stage = config.model.windows, eight_bit_layers(config), layout.index(pp_rank, chunk)
    last, known = stage == layout.count - 1, dict[tuple[int | None, bool], tuple[int, ...]]()
    weights = CASTS * sum(block_weights(config.model).values()) // config.parallel.tp  # of a block, as they are cast
    grad = sizes.residual
    released, beside = (sizes.head() if last else 0), 0
    first = forward = kept + grad + (head_forward(config) - released if last else 0)
    lacking = 0  # casts of the blocks that follow
    backward = {"head": (norm_backward(sizes, config.model.norm), released)} if last else {}
    for layer in reversed(layout.layers(stage)):
        key = windows[layer], layer in cast
        if key not in known:
            going, coming = block_forward(config, layer, recompute), block_backward(config, layer, recompute)
            begun = first_forward(config, layer, recompute) if layer in cast else going
            known[key] = sizes.block(layer).kept(recompute), begun, going, coming
        block, begun, going, coming = known[key]
        working = grad + beside + coming - released
        released += block
        backward[f"layers.{layer}"] = working, released
        forward = max(forward, kept - released + sizes.residual + going)
        first = max(first, kept - released + sizes.residual + begun - lacking)
        lacking += weights if layer in cast else 0
        beside = 0 if last else grad  # what has arrived stays until the backward's end
    embedded = 0
    if stage == 0:
        coming = embedding_backward(config)
        if config.model.position == "learned":
            embedded = 2 * grad  # vectors of tokens, and the sum
        if config.model.dropout:  # its input, what of it stays, and that scaled; backwards a gradient, then no mask
            embedded, coming = sizes.embedding() + 3 * grad, max(coming - sizes.mask, grad)
        backward["embedding"] = grad + beside + coming - released, kept
    names = {name for name, _ in starts}
    runs, fresh = list[tuple[int, int]](), True
    for name, (working, released) in backward.items():
        most = working if fresh else max(runs.pop()[0], working)
        runs.append((most, released))
        fresh = name in names
    return ChunkBytes(kept, max(first, embedded - lacking), max(forward, embedded), tuple(runs), lacking)


def first_units(config: RunConfig, pp_rank: int) -> list[Starts]:
    """Of each chunk, with zero = 2."""
    p, number = config.parallel, PRECISIONS[config.train.precision].facts["accumulate_bytes"]
    found = []
    for chunk in packed(config, pp_rank) if p.zero == 2 else [[]] * p.vpp:
        starts: dict[str, list[int]] = {}
        for bucket in chunk:
            starts.setdefault(bucket.unit, []).append(number * bucket.numbers)
        found.append(list(reversed(starts.items())))
    return found


def _always(config: RunConfig, pp_rank: int) -> int:
    """The step's tokens and labels at the ends of the pipeline, and the table of rotary embeddings."""
    m, sizes = config.model, Sizes(config)
    tokens = token_bytes(sizes) * config.micro_batches if pp_rank in (0, config.parallel.pp - 1) else 0
    return tokens + (sizes.seq * m.head_dim * sizes.wide if m.position == "rope" else 0)


def token_bytes(sizes: Sizes) -> int:
    """Of a micro-batch's tokens and labels."""
    return 2 * INDEX * sizes.tokens


class Rooms:
    """Whole gradients with zero = 2 (`parallel.gradients`), by chunk and run of units. `_open`: backwards add to them;
    `_reducing`: until the sum over data parallelism is waited for, with the shard that it gives.
    """

    def __init__(self, config: RunConfig, units: list[Starts]) -> None:
        self._overlap, self._shards = config.overlap.dp, config.dp * config.parallel.cp
        self._sizes = [[sum(sizes) for _, sizes in chunk] for chunk in units]
        self._largest = [[max(sizes) for _, sizes in chunk] for chunk in units]
        self._used = config.parallel.zero == 2
        self._head = len(self._sizes[-1]) - 1 if config.model.tie_embeddings and config.parallel.pp == 1 else 0
        self._open: dict[tuple[int, int], int] = {}
        self._reducing: dict[tuple[int, int], int] = {}

    @property
    def whole(self) -> Whole:
        """Those that there are."""
        return tuple(self._open.items()), tuple(self._reducing.items())

    @whole.setter
    def whole(self, found: Whole) -> None:
        self._open, self._reducing = map(dict, found)

    @property
    def total(self) -> int:
        return sum(self._open.values()) + sum(self._reducing.values()) if self._used else 0

    def loss(self, chunk: int) -> None:
        """Before a forward that ends in the loss, which adds to the gradient of the head's weight."""
        self._make(chunk, [self._head])

    def backward(self, chunk: int) -> None:
        """Before a backward."""
        self._make(chunk, range(len(self._sizes[chunk])))

    def reduce(self, chunk: int, run: int) -> None:
        """Gradients are complete: begin to sum them, once the sum before is done."""
        if self._used:
            self._reducing.pop((chunk, run), None)
            whole = self._open.pop((chunk, run))
            alone = self._shards == 1  # with nobody to sum with, one bucket goes after the other
            self._reducing[chunk, run] = whole + (self._largest[chunk][run] if alone else whole // self._shards)

    def settle(self) -> None:
        """Nothing else runs while a sum is waited for, or there is nobody to sum with."""
        if not self._overlap:
            self._reducing.clear()
        elif self._shards == 1:
            self._reducing = {key: min(size, self._sizes[key[0]][key[1]]) for key, size in self._reducing.items()}

    def _make(self, chunk: int, runs: Iterable[int]) -> None:
        """That of one chunk may still be being reduced, no more."""
        if not self._used:
            return
        newest = [other for other, _ in self._reducing][-1:]
        self._reducing = {key: size for key, size in self._reducing.items() if key[0] in newest}
        self._open |= {(chunk, run): self._sizes[chunk][run] for run in runs}
