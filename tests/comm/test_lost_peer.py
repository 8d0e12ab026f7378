"""Errors of a communication that lost another rank: told by type and place, with group, label and peers."""

from __future__ import annotations

import os
import time

import pytest
from torch.distributed import DistBackendError, DistStoreError

from megascale.comm.lost_peer import lost_peer_error
from megascale.core.errors import LostPeerError
from megascale.core.rank import Rank
from megascale.operate.node.failure import is_peer_lost
from tests.worlds import run_world

RANKS = (4, 5, 6)


@pytest.mark.parametrize("error", [DistBackendError("no phrase"), DistStoreError("none"), RuntimeError("broken pipe")])
def test_torchs_errors_of_a_communication_name_group_and_peers(error: RuntimeError) -> None:
    lost = lost_peer_error(error, "all_reduce 'layer 3 qkv'", "tp", RANKS, (4, 6))
    assert lost is not None and lost.peers == (4, 6) and is_peer_lost(lost)
    assert str(lost) == f"all_reduce 'layer 3 qkv' of group tp lost one of ranks 4, 6: {error}"


def test_a_transport_that_knows_the_peer_counts_within_the_group() -> None:
    lost = lost_peer_error(LostPeerError("process 7 has ended", peers=(1,)), "send", "dp", RANKS, (4, 6))
    assert lost is not None and lost.peers == (5,)
    assert str(lost) == "send of group dp lost rank 5: process 7 has ended"


def test_other_errors_are_left_alone() -> None:
    assert lost_peer_error(RuntimeError("size mismatch"), "send", "dp", RANKS, (4,)) is None


def left_alone(rank: Rank) -> tuple[str, str]:
    """Rank 0's error in a collective with rank 1, whose messages never come, and what the store knows of rank 1."""
    import torch

    from megascale.comm.collectives import all_reduce
    from megascale.comm.control import _process_key, announce_exit, describe_lost
    from megascale.comm.mesh import open_mesh
    from megascale.config.launch import CommConfig, LaunchConfig
    from megascale.layout.topology import Topology
    from tests.runs import send_messages

    limits = {"launch": LaunchConfig(start_timeout_s=60), "comm": CommConfig.model_construct(timeout_s=0.3)}
    mesh = open_mesh(Topology(tp=2), rank.rank, tied=False, **limits)
    send_messages(mesh.tp, backend=False, timeout=mesh.timeout)
    mesh.world.control.barrier("opened")
    if rank.rank == 1:
        announce_exit("rank 1 of 2 on node7: no space")
        announce_exit("rank 1 of 2 on node7: a later error")
        time.sleep(2)
        return "", ""
    mesh.timeout.tighten()
    with pytest.raises(LostPeerError) as raised:
        all_reduce(mesh.tp, torch.zeros(1), label="layer 3 qkv")
    assert raised.value.peers == (1,)
    told = describe_lost(0, raised.value.peers)
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    place = store.get(_process_key(1)).decode().split(" ")
    child = os.fork()
    if child == 0:
        os._exit(0)
    store.set(_process_key(1), " ".join([str(child), *place[1:]]))  # a process that has ended, not waited for
    time.sleep(0.2)
    return f"{raised.value}{told}", describe_lost(0, [1])


def test_the_error_of_a_collective_says_who_is_lost_and_what_is_known() -> None:
    first, second = run_world(2, left_alone)[0]
    assert first.startswith("all_reduce 'layer 3 qkv' of group tp lost rank 1: "), first
    assert "; no answer from rank 1 on " in first
    assert first.endswith("; the first to say so: rank 1 of 2 on node7: no space")
    assert "; the process of rank 1 has ended" in second
