"""Bytes of every exchange of tokens follow from the counts of rows, and with equal counts from the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.topology import topology_of
from megascale.plan.account.stage_traffic import StageTraffic
from tests.marks import only_quick
from tests.parallel.experts.test_expert_layouts import MIXTRAL, SHARED
from tests.recorded_events import forget_events
from tests.runs import build_run, config_of, settings, traffic_of
from tests.worlds import run_world

Counts = list[list[int]]
"""Rows of a rank by exchange, a layer of a micro-batch, and by expert."""

Traffic = dict[str, tuple[int, int]]
"""Calls and bytes by operation."""


def recorded(rank: Rank, config: RunConfig) -> tuple[Traffic, Counts]:
    """Return a step's exchanges over ep, and the counts of rows."""
    from megascale.train.step import train_step

    run = build_run(rank, config)
    forget_events(run.mesh.recorder)
    batch = run.train_loader.batch(0)
    train_step(run, batch)
    counts = [
        choice.counts.tolist() for each in batch.micro_batches for _, choice in sorted(each.expert_choices.items())
    ]
    return traffic_of(run, step=1)["ep"], counts


def token_bytes(config: RunConfig) -> int:
    """Size a token on its way to the experts: in FP8 a code an element, and the scales of its blocks."""
    h = config.model.hidden_size
    if config.train.precision != "fp8":
        return config.train.element_bytes[0] * h
    return h + {"rowwise": 4, "blockwise": 4 * h // 128, "mxfp8": h // 32}[config.fp8.recipe]


def expected(config: RunConfig, ranks: list[Counts], rank: int) -> Traffic:
    """Count calls and bytes of a rank from the counts of all."""
    m, group, blocks = config.model, topology_of(config.parallel).group(rank, "ep"), config.moe.token_blocks
    (compute, wide), local, calls, nbytes = config.train.element_bytes, m.experts // len(group), 0, 0
    row, token, own = (
        m.hidden_size * compute,
        token_bytes(config),
        slice(group.index(rank) * local, (group.index(rank) + 1) * local),
    )
    for number, counts in enumerate(ranks[rank]):
        sent = sum(counts) - sum(counts[own])
        arrived = sum(sum(ranks[peer][number][own]) for peer in group if peer != rank)
        passes = 2 if config.train.recompute == "full" else 1
        calls += 1 + (2 * passes + 2) * blocks
        nbytes += 8 * m.experts * blocks
        nbytes += passes * sent * (token + wide) + arrived * (row + wide) + (passes * arrived + sent) * row
    return {"all_to_all": (calls, nbytes)}


def gathered(config: RunConfig, exchanges: int) -> Traffic:
    """Count calls and bytes of a rank that gathers tokens, for as many exchanges, whatever the loads are."""
    m, n, blocks = config.model, config.parallel.ep, config.moe.token_blocks
    compute, wide = config.train.element_bytes
    tokens, passes = config.row_tokens // config.parallel.tp, 2 if config.train.recompute == "full" else 1
    row, weights = m.hidden_size * compute, m.experts_per_token * wide
    token = token_bytes(config)
    gathers = 8 * n * tokens * m.experts_per_token + n * tokens * (passes * (token + weights) + row)
    sums = (n - 1) * tokens * (passes * row + row + weights)
    return {
        "all_gather": (exchanges * (1 + (passes + 1) * blocks), exchanges * gathers),
        "all_to_all": (exchanges * (passes + 1) * blocks, exchanges * sums),
    }


FULL = {"parallel__dp": 2, "parallel__ep": 2, "train__precision": "bf16", "train__recompute": "full"}

WIDE = MIXTRAL | {"hidden_size": 128, "num_kv_heads": 4, "ffn_size": 256, "expert_ffn_size": 128, "seq_length": 128}
CODES = FULL | {"train__precision": "fp8", "fp8__first_layers_bf16": 0, "fp8__last_layers_bf16": 0}


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (MIXTRAL, FULL),
        (MIXTRAL, FULL | {"moe__dispatcher": "all_gather", "moe__token_blocks": 2}),
        pytest.param(MIXTRAL, FULL | {"moe__token_blocks": 4}, marks=pytest.mark.slow),
        pytest.param(
            SHARED, {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__ep": 4,
                     "moe__dispatcher": "all_gather"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SHARED, {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__ep": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["full recomputation", "gathered blocks", "blocks", "gathered sp", "sp"],
)  # fmt: skip
def test_exchanged_bytes_follow_from_counts(model: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    compare(config_of(settings(model, tmp_path, batch__global=4, **keys), tmp_path))


@pytest.mark.parametrize("dispatcher", only_quick(["all_to_all", "all_gather"], "all_to_all"))
@pytest.mark.parametrize("recipe", only_quick(["rowwise", "blockwise", "mxfp8"], "rowwise"))
def test_tokens_travel_in_the_bytes_of_their_codes(recipe: str, dispatcher: str, tmp_path: Path) -> None:
    keys = CODES | {"fp8__recipe": recipe, "moe__dispatcher": dispatcher}
    keys |= {} if recipe == "mxfp8" else {"fp8__scale": "pow2"}
    compare(config_of(settings(WIDE, tmp_path, batch__global=4, **keys), tmp_path))


def compare(config: RunConfig) -> None:
    """Compare the bytes of every rank's exchanges in a step with the counts of its rows, and with the plan."""
    traffic, counts = zip(*run_world(config.world_size, recorded, config), strict=True)
    slots = config.row_tokens // config.parallel.tp * config.model.experts_per_token
    assert all(sum(of_layer) == slots for of_rank in counts for of_layer in of_rank)
    formula = dict.fromkeys(traffic[0], (0, 0))
    for each in StageTraffic(config, 0).all():
        if each.group == "ep":
            calls, nbytes = formula[each.operation]
            formula[each.operation] = calls + each.times * each.calls, nbytes + each.times * each.bytes
    if config.moe.dispatcher == "all_gather":
        assert all(each == gathered(config, len(counts[0])) for each in (*traffic, formula))
        return
    for rank in range(config.world_size):
        assert traffic[rank] == expected(config, list(counts), rank)
    equal = [[slots // config.model.experts] * config.model.experts] * len(counts[0])
    assert formula == expected(config, [equal] * config.world_size, 0)
