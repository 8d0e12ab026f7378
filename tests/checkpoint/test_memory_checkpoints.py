"""In-memory checkpoints: a run whose processes died resumes from complete copies, bit by bit."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascale.checkpoint.memory import replication
from megascale.checkpoint.memory.copies import CopyFolder
from megascale.core.errors import CheckpointError
from megascale.core.network import reserve_port
from megascale.core.rank import Rank
from megascale.core.run_folder import TOKEN_VARIABLE
from megascale.operate.channel import handshake
from megascale.operate.node.stored_copies import RUN_FILE
from tests.checkpoint.test_checkpoints import config_in, state_of
from tests.checkpoint.test_saver import hold
from tests.marks import only_quick
from tests.runs import FAMILIES, build_run, config_of, settings, write_config
from tests.worlds import RankFailed, run_world


def config_with(folder: Path, **layout: Any) -> Any:
    return config_in(folder, **{"checkpoint__every": 100, "checkpoint__in_memory_every": 1} | layout)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Folder for the copies; its file system does not matter here."""
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def at(config: Any, rank: Rank, apart: bool) -> Any:
    """The configuration of a rank; with `apart`, of a rank on its own host, whose writer may take a minute to start."""
    replication.SAVE_TIMEOUT_S = 60.0
    if not apart:
        return config
    host_memory = Path(config.checkpoint.in_memory_dir) / f"host{rank.rank}"
    return config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"in_memory_dir": str(host_memory)})}
    )


def train_and_exit(rank: Rank, config: Any, steps: int, saved: int, apart: bool = False) -> dict[str, list[Any]]:
    """Train, with a checkpoint on storage at step `saved` and copies in memory at the rest, and exit without cleanup.

    Returns the state after the last step.
    """
    from megascale.train.step import train_step

    run = build_run(rank, at(config, rank, apart))
    for step in range(1, steps + 1):
        train_step(run, run.train_loader.batch(run.progress.samples))
        run.buffers.finish_param_gather()
        if step == saved:
            run.checkpoints.save(run.progress)
        else:
            run.checkpoints.save_to_memory(run.progress)
            copied = run.checkpoints.wait_for_save()
            assert copied is not None and copied.error is None and copied.path is None
    return state_of(run)


def resume(rank: Rank, config: Any, apart: bool = False) -> tuple[dict[str, list[Any]], int, str, list[str]]:
    """Resume. Returns the state, the step, its source, and the warnings."""
    run = build_run(rank, at(config, rank, apart))
    result = run.checkpoints.resume()
    if result is None:
        return {}, 0, "nothing", run.checkpoints.warnings
    return state_of(run), result.progress.step, result.path.name if result.path else "memory", run.checkpoints.warnings


def fail_to_allocate(rank: Rank, config: Any) -> str:
    """The error of a rank if rank 1 has no memory for its second slot."""
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
    return failed.value.message


def test_a_failed_allocation_frees_the_memory(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__tp=2)
    first, second = run_world(2, fail_to_allocate, config)
    assert first == second and "rank-00001.b: No space left on device" in first
    assert list(memory.iterdir()) == []


