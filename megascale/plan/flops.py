"""FLOPs of training, from the configuration.

A multiplication and an addition are two FLOPs; only matrix products count. A backward costs twice its forward. Two
conventions for the attention matrix are always named: `full` counts s x s scores for each head, as Megatron-LM and PaLM
do; `causal` the half that a causal mask leaves. MFU divides the model's FLOPs by the time and the device's peak.

With h the width, l layers, V the vocabulary, f = 4 h and no grouped heads, `full` is 72 l h^2 (1 + s/(6 h) + V/(12 l
h)) a token: the formula of Narayanan et al. 2021, without recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config.model import ModelConfig


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token's forward and backward. `linear`: products with weights, the head's among them; `attention`:
    scores and their product with the values, for all s x s pairs.
    """

    linear: float
    attention: float

    @property
    def full(self) -> float:
        """The whole attention matrix counted."""
        return self.linear + self.attention

    @property
    def causal(self) -> float:
        """Half of the attention matrix counted."""
        return self.linear + self.attention / 2


def token_flops(model: ModelConfig) -> TokenFlops:
    """FLOPs of training on one token of a sequence of `seq_length`."""
    m, head = model, model.head_dim
    qkv = m.hidden_size * (m.num_heads + 2 * m.num_kv_heads) * head
    out = m.num_heads * head * m.hidden_size
    mlp = (3 if m.gated else 2) * m.hidden_size * m.ffn_size
    weights = m.num_layers * (qkv + out + mlp) + m.hidden_size * m.vocab_size
    scores_and_values = m.num_layers * 2 * m.seq_length * m.num_heads * head
    return TokenFlops(linear=6 * weights, attention=6 * scores_and_values)


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """Model FLOPs utilisation in [0, 1]. `peak_flops`: of all devices together, in FLOP/s."""
    return flops_per_token * tokens_per_s / peak_flops
