"""Conversions of values of other systems, whose meaning depends on other settings."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from typing import Any

from megascale.config.batch_rampup import BatchSizes
from megascale.config.foreign.setting import Advice, Context, Conversion, Needless, Several, Values

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
LOSSES = {"none": "none", "aux_loss": "group", "seq_aux_loss": "sequence", "global_aux_loss": "step"}
_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def value_of(context: Context, name: str, default: Any = None) -> Any:
    """Return the first value of a setting, or its default."""
    values = context.get(name)
    return values[0] if values else default


def every(values: Values, context: Context) -> list[Any]:
    """Return all values as a list."""
    return list(values[0]) if len(values) == 1 and isinstance(values[0], list) else list(values)


def betas(**theirs: float) -> Conversion:
    """Return the conversion of one of Adam's decays to both. `theirs`: their names, with the system's defaults."""
    return lambda _, context: [value_of(context, name, default) for name, default in theirs.items()]


def blend(values: Values, context: Context) -> Any:
    """Return a dataset, or a blend of weights and datasets."""
    listed = every(values, context)
    if len(listed) == 1:
        return str(listed[0])
    if any(isinstance(value, str) for value in listed[::2]):
        return Advice("several datasets without weights: theirs are blended by length; write the weights")
    return [[weight, prefix] for weight, prefix in zip(listed[::2], listed[1::2], strict=True)]


def two_shares(values: Values, context: Context) -> list[float]:
    """Return the shares, of a text or a list: training, and validation with a test."""
    given = values[0] if isinstance(values[0], list) else str(values[0]).strip("'\"").split(",")
    shares = [float(share) for share in given]
    return [int(share) if share.is_integer() else share for share in (shares[0], sum(shares[1:], 0.0))]


def norm(values: Values, context: Context) -> str:
    """Return the norm of `--normalization`, with gains around 1 by `--apply-layernorm-1p`, a switch."""
    name = str(value_of(context, "normalization", "layernorm" if "num_layers" in context else "rmsnorm")).lower()
    around_1 = not values or "apply_layernorm_1p" in context
    return {"layernorm": "layernorm", "rmsnorm": "rmsnorm_1p" if around_1 else "rmsnorm"}[name]


def activation_func(values: Values, context: Context) -> str | Advice:
    """Return the activation without a gate. Fused with a bias, GELU is its approximation."""
    if value_of(context, "gated_linear_unit"):
        return Needless("nothing to write: gated_linear_unit says it")
    if str(values[0]).rpartition(".")[2] != "gelu":
        return Advice("not supported without gated_linear_unit: one of the choices of model.activation")
    fused = value_of(context, "add_bias_linear", True) and value_of(context, "bias_activation_fusion", True)
    return "gelu_tanh" if fused else "gelu"


def with_quick_geglu(number: int) -> Conversion:
    """Return the conversion of a number of a gated activation, of which `--quick-geglu` alone has another than 0."""
    return lambda values, context: (
        Needless("with --quick-geglu" if values[0] else "nothing to write: 0")
        if values[0] == 0 or (values[0] == number and "quick_geglu" in context)
        else Advice(f"not supported but {number} with --quick-geglu")
    )


def positions(values: Values, context: Context) -> Any:
    """Return the length of sequences, or the learned position vectors of a longer model."""
    if "seq_length" not in context:
        return values[0]
    rotated = {"use_rotary_position_embeddings", "no_position_embedding"} & set(context)
    learned = value_of(context, "position_embedding_type", "learned_absolute") == "learned_absolute" and not rotated
    if "num_layers" in context and learned and values[0] > context["seq_length"][0]:
        return Several({"model.positions": values[0]})
    return Needless("nothing to write: model.seq_length says it; with learned positions of more: model.positions")


def documents(values: Values, context: Context) -> str | Several | Advice:
    """Return the mask of documents, with a loss at their ends unless `--eod-mask-loss` leaves it out."""
    if "num_layers" not in context:
        return "document"
    if {"reset_attention_mask", "reset_position_ids"} <= set(context) or "dataloader_inter_document_masking" in context:
        return Several({"data.attention_mask": "document", "data.eod_mask_loss": "eod_mask_loss" in context})
    return Advice("not supported without --reset-attention-mask and --reset-position-ids together")


def query_groups(values: Values, context: Context) -> int | Needless:
    """Return the heads of keys, 1 by default; on a command line `--group-query-attention` switches them on."""
    if "num_layers" in context and not {"group_query_attention", "model.num_query_groups"} & set(context):
        return Needless("nothing to write without --group-query-attention")
    return int(value_of(context, "num_query_groups", 1))


def window(values: Values, context: Context) -> int | list[int]:
    """Return the keys of a query, in a list with 0 for the layers that `--window-attn-skip-freq` leaves out."""
    keys = int(str(every(values, context)[0]).strip("() ").split(",")[0]) + 1
    layers = every(context.get("window_attn_skip_freq") or [0], context)
    if len(layers) > 1:
        return [keys * int(one) for one in layers]
    return [keys] * (layers[0] - 1) + [0] if layers[0] else keys


def latent_scaling(values: Values, context: Context) -> Any:
    """Return the scaling of rotary embeddings in multi-head latent attention."""
    if float(values[0]) == 1:
        return Needless("nothing to write: no scaling")
    scales = {name: float(value_of(context, name, theirs)) for name, theirs in (("mscale", 1.0), ("mscale_all_dim", 0))}
    length = value_of(context, "yarn_original_max_position_embeddings", 4096)
    table = {"type": "yarn", "factor": float(values[0]), "original_seq_length": length}
    return table | {name: scale for name, scale in scales.items() if scale}


def zero(values: Values, context: Context) -> int | Needless:
    """Return the ZeRO stage of the distributed optimizer, or of FSDP."""
    fully = {"use_megatron_fsdp", "use_torch_fsdp2"} & set(context)
    if "use_distributed_optimizer" in context and not fully:
        return 1
    if "num_layers" in context and not fully:
        return Needless("nothing to write without FSDP")
    return _STAGES[str(value_of(context, "data_parallel_sharding_strategy", "optim_grads_params")).lower()]


def fp8(values: Values, context: Context) -> str | Several | Advice:
    """Return the precision, if the format is that of the recipe, and the layers at both ends that stay in bf16."""
    recipe = value_of(context, "fp8_recipe")
    if "num_layers" not in context:
        return "fp8"
    if str(values[0]).lower() != ("e4m3" if recipe in ("blockwise", "mxfp8") else "hybrid"):
        return Advice("not supported: delayed and tensorwise are hybrid, blockwise and mxfp8 e4m3")
    ends = {"fp8.first_layers_bf16": "num_layers_at_start_in_bf16", "fp8.last_layers_bf16": "num_layers_at_end_in_bf16"}
    kept = "first_last_layers_bf16" in context
    scale = {"fp8.scale": "pow2"} if recipe == "blockwise" else {}  # the default of Transformer Engine
    layers = {key: value_of(context, ends[key], 1) if kept else 0 for key in ends}
    return Several({"train.precision": "fp8", **scale, **layers})


def history(values: Values, context: Context) -> Any:
    """Return the steps of the history of maxima, of which `most_recent`, the default, takes one."""
    if value_of(context, "fp8_recipe", "delayed") != "delayed":
        return Needless("nothing to write: fp8.recipe has no history")
    whole = value_of(context, "fp8_amax_compute_algo") == "max" or "fp8_format" not in context
    return values[0] if whole else 1


def batch_schedule(values: Values, context: Context) -> Several | Advice:
    """Return the ramp-up of `BEGIN:SIZE ...`, in tokens: equal increments at equal distances."""
    pairs = [word.split(":") for value in values for word in re.split("[, ]", str(value))]
    sizes = [int(size) for _, size in pairs]
    begins = [float(text.rstrip("KMBT")) * _UNITS.get(text[-1], 1) // context["seq_length"][0] for text, _ in pairs]
    distances = {after - before for before, after in itertools.pairwise(begins)}
    increments = {after - before for before, after in itertools.pairwise(sizes)}
    if begins[0] or len(distances) != 1 or len(increments) != 1:
        return Advice("not supported: batch.rampup has equal increments at equal distances of samples")
    return Several({"batch.global": sizes[-1], "batch.rampup": [sizes[0], *increments, int(begins[-1])]})


def _sizes(context: Context) -> BatchSizes:
    """Return the batches of the steps, with a ramp-up."""
    if schedule := context.get("step_batch_size_schedule"):
        made: Any = batch_schedule(schedule, context)
        return BatchSizes(made["batch.global"], *made["batch.rampup"])
    batch = int(context["global_batch_size"][0])  # an unknown one is a text, and is refused here
    return BatchSizes(batch, *map(int, context.get("rampup_batch_size", (batch, batch, 0))))


def steps_of(name: str, context: Context) -> int:
    """Return the steps of `--NAME-iters`, or those of batch.global for `--NAME-samples`."""
    samples = value_of(context, f"{name}_samples")
    return context[f"{name}_iters"][0] if samples is None else int(samples // _sizes(context).total)


def steps_of_run(values: Values, context: Context) -> int:
    """Return the steps of the samples of a run, with those of a ramp-up."""
    sizes = _sizes(context)
    return bisect.bisect_right(range(1, int(values[0])), values[0], key=lambda step: sizes.before_step(step + 1))


def schedule(values: Values, context: Context) -> Any:
    """Return the steps of the learning rate's schedule, of batch.global, if they are not those of the run."""
    if value_of(context, "lr_decay_style") == "constant":
        return Needless("nothing to write: a constant rate")
    if values == (context.get("train_iters") or context.get("train_samples")):
        return Needless("nothing to write: the run's length")
    return steps_of("lr_decay", context)


