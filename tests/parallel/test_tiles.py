"""An MLP in tiles of tokens is the MLP of all tokens, and has one tile's intermediates at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.parallel.recompute import Recomputation
from megascale.parallel.tiles import run_in_tiles
from tests.marks import only_quick
from tests.memory import held_bytes, peak_bytes
from tests.parallel.test_recompute import trained
from tests.parallel.test_tp_overlap import Outcome
from tests.runs import GEMMA2, GPT, LLAMA, NEOX, OLMO2, builds, config_of, settings, train_order
from tests.worlds import run_world

NORM = {"train__recompute": "selective", "train__recompute_ops": ["norm"]}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": GPT, "model__dropout": 0.1},
    "llama, full": {"model": LLAMA, "train__recompute": "full"},
    "llama, norm": {"model": LLAMA, "model__bias": True, **NORM},
    "gemma, full": {"model": GEMMA2, "model__dropout": 0.1, "train__recompute": "full"},
    "olmo": {"model": OLMO2},
    "parallel, norm": {"model": LLAMA, "model__block": "parallel", **NORM},
    "neox, full": {"model": NEOX, "model__dropout": 0.1, "train__recompute": "full"},
}
QUICK_MODELS = ("gemma, full", "parallel, norm")
DOCUMENTS = {"data__attention_mask": "document", "data__document_length": 5}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"parallel__tp": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "tp2 sp, no overlap": {"parallel__tp": 2, "parallel__sp": True, "overlap__tp": False},
    "pp2 gpipe": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "pp2 vpp2 dp2 zero2": {
        "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2, "batch__global": 8,
    },
    "tp2 sp pp2 vpp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
    "cp2 ring": {"parallel__cp": 2, "model__dropout": 0.0},
    "chunks": {"data__sequence_chunk_tokens": 8, "model__dropout": 0.0},
    "hybrid": {
        "parallel__hybrid_dp": True, "parallel__dp": 2, "data__max_tokens_per_rank": 8, "model__dropout": 0.0,
        "batch__micro": 1, **DOCUMENTS,
    },
}  # fmt: skip


def difference(ours: Outcome, theirs: Outcome) -> float:
    """Largest relative difference of losses and gradient norms, or absolute of weights."""
    pairs = zip(np.ravel(ours[0]), np.ravel(theirs[0]), strict=True)
    return max(float(np.abs(ours[1] - theirs[1]).max()), *(abs(a - b) / abs(b) for a, b in pairs))


def check_layout(layout: str, models: tuple[str, ...], folder: Path) -> None:
    configs = []
    for name in models:
        for tiles in (1, 3):  # 16 rows, and 8 with sp: tiles of unequal size
            case = {"batch__micro": 2, "batch__global": 4, "train__mlp_tiles": tiles} | MODELS[name] | LAYOUTS[layout]
            model = case.pop("model") | ({} if "parallel__vpp" in case else {"num_layers": 2})
            configs.append(config_of(settings(model, folder, **case), folder))
    for outcomes in run_world(configs[0].world_size, trained, configs):
        for name, whole, tiled in zip(models, outcomes[::2], outcomes[1::2], strict=True):
            assert difference(tiled, whole) < 1e-12, name


def test_tiles_are_the_same_run(tmp_path: Path) -> None:
    check_layout("tp2 sp", QUICK_MODELS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_are_the_same_run_in_every_layout(layout: str, tmp_path: Path) -> None:
    check_layout(layout, tuple(MODELS), tmp_path)


FP8_MODEL = LLAMA | {"hidden_size": 256, "ffn_size": 512, "seq_length": 256, "num_layers": 3}


def casts_and_losses(rank: Rank, configs: list[RunConfig]) -> list[tuple[dict[str, Any], float]]:
    """Cast statistics of a step by operand, and its loss."""
    results = []
    for run in builds(rank, configs):
        run.buffers.begin_step()
        run.fp8_state.begin_step(collect_stats=True)
        loss = run.pipeline.run_actions(train_order(run), run.train_loader.batch(0))
        results.append((run.fp8_state.take_cast_stats(), float(loss)))
    return results


@pytest.mark.parametrize("recipe", only_quick(["static", "blockwise"], "static"))
def test_fp8_scales_are_those_of_all_tokens(recipe: str, tmp_path: Path) -> None:
    """Forwards are bit-equal, and so are casts but those of gradients, which sums of wgrad do not enter."""
    keys = {"train__precision": "fp8", "fp8__recipe": recipe, "batch__global": 2}
    trees = (settings(FP8_MODEL, tmp_path, **keys, train__mlp_tiles=tiles) for tiles in (1, 2))
    (whole, tiled) = run_world(1, casts_and_losses, [config_of(tree, tmp_path) for tree in trees])[0]
    assert tiled[1] == whole[1] and tiled[0].keys() == whole[0].keys() and whole[0]
    for name, stats in whole[0].items():
        sums = {part: getattr(stats, part) for part in ("rms", "kurtosis")}  # of tiles, in another order
        assert dataclasses.replace(tiled[0][name], **sums) == stats
        assert all(getattr(tiled[0][name], part) == pytest.approx(value, rel=1e-6) for part, value in sums.items())


def mlp(x: Tensor, compute_output: bool = True) -> Tensor:
    """An MLP with an intermediate of 64 times the width of x."""
    return x.repeat(1, 1, 64).exp().unflatten(-1, (64, -1)).sum(-2)


def test_the_input_alone_is_saved_and_a_tile_is_held_at_a_time() -> None:
    x = torch.randn(32, 2, 64, requires_grad=True)
    intermediate = 64 * x.nbytes

    def peaks(tiles: int) -> tuple[int, int]:
        forward = peak_bytes(lambda: run_in_tiles(mlp, x, tiles))
        out = run_in_tiles(mlp, x, tiles)
        return forward, peak_bytes(lambda: torch.autograd.grad(out, x, torch.ones_like(out)))

    assert held_bytes(lambda: run_in_tiles(mlp, x, 4)) == x.nbytes  # the result
    whole = peaks(1)
    for tiles in (4, 16):
        for peak, of_all in zip(peaks(tiles), whole, strict=True):
            fixed = 4 * x.nbytes  # results and gradients, of the size of x
            assert of_all / tiles - fixed < peak < of_all / tiles + fixed
    assert whole[1] > 2 * intermediate


def test_backward_recomputes_tiles_from_the_saved_tensor() -> None:
    calls: list[tuple[int, bool]] = []

    def function(x: Tensor, compute_output: bool) -> Tensor:
        calls.append((x.shape[0], compute_output))
        return x.sin().exp()

    x = torch.randn(5, 1, 3, dtype=torch.float64, requires_grad=True)
    source = torch.randn(5, 1, 3, dtype=torch.float64)
    out = run_in_tiles(function, x, 2, Recomputation(lambda source: 2 * source, source))
    torch.testing.assert_close(out, x.sin().exp(), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, (2 * source).cos() * (2 * source).sin().exp(), rtol=0, atol=1e-15)
    assert calls == [(2, True), (3, True), (2, False), (3, False)]


def test_without_an_output_nothing_runs_before_the_backward() -> None:
    calls: list[bool] = []
    x = torch.ones(4, 1, 2, requires_grad=True)
    out = run_in_tiles(lambda x, wanted: calls.append(wanted) or 3 * x, x, 2, compute_output=False)
    assert calls == [] and out.shape == x.shape
    (grad,) = torch.autograd.grad(out, x, torch.ones(4, 1, 2))
    assert calls == [False, False] and torch.equal(grad, torch.full((4, 1, 2), 3.0))


def peaks_of_steps(rank: Rank, configs: list[RunConfig]) -> list[int]:
    """Peak bytes of a micro-batch's forward and backward, by run."""
    peaks = []
    for run in builds(rank, configs):
        actions, batch = [action for action in train_order(run) if action.kind in ("F", "B")], run.train_loader.batch(0)
        run.buffers.begin_step()
        run.pipeline.run_actions(actions, batch)  # fills caches
        peaks.append(peak_bytes(lambda run=run, actions=actions, batch=batch: run.pipeline.run_actions(actions, batch)))
    return peaks


def test_the_peak_of_a_step_falls_with_the_tiles(tmp_path: Path) -> None:
    """With full recomputation a block's intermediates are the peak, and those of the MLP nearly all of them."""
    wide = LLAMA | {"ffn_size": 4096, "seq_length": 256, "num_layers": 2}
    keys = {"train__precision": "fp32", "train__recompute": "full", "batch__global": 1}
    trees = [settings(wide, tmp_path, train__mlp_tiles=tiles, **keys) for tiles in (1, 4, 16)]
    whole, four, sixteen = run_world(1, peaks_of_steps, [config_of(tree, tmp_path) for tree in trees])[0]
    gate_and_up = 4 * 256 * 2 * 4096
    assert whole > 2.5 * gate_and_up  # with the activation's result, and gradients
    assert four < 0.4 * whole and sixteen < 0.2 * whole, (whole, four, sixteen)
