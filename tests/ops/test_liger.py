"""What Liger's kernels take. The kernels themselves need a GPU: `megascale doctor` tests them there."""

from __future__ import annotations

import pytest

from megascale.ops.library import Library
from megascale.ops.select import refusal
from tests.ops.settings import GPU, setting


@pytest.fixture(autouse=True)
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger would be there."""
    monkeypatch.setattr(Library, "absence", lambda self: None)


def test_a_row_is_one_block() -> None:
    assert refusal("norm", "liger", setting(device=GPU, hidden_size=65536)) is None
    assert refusal("norm", "liger", setting(device=GPU, hidden_size=65540)) == "takes at most 65536 columns, not 65540"
    wide = {"device": GPU, "ffn_size": 65538}
    assert refusal("activation", "liger", setting(**wide)) == "takes at most 65536 columns, not 65538"
    assert refusal("activation", "liger", setting(**wide, tp=2)) is None
