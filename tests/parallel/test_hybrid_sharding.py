"""Hybrid sharding: inner ranks shard and outer ones have copies, and a run is that of one process, bit for bit the same
on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.core.errors import ReplicasDifferError
from megascale.layout.chunks import bucket_sizes
from megascale.layout.topology import Topology, topology_of
from megascale.plan.account.traffic import step_traffic
from megascale.train import replica_check
from megascale.train.replica_check import ReplicaCheck
from tests.optim.layouts import assembled
from tests.recorded_events import recorded_events
from tests.runs import GPT, LLAMA, config_of, curve_of, settings, traffic_of
from tests.thread_world import run_threads

MIXTRAL = LLAMA | {"experts": 4, "experts_per_token": 2, "expert_ffn_size": 16}
V = {"pp": 2, "vpp": 2, "schedule": "zb_v"}
ALL = {"zero": 3, "state_shard": "all"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dp4 zero1": (GPT, {"dp": 4, "zero": 1}, {}),
    "dp6 zero2, in threes": (LLAMA, {"dp": 6, "dp_shard": 3, "zero": 2}, {"batch__global": 12}),
    "dp4 zero3": (GPT, {"dp": 4, "zero": 3}, {}),
    "dp4 zero3, state over all": (GPT, {"dp": 4, **ALL}, {}),
    "dp6 zero3, state over all, no overlap": (
        LLAMA, {"dp": 6, **ALL}, {"batch__global": 12, "overlap__dp": False},
    ),
    "tied v dp4 zero3, state over all": (GPT, {"dp": 4, **V, **ALL}, {"model__dropout": 0.1}),
    "tied pp2 vpp2 dp4 zero1": (GPT, {"dp": 4, "pp": 2, "vpp": 2, "zero": 1}, {}),
    "pp2 zb_h1 dp4 zero2": (LLAMA, {"dp": 4, "pp": 2, "schedule": "zb_h1", "zero": 2}, {}),
    "tp2 sp dp4 zero2": (LLAMA, {"tp": 2, "sp": True, "dp": 4, "zero": 2}, {"model__qk_norm": "head"}),
    "tp2 sp dp4 zero3, state over all": (LLAMA, {"tp": 2, "sp": True, "dp": 4, **ALL}, {"model__qk_norm": "head"}),
    "cp2 dp2 zero3, alone along dp": (LLAMA, {"cp": 2, "dp": 2, "dp_shard": 1, "zero": 3}, {}),
    "cp2 dp4 zero3, state over all": (LLAMA, {"cp": 2, "dp": 4, **ALL}, {}),
    "dp4 ep2 zero1, experts without shards": (MIXTRAL, {"dp": 4, "ep": 2, "zero": 1}, {}),
    "dp8 in fours, ep2 zero2": (MIXTRAL, {"dp": 8, "dp_shard": 4, "ep": 2, "zero": 2}, {}),
    "dp4 ep2 zero3, state over all": (MIXTRAL, {"dp": 4, "ep": 2, **ALL}, {}),
    "tp2 sp dp4 ep2 zero3, state over all": (MIXTRAL, {"tp": 2, "sp": True, "dp": 4, "ep": 2, **ALL}, {}),
    "pp2 dp4 ep1 zero3, a dense stage": (MIXTRAL | {"dense_layers": 2}, {"pp": 2, "dp": 4, "zero": 3}, {}),
    "vocabulary pp2 dp4 zero2": (GPT, {"pp": 2, "vocab_pp": 1, "dp": 4, "zero": 2}, {}),
    "documents hybrid_dp zero1": (
        LLAMA,
        {"dp": 4, "hybrid_dp": True, "zero": 1, "data__max_tokens_per_rank": 8},
        {"data__attention_mask": "document", "data__document_length": 5},
    ),
    "lamb tp2 dp4 zero2": (GPT, {"tp": 2, "dp": 4, "zero": 2}, {"optimizer__name": "lamb"}),
    "lamb dp4 ep2 zero3, state over all": (MIXTRAL, {"dp": 4, "ep": 2, **ALL}, {"optimizer__name": "lamb"}),
    "muon tp2 dp4 zero1": (LLAMA, {"tp": 2, "dp": 4, "zero": 1}, {"optimizer__name": "muon"}),
    "muon dp4 ep2 zero3, state over all": (MIXTRAL, {"dp": 4, "ep": 2, **ALL}, {"optimizer__name": "muon"}),
    "noise scale, guard, averages dp4 zero2": (
        GPT,
        {"dp": 4, "zero": 2},
        {"train__noise_scale_every": 1, "optimizer__zclip": True, "train__weight_average": "ema"},
    ),
}  # fmt: skip
QUICK = (
    "dp6 zero2, in threes", "tied v dp4 zero3, state over all", "tp2 sp dp4 zero2", "cp2 dp2 zero3, alone along dp",
    "dp4 ep2 zero3, state over all", "muon tp2 dp4 zero1",
)  # fmt: skip
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]


def configuration(name: str, folder: Path, *, alone: bool = False, **changes: Any) -> Any:
    """Return the configuration of a case, of two inner ranks if it says nothing else; or of one process."""
    model, layout, keys = CASES[name]
    layout = {} if alone else {"dp_shard": 2} | layout
    layout = {key if "__" in key else f"parallel__{key}": value for key, value in layout.items()}
    return config_of(settings(model, folder, **{**layout, **keys, **changes}), folder)


def trained(run: Any) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Train; return losses and gradient norms, and this rank's shards of weights and state by global name."""
    curve = curve_of(run, 2)
    tensors = run.optimizer.global_tensors()
    return curve, {
        name: [(tensor.shape, shard.offset, shard.data) for shard in tensor.shards] for name, tensor in tensors.items()
    }


