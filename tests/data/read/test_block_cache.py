"""Blocks of remote files: fetched once by the processes of a host, bounded, and replaced when they are damaged."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from megascale.core.errors import DataError
from megascale.core.storage import Location
from megascale.data.read import block_cache
from megascale.data.read.block_cache import BlockCache, CachedFile
from megascale.data.read.checksum import CHECKSUM_BYTES

DATA = bytes(range(256)) * 50
URL = "memory://block-cache/set.bin"


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The ranges (start, bytes) that are fetched, of a file in blocks of 1000 bytes."""
    ranges: list[tuple[int, int]] = []
    read_into = Location.read_into

    def counted(self: Location, buffer: memoryview, start: int) -> int:
        ranges.append((start, len(buffer)))
        return read_into(self, buffer, start)

    monkeypatch.setattr(Location, "read_into", counted)
    monkeypatch.setattr(block_cache, "BLOCK_BYTES", 1000)
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/block-cache/set.bin", DATA)
    yield ranges
    fs.rm("/block-cache", recursive=True)


def opened(folder: Path, max_bytes: int = 1 << 20, version: str = "1") -> CachedFile:
    return BlockCache(folder, max_bytes, retry_s=0.0).open(URL, len(DATA), version)


def blocks(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.rglob("0*"))


def test_ranges_are_read_and_each_block_is_fetched_once(tmp_path: Path, fetched: list[tuple[int, int]]) -> None:
    file = opened(tmp_path)
    for start, stop in ((0, 5), (990, 1010), (500, 3500), (12_790, 12_800), (12_795, 99_999), (7, 7)):
        assert file.read(start, stop) == DATA[start:stop]
    assert sorted(fetched) == [(0, 1000), (1000, 1000), (2000, 1000), (3000, 1000), (12_000, 800)]
    assert opened(tmp_path).read(0, 4000) == DATA[:4000], "another process"
    assert len(fetched) == 5
    assert opened(tmp_path, version="2").read(0, 10) == DATA[:10], "another version of the file"
    assert len(fetched) == 6


