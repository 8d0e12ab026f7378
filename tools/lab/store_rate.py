"""Requests per second of a job's store, with many clients: ours, torch's TCPStore, and Redis if it is installed."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch.distributed as dist

from lab.forked import run_forked
from lab.redis_store import has_redis, redis_store
from megascale.comm.rendezvous import start_server
from megascale.comm.store import JobStore
from megascale.core.network import LOOPBACK, listen
from megascale.operate.channel.secret import new_secret

TIMEOUT = datetime.timedelta(seconds=300)

POLL_S, START_S = 0.5, 1.5
"""Seconds between a client's looks for the moment at which all send, and from its announcement to that moment."""

Connect = Callable[[], Any]
"""Opens a client's connection."""

Served = tuple[Connect, int]
"""A store that is served: connections to it, and the server's process ID."""


@dataclass(frozen=True)
class StoreRate:
    """Requests per second of a store with `clients`, each of which sends a request after the answer to the last; and
    per second of the server's CPU time, which the clients of this host do not take from it.
    """

    store: str
    clients: int
    requests_per_s: float
    requests_per_cpu_s: float


@contextmanager
def job_store() -> Iterator[Served]:
    """Serve our store."""
    secret = bytes.fromhex(new_secret())
    with listen(LOOPBACK) as listener:
        address = listener.getsockname()
        server = start_server(listener, secret)
    try:
        yield lambda: JobStore((address[0], address[1]), secret, TIMEOUT), server.pid
    finally:
        server.kill()
        server.wait()
        if server.stdin is not None:
            server.stdin.close()


@contextmanager
def tcp_store() -> Iterator[Served]:
    """Serve torch's TCPStore in a process of its own, whose event loop is libuv's."""
    import multiprocessing

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_tcp_store, args=(theirs,), daemon=True)
    process.start()
    port = ours.recv()
    try:
        assert process.pid is not None
        yield lambda: dist.TCPStore(LOOPBACK, port, is_master=False, timeout=TIMEOUT), process.pid
    finally:
        process.kill()
        process.join()


def _serve_tcp_store(pipe: Any) -> None:
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, use_libuv=True)
    pipe.send(store.port)
    time.sleep(86400)


STORES = {"ours": job_store, "torch's TCPStore": tcp_store, "Redis": redis_store}


def installed_stores() -> list[str]:
    """Return the names of STORES that this host can serve."""
    return [name for name in STORES if name != "Redis" or has_redis()]


def measure_rate(name: str, clients: int, seconds: float) -> StoreRate:
    """Measure a store of STORES for some seconds. Keys are each client's own, but for a counter that all add to."""
    with STORES[name]() as (connect, server):
        own = connect()

        def work(number: int) -> list[float]:
            store = connect()
            store.add("ready", 1)
            while not store.check(["begin"]):
                time.sleep(POLL_S)
            begin, count = float(store.get("begin")), 0
            time.sleep(max(0.0, begin - time.monotonic()))
            begun = time.monotonic()
            while time.monotonic() < begin + seconds:
                store.set(f"key {number}", b"x" * 32)
                store.get(f"key {number}")
                store.add("counter", 1)
                count += 3
            return [count, time.monotonic() - begun]

        def run(number: int) -> list[float]:
            if number < clients:
                return work(number)
            while own.add("ready", 0) < clients:
                time.sleep(POLL_S)
            begin = time.monotonic() + START_S
            own.set("begin", str(begin).encode())
            time.sleep(START_S)
            before = _cpu_s(server)
            time.sleep(seconds)
            return [_cpu_s(server) - before]

        *sent, (cpu_s,) = run_forked(clients + 1, run)
        requests = sum(count for count, _ in sent)
        return StoreRate(name, clients, sum(count / time_s for count, time_s in sent), requests / max(cpu_s, 0.01))


def _cpu_s(process: int) -> float:
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)
