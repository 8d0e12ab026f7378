"""Mixtures of experts: model_type mixtral; qwen2_moe, with a shared expert (Qwen1.5-MoE, Qwen2); qwen3_moe, with a norm
of each head of q and k; olmoe, with norms of all of q and of k; glm4_moe (GLM-4.5), with scores by sigmoid and biases.
"""

from __future__ import annotations

from functools import partial

from megascale.config.model import ModelConfig
from megascale.convert.families import prediction_layers
from megascale.convert.families.family import ConfigKeys, Family, Key, Same
from megascale.convert.families.llama import (
    KEYS,
    LAYER,
    LLAMA,
    OUTER,
    ROTARY_BUFFERS,
    check_heads,
    kv_heads,
    read_head_dim,
    write_head_dim,
)
from megascale.convert.families.qwen import QWEN_KEYS, write_windows
from megascale.convert.families.rotary_keys import read_rope, write_rope
from megascale.convert.families.window_keys import FULL, SLIDING, read_one_window, read_windows, write_one_window

MIXTRAL_LAYER = {theirs: ours for theirs, ours in LAYER.items() if "mlp." not in theirs} | {
    "block_sparse_moe.gate": "router"
}
MIXTRAL_EXPERTS = {
    "experts.gate_up": ("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3"),
    "experts.down": ("block_sparse_moe.experts.*.w2",),
}
EXPERTS = {
    "experts.gate_up": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
    "experts.down": ("mlp.experts.*.down_proj",),
}
ROUTER = {"mlp.gate": "router"}


def _expert_keys(experts: int, chosen: int) -> dict[str, Key]:
    """The keys of a router whose weights add up to 1 by `norm_topk_prob`, with the family's defaults."""
    return {
        "experts": Key("num_experts", experts, size=True, also="num_local_experts"),
        "experts_per_token": Key("num_experts_per_tok", chosen, size=True),
        "router_normalize": Key("norm_topk_prob", False),
    }


def write_expert_size(model: ModelConfig) -> ConfigKeys:
    """The key of the inner width of a family without dense layers."""
    return {"intermediate_size": model.expert_ffn_size}


def _read_dense_layers(config: ConfigKeys) -> ConfigKeys:
    """The key `dense_layers` of `[model]`. Raises: ValueError if other than the first layers have no experts"""
    listed = config.get("mlp_only_layers") or []
    if sorted(listed) != list(range(len(listed))):
        raise ValueError(f"mlp_only_layers is {listed!r}, not the first layers")
    return {"dense_layers": len(listed)}


def _write_dense_layers(model: ModelConfig) -> ConfigKeys:
    return {"mlp_only_layers": list(range(model.dense_layers))}


def _write_window(model: ModelConfig) -> ConfigKeys:
    keys = write_one_window(model)
    return keys | {"use_sliding_window": keys["sliding_window"] is not None}


def _read_alternating_windows(config: ConfigKeys) -> ConfigKeys:
    """Every second layer before `max_window_layers` has the window, if `use_sliding_window` is true."""
    used, last = config.get("use_sliding_window", False), config.get("max_window_layers", 28)
    layers = range(config["num_hidden_layers"])
    types = [SLIDING if used and index % 2 == 0 and index < last else FULL for index in layers]
    return read_windows(config if used else config | {"sliding_window": None}, types, 4096)


def _read_glm(config: ConfigKeys) -> ConfigKeys:
    shared, width = config.get("n_shared_experts", 1), config.get("moe_intermediate_size", 1408)
    return read_rope(config, fraction=("partial_rotary_factor", 0.5)) | {
        "qk_norm": "head" if config.get("use_qk_norm", False) else "none",
        "shared_ffn_size": shared * width,
        "router_group_value": "top2" if config.get("n_group", 1) > 1 else "max",
    }


MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", LLAMA | {"bias": False},
    KEYS | {
        "num_kv_heads": kv_heads(8),
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "seq_length": Key("max_position_embeddings", 131_072, size=True),
        "experts": Key("num_local_experts", 8, size=True, also="num_experts"),
        "experts_per_token": Key("num_experts_per_tok", 2, size=True),
    },
    OUTER, "model.layers", MIXTRAL_LAYER, {"hidden_act": ("silu",)},
    (partial(read_rope, theta=1_000_000.0), read_head_dim, partial(read_one_window, default=None)),
    (write_rope, write_head_dim, write_one_window, write_expert_size), ROTARY_BUFFERS, MIXTRAL_EXPERTS,
)  # fmt: skip

