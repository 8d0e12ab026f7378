"""Collectives of a layer, with order and labels, and messages; test_against_dry_run compares sums over a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.blocks import block_spec
from megascale.layout.chunks import fp8_layers
from megascale.layout.recompute_policy import recompute_policy
from megascale.layout.topology import Coord
from megascale.plan.account.sizes import micro_batch_sizes
from megascale.plan.account.stage_traffic import block_traffic
from megascale.plan.account.step_totals import step_totals
from megascale.plan.account.traffic import step_traffic
from tests.marks import only_quick
from tests.runs import FAMILIES, builds, config_of, settings, traffic_of
from tests.worlds import run_world

WIDE = {"num_layers": 1, "hidden_size": 1024, "ffn_size": 2048, "seq_length": 1024, "num_kv_heads": 4}
ALL_FP8 = {"train__precision": "fp8", "fp8__first_layers_bf16": 0, "fp8__last_layers_bf16": 0}
NORMED_BLOCKS = ("sandwich", "post_norm", "fog", "parallel_two_norms")
CASES: dict[str, dict[str, Any]] = {
    "tp": {},
    "sp": {"parallel__sp": True},
    "sp, full recomputation": {"parallel__sp": True, "train__recompute": "full"},
    "sp, parallel block": {"parallel__sp": True, "model__block": "parallel"},
    **{f"sp, {name} block": {"parallel__sp": True, "model__block": name} for name in NORMED_BLOCKS},
    "sp, sandwich block, full recomputation": {
        "parallel__sp": True,
        "model__block": "sandwich",
        "train__recompute": "full",
    },
    "sp, no overlap": {"parallel__sp": True, "overlap__tp": False},
    "tp, tiles": {"train__mlp_tiles": 4},
    "sp, tiles, full recomputation": {"parallel__sp": True, "train__mlp_tiles": 3, "train__recompute": "full"},
    **{
        f"sp, tiles, {name} block": {
            "parallel__sp": True, "train__mlp_tiles": 2, "train__recompute": "full", "model__block": name,
        }
        for name in ("parallel", "sandwich", "parallel_two_norms")
    },
    **{f"sp, {name}": {"parallel__sp": True, "fp8__recipe": name, **ALL_FP8} for name in ("tensorwise", "rowwise")},
    **{
        f"sp, {name}, powers of two": {"parallel__sp": True, "fp8__recipe": name, "fp8__scale": "pow2", **ALL_FP8}
        for name in ("rowwise", "blockwise")
    },
    "sp, mxfp8": {"parallel__sp": True, "fp8__recipe": "mxfp8", **ALL_FP8},
}  # fmt: skip


QUICK = ("tp", "sp, full recomputation", "sp, parallel block", "sp, tiles, sandwich block", "sp, rowwise", "sp, mxfp8")


@pytest.mark.parametrize("case", only_quick(CASES, *QUICK))
def test_collectives_of_a_layer_equal_the_event_log(case: str, tmp_path: Path) -> None:
    from megascale.plan.dryrun.dry_run import dry_run

    more = {"train__precision": "fp32", **CASES[case]}
    tree = settings(FAMILIES["llama"] | WIDE, tmp_path, parallel__tp=2, batch__global=1, **more)
    config = config_of(tree, tmp_path)
    sizes = replace(micro_batch_sizes(config), fp8=bool(fp8_layers(config.model, config.train, config.fp8)))
    planned = block_traffic(sizes, block_spec(config.model, 0), recompute_policy(config.train, 0))
    logged = [
        (call.operation, call.bytes, call.text.split("/")[0].removesuffix(" 1"))
        for call in dry_run(config, 0).calls
        if call.group == "tp" and call.text.startswith("layer") and "weight" not in call.text
    ]
    expected = []
    for sent in planned:
        expected += [(sent.operation, sent.bytes // sent.calls, f"layer 0 {sent.label}")] * sent.calls
    assert [(operation, size) for operation, size, _ in logged] == [(o, size) for o, size, _ in expected]
    assert all(text.startswith(label) for (_, _, text), (_, _, label) in zip(logged, expected, strict=True))


def test_one_rank_has_no_communication(tmp_path: Path) -> None:
    config = config_of(settings(FAMILIES["gpt"], tmp_path), tmp_path)
    assert step_traffic(config, Coord(0, 0, 0, 0)) == {}


def test_messages_go_up_and_down_the_pipeline(tmp_path: Path) -> None:
    """The last rank's first chunk sends down, to the first rank's second chunk."""
    config = config_of(settings(FAMILIES["gpt"], tmp_path, parallel__pp=2, parallel__vpp=2), tmp_path)
    count, size = config.num_microbatches, micro_batch_sizes(config).message
    traffic = step_traffic(config, Coord(0, 0, 0, 1))
    assert traffic["pp.down", "send"] == (3 * count, 3 * count * size)  # two gradients, an activation
    assert traffic["pp.up", "receive"] == (2 * count + count, 3 * count * size)
    assert size == 8 * config.model.seq_length * config.model.hidden_size


TOTALS: list[tuple[dict[str, Any], int]] = [
    ({}, 6),
    ({"data__attention_mask": "document", "data__document_length": 8}, 8),
    ({"data__attention_mask": "document", "data__document_length": 8, "model__window": [4, 0]}, 10),
    ({"train__noise_scale_every": 1}, 9),
    ({"batch__rampup": [4, 4, 16]}, 7),
]
"""Settings, and the number of totals that training sums over the job."""


def test_the_totals_of_a_step_are_those_that_training_sums(tmp_path: Path) -> None:
    common = {"parallel__dp": 2, "optimizer__warmup_steps": 0}
    configs = [config_of(settings(FAMILIES["llama"], tmp_path, **common, **more), tmp_path) for more, _ in TOTALS]
    found, _ = run_world(2, totals_of_a_step, configs)
    for config, (names, logged), (more, count) in zip(configs, found, TOTALS, strict=True):
        calls, size = step_traffic(config, Coord())["world", "all_reduce"]
        expected = step_totals(config.model, config.batch, config.train, config.data)
        assert set(names) == set(expected) and len(names) == count, more
        assert logged == size == 8 * count and calls == 1, more


def totals_of_a_step(rank: Rank, configs: list[RunConfig]) -> list[tuple[list[str], int]]:
    """Names of a step's totals, and their bytes in the event log, by configuration."""
    from megascale.train.step import train_step

    found, before = [], 0
    for run in builds(rank, configs):
        totals = train_step(run, run.train_loader.batch(0)).totals
        run.buffers.finish_param_gather()
        run.train_loader.close()
        names = totals.keys() - {"grad_norm", "local_loss", "skipped"} | {"sq_norm"}  # what a step derives, from what
        logged = traffic_of(run, 1)["world"]["all_reduce"][1]  # of this run and those before, in one log
        found.append((sorted(names), logged - before))
        before = logged
    return found
