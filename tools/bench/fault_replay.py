"""Published failures replayed through driver and policy in simulated time, for several sizes of a job.

    .venv/bin/python tools/bench/fault_replay.py --gpus 1024 4096 16384

Prints a table for each mix: effective training time with the driver and with restart by requeue, nodes replaced with
and without a fault, spares, and stops that need a person.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from megascale.config.fault import FaultConfig
from megascale.fault.failure_mixes import MIXES
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the replays and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--mix", choices=list(MIXES), nargs="+", default=list(MIXES), help="failures (all)")
    parser.add_argument("--days", type=float, default=54.0, help="length of the run (54)")
    parser.add_argument("--spares", type=int, help="spare nodes (enough for a day's lost nodes in 99%% of days)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(arguments)
    plans = [ReplayPlan(gpus, options.days, options.spares, seed=options.seed) for gpus in options.gpus]
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
