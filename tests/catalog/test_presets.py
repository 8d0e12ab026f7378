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
    "llama3.1-8b": 8.03e9, "llama3.1-70b": 70.6e9, "llama3.1-405b": 405.9e9, "llama3.2-1b": 1.24e9,
    "llama3.2-3b": 3.21e9, "qwen2.5-0.5b": 0.494e9, "qwen2.5-7b": 7.62e9, "qwen2.5-72b": 72.7e9,
    "qwen3-0.6b": 0.596e9, "qwen3-8b": 8.19e9, "qwen3-32b": 32.8e9, "mistral-7b": 7.24e9, "mistral-nemo-12b": 12.25e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_complete_model_of_the_published_size(name: str) -> None:
    model = ModelConfig.model_validate({"preset": name})
    assert parameter_count(model) == pytest.approx(PUBLISHED[name], rel=0.006)
    assert model.hidden_size % model.num_heads == 0


def test_exact_counts_of_published_weights() -> None:
    """Elements in the released files: of GPT-2 (tied), Llama 3, Qwen 2.5 and 3, Mistral and Mistral NeMo."""
    exact = {
        "gpt2-124m": 124_439_808, "gpt2-1.5b": 1_557_611_200, "llama3-1b": 1_235_814_400,
        "llama3-3b": 3_212_749_824, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
        "llama3.2-1b": 1_235_814_400, "llama3.1-8b": 8_030_261_248, "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-7b": 7_615_616_512, "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920,
        "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264, "mistral-7b": 7_241_732_096,
        "mistral-nemo-12b": 12_247_782_400,
    }  # fmt: skip
    for name, count in exact.items():
        assert parameter_count(ModelConfig.model_validate({"preset": name})) == count


def test_table_1_of_megascale() -> None:
    keys = ("num_heads", "hidden_size", "num_layers", "vocab_size", "seq_length")
    assert [PRESETS["megascale-175b"][key] for key in keys] == [128, 12_288, 96, 64_000, 2048]
    assert [PRESETS["megascale-530b"][key] for key in keys] == [160, 20_480, 105, 64_000, 2048]


def test_parts_of_attention_by_family() -> None:
    """The keys of released configurations that do not change the parameter count."""

    def model(name: str) -> ModelConfig:
        return ModelConfig.model_validate({"preset": name})

    scaling = model("llama3.2-1b").rope_scaling
    assert scaling is not None and scaling["factor"] == 32.0 and scaling["original_seq_length"] == 8192
    assert model("llama3-8b").rope_scaling is None
    assert (model("qwen2.5-7b").qkv_bias, model("qwen2.5-7b").bias, model("qwen3-8b").qkv_bias) == (True, False, False)
    assert [model(name).head_dim for name in ("qwen3-0.6b", "qwen3-32b", "mistral-nemo-12b")] == [128, 128, 128]
    assert [model(name).qk_norm for name in ("qwen2.5-7b", "qwen3-0.6b")] == ["none", "head"]
    assert set(model("mistral-7b").windows) == {4096}
