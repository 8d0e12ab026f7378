"""Peak memory from few representative micro-batches and stages, and state by weight storage. tests/parallel compares
allocations, test_against_dry_run compares dry runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.core.registry import Card
from megascale.plan.account import memory as memory_of
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.state_bytes import THIS_TRAINER, WeightStorage, state_bytes
from megascale.schedule.ir import RankSchedule, backward, forward
from tests.drawn import jobs
from tests.marks import only_quick

STORAGES = st.builds(WeightStorage, st.sampled_from(["beside", "instead"]), st.booleans(), st.sampled_from([0, 2]))

ALONE = WeightStorage(masters_alone=True)


def test_schedules_without_a_period_are_walked_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A breadth-first schedule: forwards of the first chunk, forwards of the second, all backwards."""

    def breadth_first(p: int, v: int, m: int, rank: int) -> RankSchedule:
        forwards = [forward(chunk, i) for chunk in range(v) for i in range(m)]
        return [*forwards, *(backward(chunk, i) for chunk in reversed(range(v)) for i in range(m))]

    monkeypatch.setitem(breadth_first.__globals__, "breadth_first", breadth_first)
    card = Card("breadth_first", "", f"{__name__}:breadth_first", {"v": None, "unbounded_in_flight": True})
    monkeypatch.setitem(SCHEDULES.cards, card.name, SCHEDULES.complete(card))
    overrides = ["parallel.pp=4", "parallel.vpp=2", "parallel.schedule=breadth_first"]
    few, many = (
        load_config("configs/gpu/llama3-8b.toml", [*overrides, f"batch.global={n}"], world_size=32) for n in (120, 240)
    )
    for less, more in zip(JobMemory(few).by_stage(), JobMemory(many).by_stage(), strict=True):
        assert more.activations == 2 * less.activations > 0


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(jobs(), STORAGES)
def test_the_fullest_rank_is_the_maximum_over_stages(config: RunConfig, storage: WeightStorage) -> None:
    ranks = JobMemory(config, storage).by_stage()
    totals = [rank.total for rank in ranks]
    assert ranks[-1] == JobMemory(config, storage).rank(len(ranks) - 1)
    assert JobMemory(config, storage).fullest().total == max(totals)
    limit = sorted(totals)[len(totals) // 2] - 1
    assert limit < JobMemory(config, storage).fullest(limit).total <= max(totals)
    for rank in ranks:
        assert min(vars(rank).values()) >= 0 and sum(vars(rank).values()) == rank.total


@pytest.mark.parametrize("p", only_quick([64, 512], 64))
def test_few_of_many_stages_are_walked(p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [f"model.num_layers={16 * p}", "parallel.layers_per_chunk=auto", f"parallel.pp={p}", "parallel.vpp=16"]
    config = load_config("configs/gpu/megascale-175b.toml", [*overrides, "batch.global=10000"], world_size=8 * p)
    played, rank = list[int](), JobMemory.rank

    def counted(job: Any, stage: int) -> Any:
        played.append(stage)
        return rank(job, stage)

    monkeypatch.setattr(JobMemory, "rank", counted)
    assert JobMemory(config).fullest().total > 0 and len(played) < 8


def test_fp8_weights_beside_or_instead_of_bf16() -> None:
    """Without codes that are gathered; with them a rank keeps bf16 of its shard alone."""
    words = ["train.precision=fp8", "parallel.zero=0"]
    config, coded = (load_config("configs/gpu/llama3-8b.toml", each, world_size=64) for each in (words, words[:1]))
    beside, instead = (
        state_bytes(config, 0, storage) for storage in (THIS_TRAINER, WeightStorage(fp8_weights="instead"))
    )
    plain = state_bytes(load_config("configs/gpu/llama3-8b.toml", ["train.precision=bf16"], world_size=64), 0)
    assert state_bytes(coded, 0).parameters < plain.parameters * 1.1 < beside.parameters
    cast = (beside.parameters - plain.parameters) // 2
    assert beside.parameters - instead.parameters == 2 * cast > plain.parameters // 4
    assert (beside.gradients, beside.optimizer) == (instead.gradients, instead.optimizer)


def test_sharded_weights_of_fsdp_are_masters_alone_and_their_gradients_of_two_bytes() -> None:
    """16 bytes of state a parameter in place of 18, and units of gradients of half the size (torch's FSDP)."""
    config, plain = (load_config("configs/gpu/llama3-8b.toml", [f"parallel.zero={z}"], world_size=64) for z in (3, 2))
    ours, masters, halves = (JobMemory(config, s) for s in (THIS_TRAINER, ALONE, WeightStorage(gradient_bytes=2)))
    state, less = ours.rank(0), masters.rank(0)
    assert (less.parameters, less.total) == (0, state.total - state.parameters)
    assert state.parameters == state.gradients // 2 == state.optimizer // 6 > 0
    head = config.model.hidden_size * config.model.vocab_size // config.parallel.tp  # the largest unit
    assert state.transient - halves.rank(0).transient == pytest.approx(2 * head, rel=1e-3)
    assert JobMemory(plain, ALONE).rank(0) == JobMemory(plain).rank(0), "whole weights are cast once a step"


@pytest.mark.parametrize(("pp", "vpp", "zero", "m"), [(16, 1, 1, 64), (16, 2, 0, 80), (32, 2, 2, 96), (16, 4, 2, 16)])
def test_stages_of_long_pipelines_are_interpolated(
    pp: int, vpp: int, zero: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = "interleaved_1f1b" if vpp > 1 else "1f1b"
    layout = [f"parallel.pp={pp}", f"parallel.vpp={vpp}", f"parallel.schedule={schedule}", "parallel.dp=2"]
    sizes = [f"model.num_layers={pp * vpp}", f"batch.global={2 * m}", f"parallel.zero={zero}"]
    config = load_config("configs/gpu/megascale-175b.toml", [*layout, *sizes], skip_sections=["data"])
    played = JobMemory(config).by_stage()
    plays, play = list[int](), JobMemory.rank
    monkeypatch.setattr(memory_of, "MAX_ACTIONS", 0)
    monkeypatch.setattr(JobMemory, "rank", lambda job, stage: plays.append(stage) or play(job, stage))
    interpolated = JobMemory(config).by_stage()
    assert max(rank.total for rank in interpolated) == max(rank.total for rank in played)
    assert len(plays) <= 4, "the first, the last, and the ends of the run between"
    for near, true in zip(interpolated, played, strict=True):
        assert near.total == pytest.approx(true.total, rel=0.04)
