"""Rotary positions in config.json: `rope_theta` and `rope_scaling` (transformers 4), or `rope_parameters` (5)."""

from __future__ import annotations

from typing import Any

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys

ORIGINAL = "original_max_position_embeddings"
SCALINGS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_seq_length": ORIGINAL,
    },
    "yarn": {
        "factor": "factor", "original_seq_length": ORIGINAL, "beta_fast": "beta_fast", "beta_slow": "beta_slow",
        "attention_factor": "attention_factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}  # fmt: skip
"""Type of scaling -> key of `model.rope_scaling` -> key of Hugging Face."""

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor",
             "rotary_pct", "rotary_emb_base", ORIGINAL)  # fmt: skip


def read_rope(
    config: ConfigKeys,
    theta: float = 10_000.0,
    theta_key: str = "rope_theta",
    fraction: tuple[str, float] | None = None,
) -> ConfigKeys:
    """The `[model]` keys of rotary positions. `theta`: the family's default base, under `theta_key` in files of
    transformers 4. `fraction`: the family's key and default of the rotated share of a head; None for whole heads.

    Raises: ValueError for an unsupported scaling, TypeError if the keys are no table
    """
    name = next(filter(config.get, ("rope_scaling", "rope_parameters")), None)  # the first takes precedence
    keys: ConfigKeys = config[name] if name else {}
    if not isinstance(keys, dict):
        raise TypeError(f"{name} is {keys!r}")
    if nested := sorted(kind for kind, content in keys.items() if isinstance(content, dict)):
        raise ValueError(f"rope_parameters differ by type of layer: {', '.join(nested)}")
    if (original := config.get(ORIGINAL)) is not None:  # takes precedence over that of the table
        keys = keys | {ORIGINAL: original}
    base = float(keys.get("rope_theta") or config.get(theta_key) or theta)
    found = {"rope_theta": base} | read_scaling(config, keys)
    name, default = fraction or ("partial_rotary_factor", 1.0)
    share = next((x for x in (keys.get("partial_rotary_factor"), config.get(name)) if x is not None), default)
    if fraction is None and share != 1:
        raise ValueError(f"{name} is {share!r}, not 1.0")
    return found | ({} if share == 1 else {"rotary_fraction": float(share)})


def read_scaling(config: ConfigKeys, keys: ConfigKeys) -> ConfigKeys:
    """The key `rope_scaling` of `[model]` for the rope keys of a config.json; none without scaling.

    Raises: ValueError for an unsupported scaling
    """
    kind = keys.get("rope_type") or keys.get("type") or "default"
    if kind == "default":
        return {}
    if kind not in SCALINGS:
        raise ValueError(f"rope_type is {kind!r}, not default or {' or '.join(SCALINGS)}")
    scaling: dict[str, Any] = {"type": kind}
    for ours, theirs in SCALINGS[kind].items():
        if (number := keys.get(theirs)) is not None and (number or ours == "truncate"):  # 0 stands for none
            scaling[ours] = number
    if kind != "linear":
        original = scaling.setdefault("original_seq_length", config.get("max_position_embeddings"))
        if kind == "yarn" and "factor" in keys and keys["factor"] is None:
            scaling["factor"] = config["max_position_embeddings"] / original
    return {"rope_scaling": scaling}


def write_rope(model: ModelConfig) -> ConfigKeys:
    """The rope keys of a config.json, which every version of transformers reads; `rope_scaling` is None without one."""
    written = None
    if scaling := model.rope_scaling:
        theirs = SCALINGS[scaling["type"]]
        written = {"rope_type": scaling["type"]} | {theirs[ours]: scaling[ours] for ours in theirs if ours in scaling}
    return {"rope_theta": model.rope_theta, "rope_scaling": written}
