"""Faults injected into jobs of `megascale launch` on this host, one after another or, in a soak, at random."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from lab import faults, soak
from lab.fault_cases import CASES, FaultCase
from megascale.cli.arguments import positive_int
from megascale.cli.command_output import print_progress
from megascale.config.injection import InjectionError, parse_injection
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.files import write_text
from megascale.core.registry import closest_name


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    one.add_argument("cases", metavar="CASE", nargs="*", help="names of cases (default: all)")
    one.add_argument("--list", action="store_true", help="list the cases")
    one.add_argument("--nodes", type=positive_int, default=4, metavar="N", help="nodes of two ranks (default: 4)")
    one.add_argument("--soak", type=positive_int, metavar="S", help="one job of S seconds with faults at random times")
    one.add_argument("--every", type=positive_int, default=30, metavar="S", help="mean time between faults of a soak")
    one.add_argument("--faults", type=positive_int, metavar="N", help="end a soak after N faults")
    help_line = f"kinds of the faults of a soak (default: {','.join(soak.KINDS)})"
    one.add_argument("--kinds", type=_kinds, default=soak.KINDS, metavar="KIND,...", help=help_line)
    one.add_argument("--seed", type=int, default=1, metavar="N", help="of the faults of a soak (default: 1)")
    one.add_argument("--output", type=Path, metavar="FOLDER", help="keep the runs in this folder")
    one.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file")
    one.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status: 0 if all cases went as expected."""
    if options.list:
        for case in CASES:
            print(f"{case.name:26}{case.reference:5}{case.title}")
        return Exit.OK
    cases = [_case(name) for name in options.cases] or list(CASES)
    with tempfile.TemporaryDirectory(prefix="megascale-faults-") as scratch:
        folder = (options.output or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if options.soak:
            plan = soak.SoakPlan(options.soak, options.every, options.seed, options.kinds, options.faults)
            result = soak.run_soak(folder, options.nodes, plan)
            if options.markdown:
                write_text(options.markdown, "\n".join(result.lines()) + "\n")
            print(json.dumps(result.to_dict()) if options.json else "\n".join(result.lines()))
            return Exit.OK if result.good else Exit.UNCLASSIFIED
        results, left_out = faults.run_cases(cases, folder, options.nodes, print_progress)
    lines = [*faults.table(results), "", faults.summary(results)]
    lines += [f"{name} was left out: {reason}" for name, reason in left_out.items()]
    if options.markdown:
        write_text(options.markdown, "\n".join(lines) + "\n")
    report = {"cases": [result.to_dict() for result in results], "left_out": left_out}
    print(json.dumps(report) if options.json else "\n".join(lines))
    return Exit.UNCLASSIFIED if any(result.problems for result in results) else Exit.OK


def _kinds(text: str) -> tuple[str, ...]:
    try:
        injection = parse_injection(f"random mtbf_s=1 kinds={text}")
    except InjectionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    assert injection.random is not None
    return injection.random.kinds


def _case(name: str) -> FaultCase:
    by_name = {case.name: case for case in CASES}
    if name not in by_name:
        close = closest_name(name, list(by_name))
        hint = f"did you mean '{close}'?" if close else "`python tools/lab faults --list` lists them"
        raise ConfigError([Problem("command line", "CASE", f"there is no case '{name}'", hint)])
    return by_name[name]
