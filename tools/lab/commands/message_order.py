"""The cost of the order of a pipeline's receives, simulated (`lab.message_times`): the increase of a step's time over
that of receives that are posted two actions ahead of their consumers, in an order that some waits deadlock. No waits
deadlock where the sender places the receive (`schedule.lower`), in torch's order, and where receives are as early as
they can be without. A forward takes 1, a backward 2, a message a share of a forward.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from lab.message_times import Times, times_of
from lab.receive_orders import Lists, earliest, placed_by_torch, posted_ahead
from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import placement_of
from megascale.schedule.ir import Kind, build_schedule, each_action
from megascale.schedule.lower import lower
from results import pipes

SHARES = (0.02, 0.1)
"""Seconds of a message; of a forward, which takes 1."""

JITTER = 0.1
"""Largest relative change of an action's time, where times vary."""

GOALS = {"1f1b": 0.01, "interleaved_1f1b": 0.003}
"""The cost that is not to be exceeded."""

Shape = tuple[str, int, int, int]
"""Schedule, p, v, m."""

SHAPES: tuple[Shape, ...] = (
    ("1f1b", 4, 1, 16), ("1f1b", 8, 1, 32), ("1f1b", 16, 1, 96), ("interleaved_1f1b", 2, 2, 8),
    ("interleaved_1f1b", 4, 2, 16), ("interleaved_1f1b", 4, 5, 16), ("interleaved_1f1b", 8, 6, 32),
    ("interleaved_1f1b", 8, 6, 96),
)  # fmt: skip

TEXT = """\
Forwards take 1, backwards 2, messages 0.02 or 0.1; times vary by up to 10%. Cost: increase of a step's time over that
with receives posted two actions ahead, an order that can deadlock, with the message of the larger cost; torch's: of the
order of torch's pipelining, which cannot deadlock either. `a -> b`: posted ahead, and placed by the senders.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--most", type=int, default=6, help="largest p of the last rows; default %(default)s")
    parser.add_argument("--draws", type=int, default=8, help="of times that vary; default %(default)s")


def run(options: argparse.Namespace) -> int:
    """Print the tables."""
    head, of_costs = ["schedule", "p, v, m"], ["cost", "torch's", "cost, times vary", "torch's"]
    rows = [row(shape, options.draws) for shape in SHAPES]
    print(TEXT, *pipes([*head, *of_costs, "compute beside messages", "most open receives"], *rows), sep="\n")

    print(f"\nThe largest costs among all pipelines of 2 to {options.most} ranks, with v to 6 and m of p to 4 p.\n")
    largest, verdicts = list[list[str]](), list[str]()
    for name, goal in GOALS.items():
        shapes = list(pipelines(name, options.most))
        even, varied = ([costs(shape, draws) for shape in shapes] for draws in (0, options.draws))
        found = [max(each) for each in (*zip(*even, strict=True), *zip(*varied, strict=True))]
        largest.append([name, str(len(shapes)), f"{goal:.1%}", *percents(found)])
        verdicts.append(f"- {name}: {verdict(max(zip(varied, shapes, strict=True))[1], goal, found, options.draws)}")
    print(*pipes(["schedule", "pipelines", "goal", *of_costs], *largest), "", *verdicts, sep="\n")
    return 0


def verdict(shape: Shape, goal: float, found: Sequence[float], draws: int) -> str:
    """Say whether a goal holds, by the largest costs of all pipelines, and what `shape`, with the largest where times
    vary, costs in other orders.
    """
    even, varied = ("holds" if cost <= goal else "is missed" for cost in (found[0], found[2]))
    ours, torchs, first = percents(costs(shape, draws, with_earliest=True))
    return (
        f"the goal {even} with even times, and {varied} where times vary. The pipeline with the largest cost, "
        f"{label(shape)[1]}, costs {ours}; {torchs} in torch's order, and {first} with receives as early as no waits "
        "deadlock."
    )


def pipelines(name: str, most: int) -> Iterator[Shape]:
    """Yield the shapes of the last rows; interleaving needs a multiple of p micro-batches, and 1F1B p or more."""
    chunks = (1,) if SCHEDULES[name].facts["v"] == 1 else range(2, 7)
    for p, v, groups in itertools.product(range(2, most + 1), chunks, range(1, 5)):
        yield name, p, v, groups * p


def row(shape: Shape, draws: int) -> list[str]:
    """Format a row; the last cells have both orders as `posted ahead -> placed by the sender`."""
    ahead, sender, _ = compare(shape, SHARES[-1])
    beside = [f"{ahead.beside:.0%} -> {sender.beside:.0%}", f"{ahead.open} -> {sender.open}"]
    return [*label(shape), *percents([*costs(shape, 0), *costs(shape, draws)]), *beside]


def label(shape: Shape) -> list[str]:
    """Format the cells of a pipeline."""
    name, *sizes = shape
    return [name, ", ".join(map(str, sizes))]


def percents(values: Iterable[float]) -> list[str]:
    """Format shares."""
    return [f"{value:.2%}" for value in values]


def costs(shape: Shape, draws: int, *, with_earliest: bool = False) -> list[float]:
    """Return the largest relative increases of the step over SHARES, of all orders beside receives posted ahead; of the
    means of `draws` draws of varying times.
    """
    increases = []
    for share in SHARES:
        runs = [compare(shape, share, seed, with_earliest) for seed in (range(draws) if draws else [None])]
        ahead, *others = (sum(times.last for times in side) for side in zip(*runs, strict=True))
        increases.append([other / ahead - 1 for other in others])
    return [max(each) for each in zip(*increases, strict=True)]


def compare(shape: Shape, message: float, seed: int | None = None, with_earliest: bool = False) -> list[Times]:
    """Return the times of receives posted ahead, of those that senders place, and of torch's order. `seed`: of times
    that vary.
    """
    name, p, v, _ = shape
    orders, chance, jitter = orders_of(shape, with_earliest), random.Random(seed), 0.0 if seed is None else JITTER
    seconds = {
        (rank, action): (1.0 if action.kind is Kind.F else 2.0) * (1 + chance.uniform(-jitter, jitter))
        for rank, order in enumerate(orders[1])
        for action in order
    }
    return [times_of(lists, placement_of(name, p, v), seconds, message) for lists in orders]


@lru_cache(1)
def orders_of(shape: Shape, with_earliest: bool) -> Sequence[Lists]:
    """Return the lowered schedule with its receives in each order."""
    name, p, v, m = shape
    placement = placement_of(name, p, v)
    lowered = [[*each_action(order)] for order in lower(build_schedule(SCHEDULES[name].load(), p, v, m), placement)]
    orders = [[posted_ahead(order) for order in lowered], lowered, placed_by_torch(lowered, placement)]
    return [*orders, earliest(lowered, placement)] if with_earliest else orders
