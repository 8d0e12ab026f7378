"""Megatron-LM's arguments for mixtures of experts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from megascale.config.foreign.megatron_values import LOSSES, balance, balance_weight
from megascale.config.foreign.setting import (
    MANY,
    Advice,
    Context,
    Needless,
    Several,
    Values,
    absent,
    computed,
    every,
    needless,
    same,
    same_values,
    switch,
    value_of,
    words,
)

_ALWAYS = "nothing to write: always so"
_NO_DEEPEP = "not supported: the exchange is NCCL's, see moe.dispatcher"
_WHOLE = "not supported: an expert is whole on a rank, of parallel.ep"
_UPCYCLING = "not in training: `megascale ckpt convert --experts N K` makes a checkpoint of experts"


def _experts(values: Values, context: Context) -> Any:
    """Return the experts, with a bias of the router where linear layers have biases."""
    biases = "disable_bias_linear" not in context and context.get("add_bias_linear") != [False]
    if values[0] and biases and "num_layers" in context:
        return Several({"model.experts": values[0], "model.router_bias": True})
    return values[0]


def _dense_layers(values: Values, context: Context) -> int | Advice:
    kinds = every(values, context)
    if kinds == [1]:
        return Needless("nothing to write: all layers have experts")
    if written := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", str(values[0]).replace(" ", "")):
        return int(written[1])
    if set(kinds) <= {0, 1} and kinds == sorted(kinds):
        return kinds.count(0)
    return Advice("not supported: only model.dense_layers first layers lack experts")


def _groups(values: Values, context: Context) -> Any:
    """Return the groups of experts, with their value: of as many experts as a token has of a group."""
    each = value_of(context, "moe_router_topk", 2) // value_of(context, "moe_router_group_topk", 1)
    if "num_layers" not in context or values[0] == 1:
        return values[0]
    if each not in (1, 2):
        return Advice("not supported: more than two experts of a group")
    return Several({"model.router_groups": values[0], "model.router_group_value": "max" if each == 1 else "top2"})


_OF_EXPERTS = (
    computed("--moe-router-topk", "model.experts_per_token", lambda values, _: values[0] if values[0] > 1
             else Several({"model.experts_per_token": 1, "model.router_normalize": False})),  # as a single weight is
    *same_values({
        "--moe-ffn-hidden-size": "model.expert_ffn_size",
        "--moe-shared-expert-intermediate-size": "model.shared_ffn_size",
        "--moe-router-group-topk": "model.router_top_groups", "--moe-router-topk-scaling-factor": "model.router_scale",
        "--moe-router-bias-update-rate": "moe.bias_rate", "--moe-z-loss-coeff": "moe.z_loss_weight",
        "--expert-model-parallel-size": "parallel.ep",
    }),
    computed("--moe-layer-freq", "model.dense_layers", _dense_layers,
             "the first layers without experts, N of `([0]*N+[1]*M)`"),
    switch("--moe-shared-expert-gate", "model.shared_gate", True),
    words("--moe-router-score-function", "model.router_score",
          {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}),
    computed("--moe-router-pre-softmax", "model.router_normalize", lambda _, context: Needless("of softmax alone")
             if value_of(context, "moe_router_score_function", "softmax") != "softmax" else False, takes=0),
    computed("--moe-router-num-groups", "model.router_groups", _groups,
             "with router_group_value = top2, at two experts a group"),
    switch("--moe-router-enable-expert-bias", "model.balance_bias", True),
    replace(words(
        "--moe-router-load-balancing-type", "moe.balance", LOSSES, "one loss: several are not supported",
        aux_loss="with moe.balance_group = batch.micro", global_aux_loss="the nearest, by the loads of the step before",
        sinkhorn="not supported: write another moe.balance, or model.balance_bias = true"),
        convert=balance, takes=MANY),
    computed("--moe-aux-loss-coeff", "moe.balance_weight", balance_weight, "0, their default: moe.balance is none",
             takes=MANY),
    computed("--expert-tensor-parallel-size", "", lambda values, _: Needless(
             "nothing to write: an expert is whole" if values[0] == 1 else _WHOLE), _WHOLE),
    same("--moe-expert-capacity-factor", "moe.capacity_factor", "of a sequence, theirs is of a rank's tokens"),
    absent("--moe-token-drop-policy", "not supported but probs: the largest weights stay",
           harmless={"probs": "nothing to write: the largest weights stay"}),
    needless("--moe-pad-expert-input-to-capacity", "not supported: rows are as many as chosen", 0),
    words("--moe-token-dispatcher-type", "moe.dispatcher",
          {"alltoall": "all_to_all", "allgather": "all_gather", "flex": "all_to_all"}, "", "all_gather"),
    needless("--moe-shared-expert-overlap", _ALWAYS, 0),
    needless("--overlap-moe-expert-parallel-comm", "write parallel.schedule = combined_1f1b", 0),
    needless("--moe-router-dtype", "nothing to write: logits are in fp32"),
    absent("--moe-input-jitter-eps", "not supported"),
    needless("--moe-grouped-gemm, --moe-per-layer-logging", _ALWAYS, 0),
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
    computed("--num-experts, --num-moe-experts", "model.experts", _experts),
    *(replace(row, only_with="num_experts") for row in _OF_EXPERTS),
)
