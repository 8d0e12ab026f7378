"""Lost pipeline stages are rebuilt as the mean of their neighbours, and nothing else changes."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.checkpoint.load.lost_stages import can_rebuild, lost_stages, rebuild_stages
from megascale.checkpoint.memory.memory_checkpoints import find_steps
from megascale.layout.stages import looped, v_shaped
from megascale.layout.topology import Topology
from megascale.train.step import train_step
from tests.checkpoint.test_memory_checkpoints import config_with, resume, train_and_exit
from tests.marks import only_quick, only_quick_rows
from tests.runs import FAMILIES, config_of, settings
from tests.thread_world import run_threads
from tests.worlds import run_world

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp3 dp2 zero0": {"parallel__pp": 3, "parallel__dp": 2, "parallel__zero": 0},
    "pp3 tp2 bf16": {"parallel__pp": 3, "parallel__tp": 2, "train__precision": "bf16"},
    "pp3 tp2 dp2 zero3": {"parallel__pp": 3, "parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 3},
    "pp3 vpp2 dp2 zero2": {"parallel__pp": 3, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2},
    "pp5, two lost": {"parallel__pp": 5, "model__num_layers": 5},
    "pp3 fp8 lamb": {
        "parallel__pp": 3, "train__precision": "fp8", "fp8__recipe": "delayed", "optimizer__name": "lamb",
        "model__hidden_size": 64, "model__ffn_size": 96,
    },
}  # fmt: skip
LOST_RANKS = {"pp5, two lost": (1, 3)}
"""Pipeline ranks that are lost, else 1."""

Whole = dict[str, np.ndarray]


def lose_and_rebuild(run: Any, lost: list[int]) -> tuple[list[Any], list[Any], Any, list[bool], list[bytes]]:
    """Train, lose the state of stages, and rebuild it. Returns the shards before and after, the shares, whether what
    all ranks have in common is whole on this rank, and its state."""
    for _ in range(2):
        train_step(run, run.train_loader.batch(run.progress.samples))
    run.buffers.finish_param_gather()
    parts = [part for part in (run.optimizer, run.fp8_state, run.optimizer._guard) if part is not None]
    before, common = shards_of(run), [[flat.clone() for flat in part.flat_tensors()] for part in parts[1:]]
    if set(run.mesh.placement.stages[run.mesh.coord.pp]) & set(lost):
        for part in parts:
            for flat in part.flat_tensors():
                flat.fill_(7)
    shares = rebuild_stages(lost, run.config.model, parts, run.mesh)
    whole = [
        bool((flat == kept).all())
        for part, kept_of in zip(parts[1:], common, strict=True)
        for flat, kept in zip(part.flat_tensors(), kept_of, strict=True)
    ]
    state = [flat.clone().double().numpy() for flat in run.optimizer.flat_tensors()]
    assert all(np.isfinite(flat).all() and not (flat == 7).any() for flat in state), "every element is rebuilt"
    return before, shards_of(run), shares, whole, [flat.tobytes() for flat in state]


def shards_of(run: Any) -> list[Any]:
    return [
        (name, tensor.shape, shard.offset, shard.data.clone().double().numpy())
        for name, tensor in run.optimizer.global_tensors().items()
        for shard in tensor.shards
    ]


def assemble(by_rank: list[list[Any]]) -> Whole:
    """Put the shards of all ranks together. Replicas must be equal."""
    tensors: Whole = {}
    for name, shape, offset, data in (shard for shards in by_rank for shard in shards):
        whole = tensors.setdefault(name, np.full(shape, np.nan))
        region = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
        held = whole[region]
        assert (np.isnan(held) | (held == data)).all(), f"replicas of {name} differ"
        whole[region] = data
    return tensors


@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "pp3 dp2 zero0", "pp3 tp2 bf16", "pp3 vpp2 dp2 zero2"))
def test_a_lost_stage_is_the_mean_of_its_neighbours(layout: str, tmp_path: Path) -> None:
    keys = {"model__num_layers": 6, "batch__global": 6, "optimizer__zclip": True, "parallel__zero": 1}
    tree = settings(FAMILIES["llama"], tmp_path, **keys | LAYOUTS[layout])
    config = config_of(tree, tmp_path)
    p, layers = config.parallel, config.model.num_layers // (config.parallel.pp * config.parallel.vpp)
    placement = looped(p.pp, p.vpp)
    lost = sorted(stage for rank in LOST_RANKS.get(layout, (1,)) for stage in placement.stages[rank])
    results = run_threads(config, partial(lose_and_rebuild, lost=lost))
    before, after = (assemble([result[index] for result in results]) for index in (0, 1))
    assert all(all(whole) for *_, whole, _ in results), "counters and histories are those of the other stages"
    assert all(shares == results[0][2] for _, _, shares, *_ in results)
    if not p.zero:
        assert all(results[rank][-1] == results[rank + 1][-1] for rank in range(0, len(results), 2)), "replicas"

    norms: dict[int, float] = defaultdict(float)
    for name, tensor in before.items():
        kind, of, layer, *_ = name.split(".")
        if (kind, of) == ("exp_avg_sq", "layers"):
            norms[int(layer) // layers] += tensor.sum()
    rounding = {"fp64": 1e-13, "bf16": 1e-6, "fp8": 1e-6}[config.train.precision]
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        kind, of, layer, *_ = name.split(".")
        stage = int(layer) // layers if of == "layers" else -1
        if stage not in lost:
            assert (tensor == before[name]).all(), f"{name} has changed"
            continue
        before_it, after_it = math.sqrt(norms[stage - 1]), math.sqrt(norms[stage + 1])
        share = before_it / (before_it + after_it)
        assert 0.05 < share < 0.95 and results[0][2][stage] == pytest.approx((share, 1 - share))
        first, second = (before[name.replace(layer, str(int(layer) + way), 1)] for way in (-layers, layers))
        mean = share * first + (1 - share) * second if kind in ("weights", "exp_avg_sq") else np.zeros_like(tensor)
        assert np.abs(tensor - mean).max() <= rounding * max(1.0, np.abs(mean).max()), name


@pytest.mark.parametrize(("placement", "ranks", "stages", "rebuilt"), [
    (looped(3, 1), (2, 3), [1], True),
    (looped(3, 1), (2,), [1], True),  # a part of a stage
    (looped(3, 1), (0,), [0], False),
    (looped(3, 1), (5,), [2], False),
    (looped(4, 1), (2, 4), [1, 2], False),
    (looped(5, 1), (2, 6), [1, 3], True),
    (looped(3, 2), (2,), [1, 4], True),
    (v_shaped(4, 2), (2,), [1, 6], True),
    (v_shaped(3, 2), (4,), [2, 3], False),  # the stages are neighbours
])  # fmt: skip
def test_stages_with_two_neighbours_are_rebuilt(placement: Any, ranks: Any, stages: list[int], rebuilt: bool) -> None:
    assert lost_stages(ranks, Topology(dp=2, pp=placement.p), placement) == stages
    assert can_rebuild(stages, placement) is rebuilt


def test_the_fewest_ranks_are_lost_and_then_the_fewest_steps() -> None:
    """Rank 1 has lost its host, and rank 2 had not completed its copy of step 5."""
    copies = [([(0, 4, 0), (0, 5, 1)], []), ([], []), ([(2, 3, 1), (2, 4, 0)], [])]
    steps, _, problems = find_steps(copies, 3, lambda step, lost: 0 not in lost)
    assert list(steps.items()) == [(4, {1}), (5, {1, 2})] and not problems
    steps, _, problems = find_steps(copies, 3, lambda step, lost: not lost)
    assert not steps and len(problems) == 2, problems


@pytest.mark.parametrize(("least", "place"), only_quick_rows([(2, "memory"), (3, "step-00000001")], (2, "memory")))
def test_a_run_whose_middle_stage_is_lost(least: int, place: str, tmp_path: Path) -> None:
    """Its newest checkpoint is two steps older than the copies of the other stages."""
    memory = tmp_path / "memory"
    memory.mkdir()
    keys = {"parallel__pp": 3, "model__num_layers": 3, "fault__rebuild_stage": least}
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), **keys)
    before = run_world(3, train_and_exit, config, 3, 1, True)
    shutil.rmtree(memory / "host1")
    after = run_world(3, resume, config, True)
    assert [(step, found) for _, step, found, _ in after] == [(3 if place == "memory" else 1, place)] * 3
    states = [state for state, *_ in after]
    assert ([states[rank] == before[rank] for rank in (0, 2)] == [True] * 2) is (place == "memory")
    assert states[1] != before[1]
    kept = [json.loads(path.read_text())["facts"]["progress"]["step"] for path in memory.rglob("*.json")]
    assert kept == ([3, 3] if place == "memory" else []), "copies of the resumed step go on to count"
