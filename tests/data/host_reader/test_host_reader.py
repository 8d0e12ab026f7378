"""The reader of a host: the same samples as ranks read themselves, once a host, whatever happens to the reader."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.cli.check_summary import memory_facts, summary
from megascale.config.run import RunConfig
from megascale.core.errors import DataError, LostPeerError
from megascale.core.files import lock_to_build
from megascale.core.rank import NODE_VARIABLE, Rank
from megascale.core.units import format_bytes
from megascale.data.host_reader import reader_supervisor
from megascale.data.host_reader.host_samples import HostSamples
from megascale.data.host_reader.reader_memory import OPENER, PROCESS_BYTES, MemoryShape, ReaderMemory
from megascale.data.host_reader.reader_process import ReaderWork, SplitReader
from megascale.data.host_reader.reader_supervisor import MOST_ENDS, ReaderSupervisor
from megascale.data.host_reader.sample_record import decode_sample, encode_sample, record_bytes
from megascale.data.mix.batch_shape import BatchShape, StepOrder
from megascale.data.mix.mixture import Mixture
from megascale.data.mix.samples import DocumentStarts, Sample
from megascale.data.read.index_files import MEMORY_ENTRIES
from megascale.train.run_splits import mixture_spec
from tests.data.datasets import ORIGIN, SEQUENCE, VOCABULARY, data_config, mixture_of, write_dataset, write_documents
from tests.runs import build_run
from tests.worlds import run_world

BATCH, STEPS = 8, 20
SECONDS = 30


def blend(folder: Path, **overrides: Any) -> RunConfig:
    """A configuration with a blend of two datasets, of which the second repeats."""
    write_dataset(folder / "a", [7, 30, 3, 60] * 30)
    write_dataset(folder / "b", [9, 4, 31] * 3, first=20_000)
    return data_config(folder, [(0.7, folder / "a"), (0.3, folder / "b")], train__steps=STEPS, **overrides)


class Readers:
    """A reader's memory and its views in this process, as `ranks` ranks of dp coordinates `replicas` have them."""

    def __init__(
        self, config: RunConfig, dp: int, replicas: list[int], end: int = BATCH * STEPS, weights: int = 0
    ) -> None:
        order = StepOrder(BatchShape(BATCH, 1, dp), end)
        rows = order.shape.rows_of(replicas)
        shape = MemoryShape(1, len(replicas), config.data.prefetch, len(rows), record_bytes(SEQUENCE), weights)
        self.memory = ReaderMemory.allocate(shape)
        self.config = config
        self.work = ReaderWork({"train": mixture_spec(config, "train")}, shape, {"train": order}, sorted(set(replicas)))
        me = 0, os.getpid()
        self.views = [HostSamples(self.memory, 0, order, rows, number, me) for number in range(len(replicas))]
        self.rows = rows

    def read(self, view: int, consumed: int) -> list[list[int]]:
        """The tokens of the host's samples of a step."""
        with self.views[view].step(consumed):
            return [self.views[view][consumed + row].tokens.tolist() for row in self.rows]


def expected(config: RunConfig, rows: list[int], consumed: int) -> list[list[int]]:
    samples = mixture_of(config)
    return [samples[consumed + row].tokens.tolist() for row in rows]


def arrays_of(sample: Sample) -> list[np.ndarray | None]:
    return [sample.ids, sample.mask, None if sample.documents is None else sample.documents.starts]


@pytest.mark.parametrize("mask", [None, np.array([1, 0, 1]), np.array([1, 0, 1], np.float32)])
def test_a_record_is_its_sample(mask: np.ndarray | None) -> None:
    documents = None if mask is None else DocumentStarts(np.array([0, 2, 3]), 4, 3)
    sample = Sample(np.array([1, 2, 2**31 - 1, 4]), mask, documents)
    record = encode_sample(sample)
    assert len(record) <= record_bytes(3)
    found = decode_sample(record.ljust(record_bytes(3), b"\7"))
    for before, after in zip(arrays_of(sample), arrays_of(found), strict=True):
        assert (before is None and after is None) or (np.array_equal(before, after) and before.dtype == after.dtype)
    assert documents is None or (found.documents is not None and found.documents[1:] == documents[1:])


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2147483648"):
        encode_sample(Sample(np.array([2**31, 0])))


