"""The model chunks of a pipeline rank: parameters (chunk_parameters), buckets (chunk_buckets, bucket_sizes) and FP8
weights (fp8_layers, fp8_weights).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.buckets import pack
from megascale.layout.parameters import layer_params, stage_params
from megascale.layout.stages import Stages, placement_of, split_layers
from megascale.layout.tensors import TOKEN_EMBEDDING, ParamSpec
from megascale.layout.topology import DATA_AXES, Topology, topology_of

AUTO_BUCKETS = 16
"""Target number of buckets of a model chunk with `bucket_bytes = "auto"`."""

MAX_BUCKET_BYTES = 32 << 20
"""Maximum bytes of gradients in an `auto` bucket of several modules, as far as MIN_SHARD_BYTES allows."""

MIN_SHARD_BYTES = 512 << 10
"""Minimum bytes of gradients in a data-parallel shard of an `auto` bucket."""


def stages_of(config: RunConfig) -> Stages:
    """The virtual pipeline stages of a run."""
    p = config.parallel
    layers_per_chunk = None if p.layers_per_chunk is None else tuple(p.layers_per_chunk)
    return split_layers(config.model.num_layers, placement_of(p.schedule, p.pp, p.vpp), layers_per_chunk)


def chunk_parameters(config: RunConfig, pp_rank: int) -> list[list[ParamSpec]]:
    """The parameters of the model chunks of a pipeline rank."""
    stages, chunks = stages_of(config), []
    for chunk in range(config.parallel.vpp):
        index = stages.index(pp_rank, chunk)
        layers, first, last = stages.layers(index), index == 0, index == stages.count - 1
        chunks.append(stage_params(config.model, layers, first, last))
    return chunks


def module_of(name: str) -> str:
    """The module of a parameter: 'embedding', 'layers.3' or 'head'."""
    first, second = name.split(".")[:2]
    return {"layers": f"layers.{second}", "embedding": "embedding"}.get(first, "head")


def chunk_buckets(config: RunConfig, pp_rank: int) -> list[list[list[ParamSpec]]]:
    """The parameters of every bucket of every chunk of a pipeline rank, in the order of the network.

    A bucket consists of complete modules. A chunk is a single bucket unless its gradients exceed
    `overlap.bucket_bytes`. A tied embedding that the first and the last stage share is a separate bucket: both stages
    shard it in the same way, and sum its gradient.
    """
    return [_split_into_buckets(config, chunk) for chunk in chunk_parameters(config, pp_rank)]


def shares_embedding(config: RunConfig) -> bool:
    """Return True if the first and the last pipeline stage share the token embedding."""
    return config.model.tie_embeddings and config.parallel.pp > 1


class _Bounds(NamedTuple):
    """Limits on the elements of a chunk's buckets: at least `min_numel`; in a bucket of several modules at most
    `max_numel`, unless a split would leave a bucket with fewer than `min_numel`.
    """

    min_numel: int
    max_numel: int


def _bounds(config: RunConfig, numel: int) -> _Bounds:
    """The limits on the buckets of a chunk of `numel` elements.

    `auto` balances two costs:

    - Exposed communication. The last bucket of a backward has no compute left to overlap with: with k equal buckets 1/k
      of the chunk's reduction is exposed, 6% for k = 16. In the first chunk the last bucket holds the token embedding,
      which is not split: a large embedding exposes more.
    - Latency. A reduce-scatter over d ranks is d - 1 messages of bucket / d bytes, and a message takes latency + bytes
      / bandwidth. At 10 us and 50 GB/s both terms are equal for 512 KiB; over slower networks latency matters less.

    A shard therefore has at least MIN_SHARD_BYTES. Buckets above MAX_BUCKET_BYTES would gain nothing. A single
    data-parallel rank communicates nothing.
    """
    element_bytes: int = PRECISIONS[config.train.precision].facts["accumulate_bytes"]
    if config.overlap.bucket_bytes != "auto":
        return _Bounds(0, config.overlap.bucket_bytes // element_bytes)
    shards = topology_of(config).size(*DATA_AXES)
    if shards == 1:
        return _Bounds(0, MAX_BUCKET_BYTES // element_bytes)
    min_numel = shards * MIN_SHARD_BYTES // element_bytes
    return _Bounds(min_numel, max(min_numel, min(MAX_BUCKET_BYTES // element_bytes, numel // AUTO_BUCKETS)))


def _split_into_buckets(config: RunConfig, parameters: list[ParamSpec]) -> list[list[ParamSpec]]:
    shared, topology = shares_embedding(config), topology_of(config)
    tied = [[p] for p in parameters if shared and p.name == TOKEN_EMBEDDING]
    untied = [p for p in parameters if not (shared and p.name == TOKEN_EMBEDDING)]
    modules = [list(group) for _, group in itertools.groupby(untied, key=lambda parameter: module_of(parameter.name))]
    ranges = _bucket_ranges(config, [_local_numel(params, topology) for params in modules])
    buckets = [[parameter for params in modules[r.start : r.stop] for parameter in params] for r in ranges]
    at_end = bool(tied) and parameters[0].name != TOKEN_EMBEDDING
    return [*buckets, *tied] if at_end else [*tied, *buckets]


def _local_numel(parameters: list[ParamSpec], topology: Topology) -> int:
    return sum(parameter.local_numel(topology) for parameter in parameters)


def _bucket_ranges(config: RunConfig, numels: list[int]) -> list[range]:
    """Group the modules of a chunk, which have `numels` elements, into buckets: ranges of module indices."""
    min_numel, max_numel = _bounds(config, sum(numels))
    starts, filled, remaining = list[int](), 0, sum(numels)
    for index, numel in enumerate(numels):
        if not starts or (filled + numel > max_numel and filled >= min_numel and remaining >= min_numel):
            starts.append(index)
            filled = 0
        filled, remaining = filled + numel, remaining - numel
    return [range(start, stop) for start, stop in itertools.pairwise([*starts, len(numels)])]


class BucketSize(NamedTuple):
    """A bucket's first module, and its number of elements with padding."""

    first_module: str
    numel: int


