"""GPT-NeoX and Pythia: attention and MLP in parallel, each after a LayerNorm; q, k and v alternate head by head."""

from __future__ import annotations

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Family, Fused, Key
from megascale.convert.families.gpt2 import GELUS, hf_gelu
from megascale.convert.families.llama import SIZES
from megascale.convert.families.rotary_keys import read_rope, write_rope

BLOCKS = {True: "parallel_two_norms", False: "serial"}  # `use_parallel_residual` -> `model.block`

KEYS = SIZES | {"norm_eps": Key("layer_norm_eps", 1e-5)}
OUTER = {
    "embedding.token.weight": "gpt_neox.embed_in.weight",
    "final_norm.weight": "gpt_neox.final_layer_norm.weight",
    "final_norm.bias": "gpt_neox.final_layer_norm.bias",
    "head.weight": "embed_out.weight",
}
LAYER: dict[str, str | Fused] = {
    "input_layernorm": "attention_norm",
    "attention.query_key_value": Fused(("attention.q", "attention.k", "attention.v"), per_head=True),
    "attention.dense": "attention.out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


def _read(config: ConfigKeys) -> ConfigKeys:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise ValueError(f"hidden_size is {hidden!r}, not a multiple of num_attention_heads = {heads!r}")
    # transformers rotates by head_dim, and splits heads without
    if config.get("head_dim", hidden // heads) != hidden // heads:
        raise ValueError(f"head_dim is {config['head_dim']!r}, not hidden_size / num_attention_heads")
    rope = read_rope(config, theta_key="rotary_emb_base", fraction=("rotary_pct", 0.25))
    return rope | {
        "num_kv_heads": heads,
        "activation": GELUS[config.get("hidden_act", "gelu")],
        "block": BLOCKS[config.get("use_parallel_residual", True)],
    }


def _write(model: ModelConfig) -> ConfigKeys:
    rope = write_rope(model)
    return {
        "rotary_emb_base": rope["rope_theta"],
        "rope_scaling": rope["rope_scaling"],
        "rotary_pct": model.rotary_fraction,
        "hidden_act": hf_gelu(model.activation),
        "use_parallel_residual": model.block != "serial",
    }


FAMILY = Family(
    "gpt_neox", "GPTNeoXForCausalLM", {"norm": "layernorm", "position": "rope", "bias": True},
    KEYS, OUTER, "gpt_neox.layers", LAYER,
    {"hidden_act": tuple(dict.fromkeys(("gelu", *GELUS))), "attention_bias": (True,)},
    (_read,), (_write,), (".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
)  # fmt: skip
