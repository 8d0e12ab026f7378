"""Comparison of two sections `[model]`: whether weights of the one can be loaded into the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megascale.config.model import ModelConfig

SAME_MODEL_HINT = "[model] as there, or another name or checkpoint.resume for this run"

MODEL_KEYS = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "norm", "activation",
            "position", "bias", "qkv_bias", "tie_embeddings", "block", "head_dim", "qk_norm",
            "positions")  # fmt: skip
"""Keys of `[model]` that must be equal in a checkpoint and in the run that loads it."""


def model_differences(saved: Mapping[str, Any], model: ModelConfig) -> str:
    """List the `MODEL_KEYS` that differ between a saved `[model]` section and this run's; empty if none does."""
    there = {key: saved.get(key) for key in MODEL_KEYS}
    hidden, heads = there["hidden_size"], there["num_heads"]
    if there["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        there["head_dim"] = hidden // heads
    if there["qkv_bias"] is None:
        there["qkv_bias"] = there["bias"]
    there["qk_norm"] = there["qk_norm"] or "none"
    if there["position"] == "learned":
        there["positions"] = there["positions"] or saved.get("seq_length")
    here = {key: getattr(model, key) for key in MODEL_KEYS} | {"positions": model.position_rows or None}
    return "; ".join(f"{key} {there[key]} there, {here[key]} here" for key in MODEL_KEYS if there[key] != here[key])
