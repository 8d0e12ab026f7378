"""Every layout computes the same run as one process: losses and gradient norms of ten steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.runs import FAMILIES, config_of, settings, train_curve
from tests.worlds import run_world

Layout = dict[str, Any]

LAYOUTS: dict[str, Layout] = {
    # world 1
    "micro2": {"batch__micro": 2},
    "micro8 zero0": {"batch__micro": 8, "parallel__zero": 0},
    # world 2
    "tp2": {"parallel__tp": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "pp2": {"parallel__pp": 2},
    "pp2 gpipe": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "pp2 vpp2": {"parallel__pp": 2, "parallel__vpp": 2},
    "pp2 uneven": {"parallel__pp": 2, "parallel__layers_per_chunk": [3, 1]},
    "dp2 zero0": {"parallel__dp": 2, "parallel__zero": 0},
    "dp2 zero1": {"parallel__dp": 2, "parallel__zero": 1},
    "dp2 zero2": {"parallel__dp": 2, "parallel__zero": 2},
    "tp2 no overlap": {"parallel__tp": 2, "overlap__tp": False},
    "pp2 vpp2 no overlap": {"parallel__pp": 2, "parallel__vpp": 2, "overlap__pp": False, "overlap__dp": False},
    # world 4
    "tp2 pp2 sp": {"parallel__tp": 2, "parallel__pp": 2, "parallel__sp": True},
    "tp2 dp2 zero2": {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 2},
    "pp2 vpp2 dp2 zero1": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2},
    "pp4": {"parallel__pp": 4},
    "dp4 zero2": {"parallel__dp": 4, "parallel__zero": 2},
    "tp2 sp dp2 zero0": {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__zero": 0},
    # world 8
    "tp2 sp pp2 vpp2 dp2 zero1": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2,
    },
    "tp2 sp pp2 vpp2 dp2 zero2": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2,
        "parallel__zero": 2,
    },
    "pp4 dp2 gpipe zero0": {"parallel__pp": 4, "parallel__dp": 2, "parallel__schedule": "gpipe", "parallel__zero": 0},
}  # fmt: skip


@cache
def reference(family: str, dropout: float, precision: str, folder: Path) -> list[tuple[float, float]]:
    tree = settings(FAMILIES[family], folder, model__dropout=dropout, train__precision=precision)
    return run_world(1, train_curve, config_of(tree, folder))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


def worst(curve: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """Largest relative difference of losses and norms."""
    pairs = [(a, b) for got, want in zip(curve, expected, strict=True) for a, b in zip(got, want, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["dry", "dropout"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_fp64(name: str, family: str, dropout: float, folder: Path) -> None:
    tree = settings(FAMILIES[family], folder, model__dropout=dropout, **LAYOUTS[name])
    config = config_of(tree, folder)
    curves = run_world(config.world, train_curve, config)
    assert all(curve == curves[0] for curve in curves), "ranks disagree about the same sums"
    assert worst(curves[0], reference(family, dropout, "fp64", folder)) < 1e-10
