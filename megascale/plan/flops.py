"""FLOPs of training, from the configuration.

A multiplication and an addition are two FLOPs; only matrix products count. A backward costs twice its forward. Two
conventions for the attention matrix are always named: `full` counts s x s scores for each head, as Megatron-LM and PaLM
do; `causal` the half that a causal mask leaves. In a layer with a window of w keys `full` counts w for each of the s
queries, and `causal` w - w^2 / (2 s), for the first w see fewer; w = s gives the half. MFU divides the model's FLOPs by
the time and the device's peak; HFU counts what is computed again as well.

With h the width, l layers, V the vocabulary, f = 4 h and no grouped heads, `full` is 72 l h^2 (1 + s/(6 h) + V/(12 l
h)) a token: the formula of Narayanan et al. 2021, without recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.catalog.layers import BLOCKS
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.chunks import stages_of
from megascale.layout.recompute import recompute_of


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token's forward and backward. `linear`: products with weights, the head's among them; the others:
    scores and their product with the values.
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
        """What the causal mask leaves of it counted."""
        return self.linear + self.causal_attention

    def __add__(self, other: TokenFlops) -> TokenFlops:
        return TokenFlops(
            self.linear + other.linear,
            self.full_attention + other.full_attention,
            self.causal_attention + other.causal_attention,
        )


NONE = TokenFlops(0.0, 0.0, 0.0)


def token_flops(model: ModelConfig) -> TokenFlops:
    """FLOPs of training on one token of a sequence of `seq_length`."""
    m = model
    weights = m.num_layers * sum(_block_weights(m).values())
    forward = sum((_attention(m, layer) for layer in range(m.num_layers)), NONE)
    return TokenFlops(6 * weights + head_flops(m), 0.0, 0.0) + forward + forward + forward


def head_flops(model: ModelConfig) -> float:
    """The part of `TokenFlops.linear` that is the projection to the vocabulary: the same whatever the layers."""
    return 6 * model.hidden_size * model.vocab_size


def hardware_flops(config: RunConfig) -> TokenFlops:
    """FLOPs of training on one token with what is computed again: of the layers that recompute, the attention's
    products, or with `full` all of a forward but the product whose value is its result, which nothing needs.
    """
    m, train, layout = config.model, config.train, stages_of(config)
    last = ("out", "down") if BLOCKS[m.block].facts["norms"] == 1 else ("down",)
    weights = sum(numbers for name, numbers in _block_weights(m).items() if name not in last)
    total = token_flops(m)
    for stage in range(layout.count):
        recompute = recompute_of(train, stage // layout.pp)
        for layer in layout.layers(stage):
            if recompute.full:
                total += TokenFlops(2 * weights, 0.0, 0.0)
            if recompute.full or recompute.attention:
                total += _attention(m, layer)
    return total


def _block_weights(m: ModelConfig) -> dict[str, int]:
    """Numbers in the matrices of a block, by the product that they enter."""
    attended = m.num_heads * m.head_dim
    return {
        "qkv": m.hidden_size * (attended + 2 * m.num_kv_heads * m.head_dim),
        "out": attended * m.hidden_size,
        "up": (2 if m.gated else 1) * m.hidden_size * m.ffn_size,
        "down": m.ffn_size * m.hidden_size,
    }


def _attention(m: ModelConfig, layer: int) -> TokenFlops:
    """Of one token's scores and their product with the values, in the forward of one layer."""
    for_a_key, w = 2 * 2 * m.num_heads * m.head_dim, m.windows[layer] or m.seq_length
    return TokenFlops(0.0, for_a_key * w, for_a_key * (w - w * w / (2 * m.seq_length)))


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """Model FLOPs utilisation in [0, 1]. `peak_flops`: of all devices together, in FLOP/s."""
    return flops_per_token * tokens_per_s / peak_flops
