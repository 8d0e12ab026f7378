"""Former names of settings: answered with the present ones, and read in what earlier versions have stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint.format.manifest import Facts
from megascale.checkpoint.format.state import Progress
from megascale.config.loading import load_config, sections
from megascale.config.renamed import REMOVED_KEYS, RENAMED_KEYS, RENAMED_VALUES, renamed, with_present_names
from megascale.config.run import RunConfig, RunKeys
from megascale.config.toml_writer import config_changes, to_toml
from megascale.core.errors import ConfigError
from megascale.operate.show.run_config import read_run_config
from tests.runs import GPT, config_of, settings, write_config

KEYS = {f"{table}.{field.alias or name}" for table, s in sections().items() for name, field in s.model_fields.items()}

OF_EARLIER: dict[str, Any] = {
    "observe": {"dir": "DIR", "tensorboard": False, "record": False, "store": False, "events": False},
    "launch": {"timeout_s": 70.0, "start_timeout_s": 100.0},
    "parallel": {"cp_mode": "hybrid", "dp": 2},
    "data": {
        "mock": True, "mask": "document", "boundary_loss": True, "max_tokens_per_rank": 16, "skip": [[8, 16]],
        "document_length": 5,
    },
    "train": {
        "steps": 10, "precision": "bf16", "average": "lawa", "average_count": 3, "check_replicas": 4,
        "recompute": "full", "activation_offload": True, "recompute_chunks": [0], "distill_temperature": 1.0,
    },
    "optimizer": {"lr": 1e-2, "master": "compensated", "offload_subgroup": 1 << 24},
    "checkpoint": {"every": 2, "memory_every": 1, "memory_dir": "/dev/shm", "file_bytes": 65536},
    "fault": {"flap_s": 4.0, "evidence_s": 2.0, "exclude_s": 9.0, "memory_failures": 3, "network_alerts": 4},
    "fp8": {"recipe": "mu_unit", "bf16_first": 0, "bf16_last": 2},
}  # fmt: skip
"""Sections as version 0.1 wrote them."""


def stored_by_an_earlier_version(folder: Path) -> dict[str, Any]:
    tree = {"name": "old", "model": dict(GPT), "batch": {"micro": 1, "global": 8}, **OF_EARLIER}
    return tree | {"observe": OF_EARLIER["observe"] | {"dir": str(folder)}}


def test_every_former_name_has_a_present_one() -> None:
    assert set(RENAMED_KEYS.values()) <= KEYS | set(RunKeys.model_fields)
    assert not RENAMED_KEYS.keys() & KEYS, "no setting has two names"
    assert {key for key, _ in RENAMED_VALUES.values()} <= KEYS


@pytest.mark.parametrize("key", RENAMED_KEYS)
def test_a_former_name_is_answered_with_the_present_one(key: str, tmp_path: Path) -> None:
    tree = settings(GPT, tmp_path)
    with pytest.raises(ConfigError) as of_command_line:
        config_of(tree, tmp_path, [f"{key}=7"])
    section, _, name = key.partition(".")
    tree.setdefault(section, {})[name] = 7
    with pytest.raises(ConfigError) as of_file:
        config_of(tree, tmp_path)
    for caught, place in (
        (of_command_line, ""),
        (of_file, "" if "." in RENAMED_KEYS[key] else ", at the top of the file"),
    ):
        hints = {problem.key: problem.hint for problem in caught.value.problems}
        assert hints[key] == f"is now {RENAMED_KEYS[key]}{place}"


@pytest.mark.parametrize(("key", "value"), RENAMED_VALUES)
def test_a_former_value_is_answered_with_the_present_setting(key: str, value: str | bool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(settings(GPT, tmp_path), tmp_path, [f"{key}={json.dumps(value)}"])
    now, present = RENAMED_VALUES[key, value]
    shown = str(present).lower() if isinstance(present, bool) else repr(present)
    assert [(p.key, p.hint) for p in caught.value.problems] == [(key, f"is now {now} = {shown}")]


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_setting_that_is_gone_is_answered_with_what_to_do(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(settings(GPT, tmp_path), tmp_path, [f"{key}=false"])
    assert [(p.key, p.hint) for p in caught.value.problems] == [(key, REMOVED_KEYS[key])]


def test_a_run_of_an_earlier_version_has_the_present_names(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    tree = stored_by_an_earlier_version(tmp_path)
    write_config(tree, folder / "config.toml")
    (folder / "metrics.jsonl").touch()
    loaded = load_config(str(folder / "config.toml"))
    assert read_run_config(folder) == loaded
    assert loaded.folder == folder and not loaded.observe.event_store and not loaded.observe.record_events
    assert loaded.comm.timeout_s == 70 and loaded.launch.start_timeout_s == 100
    assert loaded.parallel.hybrid_dp and loaded.parallel.cp_mode == "ring"
    assert loaded.data.attention_mask == "document" and not loaded.data.eod_mask_loss
    assert loaded.data.skip_samples == [[8, 16]]
    assert loaded.train.weight_average == "lawa" and loaded.train.weight_average_count == 3
    assert loaded.optimizer.master_weights == "bf16_compensated" and loaded.fp8.recipe == "static"
    assert loaded.checkpoint.in_memory_every == 1 and loaded.checkpoint.max_file_bytes == 65536
    assert loaded.fault.network_faults == 4 and loaded.fp8.last_layers_bf16 == 2
    assert loaded.train.memory == ["full_host"] and loaded.train.recompute == "none"


def test_a_checkpoint_of_an_earlier_version_differs_in_nothing(tmp_path: Path) -> None:
    tree = stored_by_an_earlier_version(tmp_path)
    facts = Facts.for_run(Progress(), tree, {})
    config = RunConfig.model_validate(facts.config).resolve(2)
    assert config_changes(facts.config, config.model_dump(mode="json", by_alias=True)) == []
    assert with_present_names(facts.config) == facts.config, "present names stay"
    assert Facts.model_validate_json(facts.model_dump_json()) == facts
    assert "eod_mask_loss = false" in to_toml(config)


def test_a_setting_with_its_present_name_stays() -> None:
    assert renamed("parallel.cp_mode", "ring") == ("parallel.cp_mode", "ring")
    assert renamed("optimizer.master", "full") == ("optimizer.master_weights", "full")
    assert renamed("data.skip", [[1, 2]]) == ("data.skip_samples", [[1, 2]])


@pytest.mark.parametrize(
    "stored",
    [
        {"optimizer__decay": "constant", "optimizer__min_lr": 1e-4},
        {"optimizer__decay": "cosine", "optimizer__decay_steps": 3},
        {"train__weight_average": "none", "train__weight_average_decay": 0.99, "train__weight_average_count": 3},
        {"model__position": "learned", "model__rope_theta": 5e5},
        {"fp8__recipe": "rowwise", "fp8__history": 4},
        {"data__reader": "rank", "data__reader_timeout_s": 7.0},
    ],
    ids=str,
)
def test_a_run_of_an_earlier_version_with_settings_of_another_mode_goes_on(
    stored: dict[str, Any], tmp_path: Path
) -> None:
    tree = settings(GPT, tmp_path, **stored)
    write_config(tree, tmp_path / "config.toml")
    with pytest.raises(ConfigError):
        load_config(str(tmp_path / "config.toml"))
    (tmp_path / "metrics.jsonl").touch()
    load_config(str(tmp_path / "config.toml"))
