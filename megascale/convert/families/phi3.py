"""Phi-3: Llama with q, k and v in one tensor, and gate and up in another; a window for all layers, or none."""

from __future__ import annotations

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Family, Fused, Key
from megascale.convert.families.llama import KEYS, LLAMA, OUTER, ROTARY_BUFFERS, read_head_dim
from megascale.convert.families.rotary_keys import read_rope, write_rope
from megascale.convert.families.window_keys import read_one_window, write_one_window

PHI3_KEYS = KEYS | {
    "seq_length": Key("max_position_embeddings", 4096, size=True),
    "norm_eps": Key("rms_norm_eps", 1e-5),
}
LAYER: dict[str, str | Fused] = {
    "input_layernorm": "attention_norm",
    "self_attn.qkv_proj": Fused(("attention.q", "attention.k", "attention.v")),
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_up_proj": Fused(("mlp.gate", "mlp.up")),
    "mlp.down_proj": "mlp.down",
}


def _read(config: ConfigKeys) -> ConfigKeys:
    rope = read_rope(config, fraction=("partial_rotary_factor", 1.0))
    if "rope_scaling" in rope:
        raise ValueError(f"rope_type is {rope['rope_scaling']['type']!r}, not default")
    return rope | read_head_dim(config | {"head_dim": None}) | read_one_window(config, None)


def _write(model: ModelConfig) -> ConfigKeys:
    keys = write_rope(model) | write_one_window(model) | {"partial_rotary_factor": model.rotary_fraction}
    return keys | {"original_max_position_embeddings": model.seq_length}


FAMILY = Family(
    "phi3", "Phi3ForCausalLM", LLAMA | {"bias": False},
    PHI3_KEYS, OUTER, "model.layers", LAYER, {"hidden_act": ("silu",)}, _read, _write, ROTARY_BUFFERS,
)  # fmt: skip
