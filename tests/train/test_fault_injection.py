"""Injected faults in a run: each moment of a rank is reached, and each fault of the run's objects has its effect."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.config.injection import BEFORE_STEPS, PHASES
from megascale.core.errors import DivergenceError, LostPeerError, ReplicasDifferError
from megascale.core.rank import Rank
from tests.jobs import Job
from tests.recorded_events import recorded_events
from tests.runs import GPT, build_run, config_of, settings, write_config
from tests.worlds import run_world

SIZES = GPT | {"num_layers": 2, "hidden_size": 16}


def configured(folder: Path, world: int, **changes: Any) -> Any:
    return config_of(settings(SIZES, folder, train__precision="fp32", **changes), folder, world=world)


def trained(rank: Rank, config: Any) -> Any:
    """Train with the faults of the configuration."""
    from megascale.train.fault_injection import fault_injection
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    run = build_run(rank, config)
    injection = fault_injection(config.fault.inject, rank, config.folder)
    if injection is not None:
        injection.attach(run)
    messages: list[str] = []
    reporter = Reporter(config, run.device, None, [], run.mesh.recorder)
    reporter.write_message = messages.append  # type: ignore[method-assign]
    run.checkpoints.resume()
    train(run, reporter)
    return messages


def phases(rank: Rank, config: Any) -> set[tuple[str, int]]:
    """The moments that a run reaches, with their steps."""
    from megascale.operate.node.inject import Injector

    reached: set[tuple[str, int]] = set()

    def strikes(self: Injector, phase: str, step: int) -> None:
        reached.add((phase, step))

    Injector.strikes = strikes  # type: ignore[assignment, method-assign]
    trained(rank, config)
    return reached


def test_all_moments_are_reached(tmp_path: Path) -> None:
    faults = {"fault__inject": "kill rank=0 step=3", "train__steps": 3, "batch__global": 4}
    tensor = configured(tmp_path / "a", 2, parallel__tp=2, **faults)
    pipeline = {"parallel__pp": 2, "parallel__dp": 2, "train__eval_every": 2, "checkpoint__every": 1}
    experts = {"parallel__ep": 2, "model__experts": 2, "model__bias": False}
    reached = run_world(2, phases, tensor)[0].union(
        *run_world(4, phases, configured(tmp_path / "b", 4, **pipeline, **experts, **faults))
    )
    assert {phase for phase, _ in reached} == set(PHASES) - set(BEFORE_STEPS)
    assert {phase for phase, step in reached if step == 3} >= {"data", "forward", "totals", "optimizer", "write"}
    assert ("evaluation", 0) in reached and ("forward", 4) not in reached


def error_of(rank: Rank, config: Any) -> BaseException | None:
    try:
        trained(rank, config)
    except Exception as error:  # any error is the result
        return error
    return None


def test_a_weight_that_becomes_nan_is_named(tmp_path: Path) -> None:
    config = configured(tmp_path, 2, train__steps=3, fault__inject="nan rank=1 step=2")
    for error in run_world(2, error_of, config):
        assert isinstance(error, DivergenceError)
        assert "step 2: " in str(error) and "has a weight that is not finite on rank 1 " in str(error)
        assert error.ranks == (1,)


@pytest.mark.parametrize("kind", ["flip_weight", pytest.param("flip_gradient", marks=pytest.mark.slow)])
def test_a_bit_that_flips_on_one_rank_is_found_there(kind: str, tmp_path: Path) -> None:
    more = {
        "parallel__dp": 3,
        "parallel__zero": 0,
        "batch__global": 6,
        "train__steps": 3,
        "train__check_replicas_every": 1,
    }
    config = configured(tmp_path, 3, fault__inject=f"{kind} rank=1 step=2 bit=20", **more)
    for error in run_world(3, error_of, config):
        assert isinstance(error, ReplicasDifferError)
        assert str(error).startswith("step 2: replicas differ") and error.ranks == (1,)


LIMITS = {"comm__timeout_s": 1.0, "train__steps": 3}


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ({"parallel__dp": 2}, "skip_collective rank=1 step=2"),
        pytest.param({"parallel__dp": 2}, "skip_collective rank=1 step=2 phase=totals", marks=pytest.mark.slow),
        pytest.param({"parallel__tp": 2}, "skip_collective rank=1 step=2 phase=tp", marks=pytest.mark.slow),
        ({"parallel__pp": 2}, "lose_message rank=0 step=2"),
    ],
)
def test_ranks_wait_for_a_communication_that_does_not_come(layout: dict[str, Any], fault: str, tmp_path: Path) -> None:
    config = configured(tmp_path, 2, fault__inject=fault, **layout, **LIMITS)
    errors = run_world(2, error_of, config)
    assert any(isinstance(error, LostPeerError) for error in errors), errors
    assert json.loads((config.folder / "injected.jsonl").read_text().splitlines()[-1])["step"] == 2


def events_of_step_2(rank: Rank, config: Any) -> list[Any]:
    """Train with the faults of the configuration; return the events of step 2."""
    from megascale.train.fault_injection import fault_injection
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    run, injection = build_run(rank, config), fault_injection(config.fault.inject, rank, config.folder)
    assert injection is not None
    injection.attach(run)
    train(run, Reporter(config, run.device, None, [], run.mesh.recorder))
    return [event for event in recorded_events(run.mesh.recorder) if event.step == 2]


def test_a_late_message_arrives_late_and_its_sender_goes_on(tmp_path: Path) -> None:
    faults = {"train__steps": 3, "fault__inject": "delay_message rank=0 step=2 delay_s=0.2"}
    config = configured(tmp_path, 2, parallel__pp=2, batch__global=4, **faults)
    sender, receiver = run_world(2, events_of_step_2, config)
    sends = [event for event in sender if event.name == "send"]
    arrivals = {event.microbatch: event.end for event in receiver if event.name == "receive"}
    assert len(sends) > 1 and all(arrivals[send.microbatch] - send.issue >= 0.2 for send in sends)
    assert sends[1].issue < arrivals[sends[0].microbatch]


def test_a_slow_processor_lengthens_an_action_by_its_own_time(tmp_path: Path) -> None:
    from megascale.train.fault_injection import fault_injection

    config = configured(tmp_path, 1, fault__inject="slow_compute rank=0 step=2 factor=3")
    run, injection = (
        build_run(Rank(0, 1, 0, "host"), config),
        fault_injection(config.fault.inject, Rank(0, 1, 0, "host"), config.folder),
    )
    assert injection is not None
    injection.attach(run)
    recorder = run.mesh.recorder
    for recorder.step in (1, 2):
        with recorder.action("F", 0, 0):
            time.sleep(0.01)
    assert recorded_events(recorder)[1].end - recorded_events(recorder)[1].start >= 0.03


@pytest.mark.parametrize("kind", ["full_disk", pytest.param("kill", marks=pytest.mark.slow)])  # may strike too late
def test_a_save_that_fails_is_one_warning_and_training_goes_on(kind: str, tmp_path: Path) -> None:
    changes = {"checkpoint__every": 1, "checkpoint__async": False, "train__steps": 3}
    config = configured(tmp_path, 1, fault__inject=f"{kind} rank=0 step=2 phase=write", **changes)
    (messages,) = run_world(1, trained, config)
    failed = [message for message in messages if message.startswith("WARNING: no checkpoint of step 2")]
    assert len(failed) == 1, messages
    assert sorted(path.name for path in (config.folder / "checkpoints").iterdir()) == ["step-00000001", "step-00000003"]


@pytest.mark.slow
def test_a_job_that_is_killed_and_started_again_has_the_undisturbed_curve(tmp_path: Path) -> None:
    curves = []
    for name, inject in (
        ("calm", ""),
        ("struck", "kill rank=0 step=3; raise rank=0 step=4; hang rank=0 step=4 for_s=0.1"),
    ):
        tree = settings(SIZES, tmp_path / name / "runs", train__steps=5, train__log_every=1, checkpoint__every=1)
        tree["fault"] = {"inject": inject}
        config = write_config(tree, tmp_path / name / "run.toml")
        ends = []
        while not ends or ends[-1]:
            assert len(ends) < 4
            job = Job(config)
            ends.append(job.process.wait(120))
            output = "".join(job.process.communicate())
            assert ("WARNING: this run injects faults" in output) is bool(inject) or ends[-1] == -9
        curves.append([(step["step"], step["loss"], step["grad_norm"]) for step in job.steps()])
    assert ends == [-9, 1, 0]
    assert curves[0] == curves[1] and len(curves[0]) == 5
