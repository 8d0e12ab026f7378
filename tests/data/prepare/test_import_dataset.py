"""Datasets of other projects, in files as those projects write them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megascale.cli.main import main
from megascale.core.errors import DataError
from megascale.data.prepare import foreign_formats
from megascale.data.prepare.import_dataset import ImportedDataset, ImportRequest, import_dataset
from megascale.data.read.indexed_dataset import open_dataset
from tests.data.prepare.test_tokenizer import byte_level

EOD = 256
DOCUMENTS = [[1, 2, 3, EOD], [EOD], [7, 8, EOD], [9] * 30 + [EOD], [5, 6, EOD]]
STREAM = [token for document in DOCUMENTS for token in document]


@pytest.fixture(params=[5, 1 << 20], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end within documents, and one of all."""
    monkeypatch.setattr(foreign_formats, "BLOCK_TOKENS", request.param)


def raw(dtype: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.array(STREAM, dtype).tofile(folder / "train.bin")
        return folder / "train.bin"

    return write


def llmc(magic: int, version: int, dtype: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        header = np.zeros(256, np.int32)
        header[:3] = magic, version, len(STREAM)
        (folder / "fineweb_train_000001.bin").write_bytes(header.tobytes() + np.array(STREAM, dtype).tobytes())
        return folder / "fineweb_train_000001.bin"

    return write


def numpy_file(folder: Path) -> Path:
    np.save(folder / "part.npy", np.array(STREAM, np.uint32))
    return folder / "part.npy"


def litdata(kind: str, dtype: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder = folder / "lit"
        folder.mkdir()
        chunks = {"chunk-0-0.bin": DOCUMENTS[:2], "chunk-0-1.bin": DOCUMENTS[2:]}
        for name, items in chunks.items():
            data = [np.array(item, dtype).tobytes() for item in items]
            offsets = np.cumsum([4 + 4 * (len(items) + 1), *map(len, data)]).astype(np.uint32)
            (folder / name).write_bytes(np.uint32(len(items)).tobytes() + offsets.tobytes() + b"".join(data))
        config = {"compression": None, "data_format": [kind], "chunk_size": None}
        (folder / "index.json").write_text(
            json.dumps({"chunks": [{"filename": name} for name in chunks], "config": config})
        )
        return folder

    return write


def parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": DOCUMENTS}), folder / "ids.parquet")
    return folder / "ids.parquet"


def arrow(folder: Path) -> Path:
    table = pyarrow.table(
        {"text": ["x"] * 5, "input_ids": pyarrow.array(DOCUMENTS, pyarrow.large_list(pyarrow.int32()))}
    )
    with pyarrow.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file, pyarrow.ipc.new_stream(
        file, table.schema
    ) as writer:  # fmt: skip
        writer.write_table(table, max_chunksize=2)
    return folder / "data-00000-of-00001.arrow"


FORMATS: dict[str, tuple[Callable[[Path], Path], str | None]] = {
    "raw uint16": (raw("<u2"), "uint16"),
    "raw uint32": (raw("<u4"), "uint32"),
    "llm.c": (llmc(20240520, 1, "<u2"), None),
    "llm.c, Llama 3": (llmc(20240801, 7, "<u4"), None),
    "NumPy": (numpy_file, None),
    "LitData, torch": (litdata("no_header_tensor:15", "<i4"), None),
    "LitData, numpy": (litdata("no_header_numpy:5", "<u2"), None),
    "Parquet": (parquet, None),
    "Arrow": (arrow, None),
}


def convert(*paths: Path, **options: object) -> ImportedDataset:
    output = paths[0].parent / "out" / "set"
    return import_dataset(ImportRequest(paths, output, **({"eod": EOD} | options)))  # type: ignore[arg-type]


def documents(folder: Path) -> list[list[int]]:
    dataset = open_dataset(folder / "out" / "set")
    return [dataset[index].tolist() for index in range(len(dataset))]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_documents(name: str, tmp_path: Path) -> None:
    write, dtype = FORMATS[name]
    made = convert(write(tmp_path), dtype=dtype)
    assert documents(tmp_path) == DOCUMENTS
    assert [name.startswith(found) for found in made.formats] == [True]
    dataset = open_dataset(tmp_path / "out" / "set")
    assert (dataset.tokens.dtype, dataset.info) == (np.uint16, None), "the smallest that holds the tokens"


def test_a_document_goes_on_in_the_next_file(tmp_path: Path) -> None:
    for name, part in (("a.bin", STREAM[:2]), ("b.bin", STREAM[2:5]), ("c.bin", [*STREAM[5:], 42])):
        np.array(part, "<u2").tofile(tmp_path / name)
    convert(*(tmp_path / name for name in ("a.bin", "b.bin", "c.bin")), dtype="uint16")
    assert documents(tmp_path) == [*DOCUMENTS, [42]]


def test_a_tokenizer_is_recorded_and_says_where_documents_end(tmp_path: Path) -> None:
    convert(raw("<u4")(tmp_path), dtype="uint32", eod=None, tokenizer="bytes")
    assert documents(tmp_path) == DOCUMENTS
    info = open_dataset(tmp_path / "out" / "set").info
    assert info is not None and (info.vocab_size, info.tokenizer.name, info.tokenizer.eod) == (257, "bytes", EOD)
    np.array([1, 300], "<u4").tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match="document 0 has token 300, but the vocabulary has 257"):
        convert(tmp_path / "train.bin", dtype="uint32", eod=None, tokenizer="bytes")


def damaged(write: Callable[[Path], Path], name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def damage(folder: Path) -> Path:
        path = write(folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        return path

    return damage


def cut(data: bytes) -> bytes:
    return data[:-3]


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no header": (raw("<u2"), "has no header of a known format  -> .*--dtype"),
    "llm.c cut": (damaged(llmc(20240520, 1, "<u2"), "fineweb_train_000001.bin", lambda d: d[:-2]), "its header says"),
    "odd bytes": (damaged(llmc(20240520, 1, "<u2"), "fineweb_train_000001.bin", cut), "no whole number of uint16"),
    "npy cut": (damaged(numpy_file, "part.npy", cut), "is no array of numbers"),
    "litdata cut": (damaged(litdata("no_header_numpy:5", "<u2"), "lit/chunk-0-1.bin", cut), "is damaged"),
    "litdata of text": (litdata("str", "<u2"), "is no LitData dataset of token arrays"),
    "parquet cut": (damaged(parquet, "ids.parquet", cut), "cannot be read"),
    "an empty folder": (lambda folder: folder, "is no LitData dataset"),
    "nothing": (lambda folder: folder / "none.bin", "cannot be read: No such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_damaged_or_unknown_is_one_line(name: str, tmp_path: Path) -> None:
    write, message = REFUSED[name]
    with pytest.raises(DataError, match=message) as caught:
        convert(write(tmp_path))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("name", "clash"),
    [
        ("raw uint16", "train.bin"),
        ("llm.c", "fineweb_train_000001.bin"),
        ("LitData, numpy", "lit/index.json"),
        ("LitData, numpy", "lit/chunk-0-1.bin"),
        ("Parquet", "tokenizer.json"),
    ],
)
@pytest.mark.parametrize("linked", [False, True])
def test_an_input_is_not_overwritten(name: str, clash: str, linked: bool, tmp_path: Path) -> None:
    write, dtype = FORMATS[name]
    byte_level("<eod>").save(str(tmp_path / "tokenizer.json"))
    inputs = [write(tmp_path), parquet(tmp_path)]
    (tmp_path / "link").symlink_to(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    target = tmp_path / ("link" if linked else "") / clash
    request = ImportRequest(inputs, target.with_suffix(""), str(tmp_path / "tokenizer.json"), dtype=dtype)
    with pytest.raises(DataError, match=f"{target} would be overwritten, but it is read  -> another --output"):
        import_dataset(request)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    source = raw("<u2")(tmp_path)
    with pytest.raises(DataError, match=f"the folder {source}/a cannot be made: .*  -> another --output"):
        import_dataset(ImportRequest([source], source / "a" / "set", eod=EOD, dtype="uint16"))
    with pytest.raises(DataError, match=r"\.\. is a folder  -> add a name"):
        import_dataset(ImportRequest([source], tmp_path / "..", eod=EOD, dtype="uint16"))


def test_columns_that_are_no_lists_of_token_ids_are_refused(tmp_path: Path) -> None:
    columns = {
        "a": ["x"],
        "b": [1],
        "c": [["x"]],
        "d": [[1, None]],
        "e": pyarrow.array([None], pyarrow.list_(pyarrow.int8())),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    for key in "abcde":
        with pytest.raises(DataError, match=f"in column '{key}'"):
            convert(tmp_path / "t.parquet", key=key)
    with pytest.raises(DataError, match="has no column 'input_ids': its columns are a, b, c, d, e"):
        convert(tmp_path / "t.parquet")


def test_tokens_that_are_negative_or_too_large_are_refused(tmp_path: Path) -> None:
    np.array([1, 2**31], "<u4").tofile(tmp_path / "a.bin")
    np.array([-1, 2], "<i4").tofile(tmp_path / "b.bin")
    with pytest.raises(DataError, match="token 2147483648 is beyond 31 bits"):
        convert(tmp_path / "a.bin", dtype="uint32")
    with pytest.raises(DataError, match="token -1 is negative"):
        convert(tmp_path / "b.bin", dtype="int32")


def test_a_stream_needs_the_token_that_ends_documents(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.bin does not say where documents end  -> --eod ID"):
        convert(raw("<u2")(tmp_path), dtype="uint16", eod=None)


def test_megatron_s_own_format_needs_no_import_and_older_ones_say_so(tmp_path: Path) -> None:
    convert(raw("<u2")(tmp_path), dtype="uint16")
    with pytest.raises(DataError, match="is in Megatron-LM's format, which training reads as it is"):
        convert(tmp_path / "out" / "set", dtype="uint16")
    for magic in (b"TNTIDX\x00\x00" + struct.pack("<Q", 1), b"MMIDIDX\x00\x00" + struct.pack("<Q", 2)):
        (tmp_path / "old.idx").write_bytes(magic.ljust(80, b"\0"))
        (tmp_path / "old.bin").touch()
        for read in (open_dataset, convert):
            with pytest.raises(DataError, match=r"old\.idx is an index of another version  -> one of version 1"):
                read(tmp_path / "old")


def test_an_index_with_modes_is_read_if_all_are_text(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "set.bin"), dtype=np.uint16, multimodal=True)
    for document in DOCUMENTS:
        builder.add_item(torch.tensor(document), 0)
        builder.end_document()
    builder.finalize(str(tmp_path / "set.idx"))
    dataset = open_dataset(tmp_path / "set")
    assert [dataset[index].tolist() for index in range(len(dataset))] == DOCUMENTS
    data = bytearray((tmp_path / "set.idx").read_bytes())
    data[-2] = 1
    (tmp_path / "set.idx").write_bytes(data)
    with pytest.raises(DataError, match=r"set\.idx has sequences with a mode other than 0"):
        open_dataset(tmp_path / "set")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = str(raw("<u2")(tmp_path)), str(tmp_path / "made")
    command = ["data", "import", path, "--output", output, "--eod", str(EOD), "--dtype", "uint16"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{output}: 5 documents, 42 tokens from raw uint16\nno tokenizer is recorded")
    assert main([*command, "--tokenizer", "bytes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"documents": 5, "tokens": 42, "formats": ["raw uint16"]}
    assert main(["data", "import", path, "--output", output]) == 3
    assert capsys.readouterr().err.count("\n") == 1
