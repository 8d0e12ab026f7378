"""Published model sizes by name. A preset fills the keys of `[model]` missing from the configuration."""

from __future__ import annotations

import math
from typing import Any


def _yarn(factor: float, mscale: float) -> dict[str, Any]:
    """The scaling of rotary frequencies from 4,096 tokens on that leaves the size of cos and sin as it is."""
    keys = {"type": "yarn", "factor": factor, "original_seq_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    return keys | {"mscale": mscale, "mscale_all_dim": mscale}


_GPT = {"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": True, "tie_embeddings": True}
_MODERN = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "num_kv_heads": 8}
_LLAMA3 = _MODERN | {"tie_embeddings": False, "rope_theta": 500_000.0, "vocab_size": 128_256, "seq_length": 8192}
_QWEN = _MODERN | {"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "vocab_size": 151_936, "seq_length": 32_768}
_QWEN2 = _QWEN | {"qkv_bias": True, "tie_embeddings": False}
_QWEN3 = _QWEN | {"qk_norm": "head", "head_dim": 128, "tie_embeddings": False}
_MISTRAL = _MODERN | {"tie_embeddings": False}
_MIXTRAL = _MISTRAL | {
    "vocab_size": 32_000, "rope_theta": 1_000_000.0, "norm_eps": 1e-5, "experts": 8, "experts_per_token": 2,
}  # fmt: skip
_QWEN15_MOE = _QWEN2 | {
    "num_kv_heads": 16, "seq_length": 8192, "experts": 60, "experts_per_token": 4, "expert_ffn_size": 1408,
    "shared_ffn_size": 5632, "shared_gate": True, "router_normalize": False,
}  # fmt: skip
_QWEN3_MOE = _QWEN3 | {"num_kv_heads": 4, "experts": 128, "experts_per_token": 8}
_GLM4_MOE = _MODERN | {
    "tie_embeddings": False, "qkv_bias": True, "head_dim": 128, "rope_theta": 1_000_000.0, "rotary_fraction": 0.5,
    "vocab_size": 151_552, "seq_length": 131_072, "experts_per_token": 8, "router_score": "sigmoid",
    "balance_bias": True, "mtp_layers": 1,
}  # fmt: skip
_GLM4_AIR = _GLM4_MOE | {"experts": 128, "expert_ffn_size": 1408, "shared_ffn_size": 1408, "dense_layers": 1}
_GLM4_LARGE = _GLM4_MOE | {
    "qk_norm": "head", "experts": 160, "expert_ffn_size": 1536, "shared_ffn_size": 1536, "dense_layers": 3,
    "router_scale": 2.5,
}  # fmt: skip
_OLMOE = _MISTRAL | {
    "num_kv_heads": 16, "norm_eps": 1e-5, "qk_norm": "full", "vocab_size": 50_304, "seq_length": 4096, "experts": 64,
    "experts_per_token": 8, "router_normalize": False,
}  # fmt: skip
_LATENT = _MISTRAL | {
    "norm_eps": 1e-6, "latent_norm_eps": 1e-6, "kv_lora_rank": 512, "q_lora_rank": 1536, "head_dim": 128,
    "rope_head_dim": 64, "value_head_dim": 128,
}  # fmt: skip
_DEEPSEEK2 = _LATENT | {
    "vocab_size": 102_400, "seq_length": 163_840, "experts_per_token": 6, "dense_layers": 1, "router_normalize": False,
    "rope_scaling": _yarn(40.0, 0.707),
}  # fmt: skip
_DEEPSEEK2_LARGE = _DEEPSEEK2 | {
    "num_kv_heads": 128, "experts": 160, "expert_ffn_size": 1536, "shared_ffn_size": 3072, "router_groups": 8,
    "router_top_groups": 3, "router_scale": 16.0,
}  # fmt: skip
_DEEPSEEK2_LITE = _DEEPSEEK2 | {
    "num_kv_heads": 16, "q_lora_rank": 0, "experts": 64, "expert_ffn_size": 1408, "shared_ffn_size": 2816,
}  # fmt: skip
_DEEPSEEK3 = _LATENT | {
    "num_kv_heads": 128, "vocab_size": 129_280, "seq_length": 163_840, "rope_scaling": _yarn(40.0, 1.0),
    "experts": 256, "experts_per_token": 8, "expert_ffn_size": 2048, "shared_ffn_size": 2048, "dense_layers": 3,
    "router_score": "sigmoid", "balance_bias": True, "router_groups": 8, "router_top_groups": 4,
    "router_group_value": "top2", "router_scale": 2.5, "mtp_layers": 1,
}  # fmt: skip
_KIMI2 = _DEEPSEEK3 | {
    "num_kv_heads": 64, "vocab_size": 163_840, "seq_length": 131_072, "experts": 384, "dense_layers": 1,
    "router_groups": 1, "router_top_groups": 1, "router_group_value": "max", "router_scale": 2.827, "mtp_layers": 0,
    "rope_theta": 50_000.0, "rope_scaling": _yarn(32.0, 1.0) | {"beta_fast": 1.0},
}  # fmt: skip
_GPT_OSS = _MODERN | {
    "tie_embeddings": False, "bias": True, "router_bias": True, "activation": "clamped_swiglu", "head_dim": 64,
    "attention_sinks": True, "window": [128, 0], "rope_theta": 150_000.0, "vocab_size": 201_088,
    "seq_length": 131_072, "experts_per_token": 4,
    "rope_scaling": {
        "type": "yarn", "factor": 32.0, "original_seq_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False,
    },
}  # fmt: skip
_GEMMA = {
    "block": "sandwich", "norm": "rmsnorm_1p", "norm_eps": 1e-6, "activation": "geglu", "position": "rope",
    "bias": False, "tie_embeddings": True, "head_dim": 256,
}  # fmt: skip
_GEMMA2 = _GEMMA | {
    "vocab_size": 256_000, "seq_length": 8192, "window": [4096, 0], "attention_softcap": 50.0, "logit_softcap": 30.0,
}  # fmt: skip
_GEMMA3 = _GEMMA | {"qk_norm": "head", "rope_theta": 1_000_000.0, "local_rope_theta": 10_000.0}
_GEMMA3_LARGE = _GEMMA3 | {
    "vocab_size": 262_208, "seq_length": 131_072, "window": [1024] * 5 + [0],
    "rope_scaling": {"type": "linear", "factor": 8.0},
}  # fmt: skip
_OLMO2 = _MISTRAL | {
    "block": "post_norm", "norm_eps": 1e-6, "qk_norm": "full", "vocab_size": 100_352, "seq_length": 4096,
    "rope_theta": 500_000.0,
}  # fmt: skip
_NEOX = {
    "block": "parallel_two_norms", "norm": "layernorm", "activation": "gelu", "position": "rope",
    "rotary_fraction": 0.25, "bias": True, "tie_embeddings": False, "seq_length": 2048,
}  # fmt: skip


def _gpt(layers: int, hidden: int, heads: int, vocab: int, seq: int, **keys: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": vocab, "seq_length": seq}
    return _GPT | sizes | keys


def _gpt2(layers: int, hidden: int, heads: int, seq: int = 1024) -> dict[str, Any]:
    return _gpt(layers, hidden, heads, 50_257, seq, activation="gelu_tanh")


def _llama31(sizes: dict[str, Any], factor: float) -> dict[str, Any]:
    """Add the scaling of rotary frequencies by which Llama 3.1 and 3.2 reach 131,072 tokens."""
    keys = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_length": 8192}
    return sizes | {"rope_scaling": {"type": "llama3", "factor": factor, **keys}}


def _sized(family: dict[str, Any], layers: int, hidden: int, heads: int, ffn: int, **keys: Any) -> dict[str, Any]:
    return family | {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "ffn_size": ffn} | keys


def _gemma(family: dict[str, Any], layers: int, hidden: int, heads: int, ffn: int, **keys: Any) -> dict[str, Any]:
    """Scale the embedding by sqrt(hidden), and give two query heads to a key-value head."""
    scale = {"embedding_scale": math.sqrt(hidden), "num_kv_heads": heads // 2}
    return _sized(family | scale, layers, hidden, heads, ffn, **keys)


def _neox(layers: int, hidden: int, heads: int, vocab: int = 50_304, **keys: Any) -> dict[str, Any]:
    return _sized(_NEOX, layers, hidden, heads, 4 * hidden, vocab_size=vocab, **keys)


PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2019
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    # Brown et al. 2020, table 2.1; 1.3b has 16 heads (24 do not divide 2048), 13b a width of 5120 (40 do not divide
    # 5140)
    "gpt3-125m": _gpt2(12, 768, 12, 2048),
    "gpt3-350m": _gpt2(24, 1024, 16, 2048),
    "gpt3-760m": _gpt2(24, 1536, 16, 2048),
    "gpt3-1.3b": _gpt2(24, 2048, 16, 2048),
    "gpt3-2.7b": _gpt2(32, 2560, 32, 2048),
    "gpt3-6.7b": _gpt2(32, 4096, 32, 2048),
    "gpt3-13b": _gpt2(40, 5120, 40, 2048),
    "gpt3-175b": _gpt2(96, 12_288, 96, 2048),
    # Smith et al. 2022 (MT-NLG); Narayanan et al. 2021, table 1
    "megatron-530b": _gpt(105, 20_480, 128, 51_200, 2048),
    "megatron-1t": _gpt(128, 25_600, 160, 51_200, 2048),
    # MegaScale, table 1
    "megascale-175b": _gpt(96, 12_288, 128, 64_000, 2048),
    "megascale-530b": _gpt(105, 20_480, 160, 64_000, 2048),
    # Llama team 2024, table 3; 1b and 3b: the files of Llama 3.2
    "llama3-1b": _sized(_LLAMA3, 16, 2048, 32, 8192, tie_embeddings=True),
    "llama3-3b": _sized(_LLAMA3, 28, 3072, 24, 8192, tie_embeddings=True),
    "llama3-8b": _sized(_LLAMA3, 32, 4096, 32, 14_336),
    "llama3-70b": _sized(_LLAMA3, 80, 8192, 64, 28_672),
    "llama3-405b": _sized(_LLAMA3, 126, 16_384, 128, 53_248),
    # the files of Llama 3.1 and 3.2
    "llama3.1-8b": _llama31(_sized(_LLAMA3, 32, 4096, 32, 14_336), 8.0),
    "llama3.1-70b": _llama31(_sized(_LLAMA3, 80, 8192, 64, 28_672), 8.0),
    "llama3.1-405b": _llama31(_sized(_LLAMA3, 126, 16_384, 128, 53_248), 8.0),
    "llama3.2-1b": _llama31(_sized(_LLAMA3, 16, 2048, 32, 8192, tie_embeddings=True), 32.0),
    "llama3.2-3b": _llama31(_sized(_LLAMA3, 28, 3072, 24, 8192, tie_embeddings=True), 32.0),
    # Qwen team 2024 and 2025, and the files of the base models
    "qwen2.5-0.5b": _sized(_QWEN2, 24, 896, 14, 4864, num_kv_heads=2, tie_embeddings=True),
    "qwen2.5-7b": _sized(_QWEN2, 28, 3584, 28, 18_944, num_kv_heads=4, vocab_size=152_064),
    "qwen2.5-72b": _sized(_QWEN2, 80, 8192, 64, 29_568, vocab_size=152_064, norm_eps=1e-5),
    "qwen3-0.6b": _sized(_QWEN3, 28, 1024, 16, 3072, tie_embeddings=True),
    "qwen3-8b": _sized(_QWEN3, 36, 4096, 32, 12_288),
    "qwen3-32b": _sized(_QWEN3, 64, 5120, 64, 25_600),
    # Jiang et al. 2023 (v0.1); the files of Mistral NeMo
    "mistral-7b": _sized(_MISTRAL, 32, 4096, 32, 14_336, vocab_size=32_000, seq_length=8192, window=4096),
    "mistral-nemo-12b": _sized(
        _MISTRAL, 40, 5120, 32, 14_336, head_dim=128, vocab_size=131_072, seq_length=131_072, rope_theta=1_000_000.0
    ),
    # Jiang et al. 2024, and the files of v0.1
    "mixtral-8x7b": _sized(_MIXTRAL, 32, 4096, 32, 14_336, seq_length=32_768),
    "mixtral-8x22b": _sized(_MIXTRAL, 56, 6144, 48, 16_384, seq_length=65_536),
    # Qwen team 2024 and 2025, and the files of the base models
    "qwen1.5-moe-a2.7b": _sized(_QWEN15_MOE, 24, 2048, 16, 5632),
    "qwen3-30b-a3b": _sized(_QWEN3_MOE, 48, 2048, 32, 6144, expert_ffn_size=768),
    "qwen3-235b-a22b": _sized(_QWEN3_MOE, 94, 4096, 64, 12_288, expert_ffn_size=1536),
    # Muennighoff et al. 2024, and the files of 0924
    "olmoe-1b-7b": _sized(_OLMOE, 16, 2048, 16, 1024),
    # GLM team 2025, table 1, and the files
    "glm4.5-air": _sized(_GLM4_AIR, 46, 4096, 96, 10_944),
    "glm4.5": _sized(_GLM4_LARGE, 92, 5120, 96, 12_288),
    # DeepSeek-AI 2024 (V2, V3), Kimi team 2025, and the files
    "deepseek-v2-lite": _sized(_DEEPSEEK2_LITE, 27, 2048, 16, 10_944),
    "deepseek-v2": _sized(_DEEPSEEK2_LARGE, 60, 5120, 128, 12_288),
    "deepseek-v3": _sized(_DEEPSEEK3, 61, 7168, 128, 18_432),
    "kimi-k2": _sized(_KIMI2, 61, 7168, 64, 18_432),
    # OpenAI 2025, table 1, and the files
    "gpt-oss-20b": _sized(_GPT_OSS, 24, 2880, 64, 2880, experts=32),
    "gpt-oss-120b": _sized(_GPT_OSS, 36, 2880, 64, 2880, experts=128),
    # Gemma team 2024, table 1; 27b scales scores by sqrt(hidden_size / num_heads)
    "gemma2-2b": _gemma(_GEMMA2, 26, 2304, 8, 9216),
    "gemma2-9b": _gemma(_GEMMA2, 42, 3584, 16, 14_336),
    "gemma2-27b": _gemma(_GEMMA2, 46, 4608, 32, 36_864, head_dim=128, softmax_scale=144**-0.5),
    # Gemma team 2025, and the files: the text models, without the vision encoder of 4b, 12b and 27b
    "gemma3-1b": _gemma(
        _GEMMA3, 26, 1152, 4, 6912, num_kv_heads=1, vocab_size=262_144, seq_length=32_768, window=[512] * 5 + [0]
    ),
    "gemma3-4b": _gemma(_GEMMA3_LARGE, 34, 2560, 8, 10_240),
    "gemma3-12b": _gemma(_GEMMA3_LARGE, 48, 3840, 16, 15_360),
    "gemma3-27b": _gemma(_GEMMA3_LARGE, 62, 5376, 32, 21_504, head_dim=128, softmax_scale=168**-0.5),
    # OLMo team 2024, and the files of 1B (0425), 7B and 13B (1124), 32B (0325)
    "olmo2-1b": _sized(_OLMO2, 16, 2048, 16, 8192, num_kv_heads=16),
    "olmo2-7b": _sized(_OLMO2, 32, 4096, 32, 11_008, num_kv_heads=32),
    "olmo2-13b": _sized(_OLMO2, 40, 5120, 40, 13_824, num_kv_heads=40),
    "olmo2-32b": _sized(_OLMO2, 64, 5120, 40, 27_648),
    # Biderman et al. 2023, with the padded vocabularies of the files; Black et al. 2022
    "pythia-70m": _neox(6, 512, 8),
    "pythia-160m": _neox(12, 768, 12),
    "pythia-410m": _neox(24, 1024, 16),
    "pythia-1b": _neox(16, 2048, 8),
    "pythia-1.4b": _neox(24, 2048, 16),
    "pythia-2.8b": _neox(32, 2560, 32),
    "pythia-6.9b": _neox(32, 4096, 32, 50_432),
    "pythia-12b": _neox(36, 5120, 40, 50_688),
    "gpt-neox-20b": _neox(44, 6144, 64, 50_432, activation="gelu_tanh"),
}
