"""Llama and its variants: model_type llama (Llama 2 and 3, SmolLM); mistral (Mistral, Mistral-Nemo), with a sliding
window; phi3, with q, k and v in one tensor, gate and up in another, and one window or none; olmo2, with norms after
attention and MLP, none before, and norms of all of q and of k.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Family, Fused, Key, Layer, Same
from megascale.convert.families.rotary_keys import read_rope, write_rope
from megascale.convert.families.window_keys import read_one_window, write_one_window


def kv_heads(missing: Any) -> Key:
    """`num_key_value_heads`; null stands for as many as heads. `missing`: the family's default of a missing key."""
    return Key("num_key_value_heads", missing, size=True, null=Same("num_attention_heads"))


LLAMA = {"block": "serial", "norm": "rmsnorm", "position": "rope", "activation": "swiglu"}
SIZES = {
    "num_layers": Key("num_hidden_layers", size=True),
    "hidden_size": Key("hidden_size", size=True),
    "num_heads": Key("num_attention_heads", size=True),
    "ffn_size": Key("intermediate_size", size=True),
    "vocab_size": Key("vocab_size", size=True),
    "seq_length": Key("max_position_embeddings", 2048, size=True),
    "tie_embeddings": Key("tie_word_embeddings", False),
    "init_std": Key("initializer_range", 0.02),
}
"""Keys of all families but GPT-2."""

KEYS = SIZES | {"num_kv_heads": kv_heads(Same("num_attention_heads")), "norm_eps": Key("rms_norm_eps", 1e-6)}
OUTER = {
    "embedding.token.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
LAYER: Layer = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
ROTARY_BUFFERS = (".rotary_emb.inv_freq",)


def read_head_dim(config: ConfigKeys, default: int | None = None) -> ConfigKeys:
    """The key `head_dim` of `[model]`, if it is not hidden_size / num_heads.

    Raises: ValueError if the heads do not divide hidden_size and no head_dim is given
    """
    hidden, heads, given = config["hidden_size"], config["num_attention_heads"], config.get("head_dim") or default
    if given is None and hidden % heads:
        raise ValueError(f"hidden_size is {hidden!r}, not a multiple of num_attention_heads = {heads!r}")
    return {} if given is None or given * heads == hidden else {"head_dim": given}


def write_head_dim(model: ModelConfig) -> ConfigKeys:
    """The key `head_dim` of a config.json."""
    return {"head_dim": model.head_dim}


def check_heads(config: ConfigKeys) -> ConfigKeys:
    """Check, for a family without head_dim, that the heads divide hidden_size. Raises: ValueError"""
    return read_head_dim(config | {"head_dim": None})


def _read_biases(config: ConfigKeys) -> ConfigKeys:
    biases = config.get("attention_bias", False), config.get("mlp_bias", False)
    if biases[0] != biases[1]:
        raise ValueError(f"mlp_bias is {biases[1]!r}, not {biases[0]!r}, as attention_bias")
    return {"bias": biases[0]}


FAMILY = Family(
    "llama", "LlamaForCausalLM", LLAMA, KEYS, OUTER, "model.layers", LAYER, {"hidden_act": ("silu",)},
    (_read_biases, read_rope, read_head_dim),
    (write_rope, write_head_dim, lambda model: {"attention_bias": model.bias, "mlp_bias": model.bias}), ROTARY_BUFFERS,
)  # fmt: skip

MISTRAL = Family(
    "mistral", "MistralForCausalLM", LLAMA | {"bias": False},
    KEYS | {"num_kv_heads": kv_heads(8)}, OUTER, "model.layers", LAYER,
    {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    (read_rope, read_head_dim, partial(read_one_window, default=4096)), (write_rope, write_head_dim, write_one_window),
    ROTARY_BUFFERS,
)  # fmt: skip

PHI3_KEYS = KEYS | {
    "seq_length": Key("max_position_embeddings", 4096, size=True),
    "norm_eps": Key("rms_norm_eps", 1e-5),
}
PHI3_LAYER: Layer = {
    "input_layernorm": "attention_norm",
    "self_attn.qkv_proj": Fused(("attention.q", "attention.k", "attention.v")),
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_up_proj": Fused(("mlp.gate", "mlp.up")),
    "mlp.down_proj": "mlp.down",
}


def _read_phi3_rope(config: ConfigKeys) -> ConfigKeys:
    rope = read_rope(config, fraction=("partial_rotary_factor", 1.0))
    if "rope_scaling" in rope:
        raise ValueError(f"rope_type is {rope['rope_scaling']['type']!r}, not default")
    return rope


PHI3 = Family(
    "phi3", "Phi3ForCausalLM", LLAMA | {"bias": False},
    PHI3_KEYS, OUTER, "model.layers", PHI3_LAYER, {"hidden_act": ("silu",)},
    (_read_phi3_rope, check_heads, partial(read_one_window, default=None)),
    (write_rope, write_one_window, lambda model: {
        "partial_rotary_factor": model.rotary_fraction, "original_max_position_embeddings": model.seq_length}),
    ROTARY_BUFFERS,
)  # fmt: skip

OLMO2_LAYER = {theirs: ours for theirs, ours in LAYER.items() if theirs != "input_layernorm"} | {
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}

OLMO2 = Family(
    "olmo2", "Olmo2ForCausalLM", LLAMA | {"block": "post_norm", "bias": False, "qk_norm": "full"},
    KEYS | {"norm_eps": Key("rms_norm_eps", 1e-5)}, OUTER, "model.layers", OLMO2_LAYER,
    {"hidden_act": ("silu",), "attention_bias": (False,)}, (read_rope, check_heads), (write_rope,), ROTARY_BUFFERS,
)  # fmt: skip
