#!/usr/bin/env python3
"""The search for faulty hosts on a synthetic fleet: its time for many hosts, and its figures beside those of the paper.

With --autoencoder it also answers whether Minder's denoiser, an LSTM-VAE for each metric, finds more than the windows'
means: both get the best of a range of margins on some fleets, and are compared on others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import host_fleet
import numpy as np
from host_fleet import Fleet, fleets, make_fleet

from megascale.observe.host_outliers import (
    OutlierSettings,
    find_host_outliers,
    outliers_in_series,
)
from megascale.observe.host_series import WATCHED, HostSeries, HostTable, read_series

MARGINS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
TRAINING, CHOICE, TEST = 1000, 1, (101, 102)
"""Seeds of the fleets: healthy ones to train on, those that choose a margin, and those of the figures."""

SeriesOf = Callable[[HostTable], Sequence[HostSeries]]


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. Exit status: 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1500, help="hosts of the timed call; default %(default)s")
    parser.add_argument("--figures", action="store_true", help="precision and recall, and the two ablations")
    parser.add_argument("--autoencoder", action="store_true", help="compare with an LSTM-VAE for each metric")
    options = parser.parse_args(words)
    print(time_table(options.hosts), flush=True)
    if options.figures:
        settings = OutlierSettings()
        print("| search | margin | precision | recall | F1 |\n|---|---|---|---|---|")
        for name, one in (("as it is", settings), ("without continuity", replace(settings, continuity_s=0.0))):
            figures = scores(test_fleets(), aligned, (settings.margin,), one)
            print(f"| {name} | {settings.margin} | {format_score(figures[settings.margin])} |", flush=True)
    if options.autoencoder:
        compare_autoencoder()
    return 0


def time_table(hosts: int) -> str:
    """Return a Markdown table of the time of a call with a quarter of an hour of samples of 8 GPUs and NICs each."""
    host_fleet.DEVICES.update(gpu=[f"gpu{i}" for i in range(8)], infiniband=[f"mlx5_{i}.1" for i in range(8)])
    fleet = make_fleet(np.random.default_rng(0), hosts, "gpu power", disturbances=10)
    lines = ["| hosts | samples | wall s | CPU s | found |", "|---|---|---|---|---|"]
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        found = find_host_outliers(fleet.table)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        names = ", ".join(sorted({outlier.node for outlier in found}))
        lines.append(f"| {hosts} | {len(fleet.table.value):,} | {wall:.2f} | {cpu:.2f} | {names} ({fleet.culprit}) |")
    host_fleet.DEVICES.update(gpu=host_fleet.DEVICES["gpu"][:4], infiniband=host_fleet.DEVICES["infiniband"][:2])
    return "\n".join(lines)


def test_fleets() -> Iterable[Fleet]:
    """Yield the fleets of the figures."""
    for seed in TEST:
        yield from fleets(seed)


Score = tuple[float, float, float]


def aligned(table: HostTable) -> list[HostSeries]:
    """Return the series as they are compared."""
    settings = OutlierSettings()
    return read_series(table, settings.sample_s, settings.gap_s)


def scores(
    cases: Iterable[Fleet], series_of: SeriesOf, margins: Sequence[float], settings: OutlierSettings
) -> dict[float, Score]:
    """Return precision, recall and F1 of the hosts that are told with each margin."""
    told, right, faulty = dict.fromkeys(margins, 0), dict.fromkeys(margins, 0), 0
    for fleet in cases:
        faulty += fleet.culprit is not None
        series = series_of(fleet.table)
        for margin in margins:
            one = replace(settings, margin=margin)
            found = (outliers_in_series(fleet.table.nodes, part, WATCHED[part.metric].floor, one) for part in series)
            nodes = {outlier.node for outliers in found for outlier in outliers}
            told[margin] += len(nodes)
            right[margin] += fleet.culprit in nodes
    return {margin: _score(told[margin], right[margin], faulty) for margin in margins}


def _score(told: int, right: int, faulty: int) -> Score:
    precision, recall = right / max(1, told), right / max(1, faulty)
    return precision, recall, 2 * precision * recall / max(1e-9, precision + recall)


def format_score(figures: Score) -> str:
    """Return cells of a Markdown table."""
    return " | ".join(f"{value:.3f}" for value in figures)


def compare_autoencoder() -> None:
    """Train the autoencoders, and print the figures of both methods on the same fleets."""
    from host_autoencoder import Denoiser, train_denoiser  # imports torch

    random = np.random.default_rng(TRAINING)
    healthy = [make_fleet(random, 32) for _ in range(12)]
    denoisers: dict[str, Denoiser] = {}
    for metric, series in _by_metric(healthy).items():
        denoisers[metric], loss = train_denoiser([one.values for one in series])
        print(f"trained {metric}: loss {loss:.4f}", flush=True)

    def denoised(table: HostTable) -> list[HostSeries]:
        series = aligned(table)
        return [replace(one, values=denoisers[one.metric].denoise(one.values).astype(np.float32)) for one in series]

    choice = [fleet for index, fleet in enumerate(fleets(CHOICE)) if index % 4 < 2]
    print("| method | margin | precision | recall | F1 |\n|---|---|---|---|---|")
    for name, series_of in (("means of windows", aligned), ("LSTM-VAE, then means", denoised)):
        chosen = scores(choice, series_of, MARGINS, OutlierSettings())
        margin = max((figures[2], one) for one, figures in chosen.items())[1]
        figures = scores(test_fleets(), series_of, (margin,), OutlierSettings())
        print(f"| {name} | {margin} | {format_score(figures[margin])} |", flush=True)


def _by_metric(cases: Sequence[Fleet]) -> dict[str, list[HostSeries]]:
    found: dict[str, list[HostSeries]] = {}
    for fleet in cases:
        for series in aligned(fleet.table):
            found.setdefault(series.metric, []).append(series)
    return found


if __name__ == "__main__":
    sys.exit(main())
