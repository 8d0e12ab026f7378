"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from megascale.cli.agent import GRPC_DEFAULTS

# Files of tests are in memory, if they fit: they are many and small, which a disk takes minutes to sync and to remove.
MEMORY, NEEDED = "/dev/shm", 4 << 30
if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > NEEDED:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

# Before any test imports gRPC: its handlers of fork abort children that this process starts with a `preexec_fn`.
os.environ.update(GRPC_DEFAULTS | os.environ)

# No deadlines: the machine is shared. The same examples each time: a failure must not come and go. `make test-all` has
# twice as many, by `--hypothesis-profile`.
settings.register_profile("all", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("quick", settings.get_profile("all"), max_examples=50)
settings.load_profile("quick")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and none of what was imported and collected after that."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter's last collection scan nothing: the process ends."""
    gc.freeze()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment after a test: commands called by a test set variables of this process."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before.items() - after.items())  # few: pytest's own PYTEST_CURRENT_TEST differs for each test
