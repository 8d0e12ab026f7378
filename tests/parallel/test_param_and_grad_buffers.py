"""Gradient buckets: contiguous, exact sums over micro-batches, shards."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runs import FAMILIES, GPT, LLAMA, config_of, settings, train_order
from tests.thread_world import run_threads

Numbers = dict[str, np.ndarray]
"""Gradients by name."""


def backward(run: Any, batch: Any) -> None:
    """Run a step's backwards: gradients are sums over the job, not divided yet."""
    run.buffers.begin_step()
    run.pipeline.run_actions(train_order(run), batch)
    list(run.buffers.finish_reductions())


def by_name(run: Any) -> Numbers:
    """Return this rank's shard of every gradient, by parameter name."""
    results = {}
    for bucket in run.buffers.buckets:
        first, last = bucket.shard
        for slot in bucket.layout.slots:
            low, high = max(slot.start, first), min(slot.stop, last)
            results[slot.parameter.name] = bucket.grad[low - first : max(high, low) - first].numpy().copy()
    return results


def placed(run: Any) -> dict[str, Any]:
    """Describe the storage and dtype of gradients."""
    backward(run, run.train_loader.batch(0))
    (bucket,) = run.buffers.buckets
    names = list(bucket.parameters)
    mains = [bucket.parameters[name].main_grad for name in names]
    spans = sorted((g.data_ptr(), g.data_ptr() + g.nbytes) for g in mains)
    base = bucket.storage.full_grad.data_ptr()
    return {
        "dtypes": {g.dtype for g in mains},
        "contiguous": all(g.is_contiguous() for g in mains),
        "apart": all(end <= start for (_, end), (start, _) in pairwise(spans)),
        "inside": base <= spans[0][0] and spans[-1][1] <= base + bucket.storage.full_grad.nbytes,
        "autograd's": [name for name in names if bucket.parameters[name].grad is not None],
        "empty": [name for name, g in zip(names, mains, strict=True) if not g.any()],
        "shard": (bucket.grad.data_ptr() - base) // bucket.grad.element_size() == bucket.shard[0],
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_lie_in_one_fp32_buffer(family: str, precision: str, tmp_path: Path) -> None:
    config = config_of(settings(FAMILIES[family], tmp_path, train__precision=precision, parallel__dp=2), tmp_path)
    for results in run_threads(config, placed):
        assert results == {
            "dtypes": {torch.float32}, "contiguous": True, "apart": True, "inside": True, "autograd's": [],
            "empty": [], "shard": True,
        }  # fmt: skip


def gradients_of(run: Any) -> Numbers:
    """Compute the gradients of the first step."""
    backward(run, run.train_loader.batch(0))
    return by_name(run)


@pytest.mark.parametrize("family", FAMILIES)
def test_accumulation_over_micro_batches_is_a_sum(family: str, tmp_path: Path) -> None:
    sizes = {"batch__global": 4, "model__dropout": 0.1}
    configs = [config_of(settings(FAMILIES[family], tmp_path, batch__micro=m, **sizes), tmp_path) for m in (4, 2, 1)]
    full, *parts = (run_threads(config, gradients_of)[0] for config in configs)
    for part in parts:
        assert part.keys() == full.keys()
        for name, gradient in part.items():
            np.testing.assert_allclose(gradient, full[name], rtol=1e-10, atol=1e-12)


def test_bf16_gradients_accumulate_in_fp32(tmp_path: Path) -> None:
    """Compare one micro-batch with the same 65 times: a sum in bf16, with 8 significant bits, would be off by percents.

    Addends may be rounded to bf16, as on a CPU.
    """
    config = config_of(settings(LLAMA, tmp_path, train__precision="bf16"), tmp_path)
    ((once, often),) = run_threads(config, repeated)
    for name, gradient in once.items():
        np.testing.assert_allclose(often[name], gradient * 65, rtol=1e-4, atol=1e-6)


def repeated(run: Any) -> tuple[Numbers, Numbers]:
    """Compute gradients of one micro-batch, and of 65 equal micro-batches."""
    micro_batch, results = run.train_loader.batch(0).micro_batches[0], []
    for times in (1, 65):
        run.buffers.begin_step()
        for _ in range(times):
            with run.buffers.backward(0, last=False):
                run.stages[0](None, micro_batch).loss.backward()
        results.append(by_name(run))
    return results[0], results[1]


def bucket_states(run: Any) -> list[tuple[int, int, bool, int]]:
    """Describe every bucket after a step's backwards: elements, gradient elements kept, whether the full gradient is
    freed, and bytes of gradients still held by parameters.
    """
    backward(run, run.train_loader.batch(0))
    return [
        (
            bucket.layout.numel,
            bucket.grad.untyped_storage().nbytes() // bucket.grad.element_size(),
            bucket.storage.full_grad is None,
            sum(getattr(p, "main_grad", torch.empty(0)).nbytes for p in bucket.parameters.values()),
        )
        for bucket in run.buffers.buckets
    ]


@pytest.mark.parametrize(("zero", "share"), [(0, 1), (1, 1), (2, 2)])
def test_only_zero_2_frees_the_full_gradient(zero: int, share: int, tmp_path: Path) -> None:
    layout = {"parallel__dp": 2, "parallel__zero": zero}
    config = config_of(settings(GPT, tmp_path, **layout), tmp_path)
    for rank in run_threads(config, bucket_states):
        for size, numbers, gone, parameters in rank:
            assert numbers == size // share
            assert gone is (zero == 2)
            assert (parameters == 0) is gone


def test_concatenated_shards_are_the_sum(tmp_path: Path) -> None:
    """The concatenated shards of two ranks equal the gradient of one process, with and without overlap."""
    runs = [(zero, overlap) for zero in (1, 2) for overlap in (True, False)]
    trees = [settings(LLAMA, tmp_path, parallel__dp=2, parallel__zero=z, overlap__dp=o) for z, o in runs]
    (alone,) = run_threads(config_of(settings(LLAMA, tmp_path), tmp_path), gradients_of)
    for tree in trees:
        one, other = run_threads(config_of(tree, tmp_path), gradients_of)
        for name, gradient in alone.items():
            both = np.concatenate([one[name], other[name]])
            np.testing.assert_allclose(both, gradient, rtol=1e-10, atol=1e-12)
        assert any(len(one[name]) and len(other[name]) for name in alone), "no shard ends inside a parameter"


def test_a_step_begins_without_gradients(tmp_path: Path) -> None:
    layouts = [{"parallel__zero": zero} for zero in (0, 1, 2)]
    for layout in layouts:
        config = config_of(settings(LLAMA, tmp_path, **layout), tmp_path)
        ((once, twice),) = run_threads(config, stepped_twice)
        assert all(np.array_equal(once[name], twice[name]) for name in once)


def stepped_twice(run: Any) -> tuple[Numbers, Numbers]:
    """Compute the gradients of a batch, and of the same batch after another batch."""
    backward(run, run.train_loader.batch(0))
    once = by_name(run)
    backward(run, run.train_loader.batch(8))
    backward(run, run.train_loader.batch(0))
    return once, by_name(run)


def stale(run: Any) -> tuple[list[str], float, list[bool]]:
    """Compare a step's gradients in fresh buffers, and in buffers full of NaN.

    Returns the parameters that differ, the largest gradient, and whether all padding is zero.
    """
    backward(run, run.train_loader.batch(0))
    clean = by_name(run)
    for bucket in run.buffers.buckets:
        for parameter in bucket.parameters.values():
            getattr(parameter, "main_grad", torch.empty(0)).fill_(torch.nan)
        if bucket.storage.full_grad is None:
            bucket.grad.fill_(torch.nan)
    backward(run, run.train_loader.batch(0))
    again = by_name(run)
    differ = [name for name, gradient in again.items() if not np.array_equal(gradient, clean[name])]
    assert any(bucket.layout.padding for bucket in run.buffers.buckets), "the model has no padding to check"
    largest = max(float(abs(gradient).max(initial=0)) for gradient in again.values())
    return differ, largest, [empty_beside_slots(bucket) for bucket in run.buffers.buckets]


@pytest.fixture
def filled_allocations() -> Iterator[None]:
    """Fill new allocations with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def empty_beside_slots(bucket: Any) -> bool:
    """Return True if the padding of this rank's shard is zero."""
    first, last = bucket.shard
    inside = [(max(low, first) - first, min(high, last) - first) for low, high in bucket.layout.padding]
    return not any(bool(bucket.grad[low:high].any()) for low, high in inside if low < high)


STALE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied": (GPT, {}),
    "untied": (LLAMA, {}),
    "shards": (GPT, {"parallel__dp": 2}),
    "tied, two stages": (GPT, {"parallel__pp": 2}),
    "pieces": (LLAMA, {"parallel__tp": 2, "parallel__sp": True}),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if name == "shards" else pytest.mark.slow, id=name) for name, case in STALE.items()],
)
@pytest.mark.usefixtures("filled_allocations")
def test_last_gradients_are_not_read(case: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    """Cover all values of zero, recomputation and FP8."""
    model, layout = case
    others: list[dict[str, Any]] = [{"parallel__zero": zero} for zero in (0, 1, 2)]
    others.append({"train__recompute": "full", "train__precision": "bf16"})
    others.append({"train__precision": "fp8", "model__ffn_size": 64})
    for other in others:
        for differ, largest, empty in run_threads(
            config_of(settings(model, tmp_path, **layout, **other), tmp_path), stale
        ):
            assert differ == [] and 0 < largest < 1e6 and all(empty)


def halved(x: Any, *others: Any) -> Any:
    yield from ()
    return x * 0.5


def reached(run: Any) -> tuple[set[str], bool]:
    """Find the nonzero gradients of a step that skips the second layer's MLP, after a step that does not."""
    backward(run, run.train_loader.batch(0))
    run.stages[0].layers["1"].mlp.steps = halved
    backward(run, run.train_loader.batch(0))
    gradients = by_name(run)
    return {n for n, g in gradients.items() if g.any()}, all(np.isfinite(g).all() for g in gradients.values())


def test_a_parameter_without_contributions_has_gradient_zero(tmp_path: Path) -> None:
    configs = [config_of(settings(LLAMA, tmp_path, parallel__zero=zero), tmp_path) for zero in (0, 1, 2)]
    for names, finite in (run_threads(config, reached)[0] for config in configs):
        assert finite and {"layers.0.mlp.down.weight", "layers.1.attention.qkv.weight"} <= names
        assert not any(name.startswith("layers.1.mlp.") for name in names)


def zeroed(run: Any) -> list[str]:
    """Find the parameters whose gradients an operator fills in a step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from megascale.train.step import train_step

    class Fills(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.overloadpacket in (torch.ops.aten.zero_, torch.ops.aten.fill_):
                at, size = args[0].data_ptr(), args[0].nbytes
                touched.update(n for n, (start, length) in places.items() if at < start + length and start < at + size)
            return function(*args, **(kwargs or {}))

    named = run.buffers.parameters(0).items()
    places = {name: (p.main_grad.data_ptr(), p.main_grad.nbytes) for name, p in named}
    touched: set[str] = set()
    with Fills():
        for _ in range(2):
            train_step(run, run.train_loader.batch(run.progress.samples))
    assert "embedding.token.weight" in places
    return sorted(touched)


def test_only_embedding_gradients_are_zeroed(tmp_path: Path) -> None:
    """A tied embedding's gradient is not zeroed either: the head has overwritten the gradient before."""
    formats = ("fp32", "bf16")
    trees = [settings(model, tmp_path, train__precision=p, batch__global=2) for model in (LLAMA, GPT) for p in formats]
    results = [run_threads(config_of(tree, tmp_path), zeroed)[0] for tree in trees]
    assert results == [["embedding.token.weight"]] * 2 + [[]] * 2
