"""The listening socket of the job's store, which the agent of rank 0's node opens anew for each attempt."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from megascale.core.network import LOOPBACK, is_loopback, listen, listen_as
from megascale.operate.channel.messages import OpenStore, StoreOpened
from megascale.operate.node.threads import call_in_thread

GIVE_UP_S = 20.0  # seconds in which the store is opened, as long as the driver waits for it
LOOK_UP_S = 5.0  # seconds that a look-up of the node's name may take
AGAIN_S = 0.5  # seconds between two tries


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

    async def open(self, order: OpenStore, say: Callable[[str], object]) -> None:
        """Listen for an attempt; a second order for the same attempt changes nothing. What fails is said, and tried
        again until the driver gives up: the node's name may not be found for a moment.
        """
        if order.attempt != self._attempt:
            self.close()
            self._attempt = order.attempt

        def open_socket() -> socket.socket:
            reachable = order.reachable and not is_loopback(self._address)
            return listen_as(self._address) if reachable else listen(LOOPBACK)

        last = time.monotonic() + GIVE_UP_S
        while self._socket is None and self._attempt == order.attempt and time.monotonic() < last:
            try:
                opened = await call_in_thread(open_socket, LOOK_UP_S)
            except (OSError, RuntimeError) as error:
                why = str(error) or f"no answer within {LOOK_UP_S:g} s"
                say(f"the job's store cannot be opened at {self._address}: {why}")
                await asyncio.sleep(AGAIN_S)
                continue
            if self._socket is None and self._attempt == order.attempt:
                self._socket = opened
            else:  # another order came while it was opened
                opened.close()

    def socket_of(self, attempt: int) -> socket.socket | None:
        """Return the socket if it was opened for an attempt."""
        return self._socket if self._attempt == attempt else None

    def close(self) -> None:
        """Close this process's copy of the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
