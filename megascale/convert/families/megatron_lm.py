"""Megatron-LM's models: arguments and `[model]`, and names of tensors, those of megatron-core's local modules in their
order, with the numbers that layers and experts have in the whole model. A fused fc1 has the gate first; of q, k and v
each group has its queries, then its key and its value.
"""

from __future__ import annotations

import re
from typing import Any

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Family, Fused, Key, Same

KEYS = {
    "num_layers": Key("num_layers", size=True),
    "hidden_size": Key("hidden_size", size=True),
    "num_heads": Key("num_attention_heads", size=True),
    "head_dim": Key("kv_channels", None),
    "ffn_size": Key("ffn_hidden_size", size=True),
    "vocab_size": Key("vocab_size", Same("padded_vocab_size"), size=True, null=Same("padded_vocab_size")),
    "seq_length": Key("seq_length", Same("max_position_embeddings"), size=True),
    "norm_eps": Key("norm_epsilon", 1e-5, also="layernorm_epsilon"),
    "bias": Key("add_bias_linear", True),
    "rope_theta": Key("rotary_base", 10_000),
    "rotary_fraction": Key("rotary_percent", 1.0),
    "dropout": Key("hidden_dropout", 0.0),
    "init_std": Key("init_method_std", 0.02),
    "experts": Key("num_experts", 0, null=0),
    "experts_per_token": Key("moe_router_topk", 2),
    "expert_ffn_size": Key("moe_ffn_hidden_size", None),
    "shared_ffn_size": Key("moe_shared_expert_intermediate_size", 0, null=0),
    "shared_gate": Key("moe_shared_expert_gate", False),
    "router_score": Key("moe_router_score_function", "softmax"),
    "router_scale": Key("moe_router_topk_scaling_factor", 1.0, null=1.0),
    "router_groups": Key("moe_router_num_groups", 1, null=1),
    "router_top_groups": Key("moe_router_group_topk", 1, null=1),
    "balance_bias": Key("moe_router_enable_expert_bias", False),
}

UNSUPPORTED = (
    "rotary_interleaved", "squared_relu", "quick_geglu", "apply_residual_connection_post_layernorm", "qk_l2_norm",
    "multi_latent_attention", "mtp_num_layers", "window_size", "heterogeneous_layers_config_path", "no_rope_freq",
    "linear_attention_freq", "attention_output_gate", "moe_apply_probs_on_input", "moe_latent_size",
    "hybrid_override_pattern", "activation_func_clamp_value", "glu_linear_offset", "use_legacy_models", "use_mup",
    "hybrid_layer_pattern", "experimental_attention_variant", "enable_mhc_connections", "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size", "decoder_num_layers", "decoder_seq_length", "dataloader_seq_length",
)  # fmt: skip
"""Arguments with an effect on the model that this conversion does not express."""

NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS = {"learned_absolute": "learned", "rope": "rope"}
LLAMA3 = {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_length": 8192}
VOCAB_MULTIPLE = 128  # default of --make-vocab-size-divisible-by


def _read(args: ConfigKeys) -> ConfigKeys:
    """The keys of attention, positions, norm and activation. Raises: ValueError for unsupported ones"""
    heads, norm = args["num_attention_heads"], NORMS[args.get("normalization", "LayerNorm")]
    one = args.get("layernorm_zero_centered_gamma", args.get("apply_layernorm_1p"))  # its newer name first
    if one and norm == "layernorm":
        raise ValueError("apply_layernorm_1p is True with LayerNorm")
    if (kind := args.get("position_embedding_type", "learned_absolute")) not in POSITIONS:
        raise ValueError(f"position_embedding_type is {kind!r}, not {' or '.join(POSITIONS)}")
    tanh = args.get("openai_gelu") or args.get("bias_gelu_fusion", False)
    keys: ConfigKeys = {
        "num_kv_heads": args.get("num_query_groups", heads) if args.get("group_query_attention") else heads,
        "norm": "rmsnorm_1p" if one else norm,
        "position": POSITIONS[kind],
        "activation": "swiglu" if args.get("swiglu") else "gelu_tanh" if tanh else "gelu",
        "qk_norm": "head" if args.get("qk_layernorm") else "none",
        "qkv_bias": bool(args.get("add_bias_linear", True) or args.get("add_qkv_bias")),
        "tie_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "positions": args["max_position_embeddings"] if kind == "learned_absolute" else None,
    }
    if factor := args.get("rotary_seq_len_interpolation_factor"):
        keys["rope_scaling"] = {"type": "linear", "factor": float(factor)}
    if args.get("use_rope_scaling"):
        keys["rope_scaling"] = LLAMA3 | {"factor": float(args.get("rope_scaling_factor", 8.0))}
    return keys | (_read_router(args) if args.get("num_experts") else {"expert_ffn_size": None})


def _read_router(args: ConfigKeys) -> ConfigKeys:
    """The keys of routers. Raises: ValueError for layers of experts that alternate, or other groups of experts"""
    chosen, groups = args.get("moe_router_topk", 2), args.get("moe_router_num_groups") or 1
    each = chosen // (args.get("moe_router_group_topk") or 1)
    frequency: Any = args.get("moe_layer_freq", 1)
    layers = [1] * args["num_layers"] if frequency in (1, "1") else frequency
    if not isinstance(layers, list) or layers != sorted(layers):
        raise ValueError(f"moe_layer_freq is {frequency!r}, not all layers but the first ones")
    if groups > 1 and each not in (1, 2):
        raise ValueError(f"moe_router_topk is {chosen}, not 1 or 2 x moe_router_group_topk")
    sigmoid = args.get("moe_router_score_function") == "sigmoid"
    return {
        "router_normalize": chosen > 1 if sigmoid else not args.get("moe_router_pre_softmax", False),
        "router_bias": args.get("add_bias_linear", True),
        "router_group_value": "top2" if groups > 1 and each == 2 else "max",
        "dense_layers": layers.count(0),
    }


def _write(model: ModelConfig) -> ConfigKeys:
    rope, tanh = model.rope_scaling or {}, model.activation == "gelu_tanh"
    dense = model.dense_layers
    return {
        "group_query_attention": model.num_kv_heads != model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "normalization": next(theirs for theirs, ours in NORMS.items() if model.norm.startswith(ours)),
        "apply_layernorm_1p": model.norm == "rmsnorm_1p",
        "position_embedding_type": next(theirs for theirs, ours in POSITIONS.items() if ours == model.position),
        "max_position_embeddings": model.position_rows or model.seq_length,
        "rotary_seq_len_interpolation_factor": rope.get("factor") if rope.get("type") == "linear" else None,
        "use_rope_scaling": rope.get("type") == "llama3",
        "rope_scaling_factor": rope.get("factor", 8.0),
        "swiglu": model.activation == "swiglu",
        "openai_gelu": tanh,
        "bias_gelu_fusion": tanh,
        "qk_layernorm": model.qk_norm == "head",
        "add_qkv_bias": model.qkv_bias,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "attention_dropout": model.dropout,
        "make_vocab_size_divisible_by": VOCAB_MULTIPLE,
        "padded_vocab_size": -(-model.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "num_experts": model.experts or None,
        "moe_router_pre_softmax": not model.router_normalize,
        "moe_layer_freq": [0] * dense + [1] * (model.num_layers - dense) if dense else 1,
    }


FAMILY = Family(
    "megatron", "GPTModel", {"block": "serial"}, KEYS,
    {
        "embedding.token.weight": "embedding.word_embeddings.weight",
        "embedding.position.weight": "embedding.position_embeddings.weight",
        "final_norm.weight": "decoder.final_layernorm.weight",
        "final_norm.bias": "decoder.final_layernorm.bias",
        "head.weight": "output_layer.weight",
    },
    "decoder.layers",
    {
        "input_layernorm": "attention_norm",
        "self_attention.linear_proj": "attention.out",
        "self_attention.linear_qkv": Fused(("attention.q", "attention.k", "attention.v"), per_head=True),
        "self_attention.q_layernorm": "attention.q_norm",
        "self_attention.k_layernorm": "attention.k_norm",
        "pre_mlp_layernorm": "mlp_norm",
        "mlp.linear_fc1": Fused(("mlp.gate", "mlp.up")),
        "mlp.linear_fc2": "mlp.down",
        "mlp.router": "router",
        "mlp.shared_experts.linear_fc1": Fused(("shared.gate", "shared.up")),
        "mlp.shared_experts.linear_fc2": "shared.down",
        "mlp.shared_experts.gate": "shared_gate",
    },
    dict.fromkeys(UNSUPPORTED, (None, False, 0)) | {"softmax_type": ("vanilla",)}, (_read,), (_write,), (),
    {
        "experts.gate_up": ("mlp.experts.*.linear_fc1",),
        "experts.up": ("mlp.experts.*.linear_fc1",),
        "experts.down": ("mlp.experts.*.linear_fc2",),
    },
    "mlp.router.expert_bias",
)  # fmt: skip

ALIASES = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("mlp.shared_experts.gate.weight", "mlp.shared_experts.gate_weight"),
)
"""Parts of names here, with those of Transformer Engine's fused modules and of `torch_dist`."""

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # tensors with rows of padding
SPLIT_OUTPUTS = re.compile(r"(linear_qkv|linear_fc1|word_embeddings|output_layer)\.(weight|bias)$")
SPLIT_INPUTS = re.compile(r"(linear_proj|linear_fc2)\.weight$")
"""Tensors that tensor parallelism splits by rows, and by columns."""
