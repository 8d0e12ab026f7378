"""The endpoint of a node: a server to which other nodes connect in their checks of reach, clock and links.

Who connects proves to know the job's secret (`channel.gate`). Requests and answers are sealed JSON objects:

| request | answer |
|---|---|
| time | the time of this node's clock, in Unix seconds |
| turn | {} once no other connection has the turn; a measurement of a link waits for the turns of both nodes |
| take seconds | the client sends; the answer is the rate in bytes/s at which this node received for `seconds` |
| give | none: this node sends until the client hangs up |
| post key value | {}; fetch key: the value, once posted. Where the ranks of a check find their store |
| end | {}, and the endpoint ends |

A connection for take or give serves that request only.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from megascale.core.network import listen_as
from megascale.operate.channel.gate import Gate
from megascale.operate.channel.handshake import Session, connect, receive_message
from megascale.operate.channel.secret import job_secret
from megascale.operate.health.checks.transfer import BLOCK_BYTES, receive_for, send_until_answer

PURPOSE = "endpoint of the checks"

MAX_MESSAGE_BYTES = 1 << 16

IDLE_S = 60.0  # seconds without a request after which a connection is closed, and with it a turn given back
FETCH_S = 30.0  # seconds until a fetched key must have been posted
ENDPOINT_S = 600.0  # seconds after which an endpoint that nobody ends does so itself


class Endpoint:
    """Serves connections at `listener` until asked to end, for at most `seconds`."""

    def __init__(self, listener: socket.socket, secret: bytes, seconds: float) -> None:
        self._selector = selectors.DefaultSelector()
        self._gate = Gate(listener, self._selector, secret, PURPOSE, self._admit)
        self._deadline = time.monotonic() + seconds
        self._turn = threading.Lock()
        self._posted: dict[str, Any] = {}
        self._new_post = threading.Condition()
        self._ended = threading.Event()

    def serve(self) -> None:
        """Serve until the end."""
        while not self._ended.is_set() and time.monotonic() < self._deadline:
            for key, _ in self._selector.select(0.1):
                key.data()
            self._gate.expire()

    def _admit(self, connection: socket.socket, session: Session) -> None:
        threading.Thread(target=self._serve_connection, args=(connection, session), daemon=True).start()

    def _serve_connection(self, connection: socket.socket, session: Session) -> None:
        has_turn = False
        try:
            with connection:
                connection.settimeout(IDLE_S)
                while True:
                    request = json.loads(receive_message(connection, session, MAX_MESSAGE_BYTES))
                    if request["do"] == "give":
                        send_until_answer(connection)
                        return
                    if request["do"] == "turn":
                        has_turn = has_turn or self._turn.acquire(timeout=IDLE_S)
                    answer = self._answer(request, connection, has_turn)
                    connection.settimeout(IDLE_S)
                    connection.sendall(session.sent.seal(json.dumps(answer).encode()))
                    if request["do"] == "take":
                        buffer = bytearray(BLOCK_BYTES)
                        while connection.recv_into(buffer):  # a reset after the answer may lose it
                            pass
                        return
                    if request["do"] == "end":
                        self._ended.set()
        except EOFError:
            pass  # the client has done its measurements
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"megascale: a connection of a check ended: {error!r}", file=sys.stderr, flush=True)
        finally:
            if has_turn:
                self._turn.release()

    def _answer(self, request: dict[str, Any], connection: socket.socket, has_turn: bool) -> dict[str, Any]:
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "time": lambda: {"time": time.time()},
            "turn": lambda: {} if has_turn else {"error": f"the node is measured by others for {IDLE_S:.0f} s"},
            "take": lambda: {"rate": receive_for(connection, float(request["seconds"]))},
            "post": lambda: self._post(str(request["key"]), request["value"]),
            "fetch": lambda: self._fetch(str(request["key"])),
            "end": dict,
        }
        return answers[request["do"]]()

    def _post(self, key: str, value: Any) -> dict[str, Any]:
        with self._new_post:
            self._posted[key] = value
            self._new_post.notify_all()
        return {}

    def _fetch(self, key: str) -> dict[str, Any]:
        with self._new_post:
            there = self._new_post.wait_for(lambda: key in self._posted, FETCH_S)
            return {"value": self._posted[key]} if there else {"error": f"{key} was not posted in {FETCH_S:.0f} s"}


def check_secret(arguments: Mapping[str, Any]) -> bytes:
    """Return the job's secret, from the environment, with `env` added, or from the file in `secret_folder`.

    Raises: ConfigError
    """
    folder = arguments.get("secret_folder")
    return job_secret(Path(folder) if folder else None, dict(os.environ) | arguments.get("env", {}))


def serve_endpoint(arguments: Mapping[str, Any], output: TextIO) -> None:
    """Serve the endpoint of this node at `host` (default: this host's name), for at most `seconds` (default:
    ENDPOINT_S). The address, host:port, is written to `output` as JSON, and `output` closed.
    """
    host = str(arguments.get("host") or socket.gethostname())
    with listen_as(host) as listener:
        endpoint = Endpoint(listener, check_secret(arguments), float(arguments.get("seconds", ENDPOINT_S)))
        with output:
            print(json.dumps({"address": f"{host}:{listener.getsockname()[1]}"}), file=output)
        endpoint.serve()


class EndpointClient:
    """A connection to the endpoint at `address`, host:port. A context manager.

    Raises: OSError if the endpoint cannot be reached within `timeout_s` or has another secret
    """

    def __init__(self, address: str, secret: bytes, timeout_s: float = IDLE_S) -> None:
        host, _, port = address.rpartition(":")
        self._connection, self._session = connect((host, int(port)), secret, PURPOSE, timeout_s)
        self._connection.settimeout(timeout_s)

    def __enter__(self) -> EndpointClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def request(self, do: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request. Raises: OSError"""
        self._send(do, fields)
        return self._receive()

    def send_for(self, seconds: float) -> float:
        """Send to the endpoint for `seconds`; return its rate in bytes/s. Raises: OSError"""
        timeout_s = self._connection.gettimeout()
        self._send("take", {"seconds": seconds})
        send_until_answer(self._connection)
        self._connection.settimeout(timeout_s)
        return float(self._receive()["rate"])

    def receive_for(self, seconds: float) -> float:
        """Receive from the endpoint for `seconds`; return the rate in bytes/s. Raises: OSError"""
        self._send("give", {})
        return receive_for(self._connection, seconds)

    def _send(self, do: str, fields: dict[str, Any]) -> None:
        self._connection.sendall(self._session.sent.seal(json.dumps({"do": do, **fields}).encode()))

    def _receive(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(receive_message(self._connection, self._session, MAX_MESSAGE_BYTES))
        except EOFError as error:
            raise ConnectionResetError(f"the endpoint hung up: {error}") from None
        if "error" in answer:
            raise TimeoutError(answer["error"])
        return answer


def try_request(address: str, secret: bytes, do: str, timeout_s: float) -> str:
    """Make a request to the endpoint at `address`; return why it failed, "" if it was answered."""
    try:
        with EndpointClient(address, secret, timeout_s) as endpoint:
            endpoint.request(do)
    except OSError as error:
        return f"{address}: {error.strerror or error}"
    return ""
