"""gpt-oss: model_type gpt_oss, with sinks of attention, alternating windows, biases, and experts in stacks whose gate
and up projections alternate. Published files have the experts in MXFP4 (`convert.dequantize`).
"""

from __future__ import annotations

from functools import partial

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Family, Key, Stacked
from megascale.convert.families.llama import KEYS, LAYER, LLAMA, OUTER, kv_heads, read_head_dim, write_head_dim
from megascale.convert.families.mixtures import write_expert_size
from megascale.convert.families.rotary_keys import read_rope, write_rope
from megascale.convert.families.window_keys import FULL, SLIDING, read_windows, write_layer_types

FIXED = LLAMA | {"activation": "clamped_swiglu", "bias": True, "attention_sinks": True, "router_bias": True}
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read(config: ConfigKeys) -> ConfigKeys:
    """Rope, which is of type yarn by default, and windows in the first layer and every second one after it."""
    given = config if config.get("rope_parameters") or config.get("rope_scaling") else config | {"rope_scaling": YARN}
    types = [FULL if index % 2 else SLIDING for index in range(config["num_hidden_layers"])]
    return read_rope(given, theta=150_000.0) | read_windows(config, types, 128)


def _write_rope(model: ModelConfig) -> ConfigKeys:
    """The rope keys; without `rope_scaling` a model of the family has its own."""
    keys = write_rope(model)
    return keys | {"rope_scaling": keys["rope_scaling"] or {"rope_type": "default"}}


FAMILY = Family(
    "gpt_oss", "GptOssForCausalLM", FIXED,
    KEYS | {
        "num_kv_heads": kv_heads(8),
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "seq_length": Key("max_position_embeddings", 131_072, size=True),
        "experts": Key("num_local_experts", 128, size=True, also="num_experts"),
        "experts_per_token": Key("num_experts_per_tok", 4, size=True, also="experts_per_token"),
    },
    OUTER, "model.layers",
    LAYER | {"self_attn.sinks": "attention.sinks", "mlp.router": "router"},
    {"hidden_act": ("silu",), "attention_bias": (True,), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    (_read, partial(read_head_dim, default=64)), (_write_rope, write_head_dim, write_layer_types, write_expert_size),
    experts={"experts.gate_up": Stacked("mlp.experts.gate_up_proj"), "experts.down": Stacked("mlp.experts.down_proj")},
)  # fmt: skip
