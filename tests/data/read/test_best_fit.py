"""Best fit: no document is cut that fits, padding is no label, and every token is read once an epoch."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.cli.check_data import data_summary
from megascale.config.run import RunConfig
from megascale.data.read import index_files
from megascale.data.read.best_fit import BestFitShape, RowGroup, best_fit, best_fit_shape
from megascale.data.read.epoch_index import EpochIndex, IndexShape
from tests.data.datasets import PADDING, SEQUENCE, data_config, mixture_of, positions_of, write_dataset
from tests.data.read.epochs_of_pieces import check_shuffling, next_index

LENGTHS = [13, 5, 1, 40, 8, 9, 30, 2, 21, 17, 16, 33, 3, 3, 6]


def packed(folder: Path, **keys: Any) -> RunConfig:
    """A configuration of the dataset `set` in a folder, with best fit."""
    config = data_config(folder, folder / "set", **keys)
    return config.model_copy(update={"data": config.data.model_copy(update={"packing": "best_fit"})})


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Tokens in the rows of best-fit decreasing, a document after another."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, filled in enumerate(rows) if filled + length <= capacity]
        if fitting:
            rows[max(fitting, key=lambda row: rows[row])] += length
        else:
            rows.append(length)
    return sorted(rows)


def lengths_of(group: RowGroup) -> list[int]:
    """The lengths of the documents in a row of a group."""
    return [length for length, documents in group.contents for _ in range(documents)]


@given(st.integers(1, 30), st.data())
def test_groups_are_rows_of_best_fit_decreasing(capacity: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=40))
    groups = best_fit(np.bincount(lengths, minlength=1).tolist(), capacity)
    rows = [list(lengths_of(group)) for group in groups for _ in range(group.rows)]
    assert Counter(length for row in rows for length in row) == Counter(lengths)
    assert sorted(map(sum, rows)) == one_by_one(lengths, capacity)


def test_time_depends_on_the_lengths_not_on_the_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 2048, 5000)
    counts = np.bincount(lengths)
    many = best_fit((counts * 10**6).tolist(), 2048)
    assert len(many) < 3 * 2048
    assert sum(group.rows * sum(lengths_of(group)) for group in many) == 10**6 * int(lengths.sum())


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(2, 20), st.integers(0, 5))
def test_an_index_has_every_token_with_a_label_once(lengths: list[int], seq_length: int, first: int) -> None:
    sizes = np.array([7] * first + lengths, dtype=np.int32)
    whole = IndexShape(first, len(sizes), sum(lengths), seq_length)
    shape = best_fit_shape(whole, sizes)
    index = shape.build(sizes, 3)
    seen = Counter[tuple[int, int]]()
    for sample in range(shape.samples):
        pieces = index.pieces(sample, sizes)
        tokens = sum(stop - start for _, start, stop in pieces)
        assert 1 < tokens <= seq_length or (tokens == seq_length + 1 and len(pieces) == 1)
        for document, start, stop in pieces:
            assert start % seq_length == 0, "only documents that do not fit are cut"
            seen.update((document, token) for token in range(start, min(stop, start + seq_length)))
    read = [length - (length % seq_length == 1) for length in lengths]  # a rest of one token is the row's before it
    assert seen == Counter((first + n, token) for n, length in enumerate(read) for token in range(length))
    assert shape.left_out == sum(lengths) - sum(read)
    assert sorted(index.order.tolist()) == list(range(shape.samples))
    if shape.samples:
        assert shape.padding == pytest.approx(1 - sum(read) / (shape.samples * seq_length))


def document_by_document(shape: BestFitShape, sizes: np.ndarray, seed: int) -> tuple[list[int], list[list[int]]]:
    """The documents and starts of an index, by loops over rows and documents."""
    s, documents = shape.seq_length, np.arange(shape.first, shape.last)
    np.random.RandomState(seed).shuffle(documents)
    parts: list[int] = []
    starts: list[list[int]] = []
    waiting = defaultdict[int, list[int]](list)
    for document in documents.tolist():
        size = int(sizes[document])
        for start in range(0, size - size % s, s):
            starts.append([len(parts), start])
            parts.append(document)
        waiting[size % s].append(document)
    for rest in (0, 1):
        waiting.pop(rest, None)
    counts = [len(waiting[length]) for length in range(s)]
    for group in best_fit(counts, s):
        for _ in range(group.rows):
            row = [waiting[length].pop(0) for length in lengths_of(group)]
            starts.append([len(parts), int(sizes[row[0]]) // s * s])
            parts += row
    return parts, [*starts, [len(parts), 0]]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(2, 20), st.integers(0, 9))
def test_an_index_is_the_one_of_plain_loops(lengths: list[int], seq_length: int, seed: int) -> None:
    sizes = np.array(lengths, dtype=np.int32)
    shape = best_fit_shape(IndexShape(0, len(sizes), sum(lengths), seq_length), sizes)
    index = shape.build(sizes, seed)
    assert (index.documents.tolist(), index.starts.tolist()) == document_by_document(shape, sizes, seed)


def test_epochs_shuffle_what_stands_together() -> None:
    sizes = np.array([3, 5] * 40, dtype=np.int32)
    shape = best_fit_shape(IndexShape(0, 80, 320, 8), sizes)
    assert (shape.samples, shape.padding) == (40, 0)
    check_shuffling(lambda seed: shape.build(sizes, seed), sizes, 40)


def test_samples_are_whole_documents(tmp_path: Path) -> None:
    documents = write_dataset(tmp_path / "set", LENGTHS)
    owner = {int(token): (number, place) for number, d in enumerate(documents) for place, token in enumerate(d)}
    config = packed(tmp_path, data__attention_mask="document")
    samples = mixture_of(config)
    (dataset,) = samples.datasets
    count, read, labels, padding = dataset.shape.samples, Counter[int](), Counter[int](), 0
    for index in range(count):
        sample = samples[index]
        assert sample.documents is not None and samples.documents(index).places == sample.documents.places
        mask = np.ones(SEQUENCE) if sample.mask is None else sample.mask
        real = positions_of(sample) != PADDING
        padding += int((~real).sum())
        assert not mask[~real].any(), "padding is no label"
        read.update(sample.tokens[real].tolist())
        places = [owner[int(token)][1] % SEQUENCE for token in sample.tokens[real]]
        assert positions_of(sample)[real].tolist() == places, "a long document is cut at multiples of the sequence"
        labels.update(sample.labels[mask == 1].tolist())
        for token, label in zip(sample.tokens[mask == 1], sample.labels[mask == 1], strict=True):
            assert label == token + 1 and owner[int(label)][0] == owner[int(token)][0]
    left_out = sum(length % SEQUENCE == 1 for length in LENGTHS)
    singles = [int(d[-1]) for d in documents if len(d) % SEQUENCE == 1]
    assert left_out and read == Counter(list(owner)) - Counter(singles), "every token once, but rests of one"
    assert labels == Counter(token for token, (_, place) in owner.items() if place), (
        "every token but a document's first"
    )
    assert padding == count * SEQUENCE - sum(LENGTHS) + left_out
    share, _ = samples.best_fit_losses()
    assert share == pytest.approx(padding / (count * SEQUENCE))
    told = f"{share:.2%} of the tokens are padding; {left_out} rests of one token, which have no label"
    assert told in data_summary(config)


def test_no_row_is_without_a_label(tmp_path: Path) -> None:
    """A rest of one token would fill a row alone, of documents of a sample and one token."""
    write_dataset(tmp_path / "set", [SEQUENCE + 1] * 8)
    samples = mixture_of(packed(tmp_path, data__attention_mask="document"))
    (dataset,) = samples.datasets
    assert dataset.shape.samples == 8 and samples.best_fit_losses()[1] == 8
    masks = [samples[index].mask for index in range(8)]
    assert all(mask is None or mask.sum() for mask in masks)
    assert sorted(int(samples[index].labels[-1]) for index in range(8)) == [9 * n + 8 for n in range(8)]


def test_padding_is_no_label_with_any_mask(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", [3, 3, 6, 6, 6, 8, 2])
    for more in ({}, {"data__attention_mask": "document", "data__eod_mask_loss": False}):
        samples = mixture_of(packed(tmp_path, **more))
        (dataset,) = samples.datasets
        counted = [samples[index].mask for index in range(dataset.shape.samples)]
        filled = [sum(piece.stop - piece.start for piece in dataset.pieces(i)) for i in range(len(counted))]
        assert sorted(filled) == [6, 6, 6, 8, 8]
        assert [int(mask.sum()) for mask in counted if mask is not None] == [n - 1 for n in filled]


@settings(max_examples=5)
@given(st.integers(0, 3))
def test_an_index_in_a_file_is_the_one_in_memory(epoch: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder / "set", LENGTHS)
        (dataset,) = mixture_of(packed(folder)).datasets
        key = dataset.index_key(epoch)
        files = index_files.open_dataset_of(key, folder)
        index_files.write_index(folder / key.file_name, key, files)
        mapped, built = index_files.map_index(folder / key.file_name, key), index_files._build(key, files)
        assert isinstance(mapped.shape, BestFitShape) and mapped.shape == key.shape
        pieces = [[index.pieces(i, files.lengths) for i in range(key.shape.samples)] for index in (mapped, built)]
        assert pieces[0] == pieces[1]
        plain = mixture_of(data_config(folder, folder / "set")).datasets[0].index_key(epoch)
        assert plain.file_name != key.file_name, "another packing is another index"


def test_the_next_epoch_is_built_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    config = packed(tmp_path)
    (dataset,) = mixture_of(config, expected=60).datasets
    assert isinstance(next_index(dataset, monkeypatch).shape, BestFitShape)


def test_damaged_entries_are_refused() -> None:
    sizes = np.array([3, 5], dtype=np.int32)
    shape = BestFitShape(0, 1, 3, 8, parts=4, rows=2, left_out=0)
    index = EpochIndex(shape, np.array([0, -1]), np.array([[0, 0], [1, 0], [1, 0], [2, 0]]), np.array([0, 1, 2]))
    assert index.pieces(0, sizes) == [(0, 0, 3)]
    for sample in (1, 2):
        with pytest.raises(IndexError):
            index.pieces(sample, sizes)
    with pytest.raises(ValueError, match="1 parts in 1 rows, not 4 in 2"):
        shape.build(sizes, 1)
