"""Profile of this machine: from measurements to the planner's estimates."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.bench import cpu_core, links, profile, profile_fit, profile_steps, timed_group
from megascale.bench.cost_fit import Measurement
from megascale.bench.links import OPERATIONS, LinkTiming
from megascale.bench.profile_fit import MeasuredProfile, PrecisionMeasurements, Quality, fit_profile, write_profile
from megascale.bench.profile_steps import CASES
from megascale.bench.quartiles import Quartiles
from megascale.cli import bench_ranks
from megascale.cli.main import main
from megascale.core.errors import MegascaleError
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.plan.account.traffic import mean_calls
from megascale.plan.simulate import profiles
from megascale.plan.simulate.link_time import group_route
from megascale.plan.simulate.step_time import estimate
from tests.runs import LLAMA, settings, write_config
from tests.worlds import run_world

MEASURED: dict[str, Any] = {
    "rate": 8e10, "bandwidth": 5e10, "gemm_s": 2e-6, "elementwise": 9e9, "layer_s": 2e-4,
    "attention_forward": {"rate": 5e10, "keys": 50.0, "width": 10.0},
    "attention_backward": {"rate": 6e10, "keys": 40.0, "width": 8.0},
}  # fmt: skip


def truth() -> dict[str, Any]:
    """Return a machine's profile as nested tables."""
    way = {"bandwidth": 3e9, "latency": 5e-5}
    return {
        "device": {"memory": 2**33, "reserve": 0, "bandwidth": 2e10, "units": 1, "measured": {"fp32": MEASURED}},
        "node": {"devices": 1024, "cores": 2, **way, "message": way},
        "network": way,
        "attained": {"gemm": 1.0, "memory": 1.0, "link": 1.0, "network": 1.0},
        "stack": {"overlaps": {"pp": True}, "attained": {"passes": 1.0, "step_s": 0.003}},
    }


def of_costs(amounts: Sequence[tuple[float, ...]], *each: float, ratio: float = 1.0) -> list[Measurement]:
    said = [sum(cost * amount for cost, amount in zip(each, some, strict=True)) for some in amounts]
    return [Measurement(some, (value / ratio, value, value)) for some, value in zip(amounts, said, strict=True)]


def as_measured(ratio: float = 1.0) -> PrecisionMeasurements:
    """Return the measurements that the planner predicts for the true machine."""
    hardware = profiles.Hardware.model_validate(truth())
    stack = profiles.stack_on(hardware, "megascale")
    configs = [profile_steps.case_config(case, "fp32", "") for case in CASES]
    steps = [Measurement((), (estimate(config, hardware, stack).step_s,)) for config in configs]
    sizes = [(1.0, float(f), float(b)) for f, b in itertools.product((1e4, 1e7, 1e9), (1e4, 1e6, 1e8))]
    kernels = [
        of_costs(sizes, keys / rate, 1 / rate, width / rate)
        for rate, keys, width in ((5e10, 50.0, 10.0), (6e10, 40.0, 8.0))
    ]
    attend, back = (
        [Measurement((s.amounts[1], s.amounts[0], s.amounts[2]), s.seconds) for s in each] for each in kernels
    )
    return PrecisionMeasurements(of_costs(sizes, 2e-6, 1 / 8e10, 1 / 5e10, ratio=ratio), attend, back, steps)


def links_of() -> list[LinkTiming]:
    hardware = profiles.Hardware.model_validate(truth())
    route, timings = group_route(hardware, 2, 1, 2), []
    for operation in OPERATIONS:
        for size in links.SIZES:
            one = route.message(size) if operation == "message" else route.collective(operation, size, 2)  # type: ignore[arg-type]
            timings.append(LinkTiming(operation, 2, size, Quartiles.from_values([one])))
    return timings


