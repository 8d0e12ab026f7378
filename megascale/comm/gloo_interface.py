"""The network interface on which gloo listens, chosen without a name of this host.

gloo would look up its host's name, which may have no address, or on Debian a loopback address.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator

from torch.distributed import Store

from megascale.core.errors import Problem
from megascale.core.network import LOOPBACK, address_toward, has_loopback, is_loopback
from megascale.core.rank import launcher_store, on_one_host, rendezvous_endpoint

VARIABLE = "GLOO_SOCKET_IFNAME"

GLOO_STORE_VARIABLE = "GLOO_ENABLE_STORE_V2_API"
"""Environment variable: gloo reads the addresses of a group's ranks in one request, not in two for each rank."""

_SIOCGIFADDR = 0x8915  # of netdevice(7)
_IFREQ = struct.Struct("16s24s")  # name, and a union that begins with a sockaddr_in
_KEY = "address of a host"


def first_host() -> str:
    """Return the name or address of rank 0's host: the store's under megascale's launcher and its agents."""
    return (launcher_store() or rendezvous_endpoint() or (LOOPBACK, 0))[0]


def interface_problems() -> Iterator[Problem]:
    """Find interfaces that this host lacks among those that the user has chosen for gloo, by names and commas."""
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        if name not in there:
            hint = f"one of {', '.join(there)}; unset it, and the interface that reaches rank 0's host is chosen"
            yield Problem("environment", VARIABLE, f"this host has no interface {name!r}", hint)


def publish_address(store: Store) -> None:
    """Tell the other ranks an address at which they reach this host."""
    if not is_loopback(address := own_address(first_host())):
        store.set(_KEY, address)


def prepare_gloo(backend: str, store: Store, world: int) -> str:
    """Set what gloo reads from the environment, for a job of `world` ranks: on hosts with loopback. Returns the backend
    to open: one that needs no network for a rank alone on a host without.
    """
    if not has_loopback():
        if backend != "gloo" or world > 1:
            return backend
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

        return "fake"  # a rank alone communicates with no one
    os.environ.setdefault(GLOO_STORE_VARIABLE, "1")
    choose_gloo_interface(store, one_host=world == 1 or on_one_host(world))
    return backend


def choose_gloo_interface(store: Store, *, one_host: bool) -> None:
    """Set the interface that gloo listens on, unless the user has: loopback for a job on one host, else the interface
    toward rank 0's host. Call after every rank has called `publish_address`.
    """
    if os.environ.get(VARIABLE):
        return
    address = own_address(first_host())
    if one_host or (is_loopback(address) and not store.check([_KEY])):
        os.environ[VARIABLE] = "lo"  # gloo's connections do not leave the host
        return
    if is_loopback(address):  # rank 0's host sees itself under another address than the rest
        address = own_address(store.get(_KEY).decode())
    if (interface := _interface_of(address)) is not None:
        os.environ[VARIABLE] = interface


def own_address(host: str) -> str:
    """Return this host's address in the network toward `host`; loopback if `host` cannot be reached."""
    try:
        return address_toward(host)
    except OSError:
        return LOOPBACK


def _interface_of(address: str) -> str | None:
    """Return the interface with an IPv4 address; None for an address of another kind."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(name.encode(), b""))
            except OSError:  # no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
