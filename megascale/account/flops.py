"""FLOPs of training, from the configuration and the description of a block (`layout.blocks`).

A multiply-add is two FLOPs; only GEMMs and attention count, and a backward costs twice the forward. Attention is
counted by two conventions: `full`, s x s scores per head, as in Megatron-LM and PaLM; `causal`, the half left by a
causal mask. With a window of w keys, a query has w scores in `full` and w - w^2 / (2 s) on average in `causal`.
For hidden size h, l layers, vocabulary V, f = 4 h and no grouped heads, `full` is 72 l h^2 (1 + s/(6 h) + V/(12 l h))
per token (Narayanan et al. 2021). HFU counts recomputation (`hardware_flops`), MFU does not (`token_flops`, `mfu`).
With a document mask only scores within documents count, in both conventions (`account.attended`).

`rank_flops` counts executed FLOPs: also the padded vocabulary, keys masked inside a block of a window's queries, and
the scores recomputed by the backward of fused attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.account.attended import Scores, expected_documents, expected_scores, scores_per_token
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.blocks import AttentionSpec, BlockSpec, block_spec, parts_of_type, skippable_rows, weight_numel
from megascale.layout.chunks import stages_of
from megascale.layout.document_lengths import count_document_scores
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.layout.tensors import padded_vocab


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of forward and backward per token. `linear`: GEMMs with weights, including the head; `full_attention`,
    `causal_attention`: the two GEMMs of attention, Q K^T and P V.
    """

    linear: float
    full_attention: float
    causal_attention: float

    @property
    def full(self) -> float:
        """FLOPs with the full attention matrix, or the full window of every query."""
        return self.linear + self.full_attention

    @property
    def causal(self) -> float:
        """FLOPs with the unmasked scores only."""
        return self.linear + self.causal_attention

    def __add__(self, other: TokenFlops) -> TokenFlops:
        return TokenFlops(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))


def token_flops(model: ModelConfig, scores: Scores | None = None) -> TokenFlops:
    """Count the model FLOPs of training per token. `scores`: per token, by default of sequences of `seq_length`."""
    total, scores = TokenFlops(head_flops(model), 0.0, 0.0), scores or scores_per_token(model)
    for described in (block_spec(model, layer) for layer in range(model.num_layers)):
        forward = forward_flops(described, weight_numel(described), scores)
        total += forward + forward + forward
    return total


def head_flops(model: ModelConfig) -> float:
    """Count the head's FLOPs per token, a part of `TokenFlops.linear`."""
    return 6 * model.hidden_size * model.vocab_size


def hardware_flops(config: RunConfig, scores: Scores | None = None) -> TokenFlops:
    """Count the FLOPs of training per token with activation recomputation: of attention, or with `full` of the block
    without its last GEMM, whose result has no use in backward. `scores`: per token, by default as the run expects them.
    """
    scores = scores or expected_scores(config)
    layout, total = stages_of(config), token_flops(config.model, scores)
    for stage in range(layout.count):
        recompute = recompute_policy(config.train, stage // layout.pp)
        for layer in layout.layers(stage) if recompute.full or recompute.attention else ():
            described = block_spec(config.model, layer)
            total += forward_flops(described, recomputed(described, recompute), scores)
    return total


def forward_flops(described: BlockSpec, elements: int, scores: Scores) -> TokenFlops:
    """Count the forward FLOPs of a block per token: GEMMs with `elements` of weights, and attention."""
    full = causal = 0.0
    for part in parts_of_type(described, AttentionSpec):
        flops_per_key = 2 * 2 * part.heads * part.head_dim
        full += flops_per_key * scores[part.window][0]
        causal += flops_per_key * scores[part.window][1]
    return TokenFlops(2 * elements, full, causal)


def recomputed(described: BlockSpec, recompute: RecomputePolicy) -> int:
    """Count the elements of a block's weights with recomputed GEMMs."""
    last = skippable_rows(described)
    return weight_numel(described) - (last.weight_numel if last else 0) if recompute.full else 0


def rank_flops(config: RunConfig, pp_rank: int) -> int:
    """Count the FLOPs executed in a step by a rank of pipeline stage `pp_rank`, for a resolved configuration."""
    m, tp = config.model, config.parallel.tp
    layout, total = stages_of(config), 0
    for chunk in range(layout.vpp):
        index, recompute = layout.index(pp_rank, chunk), recompute_policy(config.train, chunk)
        total += sum(layer_flops(config, layer, recompute) for layer in layout.layers(index))
        if index == layout.count - 1:
            total += 6 * config.batch.micro * m.seq_length * m.hidden_size * padded_vocab(m, tp) // tp
    return config.num_microbatches * total


def layer_flops(config: RunConfig, layer: int, recompute: RecomputePolicy) -> int:
    """Count the FLOPs executed by one rank in a block, per micro-batch. Attention has two GEMMs in forward and four in
    backward, or five if fused, for the scores are recomputed.
    """
    m, described, lengths = config.model, block_spec(config.model, layer), expected_documents(config)
    total = 2 * m.seq_length * (3 * weight_numel(described) + recomputed(described, recompute))
    for part in parts_of_type(described, AttentionSpec):
        gemm = (
            2
            * part.heads
            * part.head_dim
            * (m.seq_length**2 if m.dropout else count_document_scores(lengths, part.block_window(m.seq_length)))
        )
        total += gemm * (2 + (4 if m.dropout else 5) + (2 if recompute.full or recompute.attention else 0))
    return config.batch.micro * total // config.parallel.tp


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """Model FLOPs utilization in [0, 1]. `peak_flops`: FLOP/s of all devices together."""
    return flops_per_token * tokens_per_s / peak_flops