def test_ranks_remove_a_folder_without_copies_together(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that another rank removes, while this one looks into it, is removed."""
    copies = CopyFolder(memory, "run", memory / "token", {})
    copies.create()
    scandir = os.scandir

    def removed_meanwhile(path: Path) -> Iterator[os.DirEntry[str]]:
        (copies.path / RUN_FILE).unlink()
        copies.path.rmdir()
        return scandir(path)

    monkeypatch.setattr("os.scandir", removed_meanwhile)
    copies.remove_unused(0)
    assert not copies.path.exists()


@pytest.mark.slow
def test_complete_copies_survive_a_failed_allocation(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__tp=2)
    before = run_world(2, train_and_exit, config, 3, 1)
    run_world(2, fail_to_allocate, config)
    after = run_world(2, resume, config)
    assert [place for _, _, place, _ in after] == ["memory"] * 2
    assert [state for state, *_ in after] == before


LAYOUTS: list[dict[str, Any]] = [
    {"parallel__tp": 2},
    {"parallel__dp": 2, "parallel__zero": 0},
    {"parallel__dp": 4, "parallel__dp_shard": 2, "parallel__zero": 1},
    {"parallel__dp": 4, "parallel__dp_shard": 2, "parallel__zero": 3, "parallel__state_shard": "all"},
]
WITHOUT = {"checkpoint__in_memory_every": 0}


@pytest.mark.parametrize("layout", only_quick(LAYOUTS, LAYOUTS[0]), ids=str)
def test_a_run_resumes_from_the_last_step_in_memory(layout: dict[str, Any], tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), **layout)
    before = run_world(config.world_size, train_and_exit, config, 3, 1)
    after = run_world(config.world_size, resume, config)
    assert [(step, place, warnings) for _, step, place, warnings in after] == [(3, "memory", [])] * config.world_size
    assert [state for state, *_ in after] == before
    assert [state for state, *_ in run_world(config.world_size, resume, config)] == before, "and again"
    headers = [json.loads(path.read_text()) for path in memory.rglob("*.json")]
    assert all(header.keys() == {"run", "what", "facts", "sums"} for header in headers), "names on disk stay"


def resume_on_a_full_file_system(rank: Rank, config: Any, full: str) -> tuple[int, list[str]] | str:
    """Resume while files in the folder `full` cannot be written. Returns step and warnings, or the error."""
    room = os.fsync

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{full}/"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room(descriptor)

    os.fsync = fsync
    run = None
    try:
        run = build_run(rank, config)
        result = run.checkpoints.resume()
    except CheckpointError as error:
        return str(error)
    finally:
        os.fsync = room
    assert result is not None
    run.progress = result.progress
    run.checkpoints.save_to_memory(run.progress)
    assert run.checkpoints.wait_for_save().error is None
    return result.progress.step, run.checkpoints.warnings


def test_a_start_without_space_for_the_ids_of_copies(tmp_path: Path, memory: Path) -> None:
    """The state is there already: a full /dev/shm costs the copies, and the next ones count again."""
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__tp=2)
    run_world(2, train_and_exit, config, 3, 1)
    for step, warnings in run_world(2, resume_on_a_full_file_system, config, str(memory)):
        assert step == 3 and len(warnings) == 1, warnings
        assert re.match("a copy in memory of step 3 was lost, .*rank-0000[01].[ab].json: No space left", warnings[0])
    again = run_world(2, resume, config)
    assert [place for _, _, place, _ in again] == ["memory"] * 2, [warnings for *_, warnings in again]
    first, second = run_world(2, resume_on_a_full_file_system, config, config.output_dir)
    assert first == second and re.match(r"cannot write .*/\.memory: No space left .* -> free some space", first)


def resume_until_copies_are_adopted(rank: Rank, config: Any, apart: bool = True) -> str:
    """Resume until this rank has made its copies those of the new start; rank 1 dies before it has."""
    run = build_run(rank, at(config, rank, apart))
    folder = run.checkpoints._memory_checkpoints._folder
    adopt = folder.adopt

    def adopt_and_die(*arguments: Any, **named: Any) -> str:
        if rank.rank == 0:
            adopt(*arguments, **named)
        raise InterruptedError

    folder.adopt = adopt_and_die
    with pytest.raises(InterruptedError):
        run.checkpoints.resume()
    return "died"


def test_copies_outlive_starts_that_die_while_they_take_them_over(tmp_path: Path, memory: Path) -> None:
    """A second fault while the job loads, and a third: some copies have the id of each start."""
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__dp=2, parallel__zero=1)
    before = run_world(2, train_and_exit, config, 3, 1, True)
    for _ in range(2):
        assert run_world(2, resume_until_copies_are_adopted, config) == ["died"] * 2
    token = config.folder / ".memory"
    assert len(token.read_text().splitlines()) == 4, "the folder, two starts that died, and the one before"
    after = run_world(2, resume, config, True)
    assert [(step, place, warnings) for _, step, place, warnings in after] == [(3, "memory", [])] * 2
    assert [state for state, *_ in after] == before
    assert len(token.read_text().splitlines()) == 2, "only the copies of this start count"


def test_a_newer_checkpoint_on_storage_wins(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory))
    run_world(1, train_and_exit, config, 2, 1)
    assert run_world(1, resume, config)[0][2] == "memory"
    shutil.copytree(config.folder / "checkpoints/step-00000001", config.folder / "checkpoints/step-00000003")
    assert run_world(1, resume, config)[0][2] == "step-00000003"
    assert not list(memory.rglob("*.json")), "older copies are removed"


@pytest.mark.parametrize("copies", [True, False])
def test_copies_serve_a_run_whose_checkpoints_are_lost(copies: bool, tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory))
    (before,) = run_world(1, train_and_exit, config, 3, 1)
    stored = config.folder / "checkpoints"
    shutil.rmtree(stored)
    if copies:
        warning = f"{stored} has no checkpoint of the run any more"
        assert run_world(1, resume, config) == [(before, 3, "memory", [warning])]
        return
    shutil.rmtree(memory)
    memory.mkdir()
    with pytest.raises(RankFailed, match=f"the run has had checkpoints in {stored}, and {stored} has no complete one"):
        run_world(1, resume, config)


def lose_the_folder(rank: Rank, config: Any, known: str) -> tuple[int, str]:
    """Resume in an attempt whose driver knows another run's folder. Returns the step, and the error."""
    os.environ[TOKEN_VARIABLE] = known
    try:
        _, step, _, _ = resume(rank, config)
    except CheckpointError as error:
        return 0, error.message
    finally:
        del os.environ[TOKEN_VARIABLE]
    return step, ""


@pytest.mark.parametrize("in_memory_every", [0, 1])
def test_a_rank_of_a_later_attempt_does_not_begin_a_run(in_memory_every: int, tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), checkpoint__in_memory_every=in_memory_every)
    (answer,) = run_world(1, lose_the_folder, config, "id\nstart\n")
    assert answer[0] == 0 and answer[1].startswith(f"the run's folder {config.folder} is lost")
    assert not config.folder.exists()


