"""`megascale doctor nodes`: checks of the nodes of a job, and a table that compares them.

Under torchrun or srun the first rank of every host takes part, and rank 0 says to the others through the job's store
which check to run. Without a launcher the nodes are processes of this host, which take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megascale.cli.arguments import add_config_arguments, add_json, at_least
from megascale.cli.doctor import configs_to_check
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.network import LOOPBACK, address_toward
from megascale.core.rank import NODE_VARIABLE, Rank, rank_from_environment, rendezvous_endpoint
from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.checks.runner import run_check
from megascale.operate.health.diagnose import FULL, Diagnosis, DiagnosisPlan, diagnose
from megascale.operate.health.node_runs import CheckedNode

if TYPE_CHECKING:
    from megascale.comm.store import JobStore

PLANS = {"quick": DiagnosisPlan(), "full": FULL, "paths": DiagnosisPlan(checks="", all_links=True)}

LONG_TABLE = 16  # nodes above which the table has only checks with a finding, and one line for the others of a check

QUIET = ("ok", "skipped", "alone")

START_S = 120.0  # seconds in which the ranks of all hosts must come
IDLE_S = 3600.0  # longest time without a request after which a host gives up

_POLL_S = 0.05


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(sub, optional="the default of fault.check_tolerance, which is all that counts here")
    count = "check N nodes that are processes of this host (default: the hosts of torchrun or srun)"
    sub.add_argument("--processes", type=at_least(1, "a diagnosis needs a node"), metavar="N", help=count)
    extent = "quick: seconds; full: up to a minute a node; paths: only connections between nodes (default: quick)"
    sub.add_argument("--checks", choices=PLANS, default="quick", help=extent)
    add_json(sub)


def run(options: argparse.Namespace) -> int:
    """Diagnose the nodes and return the exit status: 1 for a bad node or link."""
    plan = PLANS[options.checks]
    if options.config is not None:
        if options.config.isdecimal():
            hint = f"--processes {options.config} for nodes that are processes of this host"
            raise ConfigError([Problem("command line", "CONFIG", f"{options.config!r} is no TOML file", hint)])
        config, *_ = configs_to_check(options.config, options.overrides).values()
        plan = replace(plan, tolerance=config.fault.check_tolerance)
    rank = rank_from_environment()
    if rank is None:
        if not options.processes:
            hint = "start it with torchrun or srun, or give --processes N for N processes of this host"
            raise ConfigError([Problem("environment", "", "no launcher has started this process", hint)])
        diagnosis = asyncio.run(diagnose_processes(options.processes, plan))
    elif (found := _diagnose_hosts(rank, plan)) is None:
        return Exit.OK
    else:
        diagnosis = found
    print(json.dumps(as_json(diagnosis)) if options.json else "\n".join(table(diagnosis)))
    return Exit.OK if diagnosis.ok else Exit.UNCLASSIFIED


async def diagnose_processes(count: int, plan: DiagnosisPlan) -> Diagnosis:
    """Diagnose `count` nodes that are processes of this host."""
    secret = os.environ.get(SECRET_VARIABLE) or new_secret()

    async def run(node: str, name: str, arguments: Mapping[str, Any], timeout_s: float) -> CheckResult:
        env = {NODE_VARIABLE: node, SECRET_VARIABLE: secret}
        return await run_check(name, {**arguments, "env": env}, timeout_s)

    places = [CheckedNode(f"node{index}", LOOPBACK) for index in range(count)]
    return await diagnose(places, run, replace(plan, at_once=False))


def _diagnose_hosts(rank: Rank, plan: DiagnosisPlan) -> Diagnosis | None:
    """Take part as a rank of a launcher; return the diagnosis on rank 0."""
    import datetime

    from megascale.comm.rendezvous import open_store
    from megascale.operate.channel.secret import job_secret

    store = open_store(rank, job_secret(None), datetime.timedelta(seconds=START_S))
    endpoint = rendezvous_endpoint()
    address = address_toward(endpoint[0]) if endpoint else LOOPBACK
    store.set(f"rank/{rank.rank}", json.dumps([rank.host, address, rank.local_rank]))
    told = [json.loads(text) for text in store.multi_get([f"rank/{other}" for other in range(rank.world_size)])]
    hosts = {index: str(host) for index, (host, _, local_rank) in enumerate(told) if local_rank == 0}
    slots = max(local_rank for _, _, local_rank in told) + 1
    try:
        if rank.rank == 0:
            several = {name for name, count in Counter(hosts.values()).items() if count > 1}  # containers, testbeds
            names = {index: f"{name}#{index}" if name in several else name for index, name in hosts.items()}
            places = [CheckedNode(names[index], str(told[index][1]), slots) for index in hosts]
            return asyncio.run(_direct(store, {names[index]: index for index in hosts}, places, plan))
        if rank.local_rank == 0:
            asyncio.run(_obey(store, rank.rank))
        return None
    finally:
        store.set(f"left/{rank.rank}", "")
        if rank.rank == 0:  # it has the store
            store.wait([f"left/{other}" for other in range(rank.world_size)])


async def _direct(
    store: JobStore, ranks: Mapping[str, int], places: Sequence[CheckedNode], plan: DiagnosisPlan
) -> Diagnosis:
    """Diagnose from rank 0: requests and results are values in the store."""
    sent = dict.fromkeys(ranks, 0)

    async def run(node: str, name: str, arguments: Mapping[str, Any], timeout_s: float) -> CheckResult:
        if ranks[node] == 0:
            return await run_check(name, arguments, timeout_s)
        number, sent[node] = sent[node], sent[node] + 1
        store.set(f"do/{ranks[node]}/{number}", json.dumps([name, dict(arguments), timeout_s]))
        answer = await _value(store, f"done/{ranks[node]}/{number}", timeout_s + START_S)
        if answer is None:
            return CheckResult(name, problem=f"the host did not answer within {timeout_s + START_S:.0f} s")
        return CheckResult.from_dict(json.loads(answer))

    try:
        return await diagnose(places, run, plan)
    finally:
        for node, number in sent.items():
            store.set(f"do/{ranks[node]}/{number}", "null")


async def _obey(store: JobStore, rank: int) -> None:
    """Run the checks that rank 0 asks for, until it has no more."""
    number = 0
    while (text := await _value(store, f"do/{rank}/{number}", IDLE_S)) is not None:
        if (request := json.loads(text)) is None:
            return
        name, arguments, timeout_s = request
        result = await run_check(name, arguments, timeout_s)
        store.set(f"done/{rank}/{number}", json.dumps(result.to_dict()))
        number += 1


async def _value(store: JobStore, key: str, timeout_s: float) -> bytes | None:
    """Return the value of a key once it is set, without keeping other requests waiting; None after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not store.check([key]):
        if asyncio.get_running_loop().time() > deadline:
            return None
        await asyncio.sleep(_POLL_S)
    return store.get(key)


