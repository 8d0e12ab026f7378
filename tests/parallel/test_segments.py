"""A forward and a backward whose segments run in turn are the same step as one after the other, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.schedule.ir import Entry, Kind, Overlap, RankSchedule, build_schedule, each_action, parts
from megascale.schedule.lower import lower
from tests.parallel.experts.test_expert_layouts import MIXTRAL, SHARED
from tests.recorded_events import recorded_events
from tests.runs import LLAMA, build_run, config_of, curve_of, settings, traffic_of
from tests.thread_world import run_threads
from tests.worlds import run_world

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (LLAMA, {}),
    "mixtral": (MIXTRAL, {"moe__z_loss_weight": 0.01, "moe__balance": "sequence", "moe__balance_weight": 0.5}),
    "some dense layers": (SHARED | {"balance_bias": True, "dense_layers": 3}, {"moe__balance": "step"}),
    "shared expert": (SHARED | {"bias": True, "router_bias": True, "activation": "clamped_swiglu"}, {}),
    "capacity": (MIXTRAL | {"block": "sandwich"}, {"moe__capacity_factor": 0.75}),
    "all-gather": (SHARED | {"block": "serial"}, {"moe__dispatcher": "all_gather"}),
    "blocks of tokens": (MIXTRAL, {"moe__token_blocks": 2}),
    "selective recomputation": (MIXTRAL, {"train__recompute": "selective"}),
    "full recomputation": (MIXTRAL, {"train__recompute": "full"}),
    "prediction": (SHARED | {"mtp_layers": 1}, {}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 ep2": {"dp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp2 vpp2 dp2 ep2": {"pp": 2, "vpp": 2, "dp": 2, "ep": 2},
    "pp2 tp2 sp ep2": {"pp": 2, "tp": 2, "sp": True, "ep": 2},
    "pp2 dualpipev dp2 ep2": {"pp": 2, "vpp": 2, "schedule": "dualpipev", "dp": 2, "ep": 2},
    "pp2 cp2 ep2": {"pp": 2, "cp": 2, "ep": 2},
    "pp2 dp2 ep2 zero2": {"pp": 2, "dp": 2, "ep": 2, "zero": 2},
}
QUICK = [
    ("mixtral", "pp2 dualpipev dp2 ep2", Kind.B, "fp64"),
    ("capacity", "pp2 dp2 ep2 zero2", Kind.I, "fp64"),
]
ALL = [
    (model, layout, kind, precision)
    for model in MODELS for layout in LAYOUTS for kind in (Kind.B, Kind.I) for precision in ("fp64", "bf16")
]  # fmt: skip


def with_backwards(order: RankSchedule, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of an order, with backwards whole, or in two parts, of which one is in pairs."""
    for entry in order:
        *before, last = parts(entry)
        if kind is Kind.B or last.kind is not Kind.B:
            yield entry
        else:
            yield Overlap(*before, last._replace(kind=kind)) if before else last._replace(kind=kind)
            yield last._replace(kind=Kind.W)


def configured(model: str, layout: str, folder: Path, **changes: Any) -> RunConfig:
    tree, moe = MODELS[model]
    keys = {f"parallel__{key}": value for key, value in LAYOUTS[layout].items() if key != "ep" or model != "dense"}
    return config_of(settings(tree, folder, **keys, **moe, **changes), folder)


def trained(run: Any, kind: Kind, *, by_turns: bool = True) -> dict[str, Any]:
    """Train two steps: losses and norms, weights, traffic, and waits of the host."""
    p, m, reads = run.config.parallel, run.config.num_microbatches, list[int]()
    schedule = SCHEDULES["dualpipev" if p.schedule == "dualpipev" else "combined_1f1b"].load()
    lowered = lower(build_schedule(schedule, p.pp, p.vpp, m), run.mesh.placement, reduce_each=p.zero == 2)
    order = [*with_backwards(lowered[run.mesh.coord.pp], kind)]
    run.order_of = lambda count, training: order if by_turns else [*each_action(order)]
    layers = [layer for stage in run.stages for layer in stage.layers.values()]
    if found := [layer.mlp._experts for layer in layers if hasattr(layer.mlp, "_experts")]:  # one object
        read = found[0].read
        object.__setattr__(found[0], "read", lambda counts, total: reads.append(total) or read(counts, total))
    curve = curve_of(run, 2)
    weights = torch.cat([bucket.weights.double() for bucket in run.buffers.buckets]).tolist()
    return {"curve": curve, "weights": weights, "traffic": traffic_of(run, 2), "reads": sorted(reads)}


def check(model: str, layout: str, kind: Kind, precision: str, folder: Path, **changes: Any) -> None:
    config = configured(model, layout, folder, train__precision=precision, **changes)
    one_by_one = run_threads(config, lambda run: trained(run, kind, by_turns=False))
    assert run_threads(config, lambda run: trained(run, kind)) == one_by_one


@pytest.mark.parametrize(("model", "layout", "kind", "precision"), QUICK)
def test_segments_by_turns_are_the_same_step(
    model: str, layout: str, kind: Kind, precision: str, tmp_path: Path
) -> None:
    check(model, layout, kind, precision, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "kind", "precision"), [case for case in ALL if case not in QUICK])
def test_segments_of_every_kind_are_the_same_step(
    model: str, layout: str, kind: Kind, precision: str, tmp_path: Path
) -> None:
    check(model, layout, kind, precision, tmp_path)


@pytest.mark.parametrize("kind", [Kind.B, pytest.param(Kind.I, marks=pytest.mark.slow)])
def test_buckets_are_reduced_within_a_pair(kind: Kind, tmp_path: Path) -> None:
    check("some dense layers", "pp2 vpp2 dp2 ep2", kind, "fp64", tmp_path, overlap__bucket_bytes=1)


def communication(rank: Rank, config: RunConfig) -> list[tuple[str, str, int]]:
    """A step's communication in the order of its issue: axis, label and micro-batch."""
    run = build_run(rank, config)
    trained(run, Kind.B)
    events = [
        event for event in recorded_events(run.mesh.recorder) if event.step == 2 and event.axis not in ("compute", "pp")
    ]
    return [(event.axis, event.label, event.microbatch) for event in events]


def test_exchanges_of_both_are_in_one_order_on_all_ranks(tmp_path: Path) -> None:
    """In processes, whose messages are under way during compute."""
    config = configured("mixtral", "pp2 vpp2 dp2 ep2", tmp_path)
    ranks = run_world(4, communication, config)
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
    assert {axis for axis, _, _ in ranks[0]} >= {"ep", "dp", "world"}


def test_an_exchange_of_one_is_under_way_in_a_segment_of_the_other(tmp_path: Path) -> None:
    config = configured("mixtral", "dp2 ep2", tmp_path, model__num_layers=2, batch__global=4)

    def exchanges(run: Any) -> list[tuple[int, str]]:
        trained(run, Kind.B)
        events = [event for event in recorded_events(run.mesh.recorder) if event.step == 2 and event.axis == "ep"]
        return [(event.microbatch, event.label) for event in events]

    for found in run_threads(config, exchanges):
        pair = found[found.index((0, "layer 1 combine gradient")) :][:10]
        assert pair == [
            (0, "layer 1 combine gradient"),
            (1, "layer 0 experts counts"), (1, "layer 0 dispatch"),
            (0, "layer 1 dispatch gradient"),
            (1, "layer 0 combine"),
            (0, "layer 0 combine gradient"),
            (1, "layer 1 experts counts"), (1, "layer 1 dispatch"),
            (0, "layer 0 dispatch gradient"),
            (1, "layer 1 combine"),
        ]  # fmt: skip
