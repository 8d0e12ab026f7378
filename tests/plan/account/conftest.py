"""Settings of the tests of accounts, most of which make dry runs."""

from __future__ import annotations

import pytest

from megascale.ops import wgrad


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add weights' gradients in blocks of 4 MiB: fake tensors have no cache, and each block takes them milliseconds."""
    monkeypatch.setattr(wgrad, "BLOCK_BYTES", 1 << 22)
