"""Saving while training goes on: what is written is what there was, and whatever happens to the process that writes."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint import whole
from megascale.checkpoint.storage import Location
from megascale.checkpoint.store import complete
from megascale.core.rank import Rank
from tests.checkpoint.test_checkpoints import config_in, state_of
from tests.runs import build_run
from tests.worlds import run_world


def hold(process: int, seconds: float) -> None:
    """Stop a process for a while."""
    os.kill(process, signal.SIGSTOP)
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(process, signal.SIGCONT)
        os._exit(0)


def step(run: Any) -> Any:
    from megascale.train.step import train_step

    return train_step(run, run.train.batch(run.progress.samples))


def save_while_training(rank: Rank, config: Any) -> tuple[dict[str, list[Any]], int]:
    """The state when a save began, while the writer is held for two steps; and the step in which it was told."""
    run = build_run(rank, config)
    step(run)
    if rank.rank == 0:
        os.kill(run.checkpoints.saving.writer, signal.SIGSTOP)
    state = state_of(run)
    run.checkpoints.begin(run.progress)
    told = 0
    while not told:
        result = step(run)
        if rank.rank == 0 and run.progress.step == 3:
            assert not complete(run.checkpoints.folder)
            os.kill(run.checkpoints.saving.writer, signal.SIGCONT)
        if saved := run.checkpoints.settle(result.written, result.failed):
            assert saved.error is None and saved.step == 1 and saved.path.name == "step-00000001"
            told = run.progress.step
    run.gradients.finish_gather()
    return state, told


@pytest.mark.parametrize("layout", [{"parallel__tp": 2}, {"parallel__dp": 2, "parallel__zero": 0}], ids=str)
def test_what_is_written_is_what_there_was(tmp_path: Path, layout: dict[str, Any]) -> None:
    import numpy as np
    import torch

    config = config_in(tmp_path, **layout)
    ranks = run_world(2, save_while_training, config)
    told = {told for _, told in ranks}
    assert len(told) == 1 and told.pop() > 3
    from megascale.checkpoint import manifest

    path = Location(str(config.folder / "checkpoints/step-00000001"))
    made = manifest.read(path)
    for name, tensor in made.tensors.items():
        found = whole.read_tensor(path, made, name)
        pieces = [piece for state, _ in ranks for piece in state.get(name, [])]
        covered = torch.zeros(tensor.shape, dtype=torch.bool)
        for offset, size, numbers in pieces:
            box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            assert found[box].contiguous().numpy().tobytes() == numbers, name
            covered[box] = True
        assert bool(np.all(covered.numpy()))


def writer_dies(rank: Rank, config: Any) -> tuple[str, list[str]]:
    """What is said when rank 1's writer is killed at work; and what is there after the next save."""
    run = build_run(rank, config)
    if rank.rank == 1:
        os.kill(run.checkpoints.saving.writer, signal.SIGSTOP)
    run.checkpoints.begin(run.progress)
    if rank.rank == 1:
        os.kill(run.checkpoints.saving.writer, signal.SIGKILL)
    saved = None
    while saved is None:
        result = step(run)
        saved = run.checkpoints.settle(result.written, result.failed)
    assert run.checkpoints.save(run.progress) is not None
    run.gradients.finish_gather()
    return str(saved.error), run.checkpoints.folder.names()


def test_a_writer_that_is_killed_ends_nothing(tmp_path: Path) -> None:
    for text, folders in run_world(2, writer_dies, config_in(tmp_path, parallel__tp=2)):
        assert text == "rank 1: the process that writes checkpoints has ended: signal 9"
        assert len(folders) == 1 and folders[0] != "step-00000000", "the failed attempt is gone"


def cannot_start(rank: Rank, config: Any) -> tuple[str, str]:
    """What becomes of a save when rank 1 can start no process, and of the next."""
    run, python = build_run(rank, config), sys.executable
    if rank.rank == 1:
        os.kill(run.checkpoints.saving.writer, signal.SIGKILL)
        sys.executable = "/nowhere/python"
        time.sleep(0.2)
    run.checkpoints.begin(run.progress)
    failed = run.checkpoints.finish()
    sys.executable = python
    saved = run.checkpoints.save(run.progress)
    return str(failed and failed.error), str(saved and saved.error)


def test_a_writer_that_cannot_be_started_ends_nothing(tmp_path: Path) -> None:
    for failed, saved in run_world(2, cannot_start, config_in(tmp_path, parallel__tp=2)):
        assert failed.startswith("rank 1: the process that writes checkpoints cannot be started: No such file")
        assert saved == "None"


NOISY = """
import sys
from megascale.checkpoint import writer
write = writer.write_files
def loud(**words):
    print("a line that is no answer", flush=True)
    return write(**words)
writer.write_files = loud
writer.main(int(sys.argv[-1]))
"""


