"""Settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No deadlines: the machine is shared. The same examples each time: a failure must not come and go.
settings.register_profile("megascale", deadline=None, derandomize=True)
settings.load_profile("megascale")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Leaves the environment as it was: commands that a test calls set variables of their process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
