"""Bounds of step time and memory are lower bounds, and tight."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.plan.account.memory import JobMemory
from megascale.plan.search.bounds import Bounds
from megascale.plan.search.space import Space, layout_of
from megascale.plan.simulate import profiles
from megascale.plan.simulate.step_time import StepParts
from tests.drawn import jobs

H100, A100 = profiles.hardware("h100"), profiles.hardware("a100-80g-roce")
STACKS = ("megascale", "megatron-2021", "torchtitan-2024")
SLACK = 1 + 1e-12


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(jobs(shares=True), st.sampled_from(STACKS))
def test_bounds_are_lower_bounds(config: RunConfig, name: str) -> None:
    check_bounds(config, name)


def check_bounds(config: RunConfig, name: str) -> None:
    stack, layout = profiles.stack(name), layout_of(config)
    space = Space(config, config.world_size)
    assert space.with_layout(layout) == config
    bounds = Bounds(space, H100, stack)
    assert bounds.step_s(layout) <= StepParts(config, H100, stack).step_s * SLACK
    assert bounds.memory(layout) <= JobMemory(config, stack.storage).fullest().total


@settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
@given(jobs(experts=True), st.sampled_from(STACKS))
def test_bounds_of_experts_are_lower_bounds(config: RunConfig, name: str) -> None:
    check_bounds(config, name)


@pytest.mark.parametrize(
    ("path", "devices", "within"),
    [
        ("configs/gpu/megascale-175b.toml", 256, 0.85),
        ("configs/gpu/megascale-530b.toml", 1120, 0.85),
        ("configs/gpu/llama3-70b.toml", 256, 0.85),
        ("configs/gpu/llama3-8b.toml", 64, 0.75),
    ],
)
def test_bounds_are_tight(path: str, devices: int, within: float) -> None:
    stack, config = profiles.stack("megascale"), load_config(path, [], world_size=devices)
    bounds, layout = Bounds(Space(config, devices), A100, stack), layout_of(config)
    assert within < bounds.step_s(layout) / StepParts(config, A100, stack).step_s <= SLACK
    assert 0.7 < bounds.memory(layout) / JobMemory(config, stack.storage).fullest().total <= 1
