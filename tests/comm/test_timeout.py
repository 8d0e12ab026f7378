"""Every group has the configured timeout, at start-up and in training."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megascale.config.launch import CommConfig, LaunchConfig
from megascale.core.errors import Exit
from megascale.core.rank import Rank
from megascale.operate.node.failure import is_peer_lost
from tests.jobs import Job, job_config
from tests.runs import GPT, send_messages
from tests.worlds import run_world


def limits(rank: Rank) -> list[list[float]]:
    """Timeouts in seconds of all process groups and shared-memory rings: as opened, after the first step, within
    `extended`, and after it.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    from megascale.comm.mesh import open_mesh
    from megascale.comm.shared_memory import SharedMemoryTransport
    from megascale.layout.stages import looped
    from megascale.layout.topology import Topology

    dist.distributed_c10d._get_default_timeout = None  # a group without a timeout fails
    mesh = open_mesh(
        Topology(tp=2, pp=2),
        rank.rank,
        tied=True,
        placement=looped(2, 2),
        launch=LaunchConfig(start_timeout_s=70),
        comm=CommConfig(timeout_s=7),
    )
    rings = [group.transport for group in mesh.groups if isinstance(group.transport, SharedMemoryTransport)]
    assert len(rings) == 3 and len(_world.pg_map) == 5  # tp, tied, world; and a channel each way

    def seen() -> list[float]:
        backends = [group._get_backend(torch.device("cpu")) for group in _world.pg_map]
        found = [backend.options._timeout.total_seconds() for backend in backends]
        found += [counter.timeout for ring in rings for counter in (ring._posted, ring._read)]
        return sorted(set(found))

    told = [seen()]
    mesh.timeout.tighten()
    told.append(seen())
    with mesh.timeout.extended():
        told.append(seen())
    told.append(seen())
    return told


def test_every_group_has_the_timeout_of_the_configuration() -> None:
    assert run_world(4, limits) == [[[70.0], [7.0], [70.0], [7.0]]] * 4


def wait_in_vain(rank: Rank, transports: list[str]) -> list[tuple[str, bool, float]]:
    """Rank 0's errors in collectives with rank 1, which is stuck: (message, is a lost peer, seconds)."""
    import torch
    import torch.distributed as dist

    from megascale.comm.collectives import all_reduce
    from megascale.comm.mesh import open_mesh
    from megascale.layout.topology import Topology

    meshes, comm = [], CommConfig.model_construct(timeout_s=0.5)  # a file may not ask for less
    for transport in transports:
        topology = Topology(pp=2) if transport == "pipeline" else Topology(tp=2)
        meshes.append(open_mesh(topology, rank.rank, tied=False, launch=LaunchConfig(start_timeout_s=60), comm=comm))
        if transport in ("exchange", "gloo"):
            send_messages(meshes[-1].tp, backend=transport == "gloo", timeout=meshes[-1].timeout)
    found = []
    for transport, mesh in zip(transports, meshes, strict=True):
        if rank.rank == 1:
            continue
        mesh.timeout.tighten()
        start = time.perf_counter()
        with pytest.raises(RuntimeError) as raised:
            if transport == "pipeline":
                mesh.p2p.receive(torch.zeros(1), 1).wait()
            else:
                all_reduce(mesh.tp, torch.zeros(1))
        found.append((str(raised.value), is_peer_lost(raised.value), time.perf_counter() - start))
    with meshes[-1].timeout.extended():
        if rank.rank == 1:
            time.sleep(4)
        dist.barrier()
    return found


def test_a_rank_that_is_stuck_ends_the_wait_for_it() -> None:
    for text, lost, seconds in run_world(2, wait_in_vain, ["shared", "exchange", "gloo", "pipeline"])[0]:
        assert lost, text
        assert 0.4 < seconds < 3, text  # shared memory checks the peer's process once a second


@pytest.mark.slow
def test_a_job_ends_whose_rank_is_stuck_in_training(tmp_path: Path) -> None:
    """The timeout is `comm.timeout_s`, not the much longer `launch.start_timeout_s`."""
    settings = {"parallel__tp": 2, "parallel__pp": 2, "train__steps": 10**6, "train__precision": "fp32"}
    limits = {"comm__timeout_s": 3.0, "launch__start_timeout_s": 1000.0}
    job = Job(job_config(tmp_path, GPT, **settings, **limits))
    job.wait_for_step(2)
    os.kill(job.ranks()[2], signal.SIGSTOP)
    start = time.monotonic()
    status, _, err = job.end()
    assert 2 < time.monotonic() - start < 60
    assert status == Exit.UNCLASSIFIED and "timed out waiting" in err.lower()
    named = [line for line in err.splitlines() if line.startswith("megascale: rank 2 of 4 on ")]
    assert named and "stopped: rank 2 is in phase step" in named[0], err
