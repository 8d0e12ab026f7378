"""Copies in memory: a run whose processes died goes on from them, to the bit, and from nothing that is not whole."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import CheckpointError
from megascale.core.rank import Rank
from tests.checkpoint.test_checkpoints import config_in, state_of
from tests.runs import FAMILIES, build_run, config_of, settings, write_config
from tests.worlds import run_world


def config_with(folder: Path, **layout: Any) -> Any:
    return config_in(folder, **{"checkpoint__every": 100, "checkpoint__memory_every": 1} | layout)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A folder for the copies: which file system it is of does not matter here."""
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def at(config: Any, rank: Rank, apart: bool) -> Any:
    """The configuration of a rank; with `apart`, of one on a host of its own."""
    if not apart:
        return config
    own = Path(config.checkpoint.memory_dir) / f"host{rank.rank}"
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"memory_dir": str(own)})})


def die(rank: Rank, config: Any, steps: int, saved: int, apart: bool = False) -> dict[str, list[Any]]:
    """Train, with a checkpoint on storage after `saved` steps, and leave without a word. The state after the last step,
    of which there is a copy.
    """
    from megascale.train.step import train_step

    run = build_run(rank, at(config, rank, apart))
    for step in range(1, steps + 1):
        train_step(run, run.train.batch(run.progress.samples))
        run.gradients.finish_gather()
        if step == saved:
            run.checkpoints.save(run.progress)
        else:
            run.checkpoints.remember(run.progress)
            found = run.checkpoints.finish()
            assert found is not None and found.error is None and found.path is None
    return state_of(run)


def back(rank: Rank, config: Any, apart: bool = False) -> tuple[dict[str, list[Any]], int, str, list[str]]:
    """Resume: the state, the step, where it came from, and what is wrong with others."""
    run = build_run(rank, at(config, rank, apart))
    found = run.checkpoints.resume()
    if found is None:
        return {}, 0, "nothing", run.checkpoints.warnings
    return state_of(run), found.progress.step, found.path.name if found.path else "memory", run.checkpoints.warnings


def without_room(rank: Rank, config: Any) -> str:
    """What a rank says if the second has no room for a second copy."""
    room, count = os.posix_fallocate, 0

    def refused(descriptor: int, start: int, size: int) -> None:
        nonlocal count
        count += 1
        if count == 2 and rank.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room(descriptor, start, size)

    os.posix_fallocate = refused
    with pytest.raises(CheckpointError) as failed:
        build_run(rank, config)
    return failed.value.what


def test_what_was_taken_in_vain_is_given_back(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), parallel__tp=2)
    first, second = run_world(2, without_room, config)
    assert first == second and "rank-00001.b: No space left on device" in first
    assert list(memory.iterdir()) == []


def test_copies_that_are_whole_stay_where_there_is_no_room(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), parallel__tp=2)
    before = run_world(2, die, config, 3, 1)
    run_world(2, without_room, config)
    after = run_world(2, back, config)
    assert [place for _, _, place, _ in after] == ["memory"] * 2
    assert [state for state, *_ in after] == before


LAYOUTS: list[dict[str, Any]] = [{"parallel__tp": 2}, {"parallel__dp": 2, "parallel__zero": 0}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_run_goes_on_from_the_last_step_in_memory(layout: dict[str, Any], tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), **layout)
    before = run_world(2, die, config, 3, 1)
    after = run_world(2, back, config)
    assert [(step, place, damaged) for _, step, place, damaged in after] == [(3, "memory", [])] * 2
    assert [state for state, *_ in after] == before
    assert [state for state, *_ in run_world(2, back, config)] == before, "and again"


def test_what_is_newer_on_storage_wins(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory))
    run_world(1, die, config, 2, 1)
    assert run_world(1, back, config)[0][2] == "memory"
    shutil.copytree(config.folder / "checkpoints/step-00000001", config.folder / "checkpoints/step-00000003")
    assert run_world(1, back, config)[0][2] == "step-00000003"
    assert not list(memory.rglob("*.json")), "older copies are forgotten"


