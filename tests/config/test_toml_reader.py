"""Reading of TOML files: precedence of values, and the line of every key in any notation."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.config.toml_reader import read_toml
from megascale.core.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _place(text: str, key: str) -> str:
    Path("a.toml").write_text(text, encoding="utf-8", newline="")
    return read_toml("a.toml").location(key)


@pytest.mark.parametrize(
    "text",
    [
        "\n[model]\ntp = 3\n",
        "\n[ model ]  # a comment\n  tp=3\n",
        "\n[model]\r\ntp = 3\r\n",
        "\n\nmodel.tp = 3\n",
        "\n\nmodel . tp = 3\n",
        "\n\nmodel = {tp = 3}\n",
        "\n\nmodel = { pp = 1, tp = 3 }\n",
        '\n["model"]\n"tp" = 3\n',
        "\n['model']\n'tp' = 3\n",
        '\n\n"model".tp = 3\n',
        "# tp = 1\u2028\n[model]\ntp = 3\n",
        "\ufeff# byte order mark\n[model]\ntp = 3\n[other]\ntp = 1\n",
        "tp = 1\n[model]\ntp = 3\n",
    ],
)
def test_the_line_of_a_key(text: str) -> None:
    assert _place(text, "model.tp") == "a.toml:3"
    assert read_toml("a.toml").tree["model"]["tp"] == 3


@pytest.mark.parametrize("text", ["\n[[model]]\ntp = 3\n", "\n[model]\n", "\n[model.inner]\n", "\nmodel.pp = 1\n"])
def test_a_missing_key_has_the_location_of_its_table(text: str) -> None:
    assert _place(text, "model.absent") == "a.toml:2"


def test_a_missing_table_has_the_location_of_the_file() -> None:
    assert _place("\n[other]\n", "model.tp") == "a.toml"


def test_the_extending_file_wins_key_by_key() -> None:
    Path("sub").mkdir()
    Path("sub/base.toml").write_text("[a]\nx = 1\ny = 1\nz = 1\n[b]\nx = 1\n")
    Path("sub/middle.toml").write_text('extends = "base.toml"\n[a]\ny = 2\nz = 2\n')
    Path("top.toml").write_text('extends = "sub/middle.toml"\n[a]\nz = 3\n')
    source = read_toml("top.toml", ["b.x=4", "c.d=word"])
    assert source.tree == {"a": {"x": 1, "y": 2, "z": 3}, "b": {"x": 4}, "c": {"d": "word"}}
    places = {key: source.location(key) for key in ("a.x", "a.y", "a.z", "b.x", "c.d")}
    assert places == {
        "a.x": "sub/base.toml:2", "a.y": "sub/middle.toml:3", "a.z": "top.toml:3", "b.x": "command line",
        "c.d": "command line",
    }  # fmt: skip


def test_the_package_s_own_file_serves_where_the_folder_has_none() -> None:
    assert read_toml("configs/quickstart.toml").tree["name"] == "quickstart"
    Path("configs").mkdir()
    Path("configs/quickstart.toml").write_text('name = "mine"')
    assert read_toml("configs/quickstart.toml").tree == {"name": "mine"}
    with pytest.raises(ConfigError, match=r"configs/quick\.toml  there is no such file"):
        read_toml("configs/quick.toml")


def test_one_base_may_be_extended_twice() -> None:
    """Only a file that extends itself is circular, not a shared base."""
    Path("base.toml").write_text("x = 1\n")
    Path("a.toml").write_text('extends = "base.toml"\n')
    Path("link.toml").symlink_to("a.toml")
    Path("b.toml").write_text('extends = "link.toml"\n')
    assert read_toml("b.toml").tree == {"x": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    {
        "3": 3, "3e-4": 3e-4, "true": True, "'3'": "3", "1f1b": "1f1b", "data/x": "data/x", "[1, 2]": [1, 2],
        " 3 ": 3, "": "", "a=b": "a=b", "3 # three": 3, "1\ny = 2": "1\ny = 2",
    }.items(),
)  # fmt: skip
def test_the_value_of_an_override(text: str, value: object) -> None:
    Path("a.toml").write_text("")
    assert read_toml("a.toml", [f"x={text}"]).tree == {"x": value}


def test_the_last_override_wins() -> None:
    Path("a.toml").write_text("x = 1\n")
    assert read_toml("a.toml", ["x=2", "x=3"]).tree == {"x": 3}
