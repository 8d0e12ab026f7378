#!/usr/bin/env python3
"""Compare training across two sites with data parallelism over two ranks: the quickstart's model and corpus, equal
tokens, the bytes that a site sends, and the validation loss after the last step.

`make quickstart` makes the data. Finished runs are not repeated: give another --output after a change of keys.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from curves import ONE_PROCESS, Planned, path, plan, table

from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.layout.parameters import all_params
from megascale.layout.topology import Topology
from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret
from megascale.optim.compression import Compression

CONFIG, SITES = "configs/quickstart.toml", 2

WAYS: dict[str, tuple[str, ...]] = {
    "data parallelism": (),
    "DiLoCo": ("sites.every=100",),
    "SparseLoCo": ("sites.every=50", "sites.top_k=0.11", "sites.bits=2"),
}
"""Settings of each way; a site has half the samples of a step, and evaluates all."""

HEAD = ("way", "settings", "MB sent a step", "of data parallelism", "validation loss", "gap")


def main() -> None:
    """Run the experiment, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="steps of a run (default: 500)")
    parser.add_argument("--output", type=path, default="runs/sites", metavar="DIR", help="folder of the runs")
    parser.add_argument("--port", type=int, default=7100, help="first port of the meeting points (default: 7100)")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings of every run")
    options = parser.parse_intermixed_args()
    os.environ[SECRET_VARIABLE] = new_secret()
    with ThreadPoolExecutor(len(WAYS)) as threads:
        measured = list(threads.map(lambda way: measure(way, options), WAYS))
    together = measured[0]
    rows = [
        (way, " ".join(f"`{word}`" for word in settings), f"{one.sent / 1e6:.4g}", f"1/{together.sent / one.sent:,.1f}",
         f"{one.loss:.3f}", f"{one.loss - together.loss:+.3f}")
        for (way, settings), one in zip(WAYS.items(), measured, strict=True)
    ]  # fmt: skip
    print(table(rows, HEAD))


class Measured(NamedTuple):
    """The bytes that a site sends to the other, as a mean of steps, and the validation loss at the end."""

    sent: float
    loss: float


def plan_way(way: str, options: argparse.Namespace) -> tuple[list[Planned], str]:
    """Return the runs of a way, one a site, and the address where they meet."""
    settings, address = WAYS[way], f"127.0.0.1:{options.port + list(WAYS).index(way)}"
    jobs = SITES if settings else 1
    words = [
        *ONE_PROCESS[:-1], f"parallel.dp={SITES // jobs}", "batch.micro=2", f"batch.global={2 * SITES // jobs}",
        f"train.steps={options.steps}", "train.log_every=1", f"train.eval_every={options.steps}",
        f"train.eval_steps={32 * jobs}", "checkpoint.every=1000000", "observe.event_store=false", *options.words,
    ]  # fmt: skip
    keys = {
        f"{way}-{site}".replace(" ", "-"): [
            *words, *settings,
            *([f"sites.count={jobs}", f"sites.index={site}", f"sites.address={address}"] if settings else []),
        ]
        for site in range(jobs)
    }  # fmt: skip
    return list(plan(CONFIG, options.output, keys).values()), address


def measure(way: str, options: argparse.Namespace) -> Measured:
    """Train at all sites at once."""
    runs, address = plan_way(way, options)
    meeting = subprocess.Popen([sys.executable, "-m", "megascale", "sites", address], stdout=subprocess.DEVNULL)
    try:
        with ThreadPoolExecutor(SITES) as threads:
            curves = list(threads.map(lambda run: run.train(), runs))
    finally:
        meeting.terminate()
        meeting.wait()
    sent = replica_bytes(runs[0].folder) if len(runs) == 1 else site_bytes(load_config(CONFIG, runs[0].words))
    return Measured(sent, curves[0].last)


def site_bytes(config: RunConfig) -> float:
    """Return the bytes of a step that a site of one rank sends to the other: of an outer step, by `every`."""
    lengths, sites = [math.prod(each.local_shape(Topology())) for each in all_params(config.model)], config.sites
    payload = Compression(sites.top_k, sites.bits).compress(torch.zeros(sum(lengths)), lengths)
    return payload.nbytes / sites.every


def replica_bytes(run: Path) -> float:
    """Return the bytes of a step that one of two replicas sends to the other: a ring sends all but its own half."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return float(max(line["communication"]["dp"]["bytes"] for line in lines if "loss" in line)) / SITES


if __name__ == "__main__":
    main()