def test_a_known_machine_is_recovered() -> None:
    """The planner's own estimates for a machine fit the machine's profile."""
    fitted, true = fit_profile(2**33, links_of(), {"fp32": as_measured()}), truth()
    measured = fitted.tree["device"]["measured"]["fp32"]
    for key in ("rate", "bandwidth", "gemm_s", "elementwise", "layer_s"):
        assert measured[key] == pytest.approx(MEASURED[key], rel=0.01), key
    for way in ("attention_forward", "attention_backward"):
        assert measured[way] == pytest.approx(MEASURED[way], rel=0.01)
    assert fitted.tree["device"]["bandwidth"] == pytest.approx(true["device"]["bandwidth"], rel=0.01)
    assert fitted.tree["stack"]["attained"]["step_s"] == pytest.approx(0.003, rel=0.01)
    assert fitted.tree["node"]["message"] == pytest.approx(true["node"]["message"])
    assert all(each.error < 0.01 for each in fitted.quality.values())


def test_known_oversubscription_is_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    tree = truth()
    tree["node"]["turn_s"] = 0.002
    true, patient = (profiles.Hardware.model_validate(each) for each in (tree, truth()))
    stack = profiles.stack_on(true, "megascale")
    for ranks, others in ((4, 1), (8, 3)):
        config = profile_steps.oversubscribed_config(ranks, "")
        said, least = (estimate(config, each, stack).step_s for each in (true, patient))
        assert config.world_size == ranks and said - least == pytest.approx(others * 0.002 * mean_calls(config))
        apart = estimate(profile_steps.single_rank_config(""), patient, stack).step_s
        for pace in (1.0, 1.25):  # of the machine, while these steps ran and others of the profile did not
            steps = profile_steps.OversubscribedSteps(ranks, (pace * said,) * 3, (pace * apart,) * 3)
            fitted = fit_profile(2**33, links_of(), {"fp32": as_measured()}, steps)
            assert fitted.tree["node"]["turn_s"] == pytest.approx(0.002, rel=0.1)
            assert fitted.quality["steps between them"].error == pytest.approx(1 - 1 / pace, abs=0.02)
    alone = fit_profile(
        2**33, links_of(), {"fp32": as_measured()}, profile_steps.OversubscribedSteps(2, (9.0,), (apart,))
    )
    assert alone.tree["node"]["turn_s"] == 0.0  # nobody shares


def test_a_disturbed_measurement_is_refused() -> None:
    with pytest.raises(MegascaleError, match=r"GEMMs in fp32: rounds differ by a factor of 3.00.*measure again"):
        fit_profile(2**33, links_of(), {"fp32": as_measured(ratio=3.0)})


def test_a_written_profile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "own.toml"
    write_profile(path, MeasuredProfile(truth(), {"links": Quality(0.0, 1.5)}), "a machine", 2)
    loaded = profiles.hardware(str(path))
    assert path.read_text().startswith("# a machine, ")
    assert "# The slowest round took at most 1.50 times the quickest.\n" in path.read_text()
    assert loaded.model_dump(exclude={"name"}) == profiles.Hardware.model_validate(truth()).model_dump(exclude={"name"})
    assert loaded.name == "own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemms_and_attention_are_measured(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_core, "TIMING_S", 1e-5)
    monkeypatch.setattr(cpu_core, "GEMM_SHAPES", ((16, 32, 48), (64, 64, 64)))
    monkeypatch.setattr(cpu_core, "ATTENTION_SHAPES", ((2, 16, 8),))
    calls, flops, moved = cpu_core.measure_gemms(dtype)[0].amounts
    assert (calls, flops) == (3, 3 * 2 * 16 * 32 * 48)
    assert moved == 3 * dtype.itemsize * (16 * 32 + 32 * 48 + 16 * 48)
    for backward, factor in ((False, 1), (True, 2.5)):
        (sample,) = cpu_core.measure_attention(dtype, backward=backward)
        assert sample.amounts[0] == factor * 4 * 2 * 16 * 8 * (16 / 2)  # half of the matrix, two GEMMs
        assert sample.amounts[0] == 8 * sample.amounts[1] == 8 * sample.amounts[2]
        assert len(sample.seconds) == cpu_core.ROUNDS


