"""`train.compile` changes only rounding, and compiles once for any number of layers and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.cli.main import main
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.ops.select import BackendError
from tests.runs import MODELS, build_run, config_of, curve_of, settings, write_config
from tests.worlds import run_world

Curve = list[tuple[float, float]]


def config(family: str, folder: Path, **changes: Any) -> RunConfig:
    tree = settings(MODELS[family], folder, train__precision="fp32", optimizer__lr=1e-3)
    tree["train"]["compile"] = True
    for name, value in changes.items():
        section, _, key = name.partition("__")
        tree.setdefault(section, {})[key] = value
    return config_of(tree, folder)


def eager(compiled: RunConfig) -> RunConfig:
    return compiled.model_copy(update={"train": compiled.train.model_copy(update={"compile": False})})


def eager_and_compiled(rank: Rank, compiled: RunConfig) -> tuple[Curve, Curve, int, int]:
    """Curves of an eager and a compiled run, and the number of compiled graphs after the first and the last step."""
    from torch._dynamo.utils import counters

    run = build_run(rank, eager(compiled))
    expected = curve_of(run, 10)
    run = build_run(rank, compiled, run.mesh)
    counters.clear()
    curve = curve_of(run, 1)
    first = counters["stats"]["unique_graphs"]
    curve += curve_of(run, 9)
    assert not counters["graph_break"]
    return expected, curve, first, counters["stats"]["unique_graphs"]


def worst(curve: Curve, expected: Curve) -> float:
    """Largest relative difference of losses and gradient norms."""
    pairs = [pair for row, reference in zip(curve, expected, strict=True) for pair in zip(row, reference, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "graphs"),
    [
        ("gpt", {}, 4),  # norm, attention, join, activation
        ("llama", {}, 4),
        ("gpt", {"parallel__tp": 2, "parallel__sp": True, "model__dropout": 0.1}, 4),
        ("llama", {"parallel__tp": 2, "parallel__sp": True, "model__block": "parallel"}, 3),
        ("llama", {"parallel__pp": 2, "parallel__vpp": 2}, 4),
        # norms of q and of k are compiled apart from attention
        ("llama", {"model__qk_norm": "head", "model__attention_softcap": 2.0, "model__rotary_fraction": 0.5}, 6),
        ("llama", {"model__qk_norm": "full", "parallel__tp": 2}, 4),
        ("gemma2", {"parallel__tp": 2, "parallel__sp": True}, 4),
        ("olmo2", {}, 3),
    ],
    ids=str,
)
def test_a_compiled_run_equals_the_eager_run(family: str, layout: dict[str, Any], graphs: int, tmp_path: Path) -> None:
    run_config = config(family, tmp_path, **layout)
    ranks = run_world(run_config.world_size, eager_and_compiled, run_config)
    for expected, curve, first, last in ranks:
        assert 0 < worst(curve, expected) < 1e-5, "compiled, so rounded differently, but within tolerance"
        assert first == last <= graphs
    assert max(last for *_, last in ranks) == graphs, "the number of graphs does not depend on the number of layers"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_run_in_fp8_is_near_the_eager_run(recipe: str, tmp_path: Path) -> None:
    """Rounding in other places may move a value to the neighbouring FP8 number."""
    run_config = config("llama", tmp_path, train__precision="fp8", fp8__recipe=recipe)
    ((expected, curve, *_),) = run_world(1, eager_and_compiled, run_config)
    assert 0 < worst(curve, expected) < 0.05


def build_without_compiler(rank: Rank, config: RunConfig) -> str:
    import os

    os.environ["CXX"] = "no-such-compiler"
    try:
        build_run(rank, config)
    except BackendError as error:
        return str(error)
    return "built"


def test_without_a_compiler_nothing_is_built(tmp_path: Path) -> None:
    (message,) = run_world(1, build_without_compiler, config("llama", tmp_path))
    expected = "train.compile: no C++ compiler: there is no no-such-compiler  -> install it, or train.compile=false"
    assert message == expected


@pytest.mark.slow
def test_without_a_compiler_the_command_ends_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    tree = settings(MODELS["gpt"], tmp_path, train__compile=True, parallel__dp=2)
    assert main(["train", str(write_config(tree, tmp_path / "run.toml"))]) == 2
    assert "train.compile: no C++ compiler: there is no no-such-compiler" in capfd.readouterr().err


@pytest.mark.slow
def test_a_backend_that_cannot_serve_ends_with_status_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tree = settings(MODELS["gpt"], tmp_path, train__precision="fp32", backends__norm="apex", parallel__dp=2)
    assert main(["train", str(write_config(tree, tmp_path / "run.toml"))]) == 2
    assert "backends.norm = 'apex' cannot serve: apex: needs a GPU  -> backends.norm=auto" in capfd.readouterr().err
