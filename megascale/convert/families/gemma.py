"""Gemma: model_type gemma2 and gemma3_text. Norms with gain 1 + w before and after each branch, GeGLU, embeddings times
sqrt(hidden_size), alternating windows; soft caps (2), norms of q and k, and a rotary base for layers with a window (3).
"""

from __future__ import annotations

import math
from functools import partial

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Family, Key
from megascale.convert.families.llama import KEYS, LAYER, OUTER, ROTARY_BUFFERS, read_head_dim, write_head_dim
from megascale.convert.families.rotary_keys import read_rope, read_scaling, write_rope
from megascale.convert.families.window_keys import FULL, SLIDING, read_windows, write_layer_types

GEMMA = {"block": "sandwich", "norm": "rmsnorm_1p", "position": "rope", "activation": "geglu", "bias": False}
GEMMA_KEYS = KEYS | {
    "num_kv_heads": Key("num_key_value_heads", 4, size=True),
    "seq_length": Key("max_position_embeddings", 8192, size=True),
    "tie_embeddings": Key("tie_word_embeddings", True),
}
GEMMA_LAYER = LAYER | {
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
GEMMA3_KEYS = GEMMA_KEYS | {"seq_length": Key("max_position_embeddings", 131_072, size=True)}
HEAD_DIM = 256  # the head_dim, and query_pre_attn_scalar, of a config.json without the key

REQUIRED = {
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attention_bias": (False,),
    "use_bidirectional_attention": (None, False),
}
CAPS = {"logit_softcap": ("final_logit_softcapping", 30.0), "attention_softcap": ("attn_logit_softcapping", 50.0)}
"""Key of `[model]` -> key of config.json, and its default; null stands for none."""


def _read_attention(config: ConfigKeys, pattern: int) -> ConfigKeys:
    """Head size, scale of scores, windows (on all layers but each `pattern`th) and scaled embeddings."""
    layers, scalar = config["num_hidden_layers"], config.get("query_pre_attn_scalar", HEAD_DIM)
    head = config.get("head_dim") or HEAD_DIM
    types = [SLIDING if (index + 1) % pattern else FULL for index in range(layers)]
    keys = read_head_dim(config, HEAD_DIM) | read_windows(config, types, 4096)
    scale = {} if scalar == head else {"softmax_scale": scalar**-0.5}
    return keys | scale | {"embedding_scale": math.sqrt(config["hidden_size"])}


def _write_attention(model: ModelConfig) -> ConfigKeys:
    scalar = model.attention_scale**-2
    whole = round(scalar)
    scalar = whole if whole > 0 and whole**-0.5 == model.attention_scale else scalar
    return write_head_dim(model) | write_layer_types(model) | {"query_pre_attn_scalar": scalar}


def _read_gemma3(config: ConfigKeys) -> ConfigKeys:
    nested = config.get("rope_parameters") or {}
    full, sliding = nested.get(FULL) or {}, nested.get(SLIDING) or {}
    if set(sliding) - {"rope_theta", "rope_type", "type"} or sliding.get("rope_type", "default") != "default":
        raise ValueError(f"the rope_parameters of {SLIDING} are scaled: {sliding!r}")
    full = full | (config.get("rope_scaling") or {})
    keys = _read_attention(config, config.get("sliding_window_pattern") or 6) | read_scaling(config, full)
    local = float(sliding.get("rope_theta") or config.get("rope_local_base_freq") or 1e4)
    keys |= {"local_rope_theta": local} if "window" in keys else {}
    return keys | {"rope_theta": float(full.get("rope_theta") or config.get("rope_theta") or 1e6)}


GEMMA2 = Family(
    "gemma2", "Gemma2ForCausalLM", GEMMA, GEMMA_KEYS, OUTER, "model.layers", GEMMA_LAYER, REQUIRED,
    (read_rope, partial(_read_attention, pattern=2),
     lambda config: {key: cap for key, given in CAPS.items() if (cap := config.get(*given)) is not None}),
    (write_rope, _write_attention, lambda model: {theirs: getattr(model, key) for key, (theirs, _) in CAPS.items()}),
    ROTARY_BUFFERS,
)  # fmt: skip
GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", GEMMA | {"qk_norm": "head"}, GEMMA3_KEYS, OUTER, "model.layers", GEMMA_LAYER,
    REQUIRED | {"final_logit_softcapping": (None,), "attn_logit_softcapping": (None,)},
    (_read_gemma3,), (write_rope, _write_attention, lambda model: (
        {"rope_local_base_freq": model.local_rope_theta} if model.local_rope_theta is not None else {}
    )), ROTARY_BUFFERS,
)  # fmt: skip
