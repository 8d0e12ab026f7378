"""Reach: which nodes this node can connect to, and which node or link explains the failures of all nodes.

Agents that reach the driver need not reach each other. A connection counts when both ends have proved to know the
job's secret: an address that another service answers is not reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from megascale.operate.health.checks.endpoint import EndpointClient, check_secret
from megascale.operate.health.checks.result import CheckResult

REACH_S = 3.0
"""Seconds in which an endpoint must answer."""

CONNECTIONS = 64
"""Concurrent connections of a node."""


@dataclass(frozen=True)
class BrokenPaths:
    """Nodes, and links between other nodes, that explain the connections that failed."""

    nodes: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()


def check_reach(arguments: Mapping[str, Any]) -> CheckResult:
    """Connect to the endpoints `peers`, addresses by node, within `reach_s` seconds (default: REACH_S).

    The value is the number of nodes not reached, and the detail `unreached` has the errors by node.
    """
    peers: Mapping[str, str] = arguments["peers"]
    connect = partial(_error, secret=check_secret(arguments), timeout_s=float(arguments.get("reach_s", REACH_S)))
    with ThreadPoolExecutor(min(CONNECTIONS, max(1, len(peers)))) as threads:
        errors = dict(zip(peers, threads.map(connect, peers.values()), strict=True))
    unreached = {node: error for node, error in errors.items() if error}
    return CheckResult("reach", value=float(len(unreached)), details={"unreached": unreached})


def _error(address: str, secret: bytes, timeout_s: float) -> str:
    try:
        with EndpointClient(address, secret, timeout_s) as endpoint:
            endpoint.request("time")
    except OSError as error:
        return f"{address}: {error.strerror or error}"
    return ""


def explain_broken(nodes: Iterable[str], broken: Iterable[tuple[str, str]]) -> BrokenPaths:
    """Name the fewest nodes and links that explain broken pairs; a pair is broken if one direction is.

    A node without a path to more than half of the others, and to at least two, is named itself; a pair between two
    other nodes is a link.
    """
    count = len(set(nodes))
    left = {(min(pair), max(pair)) for pair in broken}
    named: list[str] = []
    while left:
        lost: dict[str, int] = {}
        for pair in left:
            for node in pair:
                lost[node] = lost.get(node, 0) + 1
        worst = max(sorted(lost), key=lambda node: lost[node])
        others = count - 1 - len(named)
        if lost[worst] < 2 or 2 * lost[worst] <= others:
            break
        named.append(worst)
        left = {pair for pair in left if worst not in pair}
    return BrokenPaths(tuple(sorted(named)), tuple(sorted(left)))
