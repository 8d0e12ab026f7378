"""Settings of Megatron-LM: its command line (megatron/training/arguments.py), and the fields of its configurations.

Read at commit d98e8a64 of 2026-08-22; flags that this commit has no more are those of core_r0.12 and before.
"""

from megascale.config.foreign import conversions as convert
from megascale.config.foreign import setting
from megascale.config.foreign.megatron_others import EXPERTS, MUON, OTHERS
from megascale.config.foreign.setting import MANY, Advice, Needless, Setting, absent, needless, same, switch, words

_ALWAYS = "nothing to write: always so"
_ACTIVATIONS = {"swiglu", "squared_relu", "quick_geglu", "openai_gelu"}  # others than GELU, exact if it adds no bias
_LATENT = "multi_latent_attention"
_MODULES = {"core_attn": "attention", "layernorm": "norm", "moe_act": "activation"}
_LOAD = "auto, the default, is the run's newest; theirs: `megascale ckpt convert megatron:FOLDER DIR`"
_TOKENIZER = "`megascale data prepare` takes the tokenizer, a tokenizer.json; training compares data.tokenizer with it"
_DECAY = "not supported: optimizer.weight_decay is constant"
_WSD = "with decay = wsd; linear, theirs exponential by default"
_WARMUP = "steps of batch.global, + 1: Megatron-LM's step k has the rate after k - 1 steps"
_RECOMPUTES = {"recompute_granularity", "recompute_activations", "moe_layer_recompute"}
_OFFLOAD = 'with recomputation of blocks, write train.memory = ["full_host"] in place of train.recompute'
_QUICK = "with a clamp of 7 and an offset of 1: write model.activation = clamped_swiglu"
_CLAMP = "not supported but for --quick-geglu: 7 and 1"


