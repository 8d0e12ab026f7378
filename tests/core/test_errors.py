"""Text of errors, and exit statuses of commands."""

from __future__ import annotations

from megascale.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergenceError,
    Exit,
    MegascaleError,
    Problem,
)


def test_an_error_ends_with_its_hint() -> None:
    assert str(MegascaleError("it broke")) == "it broke"
    assert str(MegascaleError("it broke", hint="turn it off")) == "it broke  -> turn it off"


def test_a_problem_is_one_line_in_a_fixed_order() -> None:
    assert str(Problem("a.toml:3", "model.tp", "found 2", "use 1")) == "a.toml:3  model.tp: found 2  -> use 1"
    assert str(Problem("a.toml", "", "no such file")) == "a.toml  no such file"
    assert str(Problem("a.toml", "b\nc", "d\ne", "f\ng")) == r"a.toml  b\nc: d\ne  -> f\ng"


def test_a_config_error_lists_and_counts() -> None:
    one, two = Problem("a.toml:1", "x", "bad"), Problem("a.toml:2", "y", "worse")
    assert str(ConfigError([one])) == f"{one}\n1 problem"
    error = ConfigError([one, two])
    assert str(error) == f"{one}\n{two}\n2 problems"
    assert error.problems == (one, two)


def test_exit_statuses_are_the_documented_ones() -> None:
    classes = [MegascaleError, ConfigError, DataError, CheckpointError, DivergenceError]
    assert [int(error_class.exit_status) for error_class in classes] == [1, 2, 3, 4, 93]
    assert (Exit.OK, Exit.STOPPED) == (0, 143)
