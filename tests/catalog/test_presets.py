"""Presets hold the published sizes."""

from __future__ import annotations

import pytest

from megascale.account.parameters import parameter_count
from megascale.catalog.presets import PRESETS
from megascale.config.model import ModelConfig

# Counts of papers and model cards, with their rounding.
PUBLISHED = {
    "gpt2-124m": 124.4e6, "gpt2-355m": 354.8e6, "gpt2-774m": 774.0e6, "gpt2-1.5b": 1557.6e6,
    "gpt3-125m": 125e6, "gpt3-350m": 356e6, "gpt3-760m": 760e6, "gpt3-1.3b": 1.32e9, "gpt3-2.7b": 2.65e9,
    "gpt3-6.7b": 6.66e9, "gpt3-13b": 12.85e9, "gpt3-175b": 174.6e9,
    "megatron-530b": 529.6e9, "megatron-1t": 1008.0e9,
    "megascale-175b": 175e9, "megascale-530b": 530e9,
    "llama3-1b": 1.24e9, "llama3-3b": 3.21e9, "llama3-8b": 8.03e9, "llama3-70b": 70.6e9, "llama3-405b": 405.9e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_complete_model_of_the_published_size(name: str) -> None:
    model = ModelConfig.model_validate({"preset": name})
    assert parameter_count(model) == pytest.approx(PUBLISHED[name], rel=0.006)
    assert model.hidden_size % model.num_heads == 0


def test_exact_counts_of_published_weights() -> None:
    """Elements in the released files: GPT-2's (tied) and Llama 3's."""
    exact = {
        "gpt2-124m": 124_439_808, "gpt2-1.5b": 1_557_611_200, "llama3-1b": 1_235_814_400,
        "llama3-3b": 3_212_749_824, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    }  # fmt: skip
    for name, count in exact.items():
        assert parameter_count(ModelConfig.model_validate({"preset": name})) == count


def test_table_1_of_megascale() -> None:
    keys = ("num_heads", "hidden_size", "num_layers", "vocab_size", "seq_length")
    assert [PRESETS["megascale-175b"][key] for key in keys] == [128, 12_288, 96, 64_000, 2048]
    assert [PRESETS["megascale-530b"][key] for key in keys] == [160, 20_480, 105, 64_000, 2048]
