"""The suspect of the flight recorder's dumps, and the verdict about the states made of them, with its chain of waits:
dumps made by hand in torch's format, and dumps of real ranks.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale.core.rank import Rank
from megascale.operate.diagnose.hang import flight
from megascale.operate.diagnose.hang.hang import Verdict, hang_verdict
from megascale.operate.diagnose.hang.wait_chain import wait_chain, waiting_sets
from megascale.operate.diagnose.hang.waits import wait_graph
from tests.operate.diagnose.hang.dumps import START, Recorder
from tests.worlds import run_world

WORLD = [0, 1, 2, 3]


def recorders(**groups: list[int]) -> list[Recorder]:
    return [Recorder(rank, f"node{rank // 2}", **groups) for rank in WORLD]


def write(folder: Path, ranks: list[Recorder]) -> None:
    for rank in ranks:
        rank.write(folder)


def stuck(folder: Path, victim: int = 3) -> list[Recorder]:
    """Write the dumps of ranks whose `victim` does not start the second all-reduce."""
    ranks = recorders(dp=WORLD)
    for rank in ranks:
        rank.collective("dp", at=0)
        if rank.rank != victim:
            rank.collective("dp", at=1, done=False)
    write(folder, ranks)
    return ranks


@pytest.mark.parametrize("victim", WORLD)
def test_the_rank_that_never_joined_is_named(victim: int, tmp_path: Path) -> None:
    stuck(tmp_path, victim)
    found = flight.find_suspect(tmp_path)
    assert found is not None and (found.rank, found.host) == (victim, f"node{victim // 2}")
    others = ", ".join(str(rank) for rank in WORLD if rank != victim)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(START + 1))
    assert found.reason == f"never joined all_reduce 2 of group dp, in which ranks {others} wait since {since}"


def test_a_rank_without_a_dump_is_the_suspect(tmp_path: Path) -> None:
    stuck(tmp_path)
    (tmp_path / "node1_rank_3").unlink()
    found = flight.find_suspect(tmp_path)
    assert found is not None and (found.rank, found.host) == (3, None)
    assert str(found).startswith("rank 3 never joined") and str(found).endswith("; it left no dump")
    (tmp_path / "node1_rank_2").unlink()  # as when a whole host has gone
    found = flight.find_suspect(tmp_path)
    assert found is not None and found.rank == 2 and found.reason.endswith("no dump, nor did rank 3")


def test_through_ranks_that_wait_themselves(tmp_path: Path) -> None:
    """Rank 0 waits for 1 in dp, 1 for a message of 2, and 2 for 3 in tp."""
    ranks = recorders(dp=[0, 1], pp=[1, 2], tp=[2, 3])
    ranks[0].collective("dp", at=4, done=False)
    ranks[1].message("pp", "recv", 2, at=3, done=False)
    ranks[2].collective("tp", "all_gather_into_tensor", at=2, done=False)
    write(tmp_path, ranks)
    found = flight.find_suspect(tmp_path)
    assert found is not None and found.rank == 3
    assert found.reason.startswith("never joined all_gather_into_tensor 1 of group tp, in which rank 2 waits since ")


def test_a_receive_that_is_posted_early_does_not_hide_the_stuck_rank(tmp_path: Path) -> None:
    """Every rank has a receive in flight; the last operation of the stuck rank started first."""
    ranks = recorders(pp=WORLD, dp=WORLD)
    for rank in ranks:
        rank.message("pp", "recv", (rank.rank + 1) % 4, at=0.1 * rank.rank, done=False)
        if rank.rank != 1:
            rank.collective("dp", at=5 + rank.rank, done=False)
    write(tmp_path, ranks)
    found = flight.find_suspect(tmp_path)
    assert found is not None and found.rank == 1


def test_a_message_that_was_not_sent(tmp_path: Path) -> None:
    ranks = recorders(pp=WORLD)
    for rank in ranks[:2]:  # one that has arrived does not count
        rank.message("pp", "send" if rank.rank == 0 else "recv", 1 - rank.rank)
    ranks[1].message("pp", "recv", 0, at=1, done=False)
    write(tmp_path, ranks)
    found = flight.find_suspect(tmp_path)
    assert found is not None and found.rank == 0
    assert found.reason.startswith("never sent the message of group pp for which rank 1 waits since ")


def test_a_message_that_was_not_received(tmp_path: Path) -> None:
    ranks = recorders(pp=WORLD)
    ranks[2].message("pp", "send", 1, at=1, done=False)
    write(tmp_path, ranks)
    found = flight.find_suspect(tmp_path)
    assert found is not None and found.rank == 1
    assert found.reason.startswith("never received the message of group pp that rank 2 sends since ")


def test_messages_of_a_batch_end_with_it(tmp_path: Path) -> None:
    ranks = recorders(tp=WORLD)
    for rank in ranks:
        peers = [other for other in WORLD if other != rank.rank]
        pairs = [(what, peer) for peer in peers for what in ("send", "recv")]
        rank.batch("tp", *pairs)
        if rank.rank != 2:
            rank.batch("tp", *pairs, at=1, done=False)
    write(tmp_path, ranks)
    found = flight.find_suspect(tmp_path)
    assert found is not None and found.rank == 2


def test_no_suspect_when_all_ranks_have_joined(tmp_path: Path) -> None:
    ranks = recorders(dp=WORLD)
    for rank in ranks:
        rank.collective("dp", done=False)
    assert flight.find_suspect(tmp_path) is None
    write(tmp_path, ranks)
    assert flight.find_suspect(tmp_path) is None


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("touch planted",)


@pytest.mark.parametrize("content", [pickle.dumps({"version": Evil()}), b"", b"\x80\x02}", pickle.dumps([1]), b"text"])
def test_a_dump_that_cannot_be_read_blames_nobody(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stuck(tmp_path)
    (tmp_path / "node1_rank_3").write_bytes(content)
    assert flight.find_suspect(tmp_path) is None
    assert not (tmp_path / "planted").exists()


DAMAGE = {
    **{f"time {time}": {"time_created_ns": time} for time in (1e27, 1e30, float("inf"), float("nan"), 10**30, "1")},
    "sequence as text": {"collective_seq_id": "2"},
    "sequence as a list": {"p2p_seq_id": [2]},
    "group without a description": {"process_group": ("hash of dp",)},
    "group that has no hash": {"process_group": ([], "dp")},
    "state as a number": {"state": 1},
    "name as bytes": {"profiling_name": b"nccl:all_reduce"},
    "retired as text": {"retired": "yes"},
    "kind as nothing": {"is_p2p": None},
}


def without_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that rank 3 with a damaged dump is no suspect, and that a single line names the file."""
    assert flight.find_suspect(folder) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"megascale: the flight record {folder / 'node1_rank_3'} cannot be read and is left out: ")