def test_several_blocks_are_fetched_at_the_same_time(
    tmp_path: Path, fetched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, at_once, most = block_cache.fetch, [0], [0]

    def slow(location: Location, start: int, count: int) -> bytes:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        time.sleep(0.05)
        at_once[0] -= 1
        return fetch(location, start, count)

    monkeypatch.setattr(block_cache, "fetch", slow)
    file = opened(tmp_path)
    file.cache.fetch(file.missing([(0, 10), (2990, 3010), (5000, 7000)]))
    assert most[0] > 1 and blocks(tmp_path) == [0, 2, 3, 5, 6]
    assert file.read(5000, 7000) == DATA[5000:7000] and len(fetched) == 5


def test_threads_that_ask_for_the_same_block_fetch_it_once(tmp_path: Path, fetched: list[tuple[int, int]]) -> None:
    files = [opened(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda file: file.read(4100, 4200), files)) == {DATA[4100:4200]}
    assert fetched == [(4000, 1000)]


def test_hosts_without_locks_that_fetch_a_block_do_not_share_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the same id fetches the block between write and rename."""
    write, within = Path.write_bytes, [False]
    file, other = opened(tmp_path), opened(tmp_path)

    def written(self: Path, data: bytes) -> int:
        count = write(self, data)
        if not within[0]:
            within[0] = True
            other._fetch(3)
        return count

    monkeypatch.setattr(Path, "write_bytes", written)
    assert file.read(3000, 3100) == DATA[3000:3100] and within[0]
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_a_killed_process_has_left_of_a_block_goes_with_old_blocks(
    tmp_path: Path, fetched: list[tuple[int, int]]
) -> None:
    file = opened(tmp_path, max_bytes=4 * (1000 + CHECKSUM_BYTES))
    file.read(0, 10)
    old, new = (file.place / f".{7:012}.{name}.tmp" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"a part of a block")
    os.utime(old, (1000, 1000))
    file.read(1000, 9000)
    assert not old.exists() and new.exists()


def test_the_cache_is_bounded_and_loses_what_was_not_used_for_longest(
    tmp_path: Path, fetched: list[tuple[int, int]]
) -> None:
    file = opened(tmp_path, max_bytes=5 * (1000 + CHECKSUM_BYTES))
    for number in range(5):
        file.read(1000 * number, 1000 * number + 1)
        os.utime(tmp_path / f"remote/{file.place.name}/{number:012}", (1000 + number, 1000 + number))
    file.read(0, 1)  # used now
    file.read(6000, 6001)
    assert blocks(tmp_path) == [0, 3, 4, 6], "10% more than needed is removed"
    assert file.read(1000, 1010) == DATA[1000:1010], "a block that was removed is fetched again"
    assert int((tmp_path / "remote" / "used").read_text()) == 5 * (1000 + CHECKSUM_BYTES)
    for number in range(13):
        file.read(1000 * number, 1000 * number + 1)
        assert sum(path.stat().st_size for path in tmp_path.rglob("0*")) <= 5 * (1000 + CHECKSUM_BYTES)


@pytest.mark.parametrize("damage", [b"", DATA[:999], DATA[:1000], b"x" * 1001, bytes(1004), b"\1" + DATA[1:1004]])
def test_a_damaged_block_is_fetched_again(tmp_path: Path, fetched: list[tuple[int, int]], damage: bytes) -> None:
    opened(tmp_path).read(0, 1)
    file = opened(tmp_path)  # another process, which has read nothing
    (tmp_path / "remote" / file.place.name / f"{0:012}").write_bytes(damage)
    assert file.read(0, 1000) == DATA[:1000] and fetched == [(0, 1000)] * 2


def test_a_block_is_checked_when_a_process_reads_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    is_intact = block_cache.is_intact

    def counted(data: bytes) -> bool:
        checked.append(len(data))
        return is_intact(data)

    monkeypatch.setattr(block_cache, "is_intact", counted)
    file = opened(tmp_path)
    for start in (0, 10, 2010, 5):
        file.read(start, start + 5)
    assert checked == [1000 + CHECKSUM_BYTES] * 2


def test_a_folder_that_does_not_keep_what_is_written_is_an_error(
    tmp_path: Path, fetched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "is_intact", lambda data: False)
    with pytest.raises(DataError, match=r"which has copies of \S+set\.bin, cannot be used: copies there do not stay"):
        opened(tmp_path).read(0, 1)
    assert len(fetched) == block_cache.FETCHES_OF_DAMAGED


def test_a_whole_file_is_downloaded_once(
    tmp_path: Path, fetched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "DOWNLOAD_BYTES", 5000)
    for _ in range(2):
        path = BlockCache(tmp_path, 1).whole_file(URL, len(DATA), "1")
        assert path.read_bytes()[:-CHECKSUM_BYTES] == DATA
    assert fetched == [(0, 5000), (5000, 5000), (10_000, 2800)]


@pytest.mark.parametrize("damage", [b"", DATA[:2000], DATA, bytes(len(DATA) + 4), DATA + b"more", DATA * 2])
def test_a_damaged_whole_file_is_downloaded_again(
    tmp_path: Path, fetched: list[tuple[int, int]], damage: bytes
) -> None:
    cache = BlockCache(tmp_path, 1)
    cache.whole_file(URL, len(DATA), "1").write_bytes(damage)
    for _ in range(2):
        assert cache.whole_file(URL, len(DATA), "1").read_bytes()[:-CHECKSUM_BYTES] == DATA
    assert len(fetched) == 2


def test_a_whole_file_that_does_not_stay_is_an_error(
    tmp_path: Path, fetched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(path: Path, size: int) -> None:
        raise ValueError

    monkeypatch.setattr(block_cache, "check_file", damaged)
    with pytest.raises(DataError, match="copies there do not stay as they were written"):
        BlockCache(tmp_path, 1).whole_file(URL, len(DATA), "1")
    assert len(fetched) == block_cache.FETCHES_OF_DAMAGED


def test_what_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"set\.bin ends after 12800 bytes: it was replaced while it is read"):
        BlockCache(tmp_path, 1 << 20, 0.0).open(URL, len(DATA) + 10, "1").read(12_000, 13_000)
    with pytest.raises(DataError, match=r"none\.bin cannot be used: .*  -> check the storage and the network"):
        BlockCache(tmp_path, 1 << 20, 0.0).open("memory://block-cache/none.bin", 10, "1").read(0, 10)
    (tmp_path / "taken").touch()
    with pytest.raises(DataError, match=r"taken, which has copies of \S+, cannot be used: .*  -> data"):
        opened(tmp_path / "taken").read(0, 10)
