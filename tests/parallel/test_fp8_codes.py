"""FP8 weights are gathered as codes: of as many bytes as planned, with scales that all ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.chunks import BucketSize
from megascale.layout.topology import topology_of
from megascale.parallel import fp8_codes
from megascale.plan.account.traffic import step_traffic
from tests.marks import only_quick
from tests.parallel.test_sharded_weights import BLOCKS, EXPERTS, FULL, POW2, TENSORS, fp8
from tests.runs import build_run, config_of, curve_of, settings, traffic_of
from tests.thread_world import run_threads
from tests.worlds import run_world

ALL = {"fp8__first_layers_bf16": 0, "fp8__last_layers_bf16": 0}
WORLDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensorwise dp2 tp2": (TENSORS, {"parallel__tp": 2, **fp8("tensorwise")}),
    "delayed dp2 tp2": (TENSORS, {"parallel__tp": 2, **fp8("delayed")}),
    "blockwise dp2": (BLOCKS, {**fp8("blockwise"), **ALL}),
    "blockwise dp2 ep2": (EXPERTS, {"parallel__ep": 2, **fp8("blockwise")}),
    "rowwise dp2 tp2": (TENSORS, {"parallel__tp": 2, **fp8("rowwise"), **FULL}),
    "rowwise dp2 tp2 pp2 keep": (TENSORS, {"parallel__tp": 2, "parallel__pp": 2, **fp8("rowwise")}),
    "rowwise pow2 dp2 tp2": (TENSORS, {"parallel__tp": 2, **fp8("rowwise"), **POW2, **FULL}),
    "rowwise pow2 dp2 tp2 sp": (TENSORS, {"parallel__tp": 2, "parallel__sp": True, **fp8("rowwise"), **POW2}),
    "rowwise pow2 dp2 ep2": (EXPERTS, {"parallel__ep": 2, **fp8("rowwise"), **POW2}),
    "blockwise pow2 dp2": (BLOCKS, {**fp8("blockwise"), **ALL, **POW2}),
}


def configured(folder: Path, model: dict[str, Any], **keys: Any) -> RunConfig:
    return config_of(settings(model, folder, **{"parallel__dp": 2, "parallel__zero": 3, **keys}), folder)


def sent(run: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Return calls and bytes of the second step, by group and operation: the first has no amax history."""
    curve_of(run, 2)
    found = {(group, kind): of for group, kinds in traffic_of(run, 2).items() for kind, of in kinds.items()}
    found.pop(("ep", "all_to_all"), None)  # by the loads of experts
    return found


@pytest.mark.parametrize("name", only_quick(WORLDS, "tensorwise dp2 tp2"))
def test_bytes_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    model, keys = WORLDS[name]
    config = configured(tmp_path, model, **keys)
    for rank, found in enumerate(run_threads(config, sent)):
        planned = step_traffic(config, topology_of(config.parallel).coord(rank))
        planned.pop(("ep", "all_to_all"), None)
        assert found == planned


def test_codes_have_half_the_bytes(tmp_path: Path) -> None:
    """Of an FP8 layer's 30,720 weights; 128 gains of norms are a sum over the ranks."""
    codes = configured(tmp_path, TENSORS, **fp8("tensorwise"), **ALL)
    wide = configured(tmp_path, TENSORS, batch__global=4, train__precision="bf16")
    (coded, _), (whole, _) = run_threads(codes, sent), run_threads(wide, sent)
    gathers = 4 * 2 * codes.num_microbatches  # of 4 layers, in forward and in backward
    calls, nbytes = coded["dp", "all_gather"]
    assert (calls, nbytes + gathers * (30_720 + 128)) == whole["dp", "all_gather"]
    amaxes = 4 * 16  # of 16 weights
    assert coded["dp", "all_reduce"] == (gathers + 1, gathers * 2 * 128 + amaxes)


# Codes that are kept for the step: zero = 1 and 2.

