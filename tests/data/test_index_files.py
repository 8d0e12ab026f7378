"""Index files of megatron-core's datasets: what is no plain array of the right numbers is refused, and runs nothing."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megascale.core.errors import DataError, Exit
from megascale.data.mixture import Mixture
from tests.data.datasets import VOCABULARY, data_config, write_dataset
from tests.runs import GPT, settings, write_config

pytestmark = pytest.mark.usefixtures("world_of_one")


class Poison:
    """An object whose pickle makes the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def array_file(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def archive(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, array)
    return file.getvalue()


def changed(entry: int) -> Callable[[bytes, Path], bytes]:
    """An index whose last entry is `entry`."""

    def change(data: bytes, _: Path) -> bytes:
        array = np.load(io.BytesIO(data))
        array.reshape(-1)[-1] = entry
        return array_file(array)

    return change


ATTACKS: dict[str, tuple[Callable[[bytes, Path], bytes], str]] = {
    "objects": (lambda _, flag: array_file(np.array([Poison(flag)], dtype=object)), "no array of numbers"),
    "a pickle": (lambda _, flag: pickle.dumps(Poison(flag)), "no array of numbers"),
    "an archive": (lambda data, _: archive(np.load(io.BytesIO(data))), "archive"),
    "cut short": (lambda data, _: data[:-1], "no array of numbers"),
    "too long": (lambda data, _: data + bytes(8), "its header says"),
    "empty": (lambda data, _: b"", "no array of numbers"),
    "half a header": (lambda data, _: data[:50], "no array of numbers"),
    "another dtype": (lambda data, _: array_file(np.load(io.BytesIO(data)).astype(np.float64)), "has dtype float64"),
    "another shape": (lambda data, _: array_file(np.load(io.BytesIO(data))[None]), "dimensions"),
    "fewer entries": (lambda data, _: array_file(np.load(io.BytesIO(data))[:0]), ""),
    "beyond the end": (changed(30_000), "entries from"),
    "a huge shape": (lambda data, _: data.replace(b"'shape': (", b"'shape': (9999999999", 1), "no array of numbers"),
}
INDICES = ("document_index", "sample_index", "shuffle_index", "dataset_index", "dataset_sample_index")


def cases() -> list[object]:
    return [
        pytest.param(index, attack, id=f"{index}-{attack}")
        for number, attack in enumerate(ATTACKS)
        for index in (INDICES if attack in ("objects", "beyond the end") else [INDICES[number % len(INDICES)]])
    ]


@pytest.mark.parametrize(("index", "attack"), cases())
def test_a_damaged_or_poisoned_index_is_one_line(index: str, attack: str, tmp_path: Path) -> None:
    sources = [(1.0, tmp_path / "a"), (1.0, tmp_path / "b")]
    for number, (_, prefix) in enumerate(sources):
        write_dataset(prefix, [30] * 10, first=1000 * number)
    config = data_config(tmp_path, sources)
    assert Mixture(config, "train", 20)[0].tokens.shape == (8,)
    paths = sorted((tmp_path / "cache").glob(f"*{index}.npy"))
    change, message = ATTACKS[attack]
    for path in paths:
        path.write_bytes(change(path.read_bytes(), tmp_path / "ran"))
    assert paths
    with pytest.raises(DataError, match=message) as raised:
        Mixture(config, "train", 20)
    assert "\n" not in str(raised.value) and "are damaged" in str(raised.value)
    assert not (tmp_path / "ran").exists(), "code of the file ran"


def test_a_pipe_in_place_of_an_index_does_not_block(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", [30] * 10)
    config = data_config(tmp_path, tmp_path / "a")
    Mixture(config, "train", 20)
    for path in (tmp_path / "cache").glob("*.npy"):
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        Mixture(config, "train", 20)


def test_megatron_core_itself_would_run_the_poison(tmp_path: Path) -> None:
    """The attack of these tests is one."""
    (tmp_path / "index.npy").write_bytes(ATTACKS["objects"][0](b"", tmp_path / "ran"))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        np.load(tmp_path / "index.npy")
    np.load(tmp_path / "index.npy", allow_pickle=True)
    assert (tmp_path / "ran").is_dir()


@pytest.mark.slow
def test_a_job_with_a_poisoned_index_ends_with_status_3(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", [200] * 10)
    model = GPT | {"vocab_size": VOCABULARY, "seq_length": 8}
    data = {"data__mock": False, "data__train": str(tmp_path / "a"), "data__split": [1.0, 0.0]}
    config = write_config(settings(model, tmp_path / "runs", **data, train__steps=3), tmp_path / "config.toml")
    command = [sys.executable, "-m", "megascale", "train", str(config)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == Exit.OK
    for path in (tmp_path / "cache").glob("*shuffle_index.npy"):
        path.write_bytes(ATTACKS["objects"][0](b"", tmp_path / "ran"))
    result = subprocess.run([*command, "name=again"], capture_output=True, text=True, check=False)
    assert result.returncode == Exit.DATA, result.stderr
    assert "are damaged" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "ran").exists()
