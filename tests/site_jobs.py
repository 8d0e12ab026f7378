"""Sites for tests: a meeting point, and sites of one rank that are threads of this process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from megascale.config.run import RunConfig
from megascale.core.network import LOOPBACK, listen
from megascale.operate.channel.secret import SECRET_VARIABLE, job_secret
from megascale.operate.channel.store_server import StoreServer
from megascale.train.outer_steps import Sites
from tests.thread_world import run_threads

T = TypeVar("T")

SECRET = "a secret of the sites in these tests"


@contextlib.contextmanager
def meeting_point() -> Iterator[str]:
    """Serve a meeting point; yield its address."""
    listener, (stop, end) = listen(LOOPBACK), os.pipe()
    address = f"{LOOPBACK}:{listener.getsockname()[1]}"
    server = StoreServer(listener, job_secret(None, {SECRET_VARIABLE: SECRET}))
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    try:
        yield address
    finally:
        os.close(end)
        thread.join()


def run_sites(configs: Sequence[RunConfig], function: Callable[[Any], T]) -> list[T]:
    """Run `function(run)` at all sites at once, each of one rank, after they have joined. Return the results."""

    def body(run: Any) -> T:
        run.sites = Sites(run)
        return function(run)

    with ThreadPoolExecutor(len(configs)) as threads:
        started = [threads.submit(run_threads, config, body) for config in configs]
    return [each.result()[0] for each in started]
