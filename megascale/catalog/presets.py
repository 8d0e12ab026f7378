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


def _gpt(layers: int, hidden: int, heads: int, vocab: int, seq: int, **keys: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": vocab, "seq_length": seq}
    return _GPT | sizes | keys


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return _gpt(layers, hidden, heads, 50_257, 1024, activation="gelu_tanh")


def _gpt3(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return _gpt(layers, hidden, heads, 50_257, 2048, activation="gelu_tanh")


def _llama3(layers: int, hidden: int, heads: int, ffn: int, **keys: Any) -> dict[str, Any]:
    return _LLAMA3 | {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "ffn_size": ffn} | keys


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
}