def slots(memory: Path, rank: int) -> dict[int, Path]:
    """The files of a rank's copies by their steps."""
    headers = memory.rglob(f"rank-{rank:05d}.?.json")
    return {json.loads(path.read_text())["facts"]["progress"]["step"]: path.with_suffix("") for path in headers}


def test_a_copy_that_is_damaged_is_passed_over(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), parallel__tp=2)
    run_world(2, die, config, 3, 1)
    assert slots(memory, 0).keys() == slots(memory, 1).keys() == {2, 3}
    newest = slots(memory, 1)[3]
    with open(newest, "r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    for _, step, place, damaged in run_world(2, back, config):
        assert (step, place) == (2, "memory")
        assert damaged == [f"the copy of step 3 in memory is not used: rank 1: {newest} is not what was written"]
    slots(memory, 0)[2].with_name(f"{slots(memory, 0)[2].name}.json").write_text("{")
    for _, step, place, _ in run_world(2, back, config):
        assert (step, place) == (1, "step-00000001")


def test_another_layout_and_another_run_take_what_is_on_storage(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), parallel__tp=2)
    run_world(2, die, config, 2, 1)
    other = config_with(tmp_path, checkpoint__memory_dir=str(memory), parallel__pp=2)
    for _, step, place, damaged in run_world(2, back, other):
        assert (step, place) == (1, "step-00000001")
        assert damaged == ["the copies of step 2 in memory are not used: they are of another layout or model"]
    run_world(2, die, config, 2, 1)
    shutil.rmtree(config.folder)
    assert {place for _, _, place, _ in run_world(2, back, config)} == {"nothing"}, "a folder that was made anew"


def test_a_run_without_another_host_says_that_there_is_no_second_copy(tmp_path: Path, memory: Path) -> None:
    wanted = {"checkpoint__memory_dir": str(memory), "checkpoint__replicate": True}
    config = config_with(tmp_path, **wanted, parallel__dp=2)
    told = ["no second copies in memory of 2 of 2 ranks: data parallelism has no other host"]
    assert [damaged for *_, damaged in run_world(2, back, config)] == [told] * 2


def test_resume_never_forgets(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory))
    run_world(1, die, config, 2, 1)
    shutil.rmtree(config.checkpoints)
    never = config_with(tmp_path, checkpoint__memory_dir=str(memory), checkpoint__resume="never")
    assert run_world(1, back, never)[0][2] == "nothing"
    assert not list(memory.rglob("*.json"))


def test_a_lost_hosts_copy_comes_from_its_neighbour(tmp_path: Path, memory: Path) -> None:
    config = config_with(
        tmp_path, checkpoint__memory_dir=str(memory), checkpoint__replicate=True, parallel__dp=2, parallel__zero=1
    )
    before = run_world(2, die, config, 3, 1, True)
    assert slots(memory / "host0", 1).keys() == slots(memory / "host1", 0).keys() == {2, 3}
    shutil.rmtree(memory / "host1")
    after = run_world(2, back, config, True)
    assert [(step, place, damaged) for _, step, place, damaged in after] == [(3, "memory", [])] * 2
    assert [state for state, *_ in after] == before
    left = [json.loads(path.read_text())["facts"]["progress"]["step"] for path in memory.rglob("*.json")]
    assert left == [3, 3, 3], "older ones are forgotten, the neighbour's too"


def swap_hosts(memory: Path) -> None:
    (memory / "host0").rename(memory / "x")
    (memory / "host1").rename(memory / "host0")
    (memory / "x").rename(memory / "host1")


@pytest.mark.slow
def test_a_copy_of_another_layout_is_not_sent_into_smaller_or_larger_room(tmp_path: Path, memory: Path) -> None:
    first, second = LAYOUTS
    run_world(2, die, config_with(tmp_path, checkpoint__memory_dir=str(memory), **first), 2, 1, True)
    swap_hosts(memory)
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), **second)
    for step, copied in run_world(2, go_on, config):
        assert (step, copied) == (1, None)
    swap_hosts(memory)
    for step, copied in run_world(2, go_on, config):
        assert (step, copied) == (2, None)


