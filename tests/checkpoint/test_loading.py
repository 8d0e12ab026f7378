"""Resuming loads the newest intact checkpoint, and reads only the bytes that a rank needs."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint.format import manifest
from megascale.core.rank import Rank
from megascale.core.storage import Location
from tests.checkpoint.test_checkpoints import config_in, save_after
from tests.marks import only_quick_rows
from tests.runs import build_run
from tests.worlds import run_world


def save_each_step(rank: Rank, config: Any, steps: int) -> None:
    from megascale.train.step import train_step

    run = build_run(rank, config)
    for _ in range(steps):
        train_step(run, run.train_loader.batch(run.progress.samples))
        run.buffers.finish_param_gather()
        run.checkpoints.save(run.progress)


def loaded_checkpoint(rank: Rank, config: Any) -> tuple[str, list[str]] | str:
    """Name of the loaded folder, and the warnings; or the error."""
    from megascale.core.errors import CheckpointError

    checkpoints = build_run(rank, config).checkpoints
    try:
        result = checkpoints.resume()
    except CheckpointError as error:
        return str(error)
    return (result.path.name, checkpoints.warnings) if result else ""


def flip(path: Path) -> None:
    """Flip the last bit of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_newest_intact_checkpoint_is_loaded(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    run_world(2, save_each_step, config, 3)
    folder = config.folder / "checkpoints"
    flip(folder / "step-00000003/rank-00001-000.safetensors")
    (folder / "step-00000002/manifest.json").write_text("{")
    for name, damaged in run_world(2, loaded_checkpoint, config):
        assert name == "step-00000001"
        first, second = damaged
        assert f"{folder}/step-00000003/rank-00001-000.safetensors: " in first and "does not match" in first
        assert f"{folder}/step-00000002/manifest.json is damaged" in second
    (folder / "step-00000001/rank-00000-000.safetensors").unlink()
    texts = set(run_world(2, loaded_checkpoint, config))
    assert len(texts) == 1 and "step-00000003/rank-00001-000.safetensors" in texts.pop()


def test_the_newest_intact_checkpoint_of_another_run_is_loaded(tmp_path: Path) -> None:
    run_world(1, save_each_step, config_in(tmp_path / "other"), 2)
    other = tmp_path / "other/test"
    flip(other / "checkpoints/step-00000002/rank-00000-000.safetensors")
    config = config_in(tmp_path, checkpoint__resume=str(other))
    ((name, damaged),) = run_world(1, loaded_checkpoint, config)
    assert name == "step-00000001" and "step-00000002/rank-00000-000.safetensors: " in damaged[0]
    config = config_in(tmp_path, checkpoint__resume=str(other / "checkpoints/step-00000002"))
    (text,) = run_world(1, loaded_checkpoint, config)
    assert text.startswith("no checkpoint is intact: ")


@pytest.mark.parametrize(
    ("known", "lost"),
    only_quick_rows(
        itertools.product(["by saving", "by resuming"], ["all", "manifest"]),
        ("by saving", "manifest"),
        ("by resuming", "all"),
    ),
)
def test_a_run_with_lost_checkpoints_does_not_start_afresh(lost: str, known: str, tmp_path: Path) -> None:
    config = config_in(tmp_path, checkpoint__dir=str(tmp_path / "mounted"))
    config.folder.mkdir()
    run_world(1, save_each_step, config, 1)
    if known == "by resuming":  # on another host, whose run folder is empty
        shutil.rmtree(config.folder)
        config.folder.mkdir()
        assert run_world(1, loaded_checkpoint, config) == [("step-00000001", [])]
    (folder,) = Path(config.checkpoint_folder).glob("step-*")
    away = tmp_path / "away"
    (folder if lost == "all" else folder / "manifest.json").rename(away)
    (text,) = run_world(1, loaded_checkpoint, config)
    assert text == (
        f"the run has had checkpoints in {folder.parent}, and {folder.parent} has no complete one"
        "  -> mount or restore it, or start afresh under another name"
    )
    assert lost == "all" or list(folder.iterdir()), "the remaining files stay"
    if lost == "all":
        other = config_in(tmp_path, checkpoint__dir=config.checkpoint.dir, checkpoint__resume=str(away))
        assert run_world(1, loaded_checkpoint, other) == [text], "nor from `checkpoint.resume`"
    away.rename(folder if lost == "all" else folder / "manifest.json")
    assert run_world(1, loaded_checkpoint, config) == [("step-00000001", [])]


def test_a_save_elsewhere_does_not_make_a_lost_run_folder_anew(tmp_path: Path) -> None:
    """As under an unmounted file system: what the next start found there would be another run."""
    config = config_in(tmp_path, checkpoint__dir=str(tmp_path / "elsewhere"))
    run_world(1, save_each_step, config, 1)
    assert list(Path(config.checkpoint_folder).glob("step-*")) and not config.folder.exists()


def resume_without_storage(rank: Rank, config: Any) -> tuple[str, list[str]] | str:
    """Resume while rank 1 cannot read from storage."""

    def read_into(place: Location, room: memoryview, start: int) -> int:
        if rank.rank == 1 and "step-00000002" in place.url:
            raise ConnectionResetError(104, "Connection reset by peer", place.url)
        return plain(place, room, start)

    plain, Location.read_into = Location.read_into, read_into  # type: ignore[method-assign]
    return loaded_checkpoint(rank, config)


def test_unreachable_storage_is_not_damage(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    run_world(2, save_each_step, config, 2)
    for text in run_world(2, resume_without_storage, config):
        assert re.match(r"rank 1: \S+/step-00000002/\S+ cannot be read: Connection reset by peer", text), text
        assert "damaged" not in text and "lost" not in text, "nothing is known but that it cannot be read"
    assert {found[0] for found in run_world(2, loaded_checkpoint, config)} == {"step-00000002"}


def resume_with_an_error_on_rank_1(rank: Rank, config: Any) -> tuple[str, list[str]] | str:
    """Resume with an unexpected error on rank 1."""
    from megascale.checkpoint.load.reader import CheckpointReader

    def broken(*_: Any) -> Any:
        raise KeyError("what")

    if rank.rank == 1:
        CheckpointReader._read_range = broken  # type: ignore[method-assign]
    return loaded_checkpoint(rank, config)


def test_an_unexpected_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    run_world(2, save_each_step, config, 1)
    assert run_world(2, resume_with_an_error_on_rank_1, config) == ["rank 1: KeyError: 'what'"] * 2


def resume_without_deleting(rank: Rank, config: Any) -> tuple[str, list[str]] | str:
    """Resume without permission to delete."""

    def refused(place: Location) -> None:
        raise PermissionError(13, "Permission denied", place.url)

    Location.remove = refused  # type: ignore[method-assign]
    return loaded_checkpoint(rank, config)


def test_an_attempt_that_cannot_be_deleted_is_a_warning(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    run_world(2, save_each_step, config, 2)
    folder = config.folder / "checkpoints"
    (folder / "step-00000002/manifest.json").unlink()
    warnings = [f"{folder}/step-00000002 cannot be removed: Permission denied"]
    assert run_world(2, resume_without_deleting, config) == [("step-00000001", warnings)] * 2


def test_a_manifest_of_another_checkpoint_is_detected(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run_world(1, save_each_step, config, 2)
    folder = config.folder / "checkpoints"
    (folder / "step-00000002/manifest.json").write_bytes((folder / "step-00000001/manifest.json").read_bytes())
    ((name, (damaged,)),) = run_world(1, loaded_checkpoint, config)
    assert name == "step-00000001" and "step-00000002/rank-00000-000.safetensors" in damaged


def test_any_flipped_bit_of_a_manifest_is_damage(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    run_world(2, save_each_step, config, 1)
    folder = Location(str(config.folder / "checkpoints/step-00000001"))
    text = (folder / manifest.NAME).read()
    assert text.startswith(b'{"format": ')  # the number of the format is among the first 200 bytes
    for place in {*range(200), *range(200, len(text), 509), len(text) - 2, len(text) - 1}:
        for bit in range(8):
            broken = bytearray(text)
            broken[place] ^= 1 << bit
            with pytest.raises(manifest.DamagedError):
                manifest.parse(folder, bytes(broken))


def read(rank: Rank, config: Any) -> tuple[int, list[str]]:
    """Bytes read by all ranks, and the sum of every flat tensor on this rank."""
    run = build_run(rank, config)
    result = run.checkpoints.resume()
    assert result is not None
    flats = [flat for shard in run.optimizer.shards for flat in (shard.master, *shard.state.values())]
    return result.bytes, [flat.double().sum().item().hex() for flat in flats]


def stored(config: Any) -> dict[str, int]:
    """Bytes of every tensor of a run's checkpoint."""
    made = manifest.read(Location(str(config.folder / "checkpoints/step-00000001")))
    itemsize = {"float32": 4}
    sizes = {}
    for name, tensor in made.tensors.items():
        count = 1
        for size in tensor.shape:
            count *= size
        sizes[name] = count * itemsize[tensor.dtype]
    return sizes


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"parallel__dp": 2, "parallel__zero": 0}, marks=pytest.mark.slow),
        {"parallel__dp": 2, "parallel__zero": 1},
        pytest.param({"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2}, marks=pytest.mark.slow),
        {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 0},
        pytest.param({"parallel__tp": 2, "parallel__sp": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_read_one_copy_together(layout: dict[str, Any], tmp_path: Path) -> None:
    config = config_in(tmp_path, "llama", **layout)
    run_world(config.world_size, save_after, config, 1)
    sizes = stored(config)
    ranks = run_world(config.world_size, read, config)
    assert {count for count, _ in ranks} == {sum(sizes.values())}
    if layout.get("parallel__zero") == 0:
        sums = [rank_sums for _, rank_sums in ranks]
        half = len(sums) // 2  # ranks of one replica
        assert sums[:half] == sums[half:], "both replicas are complete"


def test_a_rank_reads_only_the_chunks_that_it_needs(tmp_path: Path) -> None:
    """Ranks that share the rows of a wide matrix do not read each other's chunks."""
    import torch

    from megascale.checkpoint import offline
    from megascale.checkpoint.load.reader import CheckpointReader, ReadRequest

    tensor = torch.arange(3 << 20, dtype=torch.float32).view(3, 1 << 20)  # 16 chunks a row
    offline.write_state(tmp_path, [("weights.wide", tensor)], {})
    folder = Location(str(tmp_path))
    saved = manifest.read(folder)
    (shard,) = saved.tensors["weights.wide"].shards

    def read(*regions: Any) -> tuple[list[Any], int]:
        reader, found = CheckpointReader(folder, saved), [torch.empty(size) for _, size in regions]
        reader.read([ReadRequest("weights.wide", shard, list(zip(regions, found, strict=True)))])
        return found, reader.bytes_read

    for first, count, size in ((0, 1, 4 << 20), (1, 2, 8 << 20), (2, 1, 4 << 20)):
        (found,), count_read = read(((first, 0), (count, 1 << 20)))
        assert count_read == size and torch.equal(found, tensor[first : first + count])
    (some, few), count_read = read(((0, 5), (3, 7)), ((1, 0), (1, 2)))
    assert count_read == 33 * (256 << 10), "from the first to the last"
    assert torch.equal(some, tensor[:, 5:12]) and torch.equal(few, tensor[1:2, :2])


def test_tensors_of_several_dtypes_share_a_file(tmp_path: Path) -> None:
    import torch

    from megascale.checkpoint import offline

    tensors = {"a": torch.arange(3, dtype=torch.bfloat16), "b": torch.arange(5.0), "c": torch.ones(2, 2).double()}
    offline.write_state(tmp_path, ((f"weights.{name}", tensor) for name, tensor in tensors.items()), {})
    folder = Location(str(tmp_path))
    saved = manifest.read(folder)
    for name, tensor in tensors.items():
        assert torch.equal(offline.read_tensor(folder, saved, f"weights.{name}"), tensor)
    assert list(offline.verify(folder, saved)) == []


def test_no_file_is_larger_than_file_bytes(tmp_path: Path) -> None:
    config = config_in(tmp_path, checkpoint__max_file_bytes=65_536)
    run_world(1, save_each_step, config, 1)
    folder = config.folder / "checkpoints/step-00000001"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3 and files[1].name == "rank-00000-001.safetensors"
    assert all(path.stat().st_size <= 65_536 for path in files)
    ((name, damaged),) = run_world(1, loaded_checkpoint, config)
    assert name == "step-00000001" and not damaged


@pytest.mark.parametrize(
    ("layout", "qk_norm"),
    [
        ({"parallel__tp": 2}, "full"),
        pytest.param({"parallel__tp": 4}, "none", marks=pytest.mark.slow),
        ({"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2}, "head"),
    ],
    ids=str,
)
def test_ranks_read_one_copy_in_another_layout(layout: dict[str, Any], qk_norm: str, tmp_path: Path) -> None:
    small = {"model__num_kv_heads": 4, "model__vocab_size": 256, "model__qk_norm": qk_norm}
    config = config_in(tmp_path, "llama", **small)
    run_world(1, save_after, config, 1)
    other = config_in(tmp_path, "llama", **small | layout)
    assert {count for count, _ in run_world(other.world_size, read, other)} == {sum(stored(config).values())}


def test_checkpoints_in_another_place_than_the_last_are_told(tmp_path: Path) -> None:
    config = config_in(tmp_path, checkpoint__dir=str(tmp_path / "old"))
    config.folder.mkdir()
    run_world(1, save_each_step, config, 1)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    moved = config_in(tmp_path, checkpoint__dir=str(tmp_path / "new"))
    ((name, warnings),) = run_world(1, loaded_checkpoint, moved)
    place = Path(moved.checkpoint_folder) / name
    assert warnings == [f"the run saved last in {config.checkpoint_folder}, and resumes from {place}"]


@pytest.mark.parametrize(("step", "told"), [(1, True), (2, False)])
def test_an_older_checkpoint_of_the_run_that_is_not_read_is_told(step: int, told: bool, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run_world(1, save_each_step, config, 2)
    named = f"{config.folder}/checkpoints/step-{step:08}"
    ((name, warnings),) = run_world(1, loaded_checkpoint, config_in(tmp_path, checkpoint__resume=named))
    assert name == "step-00000002"
    assert [f"checkpoint.resume = {named} is not read" in warning for warning in warnings] == [True] * told
