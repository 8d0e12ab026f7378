"""A plan says where its figures are not those of the run."""

from __future__ import annotations

import pytest

from megascale.config.loading import load_config
from megascale.plan.search.plan import Plan
from megascale.plan.simulate import profiles

QUANTIZED = ("train.precision=fp8", "parallel.tp=1", "parallel.pp=4", "batch.global=64", "batch.micro=1")


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (
            ("fp8.recipe=nvfp4", 'fp8.schedule=[[0.8, "bf16"]]'),
            "the step is of fp8.recipe = nvfp4, before the changes of fp8.schedule",
        ),
        (("fp8.recipe=metis",), "metis is emulated: its GEMMs are planned as those of other recipes"),
    ],
)
def test_speed_that_is_not_the_runs_is_named(overrides: tuple[str, ...], note: str) -> None:
    h100, stack = profiles.hardware("h100"), profiles.stack("megascale")
    config = load_config("configs/gpu/llama3-8b.toml", [*QUANTIZED, *overrides], world_size=64)
    plain = load_config("configs/gpu/llama3-8b.toml", QUANTIZED, world_size=64)
    assert any(each.startswith(note) for each in Plan(config, h100, stack).notes)
    assert not any(each.startswith(note) for each in Plan(plain, h100, stack).notes)


def test_a_plan_says_where_bf16_is_as_fast() -> None:
    """GEMMs of small sizes save less than casts take."""
    h100, stack = profiles.hardware("h100"), profiles.stack("megascale")
    small = ("preset=", "model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=8", "model.ffn_size=1024")
    configs = [
        load_config("configs/gpu/llama3-8b.toml", [*QUANTIZED, *overrides], world_size=64)
        for overrides in (small[1:], ())
    ]
    found = [any("bf16 is planned no slower" in note for note in Plan(each, h100, stack).notes) for each in configs]
    assert found == [True, False]
