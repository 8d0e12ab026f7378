"""Settings of torchtitan, NeMo, DeepSpeed and Hugging Face transformers.

torchtitan: the TOML files up to February 2026, and the dataclasses since then (commit b5bcd76c). NeMo: the YAML files
of version 1; versions since then use Megatron-LM's names. DeepSpeed: its JSON file. transformers: `config.json`, and
the arguments of its Trainer.
"""

from __future__ import annotations

import math
from typing import Any

from megascale.config.foreign import conversions as convert
from megascale.config.foreign import setting
from megascale.config.foreign.setting import (
    MANY,
    Advice,
    Needless,
    Setting,
    absent,
    needless,
    same,
    switch,
    words,
)

_DTYPES = {
    "bfloat16": "bf16", "float32": "fp32", "bf16": "bf16", "fp32": "fp32", "32": "fp32", "bf16-mixed": "bf16",
    "bf16-true": "bf16", "32-true": "fp32", "fp8": "fp8",
}  # fmt: skip
_ZERO = {"0": 0, "1": 1, "2": 2, "3": 3}
_PRESET = 'write model.preset, such as "llama3-8b": docs/presets.md lists them'
_HEAD = "nothing to write: the head stays in bf16"
_LAYERS = "not supported: write fp8.first_layers_bf16 and fp8.last_layers_bf16"
_PRESETS = {(f"llama3{dot}", size): f"llama3.1-{size.lower()}" for dot in ("", "_ft") for size in ("8B", "70B", "405B")}


