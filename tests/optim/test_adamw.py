"""AdamW against torch's, step by step, on flat segments and on a model's shards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.config.train import OptimizerConfig
from megascale.core.rank import Rank
from megascale.ops.optimizer import Segment
from megascale.train.step import train_step
from tests.runs import FAMILIES, GPT, LLAMA, build_run, config_of, gather_weights, settings
from tests.thread_world import run_threads
from tests.worlds import run_world

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.2, betas=[0.8, 0.9], eps=1e-6)
STEPS = 6


def segment(size: int, decays: bool, seed: int) -> Segment:
    names = OPTIMIZERS["adamw"].load().state_names
    weight = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return Segment(weight, torch.zeros(size), {name: torch.zeros(size) for name in names}, not decays, decays)


GO = torch.zeros(())
"""Do not skip the step."""

ONE = torch.ones((), dtype=torch.float64)
"""Do not clip."""


def gradient(size: int, step: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 + step))


def by_the_formula(weight: Tensor, lrs: list[float], decay: float, bias_correction: bool) -> list[Tensor]:
    """Run algorithm 2 of Loshchilov and Hutter 2019 in fp64; return the weights of every step."""
    x, (beta1, beta2) = weight.double(), CONFIG.betas
    m = v = torch.zeros_like(x)
    results = []
    for t, lr in enumerate(lrs, 1):
        g = gradient(len(x), t).double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        low, high = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        update = (m / low) / ((v / high).sqrt() + CONFIG.eps)
        x = x - lr * (update + decay * x)
        results.append(x)
    return results


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decays", [True, False])
def test_follows_the_formula_under_a_changing_rate(decays: bool, bias_correction: bool) -> None:
    part = segment(200, decays, seed=1)
    lrs = [1e-2, 2e-2, 5e-3, 1e-3, 1e-3, 0.0]
    expected = by_the_formula(part.weight.clone(), lrs, CONFIG.weight_decay if decays else 0.0, bias_correction)
    config = CONFIG.model_copy(update={"bias_correction": bias_correction})
    optimizer = OPTIMIZERS["adamw"].load()([part], config)
    for step, lr in enumerate(lrs, 1):
        part.grad.copy_(gradient(200, step))
        optimizer.step(lr, step, ONE, GO)
        torch.testing.assert_close(part.weight.double(), expected[step - 1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(part.weight, segment(200, decays, seed=1).weight)


def test_segmentation_does_not_change_the_result() -> None:
    full, body = segment(100, True, seed=2), OPTIMIZERS["adamw"].load()
    flat = segment(100, True, seed=2)
    cuts = [
        Segment(flat.weight[part], flat.grad[part], {k: v[part] for k, v in flat.state.items()}, True, True)
        for part in (slice(0, 7), slice(7, 64), slice(64, 100))
    ]
    one, many = body([full], CONFIG), body(cuts, CONFIG)
    for step in range(1, STEPS):
        for part in (full, flat):
            part.grad.copy_(gradient(100, step))
        one.step(1e-2, step, ONE, GO)
        many.step(1e-2, step, ONE, GO)
    for name in ("weight", *full.state):  # the ends of a range are not vectorized, and round differently
        ours, theirs = (part.weight if name == "weight" else part.state[name] for part in (full, flat))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_all_state_is_in_the_segments() -> None:
    """A new optimizer over the same segments, as after loading a checkpoint, continues bit-equal."""
    one, other, body = segment(50, True, seed=3), segment(50, True, seed=3), OPTIMIZERS["adamw"].load()
    straight, broken = body([one], CONFIG), body([other], CONFIG)
    for step in range(1, STEPS):
        if step == 3:
            broken = body([other], CONFIG)
        for part in (one, other):
            part.grad.copy_(gradient(50, step))
        straight.step(1e-2, step, ONE, GO)
        broken.step(1e-2, step, ONE, GO)
    assert torch.equal(one.weight, other.weight)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-14)], ids=str)
def test_grad_factor_scales_the_gradient(dtype: torch.dtype, tolerance: float) -> None:
    """In fp64 to the last digits, because layouts of a model are compared to the last digits."""
    body, factor = OPTIMIZERS["adamw"].load(), torch.tensor(math.pi * 1e-5, dtype=torch.float64)
    clipped, within = (
        Segment(p.weight.to(dtype), p.grad.to(dtype), {k: v.to(dtype) for k, v in p.state.items()}, True, True)
        for p in (segment(100, True, seed=5), segment(100, True, seed=5))
    )
    for step in range(1, STEPS):
        within.grad.copy_(gradient(100, step).to(dtype))
        clipped.grad.copy_(within.grad.double() * factor)
        body([clipped], CONFIG).step(1e-2, step, ONE, GO)
        body([within], CONFIG).step(1e-2, step, factor, GO)
    for name in ("weight", *within.state):
        ours, theirs = (part.weight if name == "weight" else part.state[name] for part in (within, clipped))
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)


def test_a_skipped_step_changes_nothing() -> None:
    part, body = segment(50, True, seed=4), OPTIMIZERS["adamw"].load()
    optimizer = body([part], CONFIG)
    part.grad.fill_(math.nan)
    before = [t.clone() for t in (part.weight, *part.state.values())]
    optimizer.step(1e-2, 1, ONE, torch.ones(()))
    assert part.grad.isnan().all(), "the guard reads the gradient"
    assert all(torch.equal(a, b) for a, b in zip(before, (part.weight, *part.state.values()), strict=True))
    optimizer.step(1e-2, 1, ONE, GO)
    assert not part.weight.isfinite().all()


def test_cards_declare_the_optimizers_state() -> None:
    for name in OPTIMIZERS.names():
        card = OPTIMIZERS[name]
        if isinstance(rule := card.load(), type):
            assert tuple(card.facts["state"]) == rule.state_names


def trained_beside_torch(run: Any) -> list[tuple[float, bool]]:
    """Compare master weights with torch's AdamW on the same gradients, step by step.

    Returns the largest difference relative to the largest update, and whether the weights are the rounded masters.
    """
    from megascale.train.step import train_step

    config = run.config
    (bucket,) = run.buffers.buckets
    (shard,) = run.optimizer.shards
    slots = {slot.parameter.name: slice(slot.start, slot.stop) for slot in bucket.layout.slots}
    theirs = {name: shard.master[place].clone().requires_grad_() for name, place in slots.items()}
    flat = {name for name in slots if name.endswith(".bias") or "norm" in name}
    o = config.optimizer
    groups = [
        {"params": [theirs[name] for name in slots if name not in flat], "weight_decay": o.weight_decay},
        {"params": [theirs[name] for name in slots if name in flat], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=tuple(o.betas), eps=o.eps, foreach=False, fused=False)
    results = []
    for _ in range(config.train.steps):
        before = shard.master.clone()
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        for name, place in slots.items():  # the kernel leaves the clipped gradients in place
            theirs[name].grad = bucket.grad[place].clone()
        for group in reference.param_groups:
            group["lr"] = result.lr
        reference.step()
        worst = max(float((theirs[name] - shard.master[place]).detach().abs().max()) for name, place in slots.items())
        rounded = torch.equal(bucket.weights, shard.master.to(bucket.weights.dtype))
        results.append((worst / float((shard.master - before).abs().max()), rounded))
    return results


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_as_with_torch_adamw(family: str, precision: str, tmp_path: Path) -> None:
    model = FAMILIES[family] | {"num_layers": 2}
    # biases start at zero, where decay has no effect: a large learning rate moves them
    more = {"train__precision": precision, "train__steps": 5, "optimizer__weight_decay": 0.5, "optimizer__lr": 5e-2}
    more["optimizer__min_lr"] = 1e-2
    config = config_of(settings(model, tmp_path, **more), tmp_path)
    (results,) = run_threads(config, trained_beside_torch)
    assert len(results) == 5 and all(difference < 1e-4 and rounded for difference, rounded in results)


def masters(run: Any) -> list[tuple[torch.dtype, torch.dtype, bool]]:
    """Return the dtypes of weights and masters, and whether masters are separate tensors."""
    return [
        (s.bucket.weights.dtype, s.master.dtype, s.master.data_ptr() != s.bucket.shard_weights.data_ptr())
        for s in run.optimizer.shards
    ]


@pytest.mark.parametrize("precision", PRECISIONS.names())
def test_masters_are_copies_only_if_the_dtypes_differ(precision: str, tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, train__precision=precision), tmp_path)
    facts = PRECISIONS[precision].facts
    expected = (
        getattr(torch, facts["compute_dtype"]),
        getattr(torch, facts["accumulate_dtype"]),
        facts["master_weights"],
    )
    assert run_threads(config, masters) == [[expected]]


DECAYED = {
    "gpt": {"embedding.token.weight", "embedding.position.weight"},
    "llama": {"embedding.token.weight", "head.weight"},
}
DECAYED_IN_A_LAYER = {
    "gpt": {"attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"},
    "llama": {"attention.qkv.weight", "attention.out.weight", "mlp.gate_up.weight", "mlp.down.weight"},
}


def decayed(run: Any) -> tuple[set[str], set[str]]:
    """Return the parameters that shrink, and those that stay, in a step without gradient."""
    before = {}
    for bucket in run.buffers.buckets:
        for name, parameter in bucket.parameters.items():
            parameter.data.add_(1.0)
            before[name] = parameter.detach().clone()
    run.buffers.begin_step()
    unclipped = run.optimizer.compute_clipping(*torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    for index in range(len(run.buffers.buckets)):
        run.optimizer.update_shard(index, unclipped, 0.1, 1)
    gather_weights(run)
    now = {n: p.detach() for bucket in run.buffers.buckets for n, p in bucket.parameters.items()}
    factor = 1 - 0.1 * run.config.optimizer.weight_decay
    shrunk = {n for n in before if torch.allclose(now[n], before[n] * factor, rtol=1e-12)}
    stayed = {n for n in before if torch.equal(now[n], before[n])}
    assert shrunk | stayed == set(before)
    return shrunk, stayed


@pytest.mark.parametrize("family", FAMILIES)
def test_only_matrices_decay(family: str, tmp_path: Path) -> None:
    """Wherever the shard boundary of two ranks lies."""
    layout = {"parallel__dp": 2, "parallel__zero": 1}
    config = config_of(settings(FAMILIES[family], tmp_path, **layout), tmp_path)
    layers = {f"layers.{i}.{name}" for i in range(GPT["num_layers"]) for name in DECAYED_IN_A_LAYER[family]}
    for shrunk, stayed in run_threads(config, decayed):
        assert shrunk == DECAYED[family] | layers
        assert all("norm" in name or name.endswith(".bias") for name in stayed) and stayed


def moved(rank: Rank, config: Any) -> float:
    """Count bytes per parameter that operators read and write in large tensors, in a step without its backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Moved(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if function.is_view or function.namespace != "aten":
                return out
            for argument, given in zip(function._schema.arguments, args, strict=False):
                size = large(given)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                reads = not (writes and function.overloadpacket in WRITE_ONLY)
                total.append(size * (writes + reads))
            if not function._schema.is_mutable:
                total.append(large(out))
            return out

    def large(given: Any) -> int:
        tensors = given if isinstance(given, list | tuple) else [given]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.numel() > 64)

    run = build_run(rank, config)
    total: list[int] = []
    backward = run.pipeline.run_actions

    def uncounted(*arguments: Any) -> Tensor:
        counted = len(total)
        loss: Tensor = backward(*arguments)
        del total[counted:]
        return loss

    run.pipeline.run_actions = uncounted
    train_step(run, run.train_loader.batch(0))
    with Moved():
        train_step(run, run.train_loader.batch(8))
    return sum(total) / sum(bucket.layout.numel for bucket in run.buffers.buckets)


WRITE_ONLY = (torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_)


def test_a_step_moves_42_bytes_per_parameter(tmp_path: Path) -> None:
    """The sum of the table in `optim.adamw`."""
    model = LLAMA | {"hidden_size": 64, "ffn_size": 128}
    tree = settings(model, tmp_path, train__precision="bf16", batch__global=2)
    ((results),) = run_world(1, moved, config_of(tree, tmp_path))
    assert results == pytest.approx(42, rel=0.01)
