"""A process that runs checks, one after the other: what `runner` asks for on stdin, a CheckResult a line on stdout.

Asked for the node's endpoint, it writes the address and serves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace

from megascale.core.process import die_with_parent
from megascale.operate.health.checks.endpoint import serve_endpoint
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.checks.runner import OPEN_ENDPOINT, checks_named


def main() -> None:
    """Run the checks of the request, one after the other, or serve the endpoint."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints
    names, arguments, parent = json.loads(sys.stdin.read())
    die_with_parent(parent)
    if OPEN_ENDPOINT in names:
        serve_endpoint(arguments, output)
        return
    for name in names:
        (card,), start = checks_named(name), time.monotonic()
        try:
            result: CheckResult = card.load()(arguments)
        except Exception as error:  # whatever a library, a driver or a disk raises is the finding
            text = (str(error).strip().splitlines() or [""])[0]
            result = CheckResult(card.name, problem=f"{type(error).__name__}: {text}")
        seconds = result.duration_s or time.monotonic() - start
        result = replace(result, unit=str(card.facts["unit"]), duration_s=seconds)
        print(json.dumps(result.to_dict()), file=output, flush=True)


if __name__ == "__main__":
    main()
