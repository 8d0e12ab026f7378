"""A profile of this machine: from what was measured to what the planner says."""

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

from megascale.account.traffic import calls
from megascale.bench import links, processor, profile
from megascale.bench.fit import Sample
from megascale.bench.links import OPERATIONS, Timed
from megascale.bench.profile import CASES, Samples, machine_of
from megascale.bench.profile_file import write
from megascale.bench.spread import Spread
from megascale.cli import bench_ranks
from megascale.cli.main import main
from megascale.core.errors import MegascaleError
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.simulate import profiles
from megascale.simulate.link_time import group_route
from megascale.simulate.step_time import estimate
from tests.runs import LLAMA, settings, write_config
from tests.worlds import run_world

MEASURED: dict[str, Any] = {
    "rate": 8e10, "bandwidth": 5e10, "product_s": 2e-6, "elementwise": 9e9, "layer_s": 2e-4,
    "attend": {"rate": 5e10, "keys": 50.0, "width": 10.0}, "attend_back": {"rate": 6e10, "keys": 40.0, "width": 8.0},
}  # fmt: skip


def truth() -> dict[str, Any]:
    """A machine as it would be written down."""
    way = {"bandwidth": 3e9, "latency": 5e-5}
    return {
        "device": {"memory": 2**33, "reserve": 0, "bandwidth": 2e10, "units": 1, "measured": {"fp32": MEASURED}},
        "node": {"devices": 1024, "cores": 2, **way, "message": way},
        "network": way,
        "attained": {"gemm": 1.0, "memory": 1.0, "link": 1.0, "network": 1.0},
        "stack": {"hides": {"pp": True}, "attained": {"passes": 1.0, "step_s": 0.003}},
    }


def of_costs(amounts: Sequence[tuple[float, ...]], *each: float, ratio: float = 1.0) -> list[Sample]:
    said = [sum(cost * amount for cost, amount in zip(each, some, strict=True)) for some in amounts]
    return [Sample(some, (value / ratio, value, value)) for some, value in zip(amounts, said, strict=True)]


def as_measured(ratio: float = 1.0) -> Samples:
    """What the true machine would have been seen to do."""
    hardware = profiles.Hardware.model_validate(truth())
    stack = profiles.stack_on(hardware, "megascale")
    configs = [profile._config(case, "fp32", "") for case in CASES]
    steps = [Sample((), (estimate(config, hardware, stack).step_s,)) for config in configs]
    sizes = [(1.0, float(f), float(b)) for f, b in itertools.product((1e4, 1e7, 1e9), (1e4, 1e6, 1e8))]
    kernels = [
        of_costs(sizes, keys / rate, 1 / rate, width / rate)
        for rate, keys, width in ((5e10, 50.0, 10.0), (6e10, 40.0, 8.0))
    ]
    attend, back = ([Sample((s.amounts[1], s.amounts[0], s.amounts[2]), s.seconds) for s in each] for each in kernels)
    return Samples(of_costs(sizes, 2e-6, 1 / 8e10, 1 / 5e10, ratio=ratio), attend, back, steps)


def links_of() -> list[Timed]:
    hardware = profiles.Hardware.model_validate(truth())
    route, found = group_route(hardware, 2, 1, 2), []
    for operation in OPERATIONS:
        for size in links.SIZES:
            one = route.message(size) if operation == "message" else route.collective(operation, size, 2)  # type: ignore[arg-type]
            found.append(Timed(operation, 2, size, Spread.of([one])))
    return found


def test_a_machine_is_found_as_it_is() -> None:
    """From the planner's own times of a machine its profile follows."""
    found, true = machine_of(2**33, links_of(), {"fp32": as_measured()}), truth()
    measured = found.tree["device"]["measured"]["fp32"]
    for key in ("rate", "bandwidth", "product_s", "elementwise", "layer_s"):
        assert measured[key] == pytest.approx(MEASURED[key], rel=0.01), key
    for way in ("attend", "attend_back"):
        assert measured[way] == pytest.approx(MEASURED[way], rel=0.01)
    assert found.tree["device"]["bandwidth"] == pytest.approx(true["device"]["bandwidth"], rel=0.01)
    assert found.tree["stack"]["attained"]["step_s"] == pytest.approx(0.003, rel=0.01)
    assert found.tree["node"]["message"] == pytest.approx(true["node"]["message"])
    assert all(each.error < 0.01 for each in found.quality.values())


def test_how_long_ranks_wait_for_their_turn_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    tree = truth()
    tree["node"]["turn_s"] = 0.002
    true, patient = (profiles.Hardware.model_validate(each) for each in (tree, truth()))
    stack = profiles.stack_on(true, "megascale")
    for ranks, others in ((4, 1), (8, 3)):
        config = profile._crowded_config(ranks, "")
        said, least = (estimate(config, each, stack).step_s for each in (true, patient))
        assert config.world == ranks and said - least == pytest.approx(others * 0.002 * calls(config))
        apart = estimate(profile._config(profile.APART, "fp32", ""), patient, stack).step_s
        for pace in (1.0, 1.25):  # of the machine, while these steps ran and others of the profile did not
            crowd = profile.Crowd(ranks, (pace * said,) * 3, (pace * apart,) * 3)
            found = machine_of(2**33, links_of(), {"fp32": as_measured()}, crowd)
            assert found.tree["node"]["turn_s"] == pytest.approx(0.002, rel=0.1)
            assert found.quality["steps between them"].error == pytest.approx(1 - 1 / pace, abs=0.02)
    alone = machine_of(2**33, links_of(), {"fp32": as_measured()}, profile.Crowd(2, (9.0,), (apart,)))
    assert alone.tree["node"]["turn_s"] == 0.0  # nobody shares


