"""The outer optimizer: DiLoCo and SparseLoCo by their definitions, in every layout, and in checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.config.sites import SitesConfig
from megascale.optim.outer_optimizer import OUTER, OUTER_MOMENTUM, OUTER_RESIDUAL, OuterOptimizer
from megascale.train.resume import copy_masters_and_gather
from megascale.train.step import train_step
from tests.marks import only_quick_rows
from tests.optim.layouts import LAYOUT_CASES, LAYOUTS, SMALL, configuration
from tests.thread_world import run_threads

SITES = {"sites__count": 2, "sites__address": "nowhere:1", "sites__every": 2}


def trained(run: Any, steps: int = 2) -> None:
    for _ in range(steps):
        train_step(run, run.train_loader.batch(run.progress.samples))


def whole(results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Put the shards of all ranks together."""
    tensors: dict[str, Tensor] = {}
    for found in results:
        for name, (shape, shards) in found.items():
            tensor = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            for offset, data in shards:
                tensor[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return tensors


def shards_of(stateful: Any) -> dict[str, Any]:
    tensors = stateful.global_tensors()
    return {
        name: (tensor.shape, [(shard.offset, shard.data.clone()) for shard in tensor.shards])
        for name, tensor in tensors.items()
    }


def two_outer_steps(run: Any) -> dict[str, Any]:
    """Train with two outer steps of this site's own pseudo-gradient, and return the weights and the outer state."""
    outer = run.outer
    outer.begin()
    for _ in range(2):
        trained(run)
        run.buffers.finish_param_gather()
        own = outer.pseudo_gradient([*range(run.config.sites.fragments)])
        outer.step(own, [own.payload, own.payload], contributed=True)
        copy_masters_and_gather(run)
    trained(run, 1)
    run.buffers.finish_param_gather()
    run.pipeline.finish_sends()
    return shards_of(run.optimizer) | shards_of(outer)


@pytest.mark.parametrize("layout", [*LAYOUT_CASES, "dp2 zero3"])
def test_no_layout_changes_outer_steps(layout: str, tmp_path: Path) -> None:
    keys = LAYOUTS.get(layout, {"parallel__dp": 2, "parallel__zero": 3})
    batch = {"batch__global": keys.get("batch__global", 4)}
    config, alone = (
        configuration(tmp_path / name, {"name": "adamw"}, SMALL, **{**batch, **given, **SITES})
        for name, given in (("layout", keys), ("alone", {key: v for key, v in keys.items() if "model" in key}))
    )
    found, expected = (whole(run_threads(each, two_outer_steps)) for each in (config, alone))
    assert found.keys() == expected.keys() and any(name.startswith(f"{OUTER_MOMENTUM}.") for name in found)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("layout", "share"),
    only_quick_rows(
        itertools.product(["tp2 zero0 dp2", "tp2 sp dp2", "pp2 tp2 dp2"], [0.1, 1.0]),
        ("tp2 zero0 dp2", 0.1), ("tp2 sp dp2", 1.0), ("pp2 tp2 dp2", 0.1),
    ),
)  # fmt: skip
def test_copies_of_a_parameter_stay_equal_in_compressed_steps(layout: str, share: float, tmp_path: Path) -> None:
    """Norms on the ranks of tp, a tied embedding on both ends of the pipeline, replicas of zero 0."""
    keys = {
        **LAYOUTS[layout],
        **SITES,
        "batch__global": 4,
        "model__tie_embeddings": True,
        "sites__top_k": share,
        "sites__bits": 2,
    }
    seen: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Tensor] = {}
    for tensors in run_threads(configuration(tmp_path, {"name": "adamw"}, SMALL, **keys), all_weights):
        for name, offset, data in tensors:
            key = name, offset, tuple(data.shape)
            assert torch.equal(seen.setdefault(key, data), data), key


def all_weights(run: Any) -> list[tuple[str, tuple[int, ...], Tensor]]:
    """Return what this rank computes with: the gathered parameters, each with this rank's place along tp."""
    two_outer_steps(run)
    found = []
    for bucket in run.buffers.buckets:
        for parameter, spec in bucket.shards():
            sharded = any(part.local_shape(run.mesh.topology) != part.shape for part in spec.parts)
            found.append((spec.name, (run.mesh.coord.tp if sharded else 0,), parameter.detach().clone()))
    return found


def outer_of(settings: SitesConfig, run: Any) -> OuterOptimizer:
    outer = OuterOptimizer(settings, run.optimizer.shards, run.config.model.total_layers, run.mesh)
    outer.begin()
    return outer


def alone(tmp_path: Path, function: Any) -> Any:
    (result,) = run_threads(configuration(tmp_path, {"name": "adamw"}), function)
    return result


