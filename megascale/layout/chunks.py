"""What a pipeline rank holds: the parameters of its model chunks, and how they form buckets."""

from __future__ import annotations

from megascale.config.run import RunConfig
from megascale.layout.stages import Stages, split
from megascale.layout.tensors import TOKEN_EMBEDDING, Parameter, stage


def stages_of(config: RunConfig) -> Stages:
    """The virtual stages of a run."""
    p = config.parallel
    return split(config.model.num_layers, p.pp, p.vpp, p.layers_per_chunk)


def chunk_parameters(config: RunConfig, pp_rank: int) -> list[list[Parameter]]:
    """The parameters of each model chunk of a pipeline rank."""
    stages, found = stages_of(config), []
    for chunk in range(config.parallel.vpp):
        index = stages.index(pp_rank, chunk)
        layers, first, last = stages.layers(index), index == 0, index == stages.count - 1
        found.append(stage(config.model, config.parallel.tp, layers, first, last))
    return found


def chunk_buckets(config: RunConfig, pp_rank: int) -> list[list[list[Parameter]]]:
    """For each chunk of a pipeline rank the parameters of its buckets: one, or two where it shares the token embedding
    with the other end of the pipeline. That is then a bucket of its own, so that both ends shard it alike and sum its
    gradient.
    """
    shared = config.model.tie_embeddings and config.parallel.pp > 1
    found = []
    for parameters in chunk_parameters(config, pp_rank):
        tied = [p for p in parameters if shared and p.name == TOKEN_EMBEDDING]
        own = [p for p in parameters if p not in tied]
        found.append([part for part in (own, tied) if part])
    return found
