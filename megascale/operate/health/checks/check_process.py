"""A process that runs checks: a CheckRequest on stdin, a CheckResult as JSON a line on stdout.

Asked for the node's endpoint, it writes the address and serves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megascale.core.process import die_with_parent
from megascale.core.registry import Card
from megascale.operate.health.checks.endpoint import serve_endpoint
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.checks.runner import OPEN_ENDPOINT, checks_named, read_request


def main() -> None:
    """Run the checks of the request, one after the other, or serve the endpoint."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints
    request = read_request(sys.stdin.read())
    die_with_parent(request.parent)
    if OPEN_ENDPOINT in request.names:
        serve_endpoint(request.arguments, output)
        return
    for name in request.names:
        (card,) = checks_named(name)
        print(json.dumps(_timed(card, request.arguments).to_dict()), file=output, flush=True)


def _timed(card: Card, arguments: Mapping[str, Any]) -> CheckResult:
    start = time.monotonic()
    try:
        result = card.load()(arguments)
    except Exception as error:  # whatever a library, a driver or a disk raises is the finding
        text = (str(error).strip().splitlines() or [""])[0]
        result = CheckResult(card.name, problem=f"{type(error).__name__}: {text}")
    unit = str(card.facts["unit"])
    return replace(result, unit=unit, duration_s=result.duration_s or time.monotonic() - start)


if __name__ == "__main__":
    main()
