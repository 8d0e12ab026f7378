"""Numeric keys at both ends of their ranges: refused in one line, or accepted by everything that `check` computes."""

# ruff: noqa: E501 - lines of output are not wrapped
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megascale.cli.check_run import host_warnings
from megascale.cli.check_summary import summary
from megascale.config.loading import load_config_tree, sections
from megascale.config.run import RunConfig
from megascale.config.run_warnings import run_warnings
from megascale.config.toml_writer import to_toml
from megascale.core.errors import ConfigError
from tests.marks import only_quick
from tests.runs import GPT, settings

KEYS = [
    f"{table}.{field.alias or name}"
    for table, section in sections().items()
    for name, field in section.model_fields.items()
    if table != "data" and ("int" in str(field.annotation) or "float" in str(field.annotation))
]
CORNERS = "0 -1 1 1.0 5e-324 nan 9223372036854775808"
BETWEEN = "-0.0 -1.5 1e-37 3.5e38 1e308 1e400 -1e400 65536 16777216 1073741825 2147483648 1099511627776 "
BETWEEN += "9223372036854775807 18446744073709551616 1" + "0" * 400


KEYS.append("data.split")


def load(*overrides: str, **more: Any) -> RunConfig:
    return load_config_tree(settings(GPT, Path("runs"), **more), "test", overrides)


LISTS = {
    f"{table}.{field.alias or name}"
    for table, section in sections().items()
    for name, field in section.model_fields.items()
    if "list" in str(field.annotation)
} | {"data.split"}
"""Keys that take lists; the others refuse one whatever it holds, and a list of 1 alone is quick."""


@pytest.mark.parametrize("numbers", only_quick(["corners", "lists of corners", "between"], "corners"))
@pytest.mark.parametrize("key", KEYS)
def test_every_number_is_refused_or_checked(key: str, numbers: str) -> None:
    for number in (BETWEEN if numbers == "between" else CORNERS).split():
        lists = (
            [f"[{number}]", f"[{number}, {number}]"] if numbers != "corners" or number == "1" or key in LISTS else []
        )
        for text in [number, *lists] if numbers != "lists of corners" else lists:
            try:
                config = load(f"{key}={text}")
            except ConfigError as error:
                assert all(len(str(problem)) < 600 for problem in error.problems)
                assert len(error.problems) < 8
            else:
                assert "no mistakes found" in summary(config)
                assert list(host_warnings(config)) == list(run_warnings(config))
                assert key.partition(".")[2] in to_toml(config) or key == "optimizer.decay_steps"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "number", only_quick(["inf", "-inf", "nan", "1e400", "1" + "0" * 400, "-1"], "nan", "1e400", "-1")
)
def test_numbers_beyond_every_range_are_refused(key: str, number: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){key}: .*\n[1-9] problems?"):
        load(f"{key}={number}", data__mock=True)


SMALLEST, LARGEST = 2.0**-126, math.nextafter(2.0**128, 0)


@pytest.mark.parametrize(
    "key", ["optimizer.lr", "optimizer.eps", "model.norm_eps", "model.init_std", "model.rope_theta"]
)
def test_floats_are_those_that_fp32_holds(key: str) -> None:
    for value in (SMALLEST, 1.0, LARGEST):
        load(f"{key}={value!r}", model__position="rope")
    for value in (SMALLEST / 2, 5e-324, 2.0**128, 0.0):
        with pytest.raises(ConfigError, match=f"{key}: .*(fp32's range|greater than 0)"):
            load(f"{key}={value!r}", model__position="rope")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch.micro=134217728", "batch.global=134217728"], "batch.micro: 134217728: should be less than or equal to"),
        (["batch.micro=16777216", "batch.global=16777216", "model.seq_length=128"], r"over 2\^31 tokens in a micro-batch"),
        (["batch.global=8388608"], "batch.global: 8388608 micro-batches in a step of a rank, over 1048576"),
        (["parallel.vpp=1099511627775", "parallel.pp=2"], "parallel.vpp: 1099511627775: should be less than or equal to"),
        (["parallel.tp=2097152"], "parallel.tp: 2097152: should be less than or equal to 1048576"),
        (["model.vocab_size=2147483649"], "model.vocab_size: 2147483649: should be less than or equal to 2147483648"),
    ],
)  # fmt: skip
def test_sizes_that_overflow_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


def test_an_inline_table_on_the_command_line_is_a_table() -> None:
    llama = GPT | {"position": "rope"}
    tree = settings(llama, Path("runs"))
    config = load_config_tree(tree, "test", ['model.rope_scaling={type = "linear", factor = 2.0}'])
    assert config.model.rope_scaling is not None
    with pytest.raises(ConfigError, match=r"model.rope_scaling: .*factor should be a number above 0"):
        load_config_tree(tree, "test", ['model.rope_scaling={type = "linear", factor = nan}'])
