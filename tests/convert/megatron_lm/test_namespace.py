"""`import-config megatron:FOLDER`: a namespace with every argument gives the settings of the script that made it."""

from __future__ import annotations

import argparse
import enum
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megascale.cli.main import main
from megascale.config.loading import load_config

DEFAULTS: dict[str, Any] = {
    "add_bias_linear": True, "add_position_embedding": True, "add_qkv_bias": False, "apply_rope_fusion": True,
    "bias_gelu_fusion": True, "bias_swiglu_fusion": True, "gradient_accumulation_fusion": True,
    "group_query_attention": False, "num_query_groups": 1,
    "layernorm_epsilon": 1e-5, "layernorm_zero_centered_gamma": False, "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute", "rotary_base": 10000, "rotary_percent": 1.0, "swiglu": False,
    "squared_relu": False, "glu_linear_offset": 0.0, "activation_func_clamp_value": None, "softmax_type": "vanilla",
    "untie_embeddings_and_output_weights": False, "make_vocab_size_divisible_by": 128, "vocab_size": None,
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "init_method_std": 0.02, "multi_latent_attention": False,
    "kv_lora_rank": 32, "qk_head_dim": 128, "mscale": 1.0, "rotary_scaling_factor": 1.0, "mtp_num_layers": None,
    "mtp_loss_scaling_factor": 0.1, "num_experts": None, "moe_router_topk": 2, "moe_layer_freq": 1,
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0, "moe_router_score_function": "softmax",
    "moe_token_dispatcher_type": "allgather", "moe_flex_dispatcher_backend": "deepep", "moe_upcycling_granularity": 1,
    "moe_dispatch_fwd_dtype": "bf16", "moe_paged_stash_page_size": 64, "mamba_state_dim": 128, "img_h": 224,
    "dsa_indexer_rotate_activation": True, "linear_key_head_dim": 128, "encoder_num_layers": 4, "patch_dim": 16,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "cp_comm_type": ["p2p"],
    "virtual_pipeline_model_parallel_size": None, "num_layers_per_virtual_pipeline_stage": None,
    "use_distributed_optimizer": False, "data_parallel_sharding_strategy": "no_shard", "sequence_parallel": False,
    "overlap_grad_reduce": False, "overlap_p2p_comm": False, "distributed_timeout_minutes": 10, "rank": 0,
    "micro_batch_size": 1, "rampup_batch_size": None, "step_batch_size_schedule": None, "train_iters": None,
    "train_samples": None, "seed": 1234, "bf16": False, "fp16": False, "fp8": None, "fp8_margin": 0, "fp4": None,
    "fp8_recipe": "delayed", "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent", "fp8_wgrad": True,
    "fp4_recipe": "nvfp4", "first_last_layers_bf16": False, "num_layers_at_start_in_bf16": 1,
    "params_dtype": torch.bfloat16, "main_grads_dtype": torch.float32, "exp_avg_dtype": torch.float32,
    "initial_loss_scale": 4294967296, "recompute_granularity": None, "recompute_modules": [], "log_interval": 100,
    "eval_interval": 1000, "eval_iters": 100, "manual_gc_eval": True, "optimizer": "adam", "lr": None, "min_lr": 0.0,
    "lr_decay_style": "linear", "lr_decay_iters": None, "lr_decay_samples": None, "lr_warmup_iters": 0,
    "lr_warmup_samples": 0, "lr_warmup_fraction": None, "lr_warmup_init": 0.0, "lr_wsd_decay_style": "exponential",
    "weight_decay": 0.01, "weight_decay_incr_style": "constant", "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_eps": 1e-8, "clip_grad": 1.0, "sgd_momentum": 0.9, "muon_momentum": 0.95, "muon_scale_mode": "spectral",
    "lion_beta1": 0.95, "split": "969,30,1", "data_path": None, "mock_data": False, "dataloader_type": "single",
    "reset_position_ids": False, "eod_mask_loss": False, "num_workers": 2, "iterations_to_skip": [], "fim_rate": 0.5,
    "save": None, "load": None, "save_interval": None, "async_save": False, "ckpt_format": "torch_dist",
    "finetune": False, "use_checkpoint_args": False, "no_load_rng": None, "rerun_mode": "validate_results",
    "error_injection_rate": 0, "error_injection_type": "transient_error", "perform_rl_step": False,
    "grpo_group_size": 2, "inference_max_requests": 8, "exit_signal": signal.SIGTERM, "consumed_train_samples": 64,
}  # fmt: skip
"""Arguments of Megatron-LM with the values that nobody gave, or that follow from others."""

