"""Buckets of gradients: contiguous, exact sums over micro-batches, and shards."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from tests.runs import FAMILIES, GPT, LLAMA, build_run, builds, config_of, settings
from tests.worlds import run_world

Numbers = dict[str, np.ndarray]
"""Arrays, which travel between processes by value."""


def backward(run: Any, batch: Any) -> None:
    """A step's gradients, summed over the job and not yet divided."""
    run.gradients.clear()
    run.pipeline.run(run.train_order, batch)
    list(run.gradients.finish())


def by_name(run: Any) -> Numbers:
    """This rank's part of each gradient, by its parameter's name."""
    found = {}
    for bucket in run.gradients.buckets:
        first, last = bucket.shard
        for slot in bucket.layout.slots:
            low, high = max(slot.start, first), min(slot.stop, last)
            found[slot.parameter.name] = bucket.grad[low - first : max(high, low) - first].numpy().copy()
    return found


def placed(rank: Rank, config: RunConfig) -> dict[str, Any]:
    """Where gradients lie and what they are made of."""
    run = build_run(rank, config)
    backward(run, run.train.batch(0))
    (bucket,) = run.gradients.buckets
    names = list(bucket.parameters)
    mains = [bucket.parameters[name].main_grad for name in names]
    spans = sorted((g.data_ptr(), g.data_ptr() + g.nbytes) for g in mains)
    base = bucket._full.data_ptr()
    return {
        "dtypes": {g.dtype for g in mains},
        "contiguous": all(g.is_contiguous() for g in mains),
        "apart": all(end <= start for (_, end), (start, _) in pairwise(spans)),
        "inside": base <= spans[0][0] and spans[-1][1] <= base + bucket._full.nbytes,
        "autograd's": [name for name in names if bucket.parameters[name].grad is not None],
        "empty": [name for name, g in zip(names, mains, strict=True) if not g.any()],
        "shard": (bucket.grad.data_ptr() - base) // bucket.grad.element_size() == bucket.shard[0],
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_lie_in_one_fp32_buffer(family: str, precision: str, tmp_path: Path) -> None:
    config = config_of(settings(FAMILIES[family], tmp_path, train__precision=precision, parallel__dp=2), tmp_path)
    for found in run_world(2, placed, config):
        assert found == {
            "dtypes": {torch.float32}, "contiguous": True, "apart": True, "inside": True, "autograd's": [],
            "empty": [], "shard": True,
        }  # fmt: skip


def gradients_of(rank: Rank, configs: list[RunConfig]) -> list[Numbers]:
    """The gradients of the first step of several runs in one layout."""
    found = []
    for run in builds(rank, configs):
        backward(run, run.train.batch(0))
        found.append(by_name(run))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_accumulation_over_micro_batches_is_a_sum(family: str, tmp_path: Path) -> None:
    sizes = {"batch__global": 4, "model__dropout": 0.1}
    configs = [config_of(settings(FAMILIES[family], tmp_path, batch__micro=m, **sizes), tmp_path) for m in (4, 2, 1)]
    ((whole, *parts),) = run_world(1, gradients_of, configs)
    for part in parts:
        assert part.keys() == whole.keys()
        for name, gradient in part.items():
            np.testing.assert_allclose(gradient, whole[name], rtol=1e-10, atol=1e-12)


def test_the_sum_of_bf16_gradients_is_kept_in_fp32(tmp_path: Path) -> None:
    """One micro-batch, and the same 65 times: a sum in bf16, of 8 bits, would be off by percents. What is added may be
    rounded to bf16, as it is on a CPU.
    """
    config = config_of(settings(LLAMA, tmp_path, train__precision="bf16"), tmp_path)
    ((once, often),) = run_world(1, repeated, config)
    for name, gradient in once.items():
        np.testing.assert_allclose(often[name], gradient * 65, rtol=1e-4, atol=1e-6)


def repeated(rank: Rank, config: RunConfig) -> tuple[Numbers, Numbers]:
    """Gradients of one micro-batch, and of 65 like it."""
    run = build_run(rank, config)
    micro_batch, found = run.train.batch(0).micro_batch(0), []
    for times in (1, 65):
        run.gradients.clear()
        for _ in range(times):
            run.gradients.begin_backward(0, last=False)
            run.stages[0](None, micro_batch).backward()
        found.append(by_name(run))
    return found[0], found[1]


def kept(rank: Rank, config: RunConfig) -> list[tuple[int, int, bool, int]]:
    """Of each bucket after a step's backward: numbers in it, numbers of gradient that are kept, whether its whole
    gradient is gone, and bytes that the parameters still hold.
    """
    run = build_run(rank, config)
    backward(run, run.train.batch(0))
    return [
        (
            bucket.layout.size,
            bucket.grad.untyped_storage().nbytes() // bucket.grad.element_size(),
            bucket._full is None,
            sum(getattr(p, "main_grad", torch.empty(0)).nbytes for p in bucket.parameters.values()),
        )
        for bucket in run.gradients.buckets
    ]


@pytest.mark.parametrize(("zero", "share"), [(0, 1), (1, 1), (2, 2)])
def test_only_zero_2_keeps_no_more_than_its_shard(zero: int, share: int, tmp_path: Path) -> None:
    layout = {"parallel__dp": 2, "parallel__zero": zero}
    config = config_of(settings(GPT, tmp_path, **layout), tmp_path)
    for rank in run_world(2, kept, config):
        for size, numbers, gone, parameters in rank:
            assert numbers == size // share
            assert gone is (zero == 2)
            assert (parameters == 0) is gone


def test_shards_are_the_parts_of_the_sum(tmp_path: Path) -> None:
    """Side by side, the shards of two ranks are one process's gradient, with and without overlap."""
    runs = [(zero, overlap) for zero in (1, 2) for overlap in (True, False)]
    trees = [settings(LLAMA, tmp_path, parallel__dp=2, parallel__zero=z, overlap__dp=o) for z, o in runs]
    ((alone,),) = run_world(1, gradients_of, [config_of(settings(LLAMA, tmp_path), tmp_path)])
    first, second = run_world(2, gradients_of, [config_of(tree, tmp_path) for tree in trees])
    for one, other in zip(first, second, strict=True):
        for name, gradient in alone.items():
            both = np.concatenate([one[name], other[name]])
            np.testing.assert_allclose(both, gradient, rtol=1e-10, atol=1e-12)
    assert any(len(first[0][name]) and len(second[0][name]) for name in alone), "a shard's edge lies in a parameter"


def test_a_step_begins_without_gradients(tmp_path: Path) -> None:
    layouts = [{"parallel__zero": zero} for zero in (0, 1, 2)]
    for layout in layouts:
        config = config_of(settings(LLAMA, tmp_path, **layout), tmp_path)
        ((once, twice),) = run_world(1, stepped_twice, config)
        assert all(np.array_equal(once[name], twice[name]) for name in once)


def stepped_twice(rank: Rank, config: RunConfig) -> tuple[Numbers, Numbers]:
    """The gradients of a batch, and of the same batch again after another."""
    run = build_run(rank, config)
    backward(run, run.train.batch(0))
    once = by_name(run)
    backward(run, run.train.batch(8))
    backward(run, run.train.batch(0))
    return once, by_name(run)


def stale(rank: Rank, configs: list[RunConfig]) -> list[tuple[list[str], float, list[bool]]]:
    """A step's gradients where nothing was before, and where the last step left numbers that are none, in memory that
    is taken anew too: which differ, the largest, and whether all padding is zero.
    """
    found = []
    for run in builds(rank, configs):
        backward(run, run.train.batch(0))
        clean = by_name(run)
        for bucket in run.gradients.buckets:
            for parameter in bucket.parameters.values():
                getattr(parameter, "main_grad", torch.empty(0)).fill_(torch.nan)
            if bucket.zero == 2:
                bucket.grad.fill_(torch.nan)
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is taken with NaN
        backward(run, run.train.batch(0))
        torch.use_deterministic_algorithms(False)
        again = by_name(run)
        differ = [name for name, gradient in again.items() if not np.array_equal(gradient, clean[name])]
        assert any(bucket.layout.padding for bucket in run.gradients.buckets), "a model without padding shows nothing"
        largest = max(float(abs(gradient).max(initial=0)) for gradient in again.values())
        found.append((differ, largest, [empty_beside_slots(bucket) for bucket in run.gradients.buckets]))
    return found


def empty_beside_slots(bucket: Any) -> bool:
    """Whether what belongs to no parameter is zero in this rank's shard."""
    first, last = bucket.shard
    inside = [(max(low, first) - first, min(high, last) - first) for low, high in bucket.layout.padding]
    return not any(bool(bucket.grad[low:high].any()) for low, high in inside if low < high)


STALE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tied": (1, GPT, {}),
    "untied": (1, LLAMA, {}),
    "shards": (2, GPT, {"parallel__dp": 2}),
    "tied, two stages": (2, GPT, {"parallel__pp": 2}),
    "pieces": (2, LLAMA, {"parallel__tp": 2, "parallel__sp": True}),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if name == "shards" else pytest.mark.slow, id=name) for name, case in STALE.items()],
)
def test_what_the_last_step_left_is_not_read(case: tuple[int, dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    """With every zero, recomputation and fp8."""
    world, model, layout = case
    others: list[dict[str, Any]] = [{"parallel__zero": zero} for zero in (0, 1, 2)]
    others.append({"train__recompute": "full", "train__precision": "bf16"})
    others.append({"train__precision": "fp8", "model__ffn_size": 64})
    configs = [config_of(settings(model, tmp_path, **layout, **other), tmp_path, world=world) for other in others]
    for rank in run_world(world, stale, configs):
        for differ, largest, empty in rank:
            assert differ == [] and 0 < largest < 1e6 and all(empty)


def reached(rank: Rank, configs: list[RunConfig]) -> list[tuple[set[str], bool]]:
    """Which gradients are not zero in a step that passes by the second layer's MLP, after one that does not."""
    found = []
    for run in builds(rank, configs):
        backward(run, run.train.batch(0))
        run.stages[0].layers["1"].mlp.forward = lambda x, *others: x * 0.5
        backward(run, run.train.batch(0))
        gradients = by_name(run)
        found.append(
            ({n for n, g in gradients.items() if g.any()}, all(np.isfinite(g).all() for g in gradients.values()))
        )
    return found


def test_a_parameter_without_a_gradient_reads_zero(tmp_path: Path) -> None:
    configs = [config_of(settings(LLAMA, tmp_path, parallel__zero=zero), tmp_path) for zero in (0, 1, 2)]
    ((*each,),) = run_world(1, reached, configs)
    for names, finite in each:
        assert finite and {"layers.0.mlp.down.weight", "layers.1.attention.qkv.weight"} <= names
        assert not any(name.startswith("layers.1.mlp.") for name in names)


def zeroed(rank: Rank, configs: list[RunConfig]) -> list[list[str]]:
    """For each run the parameters whose gradients some operator fills in a step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from megascale.train.step import train_step

    class Fills(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.overloadpacket in (torch.ops.aten.zero_, torch.ops.aten.fill_):
                at, size = args[0].data_ptr(), args[0].nbytes
                touched.update(n for n, (start, length) in places.items() if at < start + length and start < at + size)
            return function(*args, **(kwargs or {}))

    found = []
    for run in builds(rank, configs):
        named = run.gradients.parameters(0).items()
        places = {name: (p.main_grad.data_ptr(), p.main_grad.nbytes) for name, p in named}
        touched: set[str] = set()
        with Fills():
            for _ in range(2):
                train_step(run, run.train.batch(run.progress.samples))
        assert "embedding.token.weight" in places
        found.append(sorted(touched))
    return found


def test_nothing_is_zeroed_but_the_rows_of_an_embedding(tmp_path: Path) -> None:
    """Where the head is tied to it and has written its gradient before, not even they."""
    formats = ("fp32", "bf16")
    trees = [settings(model, tmp_path, train__precision=p) for model in (LLAMA, GPT) for p in formats]
    ((*found,),) = run_world(1, zeroed, [config_of(tree, tmp_path) for tree in trees])
    assert found == [["embedding.token.weight"]] * 2 + [[]] * 2
