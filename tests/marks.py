"""Selection of a test's cases for the quick suite, and of tests that a host can run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Any

import pytest

_can_mount = not subprocess.run(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL, check=False).returncode
needs_mount = pytest.mark.skipif(not _can_mount, reason="a mount needs root with CAP_SYS_ADMIN")


def only_quick(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the cases of a test, with all cases outside `quick` marked slow.

    Raises: ValueError if `quick` has an unknown case
    """
    cases = list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"no cases: {unknown}")
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def only_quick_rows(rows: Iterable[tuple[Any, ...]], *quick: tuple[Any, ...]) -> list[Any]:
    """Return the rows of a test's arguments as `only_quick` does its cases."""
    rows = list(rows)
    if unknown := [row for row in quick if row not in rows]:
        raise ValueError(f"no rows: {unknown}")
    return [pytest.param(*row, marks=() if row in quick else pytest.mark.slow) for row in rows]
