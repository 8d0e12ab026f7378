"""Checkpoints: any layout loads any other's, damage is resume_error, nothing is overwritten."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megascale.core.rank import Rank
from tests.runs import FAMILIES, build_run, builds, config_of, gather_weights, settings
from tests.worlds import run_world

SAVERS: dict[str, dict[str, Any]] = {
    "alone fp32": {"parallel__zero": 0, "train__precision": "fp32"},
    "tp2 sp dp2 zero1": {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2},
    "tp2 dp2 zero0 fp32": {
        "parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 0, "train__precision": "fp32",
    },
    "dp4 zero2 fp32": {"parallel__dp": 4, "parallel__zero": 2, "train__precision": "fp32"},
    "pp2 vocabulary dp2": {"parallel__pp": 2, "parallel__vocab_pp": 1, "parallel__dp": 2},
    "tp2 dp2 zero3": {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 3},
    "dp4 in twos zero2": {"parallel__dp": 4, "parallel__dp_shard": 2, "parallel__zero": 2},
    "pp2 vpp2 dp2 zero2": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2},
}  # fmt: skip
"""Layouts that save, by default with bf16 weights and fp32 master weights."""

LOADERS: dict[str, dict[str, Any]] = SAVERS | {
    "pp4 fp32": {"parallel__pp": 4, "train__precision": "fp32"},
    "pp2 v dp2 zero2": {
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "zb_v",
        "parallel__dp": 2,
        "parallel__zero": 2,
    },
    "pp2 dp2 zero3": {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 3},
    "dp4 in twos zero3, state over all": {
        "parallel__dp": 4,
        "parallel__dp_shard": 2,
        "parallel__zero": 3,
        "parallel__state_shard": "all",
    },
    "pp4 vocabulary": {"parallel__pp": 4, "parallel__vocab_pp": 2},
    "dp3 zero1": {"parallel__dp": 3, "batch__global": 9},
    "tp2 sp pp2 zero0": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__zero": 0},
}
"""Layouts that load, each what each of the savers has saved."""
QUICK_LOADERS = ("pp4 fp32", "dp4 in twos zero3, state over all", "dp3 zero1")
"""The chain of test_expert_checkpoints.py has stages on a V, tp with sp, and copies without shards."""


def config_in(folder: Path, family: str = "gpt", **layout: Any) -> Any:
    defaults = {"checkpoint__every": 1, "train__precision": "bf16", "batch__global": 4}
    return config_of(settings(FAMILIES[family], folder, **defaults | layout), folder)


def state_of(run: Any) -> dict[str, list[Any]]:
    """Copy this rank's state: (offset, size, bytes) of every shard, by name."""
    tensors = run.optimizer.global_tensors()
    return {
        name: [(p.offset, p.size, p.data.clone().view(-1).numpy().tobytes()) for p in tensor.shards]
        for name, tensor in tensors.items()
    }


def save_after(rank: Rank, config: Any, steps: int) -> dict[str, list[Any]]:
    """Train, save, and return this rank's state."""
    from megascale.train.step import train_step

    run = build_run(rank, config)
    for _ in range(steps):
        train_step(run, run.train_loader.batch(run.progress.samples))
    run.buffers.finish_param_gather()
    run.checkpoints.save(run.progress)
    return state_of(run)


def load(rank: Rank, config: Any) -> tuple[dict[str, list[Any]], dict[str, int], dict[str, float]]:
    """Resume. Returns this rank's state, the progress, and the sum of magnitudes of every parameter, or of what the
    rank keeps of a bucket's.
    """
    run = build_run(rank, config)
    result = run.checkpoints.resume()
    assert result is not None
    run.optimizer.copy_masters_to_weights()
    gather_weights(run)
    sums = {
        name: float(p.double().abs().sum())
        for chunk in range(len(run.stages))
        for name, p in run.buffers.parameters(chunk).items()
    }
    if config.parallel.zero == 3:
        sums = {bucket.label: float(bucket.weights.double().abs().sum()) for bucket in run.buffers.buckets}
    return state_of(run), vars(result.progress), sums