def quick(rank: Rank) -> Any:
    """Measure a profile with few and small cases."""
    from megascale.device import detect_device

    small: dict[Any, dict[str, Any]] = {
        links: {"SIZES": (4096, 65536)},
        timed_group: {"TIMING_S": 0.0},
        cpu_core: {"TIMING_S": 1e-4},
        profile_steps: {"ROUNDS": 3, "CASES": CASES[:4]},
        profile_fit: {"MAX_ERROR": math.inf, "MAX_RATIO": math.inf},
    }
    for module, values in small.items():
        vars(module).update(values)
    said: list[str] = []
    fitted = profile.measure_profile(detect_device(allow_gpu=False), rank.rank, rank.world_size, said.append, ["fp32"])
    return (fitted.tree if fitted else None), said


@pytest.mark.slow
def test_all_ranks_measure_at_the_same_time() -> None:
    (tree, said), (nothing, _) = run_world(2, quick)
    assert nothing is None
    assert said == ["links", "GEMMs and attention in fp32", "steps in fp32"]
    hardware = profiles.Hardware.model_validate(tree)
    assert 1e8 < hardware.device.measured["fp32"].rate < 1e14
    config = profile_steps.case_config(CASES[3], "fp32", "")
    assert estimate(config, hardware, profiles.stack_on(hardware, "megascale")).step_s > 0


def oversubscribed(rank: Rank) -> profile_steps.OversubscribedSteps:
    from megascale.device import detect_device

    small = CASES[0]._replace(layers=2)
    vars(profile_steps).update({"OVERSUBSCRIBED_ROUNDS": 2, "OVERSUBSCRIBED_CASE": small, "SINGLE_RANK_CASE": small})
    return profile_steps.measure_oversubscribed(detect_device(allow_gpu=False), rank)


def test_oversubscribed_steps_are_measured() -> None:
    for steps in run_world(4, oversubscribed):
        assert steps.ranks == 4 and len(steps.seconds) == 2 and min(steps.seconds) > 0
        alone = steps.single_rank_seconds
        assert len(alone) == 2 * min(4, len(os.sched_getaffinity(0))) and min(alone) > 0


def write_own(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    """Run the command with one rank, which returns the true machine."""

    jobs: list[int] = []

    def start(words: list[str], processes: int) -> int:
        jobs.append(processes)
        return main(words)

    def alone(work: Any, *, gpus: bool) -> int:
        assert not gpus
        work(Device(torch.device("cpu"), "gloo"), Rank(0, jobs[-1], 0, "here"))
        return 0

    def measure(*_: Any, oversubscribed: profile_steps.OversubscribedSteps) -> MeasuredProfile:
        assert oversubscribed.ranks == jobs[0] == 2 * jobs[1]
        return MeasuredProfile(truth(), {"GEMMs in fp32": Quality(0.031, 1.25)})

    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    monkeypatch.setattr(bench_ranks, "_start", start)
    monkeypatch.setattr(bench_ranks, "_run_rank", alone)
    monkeypatch.setattr(
        profile_steps,
        "measure_oversubscribed",
        lambda _, rank: profile_steps.OversubscribedSteps(rank.world_size, (1.0,), (1.0,)),
    )
    monkeypatch.setattr(profile, "measure_profile", measure)
    return main(["bench", "profile", *words])


def test_plan_reads_the_written_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = settings(LLAMA, tmp_path, train__precision="fp32", parallel__tp=2)
    plan = ["plan", str(write_config(tree, tmp_path / "run.toml")), "--hardware", "this", "--json"]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(plan) == 2
    assert "this machine has not been measured  -> `megascale bench profile` measures it" in capsys.readouterr().err
    assert write_own(monkeypatch, tmp_path) == 0
    shown = capsys.readouterr().out
    assert "GEMMs in fp32" in shown and "1.25" in shown and "3.1%" in shown
    assert main(plan) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["hardware"] == "this"
    assert planned["causes_s"]["other"] == pytest.approx(0.003)  # the stack's, as it was measured here


def test_a_profile_is_written_to_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sub" / "mine.toml"
    assert write_own(monkeypatch, tmp_path, "--output", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(path)
    assert profiles.hardware(str(path)).node.cores == 2
    for wrong in (str(tmp_path / "mine.txt"), f"{path}/below.toml"):
        assert write_own(monkeypatch, tmp_path, "--output", wrong) == 2
        assert "command line  --output: " in capsys.readouterr().err
