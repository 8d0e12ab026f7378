"""Every family converts both ways: weights bit by bit, config.json key by key, as transformers 4 and 5 write it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megascale.config.model import ModelConfig
from megascale.convert.config_file import CONFIG_FILE
from megascale.convert.conversion import from_huggingface, to_huggingface
from megascale.convert.families.config_json import FAMILIES, family_of_model, fresh_config, make_config, read_model
from megascale.convert.families.gpt2 import GELUS
from megascale.convert.huggingface import PretrainedWeights
from megascale.core.errors import CheckpointError
from megascale.core.storage import Location
from megascale.ops.rope import layer_rope, rope_table
from tests.convert.tiny import TINY, save_tiny


def config_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / CONFIG_FILE).read_text()))


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def computes_the_same(ours: dict[str, Any], theirs: dict[str, Any], folder: Path) -> bool:
    """True if transformers reads the same sizes, rotary positions and windows from two config.json."""
    from transformers import AutoConfig

    read = []
    for name, keys in (("ours", ours), ("theirs", theirs)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / CONFIG_FILE).write_text(json.dumps(keys))
        said = AutoConfig.from_pretrained(folder / name).to_dict()
        said["hidden_act"] = GELUS.get(said.get("hidden_act"), said.get("hidden_act"))  # GELUs have several names
        (said.get("rope_parameters") or {}).pop("type", None)  # the older name of rope_type, kept beside it
        read.append({key: value for key, value in said.items() if key in RELEVANT and value is not None})
    common = read[0].keys() & read[1].keys()  # a class of transformers has all of its keys
    return all(read[0][key] == read[1][key] for key in common)


RELEVANT = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size",
    "n_routed_experts", "n_shared_experts", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "topk_method", "first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group",
    "use_qk_norm", "shared_expert_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "qkv_bias",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "layer_norm_eps", "hidden_act",
    "hidden_activation", "tie_word_embeddings", "rope_parameters", "attention_bias", "layer_types",
    "use_parallel_residual", "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping",
}  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_a_round_trip_is_exact(tmp_path: Path, name: str) -> None:
    save_tiny(name, tmp_path / "theirs", torch.bfloat16)
    from_huggingface(tmp_path / "theirs", tmp_path / "ours")
    to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "again")
    without = {"num_nextn_predict_layers": 0} if "glm" in name else {}  # transformers saves no further layers
    assert config_in(tmp_path / "again") == config_in(tmp_path / "theirs") | without
    before, after = weights_in(tmp_path / "theirs"), weights_in(tmp_path / "again")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype and torch.equal(after[key], tensor), key


@pytest.mark.parametrize("name", TINY)
def test_a_config_of_our_own_describes_the_same_model(tmp_path: Path, name: str) -> None:
    """Without foreign keys to go by, in the style that transformers 4 and 5 read."""
    save_tiny(name, tmp_path / "saved")
    theirs = config_in(tmp_path / "saved")
    model = read_model(theirs, "config.json")
    ours = fresh_config(FAMILIES[theirs["model_type"]], model)
    assert computes_the_same(ours, theirs, tmp_path)
    assert read_model(ours, "config.json") == model
    assert "rope_parameters" not in ours


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128001,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "Mistral-Nemo-Base-2407": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vocab_size": 131072,
    },
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2",
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
        "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 8192,
        "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "torch_dtype": "float32", "vocab_size": 256000,
    },
    "gemma-3-1b-pt": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
        "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "vocab_size": 262144,
    },
    "OLMo-2-1124-7B": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "eos_token_id": 100257, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
        "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 100352,
    },
    "pythia-160m": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12, "num_hidden_layers": 12,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
        "use_parallel_residual": True, "vocab_size": 50304,
    },
    "Phi-3-mini-4k-instruct": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "bos_token_id": 1, "embd_pdrop": 0.0,
        "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "pad_token_id": 32000, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
        "sliding_window": 2047, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32064,
    },
    "Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
        "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
        "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-30B-A3B-Base": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151643, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 32768,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    },
    "OLMoE-1B-7B-0924": {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 1024,
        "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
        "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vocab_size": 50304,
    },
    "GLM-4.5-Air-Base": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
        "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
        "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
    },
    "DeepSeek-V2": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
        "moe_intermediate_size": 1536, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 128, "num_experts_per_tok": 6,
        "num_hidden_layers": 60, "num_key_value_heads": 128, "pretraining_tp": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 3, "topk_method": "group_limited_greedy",
        "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
    },
    "DeepSeek-V3-Base": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "Kimi-K2-Base": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 131072, "model_type": "kimi_k2",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
    },
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "vocab_size": 49152,
    },
}  # fmt: skip
"""config.json of published models, in the style of transformers 4."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_and_kept(tmp_path: Path, name: str) -> None:
    published = PUBLISHED[name]
    model = read_model(published, "config.json")
    assert make_config(model, published) == published
    known = published if published["model_type"] != "kimi_k2" else published | {"model_type": "deepseek_v3"}
    assert computes_the_same(fresh_config(FAMILIES[known["model_type"]], model), known, tmp_path)
    assert family_of_model(model, published["model_type"]).name == published["model_type"]


