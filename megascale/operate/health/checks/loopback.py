"""Loopback: bandwidth of TCP between two threads of this node, without a network card."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any

from megascale.core.network import LOOPBACK, listen
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.checks.transfer import receive_for, send_until_answer

LOOPBACK_S = 0.4


def check_loopback(arguments: Mapping[str, Any]) -> CheckResult:
    """Transfer for `seconds` (default: LOOPBACK_S) over the loopback interface."""
    with listen(LOOPBACK) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver, _ = listener.accept()
        thread = threading.Thread(target=send_until_answer, args=(sender,))
        thread.start()
        try:
            with receiver:
                rate = receive_for(receiver, float(arguments.get("seconds", LOOPBACK_S)))
        finally:
            thread.join()
    return CheckResult("loopback", value=rate)
