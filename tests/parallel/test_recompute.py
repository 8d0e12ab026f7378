"""What is computed again is the same to the bit, and costs the collectives that the formulas say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.model import mlp, parts
from megascale.parallel.eight_bit import Lost
from megascale.parallel.recompute import formed_again, recomputed
from tests.marks import only_quick
from tests.parallel.test_overlap import Outcome, outcome
from tests.runs import FAMILIES, GPT, LLAMA, build_run, builds, config_of, send_messages, settings, traffic_of
from tests.worlds import run_world

EACH = ["attention", "norm", "activation"]
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "full, one chunk": {"recompute": "full", "recompute_chunks": [0]},
    **{op: {"recompute": "selective", "recompute_ops": [op]} for op in EACH},
    "all": {"recompute": "selective", "recompute_ops": EACH},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"parallel__tp": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "pp2 gpipe": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "pp2 vpp2 dp2 zero2": {
        "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2, "batch__global": 8,
    },
    "tp2 sp pp2 vpp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
}  # fmt: skip
CASES = [
    {"model": GPT, "model__block": "serial", "model__dropout": 0.1, "train__precision": "fp32"},
    {"model": LLAMA, "model__block": "parallel", "model__dropout": 0.1, "train__precision": "fp32"},
    {"model": LLAMA, "model__block": "serial", "model__dropout": 0.0, "train__precision": "fp64"},
    {"model": GPT, "model__block": "parallel", "model__dropout": 0.0, "train__precision": "bf16"},
    {"model": LLAMA, "model__block": "serial", "model__window": [5, 0], "train__precision": "fp32"},
]
EIGHT_BIT = LLAMA | {"hidden_size": 256, "ffn_size": 512, "seq_length": 128, "num_layers": 3}


def configurations(folder: Path, **layout: Any) -> list[RunConfig]:
    """Each case with each setting."""
    found = []
    for case in CASES:
        for setting in SETTINGS.values():
            more = {name: value for name, value in case.items() if name != "model"} | layout
            more |= {f"train__{key}": value for key, value in setting.items()}
            layers = 4 if "parallel__vpp" in layout else 2
            more = {"batch__micro": 2, "batch__global": 4, "model__num_layers": layers} | more
            found.append(config_of(settings(case["model"], folder, **more), folder))
    return found


def trained(rank: Rank, configs: list[RunConfig]) -> list[Outcome]:
    """What becomes of each, whose tp groups communicate by messages, in small pieces."""
    from megascale.parallel import overlap

    overlap.PIECE_BYTES = 2000
    found = []
    for run in builds(rank, configs):
        if not found:
            send_messages(run.mesh.tp)
        found.append(outcome(run, 2))
    return found


@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "tp2 sp"))
def test_every_setting_gives_the_same_bits(layout: str, tmp_path: Path) -> None:
    configs = configurations(tmp_path, **LAYOUTS[layout])
    for outcomes in run_world(configs[0].world, trained, configs):
        for index in range(0, len(configs), len(SETTINGS)):
            curve, weights = outcomes[index]
            for name, (other, theirs) in zip(SETTINGS, outcomes[index:], strict=False):
                assert other == curve, (CASES[index // len(SETTINGS)], name)
                assert np.array_equal(theirs, weights)


def eight_bit_configurations(folder: Path, **more: Any) -> list[RunConfig]:
    """Each setting with one layer of three in 8 bits."""
    more = {"train__precision": "fp8", "batch__global": 2, "model__dropout": 0.1} | more
    trees = [
        settings(EIGHT_BIT, folder, **more, **{f"train__{key}": value for key, value in setting.items()})
        for setting in SETTINGS.values()
    ]
    return [config_of(tree, folder) for tree in trees]


IN_FP8 = [
    *((recipe, {"model__block": "serial"}) for recipe in RECIPES.names()),
    ("tensorwise", {"model__block": "parallel", "parallel__tp": 2, "parallel__sp": True}),
    ("rowwise", {"model__block": "parallel", "parallel__tp": 2, "parallel__sp": True}),
]


@pytest.mark.parametrize("case", only_quick(IN_FP8, IN_FP8[0]), ids=str)
def test_every_setting_gives_the_same_bits_in_fp8(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    recipe, layout = case
    configs = eight_bit_configurations(tmp_path, fp8__recipe=recipe, **layout)
    for outcomes in run_world(configs[0].world, trained, configs):
        curve, weights = outcomes[0]
        for name, (other, theirs) in zip(SETTINGS, outcomes, strict=True):
            assert other == curve, name
            assert np.array_equal(theirs, weights)


def test_what_casts_lose_is_the_same_when_they_are_done_again(tmp_path: Path) -> None:
    configs = eight_bit_configurations(tmp_path, fp8__recipe="mu_unit")
    (found,) = run_world(1, losses_of_casts, configs)
    assert found[0] and all(lost == found[0] for lost in found)


def losses_of_casts(rank: Rank, configs: list[RunConfig]) -> list[dict[str, Lost]]:
    found = []
    for run in builds(rank, configs):
        run.gradients.clear()
        run.scaling.begin(watch=True)
        run.pipeline.run(run.train_order, run.train.batch(0))
        found.append(run.scaling.take_lost())
    return found


def traffic(rank: Rank, configs: list[RunConfig]) -> list[Any]:
    """(calls, bytes) over tp in a step."""
    from megascale.train.step import train_step

    found = []
    for run in builds(rank, configs):
        run.mesh.recorder._ring.clear()
        train_step(run, run.train.batch(0))
        found.append(traffic_of(run, step=1)["tp"])
    return found


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_that_are_issued_again(sequence: bool, block: str, tmp_path: Path) -> None:
    """With `full` the sum of attention's output, and with sp the gathers, of each layer; the last sum is not needed.
    The parallel block has no other. Selective recomputation communicates nothing.
    """
    layout = {"parallel__tp": 2, "parallel__sp": sequence, "model__block": block, "train__precision": "fp32"}
    trees = [
        settings(FAMILIES["gpt"], tmp_path, **layout, **{f"train__{key}": value for key, value in setting.items()})
        for setting in SETTINGS.values()
    ]
    configs = [config_of(tree, tmp_path) for tree in trees]
    m, micro = configs[0].model, configs[0].micro_batches
    layers, activation = micro * m.num_layers, 4 * m.seq_length * m.hidden_size
    serial = block == "serial"
    for found in run_world(2, traffic, configs):
        none, counts = found[0], dict(zip(SETTINGS, found, strict=True))
        assert counts["attention"] == counts["norm"] == counts["activation"] == counts["all"] == none
        again = {op: counts["full"][op][0] - none[op][0] for op in none}
        sizes = {op: counts["full"][op][1] - none[op][1] for op in none}
        sums = layers if serial else 0
        if sequence:
            gathers = 2 * layers if serial else layers
            assert again == {"all_gather": gathers, "reduce_scatter": sums, "all_reduce": 0}
        else:
            assert again == {"all_reduce": sums}
        assert sizes == {op: number * activation for op, number in again.items()}


def test_only_the_input_is_kept() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def function(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return x.sin().exp()

    calls: list[bool] = []
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = recomputed(function, x)
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]
    (grad,) = torch.autograd.grad(out.sum() * 2, x)
    assert calls == [False, True]
    torch.testing.assert_close(grad, 2 * x.cos() * x.sin().exp(), rtol=0, atol=1e-15)


def test_what_is_called_again_may_have_another_value() -> None:
    x = torch.randn(5, requires_grad=True)
    out = recomputed(lambda x: 3 * x, x, again=lambda x: 3 * x + 100)
    assert torch.equal(out, 3 * x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.full((5,), 3.0))


def test_nothing_is_computed_again_in_an_evaluation() -> None:
    calls = []
    with torch.no_grad():
        out = recomputed(lambda x: calls.append(1) or 2 * x, torch.ones(3, requires_grad=True))
    assert not out.requires_grad and calls == [1]


def test_formed_again_holds_no_graph() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    again = formed_again(torch.exp, x, True)
    assert again is not None and not again.x.requires_grad
    assert torch.equal(again.function(again.x), x.exp())
    assert formed_again(torch.exp, x, False) is None


def left_over(rank: Rank, configs: list[RunConfig]) -> list[tuple[int, list[int]]]:
    """For each run, of what is kept to form inputs of linear layers from: how many tensors there are, and how many of
    a layer and those above it are still there when the layer's backward is done.
    """
    found = []
    for config in configs:
        run, kept, alive = build_run(rank, config), list[StorageWeakRef](), list[int]()

        def watched(function: Any, x: Tensor, wanted: bool, kept: list[StorageWeakRef] = kept) -> Any:
            kept.append(StorageWeakRef(x.untyped_storage()))
            return formed_again(function, x, wanted)

        def enter(_: Any, inputs: Any, kept: list[StorageWeakRef] = kept, alive: list[int] = alive) -> None:
            first = len(kept)
            inputs[0].register_hook(lambda grad: alive.append(sum(not each.expired() for each in kept[first:])))

        parts.formed_again = mlp.formed_again = watched
        (stage,) = run.stages
        for layer in stage.layers.values():
            layer.register_forward_pre_hook(enter)
        loss = stage(None, run.train.batch(0).micro_batch(0))
        assert not any(each.expired() for each in kept)
        loss.backward()
        found.append((len(kept), alive))
    return found


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_what_is_kept_goes_when_the_layers_backward_is_done(block: str, tmp_path: Path) -> None:
    """And not with the graph, which the loss holds."""
    more = {"model__block": block, "model__dropout": 0.1, "train__precision": "fp32"}
    more |= {f"train__{key}": value for key, value in SETTINGS["all"].items()}
    configs = [config_of(settings(FAMILIES[family], tmp_path, **more), tmp_path) for family in FAMILIES]
    for kept, alive in run_world(1, left_over, configs)[0]:
        assert kept == 4 * (3 if block == "serial" else 2)
        assert alive == [0, 0, 0, 0]
