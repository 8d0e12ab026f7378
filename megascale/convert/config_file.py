"""config.json of a folder of Hugging Face weights, and the JSON files beside it, read without torch."""

from __future__ import annotations

import json
from pathlib import Path

from megascale.config.model import ModelConfig
from megascale.convert.families.config_json import read_model
from megascale.convert.families.family import ConfigKeys
from megascale.core.errors import CheckpointError
from megascale.core.files import exists, why_unreadable
from megascale.core.limits import os_error_hint

CONFIG_FILE = "config.json"

DAMAGED_HINT = "compare its size and checksum with the original: it may be incomplete, or another file"

UNQUANTIZED_HINT = "the weights before quantization, in fp32, bf16 or fp16"

QUANTIZED = "quantization_config"

QUANTIZATION_KEYS = (QUANTIZED, "compression_config", "quantization")
"""Keys of a config.json whose weights are quantized: transformers' own, compressed-tensors' and MLX's."""

TILE = 128  # side of the tiles of FP8 weights

SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""JSON files beside weights that a conversion back, sampling or transformers reads."""


def read_model_config(folder: Path) -> tuple[ConfigKeys, ModelConfig]:
    """The config.json of a folder of weights, and its `[model]` section.

    Raises: CheckpointError if it is unreadable, of quantized weights or of an unsupported model
    """
    path = folder / CONFIG_FILE
    config = read_json(path)
    for key in QUANTIZATION_KEYS:
        if quantized := config.get(key):
            facts = quantized if isinstance(quantized, dict) else {"quant_method": quantized}
            method, *form = map(facts.get, ("quant_method", "fmt", "weight_block_size"))
            if key == QUANTIZED and (method == "mxfp4" or (method == "fp8" and form == ["e4m3", [TILE, TILE]])):
                continue  # read as bf16 (`convert.dequantize`)
            by = f", by quant_method {method!r}" if method else ""
            raise CheckpointError(f"{path}: the weights are quantized, it has {key}{by}", hint=UNQUANTIZED_HINT)
    return config, read_model(config, str(path))


def check_small_files(folder: Path) -> None:
    """Check that `SMALL_FILES`, where they are, are JSON objects: what a run begins with can be converted back.

    Raises: CheckpointError
    """
    for name in SMALL_FILES:
        if exists(folder / name):
            read_json(folder / name)


def read_json(path: Path) -> ConfigKeys:
    """Read a JSON object from a file. Raises: CheckpointError"""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = os_error_hint(error, "a folder with config.json and safetensors")
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, RecursionError) as error:
        what = why_unreadable(path) or f"{path} is not JSON: {error}"
        raise CheckpointError(what, hint=DAMAGED_HINT) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", hint=DAMAGED_HINT)
    return value
