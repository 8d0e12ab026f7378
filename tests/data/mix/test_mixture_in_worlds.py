"""Every rank of a real world reads the same samples, by indices that one of them builds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megascale.config.run import RunConfig
from megascale.core.errors import Exit
from megascale.core.rank import Rank
from tests.data.datasets import data_config, mixture_of, write_dataset
from tests.jobs import Job, curve, finish, job_config
from tests.runs import GPT
from tests.worlds import run_world


def read_everywhere(rank: Rank, config: RunConfig) -> tuple[list[list[int]], int]:
    """Return the samples that a rank reads, and the number of indices that it builds, all of which are files."""
    from megascale.data.read import index_files
    from megascale.data.read.epoch_index import IndexShape

    build, built = IndexShape.build, []
    IndexShape.build = lambda *arguments: built.append(arguments) or build(*arguments)  # type: ignore[method-assign]
    index_files.MEMORY_ENTRIES = 0
    samples = mixture_of(config)
    read = [[*samples[i].tokens.tolist(), int(samples[i].labels[-1])] for i in range(40)]
    return read, len(built)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_read_the_same_samples_by_indices_that_are_built_once(tmp_path: Path, world: int) -> None:
    lengths = [13, 5, 1, 40, 8, 9, 30, 2, 21]
    write_dataset(tmp_path / "a", lengths)
    write_dataset(tmp_path / "b", lengths, first=1000)
    config = data_config(tmp_path, [(0.7, tmp_path / "a"), (0.3, tmp_path / "b")])
    answers = run_world(world, read_everywhere, config)
    assert all(read == answers[0][0] for read, _ in answers)
    assert {row[0] >= 1000 for row in answers[0][0]} == {True, False}
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    files = [name for name in names if name.endswith(".index")]
    assert sum(built for _, built in answers) == len(files) > 0
    assert len(names) == 2 * len(files), "one process has checked each"


@pytest.mark.slow
@pytest.mark.parametrize("sources", ["one", "blend"])
def test_a_small_dataset_is_repeated_while_training(tmp_path: Path, sources: str) -> None:
    """With 2 samples an epoch and 8 a step, all ranks read epochs that rank 0 has just written, also after a resume."""
    write_dataset(tmp_path / "a", [20, 13])
    write_dataset(tmp_path / "b", [30, 31], first=40)
    for made in tmp_path.glob("*.json"):
        made.unlink()  # the description has a larger vocabulary than the model
    train = str(tmp_path / "a") if sources == "one" else [[0.7, str(tmp_path / "a")], [0.3, str(tmp_path / "b")]]
    data = {"data__mock": False, "data__train": train, "data__split": [1.0, 0.0], "train__precision": "fp64"}
    curves = {}
    for name, layout in {"alone": {}, "dp2": {"parallel__dp": 2}, "pp2": {"parallel__pp": 2}}.items():
        (tmp_path / name).mkdir()
        overrides = data | layout | {"data__cache": str(tmp_path / name / "cache"), "checkpoint__every": 6}
        config = job_config(tmp_path / name, GPT, **overrides, train__steps=12)
        finish(config, "train.steps=7")
        curves[name] = curve(finish(config))
    for layout in ("dp2", "pp2"):
        for (_, loss, norm), (_, expected, expected_norm) in zip(curves[layout], curves["alone"], strict=True):
            assert loss == pytest.approx(expected, rel=1e-10) and norm == pytest.approx(expected_norm, rel=1e-8)


LAYOUTS = {"alone": {}, "tp2": {"parallel__tp": 2}, "pp2": {"parallel__pp": 2}, "dp2": {"parallel__dp": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("token", [-1, 101])
def test_every_layout_finds_a_token_outside_the_vocabulary(token: int, tmp_path: Path) -> None:
    """One sample of the first step has the token, once as a token and once as a label."""
    prefix = tmp_path / "set"
    write_dataset(prefix, [8 * 16 + 1])
    (tmp_path / "set.json").unlink()
    ids = np.arange(8 * 16 + 1, dtype=np.int32) % 101
    ids[100] = token
    ids.tofile(tmp_path / "set.bin")
    index = bytearray((tmp_path / "set.idx").read_bytes())
    index[17] = 4  # i32
    (tmp_path / "set.idx").write_bytes(index)
    messages = {}
    for name, layout in LAYOUTS.items():
        (tmp_path / name).mkdir()
        data = {"data__mock": False, "data__train": str(prefix), "data__split": [1.0, 0.0]}
        status, _, err = Job(job_config(tmp_path / name, GPT, **data, **layout, train__seed=1)).end()
        assert status == Exit.DATA, err
        (messages[name],) = set(re.findall(r"sample \d+, from .*", err))
    assert len(set(messages.values())) == 1, messages
    assert f"has token {token}; model.vocab_size is 101  -> " in messages["alone"]
