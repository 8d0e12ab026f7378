"""States of linear attention between ranks and chunks: bytes that no length changes, and a store that ends empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.plan.account.traffic import step_traffic
from megascale.train.step import train_step
from tests.marks import only_quick
from tests.recorded_events import recorded_events
from tests.runs import LLAMA, config_of, settings
from tests.thread_world import run_threads

MODEL = LLAMA | {"num_layers": 2, "attention_pattern": "L"}
HEADS, D, WIDE = 4, 8, 4
MODES: dict[str, tuple[dict[str, Any], list[tuple[str, int]]]] = {
    "ring 3": ({"cp": 3}, [("cp.keys", 6)]),
    "ulysses 2, tp2": ({"cp": 2, "cp_mode": "ulysses", "tp": 2}, [("cp.heads", 2)]),
    "usp 2x2": ({"cp": 4, "cp_mode": "usp", "cp_a2a_size": 2}, [("cp.heads", 2), ("cp.keys", 4)]),
}
"""Layouts, and by group the states in an all-gather: of two spans a rank, but of one where heads are exchanged."""


def configured(folder: Path, length: int, parallel: dict[str, Any], **keys: Any) -> RunConfig:
    changes: dict[str, Any] = {f"parallel__{key}": value for key, value in parallel.items()} | keys
    changes |= {"train__precision": "bf16", "batch__global": 2, "optimizer__warmup_steps": 0}
    return config_of(settings(MODEL | {"seq_length": length}, folder, **changes), folder)


def gathered(run: Any) -> tuple[Any, list[tuple[str, int]]]:
    """Return the rank's coordinates, and the group and bytes of every all-gather of states in a step."""
    train_step(run, run.train_loader.batch(0))
    run.buffers.finish_param_gather()
    events = recorded_events(run.mesh.recorder)
    return run.mesh.coord, [(e.group, e.bytes) for e in events if e.group and e.group.startswith("cp.")]


@pytest.mark.parametrize("recompute", only_quick(["none", "full"], "none"))
@pytest.mark.parametrize("mode", only_quick(MODES, "ring 3", "usp 2x2"))
def test_a_rank_sends_states_of_any_length(mode: str, recompute: str, tmp_path: Path) -> None:
    """In every layer once in forward and once in backward: d^2 elements in fp32 of each head and span."""
    parallel, states = MODES[mode]
    each = HEADS // parallel.get("tp", 1) * D * D * WIDE
    passes = 2 + (recompute == "full")
    for length in (24, 96):
        config = configured(tmp_path, length, parallel, train__recompute=recompute)
        for coord, found in run_threads(config, gathered):
            expected = [(group, count * each) for group, count in states]
            assert sorted(found) == sorted(expected * passes * 2 * config.num_microbatches)
            planned = step_traffic(config, coord)
            for group, count in states:
                calls = passes * 2 * config.num_microbatches
                assert planned[group, "all_gather"] == (calls, calls * count * each)


@pytest.mark.parametrize("saved", [1, 3])
def test_states_between_chunks_are_freed_with_their_last_use(saved: int, tmp_path: Path) -> None:
    keys = {"data__sequence_chunk_tokens": 8, "data__sequence_chunks_saved": saved}
    config = configured(tmp_path, 24, {}, **keys)

    def stores(run: Any) -> list[Any]:
        run_actions, found = run.pipeline.run_actions, list[Any]()

        def collect(order: Any, batch: Any) -> Any:
            loss = run_actions(order, batch)
            found.extend(part.keys for part in batch.micro_batches)
            return loss

        run.pipeline.run_actions = collect
        train_step(run, run.train_loader.batch(0))
        return found

    (found,) = run_threads(config, stores)
    assert found and not any(store.blocks or store.grads for store in found)
