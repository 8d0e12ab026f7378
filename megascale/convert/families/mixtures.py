"""Mixtures of experts: model_type mixtral; qwen2_moe, with a shared expert (Qwen1.5-MoE, Qwen2); qwen3_moe, with a norm
of each head of q and k; olmoe, with norms of all of q and of k; glm4_moe (GLM-4.5), with scores by sigmoid and biases.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Key, Layer
from megascale.convert.families.llama import FAMILY, KEYS, check_heads, kv_heads, read_head_dim, write_head_dim
from megascale.convert.families.qwen import QWEN_KEYS, read_switched_windows, write_windows
from megascale.convert.families.rotary_keys import read_rope, write_rope
from megascale.convert.families.window_keys import read_one_window, write_one_window

PREDICTION_LAYER: Layer = {
    "enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "merge", "shared_head.norm": "final_norm",
}  # fmt: skip
"""Modules of a layer of multi-token prediction beside those of a block; `eh_proj` is of [embedding, hidden state]."""


def _expert_keys(experts: int, chosen: int) -> dict[str, Key]:
    """The keys of a router whose weights add up to 1 by `norm_topk_prob`, with the family's defaults."""
    return {
        "experts": Key("num_experts", experts, size=True, also="num_local_experts"),
        "experts_per_token": Key("num_experts_per_tok", chosen, size=True),
        "router_normalize": Key("norm_topk_prob", False),
    }


def routed_keys(experts: int, width: int, dense: int, scale: float, groups: int, top_groups: int) -> dict[str, Key]:
    """The keys of experts of GLM-4.5 and DeepSeek-V3, with a family's defaults."""
    return {
        "experts": Key("n_routed_experts", experts, size=True, also="num_local_experts"),
        "experts_per_token": Key("num_experts_per_tok", 8, size=True),
        "expert_ffn_size": Key("moe_intermediate_size", width, size=True),
        "dense_layers": Key("first_k_dense_replace", dense),
        "router_normalize": Key("norm_topk_prob", True),
        "router_scale": Key("routed_scaling_factor", scale, size=True),
        "router_groups": Key("n_group", groups, size=True),
        "router_top_groups": Key("topk_group", top_groups, size=True),
        "mtp_layers": Key("num_nextn_predict_layers", 0),
    }


def read_groups(config: ConfigKeys, default: int) -> ConfigKeys:
    """The value of a group of experts, if there are several; null stands for none."""
    if (groups := config.get("n_group", default)) is None:
        return {"router_groups": 1, "router_top_groups": 1}
    return {"router_group_value": "top2" if groups > 1 else "max"}


def read_shared(config: ConfigKeys, shared: int, width: int) -> ConfigKeys:
    """The shared experts, by default `shared` of `width`, as one."""
    return {"shared_ffn_size": config.get("n_shared_experts", shared) * config.get("moe_intermediate_size", width)}


