"""The endpoint of a node: who has the secret is served, one measurement at a time; strangers are not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from megascale.core.network import LOOPBACK, listen
from megascale.operate.channel.secret import SECRET_VARIABLE, job_secret, new_secret
from megascale.operate.health.checks import transfer
from megascale.operate.health.checks.endpoint import Endpoint, EndpointClient
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.checks.runner import run_check
from megascale.operate.health.pair_search import Culprits, explain_broken


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setenv(SECRET_VARIABLE, new_secret())
    return job_secret(None)


@pytest.fixture
def address(secret: bytes) -> Iterator[str]:
    """The address of an endpoint in a thread."""
    with listen(LOOPBACK) as listener:
        endpoint = Endpoint(listener, secret, 60.0)
        thread = threading.Thread(target=endpoint.serve)
        thread.start()
        address = f"{LOOPBACK}:{listener.getsockname()[1]}"
        yield address
        with EndpointClient(address, secret, 5.0) as client:
            client.request("end")
        thread.join()


def listens(address: str, secret: bytes) -> bool:
    """Return True if an endpoint takes a connection."""
    with contextlib.suppress(OSError), EndpointClient(address, secret, 0.0):
        return True
    return False


def test_two_nodes_from_their_processes_to_the_end(secret: bytes) -> None:
    """Endpoints start, are reached and measured, and end; the caller has no process left."""

    async def play() -> dict[str, CheckResult]:
        opened = [await run_check("open_endpoint", {"host": LOOPBACK}, 30.0) for _ in range(2)]
        own, peer = (str(one.details["address"]) for one in opened)
        other = {"env": {SECRET_VARIABLE: new_secret()}}
        calls: list[tuple[str, Mapping[str, Any]]] = [
            ("reach", {"peers": {"b": peer, "nobody": f"{LOOPBACK}:1"}, "reach_s": 1}),
            ("clock", {"reference": peer}),
            ("link", {"own": own, "peers": {"b": peer}, "seconds": 0.05}),
        ]
        results = {name: await run_check(name, arguments, 30.0) for name, arguments in calls}
        results["stranger"] = await run_check("reach", {"peers": {"b": peer}, **other}, 30.0)
        for address in (own, peer):
            assert (await run_check("close_endpoint", {"address": address}, 30.0)).problem == ""
        deadline = time.monotonic() + 10
        for address in (own, peer):
            while listens(address, secret):  # it answers before it ends
                assert time.monotonic() < deadline
        return results

    results = asyncio.run(play())
    assert [one.problem for one in results.values()] == [""] * 4
    assert set(results["reach"].details["unreached"]) == {"nobody"}
    assert abs(results["clock"].value or 1.0) < 1.0
    assert results["link"].details["rates"]["b"] == results["link"].value > 0
    assert "secret" in results["stranger"].details["unreached"]["b"]


def test_an_endpoint_without_a_secret_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert SECRET_VARIABLE in asyncio.run(run_check("open_endpoint", {"host": LOOPBACK}, 30.0)).problem


def test_a_node_has_one_measurement_at_a_time(address: str, secret: bytes) -> None:
    waited: list[float] = []

    def take_turn() -> None:
        with EndpointClient(address, secret) as client:
            client.request("turn")
            waited.append(time.monotonic())

    with EndpointClient(address, secret) as first:
        first.request("turn")
        second = threading.Thread(target=take_turn)
        second.start()
        second.join(0.5)
        assert not waited
        released = time.monotonic()
    second.join()
    assert waited[0] > released


def test_values_are_fetched_once_they_are_posted(address: str, secret: bytes) -> None:
    with EndpointClient(address, secret) as one, EndpointClient(address, secret) as other:
        threading.Timer(0.2, lambda: other.request("post", key="store", value="host:1")).start()
        assert one.request("fetch", key="store") == {"value": "host:1"}
        assert one.request("fetch", key="store") == {"value": "host:1"}


def test_a_stalled_transfer_is_an_error(address: str, secret: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STALL_S", 0.2)
    monkeypatch.setattr(transfer, "send_until_answer", lambda connection: time.sleep(2))
    with EndpointClient(address, secret) as client, pytest.raises(TimeoutError):
        transfer.receive_for(client._connection, 1.0)  # a peer that sends nothing


def test_the_fewest_nodes_and_links_explain_failed_connections() -> None:
    nodes = [f"n{index}" for index in range(6)]
    cut = [("n2", other) for other in nodes if other != "n2"]
    assert explain_broken(nodes, cut) == Culprits(nodes=("n2",))
    assert explain_broken(nodes, [(b, a) for a, b in cut]) == Culprits(nodes=("n2",))
    assert explain_broken(nodes, [("n4", "n1"), ("n1", "n4")]) == Culprits(links=(("n1", "n4"),))
    assert explain_broken(nodes, [*cut, ("n0", "n1")]) == Culprits(("n2",), (("n0", "n1"),))
    assert explain_broken(["a", "b"], [("a", "b")]) == Culprits(links=(("a", "b"),))
    assert explain_broken(nodes, []) == Culprits()