def outcome(config: Any) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Train in threads; all ranks agree, and copies are equal bit for bit."""
    ranks = run_threads(config, trained)
    assert all(curve == ranks[0][0] for curve, _ in ranks)
    return ranks[0][0], assembled([state for _, state in ranks])


def worst(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its largest element; of all but biases of keys, which have
    gradients of rounding alone.
    """
    assert ours.keys() == theirs.keys()
    compared = {name: of for name, of in theirs.items() if not name.endswith("k.bias")}
    return max(float((ours[n] - of).abs().max() / of.abs().max().clamp(min=1e-12)) for n, of in compared.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    """State as well: moments have the scale of gradients."""
    curve, state = outcome(configuration(name, tmp_path))
    expected, whole = outcome(configuration(name, tmp_path, alone=True))
    for ours, theirs in zip(curve, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10, abs=0)
    assert worst(state, whole) < 1e-9


@pytest.mark.parametrize(
    ("name", "masters"),
    [
        ("dp4 zero3", "full"),
        pytest.param("dp4 zero3", "bf16_compensated", marks=pytest.mark.slow),
        pytest.param("tied v dp4 zero3, state over all", "full", marks=pytest.mark.slow),
    ],
)
def test_who_shards_weights_and_state_changes_no_bit(name: str, masters: str, tmp_path: Path) -> None:
    """Without clipping, since the norm sums by shards."""
    keys = {"train__precision": "bf16", "optimizer__clip_norm": 0.0, "optimizer__master_weights": masters}

    def state(**changes: Any) -> dict[str, Tensor]:
        return outcome(configuration(name, tmp_path, **keys, **changes))[1]

    inner = {"parallel__state_shard": "inner"}
    expected = state(parallel__zero=2, overlap__bucket_bytes=1, **inner)
    for changes in (inner, {"parallel__state_shard": "all"}):
        found = state(**changes)
        assert all(torch.equal(found[tensor], values) for tensor, values in expected.items())


def test_inner_ranks_that_are_all_of_dp_are_the_layout_without_the_key(tmp_path: Path) -> None:
    """Storages and groups follow from the topology alone."""
    config = configuration("dp4 zero1", tmp_path, parallel__dp_shard=4)
    assert topology_of(config.parallel) == Topology(dp=4)


def sent_in_a_step(run: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Return calls and bytes of a step over parts of dp, from the event log."""
    curve_of(run, 1)
    return {
        (group, operation): sent
        for group, of_group in traffic_of(run, 1).items()
        for operation, sent in of_group.items()
        if "dp" in group
    }


SENT = {
    "dp4 zero1": True, "dp4 zero3, state over all": True, "dp4 ep2 zero3, state over all": False,
    "lamb dp4 ep2 zero3, state over all": False, "muon dp4 ep2 zero3, state over all": True,
    "dp4 ep2 zero1, experts without shards": False, "dp8 in fours, ep2 zero2": False,
    "tp2 sp dp4 ep2 zero3, state over all": False, "tied pp2 vpp2 dp4 zero1": False,
}  # fmt: skip
"""Cases, and whether they are quick."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if quick else pytest.mark.slow) for name, quick in SENT.items()]
)
def test_bytes_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    """Over inner ranks as without copies, and of a shard once over the outer ones."""
    config = configuration(name, tmp_path)
    ranks = run_threads(config, sent_in_a_step)
    for rank, sent in enumerate(ranks):
        planned = step_traffic(config, topology_of(config.parallel).coord(rank))
        assert sent == {kind: size for kind, size in planned.items() if "dp" in kind[0]}
    if name == "dp4 zero3, state over all":
        (units,) = bucket_sizes(config.model, config.parallel, config.overlap, config.train, 0)
        shards = len(units), 8 * sum(unit.numel for unit in units) // 2
        assert ranks[0]["dp.replicate", "reduce_scatter"] == ranks[0]["dp.replicate", "all_gather"] == shards


def checked(run: Any) -> bool:
    """Train, and check copies; then again without the sums over outer ranks. Return True if copies differ then."""
    curve_of(run, 1)
    ReplicaCheck().check(run)
    for bucket in run.buffers.buckets:
        bucket.storage.start_outer_reduction = lambda: None
    curve_of(run, 1)
    try:
        ReplicaCheck().check(run)
    except ReplicasDifferError:
        return True
    return False


def test_copies_without_their_sums_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unplugged: every group with copies goes its own way, and the check of copies says so."""
    monkeypatch.setattr(replica_check, "_describe", lambda run, copies: ("", []))  # needs processes
    assert all(run_threads(configuration("tp2 sp dp4 zero2", tmp_path), checked))


def order_of_sums(run: Any) -> list[str]:
    """List the reductions of a step, in the order in which this rank starts them."""
    curve_of(run, 1)
    kinds = ("reduce_scatter", "all_reduce")
    return [e.group for e in recorded_events(run.mesh.recorder) if e.name in kinds and e.group.startswith("dp.")]


@pytest.mark.parametrize(
    "name", ["dp4 zero1", "dp4 zero3", pytest.param("pp2 zb_h1 dp4 zero2", marks=pytest.mark.slow)]
)
def test_outer_sums_begin_under_the_last_backward(name: str, tmp_path: Path) -> None:
    """Those of a bucket once its successor's gradients have set out, and none before a bucket's last micro-batch."""
    keys = {} if name == "dp4 zero3" else {"overlap__bucket_bytes": 20_000}
    config = configuration(name, tmp_path, **keys)
    for groups in run_threads(config, order_of_sums):
        count = groups.count("dp.replicate")
        assert count > 2 and groups[-3:] == ["dp.shard", "dp.replicate", "dp.replicate"]
        assert groups[-2 * count :] == ["dp.shard", *["dp.shard", "dp.replicate"] * (count - 1), "dp.replicate"]
        assert "dp.replicate" not in groups[: -2 * count]