def test_what_a_library_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megascale.checkpoint.background import Background

    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{NOISY}' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    memory = os.memfd_create("numbers")
    os.write(memory, b"0" * 64)
    background = Background([memory])
    files = {"a.safetensors": [["a@0", "F32", [16], 0, 64]]}
    words = {"memory": f"/proc/self/fd/{memory}", "folder": str(tmp_path), "patience": 0.0, "chunk": 1024}
    background.order(write=words | {"files": files})
    found = background.answer(math.inf)
    os.kill(background.pid, signal.SIGKILL)
    assert found is not None and found["files"].keys() == files.keys()


def begins_badly(rank: Rank, config: Any) -> list[str]:
    """What a run says whose second save cannot begin, when the first is complete by then."""
    from megascale.checkpoint import store
    from megascale.train.loop import train
    from megascale.train.report import Reporter

    def fresh(folder: Location, step: int) -> Location:
        if step == 2:
            raise PermissionError(13, "Permission denied")
        return plain(folder, step)

    plain, store.fresh_folder = store.fresh_folder, fresh
    run, said = build_run(rank, config), []
    reporter = Reporter(config, run.device, None, [], run.mesh.recorder)
    reporter.note = said.append  # type: ignore[method-assign]
    hold(run.checkpoints.saving.writer, 0.5)
    train(run, reporter)
    return [line.partition(": rank")[0].partition(": training")[0] for line in said]


def test_a_save_that_cannot_begin_does_not_hide_the_one_before(tmp_path: Path) -> None:
    (said,) = run_world(1, begins_badly, config_in(tmp_path, train__steps=3, checkpoint__every=1))
    folder = tmp_path / "test/checkpoints"
    assert said == [
        f"saved {folder}/step-00000001", "WARNING: no checkpoint of step 2", f"saved {folder}/step-00000003",
    ]  # fmt: skip


def vanishes(rank: Rank, config: Any) -> str:
    """What becomes of a save whose folder is gone before its files are written."""
    run = build_run(rank, config)
    hold(run.checkpoints.saving.writer, 1.0)
    run.checkpoints.begin(run.progress)
    if rank.rank == 0:
        shutil.rmtree(Path(str(run.checkpoints.folder)) / "step-00000000")
    saved = run.checkpoints.finish()
    assert not complete(run.checkpoints.folder)
    return str(saved.error)


def test_no_rank_makes_a_folder_of_its_own(tmp_path: Path) -> None:
    """One that sees another file system must not take its part for saved."""
    folder = tmp_path / "test/checkpoints/step-00000000"
    for said in run_world(2, vanishes, config_in(tmp_path, parallel__tp=2)):
        assert said.startswith(f"rank 0: cannot write {folder}/rank-00000-000.safetensors: No such file or directory")


def waited_for(rank: Rank, config: Any) -> list[int]:
    """Begin a save while the one before is held up for half a second; the steps that are then there."""
    run = build_run(rank, config)
    hold(run.checkpoints.saving.writer, 0.5)
    run.checkpoints.begin(run.progress)
    step(run)
    before = run.checkpoints.finish()
    assert before is not None and before.step == 0 and before.waited == 0
    run.checkpoints.begin(run.progress)
    after = run.checkpoints.finish()
    assert after is not None and after.step == 1 and after.waited > 0.1
    run.gradients.finish_gather()
    return [stored.step for stored in complete(run.checkpoints.folder)]


def test_one_save_waits_for_the_one_before(tmp_path: Path) -> None:
    assert run_world(1, waited_for, config_in(tmp_path)) == [[0, 1]]


def hangs(rank: Rank, config: Any, errors: Path) -> str:
    """What rank 1 says while its writer does not go on."""
    from megascale.checkpoint import saving

    saving.SILENCE_S = 0.2
    run = build_run(rank, config)
    if rank.rank == 1:
        hold(run.checkpoints.saving.writer, 0.7)
    with open(errors / str(rank.rank), "w") as file, contextlib.redirect_stderr(file):
        assert run.checkpoints.save(run.progress) is not None
    return (errors / str(rank.rank)).read_text()


def test_who_waits_for_a_writer_says_so(tmp_path: Path) -> None:
    quiet, told = run_world(2, hangs, config_in(tmp_path / "run", parallel__tp=2), tmp_path)
    first, *_ = told.splitlines()
    assert quiet == "" and len(told.splitlines()) >= 2
    assert first.startswith("WARNING: rank 1 waits for its writer, process ")
    assert f"{tmp_path}/run/test/checkpoints/step-00000000 for 0 s" in first


def outlasts(rank: Rank, config: Any) -> list[bool]:
    """Whether checkpoints are complete for which a writer takes longer than ranks wait for each other in training."""
    run = build_run(rank, config)
    run.mesh.timeout.tighten()
    found = []
    for _ in range(2):
        if rank.rank == 1:
            hold(run.checkpoints.saving.writer, 1.2)
        saved = run.checkpoints.save(run.progress)
        found.append(saved is not None and saved.error is None)
        step(run)
    run.gradients.finish_gather()
    return found


