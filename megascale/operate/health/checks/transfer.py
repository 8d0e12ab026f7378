"""A timed transfer over a connection: one end sends, the other counts bytes for a set time and then says how many."""

from __future__ import annotations

import select
import socket
import time

BLOCK_BYTES = 256 << 10

WARM_UP_SHARE = 0.25  # share of a transfer before the bytes count: TCP starts slowly
STALL_S = 5.0  # seconds without a byte after which a transfer has failed


def receive_for(connection: socket.socket, seconds: float) -> float:
    """Receive for `seconds` after the first bytes; return the rate in bytes per second.

    Raises: OSError, also if the transfer stalls or ends early
    """
    buffer = bytearray(BLOCK_BYTES)
    connection.settimeout(STALL_S)
    _receive(connection, buffer)
    start = time.perf_counter()
    counted_from, count, now = start + WARM_UP_SHARE * seconds, 0, start
    while now < start + seconds or not count:
        size = _receive(connection, buffer)
        now = time.perf_counter()
        if now >= counted_from:
            count += size
    return count / (now - counted_from)


def send_until_answer(connection: socket.socket) -> None:
    """Send until the other end answers or hangs up. Raises: OSError if the transfer stalls"""
    block = memoryview(bytes(BLOCK_BYTES))
    connection.setblocking(False)
    while True:
        readable, writable, _ = select.select([connection], [connection], [], STALL_S)
        if readable:
            return
        if not writable:
            raise TimeoutError(f"no byte was taken for {STALL_S:.0f} s")
        try:
            connection.send(block)
        except (BrokenPipeError, ConnectionResetError):
            return


def _receive(connection: socket.socket, buffer: bytearray) -> int:
    size = connection.recv_into(buffer)
    if not size:
        raise ConnectionResetError("the other end hung up")
    return size
