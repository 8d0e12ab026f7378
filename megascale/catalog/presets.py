"""Published model sizes by name. A preset fills the keys of `[model]` missing from the configuration."""

from __future__ import annotations

from typing import Any

_GPT = {"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": True, "tie_embeddings": True}
_LLAMA3 = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "bias": False,
    "tie_embeddings": False,
    "rope_theta": 500_000.0,
    "vocab_size": 128_256,
    "seq_length": 8192,
    "num_kv_heads": 8,
}


_MODERN = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "num_kv_heads": 8}
_QWEN = _MODERN | {"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "vocab_size": 151_936, "seq_length": 32_768}
_QWEN2 = _QWEN | {"qkv_bias": True, "tie_embeddings": False}
_QWEN3 = _QWEN | {"qk_norm": "head", "head_dim": 128, "tie_embeddings": False}
_MISTRAL = _MODERN | {"tie_embeddings": False}


def _gpt(layers: int, hidden: int, heads: int, vocab: int, seq: int, **keys: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": vocab, "seq_length": seq}
    return _GPT | sizes | keys


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return _gpt(layers, hidden, heads, 50_257, 1024, activation="gelu_tanh")


def _gpt3(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return _gpt(layers, hidden, heads, 50_257, 2048, activation="gelu_tanh")


def _llama3(layers: int, hidden: int, heads: int, ffn: int, **keys: Any) -> dict[str, Any]:
    return _sized(_LLAMA3, layers, hidden, heads, ffn, **keys)


def _llama31(sizes: dict[str, Any], factor: float) -> dict[str, Any]:
    """Add the scaling of rotary frequencies by which Llama 3.1 and 3.2 reach 131,072 tokens."""
    keys = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_length": 8192}
    return sizes | {"rope_scaling": {"type": "llama3", "factor": factor, **keys}}


def _sized(family: dict[str, Any], layers: int, hidden: int, heads: int, ffn: int, **keys: Any) -> dict[str, Any]:
    return family | {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "ffn_size": ffn} | keys


PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2019
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    # Brown et al. 2020, table 2.1; 1.3b has 16 heads (24 do not divide 2048), 13b a width of 5120 (40 do not divide
    # 5140)
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-760m": _gpt3(24, 1536, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12_288, 96),
    # Smith et al. 2022 (MT-NLG); Narayanan et al. 2021, table 1
    "megatron-530b": _gpt(105, 20_480, 128, 51_200, 2048),
    "megatron-1t": _gpt(128, 25_600, 160, 51_200, 2048),
    # MegaScale, table 1
    "megascale-175b": _gpt(96, 12_288, 128, 64_000, 2048),
    "megascale-530b": _gpt(105, 20_480, 160, 64_000, 2048),
    # Llama team 2024, table 3; 1b and 3b: the files of Llama 3.2
    "llama3-1b": _llama3(16, 2048, 32, 8192, tie_embeddings=True),
    "llama3-3b": _llama3(28, 3072, 24, 8192, tie_embeddings=True),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248),
    # the files of Llama 3.1 and 3.2
    "llama3.1-8b": _llama31(_llama3(32, 4096, 32, 14_336), 8.0),
    "llama3.1-70b": _llama31(_llama3(80, 8192, 64, 28_672), 8.0),
    "llama3.1-405b": _llama31(_llama3(126, 16_384, 128, 53_248), 8.0),
    "llama3.2-1b": _llama31(_llama3(16, 2048, 32, 8192, tie_embeddings=True), 32.0),
    "llama3.2-3b": _llama31(_llama3(28, 3072, 24, 8192, tie_embeddings=True), 32.0),
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
}