def test_ranks_wait_longer_for_a_writer_than_in_training(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    launch = config.launch.model_copy(update={"timeout_s": 0.5})  # a file may not ask for less than a second
    config = config.model_copy(update={"launch": launch})
    assert run_world(2, outlasts, config) == [[True, True]] * 2


def diverges(rank: Rank, config: Any) -> str:
    """Training that diverges in step 3, while the checkpoint of step 2 is held up."""
    from megascale.core.errors import DivergenceError
    from megascale.train.loop import train
    from megascale.train.report import Reporter

    run = build_run(rank, config)
    draw = run.train.batch

    def batch(seen: int) -> Any:
        if run.progress.step == 2:
            raise DivergenceError("the loss is nan")
        if run.progress.step == 1:
            hold(run.checkpoints.saving.writer, 1.0)
        return draw(seen)

    run.train.batch = batch
    try:
        train(run, Reporter(config, run.device, None, [], run.mesh.recorder))
    except DivergenceError as error:
        return str(error)
    return "it went on"


def test_a_checkpoint_under_way_is_completed_before_a_run_that_diverges_ends(tmp_path: Path) -> None:
    assert run_world(2, diverges, config_in(tmp_path, parallel__tp=2, checkpoint__every=2)) == ["the loss is nan"] * 2
    assert [stored.step for stored in complete(Location(str(tmp_path / "test/checkpoints")))] == [2]


def removes_late(rank: Rank, config: Any) -> list[list[str]]:
    """The folders while an old one is being deleted, by storage that takes its time, and when it is gone."""
    import threading

    run, found, gate, remove = build_run(rank, config), [], threading.Event(), Location.remove

    def late(place: Location) -> None:
        assert gate.wait(60)
        remove(place)

    Location.remove = late  # type: ignore[method-assign]
    for _ in range(2):
        step(run)
        run.checkpoints.save(run.progress)
        run.checkpoints.remove_old()
    step(run)
    found.append(run.checkpoints.folder.names())
    gate.set()
    run.checkpoints.removed()
    found.append(run.checkpoints.folder.names())
    run.gradients.finish_gather()
    return found


def test_training_does_not_wait_for_what_is_deleted(tmp_path: Path) -> None:
    found = run_world(1, removes_late, config_in(tmp_path, checkpoint__keep=1))
    assert found == [[["step-00000001", "step-00000002"], ["step-00000002"]]]


def cannot_remove(rank: Rank, config: Any) -> list[str]:
    """What a run says that may not delete."""
    from megascale.train.loop import train
    from megascale.train.report import Reporter

    def refused(place: Location) -> None:
        raise PermissionError(13, "Permission denied", str(place))

    Location.remove = refused  # type: ignore[method-assign]
    run, said = build_run(rank, config), []
    reporter = Reporter(config, run.device, None, [], run.mesh.recorder)
    reporter.note = said.append  # type: ignore[method-assign]
    train(run, reporter)
    return [line for line in said if "WARNING" in line]


def test_what_cannot_be_deleted_is_said(tmp_path: Path) -> None:
    (said,) = run_world(1, cannot_remove, config_in(tmp_path, train__steps=3, checkpoint__every=1, checkpoint__keep=1))
    place = tmp_path / "test/checkpoints/step-00000001"
    what = f"WARNING: {place} cannot be removed: Permission denied"
    assert said == [f"{what}  -> check permissions", f"{what}, nor can 1 more  -> check permissions"]
    assert len(complete(Location(str(place.parent)))) == 3


def many(rank: Rank, config: Any, count: int) -> list[tuple[int, int, int]]:
    """Open files, bytes in memory and processes of this rank after every ten saves."""
    import resource

    run, found = build_run(rank, config), []
    for number in range(count):
        step(run)
        run.checkpoints.finish()
        run.checkpoints.begin(run.progress)
        if number % 10 == 9:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            found.append((len(os.listdir("/proc/self/fd")), held, len(children)))
            run.checkpoints.remove_old()
            run.checkpoints.removed()
    run.checkpoints.finish()
    run.gradients.finish_gather()
    return found


def test_fifty_saves_leave_nothing_behind(tmp_path: Path) -> None:
    ((first, *others),) = run_world(1, many, config_in(tmp_path, checkpoint__keep=1), 50)
    for files, held, processes in others:
        assert (files, processes) == (first[0], first[2])
        assert held < first[1] + (4 << 20)
    assert len(complete(Location(str(tmp_path / "test/checkpoints")))) <= 12


def ended(rank: Rank, config: Any) -> int:
    """Leave without a word; the writer's number."""
    run = build_run(rank, config)
    return int(run.checkpoints.saving.writer)


def test_the_writer_ends_with_its_rank(tmp_path: Path) -> None:
    (writer,) = run_world(1, ended, config_in(tmp_path))
    for _ in range(200):
        if not Path(f"/proc/{writer}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("it is still there")


def test_the_writer_needs_no_torch() -> None:
    import subprocess

    code = "import sys, megascale.checkpoint.writer; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
