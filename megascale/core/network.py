"""Addresses of this host, and where its servers listen: on loopback, or on the one address that other hosts reach."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable

BACKLOG = 4096
"""Connections that wait in the kernel to be accepted, at most; the kernel's own limit (somaxconn) applies."""

LOOPBACK = "127.0.0.1"

ALL_INTERFACES = ""


def listen(host: str, port: int = 0, *, shared: bool = False) -> socket.socket:
    """Listen at an address of this host. `shared`: a port that `reserve_port` keeps. Raises: OSError"""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)


def listen_as(name: str, port: int = 0) -> socket.socket:
    """Listen at the address by which other hosts reach this one under `name`, and at no other.

    On all interfaces if this host does not know the address: behind a service or a NAT, or if its own name is loopback
    to itself, as on Debian.
    Raises: OSError
    """
    return _where_others_reach(name, port, listen)[0]


def _where_others_reach(name: str, port: int, take: Callable[[str, int], socket.socket]) -> tuple[socket.socket, str]:
    """Take a port at the address by which other hosts reach this one as `name`; return the socket and the address."""
    address = address_for_others(name, str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0]))
    try:
        return take(address, port), address
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return take(ALL_INTERFACES, port), ALL_INTERFACES


def reserve_port(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a socket that keeps a port for processes that `listen` there with `shared`, one after another. It takes no
    connection: while none of them listens, peers are refused.

    Raises: OSError
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, port))
    except BaseException:
        reserved.close()
        raise
    return reserved


def reserve_port_as(name: str, port: int = 0) -> tuple[socket.socket, str]:
    """Keep a port as `reserve_port` does, where `listen_as` would listen. Returns the socket, and the address at which
    to listen for hosts that know this one as `name`, "" for all interfaces.

    Raises: OSError
    """
    return _where_others_reach(name, port, reserve_port)


def address_for_others(name: str, address: str) -> str:
    """Return where to listen for hosts that know this one as `name`, which is `address` here: all interfaces if that is
    loopback, unless the name says so.
    """
    return ALL_INTERFACES if is_loopback(address) and not (name == "localhost" or is_loopback(name)) else address


def split_port(text: str) -> tuple[str, int]:
    """Return host and port of host:port. Raises: ValueError"""
    host, _, port = text.rpartition(":")
    if not host or not (port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(text)
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_port(host: str, port: int) -> str:
    """Return host:port, with an address of IPv6 in brackets; "" is all interfaces."""
    return f"[{host}]:{port}" if ":" in host else f"{host or '[::]'}:{port}"


def address_toward(host: str) -> str:
    """Return this host's address in the network toward `host`. Raises: OSError"""
    family, _, _, _, peer = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)  # UDP: sends nothing
        return str(probe.getsockname()[0])


def has_loopback() -> bool:
    """Return True if this host's loopback interface is up; False in a container without any network."""
    try:
        return is_loopback(address_toward(LOOPBACK))
    except OSError:
        return False


def is_loopback(address: str) -> bool:
    """Return True for a loopback address; False for any other address, and for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
