"""Megatron-LM's arguments that only affect execution, and those of models and programs that have none here."""

from megascale.config.foreign.setting import MANY, absent, needless, same

_FAST = "nothing to write: for speed or memory alone"
_FILES = "nothing to write: checkpoints have one format, for every layout"
_LOGS = "nothing to write: for logs alone"
MUON = "not supported: another scale, steps and momentum; write optimizer.name = muon and optimizer.options"
_FP32 = {"fp32": "nothing to write: fp32", "torch.float32": "nothing to write: fp32"}

OTHERS = (
    needless("--ddp-average-in-collective, --ddp-pad-buckets-for-high-nccl-busbw, --disable-gloo-process-groups, "
             "--overlap-p2p-communication-warmup-flush, --overlap-param-gather-with-optimizer-step, "
             "--reuse-grad-buf-for-mxfp8-param-ag, --te-rng-tracker, --use-flashinfer-fused-rope, "
             "--use-fused-weighted-squared-relu, --defer-embedding-wgrad-compute, --use-transformer-engine-op-fuser, "
             "--no-use-layer-wise-param-layout, --enable-experimental, --check-for-large-grads, "
             "--disable-bf16-reduced-precision-matmul, --fsdp-manual-registration, --init-model-with-meta-device, "
             "--fsdp-double-buffer, --use-nccl-ub, --export-force-local-attention", _FAST, 0),
    needless("--ddp-num-buckets, --high-priority-stream-groups, "
             "--cuda-graph-modules, --cuda-graph-scope, --cuda-graph-warmup-steps, --tp-comm-overlap-cfg, "
             "--wgrad-deferral-limit, --offload-modules, --megatron-fsdp-grad-comm-dtype, "
             "--megatron-fsdp-main-grads-dtype, --megatron-fsdp-main-params-dtype, "
             "--activations-checkpoint-method, --num-dataset-builder-threads", _FAST, MANY),
    needless("--num-distributed-optimizer-instances",
             "write parallel.dp_shard = dp / instances, or nothing: for speed or memory alone"),
    needless("--outer-dp-sharding-strategy", 'for optim write parallel.state_shard = "all" with zero = 3, no '
             "parallel.dp_shard with zero = 1 or 2: for memory alone"),
    needless("--async-ckpt-use-cpu-shm, --use-persistent-ckpt-worker, --auto-detect-ckpt-format, "
             "--ckpt-assume-constant-structure, --ckpt-drop-redundant-extra-state, "
             "--ckpt-fully-parallel-load-per-rank-objects, --dist-ckpt-optim-fully-reshardable, "
             "--no-ckpt-fully-parallel-save, --no-ckpt-load-validate-sharding-integrity", _FILES, 0),
    needless("--async-strategy", _FILES),
    needless("average_in_collective, check_for_nan_in_grad, grad_reduce_in_fp32, fully_parallel_save, pipeline_dtype, "
             "skip_getting_attention_mask_from_dataset, data_sharding, use_tokenizer_vocab_size, apply_rope_fusion, "
             "masked_softmax_fusion, bias_dropout_fusion, persist_layer_norm, gradient_accumulation_fusion, "
             "scatter_embedding_sequence_parallel, should_pad_vocab, batch_p2p_comm, deallocate_pipeline_outputs, "
             "params_dtype, perform_initialization", "nothing to write: a field for speed, or always so"),
    needless("--log-validation-ppl-to-tensorboard, --log-progress, --log-energy, --no-record-throughput", _LOGS, 0),
    needless("--logging-level, --log-memory-interval, --tensorboard-log-interval, --straggler-minmax-count, "
             "--wandb-entity", _LOGS),
    same("--padded-vocab-size", "model.vocab_size"),
    needless("--no-use-tokenizer-model-from-checkpoint-args", "nothing to write: data.tokenizer says it", 0),
    needless("--eval-global-batch-size", "not supported: an evaluation takes batch.global sequences, too"),
    needless("--bias-activation-fusion", _FAST),
    needless("--no-position-embedding", "nothing to write: model.position says it", 0),
    absent("--use-checkpoint-args", "import the arguments that made the checkpoint", 0),
    absent("--exp-avg-dtype, --exp-avg-sq-dtype, --main-grads-dtype, --main-params-dtype",
           'write optimizer.name = "adamw_8bit", or optimizer.master_weights = "bf16_compensated"', 1, _FP32),
    absent("--rope-type", "write model.rope_scaling", 1, {"rope": "nothing to write: without scaling"}),
    absent("--apply-wd-to-qk-layernorm", "not supported: norms have no weight decay", 0),
    absent("--attention-output-gate, --rotary-interleaved, --mtp-use-repeated-layer, --enable-gpt-oss, "
           "--no-yarn-correction-range-round-to-int", "not supported: another model", 0),
    needless("--muon-momentum, --muon-num-ns-steps, --muon-scale-mode, --muon-extra-scale-factor, --muon-tp-mode, "
             "--muon-coefficient-type, --muon-fp32-matmul-prec, --muon-scalar-optimizer", MUON),
    needless("--muon-nesterov, --muon-no-split-qkv, --muon-use-syrk", MUON, 0),
    absent("--lr-mult-router", "write [[optimizer.groups]] with params and lr_mult"),
    absent("--fim-data, --sft, --use-packed-sequence", "not supported: samples of another kind", 0),
    absent("--model-provider, --export-model-type", "not supported: a model of another kind"),
    absent("--perform-rl-step, --qk-clip, --freeze-all-layers, --decrease-batch-size-if-needed", "not supported", 0),
    absent("--embedding-init-method-std, --no-weight-decay-cond-type, --phase-transition-iterations, "
           "--te-precision-config-file, --logits-load-dir, --export-kd-teacher-load", "not supported"),
    absent("--is-hybrid-model, --bert-no-binary-head", "not supported: a model of another kind", 0),
)  # fmt: skip

BEGINNINGS = (
    absent("moe_", "not supported for experts"), absent("fim_, sft_", "not supported: samples of another kind"),
    absent("rl_, no_rl_, grpo_, langrl_, perform_rl, refit_", "not supported: reinforcement learning"),
    absent("inference_, incoming_requests, num_tokens_to_generate, output_, prompt, return_log_probs, temperature, "
           "top_, stop_words, termination_id, test_mode, flash_decode, max_tokens_to_oom, use_coordinator, async_mode, "
           "use_legacy_static_engine, suspend_, enable_chunked_prefill, decode_only_",
           "not supported: serving; `megascale sample` generates text"),
    absent("export_, flextron, enable_router, router_, budget_, binary_mask, soft_mask, slice, tau_, emb_int_list, "
           "mlp_int_list, hard_sample_th, loss_alpha, original_model_sample, linear_scaler",
           "not supported: a search for a smaller model"),
    absent("mamba_, hybrid_, encoder_, decoder_, vocab_extra_ids, linear_, dsa_, experimental_attention, img_, "
           "patch_dim, disable_vision, dataloader_seq_length, dataset_provider, total_seq_length, packing_buffer, "
           "modelopt_, language_model_checkpoint", "not supported: a model of another kind"),
)  # fmt: skip
"""By the beginnings of the names of other settings."""
