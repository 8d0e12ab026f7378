"""Which tests of the GPU suite run on this machine, and the figures that they report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.machine import available, rehearsing

Figure = Callable[..., None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are and, in a rehearsal, what only a GPU can show."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        count, have = marker.args[0], available()
        if have < count:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {count} GPU{'s' if count > 1 else ''}, this host has {have}")
            )
        elif rehearsing() and marker.kwargs.get("only"):
            item.add_marker(pytest.mark.skip(reason="only a GPU can show it"))


@pytest.fixture
def figure(record_property: Callable[[str, Any], None]) -> Figure:
    """Reports a measured value by name, with its unit; `least` and `most` say what is expected on an H100. A figure out
    of its range is shown as such and fails nothing: speed is measured here, not tested.
    """

    def report(name: str, value: float, unit: str = "", least: float | None = None, most: float | None = None) -> None:
        record_property(name, {"value": value, "unit": unit, "least": least, "most": most})

    return report
