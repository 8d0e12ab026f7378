"""The model chunks of a pipeline rank: buckets of parameters (chunk_buckets, bucket_sizes) and FP8 weights (fp8_layers,
fp8_weights).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megascale.catalog.recipes import QuantizerSpec
from megascale.config.backends import Fp8Config, bf16_layers
from megascale.config.model import ModelConfig
from megascale.config.parallel import OverlapConfig, ParallelConfig
from megascale.config.train import TrainConfig
from megascale.layout.blocks import distinct_blocks
from megascale.layout.buckets import BucketLayout, pack, split_by_reduction
from megascale.layout.freezing import mark_frozen
from megascale.layout.parameters import exit_params, layer_params, pipeline_vocabulary, stage_params
from megascale.layout.stages import Place, Stages, placement_of, split_layers
from megascale.layout.tensors import TOKEN_EMBEDDING, ParamSpec, exit_name
from megascale.layout.topology import DATA_AXES, Topology, inner_axes, topology_of

AUTO_BUCKETS = 16  # target number of buckets of a model chunk with `bucket_bytes = "auto"`

MAX_BUCKET_BYTES = 32 << 20
"""Maximum bytes of gradients in an `auto` bucket of several modules, as far as MIN_SHARD_BYTES allows."""

MIN_SHARD_BYTES = 512 << 10  # minimum bytes of gradients in a data-parallel shard of an `auto` bucket


def stages_of(model: ModelConfig, parallel: ParallelConfig) -> Stages:
    """The virtual pipeline stages of a run. The last has the layers of multi-token prediction."""
    p = parallel
    layers_per_chunk = None if p.layers_per_chunk is None else tuple(p.layers_per_chunk)
    placement = placement_of(p.schedule, p.pp, p.vpp, p.vocab_pp, p.skip_ratio)
    stages = split_layers(model.num_layers, placement, layers_per_chunk)
    return replace(stages, starts=(*stages.starts[:-1], model.total_layers)) if model.mtp_layers else stages


def exits_of(model: ModelConfig, stages: Stages, stage: int) -> list[int]:
    """The early exits of a virtual stage, by the number of layers before them."""
    return [after for after in model.exits if after - 1 in stages.layers(stage)]


def count_heads(model: ModelConfig, stages: Stages, stage: int) -> int:
    """Count the losses of a virtual stage: of early exits, and on the last of the next token and of those beyond, but
    none in vocabulary parallelism.
    """
    ends = stage == stages.count - 1 and not stages.placement.barriers
    return len(exits_of(model, stages, stage)) + (1 + model.mtp_layers if ends else 0)


def token_ranks(model: ModelConfig, parallel: ParallelConfig) -> set[int]:
    """The pipeline ranks that need tokens or labels: those of the first and the last stage, and of early exits; all in
    vocabulary parallelism.
    """
    if parallel.vocab_pp:
        return set(range(parallel.pp))
    stages = stages_of(model, parallel)
    places = stages.placement.places
    exits = (place for stage, place in enumerate(places) if exits_of(model, stages, stage))
    return {rank for rank, _ in (places[0], places[-1], *exits)}


def module_of(name: str) -> str:
    """The module of a parameter: 'embedding', 'layers.3', 'exits.4' or 'head'."""
    first, second = name.split(".")[:2]
    return f"{first}.{second}" if first in ("layers", "exits") else "embedding" if first == "embedding" else "head"


def chunk_buckets(
    model: ModelConfig, parallel: ParallelConfig, overlap: OverlapConfig, train: TrainConfig, pp_rank: int
) -> list[list[list[ParamSpec]]]:
    """The parameters of every bucket of every chunk of a pipeline rank, in the order of the network.

    A bucket consists of complete modules, as far as their gradients are reduced over the same ranks. A chunk is a
    single bucket unless its gradients exceed `overlap.bucket_bytes`, or are reduced over different ranks. A tied
    embedding that the first and the last stage share is a separate bucket: both stages shard it in the same way, and
    sum its gradient; stages of one rank have one bucket (`embedding_chunks`).
    """
    module, limits = partial(_module, topology_of(parallel), train.freeze), partial(_bounds, parallel, overlap, train)

    def layer(number: int) -> _Module:
        return module(f"layers.{number}", layer_params(model, number))

    chunks = _modules_of_buckets(model, parallel, pp_rank, held_chunks(parallel), module, layer, limits)
    return [[bucket for modules in chunk for bucket in _params_of_buckets(modules)] for chunk in chunks]


def shares_embedding(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Return True if the first and the last pipeline stage, on two ranks, share the token embedding."""
    return len({rank for rank, _ in _embedding_places(model, parallel)}) > 1


