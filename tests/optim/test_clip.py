"""Gradient norm and clipping: of the full model, every parameter counted once, in every layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megascale.comm.totals import max_over_job
from megascale.layout.topology import Coord, Topology
from megascale.optim.clipping import ROW, sum_of_squares
from tests.marks import only_quick_rows
from tests.runs import FAMILIES, GPT, LLAMA, config_of, curve_of, given, scale_and_clip, settings, total_of, train_order
from tests.thread_world import run_threads

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4 zero0": {"parallel__dp": 4, "parallel__zero": 0},
    "dp4 zero1": {"parallel__dp": 4, "parallel__zero": 1},
    "dp4 zero2": {"parallel__dp": 4, "parallel__zero": 2},
    "tp4": {"parallel__tp": 4},
    "tp2 dp2 zero0": {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 0},
    "tp2 sp dp2 zero2": {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__zero": 2},
    "tp2 sp pp2 vpp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
    "pp2 dp2 zero1": {"parallel__pp": 2, "parallel__dp": 2},
    "pp4": {"parallel__pp": 4},
}
WIDE = {"num_kv_heads": 4}  # for tp = 4
BATCH = 4
CASES = [(family, name) for name in LAYOUTS for family in FAMILIES]
QUICK = (
    ("gpt", "dp4 zero0"), ("llama", "dp4 zero1"), ("llama", "tp4"), ("gpt", "tp2 sp dp2 zero2"),
    ("gpt", "tp2 sp pp2 vpp2"), ("llama", "pp2 dp2 zero1"), ("gpt", "pp4"),
)  # fmt: skip
"""Each axis and ZeRO stage, the tied embedding of a pipeline's ends, and each with another."""


def plain_gradients(config: Any) -> dict[str, Tensor]:
    """Compute gradients of the first step's mean loss by autograd alone, without buckets, micro-batches and groups."""
    from megascale.layout.parameters import all_params
    from megascale.model.initialize import init_parameters
    from megascale.model.transformer import Stage

    parameters = {}
    for parameter in all_params(config.model):
        weight = torch.zeros(parameter.local_shape(Topology()), dtype=torch.float64)
        init_parameters([(weight, parameter)], Topology(), Coord(), config.train.seed)
        parameters[parameter.name] = nn.Parameter(weight)
    layers = range(config.model.num_layers)
    stage = Stage(given(config.model, parameters), layers, True, True)
    batch = whole_batch(config)
    stage(None, batch).loss.backward()
    tokens = batch.labels.numel()
    return {name: parameter.grad / tokens for name, parameter in parameters.items() if parameter.grad is not None}


def whole_batch(config: Any) -> Any:
    """Return the samples of the first step as one micro-batch."""
    from megascale.data.mix.loader import BatchShape, Loader
    from megascale.data.mix.mock_mixture import build_mixture
    from megascale.train.run_splits import mixture_spec

    total = config.batch.total
    samples = build_mixture(mixture_spec(config, "train"))
    shape = BatchShape(total, total, 1)
    loader = Loader(samples, shape, 0, dropout=0.0, seed=config.train.seed, device=torch.device("cpu"))
    return loader.batch(0).micro_batches[0]


def clipped(run: Any) -> tuple[float, float, float, float]:
    """Measure the norm of the first step without clipping, and with clipping to half of the norm: the reported norm,
    the norm of the clipped shards, and the largest difference to the unclipped gradient times the factor.
    """
    batch = run.train_loader.batch(0)
    run.buffers.begin_step()
    run.pipeline.run_actions(train_order(run), batch)
    list(run.buffers.finish_reductions())
    tokens = total_of(run, batch.loss_tokens)
    run.optimizer._clip = 0.0
    norm = scale_and_clip(run, tokens)
    before = [shard.bucket.grad.clone() for shard in run.optimizer.shards]
    run.optimizer._clip = norm / 2
    again = scale_and_clip(run)
    run.optimizer._clip = 0.0
    left = scale_and_clip(run)
    differences = [
        float((shard.bucket.grad - old * (left / norm)).abs().max())
        for shard, old in zip(run.optimizer.shards, before, strict=True)
    ]
    worst = torch.tensor(max(differences), dtype=torch.float64)
    max_over_job(run.mesh, worst)
    return norm, again, left, float(worst)


