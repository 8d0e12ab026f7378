"""Numbers in environment variables: a number in its range, or one line with status 2."""

from __future__ import annotations

import pytest

from megascale.core.env_numbers import openmp_threads, whole_number
from megascale.core.errors import ConfigError, Exit


@pytest.mark.parametrize("text", ["0", "7", " 7 ", "007", "65535"])
def test_a_number_is_read(text: str) -> None:
    assert whole_number({"N": text}, "N", most=65_535) == int(text)
    assert whole_number({}, "N", 3) == 3


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.0", "1e3", "0x10", "²", "٣", "inf", "nan", "1 2", "65536", "9" * 5000]
)
def test_anything_else_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"environment  N: .*number.*  -> ") as caught:
        whole_number({"N": text}, "N", most=65_535)
    assert caught.value.exit_status == Exit.CONFIG
    assert len(str(caught.value.problems[0])) < 200
    assert "\n" not in str(caught.value.problems[0])


def test_the_lower_end() -> None:
    assert whole_number({"N": "1"}, "N", least=1) == 1
    with pytest.raises(ConfigError, match="N: 0 is not a number of 1 or more"):
        whole_number({"N": "0"}, "N", least=1)


@pytest.mark.parametrize(("text", "threads"), [("", None), ("4", 4), ("4,2", 4)])
def test_openmp_threads(text: str, threads: int | None) -> None:
    assert openmp_threads({"OMP_NUM_THREADS": text}) == threads
    assert openmp_threads({}) is None


@pytest.mark.parametrize("text", ["0", "-2", "auto", "4;2", "1e9", "9" * 20])
def test_openmp_threads_that_are_no_number(text: str) -> None:
    with pytest.raises(ConfigError, match="environment  OMP_NUM_THREADS: "):
        openmp_threads({"OMP_NUM_THREADS": text})