def embedding_chunks(model: ModelConfig, parallel: ParallelConfig, pp_rank: int) -> list[int]:
    """The chunks of a pipeline rank that use the token embedding, one parameter in a bucket of the first of them."""
    return [chunk for rank, chunk in _embedding_places(model, parallel) if rank == pp_rank]


def _embedding_places(model: ModelConfig, parallel: ParallelConfig) -> Iterable[Place]:
    """The places of stages with the token embedding: none in vocabulary parallelism, where all have rows of it."""
    places = stages_of(model, parallel).placement.places
    return () if parallel.vocab_pp else dict.fromkeys([places[0], *(places[-1:] if model.embeds_last else [])])


def held_chunks(parallel: ParallelConfig) -> range:
    """The model chunks of a pipeline rank, with that of the vocabulary, the last, if stages share it."""
    return range(parallel.vpp + bool(parallel.vocab_pp))


def _bounds(parallel: ParallelConfig, overlap: OverlapConfig, train: TrainConfig, numel: int) -> tuple[int, int]:
    """The limits on the elements of a bucket, in a chunk of `numel` elements: the least, and in a bucket of several
    modules the most, unless a split would leave a bucket with fewer than the least.

    `auto` balances two costs:

    - Exposed communication. The last bucket of a backward has no compute left to overlap with: with k equal buckets 1/k
      of the chunk's reduction is exposed, 6% for k = 16. In the first chunk the last bucket holds the token embedding,
      which is not split: a large embedding exposes more.
    - Latency. A reduce-scatter over d ranks is d - 1 messages of bucket / d bytes, and a message takes latency + bytes
      / bandwidth. At 10 us and 50 GB/s both terms are equal for 512 KiB; over slower networks latency matters less.

    A shard therefore has at least MIN_SHARD_BYTES. Buckets above MAX_BUCKET_BYTES would gain nothing. A single
    data-parallel rank communicates nothing. With zero = 3 every module has its own: memory holds two whole buckets.
    """
    _, element_bytes = train.element_bytes
    if parallel.zero == 3:
        return 0, 0
    if overlap.bucket_bytes != "auto":
        return 0, overlap.bucket_bytes // element_bytes
    shards = topology_of(parallel).size(*inner_axes(DATA_AXES))
    if shards == 1:
        return 0, MAX_BUCKET_BYTES // element_bytes
    min_numel = shards * MIN_SHARD_BYTES // element_bytes
    return min_numel, max(min_numel, min(MAX_BUCKET_BYTES // element_bytes, numel // AUTO_BUCKETS))


def _split(modules: list[_Module], min_numel: int, max_numel: int) -> list[list[_Module]]:
    """Group the modules of a chunk into buckets."""
    buckets, filled, remaining = list[list[_Module]](), 0, sum(module.numel for module in modules)
    for module in modules:
        numel = module.numel
        if not buckets or (filled + numel > max_numel and filled >= min_numel and remaining >= min_numel):
            buckets.append([])
            filled = 0
        buckets[-1].append(module)
        filled, remaining = filled + numel, remaining - numel
    return buckets


class BucketSize(NamedTuple):
    """A bucket's first module, and of its layout the elements with padding, `reduce_axes`, `fp8_numel`, the parameters
    that have the vocabulary's rows, and all modules. `frozen`: without gradients and optimizer state.
    """

    first_module: str
    numel: int
    reduce_axes: tuple[str, ...] = DATA_AXES
    fp8_numel: int = 0
    tables: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    frozen: bool = False

    @classmethod
    def of(cls, layout: BucketLayout) -> BucketSize:
        """Size a bucket of a layout."""
        kinds = {slot.parameter.name: slot.parameter.kind for slot in layout.slots}
        tables = frozenset(name for name, kind in kinds.items() if kind in ("embedding", "head"))
        size = cls("", layout.numel, layout.reduce_axes, layout.fp8_numel, tables, frozen=layout.frozen)
        return size.with_modules(map(module_of, kinds))

    def with_modules(self, modules: Iterable[str]) -> BucketSize:
        """Return the size of an equal bucket of other modules, in order."""
        first, *others = modules
        return self._replace(first_module=first, modules=frozenset([first, *others]))

    def coded(self, layers: range, weight: QuantizerSpec) -> int:
        """Count the first elements that are gathered as FP8 codes: weights of a bucket of FP8 `layers` alone, where the
        codes of a `weight` serve forward and dgrad, of experts in rows or parts of them.
        """
        experts = self.reduce_axes != DATA_AXES
        serves = weight.gathers_codes and not (experts and weight.block.rows is None)
        numbers = (module.partition(".") for module in self.modules if serves)
        within = all(kind == "layers" and int(number) in layers for kind, _, number in numbers)
        return self.fp8_numel if serves and within else 0

    def shard(self, topology: Topology) -> int:
        """Count the elements of a shard over the inner ranks of those whose gradients are summed."""
        return self.numel // topology.size(*inner_axes(self.reduce_axes))


def bucket_sizes(
    model: ModelConfig, parallel: ParallelConfig, overlap: OverlapConfig, train: TrainConfig, pp_rank: int,
    chunks: Iterable[int] | None = None,
) -> list[list[BucketSize]]:  # fmt: skip
    """The sizes of the buckets of every chunk of a pipeline rank, or of the given `chunks`.

    The result equals the sizes of `pack` for `chunk_buckets`, computed faster, from a single layer of each kind. The
    bucket of a tied embedding on the last stage has "head" as its first module.
    """
    topology, kinds = topology_of(parallel), distinct_blocks(model, tuple(train.freeze))[1]
    module = partial(_module, topology, train.freeze)
    layers, known = dict[int, _Module](), dict[tuple[str, ...], list[BucketSize]]()
    for number, kind in enumerate(kinds):
        if kind not in layers:
            layers[kind] = module(f"layers.{number}", layer_params(model, number))

    def sizes(modules: list[_Module]) -> list[BucketSize]:
        key = tuple(module.params[0].name for module in modules)
        if key not in known:
            known[key] = [BucketSize.of(pack(bucket, topology)) for bucket in _params_of_buckets(modules)]
        return [size.with_modules(_modules_in(size, modules)) for size in known[key]]

    def layer(number: int) -> _Module:
        return layers[kinds[number]]._replace(name=f"layers.{number}")

    held, limits = held_chunks(parallel) if chunks is None else chunks, partial(_bounds, parallel, overlap, train)
    found = _modules_of_buckets(model, parallel, pp_rank, held, module, layer, limits)
    return [[size for modules in chunk for size in sizes(modules)] for chunk in found]


def stage_elements(
    chunks: Iterable[Iterable[BucketSize]], topology: Topology, *, trained: bool
) -> tuple[int, int, int]:
    """Count the elements of chunks' buckets, all or `trained`, of their shards, and of the shards of their state."""
    buckets = [bucket for bucket in itertools.chain(*chunks) if not (trained and bucket.frozen)]
    shard = sum(bucket.shard(topology) for bucket in buckets)
    state = shard // topology.dp_replicate if topology.state_over_all else shard
    return sum(bucket.numel for bucket in buckets), shard, state


class _Module(NamedTuple):
    """A module of the network, which is never split over buckets of equal reductions."""

    name: str
    params: list[ParamSpec]
    numel: int


def _module(topology: Topology, freeze: Sequence[str], name: str, params: list[ParamSpec]) -> _Module:
    numel = sum(parameter.local_numel(topology) for parameter in params)
    return _Module(name, mark_frozen(params, freeze), numel)


def _modules_in(bucket: BucketSize, modules: Iterable[_Module]) -> Iterator[str]:
    """The names of those modules that have parameters in a bucket."""
    kind = bucket.frozen, bucket.reduce_axes
    return (each.name for each in modules if any((param.frozen, param.reduce_axes) == kind for param in each.params))


def _params_of_buckets(modules: list[_Module]) -> list[list[ParamSpec]]:
    """The parameters of the buckets of modules: of one bucket for all parameters with equal reductions."""
    return split_by_reduction(itertools.chain(*(module.params for module in modules)))


def _modules_of_buckets(
    model: ModelConfig, parallel: ParallelConfig, pp_rank: int, chunks: Iterable[int],
    module: Callable[[str, list[ParamSpec]], _Module], layer: Callable[[int], _Module],
    limits: Callable[[int], tuple[int, int]],
) -> Iterator[list[list[_Module]]]:  # fmt: skip
    """Yield the modules of each bucket of each of the chunks of a pipeline rank, in the order of the network. `limits`:
    the `_bounds` for a chunk's number of elements.
    """
    stages, copied = stages_of(model, parallel), shares_embedding(model, parallel)
    shared, shards = model.embeds_last and stages.count > 1, pipeline_vocabulary(model) if parallel.vocab_pp else []
    split = {parameter.name for parameter in shards}
    for chunk in chunks:
        if chunk == stages.vpp:  # of the vocabulary: a single bucket
            yield [[module("embedding", shards)]]
            continue
        index = stages.index(pp_rank, chunk)
        edges = stage_params(model, range(0), index == 0, index == stages.count - 1)
        edges = [parameter for parameter in edges if parameter.name not in split]
        tied = [p for p in edges if shared and p.name == TOKEN_EMBEDDING]
        groups = itertools.groupby((p for p in edges if p not in tied), key=lambda p: module_of(p.name))
        ends = [module(name, list(params)) for name, params in groups]
        begin = [each for each in ends if each.name == "embedding"]
        numbers = stages.layers(index)
        trunk, deeper = range(numbers.start, min(numbers.stop, model.num_layers)), range(model.num_layers, numbers.stop)
        exits = {n: [module(exit_name(n + 1), params)] for n in trunk if (params := exit_params(model, n + 1))}
        inner = [each for n in trunk for each in (layer(n), *exits.get(n, ()))]
        modules = [*begin, *inner, *ends[len(begin) :], *map(layer, deeper)]
        buckets = _split(modules, *limits(sum(each.numel for each in modules)))
        end = "head" if index else "embedding"
        separate = [[module(end, tied)]] if tied and (copied or not index) else []
        yield [*buckets, *separate] if index else [*separate, *buckets]


def fp8_weights(model: ModelConfig, layers: range) -> dict[str, ParamSpec]:
    """The weights of FP8 GEMMs by name, in the order of the network: weights of `layers` with the `fp8` flag."""
    return {p.name: p for index in layers for p in layer_params(model, index) if p.fp8}


def fp8_layers(model: ModelConfig, train: TrainConfig, fp8: Fp8Config) -> range:
    """The layers with FP8 GEMMs: all but the first and last few, as `[fp8]` configures. Those of multi-token prediction
    have them if the last layer has.
    """
    first, last = bf16_layers(fp8, model.num_layers)
    end = model.num_layers - last if last else model.total_layers
    return range(first, end) if train.quantizes else range(0)
