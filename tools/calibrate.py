#!/usr/bin/env python3
"""Fit the efficiencies of configs/hardware and configs/stacks to the trusted rows of tools/calibration, and write the
profiles. Write the errors by source and the worth of every assumption to docs/results/planner.md.

`--check` only prints the errors of the present profiles; `--assumptions` only updates the assumptions' worth,
`--experts` the errors of mixtures of experts, `--split` those of schedules with split backwards, and `--precisions`
those of steps in MXFP8 and NVFP4.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from calibration import assumptions
from calibration import experts as expert_rows
from calibration.fit import EFFICIENCIES, FIRST_YEAR, LOSS, RECENT, RECENT_YEAR, Fit, Profiles, Values, mean_error
from calibration.rows import MANY, ROWS, Row, goals, read, read_block_scaled, read_split
from megascale.config import profile_files
from megascale.core.files import write_text
from megascale.layout.parameters import parameter_count
from megascale.plan.account.flops import mfu
from megascale.plan.simulate import profiles
from results import fill

PAGE = Path(__file__).parents[1] / "docs" / "results" / "planner.md"
ATTAINED = "\n[attained] # tools/calibrate.py\n"


def main() -> None:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=Path, default=ROWS, metavar="FILE.csv", help="measurements (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="fit nothing, print the errors of the present profiles")
    parser.add_argument(
        "--assumptions", action="store_true", help="fit nothing, write the worth of the assumptions to the page"
    )
    parser.add_argument("--experts", action="store_true", help="fit only the rows of experts, write them to the page")
    parser.add_argument("--split", action="store_true", help="fit nothing, write the errors of split backwards")
    parser.add_argument("--precisions", action="store_true", help="fit nothing, write the errors of MXFP8 and NVFP4")
    options = parser.parse_args()
    gc.disable()  # a simulation allocates millions of tuples, none in a cycle
    rows = [row for row in read(options.rows) if row.trusted]
    if options.check:
        print("\n".join([*errors(rows, {"profiles": as_written(rows)}, (by_source, by_parallelism)), "", *experts()]))
        return
    if options.experts:
        fill(PAGE, "experts", "\n".join(experts()))
        return
    if options.split:
        fill(PAGE, "split", "\n".join(split_backwards(rows)))
        return
    if options.precisions:
        fill(PAGE, "precisions", "\n".join(precisions()))
        return
    if options.assumptions:
        write_assumptions(rows)
        return
    began = time.monotonic()
    fit = Fit(rows)
    left_out = fit.left_out()
    for kind in ("hardware", "stacks"):
        write_profiles(kind, fit.values)
    write_text(profile_files.path_of("", "errors"), "\n".join(error_file(rows, left_out)) + "\n")
    fitted = {row.line: fit.known.predicted(row, fit.values) for row in rows}
    page = list(report(rows, fitted, left_out))
    fill(PAGE, "calibration", "\n".join(page))
    fill(PAGE, "experts", "\n".join(experts()))
    fill(PAGE, "split", "\n".join(split_backwards(rows)))
    fill(PAGE, "precisions", "\n".join(precisions()))
    write_assumptions(rows)
    print("\n".join([*page, "", *values_table(fit.values)]))
    print(f"{time.monotonic() - began:.0f} s")


def experts() -> Iterator[str]:
    """Yield the tables of mixtures of experts."""
    return expert_rows.report(expert_rows.read())


def split_backwards(rows: Sequence[Row]) -> Iterator[str]:
    """Tabulate published steps with split backwards, by profiles that are fitted to steps of other schedules: their
    errors, and their gain over 1F1B where that was published for the same job.
    """

    def job(row: Row) -> tuple[str, ...]:
        return tuple(row.text[key] for key in ("source", "gpus", "layers", "batch", "micro"))

    split = list(read_split())
    plain = {job(row): row for row in rows if row.config.parallel.schedule == "1f1b"}
    planned = as_written([*split, *plain.values()])
    yield "| model, GPUs | batch, micro | schedule | measured, s | planned, s | error | over 1F1B, measured | planned |"
    yield f"|---|---|---|{'---:|' * 5}"
    gains, errors = list[float](), list[float]()
    for row in split:
        seconds, whole = planned[row.line], plain.get(job(row))
        errors.append(seconds / row.step_s - 1)
        model, jobs = parameter_count(row.config.model) / 1e9, f"{row.text['batch']}, {row.text['micro']}"
        cells = [f"{model:.1f}B, {row.text['gpus']}", jobs, f"{row.text['schedule']}: {row.config.parallel.schedule}"]
        cells += [f"{row.step_s:.3f}", f"{seconds:.3f}", f"{errors[-1]:+.1%}"]
        if whole is not None:
            measured, ours = whole.step_s / row.step_s, planned[whole.line] / seconds
            gains.append(ours / measured - 1)
            cells += [f"{measured - 1:+.1%}", f"{ours - 1:+.1%}"]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield (
        f"Mean error of {len(errors)} steps {mean(map(abs, errors)):.1%}, of {len(gains)} gains "
        f"{mean(map(abs, gains)):.1%}."
    )


def precisions() -> Iterator[str]:
    """Tabulate published steps in MXFP8 and NVFP4 of dense models, and those that NVFP4 gains over MXFP8."""
    rows = list(read_block_scaled())
    planned = as_written(rows)
    yield "| model, GPUs | container | layout | recipe | measured, s | planned, s | error |"
    yield f"|---|---|---|---|{'---:|' * 3}"
    errors = defaultdict[str, list[float]](list)
    for row in sorted(rows, key=lambda row: row.recipe):
        c, p, seconds = row.config, row.config.parallel, planned[row.line]
        errors[row.recipe].append(seconds / row.step_s - 1)
        model = f"{parameter_count(c.model) / 1e9:.0f}B, {c.world_size} {row.hardware.upper()}"
        layout = f"tp {p.tp} pp {p.pp} vpp {p.vpp} dp {c.dp}, micro {c.batch.micro}"
        cells = [model, row.table.removesuffix(" container"), layout, row.recipe, f"{row.step_s:.2f}"]
        yield f"| {' | '.join([*cells, f'{seconds:.2f}', f'{errors[row.recipe][-1]:+.1%}'])} |"
    yield ""
    means = (f"{name} {mean(map(abs, of)):.1%} over {len(of)} steps" for name, of in errors.items())
    yield f"Mean error: {', '.join(means)}."


def as_written(rows: Sequence[Row]) -> dict[int, float]:
    """Predict the step times with the present profiles."""
    known = Profiles(rows)
    return {row.line: known.predicted(row, {}) for row in rows}


def write_profiles(kind: str, values: Values) -> None:
    """Write the fitted values to the end of every profile's file."""
    for name in sorted({name for of, name, _ in values if of == kind}):
        path = profile_files.path_of(kind, name)
        attained = {
            key: f"{value:.3g}" for (of, profile, key), value in values.items() if (of, profile) == (kind, name)
        }
        if recent := attained.pop(RECENT.name, None):
            newer = float(attained["gemm"]) * float(recent)
            attained["gemm"] = f"{{ {FIRST_YEAR} = {attained['gemm']}, {RECENT_YEAR} = {newer:.3g} }}"
        lines = "".join(f"{key} = {value}\n" for key, value in attained.items())
        write_text(path, path.read_text(encoding="utf-8").partition(ATTAINED)[0].rstrip("\n") + "\n" + ATTAINED + lines)


