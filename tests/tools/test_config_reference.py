"""The tables of settings and presets leave nothing out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megascale.catalog.presets import PRESETS
from megascale.config.loading import load_config, sections
from megascale.core.errors import ConfigError
from tools import config_reference

PAGE = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")


def _keys() -> set[str]:
    return {
        f"{name}.{field.alias or key}"
        for name, section in sections().items()
        for key, field in section.model_fields.items()
    }


def test_every_key_has_a_line_with_a_meaning() -> None:
    text = "\n".join(config_reference.keys())
    for name, section in sections().items():
        part = text.partition(f"### [{name}]\n")[2].partition("\n#")[0]
        for key, field in section.model_fields.items():
            ending = f"| {field.description} |"
            lines = [line for line in part.splitlines() if line.startswith(f"| `{field.alias or key}` | ")]
            assert field.description and [line.endswith(ending) for line in lines].count(True) == 1, key


def test_every_choice_and_preset_is_there() -> None:
    text = "\n".join(config_reference.keys())
    for shown in (
        "`gelu_tanh` | GELU, tanh approximation",
        "`interleaved_1f1b` | 1f1b with",
        "`wsd` | stays at lr",
        "`bf16` |",
    ):
        assert shown in text
    presets = config_reference.presets()
    assert [row.split("`")[1] for row in presets[2:]] == list(PRESETS)
    row = "| `llama3-8b` | 8.03B | 32 | 4,096 | 32 | 8 | 14,336 | 128,256 | 8,192 | rmsnorm, swiglu, rope |"
    assert row in presets


def test_the_example_has_no_unknown_key(tmp_path: Path) -> None:
    example = PAGE.partition("```toml\n")[2].partition("```")[0]
    tree = tomllib.loads(example)
    assert {f"{table}.{key}" for table, keys in tree.items() if isinstance(keys, dict) for key in keys} <= _keys()
    (tmp_path / "run.toml").write_text(example)
    (tmp_path / "base.toml").write_text("batch.global = 8\ntrain.steps = 1\noptimizer.lr = 1e-3\ndata.mock = true\n")
    assert load_config(str(tmp_path / "run.toml")).parallel.sp
    with pytest.raises(ConfigError):
        load_config(str(tmp_path / "base.toml"))
