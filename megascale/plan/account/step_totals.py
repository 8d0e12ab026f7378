"""The totals of a step (`train.step`): names of the fp64 values that one all-reduce sums over the job."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress

from megascale.catalog.data import DATA_POLICIES
from megascale.catalog.objectives import DISTILLATION
from megascale.config.data import DataConfig
from megascale.config.model import ModelConfig
from megascale.config.moe import MoeConfig
from megascale.config.sparse_pattern import Reach
from megascale.config.train import BatchConfig, TrainConfig
from megascale.layout.tensors import exit_name
from megascale.plan.account.attended import windows_of

EVERY_STEP = ("loss", "tokens", "stops", "ranks_written", "ranks_failed", "sq_norm")
NOISE_SCALE = ("first_sq_norm", "first_tokens", "first_sq_tokens")
ROUTER_TOTALS = ("balance", "z", "dropped")
EXPERT_LOAD = "load of experts"
"""A vector with an element for every layer: the largest load of an expert, relative to the mean."""

COUNTED_TERMS = "terms of loss"
"""A vector with an element for every depth of multi-token prediction and every objective, counted before the step."""

DATASET_LOSSES, DATASET_TOKENS = "loss of dataset", "tokens of dataset"
"""Vectors with an element for every dataset, of policies that use losses."""


def step_totals(model: ModelConfig, batch: BatchConfig, train: TrainConfig, data: DataConfig) -> list[str]:
    """Name the totals of a step: those of every run, and of features. Plug-ins may add totals of their own; those of a
    noise scale that is not measured in every step are left out.
    """
    names = list(EVERY_STEP)
    if batch.rampup is not None:
        names.append("samples")
    if train.noise_scale_every == 1:
        names += NOISE_SCALE
    if data.attention_mask == "document":
        names += [name for pair in score_totals(model).values() for name in pair]
    if model.experts:
        layers = [vector_name(EXPERT_LOAD, layer) for layer in range(model.total_layers)]
        names += ["routed", *layers, *ROUTER_TOTALS]
    names += map(loss_of, further_losses(model, train))
    names += map(count_of, counted_losses(train))
    if data.blend_policy and DATA_POLICIES[data.blend_policy].facts.get("uses_losses"):
        datasets = range(len(data.train or ()))
        names += [vector_name(total, number) for total in (DATASET_LOSSES, DATASET_TOKENS) for number in datasets]
    return names


def further_losses(model: ModelConfig, train: TrainConfig) -> list[str]:
    """List the losses beside the head's: of early exits and layers of multi-token prediction, and counted ones."""
    layers = range(model.num_layers, model.total_layers)
    return [*map(exit_name, model.exits), *(f"layers.{n}" for n in layers), *counted_losses(train)]


def counted_losses(train: TrainConfig) -> list[str]:
    """List the losses with a count of their own."""
    return [*([DISTILLATION] if train.soft_tokens else []), *(str(table["type"]) for table in train.objectives)]


def loss_of(name: str) -> str:
    """The name of the sum of a further loss."""
    return f"loss of {name}"


def count_of(loss: str) -> str:
    """The name of the count of a loss that has its own."""
    return f"count of {loss}"


def counted_weights(model: ModelConfig, train: TrainConfig) -> list[float]:
    """List the weights of the losses whose terms are counted before the step: of depths, then of objectives."""
    depths = [train.mtp_loss_weight / model.mtp_layers for _ in range(model.mtp_layers)]
    return depths + [float(table["weight"]) for table in train.objectives]


def score_totals(model: ModelConfig) -> Mapping[Reach | None, tuple[str, str]]:
    """Name the totals of attention's scores in both conventions, full and causal, by window."""
    shown = {window: window or "all" for window in windows_of(model)}
    return {window: (f"scores full {name}", f"scores causal {name}") for window, name in shown.items()}


def vector_name(total: str, index: int) -> str:
    """The name of the sum of an element of a vector."""
    return f"{total} {index}"


def expert_metrics(model: ModelConfig, moe: MoeConfig, totals: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return `StepMetrics.experts` of the totals of a step; losses are means over layers."""
    used = moe.balance != "none", moe.z_loss_weight > 0, moe.capacity_factor is not None
    losses = {name: totals[name] for name in compress(ROUTER_TOTALS, used)}
    layers = range(model.dense_layers, model.total_layers)
    loads = {f"layers.{layer}": {"load": totals[vector_name(EXPERT_LOAD, layer)]} for layer in layers}
    return loads | ({"router": losses} if losses else {})
