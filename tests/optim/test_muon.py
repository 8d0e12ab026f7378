"""Muon: torch's, in one process; and the same steps in every layout, with its owners and their state."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.layout.owners import OwnedMatrix
from megascale.ops.optimizer import UpdateInput
from megascale.optim.matrix_exchange import MatrixExchange
from megascale.optim.matrix_updates import BucketMatrices
from megascale.optim.muon import muon, newton_schulz
from tests.memory import peak_bytes
from tests.optim.layouts import LAYOUT_CASES, LAYOUTS, SMALL, Trained, configuration, difference, state_after
from tests.thread_world import simulate

OPTIONS: dict[str, Any] = {
    "momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_dtype": "fp64", "adjust_lr": "match_rms_adamw",
    "per_head": False,
}  # fmt: skip
MUON = {"name": "muon", "options": {"ns_dtype": "fp64"}}


def gradient(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 2**-5), ("fp32", 1e-5)])
def test_torch_s_muon(
    dtype: str, tolerance: float, shape: tuple[int, int], nesterov: bool, adjust_lr: str, monkeypatch: Any
) -> None:
    """In bf16, torch's dtype, within the rounding of five steps' GEMMs; with torch's cast left out, as in fp32."""
    if dtype == "fp32":
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    weight = torch.nn.Parameter(gradient(shape, 0, torch.float32))
    theirs = torch.optim.Muon([weight], lr=0.1, weight_decay=0.5, nesterov=nesterov, adjust_lr_fn=adjust_lr)
    ours, state = weight.detach().clone(), {"momentum": torch.zeros(shape)}
    options = OPTIONS | {"ns_dtype": dtype, "nesterov": nesterov, "adjust_lr": adjust_lr}
    for step in range(1, 6):
        weight.grad = gradient(shape, step, torch.float32)
        theirs.step()
        direction, state = muon(UpdateInput(weight.grad, state, step, options))
        ours = ours * (1 - 0.1 * 0.5) - 0.1 * direction
    torch.testing.assert_close(state["momentum"], theirs.state[weight]["momentum_buffer"], rtol=1e-6, atol=1e-7)
    scale = float(direction.abs().max()) * 0.1
    assert float((ours - weight).abs().max()) < tolerance * scale


