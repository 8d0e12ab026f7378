"""Documents in the order of a file: each once, in every epoch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.data.read.document_order import order_identity, read_order
from megascale.data.read.identity import replaced_datasets, write_identities
from tests.data.datasets import SEQUENCE, data_config, mixture_of, write_dataset

LENGTHS = [13, 5, 1, 40, 8, 9, 30, 2, 21, 17, 16, 33]
ORDER = [3, 0, 11, 5, 4, 1, 2, 10, 9, 6, 7, 8]


def ordered(folder: Path, order: list[int], **keys: object) -> RunConfig:
    """A configuration of the dataset `set` of a folder, in an order that is written to a file."""
    np.save(folder / "order.npy", np.array(order))
    config = data_config(folder, folder / "set", **keys)
    return config.model_copy(
        update={"data": config.data.model_copy(update={"document_order_file": str(folder / "order.npy")})}
    )


def test_samples_follow_the_file_in_every_epoch(tmp_path: Path) -> None:
    documents = write_dataset(tmp_path / "set", LENGTHS)
    samples = mixture_of(ordered(tmp_path, ORDER), expected=60)
    stream = np.concatenate([documents[number] for number in ORDER])
    count = samples.datasets[0].shape.samples
    for index in range(2 * count):
        place = index % count * SEQUENCE
        assert samples[index].tokens.tolist() == stream[place : place + SEQUENCE].tolist()
        assert samples[index].labels.tolist() == stream[place + 1 : place + SEQUENCE + 1].tolist()


def test_validation_documents_are_not_in_the_order(tmp_path: Path) -> None:
    documents = write_dataset(tmp_path / "set", LENGTHS)
    config = ordered(tmp_path, [2, 0, 1, 3, 5, 4, 6, 7, 8], data__split=[0.75, 0.25])
    assert mixture_of(config)[0].tokens[0] == documents[2][0]
    assert mixture_of(config, "valid")[0].tokens[0] >= documents[9][0]


def test_a_changed_file_is_another_index(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    config = ordered(tmp_path, ORDER)
    names = [mixture_of(config).datasets[0].index_key(0).file_name]
    os.utime(tmp_path / "order.npy", ns=(1, 1))
    names.append(mixture_of(config).datasets[0].index_key(0).file_name)
    names.append(mixture_of(data_config(tmp_path, tmp_path / "set")).datasets[0].index_key(0).file_name)
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 1], "3 documents, and there are 4"),
        ([0, 1, 1, 3], "2 is missing"),
        ([0, 1, 2, 4], "3 is missing"),
        ([0.0, 1.0, 2.0, 3.0], "numbers of float64"),
    ],
)
def test_a_file_with_other_documents_is_refused(order: list[int], message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "order.npy", np.array(order))
    with pytest.raises(DataError, match=message):
        read_order(order_identity(str(tmp_path / "order.npy")), 0, 4)
    (tmp_path / "order.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match="cannot be read"):
        read_order(order_identity(str(tmp_path / "order.npy")), 0, 4)


def test_a_file_that_is_replaced_while_a_run_reads_changes_no_order(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    samples = mixture_of(ordered(tmp_path, ORDER), expected=60)
    count = samples.datasets[0].shape.samples
    first, path = samples[0].tokens.tolist(), tmp_path / "order.npy"
    old, facts = path.read_bytes(), path.stat()
    np.save(path, np.array(ORDER[::-1]))
    assert samples[1].tokens[0] == first[-1] + 1, "of the epoch that is open"
    with pytest.raises(DataError, match=r"order\.npy was replaced while the run reads by it"):
        samples[count]
    path.write_bytes(old)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert samples[count].tokens.tolist() == first


def test_a_file_that_was_replaced_since_the_last_start_is_said(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    config = ordered(tmp_path, ORDER)
    config.folder.mkdir(parents=True)
    write_identities(config.data, config.folder)
    os.utime(tmp_path / "order.npy", ns=(1, 1))
    assert replaced_datasets(config.data, config.folder) == [], "the same content"
    np.save(tmp_path / "order.npy", np.array(ORDER[::-1]))
    [text] = replaced_datasets(config.data, config.folder)
    assert text.startswith(f"{tmp_path / 'order.npy'} is another order of documents than at the run's last start: ")
    assert text.endswith("; a run that resumes reads samples again and leaves others out")
    without = data_config(tmp_path, tmp_path / "set")
    assert replaced_datasets(without.data, without.folder) == []


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    config = ordered(tmp_path, ORDER)
    (tmp_path / "order.npy").unlink()
    with pytest.raises(DataError, match=r"order\.npy cannot be read"):
        mixture_of(config)[0]
