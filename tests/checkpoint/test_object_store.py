"""Training on an object store: an S3 server on this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.core.storage import Location
from tests.runs import LLAMA, settings, write_config

KEYS = {"aws_access_key_id": "key", "aws_secret_access_key": "key", "region_name": "us-east-1"}


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """Environment with a bucket at s3://bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    boto3.client("s3", endpoint_url=url, **KEYS).create_bucket(Bucket="bucket")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    yield os.environ | {"AWS_ENDPOINT_URL": url} | dict(zip(names, KEYS.values(), strict=True))
    server.stop()


def test_a_file_of_whole_reads_is_intact(
    store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    offline.write_state(tmp_path, [("weights.a", torch.arange(8.0))], {})
    folder = Location("s3://bucket/ends", retry_s=1.0)
    for path in tmp_path.iterdir():
        (folder / path.name).write(path.read_bytes())
    saved = manifest.read(folder)
    ((name, file),) = saved.files.items()
    monkeypatch.setattr(offline, "MAX_READ_BYTES", file.bytes // 2)
    assert file.bytes % 2 == 0 and list(offline.verify(folder, saved)) == []
    (folder / name).write((tmp_path / name).read_bytes() + b"x")
    problem = f"{folder / name}: its size or CRC-32 does not match, though its tensors are intact"
    assert list(offline.verify(folder, saved)) == [problem]


def test_a_missing_bucket_is_not_made(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FileNotFoundError, match="there is no typo"):
        Location("s3://typo/run/step-00000001", retry_s=1.0).make_folder()
    Location("s3://bucket/run/step-00000001", retry_s=1.0).make_folder()
    with pytest.raises(FileNotFoundError, match="there is no typo"):
        Location("s3://typo/run", retry_s=1.0).check_writable()
    Location("s3://bucket/new", retry_s=1.0).check_writable()
    assert Location("s3://bucket/new", retry_s=1.0).list_names() == []


def megascale(store: dict[str, str], *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megascale", *map(str, words)]
    return subprocess.run(command, env=store, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_run_saves_to_an_object_store_and_resumes(store: dict[str, str], tmp_path: Path) -> None:
    where = {"checkpoint__dir": "s3://bucket/runs", "checkpoint__every": 2, "checkpoint__keep": 2}
    rate = {"optimizer__min_lr": 1e-2}  # the same whatever train.steps is
    given = settings(LLAMA, tmp_path, parallel__tp=2, train__precision="fp32", train__steps=4, **rate, **where)
    config = write_config(given, tmp_path / "run.toml")
    run = "s3://bucket/runs/test"
    first = megascale(store, "train", config)
    assert first.returncode == 0, first.stderr
    assert f"saved {run}/step-00000002: " in first.stdout and f"saved {run}/step-00000004: " in first.stdout
    second = megascale(store, "train", config, "train.steps=6")
    assert second.returncode == 0 and f"resumed from {run}/step-00000004: step 4" in second.stdout, second.stdout
    listed = json.loads(megascale(store, "ckpt", "list", run, "--json").stdout)
    assert [row["step"] for row in listed["checkpoints"]] == [4, 6] and listed["unfinished"] == []
    assert all(row["bytes"] > 100_000 for row in listed["checkpoints"])
    assert megascale(store, "ckpt", "verify", run).stdout.endswith("match their checksums\n")
    plain = megascale(store, "train", config, "train.steps=6", "name=plain")
    assert plain.returncode == 0
    same = megascale(store, "ckpt", "diff", run, "s3://bucket/runs/plain")
    assert "tensors are bit-equal, 0 differ" in same.stdout, "as if it had not been interrupted"


@pytest.mark.slow
def test_a_damaged_object_is_passed_over(store: dict[str, str], tmp_path: Path) -> None:
    import boto3

    given = settings(
        LLAMA, tmp_path, train__precision="fp32", train__steps=4, checkpoint__every=2, checkpoint__dir="s3://bucket/two"
    )
    config = write_config(given, tmp_path / "run.toml")
    assert megascale(store, "train", config).returncode == 0
    client = boto3.client("s3", endpoint_url=store["AWS_ENDPOINT_URL"], **KEYS)
    key = "two/test/step-00000004/rank-00000-000.safetensors"
    client.put_object(Bucket="bucket", Key=key, Body=client.get_object(Bucket="bucket", Key=key)["Body"].read()[:-9])
    client.put_object(Bucket="bucket", Key="two/test/step-00000009/rank-00000-000.safetensors", Body=b"unfinished")
    found = megascale(store, "train", config, "train.steps=5")
    assert found.returncode == 0
    assert f"WARNING: rank 0: s3://bucket/{key}: it ends too early" in found.stdout
    assert "resumed from s3://bucket/two/test/step-00000002: step 2" in found.stdout
    listed = json.loads(megascale(store, "ckpt", "list", "s3://bucket/two/test", "--json").stdout)
    assert [row["step"] for row in listed["checkpoints"]] == [2, 4, 4, 5] and listed["unfinished"] == []


@pytest.mark.slow
def test_an_unreachable_store_ends_a_run_at_its_start(store: dict[str, str], tmp_path: Path) -> None:
    given = settings(
        LLAMA, tmp_path, checkpoint__every=2, checkpoint__dir="s3://bucket/x", checkpoint__retry_timeout_s=1.0
    )
    config = write_config(given, tmp_path / "run.toml")
    found = megascale(store | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "train", config)
    assert found.returncode == 4 and "cannot look into s3://bucket/x/test: " in found.stderr
    assert "Traceback" not in found.stderr


def test_a_missing_file_system_package_is_found_before_launch(tmp_path: Path) -> None:
    given = settings(LLAMA, tmp_path, checkpoint__every=2, checkpoint__dir="nowhere://bucket/x")
    found = megascale(dict(os.environ), "train", write_config(given, tmp_path / "run.toml"))
    assert found.returncode == 2 and "checkpoint.dir: nowhere: Protocol not known: nowhere" in found.stderr