Results = Callable[[str, str], list[tuple[float, ...]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A function that returns the results of the ranks of a family in a layout."""
    folder = tmp_path_factory.mktemp("clip")

    @cache
    def of(family: str, layout: str) -> list[tuple[float, ...]]:
        tree = settings(FAMILIES[family] | WIDE, folder, batch__global=BATCH, **LAYOUTS[layout])
        return run_threads(config_of(tree, folder), clipped)

    return of


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The gradient norm of the full model by autograd alone, by family."""
    folder = tmp_path_factory.mktemp("plain")
    measured = {}
    for family, sizes in FAMILIES.items():
        gradients = plain_gradients(config_of(settings(sizes | WIDE, folder, batch__global=BATCH), folder))
        measured[family] = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    return measured


@pytest.mark.parametrize(("family", "layout"), only_quick_rows(CASES, *QUICK))
def test_the_norm_is_that_of_the_full_model(family: str, layout: str, results: Results, expected: Any) -> None:
    for norm, *_ in results(family, layout):
        assert norm == pytest.approx(expected[family], rel=1e-11)


@pytest.mark.parametrize(("family", "layout"), only_quick_rows(CASES, *QUICK))
def test_clipping_scales_all_gradients_equally(family: str, layout: str, results: Results) -> None:
    ranks = results(family, layout)
    assert all(rank == ranks[0] for rank in ranks), "ranks would clip differently"
    norm, again, left, difference = ranks[0]
    assert again == pytest.approx(norm, rel=1e-12), "the reported norm is after clipping"
    assert left == pytest.approx(norm / 2, rel=1e-5)
    assert difference < 1e-12 * norm


def edges(run: Any) -> dict[str, tuple[float, bool]]:
    """Return, by limit, the reported norm of gradients of norm 2.0, and whether the gradients are unchanged."""
    measured = {}
    for limit in (0.0, 1.0, 1.99, 2.01, 100.0):
        (shard,) = run.optimizer.shards
        grad = shard.bucket.grad
        grad.zero_()
        grad[:4] = 1.0
        run.optimizer._clip = limit
        norm = scale_and_clip(run)
        measured[str(limit)] = (norm, bool((grad[:4] == 1.0).all()))
    grad[2] = math.nan
    kept = grad.clone()
    norm = scale_and_clip(run, 2.0)
    measured["nan"] = (norm, torch.equal(grad.nan_to_num(7), kept.nan_to_num(7)))
    return measured


def test_only_a_larger_norm_is_clipped_and_zero_disables_clipping(tmp_path: Path) -> None:
    (measured,) = run_threads(config_of(settings(LLAMA, tmp_path), tmp_path), edges)
    nan, unchanged = measured.pop("nan")
    assert math.isnan(nan) and unchanged, "non-finite gradients must stay for the guard"
    assert {norm for norm, _ in measured.values()} == {2.0}
    assert {limit: same for limit, (_, same) in measured.items()} == {
        "0.0": True, "1.0": False, "1.99": False, "2.01": True, "100.0": True,
    }  # fmt: skip


def first_update(run: Any) -> tuple[float, float]:
    """Return the loss of the second step, and the norm of the first."""
    curve = curve_of(run, 2)
    return curve[1][0], curve[0][1]


def test_the_configured_limit_is_used(tmp_path: Path) -> None:
    """Adam normalizes the gradient's size; a large eps prevents this, which makes a clipped step a small step."""
    limits = (0.0, 1e3, 1e-3)
    more = {"optimizer__eps": 1e3, "optimizer__lr": 3e2, "optimizer__warmup_steps": 0, "optimizer__weight_decay": 0.0}
    configs = [config_of(settings(GPT, tmp_path, optimizer__clip_norm=limit, **more), tmp_path) for limit in limits]
    off, far, near = (run_threads(config, first_update)[0] for config in configs)
    assert off == far
    assert near[1] == off[1] and near[0] > off[0]


@pytest.mark.parametrize("size", [0, 1, ROW - 1, ROW, 5_000_000])
def test_a_norm_of_many_elements_is_accurate(size: int) -> None:
    """A single fp32 sum is off by 1e-4 after five million elements."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(0))
    assert float(sum_of_squares(numbers)) == pytest.approx(float(numbers.double().square().sum()), rel=1e-6)


class GradientReads(TorchDispatchMode):
    """Counts by operator the elements of gradients that it reads, and does not write or view."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        super().__init__()
        self._storages = {grad.untyped_storage().data_ptr() for grad in grads}
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._of_gradients((out, kwargs)):
            self.elements[func._overloadpacket.__name__] += sum(x.numel() for x in self._of_gradients(args))
        return out

    def _of_gradients(self, tree: Any) -> list[Tensor]:
        tensors = (x for x in tree_leaves(tree) if isinstance(x, Tensor))
        return [x for x in tensors if x.untyped_storage().data_ptr() in self._storages]


def test_one_pass_over_gradients_is_norm_and_finite_check(tmp_path: Path) -> None:
    """Beside the update nothing else reads them: the norm of a gradient that is not finite is not, either."""

    def reads(run: Any) -> tuple[dict[str, int], int]:
        curve_of(run, 1)
        grads = [bucket.grad for bucket in run.buffers.buckets]
        with GradientReads(grads) as mode:
            curve_of(run, 1)
        return {name: count for name, count in mode.elements.items() if count}, sum(grad.numel() for grad in grads)

    config = config_of(settings(GPT, tmp_path, train__precision="fp32", overlap__bucket_bytes=20_000), tmp_path)
    ((elements, total),) = run_threads(config, reads)
    assert elements.pop("_fused_adamw_", total) == total
    assert elements == {"linalg_vector_norm": total}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38, 1e15])
def test_the_norm_is_finite_where_all_squares_are(value: float) -> None:
    """In any place: in a row, in the rest, at an edge. Beyond the root of the largest number squares are not."""
    for place in (0, ROW - 1, ROW, 2 * ROW + 5):
        x = torch.ones(2 * ROW + 6)
        x[place] = value
        assert bool(sum_of_squares(x).sqrt().isfinite()) == (value == 1e15)
