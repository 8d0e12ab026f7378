"""Faults of a run that saves, through the command line: kill -9 at any moment, damaged files, a full disk."""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megascale.cli.main import main
from megascale.core.errors import Exit
from tests.checkpoint.faults import ENDS, KilledRun, complete, config_in, in_progress, poll, step_of, writers
from tests.jobs import Job, curve, finish

FILES = "rank-00000-000.safetensors", "rank-00001-000.safetensors"
EXECUTED = "executed"


def survives(folder: Path, kills: Iterable[tuple[str, bool]], seed: int, **layout: Any) -> KilledRun:
    """Kill parts of a run; losses, gradient norms and last checkpoint must equal an undisturbed run's, bit by bit."""
    with KilledRun(config_in(folder / "killed", checkpoint__keep=2, **layout), random.Random(seed)) as killed:
        for victim, slowly in kills:
            killed.kill_during_save(victim, slowly=slowly)
        steps = killed.stop()
    last = steps[-1]["step"]
    straight = finish(config_in(folder / "straight", checkpoint__keep=2, **layout), f"train.steps={last}")
    assert [record["step"] for record in straight] == list(range(1, last + 1))
    assert curve(steps) == curve(straight)
    places = [folder / name / f"runs/test/checkpoints/step-{last:08d}" for name in ("killed", "straight")]
    assert main(["ckpt", "diff", *map(str, places)]) == 0
    return killed


@pytest.mark.slow
def test_kill_9_while_saving_and_resume(tmp_path: Path) -> None:
    kills = [("writers", False), ("writer", True), ("rank", True)]
    killed = survives(tmp_path, kills, seed=0, parallel__tp=2)
    assert killed.resumed == 1 and killed.lost > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_9_at_fifty_moments_of_saving_and_resume_each_time(tmp_path: Path) -> None:
    """Fifty kills end the run; in between it survives some more."""
    counts = dict.fromkeys(ENDS, 10) | {"writer": 12, "writers": 6}  # five of them before they can have written all
    kills = [(victim, number % 4 == 0) for victim, count in counts.items() for number in range(count)]
    random.Random(1).shuffle(kills)
    killed = survives(tmp_path, kills, seed=1, parallel__dp=2)
    assert killed.resumed == 50 and killed.lost > 4


@pytest.mark.slow
def test_a_writer_killed_in_the_last_save_ends_the_run(tmp_path: Path) -> None:
    """The last save must succeed; the run can be started again."""
    config = config_in(tmp_path, parallel__tp=2, checkpoint__every=40)
    job = Job(config)
    folder = job.folder / "checkpoints"
    poll(job, lambda: bool(complete(folder)))
    writer = writers(job.ranks())[1]
    os.kill(writer, signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    poll(job, lambda: (folder / (in_progress(folder) or "none") / FILES[0]).exists())
    time.sleep(0.2)  # a writer killed before its order would be replaced
    os.kill(writer, signal.SIGKILL)
    status, out, err = job.end()
    assert status == Exit.CHECKPOINT and "Traceback" not in out + err, (status, out, err)
    assert "rank 1: the process that writes checkpoints has ended: signal 9" in err
    assert complete(folder) == ["step-00000040"] and not in_progress(folder)
    again = Job(config, f"train.steps={job.steps()[-1]['step']}")
    status, out, err = again.end()
    assert status == 0 and f"resumed from {folder}/step-00000040: step 40, " in out, (status, out, err)


def flip(path: Path, chance: random.Random, start: int = 0) -> None:
    """Flip a random bit of a file, from byte `start`."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(start, len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(folder: Path) -> str:
    path = folder / FILES[1]
    os.truncate(path, path.stat().st_size // 2)
    return path.name


def flip_data(folder: Path) -> str:
    path = folder / FILES[0]
    flip(path, random.Random(2), start=8 + int.from_bytes(path.read_bytes()[:8], "little"))
    return path.name


def remove_file(folder: Path) -> str:
    (folder / FILES[1]).unlink()
    return FILES[1]


def block_file(folder: Path) -> str:
    """Make a file unreadable: root may open any file, but nobody can read a folder."""
    (folder / FILES[0]).unlink()
    (folder / FILES[0]).mkdir()
    return FILES[0]


def swap_manifest(folder: Path) -> str:
    """Copy another checkpoint's manifest: intact in itself, with checksums of other tensors."""
    shutil.copy(folder.parent / complete(folder.parent)[0] / "manifest.json", folder)
    return "rank-0000[01]-000.safetensors"


def flip_manifest(folder: Path) -> str:
    flip(folder / "manifest.json", random.Random(3), start=100)
    return "manifest.json"


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self._marker,)


