"""The generated pages are what the tool writes, and the tool leaves nothing out."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from megascale.catalog.presets import PRESETS
from megascale.config.loading import load_config, sections
from megascale.core.errors import ConfigError
from tools import config_reference
from tools.config_reference import configuration, main, presets


def _keys() -> set[str]:
    return {
        f"{name}.{field.alias or key}"
        for name, section in sections().items()
        for key, field in section.model_fields.items()
    }


def test_the_pages_are_current(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["config_reference.py", "--check"])
    assert main() == 0, capsys.readouterr().err


def test_a_page_out_of_date_is_status_1_and_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "presets.md"
    monkeypatch.setattr(config_reference, "DOCS", tmp_path)
    monkeypatch.setattr(config_reference, "pages", lambda: {"presets.md": presets()})
    monkeypatch.setattr(sys, "argv", ["config_reference.py", "--check"])
    assert main() == 1
    assert not old.exists()
    old.write_text(presets() + " ")
    assert main() == 1
    assert capsys.readouterr().err == "docs/presets.md is out of date  -> make docs\n" * 2
    monkeypatch.setattr(sys, "argv", ["config_reference.py"])
    assert main() == 0
    assert old.read_text() == presets()


def test_every_key_has_a_line_with_a_meaning() -> None:
    text = configuration()
    for name, section in sections().items():
        part = text.partition(f"### [{name}]\n")[2].partition("\n#")[0]
        for key, field in section.model_fields.items():
            ending = f"| {field.description} |"
            lines = [line for line in part.splitlines() if line.startswith(f"| `{field.alias or key}` | ")]
            assert field.description and [line.endswith(ending) for line in lines].count(True) == 1, key


def test_every_choice_and_preset_is_there() -> None:
    text = configuration()
    for shown in (
        "`gelu_tanh` | GELU, tanh approximation",
        "`interleaved_1f1b` | 1f1b with",
        "`wsd` | stays at lr",
        "`bf16` |",
    ):
        assert shown in text
    for name in PRESETS:
        assert f"| `{name}` | " in presets()
    row = "| `llama3-8b` | 8.03B | 32 | 4,096 | 32 | 8 | 14,336 | 128,256 | 8,192 | rmsnorm, swiglu, rope |"
    assert row in presets()


def test_the_example_has_no_unknown_key(tmp_path: Path) -> None:
    example = configuration().partition("```toml\n")[2].partition("```")[0]
    tree = tomllib.loads(example)
    assert {f"{table}.{key}" for table, keys in tree.items() if isinstance(keys, dict) for key in keys} <= _keys()
    (tmp_path / "run.toml").write_text(example)
    (tmp_path / "base.toml").write_text("batch.global = 8\ntrain.steps = 1\noptimizer.lr = 1e-3\ndata.mock = true\n")
    assert load_config(str(tmp_path / "run.toml")).parallel.sp
    with pytest.raises(ConfigError):
        load_config(str(tmp_path / "base.toml"))
