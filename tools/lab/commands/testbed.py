"""Run a command on every host of a temporary cluster on this machine: network namespaces, joined by links of a given
bandwidth. The words after -- are torchrun's, for one job on all hosts:

  .venv/bin/python tools/lab testbed --hosts 2 --ranks 1 --rate 500mbit -- -m megascale train CONFIG key=value ...

or, with --exec, a plain command per host, with HOST_INDEX, HOSTS and FIRST_HOST in its environment:

  .venv/bin/python tools/lab testbed --hosts 2 --rate 1gbit --exec -- ip address

Needs root and iproute2. Exit status: of the host that failed first; 124 after the timeout.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from lab.hosts import TIMED_OUT, TIMEOUT, CommandResult, run_on_hosts, run_torchrun
from lab.testbed import Host, HostLink, Testbed
from megascale.cli.arguments import positive_int
from megascale.core.errors import Exit
from megascale.core.process import exit_on_stop_signals

PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def rate(text: str) -> float:
    """Parse a rate in tc's notation to bits per second: '500mbit'; '10mbps' means bytes per second."""
    parts = re.fullmatch(r"([0-9.]+)([kmgt]i?|)(bit|bps|)", text.lower())
    if parts is None or (parts[2] and not parts[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: give 500mbit or 1gbit, for example")
    return _number(parts[1]) * PREFIXES[parts[2]] * (8 if parts[3] == "bps" else 1)


def duration(text: str) -> float:
    """Parse a time in tc's notation to seconds: '1ms'."""
    parts = re.fullmatch(r"([0-9.]+)(s|ms|us)", text.lower())
    if parts is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: give 1ms or 100us, for example")
    return _number(parts[1]) * SECONDS[parts[2]]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def show(host: Host, name: str, line: str) -> None:
    """Print a line of a host's output."""
    print(f"[host {host.index}] {line}", file=sys.stdout if name == "out" else sys.stderr, flush=True)


def status(ends: Sequence[CommandResult]) -> int:
    """Return the exit status of the host that failed first, in the shell's convention; 0 without a failure."""
    first = min((end for end in ends if end.status), key=lambda end: end.seconds, default=None)
    if first is None:
        return Exit.OK
    return first.status if first.status > 0 else 128 - first.status


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    one.add_argument("--hosts", type=positive_int, default=2, metavar="N", help="number of hosts (default: 2)")
    one.add_argument(
        "--ranks",
        type=positive_int,
        default=1,
        metavar="R",
        help="processes per host, started by torchrun (default: 1)",
    )
    one.add_argument(
        "--rate", type=rate, help="bandwidth of a host's link per direction, such as 500mbit (default: unlimited)"
    )
    one.add_argument("--delay", type=duration, default=0.0, help="delay between hosts, such as 1ms (default: none)")
    one.add_argument(
        "--cores", type=float, metavar="C", help="processor time of a host in cores, such as 0.25 (default: unlimited)"
    )
    limit = f"seconds (default: {TIMEOUT:.0f})"
    one.add_argument("--timeout", type=positive_int, default=TIMEOUT, metavar="S", help=limit)
    one.add_argument("--exec", action="store_true", help="run a plain command on every host, without torchrun")
    one.add_argument("words", nargs="+", metavar="WORD", help="torchrun's words, or with --exec a command")


def run(options: argparse.Namespace) -> int:
    """Run the command and return the status of the host that failed first."""
    with (
        exit_on_stop_signals(),
        Testbed(options.hosts, HostLink(options.rate, options.delay), options.cores) as testbed,
    ):
        if options.exec:
            ends = run_on_hosts(testbed, lambda host: options.words, timeout=options.timeout, on_line=show)
        else:
            ends = run_torchrun(testbed, options.ranks, options.words, timeout=options.timeout, on_line=show)
    if late := [str(host) for host, end in enumerate(ends) if end.status == TIMED_OUT]:
        print(
            f"host {', '.join(late)}: not finished after {options.timeout:.0f} s, killed  -> give a longer --timeout",
            file=sys.stderr,
        )
    return status(ends)
