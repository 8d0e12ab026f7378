"""The token dataset format equals megatron-core's to the byte, is read back as written, and is refused when damaged."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.errors import DataError
from megascale.data.prepare import dataset_writer
from megascale.data.read import indexed_dataset
from tests.data.datasets import ORIGIN, write_documents

VOCABULARIES = st.sampled_from([300, 65_499, 65_500, 200_000])


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, list[np.ndarray]]:
    """A vocabulary size, and documents of its tokens that use the last token."""
    vocabulary = draw(VOCABULARIES)
    ids = st.lists(st.integers(0, vocabulary - 1), max_size=20)
    documents = draw(st.lists(ids, min_size=1, max_size=8))
    return vocabulary, [np.array([*document, vocabulary - 1], dtype=np.int64) for document in documents]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """The prefix of a dataset of three documents and 6 tokens."""
    path = tmp_path / "set"
    write_documents(path, [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])], ORIGIN, 300)
    return path


def file(prefix: Path, ending: str) -> Path:
    return Path(f"{prefix}{ending}")


@given(corpora())
def test_a_dataset_is_read_as_written(corpus: tuple[int, list[np.ndarray]]) -> None:
    vocabulary, documents = corpus
    with tempfile.TemporaryDirectory() as folder:
        made = write_documents(Path(folder) / "set", documents, ORIGIN, vocabulary)
        reader = indexed_dataset.open_dataset(Path(folder) / "set")
        assert [reader[i].tolist() for i in range(len(reader))] == [d.tolist() for d in documents]
    assert reader.info == made
    assert made == indexed_dataset.DatasetInfo(
        vocabulary, sum(map(len, documents)), len(documents), ORIGIN, max(int(d.max(initial=-1)) for d in documents)
    )


@given(corpora())
def test_files_equal_those_of_megatron_core(corpus: tuple[int, list[np.ndarray]]) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

    vocabulary, documents = corpus
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = f"{folder}/ours", f"{folder}/theirs"
        write_documents(Path(ours), documents, ORIGIN, vocabulary)
        builder = IndexedDatasetBuilder(theirs + ".bin", dtype=DType.optimal_dtype(vocabulary))
        for document in documents:
            builder.add_document(torch.from_numpy(document), [len(document)])
        builder.finalize(theirs + ".idx")
        for ending in (".bin", ".idx"):
            assert Path(ours + ending).read_bytes() == Path(theirs + ending).read_bytes()
        dataset, reader = IndexedDataset(ours), indexed_dataset.open_dataset(Path(theirs))
        assert reader.info is None
        assert len(dataset) == len(reader) == len(documents)
        for index, document in enumerate(documents):
            assert dataset[index].tolist() == reader[index].tolist() == document.tolist()


@pytest.mark.parametrize("kind", indexed_dataset.DTYPE_CODES.values())
def test_every_token_dtype_of_megatron_core_is_read(tmp_path: Path, kind: type[np.generic]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "set.bin"), dtype=kind)
    for document in ([1, 2, 120], [7]):
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "set.idx"))
    reader = indexed_dataset.open_dataset(tmp_path / "set")
    assert [reader[i].tolist() for i in range(2)] == [[1, 2, 120], [7]]
    assert reader.tokens.dtype == kind


def test_documents_of_several_sequences_are_read_by_sequence(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "set.bin"))
    builder.add_document(torch.tensor([1, 2, 3]), [2, 1])
    builder.finalize(str(tmp_path / "set.idx"))
    reader = indexed_dataset.open_dataset(tmp_path / "set")
    assert [reader[i].tolist() for i in range(len(reader))] == [[1, 2], [3]]


@pytest.mark.parametrize("end", range(0, 34 + 3 * 12 + 4 * 8, 7))
def test_a_truncated_index_is_refused(prefix: Path, end: int) -> None:
    file(prefix, ".idx").write_bytes(file(prefix, ".idx").read_bytes()[:end])
    with pytest.raises(DataError, match=r"set\.idx (is cut short|has \d+ bytes)"):
        indexed_dataset.open_dataset(prefix)


def patch(path: Path, offset: int, value: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(value)] = value
    path.write_bytes(raw)


def number(value: int) -> bytes:
    return value.to_bytes(8, "little")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "magic": (lambda p: patch(file(p, ".idx"), 0, b"PK"), "not an index of megatron-core's format"),
    "version": (lambda p: patch(file(p, ".idx"), 9, number(2)), "is an index of another version"),
    "format": (lambda p: patch(file(p, ".idx"), 17, b"\x06"), "not an index of megatron-core's format"),
    "count": (lambda p: patch(file(p, ".idx"), 18, number(2**63)), r"set\.idx has 102 bytes"),
    "longer index": (lambda p: patch(file(p, ".idx"), 102, b"more"), r"set\.idx has 106 bytes"),
    "length": (lambda p: patch(file(p, ".idx"), 34, b"\x09"), "documents 0 to 3 have 12 tokens in 6 places"),
    "last offset": (lambda p: patch(file(p, ".idx"), 34 + 12 + 16, number(2)), "has 12 bytes, its index says 6"),
    "bounds": (lambda p: patch(file(p, ".idx"), 102 - 8, number(9)), "documents do not end where its sequences do"),
    "shorter tokens": (lambda p: file(p, ".bin").write_bytes(b"\0\0\0"), r"set\.bin has 3 bytes, its index says 12"),
    "no tokens": (lambda p: file(p, ".bin").unlink(), r"there is no file .*set\.bin"),
    "no index": (lambda p: file(p, ".idx").unlink(), r"there is no file .*set\.idx"),
    "a folder": (lambda p: (file(p, ".bin").unlink(), file(p, ".bin").mkdir()), r"there is no file .*set\.bin"),
    "no JSON": (lambda p: file(p, ".json").write_text("{"), r"set\.json cannot be read"),
    "a list": (lambda p: file(p, ".json").write_text("[]"), r"set\.json cannot be read"),
    "a key less": (lambda p: file(p, ".json").write_text('{"tokenizer": {}}'), r"set\.json cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_refused(prefix: Path, what: str) -> None:
    assert len(indexed_dataset.open_dataset(prefix)) == 3
    damage, message = DAMAGE[what]
    damage(prefix)
    with pytest.raises(DataError, match=message):
        indexed_dataset.open_dataset(prefix)


def index_of(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


@pytest.mark.parametrize(
    ("part", "entry", "value"), [("lengths", 0, -3), ("offsets", 1, -2), ("offsets", 0, 1 << 40), ("bounds", 0, -1)]
)
def test_entries_out_of_range_are_refused(part: str, entry: int, value: int, prefix: Path) -> None:
    """megatron-core's C++ code reads documents by these numbers, unchecked."""
    reader = indexed_dataset.open_dataset(prefix)
    n = len(reader)
    data = np.array(np.fromfile(index_of(prefix), np.uint8))
    starts = {"lengths": 0, "offsets": 4 * n, "bounds": 12 * n}
    dtype = np.dtype("<i4" if part == "lengths" else "<i8")
    start = indexed_dataset.HEADER.itemsize + starts[part]
    values = data[start : start + n * dtype.itemsize].view(dtype)
    if part == "lengths":
        values[1] += values[entry] - value  # the sum stays
    values[entry] = value
    index_of(prefix).write_bytes(data.tobytes())
    with pytest.raises(DataError, match="is damaged"):
        indexed_dataset.open_dataset(prefix)


