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

SIZES = [28, 660, 2000, 0, 300_001, 3]


def random_bytes(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def test_tensors_come_back_from_a_file_byte_for_byte(tmp_path: Path) -> None:
    files, values = FileMemory(PlainBuffers(), str(tmp_path)), [*map(random_bytes, SIZES)]
    for _ in range(2):  # the second time in the same extents
        moved = [files.save(x) for x in values]
        for tensor in moved:
            tensor.leave()
            assert tensor.x is None
        for tensor in reversed(moved):
            tensor.fetch()
        assert all(tensor.take().equal(x) for tensor, x in zip(reversed(moved), reversed(values), strict=True))
        del moved, tensor
    assert files.written == 2 * sum(SIZES) and files.extents.nbytes == sum(SIZES)
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_a_tensor_that_returns_before_its_write_is_never_written(tmp_path: Path) -> None:
    """The last block's is still on the device."""
    files, busy = FileMemory(PlainBuffers(), str(tmp_path)), threading.Event()
    store, values = ActivationStore({"nvme": files}), [torch.randn(10), torch.randn(10)]
    first = x = torch.ones(10, requires_grad=True)
    for value in values:
        with store.moving("nvme", x, []):
            x = x * value  # saves the value
        if value is values[0]:
            files.writer.submit(int).result()  # which runs after the write
            files.writer.submit(busy.wait, 60)
    x.sum().backward()
    assert first.grad is not None and first.grad.equal(values[0] * values[1])
    busy.set()
    files.writer.shutdown()
    assert files.written == values[0].nbytes
    assert len(files.pool.free) == len(files.extents.free) == 2


def test_a_pending_write_is_cancelled(tmp_path: Path) -> None:
    files, busy = FileMemory(PlainBuffers(), str(tmp_path)), threading.Event()
    files.writer.submit(busy.wait, 60)
    files.save(random_bytes(10))  # and free it
    busy.set()
    files.writer.shutdown()
    assert files.written == 0 and len(files.pool.free) == len(files.extents.free) == 1


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = FileMemory(PlainBuffers(), str(tmp_path))
    monkeypatch.setattr(os, "pwritev", full)
    tensor = files.save(random_bytes(10))
    with pytest.raises(
        SavedTensorError, match=f"cannot write saved tensors in train.memory_dir = {tmp_path}: No space left"
    ):
        tensor.leave()


def test_a_lost_file_is_one_clear_error(tmp_path: Path) -> None:
    files = FileMemory(PlainBuffers(), str(tmp_path))
    moved = [files.save(random_bytes(40)) for _ in range(2)]
    for tensor in moved:
        tensor.leave()
    files._file.truncate(60)
    moved[0].take()
    with pytest.raises(SavedTensorError, match=r"cannot read saved tensors in .*: the file ends 20 bytes too early"):
        moved[1].take()


def test_a_folder_that_is_gone_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SavedTensorError, match=r"cannot create a file of saved tensors in .*: No such file"):
        FileMemory(PlainBuffers(), str(tmp_path / "gone"))


def test_a_pool_has_the_bytes_that_are_used() -> None:
    """Powers of two, torch's sizes of pinned memory, would need 40% more for these."""
    sizes = [3000, 5000, 4097, 1025]
    memory = HostMemory(PlainBuffers())
    for _ in range(3):
        moved = [memory.save(random_bytes(size)) for size in sizes * 2]
        while moved:
            moved.pop()
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
    assert len(pool.take(5)) == 19 and len(made) == 20
