"""The listening socket of the job's store, which the agent of rank 0's node opens anew for each attempt."""

from __future__ import annotations

import socket

from megascale.core.network import LOOPBACK, is_loopback, listen, listen_as
from megascale.fault.messages import OpenStore, StoreOpened


class StoreListener:
    """Listens at `address`, the node's, or on loopback. Rank 0 inherits the socket."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._attempt = -1
        self._socket: socket.socket | None = None

    @property
    def opened(self) -> StoreOpened | None:
        """The report that the socket listens; None while it does not."""
        if self._socket is None:
            return None
        host, port = self._socket.getsockname()[:2]
        return StoreOpened(self._attempt, f"{host if is_loopback(host) else self._address}:{port}")

    def open(self, order: OpenStore) -> None:
        """Listen for an attempt; a second order for the same attempt changes nothing. Raises: OSError"""
        if self._socket is not None and self._attempt == order.attempt:
            return
        self.close()
        loopback = not order.reachable or is_loopback(self._address)
        self._attempt, self._socket = order.attempt, listen(LOOPBACK) if loopback else listen_as(self._address)

    def socket_of(self, attempt: int) -> socket.socket | None:
        """Return the socket if it was opened for an attempt."""
        return self._socket if self._attempt == attempt else None

    def close(self) -> None:
        """Close this process's copy of the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
