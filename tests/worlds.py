"""Worlds of real processes for tests: `run_world` runs a function on every rank of a gloo world.

Ranks are forked from a server that has imported torch, so that a world of four starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megascale.core.rank import Rank
from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret

SECONDS = 300
"""A world that takes longer is stuck."""


class RankFailed(AssertionError):
    """An error of a rank; the message is the rank's traceback."""


def run_world(world: int, function: Callable[..., Any], *arguments: Any, gpu: bool = False) -> list[Any]:
    """Run `function(rank, *arguments)` on every rank of a world of processes and return the results in rank order.
    `gpu`: a GPU for each rank.

    Raises: RankFailed with the first traceback that a rank sent.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with contextlib.chdir(Path(__file__).parents[1]):  # the server's path has its working directory
        forkserver.ensure_running()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pipes, processes = [], []
    secret = new_secret()
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main,
            args=(rank, world, port, secret, theirs, function, arguments, gpu, dict(os.environ)),
            daemon=True,
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=SECONDS)
        if not ready:
            raise RankFailed(f"no rank returned within {SECONDS} s; ranks {sorted(results)} are done")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                error, value = pipe.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died without an error") from None
            if error:
                raise RankFailed(f"rank {rank}:\n{error}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int, world: int, port: int, secret: str, pipe: Connection, function: Callable[..., Any],
    arguments: tuple[Any, ...], gpu: bool, environment: dict[str, str],
) -> None:  # fmt: skip
    os.environ.clear()  # that of the server, which may have started before the test
    os.environ.update(environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    os.environ[SECRET_VARIABLE] = secret
    import torch
    import torch.distributed as dist

    from megascale.comm import init, shared_memory
    from megascale.device import detect_device

    torch.set_num_threads(1)
    shared_memory.usable_cores = lambda: 1  # a rank that waits leaves its core to other tests at once
    try:
        place = Rank(rank, world, rank, "localhost")
        init.init_distributed(place, detect_device(rank, allow_gpu=gpu))
        answer = ("", function(place, *arguments))
        dist.barrier()  # no rank exits while a peer still communicates with it
    except BaseException:
        answer = (traceback.format_exc(), None)
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # gloo's tear-down would wait for exited ranks
