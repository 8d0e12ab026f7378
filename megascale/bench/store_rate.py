"""Requests per second of a job's store, with many clients at once: ours, and torch's TCPStore."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megascale.bench.forked import run_forked
from megascale.comm.store import JobStore
from megascale.comm.store_server import start_server
from megascale.core.network import LOOPBACK, listen
from megascale.core.secret import new_secret

TIMEOUT = datetime.timedelta(seconds=300)

START_S = 0.5
"""Seconds after the last client's connection until all send."""

Connect = Callable[[], Any]
"""Opens a client's connection."""


@dataclass(frozen=True)
class StoreRate:
    """Requests per second of a store with `clients`, each of which sends a request after the answer to the last."""

    store: str
    clients: int
    requests_per_s: float


@contextmanager
def job_store() -> Iterator[Connect]:
    """Serve our store."""
    secret = bytes.fromhex(new_secret())
    with listen(LOOPBACK) as listener:
        address = listener.getsockname()
        server = start_server(listener, secret)
    try:
        yield lambda: JobStore((address[0], address[1]), secret, TIMEOUT)
    finally:
        server.kill()
        server.wait()
        if server.stdin is not None:
            server.stdin.close()


@contextmanager
def tcp_store() -> Iterator[Connect]:
    """Serve torch's TCPStore in a process of its own, whose event loop is libuv's."""
    import multiprocessing

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_tcp_store, args=(theirs,), daemon=True)
    process.start()
    port = ours.recv()
    try:
        yield lambda: dist.TCPStore(LOOPBACK, port, is_master=False, timeout=TIMEOUT)
    finally:
        process.kill()
        process.join()


def _serve_tcp_store(pipe: Any) -> None:
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, use_libuv=True)
    pipe.send(store.port)
    time.sleep(86400)


STORES = {"ours": job_store, "torch's TCPStore": tcp_store}


def measure_rate(name: str, clients: int, seconds: float) -> StoreRate:
    """Measure a store of STORES for some seconds. Keys are each client's own, but for a counter that all add to."""
    with STORES[name]() as connect:
        own = connect()

        def work(number: int) -> float:
            store = connect()
            store.add("ready", 1)
            while not store.check(["go"]):
                time.sleep(0.01)
            end, count, begun = time.perf_counter() + seconds, 0, time.perf_counter()
            while time.perf_counter() < end:
                store.set(f"key {number}", b"x" * 32)
                store.get(f"key {number}")
                store.add("counter", 1)
                count += 3
            return count / (time.perf_counter() - begun)

        def run(number: int) -> float:
            if number < clients:
                return work(number)
            while own.add("ready", 0) < clients:
                time.sleep(0.01)
            time.sleep(START_S)
            own.set("go", b"")
            return 0.0

        return StoreRate(name, clients, sum(run_forked(clients + 1, run)))
