"""Injected faults: the plan of a rank, the log over restarts, and what a fault does to a process."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from itertools import islice, pairwise
from pathlib import Path

import pytest

from megascale.config.injection import Fault, RandomFaults, parse_injection
from megascale.operate.node import inject
from megascale.operate.node.inject import Injector, describe, faults_of_target, random_faults

STEPS = range(1, 8)


def struck(injector: Injector, phases: tuple[str, ...] = ("data", "forward", "backward")) -> list[tuple[str, str, int]]:
    """Go through the steps of an attempt; return kind, phase and step of each fault."""
    return [
        (fault.kind, phase, step)
        for step in STEPS
        for phase in phases
        for _ in range(2)  # micro-batches
        if (fault := injector.strikes(phase, step))
    ]


def test_a_fault_strikes_its_rank_once_in_its_step_and_phase(tmp_path: Path) -> None:
    text = parse_injection(
        "kill rank=1 step=3; hang rank=0 step=2; stop rank=1 step=5 phase=backward; nan rank=1 step=6"
    )
    found = struck(Injector(text, 1, 2, tmp_path))
    assert found == [("kill", "forward", 3), ("stop", "backward", 5), ("nan", "data", 6)]
    assert struck(Injector(text, 0, 2, tmp_path)) == [("hang", "data", 2)]


def test_a_restart_does_not_repeat_a_fault(tmp_path: Path) -> None:
    text = parse_injection("kill rank=0 step=2; kill rank=0 step=2; exit rank=0 step=4 times=2; hang rank=0 phase=load")
    first = Injector(text, 0, 1, tmp_path)
    assert first.strikes("load", 0) and not first.strikes("load", 0)
    assert first.strikes("forward", 2)  # the process dies here
    second = Injector(text, 0, 1, tmp_path)
    assert not second.strikes("load", 0)
    assert struck(second) == [("kill", "forward", 2), ("exit", "forward", 4)]
    assert struck(Injector(text, 0, 1, tmp_path)) == [("exit", "forward", 4)]
    assert struck(Injector(text, 0, 1, tmp_path)) == []
    lines = [json.loads(line) for line in (tmp_path / "injected.jsonl").read_text().splitlines()]
    faults = [line for line in lines if "fault" in line]
    assert [line["step"] for line in faults] == [0, 2, 2, 4, 4]
    assert abs(faults[0].pop("time") - time.time()) < 60
    assert faults[0] == {
        "fault": "hang rank=0 step=0 phase=load", "kind": "hang", "rank": 0, "node": None, "step": 0, "phase": "load"
    }  # fmt: skip


def test_a_slow_processor_is_slow_in_every_action_of_its_steps(tmp_path: Path) -> None:
    text = parse_injection("slow_compute rank=0 step=2 steps=3 factor=1.5; collect_garbage rank=1 step=4 delay_s=0.01")
    injector = Injector(text, 0, 2, tmp_path)
    assert injector.plans("slow_compute") and not injector.plans("collect_garbage")
    assert [step for _, _, step in struck(injector, ("",))] == [2, 2, 3, 3, 4, 4]
    assert (tmp_path / "injected.jsonl").read_text().count('"fault"') == 1


def test_injected_garbage_collections_are_real(tmp_path: Path) -> None:
    pauses: list[str] = []
    take = lambda phase, info: pauses.append(phase)  # noqa: E731
    gc.callbacks.append(take)
    try:
        inject.strike(Fault("collect_garbage", 1, rank=0, delay_s=0.01), "")
    finally:
        gc.callbacks.remove(take)
    assert pauses.count("start") == pauses.count("stop") >= 1


def test_a_slow_rank_is_slow_in_all_its_steps_and_logged_once(tmp_path: Path) -> None:
    injector = Injector(parse_injection("slow rank=0 step=2 delay_s=0.5 steps=3"), 0, 1, tmp_path)
    assert [step for _, _, step in struck(injector)] == [2, 2, 3, 3, 4, 4]
    assert (tmp_path / "injected.jsonl").read_text().count('"fault"') == 1


def test_random_faults_are_equal_on_all_ranks_and_not_repeated(tmp_path: Path) -> None:
    text = parse_injection("random mtbf_steps=0.5 seed=3 kinds=kill,hang")
    by_rank = [struck(Injector(text, rank, 3, tmp_path), inject.RANDOM_PHASES) for rank in range(3)]
    steps = [fault.fault.step for fault in islice(random_faults(RandomFaults(("kill",), 0, 0.5, 3), 3, 0.0), 40)]
    assert sum(map(len, by_rank)) > 3 and all(by_rank)
    assert steps == sorted(steps) and steps[-1] > 10
    again = [struck(Injector(text, rank, 3, tmp_path), inject.RANDOM_PHASES) for rank in range(3)]
    assert max(inject.InjectionLog(tmp_path).struck().values()) == 1
    assert sum(map(len, again)) < sum(map(len, by_rank)), "only those of a step that another fault cut short"


def test_random_faults_by_time_leave_out_those_of_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(inject.time, "time", lambda: now[0])
    text = parse_injection("random mtbf_s=10 seed=1 kinds=kill")
    due = [planned.due for planned in islice(random_faults(text.random, 1, 1000.0), 6)]  # type: ignore[arg-type]
    first = Injector(text, 0, 1, tmp_path)
    now[0] = due[0] - 0.1
    assert struck(first, inject.RANDOM_PHASES) == []
    now[0] = due[0] + 0.1
    assert len(struck(first, inject.RANDOM_PHASES)) == 1
    now[0] = due[3] + 0.1  # the job was down until now
    again = Injector(text, 0, 1, tmp_path)
    assert struck(again, inject.RANDOM_PHASES) == []
    now[0] = due[4] + 0.1
    assert len(struck(again, inject.RANDOM_PHASES)) == 1


def test_random_faults_by_time_leave_out_those_of_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which imports and connects, and on a busy host may take longer than the time between two faults."""
    now = [1000.0]
    monkeypatch.setattr(inject.time, "time", lambda: now[0])
    text = parse_injection("random mtbf_s=10 seed=1 kinds=kill")
    due = [planned.due for planned in islice(random_faults(text.random, 1, 1000.0), 2)]  # type: ignore[arg-type]
    injector = Injector(text, 0, 1, tmp_path)
    now[0] = due[0] + 0.1
    assert not any(injector.strikes(phase, step) for step in (4, 5) for phase in inject.RANDOM_PHASES)
    now[0] = due[1] + 0.1
    assert any(injector.strikes(phase, 5) for phase in inject.RANDOM_PHASES)


