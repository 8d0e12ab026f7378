"""Link: bandwidth of TCP between this node and others, one after the other, in both directions.

Before a measurement the client takes the turn of both endpoints, always in the order of their addresses: no node takes
part in two measurements at a time, and none waits without a bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from megascale.operate.health.checks.endpoint import EndpointClient, check_secret
from megascale.operate.health.checks.result import CheckResult

LINK_S = 0.2
"""Seconds of a measurement in one direction."""


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