def test_files_of_two_datasets_are_refused(prefix: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_documents(other, [np.array([1, 2]), np.array([3, 4, 5, 6])], ORIGIN, 300)
    file(other, ".idx").replace(file(prefix, ".idx"))
    with pytest.raises(DataError, match=r"set.json is of another dataset: 3 documents and 6 tokens, not 2 and 6"):
        indexed_dataset.open_dataset(prefix)


def test_an_unreadable_file_is_refused(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(DataError, match="set cannot be read: Permission denied"):
        indexed_dataset.open_dataset(prefix)


def test_a_path_with_its_ending_is_explained(prefix: Path) -> None:
    with pytest.raises(DataError, match=r"a prefix is the path without \.bin"):
        indexed_dataset.open_dataset(file(prefix, ".bin"))


def test_a_dataset_without_documents_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the input has no text"):
        write_documents(tmp_path / "set", [], ORIGIN, 300)
    assert list(tmp_path.iterdir()) == []


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="document 1 has token 300, but the vocabulary has 300"):
        write_documents(tmp_path / "set", [np.array([1]), np.array([2, 300])], ORIGIN, 300)
    assert list(tmp_path.iterdir()) == []


def test_a_document_too_long_for_the_format_is_refused(tmp_path: Path) -> None:
    endless = np.broadcast_to(np.uint16(1), (2**31,))
    with pytest.raises(DataError, match="document 0 has 2,147,483,648 tokens"):
        write_documents(tmp_path / "set", [endless], ORIGIN, 300)


def test_a_failed_write_leaves_the_old_dataset(prefix: Path) -> None:
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}

    def documents():
        yield np.array([9, 9, 9])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_documents(prefix, documents(), ORIGIN, 300)
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_death_between_renames_mixes_no_datasets(prefix: Path, renamed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, done = Path.replace, []

    def dying(self: Path, target: Path) -> Path:
        if len(done) == renamed:
            raise OSError(5, "Input/output error")
        done.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dying)
    with pytest.raises(DataError, match="cannot be written: Input/output error"):
        write_documents(prefix, [np.array([11, 12]), np.array([13, 14, 15, 16])], ORIGIN, 300)
    monkeypatch.undo()
    with pytest.raises(DataError, match="there is no file"):
        indexed_dataset.open_dataset(prefix)


