"""`megascale observe`: a driver for a job that torchrun or srun starts: reports of hangs and failures, no restarts.

The agent of this host is its child. On every other host `megascale agent --observe RUN` runs, which finds the driver by
RUN/observer.json, a file that the hosts share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from megascale.cli.agent import GRPC_DEFAULTS, OBSERVER_FILE, observed_place
from megascale.cli.main import add_config_arguments
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.network import LOOPBACK
from megascale.core.secret import job_secret


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)
    sub.add_argument(
        "--listen",
        default=LOOPBACK,
        metavar="HOST[:PORT]",
        help="name or address at which agents of other hosts reach this one (default: only this host's agent does)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    os.environ.update(GRPC_DEFAULTS | os.environ)
    config = load_config(options.config, options.overrides)
    host, _, port = options.listen.rpartition(":") if ":" in options.listen else (options.listen, "", "0")
    if not port.isdecimal():
        raise ConfigError([Problem("command line", "--listen", f"no port {port!r}", "HOST or HOST:PORT")])
    return asyncio.run(_observe(config, host, int(port)))


async def _observe(config: RunConfig, host: str, port: int) -> int:
    from megascale.fault.alerts import METRICS_FILE, AlertReader
    from megascale.fault.driver import Clock, Driver
    from megascale.fault.incidents import LOG_FILE, IncidentLog, read_history
    from megascale.fault.job import Job, JobPlan
    from megascale.fault.rpc import DriverServer, reserve_port
    from megascale.fault.say import say
    from megascale.fault.scheduler.observed import ObservedHost
    from megascale.fault.scheduler.port import Node
    from megascale.fault.streams import tls_from_environment
    from megascale.observe.hang import hang_verdict

    folder, clock = config.folder, Clock()
    secret = job_secret(Path(config.observe.dir))
    with reserve_port(host, port) as reserved:
        address = f"{host}:{reserved.getsockname()[1]}"
        with _only_observer(folder, address):
            log, history = IncidentLog(folder / LOG_FILE), read_history(folder / LOG_FILE)
            event = {"event": "driver", "time": clock.now()}
            history.apply(event)
            log.append(event)
            logs = folder / "logs"
            plan = JobPlan(config.name, 0, config.world_size, (), str(logs), revivable=False, observes=True)
            job = Job(plan, config.fault, history, hang_verdict, clock.now())
            place = observed_place(folder, os.environ, address)
            command = (sys.executable, "-m", "megascale", "agent", "--observe", str(folder))
            scheduler = ObservedHost(Node(place.node, place.address), command, logs / f"agent-{place.node}.log")
            say(f"observing {folder} at {address}; on every other host: megascale agent --observe {folder}")
            async with DriverServer(secret, host, reserved.getsockname()[1], tls_from_environment()) as server:
                alerts = AlertReader(folder / METRICS_FILE)
                status = await Driver(job, server, scheduler, log, clock, alerts).run(start_agents=True)
            await scheduler.stop(requeue=False)
    return status


@contextlib.contextmanager
def _only_observer(folder: Path, address: str) -> Iterator[None]:
    """Say in RUN/observer.json where the driver is, and keep other observers away, during the `with` block.

    Raises: ConfigError if another process observes the run, or its folder cannot be written
    """
    path = folder / OBSERVER_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  closed below
    except OSError as error:
        raise ConfigError([Problem(str(path), "observe.dir", f"cannot be written: {error.strerror}")]) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            what = f"the run is observed already: {file.read().strip() or 'by another process'}"
            raise ConfigError([Problem(str(path), "observer", what, "one driver is enough")]) from None
        file.truncate(0)
        file.write(json.dumps({"driver": address}) + "\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
