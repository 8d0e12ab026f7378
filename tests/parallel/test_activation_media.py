"""Copies of tensors in host memory and in a file: exact, in pieces of exact sizes, and failures that say what to do."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megascale.device import PlainBuffers
from megascale.parallel.activation_media import FileMemory, HostMemory, MemoryPool, SavedTensorError
from megascale.parallel.activation_store import ActivationStore

TENSORS = [
    torch.arange(7, dtype=torch.int32),
    torch.randn(33, 5),
    torch.randn(1000).bfloat16(),
    torch.tensor([float("nan"), -0.0, float("inf")]),
    torch.zeros(0),
    torch.randint(0, 256, (300_001,), dtype=torch.uint8),
    torch.randn(4, 6).t(),
]


def test_tensors_come_back_from_a_file_byte_for_byte(tmp_path: Path) -> None:
    files = FileMemory(PlainBuffers(), str(tmp_path))
    for _ in range(2):  # the second time in the same extents
        copies = [files.save(x) for x in TENSORS]
        for copy in copies:
            copy.leave()
        loads = [copy.load() for copy in reversed(copies)]
        for x, load in zip(reversed(TENSORS), loads, strict=True):
            back, _ = load()
            assert back.dtype == x.dtype and back.shape == x.shape
            assert back.contiguous().view(-1).view(torch.uint8).equal(x.contiguous().view(-1).view(torch.uint8))
        for copy in copies:
            copy.free()
    total = sum(x.nbytes for x in TENSORS)
    assert files.written == 2 * total and files.extents.nbytes == total
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_a_tensor_that_returns_before_its_write_is_never_written(tmp_path: Path) -> None:
    """The last block's is still on the device."""
    files, busy = FileMemory(PlainBuffers(), str(tmp_path)), threading.Event()
    store, values = ActivationStore({"host": files}), [torch.randn(10), torch.randn(10)]
    takes = [store.store(values[0])]
    files.writer.submit(int).result()  # which runs after the write
    files.writer.submit(busy.wait, 60)
    takes.append(store.store(values[1]))
    assert takes[1]().equal(values[1]) and takes[0]().equal(values[0])
    busy.set()
    files.writer.shutdown()
    assert files.written == values[0].nbytes
    assert len(files.pool.free) == len(files.extents.free) == 2


def test_a_pending_write_is_cancelled(tmp_path: Path) -> None:
    files, busy = FileMemory(PlainBuffers(), str(tmp_path)), threading.Event()
    files.writer.submit(busy.wait, 60)
    copy = files.save(torch.randn(10))
    copy.free()
    busy.set()
    files.writer.shutdown()
    assert files.written == 0 and len(files.pool.free) == len(files.extents.free) == 1


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = FileMemory(PlainBuffers(), str(tmp_path))
    monkeypatch.setattr(os, "pwrite", full)
    copy = files.save(torch.randn(10))
    with pytest.raises(
        SavedTensorError, match=f"cannot write saved tensors in train.memory_dir = {tmp_path}: No space left"
    ):
        copy.leave()
    copy.free()


def test_a_lost_file_is_one_clear_error(tmp_path: Path) -> None:
    files = FileMemory(PlainBuffers(), str(tmp_path))
    copies = [files.save(torch.randn(10)) for _ in range(2)]
    for copy in copies:
        copy.leave()
    os.ftruncate(files._file, 60)
    copies[0].load()()
    with pytest.raises(SavedTensorError, match=r"cannot read saved tensors in .*: the file ends 20 bytes too early"):
        copies[1].load()()


def test_a_folder_that_is_gone_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SavedTensorError, match=r"cannot create a file of saved tensors in .*: No such file"):
        FileMemory(PlainBuffers(), str(tmp_path / "gone"))


def test_a_pool_has_the_bytes_that_are_used() -> None:
    """Powers of two, torch's sizes of pinned memory, would need 40% more for these."""
    sizes = [3000, 5000, 4097, 1025]
    memory = HostMemory(PlainBuffers())
    for _ in range(3):
        copies = [memory.save(torch.zeros(size, dtype=torch.uint8)) for size in sizes * 2]
        for copy in reversed(copies):
            copy.free()
    assert memory.pool.nbytes == 2 * sum(sizes)
    assert 2 * sum(1 << (size - 1).bit_length() for size in sizes) > 1.4 * memory.pool.nbytes


def test_a_pool_replaces_pieces_that_are_too_small() -> None:
    """Sizes that grow from step to step do not add up."""
    made: list[int] = []

    def allocate(nbytes: int) -> Tensor:
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    pool = MemoryPool(allocate)
    for size in range(10, 20):
        pieces = [pool.take(size) for _ in range(2)]
        for piece in pieces:
            pool.give(piece)
    assert pool.nbytes == 2 * 19 and len(made) == 20
    assert pool.take(5).nbytes == 19 and len(made) == 20