def test_a_writer_continues_after_what_is_on_disk(tmp_path: Path) -> None:
    def write(prefix: Path, writer: dataset_writer.DatasetWriter, numbers: range) -> None:
        for number in numbers:
            writer.append(np.arange(number), np.array([number]))

    with dataset_writer.DatasetWriter(tmp_path / "set", np.uint16) as writer:
        write(tmp_path / "set", writer, range(1, 5))
        start = writer.flush()
        write(tmp_path / "set", writer, range(9))  # lost: not part of what was recorded
    assert sorted(path.name for path in tmp_path.iterdir()) == [".set.bin.part", ".set.lengths.part"]
    with dataset_writer.DatasetWriter(tmp_path / "set", np.uint16, start) as writer:
        write(tmp_path / "set", writer, range(5, 9))
        writer.commit(ORIGIN, 300)
    write_documents(tmp_path / "whole", (np.arange(n) for n in range(1, 9)), ORIGIN, 300)
    for ending in (".bin", ".idx", ".json"):
        assert file(tmp_path / "set", ending).read_bytes() == file(tmp_path / "whole", ending).read_bytes()
    with pytest.raises(DataError, match=r"\.set\.bin\.part has 0 bytes, not 200"):
        dataset_writer.DatasetWriter(tmp_path / "set", np.uint16, (100, 3, 9))


def test_an_index_of_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entries in (("one", 1 << 20), ("many", 3)):
        monkeypatch.setattr(dataset_writer, "BLOCK_ENTRIES", entries)
        write_documents(tmp_path / name, (np.arange(n) for n in range(1, 12)), ORIGIN, 300)
    assert file(tmp_path / "one", ".idx").read_bytes() == file(tmp_path / "many", ".idx").read_bytes()


def test_the_description_is_plain_json(prefix: Path) -> None:
    assert json.loads(file(prefix, ".json").read_text()) == {
        "vocab_size": 300,
        "tokens": 6,
        "documents": 3,
        "tokenizer": {"name": "bytes", "fingerprint": "bytes", "eod": 256, "eod_origin": "fixed", "bos": None},
        "highest_token": 6,
    }


def test_a_description_of_wider_tokens_is_refused(prefix: Path) -> None:
    """PREFIX.json and PREFIX.idx disagree: 16-bit tokens cannot hold the vocabulary."""
    path = file(prefix, ".json")
    path.write_text(path.read_text().replace('"vocab_size": 300', '"vocab_size": 70000'))
    with pytest.raises(
        DataError, match=r"set\.json is of another dataset: tokens of 2 bytes hold no vocabulary of 70000"
    ):
        indexed_dataset.open_dataset(prefix)