TORCHTITAN = (
    Setting("model.flavor, flavor", "model.preset", lambda values, context: _PRESETS.get(
            (convert.value_of(context, "model.name"), str(values[0]))) or Advice(_PRESET)),
    Setting("model.converters", "train.precision", convert.converters, "float8 alone"),
    needless("model.hf_assets_path, model.tokenizer_path, hf_assets_path",
             "`megascale data prepare --tokenizer FILE`, and data.tokenizer = FILE"),
    Setting("training.dataset", "data.train", lambda values, _: f"data/{values[0]}",
            "`megascale data prepare` makes a dataset for data.train"),
    Setting("training.dataset_path", "data.train", convert.blend, "a dataset by `megascale data prepare`"),
    Setting("training.local_batch_size", "batch.micro", lambda values, context: convert.value_of(
            context, "parallelism.pipeline_parallel_microbatch_size", 1) if convert.value_of(
            context, "parallelism.pipeline_parallel_degree", 1) > 1 else values[0],
            "sequences of a micro-batch; their local batch has several with pp"),
    same("parallelism.pipeline_parallel_microbatch_size, pipeline_parallel_microbatch_size", "batch.micro", "with pp",
         only_with="parallelism.pipeline_parallel_degree"),
    Setting("training.global_batch_size", "batch.global", convert.global_batch,
            "-1: local_batch_size x dp, of --gpus N"),
    same("training.seq_len, training.max_context_length", "model.seq_length", theirs=2048),
    absent("training.num_tokens_per_microbatch_per_dp_rank", "write batch.micro, in sequences"),
    absent("training.num_tokens_per_train_step", "write batch.global, in sequences"),
    same("training.steps", "train.steps", theirs=10000),
    same("optimizer.lr", "optimizer.lr", theirs=8e-4),
    *setting.same_values({
        "optimizer.eps": "optimizer.eps", "training.max_norm": "optimizer.clip_norm", "debug.seed": "train.seed",
        "parallelism.tensor_parallel_degree": "parallel.tp", "parallelism.pipeline_parallel_degree": "parallel.pp",
        "parallelism.context_parallel_degree": "parallel.cp", "parallelism.expert_parallel_degree": "parallel.ep",
        "lr_scheduler.total_steps": "optimizer.schedule_steps", "metrics.log_freq": "train.log_every",
    }),
    Setting("optimizer.weight_decay", "optimizer.weight_decay", lambda values, _: setting.Several({
            "optimizer.weight_decay": values[0]}), "of norms, too, there, and not here"),
    words("optimizer.name", "optimizer.name", {"adamw": "adamw"}, "adamw alone"),
    same("lr_scheduler.warmup_steps", "optimizer.warmup_steps", theirs=200),
    absent("training.dtype", "not supported: master weights are fp32",
           harmless={"float32": "nothing to write: master weights are fp32"}),
    words("training.mixed_precision_param", "train.precision", {"bfloat16": "bf16", "float32": "fp32"},
          "master weights and reductions in fp32", "bf16"),
    needless("training.mixed_precision_reduce", "nothing to write: fp32"),
    switch("training.enable_cpu_offload", "optimizer.offload", "host", "weights and gradients stay on the device"),
    needless("training.gc_freq, training.gc_debug", "nothing to write: collected on all ranks in the same step"),
    needless("debug.deterministic", "nothing to write"),
    switch("parallelism.enable_sequence_parallel", "parallel.sp", True, "with tp above 1", True),
    words("parallelism.pipeline_parallel_schedule", "parallel.schedule",
          {"1f1b": "1f1b", "interleaved1f1b": "interleaved_1f1b", "gpipe": "gpipe",
           "interleavedzerobubble": "interleaved_zb", "zbvzerobubble": "zb_v", "dualpipev": "dualpipev"},
          "LoopedBFS is not supported"),
    absent("parallelism.pipeline_parallel_layers_per_stage, parallelism.module_fqns_per_model_part",
           "write parallel.vpp, and parallel.layers_per_chunk"),
    needless("parallelism.num_pp_microbatches", "nothing to write: batch.global / (batch.micro x dp)"),
    words("parallelism.context_parallel_rotate_method", "parallel.cp_mode",
          {"allgather": "allgather", "alltoall": "ring"}),
    needless("parallelism.context_parallel_load_balancer", "nothing to write: head and tail together"),
    Setting("parallelism.data_parallel_shard_degree", "parallel.zero", lambda values, _: 0 if values[0] == 1 else 3,
            "sharded over all of dp: with replicas write it as parallel.dp_shard, too", 3),
    needless("parallelism.data_parallel_replicate_degree",
  "nothing to write: dp is what tp, cp and pp leave; parallel.dp_shard of it shard"),
    words("parallelism.fsdp_reshard_after_forward", "parallel.reshard", {"always": "forward", "never": "keep"},
          default="leave it out: forward, with pp keep"),
    needless("parallelism.expert_tensor_parallel_degree", "not supported: an expert is whole on a rank of ep"),
    switch("parallelism.enable_async_tensor_parallel, compile.enable_async_tensor_parallel", "overlap.tp", True,
           theirs=False),
    switch("compile.enable", "train.compile", True),
    Setting("optimizer.beta1, optimizer.beta2", "optimizer.betas", convert.betas(beta1=0.9, beta2=0.95)),
    needless("optimizer.implementation, optimizer.early_step_in_backward", "write backends.optimizer"),
    words("lr_scheduler.decay_type", "optimizer.decay", {"linear": "linear", "cosine": "cosine"}, theirs="linear"),
    absent("lr_scheduler.decay_ratio", "write optimizer.decay = wsd and optimizer.decay_steps"),
    Setting("lr_scheduler.min_lr_factor", "optimizer.min_lr", lambda values, context: float(
            f"{values[0] * context['lr'][0]:.6g}"), "a rate, theirs is a share of lr"),
    words("activation_checkpoint.mode", "train.recompute", {"none": "none", "selective": "selective", "full": "full"},
          "memory_budget is not supported", "selective"),
    needless("activation_checkpoint.selective_ac_option", "write train.recompute_ops, or train.memory"),
    words("quantize.linear.float8.recipe_name, float8.recipe_name", "fp8.recipe",
          {"tensorwise": "tensorwise", "rowwise": "rowwise"}, 'with train.precision = "fp8"'),
    needless("float8.enable_fsdp_float8_all_gather, float8.precompute_float8_dynamic_scale_for_fsdp, "
             "quantize.linear.float8.enable_fsdp_float8_all_gather, "
             "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
             "nothing to write: weights are gathered in FP8, with exact rowwise scales in bf16"),
    Setting("float8.filter_fqns, quantize.linear.float8.filter_fqns", "", lambda values, _: Needless(_HEAD)
            if set(values[0]) <= {"output", "lm_head"} else Advice(_LAYERS), _LAYERS),
    absent("quantize.linear.mx.recipe_name, mx.recipe_name", 'write train.precision = "fp8" and fp8.recipe = "mxfp8"'),
    needless("checkpoint.enable", "nothing to write: checkpoint.every = 0 is off", 0),
    needless("checkpoint.folder", "checkpoints are in output_dir/name; checkpoint.dir puts them elsewhere"),
    Setting("checkpoint.interval", "checkpoint.every", lambda values, context: values[0] if "model.flavor" not in
            context or convert.value_of(context, "checkpoint.enable") else 0, theirs=0),
    same("checkpoint.keep_latest_k", "checkpoint.keep", theirs=10),
    same("checkpoint.initial_load_path", "checkpoint.resume", "hf:FOLDER for weights of Hugging Face"),
    absent("checkpoint.load_step", "write checkpoint.resume = RUN/checkpoints/step-N, with another name for the run"),
    words("checkpoint.async_mode", "checkpoint.async",
          {"disabled": False, "async": True, "async_with_pinned_mem": True}, theirs=False),
    needless("checkpoint.last_save_in_hf, checkpoint.export_dtype", "`megascale ckpt convert RUN FOLDER --dtype bf16`"),
    switch("metrics.enable_tensorboard", "observe.tensorboard", True, theirs=False),
    needless("metrics.enable_wandb", "not supported: metrics.jsonl, TensorBoard, `megascale dashboard`, Prometheus", 0),
    same("job.dump_folder, dump_folder", "output_dir", "a run's folder is output_dir/name"),
    needless("profiling.enable_profiling, profiling.profile_freq", "write observe.profile_step = N"),
    Setting("validation.freq, validator.freq", "train.eval_every", lambda values, context: values[0] if
            "model.flavor" not in context or convert.value_of(context, "validation.enable") else 0),
    Setting("validation.steps, validator.steps", "train.eval_steps", lambda values, context: Needless("no validation")
            if "model.flavor" in context and not convert.value_of(context, "validation.enable") else
            Advice("write train.eval_steps, a number") if values[0] == -1 else values[0]),
    needless("validation.enable", "nothing to write: train.eval_every = 0 is off", 0),
    same("comm.init_timeout_seconds", "launch.start_timeout_s", theirs=300.0),
    same("comm.train_timeout_seconds", "comm.timeout_s", theirs=100.0),
    Setting("validation.dataset, validation.dataset_path", "data.valid", lambda values, context: f"data/{values[0]}"
            if convert.value_of(context, "validation.enable") else Needless("nothing to write: no validation"),
            "`megascale data prepare` makes a dataset"),
    absent("debug.moe_force_load_balance", "not supported: a router chooses by its scores"),
    needless("fault_tolerance.enable", "use `megascale launch CONFIG --nodes N`, with [fault]", 0),
    needless("dataloader.num_workers, training.dataloader.num_workers", "write data.reader = host"),
)  # fmt: skip

