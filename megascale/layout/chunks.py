"""What a pipeline rank holds: the parameters of its model chunks, and how they form buckets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.buckets import pack
from megascale.layout.stages import Stages, split
from megascale.layout.tensors import TOKEN_EMBEDDING, Parameter, layer, stage
from megascale.layout.topology import DATA, Topology, topology_of

BUCKETS = 16
"""Buckets of a model chunk that `auto` asks for."""

MOST_BYTES = 32 << 20
"""Most bytes of gradients in a bucket that `auto` makes of several units, as far as each rank's share allows."""

SHARE_BYTES = 512 << 10
"""Fewest bytes of a bucket's gradients for each rank of dp."""


def stages_of(config: RunConfig) -> Stages:
    """The virtual stages of a run."""
    p = config.parallel
    given = None if p.layers_per_chunk is None else tuple(p.layers_per_chunk)
    return split(config.model.num_layers, p.pp, p.vpp, given)


def chunk_parameters(config: RunConfig, pp_rank: int) -> list[list[Parameter]]:
    """The parameters of each model chunk of a pipeline rank."""
    stages, found = stages_of(config), []
    for chunk in range(config.parallel.vpp):
        index = stages.index(pp_rank, chunk)
        layers, first, last = stages.layers(index), index == 0, index == stages.count - 1
        found.append(stage(config.model, layers, first, last))
    return found


def unit(name: str) -> str:
    """The part of the network that a parameter belongs to: 'embedding', 'layers.3' or 'head'."""
    first, second = name.split(".")[:2]
    return {"layers": f"layers.{second}", "embedding": "embedding"}.get(first, "head")


def chunk_buckets(config: RunConfig, pp_rank: int) -> list[list[list[Parameter]]]:
    """For each chunk of a pipeline rank the parameters of its buckets, in the order of the network.

    A chunk is one bucket, or several of whole units where its gradients take more than `overlap.bucket_bytes`. A token
    embedding that it shares with the other end of the pipeline is a bucket of its own, so that both ends shard it alike
    and sum its gradient.
    """
    return [_cut(config, chunk) for chunk in chunk_parameters(config, pp_rank)]


def shares_embedding(config: RunConfig) -> bool:
    """Tell whether both ends of the pipeline have the token embedding."""
    return config.model.tie_embeddings and config.parallel.pp > 1


class _Bounds(NamedTuple):
    """Of the buckets of a chunk, in numbers: none has fewer than `least`, and none of several units more than `most`,
    unless it would leave a bucket with fewer than `least`.
    """

    least: int
    most: int