def slots(memory: Path, rank: int) -> dict[int, Path]:
    """Files of a rank's copies by step."""
    headers = memory.rglob(f"rank-{rank:05d}.?.json")
    return {json.loads(path.read_text())["facts"]["progress"]["step"]: path.with_suffix("") for path in headers}


def test_a_damaged_copy_is_passed_over(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__tp=2)
    run_world(2, train_and_exit, config, 3, 1)
    assert slots(memory, 0).keys() == slots(memory, 1).keys() == {2, 3}
    newest = slots(memory, 1)[3]
    with open(newest, "r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    for _, step, place, warnings in run_world(2, resume, config):
        assert (step, place) == (2, "memory")
        assert warnings == [f"the copy of step 3 in memory is not used: rank 1: the CRC-32 of {newest} does not match"]
    slots(memory, 0)[2].with_name(f"{slots(memory, 0)[2].name}.json").write_text("{")
    for _, step, place, _ in run_world(2, resume, config):
        assert (step, place) == (1, "step-00000001")


def test_a_rule_with_equal_state_loads_from_storage(tmp_path: Path, memory: Path) -> None:
    """SPAM's moments have the names and shapes of AdamW's, and another meaning."""
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory))
    run_world(1, train_and_exit, config, 2, 1)
    ((_, step, place, warnings),) = run_world(
        1, resume, config_with(tmp_path, checkpoint__in_memory_dir=str(memory), optimizer__name="spam")
    )
    assert (step, place) == (1, "step-00000001")
    assert "they are of another layout, model or optimizer" in warnings[0]