def test_work_is_itself_after_its_way_to_the_process(tmp_path: Path) -> None:
    work = Readers(blend(tmp_path, data__skip_samples=[[4, 6]], batch__rampup=[4, 4, 12]), 2, [0, 1]).work
    assert ReaderWork.from_json(work.to_json()) == work


def test_the_reader_is_ahead_by_prefetch_and_no_more(tmp_path: Path) -> None:
    readers = Readers(blend(tmp_path, data__prefetch=3), 1, [0, 0])
    reader, ring = SplitReader(readers.work, "train", readers.memory), readers.memory.ring(0)
    assert not reader.fill_next()
    for view in readers.views:
        view.begin(16)
    assert [reader.fill_next() for _ in range(5)] == [True, True, True, False, False]
    assert readers.read(0, 16) == expected(readers.config, readers.rows, 16)
    assert not reader.fill_next(), "the other rank has not read the step"
    readers.read(1, 16)
    assert reader.fill_next() and not reader.fill_next()
    assert ring.filled == (1, 4)


def test_the_reader_stops_after_the_last_step(tmp_path: Path) -> None:
    readers = Readers(blend(tmp_path), 1, [0], end=24)
    readers.views[0].begin(8)
    reader = SplitReader(readers.work, "train", readers.memory)
    assert [reader.fill_next() for _ in range(4)] == [True, True, False, False]


def test_the_reader_works_ahead_beyond_the_samples_that_the_present_batches_would_make(tmp_path: Path) -> None:
    """A run that began with larger batches has consumed more; a reader that is started again knows its end, too."""
    readers = Readers(blend(tmp_path), 1, [0], end=24)
    readers.views[0].begin(40, end=64)
    reader = SplitReader(readers.work, "train", readers.memory)
    assert [reader.fill_next() for _ in range(3)] == [True, True, False]
    readers.read(0, 40)
    reader = SplitReader(readers.work, "train", readers.memory)
    assert [reader.fill_next() for _ in range(2)] == [True, False]
    assert readers.read(0, 48) == expected(readers.config, readers.rows, 48)
    assert readers.read(0, 56) == expected(readers.config, readers.rows, 56)
    assert not reader.fill_next() and readers.memory.ring(0).filled == (1, 3), "three steps, in one generation"


def test_ranks_may_begin_anywhere_and_again(tmp_path: Path) -> None:
    readers = Readers(blend(tmp_path), 1, [0, 0])
    reader = SplitReader(readers.work, "train", readers.memory)
    for consumed in (8, 8, 40):
        for view in readers.views:
            view.begin(consumed)
        while reader.fill_next():
            pass
        for view in range(2):
            assert readers.read(view, consumed) == expected(readers.config, readers.rows, consumed)
    readers.views[0].begin(0)
    assert reader.fill_next(), "the other rank still reads"
    assert readers.memory.ring(0).filled == (3, 3)


def test_another_reader_goes_on_where_one_was_killed(tmp_path: Path) -> None:
    config = blend(tmp_path)
    readers = Readers(config, 1, [0])
    readers.views[0].begin(0)
    for step in range(STEPS):
        reader = SplitReader(readers.work, "train", readers.memory)  # as a new process has it
        reader.fill_next()
        assert readers.read(0, BATCH * step) == expected(config, readers.rows, BATCH * step)