TORCHTITAN_BEGINNINGS = (
    needless("profiling., metrics., comm., memory_estimation., job.", "for logs alone"),
    needless("compile., checkpoint., activation_checkpoint., parallelism., debug.deterministic, model.name, "
             "model.print", "the run is the same"),
    needless("validation.", "as in training"),
)  # fmt: skip
"""By the beginnings of the names of other settings of torchtitan."""

_LLAMA3 = {
    "model.name": "llama3", "model.converters": [], "training.seq_len": 8192, "training.steps": 1000,
    "training.dataset": "c4", "checkpoint.interval": 500, "validation.freq": 500, "validation.steps": 1200,
    "metrics.enable_tensorboard": True, "profiling.enable_profiling": True, "profiling.profile_freq": 100,
}  # fmt: skip
_ASSETS = "./assets/hf/Llama-3.1-"

TORCHTITAN_RUNS: dict[str, dict[str, Any]] = {
    "llama3_8b": _LLAMA3 | {
        "model.flavor": "8B", "model.hf_assets_path": f"{_ASSETS}8B", "optimizer.lr": 3e-4,
        "training.local_batch_size": 1, "activation_checkpoint.mode": "selective",
    },
    "llama3_70b": _LLAMA3 | {
        "model.flavor": "70B", "model.hf_assets_path": f"{_ASSETS}70B", "optimizer.lr": 1.5e-4,
        "training.local_batch_size": 8, "activation_checkpoint.mode": "full", "parallelism.tensor_parallel_degree": 8,
    },
    "llama3_405b": _LLAMA3 | {
        "model.flavor": "405B", "model.hf_assets_path": f"{_ASSETS}405B", "model.converters": ["float8"],
        "optimizer.lr": 8e-5, "training.local_batch_size": 2, "training.steps": 3000,
        "activation_checkpoint.mode": "full", "lr_scheduler.warmup_steps": 600, "float8.filter_fqns": ["lm_head"],
        "parallelism.tensor_parallel_degree": 8, "parallelism.enable_async_tensor_parallel": True,
        "compile.enable": True,
    },
}  # fmt: skip
"""Published configurations of torchtitan 0.3, by the name of the function that each is there."""

