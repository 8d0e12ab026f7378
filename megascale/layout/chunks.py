"""What a pipeline rank holds: the parameters of its model chunks, and how they form buckets."""

from __future__ import annotations

import itertools

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.stages import Stages, split
from megascale.layout.tensors import TOKEN_EMBEDDING, Parameter, layer, stage


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
        found.append(stage(config.model, config.parallel.tp, layers, first, last))
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
    shared = config.model.tie_embeddings and config.parallel.pp > 1
    number_bytes = PRECISIONS[config.train.precision].facts["accumulate_bytes"]
    most = config.overlap.bucket_bytes // number_bytes
    return [_cut(chunk, config.parallel.tp, most, shared) for chunk in chunk_parameters(config, pp_rank)]


def _cut(parameters: list[Parameter], tp: int, most: int, shared: bool) -> list[list[Parameter]]:
    """Buckets of whole units with at most `most` numbers on a rank, or of one unit if that has more."""
    tied = [[p] for p in parameters if shared and p.name == TOKEN_EMBEDDING]
    own = [p for p in parameters if not (shared and p.name == TOKEN_EMBEDDING)]
    buckets: list[list[Parameter]] = []
    room = 0
    for _, group in itertools.groupby(own, key=lambda parameter: unit(parameter.name)):
        members = list(group)
        numbers = sum(parameter.local_numel(tp) for parameter in members)
        if not buckets or numbers > room:
            buckets.append([])
            room = most
        buckets[-1] += members
        room -= numbers
    at_end = bool(tied) and parameters[0].name != TOKEN_EMBEDDING
    return [*buckets, *tied] if at_end else [*tied, *buckets]


def eight_bit_weights(config: RunConfig) -> dict[str, Parameter]:
    """The weights that multiply in 8 bits, by name in the order of the network: matrices of blocks, without the first
    and last few.
    """
    return {p.name: p for index in eight_bit_layers(config) for p in layer(config.model, index) if p.decays}


def eight_bit_layers(config: RunConfig) -> range:
    """The layers whose products are in 8 bits."""
    if config.train.precision != "fp8":
        return range(0)
    return range(config.fp8.bf16_first, config.model.num_layers - config.fp8.bf16_last)
