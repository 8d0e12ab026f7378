"""Flight records made of torch's dumps: the verdict is that of the dumps' own analysis, and has its chain of waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.operate.diagnose.hang.flight import find_suspect, read_dumped_records
from megascale.operate.diagnose.hang.hang import Verdict, hang_verdict
from megascale.operate.diagnose.hang.wait_chain import wait_chain, waiting_sets
from megascale.operate.diagnose.hang.waits import wait_graph
from tests.operate.diagnose.hang.test_flight import WORLD, recorders, stuck, write


def verdict_in(folder: Path) -> tuple[Verdict, list[str]]:
    """Return the verdict, and the chain of waits."""
    records = read_dumped_records(folder, "run", len(WORLD))
    verdict = hang_verdict(records, {})
    suspect = find_suspect(folder)
    assert suspect is not None and suspect.rank in verdict.ranks
    return verdict, list(map(str, wait_chain(waiting_sets(wait_graph(records)), verdict.ranks)))


@pytest.mark.parametrize("victim", WORLD)
def test_the_rank_that_never_joined(victim: int, tmp_path: Path) -> None:
    stuck(tmp_path, victim)
    verdict, chain = verdict_in(tmp_path)
    assert (verdict.kind, verdict.ranks, verdict.group, verdict.confident) == ("collective", (victim,), "dp", True)
    first = min(rank for rank in WORLD if rank != victim)
    assert chain == [f"rank {first} waits in all_reduce 2 of group dp (with 2 other ranks) for rank {victim}"]


def test_a_rank_without_a_dump(tmp_path: Path) -> None:
    stuck(tmp_path)
    (tmp_path / "node1_rank_3").unlink()
    verdict, _ = verdict_in(tmp_path)
    assert (verdict.kind, verdict.ranks) == ("unknown", (3,))


def test_a_chain_through_ranks_that_wait_themselves(tmp_path: Path) -> None:
    """Rank 0 waits for 1 in dp, 1 for a message of 2, and 2 for 3 in tp."""
    ranks = recorders(dp=[0, 1], pp=[1, 2], tp=[2, 3])
    ranks[0].collective("dp", at=4, done=False)
    ranks[1].message("pp", "recv", 2, at=3, done=False)
    ranks[2].collective("tp", "all_gather_into_tensor", at=2, done=False)
    write(tmp_path, ranks)
    verdict, chain = verdict_in(tmp_path)
    assert verdict.ranks == (3,)
    assert chain == [
        "rank 0 waits in all_reduce 1 of group dp for rank 1",
        "rank 1 waits in recv 0 of group pp receive 2 for rank 2",
        "rank 2 waits in all_gather_into_tensor 1 of group tp for rank 3",
    ]


def test_a_rank_with_several_operations_waits_for_its_device(tmp_path: Path) -> None:
    ranks = recorders(dp=WORLD, tp=[0, 1])
    ranks[0].collective("tp", at=1, done=False)
    for rank in (ranks[0], ranks[2], ranks[3]):
        rank.collective("dp", at=2, done=False)
    write(tmp_path, ranks)
    verdict, _ = verdict_in(tmp_path)
    assert (verdict.kind, verdict.ranks) == ("collective", (1,))


def test_nothing_is_made_of_dumps_that_cannot_tell(tmp_path: Path) -> None:
    assert read_dumped_records(tmp_path, "run", 4) == {}
    stuck(tmp_path)
    (tmp_path / "node1_rank_2").write_bytes(b"cut")
    assert read_dumped_records(tmp_path, "run", 4) == {}
