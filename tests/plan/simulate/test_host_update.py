"""Time of an update of state in host memory: the best stride is that of all that is tried, and plans use it."""

from __future__ import annotations

import random

import pytest

from megascale.config.loading import load_config
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.state_bytes import host_state_bytes, state_bytes, state_shards
from megascale.plan.search.plan import Plan
from megascale.plan.simulate import profiles
from megascale.plan.simulate.host_update import HostUpdateTime, host_update

HARDWARE, STACK = profiles.hardware("a100-80g"), profiles.stack("megascale")


def test_the_best_stride_is_the_argmin() -> None:
    """For rates drawn over three decades, those of a slow processor and of a slow link among them."""
    draw = random.Random(1)
    strides = set()
    for _ in range(3000):
        host, device, gradient, moments = (10 ** draw.uniform(-2, 1) for _ in range(4))
        times = HostUpdateTime(draw.randint(1, 60), host, device, gradient, gradient + moments)
        best = min(times.seconds(stride) for stride in range(times.count + 1))
        assert times.seconds(times.best_stride) == pytest.approx(best, rel=1e-12), times
        strides.add(times.best_stride)
    assert {0, 1, 2, 3, 4, 5} < strides


def test_rates_choose_between_host_and_device() -> None:
    fast_host = HostUpdateTime(12, host=1.0, device=0.1, gradient=1.0, state=3.0)
    slow_host = HostUpdateTime(12, host=100.0, device=0.1, gradient=1.0, state=3.0)
    assert fast_host.best_stride == 0 and slow_host.best_stride == 1
    assert HostUpdateTime(12, host=4.0, device=0.1, gradient=1.0, state=3.0).best_stride == 2
    assert slow_host.seconds(1) == 12 * 3.0 and slow_host.seconds(0) == 12 * 100.0
    assert slow_host.seconds(4) == 9 * 100.0 and fast_host.seconds(4) == 9 * 1.0 + 3 * 3.0


def plan(*overrides: str, hardware: profiles.Hardware = HARDWARE) -> Plan:
    return Plan(load_config("configs/gpu/llama3-8b.toml", [*overrides], world_size=64), hardware, STACK)


def test_a_plan_counts_what_an_update_in_host_memory_takes() -> None:
    on_device, in_host = plan(), plan("optimizer.offload=host")
    config, update = in_host.config, host_update(in_host.config, HARDWARE)
    assert update is not None
    longer = in_host.estimate.causes["optimizer"] - on_device.estimate.causes["optimizer"]
    assert 0 < longer < update.seconds(update.best_stride)  # the device no longer passes over the state
    slower = plan("optimizer.offload=host", "optimizer.offload_stride=0")
    added = slower.estimate.causes["optimizer"] - in_host.estimate.causes["optimizer"]
    assert added == pytest.approx(update.seconds(0) - update.seconds(update.best_stride)) and added > 0
    assert any(f"offload_stride, {update.best_stride}; " in note for note in slower.notes)
    kept = state_bytes(on_device.config, 0).optimizer
    assert JobMemory(config).rank(0).optimizer == 0
    assert host_state_bytes(config) == kept + 2 * 4 * max(state_shards(config, 0))


def test_a_profile_without_the_rates_is_told() -> None:
    node = HARDWARE.node.model_copy(update={"memory_bandwidth": None})
    unknown = HARDWARE.model_copy(update={"node": node})
    in_host, on_device = (plan(f"optimizer.offload={where}", hardware=unknown) for where in ("host", "none"))
    assert in_host.estimate.step_s == on_device.estimate.step_s
    assert any("a100-80g states no device.host_bandwidth or node.memory_bandwidth" in note for note in in_host.notes)