def pickle_file(folder: Path) -> str:
    """Write pickles as torch.save and torch's checkpoint writer do: loading executes them."""
    import torch

    trap = Trap(folder.parent / EXECUTED)
    torch.save(trap, folder / FILES[0])
    (folder / ".metadata").write_bytes(pickle.dumps(trap))
    return FILES[0]


DAMAGES = {
    f.__name__: f for f in (truncate, flip_data, remove_file, block_file, swap_manifest, flip_manifest, pickle_file)
}


def curve_in(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of the run in a folder."""
    records = map(json.loads, (folder / "runs/test/metrics.jsonl").read_text().splitlines())
    return curve([record for record in records if "loss" in record])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with a checkpoint for every kind of damage, and one more."""
    folder = tmp_path_factory.mktemp("saved")
    finish(config_in(folder, parallel__tp=2, train__steps=4 * (len(DAMAGES) + 1)))
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Configuration and checkpoints of a copy of the run, to be damaged."""
    shutil.copytree(saved / "runs", tmp_path / "runs")
    config = config_in(tmp_path, parallel__tp=2, train__steps=4 * (len(DAMAGES) + 1))
    return config, tmp_path / "runs/test/checkpoints"


def resumes_from(config: Path, name: str, told: Sequence[Path]) -> None:
    """Run to the end: a warning for every file of `told`, resumed from checkpoint `name`, with the same curve."""
    before = curve_in(config.parent)
    job = Job(config)
    status, out, err = job.end()
    assert (status, err) == (0, ""), (status, out, err)
    moved = "WARNING: the run saved last in "  # the folder is a copy
    warnings = [line for line in out.splitlines() if line.startswith("WARNING") and not line.startswith(moved)]
    assert len(warnings) == len(told), out
    for warning, path in zip(warnings, told, strict=True):
        assert re.match(rf"WARNING: (rank [01]: )?{path}\b", warning), (warning, path)
    place = job.folder / "checkpoints" / name
    assert f"\nresumed from {place}: step {step_of(name)}, " in out
    assert curve_in(config.parent) == before and not (job.folder / "checkpoints" / EXECUTED).exists()


@pytest.mark.slow
def test_the_newest_intact_checkpoint_is_used(copy: tuple[Path, Path]) -> None:
    config, folder = copy
    first, *others = complete(folder)
    told = [folder / name / damage(folder / name) for name, damage in zip(others, DAMAGES.values(), strict=True)]
    resumes_from(config, first, told[::-1])
    assert complete(folder)[-1] == f"{others[-1]}.1", "nothing is overwritten"
    assert main(["ckpt", "verify", str(folder / complete(folder)[-1])]) == 0


@pytest.mark.slow
def test_a_run_with_only_damaged_checkpoints_ends_with_one_message(copy: tuple[Path, Path]) -> None:
    config, folder = copy
    *others, older, newest = complete(folder)
    for name in others:
        shutil.rmtree(folder / name)
    remove_file(folder / older)
    told = folder / newest / pickle_file(folder / newest)
    before = sorted(folder.rglob("*")), curve_in(config.parent)
    status, out, err = Job(config).end()
    assert status == Exit.CHECKPOINT and "resumed" not in out and "Traceback" not in out + err
    assert set(re.findall(rf"{folder}[^ ]*(?=: it ends too early)", err)) == {str(told)}, err
    assert err.count("it ends too early") == 1, err
    assert f"no checkpoint is intact: rank 0: {told}: it ends" in err, err
    assert f"; rank 0: {folder / older / FILES[1]} cannot be read: No such file" in err, err
    assert (sorted(folder.rglob("*")), curve_in(config.parent)) == before, "nothing was changed"


@pytest.mark.slow
def test_keep_does_not_count_damaged_checkpoints(copy: tuple[Path, Path]) -> None:
    config, folder = copy
    *_, older, newer, newest = complete(folder)
    for name in (newer, newest):
        remove_file(folder / name)
    last = step_of(newest) - 2
    status, out, err = Job(config, f"train.steps={last}", "checkpoint.keep=1").end()
    assert status == 0 and f"resumed from {folder / older}: " in out, (status, out, err)
    assert f"step-{last:08d}" in complete(folder)


@pytest.mark.parametrize("file", [FILES[0], ".metadata"])
def test_loading_the_pickles_executes_them(file: str, tmp_path: Path) -> None:
    import torch

    (tmp_path / "step").mkdir()
    pickle_file(tmp_path / "step")
    load = pickle.loads if file == ".metadata" else lambda data: torch.load(io.BytesIO(data), weights_only=False)
    load((tmp_path / "step" / file).read_bytes())
    assert (tmp_path / EXECUTED).exists()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB in memory."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", folder], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here: that needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("full", ["rank-0000[01]-000.safetensors", "manifest.json"])
def test_a_disk_that_is_full_for_a_while(full: str, saved: Path, small: Path, tmp_path: Path) -> None:
    """Leave space for half of a checkpoint, or for all but its manifest."""
    made = saved / "runs/test/checkpoints/step-00000004"
    pages = [-(-(made / name).stat().st_size // mmap.PAGESIZE) for name in FILES]
    room = sum(pages) if full == "manifest.json" else pages[0] // 2
    (small / "test").mkdir()
    (small / "test/.lock").write_text("its page")
    ballast = small / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small).free - room * mmap.PAGESIZE))
    config = config_in(tmp_path, parallel__tp=2, checkpoint__dir=str(small), train__steps=24)
    job = Job(config)
    job.wait_for_step(9)  # the save of step 8 has waited for that of step 4
    folder = small / "test"
    assert not (folder / "step-00000004").exists()
    ballast.unlink()
    status, out, err = job.end()
    assert (status, err) == (0, ""), (status, out, err)
    what = rf"cannot write {folder}/step-00000004/{full}: No space left on device"
    assert re.search(rf"^WARNING: no checkpoint of step 4: (rank [01]: )?{what}", out, re.MULTILINE), out
    assert complete(folder)[-1] == "step-00000024" and len(complete(folder)) > 1
    assert {path.name for path in folder.iterdir()} == {".lock", *complete(folder)}
    assert curve_in(tmp_path) == curve_in(saved)[:24]


@pytest.mark.slow
def test_a_smaller_keep_frees_space_at_the_next_start(saved: Path, small: Path, tmp_path: Path) -> None:
    """There is no space for a checkpoint until old ones are deleted."""
    made = saved / "runs/test/checkpoints"
    for name in complete(made)[-2:]:
        shutil.copytree(made / name, small / "test" / name)
    (small / "test/.lock").write_text("its page")
    (small / "ballast").write_bytes(bytes(shutil.disk_usage(small).free))
    last = step_of(complete(small / "test")[-1])
    overrides = f"checkpoint.dir={small}", f"train.steps={last + 4}"
    config = config_in(tmp_path, parallel__tp=2)
    status, out, err = Job(config, *overrides).end()
    assert status == Exit.CHECKPOINT and "No space left on device" in err, (status, out, err)
    status, out, err = Job(config, *overrides, "checkpoint.keep=1").end()
    assert (status, err) == (0, ""), (status, out, err)
    assert complete(small / "test") == [f"step-{last + 4:08d}"]