def test_an_error_of_a_sample_is_raised_by_the_step_that_reads_it(tmp_path: Path) -> None:
    config = blend(tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 100})})
    readers = Readers(config, 1, [0])
    readers.views[0].begin(0)
    SplitReader(readers.work, "train", readers.memory).fill_next()
    with pytest.raises(DataError, match=r"model.vocab_size is 100  -> data that this model's own tokenizer"):
        readers.read(0, 0)


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), OSError(5, "lost"), AssertionError()])
def test_any_error_is_raised_by_the_step_and_no_reader_is_started_again(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Mixture, index: int) -> Sample:
        raise error

    readers = Readers(blend(tmp_path), 1, [0])
    reader = SplitReader(readers.work, "train", readers.memory)
    readers.views[0].begin(0)
    monkeypatch.setattr(Mixture, "__getitem__", fail)
    assert reader.fill_next(), "the process goes on"
    with pytest.raises(DataError, match=rf"the reader of this host has failed: {type(error).__name__}: "):
        readers.read(0, 0)
    assert capfd.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize("text", ["x" * 9000, "\u00e9" * 9000, "\n\0" * 9000, "short"])
def test_a_long_error_is_cut_and_stays_readable(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Mixture, index: int) -> Sample:
        raise DataError(f"sample {index} fails: {text}", hint=text)

    readers = Readers(blend(tmp_path), 1, [0])
    readers.views[0].begin(0)
    monkeypatch.setattr(Mixture, "__getitem__", fail)
    SplitReader(readers.work, "train", readers.memory).fill_next()
    with pytest.raises(DataError, match="sample 0 fails: ") as error:
        readers.read(0, 0)
    assert error.value.message.rstrip(".") in f"sample 0 fails: {text}" and error.value.hint in text


def test_check_tells_the_memory_of_the_reader(process: Any) -> None:
    """At least what it takes: its own memory, without files, and what it shares with the ranks."""
    readers, supervisor = process
    readers.read(0, 0)
    config = readers.config
    config = config.model_copy(update={"data": config.data.model_copy(update={"reader": "host"})})
    status = Path(f"/proc/{supervisor.pid}/status").read_text()
    own = int(status.split("RssAnon:")[1].split()[0]) << 10
    size = memory_facts(config)["reader_bytes"]
    assert readers.work.memory.bytes + own <= size <= readers.work.memory.bytes + PROCESS_BYTES + (1 << 20)
    assert f"memory of a host's reader {format_bytes(size)}" in summary(config)
    assert memory_facts(readers.config)["reader_bytes"] == 0 and "host's reader" not in summary(readers.config)


def test_only_the_samples_of_a_host_are_read(tmp_path: Path) -> None:
    config = blend(tmp_path)
    readers = Readers(config, 4, [1, 1, 3])
    for view in readers.views:
        view.begin(0)
    SplitReader(readers.work, "train", readers.memory).fill_next()
    assert readers.rows == [1, 3, 5, 7]
    assert [readers.read(view, 0) for view in range(3)] == 3 * [expected(config, readers.rows, 0)]


@pytest.fixture
def process(tmp_path: Path) -> Any:
    readers = Readers(blend(tmp_path), 1, [0])
    supervisor = ReaderSupervisor(readers.work, readers.memory)
    supervisor.start()
    readers.views[0].begin(0)
    yield readers, supervisor
    supervisor.close()


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_a_killed_and_a_stopped_reader_are_replaced(process: Any, capfd: pytest.CaptureFixture[str]) -> None:
    readers, supervisor = process
    pids = set()
    for step in range(STEPS):
        assert readers.read(0, BATCH * step) == expected(readers.config, readers.rows, BATCH * step)
        if step in (3, 9):
            assert "libtorch" not in maps_of(supervisor.pid) and "_multiarray" in maps_of(supervisor.pid)
            pids.add(supervisor.pid)
            os.kill(supervisor.pid, signal.SIGKILL if step == 3 else signal.SIGSTOP)
    assert supervisor.pid not in pids
    assert capfd.readouterr().err.count("another one goes on where it was") == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Broken:
    """A standard error whose pipe is closed."""

    def write(self, text: str) -> None:
        raise BrokenPipeError

    flush = write


