"""Every configuration in configs/ is one that runs: it passes `megascale check`, with its data and on its GPUs."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from megascale.catalog.presets import PRESETS
from megascale.cli.main import main
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.data.read import indexed_dataset
from megascale.layout.chunks import fp8_layers
from megascale.layout.parameters import parameter_count
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.state_bytes import state_bytes
from tests.data.datasets import write_documents

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PROFILES = ("hardware", "stacks")  # of the planner: tests/plan/simulate/test_profiles.py
PATHS = [
    path for path in CONFIGS.rglob("*.toml") if path.parent.name not in PROFILES and path != CONFIGS / "errors.toml"
]
FILES = sorted(path.relative_to(CONFIGS).as_posix() for path in PATHS)
BASES = {
    (path.parent / tree["extends"]).resolve().relative_to(CONFIGS).as_posix()
    for path in PATHS
    if "extends" in (tree := tomllib.loads(path.read_text()))
}
RUNS = [name for name in FILES if name not in BASES]

# GPUs that a file's first line names, and its layout: tp, pp, vpp, dp
GPUS = {
    "gpu/llama3-8b.toml": (64, (2, 1, 1, 32)),
    "gpu/llama3-70b.toml": (512, (8, 4, 5, 16)),
    "gpu/gpt3-175b.toml": (1024, (8, 8, 6, 16)),
    "gpu/megascale-175b.toml": (12_288, (8, 8, 6, 192)),
    "gpu/megascale-530b.toml": (11_200, (8, 35, 3, 40)),
    "gpu/mixtral-8x22b.toml": (128, (4, 8, 7, 4)),
    "gpu/qwen3-235b-a22b.toml": (256, (4, 8, 4, 8)),
    "gpu/deepseek-v3.toml": (1024, (1, 16, 2, 64)),
}
SIZES = {"family/1m.toml": 1.0e6, "family/10m.toml": 10.0e6, "family/50m.toml": 52.0e6, "family/124m.toml": 88.0e6}
# models on one GPU: layers, and those of the whole model
SLICES = {
    "bench/llama3-1b.toml": (16, 16),
    "bench/llama3-8b-slice.toml": (8, 32),
    "bench/gpt3-175b-slice.toml": (1, 96),
    "bench/megascale-175b-slice.toml": (1, 96),
}
GPU_BYTES = 80e9
LEFT = 10e9
"""For what the allocator rounds up, and for the libraries."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Datasets under the names of `make quickstart`: configurations may ask for these and no others."""
    monkeypatch.chdir(tmp_path)
    folder = Path("data/quickstart")
    folder.mkdir(parents=True)
    for name in ("train", "valid"):
        origin = indexed_dataset.TokenizerInfo("bytes", "bytes", 256)
        write_documents(folder / name, [np.zeros(3_000_000, np.uint16)], origin, 257)
        (folder / f"{name}.json").unlink()
    (folder / "tokenizer.json").touch()
    return tmp_path


def test_there_are_configurations() -> None:
    assert GPUS.keys() | SIZES.keys() | SLICES.keys() | {"quickstart.toml"} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_a_configuration_passes(name: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = ["--gpus", str(GPUS[name][0])] if name in GPUS else []
    status = main(["check", str(CONFIGS / name), *gpus])
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert status == 0 and all(line.startswith("WARNING: batch.micro = 1 gives GEMMs of 256 rows") for line in lines)
    assert len(lines) == name.startswith("gpu/megascale"), "MegaScale's micro-batch"
    assert "no mistakes found\n" in out


def test_names_are_unique(data: Path) -> None:
    names = [load_config(str(CONFIGS / name)).name for name in RUNS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", SIZES)
def test_a_family_member_runs_alone_and_has_its_size(name: str, data: Path) -> None:
    config = load_config(str(CONFIGS / name))
    assert config.world_size == 1
    assert parameter_count(config.model) == pytest.approx(SIZES[name], rel=0.06)


@pytest.mark.parametrize("name", GPUS)
def test_a_large_model_has_the_layout_that_its_file_states(name: str) -> None:
    gpus, layout = GPUS[name]
    config = _on(name, gpus)
    p = config.parallel
    assert (p.tp, p.pp, p.vpp, config.dp) == layout
    assert config.world_size == gpus
    first = (CONFIGS / name).read_text().splitlines()[0]
    assert int(re.findall(r"([\d,]+) GPUs", first)[0].replace(",", "")) == gpus
    assert f"dp {config.dp}" in "".join((CONFIGS / name).read_text().splitlines()[:2])
    assert (config.num_microbatches % p.pp == 0) or p.vpp == 1  # no stage waits at the end of a group of micro-batches


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_has_the_layers_that_its_file_states_and_a_job_s_micro_batch(name: str) -> None:
    layers, whole = SLICES[name]
    config = load_config(str(CONFIGS / name))
    assert (config.world_size, config.model.num_layers) == (1, layers)
    assert PRESETS[config.model.preset or ""]["num_layers"] == whole
    assert config.batch.micro * config.model.seq_length == 8192
    first = (CONFIGS / name).read_text().splitlines()[0]
    assert layers == whole or first.startswith(f"# {layers} of {whole} layers")


@pytest.mark.parametrize("name", [*GPUS, *SLICES])
def test_it_fits(name: str) -> None:
    config = _on(name, GPUS[name][0] if name in GPUS else 1)
    fullest = JobMemory(config).fullest()
    assert fullest.total < GPU_BYTES - LEFT


@pytest.mark.parametrize("name", SLICES)
def test_every_layer_of_a_slice_is_cast_in_fp8_and_it_fits(name: str) -> None:
    config = load_config(str(CONFIGS / name), ["train.precision=fp8"])
    assert fp8_layers(config.model, config.train, config.fp8) == range(config.model.num_layers)
    assert JobMemory(config).fullest().total < GPU_BYTES - LEFT


def test_the_largest_model_would_not_fit_without_its_layout() -> None:
    """The test above can fail: the same model on a quarter of the pipeline."""
    config = load_config(str(CONFIGS / "gpu/megascale-530b.toml"), ["parallel.pp=5", "parallel.vpp=1"])
    assert state_bytes(config, 0).total > GPU_BYTES


def _on(name: str, gpus: int) -> RunConfig:
    return load_config(str(CONFIGS / name), world_size=gpus)


@pytest.mark.parametrize("script", sorted((ROOT / "launch").iterdir()), ids=lambda path: path.name)
def test_launch_scripts_read_keys_that_exist(script: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(CONFIGS / "quickstart.toml"), "--json"])
    config = json.loads(capsys.readouterr().out)["config"]
    for keys in re.findall(r'config((?:\["\w+"\])+)', script.read_text(encoding="utf-8")):
        found = config
        for key in re.findall(r"\w+", keys):
            assert key in found, keys
            found = found[key]
