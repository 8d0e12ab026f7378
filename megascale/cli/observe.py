"""`megascale observe`: watch a job of torchrun or srun: who hangs, who died first. The same command on each host.

On the host of the driver's address the command is the driver, with the host's observer as its child; elsewhere it is
the observer. Nothing is restarted: that is the launcher's task.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megascale.cli.agent import GRPC_DEFAULTS
from megascale.cli.arguments import add_config_arguments
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.network import LOOPBACK, address_for_others, address_toward, join_port, listen, reserve_port
from megascale.core.process import die_with_parent, module_command, stop_signals
from megascale.core.rank import NODE_VARIABLE
from megascale.core.run_folder import LOGS
from megascale.operate.driver.scheduler.port import ADDRESS_VARIABLE, DRIVER_VARIABLE

PORT = 29600  # port of the driver, unless --driver names another
LEAVE_S = 5.0  # seconds that the observer of the driver's host has to leave


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)
    sub.add_argument(
        "--driver",
        metavar="HOST[:PORT]",
        default=LOOPBACK,
        help=f"where the driver listens: one of the job's hosts (default: this host alone, port {PORT})",
    )


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status: on the driver's host that of the job."""
    os.environ.update(GRPC_DEFAULTS | os.environ)
    config = load_config(options.config, options.overrides)
    driver = _driver_endpoint(options.driver)
    command, env = _observer(config, driver)
    if (reserved := _reserve(driver)) is None:
        os.execve(command[0], command, env)
    with reserved, _observing(command, env):
        return asyncio.run(_drive(config, driver))


class DriverEndpoint(NamedTuple):
    """Where the driver is: its host as it was named, and its address as this host knows it."""

    name: str
    address: str
    port: int

    @property
    def listens_at(self) -> str:
        """Where the driver listens on its own host, for all hosts that know it by its name."""
        return address_for_others(self.name, self.address)


def _driver_endpoint(text: str) -> DriverEndpoint:
    """Return the endpoint of HOST[:PORT], with an address of IPv6 in brackets. Raises: ConfigError"""
    parts = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::(\d+))?", text, re.ASCII)
    if parts is None:
        raise _no_endpoint(text, "", "such as node1:29600, or [fd00::1]:29600 with an address of IPv6")
    bracketed, name, number = parts.groups(default="")
    port = int(number or PORT)
    if not 1 <= port <= 65535:
        raise _no_endpoint(text, f": there is no port {number} that other hosts could know", "a port from 1 to 65535")
    family, host = socket.AF_INET6 if bracketed else socket.AF_INET, bracketed or name
    try:
        return DriverEndpoint(host, str(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4][0]), port)
    except (UnicodeError, OSError) as error:
        raise _no_endpoint(text, f": {error}", "a host of the job, such as node1:29600") from None


def _no_endpoint(text: str, why: str, hint: str) -> ConfigError:
    return ConfigError([Problem("command line", "--driver", f"{text!r} is no HOST[:PORT]{why}", hint)])


def _reserve(driver: DriverEndpoint) -> socket.socket | None:
    """Keep the driver's port; None on a host that does not have the driver's address. Raises: ConfigError"""
    host, port = driver.listens_at, driver.port
    try:
        listen(host, port).close()  # a kept port can be shared with another driver, which would get our observers
        return reserve_port(host, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        what = f"cannot listen at {join_port(host, port)}: {os.strerror(error.errno or 0)}"
        hint = "another port than other drivers have, the same on all hosts: --driver HOST:PORT"
        raise ConfigError([Problem("command line", "--driver", what, hint)]) from None


def _observer(config: RunConfig, driver: DriverEndpoint) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of this host's observer. Raises: ConfigError"""
    address = join_port(driver.address, driver.port)
    try:
        place = {ADDRESS_VARIABLE: address_toward(driver.address), DRIVER_VARIABLE: address}
    except OSError as error:
        what = f"this host cannot connect to {address}: {error.strerror}"
        hint = "a host of the job that all others reach, such as node1:29600"
        raise ConfigError([Problem("command line", "--driver", what, hint)]) from None
    command = module_command("megascale", "agent", "--observe", str(config.folder))
    return command, {NODE_VARIABLE: socket.gethostname(), **os.environ, **place}


@contextlib.contextmanager
def _observing(command: Sequence[str], env: Mapping[str, str]) -> Iterator[None]:
    """Run the observer of the driver's host; at the end it has a moment to leave."""
    parent = os.getpid()
    process = subprocess.Popen(
        command,
        env=env,
        start_new_session=True,  # Ctrl-C reaches the driver, which tells the observers
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  a call of the kernel, no lock
    )
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)
        process.kill()
        process.wait()


async def _drive(config: RunConfig, driver: DriverEndpoint) -> int:
    """Reach verdicts about the ranks of all hosts, until they have ended."""
    from megascale.operate.channel.driver_server import DriverServer
    from megascale.operate.channel.secret import job_secret
    from megascale.operate.channel.streams import tls_from_environment
    from megascale.operate.driver.drive_job import drive_job
    from megascale.operate.driver.job_state import JobPlan
    from megascale.operate.driver.scheduler.none import NoScheduler
    from megascale.operate.print_line import print_line

    config.folder.mkdir(parents=True, exist_ok=True)
    observe, settings = config.observe, config.checkpoint
    plan = JobPlan(
        config.name, 0, 0, (), str(config.folder / LOGS), revivable=False, observed=True, folder=str(config.folder),
        metrics_address=observe.metrics_address, metrics_port=observe.metrics_port, stops=tuple(stop_signals()),
    )  # fmt: skip
    size = {"nodes": 0, "world": 0, "scheduler": "none"}  # the observers find them
    where = join_port(driver.name, driver.port)
    print_line(f"watching the ranks of {config.name}; observers of their hosts join at {where}")
    secret, tls = job_secret(Path(config.output_dir)), tls_from_environment()
    server = DriverServer(secret, driver.listens_at, driver.port, tls, config.name)
    copies = Path(settings.in_memory_dir) if settings.every and settings.in_memory_every else None
    return await drive_job(plan, config.fault, NoScheduler(), server, size, copies=copies)
