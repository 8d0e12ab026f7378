"""FLOPs of training, from the configuration and the description of a block (`layout.blocks`).

A multiplication and an addition are two FLOPs; only GEMMs and attention count, and a backward costs twice its forward.
Two conventions for the attention matrix are always named: `full` counts s x s scores for each head, as Megatron-LM and
PaLM do; `causal` the half that a causal mask leaves. In a layer with a window of w keys `full` counts w for each of the
s queries, and `causal` w - w^2 / (2 s), for the first w see fewer. MFU divides the model's FLOPs by the time and the
device's peak; HFU counts recomputation as well. With h the width, l layers, V the vocabulary, f = 4 h and no grouped
heads, `full` is 72 l h^2 (1 + s/(6 h) + V/(12 l h)) a token (Narayanan et al. 2021), without recomputation.

A rank's kernels do other FLOPs than the model has: of its part, with the padding of the vocabulary and keys that a
window hides from some queries of a block; and fused attention forms its scores once more in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.blocks import Attention, Block, block, parts, unread, weights
from megascale.layout.chunks import stages_of
from megascale.layout.recompute import NOTHING, Recompute, recompute_of
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
        """The whole attention matrix counted, or the whole window of each query."""
        return self.linear + self.full_attention

    @property
    def causal(self) -> float:
        """FLOPs with the scores counted that a causal mask leaves."""
        return self.linear + self.causal_attention

    def __add__(self, other: TokenFlops) -> TokenFlops:
        attention = self.full_attention + other.full_attention, self.causal_attention + other.causal_attention
        return TokenFlops(self.linear + other.linear, *attention)


NONE = TokenFlops(0.0, 0.0, 0.0)


def token_flops(model: ModelConfig) -> TokenFlops:
    """Count the FLOPs of training on one token of a sequence of `seq_length`."""
    total = TokenFlops(head_flops(model), 0.0, 0.0)
    for layer in range(model.num_layers):
        forward = forward_attention(model, layer) + TokenFlops(2 * weights(block(model, layer)), 0.0, 0.0)
        total += forward + forward + forward
    return total


def head_flops(model: ModelConfig) -> float:
    """Count the part of `TokenFlops.linear` that is the projection to the vocabulary, which layers do not change."""
    return 6 * model.hidden_size * model.vocab_size


def hardware_flops(config: RunConfig) -> TokenFlops:
    """Count the FLOPs of training on one token with recomputation: in the layers that recompute, attention, or with
    `full` all of a forward but the GEMM whose result nothing needs.
    """
    layout, total = stages_of(config), token_flops(config.model)
    for stage in range(layout.count):
        recompute = recompute_of(config.train, stage // layout.pp)
        for layer in layout.layers(stage):
            if recompute.full:
                total += TokenFlops(2 * _recomputed(block(config.model, layer)), 0.0, 0.0)
            if recompute.full or recompute.attention:
                total += forward_attention(config.model, layer)
    return total


def layer_flops(config: RunConfig, layer: int, recompute: Recompute = NOTHING) -> int:
    """Count a micro-batch's FLOPs of a block on one rank, in a chunk that recomputes so."""
    m, described = config.model, block(config.model, layer)
    elements = 3 * weights(described) + (_recomputed(described) if recompute.full else 0)
    found = 2 * m.seq_length * elements
    for part in parts(described, Attention):
        gemm = 2 * part.heads * part.width * scores(m.seq_length, None if m.dropout else part.window)
        found += gemm * (2 + (4 if m.dropout else 5) + (2 if recompute.full or recompute.attention else 0))
    return config.batch.micro * found // config.parallel.tp


def loss_flops(config: RunConfig) -> int:
    """Count a micro-batch's FLOPs of the head on one rank."""
    m, tp = config.model, config.parallel.tp
    return 6 * config.batch.micro * m.seq_length * m.hidden_size * padded_vocab(m, tp) // tp


def rank_flops(config: RunConfig, pp_rank: int) -> int:
    """Count the FLOPs of a step on a rank of pipeline stage `pp_rank`, of a resolved configuration."""
    layout, total = stages_of(config), 0
    for chunk in range(layout.vpp):
        index, recompute = layout.index(pp_rank, chunk), recompute_of(config.train, chunk)
        total += sum(layer_flops(config, layer, recompute) for layer in layout.layers(index))
        total += loss_flops(config) if index == layout.count - 1 else 0
    return config.micro_batches * total


def forward_attention(model: ModelConfig, layer: int) -> TokenFlops:
    """Count one token's scores and their GEMM with the values, in the forward of one layer."""
    total = NONE
    for part in parts(block(model, layer), Attention):
        keys, each = part.window or model.seq_length, 2 * 2 * part.heads * part.width
        total += TokenFlops(0.0, each * keys, each * (keys - keys * keys / (2 * model.seq_length)))
    return total


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """Model FLOPs utilisation in [0, 1]. `peak_flops`: of all devices together, in FLOP/s."""
    return flops_per_token * tokens_per_s / peak_flops


def _recomputed(described: Block) -> int:
    """Count the elements of the weights whose GEMM full recomputation forms again."""
    last = unread(described)
    return weights(described) - (last.elements if last else 0)