def assemble(states: list[dict[str, list[Any]]]) -> dict[str, Any]:
    """Assemble global tensors from the shards of all ranks; replicas must agree bit by bit."""
    import numpy as np

    tensors: dict[str, Any] = {}
    for state in states:
        for name, shards in state.items():
            for offset, size, data in shards:
                end = tuple(o + n for o, n in zip(offset, size, strict=True))
                old = tensors.get(name)
                shape = end if old is None else tuple(max(a, b) for a, b in zip(end, old.shape, strict=True))
                grown = np.full(shape, np.nan, dtype=np.float32)
                if old is not None:
                    grown[tuple(slice(n) for n in old.shape)] = old
                place = tuple(slice(o, e) for o, e in zip(offset, end, strict=True))
                numbers = np.frombuffer(data, dtype=np.float32).reshape(size)
                known = ~np.isnan(grown[place])
                assert (grown[place][known] == numbers[known]).all(), f"replicas of {name} differ"
                grown[place] = numbers
                tensors[name] = grown
    return tensors


@pytest.mark.parametrize("family", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "saver", [*(pytest.param(it, marks=pytest.mark.slow) for it in list(SAVERS)[:-1]), list(SAVERS)[-1]]
)
def test_any_layout_loads_any_other(saver: str, family: str, tmp_path: Path) -> None:
    import numpy as np

    config = config_in(tmp_path, family, **SAVERS[saver])
    saved = assemble(run_world(config.world_size, save_after, config, 2))
    assert not any(np.isnan(tensor).any() for tensor in saved.values())
    assert {name.split(".")[0] for name in saved} == {"weights", "exp_avg", "exp_avg_sq"}
    for loader in QUICK_LOADERS if family == "gpt" and saver == list(SAVERS)[-1] else LOADERS:
        other = config_in(tmp_path, family, **LOADERS[loader])
        results = run_world(other.world_size, load, other)
        loaded = assemble([state for state, _, _ in results])
        assert loaded.keys() == saved.keys(), loader
        for name, tensor in saved.items():
            assert np.array_equal(loaded[name], tensor), (loader, name)
        assert all(progress == {"step": 2, "samples": 8, "tokens": 128} for _, progress, _ in results)
        assert all(all(sums.values()) for _, _, sums in results if family == "llama"), "weights were gathered"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that saved after two steps on two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    config = config_in(folder, parallel__tp=2)
    run_world(2, save_after, config, 2)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> tuple[Any, Path]:
    """Configuration and checkpoint folder of a copy of the run, to be damaged."""
    return copied(saved, tmp_path)


def copied(saved: Path, folder: Path) -> tuple[Any, Path]:
    shutil.copytree(saved / "test", folder / "test")
    return config_in(folder, parallel__tp=2), folder / "test" / "checkpoints" / "step-00000002"


def resume_error(rank: Rank, config: Any) -> tuple[str, int]:
    """Text and exit status of the error of a resume."""
    return resume_errors(rank, [config])[0]


def resume_errors(rank: Rank, configs: list[Any]) -> list[tuple[str, int]]:
    """Texts and exit statuses of the errors of resumes of runs of one layout."""
    from megascale.core.errors import CheckpointError

    errors = []
    for run in builds(rank, configs):
        before = state_of(run)
        try:
            run.checkpoints.resume()
            errors.append(("nothing was changed" if state_of(run) == before else "resumed", 0))
        except CheckpointError as error:
            errors.append((str(error), int(error.exit_status)))
    return errors


def damage_error(config: Any) -> str:
    """The error of a resume from a damaged checkpoint, equal on all ranks."""
    return damage_errors([config])[0]


def damage_errors(configs: list[Any]) -> list[str]:
    """The errors of resumes from damaged checkpoints, each equal on all ranks."""
    texts = []
    for errors in zip(*run_world(configs[0].world_size, resume_errors, configs), strict=True):
        assert {status for _, status in errors} == {4}, errors
        ((text, _),) = set(errors)
        texts.append(text)
    return texts


def errors_by_damage(saved: Path, folder: Path, damages: dict[str, Callable[[Path], object]]) -> dict[str, str]:
    """Damage the checkpoint of a copy of the run in each of several ways: the errors of resumes from them, with DAMAGED
    in place of the checkpoint's folder.
    """
    copies = {name: copied(saved, folder / str(number)) for number, name in enumerate(damages)}
    for name, (_, place) in copies.items():
        damages[name](place)
    texts = damage_errors([config for config, _ in copies.values()])
    places = [str(place) for _, place in copies.values()]
    return {name: text.replace(place, "DAMAGED") for name, place, text in zip(copies, places, texts, strict=True)}


def edit(folder: Path, change: Any) -> None:
    """Change a manifest, with a matching CRC-32."""
    from megascale.checkpoint.format import manifest
    from megascale.core.storage import Location

    place = Location(str(folder))
    content = manifest.read(place).model_dump(mode="json", by_alias=True)
    change(content)
    manifest.write(place, manifest.Manifest.model_validate_json(json.dumps(content)))


