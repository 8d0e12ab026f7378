"""OLMo 2: norms after attention and MLP, none before, and norms of all of q and of k."""

from __future__ import annotations

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Family, Key
from megascale.convert.families.llama import KEYS, LAYER, LLAMA, OUTER, ROTARY_BUFFERS, read_head_dim
from megascale.convert.families.rotary_keys import read_rope, write_rope

OLMO2_LAYER = LAYER | {
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
del OLMO2_LAYER["input_layernorm"]


def _read(config: ConfigKeys) -> ConfigKeys:
    return read_rope(config) | read_head_dim(config | {"head_dim": None})


def _write(model: ModelConfig) -> ConfigKeys:
    return write_rope(model)


FAMILY = Family(
    "olmo2", "Olmo2ForCausalLM", LLAMA | {"block": "post_norm", "bias": False, "qk_norm": "full"},
    KEYS | {"norm_eps": Key("rms_norm_eps", 1e-5)}, OUTER, "model.layers", OLMO2_LAYER,
    {"hidden_act": ("silu",), "attention_bias": (False,)}, _read, _write, ROTARY_BUFFERS,
)  # fmt: skip
