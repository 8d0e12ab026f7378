"""Names of other systems' settings, with the keys here that set the same: for hints, where spelling would mislead.

Sources: arguments of Megatron-LM, job configurations of torchtitan, `config.json` of Hugging Face transformers.
"""

FOREIGN_KEYS = {
    # model
    "dim": "model.hidden_size", "hidden_dim": "model.hidden_size", "n_embd": "model.hidden_size",
    "num_attention_heads": "model.num_heads", "n_head": "model.num_heads", "n_heads": "model.num_heads",
    "num_query_groups": "model.num_kv_heads", "num_key_value_heads": "model.num_kv_heads",
    "n_kv_heads": "model.num_kv_heads", "n_layer": "model.num_layers", "n_layers": "model.num_layers",
    "num_hidden_layers": "model.num_layers", "ffn_hidden_size": "model.ffn_size", "intermediate_size": "model.ffn_size",
    "kv_channels": "model.head_dim", "seq_len": "model.seq_length", "max_seq_len": "model.seq_length",
    "max_position_embeddings": "model.seq_length", "padded_vocab_size": "model.vocab_size", "flavor": "model.preset",
    "normalization": "model.norm", "norm_epsilon": "model.norm_eps", "layernorm_epsilon": "model.norm_eps",
    "rms_norm_eps": "model.norm_eps", "layer_norm_epsilon": "model.norm_eps", "rotary_base": "model.rope_theta",
    "rotary_percent": "model.rotary_fraction", "partial_rotary_factor": "model.rotary_fraction",
    "rotary_pct": "model.rotary_fraction", "position_embedding_type": "model.position",
    "hidden_dropout": "model.dropout", "attention_dropout": "model.dropout", "init_method_std": "model.init_std",
    "initializer_range": "model.init_std", "hidden_act": "model.activation", "swiglu": "model.activation",
    "add_bias_linear": "model.bias", "tie_word_embeddings": "model.tie_embeddings",
    "untie_embeddings_and_output_weights": "model.tie_embeddings", "sliding_window": "model.window",
    "window_size": "model.window", "qk_layernorm": "model.qk_norm", "add_qkv_bias": "model.qkv_bias",
    # parallel and batch
    "tensor_model_parallel_size": "parallel.tp", "tensor_parallel_degree": "parallel.tp", "tp_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp", "pipeline_parallel_degree": "parallel.pp", "pp_size": "parallel.pp",
    "data_parallel_shard_degree": "parallel.dp", "data_parallel_replicate_degree": "parallel.dp",
    "dp_size": "parallel.dp", "context_parallel_size": "parallel.cp", "context_parallel_degree": "parallel.cp",
    "cp_comm_type": "parallel.cp_mode", "hierarchical_context_parallel_sizes": "parallel.cp_a2a_size",
    "ulysses_degree": "parallel.cp_a2a_size",
    "expert_model_parallel_size": "parallel.ep", "expert_parallel_degree": "parallel.ep",
    "virtual_pipeline_model_parallel_size": "parallel.vpp", "sequence_parallel": "parallel.sp",
    "pipeline_parallel_schedule": "parallel.schedule", "zero_stage": "parallel.zero", "fsdp": "parallel.zero",
    "use_distributed_optimizer": "parallel.zero", "overlap_grad_reduce": "overlap.dp",
    "overlap_param_gather": "overlap.dp", "tp_comm_overlap": "overlap.tp", "micro_batch_size": "batch.micro",
    "local_batch_size": "batch.micro", "global_batch_size": "batch.global",
    "rampup_batch_size": "batch.rampup",
    # train and optimizer
    "train_iters": "train.steps", "max_steps": "train.steps", "iterations": "train.steps", "dtype": "train.precision",
    "mixed_precision": "train.precision", "bf16": "train.precision", "fp16": "train.precision",
    "torch_dtype": "train.precision", "recompute_granularity": "train.recompute",
    "activation_checkpoint": "train.recompute", "recompute_modules": "train.recompute_ops",
    "enable_activation_offloading": "train.activation_offload", "cpu_offloading": "train.activation_offload",
    "cpu_checkpointing": "train.activation_offload", "fine_grained_activation_offloading": "train.activation_offload",
    "tiled_mlp": "train.mlp_tiles", "tiled_mlp_num_shards": "train.mlp_tiles",
    "eval_interval": "train.eval_every", "eval_iters": "train.eval_steps", "log_interval": "train.log_every",
    "log_freq": "train.log_every", "random_seed": "train.seed", "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "adam_beta1": "optimizer.betas", "adam_beta2": "optimizer.betas", "beta1": "optimizer.betas",
    "beta2": "optimizer.betas", "adam_eps": "optimizer.eps",
    "clip_grad": "optimizer.clip_norm", "grad_clip": "optimizer.clip_norm", "max_norm": "optimizer.clip_norm",
    "gradient_clip_val": "optimizer.clip_norm", "lr_warmup_iters": "optimizer.warmup_steps",
    "lr_decay_style": "optimizer.decay", "lr_decay_iters": "optimizer.decay_steps", "wd": "optimizer.weight_decay",
    # data, checkpoint and observe
    "data_path": "data.train", "train_data_path": "data.train", "dataset_path": "data.train", "dataset": "data.train",
    "blend": "data.train", "valid_data_path": "data.valid", "data_cache_path": "data.cache",
    "reset_attention_mask": "data.attention_mask", "reset_position_ids": "data.attention_mask",
    "tokenizer_path": "data.tokenizer", "tokenizer_model": "data.tokenizer", "save_interval": "checkpoint.every",
    "interval": "checkpoint.every", "load": "checkpoint.resume", "initial_load_path": "checkpoint.resume",
    "resume_from": "checkpoint.resume", "save": "checkpoint.dir", "keep_latest_k": "checkpoint.keep",
    "async_save": "checkpoint.async", "async_mode": "checkpoint.async", "tensorboard_dir": "observe.tensorboard",
    "enable_tensorboard": "observe.tensorboard", "dump_folder": "output_dir", "log_dir": "output_dir",
}  # fmt: skip

FOREIGN_TABLES = {
    "training": "train", "optim": "optimizer", "lr_scheduler": "optimizer", "parallelism": "parallel",
    "dataset": "data", "checkpointing": "checkpoint", "activation_checkpoint": "train", "float8": "fp8",
    "logging": "observe", "metrics": "observe",
}  # fmt: skip
"""Tables of other systems, with the table here that has most of their keys."""
