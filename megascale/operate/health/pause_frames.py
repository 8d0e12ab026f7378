"""Pause frames of Ethernet's flow control, from the drivers' own counters (`ethtool -S`).

They rise on a host whose PCIe or network card takes data more slowly than the network brings it, and on its neighbours.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
import struct
from ctypes import addressof, c_char, create_string_buffer
from pathlib import Path

from megascale.core.files import exists

NETWORK = Path("/sys/class/net")

_PAUSE = re.compile(
    r"[rt]x_(?:global_|prio\d_)?pause(?:_frames|_ctrl_phy)?"
    r"|[rt]x_pfc_(?:ena_)?frames(?:_pri\d)?"
    r"|(?:port\.)?[rt]x_(?:priority_\d|flow_control)_xoff"
)
"""Names of the counters in mlx5, bnxt_en, ice, i40e and ixgbe."""

# linux/sockios.h and linux/ethtool.h
_SIOCETHTOOL = 0x8946
_GSSET_INFO, _GSTRINGS, _GSTATS = 0x37, 0x1B, 0x1D
_STATS_SET = 1
_NAME_BYTES = 32


class PauseFrames:
    """Counts the pause frames that the host's physical network cards have sent and received."""

    def __init__(self, interfaces: Path = NETWORK) -> None:
        self._places: dict[str, tuple[int, list[int]]] = {}
        with contextlib.suppress(OSError):
            for name in (path.name for path in sorted(interfaces.iterdir()) if exists(path / "device", optional=True)):
                with contextlib.suppress(OSError):
                    names = counter_names(name)
                    if found := [index for index, counter in enumerate(names) if _PAUSE.fullmatch(counter)]:
                        self._places[name] = len(names), found

    def count(self) -> int | None:
        """Return the frames since the drivers' start; None without a card that counts them."""
        total = None
        for name, (size, places) in self._places.items():
            with contextlib.suppress(OSError):
                values = counters(name, size)
                total = (total or 0) + sum(values[place] for place in places)
        return total


def counter_names(interface: str) -> list[str]:
    """Return the names of a driver's counters. Raises: OSError"""
    head = struct.pack("=IIQ", _GSSET_INFO, 0, 1 << _STATS_SET)
    (size,) = struct.unpack_from("=I", _ask(interface, head, len(head) + 4), len(head))
    head = struct.pack("=III", _GSTRINGS, _STATS_SET, size)
    text = _ask(interface, head, len(head) + size * _NAME_BYTES)[len(head) :]
    names = (text[start : start + _NAME_BYTES] for start in range(0, size * _NAME_BYTES, _NAME_BYTES))
    return [name.partition(b"\0")[0].decode(errors="replace") for name in names]


def counters(interface: str, size: int) -> tuple[int, ...]:
    """Return the values of a driver's counters. Raises: OSError"""
    head = struct.pack("=II", _GSTATS, size)
    return struct.unpack_from(f"={size}Q", _ask(interface, head, len(head) + 8 * size), len(head))


def _ask(interface: str, head: bytes, size: int) -> bytes:
    """Return the answer of a driver, in the place of the question. Raises: OSError"""
    buffer = create_string_buffer(head, size)
    address = addressof(c_char.from_buffer(buffer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP8x", interface.encode(), address))
    return buffer.raw
