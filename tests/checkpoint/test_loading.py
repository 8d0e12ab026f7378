"""Which checkpoint is loaded, what of it is read, and by whom."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint import manifest
from megascale.checkpoint.storage import Location
from megascale.core.rank import Rank
from tests.checkpoint.test_checkpoints import config_in, save_after
from tests.runs import build_run
from tests.worlds import run_world


def save_each_step(rank: Rank, config: Any, steps: int) -> None:
    from megascale.train.step import train_step

    run = build_run(rank, config)
    for _ in range(steps):
        train_step(run, run.train.batch(run.progress.samples))
        run.gradients.finish_gather()
        run.checkpoints.save(run.progress)


def resumed(rank: Rank, config: Any) -> tuple[str, list[str]] | str:
    """The folder that was loaded, and what is said of those that were not; or the error."""
    from megascale.core.errors import CheckpointError

    checkpoints = build_run(rank, config).checkpoints
    try:
        found = checkpoints.resume()
    except CheckpointError as error:
        return str(error)
    return (found.path.name, checkpoints.warnings) if found else ""


def flip(path: Path) -> None:
    """Change the last bit of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_newest_that_is_right_is_loaded(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    run_world(2, save_each_step, config, 3)
    folder = config.folder / "checkpoints"
    flip(folder / "step-00000003/rank-00001-000.safetensors")
    (folder / "step-00000002/manifest.json").write_text("{")
    for name, damaged in run_world(2, resumed, config):
        assert name == "step-00000001"
        first, second = damaged
        assert f"{folder}/step-00000003/rank-00001-000.safetensors: " in first and "is not what was written" in first
        assert f"{folder}/step-00000002/manifest.json is damaged" in second
    (folder / "step-00000001/rank-00000-000.safetensors").unlink()
    texts = set(run_world(2, resumed, config))
    assert len(texts) == 1 and "step-00000003/rank-00001-000.safetensors" in texts.pop()


def test_of_another_run_the_newest_that_is_right_is_loaded(tmp_path: Path) -> None:
    run_world(1, save_each_step, config_in(tmp_path / "other"), 2)
    other = tmp_path / "other/test"
    flip(other / "checkpoints/step-00000002/rank-00000-000.safetensors")
    config = config_in(tmp_path, checkpoint__resume=str(other))
    ((name, damaged),) = run_world(1, resumed, config)
    assert name == "step-00000001" and "step-00000002/rank-00000-000.safetensors: " in damaged[0]
    config = config_in(tmp_path, checkpoint__resume=str(other / "checkpoints/step-00000002"))
    (text,) = run_world(1, resumed, config)
    assert text.startswith("no checkpoint is right: ")


@pytest.mark.parametrize("lost", ["all", "manifest"])
@pytest.mark.parametrize("known", ["by saving", "by resuming"])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(lost: str, known: str, tmp_path: Path) -> None:
    config = config_in(tmp_path, checkpoint__dir=str(tmp_path / "mounted"))
    run_world(1, save_each_step, config, 1)
    if known == "by resuming":  # on another host, with another file system for what runs say
        shutil.rmtree(config.folder)
        assert run_world(1, resumed, config) == [("step-00000001", [])]
    (folder,) = Path(config.checkpoints).glob("step-*")
    away = tmp_path / "away"
    (folder if lost == "all" else folder / "manifest.json").rename(away)
    (text,) = run_world(1, resumed, config)
    assert text == (
        f"the run has had checkpoints in {folder.parent}, and {folder.parent} has no complete one"
        "  -> mount or restore it, or begin anew under another name"
    )
    assert lost == "all" or list(folder.iterdir()), "what is left stays"
    if lost == "all":
        other = config_in(tmp_path, checkpoint__dir=config.checkpoint.dir, checkpoint__resume=str(away))
        assert run_world(1, resumed, other) == [text], "nor from what it began with"
    away.rename(folder if lost == "all" else folder / "manifest.json")
    assert run_world(1, resumed, config) == [("step-00000001", [])]


def unanswered(rank: Rank, config: Any) -> tuple[str, list[str]] | str:
    """A resume from storage of which one rank hears nothing."""

    def read_into(place: Location, room: memoryview, start: int) -> int:
        if rank.rank == 1 and "step-00000002" in place.url:
            raise ConnectionResetError(104, "Connection reset by peer", place.url)
        return plain(place, room, start)

    plain, Location.read_into = Location.read_into, read_into  # type: ignore[method-assign]
    return resumed(rank, config)


def test_storage_that_does_not_answer_is_no_damage(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    run_world(2, save_each_step, config, 2)
    for text in run_world(2, unanswered, config):
        assert re.match(r"rank 1: \S+/step-00000002/\S+ cannot be read: Connection reset by peer", text), text
        assert "nothing was lost" in text
    assert {found[0] for found in run_world(2, resumed, config)} == {"step-00000002"}


def fails_alone(rank: Rank, config: Any) -> tuple[str, list[str]] | str:
    """A resume in which something that nobody thought of goes wrong on one rank."""
    from megascale.checkpoint.reader import Reader

    def spoilt(*_: Any) -> Any:
        raise KeyError("what")

    if rank.rank == 1:
        Reader._bytes = spoilt  # type: ignore[method-assign]
    return resumed(rank, config)


def test_what_goes_wrong_on_one_rank_ends_all(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    run_world(2, save_each_step, config, 1)
    assert run_world(2, fails_alone, config) == ["rank 1: KeyError: 'what'"] * 2


def left_over(rank: Rank, config: Any) -> tuple[str, list[str]] | str:
    """A resume that may not delete."""

    def refused(place: Location) -> None:
        raise PermissionError(13, "Permission denied", place.url)

    Location.remove = refused  # type: ignore[method-assign]
    return resumed(rank, config)


def test_an_attempt_that_cannot_be_deleted_is_in_nobodys_way(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    run_world(2, save_each_step, config, 2)
    folder = config.folder / "checkpoints"
    (folder / "step-00000002/manifest.json").unlink()
    said = [f"{folder}/step-00000002 cannot be removed: Permission denied"]
    assert run_world(2, left_over, config) == [("step-00000001", said)] * 2


def test_a_manifest_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run_world(1, save_each_step, config, 2)
    folder = config.folder / "checkpoints"
    (folder / "step-00000002/manifest.json").write_bytes((folder / "step-00000001/manifest.json").read_bytes())
    ((name, (damaged,)),) = run_world(1, resumed, config)
    assert name == "step-00000001" and "step-00000002/rank-00000-000.safetensors" in damaged


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run_world(1, save_each_step, config, 1)
    folder = Location(str(config.folder / "checkpoints/step-00000001"))
    text = (folder / manifest.NAME).read()
    for place in range(0, len(text), 97):
        broken = bytearray(text)
        broken[place] ^= 1 << place % 8
        with pytest.raises(manifest.CheckpointError):
            manifest.parse(folder, bytes(broken))


def read(rank: Rank, config: Any) -> tuple[int, list[str]]:
    """How many bytes all ranks have read; and checksums of what this one holds, whole."""
    run = build_run(rank, config)
    found = run.checkpoints.resume()
    assert found is not None
    flats = [flat for shard in run.optimizer.shards for flat in (shard.master, *shard.state.values())]
    return found.bytes, [flat.double().sum().item().hex() for flat in flats]


def stored(config: Any) -> dict[str, int]:
    """Bytes of each tensor of a run's checkpoint."""
    made = manifest.read(Location(str(config.folder / "checkpoints/step-00000001")))
    sizes = {"float32": 4}
    found = {}
    for name, tensor in made.tensors.items():
        count = 1
        for size in tensor.shape:
            count *= size
        found[name] = count * sizes[tensor.dtype]
    return found


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__dp": 2, "parallel__zero": 0},
        {"parallel__dp": 2, "parallel__zero": 1},
        {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2},
        {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 0},
        {"parallel__tp": 2, "parallel__sp": True},
    ],
    ids=str,
)
def test_one_copy_is_read(layout: dict[str, Any], tmp_path: Path) -> None:
    config = config_in(tmp_path, "llama", **layout)
    run_world(config.world, save_after, config, 1)
    sizes = stored(config)
    ranks = run_world(config.world, read, config)
    assert {count for count, _ in ranks} == {sum(sizes.values())}
    if layout.get("parallel__zero") == 0:
        held = [sums for _, sums in ranks]
        each = len(held) // 2  # ranks of one copy
        assert held[:each] == held[each:], "both copies are whole"


def test_the_bytes_that_a_rank_needs_are_read(tmp_path: Path) -> None:
    """A wide matrix whose rows two ranks share: neither reads the other's chunks."""
    import torch

    from megascale.checkpoint import whole
    from megascale.checkpoint.reader import Reader, Wanted

    tensor = torch.arange(3 << 20, dtype=torch.float32).view(3, 1 << 20)  # 16 chunks a row
    whole.write(tmp_path, [("wide", tensor)], {})
    folder = Location(str(tmp_path))
    saved = manifest.read(folder)
    (box,) = saved.tensors["weights.wide"].boxes

    def read(*parts: Any) -> tuple[list[Any], int]:
        reader = Reader(folder, saved)
        ((_, found),) = reader.read([Wanted("weights.wide", box, parts)])
        return found, reader.bytes

    for first, count, size in ((0, 1, 4 << 20), (1, 2, 8 << 20), (2, 1, 4 << 20)):
        (found,), count_read = read(((first, 0), (count, 1 << 20)))
        assert count_read == size and torch.equal(found, tensor[first : first + count])
    (some, few), count_read = read(((0, 5), (3, 7)), ((1, 0), (1, 2)))
    assert count_read == 33 * (256 << 10), "from the first to the last"
    assert torch.equal(some, tensor[:, 5:12]) and torch.equal(few, tensor[1:2, :2])


def test_tensors_of_any_format_lie_side_by_side(tmp_path: Path) -> None:
    import torch

    from megascale.checkpoint import whole

    tensors = {"a": torch.arange(3, dtype=torch.bfloat16), "b": torch.arange(5.0), "c": torch.ones(2, 2).double()}
    whole.write(tmp_path, tensors.items(), {})
    folder = Location(str(tmp_path))
    saved = manifest.read(folder)
    for name, tensor in tensors.items():
        assert torch.equal(whole.read_tensor(folder, saved, f"weights.{name}"), tensor)
    assert list(whole.verify(folder, saved)) == []


def test_files_and_boxes_are_no_larger_than_asked(tmp_path: Path) -> None:
    config = config_in(tmp_path, checkpoint__file_bytes=65_536)
    run_world(1, save_each_step, config, 1)
    folder = config.folder / "checkpoints/step-00000001"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3 and files[1].name == "rank-00000-001.safetensors"
    assert all(path.stat().st_size <= 65_536 for path in files)
    ((name, damaged),) = run_world(1, resumed, config)
    assert name == "step-00000001" and not damaged


@pytest.mark.parametrize(
    "layout",
    [{"parallel__tp": 2}, {"parallel__tp": 4}, {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2}],
    ids=str,
)
def test_one_copy_is_read_in_another_layout(layout: dict[str, Any], tmp_path: Path) -> None:
    small = {"model__num_kv_heads": 4, "model__vocab_size": 256}
    config = config_in(tmp_path, "llama", **small)
    run_world(1, save_after, config, 1)
    other = config_in(tmp_path, "llama", **small | layout)
    assert {count for count, _ in run_world(other.world, read, other)} == {sum(stored(config).values())}
