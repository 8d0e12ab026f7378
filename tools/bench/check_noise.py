"""Duration of the checks of a node against false findings, from repeated measurements on this machine.

Every check runs `--rounds` times with each duration. The measurements are the values of healthy nodes: jobs of
`--nodes` nodes are drawn from them, judged as `megascale doctor nodes` does, and findings counted, with 0, 1 and 2
further measurements of a low value. A slow node has SLOW times a drawn value. `--rounds 0` takes values with the noise
of SIMULATED instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megascale.catalog.checks import CHECKS
from megascale.core.network import LOOPBACK
from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret
from megascale.operate.health.checks.runner import run_check
from megascale.operate.health.compare import compare_high

DURATIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "memory": [{"bytes": 16 << 20}, {"bytes": 64 << 20}, {"bytes": 256 << 20}],
    "disk": [{"disk_bytes": 8 << 20}, {"disk_bytes": 32 << 20}, {"disk_bytes": 128 << 20}],
    "loopback": [{"seconds": 0.1}, {"seconds": 0.4}, {"seconds": 1.6}],
    "link": [{"seconds": 0.05}, {"seconds": 0.2}, {"seconds": 0.8}],
    "gemm": [{"gemm_s": 0.1}, {"gemm_s": 0.5}, {"gemm_s": 2.0}],
}
"""Arguments by check, from short to long; the second are the defaults."""

SIMULATED = {
    "spread 1%": (0.01, 0.0),
    "spread 5%": (0.05, 0.0),
    "spread 10%": (0.1, 0.0),
    "spread 5%, and 5 of 100 measurements disturbed": (0.05, 0.05),
    "spread 5%, and 20 of 100 measurements disturbed": (0.05, 0.2),
}
"""Standard deviation, and share of measurements that are slowed down to between 0.2 and 1 times the value."""

SLOW = 0.5
USUAL_NOISE = 0.05
"""Noise of a simulated check."""

DRAWS = 16_000
REPEATS = (0, 1, 2)


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="measurements of every check (default: 20)")
    parser.add_argument("--nodes", type=int, default=16, help="nodes of a simulated job (default: 16)")
    parser.add_argument("--checks", nargs="+", choices=DURATIONS, default=list(DURATIONS))
    parser.add_argument("--output", help="also write all values to this file, as JSON")
    options = parser.parse_args()
    os.environ.setdefault(SECRET_VARIABLE, new_secret())
    measured = asyncio.run(measure(options.checks, options.rounds)) if options.rounds else {}
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump({name: list(some) for name, some in measured.items()}, file)
    if not options.rounds:
        measured = {name: [(0.0, simulated(*noise))] for name, noise in SIMULATED.items()}
    print("| check | seconds | spread | false findings of 1,000 nodes, measured 1, 2, 3 times | a slow node missed |")
    print("|---|---|---|---|---|")
    for name, runs in measured.items():
        for seconds, values in runs:
            print(row(name, seconds, values, options.nodes))


def simulated(spread: float, disturbed: float) -> list[float]:
    """Return values of healthy nodes."""
    rng = random.Random(0)
    slowed = (rng.uniform(0.2, 1.0) if rng.random() < disturbed else 1.0 for _ in range(DRAWS))
    return [rng.gauss(1.0, spread) * factor for factor in slowed]


async def measure(names: Sequence[str], rounds: int) -> dict[str, list[tuple[float, list[float]]]]:
    """Return the median duration and the values of every check, by duration; rounds alternate between durations."""
    opened = [await run_check("open_endpoint", {"host": LOOPBACK}, 60.0) for _ in range(2)]
    own, peer = (str(one.details["address"]) for one in opened)
    measured: dict[str, list[tuple[float, list[float]]]] = {}
    try:
        for name in names:
            cases: list[tuple[list[float], list[float]]] = [([], []) for _ in DURATIONS[name]]
            for _ in range(rounds):
                for arguments, (seconds, values) in zip(DURATIONS[name], cases, strict=True):
                    start = time.monotonic()
                    result = await run_check(name, {**arguments, "own": own, "peers": {"peer": peer}}, 120.0)
                    seconds.append(time.monotonic() - start)
                    values.append(result.value or 0.0)
            measured[name] = [(statistics.median(seconds), values) for seconds, values in cases]
    finally:
        for address in (own, peer):
            await run_check("close_endpoint", {"address": address}, 60.0)
    return measured


def row(name: str, seconds: float, values: Sequence[float], nodes: int) -> str:
    """Return a line of the table."""
    rng, noise = random.Random(0), CHECKS[name].facts["noise"] if name in CHECKS.cards else USUAL_NOISE
    false, missed = dict.fromkeys(REPEATS, 0), 0
    for _ in range(DRAWS // nodes):
        job = {str(node): rng.choice(values) for node in range(nodes)}
        low = [node for node, one in compare_high(job, noise).items() if one.low]
        false[0] += len(low)
        for repeat in REPEATS[1:]:
            again = {node: max(job[node], rng.choice(values)) for node in low}
            job |= again
            low = [node for node, one in compare_high(job, noise).items() if one.low]
            false[repeat] += len(low)
        slow = {**job, "0": SLOW * max(rng.choice(values) for _ in REPEATS)}
        missed += not compare_high(slow, noise)["0"].low
    jobs = DRAWS // nodes
    median = statistics.median(values)
    low_quartile, _, high_quartile = statistics.quantiles(values, n=4)
    rates = ", ".join(f"{1000 * count / (jobs * nodes):.1f}" for count in false.values())
    return f"| {name} | {seconds:.1f} | {(high_quartile - low_quartile) / median:.0%} | {rates} | {missed / jobs:.0%} |"


if __name__ == "__main__":
    main()