def table(diagnosis: Diagnosis) -> list[str]:
    """Format the verdicts, one line each, and the findings below."""
    width = max((len(verdict.node) for verdict in diagnosis.verdicts), default=4) + 2
    nodes = {verdict.node for verdict in diagnosis.verdicts}
    lines = [f"{'node':<{width}}{'check':<13}{'value':>14}  {'other nodes':>14}  {'seconds':>7}  verdict"]
    for name in dict.fromkeys(verdict.check for verdict in diagnosis.verdicts):
        some = [verdict for verdict in diagnosis.verdicts if verdict.check == name]
        shown = some if len(nodes) <= LONG_TABLE else [verdict for verdict in some if verdict.kind not in QUIET]
        for one in shown:
            value, reference = one.with_unit(one.value), one.with_unit(one.reference)
            reason = f": {one.reason}" if one.kind not in ("ok", "alone") else ""
            seconds = f"{one.duration_s:7.1f}" if one.duration_s else ""
            row = f"{one.node:<{width}}{one.check:<13}{value:>14}  {reference:>14}  {seconds:>7}  {one.kind}{reason}"
            lines.append(row)
        if len(shown) < len(some):
            lines.append(f"{'others':<{width}}{name:<13}{len(some) - len(shown)} nodes ok")
    lines.append("")
    lines += [f"bad node {node}: {'; '.join(reasons)}" for node, reasons in diagnosis.bad_nodes.items()]
    lines += [f"bad link {a} - {b}: {reason}" for (a, b), reason in diagnosis.bad_links.items()]
    lines += [f"undecided: {text}" for text in diagnosis.undecided]
    verdict = "no finding" if diagnosis.ok else "see docs/node-checks.md for what to do"
    return [*lines, f"{len(nodes)} nodes in {diagnosis.duration_s:.0f} s: {verdict}"]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON values."""
    return {
        "ok": diagnosis.ok,
        "seconds": diagnosis.duration_s,
        "bad_nodes": {node: list(reasons) for node, reasons in diagnosis.bad_nodes.items()},
        "bad_links": [{"nodes": list(pair), "reason": reason} for pair, reason in diagnosis.bad_links.items()],
        "undecided": list(diagnosis.undecided),
        "verdicts": [asdict(verdict) for verdict in diagnosis.verdicts],
    }
