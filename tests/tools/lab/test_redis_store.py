"""The client that measures Redis: its requests do what they say, on a real server."""

from __future__ import annotations

import pytest

from lab.redis_store import has_redis, redis_store
from megascale.core.errors import MegascaleError


@pytest.mark.skipif(not has_redis(), reason="redis-server is not installed")
def test_requests_are_answered() -> None:
    with redis_store() as (connect, _):
        first, second = connect(), connect()
        first.set("key", b"a\r\nb")
        assert second.get("key") == b"a\r\nb" and second.get("other") is None
        assert first.add("count", 2) == 2 and second.add("count", 3) == 5
        assert second.check(["key", "count"]) and not second.check(["key", "other"])
        with pytest.raises(MegascaleError, match="Redis answers '-"):
            first.add("key", 1)