NEMO = (
    *setting.same_values({
        "trainer.max_steps, max_steps": "train.steps",
        "trainer.val_check_interval, val_check_interval": "train.eval_every",
        "trainer.limit_val_batches, limit_val_batches": "train.eval_steps",
        "trainer.log_every_n_steps, log_every_n_steps": "train.log_every",
        "trainer.gradient_clip_val, gradient_clip_val": "optimizer.clip_norm",
        "exp_manager.explicit_log_dir, explicit_log_dir, exp_dir, log_dir": "output_dir",
        "model.encoder_seq_length, encoder_seq_length": "model.seq_length", "model.optim.lr, max_lr": "optimizer.lr",
        "model.optim.sched.warmup_steps": "optimizer.warmup_steps", "softmax_scale": "model.softmax_scale",
    }),
    words("trainer.precision, precision", "train.precision", _DTYPES, "16 is not supported: fp16 with loss scaling"),
    needless("trainer.devices, trainer.num_nodes, num_nodes", "nothing to write: torchrun, srun or `megascale launch`"),
    needless("trainer.accumulate_grad_batches", "nothing to write: batch.global / (batch.micro x dp)"),
    needless("model.mcore_gpt", "nothing to write: one model", 0),
    Setting("model.optim.betas", "optimizer.betas", convert.every, takes=MANY),
    words("model.optim.sched.name", "optimizer.decay", {"cosineannealing": "cosine", "warmuppolicy": "constant"}),
    absent("model.optim.sched.constant_steps", "write optimizer.decay = wsd and optimizer.decay_steps"),
    Setting("model.data.data_prefix, data_prefix, blend", "data.train", convert.blend, takes=MANY),
    needless("model.megatron_amp_O2", "nothing to write: master weights in fp32", 0),
)  # fmt: skip

DEEPSPEED = (
    *setting.same_values({
        "train_batch_size": "batch.global", "train_micro_batch_size_per_gpu": "batch.micro",
        "warmup_num_steps": "optimizer.warmup_steps", "total_num_steps": "train.steps",
        "tiled_mlp_num_shards": "train.mlp_tiles", "steps_per_print": "train.log_every",
    }),
    needless("gradient_accumulation_steps", "nothing to write: batch.global / (batch.micro x dp)"),
    words("zero_optimization.stage, zero_stage, stage", "parallel.zero", _ZERO, theirs=0),
    switch("zero_optimization.overlap_comm, overlap_comm", "overlap.dp", True),
    Setting("zero_optimization.reduce_bucket_size, reduce_bucket_size", "overlap.bucket_bytes",
            lambda values, _: 4.0 * values[0], "bytes of fp32 gradients, theirs are elements"),
    absent("offload_optimizer", 'write optimizer.offload = "host"'),
    absent("offload_param", "not supported: parallel.zero = 3"),
    switch("bf16.enabled, bf16_enabled", "train.precision", "bf16"),
    switch("fp16.enabled, fp16_enabled", "train.precision", "bf16", setting.NO_FP16),
    same("gradient_clipping", "optimizer.clip_norm", theirs=0.0),
    absent("scheduler.type", "write optimizer.decay"),
    Setting("cpu_checkpointing", "train.memory", lambda values, _: Needless("the default")
            if setting.as_word(*values[:1]) in ("false", "0") else ["full_host"], takes=0),
    absent("partition_activations", "write parallel.sp = true", 0),
    needless("wall_clock_breakdown", "nothing to write: observe.record_events", 0),
    same("sequence_parallel_size, ulysses_degree", "parallel.cp", 'with parallel.cp_mode = "ulysses"'),
    absent("autotp_size", "write parallel.tp"),
)  # fmt: skip

