"""Collectives in pieces: the result and bytes of the whole collective, under any timing."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.recorded_events import recorded_events
from tests.runs import send_messages
from tests.worlds import run_world

SIZES = [(1, 1), (1, 4), (3, 4), (4, 4), (7, 4), (10, 3), (64, 5), (1001, 4)]
"""Rows of a rank's part, and the largest number of pieces, which rarely divides the rows."""

WIDTH = 6


def open_group(rank: Rank, seed: int) -> Any:
    """Open a group that sends messages, with random delays."""
    from megascale.comm.open_group import open_group
    from megascale.record.recorder import Recorder

    group = open_group("tp", range(rank.world_size), rank.rank, Recorder(), slot_bytes=1 << 12)
    group.recorder.step = 1  # outside of steps nothing is counted
    send_messages(group)
    chance = random.Random(f"{seed} {rank.rank}")

    def delay(operation: str, label: object) -> None:
        if chance.random() < 0.3:
            time.sleep(chance.expovariate(1 / 1e-3))

    group.fault_hook = delay
    return group


def part_of(rank: int, rows: int, number: int = 0) -> Any:
    """The input of a rank, different in every row."""
    import torch

    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * number + rank))


def assert_recorded(group: Any, name: str, calls: int, nbytes: int) -> None:
    """The event log has the numbered pieces of a single collective since the last call."""
    traffic = group.recorder.take_traffic()["tp"]
    assert (traffic.calls, traffic.bytes) == (calls, nbytes)
    events = recorded_events(group.recorder)[-calls:]
    numbers = [f" {i + 1}/{calls}" for i in range(calls)] if calls > 1 else [""]
    assert [(event.name, event.label) for event in events] == [(name, f"layer 3{number}") for number in numbers]


def gather(rank: Rank, seed: int) -> int:
    """All-gather in pieces; return the number of cases."""
    import torch

    from megascale.comm.collectives import all_gather, all_gather_pieces

    group, world = open_group(rank, seed), rank.world_size
    for number, (rows, pieces) in enumerate(SIZES, 1):
        part = part_of(rank.rank, rows, number)
        expected = torch.empty(world * rows, WIDTH)
        all_gather(group, expected, part)
        assert torch.equal(expected, torch.cat([part_of(r, rows, number) for r in range(world)]))
        group.recorder.take_traffic()
        out = torch.full_like(expected, torch.nan)
        seen: list[int] = []
        coming = all_gather_pieces(group, out, part, pieces, label="layer 3")
        assert len(coming) == 1 + min(rows, pieces)
        for runs, pending in coming:
            pending.wait()
            for run in runs:
                assert torch.equal(out[run], expected[run]), "what has been waited for is there"
                seen += range(run.start, run.stop)
        assert coming[0][0] == [slice(rank.rank * rows, (rank.rank + 1) * rows)], "the own rows first"
        assert sorted(seen) == list(range(world * rows))
        assert torch.equal(out, expected)
        assert_recorded(group, "all_gather", min(rows, pieces), expected.nbytes)
    return number


@pytest.mark.parametrize("world", [2, 3, 4])
def test_an_all_gather_in_pieces_is_an_all_gather(world: int) -> None:
    assert run_world(world, gather, world) == [len(SIZES)] * world


def scatter(rank: Rank, seed: int) -> list[str]:
    """Reduce-scatter in pieces; return the outputs as text."""
    import torch

    from megascale.comm.collectives import ReduceScatterPieces, reduce_scatter

    group, world, results = open_group(rank, seed), rank.world_size, []
    for number, (rows, pieces) in enumerate(SIZES):
        source = part_of(rank.rank, world * rows, number)
        expected = torch.empty(rows, WIDTH)
        reduce_scatter(group, expected, source.clone())
        everyone = sum(part_of(r, world * rows, number) for r in range(world))
        torch.testing.assert_close(expected, everyone.view(world, rows, WIDTH)[rank.rank])
        group.recorder.take_traffic()
        out, full = torch.full_like(expected, torch.nan), torch.full_like(source, torch.nan)
        written: list[int] = []
        leaving = ReduceScatterPieces(group, out, full, pieces, label="layer 3")
        assert len(leaving.rows_per_send) == min(rows, pieces) + 1
        for wave in leaving.rows_per_send:
            for run in wave:  # nothing is written before its turn
                full[run] = source[run]
                written += range(run.start, run.stop)
            leaving.send_piece()
        leaving.wait_and_reduce()
        assert sorted(written) == list(range(world * rows))
        assert leaving.rows_per_send[-1] == [slice(rank.rank * rows, (rank.rank + 1) * rows)], "the own rows last"
        assert torch.equal(out, expected), "the same bits"
        assert torch.equal(full, source), "what was summed is left as it was"
        assert_recorded(group, "reduce_scatter", min(rows, pieces), full.nbytes)
        results.append(str(out.tolist()))
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_reduce_scatter_in_pieces_is_a_reduce_scatter(world: int) -> None:
    results = run_world(world, scatter, world)
    assert len({result[-1] for result in results}) == world


def entangle(rank: Rank, seed: int) -> None:
    """Run several collectives in pieces in flight, waited for in a different order on every rank."""
    import torch

    from megascale.comm.collectives import ReduceScatterPieces, all_gather_pieces

    group, world, rows = open_group(rank, seed), rank.world_size, 50
    chance = random.Random(f"{seed} {rank.rank} order")
    for number in range(8):
        part, source = part_of(rank.rank, rows, number), part_of(rank.rank, world * rows, number)
        gathered, full, out = torch.empty(world * rows, WIDTH), torch.empty_like(source), torch.empty(rows, WIDTH)
        leaving = ReduceScatterPieces(group, out, full, 4)
        first, *waves = leaving.rows_per_send
        for run in first:
            full[run] = source[run]
        leaving.send_piece()
        coming = all_gather_pieces(group, gathered, part, 3)
        for wave in waves:
            for run in wave:
                full[run] = source[run]
            leaving.send_piece()
        steps = [leaving.wait_and_reduce, *(pending.wait for _, pending in coming)]
        chance.shuffle(steps)
        for step in steps:
            step()
        assert torch.equal(gathered, torch.cat([part_of(r, rows, number) for r in range(world)]))
        everyone = sum(part_of(r, world * rows, number) for r in range(world))
        torch.testing.assert_close(out, everyone.view(world, rows, WIDTH)[rank.rank])


@pytest.mark.parametrize("seed", range(2))
def test_pieces_of_several_collectives_keep_apart(seed: int) -> None:
    run_world(3, entangle, seed)
