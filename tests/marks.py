"""Which cases of a test the quick suite runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def only_quick(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases of a test, of which all but those in `quick` are slow.

    Raises: ValueError if a quick one is no case
    """
    cases = list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"no cases: {unknown}")
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
