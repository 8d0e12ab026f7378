#!/usr/bin/env python3
"""Run a command on every host of a temporary cluster on this machine: network namespaces, joined by links of a given
bandwidth. The words after -- are torchrun's, for one job on all hosts:

  .venv/bin/python tools/testbed.py --hosts 2 --ranks 1 --rate 500mbit -- -m megascale train CONFIG key=value ...

or, with --exec, a plain command per host, with HOST_INDEX, HOSTS and FIRST_HOST in its environment:

  .venv/bin/python tools/testbed.py --hosts 2 --rate 1gbit --exec -- ip address

Needs root and iproute2. Exit status: of the host that failed first; 124 after the timeout.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from megascale.core.errors import Exit, MegascaleError
from megascale.core.process import exit_on_stop_signals
from megascale.launch.hosts import TIMED_OUT, TIMEOUT, CommandResult, run_on_hosts, run_torchrun
from megascale.launch.testbed import Host, HostLink, Testbed

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


def count(text: str) -> int:
    """Parse an integer of 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


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


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=count, default=2, metavar="N", help="number of hosts (default: 2)")
    parser.add_argument(
        "--ranks", type=count, default=1, metavar="R", help="processes per host, started by torchrun (default: 1)"
    )
    parser.add_argument(
        "--rate", type=rate, help="bandwidth of a host's link per direction, such as 500mbit (default: unlimited)"
    )
    parser.add_argument("--delay", type=duration, default=0.0, help="delay between hosts, such as 1ms (default: none)")
    parser.add_argument(
        "--cores", type=float, metavar="C", help="processor time of a host in cores, such as 0.25 (default: unlimited)"
    )
    parser.add_argument("--timeout", type=count, default=TIMEOUT, metavar="S", help=f"seconds (default: {TIMEOUT:.0f})")
    parser.add_argument("--exec", action="store_true", help="run a plain command on every host, without torchrun")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the command")
    return parser.parse_args()


def main() -> int:
    """Run the tool."""
    options = parse()
    try:
        with (
            exit_on_stop_signals(),
            Testbed(options.hosts, HostLink(options.rate, options.delay), options.cores) as testbed,
        ):
            if options.exec:
                ends = run_on_hosts(testbed, lambda host: options.command, timeout=options.timeout, on_line=show)
            else:
                ends = run_torchrun(testbed, options.ranks, options.command, timeout=options.timeout, on_line=show)
    except MegascaleError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # the reader of the output has exited
        sys.stderr.close()
        return Exit.UNCLASSIFIED
    if late := [str(host) for host, end in enumerate(ends) if end.status == TIMED_OUT]:
        print(
            f"host {', '.join(late)}: not finished after {options.timeout:.0f} s, killed  -> give a longer --timeout",
            file=sys.stderr,
        )
    return status(ends)


if __name__ == "__main__":
    sys.exit(main())
