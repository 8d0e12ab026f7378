"""torch.distributed.checkpoint: what torch writes in any layout is read without code, and torch reads ours."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from megascale.convert.dcp import METADATA, DcpFolder, write_dcp
from megascale.core.errors import CheckpointError
from megascale.core.rank import Rank
from tests.worlds import run_world

MATRIX = torch.arange(35.0).view(5, 7)
STATE = {"matrix": MATRIX, "half": MATRIX.bfloat16(), "scalar": torch.tensor(3.0), "run": {"step": 7, "bytes": b"ab"}}


class Code:
    """An object whose pickle calls a function of the system."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/never",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(STATE, checkpoint_id=tmp_path / "theirs", no_dist=True)
    return tmp_path / "theirs"


def save_sharded(rank: Rank, folder: Path) -> None:
    """Save the matrix with rows, with columns, and with rows and columns on the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    meshes = {"rows": (flat, [Shard(0)]), "columns": (flat, [Shard(1)]), "both": (square, [Shard(0), Shard(1)])}
    dcp.save({name: distribute_tensor(MATRIX, *layout) for name, layout in meshes.items()}, checkpoint_id=folder)


def test_tensors_of_any_layout_are_read_whole_and_in_part(tmp_path: Path) -> None:
    run_world(4, save_sharded, tmp_path / "theirs")
    found = DcpFolder(tmp_path / "theirs")
    assert {name: len(tensor.chunks) for name, tensor in found.tensors.items()} == dict.fromkeys(
        ("rows", "columns", "both"), 4
    )
    for name in found.tensors:
        assert found.read(name).equal(MATRIX)
        assert found.read(name, ((1, 2), (3, 4))).equal(MATRIX[1:4, 2:6])


def test_tensors_and_objects_are_read(folder: Path) -> None:
    found = DcpFolder(folder)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.tensors.items()} == {
        "matrix": ((5, 7), torch.float32), "half": ((5, 7), torch.bfloat16), "scalar": ((), torch.float32),
    }  # fmt: skip
    assert found.read("half").equal(MATRIX.bfloat16()) and found.read("scalar").item() == 3
    assert {name: found.read_value(name) for name in found.objects} == {"run.step": 7, "run.bytes": b"ab"}
    assert found.metadata.planner_data["run.step"] == ("run", "step")


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    write_dcp(tmp_path, [("matrix", MATRIX.t()), ("row", MATRIX[1]), ("run.step", 7)], ("run",))
    state: dict[str, Any] = {"matrix": torch.zeros(7, 5), "row": torch.zeros(7), "run": {"step": 0}}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["matrix"].equal(MATRIX.t()) and state["row"].equal(MATRIX[1]) and state["run"] == {"step": 7}
    assert _load_state_dict_from_keys(checkpoint_id=tmp_path)["run"] == {"step": 7}
    assert (tmp_path / "__0_0.distcp").stat().st_size < 6000  # of the row alone, not of what it is a view of
    assert DcpFolder(tmp_path).read("matrix").equal(MATRIX.t())


def changed_metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        metadata = pickle.loads((folder / METADATA).read_bytes())
        change(metadata)
        (folder / METADATA).write_bytes(pickle.dumps(metadata))

    return apply


def without_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["matrix"].size = torch.Size([6, 7])


def transformed(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]


def elsewhere(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../other.distcp"


def with_code(metadata: Any) -> None:
    metadata.planner_data = Code()


def cut(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 1)


def overwrite(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(bytes((folder / "__0_0.distcp").stat().st_size))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no metadata": (lambda folder: (folder / METADATA).unlink(), "there is no file FOLDER/.metadata"),
    "no shard": (lambda folder: (folder / "__0_0.distcp").unlink(), "FOLDER lacks the file __0_0.distcp"),
    "a short shard": (cut, "FOLDER/__0_0.distcp has "),
    "other bytes": (overwrite, "FOLDER/__0_0.distcp: matrix is damaged"),
    "cut metadata": (lambda folder: os.truncate(folder / METADATA, 100), "FOLDER/.metadata is damaged: "),
    "another pickle": (
        lambda folder: (folder / METADATA).write_bytes(pickle.dumps({"a": 1})),
        "FOLDER/.metadata is not what torch.distributed.checkpoint writes: ",
    ),
    "a part": (changed_metadata(without_chunk), "FOLDER holds only a part of matrix [6, 7]: it lacks [5:6, 0:7]"),
    "transformed": (changed_metadata(transformed), "is stored transformed, by stream.zstd"),
    "elsewhere": (changed_metadata(elsewhere), "FOLDER lacks the file ../other.distcp"),
    "code": (changed_metadata(with_code), "FOLDER: .metadata names posix.mkdir, which is not opened"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_a_damaged_folder_is_refused_in_one_line(damage: str, folder: Path) -> None:
    apply, words = DAMAGE[damage]
    apply(folder)
    with pytest.raises(CheckpointError) as caught:
        DcpFolder(folder).read("matrix")
    assert words.replace("FOLDER", str(folder)) in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.hint


def test_an_object_with_code_is_refused_by_its_class(tmp_path: Path) -> None:
    write_dcp(tmp_path, [("run.step", Code()), ("share", [Fraction(1, 2)])])
    found = DcpFolder(tmp_path)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: run.step names posix.mkdir, which is not"):
        found.read_value("run.step")
    with pytest.raises(CheckpointError, match=r"share names fractions.Fraction"):
        found.read_value("share")


def test_what_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tensor other"):
        DcpFolder(folder).read("other")
    with pytest.raises(CheckpointError, match="has no object matrix"):
        DcpFolder(folder).read_value("matrix")