@pytest.mark.slow
def test_another_layout_and_another_run_load_from_storage(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__tp=2)
    run_world(2, train_and_exit, config, 2, 1)
    other = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__pp=2)
    for _, step, place, warnings in run_world(2, resume, other):
        assert (step, place) == (1, "step-00000001")
        assert warnings == [
            "the copies of step 2 in memory are not used: they are of another layout, model or optimizer"
        ]
    run_world(2, train_and_exit, config, 2, 1)
    shutil.rmtree(config.folder)
    assert {place for _, _, place, _ in run_world(2, resume, config)} == {"nothing"}, "a new folder is another run"


def test_a_run_on_one_host_warns_of_missing_replicas(tmp_path: Path, memory: Path) -> None:
    wanted = {"checkpoint__in_memory_dir": str(memory), "checkpoint__replicate": True}
    config = config_with(tmp_path, **wanted, parallel__dp=2)
    expected = ["no second copies in memory of 2 of 2 ranks: the job has no other host"]
    assert [warnings for *_, warnings in run_world(2, resume, config)] == [expected] * 2


def test_resume_never_removes_the_copies(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory))
    run_world(1, train_and_exit, config, 2, 1)
    shutil.rmtree(config.checkpoint_folder)
    never = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), checkpoint__resume="never")
    assert run_world(1, resume, never)[0][2] == "nothing"
    assert not list(memory.rglob("*.json"))


def test_the_copy_of_a_lost_host_comes_from_its_replica(tmp_path: Path, memory: Path) -> None:
    config = config_with(
        tmp_path, checkpoint__in_memory_dir=str(memory), checkpoint__replicate=True, parallel__dp=2, parallel__zero=1
    )
    before = run_world(2, train_and_exit, config, 3, 1, True)
    assert slots(memory / "host0", 1).keys() == slots(memory / "host1", 0).keys() == {2, 3}
    shutil.rmtree(memory / "host1")
    after = run_world(2, resume, config, True)
    assert [(step, place, warnings) for _, step, place, warnings in after] == [(3, "memory", [])] * 2
    assert [state for state, *_ in after] == before
    remaining = [json.loads(path.read_text())["facts"]["progress"]["step"] for path in memory.rglob("*.json")]
    assert remaining == [3, 3, 3], "older copies are removed, replicas too"


@pytest.mark.slow
def test_the_copies_of_a_lost_group_come_from_other_groups(tmp_path: Path, memory: Path) -> None:
    config = config_with(
        tmp_path, checkpoint__in_memory_dir=str(memory), checkpoint__replicate=True, parallel__dp=2, parallel__pp=2
    )
    before = run_world(4, train_and_exit, config, 3, 1, True)
    for host in ("host0", "host1"):  # the dp group of the first stage
        shutil.rmtree(memory / host)
    after = run_world(4, resume, config, True)
    assert [(step, place) for _, step, place, _ in after] == [(3, "memory")] * 4
    assert [state for state, *_ in after] == before


def lose_a_neighbour(rank: Rank, config: Any, during: bool) -> list[str]:
    """Make four copies in memory, and kill rank 1's writer, which receives rank 0's, after the first copy, or `during`
    the second. Returns the error of each copy, "" without.
    """
    from megascale.train.step import train_step

    run, errors = build_run(rank, at(config, rank, True)), []
    for step in range(1, 5):
        train_step(run, run.train_loader.batch(run.progress.samples))
        run.buffers.finish_param_gather()
        killed = during and step == 2 and rank.rank == 1
        if killed:
            hold(run.checkpoints.saver.writer_pid)  # the copy is under way until it is killed
        run.checkpoints.save_to_memory(run.progress)
        if killed:
            os.kill(run.checkpoints.saver.writer_pid, signal.SIGKILL)
        copied = run.checkpoints.wait_for_save()
        errors.append(str(copied.error or ""))
        if not during and step == 1 and rank.rank == 1:
            os.kill(run.checkpoints.saver.writer_pid, signal.SIGKILL)
    return errors


