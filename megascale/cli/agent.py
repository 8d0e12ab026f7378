"""`megascale agent`: the agent of a node, started by the scheduler adapters of `megascale launch`, not by people.

Its node, the driver's address and the job's secret come by the environment, never on a command line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megascale.core.env_numbers import whole_number
from megascale.core.errors import ConfigError, Exit, MegascaleError, Problem
from megascale.core.limits import raise_soft_limits
from megascale.core.process import usable_cores
from megascale.core.rank import NODE_VARIABLE
from megascale.operate.channel.secret import inheritable_secret, job_secret
from megascale.operate.driver.scheduler.port import ADDRESS_VARIABLE, DRIVER_VARIABLE, SLOTS_VARIABLE
from megascale.operate.node.ranks import NodePlace

OPEN_FILES = 1 << 16

NO_DESCRIPTOR = -1  # an observer starts no ranks, which would read the secret from a descriptor

GRPC_DEFAULTS = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # the children of an agent are other programs
    "GRPC_VERBOSITY": "ERROR",
}


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    sub.add_argument(
        "--observe",
        metavar="FOLDER",
        type=Path,
        help="only watch the ranks of the run in FOLDER that torchrun or srun has started on this host",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command, and end this process with its exit status."""
    os.environ.update(GRPC_DEFAULTS | os.environ)
    from megascale.operate.channel.agent_channel import AgentChannel  # imports gRPC, which reads these variables
    from megascale.operate.channel.handshake import NotAPeerError
    from megascale.operate.channel.streams import tls_from_environment
    from megascale.operate.node.agent import Agent
    from megascale.operate.node.observed_ranks import ObservedRanks

    place = place_from_environment(os.environ)
    raise_soft_limits(OPEN_FILES)
    if options.observe is None:
        secret, descriptor, observe = job_secret(None), inheritable_secret(), None
    else:
        folder = options.observe.absolute()
        secret, descriptor, observe = job_secret(folder.parent), NO_DESCRIPTOR, functools.partial(ObservedRanks, folder)
        place = replace(place, run=folder.name)
    try:
        connect = functools.partial(AgentChannel, place.driver, secret, tls=tls_from_environment())
        status = asyncio.run(Agent(place, connect, descriptor, observe).run())
    except NotAPeerError as error:
        hint = "give all agents the secret of the job's supervisor"
        print(MegascaleError(f"the driver at {place.driver}: {error}", hint=hint), file=sys.stderr)
        status = int(Exit.UNCLASSIFIED)
    except MegascaleError as error:
        print(error, file=sys.stderr)
        status = int(error.exit_status)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # at once, whatever a thread waits for, such as a sick device; gRPC may abort a process that ends in order
    os._exit(status)


def place_from_environment(env: Mapping[str, str]) -> NodePlace:
    """Read the node of this agent. Raises: ConfigError"""
    missing = [name for name in (NODE_VARIABLE, ADDRESS_VARIABLE, DRIVER_VARIABLE) if not env.get(name)]
    if missing:
        hint = "`megascale launch` starts the agents"
        raise ConfigError([Problem("environment", name, "not set", hint) for name in missing])
    slots = whole_number(env, SLOTS_VARIABLE, usable_cores(), least=1)
    return NodePlace(env[NODE_VARIABLE], env[ADDRESS_VARIABLE], env[DRIVER_VARIABLE], slots)
