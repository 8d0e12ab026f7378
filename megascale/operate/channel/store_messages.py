"""Requests and answers of the job's store: fields of bytes, each with its length before it.

A request is its name and its arguments, such as [b"set", key, value]. An answer is OK or TIMED_OUT, and the results.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

OK, TIMED_OUT = b"ok", b"timed out"

PURPOSE = "job's store"  # the purpose of the handshake
REFUSED_KEY = "refused strangers"  # key of the store: a text of connections that were refused; absent without any
MAX_MESSAGE_BYTES = 64 << 20  # longest message in bytes

_LENGTH = struct.Struct("<I")


def pack(fields: Iterable[bytes]) -> bytes:
    """Join fields to a message."""
    return b"".join([part for field in fields for part in (_LENGTH.pack(len(field)), field)])


def unpack(message: bytes) -> list[bytes]:
    """Split a message into its fields."""
    fields, at = [], 0
    while at < len(message):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(message, at)[0]
        fields.append(message[start:at])
    return fields