MODEL = (
    *setting.same_values({
        "--num-layers": "model.num_layers", "--hidden-size": "model.hidden_size",
        "--num-attention-heads": "model.num_heads", "--kv-channels": "model.head_dim",
        "--seq-length, sequence_length": "model.seq_length", "--norm-epsilon, --layernorm-epsilon": "model.norm_eps",
        "--rotary-base": "model.rope_theta", "--rotary-percent": "model.rotary_fraction",
        "--init-method-std": "model.init_std", "--mup-base-hidden-size": "model.mup_base_width",
        "--mtp-num-layers": "model.mtp_layers", "--mtp-loss-scaling-factor": "train.mtp_loss_weight",
    }),
    Setting("--group-query-attention", "model.num_kv_heads", convert.query_groups, "1, or --num-query-groups", takes=0),
    Setting("--num-query-groups", "model.num_kv_heads", convert.query_groups),
    same("--ffn-hidden-size", "model.ffn_size", "for a gated activation the width of one of the two matrices"),
    same("--vocab-size", "model.vocab_size", "the true size; it is padded to a multiple of 64 x tp"),
    needless("--make-vocab-size-divisible-by", "nothing to write: padded to a multiple of 64 x tp, theirs of 128 x tp"),
    Setting("--max-position-embeddings", "model.seq_length", convert.positions,
            "nothing to write beside --seq-length; with learned positions of a longer model: model.positions"),
    Setting("--normalization", "model.norm", convert.norm),
    Setting("--apply-layernorm-1p", "model.norm", convert.norm, "for RMSNorm; LayerNorm has gain 1 from the start",
            takes=0),
    Setting("--swiglu", "model.activation", lambda _, context: "swiglu" if "hidden_size" not in context or
            "ffn_hidden_size" in context else setting.Several({"model.activation": "swiglu", "model.ffn_size":
            int(4 * context["hidden_size"][0] * 2 / 3 / 64) * 64}), theirs="gelu_tanh", takes=0),
    switch("--openai-gelu", "model.activation", "gelu_tanh"),
    absent("--squared-relu", "not supported: one of the choices of model.activation", 0),
    Setting("--quick-geglu", "model.activation", lambda _, context: "clamped_swiglu" if {
            "activation_func_clamp_value", "glu_linear_offset"} <= set(context) else Advice(_QUICK), _QUICK, takes=0),
    Setting("--activation-func-clamp-value", "model.activation", convert.with_quick_geglu(7), _CLAMP),
    Setting("--glu-linear-offset", "model.activation", convert.with_quick_geglu(1), _CLAMP),
    words("--softmax-type", "model.attention_sinks", {"vanilla": False, "learnable": True},
          "off-by-one: not supported"),
    words("--position-embedding-type", "model.position", {"learned_absolute": "learned", "rope": "rope"}),
    switch("--use-rotary-position-embeddings", "model.position", "rope"),
    Setting("--rotary-seq-len-interpolation-factor", "model.rope_scaling",
            lambda values, _: {"type": "linear", "factor": float(values[0])}),
    Setting("--use-rope-scaling", "model.rope_scaling", lambda _, context: {
            "type": "llama3", "factor": float(convert.value_of(context, "rope_scaling_factor", 8.0)),
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_length": 8192}, takes=0),
    needless("--rope-scaling-factor", "written by --use-rope-scaling: factor in model.rope_scaling"),
    switch("--add-qkv-bias", "model.qkv_bias", True),
    Setting("--qk-layernorm", "model.qk_norm", lambda _, context: Needless("latent vectors have norms")
            if "multi_latent_attention" in context else "head", "latent vectors always have norms", takes=0),
    Setting("--disable-bias-linear", "model.bias", lambda _, context: setting.Several({
            "model.bias": False, "model.activation": "gelu"}) if "num_layers" in context and not
            _ACTIVATIONS & set(context) else False, "without it, a router has a bias too: model.router_bias", takes=0),
    switch("add_bias_linear", "model.bias", True),
    switch("--untie-embeddings-and-output-weights", "model.tie_embeddings", False),
    switch("share_embeddings_and_output_weights", "model.tie_embeddings", True),
    Setting("gated_linear_unit", "model.activation", lambda values, context: Needless("not gated") if not values[0] else
            {"silu": "swiglu", "gelu": "geglu"}[str(convert.value_of(context, "activation_func")).rpartition(".")[2]]),
    Setting("activation_func", "model.activation", convert.activation_func, "as gated_linear_unit says, or GELU"),
    Setting("--hidden-dropout, --attention-dropout", "model.dropout", lambda values, context: values[0] if all(
            context.get(name, [0.1] if "num_layers" in context else values)[0] == values[0]
            for name in ("hidden_dropout", "attention_dropout")) else
            Advice("not supported: two probabilities; write one for both"), "one value for both", 0.1),
    absent("--init-method-xavier-uniform", "not supported: write model.init_std", 0),
    needless("--use-cpu-initialization", "nothing to write: train.seed gives the same weights in every layout", 0),
    needless("--use-mup", "nothing to write: model.mup_base_width says it", 0),
    Setting("--window-size", "model.window", convert.window, "their number of keys before the query, plus 1"),
    needless("--window-attn-skip-freq", "written by --window-size: a list, with 0 for layers without a window"),
    needless("--apply-query-key-layer-scaling", "nothing to write: scores are the same", 0),
    absent("--fp32-residual-connection", "not supported", 0),
    needless("--attention-softmax-in-fp32", _ALWAYS, 0),
    needless("--multi-latent-attention", "nothing to write: model.kv_lora_rank says it", 0),
    same("--kv-lora-rank", "model.kv_lora_rank", "", 32, _LATENT),
    same("--q-lora-rank", "model.q_lora_rank", "0: queries are projected at once"),
    same("--qk-head-dim", "model.head_dim", "with kv_lora_rank: without what is rotated", 128, _LATENT),
    same("--qk-pos-emb-head-dim", "model.rope_head_dim", "", 64, _LATENT),
    same("--v-head-dim", "model.value_head_dim", "", 128, _LATENT),
    Setting("--rotary-scaling-factor", "model.rope_scaling", convert.latent_scaling, 'of type "yarn"',
            only_with=_LATENT),
    needless("--mscale, --mscale-all-dim, --yarn-original-max-position-embeddings",
             'written by --rotary-scaling-factor: model.rope_scaling, a table of type "yarn"'),
    absent("--yarn-beta-fast", "not supported with latent attention but 32", harmless={"32": "nothing to write: 32"}),
    absent("--yarn-beta-slow", "not supported with latent attention but 1", harmless={"1": "nothing to write: 1"}),
    needless("--use-mcore-models, --use-legacy-models", "nothing to write: one model", 0),
    needless("--transformer-impl", "write backends.* for single operations; auto takes what is installed"),
    absent("--spec", "not supported: layers of another kind", MANY, {"local": "as --transformer-impl"}),
)  # fmt: skip

PARALLEL = (
    *setting.same_values({
        "--tensor-model-parallel-size": "parallel.tp", "--pipeline-model-parallel-size": "parallel.pp",
        "--context-parallel-size": "parallel.cp",
        "--num-virtual-stages-per-pipeline-rank, --virtual-pipeline-model-parallel-size": "parallel.vpp",
        "--max-seqlen-per-dp-cp-rank": "data.max_tokens_per_rank", "--micro-batch-size": "batch.micro",
        "--global-batch-size": "batch.global", "--distributed-timeout-seconds-after-init": "comm.timeout_s",
    }),
    Setting("--num-layers-per-virtual-pipeline-stage", "parallel.vpp", lambda values, context:
            context["num_layers"][0] // (context["pipeline_model_parallel_size"][0] * values[0]),
            "counts chunks: num_layers / (pp x their number)"),
    needless("--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers",
             "write parallel.layers_per_chunk; auto gives the first and last stage fewer layers"),
    needless("--microbatch-group-size-per-virtual-pipeline-stage", "nothing to write: groups of parallel.pp"),
    needless("--pipeline-model-parallel-layout", "write parallel.layers_per_chunk, a list"),
    needless("--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split", _ALWAYS, 0),
    Setting("--sequence-parallel", "parallel.sp", lambda _, context: Needless("for tp above 1") if convert.value_of(
            context, "tensor_model_parallel_size", 1 if "num_layers" in context else 2) == 1 else True, takes=0),
    words("--cp-comm-type", "parallel.cp_mode",
          {"p2p": "ring", "all_gather": "allgather", "a2a": "ulysses", "a2a+p2p": "usp"}),
    Setting("--hierarchical-context-parallel-sizes", "parallel.cp_a2a_size", lambda values, _: values[0],
            "with cp_mode = usp", takes=MANY),
    switch("--hybrid-context-parallel", "parallel.hybrid_dp", True),
    Setting("--use-distributed-optimizer", "parallel.zero", convert.zero, theirs=0, takes=0),
    needless("--DDP-impl", "nothing to write: parallel.zero says it"),
    Setting("--data-parallel-sharding-strategy", "parallel.zero", convert.zero,
            "no_shard is 0, optim 1, optim_grads 2, optim_grads_params 3"),
    Setting("--use-torch-fsdp2, --use-megatron-fsdp", "parallel.zero", convert.zero, takes=0),
    switch("--overlap-grad-reduce, --overlap-param-gather", "overlap.dp", True, "one switch for both", False),
    switch("--tp-comm-overlap", "overlap.tp", True, theirs=False),
    switch("--no-async-tensor-model-parallel-allreduce", "overlap.tp", False),
    switch("--no-overlap-p2p-communication", "overlap.pp", False),
    Setting("--ddp-bucket-size", "overlap.bucket_bytes", lambda values, _: 4.0 * values[0],
            "bytes of fp32 gradients, theirs are elements"),
    Setting("--rampup-batch-size", "batch.rampup", convert.every, takes=MANY),
    Setting("--step-batch-size-schedule", "batch.rampup", convert.batch_schedule,
            "[start, increment, samples], and batch.global: equal increments at equal distances of samples",
            takes=MANY),
    Setting("--distributed-timeout-minutes", "comm.timeout_s", lambda values, _: float(values[0]) * 60
            if values[0] <= 30 else setting.Several(
            dict.fromkeys(("comm.timeout_s", "launch.start_timeout_s"), values[0] * 60.0)),
            "in seconds; launch.start_timeout_s is no less"),
    needless("--distributed-backend", "nothing to write: NCCL on GPUs, gloo on CPUs"),
    needless("--nccl-communicator-config-path", "write nccl.*_ctas"),
    needless("--use-tp-pp-dp-mapping", "not supported: tp is fastest, pp slowest", 0),
    needless("--nproc-per-node, --nnodes, --node-rank, --master-addr, --master-port",
             "torchrun's: keep `torchrun ... -m megascale train CONFIG`, or use `megascale launch CONFIG --nodes N`"),
)  # fmt: skip

TRAIN = (
    same("--train-iters", "train.steps"),
    Setting("--train-samples", "train.steps", convert.steps_of_run,
            "steps: samples / batch.global; more with a ramp-up"),
    same("--seed", "train.seed"),
    needless("dataset.random_seed", "nothing to write: train.seed is of the data's order, too"),
    *(Setting(name, "train.precision", lambda _, context: "fp8" if "fp8_format" in context else "bf16", note, takes=0)
      for name, note in (("--bf16", ""), ("--fp16", setting.NO_FP16))),
    words("mixed_precision", "train.precision", {"bf16_mixed": "bf16", "bf16": "bf16", "fp8": "fp8"},
          "other recipes are not supported: write train.precision and fp8.recipe"),
    needless("--loss-scale, --initial-loss-scale, --min-loss-scale, --loss-scale-window, --hysteresis",
             setting.NO_FP16),
    Setting("--fp8-format", "train.precision", convert.fp8,
            "the format follows fp8.recipe: tensorwise, delayed and static are hybrid, others e4m3"),
    words("--fp8-recipe", "fp8.recipe", {name: name for name in ("tensorwise", "delayed", "blockwise", "mxfp8")},
          'blockwise with fp8.scale = "pow2"', "delayed", only_with="fp8_format"),
    Setting("--fp8-amax-history-len", "fp8.history", convert.history, 'with fp8.recipe = "delayed", their default', 1,
            only_with="fp8_format"),
    needless("--fp8-amax-compute-algo", 'nothing to write: the maximum of the history, with fp8.recipe = "delayed"'),
    needless("--fp8-interval", "nothing to write: 1"),
    absent("--fp8-margin", "not supported", harmless={"0": "nothing to write: 0"}),
    needless("--fp8-param-gather", "nothing to write: zero = 1 to 3 gather FP8, or bf16 with exact rowwise scales", 0),
    same("--num-layers-at-start-in-bf16", "fp8.first_layers_bf16", only_with="first_last_layers_bf16"),
    same("--num-layers-at-end-in-bf16", "fp8.last_layers_bf16", only_with="first_last_layers_bf16"),
    needless("--first-last-layers-bf16", "nothing to write: one layer at each end stays in bf16 by default", 0),
    absent("--fp4-format", 'write train.precision = "fp8" and fp8.recipe = "nvfp4"'),
    needless("--fp4-recipe", "said by --fp4-format"),
    needless("--grad-reduce-in-bf16", "not supported: gradients are reduced in fp32", 0),
    needless("--accumulate-allreduce-grads-in-fp32, --calculate-per-token-loss", _ALWAYS, 0),
    words("--recompute-granularity", "train.recompute", {"selective": "selective", "full": "full"}),
    switch("--recompute-activations", "train.recompute", "selective"),
    switch("--moe-layer-recompute", "train.recompute", "full", "of whole blocks, with attention"),
    Setting("--recompute-modules", "train.recompute_ops",
             lambda values, _: [_MODULES[name] for name in values if name in _MODULES]
             or Needless("not supported: other operations"), "core_attn is attention, layernorm is norm", takes=MANY),
    needless("--recompute-num-layers, --recompute-method", "write train.memory, by layer"),
    Setting("--fine-grained-activation-offloading, --cpu-offloading", "train.memory",
            lambda _, context: Needless(_OFFLOAD) if _RECOMPUTES & set(context) else ["host"], _OFFLOAD, takes=0),
    words("--attention-backend", "backends.attention",
          {"auto": "auto", "flash": "flash", "fused": "te", "unfused": "torch", "local": "torch"}),
    switch("--use-flash-attn", "backends.attention", "flash"),
    switch("--no-rope-fusion", "backends.rope", "torch"),
    Setting("--no-bias-gelu-fusion", "model.activation", lambda _, context: Needless("of another activation")
            if _ACTIVATIONS & set(context) else "gelu", takes=0),
    switch("--no-bias-swiglu-fusion", "backends.activation", "torch"),
    switch("--no-gradient-accumulation-fusion", "backends.wgrad", "torch"),
    needless("--no-masked-softmax-fusion, --no-bias-dropout-fusion, --no-persist-layer-norm",
             "write backends.*: a backend for each operation", 0),
    needless("--cross-entropy-loss-fusion", "nothing to write: backends.cross_entropy, chunks of the logits", 0),
    needless("--cross-entropy-fusion-impl", "write backends.cross_entropy"),
    needless("--cuda-graph-impl", "not supported: write train.compile = true"),
    needless("--enable-cuda-graph, --external-cuda-graph", "not supported: write train.compile = true", 0),
    same("--log-interval", "train.log_every", theirs=100),
    Setting("--eval-interval", "train.eval_every", lambda values, context:
            0 if convert.value_of(context, "eval_iters") == 0 else values[0], "0 is never", 1000),
    Setting("--eval-iters", "train.eval_steps", lambda values, _: values[0] or setting.Several({"train.eval_every": 0}),
            "0 is never", 100),
    same("--check-weight-hash-across-dp-replicas-interval", "train.check_replicas_every", "over tp, too"),
    needless("--manual-gc, --manual-gc-eval, --no-manual-gc-eval",
           "nothing to write: collected on all ranks in the same step", 0),
    needless("--manual-gc-interval, --empty-unused-memory-level", "nothing to write"),
    needless("--exit-duration-in-mins, --exit-interval", "not supported: SIGTERM, or the scheduler's end of time, "
             "saves and stops; the same command resumes"),
    needless("--exit-signal-handler, --check-for-nan-in-loss-and-grad", _ALWAYS, 0),
    needless("--no-check-for-nan-in-loss-and-grad", "not supported: loss and gradients must be finite", 0),
    needless("--rerun-mode", "not supported: write train.check_replicas_every, which finds silent errors"),
    needless("--delay-wgrad-compute", "write parallel.schedule = interleaved_zb or dualpipev: both split backward", 0),
    needless("--deterministic-mode", "nothing to write: a resume in the same layout repeats every bit", 0),
)  # fmt: skip

OPTIMIZER = (
    words("--optimizer", "optimizer.name", {"adam": "adamw", "lion": "lion", "soap": "soap"},
          "sgd is not supported, nor others than adam, lion and soap", muon=MUON, dist_muon=MUON),
    same("--lr", "optimizer.lr"), same("--adam-eps", "optimizer.eps"), same("--clip-grad", "optimizer.clip_norm"),
    Setting("--min-lr", "optimizer.min_lr", lambda values, context: Needless("nothing to write: a constant rate")
            if convert.value_of(context, "lr_decay_style") == "constant" else values[0]),
    Setting("--lr-warmup-iters, --lr-warmup-samples", "optimizer.warmup_steps",
            lambda _, context: convert.steps_of("lr_warmup", context) + 1, _WARMUP, 1),
    Setting("--lr-warmup-fraction", "optimizer.warmup_steps", lambda values, context: 1 + round(values[0] *
            convert.steps_of("lr_decay" if {"lr_decay_iters", "lr_decay_samples"} & set(context) else "train",
                             context)), "share x --lr-decay-iters, + 1"),
    words("--lr-decay-style", "optimizer.decay",
          {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "wsd"}, theirs="linear"),
    Setting("--lr-decay-iters, --lr-decay-samples", "optimizer.schedule_steps", convert.schedule,
            "steps of batch.global"),
    Setting("--lr-wsd-decay-iters, --lr-wsd-decay-samples", "optimizer.decay_steps", lambda values, context: Advice(
            _WSD) if convert.value_of(context, "lr_wsd_decay_style") != "linear" and "num_layers" in context
            else convert.steps_of("lr_wsd_decay", context) - 1, _WSD),  # theirs begins and ends a step later
    Setting("--lr-wsd-decay-style", "", lambda values, context: Needless("nothing to write: linear, or not wsd")
            if values[0] == "linear" or str(convert.value_of(context, "lr_decay_style")).lower() != "wsd"
            else Advice("not supported: linear alone"), "linear alone"),
    absent("--lr-warmup-init", "not supported: the warm-up begins at 0", harmless={"0": "nothing to write: 0"}),
    needless("--override-opt-param-scheduler, --use-checkpoint-opt-param-scheduler",
           "nothing to write: [optimizer] counts, and a resume lists what differs", 0),
    Setting("--decoupled-lr", "optimizer.groups", convert.decoupled, 'kinds = ["embedding", "head"] and lr_mult'),
    needless("--decoupled-min-lr", "nothing to write: the least rate of [[optimizer.groups]] is min_lr x lr_mult"),
    Setting("--weight-decay", "optimizer.weight_decay", lambda values, context: context.get(
            "end_weight_decay", values)[0], "not of norms and biases", 0.01),
    Setting("--start-weight-decay, --end-weight-decay", "optimizer.weight_decay", lambda values, context: values[0]
            if context.get("start_weight_decay") == context.get("end_weight_decay") else Advice(_DECAY), _DECAY),
    absent("--weight-decay-incr-style", _DECAY, harmless={"constant": "nothing to write: constant"}),
    Setting("--adam-beta1, --adam-beta2", "optimizer.betas", convert.betas(adam_beta1=0.9, adam_beta2=0.999),
            theirs=[0.9, 0.999]),
    absent("--sgd-momentum", "not supported: one of the choices of optimizer.name"),
    absent("--lion-beta1, --lion-beta2", "not supported: write optimizer.betas"),
    absent("--use-precision-aware-optimizer",
           'write optimizer.name = "adamw_8bit", or optimizer.master_weights = "bf16_compensated"', 0),
    switch("--optimizer-cpu-offload", "optimizer.offload", "host"),
)  # fmt: skip

DATA = (
    Setting("--data-path, --train-data-path", "data.train", lambda values, context: Needless("with --mock-data")
            if "mock_data" in context else convert.blend(values, context), "the same files, without .bin", takes=MANY),
    Setting("dataset.blend", "data.train", lambda values, context: convert.blend(values[0] if values[1] is None else [
            part for pair in zip(values[1], values[0], strict=True) for part in pair], context), "weights and paths"),
    Setting("--valid-data-path", "data.valid", convert.blend, takes=MANY),
    needless("--test-data-path", "not supported: write data.valid of another run", MANY),
    absent("--data-args-path, --per-split-data-args-path, dataset.blend_per_split", "write the blend in data.train"),
    Setting("--split", "data.split", convert.two_shares, "two shares, training and validation", [969, 31]),
    Setting("--tokenizer-model", "data.tokenizer", lambda values, _: str(values[0]) if str(values[0]).endswith(".json")
            else Needless(_TOKENIZER), "a tokenizer.json, compared with the data's"),
    Setting("--merge-file", "model.vocab_size", lambda _, context: 50257 if "num_layers" in context and "vocab_size"
            not in context else Needless(_TOKENIZER), "of GPT-2's vocabulary"),
    needless("--vocab-file, --tokenizer-type, --tiktoken-pattern", _TOKENIZER),
    same("--data-cache-path", "data.cache"),
    switch("--mock-data", "data.mock", True),
    Setting("--reset-attention-mask, --reset-position-ids, --dataloader-inter-document-masking",
            "data.attention_mask", convert.documents, "mask and positions together", takes=0),
    Setting("--eod-mask-loss", "data.eod_mask_loss", lambda values, context: convert.documents(values, context)
            if "num_layers" in context else True, 'with data.attention_mask = "document"', takes=0),
    needless("--no-create-attention-mask-in-dataloader, --no-mmap-bin-files", _ALWAYS, 0),
    needless("--num-workers", "write data.reader = host: a process of each host reads data.prefetch steps ahead"),
    absent("--dataloader-type", "not supported: a loader of your own", harmless=dict.fromkeys(
           ("single", "cyclic"), "nothing to write: shuffled by train.seed, the same in every layout")),
    absent("--iterations-to-skip", "write data.skip_samples, ranges of samples", MANY),
)  # fmt: skip

CHECKPOINT = (
    Setting("--save", "output_dir", lambda values, context: str(values[0]) if not context.get("train_iters") or {
            "save_interval", "persistent_save_interval"} & set(context) else setting.Several(
            {"output_dir": str(values[0]), "checkpoint.every": context["train_iters"][0]}),
            "a run's folder is output_dir/name; checkpoint.dir puts checkpoints elsewhere"),
    Setting("--load", "checkpoint.resume",
            lambda values, context: "auto" if context.get("save") == values else Advice(_LOAD), _LOAD),
    Setting("--save-interval, --persistent-save-interval", "checkpoint.every", lambda values, context: values[0]
            if "save" in context or "num_layers" not in context else 0, theirs=0),
    Setting("--save-retain-interval", "checkpoint.keep_every", lambda values, context: values[0] if "most_recent_k" in
            context else setting.Several({"checkpoint.keep": 1, "checkpoint.keep_every": values[0]}), "and the last"),
    Setting("--most-recent-k", "checkpoint.keep", lambda values, _: max(0, int(values[0]))),
    absent("--ckpt-step", "write checkpoint.resume = RUN/checkpoints/step-N, with another name for the run"),
    needless("--ckpt-format, --dist-ckpt-format, --ckpt-convert-format",
           "nothing to write: safetensors for every layout; `megascale ckpt convert` writes Hugging Face's"),
    switch("--async-save", "checkpoint.async", True, theirs=False),
    needless("--use-dist-ckpt, --ckpt-fully-parallel-save, --ckpt-fully-parallel-load, --verify-integrity", _ALWAYS, 0),
    needless("--dist-ckpt-strictness", "nothing to write: a checkpoint is whole"),
    absent("--finetune", "write checkpoint.resume = hf:FOLDER: weights alone, step 0", 0),
    absent("--pretrained-checkpoint", "write checkpoint.resume = hf:FOLDER, weights of Hugging Face"),
    needless("--no-save-optim, --no-save-rng, --no-load-optim, --no-load-rng", "checkpoints are whole", 0),
    same("--non-persistent-save-interval", "checkpoint.in_memory_every"),
    same("--non-persistent-local-ckpt-dir", "checkpoint.in_memory_dir"),
    needless("--non-persistent-ckpt-type", "nothing to write: checkpoint.in_memory_every, in host memory"),
    switch("--replication", "checkpoint.replicate", True),
    needless("--replication-factor, --replication-jump", "nothing to write: one copy on another host"),
)  # fmt: skip

OBSERVE = (
    Setting("--tensorboard-dir", "observe.tensorboard", lambda values, _: True,
            "the default; files lie in the run's folder, output_dir/name"),
    needless("--wandb-project, --wandb-exp-name, --wandb-save-dir",
           "not supported: metrics.jsonl, TensorBoard, `megascale dashboard`, Prometheus"),
    needless("--log-throughput", "nothing to write: each line has tok/s and MFU, theirs is causal", 0),
    needless("--log-params-norm, --log-num-zeros-in-grad", "not supported: grad_norm is in metrics.jsonl", 0),
    needless("--log-timers-to-tensorboard, --log-memory-to-tensorboard", "nothing to write: observe.record_events", 0),
    needless("--timing-log-level, --timing-log-option", "nothing to write: observe.record_events, every action"),
    needless("--log-straggler", "nothing to write: `megascale diagnose RUN --slow`", 0),
    needless("--profile, --use-pytorch-profiler", "write observe.profile_step = N", 0),
    same("--profile-step-start", "observe.profile_step", "one step", only_with="profile"),
    needless("--profile-step-end, --profile-ranks", "nothing to write: one step, of each stage's first rank", MANY),
    needless("--enable-ft-package, --inprocess-restart", "use `megascale launch CONFIG --nodes N`, with [fault]", 0),
    absent("--error-injection-rate", "write fault.inject: faults by kind and step"),
    needless("--error-injection-type", "said by --error-injection-rate"),
)  # fmt: skip

SETTINGS = (*MODEL, *EXPERTS, *PARALLEL, *TRAIN, *OPTIMIZER, *DATA, *CHECKPOINT, *OBSERVE, *OTHERS)