@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (32, 64)])
def test_singular_values_and_root_mean_square(shape: tuple[int, int]) -> None:
    orthogonal = newton_schulz(gradient((1, *shape), 1), 5)
    values = torch.linalg.svdvals(orthogonal[0])
    assert float(values.min()) > 0.3 and float(values.max()) < 1.3
    direction, _ = muon(
        UpdateInput(gradient(shape, 1), {"momentum": torch.zeros(shape, dtype=torch.float64)}, 1, OPTIONS)
    )
    assert float(direction.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_newton_schulz_steps_are_in_the_dtype_of_the_weights(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default; rounding to bf16 differs between layouts by a whole bit where fp32 differs by its last."""
    found = set[torch.dtype]()

    def noted(x: Tensor, steps: int) -> Tensor:
        found.add(x.dtype)
        return newton_schulz(x, steps)

    monkeypatch.setattr("megascale.optim.muon.newton_schulz", noted)
    state_after(configuration(tmp_path, {"name": "muon"}, train__precision=precision), 1)
    assert found == {{"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[precision]}


def test_per_head_orthogonalizes_every_head() -> None:
    grad, zero = gradient((12, 20), 2), torch.zeros(12, 20, dtype=torch.float64)
    whole, _ = muon(UpdateInput(grad, {"momentum": zero}, 1, OPTIONS | {"per_head": True}, head_dim=4))
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        alone, _ = muon(UpdateInput(grad[rows], {"momentum": zero[rows]}, 1, OPTIONS))
        torch.testing.assert_close(whole[rows], alone, rtol=1e-12, atol=0)
    together, _ = muon(UpdateInput(grad, {"momentum": zero}, 1, OPTIONS, head_dim=4))
    assert not torch.allclose(whole, together)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """Weights and state of one process by key-value heads."""
    folder = tmp_path_factory.mktemp("alone")
    return {heads: state_after(configuration(folder, MUON, model__num_kv_heads=heads)) for heads in (2, 4)}


@pytest.mark.parametrize("layout", LAYOUT_CASES)
def test_every_layout_equals_one_process(layout: str, alone: Any, tmp_path: Path) -> None:
    config = configuration(tmp_path, MUON, **LAYOUTS[layout])
    assert difference(state_after(config), alone[config.model.num_kv_heads]) < 1e-12


@pytest.mark.parametrize("layout", ["dp2 zero1", "tp2"])
def test_a_shard_alone_is_wrong(layout: str, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the other ranks' parts the update of a matrix is another: by a third of it and more."""
    start = MatrixExchange._start

    def left_out(exchange: MatrixExchange, group: Any, what: str) -> None:
        if what == "matrices":
            exchange._incoming = [
                part if source == group.index else torch.zeros_like(part)
                for source, part in enumerate(exchange._incoming)
            ]
            exchange._incoming[group.index].copy_(exchange._outgoing[group.index])
        else:
            start(exchange, group, what)

    config, before = configuration(tmp_path, MUON, **LAYOUTS[layout]), configuration(tmp_path, MUON)
    initial = state_after(before, steps=0)
    monkeypatch.setattr(MatrixExchange, "_start", left_out)
    wrong, right = state_after(config), alone[2]
    errors = {
        name: float((wrong[name] - right[name]).norm() / (right[name] - initial[name]).norm())
        for name in right
        if name.startswith("weights.layers") and "norm" not in name
    }
    assert max(errors.values()) > 0.3
    assert min(errors[name] for name in errors if layout == "tp2") > 0.1 if layout == "tp2" else True


def test_blocks_by_muon_and_the_rest_by_adamw(alone: Any, tmp_path: Path) -> None:
    adamw = state_after(configuration(tmp_path, {"name": "adamw"}))
    for name, values in alone[2].items():
        state, _, tensor = name.partition(".")
        matrix = tensor.startswith("layers") and "norm" not in tensor
        assert (state == "momentum") == (matrix and state != "weights") or state == "weights"
        if not matrix:
            assert torch.equal(values, adamw[name])
    assert {name for name in alone[2] if "attention.q" in name} == {
        f"{state}.layers.{layer}.attention.q.weight" for state in ("weights", "momentum") for layer in (0, 1)
    }


@pytest.mark.parametrize("nesterov", [True, False])
def test_an_update_takes_the_memory_of_two_matrices(nesterov: bool) -> None:
    """In bf16, with wide matrices: neither momentum nor gradient is held beside the steps."""
    grad, momentum = (gradient((64, 2048), seed, torch.float32) for seed in (1, 2))
    options = OPTIONS | {"ns_dtype": "bf16", "nesterov": nesterov}
    peak = peak_bytes(lambda: muon(UpdateInput(grad, {"momentum": momentum}, 2, options)))
    assert 2 * grad.nbytes <= peak < 2.2 * grad.nbytes


@pytest.mark.parametrize("layout", ["one process", "tp2", "dp2 zero1"])
def test_one_direction_is_whole_at_a_time(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, count = BucketMatrices._directions, Counter[str]()

    def watched(*args: Any) -> Iterator[tuple[int, Tensor]]:
        for number, direction in compute(*args):
            before = weakref.ref(direction)
            yield number, direction
            del direction
            count["held" if before() is not None else "freed"] += 1

    monkeypatch.setattr(BucketMatrices, "_directions", watched)
    state_after(configuration(tmp_path, MUON, **LAYOUTS.get(layout, {})), 1)
    assert count["freed"] >= 12 and not count["held"]


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    config = configuration(tmp_path, MUON, **LAYOUTS["tp2 sp dp2"])
    first, skipped = state_after(config, 1), state_after(config, 2, skipped=[2])
    assert difference(skipped, first) == 0


def owners(config: Any) -> list[OwnedMatrix]:
    """Return the places of the matrices of a run's first rank, after no step."""

    def body(mesh: Any) -> list[OwnedMatrix]:
        return [p for m in Trained(mesh, config, 0).optimizer.updates[0].buckets.values() for p in m.places]

    from megascale.layout.topology import topology_of

    return simulate(topology_of(config.parallel), body)[0]


def test_owners_share_the_work(tmp_path: Path) -> None:
    """The most loaded of eight ranks has little more than the mean of twelve equal matrices' work."""
    from megascale.layout.owners import update_cost

    model = SMALL | {"num_layers": 8, "num_kv_heads": 4}
    config = configuration(tmp_path, MUON, model, parallel__tp=2, parallel__dp=4)
    loads: dict[tuple[Any, Any], int] = {}
    for place in owners(config):
        key = (place.tp_owner, place.dp_owner)
        loads[key] = loads.get(key, 0) + update_cost(place.group, place.shape)
    assert len(loads) == 8
    assert max(loads.values()) < 1.1 * sum(loads.values()) / 8


def test_replicas_of_tp_and_zero0_are_owners(tmp_path: Path) -> None:
    places = owners(configuration(tmp_path, MUON, parallel__dp=2, parallel__zero=0, parallel__tp=2))
    assert all(place.dp_owner is None for place in places)
    assert {place.tp_owner for place in places} == {0, 1}
    gpt = {"position": "learned", "rotary_fraction": 1.0}
    group = [{"params": ["embedding.position.weight"], "name": "muon"}]
    config = configuration(tmp_path, MUON | {"groups": group}, SMALL | gpt, parallel__tp=2, parallel__dp=2)
    (position,) = [place for place in owners(config) if place.tensor.name == "embedding.position.weight"]
    assert position.tp_owner is None and position.dp_owner is not None
    model = configuration(tmp_path, MUON | {"groups": group}, SMALL | gpt)
    assert difference(state_after(config), state_after(model)) < 1e-12


def test_a_padded_embedding_by_muon(tmp_path: Path) -> None:
    """Vocabulary rows beyond the model's are padding, on the last tp rank."""
    optimizer = MUON | {"groups": [{"kinds": ["embedding", "head"], "name": "muon", "lr_mult": 0.5}]}
    config = configuration(tmp_path, optimizer, parallel__tp=2, parallel__dp=2)
    assert difference(state_after(config), state_after(configuration(tmp_path, optimizer))) < 1e-12
