"""`megascale check` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megascale.catalog.schedules import SCHEDULES
from megascale.cli.main import main
from megascale.config.loading import load_config
from megascale.config.toml_writer import to_toml
from megascale.core import registry
from megascale.core.registry import Card
from megascale.core.units import format_bytes
from megascale.layout.stages import placement_of
from megascale.plan.account.memory import JobMemory
from megascale.schedule.interleaved import combined_1f1b
from megascale.schedule.ir import Action, Kind, RankSchedule, ScheduleFn, backward, each_action, forward
from megascale.schedule.lower import compute_order
from megascale.schedule.one_f_one_b import one_f_one_b
from megascale.schedule.zero_bubble import interleaved_zb
from tests.runs import GPT, settings, write_config


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Write a configuration without mistakes."""
    return str(write_config(settings(GPT, tmp_path, parallel__tp=2, parallel__sp=True), tmp_path / "run.toml"))


def test_the_summary_describes_the_run(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, "--gpus", "8", "parallel.pp=2", "parallel.vpp=2", "train.steps=1000"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    fullest = JobMemory(load_config(config, ["parallel.pp=2", "parallel.vpp=2"], world_size=8)).fullest()
    # 101 x 32 embedding, 16 x 32 positions, 4 x (12 x 32 x 32 + 13 x 32) blocks, 2 x 32 norm
    first, title, *rows = out.splitlines()
    assert first == (
        "test: 54.62k parameters, tp 2 sp x pp 2 (vpp 2) x dp 2 = 8 processes, 4 micro-batches of 1, "
        "128 tokens per step, 128.00k in 1000 steps: no mistakes found"
    )
    assert title == "memory of the fullest rank"
    expected = {**vars(fullest), "total": fullest.total}
    assert [row.split(maxsplit=1) for row in rows] == [[kind, format_bytes(size)] for kind, size in expected.items()]


def test_show_is_the_resolved_configuration(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, "--show", "--gpus", "4"]) == 0
    assert capsys.readouterr().out == to_toml(load_config(config, world_size=4))


