"""`megascale driver`: the driver of a job, which `megascale launch` starts, and starts again when it dies."""

from __future__ import annotations

import argparse
import asyncio
import socket
from pathlib import Path

from megascale.cli.arguments import add_config_arguments
from megascale.config.loading import load_config
from megascale.core.process import STOP_ORDER
from megascale.core.run_folder import LOGS, RunFolder
from megascale.operate.channel.secret import job_secret


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(sub)
    sub.add_argument("--nodes", type=int, required=True, help="nodes that train")
    sub.add_argument("--topology", type=Path, help="topology file, which orders the nodes")
    sub.add_argument("--scheduler", required=True, help="name of the scheduler's adapter")
    sub.add_argument("--listen", required=True, help="host:port for the agents; no host is all interfaces")
    sub.add_argument("--scheduler-descriptor", type=int, required=True, help="socket to the supervisor's scheduler")
    sub.add_argument("--run-id", required=True, help="first id in the token of the run's folder")
    role = sub.add_mutually_exclusive_group(required=True)
    role.add_argument("--first", action="store_true", help="no driver of this launch has run")
    role.add_argument("--takeover", action="store_true", help="an earlier driver of this launch has died")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    return asyncio.run(_drive(options))


async def _drive(options: argparse.Namespace) -> int:
    from megascale.cli.smaller_layout import smaller_layout
    from megascale.operate.channel.driver_server import DriverServer
    from megascale.operate.channel.streams import tls_from_environment
    from megascale.operate.driver.drive_job import drive_job
    from megascale.operate.driver.job_state import JobPlan
    from megascale.operate.driver.node_order import NodeOrder
    from megascale.operate.driver.scheduler.adapters import ADAPTERS
    from megascale.operate.driver.scheduler.remote import SchedulerClient
    from megascale.operate.driver.switches import read_switches

    config = load_config(options.config, options.overrides)
    fault, settings, observe = config.fault, config.checkpoint, config.observe
    adapter, per_node = ADAPTERS[options.scheduler], config.world_size // options.nodes
    switches = read_switches(options.topology) if options.topology else {}
    plan = JobPlan(
        config.name,
        options.nodes,
        config.world_size,
        ("train", options.config, *options.overrides),
        str(config.folder / LOGS),
        takeover=options.takeover,
        requestable=adapter.requestable,
        revivable=adapter.revivable,
        checks=fault.check_nodes,
        order=NodeOrder.of_layout(switches, config.parallel, options.nodes),
        resuming=("checkpoint.resume=auto",) if settings.resume == "never" else (),
        smaller=lambda nodes: smaller_layout(config, per_node, nodes),
        folder=str(config.folder),
        metrics_address=observe.metrics_address,
        metrics_port=observe.metrics_port,
        stops=(STOP_ORDER,),  # of the supervisor
        sites_hang_s=config.sites_hang_s,
    )
    copies = settings.in_memory_dir if settings.every and settings.in_memory_every else ""
    wait_s = settings.retry_timeout_s / fault.same_step_failures  # that many attempts wait
    path = str(config.folder.resolve())
    folder = RunFolder(path, options.run_id, config.checkpoint_folder, copies, wait_s).read_again()
    host, _, port = options.listen.rpartition(":")
    server = DriverServer(job_secret(None), host, int(port), tls_from_environment(), config.name)
    size = {"nodes": options.nodes, "world": config.world_size, "scheduler": options.scheduler}
    scheduler = await SchedulerClient.connect(socket.socket(fileno=options.scheduler_descriptor))
    try:
        return await drive_job(
            plan, fault, scheduler, server, size if options.first else None, scheduler.report_end, folder,
            Path(copies) if copies else None,
        )  # fmt: skip
    finally:
        await scheduler.close()
