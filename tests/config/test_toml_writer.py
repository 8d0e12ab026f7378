"""A resolved configuration, written as TOML, loads as the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.catalog.decays import DECAYS
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.config.toml_writer import config_changes, to_toml
from tests.runs import FAMILIES, config_of, settings

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
SIZES = st.integers(1, 2**26)
PATHS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
POSITIVE = st.floats(2.0**-126, 2.0**128, exclude_max=True)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for files. The working directory is unchanged, because paths are relative to it."""
    return tmp_path_factory.mktemp("configs")


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Valid settings, mostly unusual values."""
    tp, dp, micro, warmup = (draw(st.integers(1, 4)) for _ in range(4))
    lr, decay = draw(POSITIVE), draw(st.sampled_from(DECAYS.names()))
    pipeline = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1)]))
    tree = settings(
        FAMILIES[draw(st.sampled_from(list(FAMILIES)))],
        Path("runs"),
        model__num_heads=4 * tp,
        model__num_kv_heads=2 * tp,
        model__hidden_size=32 * tp,
        model__ffn_size=48 * tp,
        model__vocab_size=draw(SIZES),
        model__norm_eps=draw(POSITIVE),
        model__dropout=draw(st.floats(0, 1, exclude_max=True)),
        parallel__tp=tp,
        parallel__dp=draw(st.sampled_from([dp, "auto"])),
        parallel__pp=pipeline[0],
        parallel__vpp=pipeline[1],
        parallel__zero=draw(st.integers(0, 2)),
        overlap__dp=draw(st.booleans()),
        batch__micro=micro,
        batch__global=micro * dp * draw(st.integers(1, 9)),
        train__steps=draw(st.integers(warmup + 1, 100)),
        train__seed=draw(st.integers(0, 2**63 - 1)),
        optimizer__lr=lr,
        optimizer__min_lr=draw(st.floats(2.0**-126, lr)) if decay != "constant" else 0.0,
        optimizer__warmup_steps=warmup,
        optimizer__decay=decay,
        optimizer__betas=draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2)),
        data__split=[draw(POSITIVE), draw(st.just(0.0) | POSITIVE)],
        output_dir=draw(PATHS),
        data__cache=draw(PATHS),
    )
    tree["name"] = draw(NAMES)
    return tree


def _load(folder: Path, text: str, overrides: list[str] | None = None) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8", newline="")
    return load_config(str(path), overrides or [])


@given(tree=trees())
def test_a_resolved_and_written_configuration_loads_unchanged(folder: Path, tree: dict[str, Any]) -> None:
    config = _load(folder, _toml(tree))
    text = to_toml(config)
    assert _load(folder, text) == config
    assert to_toml(_load(folder, text)) == text


@given(tree=trees())
def test_overrides_equal_a_file(folder: Path, tree: dict[str, Any]) -> None:
    config = _load(folder, _toml(tree))
    assert _load(folder, f"name = '{tree['name']}'\n", _dotted(tree)) == config


def _toml(tree: dict[str, Any]) -> str:
    """Overrides with dotted keys."""
    return "\n".join([f"name = '{tree['name']}'", *_dotted(tree)])


def _dotted(tree: dict[str, Any]) -> list[str]:
    sections = {section: keys for section, keys in tree.items() if isinstance(keys, dict)}
    return [f"{section}.{key}={_value(value)}" for section, keys in sections.items() for key, value in keys.items()]


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def test_derived_values_are_written(folder: Path) -> None:
    tree = settings(FAMILIES["gpt"], Path("runs"), parallel__pp=2, parallel__vpp=2, optimizer__decay="wsd")
    tree["checkpoint"]["resume"] = "auto"
    config = load_config(str(_write(folder, tree)), world_size=8)
    assert (config.dp, config.parallel.schedule, config.optimizer.decay_steps) == (4, "interleaved_1f1b", 1)
    assert config.folder == Path("runs").absolute() / "test"
    assert config.data.train is None and config.num_microbatches == 2


def test_the_default_decay_of_wsd_fits_after_the_warm_up(folder: Path) -> None:
    changes = {"train__steps": 100, "optimizer__warmup_steps": 95, "optimizer__decay": "wsd"}
    config = load_config(str(_write(folder, settings(FAMILIES["gpt"], Path("runs"), **changes))))
    assert config.optimizer.decay_steps == 5


@pytest.mark.parametrize(("heads", "expected"), [({}, 4), ({"num_kv_heads": 2}, 2)])
def test_key_value_heads_follow_heads(folder: Path, heads: dict[str, int], expected: int) -> None:
    tree = settings(FAMILIES["gpt"] | heads, Path("runs"))
    assert load_config(str(_write(folder, tree))).model.num_kv_heads == expected


@pytest.mark.parametrize(
    ("activation", "hidden", "ffn"), [("gelu", 32, 128), ("swiglu", 32, 128), ("swiglu", 768, 2048)]
)
def test_the_width_of_the_mlp_follows_the_activation(folder: Path, activation: str, hidden: int, ffn: int) -> None:
    """Gated activations (Shazeer 2020): two thirds of 4 x hidden, rounded up to a multiple of 64."""
    tree = settings(FAMILIES["gpt"] | {"activation": activation, "hidden_size": hidden}, Path("runs"))
    assert load_config(str(_write(folder, tree))).model.ffn_size == ffn


def test_a_slice_of_a_preset_has_the_windows_of_its_layers(folder: Path) -> None:
    settings_of_slice = settings({"preset": "gemma3-1b", "num_layers": 4}, Path("runs"))
    model = load_config(str(_write(folder, settings_of_slice))).model
    assert model.window == [512, 512, 512, 512]


def test_a_size_beside_a_preset_wins(folder: Path) -> None:
    model = load_config(str(_write(folder, settings({"preset": "llama3-8b", "num_layers": 2}, Path("runs"))))).model
    assert (model.num_layers, model.ffn_size, model.num_kv_heads) == (2, 14_336, 8)


def _write(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "run.toml"
    path.write_text(_toml(tree), encoding="utf-8")
    return path


def test_changes_that_affect_the_loss_are_listed(folder: Path) -> None:
    tree = settings(FAMILIES["llama"], folder, train__precision="fp8", fp8__first_layers_bf16=0, fp8__recipe="delayed")
    saved, current = config_of(tree, folder), config_of(tree | {"fp8": {"recipe": "tensorwise"}}, folder)
    assert config_changes(*(one.model_dump(by_alias=True, mode="json") for one in (saved, current))) == [
        'fp8.recipe "delayed" -> "tensorwise"', "fp8.first_layers_bf16 0 -> 1",
    ]  # fmt: skip


def test_tables_and_unset_keys_survive(folder: Path) -> None:
    model = FAMILIES["llama"] | {"head_dim": 16, "qkv_bias": True, "softmax_scale": 0.1}
    model["rope_scaling"] = {"type": "yarn", "factor": 4, "original_seq_length": 8, "truncate": False}
    config = config_of(settings(model, folder), folder)
    path = folder / "resolved.toml"
    path.write_text(to_toml(config))
    assert "head_dim = 16" in path.read_text() and "{type = " in path.read_text()
    assert load_config(str(path)) == config
    assert config.model.rope_scaling == model["rope_scaling"]
    plain = load_config(str(path), ["model.head_dim=auto", "model.qkv_bias=auto", "model.rope_scaling=auto"]).model
    assert (plain.head_dim, plain.qkv_bias, plain.rope_scaling) == (8, False, None)


@pytest.mark.parametrize(("key", "default"), [("head_dim", 8), ("qkv_bias", False)])
def test_keys_equal_to_their_derived_default_are_unset(key: str, default: Any, folder: Path) -> None:
    models = [
        load_config(str(_write(folder, settings(FAMILIES["llama"] | more, folder)))).model
        for more in ({}, {key: default})
    ]
    assert models[0] == models[1] and getattr(models[1], key) == default
