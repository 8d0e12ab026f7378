"""Saving in the background: files hold the state at the save, and a failing writer does not end the run."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint import offline
from megascale.checkpoint.collective_errors import OtherRankError
from megascale.checkpoint.folders import complete_checkpoints
from megascale.checkpoint.save import writer_process
from megascale.core.errors import CheckpointError
from megascale.core.rank import Rank
from megascale.core.storage import Location
from tests.checkpoint.test_checkpoints import config_in, state_of
from tests.runs import build_run
from tests.worlds import run_world


def hold(writer: int) -> None:
    """Stop a writer, as slow storage would hold it up: it is not replaced."""
    writer_process.STOPPED_S = 1000.0
    os.kill(writer, signal.SIGSTOP)


def hold_for(writer: int, seconds: float) -> None:
    """Hold up a writer for some seconds."""
    hold(writer)
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(writer, signal.SIGCONT)
        os._exit(0)


def step(run: Any) -> Any:
    from megascale.train.step import train_step

    return train_step(run, run.train_loader.batch(run.progress.samples))


def save_while_training(rank: Rank, config: Any) -> tuple[dict[str, list[Any]], int]:
    """Save with the writer stopped for two steps. Returns the state at the save, and the step that reports it."""
    run = build_run(rank, config)
    step(run)
    if rank.rank == 0:
        hold(run.checkpoints.saver.writer_pid)
    state = state_of(run)
    run.checkpoints.start_save(run.progress)
    reported = 0
    while not reported:
        result = step(run)
        if rank.rank == 0 and run.progress.step == 3:
            assert not complete_checkpoints(run.checkpoints.folder)
            os.kill(run.checkpoints.saver.writer_pid, signal.SIGCONT)
        if saved := run.checkpoints.complete_save(result.totals["ranks_written"], result.totals["ranks_failed"]):
            assert saved.error is None and saved.step == 1 and saved.path.name == "step-00000001"
            reported = run.progress.step
    run.buffers.finish_param_gather()
    return state, reported


@pytest.mark.parametrize("layout", [{"parallel__tp": 2}, {"parallel__dp": 2, "parallel__zero": 0}], ids=str)
def test_files_hold_the_state_at_the_save(tmp_path: Path, layout: dict[str, Any]) -> None:
    import numpy as np
    import torch

    config = config_in(tmp_path, **layout)
    ranks = run_world(2, save_while_training, config)
    reported = {reported for _, reported in ranks}
    assert len(reported) == 1 and reported.pop() > 3
    from megascale.checkpoint.format import manifest

    path = Location(str(config.folder / "checkpoints/step-00000001"))
    made = manifest.read(path)
    for name, tensor in made.tensors.items():
        found = offline.read_tensor(path, made, name)
        shards = [shard for state, _ in ranks for shard in state.get(name, [])]
        covered = torch.zeros(tensor.shape, dtype=torch.bool)
        for offset, size, numbers in shards:
            box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            assert found[box].contiguous().numpy().tobytes() == numbers, name
            covered[box] = True
        assert bool(np.all(covered.numpy()))


def writer_dies(rank: Rank, config: Any) -> tuple[str, list[str]]:
    """Kill rank 1's writer during a save, and save again. Returns the error of the first, and the folders."""
    run = build_run(rank, config)
    if rank.rank == 1:
        os.kill(run.checkpoints.saver.writer_pid, signal.SIGSTOP)
    run.checkpoints.start_save(run.progress)
    if rank.rank == 1:
        os.kill(run.checkpoints.saver.writer_pid, signal.SIGKILL)
    saved = None
    while saved is None:
        result = step(run)
        saved = run.checkpoints.complete_save(result.totals["ranks_written"], result.totals["ranks_failed"])
    assert run.checkpoints.save(run.progress) is not None
    run.buffers.finish_param_gather()
    return str(saved.error), run.checkpoints.folder.list_names()


