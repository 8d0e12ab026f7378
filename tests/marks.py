"""Selection of a test's cases for the quick suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def only_quick(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the cases of a test, with all cases outside `quick` marked slow.

    Raises: ValueError if `quick` has an unknown case
    """
    cases = list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"no cases: {unknown}")
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