def decoupled(values: Values, context: Context) -> list[dict[str, Any]] | Advice:
    """Return the group of the embedding and the head, whose rate is a multiple of the others' from start to end."""
    factor, least = values[0] / context["lr"][0], value_of(context, "min_lr", 0.0)
    if math.isclose(value_of(context, "decoupled_min_lr", least), factor * least, rel_tol=1e-3):
        return [{"kinds": ["embedding", "head"], "lr_mult": factor}]
    return Advice("not supported: the least rate of a group is min_lr x lr_mult, too")


def balance(values: Values, context: Context) -> Any:
    """Return the loss that balances experts; without a coefficient there is none."""
    (kind,) = values
    if "num_experts" in context and not value_of(context, "moe_aux_loss_coeff"):
        return "none"
    if kind == "aux_loss" and "micro_batch_size" in context:
        return Several({"moe.balance": "group", "moe.balance_group": context["micro_batch_size"][0]})
    return LOSSES[str(kind).lower()]


def balance_weight(values: Values, context: Context) -> Any:
    """Return the weight of the loss that balances experts, with the loss if it is the default."""
    (weight,) = values
    if not weight:
        return Needless('nothing to write: moe.balance is "none"')
    if "num_experts" not in context or "moe_router_load_balancing_type" in context:
        return float(weight)
    return Several(balance(["aux_loss"], context) | {"moe.balance_weight": float(weight)})