def write_shared(model: ModelConfig) -> ConfigKeys:
    """The number of shared experts, each as wide as a routed one."""
    return {"n_shared_experts": model.shared_ffn_size // model.expert_ffn_size}


def shared_layer(module: str) -> Layer:
    """The modules of the shared expert."""
    return {f"{module}.{part}_proj": f"shared.{part}" for part in ("gate", "up", "down")}


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


MIXTRAL = replace(
    FAMILY, name="mixtral", architecture="MixtralForCausalLM", fixed=FAMILY.fixed | {"bias": False},
    keys=KEYS | {
        "num_kv_heads": kv_heads(8),
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "seq_length": Key("max_position_embeddings", 131_072, size=True),
        "experts": Key("num_local_experts", 8, size=True, also="num_experts"),
        "experts_per_token": Key("num_experts_per_tok", 2, size=True),
    },
    layer=FAMILY.layer | {"block_sparse_moe.gate": "router"},
    read=(partial(read_rope, theta=1_000_000.0), read_head_dim, partial(read_one_window, default=None)),
    write=(write_rope, write_head_dim, write_one_window, write_expert_size),
    experts={
        "experts.gate_up": ("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3"),
        "experts.down": ("block_sparse_moe.experts.*.w2",),
    },
)  # fmt: skip

BASE = replace(
    FAMILY, fixed=FAMILY.fixed | {"bias": False}, layer=FAMILY.layer | {"mlp.gate": "router"},
    experts={
        "experts.gate_up": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
        "experts.down": ("mlp.experts.*.down_proj",),
    },
)  # fmt: skip
"""The basis of the other families."""

QWEN2_MOE = replace(
    BASE, name="qwen2_moe", architecture="Qwen2MoeForCausalLM", fixed=BASE.fixed | {"shared_gate": True},
    keys=QWEN_KEYS | _expert_keys(60, 4) | {
        "num_kv_heads": kv_heads(16),
        "qkv_bias": Key("qkv_bias", True),
        "expert_ffn_size": Key("moe_intermediate_size", 1408, size=True),
        "shared_ffn_size": Key("shared_expert_intermediate_size", 5632, size=True),
    },
    layer=BASE.layer | shared_layer("mlp.shared_expert") | {"mlp.shared_expert_gate": "shared_gate"},
    required=BASE.required | {"decoder_sparse_step": (1,)},
    read=(read_rope, check_heads, _read_dense_layers,
          partial(read_switched_windows, has_window=lambda index, bound: index % 2 == 0 and index < bound)),
    write=(write_rope, write_windows, _write_dense_layers),
)  # fmt: skip

QWEN3_MOE = replace(
    BASE, name="qwen3_moe", architecture="Qwen3MoeForCausalLM", fixed=BASE.fixed | {"qk_norm": "head"},
    keys=QWEN_KEYS | _expert_keys(128, 8) | {
        "num_kv_heads": kv_heads(4), "expert_ffn_size": Key("moe_intermediate_size", 768, size=True)
    },
    required=BASE.required | {"attention_bias": (False,), "decoder_sparse_step": (1,)},
    read=(read_rope, read_head_dim, _read_dense_layers,
          lambda config: read_one_window(config, 4096) if config.get("use_sliding_window", False) else {}),
    write=(write_rope, write_head_dim, _write_window, _write_dense_layers),
)  # fmt: skip

OLMOE = replace(
    BASE, name="olmoe", architecture="OlmoeForCausalLM", fixed=BASE.fixed | {"qk_norm": "full"},
    keys=KEYS | _expert_keys(64, 8) | {
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "seq_length": Key("max_position_embeddings", 4096, size=True),
    },
    required=BASE.required | {"attention_bias": (False,), "clip_qkv": (None,)},
    read=(read_rope, check_heads), write=(write_rope, write_expert_size),
)  # fmt: skip

GLM4_MOE = replace(
    BASE, name="glm4_moe", architecture="Glm4MoeForCausalLM",
    fixed=BASE.fixed | {"router_score": "sigmoid", "balance_bias": True},
    keys=KEYS | {
        "num_kv_heads": kv_heads(8),
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "seq_length": Key("max_position_embeddings", 131_072, size=True),
        "qkv_bias": Key("attention_bias", False),
    } | routed_keys(128, 1408, dense=1, scale=1.0, groups=1, top_groups=1),
    layer=BASE.layer | PREDICTION_LAYER | shared_layer("mlp.shared_experts"),
    read=(partial(read_rope, fraction=("partial_rotary_factor", 0.5)), read_head_dim,
          partial(read_shared, shared=1, width=1408), partial(read_groups, default=1),
          lambda config: {"qk_norm": "head" if config.get("use_qk_norm", False) else "none"}),
    write=(write_rope, write_head_dim, write_shared, lambda model: {
        "partial_rotary_factor": model.rotary_fraction, "use_qk_norm": model.qk_norm == "head"}),
    balance_bias="mlp.gate.e_score_correction_bias",
)  # fmt: skip
