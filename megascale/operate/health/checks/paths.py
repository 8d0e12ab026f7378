"""Checks of the paths from this node to others, by their endpoints: reach, the offset of the clock, and links.

- Reach: agents that reach the driver need not reach each other. A connection counts when both ends have proved to know
  the job's secret: an address that another service answers is not reached.
- Link: bandwidth of TCP to other nodes, one after the other, in both directions. Before a measurement the client takes
  the turn of both endpoints, always in the order of their addresses: no node takes part in two measurements at a time,
  and none waits without a bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from megascale.operate.health.checks.endpoint import EndpointClient, check_secret, try_request
from megascale.operate.health.checks.result import CheckResult

REACH_S = 3.0  # seconds in which an endpoint must answer

CONNECTIONS = 64


def check_reach(arguments: Mapping[str, Any]) -> CheckResult:
    """Connect to the endpoints `peers`, addresses by node, within `reach_s` seconds (default: REACH_S).

    The value is the number of nodes not reached, and the detail `unreached` has the errors by node.
    """
    peers: Mapping[str, str] = arguments["peers"]
    secret, timeout_s = check_secret(arguments), float(arguments.get("reach_s", REACH_S))
    connect = partial(try_request, secret=secret, do="time", timeout_s=timeout_s)
    with ThreadPoolExecutor(min(CONNECTIONS, max(1, len(peers)))) as threads:
        errors = dict(zip(peers, threads.map(connect, peers.values()), strict=True))
    unreached = {node: error for node, error in errors.items() if error}
    return CheckResult("reach", value=float(len(unreached)), details={"unreached": unreached})


ROUND_TRIPS = 8


def check_clock(arguments: Mapping[str, Any]) -> CheckResult:
    """Ask the endpoint `reference` for its time; the shortest of several round trips counts (Cristian). The value is in
    seconds, positive if this node's clock is ahead.
    """
    trips = []
    with EndpointClient(arguments["reference"], check_secret(arguments)) as endpoint:
        for _ in range(ROUND_TRIPS):
            wall, start = time.time(), time.perf_counter()
            theirs = float(endpoint.request("time")["time"])
            trip = time.perf_counter() - start
            trips.append((trip, wall + trip / 2 - theirs))
    trip, offset = min(trips)
    return CheckResult("clock", value=offset, details={"round_trip_s": trip})


LINK_S = 0.2  # seconds of a measurement in one direction


def check_link(arguments: Mapping[str, Any]) -> CheckResult:
    """Measure the links from the endpoint `own` to the endpoints `peers`, addresses by node, for `seconds` (default:
    LINK_S) in each direction.

    The value is the rate of the slowest; the detail `rates` has the rates by node, `errors` the links without a rate.
    """
    secret, seconds = check_secret(arguments), float(arguments.get("seconds", LINK_S))
    rates: dict[str, float] = {}
    errors: dict[str, str] = {}
    round_trips: dict[str, float] = {}
    for node, address in arguments["peers"].items():
        try:
            rates[node], round_trips[node] = _measure(arguments["own"], address, secret, seconds)
        except OSError as error:
            errors[node] = f"{address}: {error.strerror or error}"
    value = 0.0 if errors else min(rates.values(), default=None)
    return CheckResult("link", value=value, details={"rates": rates, "errors": errors, "round_trip_s": round_trips})


def _measure(own: str, address: str, secret: bytes, seconds: float) -> tuple[float, float]:
    """Return the rate of the slower direction in bytes/s, and the time of a round trip."""
    with ExitStack() as stack:
        for end in sorted({own, address}):
            turn = stack.enter_context(EndpointClient(end, secret))
            turn.request("turn")
            if end == address:
                peer = turn
        start = time.perf_counter()
        peer.request("time")
        round_trip = time.perf_counter() - start
        sending = stack.enter_context(EndpointClient(address, secret))
        sent = sending.send_for(seconds)
        receiving = stack.enter_context(EndpointClient(address, secret))
        return min(sent, receiving.receive_for(seconds)), round_trip
