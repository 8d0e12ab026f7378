"""State in host memory: training is that with state on the device bit for bit, at any stride and in any layout, copies
are waited for, and state is saved and loaded as without it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.config.run import RunConfig
from megascale.core.errors import DivergenceError
from megascale.core.rank import Rank
from megascale.device import Device, PlainBuffers, Wait
from megascale.layout import buckets
from megascale.optim.host_updates import HostUpdates
from megascale.plan.account.state_bytes import host_state_bytes
from megascale.train.resume import load_initial_state
from tests.marks import only_quick, only_quick_rows
from tests.optim.layouts import SMALL, assembled, configuration
from tests.parallel.test_fp8_codes import BY_MODULE
from tests.parallel.test_sharded_weights import TENSORS, fp8
from tests.runs import GPT, build_run, curve_of
from tests.thread_world import run_threads
from tests.worlds import run_world

STEPS = 3

GROUPS = {
    "lr": 0.01,
    "clip_norm": 0.1,
    "groups": [
        {"params": ["layers.*.attention.[qk].weight"], "lr_mult": 0.5, "name": "lion"},
        {"kinds": ["embedding"], "weight_decay": 0.0, "lr_mult": 2.0},
    ],
}
"""Two rules, whose states are different, and other rates in one bucket, with clipping."""

SIZE = 192
"""Elements of a sub-group, aligned as parameters are."""

FROZEN = {"train__freeze": ["embedding.*", "layers.0.*"]}

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp2 zero0": {"parallel__dp": 2, "parallel__zero": 0},
    "dp2 zero1 tp2": {"parallel__dp": 2, "parallel__tp": 2, "parallel__sp": True},
    "pp2 vpp2 dp2 zero2": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2},
    "dp2 zero3": {"parallel__dp": 2, "parallel__zero": 3},
    "dp4 in twos": {"parallel__dp": 4, "parallel__dp_shard": 2},
}


@pytest.fixture(autouse=True)
def small_sub_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SUB_GROUP", SIZE)


def of(folder: Path, precision: str = "fp32", stride: int | None = None, **keys: Any) -> RunConfig:
    """Return a configuration; without a stride state is on the device."""
    optimizer = keys.pop("optimizer", GROUPS)
    if stride is not None:
        optimizer = {**optimizer, "offload": "host", "offload_stride": stride}
    model = keys.pop("model", SMALL)
    return configuration(folder, optimizer, model, **{"train__precision": precision, **keys})


def outcome(run: Any, steps: int = STEPS) -> tuple[Any, dict[str, Any], list[Tensor]]:
    """Train; return the curve, state by global name, and this rank's weights."""
    curve = curve_of(run, steps)
    named = run.optimizer.global_tensors().items()
    state = {
        name: [(tensor.shape, shard.offset, shard.data.clone()) for shard in tensor.shards] for name, tensor in named
    }
    return curve, state, [bucket.weights.clone() for bucket in run.buffers.buckets]


def check_equal(expected: list[Any], found: list[Any]) -> None:
    """Compare curves, weights and state of all ranks, bit for bit."""
    for (curve, _, weights), (other_curve, _, other_weights) in zip(expected, found, strict=True):
        assert curve == other_curve
        assert all(map(torch.equal, weights, other_weights))
    state, other_state = assembled([rank[1] for rank in expected]), assembled([rank[1] for rank in found])
    assert state.keys() == other_state.keys()
    assert all(torch.equal(values, other_state[name]) for name, values in state.items())


@pytest.mark.parametrize("layout", only_quick(list(LAYOUTS), "pp2 vpp2 dp2 zero2"))
@pytest.mark.parametrize("precision", only_quick(["fp64", "fp32", "bf16"], "bf16"))
def test_training_is_bit_equal_at_any_stride(layout: str, precision: str, tmp_path: Path) -> None:
    """Of two rules in one bucket, with rates of their own and clipping; the number of sub-groups is not a multiple."""
    expected = run_threads(of(tmp_path, precision, **LAYOUTS[layout]), outcome)
    for stride in (0, 1, 3):  # all on the host, all on the device, some on each
        check_equal(expected, run_threads(of(tmp_path, precision, stride, **LAYOUTS[layout]), outcome))


@pytest.mark.parametrize(
    ("recipe", "zero"),
    only_quick_rows([("tensorwise", 0), ("delayed", 1), ("rowwise", 2), ("tensorwise", 3)], ("delayed", 1)),
)
def test_codes_are_cast_from_the_rounded_weights(recipe: str, zero: int, tmp_path: Path) -> None:
    """Also where ranks have nothing but their shard of the weights, and the codes of all."""
    keys = {"model": TENSORS, "parallel__dp": 2, "parallel__zero": zero, **fp8(recipe)}
    keys |= BY_MODULE if zero < 3 else {}
    expected = run_threads(of(tmp_path, **keys), outcome)
    for stride in (0, 2):
        check_equal(expected, run_threads(of(tmp_path, stride=stride, **keys), outcome))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_parameters_have_no_sub_groups(precision: str, tmp_path: Path) -> None:
    keys = LAYOUTS["dp2 zero3"] | FROZEN
    expected = run_threads(of(tmp_path, precision, **keys), outcome)
    for stride in (0, 2):
        check_equal(expected, run_threads(of(tmp_path, precision, stride, **keys), outcome))


