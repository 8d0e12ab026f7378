"""Datasets in an object store: a server of this host that speaks S3, of whose requests 20% fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.config.loading import load_config
from megascale.core.storage import Location
from megascale.data.mix.mixture import Mixture
from megascale.data.read import block_cache
from megascale.train.run_splits import mixture_spec
from tests.data.datasets import data_config, write_dataset
from tests.runs import GPT, settings, write_config
from tests.s3_server import FailingStore, s3_server

READER = """
import sys
from megascale.config.loading import load_config
from megascale.data.read import block_cache
from megascale.data.mix.mixture import Mixture
from megascale.train.run_splits import mixture_spec
block_cache.BLOCK_BYTES = 1000
samples = Mixture(mixture_spec(load_config(sys.argv[1], []), "train"))
print([samples[index].tokens.tolist() for index in range(300)])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FailingStore, dict[str, str]]]:
    with s3_server() as found:
        yield found


@pytest.fixture
def store(server: tuple[FailingStore, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingStore]:
    store, env = server
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    store.sent.clear()
    store.failed = 0
    yield store
    store.failing_share = 0.0


def upload(folder: Path, *names: str) -> None:
    for name in names:
        for ending in (".bin", ".idx", ".json"):
            Location(f"s3://bucket/sets/{name}{ending}").write((folder / f"{name}{ending}").read_bytes())


def run_config(folder: Path) -> str:
    """The path of a configuration of a blend of two remote datasets of 187 and 62 samples."""
    tree = settings(GPT | {"vocab_size": 60_000, "seq_length": 16}, folder / "runs", data__mock=False, train__steps=3)
    train = [[0.7, "s3://bucket/sets/a"], [0.3, "s3://bucket/sets/b"]]
    tree["data"] |= {"train": train, "split": [1.0, 0.0], "cache": str(folder / "cache")}
    tree["optimizer"]["warmup_steps"] = 1
    return str(write_config(tree, folder / "run.toml"))


def local_samples(folder: Path) -> list[list[int]]:
    """Write two datasets, upload them, and return the samples of the blend of `run_config`, read from the disk."""
    lengths = [7, 30, 3, 60] * 30
    write_dataset(folder / "a", lengths)
    write_dataset(folder / "b", lengths[:40], first=10_000)
    upload(folder, "a", "b")
    config = data_config(folder, [(0.7, folder / "a"), (0.3, folder / "b")], model__seq_length=16)
    samples = Mixture(mixture_spec(config, "train"))
    return [samples[index].tokens.tolist() for index in range(300)]


def assert_each_byte_was_sent_once(store: FailingStore, folder: Path) -> None:
    for name in ("a", "b"):
        assert store.sent[f"/bucket/sets/{name}.bin"] == (folder / f"{name}.bin").stat().st_size


def test_samples_are_those_of_the_disk_while_requests_fail(
    store: FailingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = local_samples(tmp_path)
    monkeypatch.setattr(block_cache, "BLOCK_BYTES", 1000)
    store.sent.clear()
    store.failing_share = 0.2
    samples = Mixture(mixture_spec(load_config(run_config(tmp_path), []), "train"))
    assert [samples[index].tokens.tolist() for index in range(300)] == expected
    assert store.failed > 3
    assert_each_byte_was_sent_once(store, tmp_path)


def test_blocks_of_all_datasets_are_fetched_together(
    store: FailingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of each of two files: at once, by the threads of one pool, with a call after each."""
    local_samples(tmp_path)
    samples, fetch = Mixture(mixture_spec(load_config(run_config(tmp_path), []), "train")), block_cache.fetch
    for index in range(16):
        samples.open(index)
    at_once, done, before = threading.Barrier(2, timeout=10), [], set(threading.enumerate())

    def together(location: Location, start: int, count: int) -> bytes:
        at_once.wait()
        return fetch(location, start, count)

    monkeypatch.setattr(block_cache, "fetch", together)
    samples.fetch(range(16), lambda: done.append(1))
    new = set(threading.enumerate()) - before  # another test may leave a thread that starts later
    pool = [thread for thread in new if thread.name.startswith("fetch blocks")]
    assert len(done) == len(pool) == 2


@pytest.mark.slow
def test_processes_of_a_host_read_each_block_once_while_requests_fail(store: FailingStore, tmp_path: Path) -> None:
    expected = local_samples(tmp_path)
    store.sent.clear()
    store.failing_share = 0.2
    command = [sys.executable, "-c", READER, run_config(tmp_path)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [reader.communicate()[0] for reader in readers]
    assert [json.loads(answer) for answer in answers] == [expected] * 4
    assert store.failed > 10
    assert_each_byte_was_sent_once(store, tmp_path)
    places = [path for path in (tmp_path / "cache" / "remote").iterdir() if path.is_dir()]
    assert sorted(path.name.rpartition("-")[0] for path in places) == ["a.bin", "a.idx", "b.bin", "b.idx"]


def test_check_inspect_and_prepare_take_urls(
    store: FailingStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "a", [7, 30, 3, 60] * 30)
    write_dataset(tmp_path / "b", [50] * 20, first=10_000)
    upload(tmp_path, "a", "b")
    config = run_config(tmp_path)
    assert main(["check", config]) == 0
    assert "\ntrains on 4.00k tokens of 2 datasets, 0.116 epochs at most\n" in capsys.readouterr().out
    assert main(["data", "inspect", "s3://bucket/sets/a"]) == 0
    assert capsys.readouterr().out.startswith("s3://bucket/sets/a: 120 documents, 3000 tokens, stored as uint16\n")
    Location("s3://bucket/text/in.jsonl").write(b'{"text": "one"}\n{"text": "two"}\n')
    words = ["data", "prepare", "s3://bucket/text", "--output", str(tmp_path / "set"), "--tokenizer", "bytes"]
    assert main([*words, "--workers", "1"]) == 0
    assert "2 documents, 8 tokens" in capsys.readouterr().out


def test_mistakes_in_urls_are_found_by_check(
    store: FailingStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "c", [50] * 20)
    upload(tmp_path, "c")
    config, url = run_config(tmp_path), "data.train=s3://bucket/sets/c"
    assert main(["check", config, url]) == 0
    capsys.readouterr()
    for override, message in {
        "data.cache=s3://bucket/cache": "data.cache: s3://bucket/cache is a URL",
        "data.train=s3://bucket/sets/none": "data.train: there is no file s3://bucket/sets/none.",
        "data.train=nosuch://bucket/a": "data.train: nosuch: Protocol not known",
    }.items():
        assert main(["check", config, url, override]) == 2
        assert message in capsys.readouterr().err
    without = tmp_path / "without.toml"
    without.write_text("".join(line for line in Path(config).read_text().splitlines(True) if "cache =" not in line))
    assert main(["check", str(without), url]) == 2
    assert "data.cache: datasets in remote storage need a folder" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(Location, "_retry", lambda self, action: pytest.fail("storage is asked in vain"))
        assert main(["check", str(without), url]) == 2
    Location("s3://bucket/sets/c.bin").write(b"short")
    assert main(["check", config, url]) == 2
    assert "s3://bucket/sets/c.bin has 5 bytes, its index says 2000" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_trains_on_remote_data_as_on_local_data(store: FailingStore, tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", [7, 30, 3, 60] * 30)
    write_dataset(tmp_path / "b", [50] * 20, first=10_000)
    upload(tmp_path, "a", "b")
    config = run_config(tmp_path)
    store.failing_share = 0.2
    local = f'data.train=[[0.7, "{tmp_path / "a"}"], [0.3, "{tmp_path / "b"}"]]'
    losses = []
    for overrides in (["name=remote", "parallel.dp=2"], ["name=local", local, "parallel.dp=2"]):
        command = [sys.executable, "-m", "megascale", "train", config, *overrides]
        done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        records = (tmp_path / "runs" / overrides[0][5:] / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(record)["loss"] for record in records if "loss" in json.loads(record)])
    assert losses[0] == losses[1] and len(losses[0]) == 3
