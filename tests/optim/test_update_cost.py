"""The work of an update, by which owners are balanced, against the operations that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megascale.catalog.optimizers import OPTIMIZERS, with_defaults
from megascale.layout.owners import update_cost
from megascale.layout.param_groups import ParamGroup
from megascale.ops.optimizer import UpdateInput
from tests.optim.test_update_rules import dtype_of, gradient

FACTS = {name: with_defaults(OPTIMIZERS[name].facts) for name in OPTIMIZERS.names()}
WITH_GEMMS = [name for name, facts in FACTS.items() if facts["gemms"] or facts["gemms_with"]]
OPTIONS: dict[str, dict[str, Any]] = {
    "galore": {"rank": 16}, "galore_8bit": {"rank": 16}, "grad_norm_lorp": {"rank": 16}, "ada_pm": {"rank": 16},
    "poet": {"block": 32}, "compact": {"rank": 16}, "muon": {"ns_dtype": "fp64"},
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_GEMMS)
@pytest.mark.parametrize("shape", [(96, 160), (160, 96)])
def test_gemms_are_those_of_a_step(name: str, shape: tuple[int, int]) -> None:
    """In a step without a decomposition, whose operations torch does not count."""
    group = ParamGroup(name, 0.0, options=OPTIONS.get(name, {}))
    state = {key: torch.zeros(size, dtype=dtype_of(group, key)) for key, size in group.state_shapes(shape).items()}
    rule, weight = OPTIMIZERS[name].load(), gradient(shape, 0)
    for step in (1, 2, 3):
        given = UpdateInput(gradient(shape, step), state, step, group.all_options, weight, first=step == 1, lr=0.01)
        with FlopCounterMode(display=False) as counter:
            _, state = rule(given)
    every_step = ParamGroup(name, 0.0, options={**group.options, **gap_of(group, 10**9)})
    counted = 2 * sum(count * m * n * k for count, (m, n, k) in every_step.gemms(shape))
    assert 0.85 < counted / counter.get_total_flops() < 1.25


def gap_of(group: ParamGroup, gap: int) -> dict[str, int]:
    return {"update_gap": gap} if "update_gap" in group.all_options else {}


@pytest.mark.parametrize(
    ("name", "options"),
    [("ada_pm", {"momentum": "none"}), ("ada_pm", {"momentum": "full"}), ("galore", {"subspace": "grass_top"})],
)
def test_options_without_gemms_cost_none(name: str, options: dict[str, Any]) -> None:
    assert not ParamGroup(name, 0.0, options=options).gemms((64, 256))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("conda", {}, 3 * 64**2 * 256 + 10 * 64**3),
        ("galore", {"rank": 8}, 3 * 64**2 * 256 + 10 * 64**3),
        ("galore", {"rank": 8, "subspace": "grass_top"}, 0),
        ("soap", {}, 10 / 3 * (64**3 + 256**3)),
        ("soap", {"max_size": 100}, 10 / 3 * 64**3),
        ("shampoo", {}, 5.5 * (64**3 + 256**3)),
    ],
)
def test_decompositions_are_shared_among_the_steps_of_a_gap(
    name: str, options: dict[str, Any], expected: float
) -> None:
    """Of a matrix [64, 256]."""
    costs = [update_cost(ParamGroup(name, 0.0, options=options | {"update_gap": gap}), (64, 256)) for gap in (5, 10)]
    assert costs[0] - costs[1] == pytest.approx(expected / 10, abs=2)
