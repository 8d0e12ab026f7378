"""Every rule is broken once; its finding names the key to change."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config import (
    exclusions,
    loss_rules,
    memory_rules,
    model_rules,
    parallel_rules,
    site_rules,
    time_rules,
    train_rules,
)
from megascale.config.exclusions import Exclusions
from megascale.config.finding import divisors
from megascale.config.loading import check_rules, load_config, load_config_tree
from megascale.config.model import ModelConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.parallel_rules import expert_parallel
from megascale.config.rules import RULES, Rule
from megascale.config.time_rules import launch_findings
from megascale.core.errors import ConfigError
from megascale.core.files import fingerprint
from tests.data.datasets import write_dataset
from tests.runs import GPT, MLA, config_of, settings, to_toml, write_config

HYBRID = {"parallel__hybrid_dp": True, "data__max_tokens_per_rank": 16, "data__attention_mask": "document"}

SITES = {"sites__count": 2, "sites__address": "10.0.0.5:7100"}

LATENT = {f"model__{key}": value for key, value in MLA.items() if MLA[key] != GPT.get(key)}

UNIT = {
    "model__unit_scaling": True, "model__block": "post_norm", "model__position": "rope", "model__tie_embeddings": False,
}  # fmt: skip
SPARSE = {"local_blocks": 1, "stride": 2, "block": 2}
MOE = {"model__experts": 8, "model__bias": False}
COMPACT = {"optimizer__name": "compact", "optimizer__options": {"rank": 4}}
DOMINO = {"overlap__tp": "domino", "parallel__tp": 2, "batch__micro": 2}
JEPA = {"type": "jepa", "weight": 0.5, "predictor": 5}
PAIRS = {"data__attention_mask": "document", "data__eod": 5}
POLICY = {"data__mock": False, "data__train": [[1.0, "set"]], "data__blend_policy": "fixed"}
REBUILT = {
    "fault__rebuild_stage": 9, "parallel__pp": 3, "checkpoint__every": 10, "checkpoint__in_memory_every": 1,
}  # fmt: skip
FP8_MODEL = {
    "train__precision": "fp8", "model__hidden_size": 512, "model__ffn_size": 512, "model__seq_length": 128,
}  # fmt: skip

# rule, settings that break the rule, expected findings: key and part of the message
BROKEN: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("meeting", {"sites__count": 2}, {"sites.address": "the sites need a meeting point"}),
    ("meeting", {"sites__count": 2, "sites__address": "there"}, {"sites.address": "'there' is no host:port"}),
    ("meeting", SITES | {"sites__index": 2}, {"sites.index": "there is no site 2 of 2"}),
    (
        "outer_steps",
        SITES | {"sites__every": 2, "sites__fragments": 3},
        {"sites.fragments": "3 fragments need as many steps, and every = 2"},
    ),
    (
        "outer_steps",
        SITES | {"sites__every": 8, "sites__fragments": 4, "sites__overlap": 2},
        {"sites.overlap": "2 steps reach the next exchange, 2 steps later"},
    ),
    (
        "outer_steps",
        SITES | {"sites__top_k": 0.1, "sites__momentum": 0.9},
        {"sites.momentum": "whose error feedback is the momentum"},
    ),
    (
        "SEVERAL_SITES",
        SITES | {"optimizer__master_weights": "bf16_compensated", "train__precision": "bf16"},
        {"optimizer.master_weights": "compensated weights have no outer steps (count = 2)"},
    ),
    ("SEVERAL_SITES", SITES | HYBRID, {"parallel.hybrid_dp": "do not divide over sites"}),
    ("SEVERAL_SITES", SITES | {"fault__shrink": True}, {"fault.shrink": "sites have the same layout"}),
    ("NOTHING_LEFT_OVER", SITES | {"sites__error_decay": 0.5}, {"sites.error_decay": "everything is sent"}),
    (
        "attention_heads",
        {"model__num_heads": 5, "model__num_kv_heads": 5},
        {"model.num_heads": "not divisible by 5 heads"},
    ),
    (
        "timeouts",
        {"launch__start_timeout_s": 500.0},
        {"launch.start_timeout_s": "500.0 s is less than comm.timeout_s = 600.0"},
    ),
    (
        "timeouts",
        {"comm__timeout_s": 10.0, "launch__start_timeout_s": 60.0, "checkpoint__every": 1},
        {"launch.start_timeout_s": "60.0 s is no more than checkpoint.retry_timeout_s = 60.0"},
    ),
    (
        "injected_faults",
        {"fault__inject": "kill rank=0 step=100000"},
        {"fault.inject": "there is no step 100000 for kill"},
    ),
    (
        "injected_faults",
        {"fault__inject": "lose_node node=1 step=5"},
        {"fault.inject": "lose_node is a fault of the node, and a run injects only faults of its ranks"},
    ),
    (
        "layout_ranks",
        {"parallel__dp": 2, "fault__inject": "kill rank=9 step=1"},
        {"fault.inject": "there is no rank 9 for kill"},
    ),
    (
        "REBUILT_STAGES",
        {"fault__rebuild_stage": 9, "parallel__pp": 2},
        {
            "parallel.pp": "with pp = 2 no stage is between two others (fault.rebuild_stage = 9)",
            "checkpoint.in_memory_every": "the other stages have no copies",
        },
    ),
    (
        "REBUILT_STAGES",
        REBUILT | {"parallel__pp": 4, "train__weight_average": "ema", "model__exits": [2]},
        {
            "model.exits": "the head of an exit has no neighbours",
            "train.weight_average": "averages are not rebuilt",
        },
    ),
    (
        "REBUILT_STAGES",
        REBUILT | MOE | {"parallel__pp": 4, "parallel__vocab_pp": 1},
        {
            "model.experts": "experts of different layers do not correspond",
            "parallel.vocab_pp": "a lost stage has rows of the vocabulary",
        },
    ),
    (
        "rebuilt_stages",
        REBUILT
        | {
            "parallel__layers_per_chunk": [1, 2, 1],
            "optimizer__groups": [{"kinds": ["matrix"], "name": "muon"}],
        },
        {
            "parallel.layers_per_chunk": "layers of unequal stages do not correspond",
            "optimizer.name": "muon: no mean of every element's squared gradient",
        },
    ),
    ("rebuilt_stages", REBUILT, {"model.num_layers": "4 layers do not make 3 equal stages"}),
    ("fault_times", {"fault__hang_s": 0.1}, {"fault.hang_s": "0.1 s is no more than fault.poll_s = 0.25"}),
    ("fault_times", {"fault__heartbeat_s": 6.0}, {"fault.node_lost_s": "6.0 s is no more than fault.heartbeat_s = 6"}),
    (
        "fault_times",
        {"fault__link_recovery_s": 30.0},
        {"fault.node_lost_s": "6.0 s is no more than fault.link_recovery_s = 30.0"},
    ),
    (
        "fault_times",
        {"fault__hang_s": 70.0},
        {"fault.evaluation_hang_s": "60.0 s is less than fault.hang_s = 70.0"},
    ),
    ("NO_EXPERTS", {"model__expert_ffn_size": 8}, {"model.expert_ffn_size": "has no effect with experts = 0"}),
    (
        "experts",
        MOE | {"model__dense_layers": 4},
        {"model.dense_layers": "4 dense layers of 4 leave none with experts"},
    ),
    ("experts", MOE | {"model__router_groups": 3}, {"model.router_groups": "8 experts cannot be split into 3 groups"}),
    ("experts", MOE | {"model__router_top_groups": 2}, {"model.router_top_groups": "cannot choose 2 of 1 group"}),
    ("experts", MOE | {"model__router_group_value": "top2"}, {"model.router_group_value": "and router_groups = 1"}),
    (
        "experts",
        MOE | {"model__router_groups": 4, "model__router_top_groups": 2, "model__experts_per_token": 5},
        {"model.experts_per_token": "5 experts a token, of 4 to choose from"},
    ),
    ("new_router", MOE | {"model__experts_per_token": 1}, {"model.router_normalize": "a token's only expert 1"}),
    ("experts", MOE | {"model__shared_gate": True}, {"model.shared_gate": "no effect without a shared expert"}),
    ("expert_parallel", {"parallel__ep": 2}, {"parallel.ep": "2 ranks share experts, and model.experts is 0"}),
    ("expert_parallel", MOE | {"parallel__tp": 2}, {"parallel.sp": "would route the same tokens"}),
    (
        "expert_parallel",
        MOE | {"parallel__ep": 3, "parallel__dp": 4},
        {"parallel.ep": "8 experts cannot be split over ep = 3"},
    ),
    (
        "expert_parallel",
        MOE | {"parallel__ep": 8, "parallel__dp": 4},
        {"parallel.ep": "ep = 8 does not divide the 4 ranks of a pipeline stage"},
    ),
    (
        "balance_group",
        MOE | {"moe__balance": "group", "moe__balance_group": 4, "parallel__dp": 2},
        {"moe.balance_group": "groups of 4 do not divide the 2 samples of a micro-batch"},
    ),
    (
        "token_blocks",
        MOE | {"moe__token_blocks": 3},
        {"moe.token_blocks": "the 16 tokens of a rank cannot be cut into 3"},
    ),
    (
        "paired_experts",
        MOE | {"parallel__schedule": "combined_1f1b", "moe__token_blocks": 2, "train__recompute": "full"},
        {
            "moe.token_blocks": "hidden by another micro-batch",
            "train.recompute": "that is recomputed or moved",
        },
    ),
    (
        "CHUNKS",
        MOE | {"moe__balance": "sequence", "moe__capacity_factor": 1.0, "data__sequence_chunk_tokens": 8},
        {"moe.balance": "a chunk is not all of a sequence", "moe.capacity_factor": "which has the capacity"},
    ),
    ("NO_EXPERTS", {"model__shared_ffn_size": 8}, {"model.shared_ffn_size": "has no effect with experts = 0"}),
    ("NO_BALANCED_EXPERTS", {"moe__balance": "sequence"}, {"moe.balance": "has no effect with experts = 0"}),
    (
        "NO_BALANCED_EXPERTS",
        {"moe__dispatcher": "all_gather", "moe__token_blocks": 2},
        dict.fromkeys(("moe.dispatcher", "moe.token_blocks"), "has no effect with experts = 0"),
    ),
    ("NO_BALANCE_LOSS", MOE | {"moe__balance_weight": 0.1}, {"moe.balance_weight": "no effect with balance = none"}),
    (
        "NO_BALANCE_GROUP",
        MOE | {"moe__balance": "step", "moe__balance_group": 2},
        {"moe.balance_group": "no effect with balance = step"},
    ),
    ("NO_BALANCE_BIAS", MOE | {"moe__bias_rate": 0.1}, {"moe.bias_rate": "no effect with balance_bias = false"}),
    (
        "EXPERT_PARALLEL",
        MOE | {"parallel__dp": 2, "parallel__ep": 2, "train__noise_scale_every": 1},
        {"train.noise_scale_every": "an expert's first gradient is of tokens of several ranks"},
    ),
    ("NO_MTP", {"train__mtp_loss_weight": 0.3}, {"train.mtp_loss_weight": "has no effect with mtp_layers = 0"}),
    *(
        ("MTP", {"model__position": "rope", "model__mtp_layers": 1} | changes, {key: message})
        for changes, key, message in (
            (
                {"model__position": "learned"},
                "model.position",
                "MTP layers have no learned positions (model.mtp_layers = 1)",
            ),
            (HYBRID, "parallel.hybrid_dp", "have no targets of MTP layers"),
            ({"train__noise_scale_every": 1}, "train.noise_scale_every", "noise scale of several losses"),
            ({"data__sequence_chunk_tokens": 8}, "data.sequence_chunk_tokens", "not supported with MTP layers"),
        )
    ),
    ("NO_EXITS", {"train__exit_loss_weight": 0.3}, {"train.exit_loss_weight": "has no effect with exits = []"}),
    ("NO_EXITS", {"train__exit_warmup_steps": 3}, {"train.exit_warmup_steps": "has no effect with exits = []"}),
    *(
        ("EXITS", {"model__exits": [2]} | changes, {key: message})
        for changes, key, message in (
            (HYBRID, "parallel.hybrid_dp", "not supported with exits (model.exits = [2])"),
            ({"train__noise_scale_every": 1}, "train.noise_scale_every", "noise scale of several losses"),
        )
    ),
    ("early_exits", {"model__exits": [2, 4]}, {"model.exits": "[2, 4] are not ascending numbers of layers before"}),
    ("early_exits", {"model__exits": [2, 2]}, {"model.exits": "[2, 2] are not ascending"}),
    (
        "early_exits",
        {"model__exits": [2, 3], "train__exit_loss_weight": [0.1]},
        {"train.exit_loss_weight": "1 weights for 2 exits"},
    ),
    *(
        ("NO_TEACHER", {f"train__{key}": value}, {f"train.{key}": "has no effect without a teacher"})
        for key, value in (
            ("distill_alpha", 0.1),
            ("distill_top_k", 5),
            ("distill_until_step", 5),
        )
    ),
    *(
        ("TEACHER", {"train__distill_teacher": "mock"} | changes, {key: message})
        for changes, key, message in (
            (
                {"parallel__pp": 2, "parallel__vocab_pp": 1, "parallel__schedule": "zb_v", "parallel__vpp": 2},
                "parallel.vocab_pp",
                "have the statistics of labels alone",
            ),
            (HYBRID, "parallel.hybrid_dp", "soft labels are of whole samples"),
            (POLICY, "data.blend_policy", "the order of samples is known only as the run goes on"),
        )
    ),
    *(
        ("WHOLE_SAMPLES", {"train__objectives": [JEPA]} | PAIRS | changes, {key: message})
        for changes, key, message in (
            (HYBRID, "parallel.hybrid_dp", "objectives see whole samples"),
            ({"data__sequence_chunk_tokens": 8}, "data.sequence_chunk_tokens", "objectives see whole sequences"),
            ({"train__noise_scale_every": 1}, "train.noise_scale_every", "noise scale of several losses"),
        )
    ),
    ("objectives", {"train__objectives": [JEPA, JEPA]} | PAIRS, {"train.objectives": "has jepa twice"}),
    (
        "objectives",
        {"train__objectives": [JEPA]},
        {"train.objectives": "jepa compares documents that are split at predictor = 5, which is not data.eod"},
    ),
    (
        "objectives",
        {"train__objectives": [JEPA | {"predictor": 6}]} | PAIRS,
        {"train.objectives": "documents that are split at predictor = 6, which is not data.eod"},
    ),
    (
        "distillation",
        {"train__distill_teacher": "mock", "train__distill_top_k": 102},
        {"train.distill_top_k": "102 tokens of a vocabulary of 101"},
    ),
    (
        "distillation",
        {"train__distill_teacher": "mock", "train__steps": 10, "train__distill_until_step": 11},
        {"train.distill_until_step": "the run ends before step 11, with train.steps = 10"},
    ),
    ("teacher_file", {"train__distill_teacher": "nowhere"}, {"train.distill_teacher": "there is no file"}),
    *(
        ("ATTENTION_SINKS", {"model__attention_sinks": True} | changes, {key: message})
        for changes, key, message in (
            ({"model__dropout": 0.1}, "model.dropout", "attention with sinks has no dropout"),
            ({"model__attention_softcap": 5.0}, "model.attention_softcap", "has no soft cap"),
            ({"backends__attention": "torch"}, "backends.attention", "runs by backends.partial_attention"),
        )
    ),
    *(
        ("SPARSE_ATTENTION", {"model__sparse_attention": SPARSE} | changes, {key: message})
        for changes, key, message in (
            ({"model__window": 4}, "model.window", "local blocks of sparse attention are its window"),
            (LATENT, "model.kv_lora_rank", "not supported with latent attention"),
            ({"model__dropout": 0.1}, "model.dropout", "sparse attention has no dropout"),
            ({"model__attention_softcap": 5.0}, "model.attention_softcap", "has no soft cap"),
        )
    ),
    *(
        ("sparse_attention", {"model__sparse_attention": SPARSE | keys}, {"model.sparse_attention": message})
        for keys, message in (
            ({"stride": 3}, "4 heads cannot share 3 offsets evenly"),
            ({"stride": 8}, "4 heads cannot share 8 offsets evenly"),
            ({"local_blocks": 8}, "8 local blocks of 2 tokens reach over all 16"),
        )
    ),
    (
        "supported_backends",
        {"model__sparse_attention": SPARSE, "backends__attention": "flash", "train__precision": "bf16"},
        {"backends.attention": "flash has no mask by head, which sparse attention needs"},
    ),
    *(
        ("EXPERTS", MOE | changes, {key: message})
        for changes, key, message in (
            ({"model__block": "parallel"}, "model.block", "experts follow attention"),
            (HYBRID, "parallel.hybrid_dp", "run the same micro-batches"),
            ({"train__mlp_tiles": 2}, "train.mlp_tiles", "experts have no tiles"),
        )
    ),
    (
        "skipped_samples",
        {"data__skip_samples": [[0, 10], [5, 20]]},
        {"data.skip_samples": "[5, 20] is empty, or begins before the end of the range before it"},
    ),
    (
        "changed_weights",
        {"data__blend_schedule": [[8, [1.0, 2.0]]]},
        {"data.blend_schedule": "[1.0, 2.0] at 8: data.train has 1 dataset"},
    ),
    (
        "changed_weights",
        {"data__blend_schedule": [[8, [1.0]], [8, [1.0]]]},
        {"data.blend_schedule": "place 8 does not come after 8"},
    ),
    ("skipped_samples", {"data__skip_samples": [[10, 10]]}, {"data.skip_samples": "[10, 10] is empty"}),
    (
        "document_order",
        {"data__document_order_file": "order.npy"},
        {"data.document_order_file": "has no effect on mock data"},
    ),
    (
        "batch_rampup",
        {"batch__rampup": [3, 2, 10]},
        {"batch.rampup": "the batch does not grow from 3 by 2 to batch.global = 8"},
    ),
    (
        "batch_rampup",
        {"batch__rampup": [2, 3, 10], "parallel__dp": 2},
        {"batch.rampup": "increment 3 is not divisible by micro x dp = 2"},
    ),
    (
        "noise_scale",
        {"train__noise_scale_every": 1, "batch__micro": 8},
        {"train.noise_scale_every": "a step of one micro-batch of 8"},
    ),
    (
        "noise_scale",
        {"train__noise_scale_every": 1, "parallel__pp": 2, "parallel__schedule": "gpipe"},
        {"train.noise_scale_every": "gpipe computes the head's gradient of further micro-batches"},
    ),
    (
        "learning_rate",
        {"batch__rampup": [2, 2, 60], "optimizer__warmup_steps": 9},
        {"optimizer.warmup_steps": "as many samples as train.steps = 10 with the ramp-up"},
    ),
    (
        "NO_DOCUMENTS",
        {"data__eod_mask_loss": False},
        {"data.eod_mask_loss": "has no effect with attention_mask = causal"},
    ),
    (
        "padded_experts",
        MOE | {"data__packing": "best_fit", "data__mock": False, "data__train": "set"},
        {"data.packing": "experts know it by the documents of a sample alone"},
    ),
    ("MOCK_DATA", {"data__packing": "best_fit"}, {"data.packing": "has no effect with mock = true"}),
    (
        "data_policy",
        {"data__blend_policy": "fixed"},
        {"data.blend_policy": "changes the weights of a blend, and data.train is none"},
    ),
    ("MOCK_DATA", {"data__sample_weight": "equal"}, {"data.sample_weight": "has no effect with mock = true"}),
    (
        "SAMPLE_WEIGHTS",
        {"data__sample_weight": "equal", "train__noise_scale_every": 1, "data__mock": False, "data__train": "set"},
        {"train.noise_scale_every": "the noise scale is in tokens"},
    ),
    (
        "NOT_DECOMPOSED",
        {"data__decompose_min_length": 8},
        {"data.decompose_min_length": "has no effect with packing = concat"},
    ),
    (
        "end_of_document",
        {"data__attention_mask": "document", "data__eod": 101},
        {"data.eod": "101 is no token of a vocabulary of 101"},
    ),
    ("nccl_ctas", {"nccl__dp_ctas": [4, 2]}, {"nccl.dp_ctas": "at least 4 and at most 2"}),
    (
        "rope",
        {"model__num_heads": 32, "model__position": "rope"},
        {"model.num_heads": "an even number of elements of a head, at least 2, not 1 of 1"},
    ),
    ("rope", {"model__position": "rope", "model__rotary_fraction": 0.4}, {"model.rotary_fraction": "not 3 of 8"}),
    (
        "rope",
        {
            "model__position": "rope",
            "model__head_dim": 2,
            "model__rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        {"model.num_heads": "at least 4, not 2 of 2"},
    ),
    (
        "rope_scaling",
        {
            "model__position": "rope",
            "model__rope_scaling": {
                "type": "llama3",
                "factor": 2,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
                "original_seq_length": 8,
            },
        },
        {"model.rope_scaling": "high_freq_factor is not above low_freq_factor"},
    ),
    (
        "rope_scaling",
        {
            "model__position": "rope",
            "model__rope_theta": 1.0,
            "model__rope_scaling": {"type": "yarn", "factor": 2, "original_seq_length": 8},
        },
        {"model.rope_theta": "yarn divides by its logarithm"},
    ),
    (
        "rope",
        {"model__position": "rope", "model__local_rope_theta": 10.0},
        {"model.local_rope_theta": "is for layers with a window, and there is none"},
    ),
    (
        "NO_ROPE",
        {"model__local_rope_theta": 10.0, "model__rope_scaling": {"type": "linear", "factor": 2}},
        {
            "model.rope_scaling": "has no effect with position = learned",
            "model.local_rope_theta": "has no effect with position = learned",
        },
    ),
    (
        "rope_scaling",
        {
            "model__position": "rope",
            "model__rope_scaling": {"type": "yarn", "factor": 2, "original_seq_length": 8, "beta_slow": 33},
        },
        {"model.rope_scaling": "beta_fast is not above beta_slow"},
    ),
    ("positions", {"model__positions": 8}, {"model.positions": "8 learned positions are fewer than the 16"}),
    (
        "NO_LEARNED_POSITIONS",
        {"model__position": "rope", "model__positions": 32},
        {"model.positions": "has no effect with position = rope"},
    ),
    ("NO_ROPE", {"model__rotary_fraction": 0.5}, {"model.rotary_fraction": "has no effect with position = learned"}),
    ("attention_heads", {"model__num_kv_heads": 3}, {"model.num_kv_heads": "4 heads cannot share 3"}),
    (
        "supported_backends",
        {"model__attention_softcap": 5.0, "backends__attention": "te", "train__precision": "bf16"},
        {"backends.attention": "te has no soft cap of scores"},
    ),
    ("qk_norm", {"model__qk_norm": "head"}, {"model.qk_norm": "layernorm subtracts a mean, and q and k need"}),
    ("NO_LATENT", {"model__rope_head_dim": 8}, {"model.rope_head_dim": "has no effect with kv_lora_rank = 0"}),
    ("NO_LATENT", {"model__value_head_dim": 4}, {"model.value_head_dim": "has no effect with kv_lora_rank = 0"}),
    (
        "latent_attention",
        LATENT | {"model__num_kv_heads": 2},
        {"model.num_kv_heads": "has keys of all 4 heads, not of"},
    ),
    ("latent_attention", LATENT | {"model__rope_head_dim": 0}, {"model.rope_head_dim": "rotates a part of q and k"}),
    ("latent_attention", LATENT | {"model__value_head_dim": 64}, {"model.value_head_dim": "wider than keys of 12"}),
    ("rope", LATENT | {"model__rope_head_dim": 3}, {"model.rope_head_dim": "an even number of elements of a head"}),
    *(
        ("LATENT", LATENT | {f"model__{key}": value}, {f"model.{key}": message})
        for key, value, message in (
            ("norm", "layernorm", "normalized by rmsnorm"),
            ("position", "learned", "needs rotary embeddings"),
            ("rotary_fraction", 0.5, "rope_head_dim says what is rotated"),
            ("bias", True, "biases are not supported"),
            ("qkv_bias", True, "biases are not supported"),
            ("block", "post_norm", "is in serial blocks"),
            ("qk_norm", "head", "norms of q and k are not supported"),
            ("window", 4, "windows are not supported"),
            ("attention_softcap", 3.0, "a soft cap is not supported"),
        )
    ),
    (
        "attention_by_layer",
        {"model__attention_pattern": "LLLLS"},
        {"model.attention_pattern": "5 letters for 4 layers"},
    ),
    *(
        (
            "NO_SCORES",
            {"model__attention_pattern": "L", "model__norm": "rmsnorm", f"model__{key}": value},
            {f"model.{key}": "no layer of L has softmax attention"},
        )
        for key, value in (
            ("window", 4),
            ("qk_norm", "head"),
            ("softmax_scale", 0.5),
            ("attention_softcap", 3.0),
            ("attention_sinks", True),
            ("sparse_attention", {"local_blocks": 1, "stride": 2, "block": 2}),
        )
    ),
    *(
        ("LINEAR_ATTENTION", {"model__attention_pattern": "LS"} | changes, {key: message})
        for changes, key, message in (
            ({"model__block": "parallel"}, "model.block", "linear attention is a branch of its own"),
            (UNIT, "model.unit_scaling", "no rule for linear attention"),
            (HYBRID, "parallel.hybrid_dp", "exchange keys and values, and no states"),
        )
    ),
    ("attention_by_layer", {"model__window": [4, 0, 4, 0, 4]}, {"model.window": "5 numbers for 4 layers"}),
    ("tensor_parallel", {"parallel__tp": 8}, {"parallel.tp": "4 heads cannot be split over tp = 8"}),
    ("tensor_parallel", {"parallel__tp": 4, "model__num_kv_heads": 2}, {"parallel.tp": "2 key-value heads cannot"}),
    ("tensor_parallel", {"parallel__tp": 2, "model__ffn_size": 33}, {"parallel.tp": "33 columns of the MLP cannot"}),
    (
        "tensor_parallel",
        MOE | {"parallel__tp": 2, "parallel__sp": True, "model__shared_ffn_size": 33},
        {"parallel.tp": "33 columns of the shared expert cannot"},
    ),
    (
        "multi_token_prediction",
        {"model__position": "rope", "model__seq_length": 4, "model__mtp_layers": 4},
        {"model.mtp_layers": "a sequence of 4 has no target of depth 4"},
    ),
    (
        "tensor_parallel",
        {"parallel__tp": 2, "parallel__sp": True, "model__seq_length": 15},
        {"model.seq_length": "a sequence of 15 cannot be split over tp = 2"},
    ),
    (
        "domino",
        {"overlap__tp": "domino"},
        {
            "parallel.tp": "one rank has no tp collectives",
            "batch.micro": "1 sequences have no two equal halves",
        },
    ),
    (
        "domino",
        DOMINO | {"batch__micro": 3, "batch__global": 3},
        {"batch.micro": "3 sequences have no two equal halves"},
    ),
    ("domino", DOMINO | MOE | {"parallel__sp": True}, {"model.experts": "experts balance whole micro-batches"}),
    (
        "domino",
        DOMINO | {"model__mtp_layers": 1, "model__position": "rope"},
        {"model.mtp_layers": "MTP layers read whole"},
    ),
    ("domino", DOMINO | {"train__mlp_tiles": 2}, {"train.mlp_tiles": "tiles run one after another"}),
    (
        "domino",
        DOMINO | {"data__sequence_chunk_tokens": 8},
        {"data.sequence_chunk_tokens": "keys are of whole micro-b"},
    ),
    *(
        (
            "domino",
            DOMINO | FP8_MODEL | {"fp8__recipe": recipe},
            {"fp8.recipe": f"{recipe} has scales of a micro-batch's"},
        )
        for recipe in ("tensorwise", "delayed", "rowwise")
    ),
    (
        "fp8_scale",
        FP8_MODEL | {"fp8__recipe": "delayed", "fp8__scale": "pow2"},
        {"fp8.scale": "pow2 is for scales by an operand's amax, and those of delayed are delayed"},
    ),
    (
        "fp8_scale",
        FP8_MODEL | {"fp8__recipe": "static", "fp8__scale": "pow2"},
        {"fp8.scale": "pow2 is for scales by an operand's amax, and those of static are static"},
    ),
    (
        "fp8_scale",
        FP8_MODEL | {"fp8__recipe": "mxfp8", "fp8__scale": "pow2"},
        {"fp8.scale": "has no effect: the fp8 recipe mxfp8 has scales in e8m0"},
    ),
    (
        "fp8_scale",
        FP8_MODEL | {"fp8__recipe": "rowwise", "fp8__scale": "pow2", "fp8__schedule": [[0.5, "delayed"]]},
        {"fp8.scale": "pow2 is for scales by an operand's amax, and those of delayed are delayed"},
    ),
    (
        "fp8_scale",
        FP8_MODEL | {"fp8__recipe": "mxfp8", "fp8__scale": "pow2", "fp8__schedule": [[0.5, "nvfp4"]]},
        {"fp8.scale": "has no effect: the fp8 recipe mxfp8 has scales in e8m0"},
    ),
    (
        "hybrid_fp8",
        FP8_MODEL | HYBRID | {"fp8__recipe": "rowwise"},
        {"fp8.scale": "ranks have other tokens together than without hybrid_dp, and other tokens"},
    ),
    (
        "hybrid_fp8",
        FP8_MODEL | HYBRID | {"fp8__recipe": "rowwise", "fp8__scale": "pow2", "data__max_tokens_per_rank": 24},
        {"data.max_tokens_per_rank": "24 tokens: the fp8 recipe rowwise needs multiples of 16"},
    ),
    (
        "tile_tokens",
        FP8_MODEL | {"fp8__recipe": "blockwise", "train__mlp_tiles": 2, "batch__micro": 2},
        {"train.mlp_tiles": "128 tokens of a sequence on a rank in 2 tiles"},
    ),
    ("pipeline", {"parallel__vpp": 2}, {"parallel.vpp": "vpp = 2 splits pipeline stages, but pp = 1"}),
    ("pipeline", {"parallel__pp": 7}, {"parallel.pp": "4 layers are too few for pp x vpp = 7 x 1 chunks"}),
    ("pipeline", {"parallel__pp": 2, "parallel__vpp": 4}, {"parallel.pp": "4 layers are too few for pp x vpp = 2 x 4"}),
    ("pipeline", {"parallel__layers_per_chunk": [2, 2]}, {"parallel.layers_per_chunk": "2 numbers for pp x vpp = 1"}),
    (
        "pipeline",
        {"parallel__layers_per_chunk": [3]},
        {"parallel.layers_per_chunk": "adds up to 3, but num_layers = 4"},
    ),
    (
        "pipeline",
        {"parallel__pp": 3, "parallel__layers_per_chunk": [2, 0, 2]},
        {"parallel.layers_per_chunk": "a chunk between first and last has no layer"},
    ),
    (
        "schedule",
        {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "gpipe"},
        {"parallel.schedule": "gpipe runs one chunk a stage, but vpp = 2"},
    ),
    (
        "schedule",
        {"parallel__pp": 2, "parallel__schedule": "zb_v"},
        {"parallel.vpp": "zb_v runs 2 chunks a stage, but vpp = 1"},
    ),
    ("schedule", {"parallel__schedule": "zb_v"}, {"parallel.vpp": "zb_v runs 2 chunks a stage, but vpp = 1"}),
    (
        "skipped_stages",
        {"parallel__pp": 4, "parallel__skip_ratio": 0.9},
        {"parallel.skip_ratio": "leaves some stage none of the 8 micro-batches in a step of a rank"},
    ),
    (
        "fp8_shapes",
        {"train__precision": "fp8", "fp8__first_layers_bf16": 2, "fp8__last_layers_bf16": 2},
        {"fp8.first_layers_bf16": "the first 2 and last 2 of 4 layers leave none in fp8"},
    ),
    (
        "fp8_shapes",
        {"train__precision": "fp8", "model__num_layers": 2},
        {"fp8.first_layers_bf16": "the first 1 and last 1 of 2 layers leave none in fp8, and these stay in bf16 by d"},
    ),
    ("fp8_shapes", {"train__precision": "fp8", "model__seq_length": 8}, {"model.seq_length": "8 tokens in a micro"}),
    (
        "fp8_schedule",
        {"train__precision": "fp8", "fp8__schedule": [[0.5, "bf16"], [0.4, "rowwise"]]},
        {"fp8.schedule": "rowwise at 0.4 does not come after 0.5"},
    ),
    (
        "fp8_schedule",
        {"train__precision": "fp8", "fp8__schedule": [[0.5, "tensorwise"]]},
        {"fp8.schedule": "tensorwise at 0.5 follows itself"},
    ),
    (
        "fp8_shapes",
        {"train__precision": "fp8", "parallel__tp": 4},
        {"parallel.tp": "24 columns of q, k and v on a rank"},
    ),
    (
        "fp8_shapes",
        {"train__precision": "fp8", "model__ffn_size": 120},
        {"model.ffn_size": "120 columns of the MLP on a rank"},
    ),
    (
        "fp8_shapes",  # a block would span k and v
        {
            "train__precision": "fp8",
            "fp8__recipe": "blockwise",
            "parallel__tp": 2,
            "batch__micro": 4,
            "batch__global": 8,
        }
        | {
            "model__seq_length": 128,
            "model__hidden_size": 512,
            "model__num_heads": 8,
            "model__num_kv_heads": 2,
            "model__ffn_size": 256,
        },
        {"parallel.tp": "64 columns of k on a rank"},
    ),
    (
        "recomputed_operations",
        {"train__recompute_ops": ["attention"]},
        {"train.recompute_ops": "selects operations for selective recomputation, but recompute = none"},
    ),
    (
        "recomputed_operations",
        {"train__recompute": "full", "train__recompute_ops": ["norm"]},
        {"train.recompute_ops": "but recompute = full"},
    ),
    (
        "recomputed_operations",
        {"train__recompute": "selective", "train__recompute_ops": ["norm", "attention", "norm"]},
        {"train.recompute_ops": "names an operation twice"},
    ),
    ("LAYER_POLICIES", {"train__memory": ["keep"], "train__recompute": "selective"}, {"train.recompute": "of all"}),
    ("layer_policies", {"train__memory": ["keep", "full"] * 3}, {"train.memory": "6 policies, and the model has 4"}),
    (
        "layer_policies",
        {"train__memory": [{"host": 0.5}]},
        {"train.memory": "no whole number of tiles with train.mlp_tiles = 1"},
    ),
    (
        "layer_policies",
        {"train__memory": ["keep", {"host": 0.3}], "train__mlp_tiles": 4},
        {"train.memory": "a share of 0.3 is no whole number of tiles with train.mlp_tiles = 4"},
    ),
    ("NO_CHOICE", {"train__memory_limit": 1 << 30}, {"train.memory_limit": "train.memory is not auto"}),
    ("saved_tensors_folder", {"train__memory": ["nvme"]}, {"train.memory_dir": "need a folder"}),
    ("saved_tensors_folder", {"train__memory_dir": "/"}, {"train.memory_dir": "has no effect without nvme"}),
    (
        "saved_tensors_folder",
        {"train__memory": ["nvme"], "train__memory_dir": "disk"},
        {"train.memory_dir": "'disk' is not the absolute path of a writable folder"},
    ),
    ("tile_tokens", {"train__mlp_tiles": 17}, {"train.mlp_tiles": "16 tokens of a sequence for 17 tiles"}),
    (
        "tile_tokens",
        {"parallel__tp": 2, "parallel__sp": True, "data__sequence_chunk_tokens": 8, "train__mlp_tiles": 5},
        {"train.mlp_tiles": "4 tokens of a sequence for 5 tiles"},
    ),
    (
        "tile_tokens",
        {"train__precision": "fp8", "fp8__recipe": "static", "train__mlp_tiles": 2},
        {"train.mlp_tiles": "16 tokens on a rank in 2 tiles: the fp8 recipe static needs multiples of 16"},
    ),
    (
        "tile_scales",
        {"train__precision": "fp8", "train__mlp_tiles": 1 << 4, "batch__micro": 16, "batch__global": 16},
        {"train.mlp_tiles": "with the fp8 recipe tensorwise a scale covers all tokens"},
    ),
    (
        "tile_scales",
        {"train__precision": "fp8", "fp8__recipe": "static", "model__block": "parallel", "model__seq_length": 32}
        | {"train__mlp_tiles": 2},
        {"train.mlp_tiles": "attention and MLP of a parallel block share an fp8 operand"},
    ),
    (
        "NO_TAIL",
        {"optimizer__decay": "cosine", "optimizer__decay_steps": 3},
        {"optimizer.decay_steps": "has no effect with"},
    ),
    (
        "CONSTANT_RATE",
        {"optimizer__decay": "constant", "optimizer__min_lr": 1e-3},
        {"optimizer.min_lr": "has no effect with"},
    ),
    ("NO_AVERAGE", {"train__weight_average_every": 3}, {"train.weight_average_every": "has no effect with"}),
    (
        "NO_EMA",
        {"train__weight_average": "lawa", "train__weight_average_decay": 0.5},
        {"train.weight_average_decay": "has no effect with"},
    ),
    (
        "NO_LAWA",
        {"train__weight_average": "ema", "train__weight_average_count": 3},
        {"train.weight_average_count": "has no effect with"},
    ),
    ("BLOCK_SCALES", {"fp8__recipe": "blockwise", "fp8__fast_dgrad": True}, {"fp8.fast_dgrad": "has no effect with"}),
    ("VOCABULARY", {"parallel__vocab_pp": 1}, {"parallel.pp": "there are no stages to share the vocabulary"}),
    (
        "SKIPS",
        {"parallel__pp": 4, "parallel__skip_ratio": 0.5, "parallel__vocab_pp": 1},
        {"parallel.vocab_pp": "its passes wait for all stages (parallel.skip_ratio = 0.5)"},
    ),
    (
        "SKIPS",
        {"parallel__pp": 2, "parallel__skip_ratio": 0.5},
        {"parallel.pp": "no stage lies between the first and the last (parallel.skip_ratio = 0.5)"},
    ),
    (
        "skipped_stages",
        {"parallel__pp": 4, "parallel__dp": 2, "parallel__skip_ratio": 0.8},
        {"parallel.skip_ratio": "leaves some stage none of the 4 micro-batches in a step of a rank"},
    ),
    ("NO_PIPELINE", {"nccl__pp_carveout": 4}, {"nccl.pp_carveout": "has no effect"}),
    ("NO_HISTORY", {"fp8__recipe": "rowwise", "fp8__history": 4}, {"fp8.history": "has no effect with"}),
    ("NO_HOST_READER", {"data__reader_timeout_s": 9.0}, {"data.reader_timeout_s": "has no effect with"}),
    (
        "tile_recomputation",
        {"train__recompute": "selective", "train__recompute_ops": ["norm", "activation"], "train__mlp_tiles": 2},
        {"train.recompute_ops": "activation has no effect with mlp_tiles = 2"},
    ),
    ("counts", {"batch__global": 2**23}, {"batch.global": "8388608 micro-batches in a step of a rank, over 1048576"}),
    ("batch_size", {"batch__micro": 3}, {"batch.global": "8 is not divisible by micro x dp = 3 x 1"}),
    ("batch_size", {"parallel__dp": 3}, {"batch.global": "8 is not divisible by micro x dp = 1 x 3"}),
    ("learning_rate", {"optimizer__min_lr": 0.1}, {"optimizer.min_lr": "0.1 is more than lr = 0.01"}),
    (
        "learning_rate",
        {"optimizer__warmup_steps": 10},
        {"optimizer.warmup_steps": "10 is not less than train.steps = 10"},
    ),
    (
        "learning_rate",
        {"optimizer__decay": "wsd", "optimizer__decay_steps": 9},
        {"optimizer.decay_steps": "9 do not fit after the warm-up"},
    ),
    (
        "optimizer_groups",
        {"optimizer__name": "muon", "optimizer__options": {"ns_step": 5}},
        {"optimizer.options": "muon has no option ns_step"},
    ),
    (
        "optimizer_groups",
        {"optimizer__name": "muon", "optimizer__options": {"ns_steps": 5.0}},
        {"optimizer.options": "muon: ns_steps is 5.0, not a whole number"},
    ),
    (
        "optimizer_groups",
        {"optimizer__groups": [{"kinds": ["matrix"], "name": "muon", "options": {"ns_dtype": "fp16"}}]},
        {"optimizer.groups": "muon: ns_dtype is 'fp16'"},
    ),
    (
        "optimizer_groups",
        {"optimizer__name": "came", "optimizer__options": {"beta2": 1.0}},
        {"optimizer.options": "came: beta2 is 1.0, out of range"},
    ),
    (
        "optimizer_groups",
        {"optimizer__groups": [{"kinds": ["matrix"]}, {"params": ["layers.1.*.weight"], "lr_mult": 2}]},
        {"optimizer.groups": "layers.1.attention.q.weight is in groups 1 and 2"},
    ),
    (
        "optimizer_groups",
        {"optimizer__groups": [{"params": ["*_norm.weight"], "name": "muon"}]},
        {"optimizer.groups": "layers.0.attention_norm.weight is no matrix, and muon updates matrices"},
    ),
    (
        "optimizer_groups",
        {"optimizer__groups": [{"params": ["layer.*"]}]},
        {"optimizer.groups": "group 1 matches no parameter"},
    ),
    (
        "optimizer_groups",
        {"optimizer__groups": [{"kinds": ["norm", "bias"], "weight_decay": 0.1}]},
        {"optimizer.groups": "weight_decay of group 1 has no effect: norms and biases do not decay"},
    ),
    (
        "optimizer_groups",
        {"optimizer__name": "adamw_8bit", "optimizer__options": {"eps": 0.0}},
        {"optimizer.options": "adamw_8bit: eps is 0.0, out of range"},
    ),
    (
        "optimizer_groups",
        {"optimizer__name": "adafactor", "optimizer__options": {"clip_threshold": 0.0}},
        {"optimizer.options": "adafactor: clip_threshold is 0.0, out of range"},
    ),
    (
        "optimizer_groups",
        {"optimizer__name": "came", "optimizer__options": {"eps2": 0.0}},
        {"optimizer.options": "came: eps2 is 0.0, out of range"},
    ),
    (
        "optimizer_groups",
        {"optimizer__name": "lamb", "optimizer__groups": [{"kinds": ["norm"], "lr_mult": 2}]},
        {"optimizer.groups": "lamb scales updates by norms of whole parameters"},
    ),
    (
        "optimizer_groups",
        {"optimizer__name": "lamb", "model__mup_base_width": 32, "model__tie_embeddings": False},
        {"model.mup_base_width": "has no effect with lamb"},
    ),
    (
        "frozen_parameters",
        {"train__freeze": ["layers.9.*"]},
        {"train.freeze": "layers.9.* matches no parameter"},
    ),
    (
        "frozen_parameters",
        {"train__freeze": ["*.q.weight"]},
        {"train.freeze": "is in one weight with layers.0.attention.k.weight, layers.0.attention.v.weight"},
    ),
    (
        "frozen_parameters",
        {"train__freeze": ["*"]},
        {"train.freeze": "all parameters are frozen: nothing is trained"},
    ),
    (
        "FROZEN",
        {"train__freeze": ["embedding.*"], "optimizer__name": "lamb"},
        {"optimizer.name": "lamb needs norms of all parameters"},
    ),
    (
        "FROZEN",
        SITES | {"train__freeze": ["embedding.*"]},
        {"sites.count": "sites exchange all weights"},
    ),
    (
        "FROZEN",
        REBUILT | {"train__freeze": ["embedding.*"], "model__num_layers": 3},
        {"fault.rebuild_stage": "a lost stage is rebuilt by its neighbours' optimizer state"},
    ),
    (
        "TIED_HEAD",
        {"model__mup_base_width": 32, "model__tie_embeddings": True},
        {"model.mup_base_width": "the head's scale and learning rate are not the token embedding's under muP"},
    ),
    (
        "RESIDUAL_TAU",
        {"model__residual_tau": 0.25},
        {"model.block": "branches of a weighted residual stream end in a norm"},
    ),
    (
        "UNIT_SCALING",
        {"model__unit_scaling": True, "model__init_std": 0.01},
        {
            "model.block": "unit scaling has a norm after each branch and none before",
            "model.position": "learned positions would add to the embedding's variance",
            "model.tie_embeddings": "the head's weight is 1 / hidden_size of an embedding's",
            "model.init_std": "has no effect with unit scaling",
        },
    ),
    (
        "optimizer_groups",
        {"optimizer__name": "muon", **UNIT},
        {"model.unit_scaling": "muon's updates do not have elements of a fixed size"},
    ),
    (
        "LAMB",
        {"optimizer__master_weights": "bf16_compensated", "optimizer__name": "lamb", "train__precision": "bf16"},
        {"optimizer.master_weights": "lamb needs master weights in fp32"},
    ),
    ("ZCLIP", {"optimizer__zclip_threshold": 3.0}, {"optimizer.zclip_threshold": "has no effect with zclip = false"}),
    ("SKIPPED_STEPS", {"optimizer__skip_window": 64}, {"optimizer.skip_window": "has no effect with skip_sigma = 0"}),
    ("supported_backends", {"backends__activation": "liger"}, {"backends.activation": "liger has no gelu"}),
    (
        "supported_backends",
        {"backends__norm": "te", "backends__activation": "compile", "train__precision": "fp64"},
        {"backends.norm": "te has no float64"},
    ),
    ("supported_backends", {"backends__attention": "flash"}, {"backends.attention": "flash has no float64"}),
    (
        "supported_backends",
        {"backends__attention": "flash", "train__precision": "bf16", "model__hidden_size": 2048},
        {"backends.attention": "flash supports head dims up to 256, not 512"},
    ),
    (
        "supported_backends",
        {"backends__attention": "compile", "train__precision": "bf16", "model__hidden_size": 64},
        {"backends.attention": "compile is for layers with a window, and there is none"},
    ),
    (
        "supported_backends",
        {"backends__norm": "liger", "train__precision": "bf16", "model__hidden_size": 1 << 17},
        {"backends.norm": "liger supports at most 65536 columns, not 131072"},
    ),
    (
        "supported_backends",
        {"backends__attention": "te", "backends__linear": "te", "train__precision": "bf16", "model__dropout": 0.1},
        {
            "backends.attention": "te draws dropout of its own",
            "backends.linear": "te is for train.precision = 'fp8' only",
        },
    ),
    (
        "supported_backends",
        {"backends__linear": "te", "train__precision": "fp8", "fp8__recipe": "rowwise"},
        {"backends.linear": "te has no scales by row"},
    ),
    ("data_source", {"data__mock": False}, {"data.train": "no training data"}),
    ("data_source", {"data__train": "set"}, {"data.mock": "both mock data and datasets are given"}),
    ("data_source", {"data__split": [0.0, 1.0]}, {"data.split": "the share of training documents is 0"}),
    (
        "data_source",
        {"data__mock": False, "data__train": "set", "data__split": [1.0, 0.0], "train__eval_every": 5},
        {"data.split": "evaluation needs validation data, but its share is 0"},
    ),
    (
        "data_files",
        {"data__mock": False, "data__train": "none", "data__valid": [[1.0, "set"], [2.0, "gone"]]},
        {
            "data.train": "there is no file none.bin nor none.idx",
            "data.valid": "there is no file gone.bin nor gone.idx",
        },
    ),
    ("data_files", {"data__mock": False, "data__train": "half"}, {"data.train": "there is no file half.idx"}),
    ("data_files", {"data__tokenizer": "none.json"}, {"data.tokenizer": "there is no file none.json"}),
    (
        "data_files",
        {"data__mock": False, "data__train": "half", "data__document_order_file": "none.npy"},
        {"data.train": "there is no file half.idx", "data.document_order_file": "there is no file none.npy"},
    ),
    (
        "data_files",
        {"data__mock": False, "data__train": "set", "data__tokenizer": "bytes"},
        {"data.tokenizer": "bytes is not the tokenizer of set (tokenizer.json)"},
    ),
    (
        "data_files",
        {"data__mock": False, "data__train": "set", "model__vocab_size": 99},
        {"model.vocab_size": "99 is less than the 100 tokens of the tokenizer of set"},
    ),
    ("data_files", {"data__mock": False, "data__train": "odd"}, {"data.train": "odd.json cannot be read"}),
    (
        "data_files",
        {"data__mock": False, "data__train": [[1.0, "set"], [1.0, "other"]]},
        {"data.train": "set and other have different tokenizers"},
    ),
    (
        "data_files",
        {"data__mock": False, "data__train": "set", "data__valid": "other"},
        {"data.valid": "set and other have different tokenizers"},
    ),
    ("data_files", {"data__mock": False, "data__train": "short"}, {"data.train": "short.idx is cut short: 0 bytes"}),
    (
        "data_files",
        {"data__mock": False, "data__train": [[1.0, "set"], [2.0, "foreign"], [0.5, "./set"]]},
        {"data.train": "set is named 2 times"},
    ),
    (
        "data_samples",
        {"data__mock": False, "data__train": "set", "model__seq_length": 120},
        {"data.train": "set: 120 tokens to train on, fewer than one sample of 120 + 1"},
    ),
    (
        "data_samples",
        {
            "data__mock": False,
            "data__train": "set",
            "train__eval_every": 5,
            "data__split": [0.5, 0.5],
            "batch__global": 4,
        },
        {"data.split": "3 samples to validate on are fewer than one global batch of 4"},
    ),
    ("resume", {"checkpoint__resume": "none"}, {"checkpoint.resume": "there is no checkpoint in none"}),
    ("resume", {"checkpoint__resume": "hf:none"}, {"checkpoint.resume": "there is no file "}),
    (
        "NO_CHECKPOINTS",
        {"checkpoint__in_memory_every": 5},
        {"checkpoint.in_memory_every": "has no effect with every = 0"},
    ),
    ("NO_COPIES", {"checkpoint__replicate": True}, {"checkpoint.replicate": "has no effect with in_memory_every = 0"}),
    (
        "memory_folder",
        {"checkpoint__in_memory_every": 5, "checkpoint__every": 5, "checkpoint__in_memory_dir": "none"},
        {"checkpoint.in_memory_dir": "'none' is not the absolute path of a writable folder"},
    ),
    (
        "NO_PRUNING",
        {"checkpoint__keep_every": 5},
        {"checkpoint.keep_every": "has no effect with keep = 0"},
    ),
    ("file_system", {"checkpoint__dir": ""}, {"checkpoint.dir": "'' is neither a path nor a URL"}),
    ("file_system", {"checkpoint__dir": "s3://"}, {"checkpoint.dir": "'s3://' is neither a path nor a URL"}),
    ("file_system", {"checkpoint__dir": "file:/tmp"}, {"checkpoint.dir": "'file:/tmp' is neither a path nor a URL"}),
    ("file_system", {"checkpoint__dir": "memory://x"}, {"checkpoint.dir": "memory://x is visible to one process only"}),
    (
        "file_system",
        {"checkpoint__dir": "simplecache::s3://a/b"},
        {"checkpoint.dir": "simplecache::s3://a/b is a chain of file systems"},
    ),
    ("file_system", {"checkpoint__dir": "none://x"}, {"checkpoint.dir": "none: Protocol not known: none"}),
    ("cp_modes", {"parallel__cp_a2a_size": 2}, {"parallel.cp_a2a_size": "has no effect with cp_mode = ring"}),
    (
        "cp_modes",
        {"parallel__cp": 4, "parallel__cp_mode": "usp"},
        {"parallel.cp_a2a_size": "usp needs the number of neighbouring ranks that exchange heads"},
    ),
    (
        "cp_modes",
        {"parallel__cp": 2, "parallel__cp_mode": "usp", "parallel__cp_a2a_size": 4},
        {"parallel.cp_a2a_size": "4 ranks that exchange heads do not divide cp = 2"},
    ),
    ("cp_sequence", {"parallel__cp": 3}, {"model.seq_length": "16 cannot be split into 2 x 3 chunks"}),
    (
        "cp_sequence",
        {"parallel__cp": 2, "parallel__tp": 4, "parallel__sp": True, "model__seq_length": 12},
        {"model.seq_length": "a sequence of 12 cannot be split into cp x tp = 8 ranks"},
    ),
    (
        "cp_heads",
        {"parallel__cp": 8, "parallel__cp_mode": "ulysses"},
        {"parallel.cp": "4 heads of a tp rank cannot be split over 8 ranks"},
    ),
    (
        "cp_heads",
        {
            "parallel__cp": 4,
            "parallel__cp_mode": "usp",
            "parallel__cp_a2a_size": 4,
            "model__num_heads": 12,
            "model__hidden_size": 48,
            "model__num_kv_heads": 6,
        },
        {"parallel.cp_a2a_size": "6 key-value heads of a tp rank can neither be split over 4 ranks nor repeated"},
    ),
    (
        "cp_sharding",
        {"parallel__cp": 2, "parallel__cp_sharding": "document"},
        {"parallel.cp_sharding": "chunks of documents need data.attention_mask = document"},
    ),
    (
        "WHOLE_SEQUENCES",
        {"data__sequence_chunks_saved": 2},
        {"data.sequence_chunks_saved": "has no effect without data.sequence_chunk_tokens"},
    ),
    (
        "chunk_sizes",
        {"data__sequence_chunk_tokens": 5},
        {"data.sequence_chunk_tokens": "16 cannot be cut into chunks of 5"},
    ),
    (
        "chunk_sizes",
        {"data__sequence_chunk_tokens": 16},
        {"data.sequence_chunk_tokens": "16 cannot be cut into chunks of 16"},
    ),
    (
        "chunk_sizes",
        {"data__sequence_chunk_tokens": 2, "parallel__tp": 4, "parallel__sp": True},
        {"data.sequence_chunk_tokens": "2 tokens cannot be split over tp = 4 ranks"},
    ),
    (
        "chunk_sizes",
        {"data__sequence_chunk_tokens": 8, "data__sequence_chunks_saved": 3},
        {"data.sequence_chunks_saved": "a sequence has 2 chunks"},
    ),
    (
        "chunk_schedule",
        {"data__sequence_chunk_tokens": 8, "parallel__pp": 2, "parallel__vpp": 2},
        {"parallel.vpp": "vpp = 2"},
    ),
    (
        "chunk_schedule",
        {"data__sequence_chunk_tokens": 8, "parallel__pp": 2, "parallel__schedule": "gpipe"},
        {"parallel.schedule": "gpipe has no order of chunks that depend on each other"},
    ),
    (
        "CHUNKS",
        {"data__sequence_chunk_tokens": 8, "parallel__cp": 2},
        {"parallel.cp": "a rank has all chunks of a sequence, and cp = 2 splits it"},
    ),
    (
        "CHUNKS",
        {"data__sequence_chunk_tokens": 8, "model__dropout": 0.1},
        {"model.dropout": "chunks have no dropout"},
    ),
    (
        "CHUNKS",
        {"data__sequence_chunk_tokens": 8, "model__attention_softcap": 2.0},
        {"model.attention_softcap": "needs all keys at once"},
    ),
    (
        "CHUNKS",
        HYBRID | {"data__sequence_chunk_tokens": 8},
        {"parallel.hybrid_dp": "hybrid_dp deals whole documents to ranks"},
    ),
    (
        "NOT_HYBRID",
        {"data__max_tokens_per_rank": 8},
        {"data.max_tokens_per_rank": "has no effect with hybrid_dp = false"},
    ),
    (
        "hybrid_tokens",
        {"parallel__hybrid_dp": True, "data__attention_mask": "document"},
        {
            "data.max_tokens_per_rank": "hybrid_dp needs the most tokens of a rank",
        },
    ),
    (
        "hybrid_tokens",
        HYBRID | {"data__max_tokens_per_rank": 3, "parallel__dp": 4},
        {"data.max_tokens_per_rank": "4 ranks hold 12 tokens, and a document may have 16"},
    ),
    *(
        ("hybrid_sharding", {"parallel__dp": 4, "parallel__dp_shard": 2, **changes}, {f"parallel.{key}": message})
        for changes, key, message in (
            ({"parallel__zero": 0}, "dp_shard", "ranks shard nothing (parallel.zero = 0)"),
            ({"parallel__dp_shard": 1}, "dp_shard", "a rank alone has no one to shard with"),
            ({"parallel__dp_shard": 3}, "dp_shard", "3 does not divide dp = 4"),
            ({"parallel__dp_shard": 8}, "dp_shard", "8 does not divide dp = 4"),
            (MOE | {"parallel__ep": 4}, "dp_shard", "the 2 ranks that shard (tp x cp x dp_shard) do not hold all"),
            ({"parallel__state_shard": "all"}, "state_shard", "parallel.dp_shard = 2 and parallel.zero = 1"),
        )
    ),
    ("hybrid_sharding", {"parallel__zero": 3, "parallel__state_shard": "all"}, {"parallel.state_shard": "no effect"}),
    (
        "coded_gradients",
        {"parallel__dp": 2, "parallel__zero": 0, "parallel__grad_reduce": "fp8"},
        {"parallel.grad_reduce": "every rank needs the whole sum (parallel.zero = 0)"},
    ),
    ("released_weights", {"parallel__reshard": "keep"}, {"parallel.reshard": "never released (parallel.zero = 1)"}),
    (
        "released_weights",
        {"parallel__zero": 3, "parallel__reshard": "microbatch"},
        {"parallel.reshard": "a stage has one model chunk"},
    ),
    (
        "released_weights",
        {
            "parallel__zero": 3,
            "parallel__vpp": 2,
            "parallel__pp": 2,
            "parallel__schedule": "dualpipev",
            "parallel__reshard": "forward",
        },
        {"parallel.reshard": "in different layers (parallel.schedule = dualpipev)"},
    ),
    *(
        ("SHARDED_WEIGHTS", {"parallel__zero": 3, **changes}, {key: f"{message} (parallel.zero = 3)"})
        for changes, key, message in (
            ({"model__mtp_layers": 1, "model__position": "rope"}, "model.mtp_layers", "use the head's weights again"),
            ({"model__exits": [2]}, "model.exits", "an evaluation leaves out exits"),
            ({"overlap__bucket_bytes": 1000}, "overlap.bucket_bytes", "every layer has a bucket"),
            (
                {"overlap__tp": "domino", "parallel__tp": 2, "batch__micro": 2},
                "overlap.tp",
                "two halves of a micro-batch are in different layers",
            ),
            (
                {"parallel__vocab_pp": 1, "parallel__pp": 2},
                "parallel.vocab_pp",
                "passes use the vocabulary's weights at any time",
            ),
        )
    ),
    ("HYBRID", HYBRID | {"parallel__cp_mode": "ulysses"}, {"parallel.cp_mode": "has no effect (parallel.hybrid_dp"}),
    (
        "HYBRID",
        HYBRID | {"parallel__pp": 2, "parallel__schedule": "gpipe"},
        {"parallel.schedule": "rings meet on all stages in 1F1B"},
    ),
    ("HYBRID", HYBRID | {"parallel__zero": 2}, {"parallel.zero": "different numbers of reductions"}),
    (
        "cp_sharding",
        {
            "parallel__cp": 2,
            "parallel__cp_sharding": "document",
            "parallel__cp_mode": "ulysses",
            "data__attention_mask": "document",
            "data__mock": True,
        },
        {"parallel.cp_sharding": "has no effect with cp_mode = ulysses"},
    ),
    ("cp_combinations", {"parallel__cp": 2, "model__dropout": 0.1}, {"model.dropout": "(cp = 2) has no dropout"}),
    (
        "cp_combinations",
        {"parallel__cp": 2, "model__attention_softcap": 2.0},
        {"parallel.cp_mode": "attention with a soft cap needs all keys at once, and cp_mode = ring"},
    ),
    (
        "cp_fp8",
        {
            "parallel__cp": 2,
            "train__precision": "fp8",
            "model__hidden_size": 64,
            "model__ffn_size": 64,
            "model__num_heads": 4,
        },
        {"parallel.cp": "8 tokens of a micro-batch on a rank along cp: the fp8 recipe tensorwise needs multiples"},
    ),
    (
        "cp_fp8",
        {
            "parallel__cp": 2,
            "train__precision": "fp8",
            "fp8__recipe": "blockwise",
            "model__hidden_size": 512,
            "model__ffn_size": 128,
            "model__num_heads": 4,
            "model__seq_length": 256,
        },
        {"parallel.cp": "64 consecutive tokens of a sequence on a rank along cp: the fp8 recipe blockwise needs"},
    ),
    (
        "decomposed_documents",
        {"data__packing": "decompose", "data__mock": False, "data__train": "set"},
        {"data.packing": "decompose fills samples with unrelated pieces"},
    ),
    (
        "HYBRID",
        HYBRID | {"data__attention_mask": "causal"},
        {"data.attention_mask": "ranks get documents, each with its own attention"},
    ),
    ("NO_POLICY", {"data__blend_policy_every": 5}, {"data.blend_policy_every": "has no effect without a policy"}),
    (
        "compensated_weights",
        {"optimizer__master_weights": "bf16_compensated", "train__precision": "fp32"},
        {"optimizer.master_weights": "there are no bf16 weights with precision = fp32"},
    ),
    (
        "COMPENSATED",
        {"optimizer__master_weights": "bf16_compensated", "train__precision": "bf16", "backends__optimizer": "torch"},
        {"backends.optimizer": "is for master weights in fp32"},
    ),
    ("NO_OFFLOAD", {"optimizer__offload_stride": 2}, {"optimizer.offload_stride": "has no effect with offload = none"}),
    *(
        ("OFFLOAD", {"optimizer__offload": "host"} | changes, {key: message})
        for changes, key, message in (
            (
                {"optimizer__master_weights": "bf16_compensated", "train__precision": "bf16"},
                "optimizer.master_weights",
                "compensated weights are the device's weights (optimizer.offload = host)",
            ),
            ({"train__weight_average": "ema"}, "train.weight_average", "averages are of master weights on the device"),
        )
    ),
    *(
        ("PROJECTED_INPUTS", COMPACT | changes, {key: message})
        for changes, key, message in (
            ({"train__precision": "fp8"}, "train.precision", "wgrad is of projected inputs (optimizer.name = compact)"),
            ({"train__recompute": "full"}, "train.recompute", "blocks save their own inputs"),
            ({"train__memory": ["keep", "full"]}, "train.memory", "blocks save their own inputs"),
            (
                {"train__recompute": "selective", "train__recompute_ops": ["norm"]},
                "train.recompute_ops",
                "recomputed inputs are not saved",
            ),
            (MOE, "model.experts", "experts keep whole inputs"),
            ({"train__mlp_tiles": 2}, "train.mlp_tiles", "tiles save no inputs of layers"),
        )
    ),
    (
        "projected_inputs",
        {"optimizer__name": "compact"},
        {"optimizer.options": "compact: rank is 256, and a layer has 32"},
    ),
    (
        "projected_inputs",
        COMPACT | {"model__ffn_size": 4},
        {"optimizer.options": "rank is 4, and a layer has 4 inputs: it would save no fewer elements"},
    ),
    (
        "offloaded_state",
        {"optimizer__offload": "host", "optimizer__name": "muon"},
        {"optimizer.offload": "muon sees whole matrices or parameters"},
    ),
    (
        "offloaded_state",
        {"optimizer__offload": "host", "optimizer__groups": [{"kinds": ["matrix"], "name": "galore"}]},
        {"optimizer.offload": "galore sees whole matrices or parameters"},
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with datasets: valid, without an index, with another tokenizer, with a corrupt description, of another
    tool, cut short.
    """
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_text("{}")
    for name in ("set", "odd", "other", "foreign"):
        write_dataset(Path(name), [60, 60])
    for name in ("half.bin", "short.bin", "short.idx"):
        Path(name).touch()
    Path("foreign.json").unlink()
    tokenizer = {"name": "tokenizer.json", "fingerprint": fingerprint(Path("tokenizer.json"))}
    Path("set.json").write_text(json.dumps({"tokenizer": tokenizer, "vocab_size": 100}))
    other_tokenizer = {"tokenizer": {"name": "bytes", "fingerprint": "bytes"}, "vocab_size": 100}
    Path("other.json").write_text(json.dumps(other_tokenizer))
    Path("odd.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "findings"),
    [(changes, findings) for _, changes, findings in BROKEN],
    ids=[f"{rule}-{' '.join(changes)}" for rule, changes, _ in BROKEN],
)
def test_a_broken_rule_names_the_key(folder: Path, changes: dict[str, Any], findings: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(settings(GPT, folder, **changes), folder)
    messages = {problem.key: problem.message for problem in caught.value.problems}
    assert messages.keys() == findings.keys()
    for key, part in findings.items():
        assert part in messages[key]
    assert all(problem.hint for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("optimizer", "message", "hint"),
    [
        ({"groups": [{"kinds": ["matrix"], "name": "mouon"}]}, "name is not one of adamw, lamb, muon", "'muon'?"),
        ({"groups": [{"kinds": ["matrix"], "name": "adam"}]}, "name is not one of adamw", "did you mean 'adamw'?"),
        ({"groups": [{"param": ["*"]}]}, "a group has no param; a group needs params or kinds", "'params'?"),
        ({"groups": [{"kinds": ["matrices"]}]}, "kinds should be a list of matrix", "keys of a group: params, kinds"),
        ({"groups": [{"params": ["*.attention.qkv.weight"]}]}, "group 1 matches no parameter",
         "layers.0.attention.qkv.weight is fused: its parts are layers.0.attention.q.weight, layers.0.attention.k.w"),
        ({"options": {"beta1": 0.9}}, "adamw has no option beta1", "keys of [optimizer]: optimizer.betas, optim"),
    ],
)  # fmt: skip
def test_a_mistake_in_groups_or_options_says_what_is_meant(
    folder: Path, optimizer: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(settings(GPT, folder, **{f"optimizer__{key}": value for key, value in optimizer.items()}), folder)
    (problem,) = caught.value.problems
    assert message in problem.message and hint in problem.hint


NAMES = {
    id(rule): name
    for module in (
        exclusions,
        loss_rules,
        memory_rules,
        model_rules,
        parallel_rules,
        site_rules,
        time_rules,
        train_rules,
    )
    for name, rule in vars(module).items()
    if isinstance(rule, Exclusions)
}


def name_of(rule: Rule) -> str:
    """The name of a function, or of a row of the table of exclusions."""
    return NAMES[id(rule)] if isinstance(rule, Exclusions) else rule.__name__


def test_every_rule_is_broken_above() -> None:
    assert {name_of(rule) for rule in RULES} == {name for name, _, _ in BROKEN}


@pytest.mark.parametrize("index", range(len(RULES)), ids=[name_of(rule) for rule in RULES])
def test_only_the_named_rule_finds_its_cases(folder: Path, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Without the rule, a case loads or has other findings: no other rule covers the case."""
    name = name_of(RULES[index])
    monkeypatch.setattr("megascale.config.loading.RULES", [*RULES[:index], *RULES[index + 1 :]])
    monkeypatch.setattr("megascale.config.loading.layout_findings", lambda config: ())  # some of them again
    for case, changes, findings in BROKEN:
        if case == name:
            path = write_config(settings(GPT, folder, **changes), folder / "case.toml")
            try:
                load_config(str(path))
            except ConfigError as error:
                assert not {problem.key for problem in error.problems} & findings.keys()


def test_no_mlp_is_split_where_all_layers_have_experts(tmp_path: Path) -> None:
    layout = {"parallel__tp": 2, "parallel__sp": True, "model__ffn_size": 33, "model__expert_ffn_size": 32}
    config_of(settings(GPT, tmp_path, **MOE, **layout), tmp_path)
    with pytest.raises(ConfigError, match="33 columns of the MLP"):
        config_of(settings(GPT, tmp_path, **MOE, **layout, model__dense_layers=1), tmp_path)


def test_a_resolved_configuration_loads_again(tmp_path: Path) -> None:
    for recompute in ("none", "selective", "full"):
        resolved = config_of(settings(GPT, tmp_path, train__recompute=recompute), tmp_path)
        (tmp_path / "resolved.toml").write_text(to_toml(resolved))
        assert load_config(str(tmp_path / "resolved.toml")) == resolved


def test_an_fp8_recipe_is_allowed_with_another_precision(tmp_path: Path) -> None:
    tree = settings(GPT, tmp_path, train__precision="fp8", fp8__recipe="rowwise")
    assert config_of(tree, tmp_path, ["train.precision=bf16"]).fp8.recipe == "rowwise"


def test_a_changed_configuration_is_checked(tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, train__precision="fp8"), tmp_path)
    check_rules(config, "four layers")
    two_layers = config.model_copy(update={"model": config.model.model_copy(update={"num_layers": 2})})
    with pytest.raises(
        ConfigError, match=r"two layers  fp8\.first_layers_bf16: the first 1 and last 1 of 2 layers leave"
    ):
        check_rules(two_layers, "two layers")


def test_matching_datasets_are_accepted(folder: Path) -> None:
    changes = {"data__mock": False, "data__train": [[1.0, "set"], [2, "same"]], "data__valid": "set"}
    for ending in ("bin", "idx", "json"):
        Path(f"same.{ending}").write_bytes(Path(f"set.{ending}").read_bytes())
    config = config_of(settings(GPT, folder, data__tokenizer="tokenizer.json", **changes), folder)
    assert config.data.train == [(1.0, str(folder / "set")), (2.0, str(folder / "same"))]


CORRUPT = ["", "[]", "[" * 100_000, '{"tokenizer": "x", "vocab_size": 3}', '{"tokenizer": [], "vocab_size": 3}',
           '{"tokenizer": {"name": 1, "fingerprint": 2}, "vocab_size": Infinity}',
           '{"vocab_size": "many"}']  # fmt: skip


@pytest.mark.parametrize("text", CORRUPT, ids=lambda text: text[:40])
def test_a_corrupt_description_is_a_finding(folder: Path, text: str) -> None:
    Path("odd.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config_of(settings(GPT, folder, data__mock=False, data__train="odd"), folder)
    assert [problem.key for problem in caught.value.problems] == ["data.train"]


def test_a_dataset_without_a_description_is_accepted(folder: Path) -> None:
    Path("set.json").unlink()
    config_of(settings(GPT, folder, data__mock=False, data__train="set", data__tokenizer="bytes"), folder)


def test_a_prefix_with_an_extension_has_a_hint(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"set\.bin is a file of a dataset  -> its prefix, the path without \.bin"):
        config_of(settings(GPT, folder, data__mock=False, data__train="set.bin"), folder)


@pytest.mark.parametrize(("experts", "ep"), [(6, 4), (6, 6), (8, 3), (8, 16)])
def test_every_ep_of_a_hint_is_legal(experts: int, ep: int) -> None:
    """On the four ranks of a stage."""
    model = ModelConfig.model_validate(GPT | {"experts": experts, "bias": False})
    (finding,) = expert_parallel(model, ParallelConfig(ep=ep, dp=4))
    hinted = [int(number) for number in finding.hint.removeprefix("one of ").split(", ")]
    assert hinted == [number for number in (1, 2, 4) if experts % number == 0]
    assert not any(list(expert_parallel(model, ParallelConfig(ep=number, dp=4))) for number in hinted)


def test_ranks_without_a_divisor_of_the_experts_are_told_how_many_share_them() -> None:
    model = ModelConfig.model_validate(GPT | {"experts": 8, "bias": False})
    (finding,) = expert_parallel(model, ParallelConfig(ep=3, dp=3))
    assert finding.hint == "1, or a stage of more ranks: 8"
    assert not list(expert_parallel(model, ParallelConfig(ep=8, dp=8)))


def test_a_folder_of_saved_tensors_may_be_on_the_hosts_alone(tmp_path: Path) -> None:
    """A job is planned elsewhere."""
    config_of(settings(GPT, tmp_path, train__memory=["nvme"], train__memory_dir=str(tmp_path / "absent")), tmp_path)


@given(st.integers(1, 5000), st.none() | st.integers(1, 100))
def test_divisors(n: int, limit: int | None) -> None:
    assert divisors(n, limit) == [d for d in range(1, min(n, limit or n) + 1) if math.gcd(n, d) == d]


def test_divisors_of_the_largest_size_take_no_time() -> None:
    assert len(divisors(2**40)) == 41


def test_a_driver_needs_less_time_than_ranks_wait() -> None:
    def broken(**changes: Any) -> list[str]:
        config = load_config_tree(settings(GPT, Path("runs"), **changes), "test")
        sections = config.fault, config.launch, config.comm, config.checkpoint, config.nccl
        return [finding.key for finding in launch_findings(1, *sections)]

    assert broken(checkpoint__every=1) == []
    for changes, key in (
        ({"comm__timeout_s": 60.0, "nccl__ib_timeout": 20}, "comm.timeout_s"),
        ({"launch__start_timeout_s": 300.0, "comm__timeout_s": 300.0}, "launch.start_timeout_s"),
        ({"checkpoint__every": 1, "fault__checkpoint_hang_s": 50.0}, "fault.checkpoint_hang_s"),
        ({"nccl__ib_timeout": 17}, "nccl.ib_timeout"),
        ({"nccl__ib_timeout": 22, "comm__timeout_s": 100.0}, "nccl.ib_timeout"),
    ):
        assert broken(**changes) == [key], changes