def test_a_killed_writer_does_not_end_the_run(tmp_path: Path) -> None:
    for text, folders in run_world(2, writer_dies, config_in(tmp_path, parallel__tp=2)):
        assert text == "rank 1: the process that writes checkpoints has ended: signal 9"
        assert len(folders) == 1 and folders[0] != "step-00000000", "the failed attempt is gone"


def writer_stops(rank: Rank, config: Any) -> list[str]:
    """Save and copy to memory with rank 1's writer stopped. Returns the errors, and that of a save after them."""
    writer_process.STOPPED_S = 0.3
    run, errors = build_run(rank, config), []
    for save in (run.checkpoints.save_to_memory, run.checkpoints.start_save):
        if rank.rank == 1:
            os.kill(run.checkpoints.saver.writer_pid, signal.SIGSTOP)
        save(run.progress)
        errors.append(str(run.checkpoints.wait_for_save().error))
    run.checkpoints.start_save(run.progress)
    return [*errors, str(run.checkpoints.wait_for_save().error)]


def test_a_stopped_writer_is_named_and_replaced(tmp_path: Path) -> None:
    memory = {"checkpoint__in_memory_every": 1, "checkpoint__in_memory_dir": str(tmp_path)}
    stopped = "rank 1: the process that writes checkpoints "
    stopped += "was stopped by a signal, did not answer for 0.3 s, and was killed"
    for errors in run_world(2, writer_stops, config_in(tmp_path, parallel__tp=2, **memory)):
        assert errors == [stopped, stopped, "None"]


def test_a_writer_that_starts_outlives_a_request_to_stop() -> None:
    """All processes of a job may get it, a writer before its first line runs, too."""
    writer = writer_process.WriterProcess([])
    first = writer.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(first, number)
    for _ in range(2):
        writer.submit({})
        assert writer.response(wait_s=300) == {}
    assert writer.pid == first


def test_a_stopped_writer_holds_up_no_large_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe takes 64 KiB."""
    monkeypatch.setattr(writer_process, "STOPPED_S", 0.3)
    writer = writer_process.WriterProcess([])
    os.kill(writer.pid, signal.SIGSTOP)
    writer.submit({"unknown": "x" * (1 << 20)})
    with pytest.raises(CheckpointError, match="was stopped by a signal"):
        writer.response()
    writer.submit({"unknown": "x" * (1 << 20)})
    assert writer.response(math.inf) == {}
    os.kill(writer.pid, signal.SIGKILL)


def other_rank_fails(rank: Rank, config: Any) -> str:
    """The error of a save in which rank 0 fails because of rank 1."""
    run = build_run(rank, config)
    run.checkpoints.start_save(run.progress)
    run.checkpoints.saver._writer.response(math.inf)
    error = CheckpointError("the cause") if rank.rank else OtherRankError("a consequence")
    run.checkpoints.saver._attempt.error = error
    return str(run.checkpoints.wait_for_save().error)


def test_the_rank_that_caused_a_failure_is_named(tmp_path: Path) -> None:
    assert run_world(2, other_rank_fails, config_in(tmp_path, parallel__tp=2)) == ["rank 1: the cause"] * 2


def cannot_start(rank: Rank, config: Any) -> tuple[str, str]:
    """Save while rank 1 cannot start a process, and again. Returns both errors."""
    run, python = build_run(rank, config), sys.executable
    if rank.rank == 1:
        os.kill(run.checkpoints.saver.writer_pid, signal.SIGKILL)
        sys.executable = "/nowhere/python"
        time.sleep(0.2)
    run.checkpoints.start_save(run.progress)
    failed = run.checkpoints.wait_for_save()
    sys.executable = python
    saved = run.checkpoints.save(run.progress)
    return str(failed and failed.error), str(saved and saved.error)


def test_a_writer_that_cannot_start_does_not_end_the_run(tmp_path: Path) -> None:
    for failed, saved in run_world(2, cannot_start, config_in(tmp_path, parallel__tp=2)):
        assert failed.startswith("rank 1: the process that writes checkpoints cannot be started: No such file")
        assert saved == "None"


NOISY = """
import sys
import threading
from megascale.checkpoint.save import writer
write = writer.write_files
def loud(**words):
    print("a line that is no response", flush=True)
    return write(**words)
