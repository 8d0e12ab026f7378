"""Rules as functions: against torch's or an independent reference, their limits, and all of them in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.optimizers import MATRIX_UNITS, OPTIMIZERS, with_defaults
from megascale.config.train import OptimizerConfig
from megascale.core.errors import ConfigError
from megascale.core.registry import Card
from megascale.core.seeds import seed_of
from megascale.layout.param_groups import ParamGroup
from megascale.ops.optimizer import Segment, UpdateInput
from megascale.optim.contrib.counter_random import random_subset
from megascale.optim.contrib.spam import rewarmed, spam
from megascale.optim.contrib.swan import whiten
from megascale.optim.matrix_updates import BucketMatrices
from tests.optim.layouts import LAYOUT_CASES, LAYOUTS, configuration, difference, state_after

FUNCTIONS = [name for name in OPTIMIZERS.names() if not isinstance(OPTIMIZERS[name].load(), type)]
SHAPES = [(12, 20), (20, 12), (16, 16)]


def gradient(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def walk(
    name: str, shape: tuple[int, int], steps: int = 6, lr: float = 0.01, size: Callable[[int], float] = lambda _: 1.0,
    head_dim: int | None = None, tensor: str = "", **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return the weight after steps without decay, and the state. `size`: a factor of the gradient, by step."""
    group = ParamGroup(name, 0.0, options=options)
    weight, state = gradient(shape, 0), {
        key: torch.zeros(dims, dtype=dtype_of(group, key)) for key, dims in group.state_shapes(shape).items()
    }  # fmt: skip
    for step in range(1, steps + 1):
        grad = size(step) * gradient(shape, step)
        given = UpdateInput(grad, state, step, group.all_options, weight, head_dim, tensor, step == 1, lr)
        direction, state = OPTIMIZERS[name].load()(given)
        weight = weight - lr * direction
    return weight, state


def dtype_of(group: ParamGroup, state: str) -> torch.dtype:
    return torch.uint8 if state in group.facts["uint8"] else torch.float64


def adam(shape: tuple[int, int], steps: int, lr: float, betas: tuple[float, float] = (0.9, 0.999)) -> Tensor:
    weight = torch.nn.Parameter(gradient(shape, 0))
    optimizer = torch.optim.AdamW([weight], lr=lr, betas=betas, eps=1e-8, weight_decay=0.0)
    for step in range(1, steps + 1):
        weight.grad = gradient(shape, step)
        optimizer.step()
    return weight.detach()


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_state_is_as_the_card_says(name: str, shape: tuple[int, int]) -> None:
    """Names, shapes and dtype; and the input is unchanged."""
    facts, variants = with_defaults(OPTIMIZERS[name].facts), [dict[str, Any]()]
    variants += [{option: value} for option, value in facts["state_with"]]
    for options in variants:
        state_is_as_declared(ParamGroup(name, 0.0, options={**options, **ranks(facts)}), shape)


def ranks(facts: dict[str, Any]) -> dict[str, int]:
    return {"rank": 4} if "rank" in facts["options"] else {}