PRESETS = {
    "Llama-3.1-8B": "llama3.1-8b", "Mistral-Nemo-Base-2407": "mistral-nemo-12b", "Qwen2.5-7B": "qwen2.5-7b",
    "Qwen3-0.6B": "qwen3-0.6b", "gemma-2-2b": "gemma2-2b", "gemma-3-1b-pt": "gemma3-1b",
    "OLMo-2-1124-7B": "olmo2-7b", "pythia-160m": "pythia-160m", "Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "Qwen1.5-MoE-A2.7B": "qwen1.5-moe-a2.7b", "Qwen3-30B-A3B-Base": "qwen3-30b-a3b", "OLMoE-1B-7B-0924": "olmoe-1b-7b",
    "GLM-4.5-Air-Base": "glm4.5-air", "DeepSeek-V2": "deepseek-v2", "DeepSeek-V3-Base": "deepseek-v3",
    "Kimi-K2-Base": "kimi-k2", "gpt-oss-20b": "gpt-oss-20b",
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_published_models(name: str) -> None:
    """But for the sequence length, which a preset may have shorter."""
    published, preset = (
        read_model(PUBLISHED[name], "config.json"),
        ModelConfig.model_validate({"preset": PRESETS[name]}),
    )
    length = {"seq_length": preset.seq_length, "preset": None}
    assert published.model_copy(update=length) == preset.model_copy(update=length)


def test_a_change_of_the_model_changes_the_keys_that_say_it(tmp_path: Path) -> None:
    """In a config.json of transformers 5 the rotary keys and windows are replaced together."""
    from transformers import AutoConfig

    save_tiny("llama 3", tmp_path)
    source = config_in(tmp_path)
    model = read_model(source, "config.json")
    longer = make_config(model.model_copy(update={"seq_length": 64}), source)
    assert {key for key in longer if longer[key] != source[key]} == {"max_position_embeddings"}
    other = make_config(model.model_copy(update={"rope_theta": 7e5}), source)
    assert other["rope_theta"] == 7e5 and other["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_parameters" not in other and other["eos_token_id"] == [1, 7]
    assert AutoConfig.for_model(**other).rope_parameters["rope_theta"] == 7e5


@pytest.mark.parametrize("name", TINY)
def test_training_on_shorter_sequences_keeps_the_config(tmp_path: Path, name: str) -> None:
    """Rotary positions reach as far as before, and a window longer than the sequences remains."""
    save_tiny(name, tmp_path)
    source = config_in(tmp_path)
    model = read_model(source, "config.json")
    assert make_config(model.model_copy(update={"seq_length": 4}), source) == source


@pytest.mark.parametrize("scaling", [{}, {"original_seq_length": 8}, {"original_seq_length": 32}])
def test_dynamic_rope_computes_the_same_at_the_length_of_training(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """transformers counts from max_position_embeddings, which is the original length, whatever the run's length."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    save_tiny("llama dynamic", tmp_path)
    source = config_in(tmp_path)
    keys = read_model(source, "config.json").model_dump(by_alias=True)
    trained = ModelConfig.model_validate(keys | {"rope_scaling": {"type": "dynamic", "factor": 2.0} | scaling})
    for given in ({}, source):
        made = make_config(trained, given)
        assert made["max_position_embeddings"] == scaling.get("original_seq_length", trained.seq_length)
        theirs = LlamaRotaryEmbedding(AutoConfig.for_model(**made))
        cos, _ = theirs(torch.zeros(1), torch.arange(trained.seq_length)[None])
        ours, _ = rope_table(trained.seq_length, layer_rope(trained, 0), torch.float32, torch.device("cpu"))
        torch.testing.assert_close(cos[0, :, : trained.head_dim // 2], ours[:, 0, 0])


PLAIN = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 9,
         "num_experts_per_tok": 2}  # fmt: skip
UNKNOWN = {"gpt2", "gpt_neox", "kimi_k2"}  # without key-value heads, or without a class in transformers
LATENT = ("deepseek_v2", "deepseek_v3")  # as many key-value heads as heads, or none of their models


REFUSE_NULL = ("mistral", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss")
"""Families whose classes in transformers accept no null for key-value heads, or compute nothing with it."""


@pytest.mark.parametrize("keys", [{}, {"num_key_value_heads": None}, {"num_key_value_heads": 2}], ids=str)
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - UNKNOWN))
def test_key_value_heads_are_those_of_transformers(name: str, keys: dict[str, Any]) -> None:
    """A missing key has a default, which differs by family; null stands for as many as heads where it is allowed."""
    from transformers import AutoConfig

    keys = PLAIN | {"num_attention_heads": 64, "hidden_size": 512} | keys
    if name in LATENT:
        keys |= {"num_attention_heads": keys.get("num_key_value_heads") or 128}
    if None not in keys.values() or name not in REFUSE_NULL:
        theirs = AutoConfig.for_model(name, **keys).num_key_value_heads
        assert read_model({"model_type": name} | keys, "config.json").num_kv_heads == theirs


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"kimi_k2"}))
def test_null_is_read_as_transformers_reads_it(name: str) -> None:
    """Of each key whose null it accepts."""
    from transformers import AutoConfig

    plain = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 9} if name == "gpt2" else PLAIN
    accepted = 0
    for ours, key in FAMILIES[name].keys.items():
        keys = {"n_positions": 64} | plain | {key.name: None}
        try:
            theirs = getattr(AutoConfig.for_model(name, **keys), key.name)
        except Exception:  # of many types
            continue
        if theirs is None:  # of qwen2_moe, which computes nothing with it
            continue
        assert getattr(read_model({"model_type": name} | keys, "config.json"), ours) == theirs
        accepted += 1
    assert accepted or name in (*REFUSE_NULL, *LATENT, "gpt2", "gpt_neox")


@pytest.mark.parametrize(("given", "value"), [({}, (8, 4, "top2")), ({"n_group": None}, (1, 1, "max"))], ids=str)
def test_null_stands_for_no_groups_of_experts(given: dict[str, Any], value: tuple[Any, ...]) -> None:
    keys = PLAIN | {"model_type": "deepseek_v3", "num_attention_heads": 128} | given
    model = read_model(keys, "config.json")
    assert (model.router_groups, model.router_top_groups, model.router_group_value) == value


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "original_max_position_embeddings": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": YARN | {"factor": None}},
        {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 16}},
        {"rope_parameters": YARN | {"factor": 4.0}, "original_max_position_embeddings": 16},
        {"rope_parameters": YARN | {"factor": None}, "original_max_position_embeddings": 16},
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8}, "original_max_position_embeddings": 16},
    ],
    ids=str,
)
def test_lengths_and_factors_of_scaled_rope_are_those_of_transformers(keys: dict[str, Any]) -> None:
    """A factor of null is the ratio of the lengths; an original length beside the table takes precedence."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    source = {"model_type": "llama", "max_position_embeddings": 32} | PLAIN | keys
    model = read_model(copy.deepcopy(source), "config.json")
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model(**copy.deepcopy(source)))
    cos, _ = theirs(torch.zeros(1), torch.arange(32)[None])
    ours, _ = rope_table(32, layer_rope(model, 0), torch.float32, torch.device("cpu"))
    torch.testing.assert_close(cos[0, :, : model.head_dim // 2], ours[:, 0, 0])
    assert make_config(model, source) == source | {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("keys", [{"sliding_window_pattern": 1}, {"layer_types": ["full_attention"] * 26}])
def test_a_gemma_3_without_windows_has_no_local_base(keys: dict[str, Any], tmp_path: Path) -> None:
    published = PUBLISHED["gemma-3-1b-pt"] | keys
    model = read_model(published, "config.json")
    assert model.local_rope_theta is None and not any(model.windows)
    assert make_config(model, published) == published
    assert computes_the_same(fresh_config(FAMILIES["gemma3_text"], model), published, tmp_path)


def test_the_window_pattern_of_gemma_3_is_the_key_that_transformers_reads(tmp_path: Path) -> None:
    """It writes `_sliding_window_pattern`, and reads `layer_types` or `sliding_window_pattern`."""
    from transformers import AutoConfig

    published = PUBLISHED["gemma-3-1b-pt"] | {"_sliding_window_pattern": 2}
    del published["sliding_window_pattern"]
    (tmp_path / CONFIG_FILE).write_text(json.dumps(published))
    theirs = [kind == "sliding_attention" for kind in AutoConfig.from_pretrained(tmp_path).layer_types]
    model = read_model(published, "config.json")
    assert [model.given_window(layer) > 0 for layer in range(model.num_layers)] == theirs


def test_every_family_has_a_tiny_model() -> None:
    kinds = {kind.lower() for kind, _ in TINY.values()} | {"gpt2", "kimik2"}  # in tests/convert/test_conversion.py
    assert {name.replace("_", "") for name in FAMILIES} == kinds


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "dbrx"}, "model_type is 'dbrx'  -> a model of gpt2, llama,"),
        (PUBLISHED["Qwen3-30B-A3B-Base"] | {"mlp_only_layers": [1]}, "mlp_only_layers is [1], not the first layers"),
        (PUBLISHED["Qwen3-30B-A3B-Base"] | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, not 1"),
        (PUBLISHED["Qwen3-30B-A3B-Base"] | {"num_experts": 0}, "num_experts is 0, not above 0"),
        (PUBLISHED["OLMoE-1B-7B-0924"] | {"clip_qkv": 8.0}, "clip_qkv is 8.0, not None"),
        (PUBLISHED["Mixtral-8x7B-v0.1"] | {"num_local_experts": "8 of them"}, "'8 of them' as experts"),
        ({"model_type": "gemma3", "text_config": {}}, "model_type is 'gemma3', a model of text and other inputs"),
        ({"model_type": "mamba"}, "model_type is 'mamba'  -> a model of gpt2, llama,"),
        (PUBLISHED["Qwen3-0.6B"] | {"rope_theta": 10**400}, "a value of the wrong type: int too large to convert"),
        (PUBLISHED["Phi-3-mini-4k-instruct"] | {"rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope'"),
        (PUBLISHED["Phi-3-mini-4k-instruct"] | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "is 'linear'"),
        (PUBLISHED["Qwen2.5-7B"] | {"layer_types": ["chunked_attention"] * 28}, "layer_types has 'chunked_attention'"),
        (PUBLISHED["Qwen2.5-7B"] | {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 28 layers"),
        (PUBLISHED["Qwen3-0.6B"] | {"attention_bias": True}, "attention_bias is True, not False"),
        (PUBLISHED["gemma-2-2b"] | {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', not"),
        (PUBLISHED["gemma-3-1b-pt"] | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            PUBLISHED["gemma-3-1b-pt"]
            | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters of sliding_attention are scaled",
        ),
        (PUBLISHED["pythia-160m"] | {"attention_bias": False}, "attention_bias is False, not True"),
        (PUBLISHED["pythia-160m"] | {"hidden_act": "relu"}, "hidden_act is 'relu', not"),
        (PUBLISHED["pythia-160m"] | {"head_dim": 32}, "head_dim is 32, not hidden_size / num_attention_heads"),
        (
            PUBLISHED["Qwen3-0.6B"] | {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}},
            "rope_parameters differ by type of layer: full_attention",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model(keys, "config.json")
    assert words in str(caught.value)


def test_a_region_of_a_fused_tensor_is_read(tmp_path: Path) -> None:
    """Also one that begins and ends within a head, as shards of optimizers do."""
    save_tiny("pythia", tmp_path)
    given = PretrainedWeights(tmp_path)
    for kind in ("weight", "bias"):
        name = f"layers.1.attention.k.{kind}"
        whole = given.read_tensor(name)
        for start, size in ((0, 32), (3, 14), (8, 8), (9, 2), (31, 1)):
            offset, extent = ((start, 5), (size, 20)) if kind == "weight" else ((start,), (size,))
            part = given.read_tensor(name, (offset, extent))
            assert torch.equal(part, whole[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))])


def test_a_model_between_two_families_is_refused() -> None:
    keys = read_model(PUBLISHED["gemma-2-2b"], "config.json").model_dump(by_alias=True) | {"norm": "rmsnorm"}
    with pytest.raises(
        CheckpointError, match=r"^no supported .*; the nearest: gemma2 has norm = 'rmsnorm_1p'"
    ) as found:
        make_config(ModelConfig.model_validate(keys), {})
    assert found.value.message.count(" has ") <= 3, "a reader needs the nearest alone"


def test_a_block_of_no_family_is_refused() -> None:
    """Unit scaling is in the weights; the weighted residual stream is in no family."""
    olmo2 = read_model(PUBLISHED["OLMo-2-1124-7B"], "config.json").model_dump(by_alias=True)
    unit = olmo2 | {"unit_scaling": True}
    for keys, message in (
        ({"block": "fog"}, "olmo2 has block = 'post_norm'"),
        ({"qk_norm": "fixed"}, "olmo2 has qk_norm = 'full'"),
        ({"unit_scaling": True}, "olmo2 has residual_tau = 0.0"),
    ):
        with pytest.raises(CheckpointError, match=message):
            make_config(ModelConfig.model_validate(olmo2 | keys), {})
    assert make_config(ModelConfig.model_validate(unit | {"residual_tau": 0.0}), {})["model_type"] == "olmo2"


@pytest.mark.parametrize("name", sorted(name for name, keys in PUBLISHED.items() if "experts" in str(keys)))
def test_a_width_without_effect_is_exported(name: str) -> None:
    """Where all layers have experts, the width of dense ones is nobody's."""
    model = read_model(PUBLISHED[name], "config.json")
    if not model.dense_layers:
        other = ModelConfig.model_validate(model.model_dump(by_alias=True) | {
            "ffn_size": model.ffn_size + 64, "expert_ffn_size": model.expert_ffn_size})  # fmt: skip
        assert family_of_model(other, PUBLISHED[name]["model_type"]).name == PUBLISHED[name]["model_type"]
