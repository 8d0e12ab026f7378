"""The examples of docs/extending are complete: each is imported as the package that the page describes, and runs."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megascale.catalog.backends import BACKENDS
from megascale.catalog.data import DATA_POLICIES, SAMPLE_WEIGHTS
from megascale.catalog.layers import BLOCKS
from megascale.catalog.objectives import OBJECTIVES
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.recipes import RECIPES
from megascale.catalog.schedules import SCHEDULES
from megascale.core.rank import Rank
from megascale.core.registry import Registry
from megascale.layout.stages import looped
from megascale.ops.select import build_op
from megascale.schedule.check import check_schedule
from megascale.schedule.ir import build_schedule
from megascale.train.op_context import op_context
from tests.runs import LLAMA, config_of, settings, train_curve
from tests.worlds import run_world

PAGES = Path(__file__).parents[2] / "docs/extending"
REGISTRIES = {
    "schedule": SCHEDULES, "optimizer": OPTIMIZERS, "block": BLOCKS, "backend": BACKENDS["norm"],
    "data_policy": DATA_POLICIES, "sample_weight": SAMPLE_WEIGHTS, "recipe": RECIPES,
    "objective": OBJECTIVES,
}  # fmt: skip
Import = Callable[[str], ModuleType]


def install(page: str, folder: Path) -> ModuleType:
    """Import a page's example from a file, and register its card as the page's entry point does."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    (code,), (points,) = (re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) for language in ("python", "toml"))
    name = re.match(r"# (\w+)\.py\n", code)
    assert name, "the first line names the file"
    folder = folder / str(os.getpid())  # each rank of a world has its own
    folder.mkdir(exist_ok=True)
    (folder / f"{name[1]}.py").write_text(code)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = importlib.import_module(name[1])
    registry: Registry = REGISTRIES[page]
    ((group, entries),) = tomllib.loads(points)["project"]["entry-points"].items()
    assert group == registry.group
    ((key, target),) = entries.items()
    assert target == f"{name[1]}:CARD" and key == module.CARD.name
    own = next(iter(registry.cards.values())).facts
    assert module.CARD.facts.keys() <= own.keys(), "only facts that the catalog has"
    registry.cards[key] = registry.complete(module.CARD)
    return module


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """Import an example, and forget it afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for registry in REGISTRIES.values():
        monkeypatch.setitem(registry.__dict__, "cards", dict(registry.cards))
    return lambda page: install(page, tmp_path)


def trained(rank: Rank, page: str, folder: Path, overrides: dict[str, object]) -> list[tuple[float, float]]:
    """The curve of a few steps with an example, in a process of its own."""
    install(page, folder)
    model = LLAMA | ({"block": "sandwich"} if page == "block" else {})
    return train_curve(rank, config_of(settings(model, folder, **overrides), folder / str(rank.rank)), 3)


@pytest.mark.parametrize("shape", [(2, 4), (4, 3), (4, 8)])
def test_the_schedule_is_complete_and_does_not_deadlock(shape: tuple[int, int], example: Import) -> None:
    (p, m), module = shape, example("schedule")
    check_schedule(build_schedule(module.CARD.load(), p, 1, m), looped(p, 1), m)


@pytest.mark.parametrize(("page", "overrides"), [
    ("optimizer", {"optimizer__name": "signum", "optimizer__lr": 1e-3}),
    ("block", {}),
    ("schedule", {"parallel__schedule": "eager_1f1b"}),
    ("objective", {"train__objectives": [{"type": "steady", "weight": 0.5, "every": 2}]}),
])  # fmt: skip
def test_it_trains_alike_on_one_rank_and_on_two(page: str, overrides: dict[str, object], tmp_path: Path) -> None:
    layout = {"parallel__dp": 2, "parallel__zero": 1} if page == "optimizer" else {"parallel__pp": 2}
    (alone,) = run_world(1, trained, page, tmp_path, overrides)
    first, _ = run_world(2, trained, page, tmp_path, overrides | layout)
    assert all(math.isfinite(value) for step in alone for value in step)
    assert torch.allclose(torch.tensor(first), torch.tensor(alone), rtol=1e-10, atol=0)


def test_the_backend_computes_the_norm(example: Import, tmp_path: Path) -> None:
    from megascale.device import detect_device

    example("backend")
    contexts = [
        op_context(config_of(settings(LLAMA, tmp_path, backends__norm=name), tmp_path), detect_device(allow_gpu=False))
        for name in ("rsqrt", "torch")
    ]
    x, weight = torch.randn(4, 32, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    ours, theirs = (build_op("norm", context)(x, weight, None, 1e-5) for context in contexts)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)
    assert contexts[0].requested_backend("norm") == "rsqrt"


def every_bf16() -> torch.Tensor:
    return torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(("exponent", "mantissa", "largest", "dtype"), [
    (4, 3, 448.0, torch.float8_e4m3fn), (5, 2, 57_344.0, torch.float8_e5m2), (8, 7, 3.3895e38, torch.bfloat16),
])  # fmt: skip
def test_the_recipe_rounds_as_torch_casts(
    exponent: int, mantissa: int, largest: float, dtype: torch.dtype, example: Import
) -> None:
    x = every_bf16()
    finite, found = x.isfinite(), example("recipe").rounded(x, exponent, mantissa, largest)
    assert found[~finite].isnan().all() and found.dtype == x.dtype
    expected = x.float().clamp(-largest, largest).to(dtype).to(x.dtype)
    assert torch.equal(found[finite].view(torch.int16), expected[finite].view(torch.int16)), "signs of zeros too"


def test_the_recipe_rounds_to_fp4(example: Import) -> None:
    numbers = torch.tensor([0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 1e30])
    expected = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0])
    assert torch.equal(example("recipe").rounded(-numbers, 2, 1, 6.0), -expected)


def test_the_recipe_trains(tmp_path: Path) -> None:
    """Near bf16, and not as bf16, as tensor parallelism has it too."""
    every = {"fp8__first_layers_bf16": 0, "fp8__last_layers_bf16": 0}
    fp8 = {"train__precision": "fp8", "fp8__recipe": "e4m3", **every}
    (bf16,) = run_world(1, trained, "recipe", tmp_path, {"train__precision": "bf16"})
    (alone,) = run_world(1, trained, "recipe", tmp_path, fp8)
    first, _ = run_world(2, trained, "recipe", tmp_path, fp8 | {"parallel__tp": 2})
    losses = torch.tensor([bf16, alone, first])[..., 0]
    assert losses.isfinite().all() and not torch.equal(losses[0], losses[1])
    assert torch.allclose(losses[1:], losses[:1], rtol=0.01, atol=0)


def test_a_page_is_short() -> None:
    """Twenty lines of prose at most, and one example."""
    for page in REGISTRIES:
        text = re.sub(r"```.*?```", "", (PAGES / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
        assert len([line for line in text.splitlines() if line.strip()]) <= 20, page


def test_every_page_has_an_example() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == REGISTRIES.keys()