def go_on(rank: Rank, config: Any) -> tuple[int, CheckpointError | None]:
    """The step that was resumed, and what became of a copy after the next."""
    from megascale.train.step import train_step

    run = build_run(rank, at(config, rank, True))
    found = run.checkpoints.resume()
    assert found is not None
    run.progress = dataclasses.replace(found.progress)
    train_step(run, run.train.batch(run.progress.samples))
    run.gradients.finish_gather()
    run.checkpoints.remember(run.progress)
    copied = run.checkpoints.finish()
    assert copied is not None
    return found.progress.step, copied.error


def test_ranks_that_change_hosts_send_each_other_their_copies(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), parallel__tp=2)
    before = run_world(2, die, config, 2, 1, True)
    swap_hosts(memory)
    after = run_world(2, back, config, True)
    assert [state for state, *_ in after] == before and {place for _, _, place, _ in after} == {"memory"}


def test_copies_of_steps_that_a_run_has_gone_back_from_do_not_count(tmp_path: Path, memory: Path) -> None:
    """A host that was away comes back with a copy of a step that the others have made anew."""
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), parallel__tp=2)
    run_world(2, die, config, 2, 1, True)
    (memory / "host1").rename(memory / "away")
    assert run_world(2, go_on, config) == [(1, None)] * 2, "from storage; it leaves copies of step 2"
    shutil.rmtree(memory / "host1")
    (memory / "away").rename(memory / "host1")
    for _, step, place, damaged in run_world(2, back, config, True):
        assert (step, place) == (1, "step-00000001")
        assert damaged == ["the copies of step 2 in memory are not used: not every rank has one"]


@pytest.mark.parametrize("without", [{"checkpoint__memory_every": 0}, {"checkpoint__every": 0}], ids=str)
def test_a_start_without_copies_makes_those_before_worthless(
    without: dict[str, Any], tmp_path: Path, memory: Path
) -> None:
    layout = {"checkpoint__memory_dir": str(memory), "parallel__tp": 2}
    config, plain = (
        config_with(tmp_path, **layout, **more) for more in ({}, without | {"checkpoint__memory_every": 0})
    )
    run_world(2, die, config, 3, 1)
    assert slots(memory, 0)
    assert [(step, place) for _, step, place, _ in run_world(2, back, plain)] == [(1, "step-00000001")] * 2
    assert not list(memory.rglob("rank-*")), "and the memory is given back"
    assert [(step, place) for _, step, place, _ in run_world(2, back, config)] == [(1, "step-00000001")] * 2


def test_a_damaged_checkpoint_does_not_make_older_copies_worthless(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory))
    before = run_world(1, die, config, 2, 1)
    folder = config.folder / "checkpoints"
    shutil.copytree(folder / "step-00000001", folder / "step-00000003")
    shard = folder / "step-00000003/rank-00000-000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    for _ in range(2):
        ((state, step, place, damaged),) = run_world(1, back, config)
        assert (step, place) == (2, "memory") and [state] == before
        assert damaged == [f"rank 0: {shard}: it ends too early"]
    (folder / "step-00000001/manifest.json").write_text("{")
    assert run_world(1, back, config)[0][2] == "memory", "where storage has nothing that is right"


def test_ranks_that_change_hosts_leave_nothing_behind(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), parallel__tp=2)
    run_world(2, die, config, 2, 1, True)
    for _ in range(2):
        swap_hosts(memory)
        assert {place for _, _, place, _ in run_world(2, back, config, True)} == {"memory"}
    for host, rank in (("host0", 0), ("host1", 1)):
        assert sorted(path.name for path in (memory / host).rglob("rank-*.?")) == [f"rank-0000{rank}.{s}" for s in "ab"]


