"""`megascale trace`: the events of a run's ranks as one timeline and a summary, without torch."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from megascale.cli.arguments import add_json, add_run, own_file, rank_ranges, step_range
from megascale.cli.command_output import writing
from megascale.cli.trace_selection import filter_steps, format_spans, missing_parts, read_ranks, select_steps
from megascale.core.errors import Exit
from megascale.core.files import write_text
from megascale.core.process import exit_on_stop_signals, without_gc
from megascale.operate.show import chrome_trace
from megascale.operate.show.charts import shapes, timeline
from megascale.operate.show.summary import format_shares, mean_over_ranks, summarize

MAX_TABLE_RANKS = 16  # number of ranks above which the table shows means over ranks instead of a row per rank
MAX_SVG_RANKS = 8  # maximum number of ranks in a picture without --ranks


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run(sub)
    steps = "steps A to B, both included, or A alone (default: the steps that are complete on every chosen rank)"
    sub.add_argument("--steps", metavar="A:B", type=step_range, help=steps)
    sub.add_argument("--ranks", metavar="LIST", type=rank_ranges, help="ranks, such as 0,1,4-7 (default: all)")
    output = "the timeline (default: RUN/timeline.json)"
    sub.add_argument("--output", metavar="FILE.json", type=own_file(".json", chrome_trace.FILE_START), help=output)
    limits = f"without --steps: of the last step; without --ranks: of {MAX_SVG_RANKS} ranks at most"
    sub.add_argument(
        "--svg", metavar="FILE.svg", type=own_file(".svg", shapes.FILE_START), help=f"also draw a picture ({limits})"
    )
    add_json(sub)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    folder = Path(options.run)
    path = options.output or folder / "timeline.json"
    with exit_on_stop_signals(), without_gc():
        records = read_ranks(folder, options.ranks, options.steps)
        steps = select_steps(records, options.steps, lambda: read_ranks(folder, options.ranks, None))
        ranks = [filter_steps(record.events, steps) for record in records]
        with writing(path):
            stats = chrome_trace.write_trace(path, ranks, chrome_trace.first_start(ranks))
        if options.svg:
            pictured = ranks[:MAX_SVG_RANKS] if options.ranks is None else ranks
            if options.steps is None:
                last = max(event.step for events in pictured for event in events.events)
                pictured = [filter_steps(events, {last}) for events in pictured]
            with writing(options.svg):
                write_text(options.svg, timeline.render_svg(pictured))
        shares = [share for events in ranks for share in summarize(events)]
    numbers = [events.rank for events in ranks]
    notes = list(missing_parts(records, steps, stats, options))
    if options.json:
        facts = {"timeline": str(path), "svg": options.svg and str(options.svg), "ranks": numbers, "steps": steps}
        facts |= {**asdict(stats), "dropped": sum(events.dropped for events in ranks), "notes": notes}
        print(json.dumps(facts | {"per_step": [share.as_json() for share in shares]}))
        return Exit.OK
    selection = f"{format_spans('step', steps)} of {format_spans('rank', numbers)}"
    print(f"{path}: {selection}, {stats.slices:,} slices, {stats.arrows:,} arrows")
    print("open it at https://ui.perfetto.dev (nothing is uploaded) or in chrome://tracing")
    if options.svg:
        print(f"{options.svg}: the picture")
    averaged = len(numbers) > MAX_TABLE_RANKS
    single = f" and rank; --ranks of at most {MAX_TABLE_RANKS} for single ranks" if averaged else ""
    print(f"\nmeans per step{single}:")
    print(format_shares(mean_over_ranks(shares) if averaged else shares))
    if notes:
        print("", *notes, sep="\n")
    return Exit.OK
