"""DeepSeek: model_type deepseek_v2 (DeepSeek-V2, V2-Lite); deepseek_v3 (V3, R1); kimi_k2 (Kimi-K2), whose modules are
V3's. Latent attention, shared experts; the best groups of experts, by their largest score (V2) or the sum of two (V3).

Files have the rotated outputs of a head as pairs of neighbours; here they are halves, and rows change places.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Fused, Key, Layer, Same, require
from megascale.convert.families.llama import LLAMA, SIZES, kv_heads
from megascale.convert.families.mixtures import GLM4_MOE, read_groups, read_shared, routed_keys, write_shared
from megascale.convert.families.rotary_keys import read_rope, write_rope

QUERIES = Fused(("attention.q", "attention.q_rope"), per_head=True, paired=("attention.q_rope",))

DEEPSEEK_LAYER: Layer = {
    **{theirs: ours for theirs, ours in GLM4_MOE.layer.items() if "self_attn" not in theirs},
    "self_attn.q_proj": QUERIES,
    "self_attn.q_a_proj": "attention.q_latent",
    "self_attn.q_a_layernorm": "attention.q_latent_norm",
    "self_attn.q_b_proj": replace(QUERIES, beside="attention.q_latent"),
    "self_attn.kv_a_proj_with_mqa": Fused(("attention.kv_latent", "attention.k_rope"), paired=("attention.k_rope",)),
    "self_attn.kv_a_layernorm": "attention.kv_latent_norm",
    "self_attn.kv_b_proj": Fused(("attention.k", "attention.v"), per_head=True),
    "self_attn.o_proj": "attention.out",
}

COMMON_KEYS = {
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "kv_lora_rank": Key("kv_lora_rank", 512, size=True),
    "q_lora_rank": Key("q_lora_rank", 1536, size=True, null=0),
    "head_dim": Key("qk_nope_head_dim", 128, size=True),
    "rope_head_dim": Key("qk_rope_head_dim", 64, size=True),
    "value_head_dim": Key("v_head_dim", 128, size=True),
}
FIXED = LLAMA | {"bias": False, "latent_norm_eps": 1e-6}  # of latents, whatever rms_norm_eps is
REQUIRED = {"hidden_act": ("silu",), "attention_bias": (False,), "moe_layer_freq": (1,)}


def _check_heads(config: ConfigKeys) -> ConfigKeys:
    """Check that key-value heads are as many as heads. Raises: ValueError"""
    require(config, "num_key_value_heads", config["num_attention_heads"], None)
    return {}


def _write(model: ModelConfig) -> ConfigKeys:
    return {"q_lora_rank": model.q_lora_rank or None} | write_shared(model)


GREEDY, BEST_GROUPS = "greedy", "group_limited_greedy"


def _read_groups(config: ConfigKeys) -> ConfigKeys:
    """The groups of DeepSeek-V2, if its method has them. Raises: ValueError for another method"""
    require(config, "topk_method", GREEDY, BEST_GROUPS)
    if config.get("topk_method", GREEDY) == GREEDY:
        return {}
    return {"router_groups": config["n_group"], "router_top_groups": config["topk_group"]}


V2 = replace(
    GLM4_MOE, name="deepseek_v2", architecture="DeepseekV2ForCausalLM", fixed=FIXED | {"router_normalize": False},
    keys=SIZES | COMMON_KEYS | {
        "num_kv_heads": kv_heads(Same("num_attention_heads")),
        "experts": Key("n_routed_experts", 64, size=True, also="num_experts"),
        "experts_per_token": Key("num_experts_per_tok", size=True),
        "expert_ffn_size": Key("moe_intermediate_size", 1407, size=True),
        "dense_layers": Key("first_k_dense_replace", 0),
        "router_scale": Key("routed_scaling_factor", 1.0, size=True),
    },
    layer=DEEPSEEK_LAYER,
    required=REQUIRED | {"mlp_bias": (False,), "norm_topk_prob": (False,), "scoring_func": ("softmax",)},
    read=(read_rope, _check_heads, partial(read_shared, shared=2, width=1407), _read_groups),
    write=(write_rope, _write, lambda model: {
        "topk_method": BEST_GROUPS if model.router_groups > 1 else GREEDY, "n_group": model.router_groups,
        "topk_group": model.router_top_groups}),
    balance_bias="",
)  # fmt: skip

V3 = replace(
    GLM4_MOE, name="deepseek_v3", architecture="DeepseekV3ForCausalLM",
    fixed=FIXED | {"router_score": "sigmoid", "balance_bias": True},
    keys=SIZES | COMMON_KEYS | {
        "num_kv_heads": kv_heads(128),
        "seq_length": Key("max_position_embeddings", 4096, size=True),
    } | routed_keys(256, 2048, dense=3, scale=2.5, groups=8, top_groups=4),
    layer=DEEPSEEK_LAYER,
    required=REQUIRED | {"rope_interleave": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    read=(read_rope, _check_heads, partial(read_shared, shared=1, width=2048), partial(read_groups, default=8)),
    write=(write_rope, _write),
)  # fmt: skip

KIMI_K2 = replace(V3, name="kimi_k2")
