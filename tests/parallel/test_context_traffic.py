"""What ranks that share sequences exchange in a step: calls and bytes equal the formulas of docs/long-context.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.layout.topology import Coord
from megascale.plan.account.traffic import step_traffic
from megascale.train.step import train_step
from tests.marks import only_quick
from tests.plan.account.test_against_dry_run import sent_by
from tests.runs import LLAMA, config_of, settings, traffic_of
from tests.thread_world import run_threads

SIZES = {"num_layers": 2, "seq_length": 24, "hidden_size": 32, "num_heads": 4}
NARROW, WIDE = 2, 4  # bytes in bf16, and of sums


def sent(run: Any) -> tuple[Any, dict[str, dict[str, tuple[int, int]]]]:
    """Return the rank's coordinates, and calls and bytes of a step by group and operation."""
    train_step(run, run.train_loader.batch(0))
    run.buffers.finish_param_gather()
    return run.mesh.coord, traffic_of(run, step=1)


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        ({"parallel__cp": 2, "parallel__cp_mode": "ulysses"}, "heads"),
        ({"parallel__cp": 4, "parallel__cp_mode": "ulysses"}, "heads"),  # two key-value heads are repeated
        ({"parallel__cp": 3, "parallel__cp_mode": "ring"}, "ring"),
        ({"parallel__cp": 3, "parallel__cp_mode": "allgather"}, "gather"),
        ({"parallel__cp": 2, "parallel__cp_mode": "ring", "train__recompute": "full", "parallel__tp": 2}, "ring"),
        ({"parallel__cp": 4, "parallel__cp_mode": "usp", "parallel__cp_a2a_size": 2}, "both"),
    ],
)
def test_bytes_of_each_mode(keys: dict[str, Any], mode: str, tmp_path: Path) -> None:
    more = {"train__precision": "bf16", "batch__global": 2, "train__steps": 2, "optimizer__warmup_steps": 0}
    config = config_of(settings(LLAMA | SIZES, tmp_path, **more, **keys), tmp_path)
    expected = exchanged(config, mode)
    for coord, found in run_threads(config, sent):
        assert {group: found[group] for group in expected} == expected
        assert formula(config, coord) == {
            (group, operation): size for group, sizes in expected.items() for operation, size in sizes.items()
        }


def exchanged(config: RunConfig, mode: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Calls and bytes of a step in bf16 by the page's formulas, by group and operation."""
    p, m = config.parallel, config.model
    n, kv, d, tokens = m.num_heads // p.tp, m.num_kv_heads // p.tp, m.head_dim, m.seq_length // p.cp
    u, r = p.cp_heads, p.cp_keys
    repeated, forwards = max(kv, u) if u > 1 else kv, 2 if config.train.recompute == "full" else 1
    passes = config.num_microbatches * m.num_layers
    heads = (n + 2 * repeated) * d * tokens * NARROW, n * d * tokens * NARROW
    block = 2 * repeated * d * tokens  # elements
    expected: dict[str, dict[str, tuple[int, int]]] = {"cp.heads": {}, "cp.keys": {}}
    if u > 1:
        expected["cp.heads"]["all_to_all"] = (passes * (forwards + 1) * 2, passes * (forwards + 1) * sum(heads))
    if mode in ("ring", "both"):
        calls = passes * ((forwards + 1) * (r - 1) + r)
        expected["cp.keys"]["send_on"] = (calls, passes * block * ((forwards + 1) * (r - 1) * NARROW + r * WIDE))
    elif mode == "gather":
        expected["cp.keys"]["all_gather"] = (passes * (forwards + 1), passes * (forwards + 1) * r * block * NARROW)
        expected["cp.keys"]["reduce_scatter"] = (passes, passes * r * block * WIDE)
    return expected


def formula(config: RunConfig, coord: Coord) -> dict[tuple[str, str], tuple[int, int]]:
    return {kind: size for kind, size in step_traffic(config, coord).items() if kind[0].startswith("cp.")}


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("tensorwise", {"parallel__cp": 4, "parallel__cp_mode": "usp", "parallel__cp_a2a_size": 2}),
        ("rowwise", {"parallel__cp": 2, "parallel__tp": 2, "train__recompute": "full"}),
    ],
)
def test_fp8_amaxes(recipe: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """In every pass an amax of each operand with a scale per tensor, and those of the rows of wgrad's operands."""
    sizes = {"num_layers": 3, "seq_length": 64, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 64}
    more = {"train__precision": "fp8", "fp8__recipe": recipe, "batch__global": 2, "optimizer__warmup_steps": 0}
    config = config_of(settings(LLAMA | sizes, tmp_path, **more, **keys), tmp_path)
    for coord, found in run_threads(config, sent):
        counted = {
            (group, operation): size for group, sizes in found.items() for operation, size in sizes.items()
            if group.startswith("cp.")
        }  # fmt: skip
        assert counted == formula(config, coord)
    calls, nbytes = counted["cp.keys", "all_reduce"]
    assert (calls, nbytes) == {
        "tensorwise": (2 * 8, 2 * 8 * 4),  # micro-batches, of 4 linear layers an input and a gradient
        "rowwise": (2 * 8, 2 * 4 * (64 + 96 + 32 + 64 + 64 + 64 + 32 + 64)),
    }[recipe]


TOKENS, RANKS = 768 * 1024, 96


MODES = {"ring": (1, "ring"), "allgather": (1, "gather"), "ulysses": (1, "heads"), "usp": (8, "both")}
"""Ranks that exchange heads with usp, and what is exchanged."""


@pytest.mark.parametrize("mode", only_quick(MODES, "ulysses", "usp"))
def test_a_sequence_of_768_k_tokens_on_96_ranks(mode: str, tmp_path: Path) -> None:
    """As the rank in the middle of the ring, in a dry run."""
    from megascale.plan.dryrun.dry_run import dry_run

    ulysses, kind = MODES[mode]
    sizes = {"num_layers": 2, "seq_length": TOKENS, "hidden_size": 96 * 8, "num_heads": 96, "num_kv_heads": 96}
    keys = {"parallel__cp": RANKS, "parallel__cp_mode": mode, "parallel__cp_a2a_size": ulysses, "batch__global": 1}
    tree = settings(LLAMA | sizes, tmp_path, train__precision="bf16", **keys)
    dry = dry_run(config := config_of(tree, tmp_path), RANKS // 2)
    found = {kind: size for kind, size in sent_by(dry).items() if kind[0].startswith("cp.")}
    expected = exchanged(config, kind)
    assert found == {(group, op): size for group, sizes in expected.items() for op, size in sizes.items()}
    assert found == formula(config, dry.coord)
    hidden, layers = 96 * 8, 2
    if mode == "ulysses":  # q, k, v and the result, forward and backward: falls with the number of ranks
        assert found["cp.heads", "all_to_all"][1] == layers * 2 * 4 * (TOKENS // RANKS) * hidden * NARROW
    elif mode == "ring":  # keys and values of all other ranks, twice, and gradients of all
        visits = 2 * (RANKS - 1) * NARROW + RANKS * WIDE
        assert found["cp.keys", "send_on"][1] == layers * 2 * (TOKENS // RANKS) * hidden * visits
