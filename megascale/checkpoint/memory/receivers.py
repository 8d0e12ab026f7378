"""Where the ranks of a job receive copies of other hosts (`open_receivers`)."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

from megascale.comm.gloo_interface import first_host, own_address
from megascale.comm.mesh import Mesh
from megascale.core.network import LOOPBACK, is_loopback, reserve_port


class Receiver(NamedTuple):
    """Address and port at which a rank receives copies, and its host's memory: host name, and device and inode of the
    folder of copies, which are equal for ranks that share memory.
    """

    address: str
    port: int
    memory: tuple[str, int, int]


def open_receivers(mesh: Mesh, folder: Path) -> tuple[list[Receiver], socket.socket | None]:
    """Gather the receivers of all ranks, and keep a port for this rank's writers, at the address that other hosts
    reach. None is kept on a job's only host.

    `folder`: this host's folder of copies. The socket takes no connection: while no writer listens, peers are refused,
    and try again until their timeout (`replication.send_replica`).
    """
    control, facts = mesh.world.control, folder.stat()
    memory = socket.gethostname(), facts.st_dev, facts.st_ino
    memories = [tuple(each) for each in control.all_gather(memory, "hosts")]
    if len(set(memories)) == 1:
        return [Receiver(LOOPBACK, 0, memory)] * len(memories), None
    here = own_address(first_host())
    hosts = control.all_gather(here, "addresses")
    if is_loopback(here):  # rank 0's host sees itself under another address than the rest
        here = own_address(next((host for host in hosts if not is_loopback(host)), here))
    reserved = reserve_port(here)
    addresses = control.all_gather((here, reserved.getsockname()[1]), "ports")
    each = zip(addresses, memories, strict=True)
    return [Receiver(address, port, memory) for (address, port), memory in each], reserved
