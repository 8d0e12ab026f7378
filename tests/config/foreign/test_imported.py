"""Arguments become settings with the meaning and the defaults of their system."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megascale.config.foreign.imported import UNKNOWN, Imported, import_arguments
from megascale.config.foreign.megatron_others import MUON
from megascale.config.foreign.setting import Setting
from megascale.config.foreign.translation import SYSTEMS, read_flags
from megascale.config.loading import load_config_tree

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size "
    "512 --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-3 --mock-data"
)
"""The arguments that every run of Megatron-LM gives."""

TITAN = {"model.name": ["llama3"], "model.flavor": ["8B"], "training.global_batch_size": [64]}

DOCUMENTS = "not supported without --reset-attention-mask and --reset-position-ids together"

DEFAULTS = [(system, setting) for system in ("Megatron-LM", "torchtitan") for setting in SYSTEMS[system]
            if setting.theirs is not None]  # fmt: skip


def imported(more: str = "", gpus: int | None = None) -> Imported:
    return import_arguments("Megatron-LM", read_flags(f"{SMALL} {more}".split()), gpus)


def changed(flags: str) -> dict[str, Any]:
    """The settings that flags change, none of which is refused."""
    made = imported(flags)
    assert not made.refused
    return {key: value for key, value in made.settings.items() if imported().settings.get(key) != value}


@pytest.mark.parametrize(("system", "setting"), DEFAULTS,
                         ids=lambda one: one.names[0] if isinstance(one, Setting) else one)  # fmt: skip
def test_a_default_that_differs_is_written(system: str, setting: Setting) -> None:
    needed = f"--{setting.only_with.replace('_', '-')} hybrid 8".split()[: 3 if setting.only_with else 0]
    given = read_flags([*SMALL.split(), *needed]) if system == "Megatron-LM" else TITAN
    if "." in setting.only_with:
        given = {**given, setting.only_with: [2]}
    made = import_arguments(system, given)
    assert made.settings[setting.key] == setting.theirs
    assert setting.key in made.defaults or setting.key in {"checkpoint.every"}


def test_defaults_are_those_of_megatron_core() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    optimizer, model = (
        {field.name: field.default for field in dataclasses.fields(config)}
        for config in (OptimizerConfig, TransformerConfig)
    )
    config = load_config_tree(imported().tree("theirs"), "the arguments", world_size=1)
    ours = config.optimizer
    assert ours.betas == [optimizer["adam_beta1"], optimizer["adam_beta2"]]
    assert (ours.eps, ours.weight_decay) == (optimizer["adam_eps"], optimizer["weight_decay"])
    assert ours.clip_norm == optimizer["clip_grad"]
    assert config.model.norm_eps == model["layernorm_epsilon"]
    assert {config.model.dropout} == {model["hidden_dropout"], model["attention_dropout"]}
    assert (config.model.bias, config.model.norm) == (model["add_bias_linear"], model["normalization"].lower())
    fp8 = imported("--bf16 --fp8-format hybrid").settings
    assert (fp8["fp8.recipe"], fp8["fp8.history"]) == (model["fp8_recipe"], model["fp8_amax_history_len"])
    assert fp8["fp8.first_layers_bf16"] == fp8["fp8.last_layers_bf16"] == 0 == int(model["first_last_layers_bf16"])


@pytest.mark.parametrize(("flags", "settings"), [
    ("--swiglu", {"model.activation": "swiglu", "model.ffn_size": 128}),
    ("--swiglu --ffn-hidden-size 96", {"model.activation": "swiglu", "model.ffn_size": 96}),
    ("--no-bias-gelu-fusion", {"model.activation": "gelu"}), ("--eval-iters 0", {"train.eval_every": 0}),
    ("--bf16", {"train.precision": "bf16"}),
    ("--max-position-embeddings 128", {"model.positions": 128}),
    ("--position-embedding-type rope --max-position-embeddings 128", {"model.position": "rope"}),
    ("--use-distributed-optimizer --data-parallel-sharding-strategy no_shard", {"parallel.zero": 1}),
    ("--use-megatron-fsdp", {"parallel.zero": 3}),
    ("--lr-decay-iters 15", {"optimizer.schedule_steps": 15}), ("--lr-decay-iters 20", {}),
    ("--lr-decay-iters 20 --lr-warmup-fraction 0.1", {"optimizer.warmup_steps": 3}),
    ("--save a --save-interval 5", {"output_dir": "a", "checkpoint.every": 5}), ("--save-interval 5", {}),
    ("--save a", {"output_dir": "a", "checkpoint.every": 20}),
    ("--save a --load a", {"output_dir": "a", "checkpoint.every": 20, "checkpoint.resume": "auto"}),
    ("--window-size 7,0 --window-attn-skip-freq 2", {"model.window": [8, 0]}),
    ("--step-batch-size-schedule 0:2,1280:4,2560:6,3840:8", {"batch.rampup": [2, 2, 60]}),
    ("--num-experts 4 --moe-router-topk 1 --moe-router-score-function sigmoid --disable-bias-linear",
     {"model.bias": False, "model.activation": "gelu", "model.experts": 4, "model.experts_per_token": 1,
      "model.router_normalize": False,
      "model.router_score": "sigmoid", "moe.dispatcher": "all_gather"}),
    ("--num-experts 4 --moe-aux-loss-coeff 0.01",
     {"model.experts": 4, "model.router_bias": True, "moe.balance": "group", "moe.balance_group": 2,
      "moe.balance_weight": 0.01,
      "moe.dispatcher": "all_gather"}),
    ("--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall "
     "--disable-bias-linear",
     {"model.bias": False, "model.activation": "gelu", "model.experts": 4, "moe.balance": "none",
      "moe.dispatcher": "all_to_all"}),
    ("--bf16 --fp8-format hybrid --fp8-amax-history-len 1024",
     {"train.precision": "fp8", "fp8.first_layers_bf16": 0, "fp8.last_layers_bf16": 0, "fp8.history": 1,
      "fp8.recipe": "delayed"}),
    ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
     {"train.precision": "fp8", "fp8.first_layers_bf16": 0, "fp8.last_layers_bf16": 0, "fp8.history": 1,
      "fp8.recipe": "blockwise", "fp8.scale": "pow2"}),
    ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
     {"train.precision": "fp8", "fp8.first_layers_bf16": 0, "fp8.last_layers_bf16": 0, "fp8.history": 1,
      "fp8.recipe": "mxfp8"}),
    ("--decoupled-lr 2e-3", {"optimizer.groups": [{"kinds": ["embedding", "head"], "lr_mult": 2.0}]}),
    ("--start-weight-decay 0.03 --end-weight-decay 0.03 --weight-decay 0.1", {"optimizer.weight_decay": 0.03}),
    ("--dataloader-inter-document-masking", {"data.attention_mask": "document", "data.eod_mask_loss": False}),
    ("--reset-attention-mask --reset-position-ids --eod-mask-loss",
     {"data.attention_mask": "document", "data.eod_mask_loss": True}),
    ("--num-query-groups 2", {}), ("--group-query-attention", {"model.num_kv_heads": 1}),
    ("--group-query-attention --num-query-groups 2", {"model.num_kv_heads": 2}),
    ("--recompute-granularity selective --recompute-modules moe core_attn",
     {"train.recompute": "selective", "train.recompute_ops": ["attention"]}),
])  # fmt: skip
def test_arguments_with_others(flags: str, settings: dict[str, Any]) -> None:
    assert changed(flags) == settings


@pytest.mark.parametrize(("flags", "reason"), [
    ("--lr nan", "nan is no number"),
    ("--swiglu --activation-func-clamp-value 7", "not supported but 7 with --quick-geglu"),
    ("--swiglu --glu-linear-offset 1", "not supported but 1 with --quick-geglu"),
    ("--num-experts 4 --moe-token-drop-policy position", "not supported but probs: the largest weights stay"),
    ("--squared-relu", "not supported: one of the choices of model.activation"),
    ("--no-such-flag 3", UNKNOWN), ("stray", UNKNOWN), ("--adam-eps", "no value stands behind it"),
    ("--profile-ranks 0 $MORE", "MORE has no value in the script"),
    ("--rampup-batch-size $MORE", "MORE has no value in the script"),
    ("--data-cache-path $CACHE/x", "CACHE has no value in the script"),
    ("--valid-data-path a b", "several datasets without weights: theirs are blended by length; write the weights"),
    ("--eod-mask-loss", DOCUMENTS),
    ("--optimizer muon", MUON), ("--optimizer dist_muon --muon-momentum 0.9", MUON),
    ("$MORE", "MORE has no value in the script"),
    ("--save $(pwd)/x", "$(pwd)/x has no value in the script"),
    ("--save a/${D%.bin}", "${D%.bin} has no value in the script"),
    ("--save `pwd`", "`pwd` has no value in the script"),
    ("--hidden-dropout 0.0", "not supported: two probabilities; write one for both"),
    ("--decoupled-lr 2e-3 --min-lr 1e-4", "not supported: the least rate of a group is min_lr x lr_mult, too"),
    ("--lr-warmup-init 1e-7", "not supported: the warm-up begins at 0"),
    ("--load elsewhere",
     "auto, the default, is the run's newest; theirs: `megascale ckpt convert megatron:FOLDER DIR`"),
    ("--lr-decay-style inverse-square-root", "no value of optimizer.decay means it"),
    ("--bf16 --fp8-format e4m3", "not supported: delayed and tensorwise are hybrid, blockwise and mxfp8 e4m3"),
    ("--bf16 --fp8-format hybrid --fp8-recipe mxfp8",
     "not supported: delayed and tensorwise are hybrid, blockwise and mxfp8 e4m3"),
    ("--step-batch-size-schedule 0:2,1280:8,1300:9",
     "not supported: batch.rampup has equal increments at equal distances of samples"),
    ("--reset-position-ids", DOCUMENTS),
    ("--use-rotary-position-embeddings --position-embedding-type learned_absolute",
     'means model.position = "learned", another argument "rope"'),
])  # fmt: skip
def test_refused(flags: str, reason: str) -> None:
    assert list(imported(flags).refused.values()) == [reason]


@pytest.mark.parametrize("flags", [
    "--num-workers $WORKERS", "--kv-lora-rank 32", "--lr-warmup-init 0.0", "--recompute-modules moe",
    "--cp-comm-type unknown", "--async-strategy nvrx", "--first-last-layers-bf16", "--weight-decay-incr-style constant",
    "--glu-linear-offset 0",
])  # fmt: skip
def test_dropped(flags: str) -> None:
    made = imported(flags)
    assert list(made.dropped) == [flags.split()[0]] and not changed(flags)


def test_a_constant_rate_has_no_least() -> None:
    assert "--min-lr" in imported("--lr-decay-style constant --min-lr 1e-4").dropped


@pytest.mark.parametrize(("function", "gated", "others", "activation"), [
    ("gelu", False, {"add_bias_linear": [False]}, "gelu"), ("gelu", False, {}, "gelu_tanh"),
    ("gelu", False, {"bias_activation_fusion": [False]}, "gelu"), ("silu", True, {}, "swiglu"),
    ("gelu", True, {}, "geglu"), ("silu", False, {}, None), ("squared_relu", False, {}, None),
])  # fmt: skip
def test_activations_of_megatron_bridge(function: str, gated: bool, others: Any, activation: str | None) -> None:
    given = {"activation_func": [f"torch.nn.functional.{function}"], "gated_linear_unit": [gated], **others}
    made = import_arguments("Megatron-LM", given)
    assert ("activation_func" in made.refused) == (activation is None)
    assert activation in (None, made.settings["model.activation"])


def test_what_decays_in_torchtitan_is_told() -> None:
    made = import_arguments("torchtitan", TITAN | {"optimizer.weight_decay": [0.1]})
    assert made.settings["optimizer.weight_decay"] == 0.1 and "norms" in made.notes["optimizer.weight_decay"]


def test_what_may_set_a_variable_is_told() -> None:
    made = import_arguments("Megatron-LM", {"--lr": ["$LR"]}, unknown={"LR": "`source env.sh` of line 3"})
    assert made.refused == {"--lr": "LR has no one value: `source env.sh` of line 3 may set it in the script"}


def test_an_unknown_batch_of_many_samples() -> None:
    given = read_flags(SMALL.replace("--global-batch-size 8 --train-iters 20", "--train-samples 1953125000").split())
    made = import_arguments("Megatron-LM", {**given, "--global-batch-size": ["$B"]})
    assert list(made.refused) == ["--train-samples", "--global-batch-size"]


def test_master_weights_of_torchtitan() -> None:
    for dtype, count in (("float32", 0), ("bfloat16", 1)):
        assert len(import_arguments("torchtitan", TITAN | {"training.dtype": [dtype]}).refused) == count


def test_samples_of_a_ramp_up() -> None:
    """The steps of a run of samples have as many samples, with the batches of the ramp-up."""
    flags = read_flags(SMALL.replace("--train-iters 20", "--train-samples 400").split())
    made = import_arguments("Megatron-LM", flags | {"--rampup-batch-size": [2, 2, 60]})
    config = load_config_tree(made.tree("theirs"), "the arguments", ["batch.micro=1"])
    assert 392 < config.samples <= 400


def test_arguments_without_dashes() -> None:
    """A mapping of all arguments, such as a checkpoint's: None, and False for a switch, are as no argument."""
    flags = {name.lstrip("-").replace("-", "_"): values or [True] for name, values in read_flags(SMALL.split()).items()}
    unset = {"swiglu": [False], "add_bias_linear": [True], "num_experts": [None], "bf16": [False], "load": [None]}
    made = import_arguments("Megatron-LM", {**flags, **unset})
    assert made.settings == imported().settings | {"model.bias": True}


def test_comments_stand_on_converted_values() -> None:
    text = imported("--fp16 --lr-warmup-fraction 0.1 --seed 7").to_toml("theirs")
    commented = [line.partition(" = ")[0] for line in text.splitlines() if "#" in line]
    assert commented == ["precision", "warmup_steps"]
    assert "seed = 7\n" in text and json.dumps("theirs") in text


@pytest.mark.parametrize(
    ("more", "zero"), [("", 3), ("--fp8-format hybrid --fp8-recipe tensorwise", 3), ("--mtp-num-layers 1", 2)]
)
def test_weights_are_sharded_where_they_can_be(more: str, zero: int) -> None:
    made = imported(f"--use-megatron-fsdp {more}")
    assert made.settings["parallel.zero"] == zero and ("parallel.zero" in made.notes) == (zero == 2), made.refused
