"""Rules of `[fault]`, but for its times (`time_rules`)."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.catalog.optimizers import MATRIX_UNITS, OPTIMIZERS
from megascale.config.fault import FaultConfig
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.train import CheckpointConfig, OptimizerConfig, TrainConfig


def rebuilt_stages(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, optimizer: OptimizerConfig,
    checkpoint: CheckpointConfig, fault: FaultConfig,
) -> Iterator[Finding]:  # fmt: skip
    """Check that a lost stage can have neighbours with layers like its own, with copies and gradient norms."""
    if not fault.rebuild_stage:
        return
    pp, chunks, sizes = parallel.pp, parallel.pp * parallel.vpp, parallel.layers_per_chunk
    uneven = sizes is None and model.num_layers % chunks
    rules = dict.fromkeys([optimizer.name, *(group.get("name", optimizer.name) for group in optimizer.groups)])
    facts = {name: OPTIMIZERS[name].facts for name in rules}
    unsuited = [
        name for name, of in facts.items()
        if of["unit_of_work"] in MATRIX_UNITS or of["state"].get("exp_avg_sq") != "mn"
    ]  # fmt: skip
    for key, fails, message, hint in (
        ("parallel.pp", pp < 3, f"with pp = {pp} no stage is between two others", "3 or more"),
        ("model.num_layers", uneven, f"{model.num_layers} layers do not make {chunks} equal stages",
         f"a multiple of {chunks}"),
        ("parallel.layers_per_chunk", len(set(sizes or ())) > 1, "layers of unequal stages do not correspond",
         "equal numbers"),
        ("checkpoint.in_memory_every", not checkpoint.in_memory_every, "the other stages have no copies", "1"),
        ("optimizer.name", unsuited, f"{', '.join(unsuited)}: no mean of every element's squared gradient",
         "adamw or lamb"),
        ("model.experts", model.experts, "experts of different layers do not correspond", "0"),
        ("model.exits", model.exits, "the head of an exit has no neighbours", "[]"),
        ("parallel.vocab_pp", parallel.vocab_pp, "a lost stage has rows of the vocabulary", "0"),
        ("train.weight_average", train.weight_average != "none", "averages are not rebuilt", "none"),
    ):  # fmt: skip
        if fails:
            why = f"{message} (fault.rebuild_stage = {fault.rebuild_stage})"
            yield Finding(key, why, f"{hint}, or no rebuild_stage")