TRAINING = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64,
    "micro_batch_size": 2, "lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "cosine", "weight_decay": 0.1,
    "adam_beta2": 0.95, "bf16": True, "split": "99,1,0", "save": "ckpt", "load": "ckpt", "save_interval": 100,
}  # fmt: skip
LLAMA = {
    "group_query_attention": True, "num_query_groups": 2, "ffn_hidden_size": 192, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "rotary_base": 500000, "swiglu": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "untie_embeddings_and_output_weights": True, "disable_bias_linear": True,
    "vocab_size": 512, "mock_data": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
    "overlap_param_gather": True, "attention_backend": "unfused",
}  # fmt: skip
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": (
        {"merge_file": "merges.txt", "data_path": ["0.5", "a", "0.5", "b"], "global_batch_size": 32,
         "train_iters": 100, "lr_warmup_fraction": 0.1, "tensor_model_parallel_size": 2, "sequence_parallel": True,
         "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "recompute_activations": True},
        {"ffn_hidden_size": 256, "kv_channels": 16, "padded_vocab_size": 50432, "lr_decay_iters": 100,
         "virtual_pipeline_model_parallel_size": 2, "recompute_granularity": "selective", "add_qkv_bias": True},
    ),
    "llama in fp8, by samples": (
        {**LLAMA, "global_batch_size": 16, "train_samples": 3200, "lr_warmup_samples": 160, "fp8_format": "hybrid",
         "fp8_amax_history_len": 32, "fp8_amax_compute_algo": "max", "apply_layernorm_1p": True},
        {"kv_channels": 16, "add_bias_linear": False, "bias_gelu_fusion": False, "padded_vocab_size": 512,
         "train_iters": 200, "lr_decay_samples": 3200, "fp8": "hybrid", "layernorm_zero_centered_gamma": True},
    ),
    "gpt without biases": (
        {"vocab_size": 512, "mock_data": True, "global_batch_size": 32, "train_iters": 100, "disable_bias_linear": True,
         "no_gradient_accumulation_fusion": True},
        {"ffn_hidden_size": 256, "kv_channels": 16, "padded_vocab_size": 512, "add_bias_linear": False,
         "bias_gelu_fusion": False, "gradient_accumulation_fusion": False, "lr_decay_iters": 100,
         "use_flash_attn": True},
    ),
    "mixture with a schedule of batches": (
        {**LLAMA, "step_batch_size_schedule": "0:16 2048:32 4096:48", "train_iters": 100, "num_experts": 4,
         "moe_ffn_hidden_size": 96, "moe_aux_loss_coeff": 0.01, "moe_token_dispatcher_type": "alltoall",
         "expert_model_parallel_size": 2, "lr_warmup_iters": 5, "no_load_rng": True},
        {"kv_channels": 16, "add_bias_linear": False, "bias_gelu_fusion": False, "padded_vocab_size": 512,
         "global_batch_size": 16, "lr_decay_iters": 100},
    ),
}  # fmt: skip
"""Flags of a script, and what Megatron-LM makes of them."""

FLAGS_ALONE = {"disable_bias_linear", "no_gradient_accumulation_fusion", "fp8_format", "apply_layernorm_1p"}
"""Flags that are stored under other names."""


class AttnBackend(enum.Enum):
    """The values of Megatron-LM's class, which is stored by its module and name."""

    __module__ = "megatron.core.transformer.enums"
    flash, fused, unfused, local, auto = 1, 2, 3, 4, 5


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    enums = ModuleType(AttnBackend.__module__)
    enums.AttnBackend = AttnBackend  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, enums.__name__, enums)


