"""Clock: the offset of this node's clock from a reference node's, by the shortest of several round trips (Cristian)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megascale.operate.health.checks.endpoint import EndpointClient, check_secret
from megascale.operate.health.checks.result import CheckResult

ROUND_TRIPS = 8


def check_clock(arguments: Mapping[str, Any]) -> CheckResult:
    """Ask the endpoint `reference` for its time. The value is in seconds, positive if this node's clock is ahead."""
    trips = []
    with EndpointClient(arguments["reference"], check_secret(arguments)) as endpoint:
        for _ in range(ROUND_TRIPS):
            wall, start = time.time(), time.perf_counter()
            theirs = float(endpoint.request("time")["time"])
            trip = time.perf_counter() - start
            trips.append((trip, wall + trip / 2 - theirs))
    trip, offset = min(trips)
    return CheckResult("clock", value=offset, details={"round_trip_s": trip})