@pytest.mark.parametrize("during", only_quick([False, True], True))
def test_a_neighbour_that_comes_back_receives_copies_again(during: bool, tmp_path: Path, memory: Path) -> None:
    """A copy under way is given up, and the rank and its host are named."""
    config = config_with(
        tmp_path, checkpoint__in_memory_dir=str(memory), checkpoint__replicate=True, parallel__dp=2, parallel__zero=1
    )
    first, second = run_world(2, lose_a_neighbour, config, during)
    assert first == second, "every rank has the same outcome"
    assert first[0] == first[2] == first[3] == ""
    if during:
        assert re.fullmatch(
            r"rank 0: cannot write a copy to rank 1 on \S+ at \S+: .*  -> does that rank's writer run, .*"
            r"|rank 1: the process that writes checkpoints has ended: signal 9",
            first[1],
        )
    else:
        assert first[1] == ""
    assert slots(memory / "host0", 1).keys() == slots(memory / "host1", 0).keys() == {3, 4}


def connect_to_dead_writer(rank: Rank, config: Any) -> str:
    """Kill this rank's writer, and connect to where it received copies. Returns what became of the connection."""
    run = build_run(rank, at(config, rank, True))
    memory, writer = run.checkpoints._memory_checkpoints, run.checkpoints.saver.writer_pid
    run.checkpoints.save_to_memory(run.progress)
    assert run.checkpoints.wait_for_save().error is None, "the writers receive"
    os.kill(writer, signal.SIGKILL)
    os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)
    try:
        socket.create_connection(memory._receivers[rank.rank][:2]).close()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "accepted"


def test_nobody_but_the_writer_holds_its_socket(tmp_path: Path, memory: Path) -> None:
    """A connection that the kernel accepts for a dead writer costs its peer the whole timeout."""
    config = config_with(
        tmp_path, checkpoint__in_memory_dir=str(memory), checkpoint__replicate=True, parallel__dp=2, parallel__zero=1
    )
    assert run_world(2, connect_to_dead_writer, config) == ["ECONNREFUSED"] * 2


def swap_hosts(memory: Path) -> None:
    (memory / "host0").rename(memory / "x")
    (memory / "host1").rename(memory / "host0")
    (memory / "x").rename(memory / "host1")


@pytest.mark.slow
def test_a_copy_of_another_layout_is_not_sent(tmp_path: Path, memory: Path) -> None:
    first, second, *_ = LAYOUTS
    run_world(2, train_and_exit, config_with(tmp_path, checkpoint__in_memory_dir=str(memory), **first), 2, 1, True)
    swap_hosts(memory)
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), **second)
    for step, copied in run_world(2, resume_and_copy, config):
        assert (step, copied) == (1, None)
    swap_hosts(memory)
    for step, copied in run_world(2, resume_and_copy, config):
        assert (step, copied) == (2, None)


def resume_and_copy(rank: Rank, config: Any) -> tuple[int, CheckpointError | None]:
    """Resume, train a step and copy. Returns the step resumed from, and the error of the copy."""
    from megascale.train.step import train_step

    run = build_run(rank, at(config, rank, True))
    result = run.checkpoints.resume()
    assert result is not None
    run.progress = dataclasses.replace(result.progress)
    train_step(run, run.train_loader.batch(run.progress.samples))
    run.buffers.finish_param_gather()
    run.checkpoints.save_to_memory(run.progress)
    copied = run.checkpoints.wait_for_save()
    assert copied is not None
    return result.progress.step, copied.error