@pytest.mark.parametrize("field", DAMAGE)
def test_a_field_of_another_type_is_damage(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = stuck(tmp_path)
    ranks[3].entries[0] |= DAMAGE[field]
    ranks[3].write(tmp_path)
    without_traceback(tmp_path, capsys)


@pytest.mark.parametrize(
    "ranks",
    ["[[0],[1]]", "[0.0, 3.0]", '["0", "3"]', "[" * 100_000, [[0], [1]], [0.5], ["3"], [True], None, 4, "4", "{"],
)
def test_ranks_of_another_shape_are_damage(ranks: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = pickle.loads(stuck(tmp_path)[3].as_bytes())
    dump["pg_config"]["hash of dp"]["ranks"] = ranks
    (tmp_path / "node1_rank_3").write_bytes(pickle.dumps(dump, protocol=2))
    without_traceback(tmp_path, capsys)


@pytest.mark.parametrize("field", DAMAGE)
def test_a_damaged_dump_of_a_rank_that_waits_hides_no_other(field: str, tmp_path: Path) -> None:
    """The first dump is damaged; the other dumps suffice."""
    ranks = stuck(tmp_path)
    ranks[0].entries[-1] |= DAMAGE[field]
    ranks[0].write(tmp_path)
    found = flight.find_suspect(tmp_path)
    assert found is not None and found.rank == 3


def test_a_dump_that_was_cut_off(tmp_path: Path) -> None:
    ranks = stuck(tmp_path)
    whole = ranks[3].as_bytes()
    for length in range(0, len(whole), 50):
        (tmp_path / "node1_rank_3").write_bytes(whole[:length])
        assert flight.find_suspect(tmp_path) is None


def test_a_dump_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck(tmp_path)
    monkeypatch.setattr(flight, "MOST_BYTES", 100)
    assert flight.find_suspect(tmp_path) is None


def test_an_attempt_begins_without_the_dumps_of_the_one_before(tmp_path: Path) -> None:
    flight.make_dump_folder(tmp_path)
    assert (tmp_path / flight.DUMP_FOLDER).stat().st_mode & 0o777 == 0o700
    folder = tmp_path / flight.DUMP_FOLDER
    stuck(folder)
    (folder / "notes.txt").touch()
    flight.make_dump_folder(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert Path(flight.dump_prefix(tmp_path)).parent == folder


def test_the_command(tmp_path: Path) -> None:
    stuck(tmp_path)
    command = [sys.executable, "-m", "megascale.operate.diagnose.hang.flight", str(tmp_path), str(tmp_path / "none")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}: rank 3 on node1 never joined all_reduce 2 of group dp")
    assert lines[1] == f"{tmp_path / 'none'}: no rank is known to wait for another"


def verdict_in(folder: Path) -> tuple[Verdict, list[str]]:
    """Return the verdict, and the chain of waits."""
    records = flight.read_dumped_records(folder, "run", len(WORLD))
    verdict = hang_verdict(records, {})
    suspect = flight.find_suspect(folder)
    assert suspect is not None and suspect.rank in verdict.ranks
    return verdict, list(map(str, wait_chain(waiting_sets(wait_graph(records)), verdict.ranks)))


@pytest.mark.parametrize("victim", WORLD)
def test_the_verdict_about_the_rank_that_never_joined(victim: int, tmp_path: Path) -> None:
    stuck(tmp_path, victim)
    verdict, chain = verdict_in(tmp_path)
    assert (verdict.kind, verdict.ranks, verdict.group, verdict.confident) == ("collective", (victim,), "dp", True)
    first = min(rank for rank in WORLD if rank != victim)
    assert chain == [f"rank {first} waits in all_reduce 2 of group dp (with 2 other ranks) for rank {victim}"]


def test_the_verdict_about_a_rank_without_a_dump(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("messages", [[("send", 1), ("recv", 1)], []])
def test_the_verdict_about_a_batch_of_messages(messages: list[tuple[str, int]], before: int, tmp_path: Path) -> None:
    """The group may have had no collective, and the batch's messages have left the recorder's ring."""
    ranks = recorders(cp=[0, 1])
    for rank in ranks[:2]:
        for _ in range(before):
            rank.collective("cp")
        peer = 1 - rank.rank
        rank.batch("cp", ("send", peer), ("recv", peer))
    ranks[0].batch("cp", *messages, at=1, done=False)
    write(tmp_path, ranks)
    verdict, _ = verdict_in(tmp_path)
    assert verdict.ranks == (1,)


def test_a_rank_with_several_operations_waits_for_its_device(tmp_path: Path) -> None:
    ranks = recorders(dp=WORLD, tp=[0, 1])
    ranks[0].collective("tp", at=1, done=False)
    for rank in (ranks[0], ranks[2], ranks[3]):
        rank.collective("dp", at=2, done=False)
    write(tmp_path, ranks)
    verdict, _ = verdict_in(tmp_path)
    assert (verdict.kind, verdict.ranks) == ("collective", (1,))


def test_nothing_is_made_of_dumps_that_cannot_tell(tmp_path: Path) -> None:
    assert flight.read_dumped_records(tmp_path, "run", 4) == {}
    stuck(tmp_path)
    (tmp_path / "node1_rank_2").write_bytes(b"cut")
    assert flight.read_dumped_records(tmp_path, "run", 4) == {}


def leave_a_real_dump(rank: Rank, folder: Path) -> None:
    """Run an all-reduce of three ranks that the second joins only after the other ranks have written their dumps."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    group = dist.new_group([0, 1, 2], use_local_synchronization=True, group_desc="dp")
    assert group is not None
    dist.all_reduce(torch.ones(3), group=group)
    late = rank.rank == 1
    work = None if late else dist.all_reduce(torch.ones(3), group=group, async_op=True)
    while late and len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    dump = pickle.loads(_dump_fr_trace(True, True, False))
    name = group.group_name  # gloo does not tell the ranks of its groups, as NCCL does
    dump["pg_config"] = {name: {"name": name, "desc": "dp", "ranks": "[0, 1, 2]"}}
    (folder / f"h_rank_{rank.rank}").write_bytes(pickle.dumps(dump, protocol=2))
    if work is None:
        dist.all_reduce(torch.ones(3), group=group)
    else:
        work.wait()


@pytest.mark.slow
def test_real_dumps_of_real_ranks(tmp_path: Path) -> None:
    run_world(3, leave_a_real_dump, tmp_path)
    found = flight.find_suspect(tmp_path)
    assert found is not None and (found.rank, found.host) == (1, "h")
    assert found.reason.startswith("never joined all_reduce 2 of group dp, in which ranks 0, 2 wait since ")
