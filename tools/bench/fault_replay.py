"""Published failures replayed through driver and policy in simulated time, for several sizes of a job.

    .venv/bin/python tools/bench/fault_replay.py --gpus 1024 4096 16384
    .venv/bin/python tools/bench/fault_replay.py --gpus 16384 --mix llama3 --sensitivity --seeds 5

Prints a table for each mix: effective training time with the driver and with restart by requeue, nodes replaced with
and without a fault, spares, and stops that need a person; with --sensitivity a table of the plan with one assumption
changed at a time: means over the seeds, with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

from megascale.config.fault import FaultConfig
from megascale.fault.failure_mixes import MIXES, FailureMix
from megascale.fault.replay import ReplayPlan, ReplayResult, replay

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


def variants(plan: ReplayPlan) -> Iterator[tuple[str, ReplayPlan]]:
    """Yield the plan, and the plan with one assumption changed: verdicts that are right, the refill of spares."""
    yield "as assumed", plan
    for named in (0.8, 1.0):
        yield f"{named:.0%} of hang verdicts right", replace(plan, named=named)
    for hours in (0.25, 8, 24):
        yield f"spares refilled in {hours:g} h", replace(plan, refill_s=hours * 3600)
    yield "no spares", replace(plan, spares=0)


def sensitivity(mix: FailureMix, plan: ReplayPlan, seeds: int) -> Iterator[str]:
    """Yield the lines of a table: each variant over `seeds` seeds."""
    yield "| GPUs | assumption | effective training time | nodes replaced | without a fault | stops |"
    yield "|---|---|---|---|---|---|"
    for what, variant in variants(plan):
        results = replay(mix, [replace(variant, seed=plan.seed + number) for number in range(seeds)], FaultConfig())
        share = spread([result.effective_share for result in results], "{:.2%}".format)
        counts = [
            spread([getattr(result, name) for result in results], "{:.0f}".format)
            for name in ("replaced", "healthy", "stops")
        ]
        yield f"| {plan.gpus:,} | {what} | {share} | {' | '.join(counts)} |"


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Return the mean of values, and in parentheses the least and the most if they differ."""
    low, high = text(min(values)), text(max(values))
    return text(statistics.mean(values)) + (f" ({low} to {high})" if low != high else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the replays and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--mix", choices=list(MIXES), nargs="+", default=list(MIXES), help="failures (all)")
    parser.add_argument("--days", type=float, default=54.0, help="length of the run (54)")
    parser.add_argument("--spares", type=int, help="spare nodes (enough for a day's lost nodes in 99%% of days)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sensitivity", action="store_true", help="change one assumption at a time")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds of --sensitivity (5)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(arguments)
    plans = [ReplayPlan(gpus, options.days, options.spares, seed=options.seed) for gpus in options.gpus]
    if options.sensitivity:
        for name in options.mix:
            print(f"{MIXES[name].name}; {options.days:g} days; {options.seeds} seeds\n")
            for plan in plans:
                print("\n".join(sensitivity(MIXES[name], plan, options.seeds)), end="\n\n")
        return
    results = {name: replay(MIXES[name], plans, FaultConfig()) for name in options.mix}
    if options.json:
        print(json.dumps({name: [asdict(result) for result in found] for name, found in results.items()}))
        return
    for name, found in results.items():
        mix = MIXES[name]
        print(f"{mix.name}: {mix.source}; {options.days:g} days\n\n{HEAD}")
        print("\n".join(map(row, found)), end="\n\n")


if __name__ == "__main__":
    main()