def test_ranks_that_change_hosts_send_each_other_their_copies(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__tp=2)
    before = run_world(2, train_and_exit, config, 2, 1, True)
    swap_hosts(memory)
    after = run_world(2, resume, config, True)
    assert [state for state, *_ in after] == before and {place for _, _, place, _ in after} == {"memory"}


def test_copies_of_an_abandoned_start_do_not_count(tmp_path: Path, memory: Path) -> None:
    """A host returns with a copy of a step that the other hosts have train_to_the_end once more."""
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__tp=2)
    run_world(2, train_and_exit, config, 2, 1, True)
    (memory / "host1").rename(memory / "away")
    assert run_world(2, resume_and_copy, config) == [(1, None)] * 2, "from storage, with new copies of step 2"
    shutil.rmtree(memory / "host1")
    (memory / "away").rename(memory / "host1")
    for _, step, place, warnings in run_world(2, resume, config, True):
        assert (step, place) == (1, "step-00000001")
        assert warnings == ["the copies of step 2 in memory are not used: not every rank has one"]


@pytest.mark.parametrize("without", only_quick([WITHOUT, {"checkpoint__every": 0}], WITHOUT), ids=str)
def test_a_start_without_copies_invalidates_earlier_ones(without: dict[str, Any], tmp_path: Path, memory: Path) -> None:
    layout = {"checkpoint__in_memory_dir": str(memory), "parallel__tp": 2}
    config, plain = (
        config_with(tmp_path, **layout, **overrides) for overrides in ({}, without | {"checkpoint__in_memory_every": 0})
    )
    run_world(2, train_and_exit, config, 3, 1)
    assert slots(memory, 0)
    assert [(step, place) for _, step, place, _ in run_world(2, resume, plain)] == [(1, "step-00000001")] * 2
    assert not list(memory.rglob("rank-*")), "and the memory is freed"
    assert [(step, place) for _, step, place, _ in run_world(2, resume, config)] == [(1, "step-00000001")] * 2


def test_a_damaged_checkpoint_does_not_invalidate_older_copies(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory))
    before = run_world(1, train_and_exit, config, 2, 1)
    folder = config.folder / "checkpoints"
    shutil.copytree(folder / "step-00000001", folder / "step-00000003")
    shard = folder / "step-00000003/rank-00000-000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    for _ in range(2):
        ((state, step, place, warnings),) = run_world(1, resume, config)
        assert (step, place) == (2, "memory") and [state] == before
        assert warnings == [f"rank 0: {shard}: it ends too early"]
    (folder / "step-00000001/manifest.json").write_text("{")
    assert run_world(1, resume, config)[0][2] == "memory", "where storage has no intact checkpoint"


@pytest.mark.slow
def test_ranks_that_change_hosts_leave_nothing_behind(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__tp=2)
    run_world(2, train_and_exit, config, 2, 1, True)
    for _ in range(2):
        swap_hosts(memory)
        assert {place for _, _, place, _ in run_world(2, resume, config, True)} == {"memory"}
    for host, rank in (("host0", 0), ("host1", 1)):
        assert sorted(path.name for path in (memory / host).rglob("rank-*.?")) == [f"rank-0000{rank}.{s}" for s in "ab"]


def test_a_copied_run_folder_has_no_copies_in_memory(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory))
    before = run_world(1, train_and_exit, config, 2, 1)
    shutil.copytree(config.folder, config.folder.with_name("copied"))
    ((_, step, place, _),) = run_world(1, resume, config.model_copy(update={"name": "copied"}))
    assert (step, place) == (1, "step-00000001")
    ((state, step, place, _),) = run_world(1, resume, config)
    assert (step, place) == (2, "memory") and [state] == before


