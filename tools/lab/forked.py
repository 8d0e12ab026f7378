"""Many processes at once on one host: forked from this one, which has imported what they need."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from megascale.core.errors import MegascaleError
from megascale.core.process import die_with_parent

SECONDS = 600.0
"""Seconds after which processes without an answer are killed."""


def run_forked(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(number)` in `count` processes and return their results, which are JSON, by number. This process must
    have no threads but its own.

    Raises: MegascaleError if a process fails or does not answer
    """
    pids, pipes = [], []
    parent = os.getpid()
    try:
        for number in range(count):
            reader, writer = os.pipe()
            if (pid := os.fork()) == 0:
                _run(work, number, writer, parent)
            os.close(writer)
            pids.append(pid)
            pipes.append(reader)
        return _results(pipes)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in pipes:
            os.close(pipe)


def _run(work: Callable[[int], Any], number: int, writer: int, parent: int) -> None:
    status = 1
    try:
        die_with_parent(parent)
        os.write(writer, json.dumps(work(number)).encode())
        os.close(writer)
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _results(pipes: list[int]) -> list[Any]:
    answers = dict.fromkeys(pipes, b"")
    waiting, deadline = set(pipes), time.monotonic() + SECONDS
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise MegascaleError(f"{len(waiting)} of {len(pipes)} processes did not answer within {SECONDS:.0f} s")
        for pipe in ready:
            if part := os.read(pipe, 1 << 16):
                answers[pipe] += part
                continue
            waiting.remove(pipe)
            if not answers[pipe]:
                what = f"process {pipes.index(pipe)} of {len(pipes)} has failed"
                raise MegascaleError(what, hint="its error is above; fewer processes, or more memory")
    return [json.loads(answers[pipe]) for pipe in pipes]