def store(run: str, legacy: bool = False, **changed: Any) -> None:
    """Write what a run of 8 processes stores of its arguments, to the folder `ckpt`."""
    flags, made = RUNS[run]
    args = DEFAULTS | {"world_size": 8} | TRAINING | {name: flags[name] for name in flags.keys() - FLAGS_ALONE}
    args |= {"start_weight_decay": args["weight_decay"], "end_weight_decay": args["weight_decay"], **made, **changed}
    args["attention_backend"] = AttnBackend[args.get("attention_backend", "auto")]
    file = Path("ckpt/iter_0000010") / ("mp_rank_00/model_optim_rng.pt" if legacy else "common.pt")
    file.parent.mkdir(parents=True)
    torch.save({"args": argparse.Namespace(**args), "iteration": 10}, file)
    Path("ckpt/latest_checkpointed_iteration.txt").write_text("10")


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["import-config", "megatron:ckpt", "--output", "run.toml"]) != 0
    assert not Path("run.toml").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize("run", sorted(RUNS))
def test_a_checkpoint_and_its_script_are_the_same_run(run: str) -> None:
    words = ["torchrun --nproc_per_node 8 pretrain_gpt.py"]
    for name, value in (TRAINING | RUNS[run][0]).items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += ["--" + name.replace("_", "-"), *map(repr, values)]
    Path("run.sh").write_text(" ".join(words))
    store(run)
    trees = []
    for source, output in (("run.sh", "of_script.toml"), ("megatron:ckpt", "of_checkpoint.toml")):
        assert main(["import-config", source, "--output", output]) == 0
        trees.append(load_config(output, world_size=8, skip_sections={"data"}).model_dump())
    assert trees[0] == trees[1] | {"name": "of_script"}


def test_of_dropped_arguments_those_that_are_on_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    store("mixture with a schedule of batches", legacy=True)
    assert main(["import-config", "megatron:ckpt", "--output", "run.toml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("98 arguments: 66 mapped, 32 dropped; ")
    assert {line.partition(":")[0] for line in lines if line.startswith("dropped")} == {
        "dropped apply_rope_fusion", "dropped gradient_accumulation_fusion", "dropped manual_gc_eval",
        "dropped no_load_rng",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "value", "problem"), [
    ("squared_relu", True, "squared_relu is True, which is not supported"),
    ("use_mup", True, "use_mup is True"),
    ("decoder_num_layers", 4, "decoder_num_layers is 4"),
    ("attention_dropout", 0.2, "not supported: two probabilities"),
    ("end_weight_decay", 0.2, "not supported: optimizer.weight_decay is constant"),
    ("perform_rl_step", True, "not supported"),
    ("optimizer", "sgd", "optimizer: sgd is not supported"),
    ("optimizer", "lion", "lion_beta1: not supported: write optimizer.betas"),
    ("lr_warmup_init", 1e-6, "not supported: the warm-up begins at 0"),
    ("exp_avg_dtype", torch.bfloat16, 'exp_avg_dtype: write optimizer.name = "adamw_8bit"'),
    ("load", "another", "load: auto, the default, is the run's newest"),
    ("world_size", 6, "not divisible by micro x dp = 2 x 6"),
    ("vocab_size", None, "model.vocab_size: missing"),
])  # fmt: skip
def test_what_would_be_another_run_is_refused(
    name: str, value: Any, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store("llama in fp8, by samples", **{name: value})
    assert problem in refused(capsys)


def test_the_true_size_of_the_vocabulary_is_added() -> None:
    store("llama in fp8, by samples", vocab_size=None)
    assert main(["import-config", "megatron:ckpt", "model.vocab_size=500", "--output", "run.toml"]) == 0
    assert load_config("run.toml").model.vocab_size == 500


def test_latent_attention_of_a_checkpoint() -> None:
    latent = {"qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16, "group_query_attention": False}
    latent |= {"layernorm_zero_centered_gamma": False, "apply_layernorm_1p": False}
    store("llama in fp8, by samples", multi_latent_attention=True, **latent)
    assert main(["import-config", "megatron:ckpt", "--output", "run.toml"]) == 0
    model = load_config("run.toml").model
    assert (model.kv_lora_rank, model.head_dim, model.rope_head_dim, model.num_kv_heads) == (32, 16, 8, 4)


def test_folders_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ckpt is no checkpoint of Megatron-LM" in refused(capsys)
    Path("ckpt/iter_0000010").mkdir(parents=True)
    Path("ckpt/latest_checkpointed_iteration.txt").write_text("10")
    assert "there is no file ckpt/iter_0000010/common.pt" in refused(capsys)
    torch.save({"iteration": 10}, "ckpt/iter_0000010/common.pt")
    assert "common.pt has no args" in refused(capsys)
