"""Upcycling: experts that begin as copies of a dense model's MLPs, with fresh routers (Komatsuzaki et al. 2023).

A token's weights add up to 1, so the first forward is that of the dense model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.config.exclusions import EXPERTS, ONE_EXPERT
from megascale.config.model import ModelConfig
from megascale.config.model_rules import experts as experts_rule
from megascale.config.parallel import ParallelConfig
from megascale.config.rules import run_rules
from megascale.config.train import TrainConfig
from megascale.core.errors import CheckpointError
from megascale.layout.parameters import all_params
from megascale.layout.topology import Coord, Topology
from megascale.model.initialize import init_parameters

Read = Callable[[str], Tensor]
"""Reads a whole tensor by its megascale name."""


class Upcycling(NamedTuple):
    """The number of experts of a layer, and of a token."""

    experts: int
    chosen: int


def upcycled_model(dense: ModelConfig, to: Upcycling, where: str) -> ModelConfig:
    """The model with experts in place of MLPs. Raises: CheckpointError for a model, `where`, that cannot have them"""
    if dense.experts:
        raise CheckpointError(f"{where}: the model has {dense.experts} experts", hint="a dense model for --experts")
    keys = dense.model_dump(by_alias=True, exclude={"preset"})
    model = ModelConfig.model_validate(keys | {"experts": to.experts, "experts_per_token": to.chosen})
    sections = {
        "model": model,
        "parallel": ParallelConfig.model_construct(),
        "train": TrainConfig.model_construct(steps=1),
    }
    if finding := next(run_rules((EXPERTS, experts_rule, ONE_EXPERT), sections), None):
        raise CheckpointError(f"{where}: {finding.key}: {finding.message}", hint=finding.hint)
    return model


def upcycled_reader(model: ModelConfig, read: Read) -> Read:
    """A reader of the tensors of `model`, which `upcycled_model` made, by those that `read` returns of the dense model.

    Routers are fp32, drawn with the default of `train.seed`.
    """
    params = {param.name: param for param in all_params(model)}

    def read_or_make(name: str) -> Tensor:
        base, _, stack = name.partition(".experts.")
        if stack:
            layer, _, kind = stack.partition(".")
            parts = [read(f"{base}.mlp.{part}.{kind}") for part in layer.split("_")]
            return torch.stack(parts).expand(params[name].parts[0].shape)
        if not name.endswith(".router.weight"):
            return read(name)
        router = torch.empty(params[name].parts[0].shape)
        init_parameters([(router, params[name])], Topology(), Coord(), TrainConfig.model_fields["seed"].default)
        return router

    return read_or_make
