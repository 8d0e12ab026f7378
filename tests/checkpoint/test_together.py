"""What fails on one rank is raised on all."""

from __future__ import annotations

from typing import Any

from megascale.core.rank import Rank
from tests.worlds import run_world


def attempts(rank: Rank) -> list[Any]:
    """Results, and the kinds and texts of what is raised."""
    from megascale.checkpoint.manifest import DamagedError
    from megascale.checkpoint.together import OtherRankError, by_all, by_first
    from megascale.comm.group import Group
    from megascale.core.errors import CheckpointError

    group = Group("world", tuple(range(rank.world)), rank.rank)

    def fails(errors: dict[int, Exception]) -> int:
        if rank.rank in errors:
            raise errors[rank.rank]
        return rank.rank

    def caught(call: Any, errors: dict[int, Exception]) -> tuple[Any, ...]:
        try:
            return (call(group, lambda: fails(errors), "work"),)
        except CheckpointError as error:
            return type(error).__name__, error.what, error.mend

    damaged, full = DamagedError("no end"), CheckpointError("no space", mend="make some")
    return [
        caught(by_first, {}),
        caught(by_first, {0: damaged, 1: full}),
        caught(by_all, {}),
        caught(by_all, {1: full, 2: damaged}),
        caught(by_all, {0: OtherRankError("ask another"), 2: damaged}),
        caught(by_all, {2: KeyError("x")}),
    ]


def test_all_raise_what_one_has_found() -> None:
    damage = "megascale ckpt verify says whether that is all"
    for rank, found in enumerate(run_world(3, attempts)):
        assert found == [
            (0,),
            ("DamagedError", "no end", damage),
            (rank,),
            ("CheckpointError", "rank 1: no space", "make some"),
            ("DamagedError", "rank 2: no end", damage),
            ("CheckpointError", "rank 2: KeyError: 'x'", ""),
        ]