def test_random_faults_are_apart() -> None:
    drawn = [planned.due for planned in islice(random_faults(RandomFaults(("kill",), 10.0, apart=8.0), 4, 0.0), 500)]
    gaps = [later - earlier for earlier, later in pairwise(drawn)]
    assert min(gaps) >= 8.0 and 9.5 < drawn[-1] / len(drawn) < 10.5


def test_faults_of_nodes_are_for_the_program_that_injects_them(tmp_path: Path) -> None:
    text = parse_injection("lose_node node=1 step=3; kill_driver step=2; kill rank=0 step=1")
    assert faults_of_target(text, "node", tmp_path) == [Fault("lose_node", 3, node=1)]
    assert faults_of_target(text, "driver", tmp_path) == [Fault("kill_driver", 2)]
    log = inject.InjectionLog(tmp_path)
    log.add(inject.PlannedFault("lose_node node=1 step=3", text.faults[0]), "", 3)
    assert faults_of_target(text, "node", tmp_path) == []


def test_a_description_is_the_text_of_the_fault() -> None:
    for text in (
        "kill rank=2 step=5 phase=forward",
        "cut_link node=1 peer=2 step=3 for_s=2.5",
        "kill_driver step=4",
        "slow rank=0 step=2 phase=data delay_s=0.1 steps=4",
        "exit rank=0 step=1 phase=tp status=7 times=3",
        "throttle_link node=1 step=3 for_s=2.5 mbit=10",
        "flip_weight rank=1 step=3 bit=30",
    ):
        fault = parse_injection(text).faults[0]
        assert describe(fault) == text and parse_injection(describe(fault)).faults[0] == fault


PROGRAM = """
import sys, threading, time
from megascale.config.injection import Fault
from megascale.operate.node.inject import strike
ticks = []
def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
start = time.monotonic()
strike(Fault({kind!r}, 1, {options}), "the fault")
print(max(b - a for a, b in zip([start, *ticks], [*ticks, time.monotonic()])))
"""


def end_of(kind: str, options: str = "") -> tuple[int, str, str]:
    """Status, output and errors of a process that a fault strikes."""
    command = [sys.executable, "-c", PROGRAM.format(kind=kind, options=options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("kind", "status", "error"), [("kill", -9, ""), ("exit", 7, ""), ("raise", 1, "injected: the")]
)
def test_faults_that_end_a_process(kind: str, status: int, error: str) -> None:
    found, output, errors = end_of(kind, "status=7")
    assert found == status and not output and error in errors


@pytest.mark.parametrize(
    ("kind", "silent"),
    [("stop", True), ("hold_gil", True), ("hang", False), ("slow_storage", False), ("slow", False)],
)
def test_faults_that_last(kind: str, silent: bool) -> None:
    """Other threads of the process go on unless it is stopped or its lock is held."""
    status, output, errors = end_of(kind, "for_s=0.6, delay_s=0.6")
    assert status == 0, errors
    assert (float(output) > 0.5) is silent


def test_faults_that_last_for_ever() -> None:
    for kind, letter in (("stop", "T"), ("hold_gil", "R"), ("hang", "S"), ("slow_storage", "S")):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(kind=kind, options="")])
        try:
            deadline = time.monotonic() + 30
            while _state(process.pid) != letter or time.monotonic() < deadline - 29:
                assert process.poll() is None and time.monotonic() < deadline, kind
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