TRANSFORMERS = (
    *setting.same_values({
        "dim, n_embd, d_model": "model.hidden_size", "n_head, n_heads": "model.num_heads",
        "num_key_value_heads, n_kv_heads": "model.num_kv_heads", "qk_rope_head_dim": "model.rope_head_dim",
        "num_local_experts, n_routed_experts": "model.experts", "num_experts_per_tok": "model.experts_per_token",
        "moe_intermediate_size": "model.expert_ffn_size", "first_k_dense_replace": "model.dense_layers",
        "norm_topk_prob": "model.router_normalize", "routed_scaling_factor": "model.router_scale",
        "n_layer, n_layers, num_hidden_layers": "model.num_layers", "intermediate_size, hidden_dim": "model.ffn_size",
        "seq_len, max_seq_len, n_positions, block_size": "model.seq_length",
        "rms_norm_eps, layer_norm_epsilon, layer_norm_eps": "model.norm_eps",
        "partial_rotary_factor, rotary_pct": "model.rotary_fraction", "initializer_range": "model.init_std",
        "sliding_window": "model.window", "attn_logit_softcapping": "model.attention_softcap",
        "final_logit_softcapping": "model.logit_softcap", "tp_size": "parallel.tp", "pp_size": "parallel.pp",
        "dp_size": "parallel.dp", "per_device_train_batch_size": "batch.micro", "learning_rate": "optimizer.lr",
        "wd": "optimizer.weight_decay", "grad_clip, max_grad_norm, max_norm": "optimizer.clip_norm",
        "iterations, num_iterations": "train.steps", "random_seed": "train.seed", "logging_steps": "train.log_every",
        "save_steps, interval": "checkpoint.every", "save_total_limit": "checkpoint.keep",
        "resume_from_checkpoint, resume_from": "checkpoint.resume", "train_file, dataset_path, dataset": "data.train",
    }),
    same("qk_nope_head_dim", "model.head_dim", "with kv_lora_rank"),
    absent("n_shared_experts", "write model.shared_ffn_size: n_shared_experts x moe_intermediate_size"),
    same("router_aux_loss_coef", "moe.balance_weight", "with moe.balance"),
    words("hidden_act, hidden_activation, activation_function", "model.activation",
          {"silu": "swiglu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
          "a gated MLP: swiglu for silu, geglu for gelu_pytorch_tanh"),
    switch("tie_word_embeddings", "model.tie_embeddings", True),
    Setting("query_pre_attn_scalar", "model.softmax_scale", lambda values, _: math.pow(values[0], -0.5),
            "its inverse square root"),
    words("torch_dtype, dtype", "train.precision", _DTYPES),
    absent("fsdp, reshard_after_forward", "write parallel.zero = 3 and parallel.reshard"),
    Setting("warmup_ratio", "optimizer.warmup_steps", lambda values, context: round(
        values[0] * context["max_steps"][0]), "counts steps"),
    Setting("warmup_samples", "optimizer.warmup_steps", lambda values, context: int(
            values[0] // (context.get("global_batch_size") or context["train_batch_size"])[0]),
            "steps: samples / batch.global"),
    absent("num_train_epochs, max_epochs", "write train.steps: steps x batch.global samples"),
    switch("gradient_checkpointing", "train.recompute", "full"),
)  # fmt: skip

TABLES = {
    "training": "train", "trainer": "train", "optim": "optimizer", "lr_scheduler": "optimizer",
    "parallelism": "parallel", "dataset": "data", "checkpointing": "checkpoint", "activation_checkpoint": "train",
    "float8": "fp8", "quantize": "fp8", "logging": "observe", "metrics": "observe",
    "profiling": "observe", "validation": "train", "debug": "train", "zero_optimization": "parallel",
    "fault_tolerance": "fault",
}  # fmt: skip
"""Tables of other systems' files, with the table here that has most of their keys."""
