"""FLOPs of training, from the configuration and the description of a block (`layout.blocks`).

A multiplication and an addition are two FLOPs; only GEMMs and attention count, and a backward costs twice its forward.
Two conventions for attention are always named: `full` counts s x s scores for each head, as Megatron-LM and PaLM do;
`causal` the half that a causal mask leaves. In a window of w keys `full` counts w for each of the s queries, `causal`
w - w^2 / (2 s), for the first w see fewer. With h the width, l layers, V the vocabulary, f = 4 h and no grouped heads,
`full` is 72 l h^2 (1 + s/(6 h) + V/(12 l h)) a token (Narayanan et al. 2021). HFU counts recomputation, MFU does not.

A rank's kernels also compute padding of the vocabulary, keys that a window hides from some queries of a block, and in
the backward of fused attention its scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.blocks import Attention, Block, block, parts, unread, weights
from megascale.layout.chunks import stages_of
from megascale.layout.recompute import Recompute, recompute_of
from megascale.layout.tensors import padded_vocab
from megascale.layout.windows import scores


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token's forward and backward. `linear`: GEMMs with weights, the head's among them; `full_attention`,
    `causal_attention`: scores and their GEMM with the values.
    """

    linear: float
    full_attention: float
    causal_attention: float

    @property
    def full(self) -> float:
        """FLOPs with the whole attention matrix counted, or the whole window of each query."""
        return self.linear + self.full_attention

    @property
    def causal(self) -> float:
        """FLOPs with the scores counted that a causal mask leaves."""
        return self.linear + self.causal_attention

    def __add__(self, other: TokenFlops) -> TokenFlops:
        return TokenFlops(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))


def token_flops(model: ModelConfig) -> TokenFlops:
    """Count the FLOPs of training on one token of a sequence of `seq_length`."""
    total = TokenFlops(head_flops(model), 0.0, 0.0)
    for described in (block(model, layer) for layer in range(model.num_layers)):
        forward = forward_flops(model, described, weights(described))
        total += forward + forward + forward
    return total


def head_flops(model: ModelConfig) -> float:
    """Count the FLOPs of a token's projection to the vocabulary, a part of `TokenFlops.linear`."""
    return 6 * model.hidden_size * model.vocab_size


def hardware_flops(config: RunConfig) -> TokenFlops:
    """Count the FLOPs of training on one token with recomputation: in the layers that recompute, attention, or with
    `full` all of a forward but the GEMM whose result nothing needs.
    """
    layout, total = stages_of(config), token_flops(config.model)
    for stage in range(layout.count):
        recompute = recompute_of(config.train, stage // layout.pp)
        for layer in layout.layers(stage) if recompute.full or recompute.attention else ():
            described = block(config.model, layer)
            total += forward_flops(config.model, described, recomputed(described, recompute))
    return total


def forward_flops(model: ModelConfig, described: Block, elements: int) -> TokenFlops:
    """Count the FLOPs of one token in the forward of a block: GEMMs with weights of `elements`, scores, and their GEMM
    with the values.
    """
    full = causal = 0.0
    for part in parts(described, Attention):
        keys, a_key = part.window or model.seq_length, 2 * 2 * part.heads * part.width
        full, causal = full + a_key * keys, causal + a_key * (keys - keys * keys / (2 * model.seq_length))
    return TokenFlops(2 * elements, full, causal)


def recomputed(described: Block, recompute: Recompute) -> int:
    """Count the elements of a block's weights whose GEMMs the backward recomputes."""
    last = unread(described)
    return weights(described) - (last.elements if last else 0) if recompute.full else 0


def rank_flops(config: RunConfig, pp_rank: int) -> int:
    """Count the FLOPs of a step on a rank of pipeline stage `pp_rank`, of a resolved configuration."""
    m, tp = config.model, config.parallel.tp
    layout, total = stages_of(config), 0
    for chunk in range(layout.vpp):
        index, recompute = layout.index(pp_rank, chunk), recompute_of(config.train, chunk)
        total += sum(layer_flops(config, layer, recompute) for layer in layout.layers(index))
        if index == layout.count - 1:
            total += 6 * config.batch.micro * m.seq_length * m.hidden_size * padded_vocab(m, tp) // tp
    return config.micro_batches * total


def layer_flops(config: RunConfig, layer: int, recompute: Recompute) -> int:
    """Count the FLOPs of a micro-batch in a block on one rank, in a chunk that recomputes so. Attention forms scores
    and their GEMM with the values; its backward has four GEMMs, and fused one more for the scores.
    """
    m, described = config.model, block(config.model, layer)
    total = 2 * m.seq_length * (3 * weights(described) + recomputed(described, recompute))
    for part in parts(described, Attention):
        gemm = 2 * part.heads * part.width * scores(m.seq_length, None if m.dropout else part.window)
        total += gemm * (2 + (4 if m.dropout else 5) + (2 if recompute.full or recompute.attention else 0))
    return config.batch.micro * total // config.parallel.tp


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """Model FLOPs utilisation in [0, 1]. `peak_flops`: of all devices together, in FLOP/s."""
    return flops_per_token * tokens_per_s / peak_flops