def error_file(rows: Sequence[Row], left_out: Mapping[int, float]) -> Iterator[str]:
    """Yield the lines of the error file that plans read: errors by accelerator, measured stacks by hardware."""
    yield "# How far plans are off: written by tools/calibrate.py, read by megascale/plan/simulate/profiles.py"
    yield f"\n# Mean error of step time, each source planned by a fit of the others; A100, H100: {MANY}+ devices"
    yield "[error]"
    groups = grouped(rows, lambda row: str(profiles.hardware(row.hardware).device.accelerator))
    for name, group in sorted(groups.items()):
        counted = goals(group).get(name, group)
        yield f"{name} = {mean_error(counted, left_out):.3f}"
    yield "\n# Stacks of which steps were measured, by hardware"
    yield "[measured]"
    for name, group in sorted(grouped(rows, lambda row: row.hardware).items()):
        yield f"{name} = {json.dumps(sorted({stack for row in group for stack in row.stacks}))}"


def write_assumptions(rows: Sequence[Row]) -> None:
    """Write the worth of every assumption to its row of the page, from the rows that count for the goal."""
    counted = [row for group in goals(rows).values() for row in group]
    write_text(PAGE, assumptions.fill(PAGE.read_text(encoding="utf-8"), assumptions.worth(counted)))


