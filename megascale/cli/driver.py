"""`megascale driver`: the driver of a job, which `megascale launch` starts, and starts again when it dies."""

from __future__ import annotations

import argparse
import asyncio
import socket

from megascale.cli.main import add_config_arguments
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.core.live_file import LIVE_FILE, LiveFile
from megascale.core.secret import job_secret


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)
    sub.add_argument("--nodes", type=int, required=True, help="nodes that train")
    sub.add_argument("--scheduler", required=True, help="name of the scheduler's adapter")
    sub.add_argument("--listen", required=True, help="host:port for the agents")
    sub.add_argument("--scheduler-descriptor", type=int, required=True, help="socket to the supervisor's scheduler")
    role = sub.add_mutually_exclusive_group(required=True)
    role.add_argument("--first", action="store_true", help="no driver of this launch has run")
    role.add_argument("--takeover", action="store_true", help="an earlier driver of this launch has died")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    config = load_config(options.config, options.overrides)
    return asyncio.run(_drive(options, config))


async def _drive(options: argparse.Namespace, config: RunConfig) -> int:
    from megascale.export.exporter import DRIVER, MetricsEndpoint, exporting
    from megascale.fault.alerts import METRICS_FILE, AlertReader
    from megascale.fault.driver import Clock, Driver
    from megascale.fault.incidents import LOG_FILE, IncidentLog, read_history
    from megascale.fault.job import Job, JobPlan
    from megascale.fault.job_families import job_metrics
    from megascale.fault.live_job import LiveWriter
    from megascale.fault.rpc import DriverServer
    from megascale.fault.say import say
    from megascale.fault.scheduler.adapters import ADAPTERS
    from megascale.fault.scheduler.remote import SchedulerClient
    from megascale.fault.shrink import smaller_layout
    from megascale.fault.streams import tls_from_environment
    from megascale.observe.hang import hang_verdict

    host, _, port = options.listen.rpartition(":")
    log, clock = IncidentLog(config.folder / LOG_FILE), Clock()
    history = read_history(config.folder / LOG_FILE)
    now = clock.now()
    events: list[dict[str, object]] = [{"event": "driver", "time": now}]
    if options.first:
        size = {"nodes": options.nodes, "world": config.world_size, "scheduler": options.scheduler}
        events.insert(0, {"event": "launch", "time": now, "run": config.name, **size})
    for event in events:
        history.apply(event)
        log.append(event)
    arguments = ("train", options.config, *options.overrides)
    adapter, per_node = ADAPTERS[options.scheduler], config.world_size // options.nodes
    plan = JobPlan(
        config.name,
        options.nodes,
        config.world_size,
        arguments,
        str(config.folder / "logs"),
        takeover=options.takeover,
        requestable=adapter.requestable,
        revivable=adapter.revivable,
        checks=config.fault.check_nodes,
        smaller=lambda nodes: smaller_layout(config, per_node, nodes),
        folder=str(config.folder),
        metrics_address=config.observe.metrics_address,
        metrics_port=config.observe.metrics_port,
    )
    job = Job(plan, config.fault, history, hang_verdict, now)
    scheduler = await SchedulerClient.connect(socket.socket(fileno=options.scheduler_descriptor))
    async with DriverServer(job_secret(None), host, int(port), tls_from_environment()) as server:
        alerts = AlertReader(config.folder / METRICS_FILE)
        live = LiveWriter(LiveFile(config.folder / LIVE_FILE))
        driver = Driver(job, server, scheduler, log, clock, alerts, live)
        with exporting(job_metrics(job, clock.now, DRIVER), MetricsEndpoint.of_run(config, DRIVER), say):
            status = await driver.run(start_agents=options.first)
        await scheduler.close()
    return status
