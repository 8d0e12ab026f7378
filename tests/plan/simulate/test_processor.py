"""Plans for a processor with measured costs, and with several ranks on a core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.plan.search.plan import Plan
from megascale.plan.simulate import profiles
from megascale.plan.simulate.gemm_time import KernelTimes
from megascale.plan.simulate.profiles import Hardware
from megascale.plan.simulate.step_time import Estimate, StepParts
from tests.bench.test_profile import MEASURED, truth
from tests.runs import LLAMA, config_of, settings


def machine(**node: Any) -> Hardware:
    tree = truth()
    tree["node"] |= node
    return Hardware.model_validate(tree)


def of(tmp_path: Path, hardware: Hardware, **parallel: Any) -> Estimate:
    keys = {f"parallel__{key}": value for key, value in parallel.items()}
    config = config_of(settings(LLAMA, tmp_path, train__precision="fp32", **keys), tmp_path)
    return StepParts(config, hardware, profiles.stack_on(hardware, "megascale")).estimate


def test_kernels_take_the_measured_times() -> None:
    kernels = KernelTimes(machine(), profiles.stack("megascale"), "fp32", 4)
    assert kernels.gemm(1, 1, 1) == pytest.approx(MEASURED["gemm_s"], rel=1e-3)
    large = 2e-6 + 2 * 1000**3 / 8e10 + 4 * 3 * 1000**2 / 5e10
    assert kernels.gemm(1000, 1000, 1000) == pytest.approx(large)
    assert kernels.gemm(0, 8, 8) == 0.0
    flops = 4 * 8 * 100 * 50 * 10  # 50 keys per query on average
    forward, backward = kernels.attention(8, 100, None, 10)
    assert forward == pytest.approx(flops * 3 / 5e10)
    assert backward == pytest.approx(2.5 * flops * (1 + 40 / 50 + 8 / 10) / 6e10)
    assert kernels.elementwise(9e9) == pytest.approx(1.0)


def test_ranks_that_share_cores_take_turns(tmp_path: Path) -> None:
    """With a core per rank nothing is shared. With four ranks on a core a step takes four times as long."""
    for parallel in ({"dp": 2}, {"tp": 2}, {"pp": 2}):
        apart = of(tmp_path, machine(), **parallel)
        assert apart == of(tmp_path, machine(cores=64), **parallel)
        assert apart.causes["cores"] == pytest.approx(0, abs=1e-12)
    crowd, apart = (of(tmp_path, machine(cores=cores), dp=8) for cores in (2, 8))
    assert crowd.step_s == pytest.approx(4 * apart.step_s, rel=0.05)
    assert sum(crowd.causes.values()) == pytest.approx(crowd.step_s)
    assert crowd.mfu_full == pytest.approx(apart.mfu_full, rel=0.05)  # MFU is relative to the existing cores


def test_other_ranks_fill_the_pipeline_bubble(tmp_path: Path) -> None:
    crowd, apart = (of(tmp_path, machine(cores=cores), pp=4) for cores in (2, 4))
    idle = apart.causes["bubble"]
    assert idle > 0.1 * apart.step_s
    assert apart.step_s <= crowd.step_s < 2 * apart.step_s - idle


def test_ranks_on_a_device_share_its_memory(tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, parallel__dp=8, train__precision="fp32"), tmp_path)
    stack = profiles.stack("megascale")
    assert Plan(config, machine(), stack).memory_limit == 2**33 // 4
    assert Plan(config, machine(cores=0), stack).memory_limit == 2**33


def test_measured_values_of_a_stack_replace_its_own() -> None:
    measured, other = profiles.stack_on(machine(), "megascale"), profiles.hardware("a100-80g")
    assert (measured.overlaps.tp, measured.overlaps.pp, measured.overlaps.dp) == ("none", True, False)
    assert (measured.attained.step_s, measured.attained.passes) == (0.003, 1.0)
    assert profiles.stack_on(other, "megascale") == profiles.stack("megascale")
