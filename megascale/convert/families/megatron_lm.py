"""Megatron-LM's models: arguments and `[model]`, and names of tensors, those of megatron-core's local modules in their
order, with the numbers that layers and experts have in the whole model. A fused fc1 has the gate first; of q, k and v
each group has its queries, then its key and its value.
"""

from __future__ import annotations

import re
from typing import Any

from megascale.config.foreign.megatron import SETTINGS
from megascale.config.foreign.setting import plain
from megascale.config.model import ModelConfig
from megascale.convert.families.family import Family, Fused

SAME = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "vocab_size", "seq_length", "norm_epsilon", "add_bias_linear", "add_qkv_bias", "rotary_base", "rotary_percent",
    "hidden_dropout", "attention_dropout", "init_method_std", "moe_router_topk", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_score_function",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
)  # fmt: skip
"""Arguments with the value of their key of `[model]`."""

VOCAB_MULTIPLE = 128  # default of --make-vocab-size-divisible-by


def arguments_of(model: ModelConfig) -> dict[str, Any]:
    """The arguments of a model. What Megatron-LM cannot express is lost."""
    rope, tanh, dense = model.rope_scaling or {}, model.activation == "gelu_tanh", model.dense_layers
    windows = [window if isinstance(window, int) else 0 for window in model.windows]
    widest = max(windows)
    keys = {plain(name): row.key.removeprefix("model.") for row in SETTINGS for name in row.names}
    return {name: getattr(model, keys[name]) for name in SAME} | {
        "group_query_attention": model.num_kv_heads != model.num_heads,
        "normalization": "RMSNorm" if model.norm.startswith("rmsnorm") else "LayerNorm",
        "apply_layernorm_1p": model.norm == "rmsnorm_1p",
        "position_embedding_type": "rope" if model.position == "rope" else "learned_absolute",
        "max_position_embeddings": model.position_rows or model.seq_length,
        "rotary_seq_len_interpolation_factor": rope.get("factor") if rope.get("type") == "linear" else None,
        "use_rope_scaling": rope.get("type") == "llama3",
        "rope_scaling_factor": rope.get("factor", 8.0),
        "swiglu": model.activation == "swiglu",
        "openai_gelu": tanh,
        "bias_gelu_fusion": tanh,
        "qk_layernorm": model.qk_norm == "head",
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "make_vocab_size_divisible_by": VOCAB_MULTIPLE,
        "padded_vocab_size": -(-model.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "window_size": (widest - 1, 0) if widest else None,
        "window_attn_skip_freq": [int(window > 0) for window in windows] if widest else None,
        "num_experts": model.experts or None,
        "moe_router_pre_softmax": not model.router_normalize,
        "moe_layer_freq": [0] * dense + [1] * (model.num_layers - dense) if dense else 1,
    }


FAMILY = Family(
    "megatron", "GPTModel", {}, {},
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
    experts={
        "experts.gate_up": ("mlp.experts.*.linear_fc1",),
        "experts.up": ("mlp.experts.*.linear_fc1",),
        "experts.down": ("mlp.experts.*.linear_fc2",),
    },
    balance_bias="mlp.router.expert_bias",
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
