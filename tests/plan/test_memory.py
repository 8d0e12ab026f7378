"""Of many micro-batches few show what a rank holds; what it holds of state is compared in tests/parallel."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.config.explain import load
from megascale.config.run import RunConfig
from megascale.core.registry import Card
from megascale.plan import memory as memory_of
from megascale.plan.memory import fullest_rank, rank_bytes, representative, state_bytes
from megascale.plan.orders import Orders
from megascale.plan.peak import Actions, PeakBytes, peak_bytes
from megascale.plan.report import memory
from megascale.schedule.ir import Kind, Order, Schedule, backward, forward
from megascale.schedule.lower import AHEAD
from megascale.schedule.runs import one_by_one
from tests.plan.jobs import jobs

RELEASES = RunConfig.model_validate(  # more than it works with, when its gradients are summed
    {
        "name": "releases",
        "model": {
            "num_layers": 3, "hidden_size": 576, "num_heads": 6, "num_kv_heads": 2, "ffn_size": 512, "vocab_size": 4784,
            "seq_length": 128, "norm": "rmsnorm", "activation": "swiglu", "position": "learned", "bias": True,
            "tie_embeddings": False, "block": "parallel",
        },
        "parallel": {"tp": 2, "sp": True, "pp": 2, "dp": 3, "zero": 2},
        "overlap": {"pp": False, "bucket_bytes": 4 << 20},
        "batch": {"micro": 1, "global": 3},
        "train": {"steps": 10, "precision": "fp64", "recompute": "selective", "recompute_ops": ["attention"]},
        "optimizer": {"lr": 1e-3},
        "data": {"mock": True},
    }
).resolve(12)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SCHEDULES.names() if SCHEDULES[name].facts["chunks"]])
@given(p=st.integers(1, 8), v=st.integers(1, 4), m=st.integers(1, 150))
@example(p=7, v=2, m=146)  # six groups are larger than fourteen others
@example(p=8, v=3, m=71)  # all but one are
def test_what_is_alive_does_not_grow_with_the_micro_batches(name: str, p: int, v: int, m: int) -> None:
    few, all = (SCHEDULES[name].load()(p, v, count) for count in (representative(p, m), m))
    assert [situations(order, v) for order in few] == [situations(order, v) for order in all]


def test_few_micro_batches_show_what_many_do() -> None:
    assert representative(8, 6144 + 5) == 6 * 8 + 3


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(jobs(), st.sampled_from(["own", "gpipe"]), st.integers(1, 40), st.booleans())
def test_what_is_done_again_and_again_is_played_once(config: RunConfig, name: str, m: int, shards: bool) -> None:
    """As if each action stood alone."""
    batch = config.batch.model_copy(update={"total": config.batch.micro * config.dp * m})
    config = (piled(config) if name == "gpipe" else config).model_copy(update={"batch": batch})
    found = rank_bytes(config, shards_weights=shards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_of, "_orders", alone)
        assert found == rank_bytes(config, shards_weights=shards)


def test_all_micro_batches_of_other_schedules_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all forwards of the first chunk, those of the second, and all backwards."""

    def breadth_first(p: int, v: int, m: int) -> Schedule:
        forwards = [forward(chunk, i) for chunk in range(v) for i in range(m)]
        return [[*forwards, *(backward(chunk, i) for chunk in reversed(range(v)) for i in range(m))] for _ in range(p)]

    monkeypatch.setitem(breadth_first.__globals__, "breadth_first", breadth_first)
    card = Card("breadth_first", "", f"{__name__}:breadth_first", {"chunks": True, "piles": True})
    monkeypatch.setitem(SCHEDULES.cards, card.name, card)
    overrides = ["parallel.pp=4", "parallel.vpp=2", "parallel.schedule=breadth_first", "batch.global=240"]
    config = load("configs/gpu/llama3-8b.toml", overrides, world=32)
    for rank in rank_bytes(config):
        assert rank.activations.peak >= config.micro_batches * sum(rank.activations.kept)


