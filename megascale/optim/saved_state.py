"""Optimizer state of a checkpoint that a run with another rule, or other options, can take over.

The checkpoint's configuration tells what state it has of a parameter, and what that state means (the card's `meaning`).
A parameter keeps all of its state, or begins with state of zero: a first moment without its second one would take steps
of any size. State that it keeps and that is missing is damage, which the reader reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError

from megascale.config.train import OptimizerConfig
from megascale.layout.freezing import matches
from megascale.layout.param_groups import ParamGroups
from megascale.layout.tensors import ParamSpec
from megascale.optim.optimizer_shard import LOW
from megascale.parallel.stateful import WEIGHTS, GlobalTensor


def saved_groups(config: Mapping[str, Any]) -> ParamGroups | None:
    """Return the parameter groups of a saved run; None if its `[optimizer]` names a rule that is not installed, or is
    of a version with other keys.
    """
    try:
        return ParamGroups(OptimizerConfig.model_validate(config.get("optimizer", {})))
    except ValidationError:
        return None


def fresh_state(
    names: Iterable[str], parameters: Iterable[ParamSpec], groups: ParamGroups, config: Mapping[str, Any]
) -> list[str]:
    """List the state tensors among `names` that begin at zero in a run that continues one with the `config`: with other
    groups, or where parameters were frozen.
    """
    before, freeze = saved_groups(config), (config.get("train") or {}).get("freeze", [])
    keeping = {
        tensor.name
        for parameter in parameters
        for tensor in parameter.parts
        if before and not matches(tensor.name, freeze)
        if groups.group_of(parameter, tensor).can_keep(before.group_of(parameter, tensor), tensor.shape)
    }
    kinds = {name: name.partition(".")[::2] for name in names}
    return [name for name, (kind, of) in kinds.items() if f"{kind}." != WEIGHTS and kind != LOW and of not in keeping]


def begin_with_rests(tensors: Mapping[str, GlobalTensor], saved: Collection[str]) -> dict[str, GlobalTensor]:
    """Return buffers for what compensated weights of a checkpoint have beside them (`low.NAME`), if `tensors` have full
    master weights, into which `add_rests` adds it.
    """
    rests = {}
    for name, tensor in tensors.items():
        low = f"{LOW}.{name.removeprefix(WEIGHTS)}"
        if name.startswith(WEIGHTS) and low in saved and low not in tensors:
            shards = [replace(shard, data=torch.empty_like(shard.data)) for shard in tensor.shards]
            rests[low] = replace(tensor, shards=shards)
    return rests


def add_rests(tensors: Mapping[str, GlobalTensor], rests: Mapping[str, GlobalTensor]) -> None:
    """Add what was read for `begin_with_rests` to the master weights."""
    for name, rest in rests.items():
        weights = tensors[WEIGHTS + name.removeprefix(f"{LOW}.")]
        for shard, part in zip(weights.shards, rest.shards, strict=True):
            shard.data.add_(part.data)
