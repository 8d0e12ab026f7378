"""The cost of the order of a pipeline's receives, simulated (`lab.message_times`). Two orders are compared: the sender
places the receive, which no waits for devices deadlock; a receive is posted two actions ahead of its consumer, which
some waits deadlock. A forward takes 1, a backward 2, a message a share of a forward.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator

from lab.message_times import Times, posted_ahead, times_of
from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import placement_of
from megascale.schedule.ir import Kind, build_schedule, each_action
from megascale.schedule.lower import lower

SHARES = (0.02, 0.1)
"""Seconds of a message; of a forward, which takes 1."""

JITTER = 0.1
"""Largest relative change of an action's time, where times vary."""

Shape = tuple[str, int, int, int]
"""Schedule, p, v, m."""

SHAPES: tuple[Shape, ...] = (
    ("1f1b", 4, 1, 16), ("1f1b", 8, 1, 32), ("1f1b", 16, 1, 96), ("interleaved_1f1b", 2, 2, 8),
    ("interleaved_1f1b", 4, 2, 16), ("interleaved_1f1b", 4, 5, 16), ("interleaved_1f1b", 8, 6, 32),
    ("interleaved_1f1b", 8, 6, 96),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--most", type=int, default=6, help="largest p of the last rows; default %(default)s")
    parser.add_argument("--draws", type=int, default=8, help="of times that vary; default %(default)s")


def run(options: argparse.Namespace) -> int:
    """Print the tables."""
    print(
        "Forwards take 1, backwards 2, messages 0.02 or 0.1; times vary by up to 10%. Cost: increase of a step's time;"
    )
    print("`a -> b`: posted ahead, and placed by the senders.\n")
    print("| schedule | p, v, m | cost | cost, times vary | compute beside messages | most open receives |")
    print("|---|---|---:|---:|---:|---:|")
    for shape in SHAPES:
        print(row(shape, options.draws), flush=True)
    print(f"\nThe largest cost among all pipelines of 2 to {options.most} ranks, with v to 6 and m of p to 4 p.\n")
    print("| schedule | pipelines | cost | times vary, m = p | times vary, m > p |\n|---|---:|---:|---:|---:|")
    for name in ("1f1b", "interleaved_1f1b"):
        shapes = list(pipelines(name, options.most))
        even = max(cost(shape, 0) for shape in shapes)
        varied = [(cost(shape, options.draws), shape) for shape in shapes]
        one, more = (max(cost for cost, (_, p, _, m) in varied if (m > p) is many) for many in (False, True))
        print(f"| {name} | {len(shapes)} | {even:.2%} | {one:.2%} | {more:.2%} |", flush=True)
    return 0


def pipelines(name: str, most: int) -> Iterator[Shape]:
    """Yield the shapes of the last rows; interleaving needs a multiple of p micro-batches, and 1F1B p or more."""
    chunks = (1,) if SCHEDULES[name].facts["v"] == 1 else range(2, 7)
    for p, v, groups in itertools.product(range(2, most + 1), chunks, range(1, 5)):
        yield name, p, v, groups * p


def row(shape: Shape, draws: int) -> str:
    """Format a row: both orders as `posted ahead -> placed by the sender`."""
    ahead, sender = compare(shape, SHARES[-1])
    shares, receives = (f"{ahead.beside:.0%} -> {sender.beside:.0%}", f"{ahead.open} -> {sender.open}")
    name, *sizes = shape
    costs = f"{cost(shape, 0):.2%} | {cost(shape, draws):.2%}"
    return f"| {name} | {', '.join(map(str, sizes))} | {costs} | {shares} | {receives} |"


def cost(shape: Shape, draws: int) -> float:
    """Return the largest relative increase of the step over SHARES; of the means of `draws` draws of varying times."""
    increases = []
    for share in SHARES:
        pairs = [compare(shape, share, seed) for seed in range(draws)] if draws else [compare(shape, share)]
        ahead, sender = (sum(times.last for times in side) for side in zip(*pairs, strict=True))
        increases.append(sender / ahead - 1)
    return max(increases)


def compare(shape: Shape, message: float, seed: int | None = None) -> list[Times]:
    """Return the times of receives posted ahead, and of those that senders place. `seed`: of times that vary."""
    name, p, v, m = shape
    placement = placement_of(name, p, v)
    compute = build_schedule(SCHEDULES[name].load(), p, v, m)
    lowered = [[*each_action(order)] for order in lower(compute, placement)]

    chance, jitter = random.Random(seed), 0.0 if seed is None else JITTER
    seconds = {
        (rank, action): (1.0 if action.kind is Kind.F else 2.0) * (1 + chance.uniform(-jitter, jitter))
        for rank, order in enumerate(lowered)
        for action in order
    }
    ahead = [posted_ahead(order) for order in lowered]
    return [times_of(lists, placement, seconds, message) for lists in (ahead, lowered)]
