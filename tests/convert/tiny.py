"""Tiny random models of every family, made by transformers."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 16, "bos_token_id": 2, "eos_token_id": [1, 7], "pad_token_id": 0,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0,
    "beta_slow": 0.5,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}
MIXTURE = GROUPED | {"num_experts": 6, "num_experts_per_tok": 3}
GLM = GROUPED | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = SIZES | {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6,
    "v_head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 1,
}  # fmt: skip
GPT_OSS = GROUPED | {
    "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3,
    "rope_parameters": YARN | {"truncate": False},
}  # fmt: skip
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": ("Llama", GROUPED | {"rope_parameters": LLAMA3}),
    "smollm": ("Llama", GROUPED | {"tie_word_embeddings": True}),
    "llama linear": ("Llama", GROUPED | {"rope_parameters": LINEAR}),
    "llama dynamic": ("Llama", GROUPED | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama yarn": ("Llama", GROUPED | {"rope_parameters": YARN}),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 5}),
    "mistral nemo": ("Mistral", GROUPED | {"head_dim": 12, "sliding_window": None}),
    "qwen 2.5": ("Qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen 2 window": ("Qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen 3": ("Qwen3", GROUPED | {"head_dim": 12}),
    "gemma 2": ("Gemma2", GROUPED | {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5}),
    "gemma 3": (
        "Gemma3Text",
        GROUPED
        | {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 5, "rope_parameters": GEMMA3_ROPE}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "olmo 2": ("Olmo2", GROUPED),
    "pythia": ("GPTNeoX", SIZES | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "gpt-neox serial": ("GPTNeoX", SIZES | {"use_parallel_residual": False, "hidden_act": "gelu_fast"}),
    "phi 3": ("Phi3", GROUPED | {"sliding_window": 5}),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral window": ("Mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 5}),
    "qwen 2 mixture": ("Qwen2Moe", MIXTURE | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}),
    "qwen 2 mixture window": (
        "Qwen2Moe",
        MIXTURE
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "norm_topk_prob": True}
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "mlp_only_layers": [0]}
        | {"qkv_bias": False},
    ),
    "qwen 3 mixture": (
        "Qwen3Moe",
        MIXTURE | {"head_dim": 12, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [0, 1]},
    ),
    "qwen 3 mixture window": (
        "Qwen3Moe",
        MIXTURE | {"moe_intermediate_size": 24, "use_sliding_window": True, "sliding_window": 5},
    ),
    "olmoe": ("Olmoe", MIXTURE),
    "glm 4 mixture": (
        "Glm4Moe",
        GLM | {"head_dim": 12, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    "glm 4 mixture groups": (
        "Glm4Moe",
        GLM
        | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2, "first_k_dense_replace": 2},
    ),
    "deepseek 2": (
        "DeepseekV2",
        LATENT
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}, "n_group": 3, "topk_group": 2}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0, "first_k_dense_replace": 1},
    ),
    "deepseek 2 lite": ("DeepseekV2", LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek 3": (
        "DeepseekV3",
        LATENT
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "n_group": 3, "topk_group": 2}
        | {"num_nextn_predict_layers": 0, "first_k_dense_replace": 2},
    ),
    "deepseek 3 one group": (
        "DeepseekV3",
        LATENT
        | {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0, "first_k_dense_replace": 1}
        | {"norm_topk_prob": False, "n_shared_experts": 2, "v_head_dim": 12, "rms_norm_eps": 1e-2},
    ),
    "gpt-oss": ("GptOss", GPT_OSS | {"sliding_window": 5}),
    "gpt-oss of 8": (
        "GptOss",
        GPT_OSS
        | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "num_local_experts": 8, "head_dim": 12},
    ),
    "phi 3 partial": ("Phi3", GROUPED | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
}
"""Class and configuration by name. Lists and names of keys are of transformers 5."""

SIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss of 64": ("GptOss", GPT_OSS | {"intermediate_size": 64}),
    "llama of 144": ("Llama", GROUPED | {"hidden_size": 144, "intermediate_size": 272}),
}
"""With widths of the groups and tiles of quantized weights."""

MIXTURES = [name for name, (_, keys) in TINY.items() if "num_experts_per_tok" in keys]


@cache
def tiny(name: str) -> Any:
    """`make_tiny`, made once."""
    return make_tiny(name)


def make_tiny(name: str, **other: Any) -> Any:
    """transformers' model, with weights far from where training starts, so that every term counts. `other`: changed
    keys.
    """
    import transformers

    kind, keys = (TINY | SIZED)[name]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = getattr(transformers, f"{kind}Config")(**keys | other, **plain)
    torch.manual_seed(0)
    architecture = {"Gemma3Text": "Gemma3"}.get(kind, kind)
    net = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(2)
    for key, parameter in net.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * 0.2
        is_gain = parameter.dim() == 1 and key.endswith("weight") and "Gemma" not in kind
        parameter.data = (drawn + is_gain).bfloat16().float()  # exact in every dtype
    for buffer in balance_biases(net).values():
        buffer.copy_((torch.randn(buffer.shape, generator=generator) * 0.2).bfloat16())
    return net


def balance_biases(net: Any) -> dict[str, torch.Tensor]:
    """The experts' biases of a model, which its files have."""
    return {name: buffer for name, buffer in net.named_buffers() if name.endswith("e_score_correction_bias")}


def save_tiny(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Save a model to a folder with transformers. Returns the model, in fp32."""
    net = tiny(name)
    stored = net if dtype == torch.float32 else copy.deepcopy(net).to(dtype)  # a cast rounds rotary frequencies too
    for module in stored.modules():
        if hasattr(module, "e_score_correction_bias"):  # published files have it in fp32
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    stored.save_pretrained(folder, **options)
    return net


def as_saved(net: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names of a model's parameters, weights or gradients, as its files have them."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(net, tensors))
