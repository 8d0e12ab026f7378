"""Megatron-LM's arguments for mixtures of experts, those that only affect execution, and those of models and programs
that have none here.
"""

from dataclasses import replace

from megascale.config.foreign import conversions as convert
from megascale.config.foreign import setting
from megascale.config.foreign.setting import MANY, Needless, Setting, absent, needless, same, switch, words

_NO_DEEPEP = "not supported: the exchange is NCCL's, see moe.dispatcher"
_WHOLE = "not supported: an expert is whole on a rank, of parallel.ep"
_UPCYCLING = "not in training: `megascale ckpt convert --experts N K` makes a checkpoint of experts"
_FAST = "nothing to write: for speed or memory alone"
_FILES = "nothing to write: checkpoints have one format, for every layout"
_LOGS = "nothing to write: for logs alone"
MUON = "not supported: another scale, steps and momentum; write optimizer.name = muon and optimizer.options"
_FP32 = {"fp32": "nothing to write: fp32", "torch.float32": "nothing to write: fp32"}

_OF_EXPERTS = (
    Setting("--moe-router-topk", "model.experts_per_token", lambda values, _: values[0] if values[0] > 1 else
            setting.Several({"model.experts_per_token": 1, "model.router_normalize": False})),  # as a single weight is
    *setting.same_values({
        "--moe-ffn-hidden-size": "model.expert_ffn_size",
        "--moe-shared-expert-intermediate-size": "model.shared_ffn_size",
        "--moe-router-group-topk": "model.router_top_groups", "--moe-router-topk-scaling-factor": "model.router_scale",
        "--moe-router-bias-update-rate": "moe.bias_rate", "--moe-z-loss-coeff": "moe.z_loss_weight",
        "--expert-model-parallel-size": "parallel.ep",
    }),
    Setting("--moe-layer-freq", "model.dense_layers", convert.dense_layers,
            "the first layers without experts, N of `([0]*N+[1]*M)`"),
    switch("--moe-shared-expert-gate", "model.shared_gate", True),
    words("--moe-router-score-function", "model.router_score",
          {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}),
    Setting("--moe-router-pre-softmax", "model.router_normalize", lambda _, context: Needless("of softmax alone")
            if convert.value_of(context, "moe_router_score_function", "softmax") != "softmax" else False, takes=0),
    Setting("--moe-router-num-groups", "model.router_groups", convert.router_groups,
            "with router_group_value = top2, at two experts a group"),
    switch("--moe-router-enable-expert-bias", "model.balance_bias", True),
    replace(words(
        "--moe-router-load-balancing-type", "moe.balance", convert.LOSSES, "one loss: several are not supported",
        aux_loss="with moe.balance_group = batch.micro", global_aux_loss="the nearest, by the loads of the step before",
        sinkhorn="not supported: write another moe.balance, or model.balance_bias = true"),
        convert=convert.balance, takes=MANY),
    Setting("--moe-aux-loss-coeff", "moe.balance_weight", convert.balance_weight,
            "0, their default: moe.balance is none", takes=MANY),
    Setting("--expert-tensor-parallel-size", "", lambda values, _: Needless(
            "nothing to write: an expert is whole" if values[0] == 1 else _WHOLE), _WHOLE),
    same("--moe-expert-capacity-factor", "moe.capacity_factor", "of a sequence, theirs is of a rank's tokens"),
    absent("--moe-token-drop-policy", "not supported but probs: the largest weights stay",
           harmless={"probs": "nothing to write: the largest weights stay"}),
    needless("--moe-pad-expert-input-to-capacity", "not supported: rows are as many as chosen", 0),
    words("--moe-token-dispatcher-type", "moe.dispatcher",
          {"alltoall": "all_to_all", "allgather": "all_gather", "flex": "all_to_all"}, "", "all_gather"),
    needless("--overlap-moe-expert-parallel-comm", "write parallel.schedule = combined_1f1b", 0),
    needless("--moe-router-dtype", "nothing to write: logits are in fp32"),
    absent("--moe-input-jitter-eps", "not supported"),
    needless("--moe-shared-expert-overlap, --moe-grouped-gemm, --moe-per-layer-logging",
             "nothing to write: always so", 0),
    needless("--moe-permute-fusion, --moe-router-fusion", "nothing to write: a switch for speed alone", 0),
    absent("--moe-use-upcycling", _UPCYCLING, 0),
    needless("--moe-upcycling-granularity", _UPCYCLING),
    absent("--moe-router-force-biased, --moe-router-quantile-balancing-ema, --moe-expert-rank-capacity-factor, "
           "--moe-dispatch-fwd-dtype, --moe-combine-bwd-dtype", "not supported for experts",
           harmless={"bf16": "nothing to write: bf16"}),
    needless("--moe-enable-deepep", _NO_DEEPEP, 0),
    needless("--moe-flex-dispatcher-backend, --moe-deepep-num-sms, --moe-hybridep-num-sms", _NO_DEEPEP),
    absent("--moe-router-force-load-balancing",
           "not supported: a router chooses by its scores; `megascale plan` counts equal loads", 0),
    absent("--moe-apply-probs-on-input", "not supported: weights multiply the input of the down projection", 0),
    needless("--moe-router-padding-for-fp8, --moe-router-padding-for-quantization",
           "nothing to write: no rows are padded", 0),
)  # fmt: skip

EXPERTS = (
    Setting("--num-experts, --num-moe-experts", "model.experts", convert.experts),
    *(replace(row, only_with="num_experts") for row in _OF_EXPERTS),
)

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
