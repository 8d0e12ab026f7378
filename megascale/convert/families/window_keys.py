"""Sliding windows of layers in config.json: one for all layers, or `layer_types`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megascale.config.model import ModelConfig
from megascale.convert.families.family import ConfigKeys, SizeError

FULL, SLIDING = "full_attention", "sliding_attention"

WINDOW_KEYS = ("sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
               "_sliding_window_pattern")  # fmt: skip


def read_one_window(config: ConfigKeys, default: int | None) -> ConfigKeys:
    """The key `window` of `[model]` for the `sliding_window` of all layers; null stands for none.

    Raises: SizeError for a window that is not above 0
    """
    window = config.get("sliding_window", default)
    if window is not None and window <= 0:
        raise SizeError(f"sliding_window is {window!r}, not above 0")
    return {} if window is None else {"window": window}


def read_windows(config: ConfigKeys, default_types: Sequence[str], default_window: int | None) -> ConfigKeys:
    """The key `window` of `[model]` for `layer_types` and `sliding_window`; none if no layer has a window.

    Raises: ValueError for other types of layers, or a list of another length
    """
    types = config.get("layer_types") or list(default_types)
    window = read_one_window(config, default_window).get("window")
    if unknown := set(types) - {FULL, SLIDING}:
        raise ValueError(f"layer_types has {', '.join(sorted(map(repr, unknown)))}, not only {FULL} and {SLIDING}")
    if len(types) != len(default_types):
        raise ValueError(f"layer_types has {len(types)} entries for {len(default_types)} layers")
    if window is None and SLIDING in types:
        types = [FULL] * len(types)
    pattern = _shortest([window if kind == SLIDING else 0 for kind in types])
    return {"window": pattern[0] if len(pattern) == 1 else pattern} if any(pattern) else {}


def _shortest(pattern: list[Any]) -> list[Any]:
    """The shortest beginning of a list whose repetition gives the list."""
    for length in range(1, len(pattern)):
        if all(item == pattern[index % length] for index, item in enumerate(pattern)):
            return pattern[:length]
    return pattern


def write_layer_types(model: ModelConfig) -> ConfigKeys:
    """`layer_types`, and the window that all layers with one share; the first if they differ."""
    windows = [model.given_window(layer) for layer in range(model.num_layers)]
    return {
        "layer_types": [SLIDING if window else FULL for window in windows],
        "sliding_window": next(filter(None, windows), None),
    }


def write_one_window(model: ModelConfig) -> ConfigKeys:
    """`sliding_window` of a family with one window for all layers; the first layer's if they differ."""
    return {"sliding_window": model.given_window(0) or None}
