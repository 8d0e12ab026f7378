"""The process of a node's endpoint: a CheckRequest on stdin, the address as JSON on stdout, then it serves."""

from __future__ import annotations

import json
import os
import socket
import sys

from megascale.core.network import listen_as
from megascale.core.process import die_with_parent
from megascale.operate.health.checks.endpoint import Endpoint, check_secret
from megascale.operate.health.checks.runner import read_request

ENDPOINT_S = 600.0
"""Seconds after which an endpoint that nobody ends does so itself."""


def main() -> None:
    """Serve the endpoint of this node."""
    request = read_request(sys.stdin.read())
    die_with_parent(request.parent)
    host = str(request.arguments.get("host") or socket.gethostname())
    with listen_as(host) as listener:
        endpoint = Endpoint(
            listener, check_secret(request.arguments), float(request.arguments.get("seconds", ENDPOINT_S))
        )
        print(json.dumps({"address": f"{host}:{listener.getsockname()[1]}"}), flush=True)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)  # the caller may have gone on and closed the pipe
        endpoint.serve()


if __name__ == "__main__":
    main()
