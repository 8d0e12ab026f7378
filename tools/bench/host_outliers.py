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
from dataclasses import dataclass, replace

import host_fleet
import numpy as np
from host_fleet import Fleet, fleets, make_fleet

from megascale.operate.diagnose.slow.host_outliers import (
    HostOutlier,
    OutlierSettings,
    distances,
    find_host_outliers,
    outliers_in_series,
    window_means,
)
from megascale.operate.diagnose.slow.host_series import WATCHED, HostSeries, HostTable, read_series

MARGINS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
JOINT_MARGINS = (-1.0, 0.0, 1.0, 2.0, 4.0)
TRAINING, CHOICE, TEST = 1000, 1, (101, 102)
"""Seeds of the fleets: healthy ones to train on, those that choose a margin, and those of the figures."""

SIZES = (4, 8, 16, 32, 64, 128)
"""Numbers of hosts of a fleet."""


@dataclass(frozen=True)
class Extent:
    """The sizes of the fleets, and the seeds of those of the figures."""

    sizes: tuple[int, ...] = SIZES
    seeds: tuple[int, ...] = TEST

    def test_fleets(self) -> Iterable[Fleet]:
        """Yield the fleets of the figures."""
        for seed in self.seeds:
            yield from fleets(seed, self.sizes)


SeriesOf = Callable[[HostTable], Sequence[tuple[HostSeries, float]]]
"""Makes the series to compare, each with the difference that means nothing."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool. Exit status: 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1500, help="hosts of the timed call; default %(default)s")
    parser.add_argument("--figures", action="store_true", help="precision and recall, and the two ablations")
    parser.add_argument("--autoencoder", action="store_true", help="compare with an LSTM-VAE for each metric")
    parser.add_argument("--training-steps", type=int, default=1500, help="of an autoencoder; default %(default)s")
    parser.add_argument("--most-hosts", type=int, default=SIZES[-1], help="of a fleet; default %(default)s")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=TEST, help="of the fleets of the figures; default %(default)s"
    )
    options = parser.parse_args(words)
    extent = Extent(tuple(size for size in SIZES if size <= options.most_hosts), tuple(options.seeds))
    print(time_table(options.hosts), flush=True)
    if options.figures:
        print_figures(extent)
    if options.autoencoder:
        compare_autoencoder(extent, options.training_steps)
    return 0


def print_figures(extent: Extent) -> None:
    """Print the figures, and those of the paper's two ablations. One distance for all gets the best of its margins."""
    settings = OutlierSettings()
    print("| search | margin | precision | recall | F1 |\n|---|---|---|---|---|")
    for name, series_of, margins, one in (
        ("as it is", aligned, (settings.margin,), settings),
        ("without continuity", aligned, (settings.margin,), replace(settings, continuity_s=0.0)),
        ("one distance for all metrics", joint, JOINT_MARGINS, settings),
    ):
        figures = scores(extent.test_fleets(), series_of, margins, one)
        margin = max((score[2], margin) for margin, score in figures.items())[1]
        print(f"| {name} | {margin} | {format_score(figures[margin])} |", flush=True)


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


Score = tuple[float, float, float]


def aligned(table: HostTable) -> list[tuple[HostSeries, float]]:
    """Return the series as they are compared."""
    settings = OutlierSettings()
    series = read_series(table, settings.sample_s, settings.gap_s)
    return [(one, WATCHED[one.metric].floor) for one in series]


def joint(table: HostTable) -> list[tuple[HostSeries, float]]:
    """Return one series: the distance of each host over all metrics together, the paper's ablation."""
    squares = []
    for series, floor in aligned(table):
        means = window_means(series.values, 1)
        apart = distances(means, floor, OutlierSettings())
        for device in sorted(set(series.devices)):
            chosen = [index for index, name in enumerate(series.devices) if name == device]
            of_node = np.full((len(means), len(table.nodes)), np.nan)
            of_node[:, series.nodes[chosen]] = apart[:, chosen]
            squares.append(of_node**2)
    known = ~np.isnan(squares).all(axis=(0, 1))
    total = np.sqrt(np.nansum(np.stack(squares), axis=0))[:, known].astype(np.float32)
    devices = [""] * int(known.sum())
    return [(replace(series, nodes=np.flatnonzero(known), devices=devices, values=total), 0.0)]


def one_distance(table: HostTable, margin: float) -> list[HostOutlier]:
    """Compare hosts by one distance over all metrics together."""
    ((series, floor),) = joint(table)
    return outliers_in_series(table.nodes, series, floor, OutlierSettings(margin=margin))


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
            found = (outliers_in_series(fleet.table.nodes, part, floor, one) for part, floor in series)
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


def compare_autoencoder(extent: Extent, training_steps: int) -> None:
    """Train the autoencoders, and print the figures of both methods on the same fleets."""
    from host_autoencoder import Denoiser, train_denoiser  # imports torch

    random = np.random.default_rng(TRAINING)
    healthy = [make_fleet(random, 32) for _ in range(12)]
    denoisers: dict[str, Denoiser] = {}
    for metric, series in _by_metric(healthy).items():
        denoisers[metric], loss = train_denoiser([one.values for one in series], training_steps)
        print(f"trained {metric}: loss {loss:.4f}", flush=True)

    def denoised(table: HostTable) -> list[tuple[HostSeries, float]]:
        return [
            (replace(one, values=denoisers[one.metric].denoise(one.values).astype(np.float32)), floor)
            for one, floor in aligned(table)
        ]

    choice = [fleet for index, fleet in enumerate(fleets(CHOICE, extent.sizes)) if index % 4 < 2]
    print("| method | margin | precision | recall | F1 |\n|---|---|---|---|---|")
    for name, series_of in (("means of windows", aligned), ("LSTM-VAE, then means", denoised)):
        chosen = scores(choice, series_of, MARGINS, OutlierSettings())
        margin = max((figures[2], one) for one, figures in chosen.items())[1]
        figures = scores(extent.test_fleets(), series_of, (margin,), OutlierSettings())
        print(f"| {name} | {margin} | {format_score(figures[margin])} |", flush=True)


def _by_metric(cases: Sequence[Fleet]) -> dict[str, list[HostSeries]]:
    found: dict[str, list[HostSeries]] = {}
    for fleet in cases:
        for series, _ in aligned(fleet.table):
            found.setdefault(series.metric, []).append(series)
    return found


if __name__ == "__main__":
    sys.exit(main())