def test_a_copy_of_a_runs_folder_has_no_part_in_its_memory(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory))
    before = run_world(1, die, config, 2, 1)
    shutil.copytree(config.folder, config.folder.with_name("copied"))
    ((_, step, place, _),) = run_world(1, back, config.model_copy(update={"name": "copied"}))
    assert (step, place) == (1, "step-00000001")
    ((state, step, place, _),) = run_world(1, back, config)
    assert (step, place) == (2, "memory") and [state] == before


def lose(rank: Rank, config: Any) -> tuple[str, str]:
    """What becomes of a copy and of a checkpoint when the folder in memory is removed under a run."""
    run = build_run(rank, config)
    run.mesh.world.control.barrier("made")  # both have made what they need there
    shutil.rmtree(config.checkpoint.memory_dir, ignore_errors=True)  # both ranks do
    run.mesh.world.control.barrier("removed")
    run.checkpoints.remember(run.progress)
    copy = run.checkpoints.finish()
    saved = run.checkpoints.save(run.progress)
    assert copy is not None and saved is not None
    return str(copy.error), str(saved.error)


def test_without_its_folder_in_memory_a_run_still_saves(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), parallel__tp=2)
    for copy, saved in run_world(2, lose, config):
        assert re.match(rf"rank 0: cannot write {memory}/\S+/rank-00000.a.json: No such file", copy) and saved == "None"
    assert (config.folder / "checkpoints/step-00000000/manifest.json").exists()


def test_what_was_in_memory_alone_is_saved_before_a_run_says_that_it_is_done(tmp_path: Path, memory: Path) -> None:
    keys = {"checkpoint__every": 100, "checkpoint__memory_every": 1, "checkpoint__memory_dir": str(memory)}
    tree = settings(FAMILIES["gpt"], tmp_path, train__precision="bf16", train__steps=3, **keys)
    config = config_of(tree, tmp_path)
    run_world(1, die, config, 3, 0)
    command = [sys.executable, "-m", "megascale", "train", str(write_config(tree, tmp_path / "run.toml"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "resumed from the copies in memory: step 3" in done.stdout, done.stderr
    assert "all 3 steps are done" in done.stdout
    assert (config.folder / "checkpoints/step-00000003/manifest.json").exists()
    assert list(memory.iterdir()) == []
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert list(memory.iterdir()) == [], "nor of a start of a run that is done"


def test_a_run_that_ends_leaves_nothing_in_memory(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__memory_dir=str(memory), train__steps=3)
    run_world(1, trained, config)
    assert list(memory.iterdir()) == []
    assert (config.folder / "checkpoints/step-00000003/manifest.json").exists()


def trained(rank: Rank, config: Any) -> None:
    from megascale.train.loop import train
    from megascale.train.report import Reporter

    run = build_run(rank, config)
    train(run, Reporter(config, run.device, None, [], run.mesh.recorder))


def test_only_the_job_itself_may_send(tmp_path: Path) -> None:
    from megascale.checkpoint import copies

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    copies.receive(os.dup(listener.fileno()), str(tmp_path / "there"), "secret")
    (tmp_path / "rank-00000.a").write_bytes(b"numbers")
    (tmp_path / "rank-00000.a.json").write_text('{"run": "x"}')
    with pytest.raises(OSError, match="it hung up"):
        copies.send(str(tmp_path / "rank-00000.a"), ("127.0.0.1", port), "another")
    copies.send(str(tmp_path / "rank-00000.a"), ("127.0.0.1", port), "secret")
    assert (tmp_path / "there/rank-00000.a").read_bytes() == b"numbers"
    assert json.loads((tmp_path / "there/rank-00000.a.json").read_text()) == {"run": "x"}
    (tmp_path / "else").write_bytes(b"numbers")
    (tmp_path / "else.json").write_text("{}")
    with pytest.raises(OSError, match="is no copy"):
        copies.send(str(tmp_path / "else"), ("127.0.0.1", port), "secret")
    assert not (tmp_path / "there/else").exists()