def report(rows: Sequence[Row], fitted: Mapping[int, float], left_out: Mapping[int, float]) -> Iterator[str]:
    """Yield the tables of the page."""
    predictions = {"fitted": fitted, "source left out": left_out}
    yield from errors(rows, predictions, (by_source,))
    yield ""
    yield from iteration_times(rows, predictions)
    yield ""
    yield from ablation_mfu(rows, predictions)


def errors(
    rows: Sequence[Row], predictions: Mapping[str, Mapping[int, float]], keys: Sequence[Callable[[Row], str]]
) -> Iterator[str]:
    """Tabulate mean absolute errors of step time and medians of predicted over measured, by groups of rows."""
    headings = [f"{name}: mean error | median ratio" for name in predictions]
    yield f"| rows | n | {' | '.join(headings)} |"
    yield f"|---|---:|{'---:|---:|' * len(predictions)}"

    def line(name: str, group: Sequence[Row]) -> str:
        cells = []
        for predicted in predictions.values():
            ratio = median(predicted[row.line] / row.step_s for row in group)
            cells.append(f"{mean_error(group, predicted):.1%} | {ratio:.3f}")
        return f"| {name} | {len(group)} | {' | '.join(cells)} |"

    for name, group in goals(rows).items():
        yield line(f"**dense, {name}, {MANY} devices or more**", group)
    if sharded := [row for row in rows if row.config.parallel.zero == 3]:
        yield line("**sharded weights** (zero 3)", sharded)
    for key in keys:
        groups = grouped(rows, key)
        yield from (line(name, groups[name]) for name in sorted(groups))


def by_source(row: Row) -> str:
    """Group rows by source and hardware."""
    return f"{row.source}, {row.hardware}"


def by_parallelism(row: Row) -> str:
    """Group rows by the axes of parallelism."""
    return f"all with {row.parallelism}"


def grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Group rows by a key function."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def iteration_times(rows: Sequence[Row], predictions: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Tabulate MegaScale's Table 2: step time in seconds, and the error of every prediction."""
    table = [row for row in rows if row.source == "megascale-2024" and row.step is None]
    lines = {"measured": [f"{row.step_s:.2f}" for row in table]}
    for name, predicted in predictions.items():
        lines[name] = [f"{predicted[row.line]:.2f}, {predicted[row.line] / row.step_s - 1:+.1%}" for row in table]
    yield from tabulated("Table 2, s", [f"{row.stack}, {row.config.world_size}" for row in table], lines)


def ablation_mfu(rows: Sequence[Row], predictions: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Tabulate MegaScale's Table 3: MFU."""
    table = [row for row in rows if row.step]
    times = {"measured": {row.line: row.step_s for row in table}, **predictions}
    lines = {name: [f"{_mfu(row, step_s[row.line]):.1%}" for row in table] for name, step_s in times.items()}
    yield from tabulated("Table 3, MFU", [str(row.step) for row in table], lines)


def tabulated(name: str, headings: Sequence[str], lines: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table with a column per published step."""
    yield f"| {name} | {' | '.join(headings)} |"
    yield f"|---|{'---:|' * len(headings)}"
    yield from (f"| {label} | {' | '.join(cells)} |" for label, cells in lines.items())


def _mfu(row: Row, seconds: float) -> float:
    """MFU by the source's own convention."""
    config, peak = row.config, profiles.hardware(row.hardware).device.peak_of("bf16")
    tokens = config.batch.total * config.model.seq_length / seconds
    return mfu(row.flops, tokens, peak * config.world_size)


def values_table(values: Values) -> Iterator[str]:
    """Tabulate the fitted values."""
    for kind in ("hardware", "stacks"):
        names = [e.name for e in EFFICIENCIES if e.kind == kind]
        yield f"| {kind} | {' | '.join(names)} |"
        yield f"|---|{'---:|' * len(names)}"
        for profile in sorted({profile for of, profile, _ in values if of == kind}):
            yield f"| {profile} | {' | '.join(f'{values[kind, profile, name]:.3g}' for name in names)} |"
        yield ""
    for (_, profile, name), value in values.items():
        if name == RECENT.name:
            yield f"GEMMs of {profile} with libraries of {RECENT_YEAR} or later: {value:.3f} times that rate.\n"
    yield f"Loss for each doubling of the devices beyond {profiles.LARGE_JOB}: {values[LOSS]:.4f} of a step.\n"


if __name__ == "__main__":
    main()
