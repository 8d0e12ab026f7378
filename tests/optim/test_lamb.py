"""LAMB against its formula on full parameters, in one process and in every kind of layout."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megascale.config.train import OptimizerConfig
from megascale.core.rank import Rank
from megascale.layout.parameters import all_params
from megascale.layout.topology import Coord, Topology
from megascale.ops.optimizer import Segment
from megascale.optim import norms
from megascale.optim.lamb import Lamb
from megascale.optim.lr import learning_rate
from tests.marks import only_quick_rows
from tests.runs import FAMILIES, build_run, config_of, curve_of, gather_weights, given, settings
from tests.thread_world import run_threads
from tests.worlds import run_world

GO, SKIP = torch.zeros(()), torch.ones(())


def segments(dtype: torch.dtype = torch.float64) -> list[Segment]:
    """Create segments of two matrices, a norm, a matrix of zeros, a matrix without decay, and a vector with decay."""
    draw = torch.Generator().manual_seed(1)
    measured = []
    sizes, scales = (200, 50, 90, 77, 60, 40), (2.0, 1.0, 0.5, 0.0, 1.0, 1.0)
    flags = ((True, True), (False, False), (True, True), (True, True), (True, False), (False, True))
    for size, scale, (is_matrix, weight_decay) in zip(sizes, scales, flags, strict=True):
        state = {name: torch.zeros(size, dtype=dtype) for name in Lamb.state_names}
        weight = (scale * torch.randn(size, dtype=torch.float64, generator=draw)).to(dtype)
        measured.append(Segment(weight, torch.zeros_like(weight), state, is_matrix, weight_decay))
    return measured


def gradient(size: int, step: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + step))


def norms_of(parts: list[Segment]) -> Tensor:
    """Compute the norms as if a segment were a full parameter."""
    pairs = [(part.weight.double().norm(), part.grad.double().norm()) for part in parts if part.is_matrix]
    return torch.tensor(pairs, dtype=torch.float64).T


@pytest.mark.parametrize("weight_decay", [0.2, 0.0])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_follows_the_formula(dtype: torch.dtype, close: float, bias_correction: bool, weight_decay: float) -> None:
    config = OptimizerConfig(
        lr=1e-2, weight_decay=weight_decay, betas=[0.8, 0.9], eps=1e-6, bias_correction=bias_correction
    )
    parts = segments(dtype)
    rule = Lamb(parts, config)
    expected = [(p.weight.double().clone(), *[torch.zeros(len(p.weight)).double()] * 2) for p in parts]
    for step, lr in enumerate([1e-2, 2e-2, 5e-3, 1e-3, 0.0], 1):
        for part in parts:
            part.grad.copy_(gradient(len(part.grad), step))
        rule.compute_updates(step, GO)
        rule.apply_updates(lr, norms_of(parts), GO)
        for index, part in enumerate(parts):
            x, m, v = expected[index]
            g = gradient(len(x), step)
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            low, high = (1 - 0.8**step, 1 - 0.9**step) if bias_correction else (1.0, 1.0)
            u = (m / low) / ((v / high).sqrt() + 1e-6)
            u = u + weight_decay * part.weight_decay * x
            ratio = float(x.norm() / u.norm()) or 1.0 if part.is_matrix else 1.0
            expected[index] = (x - lr * ratio * u, m, v)
            for ours, theirs in zip((part.weight, *part.state.values()), expected[index], strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=close, atol=close)


def test_a_skipped_step_changes_nothing() -> None:
    """Includes the gradient, because the guard reads a non-finite gradient."""
    parts = segments()
    rule = Lamb(parts, OptimizerConfig(lr=1e-2))
    for part in parts:
        part.grad.copy_(gradient(len(part.grad), 1))
    parts[0].grad[7] = math.nan
    before = [t.clone() for p in parts for t in (p.weight, p.grad, *p.state.values())]
    rule.compute_updates(1, SKIP)
    rule.apply_updates(1e-2, norms_of(parts), SKIP)
    after = [t for p in parts for t in (p.weight, p.grad, *p.state.values())]
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(before, after, strict=True))
    rule.compute_updates(1, GO)
    rule.apply_updates(1e-2, norms_of(parts), GO)
    assert not parts[0].weight.isfinite().all()


def test_a_shard_may_hold_no_parameter() -> None:
    rule = Lamb([], OptimizerConfig(lr=1e-2))
    rule.compute_updates(1, GO)
    rule.apply_updates(1e-2, torch.zeros(2, 0, dtype=torch.float64), GO)


@dataclass(frozen=True)
class Reference:
    """A one-process run by autograd and the formula on full parameters: loss and gradient norm by step, final weights,
    and the norms of weights and updates in the last step.
    """

    curve: list[tuple[float, float]]
    weights: dict[str, Tensor]
    norms: dict[str, tuple[float, float]]


STEPS = 4
RUN: dict[str, Any] = {
    "train__steps": STEPS, "batch__global": 4, "optimizer__name": "lamb", "optimizer__lr": 2e-2, "optimizer__eps": 1e-6,
    "optimizer__clip_norm": 0.1,
}  # fmt: skip
PLAIN = {"optimizer__bias_correction": False}
SMALL = {"overlap__bucket_bytes": 20_000}
WIDE = {"num_kv_heads": 4}  # for tp = 4

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4 zero0": {"parallel__dp": 4, "parallel__zero": 0},
    "dp4 zero1": {"parallel__dp": 4},
    "dp4 zero2": {"parallel__dp": 4, "parallel__zero": 2},
    "dp4 zero1 buckets": {"parallel__dp": 4, **SMALL},
    "tp4": {"parallel__tp": 4},
    "tp2 dp2 zero0": {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 0},
    "tp2 sp dp2 zero2 buckets": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__zero": 2, **SMALL,
    },
    "pp2 dp2": {"parallel__pp": 2, "parallel__dp": 2},
    "pp2 dp2 zero0 plain": {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 0, **PLAIN},
    "tp2 sp pp2 vpp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
    "pp4": {"parallel__pp": 4},
}  # fmt: skip
CASES = [("llama", name) for name in ("dp4 zero1", "tp4", "pp2 dp2", "pp4")] + [("gpt", name) for name in LAYOUTS]
QUICK = (
    ("llama", "tp4"), ("gpt", "dp4 zero1 buckets"), ("gpt", "tp2 sp dp2 zero2 buckets"), ("gpt", "tp2 sp pp2 vpp2"),
    ("gpt", "pp2 dp2 zero0 plain"),
)  # fmt: skip
"""Each family, axis, ZeRO stage and size of buckets, with and without correction of bias."""

LARGEST: dict[str, dict[str, Any]] = {
    "tp2 sp pp2 vpp2 dp2 zero1": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2,
    },
    "tp2 pp2 dp2 zero2 buckets": {
        "parallel__tp": 2, "parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2, **SMALL,
    },
}  # fmt: skip


def configuration(folder: Path, family: str, **layout: Any) -> Any:
    return config_of(settings(FAMILIES[family] | WIDE, folder, **RUN, **layout), folder)


def by_the_formula(config: Any) -> Reference:
    """Train without our buckets, micro-batches, groups and optimizer. The parts of a fused weight, such as q, k and v,
    have a trust ratio each.
    """
    from megascale.data.mix.loader import BatchShape, Loader
    from megascale.data.mix.mock_mixture import build_mixture
    from megascale.model.initialize import init_parameters
    from megascale.model.transformer import Stage
    from megascale.train.run_splits import mixture_spec

    o, total = config.optimizer, config.batch.total
    parameters, parts = {}, dict[str, dict[str, int]]()
    for parameter in all_params(config.model):
        weight = torch.zeros(parameter.local_shape(Topology()), dtype=torch.float64)
        init_parameters([(weight, parameter)], Topology(), Coord(), config.train.seed)
        parameters[parameter.name] = nn.Parameter(weight)
        parts[parameter.name] = {part.name: part.local_shape(Topology())[0] for part in parameter.parts}
    stage = Stage(given(config.model, parameters), range(config.model.num_layers), True, True)
    samples = build_mixture(mixture_spec(config, "train"))
    loader = Loader(
        samples, BatchShape(total, total, 1), 0, dropout=0.0, seed=config.train.seed, device=torch.device("cpu")
    )
    m = {name: torch.zeros_like(p) for name, p in parameters.items()}
    v = {name: torch.zeros_like(p) for name, p in parameters.items()}
    beta1, beta2 = o.betas
    curve, norms = [], {}
    for step in range(1, STEPS + 1):
        batch = loader.batch((step - 1) * total).micro_batches[0]
        tokens, losses = batch.labels.numel(), stage(None, batch).loss
        measured, loss = torch.autograd.grad(losses, list(parameters.values())), losses / tokens
        grads = {name: grad / tokens for name, grad in zip(parameters, measured, strict=True)}
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        curve.append((float(loss), norm))
        lr = learning_rate(o, STEPS)(step)
        for name, p in parameters.items():
            g = grads[name] * min(1.0, o.clip_norm / (norm + 1e-6))
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            low, high = (1 - beta1**step, 1 - beta2**step) if o.bias_correction else (1.0, 1.0)
            u = (m[name] / low) / ((v[name] / high).sqrt() + o.eps)
            if p.dim() > 1:  # matrices
                u = u + o.weight_decay * p.detach()
                rows = list(parts[name].values())
                for part, weight, update in zip(parts[name], p.detach().split(rows), u.split(rows), strict=True):
                    norms[part] = float(weight.norm()), float(update.norm())
                    update *= norms[part][0] / norms[part][1]
            p.data -= lr * u
    return Reference(curve, {name: p.detach() for name, p in parameters.items()}, norms)


@dataclass(frozen=True)
class Outcome:
    """A rank's view of a run: the curve, shards of the weights by tensor (offset, elements) with their shapes, and the
    norms of its stage's matrices in the last step.
    """

    curve: list[tuple[float, float]]
    pieces: dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], Any]]]]
    norms: dict[str, tuple[float, float]]


def outcome(run: Any) -> Outcome:
    from megascale.train.step import train_step

    optimizer, norms_by_step = run.optimizer, []
    compute_updates = optimizer.compute_updates
    optimizer.compute_updates = lambda *arguments: (
        compute_updates(*arguments),
        norms_by_step.append(optimizer.updates[0].norms),
    )
    curve = []
    for _ in range(STEPS):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        curve.append((result.loss, result.grad_norm))
    run.buffers.finish_param_gather()
    slots = [slot for bucket in run.buffers.buckets for slot in bucket.layout.slots if slot.parameter.is_matrix]
    names = [part.name for slot in slots for part in slot.parameter.parts]
    last_norms = dict(zip(names, norms_by_step[-1].T.tolist(), strict=True))
    tensors = optimizer.global_tensors().items()
    pieces = {
        name.removeprefix("weights."): (tuple(t.shape), [(p.offset, p.data.clone().numpy()) for p in t.shards])
        for name, t in tensors
        if name.startswith("weights.")
    }
    return Outcome(curve, pieces, last_norms)


def assemble(config: Any, ranks: list[Outcome]) -> dict[str, Tensor]:
    """Assemble the full weights by parameter, and check that replicas are bit-equal."""
    tensors: dict[str, Tensor] = {}
    for rank in ranks:
        for name, (shape, pieces) in rank.pieces.items():
            known = tensors.setdefault(name, torch.full(shape, math.nan, dtype=torch.float64))
            for offset, numbers in pieces:
                place = tuple(slice(o, o + n) for o, n in zip(offset, numbers.shape, strict=True))
                old, new = known[place], torch.from_numpy(numbers)
                assert bool((old.isnan() | (old == new)).all()), f"replicas of {name} differ"
                known[place] = new
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return {p.name: torch.cat([tensors[t.name] for t in p.parts]) for p in all_params(config.model)}


def difference(config: Any, ranks: list[Outcome], expected: Reference) -> float:
    """Return the largest difference of any parameter's weights, relative to its largest weight."""
    measured = assemble(config, ranks)
    size = config.model.vocab_size  # later rows are padding, and stay zero
    pairs = [
        (measured[name], weight[:size] if name in ("embedding.token.weight", "head.weight") else weight)
        for name, weight in expected.weights.items()
    ]
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Reference]:
    """Reference runs by family and bias correction."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        (family, not plain): by_the_formula(configuration(folder, family, **plain))
        for family in FAMILIES
        for plain in ({}, PLAIN)
    }


def trained(
    folder: Path, cases: dict[tuple[str, str], dict[str, Any]], unplugged: Sequence[str] = (), nudged: bool = False
) -> dict[tuple[str, str], tuple[Any, list[Outcome]]]:
    """Train every configuration. `unplugged`: the axes over which norms are not reduced; `nudged`: the last rank's sums
    of squares are off by the last bit.
    """
    plugged, exact, here = norms.all_reduce, norms.sums_of_squares, threading.local()

    def body(run: Any) -> Outcome:
        here.factor = 1 + 2**-52 if nudged and run.mesh.rank == run.mesh.world.size - 1 else 1.0
        return outcome(run)

    def partly(group: Any, *tensors: Any, **how: Any) -> None:
        if group.axis not in unplugged:
            plugged(group, *tensors, **how)

    configs = {case: configuration(folder, case[0], **layout) for case, layout in cases.items()}
    with (
        patch.object(norms, "all_reduce", partly),
        patch.object(norms, "sums_of_squares", lambda tensors: exact(tensors) * here.factor),
    ):
        return {case: (config, run_threads(config, body)) for case, config in configs.items()}


def compare(config: Any, ranks: list[Outcome], expected: Reference) -> None:
    assert difference(config, ranks, expected) < 1e-10
    for rank in ranks:
        assert sum(rank.curve, ()) == pytest.approx(sum(expected.curve, ()), rel=1e-10)
        for name, both in rank.norms.items():
            assert both == pytest.approx(expected.norms[name], rel=1e-10), name
    assert {name for rank in ranks for name in rank.norms} == expected.norms.keys()
    for name in expected.norms:
        assert len({rank.norms[name][0] for rank in ranks if name in rank.norms}) == 1, "norms differ between ranks"


@pytest.mark.parametrize(("family", "layout"), only_quick_rows(CASES, *QUICK))
def test_every_layout_equals_one_process(family: str, layout: str, references: Any, tmp_path: Path) -> None:
    ((config, ranks),) = trained(tmp_path, {(family, layout): LAYOUTS[layout]}).values()
    compare(config, ranks, references[family, config.optimizer.bias_correction])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LARGEST)
def test_all_axes_at_once(layout: str, references: Any, tmp_path: Path) -> None:
    cases = {(family, layout): LARGEST[layout] for family in FAMILIES}
    for (family, _), (config, ranks) in trained(tmp_path, cases).items():
        compare(config, ranks, references[family, True])


def test_norms_of_shards_would_change_the_run(references: Any, tmp_path: Path) -> None:
    """Both reductions are needed, and the comparison depends on the trust ratios."""
    cases = {("llama", name): LAYOUTS[name] for name in ("dp4 zero1", "tp4")}
    for (family, name), (config, ranks) in trained(tmp_path, cases, unplugged=("tp", "dp")).items():
        assert difference(config, ranks, references[family, True]) > 1e-4, name
    for reference in references.values():
        ratios = [weight / direction for weight, direction in reference.norms.values()]
        assert max(ratios) / min(ratios) > 2, "ratios are too similar to show an error"


def test_both_stages_scale_a_tied_embedding_equally(tmp_path: Path) -> None:
    """Bit-equal, although the stages may round their sums differently."""
    cases = {("gpt", "pp2"): {"parallel__pp": 2}}
    for unplugged in ((), ("tied",)):
        ((config, ranks),) = trained(tmp_path, cases, nudged=True, unplugged=unplugged).values()
        first, last = (rank.norms["embedding.token.weight"] for rank in ranks)
        if unplugged:
            assert first != last and first == pytest.approx(last, rel=1e-12)
        else:
            assert first == last
            assemble(config, ranks)


def resumed(rank: Rank, config: Any, other: Any) -> tuple[bool, list[tuple[float, float]], list[tuple[float, float]]]:
    """Return whether a resumed run is bit-equal to an uninterrupted run; and its curve, here and in another layout."""
    straight = build_run(rank, config)
    whole_curve = curve_of(straight, STEPS)
    half = build_run(rank, config, straight.mesh)
    curve_of(half, STEPS // 2)
    half.checkpoints.save(half.progress)
    again = resume(build_run(rank, config, straight.mesh))
    curve = curve_of(again, STEPS - STEPS // 2)
    same = curve == whole_curve[STEPS // 2 :]
    for one, two in zip(straight.optimizer.shards, again.optimizer.shards, strict=True):
        pairs = [(one.master, two.master), *((one.state[name], two.state[name]) for name in one.state)]
        same = same and all(torch.equal(a, b) for a, b in pairs)
    elsewhere = resume(build_run(rank, other))
    return same, curve, curve_of(elsewhere, STEPS - STEPS // 2)


def resume(run: Any) -> Any:
    measured = run.checkpoints.resume()
    run.progress = measured.progress
    run.optimizer.copy_masters_to_weights()
    gather_weights(run)
    return run


@pytest.mark.parametrize(
    ("precision", "close", "tp"),
    only_quick_rows([("fp32", 1e-5, 1), ("fp32", 1e-5, 2), ("bf16", 1e-2, 2)], ("fp32", 1e-5, 1)),
)
def test_resumes_bit_equal_and_in_another_layout(precision: str, close: float, tp: int, tmp_path: Path) -> None:
    """With shards of the state, and then on two stages, without shards if there are two ranks."""
    more = {"train__precision": precision, "checkpoint__every": 1}
    config = configuration(tmp_path, "gpt", parallel__tp=tp, parallel__dp=2, **more, **SMALL)
    other = configuration(tmp_path, "gpt", parallel__pp=2, parallel__dp=tp, parallel__zero=2 * (tp - 1), **more)
    for same, curve, elsewhere in run_world(2 * tp, resumed, config, other):
        assert same
        assert sum(elsewhere, ()) == pytest.approx(sum(curve, ()), rel=close)
