"""The client of the job's store, as torch's process groups and the control channel use it."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megascale.operate.channel.handshake import NotAPeerError, connect, receive_message
from megascale.operate.channel.store_messages import OK, PURPOSE, pack, unpack

ANSWER_S = 60.0  # seconds beyond a request's own timeout until the server is given up


MAX_ANSWER_BYTES = 1 << 30  # longest answer in bytes: the values of all ranks, gathered under one key


class JobStore(dist.Store):
    """A connection to the store at `address`, whose server and all other clients know `secret` too.

    As torch's TCPStore, but for `clone`, which torch does not let a class of Python have: a thread that waits keeps
    other threads of the process waiting. Requests raise DistNetworkError if the server has gone, and DistStoreError if
    a key is not there in time.

    `requests`: their number so far. `polls`: of those that only ask if a key is there, as many as a wait is long.
    `connect_s`: seconds to reach the server, by default `timeout`.

    Raises: NotAPeerError if the server has another secret, OSError if it cannot be reached in time
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, timeout: datetime.timedelta, connect_s: float | None = None
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)  # torch's C++ code and `timeout` read it
        self._address = f"{address[0]}:{address[1]}"
        self._lock = threading.Lock()
        self.requests = self.polls = 0
        self._connection, self._session = connect(address, secret, PURPOSE, connect_s or timeout.total_seconds())

    def set(self, key: str, value: bytes | str) -> None:
        self._request(b"set", key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._request(b"add", key.encode(), b"%d" % amount)[0])

    def append(self, key: str, value: bytes | str) -> None:
        self._request(b"append", key.encode(), _bytes(value))

    def compare_set(self, key: str, expected: bytes | str, value: bytes | str) -> bytes:
        return self._request(b"compare_set", key.encode(), _bytes(expected), _bytes(value))[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._request(b"check", *(key.encode() for key in keys)) == [b"1"]

    def delete_key(self, key: str) -> bool:
        return self._request(b"delete", key.encode()) == [b"1"]

    def num_keys(self) -> int:
        return int(self._request(b"count")[0])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._request_keys(b"wait", keys, timeout or self._timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._request_keys(b"get", keys, self._timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        pairs = zip(keys, values, strict=True)
        self._request(b"set", *(part for key, value in pairs for part in (key.encode(), _bytes(value))))

    def has_extended_api(self) -> bool:
        return True

    deleteKey = delete_key
    getNumKeys = num_keys

    def close(self) -> None:
        """Close the connection; further requests fail."""
        self._connection.close()

    @property
    def _timeout(self) -> datetime.timedelta:
        timeout: datetime.timedelta = getattr(self, "timeout")  # noqa: B009  torch's type stubs lack it
        return timeout

    def _request_keys(self, name: bytes, keys: Sequence[str], timeout: datetime.timedelta) -> list[bytes]:
        """Request keys that may have to be waited for."""
        seconds = timeout.total_seconds()
        answer = self._exchange([name, b"%d" % (1000 * seconds), *(key.encode() for key in keys)], seconds)
        if answer[0] != OK:
            raise dist.DistStoreError(f"wait timeout after {1000 * seconds:.0f}ms, keys: {', '.join(keys)}")
        return answer[1:]

    def _request(self, *fields: bytes) -> list[bytes]:
        return self._exchange(fields, 0.0)[1:]

    def _exchange(self, fields: Sequence[bytes], seconds: float) -> list[bytes]:
        try:
            with self._lock:
                if fields[0] == b"check":
                    self.polls += 1
                else:
                    self.requests += 1
                self._connection.settimeout(seconds + ANSWER_S)
                self._connection.sendall(self._session.sent.seal(pack(fields)))
                content = receive_message(self._connection, self._session, MAX_ANSWER_BYTES)
        except (EOFError, OSError) as error:
            if isinstance(error, NotAPeerError):
                raise
            what = "does not answer" if isinstance(error, TimeoutError) else "has ended"
            text = f"connection closed by peer: the process of the job's store, which rank 0 started, {what}"
            text += f" ({self._address}: {error})"
            raise dist.DistNetworkError(text) from None
        return unpack(content)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def count_requests() -> tuple[int, int]:
    """Return the requests and the polls of this process so far; none in a job of one rank. Requires the job's store."""
    default: Any = _get_default_store()
    store = default.underlying_store
    return (store.requests, store.polls) if isinstance(store, JobStore) else (0, 0)
