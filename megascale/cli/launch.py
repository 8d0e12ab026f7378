"""`megascale launch`: a job that survives faults, with a driver, an agent on each node, and spare nodes."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from collections.abc import Iterator
from pathlib import Path

from megascale.cli.arguments import add_config_arguments, non_negative_int, positive_int
from megascale.cli.command_output import warn
from megascale.cli.run_lock import lock_run_folder, prepare_host
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.config.run_warnings import run_warnings
from megascale.config.time_rules import launch_findings
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.files import atomic_file
from megascale.core.run_folder import read_token


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(sub)
    sub.add_argument("--nodes", type=positive_int, required=True, metavar="N", help="nodes with ranks, as many on each")
    spares = "further nodes that wait to replace others (default: 0)"
    sub.add_argument("--spares", type=non_negative_int, default=0, metavar="K", help=spares)
    source = "source of nodes: local, processes of this host; slurm, an allocation; jobset, Kubernetes (default: local)"
    sub.add_argument("--scheduler", default="local", metavar="NAME", help=source)
    switches = "put neighbouring ranks below the same switches: FILE is Slurm's topology.conf, or labels of Kubernetes"
    sub.add_argument("--topology", type=Path, metavar="FILE", help=switches)
    manifest = sub.add_argument_group("manifest for --scheduler jobset, instead of a launch")
    manifest.add_argument("--output", type=Path, metavar="FILE", help="write the manifest to FILE")
    manifest.add_argument("--image", metavar="IMAGE", help="container image with megascale (launch/Dockerfile)")
    manifest.add_argument("--claim", metavar="CLAIM=PATH", help="volume claim with the data and runs, mounted at PATH")
    manifest.add_argument(
        "--gpus-per-node", type=non_negative_int, default=0, metavar="GPUS", help="GPUs of a pod (default: 0)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from megascale.operate.driver.supervisor import supervise
    from megascale.operate.node.node_ranks import remove_lost_records

    config = load_config(options.config, options.overrides)
    if found := list(problems(options, config)):
        raise ConfigError(found)
    if options.output:
        return _write_manifest(options, config)
    prepare_host(config, config.world_size if options.scheduler == "local" else config.world_size // options.nodes)
    warn(run_warnings(config, restarts=True))
    size = ["--nodes", str(options.nodes), "--scheduler", options.scheduler, *_topology(options)]
    with lock_run_folder(config):
        run_id, _ = read_token(config.folder)
        arguments = (options.config, *options.overrides, *size, "--run-id", run_id)
        count, slots = options.nodes + options.spares, config.world_size // options.nodes
        grace_s = config.fault.stop_grace_s
        try:
            return asyncio.run(supervise(config.folder, arguments, count, options.scheduler, slots, grace_s))
        finally:
            remove_lost_records(config.folder.name)


def _write_manifest(options: argparse.Namespace, config: RunConfig) -> int:
    from megascale.operate.channel.secret import new_secret
    from megascale.operate.driver.scheduler.jobset import JobSetPlan, manifest

    claim, _, mount = options.claim.partition("=")
    size = ["--nodes", str(options.nodes), "--spares", str(options.spares), *_topology(options)]
    arguments = [options.config, *options.overrides, *size]
    plan = JobSetPlan(
        config.name, options.image, options.nodes, options.spares, arguments, claim, mount, new_secret(),
        options.gpus_per_node, math.ceil(config.fault.stop_grace_s + config.fault.end_grace_s) + 30,
        slots=config.world_size // options.nodes,
    )  # fmt: skip
    with atomic_file(options.output, "w") as file:
        os.fchmod(file.fileno(), 0o600)  # it holds the job's secret
        file.write(manifest(plan))
    print(f"wrote {options.output}: kubectl apply -f {options.output}")
    return Exit.OK


def _topology(options: argparse.Namespace) -> list[str]:
    return ["--topology", str(options.topology)] if options.topology else []


def problems(options: argparse.Namespace, config: RunConfig) -> Iterator[Problem]:
    """Find what is wrong between the options and the configuration, before anything starts."""
    from megascale.operate.driver.scheduler.adapters import ADAPTERS
    from megascale.operate.driver.switches import read_switches

    world, nodes = config.world_size, options.nodes
    if world % nodes:
        divisors = ", ".join(str(n) for n in range(1, world + 1) if not world % n)
        what = f"{world} ranks do not divide over {nodes} nodes"
        yield Problem("command line", "--nodes", what, f"one of {divisors}")
    for finding in launch_findings(world, config.fault, config.launch, config.comm, config.checkpoint, config.nccl):
        yield finding.problem("configuration")
    if options.topology:
        read_switches(options.topology)
    elif config.parallel.far_axis == "dp":
        hint = "--topology FILE, whose widest switches are the islands"
        yield Problem("configuration", "parallel.far_axis", "dp has no effect without a topology", hint)
    if options.scheduler not in ADAPTERS:
        hint = f"one of {', '.join(ADAPTERS)}"
        yield Problem("command line", "--scheduler", f"no scheduler {options.scheduler!r}", hint)
    yield from _manifest_problems(options)


def _manifest_problems(options: argparse.Namespace) -> Iterator[Problem]:
    for option in ("image", "claim", "gpus_per_node") if not options.output else ():
        if getattr(options, option):
            what = f"has no effect without a manifest (--scheduler {options.scheduler})"
            name = f"--{option.replace('_', '-')}"
            yield Problem("command line", name, what, "leave it out, or --scheduler jobset --output FILE")
    if options.output and options.scheduler != "jobset":
        yield Problem("command line", "--output", "a manifest is for --scheduler jobset", "add --scheduler jobset")
    if options.output and not options.image:
        yield Problem("command line", "--image", "a manifest needs a container image", "--image IMAGE")
    if options.output and not all((options.claim or "").partition("=")):
        hint = "--claim CLAIM=/work"
        yield Problem("command line", "--claim", "a manifest needs a volume claim and where to mount it", hint)