QWEN2_MOE = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM", LLAMA | {"bias": False, "shared_gate": True},
    QWEN_KEYS | _expert_keys(60, 4) | {
        "num_kv_heads": kv_heads(16),
        "qkv_bias": Key("qkv_bias", True),
        "expert_ffn_size": Key("moe_intermediate_size", 1408, size=True),
        "shared_ffn_size": Key("shared_expert_intermediate_size", 5632, size=True),
    },
    OUTER, "model.layers",
    LAYER | ROUTER | {
        "mlp.shared_expert.gate_proj": "shared.gate",
        "mlp.shared_expert.up_proj": "shared.up",
        "mlp.shared_expert.down_proj": "shared.down",
        "mlp.shared_expert_gate": "shared_gate",
    },
    {"hidden_act": ("silu",), "decoder_sparse_step": (1,)},
    (read_rope, check_heads, _read_alternating_windows, _read_dense_layers),
    (write_rope, write_windows, _write_dense_layers), ROTARY_BUFFERS, EXPERTS,
)  # fmt: skip

QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", LLAMA | {"bias": False, "qk_norm": "head"},
    QWEN_KEYS | _expert_keys(128, 8) | {
        "num_kv_heads": kv_heads(4), "expert_ffn_size": Key("moe_intermediate_size", 768, size=True)
    },
    OUTER, "model.layers", LAYER | ROUTER,
    {"hidden_act": ("silu",), "attention_bias": (False,), "decoder_sparse_step": (1,)},
    (read_rope, read_head_dim, _read_dense_layers,
     lambda config: read_one_window(config, 4096) if config.get("use_sliding_window", False) else {}),
    (write_rope, write_head_dim, _write_window, _write_dense_layers), ROTARY_BUFFERS, EXPERTS,
)  # fmt: skip

OLMOE = Family(
    "olmoe", "OlmoeForCausalLM", LLAMA | {"bias": False, "qk_norm": "full"},
    KEYS | _expert_keys(64, 8) | {
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "seq_length": Key("max_position_embeddings", 4096, size=True),
        "num_kv_heads": kv_heads(Same("num_attention_heads")),
    },
    OUTER, "model.layers", LAYER | ROUTER,
    {"hidden_act": ("silu",), "attention_bias": (False,), "clip_qkv": (None,)},
    (read_rope, check_heads), (write_rope, write_expert_size), ROTARY_BUFFERS, EXPERTS,
)  # fmt: skip

GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", LLAMA | {"bias": False, "router_score": "sigmoid", "balance_bias": True},
    KEYS | {
        "num_kv_heads": kv_heads(8),
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "seq_length": Key("max_position_embeddings", 131_072, size=True),
        "qkv_bias": Key("attention_bias", False),
        "experts": Key("n_routed_experts", 128, size=True, also="num_local_experts"),
        "experts_per_token": Key("num_experts_per_tok", 8, size=True),
        "expert_ffn_size": Key("moe_intermediate_size", 1408, size=True),
        "dense_layers": Key("first_k_dense_replace", 1),
        "router_normalize": Key("norm_topk_prob", True),
        "router_scale": Key("routed_scaling_factor", 1.0, size=True),
        "router_groups": Key("n_group", 1, size=True),
        "router_top_groups": Key("topk_group", 1, size=True),
    } | prediction_layers.KEYS,
    OUTER, "model.layers",
    LAYER | ROUTER | prediction_layers.LAYER | {
        "mlp.shared_experts.gate_proj": "shared.gate",
        "mlp.shared_experts.up_proj": "shared.up",
        "mlp.shared_experts.down_proj": "shared.down",
    },
    {"hidden_act": ("silu",)},
    (_read_glm, read_head_dim),
    (write_rope, write_head_dim, lambda model: {
        "partial_rotary_factor": model.rotary_fraction, "use_qk_norm": model.qk_norm == "head",
        "n_shared_experts": model.shared_ffn_size // model.expert_ffn_size}), ROTARY_BUFFERS, EXPERTS,
    "mlp.gate.e_score_correction_bias",
)  # fmt: skip