def test_what_was_disturbed_is_refused() -> None:
    with pytest.raises(MegascaleError, match=r"products in fp32: rounds differ 3.00 times.*measure again"):
        machine_of(2**33, links_of(), {"fp32": as_measured(ratio=3.0)})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "own.toml"
    write(path, truth(), "a machine\nmeasured")
    found = profiles.hardware(str(path))
    assert path.read_text().startswith("# a machine\n# measured\n")
    assert found.model_dump(exclude={"name"}) == profiles.Hardware.model_validate(truth()).model_dump(exclude={"name"})
    assert found.name == "own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_attention_are_measured(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "TIMING_S", 1e-5)
    monkeypatch.setattr(processor, "SHAPES", ((16, 32, 48), (64, 64, 64)))
    monkeypatch.setattr(processor, "ATTENTIONS", ((2, 16, 8),))
    calls, flops, moved = processor.products(dtype)[0].amounts
    assert (calls, flops) == (3, 3 * 2 * 16 * 32 * 48)
    assert moved == 3 * dtype.itemsize * (16 * 32 + 32 * 48 + 16 * 48)
    for backward, factor in ((False, 1), (True, 2.5)):
        (sample,) = processor.attention(dtype, backward=backward)
        assert sample.amounts[0] == factor * 4 * 2 * 16 * 8 * (16 / 2)  # half of the matrix, two products
        assert sample.amounts[0] == 8 * sample.amounts[1] == 8 * sample.amounts[2]
        assert len(sample.seconds) == processor.ROUNDS


def quick(rank: Rank) -> Any:
    """A profile by two ranks, of few and small things."""
    from megascale.device import detect

    small: dict[Any, dict[str, Any]] = {
        links: {"SIZES": (4096, 65536), "TIMING_S": 0.0},
        processor: {"TIMING_S": 1e-4},
        profile: {"ROUNDS": 3, "CASES": CASES[:4], "ERROR": math.inf, "BUSY": math.inf},
    }
    for module, values in small.items():
        vars(module).update(values)
    said: list[str] = []
    found = profile.measure(detect(allow_gpu=False), rank.rank, rank.world, said.append, ["fp32"])
    return (found.tree if found else None), said


def test_ranks_measure_together() -> None:
    (tree, said), (nothing, _) = run_world(2, quick)
    assert nothing is None
    assert said == ["links", "products and attention in fp32", "steps in fp32"]
    hardware = profiles.Hardware.model_validate(tree)
    assert 1e8 < hardware.device.measured["fp32"].rate < 1e14
    config = profile._config(CASES[3], "fp32", "")
    assert estimate(config, hardware, profiles.stack_on(hardware, "megascale")).step_s > 0


def crowd(rank: Rank) -> profile.Crowd:
    from megascale.device import detect

    small = CASES[0]._replace(layers=2)
    vars(profile).update({"CROWDED_ROUNDS": 2, "CROWDED": small, "APART": small})
    return profile.crowded(detect(allow_gpu=False), rank)


def test_a_crowd_trains() -> None:
    for found in run_world(4, crowd):
        assert found.ranks == 4 and len(found.seconds) == 2 and min(found.seconds) > 0
        assert len(found.apart) == 2 * min(4, len(os.sched_getaffinity(0))) and min(found.apart) > 0


def write_own(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    """The command, with one rank that has found the true machine."""

    jobs: list[int] = []

    def start(words: list[str], processes: int) -> int:
        jobs.append(processes)
        return main(words)

    def alone(work: Any, *, gpus: bool) -> int:
        assert not gpus
        work(Device(torch.device("cpu"), "gloo"), Rank(0, jobs[-1], 0, "here"))
        return 0

    def measure(*_: Any, crowd: profile.Crowd) -> profile.Machine:
        assert crowd.ranks == jobs[0] == 2 * jobs[1]
        return profile.Machine(truth(), {"products in fp32": profile.Quality(0.031, 1.25)})

    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    monkeypatch.setattr(bench_ranks, "_start", start)
    monkeypatch.setattr(bench_ranks, "_work", alone)
    monkeypatch.setattr(profile, "crowded", lambda _, rank: profile.Crowd(rank.world, (1.0,), (1.0,)))
    monkeypatch.setattr(profile, "measure", measure)
    return main(["bench", "profile", *words])


def test_plan_reads_what_the_command_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = settings(LLAMA, tmp_path, train__precision="fp32", parallel__tp=2)
    plan = ["plan", str(write_config(tree, tmp_path / "run.toml")), "--hardware", "this", "--json"]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(plan) == 2
    assert "this machine has not been measured  -> `megascale bench profile` measures it" in capsys.readouterr().err
    assert write_own(monkeypatch, tmp_path) == 0
    shown = capsys.readouterr().out
    assert "products in fp32" in shown and "1.25" in shown and "3.1%" in shown
    assert main(plan) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"] == "this"
    assert found["causes_s"]["other"] == pytest.approx(0.003)  # the stack's, as it was measured here


def test_a_profile_goes_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sub" / "mine.toml"
    assert write_own(monkeypatch, tmp_path, "--output", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(path)
    assert profiles.hardware(str(path)).node.cores == 2
    for wrong in (str(tmp_path / "mine.txt"), f"{path}/below.toml"):
        assert write_own(monkeypatch, tmp_path, "--output", wrong) == 2
        assert "command line  --output: " in capsys.readouterr().err
