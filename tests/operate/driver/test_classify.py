"""The first cause of a fault is named, and its consequences are folded under it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from megascale.core.errors import Exit
from megascale.operate.channel.messages import RankEnd
from megascale.operate.diagnose.hang.hang import Verdict
from megascale.operate.driver.classify import classify_ends, classify_hang, classify_lost_nodes, innermost_frame

NODES = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}


def ended(rank: int, status: int, time: float, **more: Any) -> RankEnd:
    return RankEnd(rank, status, time, **more)


def lost_peer(rank: int, time: float, *peers: int) -> RankEnd:
    return ended(
        rank, 1, time, error="Connection closed by peer", error_kind="LostPeerError", peer_lost=True, peers=peers
    )


def classify(*ends: RankEnd) -> Any:
    return classify_ends({end.rank: end for end in ends}, NODES)


def test_a_killed_rank_is_named_and_ranks_that_lost_it_follow() -> None:
    found = classify(lost_peer(0, 1.0, 1), lost_peer(1, 1.1, 3), ended(3, -signal.SIGKILL, 1.2), lost_peer(2, 1.3, 3))
    assert (found.class_, found.culprit.ranks, found.culprit.nodes) == ("process", (3,), ("b",))
    assert found.what == "rank 3 on b was killed by SIGKILL"
    assert found.followers == (0, 1, 2)


def test_ranks_that_were_killed_at_the_same_moment_are_all_culprits() -> None:
    killed = [ended(rank, -signal.SIGKILL, 1.0 + rank / 10, patterns=("linux_oom_kill",)) for rank in (1, 2)]
    found = classify(lost_peer(0, 1.0, 1), *killed, ended(4, -signal.SIGABRT, 0.9, patterns=("peer_lost",)))
    assert found.what == "ranks 1, 2 on a, b were killed by SIGKILL, out of memory"
    assert (found.culprit.ranks, found.culprit.nodes, found.followers) == ((1, 2), ("a", "b"), (0, 4))
    ended_by_order = classify(killed[0], ended(2, -signal.SIGKILL, 1.2, stopped=True))
    assert (ended_by_order.culprit.ranks, ended_by_order.followers) == ((1,), (2,))


def test_an_end_of_which_only_another_launcher_knows_the_status_is_said_to_be_unknown() -> None:
    found = classify(RankEnd(1, None, 1.0))
    assert found.what == "rank 1 on a ended before the job's end, and only its launcher knows with which status"
    assert (found.class_, found.signature) == ("process", "process: unknown status of rank 1")


def test_the_earliest_of_several_causes_counts() -> None:
    found = classify(ended(2, -11, 5.0), ended(1, 1, 4.0, error="boom", error_kind="RuntimeError"))
    assert (found.class_, found.culprit.ranks) == ("software", (1,))


def test_ranks_that_an_error_names_are_the_culprits() -> None:
    error = {"error": "replicas differ", "error_kind": "ReplicasDifferError", "exit_status": 93, "named": (3,)}
    found = classify(*(ended(rank, 93, 1.0 + rank, **error) for rank in range(6)))
    assert (found.class_, found.culprit.ranks, found.culprit.nodes) == ("divergence", (3,), ("b",))
    assert found.followers == (0, 1, 2, 4, 5)


def test_an_abort_by_the_watchdog_is_a_consequence() -> None:
    found = classify(ended(0, -signal.SIGABRT, 1.0, patterns=("nccl_watchdog",)), ended(5, -signal.SIGKILL, 2.0))
    assert found.culprit.ranks == (5,)


@pytest.mark.parametrize(
    ("end", "class_", "permanent"),
    [
        ({"status": 1, "error": "x", "error_kind": "TypeError"}, "software", True),
        ({"status": 1, "error": "x", "error_kind": "RuntimeError"}, "software", False),
        ({"status": 3, "error": "x", "error_kind": "DataError", "exit_status": Exit.DATA}, "data", True),
        ({"status": 2, "error": "x", "error_kind": "ConfigError", "exit_status": Exit.CONFIG}, "software", True),
        ({"status": 93, "error": "x", "error_kind": "DivergenceError", "exit_status": 93}, "divergence", True),
        ({"status": 4, "error": "x", "error_kind": "CheckpointError", "exit_status": 4}, "storage", False),
        ({"status": -signal.SIGBUS}, "storage", False),
        ({"status": -signal.SIGSEGV}, "process", False),
        ({"status": 0}, "process", False),
    ],
)
def test_classes_of_ends(end: dict[str, Any], class_: str, permanent: bool) -> None:
    found = classify(ended(rank=1, time=1.0, **end))
    assert (found.class_, found.permanent) == (class_, permanent)


def test_an_end_without_an_error_is_a_failure_even_with_status_0() -> None:
    assert "ended with status 0 and no error" in classify(ended(1, 0, 1.0), ended(2, 0, 1.0, in_order=True)).what


def test_nodes_that_only_lose_each_other_are_a_partial_network() -> None:
    found = classify(lost_peer(0, 1.0, 4), lost_peer(2, 1.0, 5), lost_peer(5, 1.1, 1))
    assert (found.class_, found.culprit.nodes) == ("network", ("c",)), "c is in all broken links"
    both = classify(lost_peer(0, 1.0, 2), lost_peer(3, 1.0, 1))
    assert both.culprit.nodes == ("a", "b"), "either may be at fault"
    assert "a and b do not reach each other" in both.what


def test_lost_peers_without_names_blame_nobody() -> None:
    found = classify(lost_peer(0, 1.0), lost_peer(1, 1.0))
    assert (found.class_, found.culprit.nodes) == ("unknown", ())


def test_a_lost_node() -> None:
    found = classify_lost_nodes({"b": "no heartbeat for 6.1 s"}, 1.0, (2, 3), (5, 0))
    assert found.what == "node b was lost: no heartbeat for 6.1 s"
    assert found.followers == (0, 5)


def test_a_hang_has_the_innermost_frame_as_evidence() -> None:
    stack = 'Thread 1 (idle): "MainThread"\n    sleep (inject.py:4)\n    step (step.py:9)\n'
    assert innermost_frame(stack) == "sleep (inject.py:4)"
    found = classify_hang(Verdict("stopped", (3,), "dp", ("state T",)), 1.0, NODES, tuple(NODES), {3: stack})
    assert (found.class_, found.culprit.nodes) == ("hang", ("b",))
    assert found.evidence == ("state T", "rank 3 in sleep (inject.py:4)")
    assert found.followers == (0, 1, 2, 4, 5)


def test_several_ranks_wait_for_data() -> None:
    found = classify_hang(Verdict("network", (0, 2), "pp"), 1.0, NODES, (0, 1, 2), {})
    assert found.what == "ranks 0, 2 on a, b wait for data that other ranks have sent"
    assert (found.class_, found.signature) == ("network", "network: waiting of ranks 0, 2")
