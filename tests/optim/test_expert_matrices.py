"""Stacks of experts' matrices: every rule updates each matrix as if it were a parameter, in every layout."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.comm.mesh import Mesh
from megascale.config.train import OptimizerConfig
from megascale.layout.owners import update_cost
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import Topology, topology_of
from megascale.ops.wgrad import torch_wgrad
from megascale.optim.sharded import ShardedOptimizer
from megascale.parallel.bucket import Bucket
from megascale.plan.account.stage_matrices import stage_places
from tests.marks import only_quick_rows
from tests.optim.layouts import SMALL, Trained, configuration, difference, state_after
from tests.thread_world import simulate

STACK = (3, 2, 6, 10)  # experts, gate and up, rows, columns
NAME = "layers.0.experts.gate_up.weight"
MATRICES = [f"{NAME}[{expert}, {half}]" for expert, half in itertools.product(range(3), range(2))]

OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"ns_dtype": "fp64"}, "soap": {"update_gap": 2}, "shampoo": {"update_gap": 2}, "conda": {"update_gap": 2},
    "galore": {"rank": 4, "update_gap": 2}, "galore_8bit": {"rank": 4, "update_gap": 2}, "ada_pm": {"rank": 4},
    "grad_norm_lorp": {"rank": 4, "update_gap": 2}, "poet": {"block": 4, "merge_every": 2},
    "spam": {"reset_every": 2}, "spam_sparse": {"reset_every": 2}, "compact": {"rank": 4},
}  # fmt: skip


def alone(parameters: list[ParamSpec], rule: str, idle: bool) -> dict[str, Tensor]:
    """Take four steps of a rule in one process, and return weights and state by name, flat. `idle`: the last expert has
    no gradient in the first two.
    """
    numel, one = math.prod(STACK), torch.ones((), dtype=torch.float64)
    values = torch.randn(5, numel, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values[1:3, numel * 2 // 3 :] *= 0 if idle else 1

    def fill(bucket: Bucket, target: Tensor, flat: Tensor) -> None:
        sizes = [slot.stop - slot.start for slot in bucket.layout.slots]
        for slot, part in zip(bucket.layout.slots, flat.split(sizes), strict=True):
            target[slot.start : slot.stop] = part

    def body(mesh: Mesh) -> dict[str, Tensor]:
        dtypes = (torch.float64, torch.float64)
        bucket = Bucket(parameters, mesh, 0, dtypes, torch.device("cpu"), (0, ""), torch_wgrad)
        fill(bucket, bucket.weights, values[0])
        config = OptimizerConfig(name=rule, options=OPTIONS.get(rule, {}), lr=1e-2, weight_decay=0.1)
        optimizer = ShardedOptimizer([bucket], mesh, config, {rule: OPTIMIZERS[rule].load()})
        for step in range(1, 5):
            fill(bucket, bucket.grad, values[step])
            clipping = optimizer.compute_clipping(0.04 * one, one, one)
            optimizer.compute_updates(clipping, 1e-2, step)
            optimizer.update_shard(0, clipping, 1e-2, step)
        tensors = optimizer.global_tensors().items()
        return {name: torch.cat([shard.data.reshape(-1) for shard in tensor.shards]) for name, tensor in tensors}

    return simulate(Topology(), body)[0]


@pytest.mark.parametrize("idle", [False, True], ids=["all with tokens", "one without"])
@pytest.mark.parametrize("rule", OPTIMIZERS.names())
def test_a_stack_is_its_matrices(rule: str, idle: bool) -> None:
    stack = alone([ParamSpec(NAME, (TensorSpec(NAME, STACK, {"ep": 0}),), reduce_axes=("edp",))], rule, idle)
    separate = alone([ParamSpec(name, (TensorSpec(name, STACK[-2:]),)) for name in MATRICES], rule, idle)
    assert all(values.double().isfinite().all() for values in stack.values())
    assert {name.partition(".")[0] for name in stack} == {name.partition(".")[0] for name in separate}
    for name, values in stack.items():
        state = name.partition(".")[0]
        expected = torch.cat([separate[f"{state}.{matrix}"] for matrix in MATRICES])
        assert torch.equal(values, expected), name


EXPERTS = SMALL | {"experts": 4, "experts_per_token": 2, "expert_ffn_size": 24}
MUON = {"name": "muon", "options": {"ns_dtype": "fp64"}}
LAMB = {"name": "lamb"}
MIXED = MUON | {
    "groups": [
        {"params": ["layers.0.experts.gate_up.weight"], "name": "soap", "options": {"update_gap": 2}},
        {"params": ["layers.0.experts.down.weight"], "name": "adafactor"},
        {"params": ["layers.1.experts.down.weight"], "name": "spam_sparse", "options": {"reset_every": 2}},
        {"params": ["*.router.weight"], "name": "adamw"},
    ]
}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 ep2 zero0": {"dp": 2, "ep": 2, "zero": 0},
    "dp4 ep2 zero1": {"dp": 4, "ep": 2},
    "dp4 ep2 zero2": {"dp": 4, "ep": 2, "zero": 2},
    "dp3 zero1": {"dp": 3},
    "cp2 dp2 ep2 zero1": {"cp": 2, "dp": 2, "ep": 2},
    "tp2 sp dp2 ep4": {"tp": 2, "sp": True, "dp": 2, "ep": 4},
    "tp2 sp dp2 ep2 zero0": {"tp": 2, "sp": True, "dp": 2, "ep": 2, "zero": 0},
    "pp2 tp2 sp dp2 ep2": {"pp": 2, "tp": 2, "sp": True, "dp": 2, "ep": 2},
}


def expert_config(folder: Path, optimizer: dict[str, Any], layout: str = "", **changes: Any) -> Any:
    parallel = {f"parallel__{key}": value for key, value in LAYOUTS.get(layout, {}).items()}
    return configuration(folder, optimizer, EXPERTS, **{"batch__global": 12} | parallel | changes)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("alone")
    rules = {"muon": MUON, "lamb": LAMB, "mixed": MIXED}
    return {name: state_after(expert_config(folder, optimizer)) for name, optimizer in rules.items()}


QUICK = (
    ("dp2 ep2 zero0", "muon"), ("dp4 ep2 zero1", "mixed"), ("dp4 ep2 zero2", "muon"), ("dp4 ep2 zero2", "lamb"),
    ("dp3 zero1", "muon"), ("cp2 dp2 ep2 zero1", "lamb"), ("tp2 sp dp2 ep4", "mixed"),
    ("tp2 sp dp2 ep2 zero0", "lamb"), ("tp2 sp dp2 ep2 zero0", "mixed"), ("pp2 tp2 sp dp2 ep2", "muon"),
)  # fmt: skip
"""Every rule with every axis, ZeRO stage and division of experts."""


@pytest.mark.parametrize(
    ("layout", "rule"), only_quick_rows(itertools.product(LAYOUTS, ["muon", "lamb", "mixed"]), *QUICK)
)
def test_every_layout_equals_one_process(layout: str, rule: str, expected: Any, tmp_path: Path) -> None:
    optimizer = {"muon": MUON, "lamb": LAMB, "mixed": MIXED}[rule]
    assert difference(state_after(expert_config(tmp_path, optimizer, layout)), expected[rule]) < 1e-12


def test_state_is_stacked_by_global_index(expected: Any) -> None:
    shapes = {name: tuple(values.shape) for name, values in expected["mixed"].items() if "experts" in name}
    assert shapes["momentum.layers.1.experts.gate_up.weight"] == (4, 2, 24, 16)
    assert shapes["left.layers.0.experts.gate_up.weight"] == (4, 2, 24, 24)
    assert shapes["row.layers.0.experts.down.weight"] == (4, 16)
    assert shapes["resets.layers.1.experts.down.weight"] == (4, 1)


def test_an_idle_expert_does_not_begin_anew_with_a_load(tmp_path: Path) -> None:
    """Its state of zero is that of a rule that has begun: SOAP moves no matrix in its first step."""
    config = expert_config(tmp_path, MIXED, "dp4 ep2 zero1")

    def body(mesh: Mesh) -> list[set[int]]:
        found = []
        for steps in (0, 1):
            trained = Trained(mesh, config, steps)
            (updates,) = [u for u in trained.optimizer.updates if hasattr(u, "buckets")]
            for bucket in updates.buckets.values():
                for number, state in bucket.state.items():
                    if bucket.places[number].name(mesh.topology, mesh.coord).endswith("[1]"):
                        [values.zero_() for values in state.values()]
            trained.optimizer.end_restore()
            found += [bucket._first for bucket in updates.buckets.values()]
        return found

    for first in simulate(topology_of(config.parallel), body):
        half = len(first) // 2
        assert all(first[:half]) and not any(first[half:])


@pytest.mark.parametrize("layout", ["dp4 ep2 zero1", "tp2 sp dp2 ep2 zero0", "tp2 sp dp2 ep4"])
def test_owners_share_the_work(layout: str, tmp_path: Path) -> None:
    """Of experts one by one, over edp; each matrix of the model once, or once on each replica."""
    config = expert_config(tmp_path, MUON, layout, model__num_layers=8)
    stage = stage_places(config.model, config.parallel, config.overlap, config.train, config.optimizer, 0)
    topology = topology_of(config.parallel)
    loads, owners = Counter[int](), Counter[str]()
    for rank in range(topology.world_size):
        coord = topology.coord(rank)
        for layout_of, places in zip(stage.layouts, stage.places, strict=True):
            index = topology.index_in_group(coord, *layout_of.reduce_axes)
            for place in places:
                if place.tp_owner in (None, coord.tp) and place.dp_owner in (None, index):
                    loads[rank] += update_cost(place.group, place.shape)
                    owners[place.name(topology, coord)] += 1
    assert max(loads.values()) < 1.1 * loads.total() / topology.world_size
    experts = {name: count for name, count in owners.items() if "experts" in name}
    assert len(experts) == 8 * 4 * 3
    assert set(experts.values()) == {1 if config.parallel.zero else topology.edp}
