"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from megascale.cli.agent import GRPC_DEFAULTS
from tests.forked import pytest_addoption, pytest_runtestloop  # noqa: F401  hooks

# Before any test imports gRPC: its handlers of fork abort children that this process starts with a `preexec_fn`.
os.environ.update(GRPC_DEFAULTS | os.environ)

# No deadlines: the machine is shared. The same examples each time: a failure must not come and go.
settings.register_profile("megascale", deadline=None, derandomize=True)
settings.load_profile("megascale")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and none of what was imported and collected after that."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment after a test: commands called by a test set variables of this process."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
