"""The most bytes that a rank holds at once in a step, beside its state: its actions are played, each with what it
keeps, what it needs while it runs, the messages that are awaited, and the whole gradients that exist with zero = 2.

What a caching allocator rounds up, and what kernels and libraries take for themselves, comes on top.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.buckets import pack
from megascale.layout.chunks import chunk_buckets, eight_bit_layers, stages_of, unit
from megascale.layout.recompute import recompute_of
from megascale.layout.tensors import TOKEN_EMBEDDING
from megascale.plan.activations import INDEX, ActivationBytes, Sizes
from megascale.plan.ends import embedding_backward, head_forward
from megascale.plan.flops import block_weights
from megascale.plan.tape import norm_backward
from megascale.plan.traffic import message_bytes
from megascale.plan.working import CASTS, block_backward, block_forward, first_forward
from megascale.schedule.ir import Action, Kind, Schedule
from megascale.schedule.lower import AHEAD, receives

Starts = list[tuple[str, list[int]]]
"""The units that buckets of a chunk begin with, in the order of backwards, and the bytes of each whole gradient."""


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


def peak_bytes(config: RunConfig, pp_rank: int, orders: Schedule, activations: ActivationBytes) -> PeakBytes:
    """On a rank of pipeline stage `pp_rank`, of a resolved configuration. `orders`: of the ranks of all stages."""
    layout, units, always = stages_of(config), first_units(config, pp_rank), _always(config, pp_rank)
    chunks = _chunks(config, pp_rank, activations, units)
    kept, most, grad, rooms = 0, PeakBytes(), Sizes(config).residual, Rooms(config, units)
    lacking = sum(chunk.casts for chunk in chunks)  # weights that are not cast yet

    def see(working: int, kept: int) -> None:
        nonlocal most
        gradients, beside = rooms.total, working + always  # less than nothing where more was released than is needed
        if kept + gradients + beside > most.total:
            most = PeakBytes(kept + min(0, beside), gradients, max(0, beside))

    for action, messages in zip(orders[pp_rank], _awaited(config, pp_rank, orders), strict=True):
        chunk, index = chunks[action.chunk], layout.index(pp_rank, action.chunk)
        if action.kind is Kind.F:
            if index == layout.count - 1:
                rooms.loss(action.chunk)
            if action.microbatch == 0:
                lacking -= chunk.casts
                see(chunk.first - lacking + messages, kept)
            else:
                see(chunk.forward + messages, kept)
            kept += chunk.kept
        else:
            rooms.backward(action.chunk)
            for run, (working, released) in enumerate(chunk.backward):
                see(working + messages, kept)
                rooms.reduce(action.chunk, run)
                arrived = 0 if index == layout.count - 1 else grad  # stays until the backward's end
                inside = run < len(chunk.backward) - 1
                see((grad + arrived if inside else 0) + messages, kept - released)
                rooms.settle()
            kept -= chunk.kept
    return most


def ceiling(config: RunConfig, pp_rank: int, activations: ActivationBytes) -> int:
    """As much as a rank holds beside its state and whole gradients, or more, without playing its actions."""
    chunks, grad = _chunks(config, pp_rank, activations, first_units(config, pp_rank)), Sizes(config).residual
    needs = [max(chunk.first, chunk.forward, 2 * grad, *(most for most, _ in chunk.backward)) for chunk in chunks]
    awaited = AHEAD if config.overlap.pp and config.parallel.pp > 1 else 0
    if config.parallel.pp == 2:  # in the sender's order: never more than there are
        awaited *= 2 * config.parallel.vpp * config.micro_batches
    messages = message_bytes(config) * awaited
    return activations.peak + max(needs) + messages + _always(config, pp_rank)


def whole_gradients(config: RunConfig, pp_rank: int) -> int:
    """As much as whole gradients take at once, or more: those of a chunk and of the head, as many that are being
    reduced, and the shards that this gives, which are no larger.
    """
    chunks = [sum(sum(sizes) for _, sizes in chunk) for chunk in first_units(config, pp_rank)]
    return 3 * (max(chunks) + chunks[-1])


def _chunks(config: RunConfig, pp_rank: int, activations: ActivationBytes, units: list[Starts]) -> list[ChunkBytes]:
    known, found = dict[object, ChunkBytes](), []
    for chunk, kept in enumerate(activations.kept):
        kind = _kind(config, pp_rank, chunk), *(tuple(sizes) for _, sizes in units[chunk])
        if kind not in known:
            known[kind] = _chunk(config, pp_rank, chunk, kept, units[chunk])
        found.append(known[kind])
    return found


def _kind(config: RunConfig, pp_rank: int, chunk: int) -> tuple[object, ...]:
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
    for chunk in chunk_buckets(config, pp_rank) if p.zero == 2 else [[]] * p.vpp:
        starts: dict[str, list[int]] = {}
        for bucket in chunk:
            tied = [parameter.name for parameter in bucket] == [TOKEN_EMBEDDING]
            first = "head" if tied and starts else unit(bucket[0].name)
            starts.setdefault(first, []).append(number * pack(bucket, p.tp, config.dp * p.cp).size)
        found.append(list(reversed(starts.items())))
    return found


def _always(config: RunConfig, pp_rank: int) -> int:
    """The step's tokens and labels at the ends of the pipeline, and the table of rotary embeddings."""
    m, sizes = config.model, Sizes(config)
    ends = pp_rank in (0, config.parallel.pp - 1)
    tokens = 2 * INDEX * sizes.tokens * config.micro_batches if ends else 0
    return tokens + (sizes.seq * m.head_dim * sizes.wide if m.position == "rope" else 0)


def _awaited(config: RunConfig, pp_rank: int, orders: Schedule) -> list[int]:
    """Bytes of the receives that are posted while each action runs, for those that follow it."""
    p, layout, order = config.parallel, stages_of(config), orders[pp_rank]
    ahead = AHEAD if config.overlap.pp else 0
    if p.pp == 1:
        return [0] * len(order)

    def receives_for(action: Action) -> bool:
        index = layout.index(pp_rank, action.chunk)
        return index > 0 if action.kind is Kind.F else index < layout.count - 1

    needs, size = [receives_for(action) for action in order], message_bytes(config)
    if p.pp == 2:  # activations and gradients are one sender's, in whose order all are posted
        posts = accumulate(map(len, receives(orders, pp_rank, p.vpp, ahead)))
        waiting = [posted - needed for posted, needed in zip(posts, accumulate(needs), strict=True)]
    else:
        waiting = [sum(needs[index + 1 : index + 1 + ahead]) for index in range(len(order))]
    return [size * count for count in waiting]


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