def remove_memory_folder(rank: Rank, config: Any) -> tuple[str, str]:
    """Remove the folder in memory under a run. Returns the errors of a copy and of a checkpoint."""
    run = build_run(rank, config)
    run.mesh.world.control.barrier("made")  # both ranks have allocated their slots
    shutil.rmtree(config.checkpoint.in_memory_dir, ignore_errors=True)  # both ranks do
    run.mesh.world.control.barrier("removed")
    run.checkpoints.save_to_memory(run.progress)
    copy = run.checkpoints.wait_for_save()
    saved = run.checkpoints.save(run.progress)
    assert copy is not None and saved is not None
    return str(copy.error), str(saved.error)


def test_without_its_folder_in_memory_a_run_still_saves(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__tp=2)
    for copy, saved in run_world(2, remove_memory_folder, config):
        assert re.match(rf"rank 0: cannot write {memory}/\S+/rank-00000.a.json: No such file", copy) and saved == "None"
    assert (config.folder / "checkpoints/step-00000000/manifest.json").exists()


@pytest.mark.slow
def test_a_finished_run_saves_a_state_that_was_in_memory_alone(tmp_path: Path, memory: Path) -> None:
    keys = {"checkpoint__every": 100, "checkpoint__in_memory_every": 1, "checkpoint__in_memory_dir": str(memory)}
    tree = settings(FAMILIES["gpt"], tmp_path, train__precision="bf16", train__steps=3, **keys)
    config = config_of(tree, tmp_path)
    run_world(1, train_and_exit, config, 3, 0)
    command = [sys.executable, "-m", "megascale", "train", str(write_config(tree, tmp_path / "run.toml"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "resumed from the copies in memory: step 3" in done.stdout, done.stderr
    assert "all 3 steps are done" in done.stdout
    assert (config.folder / "checkpoints/step-00000003/manifest.json").exists()
    assert list(memory.iterdir()) == []
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert list(memory.iterdir()) == [], "nor does a start of a finished run leave any"


def test_a_run_that_ends_leaves_nothing_in_memory(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), train__steps=3)
    run_world(1, train_to_the_end, config)
    assert list(memory.iterdir()) == []
    assert (config.folder / "checkpoints/step-00000003/manifest.json").exists()


def train_to_the_end(rank: Rank, config: Any) -> None:
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    run = build_run(rank, config)
    train(run, Reporter(config, run.device, None, [], run.mesh.recorder))


def receiver(folder: Path) -> tuple[tuple[str, int], str]:
    """Receive copies into `folder`, in threads. Returns the address and the secret."""
    secret = secrets.token_hex(32)
    with reserve_port() as reserved:
        address = reserved.getsockname()
        replication.serve_replicas(address, str(folder), secret)
        handshake.connect(address, bytes.fromhex(secret), replication.PURPOSE, 60)[0].close()  # it listens
        return address, secret


def test_a_replica_needs_the_secret_of_the_job(tmp_path: Path) -> None:
    address, secret = receiver(tmp_path / "there")
    (tmp_path / "rank-00000.a").write_bytes(b"numbers")
    (tmp_path / "rank-00000.a.json").write_text('{"run": "x"}')
    with pytest.raises(OSError, match=r"it hung up: it has another secret than this process: 'a copy to rank 1 at 127"):
        replication.send_replica(str(tmp_path / "rank-00000.a"), "rank 1", address, secrets.token_hex(32), 60)
    assert not (tmp_path / "there").exists()
    replication.send_replica(str(tmp_path / "rank-00000.a"), "rank 1", address, secret, 60)
    assert (tmp_path / "there/rank-00000.a").read_bytes() == b"numbers"
    assert json.loads((tmp_path / "there/rank-00000.a.json").read_text()) == {"run": "x"}
    for path, mode in ((".", 0o700), ("rank-00000.a", 0o600)):
        assert (tmp_path / "there" / path).stat().st_mode & 0o777 == mode
    (tmp_path / "else").write_bytes(b"numbers")
    (tmp_path / "else.json").write_text("{}")
    with pytest.raises(OSError, match="is no copy"):
        replication.send_replica(str(tmp_path / "else"), "rank 1", address, secret, 60)
    assert not (tmp_path / "there/else").exists()


def test_a_replica_is_allocated_once_however_small_the_parts_in_which_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, content, allocated = (
        replication.COPY_BLOCK_BYTES,
        secrets.token_bytes((4 << 20) + 1),
        list[tuple[int, int]](),
    )
    allocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: (allocated.append(args[1:]), allocate(*args)))
    with io.BytesIO(content) as stream:
        source = SimpleNamespace(recv_into=lambda part: stream.readinto(part[: 1 << 16]))
        replication._receive(tmp_path, {"name": "rank-00000.a", "size": len(content), "header": {}}, source)
    assert (tmp_path / "rank-00000.a").read_bytes() == content
    assert allocated == [(0, block), (block, 1)]


@pytest.mark.parametrize("admits", [True, False], ids=["admits", "accepts"])
def test_a_silent_peer_is_given_up_and_named(admits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has stopped before or after the handshake."""
    held: list[Any] = []
    monkeypatch.setattr(replication, "_receive_copy", lambda connection, *_: held.append(connection))
    (tmp_path / "rank-00000.a").write_bytes(b"numbers")
    (tmp_path / "rank-00000.a.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, secret = receiver(tmp_path / "there") if admits else (silent.getsockname(), "00" * 32)
        with pytest.raises(replication.ReplicationError) as caught:
            replication.send_replica(str(tmp_path / "rank-00000.a"), "rank 3 on n1", address, secret, 0.3)
    assert caught.value.strerror == "no answer for 0.3 s" and bool(held) == admits
    assert caught.value.filename == f"a copy to rank 3 on n1 at 127.0.0.1:{address[1]}"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_hundred_strangers_cost_a_receiver_no_memory(tmp_path: Path) -> None:
    """Each sends 4 MiB: a line without an end, or the head of a message of 4 GiB."""
    address, secret = receiver(tmp_path / "there")
    before, crowd = resident_bytes(), []
    for number in range(100):
        connection = socket.create_connection(address)
        connection.settimeout(0.2)
        crowd.append(connection)
        with contextlib.suppress(OSError):  # it has been closed
            connection.sendall((b"{" if number % 2 else b"\xff") * (4 << 20))
    assert resident_bytes() - before < 16 << 20
    (tmp_path / "rank-00000.a").write_bytes(b"numbers")
    (tmp_path / "rank-00000.a.json").write_text("{}")
    replication.send_replica(str(tmp_path / "rank-00000.a"), "rank 1", address, secret, 60)
    for connection in crowd:
        connection.close()


def listens(rank: Rank, config: Any, apart: bool) -> bool:
    """Return True if this rank's writer receives copies."""
    run = build_run(rank, at(config, rank, apart))
    assert run.checkpoints._memory_checkpoints is not None
    return run.checkpoints._memory_checkpoints.receiver_args is not None


def test_nothing_listens_for_copies_on_a_single_host(tmp_path: Path, memory: Path) -> None:
    config = config_with(tmp_path, checkpoint__in_memory_dir=str(memory), parallel__dp=2)
    assert run_world(2, listens, config, False) == [False, False]
    assert run_world(2, listens, config, True) == [True, True]
    folders = [folder for folder in memory.rglob("*") if folder.is_dir()]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders if folder.name.startswith("megascale"))


def test_a_folder_that_a_stranger_made_is_refused(tmp_path: Path) -> None:
    from megascale.operate.node.stored_copies import _make_private_folder

    (tmp_path / "own").mkdir(mode=0o777)
    _make_private_folder(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(CheckpointError, match="is no folder"):
        _make_private_folder(tmp_path / "link")
    os.chown(tmp_path / "own", 65534, 65534)
    with pytest.raises(CheckpointError, match="belongs to user 65534"):
        _make_private_folder(tmp_path / "own")
