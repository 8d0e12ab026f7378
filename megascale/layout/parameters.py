"""The parameters of a model in the order of the network, which does not depend on the layout.

Initialization, sharding, optimizers, FP8, checkpoints, parameter counts and memory all read these lists: of a layer
(`layer_params`), of a pipeline stage (`stage_params`), of the full model (`all_params`, `parameter_count`). With
experts, MFU counts the FLOPs of the parameters that a token uses (`active_parameter_count`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from megascale.config.model import ModelConfig
from megascale.core.units import format_count
from megascale.layout.blocks import block_spec, distinct_blocks
from megascale.layout.parts.elementwise import norm_params
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, ParamSpec, TensorSpec, exit_name, vocabulary_param


def layer_params(model: ModelConfig, index: int) -> list[ParamSpec]:
    """The parameters of a transformer block, in the order of its parts (`layout.blocks`)."""
    return [param for part in block_spec(model, index) for param in part.params(f"layers.{index}", model)]


def embedding_params(model: ModelConfig) -> list[ParamSpec]:
    """The parameters before the first layer."""
    params = [vocabulary_param(TOKEN_EMBEDDING, model)]
    if model.position == "learned":
        name, shape = "embedding.position.weight", (model.position_rows, model.hidden_size)
        params.append(ParamSpec(name, (TensorSpec(name, shape, std=model.init_std),), "embedding"))
    return params


def head_params(model: ModelConfig) -> list[ParamSpec]:
    """The parameters after the last layer. A tied head has the name of the token embedding, which multi-token
    prediction uses beside the head.
    """
    names = [*([] if model.tie_embeddings else [HEAD]), *([TOKEN_EMBEDDING] if model.embeds_last else [])]
    return [*norm_params("final_norm", model), *(vocabulary_param(name, model) for name in names)]


def pipeline_vocabulary(model: ModelConfig) -> list[ParamSpec]:
    """The embedding and the head, whose rows the stages share in vocabulary parallelism; once if they are tied."""
    return [vocabulary_param(n, model, "pp") for n in (TOKEN_EMBEDDING, *([] if model.tie_embeddings else [HEAD]))]


def exit_params(model: ModelConfig, after: int) -> list[ParamSpec]:
    """The parameters of an early exit `after` as many layers; none where there is no exit."""
    if after not in model.exits:
        return []
    name = exit_name(after)
    return [*norm_params(f"{name}.norm", model), vocabulary_param(f"{name}.{HEAD}", model)]


def stage_params(model: ModelConfig, layers: range, first: bool, last: bool) -> list[ParamSpec]:
    """The parameters of a pipeline stage, without duplicates: a stage with embedding and tied head has them once.
    Layers of multi-token prediction follow the head.
    """
    params = embedding_params(model) if first else []
    for index in layers:
        params += head_params(model) if index == model.num_layers else []
        params += [*layer_params(model, index), *exit_params(model, index + 1)]
    params += head_params(model) if last and model.num_layers not in layers else []
    unique = dict[str, ParamSpec]()
    for parameter in params:
        unique.setdefault(parameter.name, parameter)
    return list(unique.values())


def all_params(model: ModelConfig) -> list[ParamSpec]:
    """The parameters of the full model."""
    return stage_params(model, range(model.total_layers), first=True, last=True)


def parameter_count(model: ModelConfig) -> int:
    """Count the elements of the model's parameters, without padding; a tied embedding counts once."""
    numbers = distinct_blocks(model)[1]
    ends = _elements(stage_params(model, range(0), first=True, last=True))
    ends += sum(_elements(exit_params(model, after)) for after in model.exits)
    layers = (count * _elements(layer_params(model, numbers.index(kind))) for kind, count in Counter(numbers).items())
    return ends + sum(layers)


def active_parameter_count(model: ModelConfig) -> int:
    """Count the elements of the parameters that compute a token: of experts, those of the ones that it is routed to."""
    if not model.experts:
        return parameter_count(model)
    stacks = [param for param in layer_params(model, model.num_layers - 1) if "ep" in param.sharding]
    idle = _elements(stacks) * (model.experts - model.experts_per_token) // model.experts
    return parameter_count(model) - idle * (model.total_layers - model.dense_layers)


def describe_parameters(model: ModelConfig) -> str:
    """Say how many parameters a model has, and how many of them a token uses, such as '47B parameters, 13B active'."""
    total = f"{format_count(parameter_count(model))} parameters"
    return f"{total}, {format_count(active_parameter_count(model))} active" if model.experts else total


def _elements(parameters: Iterable[ParamSpec]) -> int:
    return sum(math.prod(tensor.shape) for parameter in parameters for tensor in parameter.parts)