def _bounds(config: RunConfig, numbers: int) -> _Bounds:
    """Of the buckets of a chunk of so many numbers.

    `auto` weighs two costs. The bucket that the backward leaves last is reduced with nothing to hide behind: of k equal
    buckets that is 1/k of the chunk's communication, with 16 about 6%. In the chunk that begins with a token embedding
    it is that of the embedding, which is not cut: where the embedding is large, so is what stays exposed. And each
    bucket costs its collectives' latency: a reduce-scatter over d ranks is d - 1 messages of bucket / d bytes, each of
    which takes latency + bytes / bandwidth; at 10 us and 50 GB/s both terms are equal at 512 KiB, over slower networks
    latency counts for less. So a rank's share of a bucket has that or more. Where both allow, more than 32 MiB in a
    bucket would gain nothing. With one data-parallel rank nothing travels.
    """
    number_bytes: int = PRECISIONS[config.train.precision].facts["accumulate_bytes"]
    if config.overlap.bucket_bytes != "auto":
        return _Bounds(0, config.overlap.bucket_bytes // number_bytes)
    shards = topology_of(config).size(*DATA)
    if shards == 1:
        return _Bounds(0, MOST_BYTES // number_bytes)
    least = shards * SHARE_BYTES // number_bytes
    return _Bounds(least, max(least, min(MOST_BYTES // number_bytes, numbers // BUCKETS)))


def _cut(config: RunConfig, parameters: list[Parameter]) -> list[list[Parameter]]:
    shared, topology = shares_embedding(config), topology_of(config)
    tied = [[p] for p in parameters if shared and p.name == TOKEN_EMBEDDING]
    own = [p for p in parameters if not (shared and p.name == TOKEN_EMBEDDING)]
    units = [list(group) for _, group in itertools.groupby(own, key=lambda parameter: unit(parameter.name))]
    runs = _runs(config, [_elements(members, topology) for members in units])
    buckets = [[parameter for members in units[run.start : run.stop] for parameter in members] for run in runs]
    at_end = bool(tied) and parameters[0].name != TOKEN_EMBEDDING
    return [*buckets, *tied] if at_end else [*tied, *buckets]


def _elements(parameters: list[Parameter], topology: Topology) -> int:
    return sum(parameter.local_numel(topology) for parameter in parameters)


def _runs(config: RunConfig, numbers: list[int]) -> list[range]:
    """The units of a chunk, which have so many numbers, as buckets."""
    least, most = _bounds(config, sum(numbers))
    starts, filled, left = list[int](), 0, sum(numbers)
    for index, own in enumerate(numbers):
        if not starts or (filled + own > most and filled >= least and left >= least):
            starts.append(index)
            filled = 0
        filled, left = filled + own, left - own
    return [range(start, stop) for start, stop in itertools.pairwise([*starts, len(numbers)])]


class Packed(NamedTuple):
    """A bucket: the unit that it begins with, and its numbers with padding."""

    unit: str
    numbers: int


def packed(config: RunConfig, pp_rank: int, chunks: Iterable[int] | None = None) -> list[list[Packed]]:
    """List the buckets of each chunk of a pipeline rank, or of some `chunks`, as `chunk_buckets` and `pack` make
    them, found sooner, for layers are alike. One of a tied embedding at the network's end begins with the head.
    """
    topology, stages = topology_of(config), stages_of(config)
    block, known = layer(config.model, 0), dict[tuple[str, ...], int]()
    size = _elements(block, topology)

    def numbers_of(units: list[_Unit]) -> int:
        kinds = tuple(each.members[0].name for each in units)
        if kinds not in known:
            known[kinds] = pack([parameter for each in units for parameter in each.members], topology).size
        return known[kinds]

    found = []
    for chunk in range(config.parallel.vpp) if chunks is None else chunks:
        index = stages.index(pp_rank, chunk)
        begin, end, tied = _ends(config, first=index == 0, last=index == stages.count - 1)
        units = [*begin, *(_Unit(f"layers.{number}", block, size) for number in stages.layers(index)), *end]
        runs = _runs(config, [each.numbers for each in units])
        buckets = [Packed(units[run.start].name, numbers_of(units[run.start : run.stop])) for run in runs]
        alone = [Packed(each.name, numbers_of([each])) for each in tied]
        found.append([*buckets, *alone] if index else [*alone, *buckets])
    return found


class _Unit(NamedTuple):
    """A part of the network that stays in one bucket."""

    name: str
    members: list[Parameter]
    numbers: int


def _ends(config: RunConfig, *, first: bool, last: bool) -> tuple[list[_Unit], list[_Unit], list[_Unit]]:
    """The units of a stage before its layers, those behind them, and what is a bucket of its own."""
    topology, shares = topology_of(config), shares_embedding(config)
    own = stage(config.model, range(0), first, last)
    tied = [[each] for each in own if shares and each.name == TOKEN_EMBEDDING]
    rest = [each for each in own if not (shares and each.name == TOKEN_EMBEDDING)]
    parts = [(name, list(members)) for name, members in itertools.groupby(rest, key=lambda each: unit(each.name))]
    units = [_Unit(name, members, _elements(members, topology)) for name, members in parts]
    begin = [each for each in units if first and each.name == "embedding"]
    alone = [_Unit("embedding" if first else "head", members, _elements(members, topology)) for members in tied]
    return begin, units[len(begin) :], alone


def eight_bit_weights(config: RunConfig) -> dict[str, Parameter]:
    """The weights that FP8 GEMMs multiply, by name in the order of the network: those that FP8 may multiply, without
    the first and last few layers'.
    """
    return {p.name: p for index in eight_bit_layers(config) for p in layer(config.model, index) if p.fp8}


def eight_bit_layers(config: RunConfig) -> range:
    """The layers whose products are in 8 bits."""
    if config.train.precision != "fp8":
        return range(0)
    return range(config.fp8.bf16_first, config.model.num_layers - config.fp8.bf16_last)