def test_sub_groups_are_updated_where_the_stride_says(tmp_path: Path) -> None:
    """Both ends of a pipeline have the same numbers for a tied embedding, wherever it is among their buckets."""

    def places(run: Any) -> list[tuple[bool, list[bool]]]:
        (updates,) = run.optimizer.updates
        assert isinstance(updates, HostUpdates)
        return [
            (shard.bucket.tied, [on_device for _, on_device in groups])
            for shard, groups in zip(run.optimizer.shards, updates.sub_groups, strict=True)
        ]

    ranks = run_threads(of(tmp_path, stride=3, model=GPT, optimizer={"lr": 0.01}, parallel__pp=2), places)
    for rank in ranks:
        untied = [place for tied, places in rank if not tied for place in places]
        assert untied == [number % 3 == 2 for number in range(len(untied))] and len(untied) > 10
    first, last = ([places for tied, places in rank if tied] for rank in ranks)
    assert first == last and len(first[0]) > 10


class LateBuffers(PlainBuffers):
    """Host memory whose copies happen at the wait, and not before, with NaN in their place until then. `allocated`: its
    bytes; `missing`: a direction whose waits do nothing.
    """

    allocated, missing = 0, ""

    def allocate(self, nbytes: int) -> Tensor:
        self.allocated += nbytes
        return super().allocate(nbytes).fill_(255)

    def read(self, x: Tensor, host: Tensor) -> Wait:
        return self._late("read", lambda: PlainBuffers.save(self, x, host)())

    def load(self, host: Tensor) -> tuple[Tensor, Wait]:
        x = torch.full_like(host, torch.nan)
        return x, self._late("load", lambda: x.copy_(host))

    def _late(self, name: str, copy: Any) -> Wait:
        return (lambda: None) if name == self.missing else copy


@pytest.mark.parametrize(("stride", "keys"), [(0, {}), (1, {}), (2, {}), (2, FROZEN)])
def test_every_copy_is_waited_for(
    stride: int, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And host memory has the bytes of the formula, allocated before the first step."""
    made, expected = list[LateBuffers](), run_threads(of(tmp_path, **keys), outcome)
    config = of(tmp_path, stride=stride, **keys)
    monkeypatch.setattr(Device, "host_buffers", lambda device: made.append(LateBuffers()) or made[-1])
    check_equal(expected, run_threads(config, outcome))
    assert made[-1].allocated == host_state_bytes(config)
    for missing in ("read", "load"):
        monkeypatch.setattr(LateBuffers, "missing", missing)
        with pytest.raises((DivergenceError, AssertionError)):
            check_equal(expected, run_threads(config, outcome))


def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    def unchanged(run: Any) -> bool:
        curve_of(run, 1)
        before = [tensor.clone() for tensor in run.optimizer.flat_tensors()]
        one = torch.ones((), dtype=torch.float64)
        clipping = run.optimizer.compute_clipping(one * math.nan, one, one)
        for bucket in run.buffers.buckets:
            bucket.grad.fill_(math.nan)
        run.optimizer.compute_updates(clipping, 0.1, 2)
        for index in range(len(run.buffers.buckets)):
            run.optimizer.update_shard(index, clipping, 0.1, 2)
        return all(map(torch.equal, before, run.optimizer.flat_tensors()))

    assert run_threads(of(tmp_path, stride=2), unchanged) == [True]


def no_weights(folder: Path) -> Any:
    raise AssertionError(f"{folder} is no folder of another project's weights")


def save(rank: Rank, config: RunConfig) -> list[Any]:
    """Train and save; return the curve of further steps."""
    run = build_run(rank, config)
    curve_of(run, 2)
    run.checkpoints.save(run.progress)
    return curve_of(run, 2)


def resume(rank: Rank, config: RunConfig) -> list[Any]:
    run = build_run(rank, config)
    load_initial_state(run, no_weights)
    return curve_of(run, 2)


@pytest.mark.parametrize(("saved", "loaded"), only_quick_rows([(None, 2), (2, None), (0, 3)], (2, None)))
def test_checkpoints_are_those_of_state_on_the_device(saved: int | None, loaded: int | None, tmp_path: Path) -> None:
    """Also of another layout, in which replicas load shares of a shard and exchange them."""
    curve = run_world(1, save, of(tmp_path, "fp64", saved, checkpoint__every=100))[0]
    assert run_world(1, resume, of(tmp_path, "fp64", loaded, checkpoint__every=100))[0] == curve
    other = of(tmp_path, "fp64", 2, checkpoint__every=100, parallel__dp=2, parallel__zero=0)
    for (loss, norm), (expected, expected_norm) in zip(run_world(2, resume, other)[0], curve, strict=True):
        assert loss == pytest.approx(expected, rel=1e-10) and norm == pytest.approx(expected_norm, rel=1e-10)