def bucket_sizes(config: RunConfig, pp_rank: int, chunks: Iterable[int] | None = None) -> list[list[BucketSize]]:
    """The sizes of the buckets of every chunk of a pipeline rank, or of the given `chunks`.

    The result equals the sizes of `pack` for `chunk_buckets`, computed faster, from a single layer. The bucket of a
    tied embedding on the last stage has "head" as its first module.
    """
    topology, stages = topology_of(config), stages_of(config)
    block, cache = layer_params(config.model, 0), dict[tuple[str, ...], int]()
    block_numel = _local_numel(block, topology)

    def padded_numel(modules: list[_Module]) -> int:
        key = tuple(module.params[0].name for module in modules)
        if key not in cache:
            cache[key] = pack([parameter for module in modules for parameter in module.params], topology).numel
        return cache[key]

    sizes = []
    for chunk in range(config.parallel.vpp) if chunks is None else chunks:
        index = stages.index(pp_rank, chunk)
        begin, end, tied = _edge_modules(config, first=index == 0, last=index == stages.count - 1)
        layers = [_Module(f"layers.{number}", block, block_numel) for number in stages.layers(index)]
        modules = [*begin, *layers, *end]
        ranges = _bucket_ranges(config, [module.numel for module in modules])
        buckets = [BucketSize(modules[r.start].name, padded_numel(modules[r.start : r.stop])) for r in ranges]
        tied_bucket = [BucketSize(module.name, padded_numel([module])) for module in tied]
        sizes.append([*buckets, *tied_bucket] if index else [*tied_bucket, *buckets])
    return sizes


class _Module(NamedTuple):
    """A module of the network, which is never split over buckets."""

    name: str
    params: list[ParamSpec]
    numel: int


def _edge_modules(config: RunConfig, *, first: bool, last: bool) -> tuple[list[_Module], list[_Module], list[_Module]]:
    """The modules of a stage before its layers, after its layers, and in a bucket of their own."""
    topology, shared = topology_of(config), shares_embedding(config)
    edge_params = stage_params(config.model, range(0), first, last)
    tied = [[p] for p in edge_params if shared and p.name == TOKEN_EMBEDDING]
    untied = [p for p in edge_params if not (shared and p.name == TOKEN_EMBEDDING)]
    groups = [(name, list(params)) for name, params in itertools.groupby(untied, key=lambda p: module_of(p.name))]
    modules = [_Module(name, params, _local_numel(params, topology)) for name, params in groups]
    begin = [module for module in modules if first and module.name == "embedding"]
    separate = [_Module("embedding" if first else "head", params, _local_numel(params, topology)) for params in tied]
    return begin, modules[len(begin) :], separate


def fp8_weights(config: RunConfig) -> dict[str, ParamSpec]:
    """The weights of FP8 GEMMs by name, in the order of the network: weights of `fp8_layers` with the `fp8` flag."""
    return {p.name: p for index in fp8_layers(config) for p in layer_params(config.model, index) if p.fp8}


def fp8_layers(config: RunConfig) -> range:
    """The layers with FP8 GEMMs: all but the first and last few, as `[fp8]` configures."""
    if config.train.precision != "fp8":
        return range(0)
    return range(config.fp8.bf16_first, config.model.num_layers - config.fp8.bf16_last)