def alone(name: str, p: int, v: int, m: int) -> Orders:
    return Orders(one_by_one(SCHEDULES[name].load()(p, v, m)), p, v)


def piled(config: RunConfig) -> RunConfig:
    """With all forwards before all backwards."""
    parallel = config.parallel.model_copy(update={"schedule": "gpipe", "vpp": 1, "layers_per_chunk": None})
    train = config.train.model_copy(update={"recompute_chunks": None})
    return config.model_copy(update={"parallel": parallel, "train": train})


def test_any_number_of_micro_batches_is_played_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    played = list[int]()
    find = Actions.find

    def counted(does: Actions, here: Any, number: int) -> None:
        played.append(number)
        find(does, here, number)

    monkeypatch.setattr(Actions, "find", counted)
    overrides = ["parallel.schedule=gpipe", "parallel.pp=4", "parallel.vpp=1", "batch.global=1000000000"]
    config = load("configs/gpu/megascale-175b.toml", [*overrides, "parallel.zero=2"], world=32)
    for rank in rank_bytes(config):
        assert rank.peak.kept // rank.activations.kept[0] in (10**9 - 1, 10**9)
    assert len(played) < 100


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(jobs(), st.sampled_from(["own", "gpipe"]), st.booleans())
def test_the_fullest_is_found_without_playing_all(config: RunConfig, schedule: str, shards: bool) -> None:
    config = piled(config) if schedule == "gpipe" else config
    totals = [rank.total for rank in rank_bytes(config, shards_weights=shards)]
    assert fullest_rank(config, shards_weights=shards).total == max(totals)
    room = sorted(totals)[len(totals) // 2] - 1
    assert room < fullest_rank(config, shards_weights=shards, room=room).total <= max(totals)


def test_the_fullest_of_many_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["model.num_layers=192", "parallel.pp=64", "parallel.vpp=1", "batch.global=256"]
    config, played = load("configs/gpu/megascale-175b.toml", overrides, world=512), list[int]()
    expected = max(rank.total for rank in rank_bytes(config))

    def counted(config: RunConfig, pp_rank: int, *rest: Any) -> PeakBytes:
        played.append(pp_rank)
        return peak_bytes(config, pp_rank, *rest)

    monkeypatch.setattr(memory_of, "peak_bytes", counted)
    assert fullest_rank(config).total == expected and len(played) < 8


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(jobs())
def test_sharded_weights_are_divided_but_for_two_units(config: RunConfig) -> None:
    shards = config.dp * config.parallel.cp
    whole = config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero": 0})})
    for rank, held in enumerate(rank_bytes(config, shards_weights=True)):
        all, own = state_bytes(whole, rank), held.state
        assert own == state_bytes(config, rank, shards_weights=True)
        assert (own.weights, own.gradients, own.optimizer) == tuple(
            size // shards for size in (all.weights, all.gradients, all.optimizer)
        )
        assert 0 < held.gathered <= all.weights and 0 < held.peak.gradients <= all.gradients
        assert held.total == own.lasting + held.peak.total + held.gathered
        assert held.peak.kept == rank_bytes(whole)[rank].peak.kept


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(jobs())
@example(RELEASES)
def test_no_kind_is_less_than_nothing(config: RunConfig) -> None:
    for rank in rank_bytes(config):
        kinds = memory(rank)
        assert min(kinds.values()) >= 0 and min(vars(rank.peak).values()) >= 0
        assert sum(kinds.values()) == 2 * kinds["total"] == 2 * rank.total


def situations(order: Order, v: int) -> set[tuple[object, ...]]:
    """Every number of micro-batches of each chunk that are alive at once, with the actions around."""
    now, found, kinds = [0] * v, set(), [(action.kind, action.chunk) for action in order]
    for index, action in enumerate(order):
        found.add((*now, *kinds[max(0, index - AHEAD) : index + 1 + AHEAD]))
        now[action.chunk] += 1 if action.kind is Kind.F else -1
    return found