def experts(values: Values, context: Context) -> Any:
    """Return the experts, with a bias of the router where linear layers have biases."""
    biases = "disable_bias_linear" not in context and context.get("add_bias_linear") != [False]
    if values[0] and biases and "num_layers" in context:
        return Several({"model.experts": values[0], "model.router_bias": True})
    return values[0]


def dense_layers(values: Values, context: Context) -> int | Advice:
    """Return the first layers, which have no experts."""
    kinds = every(values, context)
    if kinds == [1]:
        return Needless("nothing to write: all layers have experts")
    if written := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", str(values[0]).replace(" ", "")):
        return int(written[1])
    if set(kinds) <= {0, 1} and kinds == sorted(kinds):
        return kinds.count(0)
    return Advice("not supported: only model.dense_layers first layers lack experts")


def router_groups(values: Values, context: Context) -> Any:
    """Return the groups of experts, with their value: of as many experts as a token has of a group."""
    each = value_of(context, "moe_router_topk", 2) // value_of(context, "moe_router_group_topk", 1)
    if "num_layers" not in context or values[0] == 1:
        return values[0]
    if each not in (1, 2):
        return Advice("not supported: more than two experts of a group")
    return Several({"model.router_groups": values[0], "model.router_group_value": "max" if each == 1 else "top2"})


def global_batch(values: Values, context: Context) -> Any:
    """Return the samples of a step of torchtitan; -1, the default, is a local batch of each rank of dp."""
    if values[0] != -1:
        return values[0]
    if "gpus" not in context:
        return Advice("local_batch_size x dp by default: give --gpus N, or write batch.global")
    axes = ("tensor", "pipeline", "context")
    ranks = math.prod(value_of(context, f"parallelism.{axis}_parallel_degree", 1) for axis in axes)
    return value_of(context, "training.local_batch_size", 8) * (context["gpus"][0] // ranks)


def converters(values: Values, context: Context) -> Any:
    """Return the precision of torchtitan's converters of the model, of which FP8 has no layers in bf16."""
    if not values[0]:
        return Needless("nothing to write")
    fp8 = Several({"train.precision": "fp8", "fp8.first_layers_bf16": 0, "fp8.last_layers_bf16": 0})
    return {"float8": fp8, "quantize.linear.float8": fp8}["".join(values[0])]
