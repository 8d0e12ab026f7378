"""Qwen: model_type qwen2 (Qwen2 and 2.5: biases of q, k and v) and qwen3 (norms of q and k, a head size of its own)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, Key
from megascale.convert.families.llama import FAMILY, KEYS, check_heads, kv_heads, read_head_dim, write_head_dim
from megascale.convert.families.rotary_keys import read_rope, write_rope
from megascale.convert.families.window_keys import FULL, SLIDING, read_windows, write_layer_types

QWEN_KEYS = KEYS | {"num_kv_heads": kv_heads(32), "seq_length": Key("max_position_embeddings", 32_768, size=True)}


def read_switched_windows(config: ConfigKeys, has_window: Callable[[int, int], bool] = operator.ge) -> ConfigKeys:
    """The windows of layers, if `use_sliding_window` is true: of those for whose numbers beside `max_window_layers`
    `has_window` is true; by default from there on.
    """
    bound, layers = config.get("max_window_layers", 28), range(config["num_hidden_layers"])
    types = [SLIDING if has_window(index, bound) else FULL for index in layers]
    given = config if config.get("use_sliding_window", False) else config | {"sliding_window": None}
    return read_windows(given, types, 4096)


def write_windows(model: ModelConfig) -> ConfigKeys:
    """`layer_types`, and the keys of windows that begin with a layer."""
    keys = write_layer_types(model)
    types = keys["layer_types"]
    full = types.index(SLIDING) if SLIDING in types else len(types)
    return keys | {"use_sliding_window": SLIDING in types, "max_window_layers": full}


QWEN2 = replace(
    FAMILY, name="qwen2", architecture="Qwen2ForCausalLM", keys=QWEN_KEYS,
    fixed=FAMILY.fixed | {"bias": False, "qkv_bias": True},
    read=(read_rope, check_heads, read_switched_windows), write=(write_rope, write_windows),
)  # fmt: skip
QWEN3 = replace(
    FAMILY, name="qwen3", architecture="Qwen3ForCausalLM", keys=QWEN_KEYS,
    fixed=FAMILY.fixed | {"bias": False, "qk_norm": "head"},
    required=FAMILY.required | {"attention_bias": (False,)},
    read=(read_rope, partial(read_head_dim, default=128), read_switched_windows),
    write=(write_rope, write_head_dim, write_windows),
)  # fmt: skip
