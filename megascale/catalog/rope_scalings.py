"""Scalings of rotary embeddings for sequences longer than in pretraining: the registry `ROPE_SCALINGS`.

Facts of a card: `required` and `optional`, the keys of `model.rope_scaling` beside `type`, with their types.
"""

from megascale.core.registry import Card, Registry

_YARN = {
    "beta_fast": float, "beta_slow": float, "attention_factor": float, "mscale": float, "mscale_all_dim": float,
    "truncate": bool,
}  # fmt: skip

ROPE_SCALINGS = Registry(
    "rope scaling",
    "megascale.rope_scalings",
    [
        Card(
            "linear",
            "positions divided by factor (Chen et al. 2023)",
            "megascale.ops.rope_scaling:linear",
            {"required": {"factor": float}, "optional": {}},
        ),
        Card(
            "dynamic",
            "a base that grows with the sequence beyond original_seq_length, by default seq_length (NTK-aware)",
            "megascale.ops.rope_scaling:dynamic",
            {"required": {"factor": float}, "optional": {"original_seq_length": int}},
        ),
        Card(
            "llama3",
            "low frequencies divided by factor, high frequencies kept: low_freq_factor, high_freq_factor, "
            "original_seq_length (Llama 3.1)",
            "megascale.ops.rope_scaling:llama3",
            {
                "required": {
                    "factor": float, "low_freq_factor": float, "high_freq_factor": float, "original_seq_length": int
                },
                "optional": {},
            },
        ),
        Card(
            "yarn",
            "as llama3, on a ramp of dimensions, and q and k multiplied: factor, original_seq_length and optionally "
            f"{', '.join(_YARN)} (Peng et al. 2023)",
            "megascale.ops.rope_scaling:yarn",
            {"required": {"factor": float, "original_seq_length": int}, "optional": _YARN},
        ),
    ],
)  # fmt: skip