def rewrite(folder: Path, change: Any) -> None:
    """Change the JSON of a manifest, valid or not, with a matching CRC-32."""
    head, body, _ = (folder / "manifest.json").read_bytes().split(b"\n")
    content = json.loads(body.removesuffix(b"}"))
    change(content)
    text = json.dumps(content).encode()
    head = re.sub(rb'"crc32": \d+', b'"crc32": %d' % zlib.crc32(b"2\n" + text), head)
    (folder / "manifest.json").write_bytes(head + b"\n" + text + b"}\n")


def test_contents_of_a_checkpoint(copy: tuple[Any, Path]) -> None:
    _, folder = copy
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "rank-00000-000.safetensors",
        "rank-00001-000.safetensors",
    ]
    facts = json.loads((folder / "manifest.json").read_text())["manifest"]["facts"]
    assert facts["progress"] == {"step": 2, "samples": 8, "tokens": 128}
    assert facts["layout"] == {"tp": 2, "cp": 1, "dp": 1, "pp": 1}
    assert facts["config"]["model"]["num_layers"] == 4
    assert {"torch", "megascale"} <= facts["versions"].keys()
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert max(sizes) < 1.5 * min(sizes), "the ranks share the writing of replicated tensors"


def test_a_flipped_bit_is_detected(saved: Path, tmp_path: Path) -> None:
    file = "rank-00001-000.safetensors"
    whole_file = (saved / "test/checkpoints/step-00000002" / file).read_bytes()
    header = 8 + int.from_bytes(whole_file[:8], "little")

    def flip(folder: Path, place: int) -> None:
        broken = bytearray(whole_file)
        broken[place] ^= 1 << place % 8
        (folder / file).write_bytes(broken)

    places = range(header, len(whole_file), (len(whole_file) - header) // 5)
    texts = errors_by_damage(saved, tmp_path, {str(place): partial(flip, place=place) for place in places})
    assert len(texts) >= 5 and all(file in text for text in texts.values()), texts


def test_a_truncated_file_is_refused(saved: Path, tmp_path: Path) -> None:
    file = "rank-00000-000.safetensors"

    def cut(folder: Path, end: int) -> None:
        (folder / file).write_bytes((folder / file).read_bytes()[:end])

    texts = errors_by_damage(saved, tmp_path, {str(end): partial(cut, end=end) for end in (0, 7, 1000, -1)})
    assert all(f"DAMAGED/{file}" in text for text in texts.values()), texts


def test_a_missing_file_is_refused(copy: tuple[Any, Path]) -> None:
    config, folder = copy
    (folder / "rank-00001-000.safetensors").unlink()
    assert "rank-00001-000.safetensors" in damage_error(config)


def test_a_damaged_manifest_is_refused(saved: Path, tmp_path: Path) -> None:
    def write(folder: Path, text: str) -> None:
        (folder / "manifest.json").write_text(text)

    manifests = ("", "{", '{"format": 99}', "[]", '{"format": 2}', "\n\n")
    texts = errors_by_damage(saved, tmp_path, {text: partial(write, text=text) for text in manifests})
    assert all("DAMAGED" in text for text in texts.values()), texts


def test_a_missing_tensor_is_refused(copy: tuple[Any, Path]) -> None:
    config, folder = copy
    edit(folder, lambda content: content["tensors"].pop("exp_avg.layers.1.mlp.up.weight"))
    assert f"{folder} has no tensor exp_avg.layers.1.mlp.up.weight" in damage_error(config)


def test_an_incomplete_tensor_is_refused(copy: tuple[Any, Path]) -> None:
    config, folder = copy
    edit(folder, lambda content: content["tensors"]["weights.layers.1.mlp.up.weight"]["boxes"].pop())
    assert f"{folder} holds only a part of weights.layers.1.mlp.up.weight" in damage_error(config)


def test_an_impossible_shard_is_refused(saved: Path, tmp_path: Path) -> None:
    def misplace(folder: Path, where: dict[str, Any]) -> None:
        def change(content: dict[str, Any]) -> None:
            content["tensors"]["weights.layers.1.mlp.up.weight"]["boxes"][0] |= where

        with pytest.raises(ValidationError, match="a shard"):
            edit(folder, change)
        rewrite(folder, change)

    places: list[dict[str, Any]] = [{"offset": [0, -1]}, {"size": [1, 10**9]}, {"size": [8]}, {"start": -8}]
    texts = errors_by_damage(saved, tmp_path, {str(where): partial(misplace, where=where) for where in places})
    expected = "DAMAGED/manifest.json is damaged: tensors.weights.layers.1.mlp.up.weight: Value error, a shard"
    assert all(expected in text for text in texts.values()), texts


def test_another_model_is_refused_by_name(copy: tuple[Any, Path]) -> None:
    config, _ = copy
    folder = Path(config.output_dir)
    other = config_in(folder, parallel__tp=2, model__hidden_size=64, model__activation="gelu_tanh")
    text = damage_error(other)
    assert "hidden_size 32 there, 64 here" in text and "activation gelu there, gelu_tanh here" in text


def test_an_unfinished_attempt_is_never_read_and_is_cleaned_up(copy: tuple[Any, Path]) -> None:
    config, folder = copy
    later = folder.with_name("step-00000009")
    shutil.copytree(folder, later)
    (later / "manifest.json").unlink()
    results = run_world(2, load, config)
    assert all(progress["step"] == 2 for _, progress, _ in results)
    assert not later.exists()


def test_a_used_folder_is_never_written_to(copy: tuple[Any, Path]) -> None:
    config, folder = copy
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run_world(2, save_after, config, 2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    again = folder.with_name("step-00000002.1")
    assert (again / "manifest.json").is_file()
    from megascale.checkpoint.folders import complete_checkpoints
    from megascale.core.storage import Location

    found = complete_checkpoints(Location(str(folder.parent)))
    assert [stored.path.local_path for stored in found] == [folder, again]


def save_twice(rank: Rank, config: Any) -> list[str]:
    """Save steps 1 to 5, twice each. Returns the folders."""
    from megascale.train.step import train_step

    run = build_run(rank, config)
    for _ in range(5):
        train_step(run, run.train_loader.batch(run.progress.samples))
        first, second = run.checkpoints.save(run.progress), run.checkpoints.save(run.progress)
        assert first is not None and second is None
        run.checkpoints.prune()
    run.checkpoints.wait_for_prune()
    run.buffers.finish_param_gather()
    return list(run.checkpoints.folder.list_names())


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    config = config_in(tmp_path, checkpoint__keep=2)
    assert run_world(1, save_twice, config) == [["step-00000004", "step-00000005"]]


def out_of_space(rank: Rank, config: Any) -> tuple[str, list[str]]:
    """Save while rank 1 cannot write more than 1000 bytes, then without the limit."""
    import resource

    from megascale.core.errors import CheckpointError

    run = build_run(rank, config)
    writer = run.checkpoints.saver.writer_pid
    if rank.rank == 1:
        resource.prlimit(writer, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        run.checkpoints.save(run.progress)
        text = "saved"
    except CheckpointError as error:
        text = str(error)
    if rank.rank == 1:
        resource.prlimit(writer, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    again = run.checkpoints.save(run.progress)
    assert again is not None
    return text, run.checkpoints.folder.list_names()


def test_a_rank_that_cannot_write_leaves_nothing(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    for text, folders in run_world(2, out_of_space, config):
        assert text.startswith("rank 1: cannot write") and "rank-00001-000.safetensors" in text
        assert len(folders) == 1, "the failed attempt is gone, the next one is complete"


def test_resume_never_and_nothing_to_resume(saved: Path, tmp_path: Path) -> None:
    never = config_in(tmp_path, parallel__tp=2, checkpoint__resume="never")
    assert run_world(2, resume_error, never) == [("nothing was changed", 0)] * 2
    assert run_world(1, resume_error, config_in(tmp_path)) == [("nothing was changed", 0)]


def test_another_runs_checkpoints_are_not_added_to(saved: Path) -> None:
    """`keep` would count their later steps as newer than the new run's."""
    never = config_in(saved, parallel__tp=2, checkpoint__resume="never")
    text = f"{saved}/test/checkpoints/step-00000002 is there, and checkpoint.resume is never  -> another name"
    for found, status in run_world(2, resume_error, never):
        assert found.startswith(text) and status == 4


def test_resume_from_another_runs_checkpoint(saved: Path, tmp_path: Path) -> None:
    source = saved / "test" / "checkpoints" / "step-00000002"
    config = config_in(tmp_path, checkpoint__resume=str(source))
    ((_, progress, _),) = run_world(1, load, config)
    assert progress["step"] == 2
    assert not (tmp_path / "test" / "checkpoints").exists() or not list((tmp_path / "test" / "checkpoints").iterdir())
    ((_, progress, _),) = run_world(1, load, config_in(tmp_path, checkpoint__resume=str(saved / "test")))
    assert progress["step"] == 2, "a run's folder stands for its newest checkpoint"


def test_nothing_in_a_checkpoint_is_executed(saved: Path) -> None:
    files = [path for path in (saved / "test" / "checkpoints").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}


def blocked(rank: Rank, config: Any) -> list[str]:
    """Save twice where the folder cannot be made. Returns the errors."""
    from megascale.core.errors import CheckpointError

    run, errors = build_run(rank, config), []
    for _ in range(2):
        try:
            run.checkpoints.save(run.progress)
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    config = config_in(tmp_path, parallel__tp=2)
    config.folder.mkdir(parents=True)
    (config.folder / "checkpoints").touch()
    place = config.folder / "checkpoints" / "step-00000000"
    for texts in run_world(2, blocked, config):
        text = f"rank 0: cannot make {place}: Not a directory  -> check that it is mounted, space, permissions"
        assert texts == [text] * 2


def test_only_the_link_to_a_checkpoint_elsewhere_is_removed(tmp_path: Path) -> None:
    from megascale.checkpoint.folders import complete_checkpoints, prune, remove_unfinished
    from megascale.core.storage import Location

    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for place in (folder / "step-2", elsewhere / "full", elsewhere / "empty"):
        place.mkdir(parents=True)
    for place in (folder / "step-2", elsewhere / "full"):
        (place / "manifest.json").touch()
    (folder / "step-1").symlink_to(elsewhere / "full")
    (folder / "step-3").symlink_to(elsewhere / "empty")
    place = Location(str(folder))
    remove_unfinished(place)
    assert [stored.step for stored in complete_checkpoints(place)] == [1, 2]
    prune(place, 1)
    assert [path.name for path in folder.iterdir()] == ["step-2"]
    assert sorted(path.name for path in elsewhere.iterdir()) == ["empty", "full"]
    assert (elsewhere / "full" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("keep", "every", "kept"),
    [
        (0, 0, [10, 20, 30, 40, 50, 60]),
        (0, 20, [10, 20, 30, 40, 50, 60]),
        (1, 0, [60]),
        (2, 30, [30, 50, 60]),
        (1, 20, [20, 40, 60]),
        (9, 0, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_prune_keeps_the_newest_and_every_nth_step(tmp_path: Path, keep: int, every: int, kept: list[int]) -> None:
    from megascale.checkpoint.folders import complete_checkpoints, prune
    from megascale.core.storage import Location

    for step in range(10, 70, 10):
        place = tmp_path / f"step-{step:08d}"
        place.mkdir()
        (place / "manifest.json").touch()
    (tmp_path / "step-00000070").mkdir()  # being written
    prune(Location(str(tmp_path)), keep, every)
    assert [stored.step for stored in complete_checkpoints(Location(str(tmp_path)))] == kept
    assert (tmp_path / "step-00000070").exists()


def test_a_failed_deletion_does_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megascale.checkpoint.folders import complete_checkpoints, prune
    from megascale.core.errors import CheckpointError
    from megascale.core.storage import Location

    for step in range(1, 5):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "manifest.json").touch()
    remove = Location.remove

    def refused(place: Location) -> None:
        if "step-1" in place.url:
            raise PermissionError(13, "Permission denied", str(place))
        remove(place)

    monkeypatch.setattr(Location, "remove", refused)
    with pytest.raises(CheckpointError, match="step-1 cannot be removed: Permission denied"):
        prune(Location(str(tmp_path)), 1)
    assert [stored.step for stored in complete_checkpoints(Location(str(tmp_path)))] == [1, 4]


def changes_of(rank: Rank, config: Any) -> list[str]:
    result = build_run(rank, config).checkpoints.resume()
    assert result is not None
    return result.changes


def test_resume_reports_changes_of_the_configuration(saved: Path) -> None:
    same = config_in(saved, parallel__tp=2)
    assert run_world(2, changes_of, config_in(saved, parallel__pp=2, checkpoint__keep=3)) == [[]] * 2
    other = config_in(saved, parallel__tp=2, train__seed=5, optimizer__weight_decay=0.25)
    decay = same.optimizer.weight_decay
    expected = [f"train.seed {same.train.seed} -> 5", f"optimizer.weight_decay {decay} -> 0.25"]
    assert run_world(2, changes_of, other) == [expected] * 2