BY_MODULE = {"overlap__bucket_bytes": 1}  # a small model's layers are in buckets of their own, as a large model's are
FROZEN = {"train__freeze": ["layers.*.attention.*.weight", "layers.2.*"]}
KEPT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: each for name, each in WORLDS.items() if "zero" not in name},
    "static dp2, all layers, tied": (TENSORS | {"tie_embeddings": True}, {**fp8("static"), **ALL}),
    "mxfp8 dp4": (TENSORS, {"parallel__dp": 4, **fp8("mxfp8")}),
    "tensorwise dp2 pp2 vpp2, full": (TENSORS, {"parallel__pp": 2, "parallel__vpp": 2, **fp8("tensorwise"), **FULL}),
    "delayed dp2 cp2, muon": (TENSORS, {"parallel__cp": 2, **fp8("delayed"), "optimizer__name": "muon"}),
    "tensorwise dp4 in twos": (TENSORS, {"parallel__dp": 4, "parallel__dp_shard": 2, **fp8("tensorwise")}),
    "nvfp4 dp2": (TENSORS, fp8("nvfp4")),
    "tensorwise dp2 tp2, frozen": (TENSORS, {"parallel__tp": 2, **fp8("tensorwise"), **FROZEN}),
    "delayed dp2, frozen": (TENSORS, {**fp8("delayed"), **FROZEN}),
    "blockwise dp2 ep2, frozen": (EXPERTS, {"parallel__ep": 2, **fp8("blockwise"), **FROZEN}),
}
QUICK_KEPT = ("tensorwise dp2 tp2", "blockwise dp2 ep2", "rowwise pow2 dp2 tp2 sp", "tensorwise dp2 tp2, frozen")


