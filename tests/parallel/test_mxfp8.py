"""Training with MXFP8: close to bf16, equal in layouts, and by calls that Blackwell's operator accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.nn.functional as F

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.device import Device
from tests import blackwell
from tests.parallel.test_fp8_linear import WIDE, configured
from tests.runs import train_curve
from tests.worlds import run_world

Curve = list[tuple[float, float]]
STEPS = 2


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    (curve,) = run_world(1, train_curve, configured(tmp_path_factory.mktemp("one"), "mxfp8", WIDE), STEPS)
    return curve  # type: ignore[no-any-return]


def test_losses_are_close_to_bf16(decoded: Curve, tmp_path: Path) -> None:
    (bf16,) = run_world(1, train_curve, configured(tmp_path, "mxfp8", WIDE, train__precision="bf16"), STEPS)
    for (loss, norm), (expected, expected_norm) in zip(decoded, bf16, strict=True):
        assert loss == pytest.approx(expected, abs=0.01) and loss != expected
        assert norm == pytest.approx(expected_norm, rel=0.02)


@pytest.mark.parametrize("layout", [{"parallel__tp": 2, "parallel__sp": True}, {"parallel__cp": 2}], ids=str)
def test_two_ranks_train_as_one(layout: dict[str, int], decoded: Curve, tmp_path: Path) -> None:
    curve, _ = run_world(2, train_curve, configured(tmp_path, "mxfp8", WIDE, **layout), STEPS)
    for (loss, norm), (expected, expected_norm) in zip(curve, decoded, strict=True):
        assert loss == pytest.approx(expected, rel=2e-3) and norm == pytest.approx(expected_norm, rel=2e-2)


def on_blackwell(rank: Rank, config: RunConfig) -> tuple[Curve, int]:
    """Return the curve with the double of Blackwell's operator, and its calls."""
    calls = 0

    def scaled_mm(*given: object, **more: object) -> object:
        nonlocal calls
        calls += 1
        return blackwell.scaled_mm(*given, **more)  # type: ignore[arg-type]

    F.scaled_mm = scaled_mm
    Device.capability = (10, 0)  # type: ignore[method-assign, assignment]
    return train_curve(rank, config, STEPS), calls


def test_blackwells_operator_accepts_every_call(decoded: Curve, tmp_path: Path) -> None:
    ((curve, calls),) = run_world(1, on_blackwell, configured(tmp_path, "mxfp8", WIDE))
    assert calls == STEPS * 2 * 3 * 8  # micro-batches, GEMMs of a layer, layers
    for (loss, norm), (expected, expected_norm) in zip(curve, decoded, strict=True):
        assert loss == pytest.approx(expected, rel=1e-3) and norm == pytest.approx(expected_norm, rel=2e-2)
