"""`megascale watch --attach`: a job of torchrun or srun is watched: who hangs, who died first. The same on each host.

On the host of the driver's address the command is the driver, with the host's observer as its child; elsewhere it is
the observer. Nothing is restarted: that is the launcher's task.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megascale.cli.agent import GRPC_DEFAULTS
from megascale.cli.watch import PORT
from megascale.config.fault import FaultConfig
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.named_run import CONFIG_FILE
from megascale.core.network import address_for_others, address_toward, join_port, listen, reserve_port
from megascale.core.process import die_with_parent, module_command, stop_signals
from megascale.core.rank import NODE_VARIABLE
from megascale.core.run_folder import LOGS
from megascale.operate.driver.scheduler.port import ADDRESS_VARIABLE, DRIVER_VARIABLE
from megascale.operate.print_line import print_line
from megascale.operate.show.run_config import read_run_config
from megascale.record.log_files import find_logs, folder_key
from megascale.record.log_reader import LogReader
from megascale.record.rank_state import LogError

LEAVE_S = 5.0  # seconds that the observer of the driver's host has to leave
LOOK_S = 0.5  # seconds between looks for the run's configuration
START_S = 60.0  # seconds that ranks without a configuration have, before they are watched by the defaults


def attach(folder: Path, driver: str) -> int:
    """Watch the ranks of the run in `folder` and return the exit status: on the driver's host that of the job."""
    os.environ.update(GRPC_DEFAULTS | os.environ)
    endpoint = _driver_endpoint(driver)
    command, env = _observer(folder, endpoint)
    if (reserved := _reserve(endpoint)) is None:
        os.execve(command[0], command, env)
    with reserved, _observing(command, env):
        return asyncio.run(_drive(folder, endpoint))


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


def _observer(folder: Path, driver: DriverEndpoint) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of this host's observer. Raises: ConfigError"""
    address = join_port(driver.address, driver.port)
    try:
        place = {ADDRESS_VARIABLE: address_toward(driver.address), DRIVER_VARIABLE: address}
    except OSError as error:
        what = f"this host cannot connect to {address}: {error.strerror}"
        hint = "a host of the job that all others reach, such as node1:29600"
        raise ConfigError([Problem("command line", "--driver", what, hint)]) from None
    command = module_command("megascale", "agent", "--observe", str(folder))
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


async def _drive(folder: Path, driver: DriverEndpoint) -> int:
    """Reach verdicts about the ranks of all hosts, until they have ended."""
    from megascale.operate.channel.driver_server import DriverServer
    from megascale.operate.channel.secret import job_secret
    from megascale.operate.channel.streams import tls_from_environment
    from megascale.operate.driver.drive_job import drive_job
    from megascale.operate.driver.job_state import JobPlan
    from megascale.operate.driver.scheduler.none import NoScheduler

    folder, where = folder.absolute(), join_port(driver.name, driver.port)
    print_line(f"watching the ranks of {folder.name}; observers of their hosts join at {where}")
    if (config := await _configuration(folder)) is None:
        fault, address, port, copies, sites_hang_s = FaultConfig(), "", 0, None, math.inf
    else:
        fault, settings, observe = config.fault, config.checkpoint, config.observe
        address, port, sites_hang_s = observe.metrics_address, observe.metrics_port, config.sites_hang_s
        copies = Path(settings.in_memory_dir) if settings.every and settings.in_memory_every else None
    plan = JobPlan(
        folder.name, 0, 0, (), str(folder / LOGS), revivable=False, observed=True, folder=str(folder),
        metrics_address=address, metrics_port=port, stops=tuple(stop_signals()), sites_hang_s=sites_hang_s,
    )  # fmt: skip
    size = {"nodes": 0, "world": 0, "scheduler": "none"}  # the observers find them
    secret, tls = job_secret(folder.parent), tls_from_environment()
    server = DriverServer(secret, driver.listens_at, driver.port, tls, folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    return await drive_job(plan, fault, NoScheduler(), server, size, copies=copies)


async def _configuration(folder: Path) -> RunConfig | None:
    """Wait for the run's configuration, which rank 0 writes before the first step. None if ranks have begun on this
    host, and it is not there START_S later: they may hang. Raises: RunFolderError
    """
    begun, told = 0.0, False
    while (config := read_run_config(folder)) is None:
        now = asyncio.get_running_loop().time()
        if _has_ranks(folder):
            begun = begun or now
            if now > begun + START_S:
                print_line(f"no {folder / CONFIG_FILE} yet: the defaults of [fault] hold")
                return None
        elif not told:
            print_line(f"waiting for the job, which writes {folder / CONFIG_FILE}")
            told = True
        await asyncio.sleep(LOOK_S)
    return config


def _has_ranks(folder: Path) -> bool:
    """Return True if ranks of the run have begun their logs on this host; another run may have the same name."""
    for path in find_logs(folder.name):
        with contextlib.suppress(LogError, OSError):
            if LogReader(path).state(head_only=True).folder == folder_key(folder):
                return True
    return False
