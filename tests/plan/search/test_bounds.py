"""Bounds of step time and memory are lower bounds, and tight."""

from __future__ import annotations

import itertools

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


@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
@given(jobs(sharded=True), st.sampled_from(STACKS))
def test_bounds_of_sharded_weights_are_lower_bounds(config: RunConfig, name: str) -> None:
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


BLOCKS = [1, 2, 4, 8, 16, 32, 64]
"""The blocks of 4,096 tokens."""


def test_blocks_of_tokens_are_the_fastest_of_all() -> None:
    """On hardware of any latency, bandwidth and rate of GEMMs, with recomputation and split backwards."""
    keys = ["model.num_layers=4", "parallel.ep=16", "parallel.tp=1", "parallel.sp=false", "batch.global=32",
            "parallel.pp=2", "parallel.vpp=1"]  # fmt: skip
    stack, config = profiles.stack("megascale"), load_config("configs/gpu/qwen3-235b-a22b.toml", keys, world_size=64)
    space, chosen, device = Space(config, 64), set[int](), H100.device
    for latency, faster, rate in itertools.product((1e-6, 1e-4), (1, 4), (1, 10)):
        network = {"latency": latency, "bandwidth": faster * H100.network.bandwidth}
        peak = {kind: rate * flops for kind, flops in device.peak.items()}
        parts = {"network": H100.network.model_copy(update=network), "device": device.model_copy(update={"peak": peak})}
        hardware = H100.model_copy(update=parts)
        bounds = Bounds(space, hardware, stack)
        for schedule, recompute in (("1f1b", "full"), ("zb_h1", "none")):
            layout = layout_of(config)._replace(schedule=schedule, recompute=recompute)
            every = [layout._replace(token_blocks=blocks) for blocks in BLOCKS]
            times = {each: StepParts(space.with_layout(each), hardware, stack).step_s for each in every}
            assert space.token_blocks(layout) == BLOCKS and bounds.in_blocks(layout) == min(
                times, key=times.__getitem__
            )
            chosen.add(bounds.in_blocks(layout).token_blocks)
    assert len(chosen) > 2


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