def state_is_as_declared(group: ParamGroup, shape: tuple[int, int]) -> None:
    state = {key: torch.zeros(size, dtype=dtype_of(group, key)) for key, size in group.state_shapes(shape).items()}
    grad = gradient(shape, 1)
    before, rule = grad.clone(), OPTIMIZERS[group.rule].load()
    direction, new = rule(UpdateInput(grad, state, 1, group.all_options, gradient(shape, 0), first=True))
    assert direction.shape == shape and direction.dtype == torch.float64
    assert {key: (values.shape, values.dtype) for key, values in new.items()} == {
        key: (values.shape, values.dtype) for key, values in state.items()
    }
    assert torch.equal(grad, before) and not any(values.any() for values in state.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_adafactor_is_torch_s(shape: tuple[int, int]) -> None:
    weight = torch.nn.Parameter(gradient(shape, 0))
    theirs = torch.optim.Adafactor([weight], lr=0.01, beta2_decay=-0.8, eps=(1e-30, 1e-3), d=1.0, weight_decay=0.0)
    for step in range(1, 7):
        weight.grad = gradient(shape, step)
        theirs.step()
    assert close(walk("adafactor", shape)[0], weight.detach())


def test_lion_by_its_formula() -> None:
    weight, momentum = gradient((4, 6), 0), torch.zeros(4, 6, dtype=torch.float64)
    for step in range(1, 7):
        grad = gradient((4, 6), step)
        weight = weight - 0.01 * torch.sign(0.9 * momentum + 0.1 * grad)
        momentum = 0.99 * momentum + 0.01 * grad
    ours, state = walk("lion", (4, 6))
    assert close(ours, weight) and close(state["momentum"], momentum)


@pytest.mark.parametrize("shape", SHAPES)
def test_came_by_its_formula(shape: tuple[int, int]) -> None:
    (rows, columns), weight = shape, gradient(shape, 0)
    r, c, rr, cc = (torch.zeros(n, dtype=torch.float64) for n in (rows, columns, rows, columns))
    m = torch.zeros(shape, dtype=torch.float64)
    for step in range(1, 7):
        g = gradient(shape, step)
        r = 0.999 * r + 0.001 * (g * g + 1e-30).sum(1) / columns
        c = 0.999 * c + 0.001 * (g * g + 1e-30).sum(0) / rows
        u = g / torch.sqrt(torch.outer(r, c) / (r.sum() / rows))
        u = u / max(1.0, float(u.norm()) / math.sqrt(rows * columns))
        m = 0.9 * m + 0.1 * u
        s = (u - m) ** 2 + 1e-16
        rr, cc = 0.9999 * rr + 0.0001 * s.sum(1) / columns, 0.9999 * cc + 0.0001 * s.sum(0) / rows
        weight = weight - 0.01 * m / torch.sqrt(torch.outer(rr, cc) / (rr.sum() / rows))
    assert close(walk("came", shape)[0], weight)


def test_adam_mini_has_a_moment_for_each_head_or_row() -> None:
    """A block of one element is AdamW."""
    _, state = walk("adam_mini", (12, 20), head_dim=4, tensor="layers.0.attention.q.weight")
    blocks = state["exp_avg_sq"].view(3, 4)
    assert torch.equal(blocks, blocks[:, :1].expand(3, 4)) and len(set(blocks[:, 0].tolist())) == 3
    _, of_rows = walk("adam_mini", (12, 20), head_dim=4, tensor="layers.0.attention.v.weight")
    assert len(set(of_rows["exp_avg_sq"].tolist())) == 12
    assert close(walk("adam_mini", (30, 1))[0], adam((30, 1), 6, 0.01, (0.9, 0.95)))


@pytest.mark.parametrize("shape", SHAPES)
def test_sinkgd_equalizes_norms(shape: tuple[int, int]) -> None:
    group = ParamGroup("sinkgd", 0.0, options={"iterations": 40, "scale": 1.0})
    x, state = OPTIMIZERS["sinkgd"].load()(UpdateInput(gradient(shape, 1), {}, 1, group.all_options))
    rows, columns = shape
    assert state == {}
    assert torch.allclose(x.norm(dim=1), torch.full((rows,), math.sqrt(columns), dtype=torch.float64), rtol=1e-6)
    assert torch.allclose(x.norm(dim=0), torch.full((columns,), math.sqrt(rows), dtype=torch.float64), rtol=1e-6)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_swan_whitens(shape: tuple[int, int]) -> None:
    """As the singular value decomposition, with enough steps."""
    x = gradient(shape, 1)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    assert torch.allclose(whiten(x, 40), u @ vh, rtol=0, atol=1e-8)


def test_spam_without_spikes_and_resets_is_adam() -> None:
    assert close(walk("spam", (6, 8), theta=1e30, reset_every=1000)[0], adam((6, 8), 6, 0.01))


def test_spam_clips_spikes_and_resets() -> None:
    """A spike of 1000 times the gradient counts as one of sqrt(theta) standard deviations."""

    def second_moment(**options: Any) -> Tensor:
        return walk("spam", (6, 8), 30, size=lambda step: 1000.0 if step == 30 else 1.0, **options)[1]["exp_avg_sq"]

    before = walk("spam", (6, 8), 29)[1]["exp_avg_sq"]
    assert close(second_moment(theta=1e30), 0.999 * before + 0.001 * (1000 * gradient((6, 8), 30)).square())
    assert float((second_moment() / before).max()) <= 0.999 + 0.001 * 5000 + 1e-9
    _, after = walk("spam", (6, 8), 11, reset_every=10)
    torch.testing.assert_close(after["exp_avg"], 0.1 * gradient((6, 8), 11), rtol=1e-12, atol=0)
    assert rewarmed(0, 150) < 0.02 and rewarmed(149, 150) > 0.99 and rewarmed(150, 150) == 1.0


@pytest.mark.parametrize("step", [5, 30, 700])
def test_spam_moves_what_has_no_moments_yet(step: int) -> None:
    """Rows of tokens that come late, and state that begins anew: nothing is clipped to moments of zero."""
    options = OPTIMIZERS["spam"].facts["options"]
    state = {name: torch.zeros(6, 8, dtype=torch.float64) for name in ("exp_avg", "exp_avg_sq")}
    direction, after = spam(UpdateInput(gradient((6, 8), 1), state, step, options))
    assert bool(direction.all()) and bool(after["exp_avg_sq"].all())
    direction, _ = spam(UpdateInput(1e6 * gradient((6, 8), 2), after, step + 1, options))
    assert float(direction.abs().max()) < 100  # and then spikes are clipped


def test_sparse_spam_by_its_formula() -> None:
    """On the elements that the name and the reset give: the others stay."""
    options = {"density": 0.3, "theta": 2.0, "reset_every": 4, "settle": 1, "rewarmup": 2}
    expected, m, v = gradient((12, 20), 0).view(-1), [0.0] * 72, [0.0] * 72
    for step in range(1, 11):
        reset, since = divmod(step - 1, 4)
        chosen = random_subset(seed_of("spam", "a", reset), 240, 72, torch.device("cpu")).tolist()
        m, v = (m, v) if since else ([0.0] * 72, [0.0] * 72)
        rate = 1 - 0.99 * (1 + math.cos(math.pi * (since + 1) / 3)) / 2 if reset and since < 2 else 1.0
        for at, place in enumerate(chosen):
            g = float(gradient((12, 20), step).view(-1)[place])
            if since and g * g > 2 * v[at]:
                g = math.copysign(math.sqrt(2 * v[at]), g)
            m[at], v[at] = 0.9 * m[at] + 0.1 * g, 0.999 * v[at] + 0.001 * g * g
            root = math.sqrt(v[at] / (1 - 0.999 ** (since + 1))) + 1e-8
            expected[place] -= 0.01 * rate * m[at] / (1 - 0.9 ** (since + 1)) / root
        ours, state = walk("spam_sparse", (12, 20), step, tensor="a", **options)
        assert close(ours.view(-1), expected) and close(state["exp_avg"], torch.tensor(m, dtype=torch.float64))
    whole, _ = walk("spam_sparse", (12, 20), 10, **options | {"density": 1.0})
    assert close(whole, walk("spam", (12, 20), 10, **{k: v for k, v in options.items() if k != "density"})[0])


def test_a_skipped_reset_of_spam_finds_no_moments_left() -> None:
    """Steps of the bias correction count from the reset, and would enlarge what is left of the moments before it."""
    options = OPTIMIZERS["spam"].facts["options"] | {"reset_every": 4}
    _, state = walk("spam", (6, 8), 4, reset_every=4)
    given = UpdateInput(gradient((6, 8), 6), state, 6, options)  # step 5 was skipped
    fresh = replace(given, state={name: torch.zeros_like(values) for name, values in state.items()})
    assert torch.equal(spam(given)[0], spam(fresh)[0])


def test_a_skipped_reset_is_made_up_for() -> None:
    """Moments of the elements before the reset are not those of the new ones."""
    group = ParamGroup("spam_sparse", 0.0, options={"reset_every": 4})
    _, state = walk("spam_sparse", (12, 20), 4, tensor="a", reset_every=4)
    given = UpdateInput(gradient((12, 20), 6), state, 6, group.all_options, name="a")  # step 5 was skipped
    _, new = OPTIMIZERS["spam_sparse"].load()(given)
    _, fresh = OPTIMIZERS["spam_sparse"].load()(replace(given, state={k: 0 * v for k, v in state.items()}))
    assert all(torch.equal(new[name], fresh[name]) for name in new) and int(new["resets"]) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_conda_by_its_formula(shape: tuple[int, int]) -> None:
    weight, m = gradient(shape, 0), torch.zeros(shape, dtype=torch.float64)
    left = shape[0] < shape[1]
    v, u = torch.zeros(shape, dtype=torch.float64), torch.zeros(0)
    for step in range(1, 7):
        g = gradient(shape, step)
        m = 0.9 * m + 0.1 * g
        if step in (1, 4):
            svd = torch.linalg.svd(m, full_matrices=False)
            u = svd.U if left else svd.Vh.T
        pg, pm = (u.T @ g, u.T @ m) if left else (g @ u, m @ u)
        v = 0.999 * v + 0.001 * pg * pg
        n = pm / (v.sqrt() + 1e-8)
        corrected = math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        weight = weight - 0.01 * corrected * (u @ n if left else n @ u.T)
    assert close(walk("conda", shape, update_gap=4)[0], weight)


@pytest.mark.parametrize("residual", ["none", "fira"])
@pytest.mark.parametrize("shape", SHAPES)
def test_galore_by_its_formula(shape: tuple[int, int], residual: str) -> None:
    rank, weight, left = 5, gradient(shape, 0), shape[0] < shape[1]
    m = v = p = torch.zeros(0)
    before: float | None = None
    for step in range(1, 7):
        g = gradient(shape, step)
        if step in (1, 4):
            svd = torch.linalg.svd(g, full_matrices=False)
            p = svd.U[:, :rank] if left else svd.Vh[:rank].T
            p = p * (p * walk("galore", shape, step, rank=rank, update_gap=3)[1]["basis"]).sum(0).sign()  # open signs
        r = p.T @ g if left else g @ p
        m, v = (0.1 * r, 0.001 * r * r) if step == 1 else (0.9 * m + 0.1 * r, 0.999 * v + 0.001 * r * r)
        n = m / (v.sqrt() + 1e-8)
        full = p @ n if left else n @ p.T
        if residual == "fira":
            dim = 0 if left else 1
            rest = (g - (p @ r if left else r @ p.T)) * (n.norm(dim=dim) / (r.norm(dim=dim) + 1e-8)).unsqueeze(dim)
            norm = float(rest.norm())
            factor = 1.0 if before is None else max(norm / (before + 1e-8), 1.01) / 1.01
            before, full = norm / factor, full + rest / factor
        corrected = math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        weight = weight - 0.01 * 0.25 * corrected * full
    assert close(walk("galore", shape, rank=rank, update_gap=3, residual=residual)[0], weight)


def test_galore_of_full_rank_has_no_residual() -> None:
    plain, _ = walk("galore", (12, 20), rank=12)
    fira, _ = walk("galore", (12, 20), rank=12, residual="fira")
    assert torch.allclose(plain, fira, rtol=0, atol=1e-9)


# Every rule on a tensor or more of two layers; element-wise ones on ranges that shards cut.
GROUPS: list[dict[str, Any]] = [
    {"params": ["layers.0.attention.[qk].weight"], "name": "came"},
    {"params": ["layers.0.attention.v.weight"], "name": "sinkgd"},
    {"params": ["layers.0.attention.out.weight"], "name": "adafactor", "lr_mult": 0.5},
    {"params": ["layers.0.mlp.gate.weight"], "name": "swan"},
    {"params": ["layers.0.mlp.up.weight"], "name": "conda", "options": {"update_gap": 2}},
    {"params": ["layers.0.mlp.down.weight"], "name": "galore", "options": {"rank": 6, "residual": "fira"}},
    {"params": ["layers.1.attention.[qkv].weight"], "name": "adam_mini", "weight_decay": 0.3},
    {"params": ["layers.1.attention.out.weight"], "name": "lion"},
    {"params": ["layers.1.mlp.gate.weight"], "name": "spam", "options": {"reset_every": 3}},
    {"params": ["layers.1.mlp.up.weight"], "name": "adamw", "lr_mult": 2.0},
    {"params": ["layers.1.mlp.down.weight"], "name": "muon", "options": {"ns_dtype": "fp64"}},
    {"kinds": ["embedding"], "name": "came"},
    {"kinds": ["norm"], "name": "lion"},
]
ALL_RULES = {"name": "adamw", "groups": GROUPS}

# With rules that have bases on both sides, 8 bits, or other subspaces, drawn elements, and reparameterisations.
MORE_GROUPS: list[dict[str, Any]] = [
    {"params": ["layers.0.attention.[qk].weight"], "name": "soap", "options": {"update_gap": 2}},
    {"params": ["layers.0.attention.v.weight"], "name": "reg"},
    {"params": ["layers.0.attention.out.weight"], "name": "shampoo", "options": {"update_gap": 2, "max_size": 20}},
    {"params": ["layers.0.mlp.gate.weight"], "name": "adamw_8bit"},
    {"params": ["layers.0.mlp.up.weight"], "name": "galore_8bit", "options": {"rank": 4, "update_gap": 2}},
    {"params": ["layers.0.mlp.down.weight"], "name": "galore", "options": {"rank": 6, "subspace": "online_pca"}},
    {"params": ["layers.1.attention.out.weight"], "name": "grad_norm_lorp", "options": {"rank": 6, "update_gap": 2}},
    {"params": ["layers.1.mlp.gate.weight"], "name": "spam_sparse", "options": {"density": 0.4, "reset_every": 2}},
    {"params": ["layers.1.mlp.down.weight"], "name": "adamw_8bit", "options": {"codes": "e4m3"}},
    {"params": ["layers.1.mlp.up.weight"], "name": "poet", "options": {"block": 7, "merge_every": 3}},
    {
        "params": ["layers.1.attention.[qk].weight"],
        "name": "galore",
        "options": {"rank": 6, "subspace": "grass_sample", "update_gap": 2, "natural": True, "history": 2},
    },
]
MORE_RULES = {"name": "ada_pm", "options": {"rank": 4}, "groups": MORE_GROUPS}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """Weights and state of one process by key-value heads."""
    folder = tmp_path_factory.mktemp("alone")
    return {heads: state_after(configuration(folder, ALL_RULES, model__num_kv_heads=heads)) for heads in (2, 4)}


def test_all_functions_are_among_the_groups() -> None:
    """A rule that chooses the GEMMs of layers has no groups (`contrib/test_compact.py`)."""
    grouped = {group["name"] for group in (*GROUPS, *MORE_GROUPS)} | {MORE_RULES["name"]}
    assert grouped == {*FUNCTIONS, "adamw"} - {"compact"}


@pytest.mark.parametrize("layout", LAYOUT_CASES)
def test_every_layout_equals_one_process(layout: str, alone: Any, tmp_path: Path) -> None:
    config = configuration(tmp_path, ALL_RULES, **LAYOUTS[layout])
    assert difference(state_after(config), alone[config.model.num_kv_heads]) < 1e-9
    more = configuration(tmp_path, MORE_RULES, **LAYOUTS[layout])
    single = {"model__num_kv_heads": config.model.num_kv_heads}
    assert difference(state_after(more), state_after(configuration(tmp_path, MORE_RULES, **single))) < 1e-9


def test_statistics_of_a_shard_are_wrong(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With row means of a tp shard alone, as techniques.md measured, CAME's second step is another."""
    compute = BucketMatrices.compute

    def with_shards(updates: BucketMatrices, *arguments: Any) -> None:
        gather = updates._gradients.finish_gather
        updates._gradients.finish_gather = (
            lambda: {  # type: ignore[method-assign]
                number: torch.cat([matrix[:, : matrix.shape[1] // 2]] * 2, 1) for number, matrix in gather().items()
            }
        )
        compute(updates, *arguments)
        updates._gradients.finish_gather = gather  # type: ignore[method-assign]

    monkeypatch.setattr(BucketMatrices, "compute", with_shards)
    wrong = state_after(configuration(tmp_path, ALL_RULES, parallel__tp=2))
    key = "row.layers.0.attention.q.weight"
    assert float((wrong[key] - alone[2][key]).abs().max() / alone[2][key].abs().max()) > 0.05


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    """Its gradients are not numbers, which decompositions refuse."""
    config = configuration(tmp_path, ALL_RULES, **LAYOUTS["tp2 sp dp2"])
    assert difference(state_after(config, 2, skipped=[2]), state_after(config, 1)) == 0


class Scaled:
    """A class of a plug-in, with an option."""

    state_names = ()

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._segments, self._scale = segments, config.options["scale"]

    def step(self, lr: float, step: int, grad_factor: Tensor, skip: Tensor) -> None:
        for segment in self._segments:
            segment.weight.fill_(self._scale)


def test_a_class_of_a_plug_in_has_the_options_of_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"unit_of_work": "elements", "state": {}, "options": {"scale": 1.0}}
    monkeypatch.setitem(OPTIMIZERS.cards, "scaled", Card("scaled", "", "tests.optim.test_update_rules:Scaled", facts))
    groups = [{"kinds": ["norm"], "options": {"scale": 3.0}}, {"kinds": ["embedding"], "name": "scaled"}]
    state = state_after(configuration(tmp_path, {"name": "scaled", "options": {"scale": 2.0}, "groups": groups}), 1)
    values = {name: float(values.unique()) for name, values in state.items()}
    assert values["weights.layers.0.attention_norm.weight"] == 3.0
    assert values["weights.layers.0.mlp.up.weight"] == values["weights.embedding.token.weight"] == 2.0


def test_a_class_needs_master_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"unit_of_work": "elements", "state": {}, "options": {"scale": 1.0}}
    monkeypatch.setitem(OPTIMIZERS.cards, "scaled", Card("scaled", "", "tests.optim.test_update_rules:Scaled", facts))
    keys = {"name": "scaled", "master_weights": "bf16_compensated"}
    with pytest.raises(ConfigError, match="scaled is a class, which needs master weights in fp32"):
        state_after(configuration(tmp_path, keys, train__precision="bf16"), 1)


def test_learning_rates_by_block(tmp_path: Path) -> None:
    """Blockwise learning rates (Wang et al. 2025): v and q of one fused weight have rates of their own."""
    rates = [
        {"kinds": ["embedding", "head"], "lr_mult": 10.0},
        {"params": ["*.attention.[qk].weight"], "lr_mult": 8.0},
        {"params": ["*.attention.v.weight", "*.attention.out.weight"], "lr_mult": 4.0},
        {"params": ["*.mlp.*"], "lr_mult": 6.0},
    ]
    base, steps = {"name": "adamw", "weight_decay": 0.0}, 1
    before = state_after(configuration(tmp_path, base), 0)
    plain = state_after(configuration(tmp_path, base), steps)
    ones = state_after(configuration(tmp_path, base | {"groups": [r | {"lr_mult": 1.0} for r in rates]}), steps)
    rated = state_after(configuration(tmp_path, base | {"groups": rates}, parallel__dp=3, batch__global=9), steps)
    assert difference(ones, plain) == 0
    expected = {"embedding": 10, "head": 10, ".q.": 8, ".k.": 8, ".v.": 4, ".out.": 4, "mlp.": 6, "norm": 1}
    for name in (name for name in plain if name.startswith("weights.")):
        factor = next(value for part, value in expected.items() if part in name.replace("mlp_norm", "norm"))
        assert close(rated[name] - before[name], factor * (plain[name] - before[name])), name


def test_cards() -> None:
    """Element-wise rules have state like the weight, and update every kind; rules of matrices those of blocks."""
    for name in FUNCTIONS:
        facts = with_defaults(OPTIMIZERS[name].facts)
        if facts["unit_of_work"] in MATRIX_UNITS:
            assert facts["kinds"] in (("matrix",), ("matrix", "embedding"))
            assert all(set(size) <= set("mnslrcMNdxytu/256") for size in facts["state"].values())
        else:
            assert set(facts["state"].values()) == {"mn"} and not facts["weight"]