def test_a_killed_reader_is_replaced_when_nothing_can_be_printed(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    readers, supervisor = process
    monkeypatch.setattr("sys.stderr", Broken())
    os.kill(supervisor.pid, signal.SIGKILL)
    for step in range(STEPS):
        assert readers.read(0, BATCH * step) == expected(readers.config, readers.rows, BATCH * step)


def test_ranks_are_told_when_the_supervisor_fails(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    readers, supervisor = process
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    monkeypatch.setattr(supervisor, "_fault", lambda: 1 / 0)
    os.kill(supervisor.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="the supervisor of the host's reader has failed: ZeroDivisionError"):
        for step in range(STEPS):
            readers.read(0, BATCH * step)


def test_a_reader_that_ends_again_and_again_is_given_up(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    readers, supervisor = process
    readers.read(0, 0)
    readers.read(0, BATCH)
    deadline = time.monotonic() + SECONDS
    monkeypatch.setattr("sys.executable", "/bin/false")
    os.kill(supervisor.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=f"ended with status 1, {MOST_ENDS} times at the same step") as error:
        for step in range(2, STEPS):
            readers.read(0, BATCH * step)
    assert 'data.reader = "rank"' in str(error.value) and time.monotonic() < deadline


def hanging(folder: Path) -> tuple[Readers, ReaderSupervisor, Path]:
    """A reader that hangs in the first read of the dataset `a`: as on a dead file server, opening its file blocks."""
    config = blend(folder, data__reader="host", data__reader_timeout_s=1.0)
    readers, index = Readers(config, 1, [0]), folder / "a.idx"
    index.rename(folder / "kept")
    os.mkfifo(index)
    supervisor = ReaderSupervisor(readers.work, readers.memory)
    readers.views[0].begin(0)
    return readers, supervisor, index


def test_a_reader_that_hangs_is_replaced_at_the_same_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    readers, supervisor, index = hanging(tmp_path)
    first = supervisor.pid
    while not readers.memory.ring(0).reading:
        time.sleep(0.02)
    index.unlink()
    (tmp_path / "kept").rename(index)  # the server answers, but the reader waits for ever
    supervisor.start()
    try:
        for step in range(3):
            assert readers.read(0, BATCH * step) == expected(readers.config, readers.rows, BATCH * step)
    finally:
        supervisor.close()
    assert supervisor.pid != first and not Path(f"/proc/{first}").exists()
    what = (
        f"WARNING: the host's reader hangs as it reads sample 0, of {tmp_path / 'a'}: another one goes on where it was"
    )
    assert what in capfd.readouterr().err


def test_a_reader_that_hangs_again_is_named(tmp_path: Path) -> None:
    readers, supervisor, _ = hanging(tmp_path)
    supervisor.start()
    try:
        with pytest.raises(
            DataError, match=f"hangs as it reads sample 0, of {tmp_path / 'a'}, 2 times at the same step"
        ):
            readers.read(0, 0)
    finally:
        supervisor.close()


def test_a_reader_that_waits_for_an_index_does_not_hang(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another process builds it for longer than a sample may take to read; then this reader builds it."""
    write_documents(tmp_path / "a", [np.array([1, 2, 3])] * MEMORY_ENTRIES, ORIGIN, VOCABULARY)
    config = data_config(tmp_path, tmp_path / "a", train__steps=STEPS, data__reader="host", data__reader_timeout_s=1.0)
    dataset = mixture_of(config).datasets[0]
    readers, path = Readers(config, 1, [0]), dataset.index_folder / dataset.index_key(0).file_name
    lock = lock_to_build(path)
    assert lock is not None
    supervisor = ReaderSupervisor(readers.work, readers.memory)
    supervisor.start()
    try:
        readers.views[0].begin(0)
        while not readers.memory.ring(0).reading:
            time.sleep(0.02)
        first = supervisor.pid
        time.sleep(3.0)
        lock.close()
        assert readers.read(0, 0) == expected(config, readers.rows, 0)
        deadline = time.monotonic() + 60
        while readers.memory.ring(0).get(OPENER):  # the reader may open what it reads ahead
            assert time.monotonic() < deadline, "a reader that has opened its datasets says so"
            time.sleep(0.02)
        assert supervisor.pid == first
    finally:
        supervisor.close()
    assert "WARNING" not in capfd.readouterr().err


WORK = {"computes": "while True: pass", "polls": "while True: time.sleep(0.05)", "is blocked": "time.sleep(60)"}


@pytest.mark.parametrize(
    ("work", "opens", "longest_s", "hangs"),
    [("computes", True, 60, False), ("polls", True, 60, False), ("is blocked", True, 60, True),
     ("computes", True, 0, True), ("computes", False, 60, True)],
)  # fmt: skip
def test_only_a_reader_that_works_as_it_opens_datasets_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, opens: bool, longest_s: float, hangs: bool
) -> None:
    """Also one that holds Python's lock as it works, so that no other thread of it can beat."""
    monkeypatch.setattr(reader_supervisor, "OPENING_S", longest_s)
    readers = Readers(blend(tmp_path), 1, [0])
    supervisor = ReaderSupervisor(readers.work, readers.memory)
    supervisor.close()
    with subprocess.Popen([sys.executable, "-Ssc", f"import time; print('', flush=True)\n{WORK[work]}"],
                          stdout=subprocess.PIPE) as process:  # fmt: skip
        try:
            assert process.stdout is not None and process.stdout.readline()
            supervisor._process = process
            supervisor._pulses = [replace(supervisor._pulses[0], since_s=time.monotonic(), limit_s=0.4)]
            monkeypatch.setattr(threading, "get_native_id", lambda: process.pid)
            with readers.memory.ring(0).opening() if opens else contextlib.nullcontext():
                found, end = None, time.monotonic() + 1.2
                while found is None and time.monotonic() < end:
                    found = supervisor._hanging_split()
                    time.sleep(0.05)
        finally:
            process.kill()
    assert (found == 0) == hangs


def test_ranks_do_not_wait_for_the_reader_of_a_rank_that_has_ended(tmp_path: Path) -> None:
    readers = Readers(blend(tmp_path), 1, [0])
    readers.views[0]._first = (3, 2**22 + 1)
    with pytest.raises(LostPeerError, match="keeps the reader of this host, has ended"):
        readers.read(0, 0)


def batches_of(rank: Rank, configs: list[RunConfig]) -> list[Any]:
    """For each configuration: the batches of two steps and two evaluations, and whether this rank has mapped tokens."""
    found, mesh = [], None
    for config in configs:
        run = build_run(rank, config, mesh)
        mesh = run.mesh
        batches = [run.train_loader.batch(consumed) for consumed in (16, 24)]
        for _ in range(2):
            batches += list(run.valid_loader.batches(run.valid_batches))
        tensors = [
            None if part is None else part.tolist()
            for batch in batches
            for micro_batch in batch.micro_batches
            for part in (micro_batch.tokens, micro_batch.labels, micro_batch.mask)
        ]
        mesh.world.control.barrier("all have read")
        found.append((tensors, [batch.loss_tokens for batch in batches], ".bin" in maps_of(os.getpid())))
        run.train_loader.close()
    return found


LAYOUTS = [
    {"tp": 2, "pp": 2},
    pytest.param({"dp": 4}, marks=pytest.mark.slow),
    pytest.param({"pp": 4}, marks=pytest.mark.slow),
    pytest.param({"tp": 2, "dp": 2, "zero": 2}, marks=pytest.mark.slow),
    pytest.param({"cp": 1, "dp": 2, "pp": 2, "vpp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_world_reads_the_same_batches_once_a_host(layout: dict[str, int], tmp_path: Path) -> None:
    overrides = {f"parallel__{name}": size for name, size in layout.items()}
    write_dataset(tmp_path / "a", [7, 30, 3, 60] * 30)
    config = data_config(
        tmp_path, tmp_path / "a", train__steps=STEPS, train__eval_every=5, train__eval_steps=2,
        data__split=[0.8, 0.2], data__reader="host", **overrides,
    )  # fmt: skip
    by_rank = config.model_copy(update={"data": config.data.model_copy(update={"reader": "rank"})})
    results = run_world(4, batches_of, [config, by_rank])
    for host, alone in results:
        assert host[:2] == alone[:2]
    (first, _, mapped), (_, _, maps_itself) = results[0]
    assert first[0] is not None and maps_itself and not mapped


def ramped_batches_of(rank: Rank, configs: list[RunConfig]) -> list[Any]:
    """For each configuration the tokens, masks and positions of five steps, with their number of samples."""
    found, mesh = [], None
    for config in configs:
        run = build_run(rank, config, mesh)
        mesh, consumed, steps = run.mesh, 0, []
        for _ in range(5):
            batch = run.train_loader.batch(consumed)
            consumed += len(batch.micro_batches)
            steps.append([
                [None if part is None else part.tolist()
                 for part in (micro_batch.tokens, micro_batch.mask, micro_batch.boundaries.positions)]
                for micro_batch in batch.micro_batches
            ])  # fmt: skip
        found.append((steps, consumed))
        run.train_loader.close()
    return found


def test_documents_and_a_ramp_up_reach_all_stages(tmp_path: Path) -> None:
    """Also those between the first and the last, which have positions and no tokens."""
    write_dataset(tmp_path / "a", [7, 30, 3, 60] * 30)
    config = data_config(
        tmp_path,
        tmp_path / "a",
        train__steps=STEPS,
        parallel__pp=4,
        batch__rampup=[4, 4, 12],
        data__attention_mask="document",
    )
    both = [
        config.model_copy(update={"data": config.data.model_copy(update={"packing": "best_fit", "reader": reader})})
        for reader in ("host", "rank")
    ]
    results = run_world(4, ramped_batches_of, both)
    for host, alone in results:
        assert host == alone and [len(step) for step in host[0]] == [4, 4, 4, 8, 8]
    (first, _, positions), (nothing, _, same) = results[0][0][0][0][0], results[1][0][0][0][0]
    assert first is not None and nothing is None and positions == same


def batch_on_a_host_of_two(rank: Rank, config: RunConfig) -> Any:
    """A step's tokens, with two ranks on each of two hosts, and the rows of a step that this host reads."""
    from torch.distributed.distributed_c10d import _get_default_store

    from megascale.comm.host_ranks import publish_rank, ranks_of_host

    os.environ[NODE_VARIABLE] = f"node-{rank.rank // 2}"
    publish_rank(_get_default_store().underlying_store, rank.rank)
    run = build_run(rank, config)  # its groups wait for all ranks
    batches = [run.train_loader.batch(BATCH * step) for step in range(3)]
    run.mesh.world.control.barrier("all have read")
    tokens = [part.tokens.tolist() for batch in batches for part in batch.micro_batches]
    return ranks_of_host(rank.rank), tokens, list(run.train_loader.samples._places)


@pytest.mark.slow
def test_each_of_two_hosts_reads_its_own_samples_only(tmp_path: Path) -> None:
    config = blend(tmp_path, data__reader="host", parallel__tp=2, parallel__dp=2, data__prefetch=1)
    results = run_world(4, batch_on_a_host_of_two, config)
    assert [ranks for ranks, _, _ in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert results[0][1] == results[1][1] != results[2][1] == results[3][1]
    assert [rows for _, _, rows in results] == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2
