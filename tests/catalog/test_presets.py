"""Presets hold the published sizes."""

from __future__ import annotations

import pytest

from megascale.catalog.presets import PRESETS
from megascale.config.model import ModelConfig
from megascale.config.model_rules import attention_heads
from megascale.layout.parameters import active_parameter_count, parameter_count

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
    "gemma2-2b": 590e6 + 2024e6, "gemma2-9b": 917e6 + 8324e6, "gemma2-27b": 1180e6 + 26_047e6,
    "gemma3-1b": 302e6 + 698e6, "gemma3-4b": 675e6 + 3209e6, "gemma3-12b": 1012e6 + 10_759e6,
    "gemma3-27b": 1416e6 + 25_600e6, "olmo2-1b": 1.48e9, "olmo2-7b": 7.3e9, "olmo2-13b": 13.7e9, "olmo2-32b": 32.2e9,
    "pythia-70m": 70.4e6, "pythia-160m": 162.3e6, "pythia-410m": 405.3e6, "pythia-1b": 1.0118e9,
    "pythia-1.4b": 1.4146e9, "pythia-2.8b": 2.7752e9, "pythia-6.9b": 6.8573e9, "pythia-12b": 11.846e9,
    "gpt-neox-20b": 20.55e9, "mixtral-8x7b": 46.7e9, "mixtral-8x22b": 140.6e9, "qwen1.5-moe-a2.7b": 14.3e9,
    "qwen3-30b-a3b": 30.5e9, "qwen3-235b-a22b": 235e9, "olmoe-1b-7b": 6.92e9,
    "deepseek-v2-lite": 15.7e9, "deepseek-v2": 236e9, "kimi-k2": 1.026e12, "deepseek-v3": 684.53e9 - 1.85e9,
    "glm4.5-air": 110.47e9 - 1.24e9, "glm4.5": 358.34e9 - 1.55e9,  # multi-token prediction has copies of both ends
    "gpt-oss-20b": 20.91e9, "gpt-oss-120b": 116.83e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_complete_model_of_the_published_size(name: str) -> None:
    model = ModelConfig.model_validate({"preset": name})
    assert parameter_count(model) == pytest.approx(PUBLISHED[name], rel=0.006)
    assert not list(attention_heads(model))


def test_exact_counts_of_published_weights() -> None:
    """Elements in the released files: of GPT-2 (tied), Llama 3, Qwen 2.5 and 3, Mistral and Mistral NeMo, Gemma 2
    and 3, OLMo 2, and GPT-NeoX with Pythia. Files of Gemma 3 from 4b on have a vision encoder and a projection besides.
    """
    vision = 416_866_032  # SigLIP, and a projection with a norm: 1152 x hidden_size + 1152
    exact = {
        "gpt2-124m": 124_439_808, "gpt2-1.5b": 1_557_611_200, "llama3-1b": 1_235_814_400,
        "llama3-3b": 3_212_749_824, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
        "llama3.2-1b": 1_235_814_400, "llama3.1-8b": 8_030_261_248, "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-7b": 7_615_616_512, "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920,
        "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264, "mistral-7b": 7_241_732_096,
        "mistral-nemo-12b": 12_247_782_400,
        "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320,
        "gemma3-1b": 999_885_952, "gemma3-4b": 4_300_079_472 - vision - 1152 * 2561,
        "gemma3-12b": 12_187_325_040 - vision - 1152 * 3841, "gemma3-27b": 27_432_406_640 - vision - 1152 * 5377,
        "olmo2-1b": 1_484_916_736, "olmo2-7b": 7_298_617_344,
        "pythia-70m": 70_426_624, "pythia-160m": 162_322_944, "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632,
        "pythia-1.4b": 1_414_647_808, "pythia-2.8b": 2_775_208_960, "pythia-6.9b": 6_857_302_016,
        "pythia-12b": 11_846_072_320, "gpt-neox-20b": 20_554_567_680, "mixtral-8x7b": 46_702_792_704,
        "qwen1.5-moe-a2.7b": 14_315_784_192, "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
        "olmoe-1b-7b": 6_919_161_856, "deepseek-v2-lite": 15_706_484_224, "deepseek-v2": 235_741_434_880,
    }  # fmt: skip
    for name, count in exact.items():
        assert parameter_count(ModelConfig.model_validate({"preset": name})) == count


def test_active_parameters_of_mixtures() -> None:
    """Counts of papers and model cards, with their rounding; a dense model has no others."""
    published = {
        "mixtral-8x7b": 12.9e9, "mixtral-8x22b": 39e9, "qwen1.5-moe-a2.7b": 2.7e9, "qwen3-30b-a3b": 3.3e9,
        "qwen3-235b-a22b": 22e9, "olmoe-1b-7b": 1.3e9, "llama3-8b": 8.03e9,
        "deepseek-v2-lite": 2.4e9 + 0.21e9, "deepseek-v2": 21e9, "deepseek-v3": 37e9, "kimi-k2": 32.6e9,
        "glm4.5-air": 12e9 + 1.24e9, "glm4.5": 32e9 + 1.55e9,  # with embedding and head
        "gpt-oss-20b": 3.61e9 + 0.58e9, "gpt-oss-120b": 5.13e9 + 0.58e9,  # with embedding
    }  # fmt: skip
    for name, count in published.items():
        active = active_parameter_count(ModelConfig.model_validate({"preset": name, "mtp_layers": 0}))
        assert active == pytest.approx(count, rel=0.02), name


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


def test_parts_of_blocks_by_family() -> None:
    """The keys of released configurations that do not change the parameter count."""

    def model(name: str) -> ModelConfig:
        return ModelConfig.model_validate({"preset": name})

    assert [model(name).softmax_scale for name in ("gemma2-9b", "gemma2-27b", "gemma3-27b")] == [
        None, pytest.approx(1 / 12), pytest.approx(168**-0.5),
    ]  # fmt: skip
    assert [model(name).embedding_scale ** 2 for name in ("gemma2-2b", "gemma3-4b")] == pytest.approx([2304, 2560])
    assert [model(name).embedding_scale for name in ("olmo2-7b", "pythia-1b")] == [1, 1]
    assert (model("gemma2-2b").logit_softcap, model("gemma3-1b").logit_softcap) == (30, None)
    assert model("gemma2-2b").windows[:4] == (4096, None, 4096, None)
    assert model("gemma3-1b").windows[:7] == (512, 512, 512, 512, 512, None, 512)
    assert (model("gemma3-1b").rope_scaling, model("gemma3-4b").rope_scaling) == (None, {"type": "linear", "factor": 8})
    assert model("pythia-1b").rotary_dim == 64 and model("gpt-neox-20b").rotary_dim == 24
