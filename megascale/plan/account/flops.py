"""FLOPs of training, from the configuration and the description of a block (`layout.blocks`).

A multiply-add is two FLOPs; only GEMMs and attention count, and a backward costs twice the forward, once for frozen
weights, of which every layer computes the gradient of its input. Attention is counted by two conventions: `full`, s x s
scores per head, as in PaLM, torchtitan, and Megatron-LM before core 0.12; `causal`, the half left by a causal mask, as
in Megatron-LM since. With a window of w keys, a query has w scores in `full` and w - w^2 / (2 s) on average in
`causal`; a sparse pattern counts by its density (`SparsePattern.count_scores`). For hidden size h, l layers, vocabulary
V, f = 4 h and no grouped heads, `full` is 72 l h^2 (1 + s/(6 h) + V/(12 l h)) per token (Narayanan et al. 2021). HFU
counts recomputation (`hardware_flops`), MFU does not (`token_flops`, `mfu`). With a document mask only scores within
documents count, in both conventions (`account.attended`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.blocks import BlockSpec, block_spec, is_skippable, tile_mlp
from megascale.layout.chunks import stages_of
from megascale.layout.freezing import mark_frozen, matches
from megascale.layout.parameters import layer_params
from megascale.layout.parts.part import Scores, TokenFlops
from megascale.layout.recompute_policy import NO_RECOMPUTE, RecomputePolicy, recompute_policy
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, exit_name
from megascale.layout.topology import Topology
from megascale.layout.windows import score_windows
from megascale.plan.account.attended import expected_scores, scores_per_token

if TYPE_CHECKING:
    from megascale.layout.hybrid.sequence_work import SequenceWork


def token_flops(
    model: ModelConfig, scores: Scores | None = None, shares: Mapping[int, float] | None = None,
    freeze: Sequence[str] = (),
) -> TokenFlops:  # fmt: skip
    """Count the model FLOPs of training per token. `scores`: per token, by default of sequences of `seq_length`;
    `shares`: by layer, of the tokens that it computes, by default all; `freeze`: patterns of weights without wgrad.
    """
    total, scores = TokenFlops(head_flops(model, freeze)), scores or scores_per_token(model)
    active = model.experts_per_token / model.experts if model.experts else 1.0
    for layer in range(model.total_layers):
        forward = sum((part.flops(scores) for part in block_spec(model, layer)), TokenFlops(0))
        params = mark_frozen(layer_params(model, layer), freeze) if freeze else ()
        frozen = (param for param in params if param.frozen and param.kind == "matrix")
        stay = sum(param.local_numel(Topology()) * (active if "ep" in param.sharding else 1) for param in frozen)
        total += (forward * 3 + TokenFlops(-2 * stay)) * (shares[layer] if shares else 1)
    return total


def model_flops(config: RunConfig, scores: Scores | None = None) -> TokenFlops:
    """Count the model FLOPs of a run's training per token, as `token_flops` without what micro-batches skip."""
    shares = stages_of(config.model, config.parallel).computed_shares(config.num_microbatches)
    return token_flops(config.model, scores, shares, config.train.freeze)


def sequence_flops(model: ModelConfig) -> SequenceWork:
    """Count the FLOPs of training on a sequence, by its length: per token, and of causal attention per square token, in
    layers with scores and without a window; sparse ones have the share of their stride.
    """
    from megascale.layout.hybrid.sequence_work import SequenceWork

    reaches, sparse = score_windows(model), model.sparse_pattern
    layers = len(reaches) / sparse.stride if sparse else reaches.count(None)
    quadratic = 3 * model.num_heads * (model.qk_head_dim + model.value_head_dim) * layers
    return SequenceWork(token_flops(model).linear, float(quadratic))


def head_flops(model: ModelConfig, freeze: Sequence[str] = ()) -> float:
    """Count the FLOPs per token of the heads, a part of `TokenFlops.linear`: for the next token, for those further
    ahead, and of early exits.
    """
    heads = [TOKEN_EMBEDDING if model.tie_embeddings else HEAD] * (1 + model.mtp_layers)
    heads += [f"{exit_name(after)}.{HEAD}" for after in model.exits]
    return 2 * model.hidden_size * model.vocab_size * sum(2 if matches(name, freeze) else 3 for name in heads)


def hardware_flops(config: RunConfig, scores: Scores | None = None) -> TokenFlops:
    """Count the FLOPs of training per token with activation recomputation: of attention, or with `full` of the block
    without its last GEMM, whose result has no use in backward; of an MLP in tiles without its last GEMM; and of the
    forwards of chunks that are recomputed.
    `scores`: per token, by default as the run expects them.
    """
    scores = scores or expected_scores(config.model, config.data)
    layout = stages_of(config.model, config.parallel)
    shares, total = layout.computed_shares(config.num_microbatches), model_flops(config, scores)
    for stage in range(layout.count):
        for layer in layout.layers(stage):
            recompute = recompute_policy(config.train, layer)
            if recompute == NO_RECOMPUTE:
                continue
            described = block_spec(config.model, layer)
            cores = described if recompute.full or recompute.attention else ()
            again = TokenFlops(2 * recomputed_weights(described, recompute))
            total += sum((part.flops(scores) for part in cores if part.attends), again) * shares[layer]
    return total + token_flops(config.model, scores) * (config.dropped_share / 3)  # a forward is a third of all


def recomputed_weights(block: BlockSpec, recompute: RecomputePolicy) -> int:
    """Count the elements of a block's weights with recomputed GEMMs."""
    parts = tile_mlp(block, recompute.mlp_tiles, recompute.stored_tiles)
    return sum(part.recomputed_weights(recompute.full, is_skippable(block, part)) for part in parts)


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """Model FLOPs utilization in [0, 1]. `peak_flops`: FLOP/s of all devices together."""
    return flops_per_token * tokens_per_s / peak_flops
