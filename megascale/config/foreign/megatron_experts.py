"""Megatron-LM's arguments for mixtures of experts."""

from __future__ import annotations

from megascale.config.foreign.setting import Advice, absent, computed, same, switch, words

_ALWAYS = "nothing to write: always so"

EXPERTS = (
    same("--num-experts", "model.experts"),
    same("--moe-router-topk", "model.experts_per_token"),
    same("--moe-ffn-hidden-size", "model.expert_ffn_size"),
    absent("--moe-layer-freq", "write model.dense_layers, the first layers without experts"),
    same("--moe-shared-expert-intermediate-size", "model.shared_ffn_size"),
    switch("--moe-shared-expert-gate", "model.shared_gate", True),
    words("--moe-router-score-function", "model.router_score",
          {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}),
    switch("--moe-router-pre-softmax", "model.router_normalize", False),
    same("--moe-router-num-groups", "model.router_groups", "with router_group_value = top2, at two experts a group"),
    same("--moe-router-group-topk", "model.router_top_groups"),
    same("--moe-router-topk-scaling-factor", "model.router_scale"),
    switch("--moe-router-enable-expert-bias", "model.balance_bias", True),
    same("--moe-router-bias-update-rate", "moe.bias_rate"),
    words("--moe-router-load-balancing-type", "moe.balance", {"none": "none", "seq_aux_loss": "sequence"},
          "aux_loss: write group and moe.balance_group = batch.micro; global_aux_loss: step is the nearest",
          "aux_loss"),
    computed("--moe-aux-loss-coeff", "moe.balance_weight",
             lambda values, _: float(values[0]) or Advice('nothing to write: moe.balance is "none"')),
    same("--moe-z-loss-coeff", "moe.z_loss_weight"),
    same("--expert-model-parallel-size", "parallel.ep"),
    absent("--expert-tensor-parallel-size", "not supported: an expert is whole on a rank, of parallel.ep"),
    same("--moe-expert-capacity-factor", "moe.capacity_factor", "of a sequence, theirs is of a rank's tokens"),
    absent("--moe-token-drop-policy", "nothing to write: the largest weights stay"),
    absent("--moe-pad-expert-input-to-capacity", "not supported: rows are as many as chosen", 0),
    words("--moe-token-dispatcher-type", "moe.dispatcher", {"alltoall": "all_to_all", "allgather": "all_gather"},
          "flex: write all_to_all", "allgather"),
    absent("--moe-shared-expert-overlap", _ALWAYS, 0),
    absent("--overlap-moe-expert-parallel-comm", "write moe.token_blocks: of blocks of a micro-batch's tokens", 0),
    absent("--moe-router-dtype", "nothing to write: logits are in fp32"),
    absent("--moe-input-jitter-eps", "not supported"),
    absent("--moe-grouped-gemm, --moe-per-layer-logging", _ALWAYS, 0),
    absent("--moe-permute-fusion, --moe-router-fusion", "not supported", 0),
)  # fmt: skip
