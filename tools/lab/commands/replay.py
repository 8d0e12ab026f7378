"""Published failures replayed through driver and policy in simulated time, for several sizes of a job.

    .venv/bin/python tools/lab replay --gpus 1024 4096 16384
    .venv/bin/python tools/lab replay --gpus 16384 --sensitivity --seeds 3

Prints a table for each mix: effective training time with the driver and with restart by requeue, nodes replaced with
and without a fault, spares, and stops that need a person; with --sensitivity a table of the plan with one assumption
changed at a time: means over the seeds, with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from lab.failure_mixes import MIXES, FailureMix
from lab.replay import ReplayPlan, ReplayResult, replay
from megascale.config.fault import FaultConfig
from megascale.core.errors import Exit

HEAD = (
    "| GPUs | spares | failures | incidents | effective training time | by requeue | nodes replaced | without a fault "
    "| handled without a person |\n|---|---|---|---|---|---|---|---|---|"
)


def row(result: ReplayResult) -> str:
    """Return a row of the table."""
    alone = 1 - result.stops / result.incidents if result.incidents else 1.0
    return (
        f"| {result.gpus:,} | {result.spares} | {result.failures} | {result.incidents} | {result.effective_share:.2%} "
        f"| {result.requeue_share:.2%} | {result.replaced} | {result.healthy} | {alone:.1%} |"
    )


@dataclass(frozen=True)
class Assumption:
    """What a variant of a replay assumes, in words, and the replay's arguments."""

    text: str
    plan: ReplayPlan
    mix: FailureMix
    settings: FaultConfig = field(default_factory=FaultConfig)


def assumptions(plan: ReplayPlan, mix: FailureMix) -> Iterator[Assumption]:
    """Yield the plan, and the plan with one assumption changed at a time, by a half and by two where it is a time."""
    yield Assumption("as assumed", plan, mix)
    usual, factors = FaultConfig(), (("half", 0.5), ("twice", 2.0))
    for words, factor in factors:
        bounds = {"hang_s": factor * usual.hang_s, "hang_step_times": factor * usual.hang_step_times}
        yield Assumption(f"hangs noticed in {words} the time", plan, mix, usual.model_copy(update=bounds))
    for words, factor in factors:
        yield Assumption(f"restarts in {words} the time", replace(plan, restart=factor), mix)
    for words, factor in factors:
        rarer = replace(mix, device_hours=factor * mix.device_hours)
        yield Assumption(f"{words} the time between failures", plan, rarer)
    yield Assumption("no spares", replace(plan, spares=0), mix)
    yield Assumption("spares refilled in 24 h", replace(plan, refill_s=24 * 3600.0), mix)
    yield Assumption("80% of hang verdicts right", replace(plan, named=0.8), mix)


def sensitivity(mix: FailureMix, plan: ReplayPlan, seeds: int) -> Iterator[str]:
    """Yield the lines of a table: each assumption over `seeds` seeds."""
    yield (
        "| assumption | effective training time | by requeue | nodes replaced | without a fault | spares "
        "| most out at once | stops |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for one in assumptions(plan, mix):
        plans = [replace(one.plan, seed=plan.seed + number) for number in range(seeds)]
        results = replay(one.mix, plans, one.settings)
        shares = [
            spread([getattr(result, name) for result in results], "{:.2%}".format)
            for name in ("effective_share", "requeue_share")
        ]
        counts = [
            spread([getattr(result, name) for result in results], "{:.0f}".format)
            for name in ("replaced", "healthy", "spares", "most_out", "stops")
        ]
        yield f"| {one.text} | {' | '.join(shares + counts)} |"


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Return the mean of values, and in parentheses the least and the most if they differ."""
    low, high = text(min(values)), text(max(values))
    return text(statistics.mean(values)) + (f" ({low} to {high})" if low != high else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--gpus", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--mix", choices=list(MIXES), nargs="+", default=list(MIXES), help="failures (all)")
    parser.add_argument("--days", type=float, default=54.0, help="length of the run (54)")
    parser.add_argument("--spares", type=int, help="spare nodes (enough for a day's lost nodes in 99%% of days)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sensitivity", action="store_true", help="change one assumption at a time")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds of --sensitivity (5)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the replays and print their tables."""
    plans = [ReplayPlan(gpus, options.days, options.spares, seed=options.seed) for gpus in options.gpus]
    if options.sensitivity:
        for name in options.mix:
            print(f"{MIXES[name].name}; {options.days:g} days; {options.seeds} seeds\n")
            for plan in plans:
                print(f"{plan.gpus:,} GPUs\n")
                for line in sensitivity(MIXES[name], plan, options.seeds):
                    print(line, flush=True)  # a row may take minutes
                print()
        return Exit.OK
    results = {name: replay(MIXES[name], plans, FaultConfig()) for name in options.mix}
    if options.json:
        print(json.dumps({name: [asdict(result) for result in found] for name, found in results.items()}))
        return Exit.OK
    for name, found in results.items():
        mix = MIXES[name]
        print(f"{mix.name}: {mix.source}; {options.days:g} days\n\n{HEAD}")
        print("\n".join(map(row, found)), end="\n\n")
    return Exit.OK
