"""Decomposed documents: pieces are powers of two of the documents, each once an epoch, and attend to nothing else."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.data.mix.build_indices import build_indices
from megascale.data.read import index_files
from megascale.data.read.decomposed_index import DecomposedShape, decomposed_shapes
from megascale.data.read.epoch_index import EpochIndex, IndexShape
from tests.data.datasets import SEQUENCE, data_config, mixture_of, positions_of, write_dataset
from tests.data.read.epochs_of_pieces import check_shuffling, next_index

LENGTHS = [13, 5, 1, 40, 8, 9, 30, 2, 21, 17, 16, 33, 3, 3, 6]


def decomposed(folder: Path, *names: str, decompose_min_length: int = 2, **keys: Any) -> RunConfig:
    """A configuration of the datasets of a folder (default: `set`) in pieces of 2, 4 and 8 tokens."""
    sources = [(1.0, folder / name) for name in names or ("set",)]
    config = data_config(folder, sources, **({"data__attention_mask": "document"} | keys))
    given = {"packing": "decompose", "decompose_min_length": decompose_min_length}
    return config.model_copy(update={"data": config.data.model_copy(update=given)})


@given(st.lists(st.integers(0, 70), min_size=1, max_size=60), st.integers(0, 4), st.integers(0, 5))
def test_buckets_have_the_greedy_pieces_of_documents_once(lengths: list[int], power: int, first: int) -> None:
    seq_length = 2**power
    sizes = np.array([7] * first + lengths, dtype=np.int32)
    whole = IndexShape(first, len(sizes), sum(lengths), seq_length)
    expected = Counter[tuple[int, int, int]]()
    for document, left in enumerate(lengths, start=first):
        start, piece = 0, seq_length
        while left:  # the longest piece that fits, again and again
            if piece <= left:
                expected[document, start, start + piece] += 1
                start, left = start + piece, left - piece
            else:
                piece //= 2
    for piece, shape in decomposed_shapes(whole, sizes, [2**n for n in range(power + 1)]).items():
        index = shape.build(sizes, 3)
        seen = Counter[tuple[int, int, int]]()
        for sample in range(shape.samples):
            pieces = index.pieces(sample, sizes)
            assert [stop - start for _, start, stop in pieces] == [piece] * (seq_length // piece)
            seen.update(pieces)
        mine = Counter({found: count for found, count in expected.items() if found[2] - found[1] == piece})
        assert mine.total() == shape.pieces
        assert seen <= mine and (mine - seen).total() == shape.pieces % (seq_length // piece)


def test_epochs_shuffle_what_stands_together() -> None:
    sizes = np.array([12, 4] * 40, dtype=np.int32)
    shape = decomposed_shapes(IndexShape(0, 80, 640, 8), sizes, [4])[4]
    check_shuffling(lambda seed: shape.build(sizes, seed), sizes, 40)


def test_a_sample_has_pieces_of_one_length_and_no_label_across_them(tmp_path: Path) -> None:
    documents = write_dataset(tmp_path / "set", LENGTHS)
    owner = {int(token): (number, place) for number, d in enumerate(documents) for place, token in enumerate(d)}
    samples = mixture_of(decomposed(tmp_path))
    lengths = set()
    for index in range(240):
        sample = samples[index]
        assert sample.documents is not None and samples.documents(index).places == sample.documents.places
        dataset, _ = samples.locate(index)
        piece = dataset.piece
        assert piece is not None and positions_of(sample).tolist() == list(range(piece)) * (SEQUENCE // piece)
        assert sample.mask is not None and sample.mask.tolist() == ([1] * (piece - 1) + [0]) * (SEQUENCE // piece)
        for token, label in zip(sample.tokens[sample.mask == 1], sample.labels[sample.mask == 1], strict=True):
            assert label == token + 1 and owner[int(label)][0] == owner[int(token)][0]
        lengths.add(piece)
    assert lengths == {2, 4, 8}


def test_an_epoch_reads_every_piece_once_and_steps_have_one_length(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", [11, 14] * 16)
    config = decomposed(tmp_path)
    samples = mixture_of(config)
    sizes = [dataset.shape.samples for dataset in samples.datasets]
    assert sizes == [8, 8, 32], "in pieces of 2, of 4 and of 8 tokens"
    total, step = sum(sizes), config.batch.total
    read = Counter(token for index in range(total) for token in samples[index].tokens.tolist())
    assert set(read.values()) == {1} and len(read) == total * SEQUENCE
    for first in range(0, 4 * total, step):
        assert len({samples.locate(index)[0].piece for index in range(first, first + step)}) == 1
    late = Counter(samples.locate(index)[0].piece for index in range(10 * total))
    assert late == {2: 80, 4: 80, 8: 320}, "buckets come to the end of an epoch together"


def test_a_blend_reads_its_shares_in_every_bucket(tmp_path: Path) -> None:
    write_dataset(tmp_path / "short", [2, 6] * 40)
    write_dataset(tmp_path / "long", [16, 30] * 40, first=5000)
    samples = mixture_of(decomposed(tmp_path, "short", "long"))
    found = Counter[tuple[str, int | None]]()
    for index in range(800):
        dataset, number = samples.locate(index)
        key = (Path(dataset.prefix).name, dataset.piece)
        assert number == found[key], "every bucket of a dataset goes on where it was"
        found[key] += 1
    assert abs(sum(count for (name, _), count in found.items() if name == "short") - 400) <= 8
    assert ("short", 8) not in found


def test_evaluations_read_concatenated_documents(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    config = decomposed(tmp_path, data__split=[0.5, 0.5])
    plain = config.model_copy(
        update={"data": config.data.model_copy(update={"packing": "concat", "decompose_min_length": None})}
    )
    found, expected = mixture_of(config, "valid"), mixture_of(plain, "valid")
    assert found.samples_without_repetition() == expected.samples_without_repetition() > 0
    assert found[1].tokens.tolist() == expected[1].tokens.tolist()


def test_data_without_a_full_sample_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", [1, 1, 3] * 3 + [2] * 1)
    with pytest.raises(DataError, match="no pieces of 4 tokens or more fill a sample of 8"):
        _ = mixture_of(decomposed(tmp_path, decompose_min_length=4))[0]


@settings(max_examples=5)
@given(st.integers(0, 3), st.sampled_from([0, 1, 2]))
def test_an_index_in_a_file_is_the_one_in_memory(epoch: int, bucket: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder / "set", LENGTHS)
        datasets = mixture_of(decomposed(folder)).datasets
        key = datasets[bucket].index_key(epoch)
        files = index_files.open_dataset_of(key, folder)
        index_files.write_index(folder / key.file_name, key, files)
        mapped, built = index_files.map_index(folder / key.file_name, key), index_files._build(key, files)
        assert isinstance(mapped.shape, DecomposedShape) and mapped.shape == key.shape
        pieces = [[index.pieces(i, files.lengths) for i in range(key.shape.samples)] for index in (mapped, built)]
        assert pieces[0] == pieces[1] and pieces[0]
        assert len({dataset.index_key(epoch).file_name for dataset in datasets}) == 3
        assert len({dataset.index_key(epoch).seed for dataset in datasets}) == 3


def test_indices_are_built_in_advance_and_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    config = decomposed(tmp_path, train__steps=5)
    mixture = mixture_of(config, expected=config.train.steps * config.batch.total)
    dataset = mixture_of(config, expected=600).datasets[1]
    assert isinstance(next_index(dataset, monkeypatch).shape, DecomposedShape)
    assert build_indices([mixture], 1).found == 2, "epochs 0 and 1 of the bucket"
    assert build_indices([mixture], 1).built == 0


def test_damaged_entries_are_refused() -> None:
    sizes = np.array([4, 6], dtype=np.int32)
    starts = np.array([[0, 0], [2, 0], [4, 0]])
    shape = DecomposedShape(0, 2, 10, 8, piece=4, pieces=5)
    index = EpochIndex(shape, np.array([0, 1, -1, 1]), starts, np.array([0, 1]))
    assert index.pieces(0, sizes) == [(0, 0, 4), (1, 0, 4)]
    with pytest.raises(IndexError, match="document -1"):
        index.pieces(1, sizes)
    with pytest.raises(IndexError, match="documents 2 to 4 of 3"):
        EpochIndex(shape, np.array([0, 1, 1]), starts, np.array([0, 1])).pieces(1, sizes)
    with pytest.raises(ValueError, match="2 pieces of 4 tokens, not 5"):
        shape.build(sizes, 1)
