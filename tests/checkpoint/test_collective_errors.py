"""An error on one rank is raised on all."""

from __future__ import annotations

from typing import Any

from megascale.core.rank import Rank
from tests.worlds import run_world


def attempts(rank: Rank) -> list[Any]:
    """Results, or class, text and hint of the errors."""
    from megascale.checkpoint.collective_errors import OtherRankError, on_all_ranks, on_first_rank
    from megascale.checkpoint.format.manifest import DamagedError
    from megascale.comm.group import Group
    from megascale.core.errors import CheckpointError

    group = Group("world", tuple(range(rank.world_size)), rank.rank)

    def fails(errors: dict[int, Exception]) -> int:
        if rank.rank in errors:
            raise errors[rank.rank]
        return rank.rank

    def caught(call: Any, errors: dict[int, Exception]) -> tuple[Any, ...]:
        try:
            return (call(group, lambda: fails(errors), "work"),)
        except CheckpointError as error:
            return type(error).__name__, error.message, error.hint

    damaged, full = DamagedError("no end"), CheckpointError("no space", hint="make some")
    return [
        caught(on_first_rank, {}),
        caught(on_first_rank, {0: damaged, 1: full}),
        caught(on_all_ranks, {}),
        caught(on_all_ranks, {1: full, 2: damaged}),
        caught(on_all_ranks, {0: OtherRankError("ask another"), 2: damaged}),
        caught(on_all_ranks, {2: KeyError("x")}),
    ]


def test_all_ranks_raise_the_error_of_one() -> None:
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
