"""FLOPs of training, from the configuration.

A multiplication and an addition are two FLOPs; only matrix products count. A backward costs twice its forward. Two
conventions for the attention matrix are always named: `full` counts s x s scores for each head, as Megatron-LM and PaLM
do; `causal` the half that a causal mask leaves. In a layer with a window of w keys `full` counts w for each of the s
queries, and `causal` w - w^2 / (2 s), for the first w see fewer; w = s gives the half. MFU divides the model's FLOPs by
the time and the device's peak; HFU counts what is computed again as well.

With h the width, l layers, V the vocabulary, f = 4 h and no grouped heads, `full` is 72 l h^2 (1 + s/(6 h) + V/(12 l
h)) a token: the formula of Narayanan et al. 2021, without recomputation.

What a rank's kernels do differs from a model's FLOPs: it has its stage, its share of the heads and of the matrices, the
padding of the vocabulary, keys that a window hides from some queries of a block, and what is computed again. And fused
attention forms its scores once more in the backward: five products instead of four.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.catalog.layers import BLOCKS
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.chunks import stages_of
from megascale.layout.recompute import NOTHING, Recompute, recompute_of
from megascale.layout.tensors import padded_vocab
from megascale.layout.windows import spans


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
    weights = m.num_layers * sum(block_weights(m).values())
    forward = sum((forward_attention(m, layer) for layer in range(m.num_layers)), NONE)
    return TokenFlops(6 * weights + head_flops(m), 0.0, 0.0) + forward + forward + forward


def head_flops(model: ModelConfig) -> float:
    """The part of `TokenFlops.linear` that is the projection to the vocabulary: the same whatever the layers."""
    return 6 * model.hidden_size * model.vocab_size


def hardware_flops(config: RunConfig) -> TokenFlops:
    """FLOPs of training on one token with what is computed again: of the layers that recompute, the attention's
    products, or with `full` all of a forward but the product whose value is its result, which nothing needs.
    """
    m, train, layout = config.model, config.train, stages_of(config)
    weights = sum(numbers for name, numbers in block_weights(m).items() if name not in _last(m))
    total = token_flops(m)
    for stage in range(layout.count):
        recompute = recompute_of(train, stage // layout.pp)
        for layer in layout.layers(stage):
            if recompute.full:
                total += TokenFlops(2 * weights, 0.0, 0.0)
            if recompute.full or recompute.attention:
                total += forward_attention(m, layer)
    return total


@dataclass(frozen=True)
class PassFlops:
    """FLOPs of the forward and the backward of a micro-batch on one rank, with what it computes again."""

    forward: int = 0
    backward: int = 0


def layer_flops(config: RunConfig, layer: int, recompute: Recompute = NOTHING) -> PassFlops:
    """Of a block's products on one rank, the whole attention matrix counted, in a chunk that recomputes so."""
    m, tp = config.model, config.parallel.tp
    tokens, weights = config.batch.micro * m.seq_length, block_weights(m)
    linear = 2 * tokens * sum(weights.values()) // tp
    product = 2 * config.batch.micro * m.num_heads // tp * m.head_dim * scores(m, layer)
    again = 2 * product if recompute.full or recompute.attention else 0
    if recompute.full:
        again += linear - 2 * tokens * sum(weights[name] for name in _last(m)) // tp
    return PassFlops(linear + 2 * product, 2 * linear + (4 if m.dropout else 5) * product + again)


def loss_flops(config: RunConfig) -> PassFlops:
    """Of the head's products on one rank: its forward forms the gradients as well."""
    m, tp = config.model, config.parallel.tp
    return PassFlops(6 * config.batch.micro * m.seq_length * m.hidden_size * padded_vocab(m, tp) // tp)


def rank_flops(config: RunConfig, pp_rank: int) -> int:
    """Of a step's products on a rank of pipeline stage `pp_rank`, of a resolved configuration."""
    layout, parts = stages_of(config), list[PassFlops]()
    for chunk in range(layout.vpp):
        index, recompute = layout.index(pp_rank, chunk), recompute_of(config.train, chunk)
        parts += [layer_flops(config, layer, recompute) for layer in layout.layers(index)]
        parts += [loss_flops(config)] if index == layout.count - 1 else []
    return config.micro_batches * sum(part.forward + part.backward for part in parts)


def _last(m: ModelConfig) -> tuple[str, ...]:
    """The products whose value is a block's result."""
    return ("out", "down") if BLOCKS[m.block].facts["norms"] == 1 else ("down",)


def scores(m: ModelConfig, layer: int) -> int:
    """Scores that a head of a layer forms of a sequence. With dropout all of them, whatever the window."""
    s, window = m.seq_length, m.windows[layer]
    if m.dropout or window is None:
        return s * s
    return sum((queries.stop - queries.start) * (keys.stop - keys.start) for queries, keys in spans(s, window))


def block_weights(m: ModelConfig) -> dict[str, int]:
    """Numbers in the matrices of a block, by the product that they enter."""
    attended = m.num_heads * m.head_dim
    return {
        "qkv": m.hidden_size * (attended + 2 * m.num_kv_heads * m.head_dim),
        "out": attended * m.hidden_size,
        "up": (2 if m.gated else 1) * m.hidden_size * m.ffn_size,
        "down": m.ffn_size * m.hidden_size,
    }


def forward_attention(m: ModelConfig, layer: int) -> TokenFlops:
    """Of one token's scores and their product with the values, in the forward of one layer."""
    for_a_key, w = 2 * 2 * m.num_heads * m.head_dim, m.windows[layer] or m.seq_length
    return TokenFlops(0.0, for_a_key * w, for_a_key * (w - w * w / (2 * m.seq_length)))


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """Model FLOPs utilisation in [0, 1]. `peak_flops`: of all devices together, in FLOP/s."""
    return flops_per_token * tokens_per_s / peak_flops
