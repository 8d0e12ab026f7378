"""What a layer sends, in its order and by its names; sums over a step are compared in test_against_dry_run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.account.traffic import block_traffic, message_bytes, step_traffic
from megascale.layout.blocks import block
from megascale.layout.chunks import eight_bit_layers
from megascale.layout.recompute import recompute_of
from megascale.layout.topology import Coord
from tests.runs import FAMILIES, config_of, settings

WIDE = {"num_layers": 1, "hidden_size": 1024, "ffn_size": 2048, "seq_length": 1024, "num_kv_heads": 4}
EIGHT_BITS = {"train__precision": "fp8", "fp8__bf16_first": 0, "fp8__bf16_last": 0}
CASES: dict[str, dict[str, Any]] = {
    "tp": {},
    "sp": {"parallel__sp": True},
    "sp, full recomputation": {"parallel__sp": True, "train__recompute": "full"},
    "sp, side by side": {"parallel__sp": True, "model__block": "parallel"},
    "sp, one after the other": {"parallel__sp": True, "overlap__tp": False},
    **{f"sp, {name}": {"parallel__sp": True, "fp8__recipe": name, **EIGHT_BITS} for name in ("tensorwise", "rowwise")},
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_sends_what_the_ledger_says(case: str, tmp_path: Path) -> None:
    from megascale.dryrun.run import dry_run

    more = {"train__precision": "fp32", **CASES[case]}
    tree = settings(FAMILIES["llama"] | WIDE, tmp_path, parallel__tp=2, batch__global=1, **more)
    config = config_of(tree, tmp_path)
    planned = block_traffic(
        config, block(config.model, 0), bool(eight_bit_layers(config)), recompute_of(config.train, 0)
    )
    found = [
        (call.operation, call.bytes, call.what.split("/")[0].removesuffix(" 1"))
        for call in dry_run(config, 0).calls
        if call.group == "tp" and call.what.startswith("layer") and "weight" not in call.what
    ]
    expected = []
    for each in (each for each in planned if "weight" not in each.label):
        expected += [(each.operation, each.bytes // each.calls, f"layer 0 {each.label}")] * each.calls
    assert [(operation, size) for operation, size, _ in found] == [(o, size) for o, size, _ in expected]
    assert all(is_.startswith(name) for (_, _, is_), (_, _, name) in zip(found, expected, strict=True))


def test_a_rank_of_one_sends_nothing(tmp_path: Path) -> None:
    config = config_of(settings(FAMILIES["gpt"], tmp_path), tmp_path)
    assert step_traffic(config, Coord(0, 0, 0, 0)) == {}


def test_messages_go_up_and_down(tmp_path: Path) -> None:
    """The last rank's first chunk sends to the first rank's second, which is before it."""
    config = config_of(settings(FAMILIES["gpt"], tmp_path, parallel__pp=2, parallel__vpp=2), tmp_path)
    count, size = config.micro_batches, message_bytes(config)
    found = step_traffic(config, Coord(0, 0, 0, 1))
    assert found["pp.down", "send"] == (3 * count, 3 * count * size)  # two gradients, an activation
    assert found["pp.up", "receive"] == (2 * count + count, 3 * count * size)
    assert size == 8 * config.model.seq_length * config.model.hidden_size