def flat(outer: OuterOptimizer, name: str) -> Tensor:
    return torch.cat([shard.state[name] for shard in outer.shards])


def masters(outer: OuterOptimizer) -> Tensor:
    return torch.cat([shard.master for shard in outer.shards]).clone()


def test_nesterov_is_torchs(tmp_path: Path) -> None:
    def compare(run: Any) -> None:
        outer = outer_of(SitesConfig(count=2), run)
        weights = torch.nn.Parameter(masters(outer))
        theirs = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)
        for _ in range(4):
            trained(run)
            weights.grad = weights.detach() - masters(outer)
            own = outer.pseudo_gradient([0])
            outer.step(own, [own.payload], contributed=True)
            theirs.step()
            torch.testing.assert_close(masters(outer), weights.detach(), rtol=0, atol=1e-14)

    alone(tmp_path, compare)


def test_all_elements_in_full_are_diloco_bit_for_bit(tmp_path: Path) -> None:
    def curve(run: Any, **keys: Any) -> Tensor:
        outer = outer_of(SitesConfig(count=2, lr=0.8, momentum=0.5, **keys), run)
        for _ in range(3):
            trained(run)
            own = outer.pseudo_gradient([0])
            outer.step(own, [own.payload], contributed=True)
        return masters(outer)

    dense, listed = (alone(tmp_path / name, lambda run, k=keys: curve(run, **k)) for name, keys in (
        ("dense", {}), ("listed", {"top_k": 1.0, "bits": 32, "error_decay": 0.5})))  # fmt: skip
    assert torch.equal(dense, listed)


@pytest.mark.parametrize(("share", "bits"), [(0.05, 32), (0.05, 2), (1.0, 8)])
def test_what_is_sent_and_what_is_kept_are_all_there_is(share: float, bits: int, tmp_path: Path) -> None:
    """Sent + residual = pseudo-gradient + decay x old residual, and the weights move by the mean of what was sent."""

    def check(run: Any) -> None:
        settings = SitesConfig(count=2, top_k=share, bits=bits, momentum=0.0, lr=1.0, error_decay=0.9)
        outer = outer_of(settings, run)
        for _ in range(3):
            trained(run)
            before, old = flat(outer, OUTER).clone(), flat(outer, OUTER_RESIDUAL).clone()
            gradient = before - masters(outer)
            own = outer.pseudo_gradient([0])
            outer.step(own, [own.payload], contributed=True)
            sent = before - masters(outer)
            assert sent.any() and not torch.equal(sent, gradient)
            residual = flat(outer, OUTER_RESIDUAL)
            torch.testing.assert_close(sent + residual, gradient + 0.9 * old, rtol=0, atol=1e-13)

    alone(tmp_path, check)


def test_fragments_are_all_weights_once(tmp_path: Path) -> None:
    def check(run: Any) -> None:
        settings = SitesConfig(count=2, fragments=2, every=4)
        outer, whole = outer_of(settings, run), outer_of(SitesConfig(count=2), run)
        trained(run)
        parts = [outer.pseudo_gradient([fragment]) for fragment in range(2)]
        assert all(part.total.any() for part in parts)
        assert sum(len(part.total) for part in parts) == len(whole.pseudo_gradient([0]).total)
        before = masters(outer)
        outer.step(parts[0], [parts[0].payload], contributed=True)
        moved = masters(outer) != before
        assert moved.any() and not moved.all()

    alone(tmp_path, check)


def test_steps_that_were_trained_meanwhile_stay(tmp_path: Path) -> None:
    def check(run: Any) -> None:
        outer = outer_of(SitesConfig(count=2), run)
        trained(run)
        own, then = outer.pseudo_gradient([0]), masters(outer)
        trained(run)
        now = masters(outer)
        outer.step(own, [own.payload], contributed=True)
        torch.testing.assert_close(masters(outer), flat(outer, OUTER) + now - then, rtol=0, atol=1e-13)

    alone(tmp_path, check)


def test_a_site_takes_over_the_state_of_another(tmp_path: Path) -> None:
    def state(run: Any) -> tuple[Tensor, Tensor]:
        outer = outer_of(SitesConfig(count=2), run)
        trained(run)
        own = outer.pseudo_gradient([0])
        outer.step(own, [own.payload], contributed=True)
        return outer.taken_over(), flat(outer, OUTER_MOMENTUM)

    sent, momentum = alone(tmp_path / "one", state)

    def check(run: Any) -> None:
        outer = outer_of(SitesConfig(count=2), run)
        trained(run, 1)
        outer.take_over(sent)
        assert torch.equal(flat(outer, OUTER), masters(outer)) and torch.equal(outer.taken_over(), sent)
        assert torch.equal(flat(outer, OUTER_MOMENTUM), momentum)

    alone(tmp_path / "other", check)
