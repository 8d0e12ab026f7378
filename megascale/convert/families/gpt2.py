"""GPT-2: LayerNorm, learned positions, biases; linear layers stored [in, out], q, k and v side by side."""

from __future__ import annotations

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Family, Fused, Key

GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}
"""Activation in config.json -> `model.activation`."""

KEYS = {
    "num_layers": Key("n_layer", size=True),
    "hidden_size": Key("n_embd", size=True),
    "num_heads": Key("n_head", size=True),
    "vocab_size": Key("vocab_size", size=True),
    "seq_length": Key("n_positions", size=True),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "tie_embeddings": Key("tie_word_embeddings", True),
    "init_std": Key("initializer_range", 0.02),
}
LAYER: dict[str, str | Fused] = {
    "ln_1": "attention_norm",
    "attn.c_attn": Fused(("attention.q", "attention.k", "attention.v"), transposed=True),
    "attn.c_proj": Fused(("attention.out",), transposed=True),
    "ln_2": "mlp_norm",
    "mlp.c_fc": Fused(("mlp.up",), transposed=True),
    "mlp.c_proj": Fused(("mlp.down",), transposed=True),
}
OUTER = {
    "embedding.token.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}


def hf_gelu(activation: str) -> str:
    """The activation in config.json; for an activation that is no GELU the first GELU."""
    return next((theirs for theirs, ours in GELUS.items() if ours == activation), "gelu_new")


def _read(config: ConfigKeys) -> ConfigKeys:
    if config["n_embd"] % config["n_head"]:
        raise ValueError(f"n_embd is {config['n_embd']!r}, not a multiple of n_head = {config['n_head']!r}")
    inner = config.get("n_inner")
    if inner is not None and inner <= 0:
        raise ValueError(f"n_inner is {inner!r}, not above 0")
    return {
        "num_kv_heads": config["n_head"],
        "ffn_size": inner or 4 * config["n_embd"],
        "activation": GELUS[config.get("activation_function", "gelu_new")],
    }


def _write(model: ModelConfig) -> ConfigKeys:
    inner = None if model.ffn_size == 4 * model.hidden_size else model.ffn_size
    return {"n_inner": inner, "n_ctx": model.seq_length, "activation_function": hf_gelu(model.activation)}


FAMILY = Family(
    "gpt2", "GPT2LMHeadModel",
    {"block": "serial", "norm": "layernorm", "position": "learned", "bias": True},
    KEYS, OUTER, "transformer.h", LAYER,
    {"activation_function": tuple(GELUS), "scale_attn_weights": (True,),
     "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    (_read,), (_write,), (".attn.bias", ".attn.masked_bias"),
)  # fmt: skip
