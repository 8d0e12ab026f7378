"""Llama: model_type llama (Llama 2 and 3, SmolLM) and mistral (Mistral, Mistral-Nemo), Llama with a sliding window."""

from __future__ import annotations

from typing import Any

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Family, Key, Same
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
LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
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


def _read_llama(config: ConfigKeys) -> ConfigKeys:
    biases = config.get("attention_bias", False), config.get("mlp_bias", False)
    if biases[0] != biases[1]:
        raise ValueError(f"mlp_bias is {biases[1]!r}, not {biases[0]!r}, as attention_bias")
    return read_rope(config) | read_head_dim(config) | {"bias": biases[0]}


def _write_llama(model: ModelConfig) -> ConfigKeys:
    return write_rope(model) | write_head_dim(model) | {"attention_bias": model.bias, "mlp_bias": model.bias}


def _read_mistral(config: ConfigKeys) -> ConfigKeys:
    return read_rope(config) | read_head_dim(config) | read_one_window(config, 4096)


def _write_mistral(model: ModelConfig) -> ConfigKeys:
    return write_rope(model) | write_head_dim(model) | write_one_window(model)


FAMILY = Family(
    "llama", "LlamaForCausalLM", LLAMA, KEYS, OUTER, "model.layers", LAYER,
    {"hidden_act": ("silu",)}, _read_llama, _write_llama, ROTARY_BUFFERS,
)  # fmt: skip
MISTRAL = Family(
    "mistral", "MistralForCausalLM", LLAMA | {"bias": False},
    KEYS | {"num_kv_heads": kv_heads(8)}, OUTER, "model.layers", LAYER,
    {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    _read_mistral, _write_mistral, ROTARY_BUFFERS,
)  # fmt: skip