def trained(run: Any) -> tuple[list[tuple[float, float]], int, int]:
    """Return the curve of two steps; the buckets gathered as codes, and their bytes of whole weights."""
    coded = [bucket for bucket in run.buffers.buckets if getattr(bucket.storage, "coded", 0)]
    assert all(len(bucket.weights) == bucket.layout.numel // bucket.storage.inner.size for bucket in coded)
    return curve_of(run, 2), len(coded), sum(bucket.sharded.gathered_bytes for bucket in coded)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("name", only_quick(KEPT, *QUICK_KEPT))
def test_codes_that_are_kept_change_no_bit(
    name: str, zero: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, keys = KEPT[name]
    config = configured(tmp_path, model, **BY_MODULE, **keys, parallel__zero=zero)
    ours = run_threads(config, trained)
    assert all((coded > 0) == config.fp8.facts["weight"].gathers_codes for _, coded, _ in ours)
    monkeypatch.setattr(BucketSize, "coded", lambda *_: 0)
    assert [curve for curve, *_ in run_threads(config, trained)] == [curve for curve, *_ in ours]


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("name", only_quick(KEPT, *QUICK_KEPT))
def test_bytes_of_kept_codes_are_those_of_the_formula(name: str, zero: int, tmp_path: Path) -> None:
    model, keys = KEPT[name]
    config = configured(tmp_path, model, **BY_MODULE, **keys, parallel__zero=zero)
    for rank, found in enumerate(run_threads(config, sent)):
        planned = step_traffic(config, topology_of(config.parallel).coord(rank))
        planned.pop(("ep", "all_to_all"), None)
        assert found == planned


@pytest.mark.parametrize("zero", only_quick([1, 2], 1))
def test_kept_codes_halve_the_bytes_of_weights(zero: int, tmp_path: Path) -> None:
    """As with zero = 3, in one gather a step, and one reduction of all amaxes."""
    keys = {**BY_MODULE, "parallel__zero": zero}
    codes = configured(tmp_path, TENSORS, **fp8("tensorwise"), **ALL, **keys)
    wide = configured(tmp_path, TENSORS, batch__global=4, train__precision="bf16", **keys)
    (coded, _), (whole, _) = run_threads(codes, sent), run_threads(wide, sent)
    calls, nbytes = coded["dp", "all_gather"]
    assert (calls, nbytes + 4 * (30_720 + 128)) == whole["dp", "all_gather"]
    assert coded["dp", "all_reduce"] == (4 + 1, 4 * 2 * 128 + 4 * 16)


def test_a_bucket_with_other_modules_is_gathered_whole(tmp_path: Path) -> None:
    config = configured(tmp_path, TENSORS, **fp8("tensorwise"), **ALL, parallel__zero=1)
    (found, _) = run_threads(config, trained)
    assert found[1] == 0


def in_all_uses(run: Any) -> tuple[Any, ...]:
    """Train, evaluate the weights and their average, and train on: all losses, and the weights at the end."""
    from megascale.train.evaluate import evaluate
    from megascale.train.replica_check import ReplicaCheck

    curves = curve_of(run, 1)
    run.average.update(run.progress.step)
    curves += curve_of(run, 1)
    losses = [evaluate(run, 1)]
    with run.average.in_place_of_weights(run.buffers):
        losses.append(evaluate(run, 1))
    losses.append(evaluate(run, 1))
    ReplicaCheck().check(run)
    weights = [tensor.clone() for tensor in run.optimizer.flat_tensors()]
    return curves + curve_of(run, 1), losses, [each.sum().item() for each in weights]


def test_evaluation_averages_and_checks_of_replicas_use_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**fp8("tensorwise"), **BY_MODULE, "train__weight_average": "ema", "train__eval_every": 2}
    config = configured(tmp_path, TENSORS, **keys, parallel__zero=1, parallel__tp=2)
    ours = run_threads(config, in_all_uses)
    assert ours[0][1][0] != ours[0][1][1] and ours[0][1][0] == ours[0][1][2]
    monkeypatch.setattr(BucketSize, "coded", lambda *_: 0)
    assert run_threads(config, in_all_uses) == ours


def loaded(run: Any) -> tuple[Any, ...]:
    """Train, have other weights as after a load, and train on: the curve, and statistics of casts at the end."""
    from megascale.train.resume import copy_masters_and_gather

    curves = curve_of(run, 1)
    for shard in run.optimizer.shards:
        shard.master.mul_(0.5)
    copy_masters_and_gather(run)
    return curves + curve_of(run, 2), run.fp8_state.take_cast_stats()


@pytest.mark.parametrize("zero", only_quick([1, 3], 1))
def test_codes_of_frozen_weights_are_made_again_after_a_load(
    zero: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their statistics are those of every step."""
    keys = {**fp8("tensorwise"), **FROZEN, "parallel__zero": zero} | (BY_MODULE if zero == 1 else {})
    config = configured(tmp_path, TENSORS, **keys)
    curves, found = run_threads(config, loaded)[0]
    monkeypatch.setattr(BucketSize, "coded", lambda *_: 0)
    expected, stats = run_threads(config, loaded)[0]
    assert curves == expected and len(stats) == len(found) > 0
    for name in stats:
        assert vars(found[name]) == pytest.approx(vars(stats[name]), rel=1e-6, abs=0), name


def curve(rank: Rank, config: RunConfig) -> list[tuple[float, float]]:
    return curve_of(build_run(rank, config), 2)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_processes_have_the_bits_of_zero_2(recipe: str, tmp_path: Path) -> None:
    runs = [
        configured(tmp_path, TENSORS, **fp8(recipe), parallel__zero=zero, **more)
        for zero, more in ((2, {"overlap__bucket_bytes": 1}), (3, {}))
    ]
    first, second = (run_world(2, curve, config) for config in runs)
    assert first == second


@pytest.mark.parametrize("zero", only_quick([1, 3], 3))
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("blockwise", marks=pytest.mark.slow)])
def test_scales_that_ranks_do_not_share_change_the_bits(
    recipe: str, zero: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unplugged: without the maximum over ranks a rank casts its shard by its own amax."""
    keys = {**fp8(recipe), "parallel__zero": zero} | (BY_MODULE if zero == 1 else {})
    config = configured(tmp_path, BLOCKS if recipe == "blockwise" else TENSORS, **keys)
    expected = run_threads(config, lambda run: curve_of(run, 2))
    monkeypatch.setattr(fp8_codes, "all_reduce", lambda *_, **__: None)
    assert run_threads(config, lambda run: curve_of(run, 2)) != expected


def statistics(run: Any) -> Any:
    curve_of(run, 1)
    return run.fp8_state.take_cast_stats()


@pytest.mark.parametrize("recipe", only_quick(["tensorwise", "rowwise", "blockwise"], "tensorwise"))
def test_statistics_of_casts_are_those_of_zero_2(recipe: str, tmp_path: Path) -> None:
    """But for the order of sums."""
    model = BLOCKS if recipe == "blockwise" else TENSORS
    configs = [configured(tmp_path, model, **fp8(recipe), parallel__zero=zero) for zero in (2, 3)]
    (two, _), (three, _) = (run_threads(config, statistics) for config in configs)
    assert two.keys() == three.keys() and "layers.1.mlp.down.weight" in two
    assert [*map(vars, two.values())] == [pytest.approx(vars(stats), rel=1e-6, abs=0) for stats in three.values()]
