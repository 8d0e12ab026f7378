"""`megascale agent`: the agent of a node, started by the scheduler adapters of `megascale launch`, not by people.

Its node, the driver's address and the job's secret come by the environment, never on a command line. People start it
with `--observe RUN` on the hosts of a job that `megascale observe` watches: there the run's folder has the address.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from megascale.core.env_numbers import whole_number
from megascale.core.errors import ConfigError, MegascaleError, Problem
from megascale.core.limits import raise_soft_limits
from megascale.core.process import usable_cores
from megascale.core.rank import NODE_VARIABLE
from megascale.core.secret import inheritable_secret, job_secret
from megascale.fault.node_place import NodePlace
from megascale.fault.scheduler.port import ADDRESS_VARIABLE, DRIVER_VARIABLE

SLOTS_VARIABLE = "MEGASCALE_NODE_SLOTS"
"""Environment variable of an agent: ranks that its node can run; by default one for each usable core."""

OPEN_FILES = 1 << 16

OBSERVER_FILE = "observer.json"
"""File in the run's folder: where the driver of its observers is."""

NO_SECRET = -1
"""Descriptor of an observer, which starts no ranks that would read the secret."""

GRPC_DEFAULTS = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # the children of an agent are other programs
    "GRPC_VERBOSITY": "ERROR",
}
"""Environment variables of gRPC."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    sub.add_argument(
        "--observe",
        metavar="RUN",
        type=Path,
        help="only watch the ranks of the run in folder RUN that torchrun or srun starts on this host",
    )


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    os.environ.update(GRPC_DEFAULTS | os.environ)
    from megascale.fault.agent import Agent, leave_process  # imports gRPC, which reads these variables
    from megascale.fault.observed_ranks import ObservedRanks
    from megascale.fault.streams import tls_from_environment

    observed = None
    if options.observe is None:
        place, secret, descriptor = place_from_environment(os.environ), job_secret(None), inheritable_secret()
    else:
        folder = options.observe.absolute()
        place, secret, descriptor = observed_place(folder, os.environ), job_secret(folder.parent), NO_SECRET
        observed = functools.partial(ObservedRanks, folder)
    raise_soft_limits(OPEN_FILES)
    try:
        status = asyncio.run(Agent(place, secret, descriptor, tls_from_environment(), observed).run())
    except MegascaleError as error:
        print(error, file=sys.stderr)
        status = int(error.exit_status)
    leave_process(status)  # also after an error: gRPC may abort a process that ends in order
    return status


def observed_place(folder: Path, env: Mapping[str, str], driver: str = "") -> NodePlace:
    """Return the place of an observer on this host: of the environment, else its name, and the `driver` that observes
    the run. Raises: ConfigError without one
    """
    node = env.get(NODE_VARIABLE) or socket.gethostname()
    driver = driver or env.get(DRIVER_VARIABLE, "")
    if not driver:
        path = folder / OBSERVER_FILE
        try:
            driver = str(json.loads(path.read_text(encoding="utf-8"))["driver"])
        except (OSError, ValueError, KeyError, TypeError):
            what, hint = "no driver observes the run", "start `megascale observe CONFIG` on one host first"
            raise ConfigError([Problem(str(path), "driver", what, hint)]) from None
    return NodePlace(node, env.get(ADDRESS_VARIABLE) or node, driver, usable_cores())


def place_from_environment(env: Mapping[str, str]) -> NodePlace:
    """Read the node of this agent. Raises: ConfigError"""
    missing = [name for name in (NODE_VARIABLE, ADDRESS_VARIABLE, DRIVER_VARIABLE) if not env.get(name)]
    if missing:
        hint = "`megascale launch` starts the agents"
        raise ConfigError([Problem("environment", name, "not set", hint) for name in missing])
    slots = whole_number(env, SLOTS_VARIABLE, usable_cores(), least=1)
    return NodePlace(env[NODE_VARIABLE], env[ADDRESS_VARIABLE], env[DRIVER_VARIABLE], slots)