writer.write_files = loud
writer.main(int(sys.argv[-1]))
"""


def test_prints_of_a_library_are_not_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{NOISY}' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    memory = os.memfd_create("numbers")
    os.write(memory, b"0" * 64)
    writer = writer_process.WriterProcess([memory])
    files = {"a.safetensors": [["a@0", "F32", [16], 0, 64]]}
    arguments = {
        "snapshot_path": f"/proc/self/fd/{memory}",
        "folder": str(tmp_path),
        "retry_s": 0.0,
        "checksum_block_bytes": 1024,
    }
    writer.submit({"write_files": arguments | {"files": files}})
    response = writer.response(math.inf)
    os.kill(writer.pid, signal.SIGKILL)
    assert response is not None and response["files"].keys() == files.keys()


def test_a_copy_that_has_not_arrived_has_a_hint_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.a").write_bytes(b"0" * 64)
    (tmp_path / "rank-00000.a.json").write_text("{}")
    with socket.socket() as unused:  # bound, but not listening
        unused.bind(("127.0.0.1", 0))
        arguments = {"path": str(tmp_path / "rank-00000.a"), "peer": "rank 1 on n1", "secret": "00" * 32}
        arguments |= {"address": unused.getsockname(), "timeout_s": 0.3}
        writer = writer_process.WriterProcess([])
        writer.submit({"send_replica": arguments})
        with pytest.raises(
            CheckpointError, match=r"a copy to rank 1 on n1 at 127\.0\.0\.1:\d+: Connection refused"
        ) as caught:
            writer.response(math.inf)
    os.kill(writer.pid, signal.SIGKILL)
    assert caught.value.hint == writer_process.PEER_HINT


def second_save_fails(rank: Rank, config: Any) -> list[str]:
    """Messages of a run whose second save cannot start; the first is complete by then."""
    from megascale.checkpoint import folders
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    def fresh(folder: Location, step: int) -> Location:
        if step == 2:
            raise PermissionError(13, "Permission denied")
        return plain(folder, step)

    plain, folders.fresh_folder = folders.fresh_folder, fresh
    run, messages = build_run(rank, config), []
    reporter = Reporter(config, run.device, None, [], run.mesh.recorder)
    reporter.write_message = messages.append  # type: ignore[method-assign]
    hold_for(run.checkpoints.saver.writer_pid, 0.5)
    train(run, reporter)
    return [
        line.partition(": rank")[0].partition(": training")[0] for line in messages if not line.startswith("start: ")
    ]


def test_a_save_that_cannot_start_does_not_hide_the_one_before(tmp_path: Path) -> None:
    (messages,) = run_world(1, second_save_fails, config_in(tmp_path, train__steps=3, checkpoint__every=1))
    folder = tmp_path / "test/checkpoints"
    assert messages == [
        f"saved {folder}/step-00000001", "WARNING: no checkpoint of step 2", f"saved {folder}/step-00000003",
    ]  # fmt: skip


def save_without_folder(rank: Rank, config: Any) -> str:
    """Remove the folder of a save before its files are written. Returns the error."""
    run = build_run(rank, config)
    hold_for(run.checkpoints.saver.writer_pid, 1.0)
    run.checkpoints.start_save(run.progress)
    if rank.rank == 0:
        shutil.rmtree(Path(str(run.checkpoints.folder)) / "step-00000000")
    saved = run.checkpoints.wait_for_save()
    assert not complete_checkpoints(run.checkpoints.folder)
    return str(saved.error)


def test_no_rank_makes_a_folder_of_its_own(tmp_path: Path) -> None:
    """A rank that sees another file system must not take its files for saved."""
    folder = tmp_path / "test/checkpoints/step-00000000"
    for text in run_world(2, save_without_folder, config_in(tmp_path, parallel__tp=2)):
        assert text.startswith(f"rank 0: cannot write {folder}/rank-00000-000.safetensors: No such file or directory")


def start_two_saves(rank: Rank, config: Any) -> list[int]:
    """Start a save whose predecessor is on storage 0.3 s after training began to wait. Returns the steps on storage."""
    run = build_run(rank, config)
    writer = run.checkpoints.saver.writer_pid
    hold(writer)
    run.checkpoints.start_save(run.progress)
    step(run)
    threading.Timer(0.3, os.kill, (writer, signal.SIGCONT)).start()
    before = run.checkpoints.wait_for_save()
    assert before is not None and before.step == 0 and before.waited_s == 0
    run.checkpoints.start_save(run.progress)
    after = run.checkpoints.wait_for_save()
    assert after is not None and after.step == 1 and after.waited_s > 0.1
    run.buffers.finish_param_gather()
    return [stored.step for stored in complete_checkpoints(run.checkpoints.folder)]


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    assert run_world(1, start_two_saves, config_in(tmp_path)) == [[0, 1]]


def save_with_stopped_writer(rank: Rank, config: Any, errors: Path) -> str:
    """Save while rank 1's writer is stopped, until that rank has said so twice. Returns this rank's stderr."""
    from megascale.core import wait_notice

    wait_notice.FIRST_S = wait_notice.NEXT_S = 0.2
    run, path = build_run(rank, config), errors / str(rank.rank)
    writer = run.checkpoints.saver.writer_pid

    def continue_writer() -> None:
        while not path.exists() or path.read_text().count("its writer") < 2:
            time.sleep(0.01)
        os.kill(writer, signal.SIGCONT)

    if rank.rank == 1:
        hold(writer)
        threading.Thread(target=continue_writer).start()
    with open(path, "w") as file, contextlib.redirect_stderr(file):
        assert run.checkpoints.save(run.progress) is not None
    return path.read_text()


def test_a_rank_that_waits_for_its_writer_says_so(tmp_path: Path) -> None:
    _, notices = run_world(2, save_with_stopped_writer, config_in(tmp_path / "run", parallel__tp=2), tmp_path)
    first = next(line for line in notices.splitlines() if "its writer" in line)
    assert re.match(r"rank 1: has waited \d+ s for its writer, process \d+, ", first)
    assert re.search(rf"{tmp_path}/run/test/checkpoints/step-00000000 for \d+ s", first)


def save_with_slow_writer(rank: Rank, config: Any) -> list[bool]:
    """Save with a writer slower than the timeout of training. Returns True for every complete checkpoint."""
    run = build_run(rank, config)
    run.mesh.timeout.tighten()
    complete = []
    for _ in range(2):
        if rank.rank == 1:
            hold_for(run.checkpoints.saver.writer_pid, 1.2)
        saved = run.checkpoints.save(run.progress)
        complete.append(saved is not None and saved.error is None)
        step(run)
    run.buffers.finish_param_gather()
    return complete


def test_ranks_wait_longer_for_a_writer_than_in_training(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    comm = config.comm.model_copy(update={"timeout_s": 0.5})  # a file may not ask for less than a second
    config = config.model_copy(update={"comm": comm})
    assert run_world(2, save_with_slow_writer, config) == [[True, True]] * 2


def diverges(rank: Rank, config: Any) -> str:
    """Diverge in step 3, while the writer of step 2 is stopped."""
    from megascale.core.errors import DivergenceError
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    run = build_run(rank, config)
    draw = run.train_loader.batch

    def batch(seen: int) -> Any:
        if run.progress.step == 2:
            raise DivergenceError("the loss is nan")
        if run.progress.step == 1:
            hold_for(run.checkpoints.saver.writer_pid, 1.0)
        return draw(seen)

    run.train_loader.batch = batch
    try:
        train(run, Reporter(config, run.device, None, [], run.mesh.recorder))
    except DivergenceError as error:
        return str(error)
    return "it went on"


def test_a_run_that_diverges_completes_the_save_in_progress(tmp_path: Path) -> None:
    assert run_world(2, diverges, config_in(tmp_path, parallel__tp=2, checkpoint__every=2)) == ["the loss is nan"] * 2
    assert [stored.step for stored in complete_checkpoints(Location(str(tmp_path / "test/checkpoints")))] == [2]


def delete_slowly(rank: Rank, config: Any) -> list[list[str]]:
    """List the folders during a slow deletion, and after it."""
    import threading

    run, folders, gate, remove = build_run(rank, config), [], threading.Event(), Location.remove

    def late(place: Location) -> None:
        assert gate.wait(60)
        remove(place)

    Location.remove = late  # type: ignore[method-assign]
    for _ in range(2):
        step(run)
        run.checkpoints.save(run.progress)
        run.checkpoints.prune()
    step(run)
    folders.append(run.checkpoints.folder.list_names())
    gate.set()
    run.checkpoints.wait_for_prune()
    folders.append(run.checkpoints.folder.list_names())
    run.buffers.finish_param_gather()
    return folders


def test_training_does_not_wait_for_deletions(tmp_path: Path) -> None:
    found = run_world(1, delete_slowly, config_in(tmp_path, checkpoint__keep=1))
    assert found == [[["step-00000001", "step-00000002"], ["step-00000002"]]]


def cannot_remove(rank: Rank, config: Any) -> list[str]:
    """Warnings of a run without permission to delete."""
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    def refused(place: Location) -> None:
        raise PermissionError(13, "Permission denied", str(place))

    Location.remove = refused  # type: ignore[method-assign]
    run, messages = build_run(rank, config), []
    reporter = Reporter(config, run.device, None, [], run.mesh.recorder)
    reporter.write_message = messages.append  # type: ignore[method-assign]
    train(run, reporter)
    return [line for line in messages if "WARNING" in line]


def test_a_failed_deletion_is_a_warning(tmp_path: Path) -> None:
    (messages,) = run_world(
        1, cannot_remove, config_in(tmp_path, train__steps=3, checkpoint__every=1, checkpoint__keep=1)
    )
    place = tmp_path / "test/checkpoints/step-00000001"
    what = f"WARNING: {place} cannot be removed: Permission denied"
    hint = "check the permissions of the file and of its folder"
    assert messages == [f"{what}  -> {hint}", f"{what}, nor can 1 more  -> {hint}"]
    assert len(complete_checkpoints(Location(str(place.parent)))) == 3


def save_many_times(rank: Rank, config: Any, count: int) -> list[tuple[int, int, int]]:
    """Open files, resident bytes and child processes of this rank after every ten saves."""
    import resource

    run, usage = build_run(rank, config), []
    for number in range(count):
        step(run)
        run.checkpoints.wait_for_save()
        run.checkpoints.start_save(run.progress)
        if number % 10 == 9:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            usage.append((len(os.listdir("/proc/self/fd")), resident, len(children)))
            run.checkpoints.prune()
            run.checkpoints.wait_for_prune()
    run.checkpoints.wait_for_save()
    run.buffers.finish_param_gather()
    return usage


@pytest.mark.slow
def test_fifty_saves_leave_nothing_behind(tmp_path: Path) -> None:
    ((first, *later),) = run_world(1, save_many_times, config_in(tmp_path, checkpoint__keep=1), 50)
    for files, resident, processes in later:
        assert (files, processes) == (first[0], first[2])
        assert resident < first[1] + (4 << 20)
    assert len(complete_checkpoints(Location(str(tmp_path / "test/checkpoints")))) <= 12


def exit_without_cleanup(rank: Rank, config: Any) -> int:
    """Exit without cleanup. Returns the writer's process id."""
    run = build_run(rank, config)
    return int(run.checkpoints.saver.writer_pid)


def test_the_writer_ends_with_its_rank(tmp_path: Path) -> None:
    (writer,) = run_world(1, exit_without_cleanup, config_in(tmp_path))
    for _ in range(200):
        if not Path(f"/proc/{writer}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("the writer is still there")


def test_the_writer_imports_no_torch() -> None:
    import subprocess

    code = "import sys, megascale.checkpoint.save.writer; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