def backwards_missing(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """A schedule that forgets the last backward of the last rank."""
    order = one_f_one_b(p, v, m, rank)
    return order[:-1] if rank == p - 1 else order


def ranks_waiting(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """A schedule whose first rank runs all of a micro-batch before the next, which the others expect first."""
    if rank == 0:
        return [action(0, i) for i in range(m) for action in (forward, backward)]
    return [*(forward(0, i) for i in reversed(range(m))), *(backward(0, i) for i in range(m))]


def raising(p: int, v: int, m: int, rank: int) -> RankSchedule:
    raise ValueError("no luck")


def with_fewer_arguments(p: int, v: int, m: int) -> RankSchedule:
    return []


def in_a_tuple(p: int, v: int, m: int, rank: int) -> object:
    return tuple(one_f_one_b(p, v, m, rank))


def in_tuples(p: int, v: int, m: int, rank: int) -> object:
    return [tuple(action) for action in one_f_one_b(p, v, m, rank)]


def with_names(p: int, v: int, m: int, rank: int) -> object:
    """A schedule whose kinds are text."""
    return [action._replace(kind="F") for action in each_action(one_f_one_b(p, v, m, rank))]


def with_messages(p: int, v: int, m: int, rank: int) -> RankSchedule:
    return [Action(Kind.SEND_F, 0, 0), *one_f_one_b(p, v, m, rank)]


def without_weights(p: int, v: int, m: int, rank: int) -> RankSchedule:
    return [action for action in interleaved_zb(p, v, m, rank) if action != Action(Kind.W, 0, 3)]


@pytest.mark.parametrize(
    ("schedule", "mistake"),
    [
        (raising, "ValueError: no luck"),
        (with_fewer_arguments, "TypeError: with_fewer_arguments() takes 3 positional arguments but 4 were given"),
        (in_a_tuple, "rank 0: tuple, not a list of Action and Overlap"),
        (in_tuples, "rank 0: tuple, not a list of Action and Overlap"),
        (with_names, "rank 0: Action(kind='F', chunk=0, microbatch=0) has no Kind"),
        (with_messages, "rank 0: Action(kind=<Kind.SEND_F: 'SEND_F'>, chunk=0, microbatch=0) has no Kind of F"),
        (without_weights, "rank 0 runs F0.3 I0.3 for chunk 0 and micro-batch 3, not F, then B or I and W"),
        (interleaved_zb, "its card has not the fact split = True"),
        (combined_1f1b, "its card has not the fact pairs = True"),
        (backwards_missing, "rank 1 runs F0.3 for chunk 0 and micro-batch 3, not F, then B"),
        (ranks_waiting, "the schedule deadlocks: rank 0 at B0.0, rank 1 at F0.3"),
    ],
)
def test_another_package_s_schedule_is_run_symbolically(
    schedule: ScheduleFn, mistake: str, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan, of which the simulation builds all ranks, says the same."""
    name = schedule.__name__
    card = Card(name, "", f"{__name__}:{name}", {**SCHEDULES["1f1b"].facts, "peak": None})
    monkeypatch.setitem(SCHEDULES.cards, name, card)
    keys = ["parallel.pp=2", f"parallel.schedule={name}", "batch.global=4"]
    for command in (["check", config], ["plan", config, "--hardware", "h100"]):
        assert main([*command, "--gpus", "4", *keys]) == 2
        found = capsys.readouterr().err
        assert f"{__name__}:{name}  parallel.schedule: {mistake}" in found and "Traceback" not in found


@pytest.mark.parametrize(
    ("target", "facts", "mistake"),
    [
        ("no_such_module:f", {}, "no_such_module:f  parallel.schedule: ModuleNotFoundError: No module named"),
        ("math:nothing", {}, "math:nothing  parallel.schedule: AttributeError: module 'math' has no attribute"),
        ("math:pi", {}, "math:pi  parallel.schedule: TypeError: 'float' object is not callable"),
        (f"{__name__}:one_f_one_b", {"placement": "w"}, "'theirs' has the unknown placement 'w'  -> one of loop, v"),
        (f"{__name__}:one_f_one_b", {"peak": 2}, "parallel.schedule: TypeError: 'int' object is not callable"),
        (f"{__name__}:one_f_one_b", {"peak": lambda p, v, m: 1}, "rank 0 has 2 micro-batches live, more than 1"),
        (f"{__name__}:one_f_one_b", {"periodik": True}, "the unknown fact 'periodik', none of v, "),
        (f"{__name__}:one_f_one_b", {}, ""),
    ],
)
def test_another_package_s_card(
    target: str, facts: dict[str, object], mistake: str, config: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    point = SimpleNamespace(load=lambda: Card("theirs", "", target, facts), value="other:CARD")
    points = SimpleNamespace(select=lambda group: [point] if group == SCHEDULES.group else [])
    monkeypatch.setattr(registry, "installed_entry_points", lambda: points)
    monkeypatch.delitem(vars(SCHEDULES), "cards", raising=False)
    compute_order.cache_clear()
    try:
        status = main(["check", config, "--gpus", "4", "parallel.pp=2", "parallel.schedule=theirs"])
    finally:
        compute_order.cache_clear()
        placement_of.cache_clear()
    found = capsys.readouterr().err
    assert status == (2 if mistake else 0) and mistake in found and "Traceback" not in found


def test_json_is_one_object(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, "--json", "--gpus", "4"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    state, activations = answer["state_bytes"]["total"], answer["activation_bytes"]["total"]
    assert 2 * state == sum(answer["state_bytes"].values()) > 0
    assert answer["total_bytes"] == state + activations + answer["transient_bytes"]
    assert activations > 0 and answer["transient_bytes"] > 0
    assert (answer["config"]["parallel"]["dp"], answer["config"]["batch"]["global"]) == (2, 8)


def test_json_of_mistakes(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, "--json", "--gpus", "3", "model.num_layers=0"]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "ok": False,
        "problems": [
            {
                "where": "command line",
                "key": "model.num_layers",
                "message": "0: should be greater than 0",
                "hint": "a whole number above 0, to 10000",
            }
        ],
    }


@pytest.mark.parametrize(("more", "status"), [([], 2), (["--gpus", "2"], 2), (["--gpus", "16"], 0)])
def test_a_fault_of_a_rank_that_the_job_lacks(
    more: list[str], status: int, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", config, "fault.inject=kill rank=9 step=1", "batch.global=8", *more]) == status
    err = capsys.readouterr().err
    assert ("there is no rank 9 for kill  -> a rank from 0 to 1" in err) == bool(status)
    assert ("--gpus for more processes" in err) == (not more)


def test_a_second_run_of_a_name_that_must_begin_anew(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = load_config(config).folder
    folder.mkdir(parents=True)
    assert main(["check", config, "checkpoint.resume=never"]) == 0
    (folder / "metrics.jsonl").touch()
    assert main(["check", config, "checkpoint.resume=never"]) == 2
    assert "there is a run of this name already" in capsys.readouterr().err
    assert main(["check", config]) == 0


def test_a_number_of_processes_without_a_layout(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, "--gpus", "3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "command line  --gpus: 3 processes are not a multiple of tp 2 x cp 1 x pp 1 = 2  -> start 2 or 4: dp" in err


def test_a_limit_that_no_policies_fit_is_refused_as_by_a_plan(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = list[str]()
    for command in (["check"], ["plan", "--hardware", "h100"]):
        assert main([*command, config, "train.memory=auto", "train.memory_limit=100000"]) == 2
        said.append(capsys.readouterr().err)
    assert "train.memory: no policies fit: a rank of stage 0 needs" in said[0]
    assert said[0] == said[1]
    assert main(["check", config, "train.memory=auto", "train.memory_limit=100000000"]) == 0


@pytest.mark.parametrize("gpus", ["0", "-1", "two", "1.5", ""])
def test_an_invalid_number_of_gpus_is_refused(config: str, capsys: pytest.CaptureFixture[str], gpus: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", config, f"--gpus={gpus}"])
    assert caught.value.code == 2
    assert f"{gpus!r} is not an integer of 1 or more" in capsys.readouterr().err


def test_nothing_is_written(config: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    main(["check", config])
    assert sorted(tmp_path.rglob("*")) == before
