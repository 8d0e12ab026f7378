"""The start of ranks: its parts are timed, and their requests to the job's store do not grow with the job."""

from __future__ import annotations

import math
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.record.start_parts import StartPart, StartParts, process_start
from megascale.train.start_report import describe_start, sum_parts
from tests.recorded_events import drain
from tests.runs import GPT, config_of, settings
from tests.worlds import run_world


def test_parts_end_where_the_next_begins() -> None:
    parts = StartParts()
    for name, count in (("rendezvous", 5), ("groups", 7), ("build", 7), ("groups", 17)):
        parts.count = lambda count=count: (count, 10 * count)  # type: ignore[misc]
        parts.begin(name)
    found = parts.end()
    assert [(part.name, part.requests, part.polls) for part in found] == [
        ("import", 5, 50), ("rendezvous", 2, 20), ("groups", 0, 0), ("build", 10, 100), ("groups", 0, 0),
    ]  # fmt: skip
    assert all(part.ended == after.begun for part, after in pairwise(found))
    assert found[0].begun < found[0].ended <= time.perf_counter()
    parts.begin("step")
    assert not parts.end()[1:], "the start has ended"


def test_a_process_began_before_now() -> None:
    assert 0 < time.perf_counter() - process_start() < time.clock_gettime(time.CLOCK_BOOTTIME)


def test_the_slowest_rank_of_each_part_is_named() -> None:
    def parts(*seconds: float) -> dict[str, list[float]]:
        starts = [StartPart(name, 0.0, t, 3, 9) for name, t in zip(("import", "load", "import"), seconds, strict=True)]
        return sum_parts(starts)

    text = describe_start([parts(1, 5, 0.5), parts(2, 1, 0.25), parts(0, 0, 0)])
    assert text == (
        "start: 6.50 s (rank 0) to the end of the first step: import 2.25 s (rank 1), checkpoint 5.00 s (rank 0); "
        "9 requests of rank 0 to the job's store, at most 9 of another rank"
    )
    assert describe_start([parts(1, 0, 0.5)]) == "start: 1.50 s to the end of the first step: import 1.50 s"


class Messages:
    """A writer that keeps messages."""

    name = "messages"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, record: Any) -> None: ...

    def write_message(self, text: str) -> None:
        self.texts.append(text)

    def close(self) -> None: ...


def start_of(rank: Rank, config: RunConfig) -> tuple[dict[str, list[float]], list[str], list[str]]:
    """Start and train a step, as `train.entry` does. Returns the totals by part, messages, and names in the log."""
    from megascale.comm import control
    from megascale.comm.store import count_requests
    from megascale.device import detect_device
    from megascale.record.layout import Phase
    from megascale.record.log import RankLog
    from megascale.train.build import build_mesh, build_rank_run
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter
    from megascale.train.resume import load_initial_state
    from megascale.train.stop import StopRequest
    from megascale.train.stored_attempt import begin_stored_attempt

    control.LIVENESS_CHECK_S = 3600.0  # its requests are as many as a wait is long
    log, device = RankLog(), detect_device(allow_gpu=False)
    log.start_parts.begin("rendezvous")
    log.start_parts.count = count_requests
    log.set_phase(Phase.GROUPS)
    mesh = build_mesh(config, rank, device, log)
    log.set_phase(Phase.BUILD)
    run = build_rank_run(config, mesh, device, StopRequest())
    log.set_phase(Phase.LOAD)
    load_initial_state(run, lambda path: pytest.fail("no weights"))
    ended = {}
    end = log.start_parts.end
    log.start_parts.end = lambda: ended.setdefault("parts", end())  # type: ignore[method-assign]
    messages = Messages()
    begin_stored_attempt(run, None)
    train(run, Reporter(config, device, None, [messages], mesh.recorder))
    drained, names = drain(mesh.recorder)
    return sum_parts(ended["parts"]), messages.texts, [names[event["name"]] for event in drained.events]


def config_for(folder: Path, **overrides: Any) -> RunConfig:
    overrides = {"train__steps": 1, "optimizer__warmup_steps": 0, **overrides}
    return config_of(settings(GPT | {"num_layers": 2}, folder, **overrides), folder)


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 4},
        pytest.param({"dp": 8}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_larger_job_makes_no_more_requests_of_a_rank(layout: dict[str, int], tmp_path: Path) -> None:
    """Of two ranks the second is the last one everywhere, and removes all keys: no rank makes more requests than it
    does, over all axes.
    """
    most: Counter[str] = Counter()
    for axis in layout:
        results = run_world(2, start_of, config_for(tmp_path, **{f"parallel__{axis}": 2}))
        most.update({name: int(part[1]) for name, part in results[1][0].items()})
    overrides = {f"parallel__{axis}": size for axis, size in layout.items()}
    results = run_world(math.prod(layout.values()), start_of, config_for(tmp_path, **overrides))
    assert most["rendezvous"] > 5 and most["groups"] > 20
    for parts, _, _ in results[1:]:
        assert all(part[1] <= most[name] for name, part in parts.items()), (parts, most)


def test_parts_are_reported_and_in_the_event_store(tmp_path: Path) -> None:
    ((parts, texts, names),) = run_world(1, start_of, config_for(tmp_path))
    assert list(parts) == [
        "import", "rendezvous", "groups", "warm-up", "build", "indices", "checkpoint", "first step", "first batch",
    ]  # fmt: skip
    assert texts[0].startswith("start: ") and " to the end of the first step: import " in texts[0]
    assert {f"start: {name}" for name in parts} <= set(names)
