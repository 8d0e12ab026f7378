"""Limits of Liger's kernels. `megascale doctor` tests the kernels themselves on a GPU."""

from __future__ import annotations

import pytest

from megascale.ops.library import Library
from megascale.ops.select import unsupported_reason
from tests.ops.settings import GPU, setting


@pytest.fixture(autouse=True)
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend an installed Liger."""
    monkeypatch.setattr(Library, "missing_reason", lambda self: None)


def test_rows_are_limited_to_one_block() -> None:
    assert unsupported_reason("norm", "liger", setting(device=GPU, hidden_size=65536)) is None
    assert (
        unsupported_reason("norm", "liger", setting(device=GPU, hidden_size=65540))
        == "supports at most 65536 columns, not 65540"
    )
    wide = {"device": GPU, "ffn_size": 65538}
    assert unsupported_reason("activation", "liger", setting(**wide)) == "supports at most 65536 columns, not 65538"
    assert unsupported_reason("activation", "liger", setting(**wide, tp=2)) is None
